"""From a StepPlan to arrays of a few fixed shapes: the bucket ladder and the packing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pagedjax.cache.rules import next_power_of_two
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Sequence, SharedPrefix, StepPlan
from pagedjax.kernels import RaggedBatch, doors, plan_ragged
from pagedjax.kernels.cascade import PrefixGroup, find_groups, group_that_pays
from pagedjax.kernels.plan import CHUNK_TOKENS
from pagedjax.runtime.sampling import SAMPLING_DTYPES, SamplingBatch

Array = Any
MAX_GROUPS = 4  # prefixes that a grouped program works once


@dataclass(frozen=True, order=True)
class Bucket:
    """The static shapes of one compiled step.

    Attributes:
        num_decodes: One-token rows it has room for.
        num_prefill_tokens: Tokens of longer rows it has room for; 0: a pure decode step.
        num_seqs: Rows in total.
        num_samples: Rows that draw a token.
    """

    num_decodes: int
    num_prefill_tokens: int
    num_seqs: int
    num_samples: int

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    def fits(self, decodes: int, prefill_tokens: int, seqs: int, samples: int) -> bool:
        return (
            decodes <= self.num_decodes
            and prefill_tokens <= self.num_prefill_tokens
            and seqs <= self.num_seqs
            and samples <= self.num_samples
        )

    def __str__(self) -> str:
        return f"{self.num_decodes} decodes + {self.num_prefill_tokens} prefill tokens"


class Buckets:
    """The ladder of step shapes: at most 12, so at most 12 compiled programs.

    Up to three sizes of decode batch (max_num_seqs, 1, a quarter of it), alone and beside up to three sizes
    of prefill tokens (the largest chunk or budget, a quarter, a sixteenth). Warm-up and packing read this
    one object, so they cannot drift.

    Args:
        config: Limits of one step.
        decode_sizes: 1 to 3. Fewer compile sooner and pad more.
        prefill_sizes: 1 to 3, likewise.
    """

    # A step of prefills alone seldom ends more prompts than this; one that does takes a wider bucket.
    _FEW_SAMPLES = 8

    def __init__(self, config: SchedulerConfig, decode_sizes: int = 3, prefill_sizes: int = 3) -> None:
        for name, size in (("decode_sizes", decode_sizes), ("prefill_sizes", prefill_sizes)):
            if not 1 <= size <= 3:
                raise ValueError(f"{name}={size}: must be 1, 2 or 3; 3 pads least")
        seqs, most = config.max_num_seqs, config.token_budget
        chunk = config.chunk_tokens or most
        decodes = sorted({seqs, *(1, next_power_of_two(max(1, seqs // 4)))[: decode_sizes - 1]})
        parts = (next_power_of_two(max(2, chunk // 4)), next_power_of_two(max(2, chunk // 16)))
        prefill = sorted({most, *(min(p, most) for p in parts[: prefill_sizes - 1])})
        ladder = {Bucket(d, 0, d, d) for d in decodes}
        for tokens in prefill:
            ladder.add(Bucket(0, tokens, seqs, min(self._FEW_SAMPLES, seqs)))
            beside = decodes[1:] if decodes[0] == 1 and seqs > 1 else decodes
            ladder |= {Bucket(d, tokens, seqs, max(d, min(self._FEW_SAMPLES, seqs))) for d in beside}
        self.ladder = tuple(sorted(ladder, key=lambda b: (b.num_tokens, b.num_samples)))

    def smallest(self, plan: StepPlan) -> Bucket:
        """The bucket with the fewest tokens that holds the plan."""
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        need = (decodes, plan.num_tokens - decodes, len(plan.rows), plan.num_samples)
        for bucket in self.ladder:
            if bucket.fits(*need):
                return bucket
        raise ValueError(f"step of {need}: exceeds every bucket up to {self.ladder[-1]}; widen the limits")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """All arrays of one step, built afresh on the host each time and never mutated after dispatch.

    (On CPU a jitted call may go on reading the host buffer after it returned.)

    Attributes:
        tokens: i32[T] token ids fed; padding is 0.
        positions: i32[T] their positions.
        ragged: Lengths, tables, slots and work list of the rows, one per KV group.
        sample_index: i32[Q] which of the T tokens each sample reads its logits from.
        sampling: Parameters of the Q samples.
    """

    tokens: Array
    positions: Array
    ragged: tuple[RaggedBatch, ...]
    sample_index: Array
    sampling: SamplingBatch


def check_batch(batch: StepBatch) -> None:
    """The door of the jitted step, judged while tracing: one T for tokens and plans, one Q for all samples.

    Raises:
        ValueError: Names the array, its rule in the letters of the architecture page, and what it is.
    """
    dims = doors.dimensions(T=batch.tokens.shape[0], Q=batch.sample_index.shape[0])
    doors.require(dims, "positions", batch.positions, "T", np.int32)
    for ragged in batch.ragged:
        doors.require(dims, "slot_mapping", ragged.slot_mapping, "T", np.int32)
    doors.require(dims, "sample_index", batch.sample_index, "Q", np.int32)
    for name, kind in SAMPLING_DTYPES.items():
        doors.require(dims, f"sampling.{name}", getattr(batch.sampling, name), "Q", kind)


def shared_prefixes(
    plan: StepPlan,
    bucket: Bucket,
    mode: str,
    *,
    block_size: int,
    windows: Seq[Seq[int | None]],
    chunk_tokens: int,
) -> tuple[SharedPrefix, ...]:
    """The prefixes that a step's decode rows should work once, by the `runtime.prefix_groups` setting.

    Layers with a window read too little of a long prefix to share it.

    Args:
        plan: Rows with one token first.
        bucket: Its shapes.
        mode: "auto", "on" or "off".
        block_size, windows, chunk_tokens: As for `pack`.
    """
    num_decodes = 0 if mode == "off" else sum(row.num_tokens == 1 for row in plan.rows)
    if num_decodes < 2:
        return ()
    lens = np.array([row.start + 1 for row in plan.rows[:num_decodes]], np.int32)
    found = []
    for number, (table, group) in enumerate(zip(plan.tables, windows, strict=True)):
        if None not in group:
            continue
        args = (table[:num_decodes], lens, block_size, chunk_tokens)
        if mode == "auto":
            best = group_that_pays(*args, bucket.num_decodes)
            groups = [] if best is None else [best]
        else:
            groups = find_groups(*args, MAX_GROUPS, 2)
        found += [SharedPrefix(tuple(g.rows.tolist()), g.num_chunks * chunk_tokens, number) for g in groups]
    return tuple(found)


def pack(
    plan: StepPlan,
    bucket: Bucket,
    *,
    block_size: int,
    table_width: int,
    windows: Seq[Seq[int | None]] = ((None,),),
    chunk_tokens: int = CHUNK_TOKENS,
    shared: Seq[SharedPrefix] = (),
) -> StepBatch:
    """Lay a plan out in a bucket's shapes.

    Args:
        plan: Rows with one token first.
        bucket: One that `fits`.
        block_size: B.
        table_width: M, the width of an empty plan's table.
        windows: Per KV group the attention windows of its layers.
        chunk_tokens: Keys per decode item.
        shared: Prefixes to be worked once for their rows; where there are any, a program of its own.
    """
    rows = plan.rows
    lens = np.array([row.num_tokens for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    tokens = np.zeros(bucket.num_tokens, np.int32)
    positions = np.zeros(bucket.num_tokens, np.int32)
    sample_index = np.zeros(bucket.num_samples, np.int32)
    decodes = sum(row.num_tokens == 1 for row in rows)  # they come first
    tokens[:decodes] = [row.seq.chain.tokens[row.start] for row in rows[:decodes]]
    positions[:decodes] = starts[:decodes]
    at = decodes
    for row in rows[decodes:]:
        start, end = row.start, row.start + row.num_tokens
        tokens[at : at + row.num_tokens] = row.seq.chain.tokens[start:end]
        positions[at : at + row.num_tokens] = np.arange(start, end, dtype=np.int32)
        at += row.num_tokens
    sequences: list[Sequence] = [seq for row in rows for seq in row.samples]
    sample_index[: len(sequences)] = np.repeat(np.cumsum(lens) - 1, [len(row.samples) for row in rows])
    tables = plan.tables if rows else [np.zeros((0, table_width), np.int32)] * len(windows)
    ragged = tuple(
        plan_ragged(
            lens,
            starts + lens,
            table,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            num_tokens_bucket=bucket.num_tokens,
            num_seqs_bucket=bucket.num_seqs,
            decode_bucket=bucket.num_decodes,
            windows=group,
            max_groups=MAX_GROUPS if shared and None in group else 0,
            groups=[
                PrefixGroup(np.array(s.rows, np.int32), s.num_tokens // chunk_tokens)
                for s in shared
                if s.group == number
            ],
        )
        for number, (table, group) in enumerate(zip(tables, windows, strict=True))
    )
    sampling = SamplingBatch.pack(sequences, bucket.num_samples)
    return StepBatch(tokens, positions, ragged, sample_index, sampling)
