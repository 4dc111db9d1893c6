"""Shared prefixes attended once for all their queries, and the one rule by which partial results merge.

Rows of a decode step that begin with the same blocks form a group. The group's common chunks are read
once, as one matrix product over the queries of all rows, and only the rest is worked row by row. The two
states merge exactly, since softmax over a union of keys is the log-sum-exp mean of softmaxes over parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# Where working a shared prefix once begins to pay (docs/kernels.md, "Break-even").
MIN_GROUP_ROWS = 4
# Shared tokens from which on → the group's reads that are left out, as a share of the rows the program has room for.
MIN_GROUP_SHARES = ((4096, 0.4), (512, 2 / 3))


@dataclass(frozen=True)
class PrefixGroup:
    """Rows that share their first chunks.

    Attributes:
        rows: i32[at least 2], decode rows.
        num_chunks: Chunks that stand in the same blocks in every row's table.
    """

    rows: np.ndarray
    num_chunks: int

    @property
    def saved_chunks(self) -> int:
        """Chunk reads that working the group at once leaves out."""
        return (len(self.rows) - 1) * self.num_chunks


def find_groups(
    tables: np.ndarray, lens: np.ndarray, block_size: int, chunk_tokens: int, max_groups: int, min_rows: int
) -> list[PrefixGroup]:
    """Disjoint groups of rows with equal leading block ids, the most saving first.

    Equal ids are the only evidence used: reference counts also count tables that are not in this step.
    A row's last token never belongs to a group, and only whole chunks do. Rows that share more among themselves
    than with a further one stay without it where that saves more: eight that share 4,096 tokens, and 256 with a
    ninth, are a group of eight.

    Args:
        tables: i32[n, M].
        lens: i32[n], KV lengths.
        max_groups: Groups the compiled program has room for.
        min_rows: Fewer rows than this gain nothing: the break-even, at least 2.
    """
    per_chunk = chunk_tokens // block_size
    whole = (lens - 1) // chunk_tokens
    if per_chunk == 0 or not len(lens) or np.count_nonzero(whole > 0) < min_rows:
        return []
    candidates = np.flatnonzero(whole > 0)
    nodes = _shared_prefixes(tables, whole, candidates, 0, per_chunk, min_rows)
    groups: list[PrefixGroup] = []
    free = np.ones(len(lens), bool)
    while nodes and len(groups) < max_groups:
        best = max(nodes, key=lambda group: group.saved_chunks)  # the first of equals: the shallower one
        groups.append(best)
        free[best.rows] = False
        nodes = [
            PrefixGroup(left, group.num_chunks)
            for group in nodes
            if len(left := group.rows[free[group.rows]]) >= min_rows
        ]
    return groups


def _shared_prefixes(
    tables: np.ndarray, whole: np.ndarray, rows: np.ndarray, depth: int, per_chunk: int, min_rows: int
) -> list[PrefixGroup]:
    """Every set of rows that agree in more chunks than the rows around them, as groups that overlap.

    Args:
        whole: i32[n], whole chunks of each row.
        rows: Rows that agree in their first `depth` chunks.
    """
    rows = rows[whole[rows] > depth]
    if len(rows) < min_rows:
        return []
    begin = depth * per_chunk
    ids, first = np.unique(tables[rows, begin], return_inverse=True)
    found = []
    for number in np.flatnonzero(np.bincount(first, minlength=len(ids)) >= min_rows):
        some = rows[first == number]
        shared = tables[some, begin : int(whole[some].min()) * per_chunk]
        same = (shared == shared[0]).all(axis=0)
        num_blocks = len(same) if same.all() else int(same.argmin())
        deeper = depth + num_blocks // per_chunk
        if deeper > depth:
            found.append(PrefixGroup(some.astype(np.int32), deeper))
            found += _shared_prefixes(tables, whole, some, deeper, per_chunk, min_rows)
        else:  # the first block is common, the chunk is not: those whose whole chunk is
            chunks = np.ascontiguousarray(tables[some, begin : begin + per_chunk])
            _, which = np.unique(chunks, axis=0, return_inverse=True)
            for one in np.flatnonzero(np.bincount(which.reshape(-1)) >= min_rows):
                part = some[which.reshape(-1) == one]
                found += _shared_prefixes(tables, whole, part, depth, per_chunk, min_rows)
    return found


def group_that_pays(
    tables: np.ndarray, lens: np.ndarray, block_size: int, chunk_tokens: int, bucket: int
) -> PrefixGroup | None:
    """The rule by which an engine works a step's most shared prefix once; None: row by row is quicker.

    The product over a group's keys is worked for all rows that the program has room for, and what it leaves out is the
    group's own reads but one. So the group has to be a good part of them (docs/kernels.md, "Break-even").

    Args:
        tables: i32[n, M] of the decode rows.
        lens: i32[n], their KV lengths.
        block_size: B.
        chunk_tokens: Keys per decode item.
        bucket: Sd, decode rows of the compiled program.
    """
    if len(lens) < MIN_GROUP_ROWS or MIN_GROUP_SHARES[0][1] * bucket > len(lens) - 1:
        return None
    for group in find_groups(tables, lens, block_size, chunk_tokens, 1, MIN_GROUP_ROWS):
        shared = group.num_chunks * chunk_tokens
        share = next((share for least, share in MIN_GROUP_SHARES if shared >= least), math.inf)
        if len(group.rows) - 1 >= share * bucket:
            return group
    return None


def merge_states(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of disjoint key sets from attention over each.

    o = Σ_i exp(lse_i - lse) o_i, lse = log Σ_i exp(lse_i), in float32.

    Args:
        outs: f[parts, T, N, H], each normalised over its own keys.
        lses: f32[parts, T, N]; -inf for a part without keys.

    Returns:
        (f32[T, N, H], f32[T, N]); 0 and -inf where no part has keys.

    Source:
        Cascade inference (FlashInfer, Ye et al., 2025, §3); Hydragen (Juravsky et al., 2024, §3.1).
    """
    top = lses.max(axis=0)
    seen = top > -jnp.inf
    top = jnp.where(seen, top, 0)
    weights = jnp.exp(lses - top[None])
    total = weights.sum(axis=0)
    safe = jnp.where(seen, total, 1)
    out = (weights[..., None] * outs.astype(jnp.float32)).sum(axis=0) / safe[..., None]
    return out, jnp.where(seen, top + jnp.log(safe), -jnp.inf)
