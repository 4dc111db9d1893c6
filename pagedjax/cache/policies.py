"""Eviction policies beside LRU, and all of them by name.

To add one: a class with the five hooks of `EvictionPolicy` (and `evictable`, for checks), a line in
`POLICIES`; the tests run their suite over every name in it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any

from pagedjax.cache.eviction import LRU, EvictionPolicy
from pagedjax.cache.plugins import Plugins
from pagedjax.cache.protocol import Hints


class _Queue:
    """Blocks in order of (score, arrival): constant-time membership, removal from anywhere, no stale order.

    A heap with lazy deletion; entries that no longer hold are dropped when they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int]] = []
        self._live: dict[int, tuple[Any, int, int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, block: int) -> bool:
        return block in self._live

    def push(self, block: int, score: Any) -> None:
        self._arrivals += 1
        self._place((score, self._arrivals, block))

    def _place(self, entry: tuple[Any, int, int]) -> None:
        self._live[entry[2]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = sorted(self._live.values())

    def score(self, block: int) -> Any:
        """The score of a block that is there."""
        return self._live[block][0]

    def rescore(self, block: int, score: Any) -> None:
        """Another score for a block that is there; among equals it keeps the place of its arrival."""
        self._place((score, self._live[block][1], block))

    def discard(self, block: int) -> Any:
        """Remove a block if it is there; returns its score, or None."""
        entry = self._live.pop(block, None)
        return None if entry is None else entry[0]

    def ordered(self) -> Iterator[int]:
        """The blocks in order; they stay. Nothing may be pushed or discarded meanwhile."""
        heap, live = self._heap, self._live
        while heap and live.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        front = [(entry, 0) for entry in heap[:1]]
        while front:
            entry, at = heapq.heappop(front)
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(front, (heap[child], child))
            if live.get(entry[2]) is entry:
                yield entry[2]

    def first(self, count: int) -> list[int]:
        """The first `count` blocks in order; they stay."""
        return list(islice(self.ordered(), count))

    def blocks(self) -> list[int]:
        return list(self._live)


class _Scored:
    """A policy whose order among evictable blocks is a score fixed when the block is released."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = _Queue()

    def _score(self, block: int, now: float) -> Any:
        raise NotImplementedError

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        pass

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            self._queue.discard(b)

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            self._queue.push(b, self._score(b, now))

    def victim(self, count: int, now: float) -> list[int]:
        return self._queue.first(count)

    def remove(self, blocks: list[int]) -> None:
        for b in blocks:
            self._queue.discard(b)

    def evictable(self) -> list[int]:
        return self._queue.blocks()


class FIFO(_Scored):
    """First indexed, first evicted, whatever was hit since; of blocks indexed together the tail first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._born = [0] * num_blocks
        self._clock = 0

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._clock += len(blocks)
        for i, b in enumerate(blocks):
            self._born[b] = self._clock - i

    def _score(self, block: int, now: float) -> int:
        return self._born[block]


class LFU(_Scored):
    """Fewest hits since it was indexed first; among equals the least recently released."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._hits = [0] * num_blocks

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b in blocks:
            self._hits[b] = 0

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        super().hit(blocks, idle, first, hints, now)
        for b in blocks:
            self._hits[b] += 1

    def _score(self, block: int, now: float) -> int:
        return self._hits[block]


class CostAware(_Scored):
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
        for i, b in enumerate(blocks, start=first):
            self._uses[b] = 1
            self._cost[b] = self._base_s + i * self._per_block_s
            self._worth[b] = self._age + self._cost[b]
        for before, b in pairwise(blocks):
            self.link(before, b)
        for b in reversed(blocks):
            self._lift(b)

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


class Retention(_Scored):
    """Lowest priority first, then least recently released; priorities expire and are budgeted.

    A block takes the priority of the request that indexed it, or of a later one that hits it with a higher
    one. After `ttl_s` it counts as priority 0. Blocks of positive priority are at most `pin_budget` of the
    pool: what comes after the budget is spent counts as priority 0.

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
        if hints.priority == 0:
            return
        expiry = math.inf if hints.ttl_s is None else now + hints.ttl_s
        for b in blocks:
            old = self._priority.get(b, 0)
            if hints.priority < old or (hints.priority > 0 and old <= 0 and self._retained >= self._budget):
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
        self._retain(blocks, hints, now)

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


class Belady(_Scored):
    """Farthest next use first, from a future that is known: a bound, not a policy to deploy.

    It is optimal for requests of single blocks. With prefix chains a resident block behind a missing one
    is no hit, so this is a strong reference and no proven optimum.

    Args:
        num_blocks: Blocks of the pool.
        future: Digest to the ascending times, in the caller's `now`, at which the block is asked for.
    """

    def __init__(self, num_blocks: int, future: Mapping[bytes, Sequence[float]]) -> None:
        super().__init__(num_blocks)
        self._future = future
        self._keys: dict[int, bytes] = {}
        self._due: list[tuple[float, int]] = []  # heap of (next use, block) of what was released

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._keys.update(zip(blocks, keys))

    def _score(self, block: int, now: float) -> float:
        times = self._future.get(self._keys[block], ())
        at = bisect_right(times, now)
        if at == len(times):
            return -math.inf
        heapq.heappush(self._due, (times[at], block))
        return -times[at]

    def victim(self, count: int, now: float) -> list[int]:
        while self._due and self._due[0][0] <= now:  # a use that passed without a hit is no next use
            when, b = heapq.heappop(self._due)
            if b in self._queue and self._queue.score(b) == -when:
                self._queue.rescore(b, self._score(b, now))
        return super().victim(count, now)

    def remove(self, blocks: list[int]) -> None:
        super().remove(blocks)
        for b in blocks:
            self._keys.pop(b, None)


class SLRU:
    """Segmented LRU: blocks hit at least once are protected, up to a share of the pool.

    Args:
        num_blocks: Blocks of the pool.
        protected: Share of the pool the protected segment may hold.

    Source: Karedla, Love & Wherry 1994.
    """

    def __init__(self, num_blocks: int, protected: float = 0.8) -> None:
        if not 0.0 <= protected <= 1.0:
            raise ValueError(f"protected={protected}: must be a share between 0 and 1; try 0.8")
        self._limit = int(protected * (num_blocks - 1))
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._hot: set[int] = set()

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._hot.difference_update(blocks)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            self._probation.pop(b, None)
            self._protected.pop(b, None)
        self._hot.update(blocks)

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            (self._protected if b in self._hot else self._probation)[b] = None
        while len(self._protected) > self._limit:
            oldest, _ = self._protected.popitem(last=False)
            self._hot.discard(oldest)
            self._probation[oldest] = None

    def victim(self, count: int, now: float) -> list[int]:
        return list(islice(chain(self._probation, self._protected), count))

    def remove(self, blocks: list[int]) -> None:
        for b in blocks:
            self._probation.pop(b, None)
            self._protected.pop(b, None)
            self._hot.discard(b)

    def evictable(self) -> list[int]:
        return [*self._probation, *self._protected]


class S3FIFO:
    """Three static FIFO queues: small, main, and a ghost of what left the small one lately.

    New contents enter the small queue, or the main one if the ghost remembers them. At the small queue's
    end a block hit more than once moves to the main queue, others go; at the main queue's end a block hit
    since goes round again. `remove` makes the moves that lead to the block it is told of; `victim` makes none.

    Args:
        num_blocks: Blocks of the pool.
        small: Share of the pool for the small queue.

    Source: Yang et al., SOSP 2023.
    """

    def __init__(self, num_blocks: int, small: float = 0.1) -> None:
        self._small_limit = max(1, int(small * (num_blocks - 1)))
        self._ghost_limit = num_blocks - 1
        self._small, self._main = _Queue(), _Queue()  # evictable blocks, by time of entry
        self._in_main: set[int] = set()
        self._entered: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._keys: dict[int, bytes] = {}
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._clock = 0

    def _enter(self, block: int, *, main: bool) -> None:
        self._clock += 1
        self._entered[block] = self._clock
        self._uses[block] = 0
        (self._in_main.add if main else self._in_main.discard)(block)

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b, key in zip(reversed(blocks), reversed(keys)):
            self._keys[b] = key
            self._enter(b, main=key in self._ghost)
            self._ghost.pop(key, None)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            self._small.discard(b)
            self._main.discard(b)
        for b in blocks:
            self._uses[b] = min(self._uses[b] + 1, 3)

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            (self._main if b in self._in_main else self._small).push(b, self._entered[b])

    def _sweep(self) -> Iterator[tuple[int, int | None]]:
        """What evicting one block after another would do; changes nothing.

        Yields:
            (block, None): it goes. (block, uses): it moves to the main queue's end, with that count.
        """
        small, main = self._small.ordered(), self._main.ordered()
        next_small, next_main = next(small, None), next(main, None)
        moved: deque[tuple[int, int]] = deque()
        num_small = len(self._keys) - len(self._in_main)
        while True:
            in_main = next_main is not None or bool(moved)
            if next_small is not None and (num_small >= self._small_limit or not in_main):
                b, uses = next_small, self._uses[next_small]
                next_small = next(small, None)
                num_small -= 1
                left = 0 if uses > 1 else None
            elif in_main:
                if next_main is not None:
                    b, uses = next_main, self._uses[next_main]
                    next_main = next(main, None)
                else:
                    b, uses = moved.popleft()
                left = uses - 1 if uses > 0 else None
            else:
                return
            if left is not None:
                moved.append((b, left))
            yield b, left

    def victim(self, count: int, now: float) -> list[int]:
        return list(islice((b for b, left in self._sweep() if left is None), count))

    def remove(self, blocks: list[int]) -> None:
        wanted = set(blocks)
        moves = []
        for b, left in self._sweep():
            if left is not None:
                moves.append((b, left))
                continue
            wanted.discard(b)
            if not wanted:
                break
        for b, left in moves:  # on the way to the last of them
            self._small.discard(b)
            self._main.discard(b)
            self._enter(b, main=True)
            self._uses[b] = left
            self._main.push(b, self._entered[b])
        for b in blocks:
            self._small.discard(b)
            self._main.discard(b)
            key = self._keys.pop(b)
            if b not in self._in_main:
                self._ghost[key] = None
                if len(self._ghost) > self._ghost_limit:
                    self._ghost.popitem(last=False)
            self._in_main.discard(b)
            del self._entered[b], self._uses[b]

    def evictable(self) -> list[int]:
        return self._small.blocks() + self._main.blocks()


def _needs_a_future(num_blocks: int) -> EvictionPolicy:
    raise ValueError(
        "policy=belady: has to know the future; pass policy=lambda n: Belady(n, future), as the simulator does"
    )


PolicyFactory = Callable[[int], EvictionPolicy]

POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "cost": CostAware,
    "retention": Retention,
    "belady": _needs_a_future,
}


POLICY_PLUGINS = Plugins("policy", "pagedjax.policies", POLICIES, "lru")


def make_policy(policy: str | PolicyFactory, num_blocks: int) -> EvictionPolicy:
    """A policy that a setting names: a name, "module:Class", or a factory num_blocks -> EvictionPolicy.

    Raises:
        ValueError: Unknown name; see `pagedjax.cache.plugins`.
    """
    return POLICY_PLUGINS.find(policy)(num_blocks)
