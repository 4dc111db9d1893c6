"""PagedManager: block tables over a pool, prefix sharing, copy-on-write; the engine's cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedjax.cache import audit
from pagedjax.cache.block import BlockPool
from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.events import EventLog, Resident
from pagedjax.cache.eviction import EvictionPolicy
from pagedjax.cache.groups import Group, KVGroup
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.match import Matcher, leading
from pagedjax.cache.policies import make_policy
from pagedjax.cache.prefix import PrefixIndex, TableIndex
from pagedjax.cache.protocol import (
    NO_HINTS,
    CopyPlan,
    Hints,
    Hit,
    InvariantError,
    MissReason,
    ResetReport,
)
from pagedjax.cache.registrar import Registrar
from pagedjax.cache.registry import make_index
from pagedjax.cache.sequence import Filling, SeqState
from pagedjax.cache.stats import CacheStats
from pagedjax.cache.swap import SwapSpace
from pagedjax.cache.tier import HostTier
from pagedjax.cache.verified_index import VerifiedHashIndex


class PagedManager:
    """Blocks on demand, shared by prefix, copied on first write.

    *Last-token rule*: a hit never covers the last token of the chain, so that there are logits to sample
    from. Without partial reuse hits are whole blocks: a 32-token prompt sent twice hits 16 at block size
    16, a 33-token prompt 32.

    *Visibility*: a block can be found once `commit` has said that its KV is written. Two sequences that
    compute the same prompt at once therefore each compute their own; the second copy is counted.

    *Red line*: no position is ever written in a block that another holds or that is indexed. `reserve` is
    the one place that checks it.

    Args:
        num_blocks: Blocks of the pool, the null block 0 included.
        block_size: Tokens per block.
        index: "hash", "radix", "table", or a factory (num_blocks, block_size) -> PrefixIndex.
        policy: Name in `POLICIES`, or a factory num_blocks -> EvictionPolicy.
        verify_tokens: Compare tokens, not digests alone, before a block is shared: for hashes that are not
            collision-proof. The hash index is replaced by one that does; a radix index does anyway.
        dedup: When a block turns out to be resident already, use the first copy and free the new one; else
            the new one stays beside it (a radix index then leaves it and what follows it unregistered).
            None: as the index is used by nature, radix with, the others without.
        partial: Least gain, in tokens, for which a part of a block is copied from a cached one; 0: never.
        groups: KV groups; None is one full-attention group.
        prefix_caching: Off: nothing is shared but forks.
        host_blocks: Host blocks per group: what is evicted moves there and comes back on a hit, and
            `swap_out` puts sequences there. 0: neither.
        events: Where changes of what is resident are logged.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        index: Any = "hash",
        policy: Any = "lru",
        dedup: bool | None = None,
        partial: int = 0,
        groups: Sequence[KVGroup] | None = None,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        events: EventLog | None = None,
        verify_tokens: bool = False,
    ) -> None:
        if verify_tokens and index == "hash":
            index = VerifiedHashIndex
        if not (1 <= block_size <= 1024 and block_size & (block_size - 1) == 0):
            raise ValueError(
                f"block_size={block_size}: must be a power of two between 1 and 1024; try 16 or 32"
            )
        if partial < 0:
            raise ValueError(
                f"partial={partial}: must be a number of tokens, or 0 to copy no part of a block"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dedup = index == "radix" if dedup is None else dedup
        self.partial = partial
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self.now = 0.0
        self._seqs: dict[int, SeqState] = {}
        self._pins: dict[tuple, list[list[int]]] = {}
        self._filling = Filling()
        self._swapped: dict[int, SeqState] = {}
        self.events = events
        self._groups = [
            self._make_group(i, group, index if prefix_caching else "table", policy)
            for i, group in enumerate(groups or [KVGroup()])
        ]
        self._pools = [group.pool for group in self._groups]
        self._tiers = [self._make_tier(i, host_blocks) for i in range(len(self._groups))]
        self._copies = PendingCopies(self._pools, self._tiers)
        self._host_blocks = host_blocks
        self._matcher = Matcher(self._groups, self._tiers, block_size, partial)
        self._swap = SwapSpace(self._groups, self._tiers, self._copies, self.stats)
        self._registrar = Registrar(self._seqs, self._tiers, self._copies, self.stats, events, self.dedup)
        self._one = self._matcher.one

    def _make_group(self, number: int, spec: KVGroup, index: Any, policy: Any) -> Group:
        num_blocks = spec.num_blocks or self.num_blocks
        built: PrefixIndex = make_index(index, num_blocks, self.block_size)
        if spec.window is not None:
            built.leaf_only = False  # the blocks behind a window go first, whatever continues them
        order: EvictionPolicy = make_policy(policy, num_blocks)
        pool = BlockPool(num_blocks, order, built)
        group = Group(number, spec.window, pool, built, self.block_size)
        pool.on_evict = lambda blocks, keys: self._registrar.evicted(group, blocks, keys, self.now)
        return group

    def _make_tier(self, number: int, num_blocks: int) -> HostTier:
        events = self.events
        if events is None:
            return HostTier(num_blocks)
        return HostTier(
            num_blocks,
            lambda key, slot: events.stored(self.now, number, "host", [key], [slot]),
            lambda key, slot: events.removed(self.now, number, "host", [key], [slot]),
        )

    # -------------------------------------------------------------- sizes

    @property
    def num_usable(self) -> int:
        return min(pool.num_usable for pool in self._pools)

    @property
    def num_free(self) -> int:
        return min(pool.num_free for pool in self._pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """Blocks of each group's pool, the null blocks included."""
        return tuple(pool.num_blocks for pool in self._pools)

    def demand(self, num_tokens: int, step_tokens: int) -> tuple[int, int]:
        """(blocks such a sequence needs at once, blocks usable) in the group that is shortest of them."""
        pairs = [
            (group.most_blocks(num_tokens, step_tokens), group.pool.num_usable) for group in self._groups
        ]
        return min(pairs, key=lambda pair: pair[1] - pair[0])

    def num_computed(self, seq: int) -> int:
        """Positions of a sequence whose KV is written."""
        return self._get(seq).computed

    # ------------------------------------------------------------ look up

    def peek(self, chain: TokenChain) -> int:
        """Tokens a `begin` would hit now; changes nothing."""
        tables, tokens = self._matcher.match(chain, len(chain) - 1)
        if tokens % self.block_size == 0:
            tokens += self._matcher.below(chain, tables, tokens, len(chain) - 1)[0]
        return tokens

    def begin(self, seq: int, chain: TokenChain, hints: Hints = NO_HINTS) -> Hit:
        """Look a sequence up and record what it may take from the cache; touches no block.

        A second `begin` before the first `reserve` replaces the first.

        Raises:
            ValueError: The chain is empty or of another block size, or the sequence holds blocks already.
        """
        self._check_begin(seq, chain)
        limit = len(chain) - 1
        if hints.max_hit_tokens is not None:
            limit = min(limit, hints.max_hit_tokens)
        state = SeqState(chain, hints, [[] for _ in self._groups], recorded=True)
        state.seen = self._num_changes()
        if not self.prefix_caching:
            state.hit = Hit(0, MissReason.DISABLED, 0)
        elif not hints.cache_read:
            state.hit = Hit(0, MissReason.OPTED_OUT, 0)
        else:
            state.hit = self._look_up(state, limit)
        self._seqs[seq] = state
        return state.hit

    def _check_begin(self, seq: int, chain: TokenChain) -> None:
        if not len(chain):
            raise ValueError(f"sequence {seq}: its chain is empty; give at least one token")
        if chain.block_size != self.block_size:
            raise ValueError(
                f"chain of block_size={chain.block_size}: the manager's is {self.block_size}; build it with that"
            )
        held = self._seqs.get(seq)
        if held is not None and not held.recorded:
            raise ValueError(f"sequence {seq}: holds blocks already; release it first")
        self._check_not_swapped(seq)

    def _check_not_swapped(self, seq: int) -> None:
        if seq in self._swapped:
            raise ValueError(f"sequence {seq}: is swapped out; swap it in or release it first")

    def _look_up(self, state: SeqState, limit: int) -> Hit:
        chain = state.chain
        state.tables, tokens = self._matcher.match(chain, limit)
        full = tokens // self.block_size
        state.computed = tokens
        state.indexed = full
        if self._host_blocks:  # what comes from the host has to be indexed again
            state.indexed = min([leading(table) for table in state.tables])
        if not self._groups[0].index.indexes:  # a table index matches to the token
            reason = MissReason.LAST_TOKEN if tokens == limit < len(chain) else MissReason.NO_MATCH
            return Hit(tokens, reason, tokens)
        gain, sources, below = self._matcher.below(chain, state.tables, tokens, limit)
        if gain:
            state.partial = sources
            state.computed += gain
        return Hit(
            tokens + gain,
            self._matcher.reason(chain, full, gain, below, limit, self._filling),
            tokens + below,
        )

    # ------------------------------------------------------------ reserve

    def reserve(self, seq: int, num_tokens: int, lookahead: int = 0) -> bool:
        """Make the next positions of a sequence writable, or change nothing.

        On True the block table covers positions [computed, computed + num_tokens + lookahead), each in a
        block that this sequence alone holds and that is not indexed; blocks that were shared or indexed
        have been replaced and their copies planned. The first call after `begin` takes the hits: it adds
        their references before it allocates.

        Room is counted so that hits waiting among the evictable blocks are consumed, and so is the source
        of a partial hit. False also where a recorded hit was evicted meanwhile: `begin` again.

        Raises:
            ValueError: Unknown sequence, or a negative number.
        """
        state = self._get(seq)
        if num_tokens < 0 or lookahead < 0:
            raise ValueError(f"num_tokens={num_tokens}, lookahead={lookahead}: must not be negative")
        size = self.block_size
        end = state.computed + num_tokens + lookahead
        want = -(-end // size)
        writes_from = state.computed // size if end > state.computed else want
        shared: list[list[int]] = []
        for group, table in zip(self._groups, state.tables):
            pool = group.pool
            copies: list[int] = []
            if writes_from < len(table):
                copies = self._unwritable(state, pool, table, writes_from, want)
            need = max(want - len(table), 0) + len(copies)
            if state.recorded and self._host_blocks:
                need += sum([b < 0 for b in table])
            room = pool.num_free - need
            if state.recorded and room <= len(table):  # else there is room whatever of the hits waits
                room -= self._num_waiting(state, group)
            if room < 0:
                return False
            shared.append(copies)
        if state.recorded and not self._adopt(seq, state):
            return False
        for group, table, copies in zip(self._groups, state.tables, shared):
            new = want - len(table)
            if new > 0 or copies:
                self._extend(seq, state, group, max(new, 0), copies)
        return True

    @staticmethod
    def _unwritable(state: SeqState, pool: BlockPool, table: list[int], first: int, end: int) -> list[int]:
        """The red line: table positions to be written whose block is shared or indexed."""
        own = 0 if state.recorded else 1  # references this sequence holds itself
        ref, keys = pool.ref, pool.keys
        return [
            i
            for i in range(first, min(end, len(table)))
            if ref[table[i]] != own or keys[table[i]] is not None
        ]

    def _num_waiting(self, state: SeqState, group: Group) -> int:
        """Evictable blocks that admitting the sequence consumes beside its new ones."""
        hits = state.tables[group.id]
        if self._one is None or self._host_blocks:
            hits = [b for b in hits if b > 0]
        if state.partial:
            hits = [*hits, state.partial[group.id][0]]
        return group.pool.num_idle(hits)

    def _adopt(self, seq: int, state: SeqState) -> bool:
        """Take the recorded hits; False: some have gone since `begin`."""
        if state.seen != self._num_changes() and not self._still_there(state):
            return False
        hints, now = state.hints, self.now
        for group, table in zip(self._groups, state.tables):
            if group.window is not None:
                self._adopt_window(group, state, table)
            elif self._host_blocks:
                group.pool.touch([b for b in table if b > 0], 0, hints, now)
            elif table:
                group.pool.touch(table, 0, hints, now)
        state.recorded = False
        if self._host_blocks:
            self._bring_in(state)
        self._count_admission(state)
        self._filling.start(state)
        return True

    def _adopt_window(self, group: Group, state: SeqState, table: list[int]) -> None:
        """Touch what the window needs; what is resident behind it counts as used, too."""
        skip = table.count(0)
        group.pool.touch([b for b in table if b > 0], skip, state.hints, self.now)
        behind = [b for b in group.index.resident(state.chain, skip) if b]
        group.pool.touch(behind, 0, state.hints, self.now)
        group.pool.free(behind, self.now)

    def _num_changes(self) -> int:
        """Grows with every content that leaves: unchanged, no recorded hit is stale."""
        return sum([pool.num_recycled for pool in self._pools]) + sum([t.version for t in self._tiers])

    def _bring_in(self, state: SeqState) -> None:
        """Blocks that were found on the host get device blocks; their copies run before the step."""
        found: list[tuple[Group, HostTier, int, int]] = []
        for group, tier, table in zip(self._groups, self._tiers, state.tables):
            for i, entry in enumerate(table):
                if entry < 0:  # hold all slots before any block is taken: taking may evict to the host
                    found.append((group, tier, i, tier.read(state.chain.digest(i))))
        for group, _, i, slot in found:
            (b,) = group.pool.take(1, self.now)
            state.tables[group.id][i] = b
            self._copies.add("swap_in", group.id, slot, b)
        self.stats.blocks_taken += len(found)
        self.stats.swapped_in_blocks += len(found)
        self.stats.host_hit_tokens += len({i for _, _, i, _ in found}) * self.block_size

    def _still_there(self, state: SeqState) -> bool:
        """The recorded blocks still hold what `begin` found."""
        again, tokens = self._matcher.match(state.chain, state.computed)
        if again != state.tables or tokens + sum(t for _, t in state.partial[:1]) != state.computed:
            return False
        if not state.partial:
            return True
        return self._matcher.below(state.chain, again, tokens, state.computed)[1] == state.partial

    def _extend(self, seq: int, state: SeqState, group: Group, new: int, copies: list[int]) -> None:
        """Allocate: `new` blocks at the table's end and one for each position of `copies`."""
        pool, table = group.pool, state.tables[group.id]
        source = state.partial[group.id][0] if state.partial else 0
        if source:
            # Out of the queue while blocks are taken, then back as if just used: held until copied.
            pool.touch([source], len(table), state.hints, self.now)
        blocks = pool.take(new + len(copies), self.now)
        self.stats.blocks_taken += len(blocks)
        if copies:
            old = [table[i] for i in copies]
            for i, src, dst in zip(copies, old, blocks):
                self._copies.add("cow", group.id, src, dst)
                table[i] = dst
            pool.free(old, self.now)
            state.indexed = min(state.indexed, copies[0])
            self._count_copies(state, group, len(copies))
        table += blocks[len(copies) :]
        if source:
            self._copies.add("cow", group.id, source, blocks[0])
            pool.free([source], self.now)
            state.partial[group.id] = (0, 0)
            self._count_copies(state, group, 1)

    def _count_copies(self, state: SeqState, group: Group, count: int) -> None:
        self.stats.copies += count
        state.copies += count

    def _count_admission(self, state: SeqState) -> None:
        stats, hit = self.stats, state.hit
        assert hit is not None
        if not state.hints.counted:
            return
        if state.hints.resumed:
            stats.resumed_requests += 1
            stats.resumed_tokens += len(state.chain)
            stats.resumed_hit_tokens += hit.num_tokens
            return
        stats.requests += 1
        stats.prompt_tokens += len(state.chain)
        stats.hit_tokens += hit.num_tokens
        stats.partial_hits += bool(state.partial)
        stats.miss_reasons[hit.reason] = stats.miss_reasons.get(hit.reason, 0) + 1

    # ------------------------------------------------------------- commit

    def commit(self, seq: int, num_computed: int, now: float) -> None:
        """Book written KV: index the blocks that are now full, let go of those behind every window.

        Args:
            num_computed: Positions whose KV is written, from the start.
            now: Logical time.

        Raises:
            ValueError: Less than before, more than reserved, or more than the chain has tokens.
        """
        state = self._get(seq)
        self.now = now
        size = self.block_size
        full = num_computed // size
        if not state.computed <= num_computed <= min(len(state.tables[0]) * size, len(state.chain)):
            raise ValueError(
                f"num_computed={num_computed}: must be at least {state.computed} and within the "
                f"{len(state.tables[0]) * size} slots reserved and the {len(state.chain)} tokens of the chain"
            )
        if state.recorded and num_computed:
            raise ValueError(f"sequence {seq}: commit before its first reserve; reserve first")
        state.computed = num_computed
        if full > state.indexed:
            if self.prefix_caching and state.hints.cache_write:
                for group in self._groups:
                    self._registrar.register(group, state, state.indexed, full, now)
            state.indexed = full
            self._filling.start(state)
        if self._one is None:
            for group in self._groups:
                if group.window is not None:
                    self._leave_behind(group, state, state.computed)

    def leave_behind(self, seq: int, num_computed: int) -> None:
        """Let go of blocks that lie behind every window once so many positions are computed.

        `commit` does it by itself; before it, the blocks are not indexed either: their KV was never written.
        """
        state = self._get(seq)
        for group in self._groups:
            if group.window is not None:
                self._leave_behind(group, state, num_computed)

    def _leave_behind(self, group: Group, state: SeqState, num_computed: int) -> None:
        table = state.tables[group.id]
        end = min(group.first_needed(num_computed), len(table))
        behind = []
        for i in range(end - 1, -1, -1):
            if not table[i]:
                break
            behind.append(table[i])
            table[i] = 0
        if behind:
            group.pool.free(behind[::-1], self.now)

    # ------------------------------------------------------ fork, release

    def fork(self, parent: int, child: int, chain: TokenChain) -> None:
        """Let `child` share all of the parent's written blocks; each copies on its first write.

        To be called between steps: what the parent has reserved for a step under way is checked already.

        Args:
            chain: The child's own tokens; they agree with the parent's as far as KV is written.

        Raises:
            ValueError: Unknown parent, a child that holds blocks, or a chain that is not the parent's so far.
        """
        source = self._get(parent)
        if child in self._seqs:
            raise ValueError(f"sequence {child}: exists already; release it first")
        self._check_not_swapped(child)
        if source.recorded:
            raise ValueError(f"sequence {parent}: has no blocks to share yet; reserve first")
        if len(chain) < source.computed:
            raise ValueError(f"chain of {len(chain)} tokens: the parent has computed {source.computed}")
        same = chain.tokens[: source.computed] == source.chain.tokens[: source.computed]
        if not same or chain.extra != source.chain.extra:
            raise ValueError(
                f"chain of {child}: differs from what {parent} has computed; fork the parent's chain"
            )
        count = self.num_blocks_for(source.computed)
        tables = [table[:count] for table in source.tables]
        for group, table in zip(self._groups, tables):
            group.pool.share([b for b in table if b])
        self._seqs[child] = SeqState(chain, source.hints, tables, source.computed, source.indexed)

    def release(self, seq: int) -> None:
        """Give a sequence's blocks back, each group's tail first. Idempotent; unknown ids are a no-op.

        Its pending copies are cancelled where nobody else needs them.
        """
        if self._swapped.pop(seq, None) is not None:
            self._swap.drop(seq)
        state = self._seqs.pop(seq, None)
        if state is None or state.recorded:
            return
        self._filling.stop(state)
        for group, table in zip(self._groups, state.tables):
            group.pool.free(table if group.window is None else [b for b in table if b], self.now)
        self._copies.cancel_unneeded()

    def truncate(self, seq: int, num_tokens: int) -> None:
        """Forget the positions from `num_tokens` on, and give back the blocks only they needed.

        Raises:
            ValueError: Unknown sequence, or more than there are.
        """
        state = self._get(seq)
        if state.recorded or not 0 <= num_tokens <= len(state.tables[0]) * self.block_size:
            raise ValueError(f"num_tokens={num_tokens}: must lie within the sequence's reserved blocks")
        keep = self.num_blocks_for(num_tokens)
        for group, table in zip(self._groups, state.tables):
            if 0 in table[group.first_needed(num_tokens) : keep]:
                raise ValueError(
                    f"num_tokens={num_tokens}: blocks it needs have left the window of {group.window}; "
                    "release the sequence and begin it again"
                )
        for group, table in zip(self._groups, state.tables):
            gone = [b for b in table[keep:] if b]
            del table[keep:]
            group.pool.free(gone, self.now)
        self._copies.cancel_unneeded()
        state.computed = min(state.computed, num_tokens)
        state.indexed = min(state.indexed, num_tokens // self.block_size)
        self._filling.start(state)

    # --------------------------------------------------------------- swap

    @property
    def host_blocks(self) -> int:
        """Host blocks per group."""
        return self._host_blocks

    def num_lone_blocks(self, *seqs: int) -> list[int]:
        """Blocks per group that `swap_out` of these sequences would copy to the host."""
        return [len(blocks) for blocks in self._swap.lone([self._written(self._get(s)) for s in seqs])]

    def _written(self, state: SeqState) -> list[list[int]]:
        count = self.num_blocks_for(state.computed)
        return [table[:count] for table in state.tables]

    def swap_out(self, *seqs: int) -> bool:
        """Move sequences to the host together, or change nothing.

        Blocks that only these sequences hold are copied to the host, once each; of others they drop their
        references and keep the digests. Slots reserved but not written yet are given up.

        Returns:
            False: the host has no room, a pending copy has still to fill one of the blocks, or a sequence
            holds none. Preempt by recomputation then.
        """
        _check_once(seqs)
        states = [self._seqs.get(seq) for seq in seqs]
        known = [state for state in states if state is not None and not state.recorded]
        if len(known) < len(seqs):
            return False
        if not self._swap.put(list(seqs), [self._written(state) for state in known]):
            return False
        for seq, state in zip(seqs, known):
            self.release(seq)
            self._swapped[seq] = state
        return True

    def swap_in(self, *seqs: int, spare: int = 0) -> bool:
        """Bring swapped sequences back together, or change nothing; `num_computed` says how much came back.

        Blocks the device still has are shared again, others are copied from the host. Where a block that
        others held has been evicted, what comes after it has to be recomputed.

        Args:
            seqs: Sequences that are swapped out.
            spare: Blocks that have to stay free in each group, for what the sequences write next.

        Returns:
            False: no room on the device, or a sequence is not swapped out.
        """
        _check_once(seqs)
        states = [self._swapped[seq] for seq in seqs if seq in self._swapped]
        if not states or len(states) < len(seqs):
            return False
        chains = [state.chain for state in states]
        found = self._swap.get(list(seqs), chains, states[0].hints, self.now, spare)
        if found is None:
            return False
        for seq, state, (tables, num_known) in zip(seqs, states, found):
            del self._swapped[seq]
            state.tables = tables
            state.computed = min(state.computed, len(tables[0]) * self.block_size)
            state.indexed = min(state.indexed, num_known)
            self._seqs[seq] = state
            self._filling.start(state)
        return True

    def _get(self, seq: int) -> SeqState:
        state = self._seqs.get(seq)
        if state is None:
            raise ValueError(f"sequence {seq}: unknown; begin it first")
        return state

    # ------------------------------------------------------ copies, tables

    def take_copies(self) -> CopyPlan:
        """The copies planned since the last call; they run before the step that is being planned."""
        return self._copies.take(self.now)

    def lose(self, copies: CopyPlan) -> None:
        """Copies that were taken may not have run: forget what they were to bring to the host.

        Sequences that hold blocks they were to fill, or that were swapped out by them, are the caller's to release.
        """
        for batch in copies.batches:
            if batch.kind == "swap_out":
                self._tiers[batch.group].lose(set(batch.dst.tolist()))

    def num_copies(self, seq: int) -> int:
        """Blocks copied on write for this sequence so far; 0 for an unknown one."""
        state = self._seqs.get(seq) or self._swapped.get(seq)
        return state.copies if state is not None else 0

    def table(self, seq: int, group: int = 0) -> list[int]:
        """Block ids of a sequence in order of position; the recorded hit before the first reserve."""
        return list(self._get(seq).tables[group])

    def tables(self, seqs: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
        """One fresh i32[S, width] per KV group, padded with the null block.

        Raises:
            ValueError: A table is longer than `width`.
        """
        out = []
        for group in self._groups:
            rows = np.zeros((len(seqs), width), dtype=np.int32)
            for row, seq in zip(rows, seqs):
                table = self._get(seq).tables[group.id]
                if len(table) > width:
                    raise ValueError(
                        f"width={width}: sequence {seq} has {len(table)} blocks; widen the tables"
                    )
                row[: len(table)] = table
            out.append(rows)
        return tuple(out)

    def writable(self) -> tuple[np.ndarray, ...]:
        """Per KV group bool[P]: blocks of one reference and no hash, the only ones a step may write."""
        return tuple(
            np.array([ref == 1 and key is None for ref, key in zip(pool.ref, pool.keys)])
            for pool in self._pools
        )

    # -------------------------------------------------------- pin, reset

    def pin(self, chain: TokenChain) -> int:
        """Keep a chain's resident prefix from eviction, whoever else uses it.

        With an index, its resident full blocks; under a table index the blocks of a live sequence that
        has computed the whole chain, to the token, offered to all later sequences.

        Returns:
            Tokens pinned; 0: nothing resident, or the chain is pinned already.
        """
        key = (chain.extra, tuple(chain.tokens))
        if key in self._pins or not self.prefix_caching:
            return 0
        if self._groups[0].index.indexes:
            tables, tokens = self._matcher.match(chain, len(chain), host=False)
        else:
            tables, tokens = self._computed_by_someone(chain)
        if not tokens:
            return 0
        for group, table in zip(self._groups, tables):
            blocks = [b for b in table if b]
            group.pool.touch(blocks, 0, NO_HINTS, self.now)
            if isinstance(group.index, TableIndex):
                group.index.pin(chain, table)
        self._pins[key] = [[b for b in table if b] for table in tables]
        return tokens

    def _computed_by_someone(self, chain: TokenChain) -> tuple[list[list[int]], int]:
        count = len(chain)
        for state in self._seqs.values():
            if (
                not state.recorded
                and state.computed >= count
                and state.chain.extra == chain.extra
                and state.chain.tokens[:count] == chain.tokens
            ):
                return [table[: self.num_blocks_for(count)] for table in state.tables], count
        return [[] for _ in self._groups], 0

    def unpin(self, chain: TokenChain) -> bool:
        """Undo `pin`; False: the chain was not pinned."""
        tables = self._pins.pop((chain.extra, tuple(chain.tokens)), None)
        if tables is None:
            return False
        for group, table in zip(self._groups, tables):
            if isinstance(group.index, TableIndex):
                group.index.unpin(chain)
                self._forget_recorded(group)
            group.pool.free(table, self.now)
        return True

    def _forget_recorded(self, group: Group) -> None:
        """Hits recorded from a pin that is gone are no longer backed by anything."""
        group.pool.num_recycled += 1

    def evict(self, num_blocks: int) -> int:
        """Drop up to so many evictable blocks' contents in the first group; returns how many went."""
        pool = self._groups[0].pool
        count = min(num_blocks, pool.num_evictable)
        if count > 0:
            pool.blank += pool.evict(count, self.now)[::-1]
        return max(count, 0)

    def reset(self, mode: str = "strict") -> ResetReport:
        """Drop every cached content, as after a change of weights.

        Args:
            mode: "strict": only if no sequence and no pin is in the way, else change nothing. "preempt":
                release all sequences and pins first; the caller has to start them again.

        Raises:
            ValueError: Another mode.
        """
        if mode not in ("strict", "preempt"):
            raise ValueError(f"mode={mode}: must be strict or preempt")
        holders = [seq for seq, state in self._seqs.items() if not state.recorded] + list(self._swapped)
        if mode == "strict" and (holders or self._pins):
            return ResetReport(False, blocked_by=len(holders) + len(self._pins))
        for seq in holders:
            self.release(seq)
        for extra, tokens in list(self._pins):
            self.unpin(TokenChain(tokens, block_size=self.block_size, extra=extra))
        self._copies.drop(self.now)
        cleared = sum(pool.clear() for pool in self._pools) + sum(tier.clear() for tier in self._tiers)
        if self.events is not None:
            self.events.cleared(self.now)
        for group in self._groups:
            group.evicted.clear()
        return ResetReport(True, cleared, tuple(holders))

    # --------------------------------------------------------------- check

    def snapshot(self) -> dict[str, Any]:
        """The state in plain values: per group the queue, references and keys; tables; counters."""
        tables = {seq: [list(t) for t in state.tables] for seq, state in self._seqs.items()}
        groups = [audit.pool_state(pool, self.now) for pool in self._pools]
        return {"groups": groups, "tables": tables, "stats": self.stats.snapshot()}

    def resident(self) -> Resident:
        """Copies of each content: (group, "device" or "host", digest) to how many."""
        return audit.resident(self._groups, self._tiers)

    def check_invariants(self) -> None:
        """Raise `InvariantError` where the books contradict themselves."""
        for group in self._groups:
            held = [s.tables[group.id] for s in self._seqs.values() if not s.recorded]
            held += [tables[group.id] for tables in self._pins.values()]
            audit.check_group(group, held)
        for seq, state in self._seqs.items():
            slots = len(state.tables[0]) * self.block_size
            if not state.recorded and state.computed > slots:
                raise InvariantError(f"sequence {seq}: {state.computed} tokens computed in {slots} slots")
        self._copies.check()
        for tier in self._tiers:
            tier.check()
        if self.events is not None and self.events.resident != self.resident():
            raise InvariantError("the event log's resident set is not the manager's")


def _check_once(seqs: Sequence[int]) -> None:
    if len(set(seqs)) < len(seqs):
        raise ValueError(f"sequences {list(seqs)}: must be named once each")
