"""KV groups: layers that share block size and lifetime rule, each with its own ids, pool, index and host tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedjax.cache.block import BlockPool
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.indexes import make_index
from pagedjax.cache.policies import make_policy
from pagedjax.cache.prefix import PrefixIndex
from pagedjax.cache.protocol import Hints
from pagedjax.cache.tier import HostTier


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
        tier: Its blocks on the host; of 0 blocks where there is none.
        block_size: Tokens per block.
        evicted: Digests of blocks evicted lately.
        link: The policy's hook of that name, if it has one.
        host_verifies: The host tier may not trust digests, since the index does not.
    """

    id: int
    window: int | None
    pool: BlockPool
    index: PrefixIndex
    tier: HostTier
    block_size: int
    evicted: EvictedKeys = field(init=False)
    link: Callable[[int, int], None] | None = field(init=False)
    host_verifies: bool = field(init=False)
    _name_of: dict[int, bytes] = field(default_factory=dict)  # where a block's name is not its digest
    _named: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.evicted = EvictedKeys(self.pool.num_blocks)
        self.link = getattr(self.pool.policy, "link", None)
        self.host_verifies = self.tier.num_blocks > 0 and self.index.verifies

    def names(self, chain: TokenChain, num_blocks: int) -> list[bytes]:
        """What the host tier knows a chain's first full blocks by: digests, collision-proof where it verifies."""
        return chain.proof(num_blocks) if self.host_verifies else chain.digests(num_blocks)

    def remember(self, chain: TokenChain, first: int, blocks: list[int]) -> None:
        """Blocks were registered, and the host tier verifies: keep names that their digests are not."""
        end = first + len(blocks)
        names = chain.proof(end)
        if names is not chain.digests(end):
            for b, name in zip(blocks, names[first:end]):
                self._name_of[b] = name
                self._named[name] += 1

    def forget_name(self, block: int, key: bytes) -> tuple[bytes, int]:
        """(name, resident copies) of a block's content, which is about to leave."""
        name = self._name_of.pop(block, None)
        if name is None:
            return key, self.index.copies(key)
        copies = self._named[name]
        self._named[name] -= 1
        if copies == 1:
            del self._named[name]
        return name, copies

    def forget_all(self) -> None:
        """Every content has left."""
        self.evicted.clear()
        self._name_of.clear()
        self._named.clear()

    def resident(self, chain: TokenChain, num_blocks: int, *, host: bool = True) -> list[int]:
        """For each of a chain's first full blocks a device id, -1 - h for host slot h, or 0: neither has it."""
        blocks = self.index.resident(chain, num_blocks)
        if host and len(self.tier):
            names, find = self.names(chain, num_blocks), self.tier.find
            blocks = [b or -1 - find(names[i]) for i, b in enumerate(blocks)]
        return blocks

    def touch_window(self, chain: TokenChain, table: list[int], hints: Hints, now: float) -> None:
        """Take the blocks that the window needs; what is resident behind it counts as used, too."""
        skip = table.count(0)
        self.pool.touch([b for b in table if b > 0], skip, hints, now)
        behind = [b for b in self.index.resident(chain, skip) if b]
        self.pool.touch(behind, 0, hints, now)
        self.pool.free(behind, now)

    def check_kept(self, table: list[int], num_tokens: int) -> None:
        """Raise ValueError where a table has let go of blocks that the query at `num_tokens` reads."""
        end = -(-num_tokens // self.block_size)
        if 0 in table[self.first_needed(num_tokens) : end]:
            raise ValueError(
                f"num_tokens={num_tokens}: blocks it needs have left the window of {self.window}; "
                "release the sequence and begin it again"
            )

    def free_tail(self, table: list[int], keep: int, now: float) -> None:
        """Let go of a table's blocks after the first `keep`."""
        gone = [b for b in table[keep:] if b]
        del table[keep:]
        self.pool.free(gone, now)

    def free_behind(self, seq: int, table: list[int], num_tokens: int, now: float) -> None:
        """Let go of the blocks of a sequence's table that no query from position `num_tokens` on reads."""
        behind = []
        for i in range(min(self.first_needed(num_tokens), len(table)) - 1, -1, -1):
            if not table[i]:
                break
            behind.append(table[i])
            table[i] = 0
        if behind:
            self.pool.free(behind[::-1], now)
            if self.pool.journal is not None:
                end = min(self.first_needed(num_tokens), len(table))
                self.pool.journal.put(seq, end - len(behind), [0] * len(behind))

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
            # One at least: a hit of which nothing is resident would be no hit (a window of 1 needs none).
            need = max(i + 1 - self.first_needed((i + 1) * self.block_size), 1)
            if run >= need:
                best = i + 1
        return best


def make_groups(
    specs: Sequence[KVGroup],
    *,
    num_blocks: int,
    block_size: int,
    index: Any,
    policy: Any,
    verify_tokens: bool,
    host_blocks: int,
) -> list[Group]:
    """Groups with pools, indexes and tiers of their own.

    Args:
        specs: One per group; those that name no number of blocks get `num_blocks`.
        block_size: Tokens per block.
        index: As `make_index` takes it.
        policy: As `make_policy` takes it.
        verify_tokens: The indexes have to compare tokens.
        host_blocks: Blocks of each group's tier.
    """
    groups: list[Group] = []
    for number, spec in enumerate(specs):
        blocks = spec.num_blocks or num_blocks
        built: PrefixIndex = make_index(index, blocks, block_size, verify_tokens=verify_tokens)
        if spec.window is not None:
            built.leaf_only = False  # the blocks behind a window go first, whatever continues them
        pool = BlockPool(blocks, make_policy(policy, blocks), built)
        groups.append(Group(number, spec.window, pool, built, HostTier(host_blocks), block_size))
    return groups


def share_anchors(groups: Sequence[Group], anchors: dict[tuple[int, int], int]) -> None:
    """Add a reference to each first copy that a sequence's books name: a fork names it, too."""
    for (number, _), block in anchors.items():
        groups[number].pool.share([block])


def free_anchors(
    groups: Sequence[Group], anchors: dict[tuple[int, int], int], first: int, now: float
) -> None:
    """Let go of the first copies that a sequence's blocks from position `first` on were registered behind."""
    for number, position in sorted((at for at in anchors if at[1] >= first), reverse=True):
        groups[number].pool.free([anchors.pop((number, position))], now)


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
