"""Shared-prefix groups: found by equal block ids, worked once, merged exactly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.kernels import merge_states, paged_attention, plan_ragged
from pagedjax.kernels.cascade import find_groups, group_that_pays


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
    best = group_that_pays(tables, lens, 16, 256, 16)
    assert (best.rows.tolist(), best.num_chunks) == (list(range(8)), 16)
    assert group_that_pays(tables, lens, 16, 256, 32) is None  # mostly room for others
    assert group_that_pays(tables[:8, :33], lens[:8] * 0 + 514, 16, 256, 8).num_chunks == 2
    assert group_that_pays(tables[:8, :33], lens[:8] * 0 + 512, 16, 256, 8) is None  # 256 tokens
    assert group_that_pays(tables[:3], lens[:3], 16, 256, 3) is None


def test_F028_the_groups_found_are_disjoint_and_shared():
    """Random trees of prefixes: rows of a group agree in its chunks, no row is in two, none could save more alone."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        tables = np.zeros((12, 12), np.int64)
        for row in range(12):  # a copy of an earlier row up to somewhere, then blocks of its own
            at = int(rng.integers(0, 13))
            tables[row] = [*tables[int(rng.integers(0, row + 1)), :at], *(100 * row + np.arange(at, 12) + 1)]
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
