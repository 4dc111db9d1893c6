"""What happened to the blocks since it was last asked: what a record of a run is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedjax.cache.groups import Group
from pagedjax.cache.sequence import SeqState


class Journal(list[str]):
    """What happened to a pool's blocks, in order; each event a list in JSON.

    It is text at once: a list of numbers turns into JSON in one call, which takes no longer than a copy that later
    changes of the list leave alone, and text stays out of the collector's way.

    Attributes:
        grew: Were blocks handed out since `Changes.take`? Else no table has grown into new ones.
    """

    __slots__ = ("grew",)

    def __init__(self) -> None:
        super().__init__()
        self.grew = False

    def taken(self, blocks: list[int]) -> None:
        """Handed out: each has one owner now."""
        self.grew = True
        self.append(f'["take",{blocks!r}]')

    def shared(self, blocks: list[int]) -> None:
        """Each gained an owner."""
        self.append(f'["share",{blocks!r}]')

    def freed(self, blocks: Sequence[int]) -> None:
        """Each lost an owner as often as it is listed."""
        self.append(f'["free",{[*blocks]!r}]')

    def dropped(self, blocks: list[int]) -> None:
        """Their contents are gone."""
        self.append(f'["drop",{blocks!r}]')

    def filled(self, blocks: list[int], digests: Sequence[bytes]) -> None:
        """Their contents are indexed now."""
        self.append(f'["fill",{blocks!r},"{",".join([digest.hex() for digest in digests])}"]')


class Changes:
    """While it lives, the pools tell each block whose owners or content change.

    What the blocks hold when it begins is told first, as if it happened then.

    Args:
        groups: Whose pools.
        states: The manager's sequences, live.
        books_tables: Does `commit` rewrite tables, as where twins are made one?

    Attributes:
        books_tables: Does `commit` change tables: twins made one, or blocks behind a window let go of?
        grew: Were blocks handed out before the last `take`?
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[int, SeqState], books_tables: bool) -> None:
        self._states = states
        self._pools = [group.pool for group in groups]
        self.books_tables = books_tables or any(group.window is not None for group in groups)
        self.grew = False
        self._journals = []
        for pool in self._pools:
            journal = Journal()
            if held := [b for b, owners in enumerate(pool.ref) if owners]:
                journal.taken(held)
            if more := [b for b in held for _ in range(pool.ref[b] - 1)]:
                journal.shared(more)
            known = [(b, key) for b, key in enumerate(pool.keys) if key is not None]
            if known:
                journal.filled([b for b, _ in known], [key for _, key in known])
            self._journals.append(journal)
            pool.journal = journal

    def take(self) -> str:
        """What happened since the last call: of each pool a list of events, in JSON; empty where nothing did."""
        self.grew = False
        if not any(self._journals):
            return ""
        told = []
        for journal in self._journals:
            told.append(",".join(journal))
            if journal.grew:
                self.grew, journal.grew = True, False
            journal.clear()
        return f"[[{'],['.join(told)}]]"

    def tables(self, seq: int) -> list[list[int]] | None:
        """A sequence's live table in each group, not to be changed; None: it holds no blocks."""
        state = self._states.get(seq)
        return None if state is None or state.recorded else state.tables

    def stop(self) -> None:
        """The pools tell nothing any more."""
        for pool in self._pools:
            pool.journal = None
