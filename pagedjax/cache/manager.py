"""PagedManager: block tables over a pool, prefix sharing, copy-on-write; the engine's cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedjax.cache import audit
from pagedjax.cache.admission import Admission
from pagedjax.cache.block import BlockPool
from pagedjax.cache.changes import Changes
from pagedjax.cache.copies import PendingCopies
from pagedjax.cache.events import EventLog, Resident
from pagedjax.cache.groups import Group, KVGroup, free_anchors, make_groups, share_anchors
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.match import Matcher
from pagedjax.cache.pins import Pins
from pagedjax.cache.protocol import NO_HINTS, CopyPlan, Hints, Hit, InvariantError, MissReason, ResetReport
from pagedjax.cache.registrar import Registrar
from pagedjax.cache.rules import check_block_size, require
from pagedjax.cache.sequence import Filling, SeqState
from pagedjax.cache.stats import CacheStats
from pagedjax.cache.swap import SwapSpace


class PagedManager:
    """Blocks on demand, shared by prefix, copied on first write. `KVCacheManager` says what each method promises.

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
        index: A name in `INDEXES` or of a plug-in, "module:Class", or a factory (num_blocks, block_size) ->
            PrefixIndex.
        policy: A name in `POLICIES` or of a plug-in, "module:Class", or a factory num_blocks -> EvictionPolicy.
        verify_tokens: Compare tokens, not digests alone, before a block is shared: for hashes that are not
            collision-proof. An index that cannot is refused; the hash index has a kind that does.
        dedup: When a block turns out to be resident already, use the first copy and free the new one; else
            the new one stays beside it (in a tree unregistered; the first copy is held for what follows it).
            None: as the index is by nature: with, where it excludes twins, else without.
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
        check_block_size(block_size)
        require(partial >= 0, f"partial={partial}: must be a number of tokens, or 0 to copy no part")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self.partial = partial
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self.now = 0.0
        self.events = events
        self._seqs: dict[int, SeqState] = {}
        self._groups = make_groups(
            groups or [KVGroup()],
            num_blocks=num_blocks,
            block_size=block_size,
            index=index if prefix_caching else "table",
            policy=policy,
            verify_tokens=verify_tokens,
            host_blocks=host_blocks,
        )
        self.dedup = self._groups[0].index.exclusive if dedup is None else dedup
        self._filling = Filling()
        self._copies = PendingCopies(self._groups)
        self._matcher = Matcher(self._groups, block_size, partial)
        self._admission = Admission(self._matcher, self._copies, self.stats, self._filling)
        self._swap = SwapSpace(self._groups, self._copies, self.stats)
        self._pins = Pins(self._matcher, self._seqs)
        self._registrar = Registrar(
            self._groups, self._seqs, self._copies, self.stats, events, self.dedup, lambda: self.now
        )

    # -------------------------------------------------------------- sizes

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """Blocks of each group's pool, the null blocks included."""
        return tuple(group.pool.num_blocks for group in self._groups)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out, in the group that has fewest."""
        return min(group.pool.num_usable for group in self._groups)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, in the group that has fewest: blank and evictable ones."""
        return min(group.pool.num_free for group in self._groups)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that many tokens need."""
        return -(-num_tokens // self.block_size)

    def demand(self, num_tokens: int, step_tokens: int, hints: Hints = NO_HINTS) -> tuple[int, int]:
        """(blocks such a sequence needs at once, blocks usable) in the group that is shortest of them."""
        pairs = [(g.most_blocks(num_tokens, step_tokens), g.pool.num_usable) for g in self._groups]
        return min(pairs, key=lambda pair: pair[1] - pair[0])

    # ------------------------------------------------------------ look up

    def peek(self, chain: TokenChain) -> int:
        """Tokens a `begin` would hit now; changes nothing."""
        return self._matcher.count(chain, len(chain) - 1)

    def begin(self, seq: int, chain: TokenChain, hints: Hints = NO_HINTS) -> Hit:
        """Look a sequence up and record what it may take from the cache; touches no block."""
        self._check_begin(seq, chain)
        limit = len(chain) - 1
        if hints.max_hit_tokens is not None:
            limit = min(limit, hints.max_hit_tokens)
        state = SeqState(chain, hints, [[] for _ in self._groups], recorded=True)
        state.seen = self._admission.num_changes()
        if not self.prefix_caching:
            state.hit = Hit(0, MissReason.DISABLED, 0)
        elif not hints.cache_read:
            state.hit = Hit(0, MissReason.OPTED_OUT, 0)
        else:
            state.hit = self._matcher.look_up(state, limit, self._filling)
        self._seqs[seq] = state
        return state.hit

    def _check_begin(self, seq: int, chain: TokenChain) -> None:
        if not len(chain):
            raise ValueError(f"sequence {seq}: its chain is empty; give at least one token")
        if chain.block_size != self.block_size:
            raise ValueError(
                f"chain of block_size={chain.block_size}: the manager's is {self.block_size}; build it with that"
            )
        known = self._seqs.get(seq)
        if known is not None and not known.recorded:
            raise ValueError(f"sequence {seq}: holds blocks already; release it first")
        self._check_not_swapped(seq)

    def _check_not_swapped(self, seq: int) -> None:
        if seq in self._swap.states:
            raise ValueError(f"sequence {seq}: is swapped out; swap it in or release it first")

    def _get(self, seq: int) -> SeqState:
        state = self._seqs.get(seq)
        if state is None:
            raise ValueError(f"sequence {seq}: unknown; begin it first")
        return state

    # ------------------------------------------------------------ reserve

    def reserve(self, seq: int, num_tokens: int, lookahead: int = 0, whole: int = 0) -> bool:
        """Make the next positions of a sequence writable, or change nothing.

        Room is counted so that hits waiting among the evictable blocks are consumed, and so is the source
        of a partial hit.
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
            if whole:
                need = max(need, group.most_blocks(whole, num_tokens) - len(table) + table.count(0))
            if state.recorded and self.host_blocks:
                need += sum([b < 0 for b in table])
            room = pool.num_free - need
            if state.recorded and room <= len(table):  # else there is room whatever of the hits waits
                room -= self._admission.num_waiting(state, group)
            if room < 0:
                return False
            shared.append(copies)
        if state.recorded:
            if not self._admission.adopt(state, self.now):
                return False
            for group, table in zip(self._groups, state.tables):
                if group.pool.journal is not None:
                    group.pool.journal.adopted(seq, table)
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

    def _extend(self, seq: int, state: SeqState, group: Group, new: int, copies: list[int]) -> None:
        """Allocate: `new` blocks at the table's end and one for each position of `copies`."""
        pool, table = group.pool, state.tables[group.id]
        source = state.partial[group.id][0] if state.partial else 0
        if source:
            # Out of the queue while blocks are taken, then back as if just used: kept until copied.
            pool.touch([source], len(table), state.hints, self.now)
        blocks = pool.take(new + len(copies), self.now)
        self.stats.blocks_taken += len(blocks)
        pairs = []
        for i, b in zip(copies, blocks):
            pairs.append((table[i], b))
            table[i] = b
        table += blocks[len(copies) :]
        if pool.journal is not None:
            if copies:
                pool.journal.put(seq, copies[0], table[copies[0] :])
            else:
                pool.journal.grew(seq)
        if copies:
            state.indexed = min(state.indexed, copies[0])
        if source:
            pairs.append((source, blocks[0]))
            state.partial[group.id] = (0, 0)
        if pairs:
            for src, dst in pairs:
                self._copies.add("cow", group.id, src, dst)
            pool.free([src for src, _ in pairs], self.now)
            self.stats.copies += len(pairs)
            state.copies += len(pairs)

    # ------------------------------------------------------------- commit

    def commit(self, seq: int, num_computed: int, now: float) -> None:
        """Book written KV: index the blocks that are now full, let go of those behind every window."""
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
        if self._matcher.one is None:
            self.leave_behind(seq, num_computed)

    def leave_behind(self, seq: int, num_computed: int) -> None:
        """Let go of blocks that lie behind every window once so many positions are computed.

        `commit` does it by itself; before it, the blocks are not indexed either: their KV was never written.
        """
        state = self._get(seq)
        for group, table in zip(self._groups, state.tables):
            if group.window is not None:
                group.free_behind(seq, table, num_computed, self.now)

    # ------------------------------------------------------ fork, release

    def fork(self, parent: int, child: int, chain: TokenChain) -> None:
        """Let `child` share all of the parent's written blocks; each copies on its first write."""
        source = self._get(parent)
        require(child not in self._seqs, f"sequence {child}: exists already; release it first")
        self._check_not_swapped(child)
        self._seqs[child] = state = source.fork(parent, child, chain)
        for group, table in zip(self._groups, state.tables):
            group.pool.share([b for b in table if b])
            if group.pool.journal is not None:
                group.pool.journal.put(child, 0, table)
        share_anchors(self._groups, state.anchors)

    def release(self, seq: int) -> None:
        """Give a sequence's blocks back, each group's tail first. Idempotent; unknown ids are a no-op."""
        self._swap.drop(seq)
        self._let_go(seq)

    def _let_go(self, seq: int) -> None:
        """A sequence leaves the device."""
        state = self._seqs.pop(seq, None)
        if state is None or state.recorded:
            return
        self._filling.stop(state)
        for group, table in zip(self._groups, state.tables):
            group.pool.free(table if group.window is None else [b for b in table if b], self.now)
            if group.pool.journal is not None:
                group.pool.journal.left(seq)
        if state.anchors:
            free_anchors(self._groups, state.anchors, 0, self.now)
        self._copies.cancel_unneeded(self.now)

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
            group.check_kept(table, num_tokens)
        for group, table in zip(self._groups, state.tables):
            group.free_tail(table, keep, self.now)
            if group.pool.journal is not None:
                group.pool.journal.cut(seq, keep)
        free_anchors(self._groups, state.anchors, num_tokens // self.block_size, self.now)
        self._copies.cancel_unneeded(self.now)
        state.computed = min(state.computed, num_tokens)
        state.indexed = min(state.indexed, num_tokens // self.block_size)
        self._filling.start(state)

    # --------------------------------------------------------------- swap

    def num_lone_blocks(self, *seqs: int) -> list[int]:
        """Blocks per group that `swap_out` of these sequences would copy to the host."""
        return [len(blocks) for blocks in self._swap.lone([self._get(seq) for seq in seqs])]

    def swap_out(self, *seqs: int) -> bool:
        """Move sequences to the host together, or change nothing."""
        require(len(set(seqs)) == len(seqs), f"sequences {list(seqs)}: must be named once each")
        states = {seq: self._seqs[seq] for seq in seqs if seq in self._seqs}
        if len(states) < len(seqs) or any(state.recorded for state in states.values()):
            return False
        if not self._swap.put(states):
            return False
        for seq in seqs:
            self._let_go(seq)
        return True

    def swap_in(self, *seqs: int, spare: int = 0) -> bool:
        """Bring swapped sequences back together, or change nothing; `num_computed` says how much came back."""
        require(len(set(seqs)) == len(seqs), f"sequences {list(seqs)}: must be named once each")
        if not seqs or not self._swap.states.keys() >= set(seqs):
            return False
        states = self._swap.get(seqs, self.now, spare)
        if states is None:
            return False
        self._seqs.update(states)
        for seq, state in states.items():
            self._filling.start(state)
            for group, table in zip(self._groups, state.tables):
                if group.pool.journal is not None:
                    group.pool.journal.put(seq, 0, table)
        return True

    # ----------------------------------------------------------- the step

    def take_copies(self) -> CopyPlan:
        """The copies planned since the last call; they run before the step that is being planned."""
        return self._copies.take(self.now)

    def lose(self, copies: CopyPlan) -> None:
        """Copies that were taken may not have run: forget what they were to bring to the host."""
        for batch in copies.batches:
            if batch.kind == "swap_out":
                self._groups[batch.group].tier.lose(set(batch.dst.tolist()))

    def num_computed(self, seq: int) -> int:
        """Positions of a sequence whose KV is written."""
        return self._get(seq).computed

    def num_copies(self, seq: int) -> int:
        """Blocks copied on write for this sequence so far; 0 for an unknown one."""
        state = self._seqs.get(seq) or self._swap.states.get(seq)
        return state.copies if state is not None else 0

    def table(self, seq: int, group: int = 0) -> list[int]:
        """Block ids of a sequence in order of position; the recorded hit before the first reserve."""
        return list(self._get(seq).tables[group])

    def tables(self, seqs: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
        """One fresh i32[S, width] per KV group, padded with the null block."""
        return audit.tables(self._groups, [(seq, self._get(seq)) for seq in seqs], width)

    def writable(self) -> tuple[np.ndarray, ...]:
        """Per KV group bool[P]: blocks of one reference and no hash, the only ones a step may write."""
        return audit.writable(self._groups)

    # ---------------------------------------------------------- the whole

    def pin(self, chain: TokenChain) -> int:
        """Keep a chain's resident prefix from eviction; returns the tokens pinned."""
        return self._pins.pin(chain, self.now) if self.prefix_caching else 0

    def unpin(self, chain: TokenChain) -> bool:
        """Undo `pin`; False: the chain was not pinned."""
        return self._pins.unpin(chain, self.now)

    def evict(self, num_blocks: int) -> int:
        """Drop up to so many evictable blocks' contents in the first group; returns how many went."""
        return self._groups[0].pool.drop(num_blocks, self.now)

    def reset(self, mode: str = "strict") -> ResetReport:
        """Drop every cached content, as after a change of weights."""
        require(mode in ("strict", "preempt"), f"mode={mode}: must be strict or preempt")
        holders = [seq for seq, state in self._seqs.items() if not state.recorded] + list(self._swap.states)
        if mode == "strict" and (holders or len(self._pins)):
            return ResetReport(False, blocked_by=len(holders) + len(self._pins))
        for seq in holders:
            self.release(seq)
        self._pins.clear(self.now)
        self._copies.drop(self.now)
        cleared = sum(group.pool.clear() + group.tier.clear() for group in self._groups)
        if self.events is not None:
            self.events.cleared(self.now)
        for group in self._groups:
            group.forget_all()
        return ResetReport(True, cleared, tuple(holders))

    def snapshot(self) -> dict[str, Any]:
        """The state in plain values: per group the queue, references and keys; tables; counters."""
        return audit.snapshot(self._groups, self._seqs, self.stats, self.now)

    def watch(self) -> Changes:
        """Tell what blocks and tables hold and what happens to them from now on; once at a time, `stop` ends it."""
        return Changes(self._groups, self._seqs)

    def resident(self) -> Resident:
        """Copies of each content: (group, "device" or "host", digest) to how many."""
        return audit.resident(self._groups)

    def check_invariants(self) -> None:
        """Raise `InvariantError` where the books contradict themselves."""
        audit.check(self._groups, self._seqs, self._pins)
        self._copies.check()
        if self.events is not None and self.events.resident != self.resident():
            raise InvariantError("the event log's resident set is not the manager's")
