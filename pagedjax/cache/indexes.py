"""Prefix indexes by name, and how one is built for a KV group."""

from __future__ import annotations

from collections.abc import Callable

from pagedjax.cache.hash_index import HashIndex
from pagedjax.cache.plugins import Plugins
from pagedjax.cache.prefix import PrefixIndex, TableIndex
from pagedjax.cache.radix_index import RadixIndex

IndexFactory = Callable[[int, int], PrefixIndex]

INDEXES: dict[str, IndexFactory] = {
    "hash": HashIndex,
    "radix": RadixIndex,
    "table": lambda num_blocks, block_size: TableIndex(),
}
NATURE = ("indexes", "leaf_only", "exclusive", "verifies", "verifying")
INDEX_PLUGINS = Plugins("index", "pagedjax.indexes", INDEXES, "hash")


def make_index(
    index: str | IndexFactory, num_blocks: int, block_size: int, *, verify_tokens: bool = False
) -> PrefixIndex:
    """An index that a setting names: a name, "module:Class", or a factory (num_blocks, block_size) -> PrefixIndex.

    Args:
        index: See `pagedjax.cache.plugins`.
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.
        verify_tokens: The index has to compare tokens, not digests alone.

    Raises:
        ValueError: Unknown name, or an index that compares digests alone and knows no kind that verifies.
    """
    built: PrefixIndex = INDEX_PLUGINS.make(index, num_blocks, block_size)
    missing = [name for name in NATURE if not hasattr(built, name)]
    if missing:
        raise ValueError(
            f"index={index}: does not say whether it is {', '.join(missing)}; derive from pagedjax.cache.Index"
        )
    if not verify_tokens or built.verifies:
        return built
    verifying = built.verifying()
    if verifying is None:
        raise ValueError(
            f"verify_tokens=true: index {index if isinstance(index, str) else type(built).__name__} serves blocks "
            "on the word of their digests; try index=hash or radix"
        )
    return verifying
