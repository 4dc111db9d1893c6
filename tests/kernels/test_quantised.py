"""Pools of eight bits: what is read is what was written, within half a step of its scale, by every reader alike."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judges import QUICK

from pagedjax.cache.rules import SCALED
from pagedjax.kernels import KVLayout, KVPool, make_pool, native, paged_attention, plan_ragged, write_kv
from pagedjax.kernels.blocks import _write_tiles, copy_blocks, new_rows
from pagedjax.kernels.layout import write_rows
from pagedjax.kernels.quant import QUANTISED, dequantise, quantise

KINDS = tuple(QUANTISED)
READERS = ["xla", "native"] if native.compiler() else ["xla"]


@pytest.mark.parametrize("kind", SCALED)
def test_a_head_comes_back_within_half_a_step_of_its_own_scale(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3, 24), np.float32) * 10.0 ** rng.integers(-30, 30, (50, 3, 1))
    x[0] = 0
    x[1, 0], x[1, 1, 5] = np.nan, np.inf
    back = np.asarray(dequantise(*quantise(jnp.asarray(x), kind), kind))
    largest = np.abs(x).max(axis=-1, keepdims=True)
    assert np.isnan(back[1, :2]).all() and not np.isnan(back[1, 2]).any() and not back[0].any()
    # fp8's step follows the number: three bits behind the first one.
    step = largest / 127 if kind == "int8" else np.maximum(np.abs(x) / 8, largest / 448 / 512)
    ok = np.isfinite(largest[..., 0])
    assert (np.abs(back - x)[ok] <= 0.502 * np.broadcast_to(step, x.shape)[ok] + 1e-45).all()


def test_codes_without_scales_are_the_nearest_numbers_and_end_at_448() -> None:
    kind = "fp8_e4m3_unscaled"
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3, 24), np.float32) * 2.0 ** rng.integers(-12, 11, (50, 3, 1))
    x[0, 0, :4] = np.inf, -np.inf, np.nan, 460.0
    codes, scales = quantise(jnp.asarray(x), kind)
    assert scales.shape == (50, 3, 0)
    back = np.array(dequantise(codes, scales, kind))
    assert back[0, 0, :2].tolist() == [448, -448] and np.isnan(back[0, 0, 2]) and back[0, 0, 3] == 448
    x[0, 0, :3] = 0
    back[0, 0, :3] = 0
    assert (np.abs(x) > 448).sum() > 100  # which plain casts would make NaN
    x = np.clip(x, -448, 448)
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 16, 2.0**-10)).all()


def test_pools_without_scales_hold_twice_the_tokens_of_bfloat16() -> None:
    wide = KVLayout(2, 24, 16, 8, 128, "bfloat16")
    assert 2 * KVLayout(2, 24, 16, 8, 128, "fp8_e4m3_unscaled").num_bytes == wide.num_bytes


def _pool(kind: str, rng: np.random.Generator, block_size: int = 8) -> tuple[KVPool, KVPool]:
    """A poisoned pool of 2 layers into which all slots of blocks 1 to 19 were written, and what it holds in float32."""
    layout = KVLayout(2, 24, block_size, 3, 24, kind)
    plain = KVLayout(2, 24, block_size, 3, 24)
    pool, wide = make_pool(layout, np.nan), make_pool(plain, np.nan)
    slots = np.arange(block_size, 20 * block_size, dtype=np.int32)
    for layer in range(2):
        k, v = rng.standard_normal((2, len(slots), 3, 24), np.float32)
        pool = write_kv(pool, layer, k, v, slots)
        codes = [dequantise(*quantise(jnp.asarray(x), kind), kind) for x in (k, v)]
        wide = write_kv(wide, layer, *codes, slots)
    return pool, wide


@pytest.mark.parametrize("implementation", READERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 11}, {"soft_cap": 3.0}, {"sinks": True}, {"groups": 2}, {"apart": True}],
    ids=str,
)
def test_attention_over_codes_is_that_over_what_they_stand_for(
    implementation: str, kind: str, options: dict[str, Any]
) -> None:
    native.prepare(implementation)
    options = dict(options)
    rng = np.random.default_rng(1)
    pool, wide = _pool(kind, rng)
    apart, groups = options.pop("apart", False), options.pop("groups", 0)
    qlens, lens = ([1, 1, 1], [40, 37, 9]) if apart or groups else ([1, 1, 7, 20], [40, 1, 7, 33])
    tables = np.zeros((len(lens), 8), np.int32)
    for row, n in enumerate(lens):
        tables[row, : -(-n // 8)] = rng.permutation(np.arange(1, 20))[: -(-n // 8)]
    if groups:
        tables[1, :4] = tables[0, :4]
    total = sum(qlens)
    ragged = plan_ragged(
        qlens,
        lens,
        tables,
        block_size=8,
        num_tokens_bucket=total if apart or groups else 32,
        num_seqs_bucket=len(lens),
        decode_bucket=total if apart or groups else 2,
        windows=(options.get("window"),),
        chunk_tokens=16,
        max_groups=groups,
        min_group_rows=2,
        apart=apart,
    )
    q = jnp.asarray(rng.standard_normal((ragged.num_tokens_bucket, 9, 24), np.float32))
    if options.pop("sinks", False):
        options["sinks"] = jnp.linspace(-1, 1, 9)
    attend = jax.jit(
        functools.partial(paged_attention, scale=0.2, implementation=implementation, **options),
        compiler_options=QUICK,
    )
    for layer in range(2):
        ours, theirs = (attend(q, one, jnp.int32(layer), ragged) for one in (pool, wide))
        assert not np.isnan(ours[:total]).any() and float(jnp.abs(ours[:total]).max()) > 0.1
        np.testing.assert_allclose(ours[:total], theirs[:total], atol=2e-6)


@pytest.mark.parametrize(
    "kind, worked_in", [("int8", "bfloat16"), ("fp8_e4m3", "float32"), ("fp8_e4m3_unscaled", "bfloat16")]
)
def test_the_tpu_kernel_reads_codes(build: Any, check: Any, kind: str, worked_in: str) -> None:
    """Decode rows and prompts in the interpreter, unwritten slots NaN: within the tolerance of the queries' dtype."""
    step = build(
        [1, 1, 9], [37, 5, 40], heads=(6, 3), head_dim=40, dtype=kind, worked_in=worked_in, window=25, soft_cap=5.0
    )  # fmt: skip
    check(step, "pallas_tpu")


@pytest.mark.parametrize("implementation", ["pallas_mosaic", "pallas_mma"])
def test_gpu_kernels_read_codes_without_scales(
    build: Any, check: Any, interpreted: Any, implementation: str
) -> None:
    """Those with scales are in the table; here no bytes come beside the codes, and weights keep the queries' dtype."""
    if implementation not in interpreted:
        pytest.skip("jax before 0.12 has no GPU interpreter")
    args: dict[str, Any] = dict(dtype="fp8_e4m3_unscaled", worked_in="float16", window=25, soft_cap=5.0)
    check(build([1, 1, 9], [37, 5, 80], heads=(6, 3), head_dim=32, **args), implementation)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_copy_bit_by_bit_and_stay_in_place(kind: str) -> None:
    pool, _ = _pool(kind, np.random.default_rng(2))
    before = np.asarray(pool.data)
    after = copy_blocks(pool, jnp.array([3, 4]), jnp.array([21, 22]))
    rows = np.asarray(after.data).reshape(2, 24, 8, -1)
    np.testing.assert_array_equal(rows[:, [21, 22]], before.reshape(2, 24, 8, -1)[:, [3, 4]])
    step = jax.jit(lambda pool, k: write_kv(pool, 1, k, k, jnp.arange(8, 12)), donate_argnums=0)
    memory: Any = step.lower(pool, jnp.zeros((4, 3, 24))).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool.layout.num_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_written_as_rows_are_scattered(kind: str) -> None:
    """As TPUs write them, in steps of 32 tokens: other slots and what lies behind the lanes in use stay."""
    rng = np.random.default_rng(4)
    pool = make_pool(KVLayout(2, 4, 64, 3, 24, kind), np.nan)
    k, v = (jnp.asarray(x) for x in rng.standard_normal((2, 6, 3, 24), np.float32))
    slots = jnp.asarray([64, 65, 255, -1, 256, 130], jnp.int32)  # the layer has 256
    for layer in (0, 1):
        rows = write_rows(pool.layout, layer, slots // 64)
        ours = _write_tiles(pool, new_rows(pool, layer, k, v, slots), rows, slots % 64)
        theirs = write_kv(pool, layer, k, v, slots)
        np.testing.assert_array_equal(ours.data, theirs.data)
        assert (np.asarray(ours.data) != np.asarray(pool.data)).any()


def test_a_pool_says_what_it_takes_and_who_reads_it() -> None:
    wide, small = KVLayout(1, 2, 16, 8, 128, "int8"), KVLayout(1, 2, 16, 3, 64, "int8")
    assert KVLayout(1, 2, 16, 8, 128, "bfloat16").num_bytes / wide.num_bytes > 1.85
    assert KVLayout(1, 2, 16, 3, 64, "bfloat16").num_bytes / small.num_bytes >= 1.5
    with pytest.raises(ValueError, match="dtype=int8: keys that hold their values are not quantised"):
        KVLayout(1, 2, 16, 1, 576, "int8", 512)
    pool, _ = _pool("int8", np.random.default_rng(3))
    plan = plan_ragged(
        [1],
        [9],
        np.ones((1, 2), np.int32),
        block_size=8,
        num_tokens_bucket=1,
        num_seqs_bucket=1,
        decode_bucket=1,
    )
    for name in ("pallas_tpu", "pallas_mosaic", "pallas_mma"):
        with pytest.raises(NotImplementedError, match=name):
            paged_attention(jnp.zeros((1, 9, 24)), pool, 0, plan, scale=1.0, implementation=name)
