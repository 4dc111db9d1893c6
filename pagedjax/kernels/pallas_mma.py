"""Ragged paged attention for NVIDIA GPUs from Ampere on (Pallas, Mosaic GPU): warp-level `mma`, float32 state.

The programs and entries of the Hopper kernel (`gpu_rows.py`), with the tensor-core instruction that every GPU of
compute capability 8.0 and later has. Blocks come by cp.async before Hopper and by TMA from it on, a key tile ahead
where shared memory has room for two. Queries stay in registers as the left operand; probabilities reach theirs
through shared memory, where the queries were.
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
from pagedjax.kernels.gpu_programs import CODE_WIDTHS, WIDTHS, GpuTiling, tiled
from pagedjax.kernels.gpu_rows import (
    KEYS,
    ROWS,
    SUBLANES,
    GpuShape,
    attend_rows,
    check,
    device_programs,
    widest_shapes,
    worked_in,
)
from pagedjax.kernels.gpu_tile import load, store
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch, compute_capability, describe_device

plgpu: Any = mosaic_gpu  # jax before 0.12 has no `mma`, and refuses below
# Of one program, as CUDA's table of compute capabilities has it: 163 and 227 KiB on the large chips, 99 on the others.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_SHARED_KIB_ELSEWHERE = 99


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) of `paged_attention`.

    Args:
        programs: That work side by side; None are the tuning table's, for every multiprocessor.
        interpret: `plgpu.InterpretGPUParams()` runs the TMA form on the CPU, for tests; the interpreter needs a rule
            for `mma`, which the tests give it.

    Raises:
        NotImplementedError: No GPU of compute capability 8.0 to 10.x, float32 (of a quantised pool's queries), blocks
            under 8 tokens or over one chunk, head dims that are no multiple of 16, more than 64 query heads per KV
            head; before Hopper, blocks whose rows of a head cannot be dealt out to four warps.
    """
    chip = _chip(interpret)
    check(pool, ragged, q.shape[1] // pool.layout.num_kv_heads)
    dtype = worked_in(pool.layout, q.dtype, "mma rounds float32")
    params = xla.Params(scale, window, soft_cap)
    tiling = GpuTiling(**ragged.sizes("pallas_mma", pool.layout, q.shape[1]))
    products = _Mma(*chip, tiling)
    products.copies_of(pool.layout)  # or refuses
    kernel = functools.partial(gpu_programs.run, products=products, interpret=interpret)
    programs = programs or device_programs(tiling.programs)
    return attend_rows(q, pool, layer, ragged, params, sinks, kernel, programs, dtype)


def _chip(interpret: Any) -> tuple[bool, int, bool]:
    """(whether it has TMA, shared memory of a program, whether it widens fp8): what decides how the kernel is made."""
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"jax {jax.__version__}: must be 0.12 or later; use 'xla' here")
    if interpret:
        return _of_capability((9, 0))
    capability = compute_capability()
    # 12.x: Mosaic lowers, and ptxas is then asked for sm_120 where the code is for sm_120a.
    if capability is None or not 8 <= capability[0] < 11:
        raise NotImplementedError(
            f"{describe_device()}: must be an NVIDIA GPU of compute capability 8.0 to 10.x; use 'xla' here"
        )
    return _of_capability(capability)


def _of_capability(capability: tuple[int, int]) -> tuple[bool, int, bool]:
    shared = _SHARED_KIB.get(capability, _SHARED_KIB_ELSEWHERE) << 10
    return capability[0] >= 9, shared, capability >= (8, 9)


@dataclass(frozen=True)
class _Mma:
    """Products of the warps, operands in registers: each warp has 16 rows of the left one and all of the right one.

    Attributes:
        tma: The chip has it.
        shared_memory: Bytes that a program may take.
        narrow_floats: The chip has instructions that widen fp8.
        tiling: Sizes of the pieces.
        given_stages: Key tiles side by side; None takes the tiling's, as far as they fit.
    """

    tma: bool
    shared_memory: int
    narrow_floats: bool
    tiling: GpuTiling
    given_stages: int | None = None

    def layout(self, dtype: Any) -> Any:
        return plgpu.Layout.MMA_ACC(dtype)

    def stages(self, shape: GpuShape) -> tuple[int, int]:
        stages = self.given_stages or self.tiling.fitting_stages(shape, self, self.shared_memory)
        return stages, stages

    def with_stages(self, stages: int) -> _Mma:
        return replace(self, given_stages=stages)

    def ahead(self, shape: GpuShape) -> bool:
        return False

    def scores_beside(self, queries: Any, keys: Any, work: Any) -> tuple[Any, Any]:
        raise NotImplementedError("mma is synchronous")

    def probabilities(self, shape: GpuShape, dtype: Any) -> Any:
        if shape.narrow:
            return plgpu.SMEM((2, KEYS, shape.queries), dtype)
        return tiled(self.tiling.value_keys, (2, ROWS, KEYS), dtype)

    def operands(self, shape: GpuShape, dtype: Any) -> list[Any]:
        return []

    def tile_lanes(self, keys: int, head_dim: int, widths: tuple[int, ...] = WIDTHS) -> int:
        """Lanes of a shared-memory tile: the widest that divide the head and by which `keys` rows can be copied.

        Raises:
            NotImplementedError: There are none.
        """
        for lanes in widths:
            if head_dim % lanes == 0 and self._copies(keys, head_dim, lanes):
                return lanes
        codes = f", and of eight bits {widths[-1]} lanes" if head_dim % widths[-1] else ""
        raise NotImplementedError(
            f"head_dim={head_dim}, blocks of {keys}: cp.async copies 16 lanes of 8 rows a warp{codes}; blocks must "
            "have at least 32 tokens, or use 'xla'"
        )

    def copies_of(self, layout: KVLayout) -> None:
        """Raises NotImplementedError where a pool's blocks cannot be copied."""
        if not (self.tma and layout.quantised):
            widths = CODE_WIDTHS if layout.quantised else WIDTHS
            self.tile_lanes(min(layout.block_size, KEYS), layout.head_dim, widths)

    def _copies(self, rows: int, head_dim: int, lanes: int) -> bool:
        """Whether a copy of so many rows goes in tiles of (8, lanes): cp.async deals them out to four warps."""
        down, across = rows // SUBLANES, head_dim // lanes
        return self.tma or down % 4 == 0 or (down % 2 == 0 and across % 2 == 0) or across % 4 == 0

    def queries(self, staged: Any, operands: Any, shape: GpuShape) -> Any:
        if shape.narrow:
            return load(staged.T, plgpu.Layout.MMA_RHS(staged.dtype))
        layout = plgpu.Layout.MMA_LHS(staged.dtype)
        return load(staged, layout)

    def scores(self, queries: Any, keys: Any, shape: GpuShape) -> Any:
        dtype = keys.dtype
        dims = (KEYS, shape.queries) if shape.narrow else (ROWS, KEYS)
        none = plgpu.layout_cast(jnp.zeros(dims, jnp.float32), self.layout(dtype))
        if shape.narrow:
            return plgpu.mma(none, load(keys, plgpu.Layout.MMA_LHS(dtype)), queries)
        return plgpu.mma(none, queries, load(keys.T, plgpu.Layout.MMA_RHS(dtype)))

    def put(self, ref: Any, p: Any, shape: GpuShape) -> Any:
        store(ref, p)
        return ref

    def weighted(self, acc: Any, p: Any, values: Any, shape: GpuShape) -> Any:
        left, right = plgpu.Layout.MMA_LHS(values.dtype), plgpu.Layout.MMA_RHS(values.dtype)
        if shape.narrow:
            return plgpu.mma(acc, load(values.T, left), load(p, right))
        # Every warp has all of a product's values in registers, beside the queries and the accumulator.
        for first in range(0, KEYS, self.tiling.value_keys):
            keys = pl.ds(first, self.tiling.value_keys)
            acc = plgpu.mma(acc, load(p.at[:, keys], left), load(values.at[keys], right))
        return acc


def shared_memory_bytes(layout: KVLayout, capability: tuple[int, int], tiling: GpuTiling) -> int:
    """Shared memory that one program takes at most on such a GPU."""
    products = _Mma(*_of_capability(capability), tiling)
    return max(gpu_programs.shared_bytes(shape, jnp.float16, products) for shape in widest_shapes(layout))
