"""Compilation for TPUs that are not there; skips by name where libtpu is not installed."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax.kernels import KVLayout, aot

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu (extra tpu) is not installed: no device-free compile",
)
GEOMETRIES = [(9, 3, 64), (32, 8, 128), (15, 5, 64), (16, 2, 64), (8, 1, 256), (12, 12, 64), (32, 8, 80)]


def compile_step(target, heads, block_size, dtype="bfloat16", **params):
    N, K, H = heads
    row = KVLayout(1, 1, block_size, K, H, dtype).num_bytes
    # Well over VMEM: small pools move into it and hide copies.
    layout = KVLayout(1, (256 << 20) // row, block_size, K, H, dtype)
    fn, args = aot.attention_step(layout, N, **params)
    return aot.compile(f"{heads}", target, fn, args, donate=(0,), pool_bytes=layout.num_bytes)


@needs_libtpu
@pytest.mark.parametrize("target", aot.TPU_TARGETS)
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128)], ids=str)
def test_decode_compiles_in_place(target, heads):
    report = compile_step(target, heads, 16)
    assert report.in_place, report


@needs_libtpu
def test_mixed_step_with_window_and_cap_compiles():
    report = compile_step("v5e", (9, 3, 64), 16, prefill_tokens=64, window=100, soft_cap=30.0)
    assert report.in_place, report


@needs_libtpu
@pytest.mark.full
@pytest.mark.parametrize("target", aot.TPU_TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_geometries(target, dtype, heads):
    for block_size in (8, 16, 32, 64, 128, 256) if target == "v5e" else (16, 64):
        report = compile_step(target, heads, block_size, dtype)
        assert report.alias_bytes >= report.pool_bytes


@needs_libtpu
def test_a_kernel_that_needs_too_much_vmem_is_refused():
    def kernel(x_ref, o_ref, scratch):
        scratch[:8] = x_ref[...]
        o_ref[...] = scratch[:8]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM(((200 << 20) // 512, 128), jnp.float32)],
    )
    with pytest.raises(NotImplementedError, match="too much on v5e"):
        aot.compile("too much", "v5e", call, (jax.ShapeDtypeStruct((8, 128), jnp.float32),))


def test_unknown_targets_are_refused():
    with pytest.raises(ValueError, match="target='v7x': must be one of v4, v5p, v5e, v6e, tpu7x"):
        aot.compile("x", "v7x", lambda x: x, (jax.ShapeDtypeStruct((8,), jnp.float32),))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_the_extra_is_named():
    with pytest.raises(NotImplementedError, match="install the extra 'tpu'"):
        aot.compile("x", "v5e", lambda x: x, (jax.ShapeDtypeStruct((8,), jnp.float32),))
