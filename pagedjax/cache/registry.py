"""Prefix indexes by name."""

from __future__ import annotations

from collections.abc import Callable

from pagedjax.cache.hash_index import HashIndex
from pagedjax.cache.prefix import PrefixIndex, TableIndex
from pagedjax.cache.radix_index import RadixIndex

INDEXES: dict[str, Callable[[int, int], PrefixIndex]] = {
    "hash": HashIndex,
    "radix": RadixIndex,
    "table": lambda num_blocks, block_size: TableIndex(),
}


def make_index(
    index: str | Callable[[int, int], PrefixIndex], num_blocks: int, block_size: int
) -> PrefixIndex:
    """An index by name, or from a factory (num_blocks, block_size) -> PrefixIndex.

    Raises:
        ValueError: Unknown name.
    """
    if callable(index):
        return index(num_blocks, block_size)
    if index not in INDEXES:
        raise ValueError(f"index={index}: must be one of {', '.join(INDEXES)}; try hash")
    return INDEXES[index](num_blocks, block_size)
