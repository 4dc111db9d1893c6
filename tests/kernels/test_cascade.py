"""Shared-prefix groups: found by equal block ids, worked once, merged exactly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.kernels import merge_states, paged_attention, plan_ragged, xla
from pagedjax.kernels.cascade import PrefixGroup, find_groups, groups_that_pay
from pagedjax.kernels.tuning import Tuning


def groups(tables, lens, **change):
    args = dict(block_size=4, chunk_tokens=8, max_groups=4, min_rows=2) | change
    return [(g.rows.tolist(), g.num_chunks) for g in find_groups(np.array(tables), np.array(lens), **args)]


def test_groups_are_equal_leading_block_ids_in_whole_chunks():
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 9, 7], [8, 2, 3, 4, 5]]
    assert groups(tables, [20, 20, 20, 20]) == [([0, 1, 2], 1)]
    assert groups(tables[:2], [20, 20]) == [([0, 1], 2)]
    # The last token stays with its row: of 16 tokens only the first chunk is shared.
    assert groups(tables[:2], [16, 20]) == [([0, 1], 1)]
    assert groups(tables[:2], [8, 20]) == []
    assert groups(tables, [20, 20, 20, 20], min_rows=4) == []
    assert groups(tables, [20, 20, 20, 20], block_size=16, chunk_tokens=8) == []


def test_the_most_saving_groups_win():
    tables = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [5, 6, 11, 12, 13], [5, 6, 14, 15, 16], [5, 6, 17, 18, 19]]
    assert groups(tables, [20] * 5) == [([0, 1], 2), ([2, 3, 4], 1)]
    assert groups(tables, [20] * 5, max_groups=1) == [([0, 1], 2)]


def test_F028_eight_rows_of_a_long_prefix_stay_without_a_ninth_of_a_short_one():
    """Blocks of 16, chunks of 256: eight share 4,096 tokens, the ninth 256 of them."""
    long = np.arange(1, 257)
    tables = np.array([[*long, 1000 + i] for i in range(8)] + [[*long[:16], *range(2000, 2241)]])
    lens = np.array([4100] * 9)
    args = dict(block_size=16, chunk_tokens=256)
    assert groups(tables, lens, **args) == [(list(range(8)), 16)]
    assert groups(tables[[8, *range(8)]], lens, **args) == [(list(range(1, 9)), 16)]
    assert groups(tables[[0, 8]], lens[:2], **args) == [([0, 1], 1)]
    nested = groups(tables, lens, **args, max_levels=2)
    assert nested == [(list(range(8)), 16), (list(range(9)), 1)]

    def pay(tables, lens, device="cpu"):
        return [(g.rows.tolist(), g.num_chunks) for g in groups_that_pay(tables, lens, 16, 256, 4, device)]

    assert pay(tables, lens) == [(list(range(8)), 16)]  # and not the ninth's one chunk
    assert pay(tables[:8, :33], lens[:8] * 0 + 514) == [(list(range(8)), 2)]
    assert pay(tables[:8, :33], lens[:8] * 0 + 512) == []  # 256 tokens
    assert pay(tables[:4], lens[:4]) == [] and pay(tables[:5], lens[:5]) == [(list(range(5)), 16)]
    assert pay(tables[:2], lens[:2], "tpu") == [([0, 1], 16)]
    assert pay(tables[:2, :129], lens[:2] * 0 + 2049, "tpu") == []  # 2,048 tokens
    assert pay(tables, lens, "gpu") == []


def tree(rng, num_rows, width, unit=1):
    """Random trees of prefixes: a row is a copy of an earlier one up to somewhere, then blocks of its own."""
    tables = np.zeros((num_rows, width), np.int64)
    for row in range(num_rows):
        at = int(rng.integers(0, width // unit + 1)) * unit
        own = 100 * row + np.arange(at, width) + 1
        tables[row] = [*tables[int(rng.integers(0, row + 1)), :at], *own]
    return tables


def test_groups_within_groups_leave_out_every_read_that_can_be():
    """With room for all, what is read is one chunk for each that differs: the judge counts distinct prefixes."""
    rng = np.random.default_rng(1)
    deepest = 0
    for _ in range(100):
        tables, lens = tree(rng, 12, 12), rng.integers(1, 49, 12)
        found = find_groups(tables, lens, 4, 8, 12, 2, max_levels=12)
        skip, reads, levels = np.zeros(12, int), 0, np.zeros(12, int)
        for group in sorted(found, key=lambda group: group.num_chunks):
            assert (skip[group.rows] == skip[group.rows[0]]).all()
            reads += group.num_chunks - skip[group.rows[0]]
            skip[group.rows] = group.num_chunks
            levels[group.rows] += 1
        whole = (lens - 1) // 8
        assert (skip <= whole).all()
        reads += int((whole - skip).sum())
        prefixes = {tuple(tables[row, : 2 * n]) for row in range(12) for n in range(1, whole[row] + 1)}
        assert reads == len(prefixes)
        deepest = max(deepest, int(levels.max()))
        for most in (1, 2, 3):
            some = find_groups(tables, lens, 4, 8, 12, 2, max_levels=most)
            for row in range(12):
                assert sum(row in group.rows for group in some) <= most
    assert deepest >= 4


@pytest.mark.parametrize(
    "groups, message",
    [
        (
            [([0, 1], 2), ([1, 2], 1)],
            r"rows \[0, 1\] have \[0, 1\] chunks worked by other groups, and share 2",
        ),
        ([([0, 1], 2), ([0, 1, 2], 2)], r"rows \[0, 1, 2\] have \[2, 2, 0\]"),
    ],
)
def test_groups_that_are_given_must_be_disjoint_or_nested(build, groups, message):
    step = build([1] * 3, [70, 71, 97], share=64)
    given = [PrefixGroup(np.array(rows, np.int32), chunks) for rows, chunks in groups]
    with pytest.raises(ValueError, match=message):
        regroup(step, groups=given)


def test_F028_the_groups_found_are_disjoint_and_shared():
    """Random trees of prefixes: rows of a group agree in its chunks, no row is in two, none could save more alone."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        tables = tree(rng, 12, 12)
        lens = rng.integers(1, 49, 12)
        found = groups(tables, lens, max_groups=12)
        rows = [row for some, _ in found for row in some]
        assert len(rows) == len(set(rows))
        best = 0
        for first in range(12):  # the judge: every row's own prefix of every length
            for chunks in range(1, 7):
                same = [
                    row
                    for row in range(12)
                    if (lens[row] - 1) // 8 >= chunks
                    and (tables[row, : 2 * chunks] == tables[first, : 2 * chunks]).all()
                ]
                best = max(best, (len(same) - 1) * chunks if len(same) > 1 else 0)
        saved = [(len(some) - 1) * chunks for some, chunks in found]
        assert saved == sorted(saved, reverse=True) and (saved[0] if saved else 0) == best
        for some, chunks in found:
            assert (tables[some, : 2 * chunks] == tables[some[0], : 2 * chunks]).all()
            assert (lens[some] > 8 * chunks).all()


def regroup(step, **change):
    lens = [len(k) for k in step.keys]
    args = step.plan_args | dict(max_groups=2, min_group_rows=2) | change
    return replace(step, ragged=plan_ragged(step.query_lens, lens, step.tables, **args))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("extra", [[], [6]])
def test_cascade_equals_the_oracle_and_the_plain_pass(build, check, soft_cap, extra):
    lens = [70, 65, 97, 129]
    step = build(
        [1] * 4 + extra,
        [*lens, *[80 for _ in extra]],
        share=64,
        soft_cap=soft_cap,
        sinks=np.linspace(-1, 1, 6),
    )
    shared = regroup(step)
    work = shared.ragged.decode_list(None)
    assert int(work.num_groups) == 1 and work.group_chunks[0] == 2 and (work.skip[:4] == 2).all()
    plain, plain_lse = check(step)
    merged, merged_lse = check(shared)
    num = step.num_tokens
    np.testing.assert_allclose(merged, plain, atol=step.tolerance[0])
    np.testing.assert_allclose(merged_lse[:num], plain_lse[:num], atol=step.tolerance[1])


@pytest.mark.parametrize("shared_keys, products", [(32, {32}), (64, {32, 64})])
def test_several_chunks_of_a_prefix_are_one_product(build, check, monkeypatch, shared_keys, products):
    """Three chunks of 32 for all rows and two more for two of them, in products of one or two."""
    step = build([1] * 4, [170, 165, 97, 129], share=[(range(4), 96), (range(2), 160)])
    own = Tuning.parse({"sizes": [{"kernel": "xla", "shared_keys": shared_keys}]}, "own.toml")
    shared = regroup(step, tuning=own)
    work = shared.ragged.decode_list(None)
    assert work.group_first.tolist() == [0, 3] and work.group_chunks.tolist() == [3, 5]
    sizes, gather = set(), xla._gather

    def spy(*args, **kwargs):
        sizes.add(args[5])
        return gather(*args, **kwargs)

    monkeypatch.setattr(xla, "_gather", spy)
    check(shared)
    assert sizes == products


def test_rows_outside_the_group_and_empty_plans(build, check):
    step = build([1] * 3, [70, 65, 64 + 9], share=64)
    tables = step.tables.copy()
    alone = regroup(step)
    assert int(alone.ragged.decode_list(None).num_groups) == 1
    # One row leaves: same program, other plan.
    none = regroup(step, min_group_rows=4)
    assert int(none.ragged.decode_list(None).num_groups) == 0
    check(none)
    assert (tables == step.tables).all()


def test_windowed_layers_do_not_use_groups(build, check):
    step = regroup(build([1] * 3, [70, 65, 97], share=64, window=40))
    assert int(step.ragged.decode_list(40).num_groups) == 0
    check(step)


def test_merge_states_is_softmax_over_the_union():
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((3, 2, 10)), rng.standard_normal((3, 2, 10, 4))

    def state(s, v):
        weights = np.exp(s)
        return (weights[..., None] * v).sum(-2) / weights.sum(-1)[..., None], np.log(weights.sum(-1))

    parts = [state(scores[..., a:b], values[..., a:b, :]) for a, b in ((0, 3), (3, 4), (4, 10))]
    empty = np.zeros((3, 2, 4)), np.full((3, 2), -np.inf)
    outs, lses = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*parts, empty))
    out, lse = merge_states(outs, lses)
    want, want_lse = state(scores, values)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)
    out, lse = merge_states(outs[3:], lses[3:])
    assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


def test_one_program_serves_plans_with_and_without_groups(build):
    step = build([1] * 4, [70, 65, 97, 129], share=64)
    traces = 0

    @jax.jit
    def run(ragged):
        nonlocal traces
        traces += 1
        return paged_attention(jnp.asarray(step.q), step.pool, step.layer, ragged, **step.params)

    with_group, without = regroup(step).ragged, regroup(step, min_group_rows=5).ragged
    np.testing.assert_allclose(run(with_group), run(without), atol=step.tolerance[0])
    assert traces == 1
