"""Policies that learn which of two rules serves the traffic: ARC, LeCaR, and W-TinyLFU's admission by frequency."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain, islice

from pagedjax.cache.policies.scored import ScoreQueue
from pagedjax.cache.protocol import Hints


class ARC:
    """Two LRU queues, of what was used once and of what was used again, whose shares follow the misses.

    What either queue lets go is remembered. A content that comes back while the first queue remembers it says that
    queue was too short, and its share grows; one that the second remembers says the opposite.

    Args:
        num_blocks: Blocks of the pool.

    Source: Megiddo & Modha, FAST 2003. The share is asked when a block has to go, before it is known which
    content comes, so the paper's case of equality for the second memory is left out.
    """

    def __init__(self, num_blocks: int) -> None:
        self._size = num_blocks - 1
        self._once: OrderedDict[int, None] = OrderedDict()  # evictable, least recently released first
        self._again: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[int, bytes] = {}
        self._used_again: set[int] = set()  # contents of the second queue, in use or not
        self._left_once: OrderedDict[bytes, None] = OrderedDict()
        self._left_again: OrderedDict[bytes, None] = OrderedDict()
        self._share = 0.0  # blocks that the first queue should hold

    @property
    def _num_once(self) -> int:
        return len(self._keys) - len(self._used_again)

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b, key in zip(reversed(blocks), reversed(keys)):
            self._keys[b] = key
            once, again = self._left_once, self._left_again
            if key in once:
                self._share = min(self._size, self._share + max(len(again) / len(once), 1.0))
            elif key in again:
                self._share = max(0.0, self._share - max(len(once) / len(again), 1.0))
            else:
                continue
            once.pop(key, None)
            again.pop(key, None)
            self._used_again.add(b)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            self._once.pop(b, None)
            self._again.pop(b, None)
        self._used_again.update(blocks)

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            (self._again if b in self._used_again else self._once)[b] = None

    def victim(self, count: int, now: float) -> list[int]:
        surplus = max(math.ceil(self._num_once - self._share), 0)
        once = iter(self._once)
        return list(islice(chain(islice(once, surplus), self._again, once), count))

    def remove(self, blocks: list[int]) -> None:
        for b in blocks:
            self._once.pop(b, None)
            self._again.pop(b, None)
            memory = self._left_again if b in self._used_again else self._left_once
            self._used_again.discard(b)
            memory[self._keys.pop(b)] = None
        while self._left_once and self._num_once + len(self._left_once) > self._size:
            self._left_once.popitem(last=False)
        while len(self._left_once) + len(self._left_again) > self._size:
            self._left_again.popitem(last=False)

    def evictable(self) -> list[int]:
        return [*self._once, *self._again]


class LeCaR:
    """For each victim LRU or LFU, drawn by weights that fall with each content one of them let go too early.

    A content that comes back shortly after an expert alone chose it costs that expert weight, the more the sooner
    it comes. The draws are a fixed sequence, a number for each eviction, so a run can be repeated.

    Args:
        num_blocks: Blocks of the pool.
        rate: Learning rate.

    Source: Vietri et al., HotStorage 2018; rate and discount as there.
    """

    def __init__(self, num_blocks: int, rate: float = 0.45) -> None:
        self._limit = num_blocks - 1
        self._rate, self._discount = rate, 0.005 ** (1 / max(num_blocks - 1, 1))
        self._recent: OrderedDict[int, None] = OrderedDict()  # evictable, least recently released first
        self._frequent = ScoreQueue()  # evictable, by hits
        self._hits: dict[int, int] = {}
        self._keys: dict[int, bytes] = {}
        self._lru_weight = 0.5
        self._evictions = 0
        # What an expert alone let go: key to the number of its eviction.
        self._left: dict[str, OrderedDict[bytes, int]] = {"lru": OrderedDict(), "lfu": OrderedDict()}

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b, key in zip(blocks, keys):
            self._keys[b] = key
            self._hits[b] = 0
            for expert, left in self._left.items():
                number = left.pop(key, None)
                if number is not None:
                    self._regret(expert, self._discount ** (self._evictions - number))

    def _regret(self, expert: str, loss: float) -> None:
        lru, lfu = self._lru_weight, 1 - self._lru_weight
        factor = math.exp(-self._rate * loss)
        lru, lfu = (lru * factor, lfu) if expert == "lru" else (lru, lfu * factor)
        self._lru_weight = min(max(lru / (lru + lfu), 0.01), 0.99)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            del self._recent[b]
            self._frequent.discard(b)
        for b in blocks:
            self._hits[b] += 1

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            self._recent[b] = None
            self._frequent.push(b, self._hits[b])

    def _sweep(self) -> Iterator[tuple[int, str]]:
        """(block, the expert that alone chose it, or "") in order of eviction; changes nothing."""
        gone: set[int] = set()
        orders = {"lru": iter(self._recent), "lfu": self._frequent.ordered()}
        heads = {expert: next(order, 0) for expert, order in orders.items()}
        for number in range(len(self._recent)):
            for expert, order in orders.items():
                while heads[expert] in gone:
                    heads[expert] = next(order, 0)
            expert = "lru" if _draw(self._evictions + number) < self._lru_weight else "lfu"
            b = heads[expert]
            gone.add(b)
            yield b, "" if heads["lru"] == heads["lfu"] else expert

    def victim(self, count: int, now: float) -> list[int]:
        return [b for b, _ in islice(self._sweep(), count)]

    def remove(self, blocks: list[int]) -> None:
        wanted, chosen = set(blocks), {}
        for b, expert in self._sweep():
            if b in wanted:
                chosen[b] = expert
                if len(chosen) == len(wanted):
                    break
        for b in blocks:
            del self._recent[b], self._hits[b]
            self._frequent.discard(b)
            key = self._keys.pop(b)
            if chosen[b]:
                left = self._left[chosen[b]]
                left[key] = self._evictions
                if len(left) > self._limit:
                    left.popitem(last=False)
            self._evictions += 1

    def evictable(self) -> list[int]:
        return list(self._recent)


def _draw(number: int) -> float:
    """A number in [0, 1) for each whole one (splitmix64)."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (z ^ z >> 31) / 2**64


class RecentCounts:
    """How often keys were counted lately: exact counts, halved every ten counts for each block of the pool.

    At most some ten keys a block are remembered. TinyLFU's sketch needs a byte a block and confuses keys whose
    bits collide; two runs that name the same contents by different hashes would then evict differently.

    Args:
        size: Blocks of the pool.

    Source: Einziger, Friedman & Manes, ACM TOS 2017 (TinyLFU, the reset), without the sketch.
    """

    def __init__(self, size: int) -> None:
        self._counts: dict[bytes, int] = {}
        self._counted, self._period = 0, 10 * max(size, 1)

    def add(self, key: bytes) -> None:
        """Count a key once more."""
        self._counts[key] = self._counts.get(key, 0) + 1
        self._counted += 1
        if self._counted >= self._period:
            self._counts = {key: count >> 1 for key, count in self._counts.items() if count > 1}
            self._counted //= 2

    def __getitem__(self, key: bytes) -> int:
        return self._counts.get(key, 0)


class WTinyLFU:
    """A small LRU window for what is new, and a segmented LRU that only what is asked for more often enters.

    For each victim the window's oldest block and the next one of the main part are compared: the one counted less
    often lately goes, and the window's, if it stays, moves to the main part. Of equals the older goes: so do the tails
    of a sequence before its head.

    Args:
        num_blocks: Blocks of the pool.
        window: Share of the pool for the window.
        protected: Share of the rest for what was hit in it.

    Source: Einziger, Friedman & Manes, ACM TOS 2017; shares as there, counts exact.
    """

    def __init__(self, num_blocks: int, window: float = 0.01, protected: float = 0.8) -> None:
        self._window_limit = max(1, int(window * (num_blocks - 1)))
        self._protected_limit = int(protected * (num_blocks - 1 - self._window_limit))
        self._recent = RecentCounts(num_blocks - 1)
        self._keys: dict[int, bytes] = {}
        self._in_window: set[int] = set()  # contents of the window, in use or not
        self._hot: set[int] = set()  # hit in the main part
        # Evictable, least recently released first.
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b, key in zip(blocks, keys):
            self._keys[b] = key
            self._in_window.add(b)
            self._recent.add(key)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            for queue in (self._window, self._probation, self._protected):
                queue.pop(b, None)
        for b in blocks:
            self._recent.add(self._keys[b])
            if b not in self._in_window:
                self._hot.add(b)

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            if b in self._in_window:
                self._window[b] = None
            else:
                (self._protected if b in self._hot else self._probation)[b] = None
        while len(self._protected) > self._protected_limit:
            oldest, _ = self._protected.popitem(last=False)
            self._hot.discard(oldest)
            self._probation[oldest] = None

    def _sweep(self) -> Iterator[tuple[int, bool]]:
        """(block, whether it goes; else it moves from the window to probation); changes nothing."""
        moved: deque[int] = deque()
        window: Iterator[int] = iter(self._window)
        probation, protected = iter(self._probation), iter(self._protected)

        def next_of_main() -> int:
            return next(probation, 0) or (moved.popleft() if moved else next(protected, 0))

        # What is over the window's share came while there was room: it enters the main part unasked.
        for b in islice(window, max(len(self._in_window) - self._window_limit, 0)):
            moved.append(b)
            yield b, False
        rest = next_of_main()
        for b in window:  # each victim makes room for a block that will push the window's oldest out
            if rest and self._recent[self._keys[b]] >= self._recent[self._keys[rest]]:
                moved.append(b)
                yield b, False
                yield rest, True
                rest = next_of_main()
            else:
                yield b, True
        while rest:
            yield rest, True
            rest = next_of_main()

    def victim(self, count: int, now: float) -> list[int]:
        return list(islice((b for b, goes in self._sweep() if goes), count))

    def remove(self, blocks: list[int]) -> None:
        wanted, moves = set(blocks), []
        for b, goes in self._sweep():
            if not goes:
                moves.append(b)
                continue
            wanted.discard(b)
            if not wanted:
                break
        for b in moves:  # on the way to the last of them
            self._in_window.discard(b)
            del self._window[b]
            self._probation[b] = None
        for b in blocks:
            for queue in (self._window, self._probation, self._protected):
                queue.pop(b, None)
            self._in_window.discard(b)
            self._hot.discard(b)
            del self._keys[b]

    def evictable(self) -> list[int]:
        return [*self._window, *self._probation, *self._protected]
