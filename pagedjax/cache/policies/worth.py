"""Policies that value blocks: by what it costs to compute them again, by what a request asked for."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from itertools import pairwise

from pagedjax.cache.policies.scored import Scored
from pagedjax.cache.protocol import Hints


class CostAware(Scored):
    """Cheapest to recompute first, aged: GreedyDual over seconds of recomputation times uses.

    A block's worth is age + uses * cost(position): computing a block deeper in its sequence takes longer,
    since its queries attend to all before it. A block is worth at least what the blocks that continue it
    are, for these are of no use without it: so tails go before heads. Each eviction raises the age to the
    worth of its victim, so that what is not hit again sinks.

    Args:
        num_blocks: Blocks of the pool.
        base_s: Seconds to compute a block at position 0.
        per_block_s: Further seconds for each block before it.

    Source: Cao & Irani 1997 (GreedyDual-Size), with cost as recompute time and equal sizes.
    """

    def __init__(self, num_blocks: int, base_s: float = 1e-3, per_block_s: float = 1e-5) -> None:
        super().__init__(num_blocks)
        self._base_s, self._per_block_s = base_s, per_block_s
        self._uses = [0] * num_blocks
        self._cost = [0.0] * num_blocks
        self._worth = [0.0] * num_blocks
        self._lives = [0] * num_blocks  # contents that each block has had
        self._before = [(0, 0)] * num_blocks  # the block that it continues, and which life of that one
        self._age = 0.0

    def link(self, before: int, block: int) -> None:
        self._before[block] = (before, self._lives[before])

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for i, (b, key) in enumerate(zip(blocks, keys), start=first):
            self._uses[b] = 1 + self._uses_before(b, key)
            self._cost[b] = self._base_s + i * self._per_block_s
            self._worth[b] = self._age + self._uses[b] * self._cost[b]
        for before, b in pairwise(blocks):
            self.link(before, b)
        for b in reversed(blocks):
            self._lift(b)

    def _uses_before(self, block: int, key: bytes) -> int:
        """Uses of a content before the one by which it is indexed now."""
        return 0

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        super().hit(blocks, idle, first, hints, now)
        for b in blocks:
            self._uses[b] += 1
            self._worth[b] = max(self._worth[b], self._age + self._uses[b] * self._cost[b])
        for b in reversed(blocks):
            self._lift(b)

    def _lift(self, block: int) -> None:
        """What a block continues is worth at least as much as the block."""
        worth, (before, life) = self._worth[block], self._before[block]
        while before and life == self._lives[before] and self._worth[before] < worth:
            self._worth[before] = worth
            if before in self._queue:
                self._queue.rescore(before, worth)
            before, life = self._before[before]

    def _score(self, block: int, now: float) -> float:
        return self._worth[block]

    def remove(self, blocks: list[int]) -> None:
        for b in blocks:
            score = self._queue.discard(b)
            if score is not None:
                self._age = max(self._age, score)
            self._lives[b] += 1
            self._before[b] = (0, 0)


class GDSF(CostAware):
    """GreedyDual with the count of uses as the worth: LFU whose counts age. All blocks cost the same.

    Source: Cherkasova 1998 (GreedyDual-Size-Frequency), with equal sizes and costs.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, base_s=1.0, per_block_s=0.0)


class GDSFKept(GDSF):
    """GDSF that keeps the count of uses after eviction.

    Args:
        num_blocks: Blocks of the pool.
        remembered: Contents remembered after eviction, as a share of the pool.

    Source: as GDSF; the memory bounded as a ghost list of S3-FIFO or ARC.
    """

    def __init__(self, num_blocks: int, remembered: float = 2.0) -> None:
        super().__init__(num_blocks)
        self._ghost_limit = int(remembered * (num_blocks - 1))
        self._keys: dict[int, bytes] = {}
        self._ghost: OrderedDict[bytes, int] = OrderedDict()

    def _uses_before(self, block: int, key: bytes) -> int:
        self._keys[block] = key
        return self._ghost.pop(key, 0)

    def remove(self, blocks: list[int]) -> None:
        super().remove(blocks)
        for b in blocks:
            key = self._keys.pop(b)
            self._ghost.pop(key, None)
            self._ghost[key] = self._uses[b]
        while len(self._ghost) > self._ghost_limit:
            self._ghost.popitem(last=False)


class Retention(Scored):
    """Lowest priority first, then least recently released; priorities expire and are budgeted.

    A block takes the priority of the request that indexed it, or of a later one that hits it with a higher
    one; what is below 0 goes before what is common. After `ttl_s` it counts as priority 0. Blocks of positive
    priority are at most `pin_budget` of the pool: what comes after the budget is spent counts as priority 0.

    Args:
        num_blocks: Blocks of the pool.
        pin_budget: Share of the pool, between 0 and 1.
    """

    def __init__(self, num_blocks: int, pin_budget: float = 0.5) -> None:
        super().__init__(num_blocks)
        if not 0.0 <= pin_budget <= 1.0:
            raise ValueError(f"pin_budget={pin_budget}: must be a share between 0 and 1; try 0.5")
        self._budget = int(pin_budget * (num_blocks - 1))
        self._priority: dict[int, int] = {}
        self._expiry: dict[int, float] = {}
        self._expiring: list[tuple[float, int]] = []
        self._retained = 0

    def _retain(self, blocks: list[int], hints: Hints, now: float) -> None:
        """Give blocks a request's priority, whatever they had."""
        if hints.priority == 0:
            for b in blocks if self._priority else ():
                self._drop(b)
            return
        expiry = math.inf if hints.ttl_s is None else now + hints.ttl_s
        for b in blocks:
            old = self._priority.get(b, 0)
            if hints.priority > 0 and old <= 0 and self._retained >= self._budget:
                self._drop(b)
                continue
            self._retained += (hints.priority > 0) - (old > 0)
            self._priority[b] = hints.priority
            self._expiry[b] = expiry
            if expiry < math.inf:
                heapq.heappush(self._expiring, (expiry, b))

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._retain(blocks, hints, now)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        super().hit(blocks, idle, first, hints, now)
        self._expire(now)
        self._retain([b for b in blocks if hints.priority >= self._priority.get(b, 0)], hints, now)

    def _score(self, block: int, now: float) -> int:
        return self._priority.get(block, 0)

    def release(self, blocks: list[int], now: float) -> None:
        self._expire(now)
        super().release(blocks, now)

    def victim(self, count: int, now: float) -> list[int]:
        self._expire(now)
        return super().victim(count, now)

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            expiry, b = heapq.heappop(self._expiring)
            if self._expiry.get(b) == expiry:
                self._drop(b)
                if b in self._queue:
                    self._queue.rescore(b, 0)

    def _drop(self, block: int) -> None:
        self._retained -= self._priority.pop(block, 0) > 0
        self._expiry.pop(block, None)

    def remove(self, blocks: list[int]) -> None:
        super().remove(blocks)
        for b in blocks:
            self._drop(b)
