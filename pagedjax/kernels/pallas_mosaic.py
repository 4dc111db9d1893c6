"""Ragged paged attention for Hopper GPUs (Pallas, Mosaic GPU): one TMA copy per block, wgmma, float32 state.

The programs are those of `gpu_programs.py`. The blocks of a key tile come by TMA at the head's lanes of the pool, one
tile ahead; scores, sums and the accumulator stay in registers, in float32, probabilities reach the second product
through shared memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pagedjax.kernels import gpu_programs, xla
from pagedjax.kernels.gpu_programs import WIDTHS, GpuTiling, slab, tiled
from pagedjax.kernels.gpu_rows import (
    KEYS,
    GpuShape,
    attend_rows,
    check,
    device_programs,
    widest_shapes,
    worked_in,
)
from pagedjax.kernels.gpu_tile import load, store
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch, compute_capability, describe_device

plgpu: Any = mosaic_gpu


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
    programs: int | None = None,
    in_registers: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) of `paged_attention`.

    Args:
        programs: That work side by side; None are the tuning table's, for every multiprocessor.
        in_registers: Probabilities of prefill go from product to product in registers, not through shared memory;
            neither judged on a GPU nor interpreted (jax 0.12's interpreter takes no operand in registers).
        interpret: `plgpu.InterpretGPUParams()` runs it on the CPU, for tests (jax 0.12 and later).

    Raises:
        NotImplementedError: Not a Hopper GPU, float32 (of a quantised pool's queries), blocks under 8 tokens or over
            one chunk, head dims that are no multiple of 16, more than 64 query heads per KV head.
    """
    if not interpret and compute_capability() != (9, 0):
        raise NotImplementedError(
            f"{describe_device()}: must be a Hopper GPU (9.0); use 'pallas_mma' or 'xla' here"
        )
    check(pool, ragged, q.shape[1] // pool.layout.num_kv_heads)
    dtype = worked_in(pool.layout, q.dtype, "wgmma rounds float32")
    params = xla.Params(scale, window, soft_cap)
    tiling = GpuTiling(**ragged.sizes("pallas_mosaic", pool.layout, q.shape[1]))
    products = _Wgmma(tiling, in_registers)
    kernel = functools.partial(gpu_programs.run, products=products, interpret=interpret)
    programs = programs or device_programs(tiling.programs)
    return attend_rows(q, pool, layer, ragged, params, sinks, kernel, programs, dtype)


def attend_in_registers(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """`attend` with probabilities in registers, to be named as an implementation until a device has judged it."""
    return attend(*args, **kwargs, in_registers=True)


@dataclass(frozen=True)
class _Wgmma:
    """Products of a warpgroup, both operands in shared memory.

    Attributes:
        tiling: Sizes of the pieces.
        in_registers: But for probabilities, where they are the left operand.
        given_stages: Key tiles side by side; None takes the tiling's, as far as they fit.
    """

    tiling: GpuTiling
    in_registers: bool = False
    given_stages: int | None = None
    tma: bool = True
    narrow_floats: bool = True
    shared_memory: int = 227 << 10

    def layout(self, dtype: Any) -> Any:
        return plgpu.Layout.WGMMA

    def stages(self, shape: GpuShape) -> tuple[int, int]:
        stages = self.given_stages or self.tiling.fitting_stages(shape, self, self.shared_memory)
        # And the next tile's keys, which are multiplied already.
        return stages + self.ahead(shape), stages

    def with_stages(self, stages: int) -> _Wgmma:
        return replace(self, given_stages=stages)

    def ahead(self, shape: GpuShape) -> bool:
        # Codes become numbers in one place, which the product before may still read.
        return not (shape.parts or shape.exact or shape.codes)

    def tile_lanes(self, keys: int, head_dim: int, widths: tuple[int, ...] = WIDTHS) -> int:
        return next(lanes for lanes in widths if head_dim % lanes == 0)

    def probabilities(self, shape: GpuShape, dtype: Any) -> Any:
        # The operands of a product must be swizzled alike.
        lanes = self.tile_lanes(KEYS, shape.head_dim)
        return tiled(lanes, (2, shape.queries, KEYS), dtype)

    def operands(self, shape: GpuShape, dtype: Any) -> list[Any]:
        lanes = self.tile_lanes(KEYS, shape.head_dim)
        return [tiled(lanes, (shape.queries, shape.head_dim), dtype)]

    def queries(self, staged: Any, operands: Any, shape: GpuShape) -> Any:
        (queries,) = operands
        layout = slab(shape.queries, shape.head_dim) if shape.narrow else plgpu.Layout.WGMMA
        store(queries, load(staged, layout))
        return queries

    def scores(self, queries: Any, keys: Any, shape: GpuShape) -> Any:
        operands = (keys, queries.T) if shape.narrow else (queries, keys.T)
        return _product(*operands)

    def scores_beside(self, queries: Any, keys: Any, work: Any) -> tuple[Any, Any]:
        def multiply(acc_ref: Any) -> tuple[Any, Any]:
            plgpu.wgmma(acc_ref, queries, keys.T)
            return work(), acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))

    def put(self, ref: Any, p: Any, shape: GpuShape) -> Any:
        if self.in_registers and not shape.narrow:
            return p
        store(ref.T if shape.narrow else ref, p)
        return ref

    def weighted(self, acc: Any, p: Any, values: Any, shape: GpuShape) -> Any:
        operands = (values.T, p.T) if shape.narrow else (p, values)
        return acc + _product(*operands)


def _product(a: Any, b: Any) -> Any:
    def work(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(work, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def shared_memory_bytes(layout: KVLayout, tiling: GpuTiling) -> int:
    """Shared memory that one program takes at most."""
    return max(
        gpu_programs.shared_bytes(shape, jnp.float16, _Wgmma(tiling)) for shape in widest_shapes(layout)
    )
