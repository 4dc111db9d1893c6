"""WorkloadAware: the least chance of reuse soon, by how soon blocks of each category of request come back."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from pagedjax.cache.policies.scored import ScoreQueue
from pagedjax.cache.protocol import Hints

_LEAST = 1e-9  # a mean interval of 0 has no rate


class ReuseIntervals:
    """Mean time to the next use, of each category and of all; old intervals fade.

    Args:
        prior: Intervals as long as the mean of all that each category begins with.
        period: Intervals after which all that came before count half.
    """

    def __init__(self, prior: float, period: float) -> None:
        self._prior, self._period = prior, period
        self._own: dict[str, tuple[float, float]] = {}  # sum, number
        self._all = (0.0, 0.0)
        self._new = 0

    def add(self, group: str, interval: float) -> None:
        """A block of this category was used again, so long after its last use."""
        total, number = self._own.get(group, (0.0, 0.0))
        self._own[group] = total + interval, number + 1
        self._all = self._all[0] + interval, self._all[1] + 1
        self._new += 1
        if self._new >= self._period:
            self._new = 0
            self._all = self._all[0] / 2, self._all[1] / 2
            # Of many users most are gone for good: what has faded below the prior's notice is dropped.
            self._own = {g: (t / 2, n / 2) for g, (t, n) in self._own.items() if n > 1e-3}

    def mean_of_all(self) -> float:
        """1 while nothing is known, in which case no category differs."""
        total, number = self._all
        return max(total / number, _LEAST) if number else 1.0

    def mean(self, group: str) -> float:
        """Positive; that of all for a category of which nothing is known."""
        total, number = self._own.get(group, (0.0, 0.0))
        return max((total + self._prior * self.mean_of_all()) / (number + self._prior), _LEAST)


class WorkloadAware:
    """Least probability of reuse within the expected life first; among equals the latest in its sequence.

    A block that was used last `t` ago by a request of category w has ReuseProb_w(t, life) = F_w(t + life) - F_w(t),
    where F_w is the distribution of the times between two uses of such blocks, an exponential one with their mean m_w.
    So it is exp(-t / m_w) · (1 - exp(-life / m_w)): within a category the least recently used goes first, and who looks
    for room compares one candidate of each category that has evictable blocks. How often a block was used does not
    count. Where no request names a category (`Hints.group`) all are one, and the policy is LRU.

    A block is of the category of the request that used it last. Of prefixes that categories share, a head can go before
    its tail, as the paper has it.

    Args:
        num_blocks: Blocks of the pool.
        life: The expected life, as a multiple of the mean time between two uses over all categories; positive.
        remembered: Contents whose last use is remembered after eviction, as a share of the pool.
        prior: Intervals that each category begins with, see `ReuseIntervals`.
        fade: Intervals, as a share of the pool, after which they count half.

    Raises:
        ValueError: `life` or `prior` is not positive.

    Source: Wang et al., USENIX ATC 2025 (KVCache Cache in the Wild, arXiv 2506.02634), §4.2: Priority = (ReuseProb_w(t,
    life), -Offset), exponential distributions, one queue a category. Known here from public accounts of it and from
    vLLM's pull request 22236. What is this project's own: the paper samples the last hour in the background and fits
    anew now and then; here means run along and fade, and a bounded memory of evicted contents shows the intervals that
    are longer than a stay in the cache. How the paper sets `life` is not said there: here it follows the intervals.
    Its categories are kind of request × turn; here they are what `group` says, so who wants turns names them in it.
    Times are the caller's: seconds in an engine, requests in a replay of blocks.
    """

    reads_groups = True

    def __init__(
        self,
        num_blocks: int,
        life: float = 1.0,
        remembered: float = 2.0,
        prior: float = 20.0,
        fade: float = 10.0,
    ) -> None:
        for name, value in (("life", life), ("prior", prior)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be a positive number; try 1.0")
        self._life = life
        self._ghost_limit = int(remembered * (num_blocks - 1))
        self._intervals = ReuseIntervals(prior, fade * (num_blocks - 1))
        self._queues: dict[str, ScoreQueue] = {}  # of the categories that have evictable blocks
        self._group = [""] * num_blocks
        self._last = [0.0] * num_blocks
        self._position = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._ghost: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # category and last use
        self._arrivals = 0

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for i, (b, key) in enumerate(zip(blocks, keys), start=first):
            self._keys[b], self._position[b], self._group[b] = key, i, hints.group
            if known := self._ghost.pop(key, None):
                self._intervals.add(known[0], now - known[1])

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            self._discard(b)
            self._intervals.add(self._group[b], now - self._last[b])
        for b in blocks:
            self._group[b] = hints.group

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            self._last[b] = now
            self._arrivals += 1
            queue = self._queues.setdefault(self._group[b], ScoreQueue())
            queue.push(b, (now, -self._position[b], self._arrivals))

    def victim(self, count: int, now: float) -> list[int]:
        if len(self._queues) < 2:
            return [b for queue in self._queues.values() for b in queue.first(count)]
        order = heapq.merge(*(self._ranked(group, now) for group in self._queues))
        return [entry[-1] for entry in islice(order, count)]

    def _ranked(self, group: str, now: float) -> Iterator[tuple[float, int, int, int]]:
        """(log of the probability, minus the position, arrival, block) of a category, the least first."""
        mean, queue = self._intervals.mean(group), self._queues[group]
        soon = math.log(-math.expm1(-self._life * self._intervals.mean_of_all() / mean))
        for b in queue.ordered():
            last, place, arrival = queue.score(b)
            yield soon - (now - last) / mean, place, arrival, b

    def _discard(self, block: int) -> None:
        group = self._group[block]
        queue = self._queues[group]
        queue.discard(block)
        if not queue:
            del self._queues[group]

    def remove(self, blocks: list[int]) -> None:
        ghost = self._ghost
        for b in blocks:
            self._discard(b)
            key = self._keys.pop(b)
            ghost.pop(key, None)
            ghost[key] = self._group[b], self._last[b]
        while len(ghost) > self._ghost_limit:
            ghost.popitem(last=False)

    def evictable(self) -> list[int]:
        return [b for queue in self._queues.values() for b in queue.blocks()]
