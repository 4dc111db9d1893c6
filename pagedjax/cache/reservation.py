"""ReservationManager: contiguous reservations on a buddy allocator, the baselines of the PagedAttention paper.

A reservation is a block table of consecutive ids, so the same engine and kernels run it. Nothing is
shared: no prefix cache, and forks copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedjax.cache.copies import Copy, plan_copies
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import (
    NO_COPIES,
    NO_HINTS,
    CopyPlan,
    Hints,
    Hit,
    InvariantError,
    MissReason,
    ResetReport,
)
from pagedjax.cache.rules import next_power_of_two
from pagedjax.cache.stats import CacheStats

RULES = ("max", "pow2", "oracle")


class BuddyAllocator:
    """Chunks of 2^k consecutive units out of a region of any size.

    The region is cut into powers of two, largest first; a chunk of size 2^k starts at a multiple of 2^k.
    The lowest free chunk that is smallest is split; freed chunks merge with their buddies.

    Args:
        size: Units of the region, numbered from 0.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_free = size
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        self._order: dict[int, int] = {}  # start of a chunk in use -> k
        start = 0
        for k in reversed(range(size.bit_length())):
            if size & (1 << k):
                self._free[k].add(start)
                start += 1 << k

    def allocate(self, units: int) -> int:
        """Start of a chunk of at least so many units, or -1: none is free in one piece."""
        k = max(units - 1, 0).bit_length()
        for have in range(k, len(self._free)):
            if self._free[have]:
                start = min(self._free[have])
                self._free[have].remove(start)
                for smaller in reversed(range(k, have)):
                    self._free[smaller].add(start + (1 << smaller))
                self._order[start] = k
                self.num_free -= 1 << k
                return start
        return -1

    def free(self, start: int) -> None:
        """Give a chunk back.

        Raises:
            InvariantError: No chunk in use starts there.
        """
        if start not in self._order:
            raise InvariantError(f"unit {start}: no chunk in use starts there")
        k = self._order.pop(start)
        self.num_free += 1 << k
        while k + 1 < len(self._free):
            buddy = start ^ (1 << k)
            if buddy not in self._free[k]:
                break
            self._free[k].remove(buddy)
            start = min(start, buddy)
            k += 1
        self._free[k].add(start)

    def units(self, start: int) -> int:
        """Units of the chunk in use that starts there."""
        return 1 << self._order[start]

    @property
    def largest(self) -> int:
        """Units of the largest free chunk."""
        return max((1 << k for k, starts in enumerate(self._free) if starts), default=0)

    def check(self) -> None:
        """Raise InvariantError unless chunks tile the region."""
        chunks = [(s, 1 << k) for k, starts in enumerate(self._free) for s in starts]
        chunks += [(s, 1 << k) for s, k in self._order.items()]
        end = 0
        for start, units in sorted(chunks):
            if start != end or start % units:
                raise InvariantError(f"chunk at {start} of {units}: the one before ends at {end}")
            end = start + units
        if end != self.size or self.num_free != sum(1 << k for k, s in enumerate(self._free) for _ in s):
            raise InvariantError(f"chunks end at {end} of {self.size}, or {self.num_free} free do not add up")


@dataclass(frozen=True)
class Waste:
    """Where the slots of the pool are, in tokens.

    Attributes:
        token_states: Hold KV.
        reservation: Will hold KV of tokens still to come.
        internal: Reserved, and never to be used.
        external: Lost to the allocator: beyond what was asked for, and, while a refused sequence waits,
            free pieces that are too small for it.
        free: Not reserved and not counted as external.
    """

    token_states: int
    reservation: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        return self.token_states + self.reservation + self.internal + self.external + self.free


@dataclass(eq=False)
class _Chunk:
    start: int  # first block id
    blocks: int
    users: int = 1


@dataclass(eq=False)
class _Seq:
    chain: TokenChain
    hints: Hints
    asked: int  # tokens it reserves
    final: int  # tokens it will have, where known; else `asked`
    computed: int = 0
    chunk: _Chunk | None = None
    source: _Chunk | None = None  # parent's chunk, to be copied from
    copies: int = 0


class ReservationManager:
    """Orca's memory management with what is known of the output length.

    * "max": every sequence reserves `max_tokens`.
    * "pow2": its tokens and its output rounded up to a power of two.
    * "oracle": its tokens and exactly its output.

    The output length is `Hints.expected_tokens`, else `Hints.max_tokens`; without either, pow2 and oracle
    reserve `max_tokens`. A sequence that outgrows its chunk moves to a larger one, if there is room.

    Args:
        num_blocks: Blocks of the pool, the null block 0 included.
        block_size: Tokens per block.
        rule: "max", "pow2" or "oracle".
        max_tokens: Longest sequence; also the cap of every reservation.

    Source: Kwon et al., SOSP 2023, section 6.1 (the Orca baselines).
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, rule: str = "max", max_tokens: int = 2048
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule={rule}: must be one of {', '.join(RULES)}; try max")
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks}: must be at least 2, block 0 is never handed out; try 1024"
            )
        if block_size < 1 or max_tokens < 1:
            raise ValueError(f"block_size={block_size}, max_tokens={max_tokens}: must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rule = rule
        self.max_tokens = max_tokens
        self.stats = CacheStats()
        self._buddy = BuddyAllocator(num_blocks - 1)
        self._seqs: dict[int, _Seq] = {}
        self._pending: list[Copy] = []
        self._leaving: list[_Chunk] = []  # chunks that pending copies still read
        self._refused = 0  # blocks that the last refused sequence asked for; 0 once one was admitted

    @property
    def num_usable(self) -> int:
        """Blocks of the largest sequence that an empty pool can hold."""
        return 1 << (self._buddy.size.bit_length() - 1)

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """Blocks of the one pool, the null block included."""
        return (self.num_blocks,)

    @property
    def host_blocks(self) -> int:
        """None: reservations are not swapped."""
        return 0

    @property
    def num_free(self) -> int:
        return self._buddy.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def demand(self, num_tokens: int, step_tokens: int, hints: Hints = NO_HINTS) -> tuple[int, int]:
        """(blocks that such a sequence reserves, blocks of the largest chunk)."""
        return self.num_blocks_for(self._sizes(num_tokens, hints)[0]), self.num_usable

    def num_computed(self, seq: int) -> int:
        return self._get(seq).computed

    def peek(self, chain: TokenChain) -> int:
        """Always 0: nothing is shared."""
        return 0

    def begin(self, seq: int, chain: TokenChain, hints: Hints = NO_HINTS) -> Hit:
        """Record a sequence and how much it will reserve; nothing is taken from a cache."""
        if not len(chain) or chain.block_size != self.block_size:
            raise ValueError(
                f"chain of {len(chain)} tokens, block_size={chain.block_size}: needs a token, and "
                f"block_size={self.block_size}"
            )
        held = self._seqs.get(seq)
        if held is not None and held.chunk is not None:
            raise ValueError(f"sequence {seq}: holds blocks already; release it first")
        asked, final = self._sizes(len(chain), hints)
        self._seqs[seq] = _Seq(chain, hints, asked, final)
        return Hit(0, MissReason.DISABLED, 0)

    def _sizes(self, length: int, hints: Hints) -> tuple[int, int]:
        """(tokens to reserve, tokens the sequence will have)."""
        output = hints.expected_tokens if hints.expected_tokens is not None else hints.max_tokens
        if output is None:
            return max(self.max_tokens, length), max(self.max_tokens, length)
        final = length + output
        rounded = {"max": self.max_tokens, "oracle": final, "pow2": length + next_power_of_two(output)}[
            self.rule
        ]
        if hints.resumed:  # what was accepted once may not outgrow the largest chunk by rounding anew
            rounded = min(rounded, max(final, self.num_usable * self.block_size))
        return max(min(rounded, self.max_tokens), length), max(min(final, self.max_tokens), length)

    def reserve(self, seq: int, num_tokens: int, lookahead: int = 0, whole: int = 0) -> bool:
        """Make the next positions writable: reserve the whole sequence at first, then move only if outgrown."""
        state = self._get(seq)
        if num_tokens < 0 or lookahead < 0:
            raise ValueError(f"num_tokens={num_tokens}, lookahead={lookahead}: must not be negative")
        end = state.computed + num_tokens + lookahead
        need = self.num_blocks_for(max(end, state.asked if state.chunk is None else 0))
        if state.chunk is not None and need <= state.chunk.blocks:
            return True
        start = self._buddy.allocate(max(need, 1))
        if start < 0:
            self._refused = need
            return False
        self._refused = 0
        chunk = _Chunk(start + 1, self._buddy.units(start))
        self.stats.blocks_taken += chunk.blocks
        old = state.chunk or state.source
        if old is not None:
            count = self.num_blocks_for(state.computed)
            self._pending += [Copy("cow", 0, old.start + i, chunk.start + i) for i in range(count)]
            self.stats.copies += count
            state.copies += count
            self._leaving.append(old)
        elif not state.hints.resumed:
            self.stats.requests += 1
            self.stats.prompt_tokens += len(state.chain)
        else:
            self.stats.resumed_requests += 1
            self.stats.resumed_tokens += len(state.chain)
        state.chunk, state.source = chunk, None
        return True

    def commit(self, seq: int, num_computed: int, now: float) -> None:
        """The KV of positions below `num_computed` is written."""
        state = self._get(seq)
        slots = state.chunk.blocks * self.block_size if state.chunk else 0
        if not state.computed <= num_computed <= min(slots, len(state.chain)):
            raise ValueError(
                f"num_computed={num_computed}: must be at least {state.computed} and within {slots} slots "
                f"and {len(state.chain)} tokens"
            )
        state.computed = num_computed

    def fork(self, parent: int, child: int, chain: TokenChain) -> None:
        """The child copies the parent's written blocks into its own chunk on its first `reserve`."""
        source = self._get(parent)
        if child in self._seqs:
            raise ValueError(f"sequence {child}: exists already; release it first")
        origin = source.chunk or source.source
        if origin is None:
            raise ValueError(f"sequence {parent}: has no blocks to copy yet; reserve first")
        asked, final = self._sizes(len(chain), source.hints)
        origin.users += 1
        self._seqs[child] = _Seq(chain, source.hints, asked, final, source.computed, source=origin)

    def swap_out(self, *seqs: int) -> bool:
        """Always False: reservations are preempted by recomputation."""
        return False

    def num_lone_blocks(self, *seqs: int) -> list[int]:
        """Nothing is ever swapped."""
        return [0]

    def swap_in(self, *seqs: int, spare: int = 0) -> bool:
        return False

    def release(self, seq: int) -> None:
        """Give a sequence's chunk back. Idempotent; unknown ids are a no-op."""
        state = self._seqs.pop(seq, None)
        if state is None:
            return
        for chunk in (state.chunk, state.source):
            if chunk is not None:
                ids = range(chunk.start, chunk.start + chunk.blocks)
                if chunk is state.chunk and chunk.users == 1:
                    if any(copy.src in ids for copy in self._pending):
                        self._leaving.append(chunk)
                        continue
                    self._pending = [copy for copy in self._pending if copy.dst not in ids]
                self._drop(chunk)

    def _drop(self, chunk: _Chunk) -> None:
        chunk.users -= 1
        if not chunk.users:
            self._buddy.free(chunk.start - 1)

    def take_copies(self) -> CopyPlan:
        """Moves and forks since the last call, as ordered batches."""
        if not self._pending and not self._leaving:
            return NO_COPIES
        plan = plan_copies(self._pending)
        self._pending = []
        for chunk in self._leaving:
            self._drop(chunk)
        self._leaving = []
        return plan

    def lose(self, copies: CopyPlan) -> None:
        """Nothing to forget: there is no host."""

    def table(self, seq: int) -> list[int]:
        """The consecutive ids of a sequence's chunk; empty before its first reserve."""
        chunk = self._get(seq).chunk
        return list(range(chunk.start, chunk.start + chunk.blocks)) if chunk else []

    def tables(self, seqs: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
        """One fresh i32[S, width]; a chunk longer than `width` is cut, its tail is never read."""
        rows = np.zeros((len(seqs), width), dtype=np.int32)
        for row, seq in zip(rows, seqs):
            table = self.table(seq)[:width]
            row[: len(table)] = table
        return (rows,)

    def writable(self) -> tuple[np.ndarray, ...]:
        """bool[P]: blocks of sequences' own chunks."""
        out = np.zeros(self.num_blocks, dtype=bool)
        for state in self._seqs.values():
            if state.chunk is not None:
                out[state.chunk.start : state.chunk.start + state.chunk.blocks] = True
        return (out,)

    def num_copies(self, seq: int) -> int:
        state = self._seqs.get(seq)
        return state.copies if state is not None else 0

    def pin(self, chain: TokenChain) -> int:
        """Always 0: there is nothing to pin."""
        return 0

    def unpin(self, chain: TokenChain) -> bool:
        return False

    def reset(self, mode: str = "strict") -> ResetReport:
        """Nothing is cached; "preempt" releases all sequences, "strict" refuses while there are any."""
        if mode not in ("strict", "preempt"):
            raise ValueError(f"mode={mode}: must be strict or preempt")
        holders = tuple(self._seqs)
        if mode == "strict" and holders:
            return ResetReport(False, blocked_by=len(holders))
        for seq in holders:
            self.release(seq)
        return ResetReport(True, 0, holders)

    def waste(self) -> Waste:
        """Where the slots are now. `reservation` and `internal` trust the hints' output length."""
        tokens = reservation = internal = external = 0
        for state in self._seqs.values():
            if state.chunk is None:
                continue
            slots = state.chunk.blocks * self.block_size
            asked = min(max(state.asked, state.computed), slots)
            final = min(max(state.final, state.computed), asked)
            tokens += state.computed
            reservation += final - state.computed
            internal += asked - final
            external += slots - asked
        everything = self._buddy.size * self.block_size
        free = everything - tokens - reservation - internal - external
        if self._refused and self._refused <= self._buddy.num_free:
            external, free = external + free, 0
        return Waste(tokens, reservation, internal, external, free)

    def snapshot(self) -> dict[str, Any]:
        """The state in plain values."""
        chunks = {s: (q.chunk.start, q.chunk.blocks) for s, q in self._seqs.items() if q.chunk}
        return {"chunks": chunks, "num_free": self.num_free, "stats": self.stats.snapshot()}

    def check_invariants(self) -> None:
        """Raise InvariantError where chunks overlap, leak or are counted wrongly."""
        self._buddy.check()
        users: dict[int, int] = {}
        for chunk in [c for q in self._seqs.values() for c in (q.chunk, q.source) if c] + self._leaving:
            users[id(chunk)] = users.get(id(chunk), 0) + 1
            if users[id(chunk)] > chunk.users:
                raise InvariantError(f"chunk at {chunk.start}: more users than the {chunk.users} counted")
        chunks = {id(c): c for q in self._seqs.values() for c in (q.chunk, q.source) if c}
        chunks |= {id(c): c for c in self._leaving}
        if any(users[name] != chunk.users for name, chunk in chunks.items()):
            raise InvariantError("a chunk has fewer users than counted")
        if sum(chunk.blocks for chunk in chunks.values()) != self._buddy.size - self._buddy.num_free:
            raise InvariantError("chunks in use do not add up to what the allocator gave")

    def _get(self, seq: int) -> _Seq:
        state = self._seqs.get(seq)
        if state is None:
            raise ValueError(f"sequence {seq}: unknown; begin it first")
        return state
