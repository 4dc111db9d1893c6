"""What is indexed and what leaves: the one place where contents become findable, with dedup and reports."""

from __future__ import annotations

from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.events import EventLog
from pagedjax.cache.groups import Group
from pagedjax.cache.protocol import NO_HINTS
from pagedjax.cache.sequence import SeqState
from pagedjax.cache.stats import CacheStats


class Registrar:
    """Registers written blocks, and sees evicted ones off.

    Args:
        seqs: The manager's live sequences: dedup rewrites their tables.
        copies: Where copies to the host are planned.
        stats: Counters.
        events: Log of what is resident, or None.
        dedup: Use the copy that was there first, free the later one.
    """

    def __init__(
        self,
        seqs: dict[int, SeqState],
        copies: PendingCopies,
        stats: CacheStats,
        events: EventLog | None,
        dedup: bool,
    ) -> None:
        self._seqs = seqs
        self._copies = copies
        self._stats = stats
        self._events = events
        self._dedup = dedup

    def register(self, group: Group, state: SeqState, first: int, full: int, now: float) -> None:
        """Index a sequence's blocks [first, full): their KV is written."""
        table, index = state.tables[group.id], group.index
        if not index.indexes:
            return
        while first < full and not table[first]:
            first += 1
        blocks = table[first:full]
        if not blocks:
            return
        known, twins = index.register(
            state.chain, first, blocks, table[first - 1] if first else 0, dedup=self._dedup
        )
        digests = state.chain.digests(full)[first:full]
        keys, pool = group.pool.keys, group.pool
        if known is blocks:
            for b, digest in zip(blocks, digests):
                keys[b] = digest
            if pool.changed is not None:
                pool.changed.update(blocks)
            pool.policy.insert(blocks, digests, first, state.hints, now)
            self._report(group, state, first, blocks, digests, now)
            self._stats.blocks_indexed += len(blocks)
        else:
            self._register_some(group, state, first, blocks, known, digests, now)
        self._stats.same_step_twins += twins

    def _register_some(
        self,
        group: Group,
        state: SeqState,
        first: int,
        blocks: list[int],
        known: list[int],
        digests: list[bytes],
        now: float,
    ) -> None:
        """Some contents were resident already: use the first copies, or let the new ones stand beside."""
        keys = group.pool.keys
        for i, (own, canonical, digest) in enumerate(zip(blocks, known, digests)):
            if own == canonical:
                if keys[own] is None:
                    keys[own] = digest
                    if group.pool.changed is not None:
                        group.pool.changed.add(own)
                    group.pool.policy.insert([own], [digest], first + i, state.hints, now)
                    self._report(group, state, first + i, [own], [digest], now)
                    self._stats.blocks_indexed += 1
            elif self._dedup and canonical > 0:
                self._replace_everywhere(group, first + i, own, canonical, now)

    def _replace_everywhere(self, group: Group, position: int, own: int, canonical: int, now: float) -> None:
        """Every table that holds the twin, forks included, names the first copy from now on."""
        holders = [
            table
            for state in self._seqs.values()
            if not state.recorded
            and len(table := state.tables[group.id]) > position
            and table[position] == own
        ]
        for table in holders:
            table[position] = canonical
            group.pool.touch([canonical], position, NO_HINTS, now)
        group.pool.free([own] * len(holders), now)
        self._stats.dedup_blocks += 1

    def evicted(self, group: Group, blocks: list[int], keys: list[bytes], now: float) -> None:
        """Blocks are about to lose their content to make room: remember, report, move to the host."""
        self._stats.evictions += len(blocks)
        group.evicted.add(keys)
        if self._events is not None:
            self._events.removed(now, group.id, "device", keys, blocks)
        tier = group.tier
        if tier.num_blocks:
            for b, key in zip(blocks, keys):
                slot = tier.store(key) if group.index.copies(key) == 1 else -1
                if slot >= 0:
                    self._copies.add("swap_out", group.id, b, slot)
                    self._stats.swapped_out_blocks += 1

    def host(self, kind: str, group: Group, key: bytes, slot: int, now: float) -> None:
        """A content was "stored" in a group's host tier or "removed" from it."""
        if self._events is not None:
            report = self._events.stored if kind == "stored" else self._events.removed
            report(now, group.id, "host", [key], [slot])

    def _report(
        self, group: Group, state: SeqState, first: int, blocks: list[int], digests: list[bytes], now: float
    ) -> None:
        if self._events is not None:
            parent = state.chain.digest(first - 1) if first else None
            self._events.stored(now, group.id, "device", digests, blocks, parent)
