"""The TPU kernel in Pallas' TPU interpreter (races, poisoned scratch), and what it refuses."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from judges import QUICK

from pagedjax.kernels import (
    IMPLEMENTATIONS,
    KVLayout,
    KVPool,
    Tuning,
    paged_attention,
    pallas_tpu,
    plan_ragged,
    tpu_sizes,
    write_and_attend,
)

TILING = pallas_tpu.Tiling(chunk_tokens=32, tile_queries=32)


def race_found(call):
    """Whether the interpreter saw a race: newer JAX raises, older JAX notes it."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
        return True
    return bool(getattr(getattr(interpreter, "races", None), "races_found", False))


def run(step, interpret):
    params = {"window": None, "soft_cap": None, "sinks": None, **step.params}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def attend(q, pool, ragged):
        return pallas_tpu.attend(q, pool, step.layer, ragged, interpret=interpret, tiling=TILING, **params)

    q = jnp.asarray(step.q.astype(step.pool.data.dtype))
    return np.asarray(attend(q, step.pool, jax.tree.map(jnp.asarray, step.ragged))[0], np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [([1, 1, 1], [5, 0, 40]), ([1, 9], [9, 37])], ids=["decode", "mixed"])
def test_no_race_and_no_read_of_poisoned_scratch(build, oracle, rows):
    """InterpretParams fills scratch with NaN, runs DMAs as a TPU orders them, and reports races."""
    step = build(*rows, window=50)
    outs = []
    assert not race_found(lambda: outs.append(run(step, pltpu.InterpretParams(detect_races=True))))
    out = outs[0]
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=step.tolerance[0])


def test_a_planted_race_is_found():
    """The detector must be able to fail: a copy that is read before it is awaited."""

    def kernel(x_ref, o_ref, buffer, sem):
        copy = pltpu.make_async_copy(x_ref, buffer, sem)
        copy.start()
        o_ref[...] = buffer[...]
        copy.wait()

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )
    assert race_found(lambda: call(jnp.ones((8, 128))))


def test_groups_merge_on_the_tpu_path_too(build, oracle):
    step = build([1] * 3, [70, 65, 97], share=64)
    args = step.plan_args | dict(max_groups=2, min_group_rows=2)
    step.ragged = plan_ragged(step.query_lens, [len(k) for k in step.keys], step.tables, **args)
    assert int(step.ragged.decode_list(None).num_groups) == 1
    out = run(step, True)
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=step.tolerance[0])


@pytest.mark.parametrize("case", ["two cores", "parts of blocks", "groups", "layer outside"])
def test_the_kernel_writes_the_new_keys_of_decode_rows(build, interpreted, monkeypatch, case):
    """Beside a scatter before it: the pool's every bit, what stood around the new rows included, and the outputs."""
    chip = TWO_CORES if case == "two cores" else tpu_sizes.TpuChip(128 << 20, 1 << 20)
    monkeypatch.setattr(pallas_tpu, "chip", lambda interpret: chip)
    monkeypatch.setitem(IMPLEMENTATIONS, "pallas_tpu", interpreted["pallas_tpu"])
    lens = [65, 66, 0, 97, 33] if case == "groups" else [32, 33, 0, 1, 40]
    share = [(range(2), 64)] if case == "groups" else 0
    dtype = "bfloat16" if case == "two cores" else "float32"
    step = build(
        [1] * 5, lens, heads=(4, 2), head_dim=32, block_size=8, dtype=dtype, share=share, buckets=(7, 7, 7)
    )
    args = step.plan_args | dict(max_groups=2, min_group_rows=2)
    step.ragged = plan_ragged(step.query_lens, lens, step.tables, **args)
    layer = jnp.int32(7) if case == "layer outside" else step.layer
    k, v = np.random.default_rng(5).standard_normal((2, 7, 2, 32)).astype(np.float32)
    fused, apart = (
        replace(
            step.ragged, tuning=Tuning.parse({"sizes": [{"kernel": "pallas_tpu", "fused_write": n}]}, "test")
        )
        for n in (1, 0)
    )

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(ragged, layer):
        params = {name: value for name, value in step.params.items() if name != "window"}
        q = jnp.asarray(step.q, step.pool.data.dtype)
        return write_and_attend(q, k, v, step.pool, layer, ragged, implementation="pallas_tpu", **params)

    assert "aliases=((" in str(run.trace(fused, layer).jaxpr).replace("input_output_", "")
    (pool, out), (want_pool, want) = run(fused, layer), run(apart, layer)
    bits = {4: np.uint32, 2: np.uint16}[pool.data.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(pool.data).view(bits), np.asarray(want_pool.data).view(bits))
    assert (case == "layer outside") == bool(
        (np.asarray(pool.data).view(bits) == np.asarray(step.pool.data).view(bits)).all()
    )
    np.testing.assert_allclose(
        np.asarray(out, np.float64), np.asarray(want, np.float64), atol=step.tolerance[0]
    )


def test_rows_apart_are_written_before_any_attends(build, interpreted, monkeypatch, oracle):
    """Three tokens of one sequence as rows apart, the last one first: it sees keys that later rows write."""
    monkeypatch.setitem(IMPLEMENTATIONS, "pallas_tpu", interpreted["pallas_tpu"])
    step = build([3], [20], heads=(4, 2), head_dim=32, block_size=8)
    tables = np.repeat(step.tables, 3, axis=0)
    buckets = dict(num_tokens_bucket=3, num_seqs_bucket=3, decode_bucket=3)
    args = step.plan_args | buckets | dict(apart=True)
    apart = plan_ragged([1] * 3, [20, 19, 18], tables, **args)
    k, v = (jnp.asarray(x[0][:16:-1]) for x in (step.keys, step.values))
    data = np.array(step.pool.data)
    block = step.layer * step.pool.layout.num_blocks + step.tables[0, 17 // 8]
    data[block, 17 % 8 :] = np.nan  # nobody has written them yet
    pool = KVPool(jnp.asarray(data), step.pool.layout)
    params = {name: value for name, value in step.params.items() if name != "window"}

    _, out = write_and_attend(
        step.q[2::-1], k, v, pool, step.layer, apart, implementation="pallas_tpu", **params
    )
    np.testing.assert_allclose(out, step.expected(oracle)[0][::-1], atol=step.tolerance[0])


TWO_CORES = tpu_sizes.TpuChip(128 << 20, 1 << 20, num_cores=2)


@pytest.mark.parametrize(
    "chip, lens, tree",
    [
        # 20 rows are two tiles of the kernel's; three groups in two levels, and rows in none.
        (TWO_CORES, [97, 33, *range(70, 90), 0, 65], [(range(2, 22), 32), (range(2, 6), 64), (range(10, 22), 64)]),
        # Tables of two rows, or groups, fit together.
        (tpu_sizes.TpuChip(128 << 20, 120), [65, 66, 70, 71, 72], [(range(5), 32), (range(2), 64), (range(2, 5), 64)]),
    ],
    ids=["two cores", "small tables"],
)  # fmt: skip
def test_shared_prefixes_on_chips(build, check, monkeypatch, chip, lens, tree):
    monkeypatch.setattr(pallas_tpu, "chip", lambda interpret: chip)
    step = build([1] * len(lens), lens, heads=(2, 1), head_dim=16, share=tree, dtype="bfloat16")
    args = step.plan_args | dict(max_groups=3, min_group_rows=2)
    step.ragged = plan_ragged(step.query_lens, lens, step.tables, **args)
    assert int(step.ragged.decode_list(None).num_groups) == 3
    check(step, "pallas_tpu")


@pytest.mark.parametrize(
    "rows",
    [([1, 1, 1], [200, 1, 0]), ([1], [40]), ([1, 1, 5, 40], [9, 90, 37, 60])],
    ids=["long first", "one row", "mixed"],
)
def test_two_cores_share_the_entries(build, check, monkeypatch, rows):
    """Each begins and ends by itself: no buffer or copy of one is another's. One entry leaves a core without any."""
    monkeypatch.setattr(pallas_tpu, "chip", lambda interpret: TWO_CORES)
    step = build(*rows, heads=(2, 1), head_dim=16, window=50, sinks=np.linspace(-1, 1, 2))
    check(step, "pallas_tpu")


@pytest.mark.parametrize(
    "kind, cores, axes",
    [("TPU v5", 2, r"\('parallel', 'arbitrary'\)"), ("TPU v5 lite", 1, r"\('arbitrary',\)")],
)
def test_a_grid_is_dealt_out_to_the_cores_of_its_chip(build, kind, cores, axes):
    """As traced for v5p, whose compiler gives each core its part of a parallel axis, and for v5e."""
    step = build([1, 20], [5, 40], dtype="bfloat16", heads=(8, 4), head_dim=128)
    chip = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip)):
        call = functools.partial(paged_attention, implementation="pallas_tpu", **step.params)
        q = jnp.asarray(step.q, jnp.bfloat16)
        text = str(jax.jit(call).trace(q, step.pool, step.layer, step.ragged).jaxpr)
    assert len(re.findall(rf"dimension_semantics={axes}", text)) == text.count("dimension_semantics") == 3
    assert text.count("grid=(2, DynamicGridDim)") == (3 if cores == 2 else 0)


def test_F061_tables_beyond_smem_are_worked_in_groups_of_rows(build, oracle, monkeypatch):
    """Two groups of two rows: decode rows in both, a tile in the last."""
    chip = tpu_sizes.TpuChip(128 << 20, 350)
    monkeypatch.setattr(pallas_tpu, "chip", lambda interpret: chip)
    step = build([1, 1, 1, 5], [70, 0, 41, 9], heads=(2, 1), head_dim=16, table_width=30, buckets=(8, 4, 3))
    assert tpu_sizes.Sizes(step.pool.layout, 2, False, TILING, chip).rows_at_once(30) == 2
    out = run(step, True)
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=2e-6, rtol=2e-6)


def test_F062_whole_tiles_and_short_entries(build, oracle):
    """Queries in tiles of 32, in entries of 16, and both of one row; the last ones reach the end of the bucket."""
    lens = [1, 5, 16, 17, 50]
    step = build(lens, [40, 60, 16, 130, 81], heads=(2, 1), buckets=(sum(lens), len(lens), 4), window=45)
    out = run(step, True)
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=2e-6, rtol=2e-6)


def test_F061_what_does_not_fit_is_refused_while_tracing(build, monkeypatch):
    step = build([1, 5], [40, 50])
    for chip, message in (
        (
            tpu_sizes.TpuChip(128 << 20, 30),
            "block_tables of 4 blocks a row: must fit 0 KiB of SMEM; use 'xla'",
        ),
        (
            tpu_sizes.TpuChip(64 << 10, 1 << 20),
            "float32, 6 query heads of 32, blocks of 16: buffers of .* must fit 60%",
        ),
    ):
        monkeypatch.setattr(pallas_tpu, "chip", lambda interpret, chip=chip: chip)
        with pytest.raises(NotImplementedError, match=message):
            run(step, True)


def test_tiles_shrink_to_the_chip():
    layout = KVLayout(1, 100, 16, 8, 128, "bfloat16")
    tiles = {
        mib: tpu_sizes.Sizes(
            layout, 32, True, tpu_sizes.Tiling(), tpu_sizes.TpuChip(mib << 20, 1 << 20)
        ).tile_queries(512)
        for mib in (16, 64, 128)
    }
    assert tiles == {16: 32, 64: 128, 128: 128}
    with pytest.raises(ValueError, match="tile_queries=24: must be a power of two of at least 16"):
        tpu_sizes.Tiling(tile_queries=24)


def test_refusals_name_the_limit(build):
    interpreted = functools.partial(run, interpret=True)
    with pytest.raises(
        NotImplementedError, match="dtype=float16: must be one of float32, bfloat16, int8, fp8_e4m3"
    ):
        interpreted(build([1], [5], dtype="float16"))
    with pytest.raises(NotImplementedError, match="block_size=4: must be at least 8"):
        interpreted(build([1], [5], block_size=4))
    step = build([1], [5])
    with pytest.raises(NotImplementedError, match="pallas_tpu: platform=cpu: must be a TPU"):
        paged_attention(
            jnp.asarray(step.q), step.pool, 0, step.ragged, scale=1.0, implementation="pallas_tpu"
        )
