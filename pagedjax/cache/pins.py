"""Pins: prefixes that are kept from eviction, whoever else uses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.match import Matcher
from pagedjax.cache.prefix import TableIndex
from pagedjax.cache.protocol import NO_HINTS
from pagedjax.cache.sequence import SeqState


@dataclass(eq=False)
class Pins:
    """References of its own on resident prefixes.

    Attributes:
        matcher: Finds them.
        seqs: The manager's live sequences: a table index takes its prefixes from them.
    """

    matcher: Matcher
    seqs: dict[int, SeqState]
    _pinned: dict[tuple, tuple[TokenChain, list[list[int]]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pinned)

    def tables(self, group: int) -> list[list[int]]:
        """The blocks of every pin in one KV group."""
        return [tables[group] for _, tables in self._pinned.values()]

    def pin(self, chain: TokenChain, now: float) -> int:
        """Tokens pinned; 0: nothing resident, or the chain is pinned already."""
        key = (chain.extra, tuple(chain.tokens))
        if key in self._pinned:
            return 0
        groups = self.matcher.groups
        if groups[0].index.indexes:
            tables, tokens = self.matcher.match(chain, len(chain), host=False)
        else:
            tables, tokens = self._computed_by_someone(chain)
        if not tokens:
            return 0
        for group, table in zip(groups, tables):
            group.pool.touch([b for b in table if b], 0, NO_HINTS, now)
            if isinstance(group.index, TableIndex):
                group.index.pin(chain, table)
        self._pinned[key] = chain.fork(), [[b for b in table if b] for table in tables]
        return tokens

    def _computed_by_someone(self, chain: TokenChain) -> tuple[list[list[int]], int]:
        count = len(chain)
        for state in self.seqs.values():
            if (
                not state.recorded
                and state.computed >= count
                and state.chain.extra == chain.extra
                and state.chain.tokens[:count] == chain.tokens
            ):
                return [table[: -(-count // chain.block_size)] for table in state.tables], count
        return [[] for _ in self.matcher.groups], 0

    def unpin(self, chain: TokenChain, now: float) -> bool:
        """Undo `pin`; False: the chain was not pinned."""
        pinned = self._pinned.pop((chain.extra, tuple(chain.tokens)), None)
        if pinned is None:
            return False
        for group, table in zip(self.matcher.groups, pinned[1]):
            if isinstance(group.index, TableIndex):
                group.index.unpin(chain)
                group.pool.num_recycled += 1  # hits recorded from it are no longer backed by anything
            group.pool.free(table, now)
        return True

    def clear(self, now: float) -> None:
        """Undo every pin."""
        for chain, _ in list(self._pinned.values()):
            self.unpin(chain, now)
