"""Shared prefixes attended once for all their queries, and the one rule by which partial results merge.

Rows of a decode step that begin with the same blocks form a group. The group's common chunks are read
once, as one matrix product over the queries of all rows, and only the rest is worked row by row. The two
states merge exactly, since softmax over a union of keys is the log-sum-exp mean of softmaxes over parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


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
    """Groups of rows with equal leading block ids, the most saving first.

    Equal ids are the only evidence used: reference counts also count tables that are not in this step.
    A row's last token never belongs to a group, and only whole chunks do.

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
    firsts = tables[candidates, 0]
    ids, counts = np.unique(firsts, return_counts=True)
    groups = []
    for first in ids[counts >= min_rows]:
        rows = candidates[firsts == first]
        shared = tables[rows, : int(whole[rows].min()) * per_chunk]
        same = (shared == shared[0]).all(axis=0)
        num_blocks = len(same) if same.all() else int(same.argmin())
        if num_blocks >= per_chunk:
            groups.append(PrefixGroup(rows.astype(np.int32), num_blocks // per_chunk))
    return sorted(groups, key=lambda group: -group.saved_chunks)[:max_groups]


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
