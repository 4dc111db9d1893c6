"""What one program of the GPU kernels does: an entry's queries come in, its key tiles are worked, outputs go out.

A program is (work entry, KV head): up to 64 rows of queries of one sequence, a token's G heads side by side, over a
range of keys. Decode rows with few heads a KV head are worked the other way round (`GpuShape.narrow`): keys, and lanes
of values, are the 64 rows of the tensor core's tile, and the few queries its columns. Queries are read from the flat
array of all tokens, token by token, and normalised outputs of prefill entries are written straight to such an array;
parts of decode rows leave (accumulator, maximum, sum) in float32. `pallas_mosaic` and `pallas_mma` give the products,
and how blocks come.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pagedjax.kernels import xla
from pagedjax.kernels.gpu_rows import KEYS, ROWS, Entry, GpuShape
from pagedjax.kernels.layout import KVPool
from pagedjax.kernels.xla import NEG

plgpu: Any = mosaic_gpu  # jax before 0.12 lacks much of it, and is refused by `gpu_rows.check`


class Products(Protocol):
    """The products of a kernel, and the shared memory that they need."""

    @property
    def tma(self) -> bool:
        """Whether blocks come by TMA, with barriers; by cp.async otherwise."""

    def layout(self, dtype: Any) -> Any:
        """Of accumulators, scores and values in registers."""

    def stages(self, shape: GpuShape) -> int:
        """Key tiles side by side."""

    def scratch(self, shape: GpuShape, dtype: Any) -> list[Any]:
        """[`stages` key tiles, what else: it holds queries and probabilities]."""

    def staged(self, refs: Any) -> Any:
        """Where queries are laid, [64, H] untiled."""

    def queries(self, refs: Any, shape: GpuShape) -> Any:
        """The operand out of what was staged."""

    def scores(self, queries: Any, keys: Any, shape: GpuShape) -> Any:
        """f32, unscaled: [64 queries, 64 keys], or [64 keys, a few queries] where `shape` is narrow."""

    def weighted(self, acc: Any, p: Any, refs: Any, values: Any, shape: GpuShape) -> Any:
        """`acc` plus probabilities p times a tile's values: [64 queries, H], or [H, a few queries]."""


def run(
    q: jax.Array,
    entry: Entry,
    tokens: int | None,
    sinks: jax.Array | None,
    *,
    pool: KVPool,
    rows: jax.Array,
    params: xla.Params,
    products: Products,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel over work entries.

    Args:
        q: f[T, K, G, H], the step's queries, in the pool's dtype.
        entry: No key from an entry's stop on is seen, and one whose stop is 0 leaves its results undefined.
        tokens: Most of an entry; None are parts of decode rows, of one token.
        sinks: f32[K, 64] the first key of each row's softmax.
        rows: i32[S, M] pool rows of every table.

    Returns:
        (accumulator f32[W, K, G, H] of decode parts, or else normalised outputs f[T, K, G, H] where entries have
        tokens; maximum, sum, each f32[W, K, at least the entry's tokens times G]).
    """
    layout, dtype = pool.layout, pool.data.dtype
    (_, K, G, H), W = q.shape, entry.table.shape[0]
    if params.window is not None:
        start = (entry.pos + 1 - params.window) // KEYS * KEYS
        entry = dataclasses.replace(entry, first=jnp.maximum(entry.first, start))
    shape = GpuShape(
        layout.block_size, K, H, rows.shape[1], G, tokens or 1, tokens is None,
        params.scale, params.window, params.soft_cap, sinks is not None,
    )  # fmt: skip
    f32 = jnp.float32
    out = jax.ShapeDtypeStruct((W, K, G, H), f32) if shape.parts else jax.ShapeDtypeStruct(q.shape, dtype)
    state = jax.ShapeDtypeStruct((W, K, shape.queries), f32)
    return plgpu.kernel(
        functools.partial(_program, shape=shape, products=products),
        out_type=[out, state, state],
        grid=(W, K),
        grid_names=("entry", "head"),
        scratch_types=_scratch(shape, dtype, products),
        compiler_params=dataclasses.replace(
            # Layouts stand in the program: their inference knows neither `mma` nor layouts of a token's slab.
            plgpu.CompilerParams(approx_math=True),
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret or None,
    )(*entry.arrays, rows.reshape(-1), *([] if sinks is None else [sinks]), q, pool.data)


def _scratch(shape: GpuShape, dtype: Any, products: Products) -> list[Any]:
    kv, *others = products.scratch(shape, dtype)
    # Keys and values are done with when the result is laid down.
    dims = (shape.head_dim, shape.queries) if shape.narrow else (ROWS, shape.head_dim)
    result = plgpu.SMEM(dims, jnp.float32 if shape.parts else dtype)
    barriers = []
    if products.tma:
        arrivals = 2 * (KEYS // shape.unit)
        barriers = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=products.stages(shape))]
    return [plgpu.RefUnion([kv, kv], result), others, barriers]


def shared_bytes(shape: GpuShape, dtype: Any, products: Products) -> int:
    """Shared memory of one program, barriers and what Mosaic aligns left out."""

    def size(ref: Any) -> int:
        if isinstance(ref, (list, tuple)):
            return sum(size(x) for x in ref)
        if isinstance(ref, plgpu.RefUnion):
            return max(size(x) for x in ref.refs)
        return math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize

    union, others, _ = _scratch(shape, dtype, products)
    return size(union) + size(others)


@plgpu.inline_mgpu() if hasattr(plgpu, "inline_mgpu") else lambda f: f
def _warpgroup_barrier(ctx: Any) -> None:
    # `commit_smem` would also fence for TMA, which no GPU before Hopper has.
    from jax.experimental.mosaic.gpu import utils

    utils.warpgroup_barrier()


def sync(products: Products) -> None:
    """No warp goes on before all have come here, with what they wrote to shared memory."""
    (plgpu.commit_smem if products.tma else _warpgroup_barrier)()


def load(ref: Any, layout: Any) -> Any:
    """Into registers, by whatever copies there are."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: Any) -> None:
    """From registers, by whatever copies there are."""
    plgpu.store(ref, value, optimized=False)


def tiled(lanes: int, dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in swizzled tiles of 8 rows."""
    transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(2 * lanes))
    return plgpu.SMEM(dims, dtype, transforms=transforms)


def _slab(shape: GpuShape, widest: int = 8) -> Any:
    """The layout of a token's [G, H]: as many of the 128 threads as divide it, the others doing the same again."""
    warps, power = math.gcd(4, shape.group), shape.head_dim & -shape.head_dim
    lanes = min(32, power)
    vector = min(widest, power // lanes)
    again = plgpu.Replicated
    return plgpu.Layout.TILED(
        plgpu.Tiling(((warps, lanes * vector), (vector,))),
        {4: (-3,), 2: (again(2), -3), 1: (again(4),)}[warps],
        (-2,) if lanes == 32 else (again(32 // lanes), -2),
        -1,
    )


def _program(*refs: Any, shape: GpuShape, products: Products) -> None:
    *arrays, q_ref, pool_ref, o_ref, m_ref, l_ref, union, others, barriers = refs
    (k_smem, v_smem), o_smem = union
    entry, rows_ref, sinks_ref = arrays[:6], arrays[6], arrays[7] if shape.has_sinks else None
    w, head = lax.axis_index("entry"), lax.axis_index("head")
    H, K, G, stages = shape.head_dim, shape.num_kv_heads, shape.group, k_smem.shape[0]
    table, token, count, pos, first, stop = (ref[w] for ref in entry)
    base = table * shape.table_width
    steps = lax.div(jnp.maximum(stop - first, 0) + (KEYS - 1), jnp.int32(KEYS))
    layout, slab = products.layout(q_ref.dtype), _slab(shape)

    def fetch(step: Any, slot: Any) -> None:
        """Starts the copies of a key tile; behind the last token they bring its block again, from the cache."""
        for part in range(KEYS // shape.unit):
            key = jnp.minimum(first + step * KEYS + part * shape.unit, stop - 1)
            row = rows_ref[base + lax.div(key, jnp.int32(shape.block_size))]
            # A block larger than a tile is brought in parts; the first key of each is a multiple of the unit.
            within = lax.div(lax.rem(key, jnp.int32(shape.block_size)), jnp.int32(shape.unit))
            offset = within * shape.unit if shape.block_size > KEYS else 0
            for lanes, smem in ((head * H, k_smem), ((K + head) * H, v_smem)):
                source = pool_ref.at[row, pl.ds(offset, shape.unit), pl.ds(lanes, H)]
                target = smem.at[slot, pl.ds(part * shape.unit, shape.unit)]
                if products.tma:
                    plgpu.copy_gmem_to_smem(source, target, barriers[0].at[slot])
                else:
                    plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def start_tile(step: Any, slot: Any) -> None:
        # By cp.async, tiles behind the last are brought too, of its last block: what is counted is the copies.
        if products.tma:
            pl.when(step < steps)(functools.partial(fetch, step, slot))
        else:
            fetch(step, slot)

    def wait(slot: Any) -> None:
        """Awaits a key tile; before Hopper by the number of copies that may still be on their way."""
        if products.tma:
            plgpu.barrier_wait(barriers[0].at[slot])
        else:
            plgpu.wait_gmem_to_smem((stages - 1) * 2 * (KEYS // shape.unit))
            sync(products)

    @pl.when(steps > 0)
    def work() -> None:
        for stage in range(stages):
            start_tile(stage, stage)
        staged = products.staged(others)
        for t in range(shape.tokens):
            # Behind the entry's last token stand other tokens' queries, whose results go nowhere.
            at = jnp.minimum(token + t, q_ref.shape[0] - 1)
            store(staged.at[pl.ds(t * G, G)], load(q_ref.at[at, head], slab))
        sync(products)
        queries = products.queries(others, shape)
        sync(products)  # before probabilities are written where queries were
        state = _no_keys(None if sinks_ref is None else sinks_ref.at[head], layout, shape)

        def one_tile(step: Any, state: Any) -> Any:
            slot = lax.rem(step, jnp.int32(stages))
            wait(slot)
            start = first + step * KEYS
            keys, values = k_smem.at[slot], v_smem.at[slot]
            _clear_unseen_values(values, start, pos, stop, shape, products)
            state = _work_tile(queries, keys, values, others, start, pos, stop, state, shape, products)
            # No warp still reads what the next copy or tile writes over.
            sync(products)
            start_tile(step + stages, slot)
            return state

        m, l, acc = lax.fori_loop(0, steps, one_tile, state)
        if not products.tma:
            plgpu.wait_gmem_to_smem(0)
            sync(products)
        if shape.narrow:
            l = l.sum(axis=0)
        if not shape.parts:
            acc = acc * lax.broadcast_in_dim(1.0 / l, acc.shape, [0])
        store(o_smem, acc.astype(o_smem.dtype))
        sync(products)

        def lay_down(t: Any, _: None) -> None:
            if shape.narrow:
                result = load(o_smem.at[:, pl.ds(0, G)].T, _slab(shape, 1))
            else:
                result = load(o_smem.at[pl.ds(t * G, G)], slab)
            store(o_ref.at[w, head] if shape.parts else o_ref.at[token + t, head], result)

        lax.fori_loop(0, count, lay_down, None)
        store(m_ref.at[w, head], m)
        store(l_ref.at[w, head], l)


def _no_keys(sinks: Any, layout: Any, shape: GpuShape) -> tuple[Any, Any, Any]:
    """The state (maximum, sum, accumulator) before the first key tile: nothing, or a sink for each query.

    Where keys are the rows, their sums are kept per row of the tile, and added up at last: across warps.
    """
    H, n = shape.head_dim, shape.queries

    def full(dims: tuple[int, ...], value: float, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(dims, value, jnp.float32), layout)

    if shape.narrow:
        by_query = layout.reduce(0)
        return full((n,), NEG, by_query), full((KEYS, n), 0.0, layout), full((H, n), 0.0, layout)
    by_query = layout.reduce(1)
    m = full((n,), NEG, by_query) if sinks is None else load(sinks, by_query)
    return m, full((n,), float(shape.has_sinks), by_query), full((n, H), 0.0, layout)


def _clear_unseen_values(
    values: Any, start: Any, pos: Any, stop: Any, shape: GpuShape, products: Products
) -> None:
    """Zeroes values that no row sees: those slots may hold NaN, and 0 * NaN is NaN.

    Only the tiles at either end have such slots, so that the others do not pay for the pass.
    """
    unseen = start + KEYS > stop
    if shape.window is not None:
        unseen |= start <= pos - shape.window

    @pl.when(unseen)
    def clear() -> None:
        tile, layout = (KEYS, shape.head_dim), products.layout(values.dtype)
        key = start + plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=layout)
        written = key < stop
        if shape.window is not None:
            written &= key > pos - shape.window
        kept = load(values, layout)
        store(values, jnp.where(written, kept, jnp.zeros_like(kept)))
        sync(products)


def _work_tile(
    queries: Any, keys: Any, values: Any, others: Any, start: Any, pos: Any, stop: Any, state: Any,
    shape: GpuShape, products: Products,
) -> Any:  # fmt: skip
    """One online-softmax step over the key tile that begins at position `start`."""
    m, l, acc = state
    layout = products.layout(values.dtype)
    of_query, of_key = (1, 0) if shape.narrow else (0, 1)
    tile = (KEYS, shape.queries) if shape.narrow else (ROWS, KEYS)
    s = products.scores(queries, keys, shape) * shape.scale
    if shape.soft_cap is not None:
        s = shape.soft_cap * jnp.tanh(s / shape.soft_cap)
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, tile, layout=layout)
    key = start + iota(of_key)
    seen = key < stop
    token = pos
    if not shape.parts:
        token = pos + lax.div(iota(of_query), jnp.int32(shape.group))
        seen &= key <= token
    if shape.window is not None:
        seen &= key > token - shape.window
    s = jnp.where(seen, s, NEG)
    top = jnp.maximum(m, s.max(axis=of_key))
    shrink = jnp.exp(m - top)
    p = jnp.exp(s - lax.broadcast_in_dim(top, tile, [of_query]))
    if shape.narrow:
        l = l * lax.broadcast_in_dim(shrink, tile, [1]) + p
    else:
        l = l * shrink + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [of_query])
    return top, l, products.weighted(acc, p, others, values, shape)
