"""ReuseCredit, a policy of this project: LRU order, and a credit for the reuse that uses and outcomes promise."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable

from pagedjax.cache.policies.scored import Scored
from pagedjax.cache.protocol import Hints


class ReturnRates:
    """How often blocks of each class came back, beside all blocks; old outcomes fade.

    Args:
        prior: Outcomes like those of all blocks that each class begins with.
        period: Outcomes after which all counts are halved.
    """

    def __init__(self, prior: float, period: float) -> None:
        self._prior, self._period = prior, period
        self._ended: dict[int, float] = {}
        self._returned: dict[int, float] = {}
        self._all_ended = self._all_returned = 0.0
        self._since = 0

    def end(self, kinds: Iterable[int], *, returned: bool) -> None:
        """Blocks of these classes were used again, or were forgotten before that."""
        kinds = list(kinds)
        while kinds:  # up to where counts fade, so that outcomes told at once count as those told one by one
            room = max(math.ceil(self._period) - self._since, 1)
            part, kinds = kinds[:room], kinds[room:]
            for kind, count in Counter(part).items():
                self._ended[kind] = self._ended.get(kind, 0.0) + count
                if returned:
                    self._returned[kind] = self._returned.get(kind, 0.0) + count
            self._all_ended += len(part)
            self._all_returned += len(part) * returned
            self._since += len(part)
            if self._since >= self._period:
                self._fade()

    def _fade(self) -> None:
        self._since = 0
        for counts in (self._ended, self._returned):
            for kind in counts:
                counts[kind] /= 2
        self._all_ended /= 2
        self._all_returned /= 2

    def relative(self, kind: int) -> float:
        """The share of the class that came back over the share of all; positive, 1 while nothing is known."""
        share = (self._all_returned + 1) / (self._all_ended + 1)
        own = self._returned.get(kind, 0.0) + self._prior * share
        return own / (self._ended.get(kind, 0.0) + self._prior) / share


class ReuseCredit(Scored):
    """LRU order, and a credit: each doubling of the expected reuse is worth `credit` times the pool of insertions.

    A block's score is the number of blocks indexed so far when it is released, which alone is LRU, plus
    credit · pool · log2(uses · relative rate). Uses are those since it was first indexed; a content that was evicted
    is remembered with its uses. The relative rate is learned: how often blocks whose request was about as long (in
    powers of two), and that were or were not its last, came back before they were forgotten, over how often all did.
    So what was used twice outlives what was used once by a pool of insertions, and the end of a prompt, which
    its next turn writes anew, goes before the rest as soon as that shows.

    Score and class are fixed at release. Blocks of one release differ by their uses only, but for the last one, so no
    head goes before its tail.

    Args:
        num_blocks: Blocks of the pool.
        credit: Pools of insertions that a doubling is worth; 0 is LRU.
        remembered: Contents remembered after eviction, as a share of the pool.
        prior: Outcomes that each class begins with, see `ReturnRates`.
        fade: Outcomes, as a share of the pool, after which they count half.

    Source: this project; experiment `policy-gap` has the ablation, and how much each constant matters. Kin: GDSF
    (uses, aged), LHD (Beckmann et al., NSDI 2018: outcomes by class), S3-FIFO and ARC (memory of what left).
    """

    def __init__(
        self,
        num_blocks: int,
        credit: float = 1.0,
        remembered: float = 2.0,
        prior: float = 20.0,
        fade: float = 10.0,
    ) -> None:
        super().__init__(num_blocks)
        size = num_blocks - 1
        self._pool = credit * size
        self._ghost_limit = int(remembered * size)
        self._rates = ReturnRates(prior, fade * size)
        self._inserted = 0
        self._keys: dict[int, bytes] = {}
        self._uses = [0] * num_blocks
        self._position = [0] * num_blocks
        self._kind = [0] * num_blocks  # class of its last release
        self._ghost: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # uses and class

    def insert(self, blocks: list[int], keys: list[bytes], first: int, hints: Hints, now: float) -> None:
        self._inserted += len(blocks)
        back = []
        for i, (b, key) in enumerate(zip(blocks, keys), start=first):
            self._keys[b] = key
            self._position[b] = i
            uses, kind = self._ghost.pop(key, (0, 0))
            self._uses[b] = uses + 1
            if uses:
                back.append(kind)
        if back:
            self._rates.end(back, returned=True)

    def hit(self, blocks: list[int], idle: list[int], first: int, hints: Hints, now: float) -> None:
        super().hit(blocks, idle, first, hints, now)
        for b in blocks:
            self._uses[b] += 1
        if idle:
            self._rates.end([self._kind[b] for b in idle], returned=True)

    def release(self, blocks: list[int], now: float) -> None:
        if not blocks:
            return
        length = self._position[blocks[0]] + 1
        for part, last in ((blocks[:1], True), (blocks[1:], False)):
            kind = self._class(length, last)
            base = self._inserted + self._pool * math.log2(self._rates.relative(kind))
            for b in part:
                self._kind[b] = kind
                self._queue.push(b, base + self._pool * self._worth(self._uses[b]))

    def _class(self, length: int, last: bool) -> int:
        """The class whose outcomes count for blocks of a request of `length` blocks."""
        return 2 * length.bit_length() + last

    def _worth(self, uses: int) -> float:
        """Doublings that so many uses are worth."""
        return math.log2(uses)

    def remove(self, blocks: list[int]) -> None:
        ghost = self._ghost
        for b in blocks:
            self._queue.discard(b)
            key = self._keys.pop(b)
            ghost.pop(key, None)
            ghost[key] = self._uses[b], self._kind[b]
        surplus = len(ghost) - self._ghost_limit
        if surplus > 0:
            forgotten = [ghost.popitem(last=False)[1][1] for _ in range(surplus)]
            self._rates.end(forgotten, returned=False)
