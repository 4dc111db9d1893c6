"""Writes and copies of blocks: right slots only, in place when donated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.kernels import (
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

LAYOUT = KVLayout(num_layers=3, num_blocks=8, block_size=4, num_kv_heads=3, head_dim=16)


def numbered(layout=LAYOUT):
    """A pool in which every element differs."""
    return KVPool(jnp.arange(np.prod(layout.shape), dtype=jnp.float32).reshape(layout.shape), layout)


def kv(num_tokens, layout=LAYOUT, seed=0):
    rng = np.random.default_rng(seed)
    shape = (num_tokens, layout.num_kv_heads, layout.head_dim)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


@pytest.fixture(autouse=True, params=["native", "xla"])
def writer(request, monkeypatch):
    """Who stores keys and values: the C++ library, or XLA's scatter."""
    if request.param == "xla":
        monkeypatch.setattr(native, "serves", lambda pool: False)
    elif native.compiler() is None:
        pytest.skip("native cannot be built: no C++ compiler here")
    else:
        native.load()
    jax.clear_caches()


def test_layout_rounds_up_to_lanes_and_counts_bytes():
    assert LAYOUT.shape == (24, 4, 128)
    assert LAYOUT.num_bytes == 24 * 4 * 128 * 4
    assert KVLayout(2, 8, 16, 3, 64, jnp.bfloat16).shape == (16, 16, 384)
    assert KVLayout(2, 8, 16, 3, 64, jnp.bfloat16).num_bytes == 16 * 16 * 384 * 2
    assert len({KVLayout(2, 8, 16, 3, 64), KVLayout(2, 8, 16, 3, 64, np.float32)}) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 24}, "block_size=24: must be a power of two between 1 and 1024; try 16 or 32"),
        ({"head_dim": 300}, "head_dim=300: must be between 1 and 256"),
        ({"num_blocks": 0}, "num_blocks=0: must be at least 1"),
        ({"dtype": "int16"}, "dtype=int16: must be one of"),
        ({"num_blocks": 2**30}, "slots and rows must fit int32"),
    ],
)
def test_layout_refuses(change, message):
    fields = dict(num_layers=3, num_blocks=8, block_size=4, num_kv_heads=3, head_dim=16)
    with pytest.raises(ValueError, match=message):
        KVLayout(**{**fields, **change})


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_write_kv_touches_its_slots_only(layer):
    k, v = kv(3)
    before = numbered()
    after = write_kv(before, layer, jnp.asarray(k), jnp.asarray(v), np.array([5, -1, 31], np.int32))
    want = np.array(before.data)
    for token, slot in ((0, 5), (2, 31)):
        row = want[layer * 8 + slot // 4, slot % 4]
        row[:48], row[48:96] = k[token].ravel(), v[token].ravel()
    np.testing.assert_array_equal(after.data, want)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("block", [8, 100, -1, 2**29 - 1])
def test_B087_ids_beyond_the_pool_are_dropped(layer, block):
    """Without the check, id 8 of layer 0 is block 0 of layer 1, and a clamp hits block 7."""
    k, v = kv(1)
    before = numbered()
    write = jax.jit(write_kv)
    after = write(before, layer, jnp.asarray(k), jnp.asarray(v), np.array([block * 4], np.int32))
    np.testing.assert_array_equal(after.data, before.data)
    after = copy_blocks(before, jnp.array([1]), jnp.array([block]))
    np.testing.assert_array_equal(after.data, before.data)


def test_B067_padding_writes_nothing():
    """A step padded to its bucket leaves every block of other requests as it was, bit for bit."""
    lens = np.array([5], np.int32)
    tables = np.array([[2, 3]], np.int32)
    ragged = plan_ragged(
        [3], lens, tables, block_size=4, num_tokens_bucket=16, num_seqs_bucket=4, decode_bucket=2
    )
    assert ragged.slot_mapping.tolist() == [10, 11, 12] + [-1] * 13
    k, v = kv(16)
    before = numbered()
    after = np.asarray(write_kv(before, 1, jnp.asarray(k), jnp.asarray(v), ragged.slot_mapping).data)
    want = np.array(before.data)
    np.testing.assert_array_equal(np.delete(after, [8 + 2, 8 + 3], 0), np.delete(want, [8 + 2, 8 + 3], 0))
    assert (after[8 + 2, 2:, :96] != want[8 + 2, 2:, :96]).all()
    np.testing.assert_array_equal(after[8 + 3, 1:], want[8 + 3, 1:])


def test_copy_blocks_is_one_assignment_in_all_layers():
    before = numbered()
    # 2 is both a source and, in the next pair, no destination: a swap of 4 and 5, a copy, padding.
    after = copy_blocks(before, jnp.array([4, 5, 2, 0]), jnp.array([5, 4, 7, -1]))
    want = np.array(before.data).reshape(3, 8, 4, 128)
    want[:, [5, 4, 7]] = want[:, [4, 5, 2]]
    np.testing.assert_array_equal(after.data, want.reshape(before.data.shape))


def test_gather_then_scatter_moves_blocks_between_pools():
    source, target = numbered(), make_pool(LAYOUT, fill=float("nan"))
    blocks = gather_blocks(source, jnp.array([3, 6]))
    assert blocks.shape == (3, 2, 4, 128)
    moved = scatter_blocks(target, jnp.array([1, -1]), blocks)
    data = np.asarray(moved.data).reshape(3, 8, 4, 128)
    np.testing.assert_array_equal(data[:, 1], np.asarray(source.data).reshape(3, 8, 4, 128)[:, 3])
    assert np.isnan(np.delete(data, 1, axis=1)).all()


def test_wrong_shapes_are_refused():
    pool = make_pool(LAYOUT)
    with pytest.raises(ValueError, match=r"k=float32\[2, 3, 8\]: must be floating \[T=2, K=3, H=16\]"):
        write_kv(pool, 0, jnp.zeros((2, 3, 8)), jnp.zeros((2, 3, 16)), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"layer=3: must be between 0 and 2, the pool's layers"):
        write_kv(pool, 3, jnp.zeros((2, 3, 8)), jnp.zeros((2, 3, 8)), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"src.shape=\(2,\): must equal"):
        copy_blocks(pool, jnp.array([1, 2]), jnp.array([1]))
    with pytest.raises(ValueError, match=r"ids.shape=\(\): must be one-dimensional"):
        gather_blocks(pool, jnp.int32(1))
    with pytest.raises(ValueError, match=r"blocks=float32.*must be floating \[L=3, C=1, B=4, W=128\]"):
        scatter_blocks(pool, jnp.array([1]), jnp.zeros((3, 2, 4, 128)))


@functools.partial(jax.jit, donate_argnums=0)
def step(pool, k, v, q, ragged, src, dst):
    pool = copy_blocks(pool, src, dst)
    for layer in range(pool.layout.num_layers):
        # As in a model, a layer's keys depend on the layer before: so XLA can order the write behind
        # its reads. Writes that nothing orders would cost a copy of the pool.
        pool = write_kv(pool, layer, k + q[:, :3], v + q[:, :3], ragged.slot_mapping)
        q = q + paged_attention(q, pool, layer, ragged, scale=0.25)
    return pool, q


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 7]])
def test_a_donated_pool_is_updated_in_place(query_lens):
    """alias = pool bytes; temporaries do not grow with the pool and stay under 1 % of the larger."""
    temps = []
    for num_blocks in (1024, 16384):
        layout = KVLayout(2, num_blocks, 16, 3, 64)
        tables = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
        ragged = plan_ragged(
            query_lens, [20, 30], tables, block_size=16, num_tokens_bucket=8, num_seqs_bucket=2,
            decode_bucket=query_lens.count(1),
        )  # fmt: skip
        pool = KVPool(jax.ShapeDtypeStruct(layout.shape, jnp.float32), layout)
        kv_spec, q_spec = (jax.ShapeDtypeStruct((8, heads, 64), jnp.float32) for heads in (3, 9))
        ids = jax.ShapeDtypeStruct((4,), jnp.int32)
        memory = step.lower(pool, kv_spec, kv_spec, q_spec, ragged, ids, ids).compile().memory_analysis()
        assert memory.alias_size_in_bytes == layout.num_bytes
        temps.append(memory.temp_size_in_bytes)
    assert temps[0] == temps[1]
    assert temps[1] < 0.01 * layout.num_bytes


def test_the_pools_buffer_survives_the_step():
    layout = KVLayout(2, 64, 16, 3, 64)
    pool = make_pool(layout)
    ragged = plan_ragged(
        [1, 1], [20, 30], np.array([[1, 2], [3, 4]], np.int32), block_size=16, num_tokens_bucket=2,
        num_seqs_bucket=2, decode_bucket=2,
    )  # fmt: skip
    k, v = kv(2, layout)
    ids = jnp.array([-1], jnp.int32)
    where = pool.data.unsafe_buffer_pointer()
    for _ in range(3):
        pool, _ = step(pool, k, v, jnp.ones((2, 9, 64)), ragged, ids, ids)
        assert pool.data.unsafe_buffer_pointer() == where


def test_plans_share_no_memory_with_their_arguments():
    """On CPU a step reads the plan's own buffers while it runs: the caller's arrays must be free to change."""
    lens, tables = np.array([20, 30], np.int32), np.array([[1, 2], [3, 4]], np.int32)
    qlens = np.array([1, 1], np.int32)
    ragged = plan_ragged(
        qlens, lens, tables, block_size=16, num_tokens_bucket=2, num_seqs_bucket=2, decode_bucket=2
    )
    for leaf in jax.tree.leaves(ragged):
        for given in (lens, tables, qlens):
            assert not np.shares_memory(leaf, given)
