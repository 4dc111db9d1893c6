"""Shared prefixes attended once for all their queries, and the one rule by which partial results merge.

Rows of a decode step that begin with the same blocks form a group. The group's common chunks are read
once, as one matrix product over the queries of all rows, and only the rest is worked row by row. The two
states merge exactly, since softmax over a union of keys is the log-sum-exp mean of softmaxes over parts.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Rows from which a group is looked for.
MIN_GROUP_ROWS = 4
# Groups that a row may be in: a system prompt, a conversation's beginning, its samples, and one more.
MAX_LEVELS = 4
# The costs below are in reads of so many keys of one row.
_COST_KEYS = 128


@dataclass(frozen=True)
class GroupCost:
    """What working a shared prefix once costs beside one read of it, in reads of 128 keys by one row.

    Attributes:
        min_rows: Fewer never pay.
        group: A group, whatever its size.
        row: Each of its rows: its queries and its part of the result.
        chunk: Each shared chunk.
        row_chunk: Each shared chunk and row.
    """

    min_rows: int
    group: float
    row: float
    chunk: float
    row_chunk: float


# By device class. On CPU measured, on TPU counted in bundles and bytes (docs/kernels.md, "Break-even").
GROUP_COSTS = {
    "cpu": GroupCost(MIN_GROUP_ROWS, group=0.0, row=1.0, chunk=3.5, row_chunk=0.0),
    "tpu": GroupCost(2, group=16.0, row=0.25, chunk=0.0, row_chunk=1 / 80),
}
# Shared tokens from which on → the group's reads that are left out, as a share of the rows the program has room for.
MIN_GROUP_SHARES = ((4096, 0.4), (512, 2 / 3))


@dataclass(frozen=True)
class PrefixGroup:
    """Rows that share their first chunks; a larger group around them works those that it shares.

    Attributes:
        rows: i32[at least 2], decode rows.
        num_chunks: Chunks that stand in the same blocks in every row's table.
    """

    rows: np.ndarray
    num_chunks: int


def find_groups(
    tables: np.ndarray,
    lens: np.ndarray,
    block_size: int,
    chunk_tokens: int,
    max_groups: int,
    min_rows: int,
    *,
    max_levels: int = 1,
    cost: Callable[[int, int], float] = lambda rows, chunks: 0.0,
) -> list[PrefixGroup]:
    """Groups of rows with equal leading block ids, the most saving first; disjoint, or one within another.

    Equal ids are the only evidence used: reference counts also count tables that are not in this step.
    A row's last token never belongs to a group, and only whole chunks do. A group within another works what its rows
    share beyond the other's chunks. Of one level, rows that share more among themselves than with a further one stay
    without it where that saves more: eight that share 4,096 tokens, and 256 with a ninth, are a group of eight.

    Args:
        tables: i32[n, M].
        lens: i32[n], KV lengths.
        max_groups: Groups the compiled program has room for.
        min_rows: Fewer rows than this gain nothing: the break-even, at least 2.
        max_levels: Groups that a row may be in.
        cost: What working so many rows' shared chunks at once costs, (rows, chunks) → chunk reads. A group that saves
            no more is none.
    """
    per_chunk = chunk_tokens // block_size
    whole = (lens - 1) // chunk_tokens
    if per_chunk == 0 or not len(lens) or np.count_nonzero(whole > 0) < min_rows:
        return []
    candidates = np.flatnonzero(whole > 0)
    nodes = [
        _Node(sum(1 << int(row) for row in group.rows), group.num_chunks)
        for group in _shared_prefixes(tables, whole, candidates, 0, per_chunk, min_rows)
    ]
    chosen: list[_Node] = []
    while nodes and len(chosen) < max_groups:
        nodes = [left for node in nodes if (left := _room_for(node, chosen, max_levels, min_rows))]
        gains = [_gain(node, chosen, cost) for node in nodes]
        if not gains or max(gains) <= 0:
            break
        best = gains.index(max(gains))  # the first of equals: the shallower one
        chosen.append(nodes.pop(best))
    return [
        PrefixGroup(np.array([i for i in range(len(lens)) if node.rows >> i & 1], np.int32), node.num_chunks)
        for node in chosen
    ]


class _Node(NamedTuple):
    """A candidate for a group: a bit for each of its rows, and the chunks that they share."""

    rows: int
    num_chunks: int

    def within(self, other: _Node) -> bool:
        return self.rows & other.rows == self.rows and self.num_chunks > other.num_chunks


def _room_for(node: _Node, chosen: Sequence[_Node], max_levels: int, min_rows: int) -> _Node | None:
    """The node as it may join the groups that are chosen: whole, without their rows, or not at all."""
    around, inside = _around(node, chosen), [c for c in chosen if c.within(node)]
    others = [c for c in chosen if c not in around and c not in inside]
    deep = max((1 + len(_around(c, inside)) for c in inside), default=0)
    if len(around) + 1 + deep <= max_levels and not any(c.rows & node.rows for c in others):
        return node
    free = node.rows & ~functools.reduce(operator.or_, (c.rows for c in chosen), 0)
    return _Node(free, node.num_chunks) if free.bit_count() >= min_rows else None


def _around(node: _Node, chosen: Sequence[_Node]) -> list[_Node]:
    return [c for c in chosen if node.within(c)]


def _gain(node: _Node, chosen: Sequence[_Node], cost: Callable[[int, int], float]) -> float:
    """Chunk reads that one more group leaves out, less what it costs; -inf where it costs more than it saves."""

    def value(group: _Node, first: int) -> float:
        rows, chunks = group.rows.bit_count(), group.num_chunks - first
        return (rows - 1) * chunks - cost(rows, chunks)

    first = max((c.num_chunks for c in _around(node, chosen)), default=0)
    own = value(node, first)
    inside = [c for c in chosen if c.within(node)]
    outer = [c for c in inside if not _around(c, inside)]  # they begin where this one ends
    left = [value(c, node.num_chunks) for c in outer]
    if own <= 0 or min(left, default=1) <= 0:
        return -math.inf
    return own + sum(left) - sum(value(c, first) for c in outer)


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


def groups_that_pay(
    tables: np.ndarray, lens: np.ndarray, block_size: int, chunk_tokens: int, max_groups: int, device: str
) -> list[PrefixGroup]:
    """The rule by which an engine works shared prefixes once: groups whose reads left out outweigh what they cost.

    Args:
        tables: i32[n, M] of the decode rows.
        lens: i32[n], their KV lengths.
        block_size: B.
        chunk_tokens: Keys per decode item.
        max_groups: Groups that the program has room for.
        device: "cpu", "tpu" or "gpu"; where no cost is known of it nothing pays (docs/kernels.md, "Break-even").
    """
    price = GROUP_COSTS.get(device)
    if price is None or len(lens) < price.min_rows:
        return []
    unit = _COST_KEYS / chunk_tokens

    def cost(rows: int, chunks: int) -> float:
        each = price.chunk + price.row_chunk * rows
        return (price.group + price.row * rows) * unit + each * chunks

    return find_groups(
        tables, lens, block_size, chunk_tokens, max_groups, price.min_rows, max_levels=MAX_LEVELS, cost=cost
    )


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
