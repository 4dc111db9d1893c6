"""Belady's rule: the bound that policies are set beside, from a future that is known."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from pagedjax.cache.policies.scored import Scored
from pagedjax.cache.protocol import Hints


class Belady(Scored):
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
