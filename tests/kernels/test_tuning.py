"""The tuning tables: which one a call takes, what a kernel does with it, and what is refused by name."""

import functools
import tomllib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax.kernels import KVLayout, gpu_programs, pallas_tpu, plan_sizes, tpu_sizes
from pagedjax.kernels.tuning import PACKAGED, SIZES, Tuning, packaged, to_toml
from pagedjax.runtime.tuning import read_tuning

GPU_INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)
OWN = """
[[sizes]]
kernel = "pallas_tpu"
heads = "32/8/128"
chunk_tokens = 512

[[sizes]]
kernel = "pallas_tpu"
heads = "32/8/128"
block_size = 64
chunk_tokens = 1024
tile_queries = 64

[[sizes]]
kernel = "plan"
device = "cpu"
chunk_tokens = 64
"""


def parse(text):
    return Tuning.parse(tomllib.loads(text), "own.toml")


def test_the_most_particular_table_gives_a_size_and_a_users_own_goes_first():
    own = parse(OWN)
    call = dict(device="TPU v6 lite", heads="32/8/128", dtype="bfloat16", block_size=16)
    found = own.sizes("pallas_tpu", **call)
    assert (found["chunk_tokens"], found["tile_queries"], found["chunk_bytes"]) == (512, 128, 1 << 20)
    found = own.sizes("pallas_tpu", **call | {"block_size": 64})
    assert (found["chunk_tokens"], found["tile_queries"]) == (1024, 64)
    assert "chunk_tokens" not in own.sizes("pallas_tpu", **call | {"heads": "9/3/64"})
    layout = KVLayout(1, 9, 16, 3, 64)
    assert plan_sizes(layout, 9) == {"chunk_tokens": 128, "tile_queries": 128}  # on CPU
    assert plan_sizes(layout, 9, own)["chunk_tokens"] == 64
    assert parse(to_toml(own, {1: "measured"})) == own and hash(own) == hash(parse(OWN))


def test_the_package_has_every_size_that_a_kernel_must_have():
    for kernel, rules in SIZES.items():
        found = PACKAGED.sizes(kernel, device="an unknown one")
        assert set(found) >= set(rules) - {"chunk_tokens"}, kernel
    assert packaged().rows and PACKAGED.rows == ()


def test_kernels_take_their_sizes_from_the_plan(build, check, monkeypatch):
    """Another chunk and tile, by the plan's own tables: the kernel is traced with them, and `xla` is the oracle's."""
    seen = []
    monkeypatch.setattr(pallas_tpu, "Sizes", lambda *args: seen.append(args[3]) or tpu_sizes.Sizes(*args))
    step = build([1, 20], [40, 50], heads=(2, 1), head_dim=16)
    own = parse('[[sizes]]\nkernel = "pallas_tpu"\nchunk_tokens = 64\ntile_queries = 16\nleft_at_most = 8\n')
    own = replace(own, rows=(*own.rows, *parse('[[sizes]]\nkernel = "xla"\niteration_bytes = 1\n').rows))
    step = replace(step, ragged=replace(step.ragged, tuning=own))
    attend = functools.partial(
        pallas_tpu.attend, window=None, soft_cap=None, sinks=None, interpret=True, **step.params
    )
    ragged = jax.tree.map(jnp.asarray, step.ragged)
    jax.eval_shape(attend, jnp.asarray(step.q), step.pool, step.layer, ragged)
    assert (seen[0].chunk_tokens, seen[0].tile_queries, seen[0].left_at_most) == (64, 16, 8)
    check(step)  # xla, an item at a time


@pytest.mark.skipif(GPU_INTERPRETER is None, reason="jax before 0.12 has no interpreter of GPU kernels")
@pytest.mark.parametrize(
    "kernel, decode, prefill, more",
    [("pallas_mosaic", 1, 3, {}), ("pallas_mosaic", 3, 1, {}), ("pallas_mma", 3, 1, {"value_keys": 16})],
)
def test_gpu_kernels_take_their_sizes_from_the_plan(build, check, monkeypatch, kernel, decode, prefill, more):
    """Other numbers of key tiles side by side, through every buffer twice; probabilities in other tiles."""
    seen = []
    scratch = gpu_programs._scratch
    monkeypatch.setattr(gpu_programs, "_scratch", lambda *args: seen.append(args[::2]) or scratch(*args))
    step = build([1, 9], [450, 440], heads=(2, 1), head_dim=64, chunk_tokens=512, dtype="float16")
    sizes = {"kernel": kernel, "decode_stages": decode, "prefill_stages": prefill, **more}
    check(replace(step, ragged=replace(step.ragged, tuning=Tuning.parse({"sizes": [sizes]}, "own"))), kernel)
    found = {(shape.parts, products.stages(shape)[1]) for shape, products in seen}
    assert found == {(True, decode), (False, prefill)}
    assert {products.tiling.value_keys for _, products in seen} == {more.get("value_keys", 64)}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[sizes]\nkernel = 'xla'", "own.toml: sizes: must be .*sizes.* tables"),
        ("[[tables]]\n", "own.toml: tables: must be"),
        ("[[sizes]]\nkernel = 'cuda'", "own.toml: sizes 1: kernel='cuda': must be one of plan, xla, pallas_tpu"),
        ("[[sizes]]\nchunk_tokens = 64", "sizes 1: kernel=None"),
        ("[[sizes]]\nkernel = 'plan'\nstages = 2", "sizes 1: stages: is no size of plan; must be one of device, "),
        ("[[sizes]]\nkernel = 'plan'\nchunk_tokens = 100", "chunk_tokens=100: must be a power of two"),
        ("[[sizes]]\nkernel = 'plan'\nchunk_tokens = true", "chunk_tokens=True: must be a power of two"),
        ("[[sizes]]\nkernel = 'pallas_tpu'\ntile_queries = 8", "tile_queries=8: must be a power of two of at least 16"),
        ("[[sizes]]\nkernel = 'plan'\nblock_size = '16'\nchunk_tokens = 64", "block_size='16': must be an integer"),
        ("[[sizes]]\nkernel = 'pallas_mosaic'\ndecode_stages = 5", "decode_stages=5: must be 1 to 4"),
        ("[[sizes]]\nkernel = 'pallas_mma'\nprograms = 0", "programs=0: must be 1 to 8"),
        ("[[sizes]]\nkernel = 'pallas_mma'\nvalue_keys = 48", "value_keys=48: must be 16, 32 or 64"),
        ("[[sizes]]\nkernel = 'pallas_mosaic'\nvalue_keys = 32", "value_keys: is no size of pallas_mosaic"),
        ("[[sizes]]\nkernel = 'plan'\ndevice = 'cpu'", "sizes 1: has no size of plan; give one of chunk_tokens"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_the_setting_reads_a_file_or_names_what_is_wrong(tmp_path):
    file = tmp_path / "own.toml"
    with pytest.raises(
        ValueError, match=r"runtime.kernel_tuning=.*own.toml: no such file; write one with: pagedjax"
    ):
        read_tuning(str(file))
    file.write_text(OWN)
    assert read_tuning(str(file)) == parse(OWN) and read_tuning("") is PACKAGED
    file.write_text("kernel = ")
    with pytest.raises(ValueError, match=r"runtime.kernel_tuning=.*own.toml: is not valid TOML"):
        read_tuning(str(file))
    file.write_text("[[sizes]]\nkernel = 'plan'\nchunks = 1")
    with pytest.raises(
        ValueError, match=r"runtime.kernel_tuning=.*own.toml: sizes 1: chunks: is no size of plan"
    ):
        read_tuning(str(file))
