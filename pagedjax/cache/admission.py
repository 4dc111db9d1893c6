"""Admission: from the hits that `begin` recorded to blocks that a sequence holds."""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.groups import Group
from pagedjax.cache.match import Matcher
from pagedjax.cache.sequence import Filling, SeqState
from pagedjax.cache.stats import CacheStats


@dataclass(eq=False)
class Admission:
    """Takes recorded hits.

    Attributes:
        matcher: Looked the hits up.
        copies: Where copies from the host are planned.
        stats: Counters.
        filling: What running sequences are computing.
    """

    matcher: Matcher
    copies: PendingCopies
    stats: CacheStats
    filling: Filling

    def num_changes(self) -> int:
        """Grows with every content that leaves: unchanged, no recorded hit is stale."""
        if (one := self.matcher.one) is not None:
            return one.pool.num_recycled + one.tier.version
        return sum([group.pool.num_recycled + group.tier.version for group in self.matcher.groups])

    def num_waiting(self, state: SeqState, group: Group) -> int:
        """Evictable blocks that admitting the sequence consumes beside its new ones."""
        hits = state.tables[group.id]
        if self.matcher.one is None or self.matcher.has_host:
            hits = [b for b in hits if b > 0]
        if state.partial:
            hits = [*hits, state.partial[group.id][0]]
        return group.pool.num_idle(hits)

    def adopt(self, state: SeqState, now: float) -> bool:
        """Take the recorded hits; False: some have gone since `begin`."""
        if state.seen != self.num_changes() and not self.matcher.still_there(state):
            return False
        hints, has_host = state.hints, self.matcher.has_host
        for group, table in zip(self.matcher.groups, state.tables):
            if group.window is not None:
                group.touch_window(state.chain, table, hints, now)
            elif has_host:
                group.pool.touch([b for b in table if b > 0], 0, hints, now)
            elif table:
                group.pool.touch(table, 0, hints, now)
        state.recorded = False
        if has_host:
            self._bring_in(state, now)
        self._count(state)
        self.filling.start(state)
        return True

    def _bring_in(self, state: SeqState, now: float) -> None:
        """Blocks that were found on the host get device blocks; their copies run before the step."""
        found: list[tuple[Group, int, int]] = []
        for group, table in zip(self.matcher.groups, state.tables):
            for i, entry in enumerate(table):
                if entry < 0:  # keep all slots before any block is taken: taking may evict to the host
                    found.append((group, i, group.tier.read(group.names(state.chain, i + 1)[i])))
        for group, i, slot in found:
            (b,) = group.pool.take(1, now)
            state.tables[group.id][i] = b
            self.copies.add("swap_in", group.id, slot, b)
        self.stats.blocks_taken += len(found)
        self.stats.swapped_in_blocks += len(found)
        self.stats.host_hit_tokens += len({i for _, i, _ in found}) * self.matcher.block_size

    def _count(self, state: SeqState) -> None:
        stats, hit = self.stats, state.hit
        assert hit is not None
        if not state.hints.counted:
            return
        if state.hints.resumed:
            stats.resumed_requests += 1
            stats.resumed_tokens += len(state.chain)
            stats.resumed_hit_tokens += hit.num_tokens
            return
        stats.miss_reasons[hit.reason] = stats.miss_reasons.get(hit.reason, 0) + 1
        if not state.hints.cache_read:
            stats.opted_out_requests += 1
            stats.opted_out_tokens += len(state.chain)
            return
        stats.requests += 1
        stats.prompt_tokens += len(state.chain)
        stats.hit_tokens += hit.num_tokens
        stats.partial_hits += bool(state.partial)
