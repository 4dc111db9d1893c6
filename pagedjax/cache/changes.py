"""Which blocks changed since it was last asked: what a record of a run is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedjax.cache.groups import Group
from pagedjax.cache.sequence import SeqState

# Of each group in which something changed: its number, the blocks that did, references and digest of each. Columns
# rather than a tuple for each block: what a recorder holds for a while stays out of the collector's way.
Changed = list[tuple[int, list[int], list[int], list[bytes | None]]]


class Changes:
    """While it lives, the pools list each block whose owners or content change.

    Args:
        groups: Whose pools.
        states: The manager's sequences, live.
        books_tables: Does `commit` rewrite tables, as where twins are made one?

    Attributes:
        books_tables: Does `commit` change tables: twins made one, or blocks behind a window let go of?
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[int, SeqState], books_tables: bool) -> None:
        self._states = states
        self._pools = [group.pool for group in groups]
        self.books_tables = books_tables or any(group.window is not None for group in groups)
        for pool in self._pools:
            pool.changed = set()

    def take(self) -> Changed:
        """What changed since the last call, in no order."""
        out: Changed = []
        for number, pool in enumerate(self._pools):
            if changed := pool.changed:
                ref, keys = pool.ref, pool.keys
                out.append((number, [*changed], [ref[b] for b in changed], [keys[b] for b in changed]))
                changed.clear()
        return out

    def tables(self, seq: int) -> tuple[list[int], ...] | None:
        """A sequence's live table in each group, not to be changed; None: it holds no blocks."""
        state = self._states.get(seq)
        return None if state is None or state.recorded else tuple(state.tables)

    def stop(self) -> None:
        """The pools list nothing any more."""
        for pool in self._pools:
            pool.changed = None
