"""What a GPU program does with a tile of keys and values: which of them are seen, a step of the softmax, codes widened.

Rows and columns of the tile are those of `GpuShape.narrow`; `gpu_programs` says when each is done.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pagedjax.kernels.gpu_rows import KEYS, GpuShape
from pagedjax.kernels.xla import NEG

if TYPE_CHECKING:
    from pagedjax.kernels.gpu_programs import Products

plgpu: Any = mosaic_gpu


def warpgroup_barrier() -> None:
    """All four warps have come here."""

    # `commit_smem` would also fence for TMA, which no GPU before Hopper has.
    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        from jax.experimental.mosaic.gpu import utils

        utils.warpgroup_barrier()

    barrier()


def sync(products: Products) -> None:
    """No warp goes on before all have come here, with what they wrote to shared memory."""
    (plgpu.commit_smem if products.tma else warpgroup_barrier)()


def load(ref: Any, layout: Any) -> Any:
    """Into registers, by whatever copies there are."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: Any) -> None:
    """From registers, by whatever copies there are."""
    plgpu.store(ref, value, optimized=False)


def widened(codes: Any, kind: str, products: Products, dtype: Any) -> Any:
    """What codes' bytes i8[…] stand for without their scale, f[…] of a dtype in which all are whole.

    Without an instruction for it the bits of an fp8 are put where float32 has them. Its exponent 0 means 2 ** -6 times
    eighths, which are read as 2 ** -7 times one and eighths first.
    """
    if kind == "int8":
        # jax's own way to bfloat16 takes an instruction that came with Hopper.
        return codes.astype(dtype) if products.tma else codes.astype(jnp.float32).astype(dtype)
    if products.narrow_floats:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32).astype(dtype)
    bits = codes.astype(jnp.int32)
    size = lax.bitcast_convert_type(((bits & 127) << 20) + (120 << 23), jnp.float32)
    size = jnp.where((bits & 120) == 0, (size - 2.0**-7) * 2, size)
    size = jnp.where((bits & 127) == 127, jnp.nan, size)
    return jnp.where(bits < 0, -size, size).astype(dtype)


def no_keys(sinks: Any, layout: Any, shape: GpuShape) -> tuple[Any, Any, Any]:
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


def softmax(
    s: Any, m: Any, l: Any, start: Any, pos: Any, stop: Any, layout: Any, shape: GpuShape
) -> tuple[Any, Any, Any, Any]:
    """(maximum, sum, what the state shrinks by, probabilities) after the scores s of keys from `start` on."""
    of_query, of_key = (1, 0) if shape.narrow else (0, 1)
    tile, s = s.shape, s * shape.scale
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
    l = l * lax.broadcast_in_dim(shrink, tile, [1]) + p if shape.narrow else l * shrink + p.sum(axis=1)
    return top, l, shrink, p


def in_units(weights: Any, shape: GpuShape) -> tuple[Any, Any]:
    """(weights by their largest, which for each query): float16 has no room for every scale.

    What lies below 1e-30 is left there, so that what stands in sums is not made infinite by it.
    """
    of_query, of_key = (1, 0) if shape.narrow else (0, 1)
    unit = jnp.maximum(weights.max(axis=of_key), 1e-30)
    return weights / lax.broadcast_in_dim(unit, weights.shape, [of_query]), unit


def seen_by_any(start: Any, pos: Any, stop: Any, shape: GpuShape, layout: Any, tile: tuple[int, int]) -> Any:
    """Which keys, the tile's rows, some query of the entry may see."""
    key = start + plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=layout)
    seen = key < stop
    return seen if shape.window is None else seen & (key > pos - shape.window)


def clear_unseen_values(
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
        written = seen_by_any(start, pos, stop, shape, layout, tile)
        kept = load(values, layout)
        store(values, jnp.where(written, kept, jnp.zeros_like(kept)))
        sync(products)
