"""Work entries of kernels whose programs are counted before they start: cut on the device out of a plan's rows.

How many there are is bounded by tokens and rows, never by the width of the tables, and what there is no work for
costs a program that ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pagedjax.kernels.layout import RaggedBatch
from pagedjax.kernels.xla import NEG, State, no_state, seen_any


def cut_rows(
    ragged: RaggedBatch, counts: jax.Array, before: jax.Array, size: int, most: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Entries of up to `size` tokens each, in order of their rows.

    Args:
        counts: i32[S] entries of each row.
        before: i32[S] of its tokens, those before the first entry.
        most: Room for entries.

    Returns:
        ((row, first position, stop, first token), each i32[most]; i32[most, size] which of the T tokens they are, T
        where it is none). stop is the first position where no entry is.
    """
    starts, ends = ragged.query_start_loc[:-1], ragged.query_start_loc[1:]
    T, upto = ragged.num_tokens_bucket, jnp.cumsum(counts)
    nth = jnp.arange(most, dtype=jnp.int32)
    row = row_of(upto, nth)
    token = starts[row] + before[row] + (nth - (upto - counts)[row]) * size
    num = jnp.where(nth < upto[-1], jnp.clip(ends[row] - token, 0, size), 0)
    first_pos = ragged.seq_lens[row] - ends[row] + token
    of_tile = jnp.arange(size, dtype=jnp.int32)[None, :]
    tokens = jnp.where(of_tile < num[:, None], token[:, None] + of_tile, T)
    return (row, first_pos, first_pos + num, token), tokens


def row_of(upto: jax.Array, nth: jax.Array) -> jax.Array:
    """Which row the nth entry is of, upto i32[S] being the entries of a row and of those before it."""
    row = (upto[None, :] <= nth[:, None]).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(row, len(upto) - 1)


@dataclass(frozen=True)
class DecodeEntries:
    """Decode rows cut into parts of about equal numbers of keys.

    Attributes:
        row: i32[W].
        first: i32[W] first key.
        stop: i32[W] key behind the last; 0 where the part has none.
        first_part: i32[Sd] the row's first part; its others follow.
        num_parts: i32[Sd].
    """

    row: jax.Array
    first: jax.Array
    stop: jax.Array
    first_part: jax.Array
    num_parts: jax.Array


def split_rows(ragged: RaggedBatch, window: int | None, spare: int) -> DecodeEntries:
    """Every decode row is one part, and `spare` more go to the rows with the most keys.

    A part is as many of the plan's chunks as leaves no more parts than there is room for: the keys of a program follow
    from the lengths, and so many short rows are not split at all.

    Args:
        spare: Parts beside one a row, at least 1: what it takes to fill the device when rows are few.
    """
    Sd, chunk = ragged.decode_bucket, ragged.chunk_tokens
    work, lens = ragged.decode_list(window), ragged.seq_lens[:Sd]
    chunks = jnp.where(jnp.arange(Sd) < ragged.num_decodes, (lens + chunk - 1) // chunk - work.skip, 0)
    # Σ ceil(c / per) < Sd + Σ c / per, and that is at most Sd + spare.
    per = jnp.maximum((chunks.sum() + spare - 1) // spare, 1)
    parts = (chunks + per - 1) // per
    upto = jnp.cumsum(parts)
    nth = jnp.arange(Sd + spare, dtype=jnp.int32)
    row = row_of(upto, nth)
    first = (work.skip[row] + (nth - (upto - parts)[row]) * per) * chunk
    stop = jnp.where(nth < upto[-1], jnp.minimum(first + per * chunk, lens[row]), 0)
    return DecodeEntries(row, first, stop, upto - parts, parts)


def join_parts(entries: DecodeEntries, parts: State) -> State:
    """The state of each row from those of its parts: [W, …] → [Sd, …]. Parts without keys may hold anything.

    Neighbours of a row are joined in pairs, then pairs of pairs: as many steps as the longest row needs, whatever the
    lengths, always in the same order.
    """
    W, Sd = entries.row.shape[0], entries.num_parts.shape[0]
    acc, m, l = parts
    empty = no_state(m.shape, acc.shape[-1])

    def only(where: jax.Array, state: State) -> State:
        return tuple(
            jnp.where(where.reshape(-1, *(1 for _ in x.shape[1:])), x, none) for x, none in zip(state, empty)
        )

    state = only(entries.stop > 0, (acc, m, l))
    shift = 1
    while shift < W - Sd + 1:
        same = jnp.roll(entries.row, -shift) == entries.row
        same &= (jnp.roll(entries.stop, -shift) > 0) & (jnp.arange(W) + shift < W)
        state = _join_two(state, only(same, tuple(jnp.roll(x, -shift, axis=0) for x in state)))
        shift *= 2
    first = jnp.minimum(entries.first_part, W - 1)
    has = entries.num_parts > 0
    acc, m, l = (x[first] for x in state)
    return (
        jnp.where(has[:, None, None, None], acc, 0),
        jnp.where(has[:, None, None], m, NEG),
        jnp.where(has[:, None, None], l, 0),
    )


def _join_two(a: State, b: State) -> State:
    (acc_a, m_a, l_a), (acc_b, m_b, l_b) = a, b
    top = jnp.maximum(m_a, m_b)
    # Where neither has met a key both are weighted 0, so that sums of nothing stay 0.
    weight_a, weight_b = (jnp.where(seen_any(m, l), jnp.exp(m - top), 0) for m, l in ((m_a, l_a), (m_b, l_b)))
    acc = weight_a[..., None] * acc_a + weight_b[..., None] * acc_b
    return acc, top, weight_a * l_a + weight_b * l_b
