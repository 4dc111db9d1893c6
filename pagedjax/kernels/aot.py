"""Compile kernels and whole steps for TPUs that are not in this machine.

libtpu (the extra `tpu`) carries the real compilers. A program compiled so has met the chip's limits (VMEM,
SMEM, layouts), and its memory analysis shows whether the pool is updated in place. What it cannot show is
time.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kernels.api import paged_attention
from pagedjax.kernels.blocks import write_kv
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch
from pagedjax.kernels.plan import plan_ragged

# Topology names of one host each, and HBM bytes of one core's device.
TPU_TARGETS: dict[str, str] = {
    "v4": "v4:2x2x1",
    "v5p": "v5p:2x2x1",
    "v5e": "v5e:2x2",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# What libtpu asks of the machine that runs it; set before its first use. Several processes may load it.
LIBTPU_ENVIRONMENT: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Compiled:
    """One program compiled for a target.

    Attributes:
        target: Key of TPU_TARGETS.
        name: What was compiled.
        compile_s: Seconds of lowering and compiling.
        argument_bytes: Of all arguments.
        temp_bytes: Scratch in HBM beside them.
        alias_bytes: Arguments updated in place.
        pool_bytes: Of the KV pool among the arguments.
    """

    target: str
    name: str
    compile_s: float
    argument_bytes: int
    temp_bytes: int
    alias_bytes: int
    pool_bytes: int

    @property
    def in_place(self) -> bool:
        """The pool is an alias of the result and nothing of its size stands beside it."""
        return self.alias_bytes >= self.pool_bytes and self.temp_bytes < self.pool_bytes / 100


def compile(
    name: str,
    target: str,
    fn: Callable[..., Any],
    args: Any,
    *,
    donate: tuple[int, ...] = (),
    pool_bytes: int = 0,
) -> Compiled:
    """Compile fn for a TPU that is not there.

    Args:
        name: For the report.
        target: Key of TPU_TARGETS.
        fn: To be jitted.
        args: Tuple of pytrees whose leaves have shape and dtype; no data is read.
        donate: Argument numbers whose buffers the program may reuse.
        pool_bytes: Size of the KV pool among the arguments, for `Compiled.in_place`.

    Raises:
        ValueError: Unknown target.
        NotImplementedError: libtpu is not installed, or the target's compiler refuses the program: the
            message carries its reason.
    """
    device = _device(target)
    sharding = jax.sharding.SingleDeviceSharding(device)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    # An axis-less mesh: with a one-device mesh, shardings reach the avals that kernels reshape.
    chip = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=getattr(device, "num_cores", 1), platform="tpu"
    )
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip)):
        lowered = jax.jit(fn, donate_argnums=donate).trace(*specs).lower()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        raise NotImplementedError(f"{name} on {target}: {str(error).splitlines()[0]}") from error
    return Compiled(
        target,
        name,
        time.perf_counter() - started,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        pool_bytes,
    )


def _device(target: str) -> Any:
    if target not in TPU_TARGETS:
        raise ValueError(f"target={target!r}: must be one of {', '.join(TPU_TARGETS)}")
    if importlib.util.find_spec("libtpu") is None:
        raise NotImplementedError(f"target={target}: needs libtpu; install the extra 'tpu'")
    for key, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=TPU_TARGETS[target]).devices[0]


def attention_step(
    layout: KVLayout,
    num_heads: int,
    *,
    num_decodes: int = 8,
    prefill_tokens: int = 0,
    context_tokens: int = 4096,
    **params: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of one layer, keys written and attended, with its arguments' shapes: for `compile`.

    Args:
        num_decodes: Rows of one token.
        prefill_tokens: Tokens of one further row; 0 leaves it out.
        context_tokens: Longest context, which sets the table's width.
        **params: Of `paged_attention`, window and soft_cap for instance.

    Returns:
        (fn, args); donate argument 0, the pool.
    """
    T = num_decodes + prefill_tokens
    S = num_decodes + (prefill_tokens > 0)
    ragged = abstract_batch(layout.block_size, T, S, num_decodes, context_tokens, (params.get("window"),))
    K, H = layout.num_kv_heads, layout.head_dim
    dtype = jnp.dtype(layout.dtype)
    pool = KVPool(jax.ShapeDtypeStruct(layout.shape, dtype), layout)  # type: ignore[arg-type]
    q, k = (jax.ShapeDtypeStruct((T, heads, H), dtype) for heads in (num_heads, K))

    def step(pool: KVPool, q: jax.Array, k: jax.Array, v: jax.Array, ragged: RaggedBatch) -> Any:
        pool = write_kv(pool, 0, k, v, ragged.slot_mapping)
        out = paged_attention(q, pool, 0, ragged, scale=H**-0.5, implementation="pallas_tpu", **params)
        return pool, out

    return step, (pool, q, k, k, ragged)


def abstract_batch(
    block_size: int, T: int, S: int, Sd: int, context_tokens: int, windows: tuple[int | None, ...] = (None,)
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
    )
