"""Compilation for devices that are not there; skips by name where a compiler is not installed (`make aot`)."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pagedjax.kernels import KVLayout, KVPool, aot, geometries
from pagedjax.kernels.blocks import copy_blocks

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def needs(target):
    reason = f"no device-free compile: extra {aot.TARGETS[target].extra} is not installed"
    return pytest.mark.skipif(not aot.installed(target), reason=reason)


def targets(names=tuple(aot.TARGETS)):
    return [pytest.param(name, marks=needs(name)) for name in names]


SMOLLM = (9, 3, 64)
LLAMA = (32, 8, 128)


# One program per target by default, two where the kernel is another.
_FULL = {(name, LLAMA) for name in ("l4", "rtx4090", "b200", "v5p", "v6e")}


@pytest.mark.parametrize(
    "target, heads",
    [
        pytest.param(
            name, heads, marks=[needs(name), *([pytest.mark.full] if (name, heads) in _FULL else [])]
        )
        for name in aot.TARGETS
        for heads in (SMOLLM, LLAMA)
    ],
)
def test_decode_compiles_in_place(target, heads):
    dtype = "bfloat16"
    report = geometries.compile_attention(target, geometries.Geometry(*heads, 16, dtype))
    assert report.in_place, report
    assert report.fits
    assert 0 < report.kernel_bytes < report.limits.on_chip_bytes


@needs("v5e")
def test_mixed_step_with_window_and_cap_compiles_for_a_tpu():
    geometry = geometries.Geometry(*SMOLLM, 16, "bfloat16")
    report = geometries.compile_attention("v5e", geometry, prefill_tokens=64, window=100, soft_cap=30.0)
    assert report.in_place, report


@pytest.mark.parametrize("target", targets(("v5e", "h100", "a100")))
def test_F062_a_mixed_step_takes_no_padding(target):
    """64 decodes and 448 prefill tokens: 485, 37 and 43 MiB before queries and outputs stayed in flat arrays."""
    report = geometries.compile_attention(
        target, geometries.Geometry(*LLAMA, 16, "bfloat16"), num_decodes=64, prefill_tokens=448
    )
    assert report.in_place and report.temp_bytes < 8 << 20, report


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100", marks=needs("h100")),
        pytest.param("a100", marks=[needs("a100"), pytest.mark.full]),
    ],
)
def test_F060_temporaries_do_not_grow_with_the_table(target):
    """64 rows of up to 131,072 tokens: 1,540 MiB a layer when state and merge had the table's width."""
    report = geometries.compile_attention(
        target, geometries.Geometry(*LLAMA, 16, "bfloat16"), num_decodes=64, context_tokens=131_072
    )
    assert report.in_place and report.temp_bytes < 8 << 20, report


_TPUS = [name for name in aot.TARGETS if aot.TARGETS[name].platform == "tpu"]


@pytest.mark.parametrize(
    "target, heads, rows",
    [
        pytest.param(
            name,
            heads,
            rows,
            marks=[needs(name), *([] if (name, rows) == ("v5e", 32) else [pytest.mark.full])],
        )
        for name in _TPUS
        for heads, rows in ((LLAMA, 32), (SMOLLM, 256))
    ],
)
def test_shared_prefixes_compile_for_every_tpu(target, heads, rows):
    """One more kernel: the decode rows' own keys, and the keys of their groups."""
    geometry = geometries.Geometry(*heads, 16, "bfloat16")
    report = geometries.compile_attention(target, geometry, num_decodes=rows, max_groups=4)
    assert report.alias_bytes >= report.pool_bytes and report.num_kernels == 2, report
    # States of 256 rows and four groups; on v5p, whose cores share no VMEM, in HBM (19.5 MiB), elsewhere 6 at most.
    assert report.temp_bytes < (24 << 20 if target == "v5p" else 8 << 20), report
    # The kernel writes the new keys, on tpu7x a scatter (tuning.toml).
    assert ("scatter(" in report.hlo) == (target == "tpu7x")


@needs("v5p")
def test_two_cores_compile_in_place():
    """v5p: the grid's first axis is the cores, by which the compiler deals its programs out."""
    report = geometries.compile_attention(
        "v5p", geometries.Geometry(*LLAMA, 16, "bfloat16"), prefill_tokens=64
    )
    assert report.in_place and report.num_kernels == 3, report


@pytest.mark.parametrize("rows, context", [pytest.param(32, 131_072, marks=pytest.mark.full), (256, 32_768)])
@needs("v5e")
def test_F061_long_tables_compile(rows, context):
    report = geometries.compile_attention(
        "v5e", geometries.Geometry(*LLAMA, 16, "bfloat16"), num_decodes=rows, context_tokens=context
    )
    assert report.in_place, report


@pytest.mark.full
@pytest.mark.parametrize("target", targets(tuple(t for t in aot.TARGETS if aot.TARGETS[t].platform == "tpu")))
@pytest.mark.parametrize("heads, dtype", [((32, 32, 128), "float32"), ((64, 64, 128), "bfloat16")], ids=str)
def test_F061_wide_heads_compile_on_every_tpu(target, heads, dtype):
    """Their buffers are over the 16 MiB that a kernel may use by default: the limit is set from the chip."""
    report = geometries.compile_attention(target, geometries.Geometry(*heads, 16, dtype), prefill_tokens=64)
    assert report.num_kernels >= 2 and report.kernel_bytes < report.limits.on_chip_bytes, report


_QUICK_CODES = {("v5e", "int8", 32), ("h100", "int8", 16)}
LATENT = geometries.Geometry(128, 1, 576, 16, "bfloat16", 512)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(name, marks=[needs(name), *([] if name == "v6e" else [pytest.mark.full])])
        for name in ("v6e", "v5p", "v5e")
    ],
)
def test_latent_rows_compile_in_place(target):
    """DeepSeek's: 128 heads over one row of 512 + 64 lanes, decode and prefill."""
    report = geometries.compile_attention(target, LATENT, prefill_tokens=8)
    assert report.in_place and report.num_kernels == 2, report
    assert report.kernel_bytes < report.limits.on_chip_bytes


@pytest.mark.parametrize(
    "target, dtype, block_size",
    [
        pytest.param(
            name, dtype, size, marks=[needs(name), *([] if case in _QUICK_CODES else [pytest.mark.full])]
        )
        for case in itertools.product(("v5e", "v6e", "h100", "a100"), ("int8", "fp8_e4m3"), (16, 32, 64))
        for name, dtype, size in [case]
    ],
)
def test_pools_of_eight_bits_compile_in_place(target, dtype, block_size):
    """Decode and a prompt. XLA:TPU would copy the whole pool for less than a tile of 32 tokens (`_write_tiles`).

    Copies of blocks beside them: of a pool of several layers, from block to block.
    """
    report = geometries.compile_attention(
        target, geometries.Geometry(*LLAMA, block_size, dtype), prefill_tokens=64
    )
    assert report.in_place and report.num_kernels == (3 if aot.TARGETS[target].platform == "tpu" else 2), (
        report
    )
    assert report.kernel_bytes < report.limits.on_chip_bytes
    if not aot.of_this_process(target):
        return  # its programs were compiled in a process of their own
    layout = KVLayout(8, 1 << 13, block_size, *LLAMA[1:], dtype)
    pool = KVPool(jax.ShapeDtypeStruct(layout.shape, layout.storage), layout)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    report = aot.compile(
        "copies", target, copy_blocks, (pool, ids, ids), donate=(0,), pool_bytes=layout.num_bytes
    )
    assert report.in_place, report


@needs("h100")
def test_latent_rows_are_refused_by_name_for_hopper():
    with pytest.raises(NotImplementedError, match="latent_dim=512: values within keys are not read"):
        geometries.compile_attention("h100", LATENT)


@needs("h100")
def test_mixed_step_of_wide_heads_compiles_for_hopper():
    geometry = geometries.Geometry(8, 1, 256, 16, "bfloat16")
    report = geometries.compile_attention("h100", geometry, prefill_tokens=64, window=100, soft_cap=30.0)
    assert report.in_place, report
    # Blocks come by TMA, products go through the tensor cores of Hopper.
    assert "cp.async.bulk.tensor" in report.hlo
    assert "wgmma.mma_async" in report.hlo


@needs("h100")
def test_probabilities_in_registers_compile_where_they_are_asked_for():
    """Neither a device nor the interpreter has judged them: an implementation to be named, never tried by itself."""
    name = "pagedjax.kernels.pallas_mosaic:attend_in_registers"
    layout = geometries.Geometry(*LLAMA, 16, "bfloat16").layout()
    fn, args = geometries.attention_step(layout, LLAMA[0], implementation=name, prefill_tokens=64)
    report = aot.compile(name, "h100", fn, args, donate=(0,), pool_bytes=layout.num_bytes)
    assert report.in_place and report.num_kernels == 2, report


def _of(geometry):
    """(dtype, heads): the geometries of one test differ in their blocks."""
    return geometry.dtype, (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)


_TESTS = [
    pytest.param(target, *of, marks=needs(target), id=f"{target}-{of[0]}-{'/'.join(map(str, of[1]))}")
    for target in aot.TARGETS
    for of in dict.fromkeys(map(_of, geometries.geometries(target)))
]


@pytest.mark.full
@pytest.mark.parametrize("target, dtype, heads", _TESTS)
def test_geometries(target, dtype, heads):
    mine = [g for g in geometries.geometries(target) if _of(g) == (dtype, heads)]
    for geometry in mine:
        report = geometries.compile_attention(target, geometry)
        assert report.in_place, report
        assert report.kernel_bytes < report.limits.on_chip_bytes


def test_the_tables_are_as_large_as_they_should_be():
    counts = {target: len(set(geometries.geometries(target))) for target in aot.TARGETS}
    assert counts == {
        "v5e": 84, "v6e": 28, "v4": 28, "v5p": 28, "tpu7x": 28,
        "h100": 56, "a100": 28, "rtx4090": 28, "l4": 8, "b200": 8,
    }  # fmt: skip
    assert any(geometry.head_dim == 256 for geometry in geometries.geometries("h100"))


@needs("v5e")
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


@needs("h100")
def test_a_kernel_that_needs_too_much_shared_memory_is_refused():
    def kernel(x_ref, o_ref, scratch):
        scratch[...] = jnp.zeros_like(scratch)
        o_ref[...] = x_ref[...]

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((228 << 8,), jnp.float32)],  # 228 KiB
    )
    with pytest.raises(NotImplementedError, match=r"too much on h100: .*shared memory"):
        aot.compile("too much", "h100", call, (jax.ShapeDtypeStruct((128,), jnp.float32),))


@pytest.mark.full
@pytest.mark.parametrize("target", targets(("h100", "a100", "rtx4090")))
def test_prefill_spills_no_registers(target):
    """ptxas prints them to its process's output, hence a process of its own."""
    words = ["--target", target, "--kernels", "--batch", "8", "--model", str(SHAPES / "llama-3-8b.json")]
    env = {**os.environ, "MOSAIC_GPU_DUMP_PTXAS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pagedjax", "compile", "-q", *words], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stdout + done.stderr)]
    assert len(spills) >= 2 and not any(spills), spills  # decode's and prefill's programs


@needs("a100")
@pytest.mark.parametrize("target", ["a100", pytest.param("rtx4090", marks=pytest.mark.full)])
def test_blocks_come_by_cp_async_before_hopper(target):
    geometry = geometries.Geometry(*SMOLLM, 16, "bfloat16")
    report = geometries.compile_attention(target, geometry, prefill_tokens=64, window=100, soft_cap=30.0)
    assert report.in_place, report
    assert "cp.async.c" in report.hlo and "mma.sync" in report.hlo
    assert "cp.async.bulk" not in report.hlo and "wgmma" not in report.hlo


def test_wgmma_is_refused_where_there_is_none():
    chip = aot.AbstractGpu(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
    object.__setattr__(chip, "compute_capability", "10.0")
    fn, args = geometries.attention_step(
        geometries.Geometry(*SMOLLM, 16, "bfloat16").layout(1 << 20), 9, implementation="pallas_mosaic"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    reason = r"jax .* must be 0\.12|compute capability 10\.0: must be a Hopper GPU"
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(fn, *args)


def test_later_gpus_are_refused_by_name():
    """12.x: Mosaic lowers, and ptxas is asked for another target than the code is for."""
    chip = aot.AbstractGpu(device_kind="NVIDIA GeForce RTX 5090", num_cores=170, platform="gpu")
    object.__setattr__(chip, "compute_capability", "12.0")
    fn, args = geometries.attention_step(
        geometries.Geometry(*SMOLLM, 16, "bfloat16").layout(1 << 20), 9, implementation="pallas_mma"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    reason = r"jax .* must be 0\.12|compute capability 12\.0: must be .* 8\.0 to 10\.x; use 'xla'"
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(fn, *args)


@needs("v5e")
def test_a_program_that_needs_too_much_hbm_is_refused():
    half = jax.ShapeDtypeStruct((9 << 28,), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"large on v5e: .*HBM"):
        aot.compile("large", "v5e", lambda x, y: x + y, (half, half))


@needs("v5e")
def test_a_copied_pool_is_seen():
    """The proof must be able to fail: a layer's slice of the pool handed to a kernel is copied."""
    pool = jax.ShapeDtypeStruct((4, 1 << 15, 16, 512), jnp.bfloat16)

    def step(pool):
        return pool, pl.pallas_call(
            lambda x_ref, o_ref, out, sem: pltpu.sync_copy(x_ref.at[0], o_ref),
            out_shape=jax.ShapeDtypeStruct((16, 512), jnp.bfloat16),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.VMEM((16, 512), jnp.bfloat16), pltpu.SemaphoreType.DMA],
        )(pool[1])

    report = aot.compile("slice", "v5e", step, (pool,), donate=(0,), pool_bytes=pool.size * 2)
    assert not report.in_place
    assert report.temp_bytes > report.pool_bytes / 5


def test_unknown_targets_are_refused():
    with pytest.raises(
        ValueError,
        match="target='v7x': must be one of v4, v5p, v5e, v6e, tpu7x, h100, a100, l4",
    ):
        aot.compile("x", "v7x", lambda x: x, (jax.ShapeDtypeStruct((8,), jnp.float32),))


@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_without_its_compiler_the_extra_is_named(target):
    if aot.installed(target):
        pytest.skip(f"the compiler for {target} is installed")
    with pytest.raises(NotImplementedError, match=f"install the extra '{aot.TARGETS[target].extra}'"):
        aot.compile("x", target, lambda x: x, (jax.ShapeDtypeStruct((8,), jnp.float32),))
