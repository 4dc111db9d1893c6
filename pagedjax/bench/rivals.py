"""Other people's decode attention on the same keys: jax's references and kernels, and torch's dense SDPA.

Each takes its own layout, made from the same values beforehand and not timed. What one cannot do here it says
itself, and it is then left out by name.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kernels import KVPool

Call = Callable[[], Any]


@dataclass(frozen=True)
class Step:
    """One decode step as the rivals take it.

    Attributes:
        q: f[S, N, H], not scaled.
        pool: One layer.
        tables: i32[S, M].
        context: Keys of every row.
    """

    q: jax.Array
    pool: KVPool
    tables: jax.Array
    context: int

    @property
    def scaled(self) -> jax.Array:
        return (self.q.astype(jnp.float32) * self.q.shape[-1] ** -0.5).astype(self.q.dtype)

    @property
    def lengths(self) -> jax.Array:
        return jnp.full(self.q.shape[0], self.context, jnp.int32)

    def pages(self) -> jax.Array:
        """Keys and values by block, f[2, K, P, B, H]."""
        layout = self.pool.layout
        K, H, B = layout.num_kv_heads, layout.head_dim, layout.block_size
        kv = self.pool.data[..., : 2 * K * H].reshape(-1, B, 2, K, H)
        return kv.transpose(2, 3, 0, 1, 4) + 0

    def dense(self) -> jax.Array:
        """Keys and values by row, f[2, S, K, context, H]."""
        layout = self.pool.layout
        K, H = layout.num_kv_heads, layout.head_dim
        kv = self.pool.data[self.tables][..., : 2 * K * H].reshape(self.q.shape[0], -1, 2, K, H)
        return kv[:, : self.context].transpose(2, 0, 3, 1, 4) + 0


def names(platform: str) -> tuple[str, ...]:
    """Rivals that may run on a platform ("cpu", "tpu", "gpu")."""
    own = {
        "tpu": ("jax tpu paged_attention", "jax ragged_paged_attention"),
        "gpu": ("jax gpu paged_attention",),
    }.get(platform, ())
    torch = ("torch sdpa, dense",) if importlib.util.find_spec("torch") and platform != "tpu" else ()
    return ("jax tpu reference", "jax gpu reference", *own, *torch)


def make(name: str, step: Step) -> Call:
    """The timed call of a rival; it starts the work and returns its result, f[S, N, H].

    Raises:
        Exception: Whatever the rival raises where it cannot serve the shape.
    """
    with warnings.catch_warnings():  # jax deprecates its own GPU kernel on import
        warnings.simplefilter("ignore")
        call = _MAKERS[name](step)
        jax.block_until_ready(call())
    return call


def to_numpy(result: Any) -> np.ndarray:
    """A jax or torch result as float32 on the host."""
    return np.asarray(result.float().cpu() if hasattr(result, "cpu") else result, np.float32)


def _jitted(fn: Callable[..., jax.Array], *args: Any) -> Call:
    compiled = jax.jit(fn).lower(*args).compile()
    return lambda: compiled(*args)


def _tpu_reference(step: Step) -> Call:
    """Gather of all blocks, then jax's dense grouped-query reference."""
    from jax.experimental.pallas.ops.tpu.paged_attention import util

    def run(q: jax.Array, pages: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        kv = pages[:, :, tables].swapaxes(1, 2)  # [2, S, K, M, B, H]
        kv = kv.reshape(*kv.shape[:3], -1, kv.shape[-1])
        out: jax.Array = util.grouped_query_attention_reference(q, kv[0], kv[1], lengths)
        return out

    return _jitted(run, step.scaled, step.pages(), step.tables, step.lengths)


def _gpu_reference(step: Step) -> Call:
    from jax.experimental.pallas.ops.gpu import paged_attention as gpu

    def run(q: jax.Array, pages: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        kv = pages[:, :, tables]  # [2, K, S, M, B, H]
        kv = kv.transpose(0, 2, 3, 4, 1, 5).reshape(2, tables.shape[0], -1, kv.shape[1], kv.shape[-1])
        out: jax.Array = gpu.paged_attention_reference(q, kv[0], kv[1], lengths)
        return out

    return _jitted(run, step.scaled, step.pages(), step.tables, step.lengths)


def _gpu_kernel(step: Step) -> Call:
    from jax.experimental.pallas.ops.gpu import paged_attention as gpu

    pages = step.pages()
    return _jitted(gpu.paged_attention, step.scaled, pages[0], pages[1], step.tables, step.lengths)


def _tpu_kernel(step: Step) -> Call:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    per_step = max(1, 256 // step.pool.layout.block_size)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, tables: jax.Array) -> jax.Array:
        out: jax.Array = paged_attention(q, k, v, lengths, tables, pages_per_compute_block=per_step)
        return out

    pages = step.pages()
    return _jitted(run, step.scaled, pages[0], pages[1], step.lengths, step.tables)


def _ragged_kernel(step: Step) -> Call:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    S, K, H = step.q.shape[0], step.pool.layout.num_kv_heads, step.q.shape[-1]
    # Keys and values of a head side by side.
    pages = step.pages().transpose(2, 3, 1, 0, 4).reshape(-1, step.pool.layout.block_size, 2 * K, H)
    starts = jnp.arange(S + 1, dtype=jnp.int32)
    args = (step.scaled, pages, step.lengths, step.tables, starts, jnp.array([S], jnp.int32))
    return _jitted(ragged_paged_attention, *args)


def _torch_dense(step: Step) -> Call:
    """torch's scaled_dot_product_attention over a contiguous cache: nothing paged."""
    import torch

    device = "cuda" if step.q.devices().pop().platform == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError("this torch sees no CUDA device")
    k, v = (torch.from_dlpack(x).to(device) for x in step.dense())
    q = torch.from_dlpack(step.q).to(device)[:, :, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def run() -> Any:
        with torch.no_grad():
            out = sdpa(q, k, v, enable_gqa=True)[:, :, 0]
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


_MAKERS: dict[str, Callable[[Step], Call]] = {
    "jax tpu reference": _tpu_reference,
    "jax gpu reference": _gpu_reference,
    "jax gpu paged_attention": _gpu_kernel,
    "jax tpu paged_attention": _tpu_kernel,
    "jax ragged_paged_attention": _ragged_kernel,
    "torch sdpa, dense": _torch_dense,
}
