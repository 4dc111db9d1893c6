"""From a StepPlan to arrays of a few fixed shapes: the packing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pagedjax.engine import Sequence, SharedPrefix, StepPlan
from pagedjax.engine.shapes import Bucket
from pagedjax.kernels import PACKAGED, RaggedBatch, Tuning, doors, plan_ragged
from pagedjax.kernels.cascade import MAX_LEVELS, PrefixGroup, find_groups, groups_that_pay
from pagedjax.kernels.plan import CHUNK_TOKENS, TILE_QUERIES
from pagedjax.runtime.sampling import SAMPLING_DTYPES, SamplingBatch

Array = Any
MAX_GROUPS = 4  # prefixes that a grouped program works once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """All arrays of one step, built afresh on the host each time and never mutated after dispatch.

    (On CPU a jitted call may go on reading the host buffer after it returned.)

    Attributes:
        tokens: i32[T] token ids fed; padding is 0. A negative one, -1 - i, is the i-th of `drawn`.
        drawn: i32[N], N the most samples of any bucket: what the step before drew. Zeros from `pack`: the runner puts
            the device's array in their place.
        positions: i32[T] their positions.
        ragged: Lengths, tables, slots and work list of the rows, one per KV group.
        sample_index: i32[Q] which of the T tokens each sample reads its logits from.
        sampling: Parameters of the Q samples.
    """

    tokens: Array
    drawn: Array
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
    doors.require(dims, "tokens", batch.tokens, "T", np.int32)
    doors.require(dims, "positions", batch.positions, "T", np.int32)
    for ragged in batch.ragged:
        doors.require(dims, "slot_mapping", ragged.slot_mapping, "T", np.int32)
    doors.require(dims, "sample_index", batch.sample_index, "Q", np.int32)
    for name, kind in SAMPLING_DTYPES.items():
        doors.require(dims, f"sampling.{name}", getattr(batch.sampling, name), "Q", kind)


def shared_prefixes(
    plan: StepPlan,
    mode: str,
    *,
    block_size: int,
    windows: Seq[Seq[int | None]],
    chunk_tokens: int,
    device: str,
) -> tuple[SharedPrefix, ...]:
    """The prefixes that a step's decode rows should work once, by the `runtime.prefix_groups` setting.

    One may lie within another: of the rows that share a prefix, some share more. Layers with a window read too little
    of a long prefix to share it.

    Args:
        plan: Rows with one token first.
        mode: "auto", "on" or "off".
        block_size, windows, chunk_tokens: As for `pack`.
        device: "cpu", "tpu" or "gpu", for "auto".
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
            groups = groups_that_pay(*args, MAX_GROUPS, device)
        else:
            groups = find_groups(*args, MAX_GROUPS, 2, max_levels=MAX_LEVELS)
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
    tile_queries: int = TILE_QUERIES,
    tuning: Tuning = PACKAGED,
    shared: Seq[SharedPrefix] = (),
    apart: bool = False,
    most_samples: int = 0,
    drawn: Mapping[Sequence, int] = {},
) -> StepBatch:
    """Lay a plan out in a bucket's shapes.

    Args:
        plan: Rows with one token first.
        bucket: One that `fits`.
        block_size: B.
        table_width: M, the width of an empty plan's table.
        windows: Per KV group the attention windows of its layers.
        chunk_tokens: Keys per decode item.
        tile_queries: Most tokens of a tile.
        tuning: The user's own sizes of kernels' pieces.
        shared: Prefixes to be worked once for their rows; where there are any, a program of its own.
        apart: Every token is a row of its own, and no row's result depends on the others; rows in any order.
        most_samples: N, at least Q.
        drawn: Where in `StepBatch.drawn` the tokens of sequences stand that the host does not know yet.
    """
    rows = plan.rows
    lens = np.array([row.num_tokens for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    tokens = np.zeros(bucket.num_tokens, np.int32)
    positions = np.zeros(bucket.num_tokens, np.int32)
    sample_index = np.zeros(bucket.num_samples, np.int32)
    decodes = 0 if apart else sum(row.num_tokens == 1 for row in rows)  # they come first
    tokens[:decodes] = [
        row.seq.chain.tokens[row.start] if row.start < len(row.seq.chain.tokens) else -1 - drawn[row.seq]
        for row in rows[:decodes]
    ]
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
    query_lens, seq_lens = lens, starts + lens
    if apart:
        tables = [np.repeat(table, lens, axis=0) for table in tables]
        query_lens, seq_lens = np.ones(at, np.int32), positions[:at] + 1
    ragged = plan_groups(
        query_lens,
        seq_lens,
        tables,
        bucket,
        shared,
        windows=windows,
        block_size=block_size,
        chunk_tokens=chunk_tokens,
        tile_queries=tile_queries,
        tuning=tuning,
        apart=apart,
    )
    ends = [row.start + row.num_tokens for row in rows for _ in row.samples]
    sampling = SamplingBatch.pack(sequences, ends, bucket.num_samples)
    before = np.zeros(max(most_samples, bucket.num_samples), np.int32)
    return StepBatch(tokens, before, positions, ragged, sample_index, sampling)


def plan_groups(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    tables: Seq[np.ndarray],
    bucket: Bucket,
    shared: Seq[SharedPrefix] = (),
    *,
    windows: Seq[Seq[int | None]],
    chunk_tokens: int,
    **sizes: Any,
) -> tuple[RaggedBatch, ...]:
    """The work of rows in each KV group.

    Args:
        query_lens, seq_lens: As for `plan_ragged`.
        tables: Of each group.
        bucket, shared, windows, chunk_tokens: As for `pack`.
        sizes: Further arguments of `plan_ragged`.
    """
    return tuple(
        plan_ragged(
            query_lens,
            seq_lens,
            table,
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
            **sizes,
        )
        for number, (table, group) in enumerate(zip(tables, windows, strict=True))
    )
