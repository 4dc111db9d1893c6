"""What no implementation may do, whichever serves: F063 to F066, and the doors' refusals."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.kernels import (
    IMPLEMENTATIONS,
    KVLayout,
    KVPool,
    copy_blocks,
    gather_blocks,
    make_pool,
    native,
    paged_attention,
    plan_ragged,
    scatter_blocks,
    write_kv,
)

if native.compiler():
    native.load()
# Interpreted kernels join where they can be: the fixture `interpreted` has them.
NAMES = [name for name in IMPLEMENTATIONS if name != "native" or native.compiler()]
BUCKETS = dict(block_size=4, num_tokens_bucket=32, num_seqs_bucket=8, decode_bucket=4)


@pytest.fixture(params=NAMES)
def implementation(request, interpreted, monkeypatch):
    """Each implementation's name, those of devices that are not here interpreted."""
    if request.param in interpreted:
        monkeypatch.setitem(IMPLEMENTATIONS, request.param, interpreted[request.param])
    elif request.param not in ("xla", "native"):
        pytest.skip(f"{request.param} is not judged: this jax has no interpreter for it")
    return request.param


def small(build, implementation, **change):
    """Decode rows and a longer one, in a dtype that the kernel takes."""
    float32 = implementation in ("xla", "native", "pallas_tpu")
    args = dict(chunk_tokens=64, dtype="float32" if float32 else "float16") | change
    return build([1, 1, 5], [40, 20, 50], **args)


def output(step, implementation, **params):
    """A step's program: (q, pool, layer) → (o, lse) of its tokens, the layer traced."""
    compiled = jax.jit(
        lambda q, pool, ragged, layer: paged_attention(
            q, pool, layer, ragged, return_lse=True, implementation=implementation, **(step.params | params)
        ),
        compiler_options={"xla_backend_optimization_level": "0"},
    )

    def run(q=step.q, pool=step.pool, layer=step.layer):
        q = jnp.asarray(q).astype(step.pool.data.dtype)
        out, lse = compiled(q, pool, jax.tree.map(jnp.asarray, step.ragged), jnp.int32(layer))
        return np.asarray(out, np.float32)[: step.num_tokens], np.asarray(lse)[: step.num_tokens]

    return run


OUTSIDE = [-1, 2, 2**30, -(2**30)]


def test_F063_a_traced_layer_outside_is_no_layer(build, implementation):
    run = output(small(build, implementation), implementation)
    for layer in OUTSIDE:
        out, lse = run(layer=layer)
        assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("writer", ["native", "xla"])
def test_F063_a_traced_layer_outside_is_not_written(monkeypatch, writer):
    if writer == "xla":
        monkeypatch.setattr(native, "serves", lambda pool: False)
    elif native.compiler() is None:
        pytest.skip("native cannot be built: no C++ compiler here")
    layout = KVLayout(2, 4, 8, 1, 8)
    k = jnp.ones((3, 1, 8))
    slots = np.array([0, 9, 31], np.int32)
    write = jax.jit(lambda pool, layer: write_kv(pool, layer, k, k, slots))
    for layer in OUTSIDE:
        assert (np.asarray(write(make_pool(layout, 7.0), jnp.int32(layer)).data) == 7).all()
    assert (np.asarray(write(make_pool(layout, 7.0), jnp.int32(1)).data) != 7).any()


def plan(qlens=(1, 5), lens=(9, 6), tables=None, **change):
    tables = np.array([[7, 3, 5], [2, 9, 4]], np.int32) if tables is None else tables
    return plan_ragged(qlens, lens, tables, **{**BUCKETS, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0: must be a power of two"),
        ({"chunk_tokens": 24}, "chunk_tokens=24: must be a power of two"),
        ({"tile_queries": 0}, "tile_queries=0: must be at least 1"),
        ({"lens": (9, 4)}, r"seq_lens=\[9, 4\]: must count this step's tokens"),
        ({"windows": (0,)}, r"windows=\(0,\): must be at least 1"),
        ({"max_groups": 1, "min_group_rows": 1}, "min_group_rows=1: must be at least 0 and 2"),
        ({"qlens": (1.0, 5.0)}, "query_lens: must be integers, got float64"),
        ({"lens": (9, 2**32 + 6)}, "seq_lens: must fit int32"),
        ({"tables": np.zeros((2, 3))}, r"block_tables=float64\[2, 3\]: must be integers"),
        ({"tables": np.array([[7, 3, 5], [2**29 + 5, 9, 4]])}, "writes to block id 536870917: must be between 0"),
        ({"tables": np.array([[7, 3, -(2**29) + 5], [2, 9, 4]])}, "writes to block id -536870907"),
    ],
)  # fmt: skip
def test_F064_plans_that_would_be_wrong_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan(**change)


def test_F064_a_plan_and_its_pool_know_each_other(build):
    step = small(build, "xla")
    attend = functools.partial(paged_attention, jnp.asarray(step.q), scale=1.0)
    wide = np.repeat(step.tables, 2, axis=1)
    for size in (8, 32):
        other = plan_ragged([1, 1, 5], [40, 20, 50], wide, **step.plan_args | {"block_size": size})
        with pytest.raises(ValueError, match=f"ragged.block_size={size}: must be the pool's 16"):
            attend(step.pool, 1, other)
    short = KVPool(step.pool.data[:-1], step.pool.layout)
    for call in (
        lambda pool: attend(pool, 1, step.ragged),
        lambda pool: write_kv(pool, 1, jnp.zeros((1, 2, 32)), jnp.zeros((1, 2, 32)), np.zeros(1, np.int32)),
        lambda pool: gather_blocks(pool, np.zeros(1, np.int32)),
        lambda pool: copy_blocks(pool, np.zeros(1, np.int32), np.ones(1, np.int32)),
        lambda pool: scatter_blocks(pool, np.zeros(1, np.int32), jnp.zeros((2, 1, 16, 128))),
    ):
        with pytest.raises(ValueError, match=r"pool.data=float32\[.*\]: must be float32 \[R="):
            call(short)
        with pytest.raises(ValueError, match=r"pool.data=bfloat16\[.*\]: must be float32 \[R="):
            call(KVPool(step.pool.data.astype(jnp.bfloat16), step.pool.layout))


def test_F064_a_window_beside_groups_must_be_planned(build, check):
    step = build([1] * 3, [70, 65, 97], share=64)
    lens = [len(k) for k in step.keys]
    args = step.plan_args | dict(max_groups=2, min_group_rows=2)
    grouped = plan_ragged(step.query_lens, lens, step.tables, **args)
    q = jnp.asarray(step.q)
    with pytest.raises(ValueError, match="window=40: must be planned where groups are"):
        paged_attention(q, step.pool, step.layer, grouped, window=40, scale=1.0)
    planned = plan_ragged(step.query_lens, lens, step.tables, **args | {"windows": (40,)})
    check(replace(step, ragged=planned, params=step.params | {"window": 40}))


def test_F064_ids_that_would_wrap_are_refused():
    pool = make_pool(KVLayout(1, 8, 16, 1, 8))
    for ids in (np.array([2**32 + 5]), np.array([1.0]), np.zeros((1, 1), np.int32)):
        with pytest.raises(ValueError, match="ids"):
            gather_blocks(pool, ids)
    with pytest.raises(ValueError, match=r"slot_mapping=int64\[1\]: must be int32 \[n=1\]"):
        write_kv(pool, 0, jnp.zeros((1, 1, 8)), jnp.zeros((1, 1, 8)), np.array([2**32 + 5]))
    with pytest.raises(ValueError, match=r"layer=1\.0: must be an int or an integer scalar"):
        write_kv(pool, 1.0, jnp.zeros((1, 1, 8)), jnp.zeros((1, 1, 8)), np.array([5], np.int32))
    with pytest.raises(ValueError, match=r"k=int32\[1, 1, 8\]: must be floating \[T=1, K=1, H=8\]"):
        write_kv(pool, 0, jnp.zeros((1, 1, 8), int), jnp.zeros((1, 1, 8)), np.array([5], np.int32))


def test_F065_nan_in_nan_out(build, implementation):
    """Token 0 is a decode row, tokens 2 to 6 a longer one; the rows beside the one with a NaN keep their bits."""
    step = small(build, implementation)
    run = output(step, implementation)
    base, base_lse = run()
    K, H, P = 2, 32, step.pool.layout.num_blocks
    rows = ((0, [0]), (2, [2, 3, 4, 5, 6]))
    for (row, tokens), where in itertools.product(rows, ("query", "key", "value")):
        q, data = step.q.copy(), np.array(step.pool.data)
        if where == "query":
            q[tokens[0]] = np.nan
            tokens = tokens[:1]
        else:
            # Position 3, which every query of the row sees; all heads.
            lanes = slice(0, K * H) if where == "key" else slice(K * H, 2 * K * H)
            data[step.layer * P + step.tables[row, 0], 3, lanes] = np.nan
        out, lse = run(q, KVPool(jnp.asarray(data), step.pool.layout))
        others = [t for t in range(step.num_tokens) if t not in tokens]
        assert np.isnan(out[tokens]).all()
        assert np.isnan(lse[tokens]).all() == (where != "value")
        np.testing.assert_array_equal(out[others], base[others])
        np.testing.assert_array_equal(lse[others], base_lse[others])
    assert np.isfinite(base).all()


def test_F065_a_nan_in_a_shared_prefix_reaches_its_rows_alone(build):
    step = build([1] * 4, [70, 65, 97, 40], share=0)
    tables = step.tables.copy()
    tables[1, :4] = tables[0, :4]
    args = step.plan_args | dict(max_groups=2, min_group_rows=2)
    step.ragged = plan_ragged([1] * 4, [70, 65, 97, 40], tables, **args)
    assert int(step.ragged.decode_list(None).num_groups) == 1
    data = np.array(step.pool.data)
    data[step.layer * step.pool.layout.num_blocks + tables[0, 0], 3] = np.nan
    out, lse = output(step, "xla")(pool=KVPool(jnp.asarray(data), step.pool.layout))
    assert np.isnan(out[:2]).all() and np.isnan(lse[:2]).all()
    assert np.isfinite(out[2:]).all() and np.isfinite(lse[2:]).all()


def test_F066_x64_changes_nothing(build, implementation, oracle):
    step = small(build, implementation, soft_cap=5.0, window=30)
    want, _ = step.expected(oracle)
    tolerance = 2e-6 if step.pool.layout.dtype == "float32" else 5e-4
    # One kind of number is enough for interpreted kernels: they are given the same Python float.
    for number in (float, np.float64) if implementation in ("xla", "native") else (np.float64,):
        params = dict(scale=number(step.params["scale"]), window=np.int64(30), soft_cap=number(5.0))
        with jax.enable_x64(True):
            out, _ = output(step, implementation, **params)()
        np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)


def test_F066_writes_and_copies_under_x64():
    layout = KVLayout(2, 4, 8, 1, 8)
    k = np.arange(24, dtype=np.float32).reshape(3, 1, 8)
    slots, ids = np.array([0, 9, -1], np.int32), np.array([0, 1], np.int32)

    def run():
        pool = write_kv(make_pool(layout), jnp.int32(1), jnp.asarray(k), jnp.asarray(k), slots)
        pool = copy_blocks(pool, ids, np.array([2, 3], np.int32))
        return np.asarray(scatter_blocks(pool, ids[:1], gather_blocks(pool, ids[1:])).data)

    want = run()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(), want)


def test_numbers_that_are_no_numbers_are_refused(build):
    step = small(build, "xla")
    attend = functools.partial(paged_attention, jnp.asarray(step.q), step.pool, 1, step.ragged)
    with pytest.raises(ValueError, match=r"window=2\.5: must be an integer or None"):
        attend(scale=1.0, window=2.5)
    with pytest.raises(ValueError, match="scale='1': must be a number known while tracing"):
        attend(scale="1")
    with pytest.raises(ValueError, match=r"q=int32\[.*\]: must be floating \[T=10, N=6, H=32\]"):
        paged_attention(jnp.asarray(step.q).astype(int), step.pool, 1, step.ragged, scale=1.0)
    wide = replace(step.ragged, seq_lens=step.ragged.seq_lens.astype(np.int64))
    with pytest.raises(ValueError, match=r"ragged.seq_lens=int64\[4\]: must be int32 \[S=4\]"):
        paged_attention(jnp.asarray(step.q), step.pool, 1, wide, scale=1.0)
