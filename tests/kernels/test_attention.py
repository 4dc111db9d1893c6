"""Every implementation against the float64 oracle, on one table; poisoned pools; exact invariants."""

import functools
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax.kernels import IMPLEMENTATIONS, KVPool, gpu_rows, native, paged_attention, plan_ragged
from pagedjax.kernels.quant import QUANTISED

AXES = {
    "heads": [(4, 4), (6, 2), (4, 1), (9, 3)],
    "head_dim": [8, 32, 64, 80, 96, 112, 128, 192, 256],
    "block_size": [1, 8, 16, 64, 128],
    "dtype": ["float32", "bfloat16", "float16", *QUANTISED],
    "window": [None, 1, 20],
    "soft_cap": [None, 5.0],
    "sinks": [False, True],
    "rows": ["decode", "prefill", "mixed"],
}


def rows_of(kind: str, block_size: int) -> tuple[list[int], list[int]]:
    """(query_lens, seq_lens): every border of a block, rows of length 0, chunks behind a cached prefix."""
    edges = [0, 1, max(1, block_size - 1), block_size, block_size + 1, 70]
    decode = [1] * len(edges), edges
    prefill = [2, 9, 8, 17], [2, block_size + 20, 8, 130]
    if kind == "mixed":
        return decode[0] + prefill[0], decode[1] + prefill[1]
    return decode if kind == "decode" else prefill


def pairwise(axes: dict[str, list]) -> list[tuple]:
    """A small set of cases in which every pair of values of two axes occurs (greedy, seeded)."""
    rng = np.random.default_rng(0)
    names = list(axes)
    index_pairs = list(itertools.combinations(range(len(names)), 2))
    missing = {
        (i, j, a, b)
        for i, j in index_pairs
        for a in range(len(axes[names[i]]))
        for b in range(len(axes[names[j]]))
    }
    cases = []
    while missing:
        i, j, a, b = min(missing)
        candidates = []
        for _ in range(30):
            case = [int(rng.integers(len(axes[n]))) for n in names]
            case[i], case[j] = a, b
            covers = sum((x, y, case[x], case[y]) in missing for x, y in index_pairs)
            candidates.append((covers, case))
        best = max(candidates)[1]
        missing -= {(x, y, best[x], best[y]) for x, y in index_pairs}
        cases.append(tuple(axes[n][k] for n, k in zip(names, best)))
    return cases


# Pallas' interpreters are slow: fewer head dims by default (B078 has them all), and only what the kernel takes.
AXES_OF = {
    "xla": AXES,
    "native": AXES | {"dtype": ["float32", "bfloat16", *QUANTISED]},
    "pallas_tpu": AXES
    | {
        "head_dim": [64, 80, 256],
        "block_size": [8, 16],
        "dtype": ["float32", "bfloat16", "int8", "fp8_e4m3"],
    },
    **dict.fromkeys(
        ("pallas_mosaic", "pallas_mma"),
        AXES
        | {
            "head_dim": [64, 80, 256],
            "block_size": [8, 16, 128],
            "dtype": ["bfloat16", "float16", "int8", "fp8_e4m3"],
        },
    ),
}
if native.compiler():
    native.load()
ABSENT = {
    "pallas_mosaic": not hasattr(plgpu, "InterpretGPUParams"),
    "pallas_mma": not hasattr(plgpu, "InterpretGPUParams"),
    "native": native.compiler() is None,
}
JUDGED = [name for name in IMPLEMENTATIONS if not ABSENT.get(name)]
PAIRWISE = [(name, case) for name in JUDGED for case in pairwise(AXES_OF[name])]
needs_gpu_interpreter = pytest.mark.skipif(
    "pallas_mosaic" not in JUDGED,
    reason="pallas_mosaic is not judged: jax before 0.12 has no GPU interpreter",
)


def dtype_of(implementation: str) -> str:
    """The pool dtype of the small named cases: the most exact that the kernel takes."""
    return "float16" if implementation in ("pallas_mosaic", "pallas_mma") else "float32"


def coded_in(implementation: str) -> str:
    """The dtype of queries over a pool of codes: the GPU kernels take no float32."""
    return "bfloat16" if implementation in ("pallas_mosaic", "pallas_mma") else "float32"


@pytest.mark.skipif(ABSENT["native"], reason="native is not judged: no C++ compiler here")
def test_the_native_kernel_is_in_the_table():
    assert "native" in {name for name, _ in PAIRWISE}


@needs_gpu_interpreter
def test_the_gpu_kernel_is_in_the_table():
    assert {"pallas_mosaic", "pallas_mma"} <= {name for name, _ in PAIRWISE}


def run_case(build, check, implementation, case):
    spec = dict(zip(AXES, case))
    qlens, lens = rows_of(spec.pop("rows"), spec["block_size"])
    spec["sinks"] = np.linspace(-2, 2, spec["heads"][0]) if spec["sinks"] else None
    # One chunk holds the largest block.
    chunk = max(32, spec["block_size"])
    check(
        build(qlens, lens, chunk_tokens=chunk, worked_in=coded_in(implementation), **spec),
        implementation,
        quick=True,
    )


@pytest.mark.parametrize("implementation", JUDGED)
def test_pairwise_set_is_small_and_complete(implementation):
    cases = [case for name, case in PAIRWISE if name == implementation]
    assert len(cases) <= 150
    for (i, a), (j, b) in itertools.combinations(enumerate(AXES_OF[implementation].values()), 2):
        assert {(x, y) for x in a for y in b} <= {(case[i], case[j]) for case in cases}


@pytest.mark.parametrize(
    "implementation, case", PAIRWISE, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else x
)
def test_equals_oracle(build, check, implementation, case):
    run_case(build, check, implementation, case)


# The product is dealt out in six hands, each with every geometry (heads, head dim, block size, dtype) under one of the
# six pairs of window and cap.
PRODUCT = ("heads", "head_dim", "block_size", "dtype", "window", "soft_cap", "sinks")
HANDS = list(itertools.product(AXES["window"], AXES["soft_cap"]))


def dealt(implementation: str, hand: int, heads: tuple[int, int], head_dim: int) -> list[tuple]:
    """What one hand of the product has of these heads: values of PRODUCT."""
    cases = []
    if implementation in ("pallas_mosaic", "pallas_mma") and head_dim % 16:
        return cases
    for b, block_size in enumerate(AXES["block_size"]):
        if implementation.startswith("pallas") and block_size < 8:
            continue
        shift = hand + AXES["heads"].index(heads) + AXES["head_dim"].index(head_dim) + b
        for d, dtype in enumerate(AXES_OF[implementation]["dtype"]):
            # Sinks join behind the kernel, in code that all implementations share. Where that code compiles to
            # one program with both, both are asked for; interpreted kernels would run twice, and take turns.
            turns = implementation.startswith("pallas")
            sinks = [(shift // len(HANDS) + d) % 2 == 1] if turns else AXES["sinks"]
            cases += [(heads, head_dim, block_size, dtype, *HANDS[shift % len(HANDS)], s) for s in sinks]
    return cases


@pytest.mark.parametrize("implementation", JUDGED)
def test_hands_are_dealt_fairly(implementation):
    """One hand has every pair of values that the kernel takes, all hands together every combination once."""
    geometries = list(itertools.product(AXES["heads"], AXES["head_dim"]))
    hands = [[c for g in geometries for c in dealt(implementation, hand, *g)] for hand in range(len(HANDS))]
    whole = [case for hand in hands for case in hand]
    axes = [sorted({case[i] for case in whole}, key=str) for i in range(len(PRODUCT))]
    assert [len(axis) for axis in axes[:1] + axes[3:]] == [
        len(AXES_OF[implementation][name]) for name in PRODUCT[:1] + PRODUCT[3:]
    ]
    for hand in hands:
        for (i, a), (j, b) in itertools.combinations(enumerate(axes), 2):
            assert {(case[i], case[j]) for case in hand} == set(itertools.product(a, b))
    combinations = math.prod(len(axis) for axis in axes)
    assert len(set(whole)) == len(whole) == combinations // (2 if implementation.startswith("pallas") else 1)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", AXES["head_dim"])
@pytest.mark.parametrize("heads", AXES["heads"], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
@pytest.mark.parametrize("implementation", JUDGED)
@pytest.mark.parametrize("hand", range(len(HANDS)), ids=lambda hand: f"hand{hand}")
def test_equals_oracle_full(build, check_variants, implementation, hand, heads, head_dim):
    """A program per (block size, dtype): all rows, the decode rows and the longer rows, with sinks and without."""
    cases = dealt(implementation, hand, heads, head_dim)
    if not cases:
        pytest.skip(f"{implementation} takes head dims that are multiples of 16")
    for case, same in itertools.groupby(cases, key=lambda case: case[:-1]):
        spec = dict(zip(PRODUCT, case))
        rows = rows_of("mixed", spec["block_size"])
        # Fewer, larger chunks are fewer programs to interpret of a GPU kernel, fewer copies to unroll of a TPU's.
        chunk = max(32 if implementation == "pallas_tpu" else 64, spec["block_size"])
        step = build(*rows, chunk_tokens=chunk, worked_in=coded_in(implementation), **spec)
        sinks = [np.linspace(-2, 2, heads[0]) if given else None for *_, given in same]
        check_variants(
            step, implementation, sinks, parts=implementation not in ("pallas_mosaic", "pallas_mma")
        )
    jax.clear_caches()


# Latent rows: (H, lanes that are the value as well). The first pair is the published one.
LATENT_AXES = {
    "heads": [(16, 1), (5, 1)],
    "widths": [(576, 512), (72, 48)],
    "block_size": [16, 64],
    "dtype": ["float32", "bfloat16"],
    "window": [None, 20],
    "soft_cap": [None, 5.0],
    "sinks": [False, True],
    "rows": ["decode", "prefill", "mixed"],
}
# Interpreted, the published widths are among the cases that run with `full`.
LATENT_AXES_OF = {name: LATENT_AXES for name in ("xla", "native") if name in JUDGED} | {
    "pallas_tpu": LATENT_AXES | {"widths": [(72, 48)], "block_size": [16]}
}
LATENT_MORE = {
    "heads": [(128, 1)],
    "widths": [(20, 16), (192, 128), (320, 256), (33, 33)],
    "block_size": [1, 8],
}


def run_latent(build, check, implementation, case):
    """Values are the keys' own first lanes; within the tolerance of rows that keep both apart."""
    H, latent = case[1]
    build = functools.partial(build, latent=latent)
    run_case(build, check, implementation, (case[0], H, *case[2:]))


@pytest.mark.parametrize(
    "implementation, case",
    [(name, case) for name, axes in LATENT_AXES_OF.items() for case in pairwise(axes)],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else x,
)
def test_latent_rows_equal_oracle(build, check, implementation, case):
    run_latent(build, check, implementation, case)


@pytest.mark.full
@pytest.mark.parametrize("implementation", LATENT_AXES_OF)
def test_latent_rows_equal_oracle_full(build, check, implementation):
    axes = {name: values + LATENT_MORE.get(name, []) for name, values in LATENT_AXES.items()}
    if implementation == "pallas_tpu":
        axes["block_size"].remove(1)
    for case in pairwise(axes):
        run_latent(build, check, implementation, case)
        jax.clear_caches()


@pytest.mark.parametrize(
    "implementation", [name for name in JUDGED if name in ("pallas_mosaic", "pallas_mma")]
)
def test_latent_rows_are_refused_by_name(build, implementation):
    step = build([1], [40], heads=(4, 1), head_dim=48, latent=32, dtype=dtype_of(implementation))
    # The door of both; before it each asks for its device.
    with pytest.raises(NotImplementedError, match="latent_dim=32: values within keys"):
        gpu_rows.check(step.pool, step.ragged, 4)


@pytest.mark.parametrize("poison", ["k", "v", "kv"])
def test_B072_unwritten_values_never_leak(build, check, poison):
    for implementation in JUDGED:
        out, _ = check(
            build([1, 10], [10, 10], poison=poison, dtype=dtype_of(implementation)), implementation
        )
        assert np.isfinite(out).all()
    check(build([1, 3], [4090, 4096], heads=(2, 1), head_dim=16, poison=poison, chunk_tokens=256))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [name for name in JUDGED if name != "xla"])
def test_B072_long_rows(build, check, implementation):
    step = build(
        [1, 3], [4090, 4096], heads=(2, 1), head_dim=32, block_size=128, chunk_tokens=512,
        dtype=dtype_of(implementation),
    )  # fmt: skip
    check(step, implementation)


def test_B074_window_starts_behind_block_0(build, check):
    lens = list(range(1, 65))
    check(build([1] * 64, lens, block_size=4, window=4, chunk_tokens=4))
    out, _ = check(build([1], [17], block_size=4, window=4, chunk_tokens=4))
    assert np.isfinite(out).all()
    check(build([min(3, n) for n in lens[1:]], lens[1:], block_size=4, window=4, chunk_tokens=4))


def test_B074_window_items_left_out(build):
    step = build([1, 1], [17, 64], block_size=4, window=4, chunk_tokens=4)
    work = step.ragged.decode_list(4)
    # Query 16 sees 13..16: blocks 3 and 4. Query 63 sees 60..63: block 15.
    assert work.start[: work.num_items].tolist() == [12, 16, 60]
    assert step.ragged.decode_list(None).num_items == 5 + 16


@pytest.mark.parametrize("query_len", [1, 3, 10])
def test_B076_query_shorter_than_keys(build, check, query_len):
    check(build([query_len], [10]))


@pytest.mark.parametrize("implementation", JUDGED)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 128, 192, 256])
def test_B078_head_dims(build, check, implementation, head_dim):
    step = build([1, 5], [40, 50], head_dim=head_dim, dtype=dtype_of(implementation))
    assert step.params["scale"] == head_dim**-0.5
    out, _ = check(step, implementation)
    assert out.shape[-1] == head_dim


@pytest.mark.parametrize("width", [5, 1, 3, 127])
def test_B081_table_width_not_a_multiple_of_the_chunk(build, check, width):
    longest = width * 8
    lens = [longest, max(1, longest - 3), 1]
    check(build([1, 1, 1], lens, block_size=8, chunk_tokens=32, table_width=width))
    check(build([4], [longest], block_size=8, chunk_tokens=32, table_width=width))


@pytest.mark.parametrize("implementation", [name for name in JUDGED if name != "xla"])
def test_B081_table_width_in_the_kernels(build, check, implementation):
    args = dict(block_size=8, chunk_tokens=32, table_width=5, dtype=dtype_of(implementation))
    check(build([1, 1, 4], [40, 37, 40], **args), implementation)


@pytest.mark.parametrize("implementation", JUDGED)
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_B083_soft_cap_before_the_mask(build, check, implementation, cap):
    # scale 1: scores reach well into the cap.
    step = build([1, 1, 6], [1, 40, 33], soft_cap=cap, scale=1.0, dtype=dtype_of(implementation))
    out, _ = check(step, implementation)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
def test_B084_numbers_of_tiles_and_chunks(build, check, tiles):
    for implementation in JUDGED:
        dtype = dtype_of(implementation)
        check(build([1, 8 * tiles], [32 * tiles, 8 * tiles + 5], dtype=dtype), implementation)


def test_B069_resuming_behind_cached_blocks(build, check):
    step = build([5], [13], block_size=4, table_seed=3)
    assert step.tables[0, :4].tolist() != [1, 2, 3, 4]
    check(step)


@pytest.mark.parametrize("implementation", JUDGED)
def test_F062_rows_of_a_few_queries_beside_long_ones(build, check, implementation):
    lens = [1, 1, 2, 5, 16, 17]
    seq_lens = [40, 0, 2, 60, 16, 130]
    buckets = (sum(lens), len(lens), 4)
    check(build(lens, seq_lens, buckets=buckets, dtype=dtype_of(implementation), window=45), implementation)


# Rows that share, up to which token: one prefix, two halves of it, a few of a half; others share nothing.
PREFIX_TREES = {
    1: [(range(6), 64)],
    2: [(range(6), 32), (range(3), 96), (range(3, 6), 64)],
    3: [(range(6), 32), (range(4), 64), (range(2), 128), (range(4, 6), 96)],
}


@pytest.mark.parametrize("levels", PREFIX_TREES)
@pytest.mark.parametrize("implementation", JUDGED)
def test_shared_prefixes_of_several_levels(build, check, implementation, levels):
    tree = PREFIX_TREES[levels]
    step = build(
        [1] * 7 + [6], [130, 129, 97, 100, 97, 98, 60, 70], share=tree, dtype=dtype_of(implementation),
        sinks=np.linspace(-1, 1, 6), soft_cap=5.0 if levels == 2 else None, buckets=(24, 9, 8),
    )  # fmt: skip
    lens, most = [len(keys) for keys in step.keys], dict(max_groups=4, min_group_rows=2)
    shared = plan_ragged(step.query_lens, lens, step.tables, **step.plan_args, **most)
    work = shared.decode_list(None)
    assert int(work.num_groups) == len(tree)
    worked = np.zeros(8, int)
    for some, upto in tree:
        worked[list(some)] = upto // 32
    assert work.skip.tolist() == worked.tolist()
    check(replace(step, ragged=shared), implementation)


@pytest.mark.parametrize("implementation", JUDGED)
def test_F060_tables_of_131072_tokens(build, check, implementation):
    """Rows of a few tokens in such tables; where nothing is interpreted, a row that fills its table, too."""
    args = dict(heads=(2, 1), head_dim=16, num_layers=1, layer=0, table_width=8192)
    dtype = dtype_of(implementation)
    check(build([1, 1, 5], [70, 0, 41], dtype=dtype, **args), implementation)
    if implementation in IMPLEMENTATIONS and not implementation.startswith("pallas"):
        check(build([1, 1, 3], [131_072, 5, 40], chunk_tokens=256, **args), implementation)


def test_one_decode_row_and_no_decode_rows(build, check):
    check(build([1], [1], buckets=(1, 1, 1)))
    check(build([1], [9], buckets=(8, 2, 1)))
    check(build([3], [9], buckets=(8, 2, 0)))
    # A bucket with room for more decode rows than there are: tokens of tiles start inside it.
    check(build([1, 4, 2], [9, 20, 2], buckets=(16, 8, 4)))


def test_layer_may_be_traced(build):
    step = build([1, 5], [40, 50])

    @jax.jit
    def run(layer):
        return paged_attention(jnp.asarray(step.q), step.pool, layer, step.ragged, **step.params)

    fixed = paged_attention(jnp.asarray(step.q), step.pool, step.layer, step.ragged, **step.params)
    # Two programs, so two orders of summation.
    np.testing.assert_allclose(run(jnp.int32(step.layer)), fixed, atol=step.tolerance[0])


def device_output(step, pool=None, ragged=None):
    @jax.jit
    def run(q, pool, ragged):
        return paged_attention(q, pool, step.layer, ragged, **step.params)

    return np.asarray(run(jnp.asarray(step.q), pool or step.pool, ragged or step.ragged))[: step.num_tokens]


ROWS = dict(query_lens=[1, 1, 1, 7, 20], seq_lens=[5, 64, 33, 40, 20], buckets=(40, 8, 4))


def test_permuted_blocks_and_larger_pools_change_no_bit(build):
    base = device_output(build(**ROWS))
    for other in (dict(table_seed=9), dict(spare_blocks=200), dict(poison="k")):
        np.testing.assert_array_equal(device_output(build(**ROWS, **other)), base)


def test_unused_table_entries_change_no_bit(build):
    """Within one compiled width, whatever stands behind a row's last block."""
    step = build(**ROWS, table_width=33)
    tables = step.tables.copy()
    for row, length in enumerate(ROWS["seq_lens"]):
        tables[row, -(-length // 16) :] = 1
    other = plan_ragged(step.query_lens, ROWS["seq_lens"], tables, **step.plan_args)
    np.testing.assert_array_equal(device_output(step, ragged=other), device_output(step))


def test_wider_tables_change_rounding_only(build):
    """Another width is another program: its loop may take more items at a time, hence the tolerance."""
    step = build(**ROWS)
    base = device_output(step)
    for width in (5, 33):
        wider = device_output(build(**ROWS, table_width=width))
        np.testing.assert_allclose(wider, base, atol=step.tolerance[0])


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_other_block_sizes_with_equal_chunks_change_no_bit(build, block_size):
    np.testing.assert_array_equal(
        device_output(build(**ROWS, block_size=block_size)), device_output(build(**ROWS))
    )


def test_padding_changes_no_bit(build):
    """The same rows with and without neighbours behind them, in one bucket."""
    step = build(**ROWS)
    fewer = plan_ragged([1, 1, 1, 7], [5, 64, 33, 40], step.tables[:4], **step.plan_args)
    np.testing.assert_array_equal(device_output(step, ragged=fewer)[:10], device_output(step)[:10])


def test_log_sum_exp_merges_halves(build):
    """Two windows' worth of keys, merged by (output, log-sum-exp), equal the whole."""
    step = build([1], [64], chunk_tokens=16)
    whole, lse = paged_attention(
        jnp.asarray(step.q), step.pool, step.layer, step.ragged, return_lse=True, **step.params
    )
    half = plan_ragged([1], [32], step.tables, **step.plan_args)
    first, first_lse = paged_attention(
        jnp.asarray(step.q), step.pool, step.layer, half, return_lse=True, **step.params
    )
    last, last_lse = paged_attention(
        jnp.asarray(step.q), step.pool, step.layer, step.ragged, window=32, return_lse=True, **step.params
    )
    w = [np.exp(np.asarray(part)[0] - np.asarray(lse)[0]) for part in (first_lse, last_lse)]
    merged = w[0][:, None] * np.asarray(first)[0] + w[1][:, None] * np.asarray(last)[0]
    np.testing.assert_allclose(merged, np.asarray(whole)[0], atol=step.tolerance[0])


def test_wrong_calls_name_value_and_rule(build):
    step = build([1, 5], [40, 50])
    q = jnp.asarray(step.q)
    call = lambda q=q, **kw: paged_attention(q, step.pool, 1, step.ragged, **{"scale": 1.0, **kw})  # noqa: E731
    with pytest.raises(ValueError, match=r"q=float32\[3, 6, 32\]: must be floating \[T=9, N=6, H=32\]"):
        call(q[:3])
    with pytest.raises(ValueError, match="N=5 query heads: must be a multiple of K=2"):
        call(q[:, :5])
    for layer in (2, -1, np.int32(7)):
        with pytest.raises(ValueError, match=f"layer={layer}: must be between 0 and 1, the pool's layers"):
            paged_attention(q, step.pool, layer, step.ragged, scale=1.0)
    with pytest.raises(ValueError, match="window=0"):
        call(window=0)
    with pytest.raises(ValueError, match="soft_cap=0"):
        call(soft_cap=0.0)
    with pytest.raises(ValueError, match=r"sinks=float32\[3\]: must be floating \[N=6\]"):
        call(sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match="implementation=triton: must be one of"):
        call(implementation="triton")
    with pytest.raises(ValueError, match=r"implementation=\(\)"):
        call(implementation=())


def test_fallback_names_each_refusal(build, monkeypatch):
    step = build([1], [40])

    def refuse(*args, **kwargs):
        raise NotImplementedError("head_dim=32: must be 7")

    monkeypatch.setitem(IMPLEMENTATIONS, "picky", refuse)
    q = jnp.asarray(step.q)
    with pytest.raises(NotImplementedError, match="picky: head_dim=32"):
        paged_attention(q, step.pool, 1, step.ragged, scale=1.0, implementation="picky")
    out = paged_attention(q, step.pool, 1, step.ragged, scale=1.0, implementation=("picky", "xla"))
    assert np.isfinite(np.asarray(out)).all()


def test_layer_0_is_not_read_for_layer_1(build, check):
    step = build([1], [40])
    P = step.pool.layout.num_blocks
    poisoned = KVPool(step.pool.data.at[:P].set(jnp.nan), step.pool.layout)
    check(replace(step, pool=poisoned))
