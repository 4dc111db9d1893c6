"""Policies of several queues: what was used once is kept apart from what was used again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain, islice

from pagedjax.cache.policies.scored import ScoreQueue
from pagedjax.cache.protocol import Hints


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
        self._small, self._main = ScoreQueue(), ScoreQueue()  # evictable blocks, by time of entry
        self._in_main: set[int] = set()
        self._entered: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._keys: dict[int, bytes] = {}
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._clock = 0
        # What `victim` found and `remove` is about to ask again: the victims, and the moves on the way to them.
        self._found: tuple[list[int], list[tuple[int, int]]] | None = None

    def _enter(self, block: int, *, main: bool) -> None:
        self._clock += 1
        self._entered[block] = self._clock
        self._uses[block] = 0
        (self._in_main.add if main else self._in_main.discard)(block)

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._found = None
        for b, key in zip(reversed(blocks), reversed(keys)):
            self._keys[b] = key
            self._enter(b, main=key in self._ghost)
            self._ghost.pop(key, None)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        self._found = None
        for b in idle:
            self._small.discard(b)
            self._main.discard(b)
        for b in blocks:
            self._uses[b] = min(self._uses[b] + 1, 3)

    def release(self, blocks: list[int], now: float) -> None:
        self._found = None
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
        if count == 1:  # what a growing sequence asks for; mostly the head of a queue goes at once
            small = len(self._keys) - len(self._in_main)
            from_small = bool(self._small) and (small >= self._small_limit or not self._main)
            head = (self._small if from_small else self._main).first(1)
            if head and self._uses[head[0]] <= from_small:
                self._found = head, []
                return list(head)
        victims: list[int] = []
        moves: list[tuple[int, int]] = []
        for b, left in self._sweep() if count > 0 else ():
            if left is not None:
                moves.append((b, left))
                continue
            victims.append(b)
            if len(victims) == count:
                break
        self._found = victims, moves
        return list(victims)

    def _moves_to(self, blocks: list[int]) -> list[tuple[int, int]]:
        """The moves on the way to the last of these blocks."""
        if self._found is not None and self._found[0] == blocks:
            return self._found[1]
        wanted = set(blocks)
        moves = []
        for b, left in self._sweep():
            if left is not None:
                moves.append((b, left))
                continue
            wanted.discard(b)
            if not wanted:
                break
        return moves

    def remove(self, blocks: list[int]) -> None:
        moves = self._moves_to(blocks)
        self._found = None
        for b, left in moves:
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


class TwoQ:
    """A FIFO queue of what is new, an LRU queue of what came back after leaving it, and a memory of that.

    Contents enter the queue of new ones, where hits move nothing: a burst of uses shortly after the first says
    little. What leaves it is remembered; a content that returns while it is remembered enters the LRU queue. New
    ones go first while they are more than their share.

    Args:
        num_blocks: Blocks of the pool.
        new: Share of the pool for new contents (Kin).
        remembered: Contents remembered, as a share of the pool (Kout).

    Source: Johnson & Shasha, VLDB 1994 (2Q, full version).
    """

    def __init__(self, num_blocks: int, new: float = 0.25, remembered: float = 0.5) -> None:
        self._new_limit = max(1, int(new * (num_blocks - 1)))
        self._ghost_limit = max(1, int(remembered * (num_blocks - 1)))
        self._new = ScoreQueue()  # evictable, by time of entry
        self._main: OrderedDict[int, None] = OrderedDict()  # evictable, least recently released first
        self._entered: dict[int, int] = {}  # of new contents, in use or not
        self._keys: dict[int, bytes] = {}
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._clock = 0

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b, key in zip(reversed(blocks), reversed(keys)):
            self._keys[b] = key
            if key in self._ghost:
                del self._ghost[key]
            else:
                self._clock += 1
                self._entered[b] = self._clock

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        for b in idle:
            self._new.discard(b)
            self._main.pop(b, None)

    def release(self, blocks: list[int], now: float) -> None:
        for b in blocks:
            if b in self._entered:
                self._new.push(b, self._entered[b])
            else:
                self._main[b] = None

    def victim(self, count: int, now: float) -> list[int]:
        surplus = max(len(self._entered) - self._new_limit, 0)
        new = self._new.ordered()
        return list(islice(chain(islice(new, surplus), self._main, new), count))

    def remove(self, blocks: list[int]) -> None:
        for b in blocks:
            self._new.discard(b)
            self._main.pop(b, None)
            key = self._keys.pop(b)
            if self._entered.pop(b, None) is not None:
                self._ghost[key] = None
                if len(self._ghost) > self._ghost_limit:
                    self._ghost.popitem(last=False)

    def evictable(self) -> list[int]:
        return self._new.blocks() + list(self._main)


class SIEVE:
    """One queue in order of entry and a hand that goes round it: what was hit since the hand came by is spared once.

    Contents enter at the young end and never move. The hand goes from the old end to the young one; a block
    hit since it passed loses its mark, another goes. Blocks in use are passed over with their marks.

    Source: Zhang et al., NSDI 2024.
    """

    def __init__(self, num_blocks: int) -> None:
        self._after = [0] * num_blocks  # a ring over the contents, the null block its seam: old to young
        self._before = [0] * num_blocks
        self._hand = 0  # it looks at the block after this one next; 0: at the old end
        self._marked: set[int] = set()
        self._idle: set[int] = set()

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b in reversed(blocks):
            last = self._before[0]
            self._after[last], self._before[b] = b, last
            self._after[b], self._before[0] = 0, b

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        self._idle.difference_update(idle)
        self._marked.update(blocks)

    def release(self, blocks: list[int], now: float) -> None:
        self._idle.update(blocks)

    def _sweep(self) -> Iterator[tuple[int, bool]]:
        """(block, it goes) in the order in which the hand would meet evictable blocks; changes nothing."""
        spared: set[int] = set()
        gone: set[int] = set()
        at = self._hand
        while len(gone) < len(self._idle):
            at = self._after[at]
            if at == 0 or at in gone or at not in self._idle:
                continue
            if at in self._marked and at not in spared:
                spared.add(at)
                yield at, False
            else:
                gone.add(at)
                yield at, True

    def victim(self, count: int, now: float) -> list[int]:
        return list(islice((b for b, goes in self._sweep() if goes), count))

    def remove(self, blocks: list[int]) -> None:
        wanted, spared, last = set(blocks), [], 0
        for b, goes in self._sweep():
            if not goes:
                spared.append(b)
            elif b in wanted:
                wanted.discard(b)
                if not wanted:
                    last = b
                    break
        self._marked.difference_update(spared)
        for b in [*(b for b in blocks if b != last), last]:
            before, after = self._before[b], self._after[b]
            if b == last:  # behind the young end the hand begins anew, whatever enters meanwhile
                self._hand = before if after else 0
            self._after[before], self._before[after] = after, before
            self._marked.discard(b)
            self._idle.discard(b)

    def evictable(self) -> list[int]:
        return list(self._idle)


class LIRS:
    """What is used again soon is kept, however old its last use; the rest passes through a hundredth of the pool.

    A block is *low* while the distance between its last two uses is among the shortest, and low blocks hold all of
    the pool but the share of the others. One of the others that is used again before the low block used longest ago
    becomes low, and that one falls back. What left is remembered with its last use, and counts the same when it
    comes back.

    The paper's stack is the order of last uses: a content is in it while its last use is younger than that of the low
    block used longest ago, so a stamp for each content replaces stack and pruning. Contents in use cannot go: when
    all of the others are in use, the low block used longest ago goes, which the paper never needs.

    Args:
        num_blocks: Blocks of the pool.
        passing: Share of the pool for blocks that are not low.
        remembered: Contents remembered, as a share of the pool; the paper has no limit.

    Source: Jiang & Zhang, SIGMETRICS 2002; 1 % as there.
    """

    def __init__(self, num_blocks: int, passing: float = 0.01, remembered: float = 2.0) -> None:
        size = num_blocks - 1
        self._low_limit = max(1, size - max(1, int(passing * size)))
        self._ghost_limit = int(remembered * size)
        self._low: OrderedDict[int, None] = OrderedDict()  # in use or not, used longest ago first
        self._passing: OrderedDict[int, None] = OrderedDict()  # evictable and not low, in order of eviction
        self._idle: set[int] = set()
        self._used: dict[int, int] = {}  # stamps of last uses
        self._keys: dict[int, bytes] = {}
        self._ghost: OrderedDict[bytes, int] = OrderedDict()
        self._clock = 0

    def _use(self, block: int, last: int) -> None:
        """A use of a block in use whose last one was at `last` (0: not known)."""
        low = self._low
        if block in low:
            low.move_to_end(block)
        elif len(low) < self._low_limit or last > self._used[next(iter(low))]:
            low[block] = None
            if len(low) > self._low_limit:
                fallen, _ = low.popitem(last=False)
                if fallen in self._idle:
                    self._passing[fallen] = None
        self._clock += 1
        self._used[block] = self._clock

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        for b, key in zip(reversed(blocks), reversed(keys)):
            self._keys[b] = key
            self._use(b, self._ghost.pop(key, 0))

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        self._idle.difference_update(idle)
        for b in idle:
            self._passing.pop(b, None)
        for b in reversed(blocks):
            self._use(b, self._used[b])

    def release(self, blocks: list[int], now: float) -> None:
        self._idle.update(blocks)
        for b in blocks:
            self._clock += 1
            self._used[b] = self._clock
            if b in self._low:
                self._low.move_to_end(b)
            else:
                self._passing[b] = None

    def victim(self, count: int, now: float) -> list[int]:
        low = (b for b in self._low if b in self._idle)
        return list(islice(chain(self._passing, low), count))

    def remove(self, blocks: list[int]) -> None:
        self._idle.difference_update(blocks)
        for b in blocks:
            self._passing.pop(b, None)
            self._low.pop(b, None)
            key = self._keys.pop(b)
            self._ghost.pop(key, None)
            self._ghost[key] = self._used.pop(b)
        while len(self._ghost) > self._ghost_limit:
            self._ghost.popitem(last=False)

    def evictable(self) -> list[int]:
        return list(self._idle)
