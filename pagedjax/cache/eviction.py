"""EvictionPolicy: in which order evictable blocks lose their content. LRU, the default.

The other policies are in `policies/`; `make_policy` knows all by name.
"""

from __future__ import annotations

from typing import Protocol

from pagedjax.cache.protocol import NO_HINTS, Hints


class EvictionPolicy(Protocol):
    """Five hooks, called in batches. Blocks are named by id while they hold a content, contents by digest.

    Time is the caller's logical `now`. A policy orders evictable blocks only; the pool hands out blank ones
    first. Within a batch the order is meaningful: `release` names the tail of a sequence first, so a policy
    that breaks ties by arrival evicts tails before heads.

    A policy may have a sixth, `link(before: int, block: int) -> None`, called just before `insert`: the first of
    the blocks continues block `before` (0: it begins a sequence). One whose scores could put a head before its
    tail needs it (`CostAware`): what continues an evicted block is of no use any more.
    """

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        """Blocks in use got a content. `first` is the position of the first in its sequence."""
        ...

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        """Consecutive blocks were taken from the cache; those in `idle` were evictable and no longer are."""
        ...

    def release(self, blocks: list[int], now: float) -> None:
        """Blocks with content lost their last reference, the tail first: they are evictable now."""
        ...

    def victim(self, count: int, now: float) -> list[int]:
        """The next `count` evictable blocks in order of eviction. They stay until `remove`; asking changes nothing."""
        ...

    def remove(self, blocks: list[int]) -> None:
        """Evictable blocks lose their content."""
        ...

    def evictable(self) -> list[int]:
        """All evictable blocks in any order, for checks; changes nothing."""
        ...


class LRU:
    """Least recently released first; the tail of a sequence before its head.

    The queue is a doubly linked list over block ids in two plain lists: leaving it from the middle is
    constant-time whatever its length. The null block 0, never in the queue, is its sentinel.

    Args:
        num_blocks: Blocks of the pool, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next = [0] * num_blocks
        self._prev = [0] * num_blocks

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        pass

    def hit(
        self, blocks: list[int], idle: list[int], first: int = 0, hints: Hints = NO_HINTS, now: float = 0.0
    ) -> None:
        if not idle:
            return
        after, before = self._next, self._prev
        # What was released together lies together, the tail first: a whole run is cut out at once.
        first, last = idle[-1], idle[0]
        if [after[b] for b in idle[1:]] == idle[:-1]:
            self._join(before[first], after[last])
            return
        for b in idle:
            p = before[b]
            n = after[b]
            after[p] = n
            before[n] = p

    def _join(self, block: int, then: int) -> None:
        self._next[block] = then
        self._prev[then] = block

    def release(self, blocks: list[int], now: float) -> None:
        after, before = self._next, self._prev
        last = before[0]
        for b in blocks:
            after[last] = b
            before[b] = last
            last = b
        after[last] = 0
        before[0] = last

    def victim(self, count: int, now: float) -> list[int]:
        after = self._next
        out = []
        b = 0
        for _ in range(count):
            b = after[b]
            if not b:
                break
            out.append(b)
        return out

    def remove(self, blocks: list[int]) -> None:
        self.hit(blocks, blocks[::-1])  # victims come in the order of the queue

    def evictable(self) -> list[int]:
        return self.victim(len(self._next), 0.0)
