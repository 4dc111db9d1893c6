"""Ragged paged attention for NVIDIA GPUs from Ampere on (Pallas, Mosaic GPU): warp-level `mma`, float32 state.

The programs and entries of the Hopper kernel (`gpu_rows.py`), with the tensor-core instruction that every GPU of
compute capability 8.0 and later has. Blocks come by cp.async before Hopper and by TMA from it on, a key tile ahead
where shared memory has room for two. Queries stay in registers as the left operand; probabilities reach theirs
through shared memory, where the queries were.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pagedjax.kernels import xla
from pagedjax.kernels.gpu_rows import KEYS, ROWS, SUBLANES, GpuShape, attend_rows, check
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch, compute_capability, describe_device
from pagedjax.kernels.xla import NEG

plgpu: Any = mosaic_gpu  # jax before 0.12 has no `mma`, and refuses below
# Of one program, as CUDA's table of compute capabilities has it: 163 and 227 KiB on the large chips, 99 on the others.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_SHARED_KIB_ELSEWHERE = 99


@dataclasses.dataclass(frozen=True)
class _GpuChip:
    """What of a GPU decides how the kernel is made: how blocks come, and how many key tiles lie side by side."""

    tma: bool
    shared_bytes: int


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
        interpret: `plgpu.InterpretGPUParams()` runs the TMA form on the CPU, for tests; the interpreter needs a rule
            for `mma`, which the tests give it.

    Raises:
        NotImplementedError: No GPU of compute capability 8.0 to 10.x, float32, blocks under 8 tokens or over one
            chunk, head dims that are no multiple of 16, more than 64 query heads per KV head; before Hopper, blocks
            whose rows of a head cannot be dealt out to four warps.
    """
    chip = _chip(interpret)
    check(pool, ragged, q.shape[1] // pool.layout.num_kv_heads, "mma rounds float32")
    params = xla.Params(scale, window, soft_cap)
    entries = functools.partial(_entries, chip=chip, interpret=interpret)
    return attend_rows(q, pool, layer, ragged, params, sinks, entries)


def _chip(interpret: Any) -> _GpuChip:
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"jax {jax.__version__}: must be 0.12 or later; use 'xla' here")
    if interpret:
        return _GpuChip(True, _SHARED_KIB[9, 0] << 10)
    capability = compute_capability()
    # 12.x: Mosaic lowers, and ptxas is then asked for sm_120 where the code is for sm_120a.
    if capability is None or not 8 <= capability[0] < 11:
        raise NotImplementedError(
            f"{describe_device()}: must be an NVIDIA GPU of compute capability 8.0 to 10.x; use 'xla' here"
        )
    return _GpuChip(capability[0] >= 9, _SHARED_KIB.get(capability, _SHARED_KIB_ELSEWHERE) << 10)


def _entries(
    q: jax.Array,
    *,
    entry: tuple[jax.Array, ...],
    group: int,
    causal: bool,
    pool: KVPool,
    rows: jax.Array,
    params: xla.Params,
    chip: _GpuChip,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel over work entries: arguments and results as of the Hopper kernel's `_entries`."""
    layout = pool.layout
    K, H = layout.num_kv_heads, layout.head_dim
    lanes = _tile_lanes(min(layout.block_size, KEYS), H, chip)
    R = -(-q.shape[2] // SUBLANES) * SUBLANES
    while not _copies(R, H, lanes, chip):
        R += SUBLANES
    # The left operand is loaded whole: what stands behind its last row must be there, and is never written out.
    q = jnp.pad(q.astype(pool.data.dtype), ((0, 0), (0, 0), (0, R - q.shape[2]), (0, 0)))
    table, which, pos, first, stop = entry
    if params.window is not None:
        first = jnp.maximum(first, (pos + 1 - params.window) // KEYS * KEYS)
    shape = GpuShape(
        layout.block_size, K, H, rows.shape[1], R, group, causal, params.scale, params.window, params.soft_cap
    )
    W = table.shape[0]
    state = jax.ShapeDtypeStruct((W, K, ROWS), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, shape=shape, chip=chip),
        out_type=[jax.ShapeDtypeStruct((W, K, R, H), jnp.float32), state, state],
        grid=(W, K),
        grid_names=("entry", "head"),
        scratch_types=_scratch(shape, pool.data.dtype, chip),
        compiler_params=dataclasses.replace(
            # The inference of layouts knows no `mma`; every layout stands in the program.
            plgpu.CompilerParams(approx_math=True),
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret or None,
    )(table, which, pos, first, stop, rows.reshape(-1), q, pool.data)


def _copies(rows: int, head_dim: int, lanes: int, chip: _GpuChip) -> bool:
    """Whether a copy of so many rows goes in tiles of (8, lanes): cp.async deals them out to four warps."""
    down, across = rows // SUBLANES, head_dim // lanes
    return chip.tma or down % 4 == 0 or (down % 2 == 0 and across % 2 == 0) or across % 4 == 0


def _tile_lanes(keys: int, head_dim: int, chip: _GpuChip) -> int:
    """Lanes of a shared-memory tile: the widest that divide the head and by which `keys` rows can be copied.

    Raises:
        NotImplementedError: There are none.
    """
    for lanes in (64, 32, 16):
        if head_dim % lanes == 0 and _copies(keys, head_dim, lanes, chip):
            return lanes
    raise NotImplementedError(
        f"head_dim={head_dim}, blocks of {keys}: cp.async copies 16 lanes of 8 rows a warp; blocks must have at "
        "least 32 tokens, or use 'xla'"
    )


def _stages(shape: GpuShape, chip: _GpuChip) -> int:
    """Key tiles side by side: two, or one where shared memory has no room for more."""
    return 2 if _shared_bytes(shape, 2) <= chip.shared_bytes else 1


def _shared_bytes(shape: GpuShape, stages: int) -> int:
    """Shared memory of one program: keys and values, and queries or probabilities, 16 bits each."""
    H = shape.head_dim
    tiles = max(2 * stages * KEYS * H * 2, ROWS * H * 4)
    return tiles + max(ROWS * H, ROWS * KEYS) * 2 + 1024


def shared_memory_bytes(layout: KVLayout, capability: tuple[int, int]) -> int:
    """Shared memory that one program takes on such a GPU."""
    shape = GpuShape(
        layout.block_size, layout.num_kv_heads, layout.head_dim, 1, SUBLANES, 1, False, 1.0, None, None
    )
    chip = _GpuChip(capability[0] >= 9, _SHARED_KIB.get(capability, _SHARED_KIB_ELSEWHERE) << 10)
    return _shared_bytes(shape, _stages(shape, chip))


def _scratch(shape: GpuShape, dtype: Any, chip: _GpuChip) -> list[Any]:
    H, stages = shape.head_dim, _stages(shape, chip)
    of_head = _tile_lanes(shape.unit, H, chip)

    def tiled(lanes: int, *dims: int) -> Any:
        transforms = (plgpu.TilingTransform((SUBLANES, lanes)), plgpu.SwizzleTransform(2 * lanes))
        return plgpu.SMEM(dims, dtype, transforms=transforms)

    kv = tiled(of_head, stages, KEYS, H)
    scratch = [
        # The keys and values are done with when the result is laid down, queries when probabilities come.
        plgpu.RefUnion([kv, kv], plgpu.SMEM((ROWS, H), jnp.float32)),
        plgpu.RefUnion(tiled(of_head, ROWS, H), tiled(64, ROWS, KEYS)),
    ]
    if chip.tma:
        arrivals = 2 * (KEYS // shape.unit)
        scratch += [plgpu.Barrier(), plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)]
    return scratch


@plgpu.inline_mgpu()
def _warpgroup_barrier(ctx: Any) -> None:
    # `commit_smem` would also fence for TMA, which no GPU before Hopper has.
    from jax.experimental.mosaic.gpu import utils

    utils.warpgroup_barrier()


def _kernel(
    table_ref: Any, which_ref: Any, pos_ref: Any, first_ref: Any, stop_ref: Any, rows_ref: Any, q_ref: Any,
    pool_ref: Any, o_ref: Any, m_ref: Any, l_ref: Any, kv_union: Any, q_union: Any, *barriers: Any,
    shape: GpuShape, chip: _GpuChip,
) -> None:  # fmt: skip
    (k_smem, v_smem), o_smem = kv_union
    q_smem, p_smem = q_union
    w, head = lax.axis_index("entry"), lax.axis_index("head")
    H, K, stages = shape.head_dim, shape.num_kv_heads, k_smem.shape[0]
    dtype = q_ref.dtype
    pos, first, stop = pos_ref[w], first_ref[w], stop_ref[w]
    base = table_ref[w] * shape.table_width
    steps = lax.div(jnp.maximum(stop - first, 0) + (KEYS - 1), jnp.int32(KEYS))
    sync = plgpu.commit_smem if chip.tma else _warpgroup_barrier

    def copy(source: Any, target: Any, barrier: Any) -> None:
        if chip.tma:
            plgpu.copy_gmem_to_smem(source, target, barrier)
        else:
            plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def fetch(step: Any, slot: Any) -> None:
        """Starts the copies of a key tile; behind the last token they bring its block again, from the cache."""
        for part in range(KEYS // shape.unit):
            key = jnp.minimum(first + step * KEYS + part * shape.unit, stop - 1)
            row = rows_ref[base + lax.div(key, jnp.int32(shape.block_size))]
            within = lax.div(lax.rem(key, jnp.int32(shape.block_size)), jnp.int32(shape.unit))
            offset = within * shape.unit if shape.block_size > KEYS else 0
            for lanes, smem in ((head * H, k_smem), ((K + head) * H, v_smem)):
                copy(
                    pool_ref.at[row, pl.ds(offset, shape.unit), pl.ds(lanes, H)],
                    smem.at[slot, pl.ds(part * shape.unit, shape.unit)],
                    barriers[1].at[slot] if chip.tma else None,
                )

    def wait(slot: Any, newer: int) -> None:
        """Awaits a key tile; before Hopper by the number of copies that may still be on their way."""
        if chip.tma:
            plgpu.barrier_wait(barriers[1].at[slot])
        else:
            plgpu.wait_gmem_to_smem(newer * 2 * (KEYS // shape.unit))
            sync()

    @pl.when(steps > 0)
    def work() -> None:
        copy(q_ref.at[which_ref[w], head], q_smem.at[pl.ds(0, shape.rows)], barriers[0] if chip.tma else None)
        if chip.tma:
            plgpu.barrier_wait(barriers[0])
        else:
            plgpu.wait_gmem_to_smem(0)
            sync()
        queries = _load(q_smem, plgpu.Layout.MMA_LHS(dtype))
        sync()  # before probabilities are written where queries were
        for stage in range(stages):
            # Tiles behind the last are brought too, of its last block: what is counted is the copies.
            if chip.tma:
                pl.when(stage < steps)(functools.partial(fetch, stage, stage))
            else:
                fetch(stage, stage)
        by_row = plgpu.Layout.MMA_ACC(dtype).reduce(1)
        state = (
            plgpu.layout_cast(jnp.full((ROWS,), NEG, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), plgpu.Layout.MMA_ACC(dtype)),
        )

        def one_tile(step: Any, state: Any) -> Any:
            slot = lax.rem(step, jnp.int32(stages))
            wait(slot, stages - 1)
            start = first + step * KEYS
            _clear_unseen_values(v_smem, slot, start, pos, stop, shape, dtype, sync)
            state = _work_tile(queries, k_smem, v_smem, p_smem, slot, start, pos, stop, state, shape, sync)
            # No warp still reads what the next copy or tile writes over.
            sync()
            if chip.tma:
                pl.when(step + stages < steps)(lambda: fetch(step + stages, slot))
            else:
                fetch(step + stages, slot)
            return state

        m, l, acc = lax.fori_loop(0, steps, one_tile, state)
        if not chip.tma:
            plgpu.wait_gmem_to_smem(0)
        sync()
        plgpu.store(o_smem, acc, optimized=False)
        sync()
        vector = math.gcd(4, shape.rows * H // 128)
        strided = plgpu.Layout.WG_STRIDED((shape.rows, H), vec_size=vector)
        result = plgpu.load(o_smem.at[pl.ds(0, shape.rows)], layout=strided, optimized=False)
        for ref, value in ((o_ref, result), (m_ref, m), (l_ref, l)):
            plgpu.store(ref.at[w, head], value, optimized=False)


def _load(ref: Any, layout: Any) -> Any:
    load: Any = plgpu.load
    return load(ref, layout=layout, optimized=False)


def _clear_unseen_values(
    v_smem: Any, slot: Any, start: Any, pos: Any, stop: Any, shape: GpuShape, dtype: Any, sync: Any
) -> None:
    """Zeroes values that no row sees: those slots may hold NaN, and 0 * NaN is NaN."""
    unseen = start + KEYS > stop
    if shape.window is not None:
        unseen |= start <= pos - shape.window

    @pl.when(unseen)
    def clear() -> None:
        tile, layout = (KEYS, shape.head_dim), plgpu.Layout.MMA_ACC(dtype)
        key = start + plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=layout)
        written = key < stop
        if shape.window is not None:
            written &= key > pos - shape.window
        values = _load(v_smem.at[slot], layout)
        plgpu.store(v_smem.at[slot], jnp.where(written, values, jnp.zeros_like(values)), optimized=False)
        sync()


def _work_tile(
    queries: Any, k_smem: Any, v_smem: Any, p_smem: Any, slot: Any, start: Any, pos: Any, stop: Any,
    state: Any, shape: GpuShape, sync: Any,
) -> Any:  # fmt: skip
    """One online-softmax step over the key tile that begins at position `start`."""
    m, l, acc = state
    dtype = queries.dtype
    tile, layout = (ROWS, KEYS), plgpu.Layout.MMA_ACC(dtype)
    none = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), layout)
    s = plgpu.mma(none, queries, _load(k_smem.at[slot].T, plgpu.Layout.MMA_RHS(dtype))) * shape.scale
    if shape.soft_cap is not None:
        s = shape.soft_cap * jnp.tanh(s / shape.soft_cap)
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, tile, layout=layout)
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
    p_smem[...] = p.astype(dtype)
    sync()
    probabilities = _load(p_smem, plgpu.Layout.MMA_LHS(dtype))
    values = _load(v_smem.at[slot], plgpu.Layout.MMA_RHS(dtype))
    return top, l, plgpu.mma(acc, probabilities, values)
