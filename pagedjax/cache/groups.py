"""KV groups: layers that share block size and lifetime rule, each with its own ids, pool and index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedjax.cache.block import BlockPool
from pagedjax.cache.prefix import PrefixIndex


@dataclass(frozen=True)
class KVGroup:
    """One group of layers.

    Attributes:
        num_blocks: Blocks of its pool, the null block included; 0 takes the manager's `num_blocks`.
        window: Keys a query sees, its own included; None: all (full attention).
    """

    num_blocks: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1, or None for full attention")


def most_blocks(window: int | None, block_size: int, num_tokens: int, step_tokens: int) -> int:
    """Most blocks that a sequence of so many tokens holds at once.

    Args:
        window: Keys a query sees, its own included; None: all.
        block_size: Tokens per block.
        num_tokens: Its length.
        step_tokens: Most of its tokens computed in one step: their blocks are held beside the window's.

    Example:
        >>> most_blocks(None, 4, 100, 8), most_blocks(8, 4, 100, 8)
        (25, 5)
    """
    full = -(-num_tokens // block_size)
    if window is None:
        return full
    # window - 1 keys before the step and the step's own, wherever they begin within a block.
    return min(full, (window - 1 + step_tokens + block_size - 2) // block_size + 1)


def split_blocks(memory_bytes: int, block_bytes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Blocks per group for a memory size, the null blocks included.

    The memory is split in proportion to `weight * block_bytes`: weights say how many blocks a typical
    sequence holds in each group, so that the groups run out together.

    Args:
        memory_bytes: For all groups.
        block_bytes: Bytes of one block, per group.
        weights: Blocks a typical sequence holds, per group.

    Raises:
        ValueError: Some group would get fewer than 2 blocks.

    Example:
        >>> split_blocks(1000, [10, 20], [3, 1])
        [60, 20]
    """
    total = sum(b * w for b, w in zip(block_bytes, weights))
    counts = [int(memory_bytes * w / total) for w in weights]
    if min(counts) < 2:
        raise ValueError(
            f"memory_bytes={memory_bytes}: gives {counts} blocks, each group needs 2; raise the memory"
        )
    return counts


class EvictedKeys:
    """Remembers which contents were evicted lately, 8 bytes each, in a direct-mapped table.

    A later eviction may overwrite an entry: the answer is then "not evicted". Two contents are confused
    only if 64 bits of their digests agree.
    """

    def __init__(self, num_blocks: int) -> None:
        self._mask = (1 << max(num_blocks - 1, 1).bit_length()) - 1
        self._table = np.zeros(self._mask + 1, dtype=np.uint64)

    def add(self, keys: list[bytes]) -> None:
        size = len(keys[0])
        if size % 8 == 0:
            marks = np.frombuffer(b"".join(keys), dtype="<u8")[:: size // 8]
        else:
            marks = np.array([int.from_bytes(key[:8], "little") for key in keys], dtype=np.uint64)
        self._table[marks & np.uint64(self._mask)] = marks

    def __contains__(self, key: bytes) -> bool:
        mark = int.from_bytes(key[:8], "little")
        return mark != 0 and int(self._table[mark & self._mask]) == mark

    def clear(self) -> None:
        self._table[:] = 0


@dataclass(eq=False)
class Group:
    """A group at work.

    Attributes:
        id: Number of the group.
        window: As in `KVGroup`.
        pool: Its blocks.
        index: Its prefix index.
        evicted: Digests of blocks evicted lately.
    """

    id: int
    window: int | None
    pool: BlockPool
    index: PrefixIndex
    block_size: int
    evicted: EvictedKeys = field(init=False)

    def __post_init__(self) -> None:
        self.evicted = EvictedKeys(self.pool.num_blocks)

    def first_needed(self, num_tokens: int) -> int:
        """First block that the query at position `num_tokens` and later ones still read."""
        if self.window is None:
            return 0
        return max(num_tokens - self.window + 1, 0) // self.block_size

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that one sequence holds at once."""
        return most_blocks(self.window, self.block_size, num_tokens, step_tokens)

    def fit(self, resident: Sequence[object], num_blocks: int) -> int:
        """Most blocks, at most `num_blocks`, whose needed ones are all resident (truthy)."""
        if self.window is None:
            for i in range(num_blocks):
                if not resident[i]:
                    return i
            return num_blocks
        need = run = 0
        best = 0
        for i in range(num_blocks):
            run = run + 1 if resident[i] else 0
            need = i + 1 - self.first_needed((i + 1) * self.block_size)
            if run >= need:
                best = i + 1
        return best


def common_hit(groups: Sequence[Group], resident: Sequence[Sequence[object]], num_blocks: int) -> int:
    """Longest hit in blocks that every group can serve.

    Full-attention groups need every block; window groups those the next query still sees. Shortening the
    hit for one group may break another, so the groups are asked in turn until none objects.
    """
    while True:
        before = num_blocks
        for group, blocks in zip(groups, resident):
            num_blocks = group.fit(blocks, num_blocks)
        if num_blocks == before:
            return num_blocks
