"""Sequences preempted by swapping: which of their blocks went where, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.groups import Group, common_hit
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.match import leading
from pagedjax.cache.protocol import Hints
from pagedjax.cache.stats import CacheStats
from pagedjax.cache.tier import HostTier


@dataclass(frozen=True, slots=True)
class _Entry:
    """What became of one block of a swapped sequence.

    Attributes:
        key: Digest of its content where it was indexed: the device may still have it.
        slot: Private host slot with a copy; -1 if it was shared and only its reference was dropped.
        null: It lay behind the window and held nothing.
    """

    key: bytes | None
    slot: int
    null: bool


class SwapSpace:
    """Private slots in the host tiers, and what each swapped sequence has in them."""

    def __init__(
        self, groups: list[Group], tiers: list[HostTier], copies: PendingCopies, stats: CacheStats
    ) -> None:
        self._groups = groups
        self._tiers = tiers
        self._copies = copies
        self._stats = stats
        self._entries: dict[int, list[list[_Entry]]] = {}

    def put(self, seq: int, tables: list[list[int]]) -> bool:
        """Plan the copies of a sequence's lone blocks to the host; False: no room, nothing changed.

        The caller releases the device blocks: swap-outs run before anything else is written.
        """
        lone = [
            [b for b in table if b and group.pool.ref[b] == 1] for group, table in zip(self._groups, tables)
        ]
        if any(len(own) > tier.num_available for own, tier in zip(lone, self._tiers)):
            return False
        if any(self._copies.fills(group.id, set(t)) for group, t in zip(self._groups, tables)):
            return False
        entries = []
        for group, tier, table, own in zip(self._groups, self._tiers, tables, lone):
            slots = dict(zip(own, tier.take_private(len(own))))
            for b, slot in slots.items():
                self._copies.add("swap_out", group.id, b, slot)
            keys = group.pool.keys
            entries.append([_Entry(keys[b], slots.get(b, -1), not b) for b in table])
            self._stats.swapped_out_blocks += len(own)
        self._entries[seq] = entries
        return True

    def get(
        self, seq: int, chain: TokenChain, hints: Hints, now: float
    ) -> tuple[list[list[int]], int] | None:
        """Bring back what can be: (a table per group, leading blocks that are indexed), or None: no room."""
        all_entries = self._entries[seq]
        found = [self._find(group, chain, entries) for group, entries in zip(self._groups, all_entries)]
        count = min(len(blocks) for blocks in found)
        if count < len(all_entries[0]):  # what is left must still serve every window
            count = common_hit(self._groups, found, count)
            for group, blocks in zip(self._groups, found):
                behind = min(group.first_needed(count * group.block_size), count)
                blocks[:behind] = [0] * behind
        tables = [blocks[:count] for blocks in found]
        hits = [[b for b in table if b > 0] for table in tables]
        for group, table, known in zip(self._groups, tables, hits):
            if sum([b < 0 for b in table]) > group.pool.num_free - group.pool.num_idle(known):
                return None
        num_known = min(leading(table) for table in tables)
        for group, known in zip(self._groups, hits):
            group.pool.touch(known, 0, hints, now)
        for group, table in zip(self._groups, tables):
            self._copy_in(group, table, now)
        for tier, entries in zip(self._tiers, self._entries.pop(seq)):
            tier.give_back([e.slot for e in entries if e.slot >= 0], read=True)
        return tables, num_known

    def _find(self, group: Group, chain: TokenChain, entries: list[_Entry]) -> list[int]:
        """Where a swapped sequence's blocks are now, up to the first that is nowhere.

        A device block is its id, a host slot h is -1 - h, a null entry is 0.
        """
        full = min(len(entries), chain.num_full_blocks)
        resident = group.index.resident(chain, full) if group.index.indexes else []
        out: list[int] = []
        for i, entry in enumerate(entries):
            here = resident[i] if i < len(resident) and entry.key is not None else 0
            if entry.null or here:
                out.append(0 if entry.null else here)
            elif entry.slot >= 0:
                out.append(-1 - entry.slot)
            else:
                break
        return out

    def _copy_in(self, group: Group, table: list[int], now: float) -> None:
        for i, entry in enumerate(table):
            if entry < 0:
                (table[i],) = group.pool.take(1, now)
                self._copies.add("swap_in", group.id, -1 - entry, table[i])
                self._stats.swapped_in_blocks += 1
                self._stats.blocks_taken += 1

    def drop(self, seq: int) -> None:
        """A swapped sequence will not come back."""
        for tier, entries in zip(self._tiers, self._entries.pop(seq)):
            tier.give_back([e.slot for e in entries if e.slot >= 0], read=False)
