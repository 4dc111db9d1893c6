"""Sequences preempted by swapping: which of their blocks went where, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.groups import Group, common_hit
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.match import leading
from pagedjax.cache.sequence import SeqState
from pagedjax.cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class _Entry:
    """What became of one block of a swapped sequence.

    Attributes:
        key: Digest of its content where it, or a twin of it, was indexed: the device may still have it.
        slot: Private host slot with a copy, shared by sequences that were swapped together; -1 if others
            held the block, too, and only its reference was dropped.
        null: It lay behind the window and held nothing.
    """

    key: bytes | None
    slot: int
    null: bool


class SwapSpace:
    """Private slots in the host tiers, and what each swapped sequence has in them.

    Attributes:
        states: The books of the sequences that are swapped out.
    """

    def __init__(self, groups: list[Group], copies: PendingCopies, stats: CacheStats) -> None:
        self.states: dict[int, SeqState] = {}
        self._groups = groups
        self._copies = copies
        self._stats = stats
        self._entries: dict[int, list[list[_Entry]]] = {}
        self._users: dict[tuple[int, int], int] = {}  # (group, slot) -> swapped sequences that use it

    def lone(self, states: Sequence[SeqState]) -> list[list[int]]:
        """Per group the written blocks that nobody but these sequences holds, once each."""
        out = []
        for group in self._groups:
            counts: dict[int, int] = {}
            for state in states:
                for b in self._written(state, group):
                    counts[b] = counts.get(b, 0) + 1
            out.append([b for b, n in counts.items() if b and group.pool.ref[b] == n])
        return out

    @staticmethod
    def _written(state: SeqState, group: Group) -> list[int]:
        return state.tables[group.id][: -(-state.computed // group.block_size)]

    def put(self, states: dict[int, SeqState]) -> bool:
        """Plan the copies of sequences' lone blocks to the host; False: no room, nothing changed.

        The caller lets go of the device blocks: swap-outs run before anything else is written.
        """
        lone = self.lone(list(states.values()))
        for group, own in zip(self._groups, lone):
            wanted = {b for state in states.values() for b in self._written(state, group)}
            if len(own) > group.tier.num_available or self._copies.fills(group.id, wanted):
                return False
        slots = []
        for group, own in zip(self._groups, lone):
            slots.append(dict(zip(own, group.tier.take_private(len(own)))))
            for b, slot in slots[-1].items():
                self._copies.add("swap_out", group.id, b, slot)
            self._stats.swapped_out_blocks += len(own)
        for seq, state in states.items():
            entries = []
            for group in self._groups:
                keys, slot_of = group.pool.keys, slots[group.id]
                written = self._written(state, group)
                first_copies = [state.anchors.get((group.id, i), b) for i, b in enumerate(written)]
                entries.append(
                    [
                        _Entry(keys[there], slot_of.get(b, -1), not b)
                        for b, there in zip(written, first_copies)
                    ]
                )
                for slot in {e.slot for e in entries[-1] if e.slot >= 0}:
                    self._users[group.id, slot] = self._users.get((group.id, slot), 0) + 1
            self._entries[seq] = entries
        self.states.update(states)
        return True

    def get(self, seqs: Sequence[int], now: float, spare: int) -> dict[int, SeqState] | None:
        """Bring back what can be of all sequences, or nothing.

        Args:
            seqs: Swapped sequences; blocks they shared are shared again.
            now: Logical time.
            spare: Blocks that have to stay free in every group.

        Returns:
            Their books, or None: no room.
        """
        states = [self.states[seq] for seq in seqs]
        all_tables = [self._tables(seq, state.chain) for seq, state in zip(seqs, states)]
        for group in self._groups:
            here = {b for tables in all_tables for b in tables[group.id] if b > 0}
            new = {b for tables in all_tables for b in tables[group.id] if b < 0}
            if len(new) + spare > group.pool.num_free - group.pool.num_idle(list(here)):
                return None
        for state, tables in zip(states, all_tables):  # take all that is here before any block is handed out
            state.indexed = min(state.indexed, *(leading(table) for table in tables))
            for group, table in zip(self._groups, tables):
                group.pool.touch([b for b in table if b > 0], 0, states[0].hints, now)
        for group in self._groups:
            self._copy_in(group, [tables[group.id] for tables in all_tables], now)
        for seq, state, tables in zip(seqs, states, all_tables):
            state.tables = tables
            state.computed = min(state.computed, len(tables[0]) * self._groups[0].block_size)
            self._give_back(seq, read=True)
        return {seq: self.states.pop(seq) for seq in seqs}

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
        for group, entries in zip(self._groups, self._entries.pop(seq)):
            free = []
            for slot in {e.slot for e in entries if e.slot >= 0}:
                self._users[group.id, slot] -= 1
                if not self._users[group.id, slot]:
                    del self._users[group.id, slot]
                    free.append(slot)
            group.tier.give_back(sorted(free), read=read)

    def drop(self, seq: int) -> None:
        """A sequence will not come back; nothing happens if it is not swapped out."""
        if self.states.pop(seq, None) is not None:
            self._give_back(seq, read=len(self._copies) > 0)
