"""What happened to blocks and tables since it was last asked: what a record of a run is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedjax.cache.groups import Group
from pagedjax.cache.sequence import SeqState

Events = list[Any]  # of each event its name, then what it is about


class Journal:
    """Takes down what happens to one pool's blocks and to the tables that name them.

    Told where it happens, nothing is ever searched or compared. The hook that hands blocks out, adds or takes owners
    comes first; where the blocks are a table's, what is said next of the table takes that event's place.

    Args:
        events: Where each event goes, in order: its name, then its values; a block alone is no list, which costs less.
        digests: Where the digests of contents go, in the order of the blocks that are told as filled.
        group: Number of the pool's group: behind the names of events, but for the first group.
    """

    __slots__ = (
        "_cut", "_digests", "_drop", "_events", "_fill", "_free", "_grow", "_hit", "_leave", "_put", "_share", "_take",
    )  # fmt: skip

    def __init__(self, events: Events, digests: list[bytes], group: int) -> None:
        self._events = events
        self._digests = digests
        names = ("take", "share", "free", "fill", "drop", "grow", "hit", "leave", "put", "cut")
        told = [f"{name} {group}" if group else name for name in names]
        self._take, self._share, self._free, self._fill, self._drop = told[:5]
        self._grow, self._hit, self._leave, self._put, self._cut = told[5:]

    def taken(self, blocks: list[int]) -> None:
        """Handed out: each has one owner now."""
        self._events.extend((self._take, blocks[0] if len(blocks) == 1 else blocks[:]))

    def shared(self, blocks: list[int]) -> None:
        """Each gained an owner."""
        self._events.extend((self._share, blocks[:]))

    def freed(self, blocks: Sequence[int]) -> None:
        """Each lost an owner as often as it is listed."""
        self._events.extend((self._free, [*blocks]))

    def dropped(self, blocks: list[int]) -> None:
        """Their contents are gone."""
        self._events.extend((self._drop, blocks[0] if len(blocks) == 1 else blocks[:]))

    def filled(self, blocks: list[int], digests: Sequence[bytes]) -> None:
        """Their contents are indexed now."""
        self._events.extend((self._fill, blocks[0] if len(blocks) == 1 else blocks[:]))
        self._digests += digests

    def grew(self, seq: int) -> None:
        """The blocks just taken are the end of a sequence's table."""
        events = self._events
        events[-2] = self._grow
        events.insert(-1, seq)

    def adopted(self, seq: int, table: list[int]) -> None:
        """A sequence has its first table: blocks that it just began to share, or whatever it found."""
        if not table:
            return
        events = self._events
        if events[-2] == self._share and events[-1] == table:
            events[-2] = self._hit
            events.insert(-1, seq)
        else:
            self.put(seq, 0, table)

    def put(self, seq: int, position: int, blocks: Sequence[int]) -> None:
        """A table names these blocks from a position on; owners are told elsewhere."""
        self._events.extend((self._put, seq, position, [*blocks]))

    def cut(self, seq: int, length: int) -> None:
        """A table became shorter; owners are told elsewhere."""
        self._events.extend((self._cut, seq, length))

    def left(self, seq: int) -> None:
        """The blocks just freed were a sequence's table, which is gone."""
        self._events[-2:] = (self._leave, seq)


class Changes:
    """While it lives, the manager tells each block whose owners or content change, and each table.

    What the pools and tables hold when it begins is told first, as if it happened then.

    Args:
        groups: Whose pools.
        states: The manager's sequences.

    Attributes:
        events: What happened, in order, values that turn into JSON as they are; who reads them removes them.
        digests: Of the blocks filled in them, in order.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[int, SeqState]) -> None:
        self.events: Events = []
        self.digests: list[bytes] = []
        self._pools = [group.pool for group in groups]
        for group in groups:
            pool = group.pool
            journal = pool.journal = Journal(self.events, self.digests, group.id)
            if held := [b for b, owners in enumerate(pool.ref) if owners]:
                journal.taken(held)
            if more := [b for b in held for _ in range(pool.ref[b] - 1)]:
                journal.shared(more)
            known = [(b, key) for b, key in enumerate(pool.keys) if key is not None]
            if known:
                journal.filled([b for b, _ in known], [key for _, key in known])
            for seq, state in states.items():
                if not state.recorded and state.tables[group.id]:
                    journal.put(seq, 0, state.tables[group.id])

    def stop(self) -> None:
        """Nothing is told any more."""
        for pool in self._pools:
            pool.journal = None
