"""Ragged paged attention for Hopper GPUs (Pallas, Mosaic GPU): one TMA copy per block, wgmma, float32 state.

One kernel serves decode and prefill. A program is (work entry, KV head): up to 64 query rows of one sequence,
the G heads of a token side by side, over a range of keys. Decode entries are the plan's decode items, so a
long row is split over many programs; prefill entries are the plan's tiles, cut to 64 rows. The blocks of a
key tile come by TMA at the head's lanes of the pool, one tile ahead; scores, sums and the accumulator stay in
registers, in float32. Every program leaves (accumulator, maximum, sum); parts of a row merge afterwards.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax.kernels import xla
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch, device_class, read_rows
from pagedjax.kernels.xla import NEG

_ROWS = 64  # of one wgmma
_KEYS = 64  # of one key tile
_STAGES = 2
_SUBLANES = 8  # rows of one swizzled shared-memory tile


@dataclass(frozen=True)
class _Shape:
    """What a compiled kernel is specialised on."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    table_width: int
    rows: int  # query rows that are copied in and out, a multiple of 8
    group: int  # rows that belong to one token
    causal: bool  # more than one token: rows see different keys
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def unit(self) -> int:
        """Keys that one copy brings."""
        return min(self.block_size, _KEYS)

    @property
    def swizzle(self) -> int:
        """Bytes of the widest swizzle whose lanes divide the head."""
        return next(s for s in (128, 64, 32) if self.head_dim % (s // 2) == 0)


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
        interpret: `plgpu.InterpretGPUParams()` runs it on the CPU, for tests (jax 0.12 and later).

    Raises:
        NotImplementedError: Not a Hopper GPU, float32, blocks under 8 tokens or over one chunk, head dims that
            are no multiple of 16, more than 64 query heads per KV head.
    """
    K = pool.layout.num_kv_heads
    _check(pool, ragged, q.shape[1] // K, interpret)
    call = functools.partial(
        _entries,
        pool=pool,
        rows=read_rows(pool.layout, layer, ragged.block_tables),
        interpret=interpret,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    return xla.assemble(
        q,
        pool,
        layer,
        ragged,
        xla.Params(scale, window, soft_cap),
        sinks,
        decode=lambda: _decode(q, ragged, call, K, window),
        tiles=lambda state: _tiles(q, ragged, call, K, window, state),
    )


def _check(pool: KVPool, ragged: RaggedBatch, group: int, interpret: Any) -> None:
    layout = pool.layout
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"jax {jax.__version__}: must be 0.12 or later; use 'xla' here")
    if not interpret and device_class() != "hopper":
        raise NotImplementedError(f"platform={device_class()}: must be a Hopper GPU; use 'xla' here")
    if layout.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"dtype={layout.dtype}: must be bfloat16 or float16 (wgmma rounds float32)")
    if not _SUBLANES <= layout.block_size <= ragged.chunk_tokens:
        raise NotImplementedError(
            f"block_size={layout.block_size}: must be between {_SUBLANES} and chunk_tokens={ragged.chunk_tokens}"
        )
    if layout.head_dim % 16:
        raise NotImplementedError(f"head_dim={layout.head_dim}: must be a multiple of 16")
    if group > _ROWS:
        raise NotImplementedError(f"{group} query heads per KV head: must be at most {_ROWS}")


def _decode(
    q: jax.Array, ragged: RaggedBatch, call: Any, K: int, window: int | None
) -> tuple[jax.Array, ...]:
    """State of the decode rows, [Sd, K, G, …]: one entry per item of the plan, merged row by row."""
    Sd, (N, H), chunk = ragged.decode_bucket, q.shape[1:], ragged.chunk_tokens
    G = N // K
    work = ragged.decode_list(window)
    lens = ragged.seq_lens[:Sd]
    size = work.row.shape[0]
    live = jnp.arange(size) < work.num_items
    pos = lens[work.row] - 1
    stop = jnp.where(live, jnp.minimum(pos + 1, work.start + chunk), 0)
    parts = call(
        q[:Sd].reshape(Sd, K, G, H),
        entry=(work.row, work.row, pos, work.start, stop),
        group=G,
        causal=False,
    )
    acc, m, l = (x[:, :, :G] for x in parts)
    counts = jnp.where(jnp.arange(Sd) < ragged.num_decodes, (lens + chunk - 1) // chunk - work.skip, 0)
    nth = jnp.arange(size // Sd, dtype=jnp.int32)[None, :]
    item = jnp.minimum((jnp.cumsum(counts) - counts)[:, None] + nth, size - 1)
    has = (nth < counts[:, None])[..., None, None]
    # What programs without keys leave is not defined, not even finite.
    return xla._merge(
        jnp.where(has[..., None], acc[item], 0), jnp.where(has, m[item], NEG), jnp.where(has, l[item], 0)
    )


def _tiles(
    q: jax.Array, ragged: RaggedBatch, call: Any, K: int, window: int | None, state: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """`state` with the tokens of all tiles written over it: one entry per 64 rows of a tile."""
    T, N, H = q.shape
    G = N // K
    size = max(1, min(_ROWS // G, ragged.tile_queries))
    splits = -(-ragged.tile_queries // size)
    row = jnp.repeat(ragged.tile_row, splits)
    offset = jnp.tile(jnp.arange(splits, dtype=jnp.int32) * size, ragged.tile_row.shape[0])
    begin = jnp.repeat(ragged.tile_start, splits) + offset
    count = row.shape[0]
    end = ragged.query_start_loc[row + 1]
    first_pos = ragged.seq_lens[row] - end + begin
    num_queries = jnp.clip(end - begin, 0, jnp.minimum(size, ragged.tile_queries - offset))
    live = jnp.arange(count) < ragged.num_tiles * splits
    stop = jnp.where(live & (num_queries > 0), first_pos + num_queries, 0)
    token = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    tiles = q[jnp.minimum(token, T - 1)].reshape(count, size, K, G, H).swapaxes(1, 2)
    parts = call(
        tiles.reshape(count, K, size * G, H),
        entry=(row, jnp.arange(count, dtype=jnp.int32), first_pos, jnp.zeros_like(stop), stop),
        group=G,
        causal=True,
    )
    kept = (jnp.arange(size)[None, :] < num_queries[:, None]) & live[:, None]
    at = jnp.where(kept, token, T).reshape(-1)

    def by_token(x: jax.Array) -> jax.Array:
        x = x[:, :, : size * G].reshape(count, K, size, G, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(count * size, K, G, *x.shape[4:])

    return tuple(s.at[at].set(by_token(x), mode="drop") for s, x in zip(state, parts))


def _entries(
    q: jax.Array,
    *,
    entry: tuple[jax.Array, ...],
    group: int,
    causal: bool,
    pool: KVPool,
    rows: jax.Array,
    interpret: Any,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel over work entries.

    Args:
        q: f[Q, K, R, H]: query rows.
        entry: (table, which of the Q, position of the first row's token, first key, stop), each i32[W]; no
            key from stop on is seen, and an entry whose stop is 0 leaves its part of the result undefined.
        rows: i32[S, M] pool rows of every table.

    Returns:
        (f32[W, K, R', H], f32[W, K, 64], f32[W, K, 64]) accumulator, maximum, sum; R' is R in whole eights.
    """
    layout = pool.layout
    K, H = layout.num_kv_heads, layout.head_dim
    R = -(-q.shape[2] // _SUBLANES) * _SUBLANES
    q = jnp.pad(q.astype(pool.data.dtype), ((0, 0), (0, 0), (0, R - q.shape[2]), (0, 0)))
    table, which, pos, first, stop = entry
    if window is not None:
        first = jnp.maximum(first, (pos + 1 - window) // _KEYS * _KEYS)
    shape = _Shape(
        layout.block_size, K, H, rows.shape[1], R, group, causal, scale, window, soft_cap
    )  # fmt: skip
    W = table.shape[0]
    f32 = jnp.float32
    state = jax.ShapeDtypeStruct((W, K, _ROWS), f32)
    return plgpu.kernel(
        functools.partial(_kernel, shape=shape),
        out_type=[jax.ShapeDtypeStruct((W, K, R, H), f32), state, state],
        grid=(W, K),
        grid_names=("entry", "head"),
        scratch_types=_scratch(shape, pool.data.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(table, which, pos, first, stop, rows.reshape(-1), q, pool.data)


def _scratch(shape: _Shape, dtype: Any) -> list[Any]:
    H, f32 = shape.head_dim, jnp.float32
    tiled = (plgpu.TilingTransform((_SUBLANES, shape.swizzle // 2)), plgpu.SwizzleTransform(shape.swizzle))
    kv = plgpu.SMEM((_STAGES, _KEYS, H), dtype, transforms=tiled)
    return [
        plgpu.SMEM((_ROWS, H), dtype, transforms=tiled),
        # The keys and values are done with when the result is laid down.
        plgpu.RefUnion([kv, kv], plgpu.SMEM((_ROWS, H), f32)),
        plgpu.SMEM((_ROWS, _KEYS), dtype, transforms=tiled),
        plgpu.SMEM((_ROWS,), f32),
        plgpu.SMEM((_ROWS,), f32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * (_KEYS // shape.unit), num_barriers=_STAGES),
    ]


def shared_memory_bytes(layout: KVLayout) -> int:
    """Shared memory that one program takes, barriers left out."""
    shape = _Shape(
        layout.block_size, layout.num_kv_heads, layout.head_dim, 1, _SUBLANES, 1, False, 1.0, None, None
    )
    refs = [ref for ref in _scratch(shape, jnp.dtype(layout.dtype)) if not isinstance(ref, plgpu.Barrier)]
    return sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in refs)


def _kernel(
    table_ref: Any, which_ref: Any, pos_ref: Any, first_ref: Any, stop_ref: Any, rows_ref: Any, q_ref: Any,
    pool_ref: Any, o_ref: Any, m_ref: Any, l_ref: Any, q_smem: Any, union: Any, p_smem: Any, m_smem: Any,
    l_smem: Any, q_barrier: Any, kv_barriers: Any, *, shape: _Shape,
) -> None:  # fmt: skip
    (k_smem, v_smem), o_smem = union
    w, head = lax.axis_index("entry"), lax.axis_index("head")
    H, K = shape.head_dim, shape.num_kv_heads
    pos, first, stop = pos_ref[w], first_ref[w], stop_ref[w]
    base = table_ref[w] * shape.table_width
    steps = lax.div(jnp.maximum(stop - first, 0) + (_KEYS - 1), jnp.int32(_KEYS))

    def fetch(step: Any, slot: Any) -> None:
        """Starts the copies of a key tile; behind the last token they bring its block again, from the cache."""
        for part in range(_KEYS // shape.unit):
            key = jnp.minimum(first + step * _KEYS + part * shape.unit, stop - 1)
            row = rows_ref[base + lax.div(key, jnp.int32(shape.block_size))]
            # A block larger than a tile is brought in parts; the first key of each is a multiple of the unit.
            within = lax.div(lax.rem(key, jnp.int32(shape.block_size)), jnp.int32(shape.unit))
            offset = within * shape.unit if shape.block_size > _KEYS else 0
            for lanes, smem in ((head * H, k_smem), ((K + head) * H, v_smem)):
                plgpu.copy_gmem_to_smem(
                    pool_ref.at[row, pl.ds(offset, shape.unit), pl.ds(lanes, H)],
                    smem.at[slot, pl.ds(part * shape.unit, shape.unit)],
                    kv_barriers.at[slot],
                )

    @pl.when(steps > 0)
    def work() -> None:
        plgpu.copy_gmem_to_smem(q_ref.at[which_ref[w], head], q_smem.at[pl.ds(0, shape.rows)], q_barrier)
        for stage in range(_STAGES):
            pl.when(stage < steps)(functools.partial(fetch, stage, stage))
        plgpu.barrier_wait(q_barrier)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            plgpu.layout_cast(jnp.full((_ROWS,), NEG, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((_ROWS, H), jnp.float32), plgpu.Layout.WGMMA),
        )

        def one_tile(step: Any, state: Any) -> Any:
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(kv_barriers.at[slot])
            start = first + step * _KEYS
            _clear_unseen_values(v_smem, slot, start, pos, stop, shape)
            state = _work_tile(q_smem, k_smem, v_smem, p_smem, slot, start, pos, stop, state, shape)
            # A barrier of the warpgroup: no warp still reads what the next copy or tile writes over.
            plgpu.commit_smem()
            pl.when(step + _STAGES < steps)(lambda: fetch(step + _STAGES, slot))
            return state

        m, l, acc = lax.fori_loop(0, steps, one_tile, state)
        o_smem[...] = acc
        m_smem[...] = m
        l_smem[...] = l
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, shape.rows)], o_ref.at[w, head])
        plgpu.copy_smem_to_gmem(m_smem, m_ref.at[w, head])
        plgpu.copy_smem_to_gmem(l_smem, l_ref.at[w, head])
        plgpu.wait_smem_to_gmem(0)


def _clear_unseen_values(v_smem: Any, slot: Any, start: Any, pos: Any, stop: Any, shape: _Shape) -> None:
    """Zeroes values that no row sees: those slots may hold NaN, and 0 * NaN is NaN.

    Only the tiles at either end have such slots, so that the others do not pay for the pass.
    """
    unseen = start + _KEYS > stop
    if shape.window is not None:
        unseen |= start <= pos - shape.window

    @pl.when(unseen)
    def clear() -> None:
        tile = (_KEYS, shape.head_dim)
        key = start + plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=plgpu.Layout.WGMMA)
        written = key < stop
        if shape.window is not None:
            written &= key > pos - shape.window
        load: Any = plgpu.load
        values = load(v_smem.at[slot], layout=plgpu.Layout.WGMMA)
        v_smem[slot] = jnp.where(written, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _work_tile(
    q_smem: Any, k_smem: Any, v_smem: Any, p_smem: Any, slot: Any, start: Any, pos: Any, stop: Any,
    state: Any, shape: _Shape,
) -> Any:  # fmt: skip
    """One online-softmax step over the key tile that begins at position `start`."""
    m, l, acc = state
    tile = (_ROWS, _KEYS)

    def scores(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].transpose((1, 0)))
        return acc_ref[...]

    s = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32)) * shape.scale
    if shape.soft_cap is not None:
        s = shape.soft_cap * jnp.tanh(s / shape.soft_cap)
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, tile, layout=plgpu.Layout.WGMMA)
    key = start + iota(1)
    seen = key < stop
    if shape.causal:
        token = pos + lax.div(iota(0), jnp.int32(shape.group))
        seen &= key <= token
    else:
        token = pos
    if shape.window is not None:
        seen &= key > token - shape.window
    s = jnp.where(seen, s, NEG)
    top = jnp.maximum(m, s.max(axis=1))
    shrink = jnp.exp(m - top)
    p = jnp.exp(s - lax.broadcast_in_dim(top, tile, [0]))
    l = l * shrink + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    p_smem[...] = p.astype(p_smem.dtype)
    plgpu.commit_smem()

    def weighted(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, p_smem, v_smem.at[slot])
        return acc_ref[...]

    return top, l, acc + pl.run_scoped(weighted, plgpu.ACC(acc.shape, jnp.float32))
