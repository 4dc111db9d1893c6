"""Ragged paged attention for Hopper GPUs (Pallas, Mosaic GPU): one TMA copy per block, wgmma, float32 state.

One kernel serves decode and prefill. A program is (work entry, KV head): up to 64 query rows of one sequence,
the G heads of a token side by side, over a range of keys (`gpu_rows.py` lays them out). The blocks of a
key tile come by TMA at the head's lanes of the pool, one tile ahead; scores, sums and the accumulator stay in
registers, in float32. Every program leaves (accumulator, maximum, sum); parts of a row merge afterwards.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax.kernels import xla
from pagedjax.kernels.gpu_rows import KEYS, ROWS, SUBLANES, GpuShape, attend_rows, check
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch, compute_capability, describe_device
from pagedjax.kernels.xla import NEG

_STAGES = 2


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
    if not interpret and compute_capability() != (9, 0):
        raise NotImplementedError(
            f"{describe_device()}: must be a Hopper GPU (9.0); use 'pallas_mma' or 'xla' here"
        )
    check(pool, ragged, q.shape[1] // pool.layout.num_kv_heads, "wgmma rounds float32")
    params = xla.Params(scale, window, soft_cap)
    entries = functools.partial(_entries, interpret=interpret)
    return attend_rows(q, pool, layer, ragged, params, sinks, entries)


def _entries(
    q: jax.Array,
    *,
    entry: tuple[jax.Array, ...],
    group: int,
    causal: bool,
    pool: KVPool,
    rows: jax.Array,
    params: xla.Params,
    interpret: Any,
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
    R = -(-q.shape[2] // SUBLANES) * SUBLANES
    q = jnp.pad(q.astype(pool.data.dtype), ((0, 0), (0, 0), (0, R - q.shape[2]), (0, 0)))
    table, which, pos, first, stop = entry
    if params.window is not None:
        first = jnp.maximum(first, (pos + 1 - params.window) // KEYS * KEYS)
    shape = GpuShape(
        layout.block_size, K, H, rows.shape[1], R, group, causal, params.scale, params.window, params.soft_cap
    )
    W = table.shape[0]
    f32 = jnp.float32
    state = jax.ShapeDtypeStruct((W, K, ROWS), f32)
    return plgpu.kernel(
        functools.partial(_kernel, shape=shape),
        out_type=[jax.ShapeDtypeStruct((W, K, R, H), f32), state, state],
        grid=(W, K),
        grid_names=("entry", "head"),
        scratch_types=_scratch(shape, pool.data.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(table, which, pos, first, stop, rows.reshape(-1), q, pool.data)


def _scratch(shape: GpuShape, dtype: Any) -> list[Any]:
    H, f32 = shape.head_dim, jnp.float32
    tiled = (plgpu.TilingTransform((SUBLANES, shape.swizzle // 2)), plgpu.SwizzleTransform(shape.swizzle))
    kv = plgpu.SMEM((_STAGES, KEYS, H), dtype, transforms=tiled)
    return [
        plgpu.SMEM((ROWS, H), dtype, transforms=tiled),
        # The keys and values are done with when the result is laid down.
        plgpu.RefUnion([kv, kv], plgpu.SMEM((ROWS, H), f32)),
        plgpu.SMEM((ROWS, KEYS), dtype, transforms=tiled),
        plgpu.SMEM((ROWS,), f32),
        plgpu.SMEM((ROWS,), f32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * (KEYS // shape.unit), num_barriers=_STAGES),
    ]


def shared_memory_bytes(layout: KVLayout) -> int:
    """Shared memory that one program takes, barriers left out."""
    shape = GpuShape(
        layout.block_size, layout.num_kv_heads, layout.head_dim, 1, SUBLANES, 1, False, 1.0, None, None
    )
    refs = [ref for ref in _scratch(shape, jnp.dtype(layout.dtype)) if not isinstance(ref, plgpu.Barrier)]
    return sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in refs)


def _kernel(
    table_ref: Any, which_ref: Any, pos_ref: Any, first_ref: Any, stop_ref: Any, rows_ref: Any, q_ref: Any,
    pool_ref: Any, o_ref: Any, m_ref: Any, l_ref: Any, q_smem: Any, union: Any, p_smem: Any, m_smem: Any,
    l_smem: Any, q_barrier: Any, kv_barriers: Any, *, shape: GpuShape,
) -> None:  # fmt: skip
    (k_smem, v_smem), o_smem = union
    w, head = lax.axis_index("entry"), lax.axis_index("head")
    H, K = shape.head_dim, shape.num_kv_heads
    pos, first, stop = pos_ref[w], first_ref[w], stop_ref[w]
    base = table_ref[w] * shape.table_width
    steps = lax.div(jnp.maximum(stop - first, 0) + (KEYS - 1), jnp.int32(KEYS))

    def fetch(step: Any, slot: Any) -> None:
        """Starts the copies of a key tile; behind the last token they bring its block again, from the cache."""
        for part in range(KEYS // shape.unit):
            key = jnp.minimum(first + step * KEYS + part * shape.unit, stop - 1)
            row = rows_ref[base + lax.div(key, jnp.int32(shape.block_size))]
            # A block larger than a tile is brought in parts; the first key of each is a multiple of the unit.
            within = lax.div(lax.rem(key, jnp.int32(shape.block_size)), jnp.int32(shape.unit))
            offset = within * shape.unit if shape.block_size > KEYS else 0
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
            plgpu.layout_cast(jnp.full((ROWS,), NEG, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), plgpu.Layout.WGMMA),
        )

        def one_tile(step: Any, state: Any) -> Any:
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(kv_barriers.at[slot])
            start = first + step * KEYS
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


def _clear_unseen_values(v_smem: Any, slot: Any, start: Any, pos: Any, stop: Any, shape: GpuShape) -> None:
    """Zeroes values that no row sees: those slots may hold NaN, and 0 * NaN is NaN.

    Only the tiles at either end have such slots, so that the others do not pay for the pass.
    """
    unseen = start + KEYS > stop
    if shape.window is not None:
        unseen |= start <= pos - shape.window

    @pl.when(unseen)
    def clear() -> None:
        tile = (KEYS, shape.head_dim)
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
    state: Any, shape: GpuShape,
) -> Any:  # fmt: skip
    """One online-softmax step over the key tile that begins at position `start`."""
    m, l, acc = state
    tile = (ROWS, KEYS)

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
