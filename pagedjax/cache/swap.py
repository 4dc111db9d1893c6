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
        slot: Private host slot with a copy, shared by sequences that were swapped together; -1 if others
            held the block, too, and only its reference was dropped.
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
        self._users: dict[tuple[int, int], int] = {}  # (group, slot) -> swapped sequences that hold it

    def lone(self, tables: list[list[list[int]]]) -> list[list[int]]:
        """Per group the blocks that nobody but these sequences holds, once each.

        Args:
            tables: Per sequence, per group, its block table.
        """
        out = []
        for number, group in enumerate(self._groups):
            counts: dict[int, int] = {}
            for table in tables:
                for b in table[number]:
                    counts[b] = counts.get(b, 0) + 1
            out.append([b for b, n in counts.items() if b and group.pool.ref[b] == n])
        return out

    def put(self, seqs: list[int], tables: list[list[list[int]]]) -> bool:
        """Plan the copies of sequences' lone blocks to the host; False: no room, nothing changed.

        The caller releases the device blocks: swap-outs run before anything else is written.
        """
        lone = self.lone(tables)
        if any(len(own) > tier.num_available for own, tier in zip(lone, self._tiers)):
            return False
        if any(self._copies.fills(g.id, {b for t in tables for b in t[g.id]}) for g in self._groups):
            return False
        slots = []
        for group, tier, own in zip(self._groups, self._tiers, lone):
            slots.append(dict(zip(own, tier.take_private(len(own)))))
            for b, slot in slots[-1].items():
                self._copies.add("swap_out", group.id, b, slot)
            self._stats.swapped_out_blocks += len(own)
        for seq, own_tables in zip(seqs, tables):
            entries = []
            for group, table in zip(self._groups, own_tables):
                keys, slot_of = group.pool.keys, slots[group.id]
                entries.append([_Entry(keys[b], slot_of.get(b, -1), not b) for b in table])
                for slot in {e.slot for e in entries[-1] if e.slot >= 0}:
                    self._users[group.id, slot] = self._users.get((group.id, slot), 0) + 1
            self._entries[seq] = entries
        return True

    def get(
        self, seqs: list[int], chains: list[TokenChain], hints: Hints, now: float, spare: int
    ) -> list[tuple[list[list[int]], int]] | None:
        """Bring back what can be of all sequences, or nothing.

        Args:
            seqs: Swapped sequences; blocks they shared are shared again.
            chains: Their tokens.
            spare: Blocks that have to stay free in every group.

        Returns:
            For each (a table per group, leading blocks that are indexed), or None: no room.
        """
        all_tables = [self._tables(seq, chain) for seq, chain in zip(seqs, chains)]
        for number, group in enumerate(self._groups):
            here = {b for tables in all_tables for b in tables[number] if b > 0}
            new = {b for tables in all_tables for b in tables[number] if b < 0}
            if len(new) + spare > group.pool.num_free - group.pool.num_idle(list(here)):
                return None
        out = []
        for tables in all_tables:  # hold all that is here before any block is taken
            out.append((tables, min(leading(table) for table in tables)))
            for group, table in zip(self._groups, tables):
                group.pool.touch([b for b in table if b > 0], 0, hints, now)
        for number, group in enumerate(self._groups):
            self._copy_in(group, [tables[number] for tables in all_tables], now)
        for seq in seqs:
            self._give_back(seq, read=True)
        return out

    def _tables(self, seq: int, chain: TokenChain) -> list[list[int]]:
        """Where a sequence's blocks are, as far as they serve it: device ids, -1 - host slots, nulls."""
        all_entries = self._entries[seq]
        found = [self._find(group, chain, entries) for group, entries in zip(self._groups, all_entries)]
        count = min(len(blocks) for blocks in found)
        if count < len(all_entries[0]):  # what is left must still serve every window
            count = common_hit(self._groups, found, count)
            for group, blocks in zip(self._groups, found):
                behind = min(group.first_needed(count * group.block_size), count)
                blocks[:behind] = [0] * behind
        return [blocks[:count] for blocks in found]

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

    def _copy_in(self, group: Group, tables: list[list[int]], now: float) -> None:
        arrived: dict[int, int] = {}  # host entry -> device block
        for table in tables:
            for i, entry in enumerate(table):
                if entry >= 0:
                    continue
                if entry in arrived:
                    group.pool.share([arrived[entry]])
                else:
                    (arrived[entry],) = group.pool.take(1, now)
                    self._copies.add("swap_in", group.id, -1 - entry, arrived[entry])
                    self._stats.swapped_in_blocks += 1
                    self._stats.blocks_taken += 1
                table[i] = arrived[entry]

    def _give_back(self, seq: int, *, read: bool) -> None:
        for number, (tier, entries) in enumerate(zip(self._tiers, self._entries.pop(seq))):
            free = []
            for slot in {e.slot for e in entries if e.slot >= 0}:
                self._users[number, slot] -= 1
                if not self._users[number, slot]:
                    del self._users[number, slot]
                    free.append(slot)
            tier.give_back(sorted(free), read=read)

    def drop(self, seq: int) -> None:
        """A swapped sequence will not come back."""
        self._give_back(seq, read=len(self._copies) > 0)
