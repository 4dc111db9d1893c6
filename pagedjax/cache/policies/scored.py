"""Policies whose order is a score, fixed when a block is released: by age, by use, and the queue they share."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from pagedjax.cache.protocol import Hints


class ScoreQueue:
    """Blocks in order of (score, arrival): constant-time membership, removal from anywhere, no stale order.

    A heap with lazy deletion; entries that no longer hold are dropped when they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int]] = []
        self._live: dict[int, tuple[Any, int, int]] = {}
        self._named: list[
            tuple[Any, int, int]
        ] = []  # taken from the heap by `first`: mostly they leave at once
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, block: int) -> bool:
        return block in self._live

    def push(self, block: int, score: Any) -> None:
        if self._named:
            self._put_back()
        self._arrivals += 1
        entry = (score, self._arrivals, block)
        self._live[block] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = sorted(self._live.values())

    def _put_back(self) -> None:
        for entry in self._named:
            if self._live.get(entry[2]) is entry:
                heapq.heappush(self._heap, entry)
        self._named.clear()

    def score(self, block: int) -> Any:
        """The score of a block that is there."""
        return self._live[block][0]

    def rescore(self, block: int, score: Any) -> None:
        """Another score for a block that is there; among equals it keeps the place of its arrival."""
        entry = self._live[block] = (score, self._live[block][1], block)
        heapq.heappush(self._heap, entry)

    def discard(self, block: int) -> Any:
        """Remove a block if it is there; returns its score, or None."""
        entry = self._live.pop(block, None)
        return None if entry is None else entry[0]

    def ordered(self) -> Iterator[int]:
        """The blocks in order; they stay. Nothing may be pushed or discarded meanwhile."""
        self._put_back()
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
        if self._named:
            self._put_back()
        heap, live = self._heap, self._live
        if count == 1:  # what a growing sequence asks for
            while heap and live.get(heap[0][2]) is not heap[0]:
                heapq.heappop(heap)
            return [heap[0][2]] if heap else []
        out = self._named
        while heap and len(out) < count:
            entry = heapq.heappop(heap)
            if live.get(entry[2]) is entry:
                out.append(entry)
        return [block for _, _, block in out]

    def blocks(self) -> list[int]:
        return list(self._live)


class Scored:
    """A policy whose order among evictable blocks is a score fixed when the block is released."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = ScoreQueue()

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


class FIFO(Scored):
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


class LFU(Scored):
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


class LRU2(Scored):
    """Oldest last use but one first; blocks used once only before all others, by their only use.

    A use is being indexed, and each hit; blocks that are used together are used at one time.

    Source: O'Neil, O'Neil & Weikum, SIGMOD 1993 (LRU-K with K = 2, without a correlated reference period and
    without the history of blocks that have left).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses = [(0, 0)] * num_blocks  # the last use but one (0: none), the last
        self._clock = 0

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._clock += 1
        for b in blocks:
            self._uses[b] = (0, self._clock)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        super().hit(blocks, idle, first, hints, now)
        self._clock += 1
        for b in blocks:
            self._uses[b] = (self._uses[b][1], self._clock)

    def _score(self, block: int, now: float) -> tuple[int, int]:
        return self._uses[block]


class LengthAware(Scored):
    """Latest position in its sequence first; among equals fewest hits, then the least recently released.

    Long prompts are given up from their ends, whoever uses them, so that many heads stay.

    Source: Mooncake report (arXiv 2407.00079), Table 1: "similar to LFU, but prioritizes evicting cache blocks
    that appear later in requests".
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._place = [(0, 0)] * num_blocks  # minus the position, hits

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for i, b in enumerate(blocks, start=first):
            self._place[b] = (-i, 0)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        super().hit(blocks, idle, first, hints, now)
        for b in blocks:
            place, hits = self._place[b]
            self._place[b] = (place, hits + 1)

    def _score(self, block: int, now: float) -> tuple[int, int]:
        return self._place[block]
