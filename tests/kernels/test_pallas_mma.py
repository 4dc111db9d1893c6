"""The `mma` kernel in Pallas' GPU interpreter: races on its TMA form, and what it refuses.

What is interpreted is the form with barriers; cp.async, the bare warpgroup barrier and operands in registers are
compiled alone (test_aot.py).
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pagedjax.kernels import KVLayout, aot, gpu_programs, gpu_tile, paged_attention, pallas_mma, pallas_mosaic
from pagedjax.kernels.gpu_programs import tiles_behind
from pagedjax.kernels.gpu_rows import GpuShape, device_programs, widest_shapes

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 has no interpreter of GPU kernels"
)


def run(step, interpret):
    params = {"window": None, "soft_cap": None, "sinks": None, **step.params}

    @jax.jit
    def attend(q, pool, ragged):
        return pallas_mma.attend(q, pool, step.layer, ragged, programs=3, interpret=interpret, **params)

    q = jnp.asarray(step.q.astype(jnp.dtype(step.worked_in)))
    return np.asarray(attend(q, step.pool, jax.tree.map(jnp.asarray, step.ragged))[0], np.float64)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.usefixtures("interpreted")
def test_no_race_on_the_way_through_shared_memory(build, oracle):
    """Three stages' worth of keys, so that a buffer is used again; queries give way to probabilities."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    step = build([1, 9], [250, 140], window=180, chunk_tokens=256, dtype="float16")
    out = run(step, plgpu.InterpretGPUParams(detect_races=True))
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=5e-4, rtol=5e-4)


TILING = gpu_programs.GpuTiling(decode_stages=2, prefill_stages=2, programs=2, value_keys=32)


def test_key_tiles_follow_from_the_table_as_far_as_shared_memory_goes():
    """At head dim 256 two key tiles fit an A100 (163 KiB a program) and one an RTX 4090 (99)."""

    def stages(head_dim, kib, asked, parts=False):
        tiling = replace(
            TILING,
            **{
                f"{name}_stages": asked if parts == (name == "decode") else 4
                for name in ("decode", "prefill")
            },
        )
        shape = widest_shapes(KVLayout(1, 1, 16, 1, head_dim, "float16"))[parts]
        found = pallas_mma._Mma(False, kib << 10, False, tiling).stages(shape)
        assert pallas_mosaic._Wgmma(tiling, shared_memory=kib << 10).stages(shape)[1] <= asked
        return found[0]

    assert [stages(h, kib, 2) for h in (128, 256) for kib in (163, 99)] == [2, 2, 2, 1]
    assert [stages(128, kib, 4) for kib in (227, 163, 99)] == [4, 4, 2]
    assert [stages(64, 227, asked, parts) for asked in (1, 3) for parts in (False, True)] == [1, 1, 3, 3]


def test_two_programs_of_prefill_fit_a_multiprocessor():
    """227 KiB of an H100, 163 of an A100, and 1 KiB that CUDA takes for each: sums within a warp need no room."""
    layout = KVLayout(1, 1, 16, 8, 128, "bfloat16")
    assert 2 * (pallas_mosaic.shared_memory_bytes(layout, TILING) + 1024) <= 228 << 10
    assert 2 * (pallas_mma.shared_memory_bytes(layout, (8, 0), TILING) + 1024) <= 164 << 10
    assert 2 * (pallas_mma.shared_memory_bytes(layout, (8, 9), TILING) + 1024) > 100 << 10


def test_few_queries_are_columns():
    """Up to 16 heads a KV head, head dims of whole 64s; a program that keeps 64 rows in float32 ends with its item."""

    def shape(group, head_dim, parts=True):
        return GpuShape(16, 1, head_dim, 1, group, 1, parts, 1.0, None, None)

    found = [
        (s.narrow, s.queries, s.walks) for s in (shape(3, 64), shape(16, 128), shape(17, 64), shape(4, 80))
    ]
    assert found == [(True, 8, True), (True, 16, True), (False, 64, False), (False, 64, False)]
    prefill = shape(4, 128, parts=False)
    assert (prefill.narrow, prefill.queries, prefill.walks) == (False, 64, True)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_copies_that_are_counted_are_those_that_are_awaited(stages):
    """cp.async has no barriers: copies end in order, and a tile is awaited by the number of newer ones."""
    asked = [part for n in range(stages) for part in (("keys", n), ("values", n))][:-1]
    for n in range(9):
        assert len(asked) - 1 - asked.index(("keys", n)) == tiles_behind(0, stages)
        asked += [("values", n + stages - 1), ("keys", n + stages)]
        assert len(asked) - 1 - asked.index(("values", n)) == tiles_behind(1, stages)


@pytest.mark.parametrize("narrow_floats", [False, True])
def test_codes_are_widened_with_and_without_an_instruction_for_it(narrow_floats):
    """All 256 of each kind, NaN among them."""
    products = pallas_mma._Mma(False, 163 << 10, narrow_floats, TILING)
    codes = np.arange(256, dtype=np.uint8).view(np.int8)
    for kind, dtype in (("int8", jnp.bfloat16), ("fp8_e4m3", jnp.bfloat16), ("fp8_e4m3", jnp.float16)):
        ours = np.asarray(gpu_tile.widened(jnp.asarray(codes), kind, products, dtype), np.float32)
        theirs = codes if kind == "int8" else codes.view(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_scales_come_in_what_a_copy_can_bring(block_size):
    """Whole within the bytes that come with them; cp.async deals its tiles of 8 rows and 32 bytes to four warps."""
    for K, H in ((3, 80), (8, 128), (1, 16)):
        layout = KVLayout(1, 1, block_size, K, H, "int8")
        shape = replace(widest_shapes(layout)[0], block_size=block_size)
        for tma in (True, False):
            width = gpu_programs.scale_lanes(shape, tma)
            program = object.__new__(gpu_programs._Program)
            program.shape, program.tma = shape, tma
            for values, head in ((0, 0), (0, K - 1), (1, K - 1)):
                first, count = program.scale_bytes(values, head)
                at = program.scale_at(values, head)
                assert count == width and first % 16 == 0
                assert first <= at and at + 4 <= first + width <= layout.width
            assert tma or (shape.unit // 8) * (width // 32) % 4 == 0


def test_programs_number_with_the_multiprocessors():
    chip = aot.AbstractGpu(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip)):
        assert [device_programs(n) for n in (1, 2)] == [148, 296]
    assert device_programs(2) == 264  # a CPU says nothing: an H100's


def test_refusals_name_the_limit(build):
    step = build([1], [5], dtype="float16")
    reason = (
        "jax .* must be 0.12" if jax.__version_info__ < (0, 12) else "platform=cpu: must be an NVIDIA GPU"
    )
    with pytest.raises(NotImplementedError, match=f"pallas_mma: {reason}"):
        paged_attention(
            jnp.asarray(step.q), step.pool, 0, step.ragged, scale=1.0, implementation="pallas_mma"
        )
    if jax.__version_info__ >= (0, 12):
        interpreted = functools.partial(run, interpret=True)
        with pytest.raises(
            NotImplementedError, match=r"dtype=float32: must be bfloat16 or float16 \(mma rounds"
        ):
            interpreted(build([1], [5]))
        with pytest.raises(
            NotImplementedError, match="queries of float32 over dtype=int8: must be bfloat16 or"
        ):
            interpreted(build([1], [5], dtype="int8"))
    layout = KVLayout(1, 2, 32, 8, 80, "int8")
    with pytest.raises(NotImplementedError, match=r"head_dim=80, blocks of 32: .*and of eight bits 32 lanes"):
        pallas_mma._Mma(False, 163 << 10, False, TILING).copies_of(layout)
    pallas_mma._Mma(False, 163 << 10, False, TILING).copies_of(replace(layout, dtype="float16"))
    pallas_mma._Mma(True, 163 << 10, True, TILING).copies_of(layout)  # TMA brings them as they lie
