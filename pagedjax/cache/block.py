"""BlockPool: which blocks are blank, in use or evictable, and the one path by which content is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagedjax.cache.protocol import NO_HINTS, Hints, InvariantError

if TYPE_CHECKING:
    from pagedjax.cache.changes import Journal
    from pagedjax.cache.eviction import EvictionPolicy
    from pagedjax.cache.prefix import PrefixIndex


class BlockPool:
    """Block ids of one KV group. A block is in exactly one state:

    * *blank*: no reference, no content. A stack; a fresh pool hands out 1, 2, 3, …
    * *in use*: `ref[b]` > 0. It may be indexed (`keys[b]` is its content's digest) or not.
    * *evictable*: no reference, indexed. The policy keeps their order.
    * *leaving*: no reference, but a pending copy still reads it; becomes blank or evictable with `settle`.

    Block 0 is the null block: the padding of tables, never handed out. Blank blocks go first; then the
    policy's victims, whose content is dropped when they are taken, not before.

    One release's blocks without content return to the front of the queue as a batch, the tail of the
    table first; those with content go to the policy, tail first.

    Args:
        num_blocks: Blocks, the null block included.
        policy: Order of eviction.
        index: Where content is registered; told of every block that loses its content.
        on_evict: Called with blocks and their digests just before they lose their content to make room.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        index: PrefixIndex,
        on_evict: Callable[[list[int], list[bytes]], None] | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks}: must be at least 2, block 0 is never handed out; try 1024"
            )
        self.num_blocks = num_blocks
        self.policy = policy
        self.index = index
        self.on_evict = on_evict
        self.ref: list[int] = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self.blank: list[int] = list(range(num_blocks - 1, 0, -1))
        self.num_evictable = 0
        self.num_evictions = 0
        self.num_recycled = 0
        self.readers: dict[int, int] = {}  # block -> pending copies that read it
        self._leaving: list[list[int]] = []  # released batches, tail first, that wait for their readers
        self.leaving: set[int] = set()  # the blocks in them
        self.journal: Journal | None = None  # told of owners and contents that change; None: nobody asks

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blank and evictable blocks."""
        return len(self.blank) + self.num_evictable

    @property
    def num_in_use(self) -> int:
        return self.num_usable - self.num_free - len(self.leaving)

    def num_idle(self, blocks: list[int]) -> int:
        """How many of the blocks wait among the evictable ones."""
        ref = self.ref
        if self.leaving:
            return sum([not ref[b] and b not in self.leaving for b in blocks])
        return sum([not ref[b] for b in blocks])

    # ------------------------------------------------------------ hand out

    def take(self, n: int, now: float = 0.0) -> list[int]:
        """Hand out n blocks with ref 1, blank ones first. The caller has checked `num_free`."""
        blank = self.blank
        rest = len(blank) - n
        if rest >= 0:
            out = blank[rest:]
            del blank[rest:]
            out.reverse()
        else:
            out = blank[::-1]
            blank.clear()
            out += self.evict(-rest, now)
        ref = self.ref
        for b in out:
            ref[b] = 1
        if self.journal is not None:
            self.journal.taken(out)
        return out

    def evict(self, n: int, now: float = 0.0) -> list[int]:
        """Drop the content of n evictable blocks and return them, in order; the caller owns them."""
        victims = self.policy.victim(n, now)
        if not self.index.leaf_only:
            if len(victims) != n:
                raise InvariantError(f"policy named {len(victims)} victims of {n} asked for")
            self._recycle(victims, evicted=True)
            return victims
        # Inner blocks stay until everything below them is gone.
        ready = self.index.leading_leaves(victims)
        out = victims[:ready]
        if out:
            self._recycle(out, evicted=True)
        while len(out) < n:
            leaf = self._first_leaf(now)
            self._recycle([leaf], evicted=True)
            out.append(leaf)
        return out

    def _first_leaf(self, now: float) -> int:
        """The first in the policy's order that nothing registered continues; costs a step for each that it passes."""
        passed, width = 0, 8
        while passed < self.num_evictable:
            order = self.policy.victim(min(width, self.num_evictable), now)
            for block in order[passed:]:
                if self.index.is_leaf(block):
                    return block
            passed, width = len(order), 4 * width
        raise InvariantError(f"no leaf among {self.num_evictable} evictable blocks")

    def drop(self, n: int, now: float = 0.0) -> int:
        """Drop the content of up to n evictable blocks, which become blank; returns how many did."""
        count = max(min(n, self.num_evictable), 0)
        if count:
            self.blank += self.evict(count, now)[::-1]
        return count

    def _recycle(self, blocks: list[int], *, evicted: bool) -> None:
        """Content leaves: index, policy and block are cleared together, here and nowhere else."""
        keys = self.keys
        gone = [keys[b] for b in blocks]
        if evicted:
            self.num_evictions += len(blocks)
            if self.on_evict is not None:
                self.on_evict(blocks, gone)  # type: ignore[arg-type]
        self.policy.remove(blocks)
        self.index.forget(blocks, gone)  # type: ignore[arg-type]
        for b in blocks:
            keys[b] = None
        if self.journal is not None:
            self.journal.dropped(blocks)
        self.num_evictable -= len(blocks)
        self.num_recycled += len(blocks)

    # --------------------------------------------------------- references

    def touch(self, blocks: list[int], first: int = 0, hints: Hints = NO_HINTS, now: float = 0.0) -> None:
        """Add a reference to cached blocks; evictable ones leave the queue.

        Args:
            blocks: Consecutive cached blocks of one sequence.
            first: Position of the first of them in its table.
        """
        ref = self.ref
        if self.journal is not None:
            self.journal.shared(blocks)
        idle = [b for b in blocks if not ref[b]]
        if len(idle) == len(blocks):
            for b in idle:
                ref[b] = 1
        else:
            for b in blocks:
                ref[b] += 1
        if not self.index.indexes:
            return
        if self.leaving:
            idle = self._take_leaving(idle)
        self.num_evictable -= len(idle)
        self.policy.hit(blocks, idle, first, hints, now)

    def _take_leaving(self, idle: list[int]) -> list[int]:
        """Leaving blocks are in use again without having been in the queue; returns the others."""
        back = self.leaving.intersection(idle)
        self.leaving -= back
        self._leaving = [[b for b in batch if b not in back] for batch in self._leaving]
        return [b for b in idle if b not in back]

    def share(self, blocks: list[int]) -> None:
        """Add a reference to blocks in use: a fork, not a hit."""
        ref = self.ref
        for b in blocks:
            ref[b] += 1
        if self.journal is not None:
            self.journal.shared(blocks)

    def free(self, blocks: Sequence[int], now: float = 0.0) -> None:
        """Drop one reference of each; blocks without any return to the queue, the tail first.

        Args:
            blocks: In table order. A block listed twice loses two references.

        Raises:
            InvariantError: A block has fewer references than times it is listed; nothing was changed.
        """
        ref = self.ref
        idle = []
        culprit = 0
        for b in reversed(blocks):
            left = ref[b] - 1
            ref[b] = left
            if left <= 0:
                if left < 0:
                    culprit = b
                idle.append(b)
        if culprit:
            for b in blocks:
                ref[b] += 1
            raise InvariantError(f"block {culprit}: freed more often than referenced; ref_cnt {ref[culprit]}")
        if self.journal is not None:
            self.journal.freed(blocks)
        if self.readers and any(b in self.readers for b in idle):
            self._leaving.append(idle)
            self.leaving.update(idle)
        elif idle:
            self._queue(idle, now)

    def _queue(self, idle: list[int], now: float) -> None:
        """Blocks that lost their last reference, tail first, return to the queue."""
        keys = self.keys
        cached = [b for b in idle if keys[b] is not None]
        if len(cached) < len(idle):
            self.blank += [b for b in reversed(idle) if keys[b] is None]
        if cached:
            self.num_evictable += len(cached)
            self.policy.release(cached, now)

    # ------------------------------------------------------ pending copies

    def add_reader(self, block: int) -> None:
        """A pending copy reads the block: it is not handed out until `settle`."""
        self.readers[block] = self.readers.get(block, 0) + 1

    def drop_reader(self, block: int, now: float) -> None:
        """A pending copy was cancelled: what only it kept from its queue returns there."""
        left = self.readers[block] - 1
        if left:
            self.readers[block] = left
            return
        del self.readers[block]
        if block in self.leaving:
            batches, self._leaving = self._leaving, []
            for idle in batches:
                if any(b in self.readers for b in idle):
                    self._leaving.append(idle)
                else:
                    self.leaving.difference_update(idle)
                    self._queue(idle, now)

    def settle(self, now: float = 0.0) -> None:
        """All pending copies have been handed out: leaving batches return to the queue, in order."""
        self.readers.clear()
        batches, self._leaving = self._leaving, []
        self.leaving.clear()
        for idle in batches:
            self._queue(idle, now)

    # -------------------------------------------------------------- clear

    def clear(self, *, ordered: bool = True) -> int:
        """Drop all evictable content; returns how many blocks became blank."""
        count = self.num_evictable
        if count:
            blocks = self.policy.evictable()
            leaves = sorted(blocks, key=self.index.depth, reverse=True) if self.index.leaf_only else blocks
            self._recycle(leaves, evicted=False)
            self.blank += blocks[::-1]
        return count

    def check(self, references: dict[int, int]) -> None:
        """Raise InvariantError unless the books agree with the references counted from outside."""
        states: dict[int, str] = {}
        leaving = [b for batch in self._leaving for b in batch]
        queue = self.policy.evictable()
        used = [b for b in range(1, self.num_blocks) if self.ref[b]]
        for name, blocks in (
            ("blank", self.blank),
            ("evictable", queue),
            ("leaving", leaving),
            ("in use", used),
        ):
            for b in blocks:
                if b in states:
                    raise InvariantError(f"block {b}: is {states[b]} and {name}; {self._dump()}")
                states[b] = name
        missing = [b for b in range(1, self.num_blocks) if b not in states]
        if missing or 0 in states:
            raise InvariantError(f"blocks {missing}: are in no state, or null is in one; {self._dump()}")
        if len(queue) != self.num_evictable:
            raise InvariantError(f"policy holds {len(queue)} blocks, the pool counts {self.num_evictable}")
        for b, state in states.items():
            if self.ref[b] != references.get(b, 0):
                raise InvariantError(f"block {b}: ref {self.ref[b]}, referenced {references.get(b, 0)} times")
            if (state == "blank" and self.keys[b] is not None) or (
                state == "evictable" and self.keys[b] is None
            ):
                raise InvariantError(f"block {b}: is {state} with key {self.keys[b]!r}; {self._dump()}")
        if self.ref[0] or self.keys[0] is not None:
            raise InvariantError(f"null block: ref {self.ref[0]}, key {self.keys[0]!r}")

    def _dump(self) -> str:
        return f"ref={self.ref[:64]}, blank={self.blank[:64]}, evictable={self.num_evictable}"
