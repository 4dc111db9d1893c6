"""Ragged paged attention for TPUs (Pallas, Mosaic).

One kernel serves decode and prefill: a program is one work entry, a few queries of one sequence. It walks
the chunks of keys they can see; a chunk's blocks come by one hand-written DMA each into one of two buffers,
while the other is worked. The last chunk of an entry already fetches the first chunk of the next, so that
short rows leave no gap.

Decode entries hold one token: its heads are laid on a block diagonal, [N, K*H], and one contraction with the
pool's own [tokens, K*H] rows serves all heads. Prefill entries are a tile of tokens and contract head by
head. Head dims and head counts need no padding, since heads are slices of lanes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax.kernels import xla
from pagedjax.kernels.layout import LANES, KVPool, RaggedBatch, device_class, read_rows
from pagedjax.kernels.xla import NEG

_SUBLANES = 8
# VMEM that one prefill entry's queries, outputs and state may take: v4 has 16 MiB in all.
_TILE_BYTES = 6 << 20


@dataclass(frozen=True)
class _Shape:
    """What a compiled kernel is specialised on."""

    block_size: int
    chunk_blocks: int
    table_width: int
    kv_width: int
    head_dim: int
    group: int  # rows of one part that belong to one token
    heads_per_kv: int
    diagonal: bool
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def chunk(self) -> int:
        return self.chunk_blocks * self.block_size


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) of `paged_attention`.

    Args:
        interpret: True or `pltpu.InterpretParams()` runs it on the CPU, for tests.

    Raises:
        NotImplementedError: Not a TPU, float16, blocks under one tile of sublanes or over one chunk.
    """
    _check(pool, ragged, interpret)
    call = functools.partial(_entries, pool=pool, interpret=interpret)
    rows = read_rows(pool.layout, layer, ragged.block_tables)
    params = dict(scale=scale, window=window, soft_cap=soft_cap)
    return xla.assemble(
        q,
        pool,
        layer,
        ragged,
        xla.Params(scale, window, soft_cap),
        sinks,
        decode=lambda: _decode(q, rows, ragged, call, params),
        tiles=lambda state: _tiles(q, rows, ragged, call, params, state),
    )


def _check(pool: KVPool, ragged: RaggedBatch, interpret: Any) -> None:
    layout = pool.layout
    if not interpret and device_class() != "tpu":
        raise NotImplementedError(f"platform={device_class()}: must be a TPU; use 'xla' here")
    if layout.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"dtype={layout.dtype}: must be float32 or bfloat16 on TPU")
    if not _SUBLANES <= layout.block_size <= ragged.chunk_tokens:
        raise NotImplementedError(
            f"block_size={layout.block_size}: must be between {_SUBLANES} and chunk_tokens={ragged.chunk_tokens}"
        )


def _decode(
    q: jax.Array, rows: jax.Array, ragged: RaggedBatch, call: Any, params: dict[str, Any]
) -> tuple[jax.Array, ...]:
    """State of the decode rows, [Sd, K, G, …]: one entry a row, heads on a block diagonal."""
    Sd, (N, H) = ragged.decode_bucket, q.shape[1:]
    work = ragged.decode_list(params["window"])
    lens = ragged.seq_lens[:Sd]
    K = call.keywords["pool"].layout.num_kv_heads
    padded = -(-N // 16) * 16
    own = jnp.arange(N)[:, None] // (N // K) == jnp.arange(K)[None, :]
    diagonal = jnp.where(own[None, :, :, None], q[:Sd, :, None, :], 0).reshape(Sd, 1, N, K * H)
    diagonal = jnp.pad(diagonal, ((0, 0), (0, 0), (0, padded - N), (0, 0)))
    entry = (jnp.arange(Sd, dtype=jnp.int32), lens - 1, jnp.ones(Sd, jnp.int32), work.skip)
    out, lse = call(
        diagonal,
        rows,
        entry,
        ragged.num_decodes,
        ragged,
        group=padded,
        heads_per_kv=N // K,
        diagonal=True,
        **params,
    )
    live = jnp.arange(Sd) < ragged.num_decodes
    out = jnp.where(live[:, None, None], out[:, 0, :N], 0).reshape(Sd, K, N // K, H)
    lse = jnp.where(live[:, None], lse[:, 0, :N], NEG).reshape(Sd, K, N // K)
    return out, lse, jnp.where(lse != NEG, 1.0, 0.0)


def _tiles(
    q: jax.Array,
    rows: jax.Array,
    ragged: RaggedBatch,
    call: Any,
    params: dict[str, Any],
    state: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """`state` with the tokens of all tiles written over it: one entry a tile, heads one by one."""
    T, N, H = q.shape
    K = call.keywords["pool"].layout.num_kv_heads
    # q and output are double-buffered, the sums of exponentials take a lane vector a row.
    per_token = N * 4 * (5 * H + 4 * LANES)
    G, size = N // K, min(ragged.tile_queries, 1 << (max(1, _TILE_BYTES // per_token).bit_length() - 1))
    splits = -(-ragged.tile_queries // size)
    row = jnp.repeat(ragged.tile_row, splits)
    offset = jnp.tile(jnp.arange(splits, dtype=jnp.int32) * size, ragged.tile_row.shape[0])
    begin = jnp.repeat(ragged.tile_start, splits) + offset
    count = row.shape[0]
    end = ragged.query_start_loc[row + 1]
    first_pos = ragged.seq_lens[row] - end + begin
    # Tiles are whole multiples of sub-tiles but for the last of a row, whose tail has no query: 0 or less.
    num_queries = jnp.clip(end - begin, 0, jnp.minimum(size, ragged.tile_queries - offset))
    token = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    tiles = q[jnp.minimum(token, T - 1)].reshape(count, size, K, G, H)
    tiles = tiles.transpose(0, 2, 1, 3, 4).reshape(count, K, size * G, H)
    padded = -(-size * G // 16) * 16
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, padded - size * G), (0, 0)))
    window = params["window"]
    behind = jnp.zeros_like(first_pos) if window is None else jnp.maximum(first_pos - window + 1, 0)
    entry = (ragged.tile_row, first_pos, num_queries, behind // ragged.chunk_tokens)
    num_entries = ragged.num_tiles * splits
    sizes = dict(group=G, heads_per_kv=G, diagonal=False)
    out, lse = call(tiles, rows, entry, num_entries, ragged, **sizes, **params)
    live = jnp.arange(count) < num_entries
    kept = (jnp.arange(size)[None, :] < num_queries[:, None]) & live[:, None]
    at = jnp.where(kept, token, T).reshape(-1)

    def by_token(x: jax.Array) -> jax.Array:
        x = x[:, :, : size * G].reshape(count, K, size, G, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(count * size, K, G, *x.shape[4:])

    lse = by_token(lse)
    parts = (by_token(out), lse, jnp.where(lse != NEG, 1.0, 0.0))
    return tuple(s.at[at].set(x, mode="drop") for s, x in zip(state, parts))


def _entries(
    q: jax.Array,
    rows: jax.Array,
    entry: tuple[jax.Array, ...],
    num_entries: jax.Array,
    ragged: RaggedBatch,
    *,
    pool: KVPool,
    group: int,
    heads_per_kv: int,
    diagonal: bool,
    interpret: Any,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel over work entries.

    Args:
        q: f[W, parts, R, lanes]: one part of K*H lanes (diagonal) or K parts of H lanes.
        rows: i32[S, M] pool rows of every table.
        entry: (table, first query's position, number of queries, first chunk), each i32[W].

    Returns:
        (normalised f32[W, parts, R, H], lse f32[W, parts, R], NEG where nothing is seen); entries from
        num_entries on are undefined.
    """
    layout = pool.layout
    W, parts, R, lanes = q.shape
    H, chunk_blocks = layout.head_dim, ragged.chunk_tokens // layout.block_size
    table, first_pos, num_queries, first_chunk = entry
    stop = first_pos + num_queries
    last_chunk = (stop + ragged.chunk_tokens - 1) // ragged.chunk_tokens
    last_chunk = jnp.where(num_queries > 0, jnp.maximum(last_chunk, first_chunk), first_chunk)
    shape = _Shape(
        layout.block_size, chunk_blocks, rows.shape[1], layout.kv_width, H, group, heads_per_kv, diagonal,
        scale, window, soft_cap,
    )  # fmt: skip
    scalars = (table, first_pos, stop, first_chunk, last_chunk, num_entries[None], rows.reshape(-1))
    f32 = jnp.float32
    out, lse = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_entries,),
            in_specs=[
                pl.BlockSpec((None, parts, R, lanes), lambda w, *_: (w, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((None, parts, R, H), lambda w, *_: (w, 0, 0, 0)),
                pl.BlockSpec((None, parts, R, 128), lambda w, *_: (w, 0, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, chunk_blocks, layout.block_size, layout.width), pool.data.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((parts, R, 128), f32),
                pltpu.VMEM((parts, R, 128), f32),
                pltpu.VMEM((parts, R, lanes), f32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((W, parts, R, H), f32),
            jax.ShapeDtypeStruct((W, parts, R, 128), f32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            # `read_rows` maps every id into the pool, and the plan every chunk into its table.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_decode" if diagonal else "paged_prefill",
    )(*scalars, q.astype(pool.data.dtype), pool.data)
    return out, lse[..., 0]


def _kernel(
    table_ref: Any, first_pos_ref: Any, stop_ref: Any, first_ref: Any, last_ref: Any, count_ref: Any,
    rows_ref: Any, q_ref: Any, pool_ref: Any, o_ref: Any, lse_ref: Any, buffers: Any, sems: Any,
    slot_ref: Any, m_ref: Any, l_ref: Any, acc_ref: Any, *, shape: _Shape,
) -> None:  # fmt: skip
    w = pl.program_id(0)
    first, last = first_ref[w], last_ref[w]

    def copies(entry: Any, chunk: Any, slot: Any, act: str) -> None:
        """Starts or awaits the copies of one chunk's blocks; blocks behind the last token are left out."""
        left = stop_ref[entry] - chunk * shape.chunk
        num_blocks = jnp.minimum((left + shape.block_size - 1) // shape.block_size, shape.chunk_blocks)
        base = table_ref[entry] * shape.table_width + chunk * shape.chunk_blocks

        def one(j: Any, _: None) -> None:
            row = rows_ref[base + j]
            copy = pltpu.make_async_copy(pool_ref.at[row], buffers.at[slot, j], sems.at[slot])
            getattr(copy, act)()

        # Written out, the address arithmetic of neighbours overlaps; only a row's last chunk needs the loop.
        @pl.when(num_blocks == shape.chunk_blocks)
        def whole_chunk() -> None:
            for j in range(shape.chunk_blocks):
                one(j, None)

        @pl.when(num_blocks < shape.chunk_blocks)
        def part_of_a_chunk() -> None:
            lax.fori_loop(0, num_blocks, one, None)

    def start_next_entry(slot: jax.Array) -> None:
        after = jnp.minimum(w + 1, count_ref[0] - 1)

        @pl.when((w + 1 < count_ref[0]) & (first_ref[after] < last_ref[after]))
        def start_after() -> None:
            copies(after, first_ref[after], slot, "start")

    @pl.when(w == 0)
    def start_first_entry() -> None:
        slot_ref[0] = 0

        @pl.when(first < last)
        def start_first_chunk() -> None:
            copies(w, first, 0, "start")

    m_ref[...] = jnp.full_like(m_ref, NEG)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(first >= last)
    def pass_on() -> None:
        start_next_entry(slot_ref[0])

    def one_chunk(chunk: jax.Array, _: None) -> None:
        slot = slot_ref[0]

        @pl.when(chunk + 1 < last)
        def start_next_chunk() -> None:
            copies(w, chunk + 1, 1 - slot, "start")

        @pl.when(chunk + 1 >= last)
        def start_beyond() -> None:
            start_next_entry(1 - slot)

        copies(w, chunk, slot, "wait")
        buffer = buffers.at[slot]
        _clear_unseen_values(buffer, chunk, first_pos_ref[w], stop_ref[w], shape)
        _work_chunk(
            buffer[...].reshape(shape.chunk, -1),
            chunk,
            first_pos_ref[w],
            stop_ref[w],
            q_ref,
            m_ref,
            l_ref,
            acc_ref,
            shape,
        )
        slot_ref[0] = 1 - slot

    lax.fori_loop(first, last, one_chunk, None)
    _write(o_ref, lse_ref, m_ref, l_ref, acc_ref, shape)


def _clear_unseen_values(
    buffer: Any, chunk: jax.Array, first_pos: jax.Array, stop: jax.Array, shape: _Shape
) -> None:
    """Zeroes values in the buffer that no query sees: those slots may hold NaN, and 0 * NaN is NaN.

    Only the chunks at either end have such slots, so that the others do not pay for the mask.
    """
    start = chunk * shape.chunk
    unseen = start + shape.chunk > stop
    if shape.window is not None:
        unseen |= start <= first_pos - shape.window

    @pl.when(unseen)
    def clear() -> None:
        values = buffer[:, :, shape.kv_width : 2 * shape.kv_width]
        block = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        pos = start + block * shape.block_size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
        written = pos < stop
        if shape.window is not None:
            written &= pos > first_pos - shape.window
        buffer[:, :, shape.kv_width : 2 * shape.kv_width] = jnp.where(written, values, jnp.zeros_like(values))


def _work_chunk(
    kv: jax.Array, chunk: jax.Array, first_pos: jax.Array, stop: jax.Array, q_ref: Any, m_ref: Any,
    l_ref: Any, acc_ref: Any, shape: _Shape,
) -> None:  # fmt: skip
    """One online-softmax step of every part over kv [chunk, width]."""
    parts, R, lanes = q_ref.shape
    precision = lax.Precision.HIGHEST if kv.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32, precision=precision)
    start = chunk * shape.chunk
    pos = start + lax.broadcasted_iota(jnp.int32, (R, shape.chunk), 1)
    token = lax.broadcasted_iota(jnp.int32, (R, shape.chunk), 0) // shape.group
    seen = (pos <= first_pos + token) & (pos < stop) & (first_pos + token < stop)
    if shape.window is not None:
        seen &= pos > first_pos + token - shape.window
    for part in range(parts):
        at = part * lanes
        k = kv[:, at : at + lanes]
        v = kv[:, shape.kv_width + at : shape.kv_width + at + lanes]
        s = dot(q_ref[part], k, (((1,), (1,)), ((), ()))) * shape.scale
        if shape.soft_cap is not None:
            s = shape.soft_cap * jnp.tanh(s / shape.soft_cap)
        s = jnp.where(seen, s, NEG)
        old = m_ref[part][:, :1]
        top = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        shrink = jnp.exp(old - top)
        p = jnp.exp(s - top)
        l = shrink * l_ref[part][:, :1] + jnp.sum(p, axis=1, keepdims=True)
        m_ref[part] = jnp.broadcast_to(top, (R, 128))
        l_ref[part] = jnp.broadcast_to(l, (R, 128))
        acc_ref[part] = shrink * acc_ref[part] + dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))


def _write(o_ref: Any, lse_ref: Any, m_ref: Any, l_ref: Any, acc_ref: Any, shape: _Shape) -> None:
    """Normalised outputs and log-sum-exp; on the diagonal, each row keeps its own head's lanes."""
    parts, R, H = o_ref.shape
    for part in range(parts):
        m, l, acc = m_ref[part], l_ref[part], acc_ref[part]
        if shape.diagonal:
            heads = acc.shape[1] // H
            row = lax.broadcasted_iota(jnp.int32, (R, H), 0) // shape.heads_per_kv
            out = jnp.zeros((R, H), jnp.float32)
            for head in range(heads):
                out = jnp.where(row == head, acc[:, head * H : (head + 1) * H], out)
        else:
            out = acc
        # A NaN among scores is a key seen, whether or not the maximum keeps it.
        seen = (m != NEG) | (l != l)
        safe = jnp.where(seen, l, 1.0)
        o_ref[part] = jnp.where(seen[:, :1], out / safe[:, :1], 0.0)
        lse_ref[part] = jnp.where(seen, m + jnp.log(safe), NEG)
