"""Attention at the shapes it is proved on: tables of geometries, and one layer's step to compile for a target.

`aot` compiles any program for a device that is not there; here stands what of attention it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kernels import aot, pallas_mma, pallas_mosaic
from pagedjax.kernels.api import write_and_attend
from pagedjax.kernels.gpu_programs import GpuTiling
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch
from pagedjax.kernels.plan import plan_ragged
from pagedjax.kernels.tuning import PACKAGED, Tuning, heads_of


@dataclass(frozen=True)
class Geometry:
    """One shape of an attention layer: heads, head dim, block size, dtype, and lanes of latent values or 0."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    latent_dim: int = 0

    def __str__(self) -> str:
        heads = f"{self.num_heads}q/{self.num_kv_heads}kv/{self.head_dim}"
        if self.latent_dim:
            heads = f"{self.num_heads}q/latent {self.latent_dim} of {self.head_dim}"
        return f"{heads} {self.dtype}, blocks of {self.block_size}"

    def layout(self, pool_bytes: int = 1 << 30) -> KVLayout:
        """A pool of one layer of about this size: well over VMEM, into which small ones move and hide copies."""
        one = KVLayout(1, 1, self.block_size, self.num_kv_heads, self.head_dim, self.dtype, self.latent_dim)
        return replace(one, num_blocks=max(1, pool_bytes // one.num_bytes))


# SmolLM2-135M, Llama-3-8B, SmolLM2-360M, many queries a head, MQA at 256, MHA, a head that fits no lane.
HEADS = ((9, 3, 64), (32, 8, 128), (15, 5, 64), (16, 2, 64), (8, 1, 256), (12, 12, 64), (32, 8, 80))


def geometries(target: str) -> list[Geometry]:
    """The table a target is proved on: 84 shapes for v5e, 56 for H100, 8 for L4 and B200, 28 for the others."""
    blocks: Sequence[int] = (16, 64)
    dtypes = ("bfloat16", "float32")
    if target == "v5e":
        blocks = (8, 16, 32, 64, 128, 256)
    if aot.TARGETS[target].platform == "cuda":
        blocks, dtypes = (16, 64), ("bfloat16", "float16")
    if target == "h100":
        blocks = (8, 16, 64, 128)
    if target in ("l4", "b200"):
        return [Geometry(*heads, size, dtype) for dtype in dtypes for heads in HEADS[:2] for size in blocks]
    # cp.async cannot deal 16 rows of 80 lanes out to four warps; `pallas_mma` refuses them there.
    least = 32 if aot.TARGETS[target].kernel == "pallas_mma" else 1
    return [
        Geometry(*heads, max(size, least) if heads[2] % 32 else size, dtype)
        for dtype in dtypes
        for heads in HEADS
        for size in blocks
    ]


def compile_attention(target: str, geometry: Geometry, **params: Any) -> aot.Compiled:
    """Compile one layer's write and attention with the kernel made for the target; see `attention_step`.

    GPUs of another compute capability than this process has compiled for are compiled for in a process of their own.
    """
    if not aot.of_this_process(target):
        call = functools.partial(compile_attention, target, geometry, **params)
        return aot.worker(aot.GPUS[target].compute_capability).submit(call).result()
    layout = geometry.layout()
    kernel = aot.TARGETS[target].kernel if target in aot.TARGETS else ""
    fn, args = attention_step(layout, geometry.num_heads, implementation=kernel, **params)
    compiled = aot.compile(str(geometry), target, fn, args, donate=(0,), pool_bytes=layout.num_bytes)
    if target not in aot.GPUS:
        return compiled
    tiling = gpu_tiling(target, geometry, params.get("tuning", PACKAGED))
    if kernel == "pallas_mma":
        shared = pallas_mma.shared_memory_bytes(layout, aot.GPUS[target].compute_capability, tiling)
    else:
        shared = pallas_mosaic.shared_memory_bytes(layout, tiling)
    return replace(compiled, kernel_bytes=shared)


def gpu_tiling(target: str, geometry: Geometry, tuning: Tuning = PACKAGED) -> GpuTiling:
    """What the tuning table gives the kernel of a GPU."""
    g = geometry
    heads = heads_of(g.num_heads, g.num_kv_heads, g.head_dim)
    call = {"device": aot.GPUS[target].kind, "heads": heads, "dtype": g.dtype, "block_size": g.block_size}
    return GpuTiling(**tuning.sizes(aot.TARGETS[target].kernel, **call))


def attention_step(
    layout: KVLayout,
    num_heads: int,
    *,
    implementation: str,
    num_decodes: int = 8,
    prefill_tokens: int = 0,
    context_tokens: int = 4096,
    max_groups: int = 0,
    tuning: Tuning = PACKAGED,
    query_dtype: str = "",
    **params: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of one layer, keys written and attended, with its arguments' shapes: for `compile`.

    Args:
        implementation: Of `paged_attention`.
        num_decodes: Rows of one token.
        prefill_tokens: Tokens of one further row; 0 leaves it out.
        context_tokens: Longest context, which sets the table's width.
        max_groups: Shared prefixes that the step has room for.
        tuning: Sizes of kernels' pieces, before those of the package.
        query_dtype: Of queries and new keys; "" is the pool's, or bfloat16 over codes.
        **params: Of `paged_attention`, window and soft_cap for instance.

    Returns:
        (fn, args); donate argument 0, the pool.
    """
    T = num_decodes + prefill_tokens
    S = num_decodes + (prefill_tokens > 0)
    windows = (params.get("window"),)
    ragged = abstract_batch(layout.block_size, T, S, num_decodes, context_tokens, windows, max_groups, tuning)
    K, H = layout.num_kv_heads, layout.head_dim
    pool = KVPool(jax.ShapeDtypeStruct(layout.shape, layout.storage), layout)  # type: ignore[arg-type]
    dtype = jnp.dtype(query_dtype or ("bfloat16" if layout.quantised else layout.dtype))
    q, k = (jax.ShapeDtypeStruct((T, heads, H), dtype) for heads in (num_heads, K))

    def step(pool: KVPool, q: jax.Array, k: jax.Array, v: jax.Array | None, ragged: RaggedBatch) -> Any:
        kwargs = {"scale": H**-0.5, "implementation": implementation, **params}
        return write_and_attend(q, k, v, pool, 0, ragged, **kwargs)

    return step, (pool, q, k, None if layout.latent_dim else k, ragged)


def abstract_batch(
    block_size: int,
    T: int,
    S: int,
    Sd: int,
    context_tokens: int,
    windows: tuple[int | None, ...] = (None,),
    max_groups: int = 0,
    tuning: Tuning = PACKAGED,
) -> RaggedBatch:
    """A ragged batch of these buckets without rows; its shapes are those of any step in them."""
    width = -(-context_tokens // block_size)
    return plan_ragged(
        np.zeros(0, np.int32),
        np.zeros(0, np.int32),
        np.zeros((0, width), np.int32),
        block_size=block_size,
        num_tokens_bucket=T,
        num_seqs_bucket=S,
        decode_bucket=Sd,
        windows=windows,
        max_groups=max_groups,
        tuning=tuning,
    )
