"""Paged attention in plain XLA: the judge of the other kernels, the CPU path, the fallback everywhere.

Decode rows are cut by the plan into items of equal token counts. A loop takes a few items at a time,
gathers their blocks straight from the pool, and joins each partial (output, max, sum) with its row's: the
state is one per row, however many items a table has room for. Tiles of several queries run one after the
other, each with its own loop over the keys it can see. Both loops have dynamic trip counts: the cost follows
the lengths, not the compiled shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.cache.rules import SCALE_BYTES
from pagedjax.kernels.layout import DecodeList, KVPool, RaggedBatch, read_rows
from pagedjax.kernels.quant import dequantise

# Finite, so that a chunk without a visible key gives exp(0), not NaN; real scores stay far above it.
NEG = -1e30
# Of queries against some keys: acc f32[..., H] = sum of exp(s - m) * v, m = max of s, l = sum of exp(s - m).
State = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Params:
    """What attention needs beside arrays; see `paged_attention`."""

    scale: float
    window: int | None
    soft_cap: float | None


def attend(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    decode_items: Callable[..., State] | None = None,
    tile_items: Callable[..., State] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, Hv], lse f32[T, N]) of `paged_attention`; serves every case.

    Args:
        decode_items: Works the items of the decode list in place of this module's loop; same arguments.
        tile_items: Works the tiles likewise, over a state of T tokens.
    """
    params = Params(scale, window, soft_cap)
    Sd = ragged.decode_bucket
    queries = scaled_queries(q, pool, scale)
    work_items, work_tiles = decode_items or _decode_items, tile_items or _tiles
    return assemble(
        q,
        pool,
        layer,
        ragged,
        params,
        sinks,
        decode=lambda: work_items(queries[:Sd], pool, layer, ragged, params),
        tiles=lambda state: work_tiles(queries, pool, layer, ragged, params, state),
        spare=0 if tile_items else ragged.tile_queries,
    )


def scaled_queries(q: jax.Array, pool: KVPool, scale: float) -> jax.Array:
    """q f[T, N, H] → f32[T, K, G, H], times the scale."""
    T, N, H = q.shape
    K = pool.layout.num_kv_heads
    return q.astype(jnp.float32).reshape(T, K, N // K, H) * scale


def assemble(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    params: Params,
    sinks: jax.Array | None,
    *,
    decode: Callable[[], State],
    tiles: Callable[[State], State],
    spare: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """(o, lse) of all tokens from an implementation's two halves, shared prefixes worked here.

    Args:
        decode: → the state of the decode rows over their own items: acc f32[Sd, K, G, Hv], m and l f32[Sd, K, G].
        tiles: The state of all tokens, decode rows filled in → the same with the tiles' tokens.
        spare: Tokens by which the state that `tiles` sees is longer than T.
    """
    T, N, _ = q.shape
    K, Sd, Hv = pool.layout.num_kv_heads, ragged.decode_bucket, pool.layout.value_dim
    shape = (T + spare, K, N // K)
    state = no_state(shape, Hv)
    if Sd:
        part = with_groups(decode(), q, pool, layer, ragged, params)
        state = _over(state, part) if Sd < T + spare else part
    if ragged.tile_queries:
        state = tiles(state)
    acc, m, l = (x[:T] for x in state)
    out, lse = finalise(acc.reshape(T, N, Hv), m.reshape(T, N), l.reshape(T, N), sinks)
    live = jnp.arange(T) < ragged.query_start_loc[-1]
    out = jnp.where(live[:, None, None], out, 0)
    return out.astype(q.dtype), jnp.where(live[:, None], lse, -jnp.inf)


def with_groups(
    part: State, q: jax.Array, pool: KVPool, layer: int | jax.Array, ragged: RaggedBatch, params: Params
) -> State:
    """The state of the decode rows, their groups' shared chunks joined."""
    work = ragged.decode_list(params.window)
    if not work.group_rows.shape[0]:
        return part
    queries = scaled_queries(q[: ragged.decode_bucket], pool, params.scale)
    shared = _shared(queries, pool, layer, ragged, work, params)
    return merge(*(jnp.stack(pair, axis=1) for pair in zip(part, shared)))


def _over(state: State, part: State) -> State:
    """`state` with its first rows replaced."""
    acc, m, l = (x.at[: y.shape[0]].set(y) for x, y in zip(state, part))
    return acc, m, l


def finalise(
    acc: jax.Array, m: jax.Array, l: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Divides acc f32[T, N, Hv] by the sum of exponentials l f32[T, N] at maximum m, sinks joined."""
    seen = seen_any(m, l)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :], m.shape)
        top = jnp.maximum(m, sink)
        shrink = jnp.exp(m - top)
        acc = acc * shrink[..., None]
        l = jnp.where(seen, l * shrink, 0) + jnp.exp(sink - top)
        m = top
    has_sum = seen if sinks is None else jnp.ones_like(seen)
    out = jnp.where(seen[..., None], acc / jnp.where(has_sum, l, 1)[..., None], 0)
    return out, jnp.where(has_sum, m + jnp.log(jnp.where(has_sum, l, 1)), -jnp.inf)


def seen_any(m: jax.Array, l: jax.Array) -> jax.Array:
    """Whether a state has met a key. A NaN among scores is one; devices differ in whether their maximum keeps it."""
    return (m != NEG) | jnp.isnan(l)


def _gather(
    pool: KVPool,
    layer: int | jax.Array,
    tables: jax.Array,
    row: jax.Array,
    start: jax.Array,
    num_keys: int,
    values: bool = False,
) -> jax.Array:
    """Keys, or values, of num_keys positions from start on: [I, K, num_keys, H or Hv], float32 of a quantised pool.

    One gather reads (block, head) windows and lays them out by head, so that no transpose follows.

    Args:
        tables: i32[S, M].
        row: i32[I], which of the tables.
        start: i32[I], multiples of the smaller of B and num_keys.
        values: Which of them.
    """
    layout = pool.layout
    B, K = layout.block_size, layout.num_kv_heads
    first, H = (layout.value_offset, layout.value_dim) if values else (0, layout.head_dim)
    I, M = row.shape[0], tables.shape[1]
    unit = min(B, num_keys)
    pos = start[:, None] + jnp.arange(0, num_keys, unit, dtype=jnp.int32)[None, :]
    # Entry by entry: to take the row first would copy all of it, however wide the table is.
    ids = tables.at[row[:, None], jnp.minimum(pos // B, M - 1)].get(mode="promise_in_bounds")
    rows = read_rows(layout, layer, ids)
    shape = (I, K, num_keys // unit)

    def lanes(first: int, width: int) -> jax.Array:
        """So many lanes of each head, from `first` on side by side: [I, K, num_keys, width]."""
        index = [rows[:, None, :], (pos % B)[:, None, :]]
        index.append((first + jnp.arange(K, dtype=jnp.int32) * width)[None, :, None])
        windows = lax.gather(
            pool.data,
            # The barrier stands for an array: folded into the gather, the indices are computed per element.
            lax.optimization_barrier(jnp.stack([jnp.broadcast_to(x, shape) for x in index], axis=-1)),
            lax.GatherDimensionNumbers(
                offset_dims=(3, 4), collapsed_slice_dims=(0,), start_index_map=(0, 1, 2)
            ),
            slice_sizes=(1, unit, width),
            mode="promise_in_bounds",
        )
        return windows.reshape(I, K, num_keys, width)

    if not layout.quantised:
        return lanes(first, H)
    codes = lanes(first, H)
    scales = 2 * layout.kv_width + (K * SCALE_BYTES if values else 0)
    return dequantise(codes, lanes(scales, SCALE_BYTES) if layout.scaled else codes[..., :0], layout.dtype)


def _values(
    pool: KVPool, layer: int | jax.Array, tables: jax.Array, row: jax.Array, start: jax.Array, keys: jax.Array
) -> jax.Array:
    """Values of the positions whose keys [I, K, num_keys, H] are given: gathered, or the keys' own first lanes."""
    if pool.layout.latent_dim:
        return keys[..., : pool.layout.latent_dim]
    return _gather(pool, layer, tables, row, start, keys.shape[2], values=True)


def _zero_unseen(values: jax.Array, seen: jax.Array) -> jax.Array:
    """f32 values [I, K, t, H] with +0 where seen [I, t] is false, whatever stood there.

    Unwritten slots may hold NaN, and 0 * NaN is NaN. For f32 an AND on the bits vectorises where a
    select does not.
    """
    if values.dtype != jnp.float32:
        return jnp.where(seen[:, None, :, None], values, 0).astype(jnp.float32)
    keep = lax.optimization_barrier(-seen.astype(jnp.int32))[:, None, :, None]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.int32) & keep, jnp.float32)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)


def _cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _decode_items(
    queries: jax.Array, pool: KVPool, layer: int | jax.Array, ragged: RaggedBatch, params: Params
) -> State:
    """The state over each row's own items, without the chunks that its group works.

    Args:
        queries: f32[Sd, K, G, H], scaled.
    """
    Sd, K, G, H = queries.shape
    Hv = pool.layout.value_dim
    work, chunk = ragged.decode_list(params.window), ragged.chunk_tokens
    lens = ragged.seq_lens[:Sd]
    size = work.row.shape[0]
    most = max(1, ragged.sizes("xla", pool.layout, K * G)["iteration_bytes"] // (chunk * K * H * 4))
    # Few rows have few items: a wide group would gather mostly padding.
    group = min(size, 1 << (most.bit_length() - 1), max(2, 1 << (Sd - 1).bit_length()))
    # Items are in order of their rows, so that a group of them lies in as many neighbouring rows at most.
    span = min(group, Sd)

    def body(i: jax.Array, state: State) -> State:
        item = i * group + jnp.arange(group, dtype=jnp.int32)
        live, item = item < work.num_items, jnp.minimum(item, work.num_items - 1)
        row, start = work.row[item], work.start[item]
        pos = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        seen = (pos < lens[row][:, None]) & live[:, None]
        if params.window is not None:
            seen &= pos >= lens[row][:, None] - params.window
        k = _gather(pool, layer, ragged.block_tables, row, start, chunk).astype(jnp.float32)
        # Keys on the left: the product of a tall and a small matrix is 3 × the other way round on CPU.
        # The barrier keeps the transpose from being folded back into it.
        scores = lax.optimization_barrier(_dot("ikth,ikgh->iktg", k, queries[row]))
        scores = _cap(scores.transpose(0, 1, 3, 2), params.soft_cap)
        scores = jnp.where(seen[:, None, None, :], scores, NEG)
        m = scores.max(axis=-1)
        p = jnp.exp(scores - m[..., None])
        # Not before the keys are done with, which they would push out of the cache.
        p, start = lax.optimization_barrier((p, start))
        v = _zero_unseen(_values(pool, layer, ragged.block_tables, row, start, k), seen)
        part = (_dot("ikgt,ikth->ikgh", p, v), m, p.sum(axis=-1))
        first = jnp.minimum(row[0], Sd - span)
        whose = (row - first)[None, :] == jnp.arange(span, dtype=jnp.int32)[:, None]
        old = tuple(lax.dynamic_slice_in_dim(x, first, span) for x in state)
        new = _join(old, part, whose & live[None, :])
        return tuple(lax.dynamic_update_slice_in_dim(x, y, first, 0) for x, y in zip(state, new))

    return lax.fori_loop(0, (work.num_items + group - 1) // group, body, no_state((Sd, K, G), Hv))


def no_state(shape: tuple[int, ...], Hv: int) -> State:
    """The state of queries that have met no key; values have Hv lanes."""
    f32 = jnp.float32
    return jnp.zeros((*shape, Hv), f32), jnp.full(shape, NEG, f32), jnp.zeros(shape, f32)


def _join(state: State, parts: State, whose: jax.Array) -> State:
    """The states [R, …] of some rows with the parts [I, …] joined of which each is a row's: whose [R, I]."""
    (acc, m, l), (part_acc, part_m, part_l) = state, parts
    mine = whose[:, :, None, None]
    top = jnp.maximum(m, jnp.where(mine, part_m[None], NEG).max(axis=1))
    weight, shrink = jnp.exp(part_m[None] - top[:, None]), jnp.exp(m - top)
    # Selects and not products with 0: another row's part may be NaN.
    l = l * shrink + jnp.where(mine, weight * part_l[None], 0).sum(axis=1)
    more = jnp.where(mine[..., None], weight[..., None] * part_acc[None], 0).sum(axis=1)
    return acc * shrink[..., None] + more, top, l


def _shared(
    queries: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    work: DecodeList,
    params: Params,
) -> State:
    """Partial state of the decode rows over their groups' shared chunks; NEG where a row is in none.

    A group's keys are gathered once, several chunks at a time and the last ones chunk by chunk, and meet the queries of
    its rows in one product, which has room for the next power of two of rows. All of these keys are written, and every
    row of the group sees them all.
    """
    Sd, K, G, H = queries.shape
    chunk, Hv = ragged.chunk_tokens, pool.layout.value_dim
    tables, pieces = ragged.block_tables, ragged.sizes("xla", pool.layout, K * G)
    # Chunks of one product, no more than a table has; they begin where a block does.
    most_keys = min(pieces["shared_keys"], tables.shape[1] * ragged.block_size)
    at_once = max(1, most_keys // chunk) if chunk >= ragged.block_size else 1
    least = pieces["least_group_rows"]
    sizes = [size for size in (least << i for i in range(Sd.bit_length())) if size < Sd] + [Sd]

    def one_group(i: jax.Array, state: State) -> State:
        rows = work.group_rows[i]

        def of_size(size: int) -> State:
            packed = jnp.minimum(rows[:size], Sd - 1)
            q = queries[packed].swapaxes(0, 1).reshape(K, size * G, H)

            def some_keys(num_keys: int, j: jax.Array, part: State) -> State:
                """Those from chunk j on, all of them in the group's chunks."""
                acc, m, l = part
                start = (j * chunk)[None]
                k = _gather(pool, layer, tables, rows[:1], start, num_keys).astype(jnp.float32)
                scores = _cap(_dot("kmh,kth->kmt", q, k[0]), params.soft_cap)
                top = jnp.maximum(m, scores.max(axis=-1))
                shrink = jnp.exp(m - top)
                p = jnp.exp(scores - top[..., None])
                v = _values(pool, layer, tables, rows[:1], start, k)[0]
                out = _dot("kmt,kth->kmh", p, v.astype(jnp.float32))
                return acc * shrink[..., None] + out, top, l * shrink + p.sum(axis=-1)

            first, last = work.group_first[i], work.group_chunks[i]
            part = no_state((K, size * G), Hv)
            if at_once > 1:
                whole = (last - first) // at_once
                many = functools.partial(some_keys, at_once * chunk)
                part = lax.fori_loop(0, whole, lambda j, part: many(first + j * at_once, part), part)
                first = first + whole * at_once
            part = lax.fori_loop(first, last, functools.partial(some_keys, chunk), part)
            by_place = (x.reshape(K, size, G, *x.shape[2:]).swapaxes(0, 1) for x in part)
            return of_rows(rows, tuple(by_place))

        num_rows = (rows < Sd).sum(dtype=jnp.int32)
        which = sum((num_rows > size).astype(jnp.int32) for size in sizes[:-1])
        mine = lax.switch(which, [functools.partial(of_size, size) for size in sizes])
        return merge(*(jnp.stack(pair, axis=1) for pair in zip(state, mine)))

    return lax.fori_loop(0, work.num_groups, one_group, no_state((Sd, K, G), Hv))


def of_rows(rows: jax.Array, state: State) -> State:
    """The states of all Sd decode rows from those of a group's, which lie side by side.

    Args:
        rows: i32[Sd], a row of `DecodeList.group_rows`.
        state: Of as many as are in the group at least.
    """
    Sd = rows.shape[0]
    mine = rows[None, : state[1].shape[0]] == jnp.arange(Sd, dtype=jnp.int32)[:, None]
    # By reading: XLA:CPU writes row by row, 15 us each.
    place, has = jnp.argmax(mine, axis=1), mine.any(axis=1)
    empty = no_state((1, *state[1].shape[1:]), state[0].shape[-1])
    return tuple(
        jnp.where(has.reshape(Sd, *(1 for _ in x.shape[1:])), x[place], none) for x, none in zip(state, empty)
    )


def merge(acc: jax.Array, m: jax.Array, l: jax.Array) -> State:
    """One partial state from those along axis 1; a part with m = NEG counts nothing."""
    top = m.max(axis=1)
    weight = jnp.where(seen_any(m, l), jnp.exp(m - top[:, None]), 0)
    return (weight[..., None] * acc).sum(axis=1), top, (weight * l).sum(axis=1)


def _tiles(
    queries: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    params: Params,
    state: tuple[jax.Array, ...],
) -> State:
    """Works the tiles in token order and writes their partial states over `state`.

    A tile is written whole; what it writes behind its last query is overwritten by the next one or is
    padding. Hence the arrays of `state` are one tile longer than T.
    """
    K, G, H = queries.shape[1:]
    size, chunk = ragged.tile_queries, ragged.chunk_tokens
    padded = jnp.pad(queries, ((0, size), (0, 0), (0, 0), (0, 0)))

    def body(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row, at = ragged.tile_row[i], ragged.tile_start[i]
        end = ragged.query_start_loc[row + 1]
        first_pos = ragged.seq_lens[row] - end + at
        num_queries = jnp.minimum(end - at, size)
        q = lax.dynamic_slice(padded, (at, 0, 0, 0), (size, K, G, H)).transpose(1, 2, 0, 3)
        part = _one_tile(q, pool, layer, ragged.block_tables, row, first_pos, num_queries, chunk, params)
        return tuple(
            lax.dynamic_update_slice(s, x, (at, *(0 for _ in x.shape[1:]))) for s, x in zip(state, part)
        )

    return lax.fori_loop(0, ragged.num_tiles, body, state)


def _one_tile(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    tables: jax.Array,
    row: jax.Array,
    first_pos: jax.Array,
    num_queries: jax.Array,
    chunk: int,
    params: Params,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries f32[K, G, tile, H] at positions first_pos + i over one table: acc, m, l, tile axis first."""
    K, G, size, H = q.shape
    Hv = pool.layout.value_dim
    flat = q.reshape(K, G * size, H)
    index = jnp.arange(size, dtype=jnp.int32)
    qpos = first_pos + index
    stop = first_pos + num_queries
    behind = -1 if params.window is None else first_pos - params.window

    def body(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, m, l = state
        start = (i * chunk)[None]
        pos = start + jnp.arange(chunk, dtype=jnp.int32)
        k = _gather(pool, layer, tables, row[None], start, chunk).astype(jnp.float32)
        written = (pos < stop) & (pos > behind)
        v = _zero_unseen(_values(pool, layer, tables, row[None], start, k), written[None])[0]
        seen = (pos[None, :] <= qpos[:, None]) & (index < num_queries)[:, None]
        if params.window is not None:
            seen &= pos[None, :] > qpos[:, None] - params.window
        scores = _cap(_dot("kmh,kth->kmt", flat, k[0]), params.soft_cap).reshape(K, G, size, chunk)
        scores = jnp.where(seen[None, None], scores, NEG)
        top = jnp.maximum(m, scores.max(axis=-1))
        shrink = jnp.exp(m - top)
        p = jnp.exp(scores - top[..., None])
        out = _dot("kmt,kth->kmh", p.reshape(K, G * size, chunk), v).reshape(K, G, size, Hv)
        return acc * shrink[..., None] + out, top, l * shrink + p.sum(axis=-1)

    first, last = jnp.maximum(behind + 1, 0) // chunk, (stop + chunk - 1) // chunk
    acc, m, l = lax.fori_loop(first, last, body, no_state((K, G, size), Hv))
    return acc.transpose(2, 0, 1, 3), m.transpose(2, 0, 1), l.transpose(2, 0, 1)
