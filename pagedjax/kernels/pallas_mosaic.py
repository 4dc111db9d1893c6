"""Ragged paged attention for Hopper GPUs (Pallas, Mosaic GPU): one TMA copy per block, wgmma, float32 state.

The programs are those of `gpu_programs.py`. The blocks of a key tile come by TMA at the head's lanes of the pool, one
tile ahead; scores, sums and the accumulator stay in registers, in float32, probabilities reach the second product
through shared memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pagedjax.kernels import gpu_programs, xla
from pagedjax.kernels.gpu_programs import load, store, tiled
from pagedjax.kernels.gpu_rows import KEYS, ROWS, GpuShape, attend_rows, check, widest_shape
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
    kernel = functools.partial(gpu_programs.run, products=_Wgmma(), interpret=interpret)
    return attend_rows(q, pool, layer, ragged, params, sinks, kernel)


@dataclass(frozen=True)
class _Wgmma:
    """Products of a warpgroup, both operands in shared memory."""

    tma: bool = True

    def layout(self, dtype: Any) -> Any:
        return plgpu.Layout.WGMMA

    def stages(self, shape: GpuShape) -> int:
        return 2

    def scratch(self, shape: GpuShape, dtype: Any) -> list[Any]:
        # One width of tiles for all: the operands of a product must be swizzled alike.
        H, lanes = shape.head_dim, shape.swizzle_lanes
        kv = tiled(lanes, (self.stages(shape), KEYS, H), dtype)
        queries = tiled(lanes, (ROWS, H), dtype)
        return [kv, queries, plgpu.RefUnion(plgpu.SMEM((ROWS, H), dtype), tiled(lanes, (ROWS, KEYS), dtype))]

    def staged(self, refs: Any) -> Any:
        return refs[1][0]

    def queries(self, refs: Any, shape: GpuShape) -> Any:
        store(refs[0], load(refs[1][0], plgpu.Layout.WGMMA))
        return refs[0].at[pl.ds(0, shape.queries)].T if shape.narrow else refs[0]

    def scores(self, queries: Any, keys: Any, shape: GpuShape) -> Any:
        if shape.narrow:
            return _product(keys, queries, (KEYS, shape.queries))
        return _product(queries, keys.T, (ROWS, KEYS))

    def weighted(self, acc: Any, p: Any, refs: Any, values: Any, shape: GpuShape) -> Any:
        probabilities = refs[1][1]
        if shape.narrow:
            probabilities = probabilities.at[pl.ds(0, shape.queries)].T
        store(probabilities, p.astype(values.dtype))
        plgpu.commit_smem()
        operands = (values.T, probabilities) if shape.narrow else (probabilities, values)
        return acc + _product(*operands, acc.shape)


def _product(a: Any, b: Any, dims: tuple[int, int]) -> Any:
    def work(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(work, plgpu.ACC(dims, jnp.float32))


def shared_memory_bytes(layout: KVLayout) -> int:
    """Shared memory that one program takes, barriers left out."""
    return gpu_programs.shared_bytes(widest_shape(layout), jnp.dtype(layout.dtype), _Wgmma())
