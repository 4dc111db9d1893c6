"""What crosses the cache's border: hints in; hits, copies and reports out; the manager protocol."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.stats import CacheStats


class InvariantError(RuntimeError):
    """The cache's books contradict themselves; the message holds a dump."""


class MissReason(enum.StrEnum):
    """Why a prefix match stopped where it did."""

    NONE = "none"  # everything that may be taken from the cache was
    NO_MATCH = "no_match"  # nothing resident continues the match
    BELOW_BLOCK_FLOOR = "below_block_floor"  # more tokens match, but fewer than a block
    EVICTED = "evicted"  # the next block was cached once and has been evicted
    OTHER_NAMESPACE = "other_namespace"  # the same tokens are cached under other extra keys
    OPTED_OUT = "opted_out"  # the request asked not to read the cache
    LAST_TOKEN = "last_token"  # more is resident, but a token must be left to compute
    SAME_STEP_TWIN = "same_step_twin"  # a running sequence is computing the next block, not yet visible
    DISABLED = "disabled"  # prefix caching is off


@dataclass(frozen=True)
class Hints:
    """What a request tells the manager beside its tokens.

    Attributes:
        expected_tokens: Output tokens, where known; read by the Oracle reservation rule.
        priority: Retention priority of its blocks; higher stays longer under the retention policy.
        group: Category of the request (kind, application, user), read by the workload-aware policy; "": none is named.
        ttl_s: For how long (in units of `now`) that priority holds; None: for ever.
        cache_read: False: take nothing from the cache.
        cache_write: False: leave nothing in it.
        resumed: The request was preempted before; what it hits again is counted apart.
        max_hit_tokens: Take at most so many tokens from the cache; None: all but the last one.
        max_tokens: Most output tokens the request may ask for; read by the reservation rules.
        counted: False: not a request, as when a snapshot is read; the statistics of requests stay as they are.
    """

    expected_tokens: int | None = None
    priority: int = 0
    ttl_s: float | None = None
    cache_read: bool = True
    cache_write: bool = True
    resumed: bool = False
    max_hit_tokens: int | None = None
    max_tokens: int | None = None
    counted: bool = True
    group: str = ""


NO_HINTS = Hints()


@dataclass(frozen=True)
class Hit:
    """What `begin` found.

    Attributes:
        num_tokens: Tokens whose KV is taken from the cache.
        reason: Why no more.
        matched_tokens: Tokens that match something resident, counted below block granularity.
        group: The KV group that lacks blocks where another would have gone on; None: all end alike.
    """

    num_tokens: int
    reason: MissReason
    matched_tokens: int
    group: int | None = None


@dataclass(frozen=True)
class CopyBatch:
    """Block copies that may run at once: no id is a destination twice, nor source and destination.

    Attributes:
        kind: "cow" (device to device), "swap_out" (device to host), "swap_in" (host to device).
        src: i32[C] source ids.
        dst: i32[C] destination ids.
        group: KV group whose pool they are in.
    """

    kind: str
    src: np.ndarray
    dst: np.ndarray
    group: int = 0


@dataclass(frozen=True)
class CopyPlan:
    """Batches in the order they have to run, all before the step computes. Truthy if there are any."""

    batches: tuple[CopyBatch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.batches)

    @property
    def num_copies(self) -> int:
        return sum(len(batch.src) for batch in self.batches)


NO_COPIES = CopyPlan()


@dataclass(frozen=True)
class ResetReport:
    """What `reset` did; truthy only if the cache is empty now.

    Attributes:
        done: The cache was cleared.
        num_cleared: Indexed blocks dropped, all groups and tiers together.
        preempted: Sequences that lost their blocks (mode "preempt").
        blocked_by: Sequences or pins in the way (mode "strict"); nothing was changed then.
    """

    done: bool
    num_cleared: int = 0
    preempted: tuple[int, ...] = ()
    blocked_by: int = 0

    def __bool__(self) -> bool:
        return self.done


class KVCacheManager(Protocol):
    """Decides which block holds which tokens. Knows tokens, blocks and sequence ids, nothing else.

    A token counts in a sequence's length from the step that writes its KV: growing from 3 to 4 tokens at
    block size 4 takes no block, from 4 to 5 takes one. Capacity is a return value; misuse is a `ValueError`.

    Attributes:
        block_size: Tokens per block.
        stats: Counters.
    """

    block_size: int
    stats: CacheStats

    # sizes

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """Blocks of each KV group's pool, the null blocks included."""
        ...

    @property
    def host_blocks(self) -> int:
        """Blocks per group on the host; 0: `swap_out` always refuses."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, in the group that has fewest."""
        ...

    def demand(self, num_tokens: int, step_tokens: int, hints: Hints = NO_HINTS) -> tuple[int, int]:
        """(blocks such a sequence needs at once, blocks usable) in the group that is shortest of them.

        Args:
            num_tokens: Length of the sequence when it is admitted.
            step_tokens: Most of its tokens computed in one step; what has left a window by then is free.
            hints: What it may still grow by, where blocks are reserved ahead.
        """
        ...

    # the life of a sequence

    def begin(self, seq: int, chain: TokenChain, hints: Hints = NO_HINTS) -> Hit:
        """Look a sequence up and record what it may take from the cache; touches no block.

        A hit never covers the last token. A second `begin` before the first `reserve` replaces the first.

        Raises:
            ValueError: The chain is empty or of another block size, or the sequence holds blocks already.
        """
        ...

    def reserve(self, seq: int, num_tokens: int, lookahead: int = 0, whole: int = 0) -> bool:
        """Make the next positions of a sequence writable, or change nothing.

        On True the block table covers positions [computed, computed + num_tokens + lookahead), each in a
        block that this sequence alone holds and that is not indexed; blocks that were shared or indexed
        have been replaced and their copies planned. The first call after `begin` takes the hits: it adds
        their references before it allocates; with 0 tokens it takes the hits and nothing else.

        Args:
            num_tokens: Positions to be written next.
            lookahead: Further ones, after them.
            whole: Refuse as well where a sequence of so many tokens, computed in steps of `num_tokens`, would
                find no room now; nothing more is taken for it.

        Returns:
            False: no room, or a recorded hit was evicted meanwhile: `begin` again.

        Raises:
            ValueError: Unknown sequence, or a negative number.
        """
        ...

    def commit(self, seq: int, num_computed: int, now: float) -> None:
        """Book written KV: index the blocks that are now full, let go of those behind every window.

        Args:
            num_computed: Positions whose KV is written, from the start.
            now: Logical time.

        Raises:
            ValueError: Less than before, more than reserved, or more than the chain has tokens.
        """
        ...

    def fork(self, parent: int, child: int, chain: TokenChain) -> None:
        """Let `child` share all of the parent's written blocks; each copies on its first write.

        To be called between steps: what the parent has reserved for a step under way is checked already.

        Args:
            chain: The child's own tokens; they agree with the parent's as far as KV is written.

        Raises:
            ValueError: Unknown parent, a child that holds blocks, or a chain that is not the parent's so far.
        """
        ...

    def release(self, seq: int) -> None:
        """Give a sequence's blocks back. Idempotent; unknown ids are a no-op.

        Its pending copies are cancelled where nobody else needs them.
        """
        ...

    def num_computed(self, seq: int) -> int:
        """Positions of a sequence whose KV is written."""
        ...

    def num_copies(self, seq: int) -> int:
        """Blocks copied on write for this sequence so far; 0 for an unknown one."""
        ...

    # the host

    def num_lone_blocks(self, *seqs: int) -> list[int]:
        """Blocks per group that `swap_out` of these sequences would copy to the host."""
        ...

    def swap_out(self, *seqs: int) -> bool:
        """Move sequences to the host together, or change nothing.

        Blocks that only these sequences hold are copied to the host, once each; of others they drop their
        references and keep the digests. Slots reserved but not written yet are given up.

        Returns:
            False: the host has no room, a pending copy has still to fill one of the blocks, or a sequence
            holds none. Preempt by recomputation then.
        """
        ...

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
        ...

    # the step

    def take_copies(self) -> CopyPlan:
        """The copies planned since the last call; they run before the step that is being planned."""
        ...

    def lose(self, copies: CopyPlan) -> None:
        """Copies that were taken may not have run: forget what they were to bring to the host.

        Sequences that hold blocks they were to fill, or that were swapped out by them, are the caller's to release.
        """
        ...

    def table(self, seq: int) -> list[int]:
        """Block ids of one sequence, in order of position (first KV group)."""
        ...

    def tables(self, seqs: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
        """One fresh i32[S, width] per KV group, padded with the null block.

        Raises:
            ValueError: A table is longer than `width`.
        """
        ...

    def writable(self) -> tuple[np.ndarray, ...]:
        """Per KV group bool[P]: blocks that a step may write, held by one sequence and not indexed."""
        ...

    # the whole

    def pin(self, chain: TokenChain) -> int:
        """Keep a chain's resident prefix from eviction, whoever else uses it.

        With an index, its resident full blocks; under a table index the blocks of a live sequence that
        has computed the whole chain, to the token, offered to all later sequences.

        Returns:
            Tokens pinned; 0: nothing resident, or the chain is pinned already.
        """
        ...

    def unpin(self, chain: TokenChain) -> bool:
        """Undo `pin`; False: it was not pinned."""
        ...

    def reset(self, mode: str = "strict") -> ResetReport:
        """Drop every cached content, as after a change of weights.

        Args:
            mode: "strict": only if no sequence and no pin is in the way, else change nothing. "preempt":
                release all sequences and pins first; the caller has to start them again.

        Raises:
            ValueError: Another mode.
        """
        ...

    def snapshot(self) -> dict[str, Any]:
        """The state in plain values."""
        ...

    def check_invariants(self) -> None:
        """Raise `InvariantError` where the books contradict themselves."""
        ...
