"""What is indexed and what leaves: the one place where contents become findable, with dedup and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.events import EventLog
from pagedjax.cache.groups import Group
from pagedjax.cache.protocol import NO_HINTS
from pagedjax.cache.sequence import SeqState
from pagedjax.cache.stats import CacheStats


class Registrar:
    """Registers written blocks, and sees evicted ones off: pools and host tiers call it.

    Args:
        groups: KV groups.
        seqs: The manager's live sequences: dedup rewrites their tables.
        copies: Where copies to the host are planned.
        stats: Counters.
        events: Log of what is resident, or None.
        dedup: Use the copy that was there first, free the later one.
        clock: The manager's logical time.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        seqs: dict[int, SeqState],
        copies: PendingCopies,
        stats: CacheStats,
        events: EventLog | None,
        dedup: bool,
        clock: Callable[[], float],
    ) -> None:
        self._seqs = seqs
        self._copies = copies
        self._stats = stats
        self._events = events
        self._dedup = dedup
        self._clock = clock
        for group in groups:
            group.pool.on_evict = partial(self._evicted, group)
            if events is not None:
                group.tier.on_stored = partial(self._on_host, group, events.stored)
                group.tier.on_removed = partial(self._on_host, group, events.removed)

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
        before = table[first - 1] if first else 0
        if state.anchors:
            before = state.anchors.get((group.id, first - 1), before)
        if index.leaf_only and first and group.pool.keys[before] is None:
            return  # what continues a block that we do not hold would keep it from eviction
        known, twins = index.register(state.chain, first, blocks, before, dedup=self._dedup)
        digests = state.chain.digests(full)[first:full]
        keys = group.pool.keys
        if known is blocks or (known == blocks and not any(map(keys.__getitem__, blocks))):
            self._enter(group, state, first, before, blocks, digests, now)
        else:
            self._register_some(group, state, first, known, digests, now)
        self._stats.same_step_twins += twins

    def _enter(
        self,
        group: Group,
        state: SeqState,
        first: int,
        before: int,
        blocks: list[int],
        digests: list[bytes],
        now: float,
    ) -> None:
        """A run of blocks became findable."""
        pool = group.pool
        keys = pool.keys
        for b, digest in zip(blocks, digests):
            keys[b] = digest
        if pool.journal is not None:
            pool.journal.filled(blocks, digests)
        if group.link is not None:
            group.link(before, blocks[0])
        pool.policy.insert(blocks, digests, first, state.hints, now)
        if group.host_verifies:
            group.remember(state.chain, first, blocks)
        if self._events is not None:
            self._report(self._events, group, state, first, blocks, digests, now)
        self._stats.blocks_indexed += len(blocks)

    def _register_some(
        self,
        group: Group,
        state: SeqState,
        first: int,
        known: list[int],
        digests: list[bytes],
        now: float,
    ) -> None:
        """Some contents were resident already: use the first copies, or let the new ones stand beside."""
        keys, table = group.pool.keys, state.tables[group.id]
        run = 0  # blocks in front of `i` that are new and not entered yet
        for i, canonical in enumerate([*known, 0]):
            position = first + i
            if canonical and canonical == table[position] and keys[canonical] is None:
                run += 1
                continue
            if run:  # together, so that a policy sees their tail first
                at = position - run
                before = state.anchors.get((group.id, at - 1), table[at - 1]) if at else 0
                self._enter(group, state, at, before, table[at:position], digests[i - run : i], now)
                run = 0
            if canonical > 0 and canonical != table[position]:
                if self._dedup:
                    self._replace_everywhere(group, position, table[position], canonical, now)
                elif group.index.leaf_only and (group.id, position) not in state.anchors:
                    # What follows is registered behind the first copy, which must not go before it.
                    state.anchors[group.id, position] = canonical
                    group.pool.touch([canonical], position, NO_HINTS, now)

    def _replace_everywhere(self, group: Group, position: int, own: int, canonical: int, now: float) -> None:
        """Every table that holds the twin, forks included, names the first copy from now on."""
        holders = [
            (seq, table)
            for seq, state in self._seqs.items()
            if not state.recorded
            and len(table := state.tables[group.id]) > position
            and table[position] == own
        ]
        for seq, table in holders:
            table[position] = canonical
            group.pool.touch([canonical], position, NO_HINTS, now)
            if group.pool.journal is not None:
                group.pool.journal.put(seq, position, [canonical])
        group.pool.free([own] * len(holders), now)
        self._stats.dedup_blocks += 1

    def _evicted(self, group: Group, blocks: list[int], keys: list[bytes]) -> None:
        """Blocks are about to lose their content to make room: remember, report, move to the host."""
        self._stats.evictions += len(blocks)
        group.evicted.add(keys)
        if self._events is not None:
            self._events.removed(self._clock(), group.id, "device", keys, blocks)
        if not group.tier.num_blocks:
            return
        left: dict[bytes, int] = {}  # copies that stay on the device: the last one to leave goes to the host
        for b, key in zip(blocks, keys):
            name, copies = group.forget_name(b, key)
            left[name] = left.get(name, copies) - 1
            slot = -1 if left[name] else group.tier.store(name, key)
            if slot >= 0:
                self._copies.add("swap_out", group.id, b, slot)
                self._stats.swapped_out_blocks += 1

    def _on_host(self, group: Group, report: Callable[..., None], digest: bytes, slot: int) -> None:
        report(self._clock(), group.id, "host", [digest], [slot])

    @staticmethod
    def _report(
        events: EventLog,
        group: Group,
        state: SeqState,
        first: int,
        blocks: list[int],
        digests: list[bytes],
        now: float,
    ) -> None:
        parent = state.chain.digest(first - 1) if first else None
        events.stored(now, group.id, "device", digests, blocks, parent)
