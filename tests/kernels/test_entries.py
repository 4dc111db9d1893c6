"""Entries cut on the device: every key and query once, as many as lengths ask for, joined exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.kernels import plan_ragged
from pagedjax.kernels.entries import cut_rows, join_parts, split_rows
from pagedjax.kernels.xla import NEG


def plan(query_lens, seq_lens, width=64, window=None, **change):
    n = len(query_lens)
    args = dict(
        block_size=8, num_tokens_bucket=sum(query_lens) + 3, num_seqs_bucket=n + 1,
        decode_bucket=query_lens.count(1), windows=(window,), chunk_tokens=16,
    )  # fmt: skip
    ragged = plan_ragged(query_lens, seq_lens, np.zeros((n, width), np.int32), **args | change)
    return jax.tree.map(jnp.asarray, ragged)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("lens", [[500, 1, 0, 33], [5, 5, 5], [512], [0, 0]])
def test_F060_parts_cover_every_key_once_and_number_with_the_rows(lens, window):
    spare = 5
    parts = jax.jit(lambda ragged: split_rows(ragged, window, spare).__dict__)(
        plan([1] * len(lens), lens, window=window)
    )
    assert len(parts["row"]) == len(lens) + spare
    spans = [
        (int(row), range(int(first), int(stop)))
        for row, first, stop in zip(parts["row"], parts["first"], parts["stop"], strict=True)
        if stop > 0
    ]
    for row, length in enumerate(lens):
        first = 0 if window is None else max(0, length - window) // 16 * 16
        assert [key for r, keys in spans if r == row for key in keys] == list(range(first, length))
        of_row = [i for i, (r, _) in enumerate(spans) if r == row]
        assert len(of_row) == parts["num_parts"][row]
        assert not of_row or of_row[0] == parts["first_part"][row]
    if lens == [512] and window is None:
        assert len(spans) == spare  # one long row fills the device
    if lens == [5, 5, 5]:
        assert len(spans) == 3


def test_joined_parts_are_the_whole_whatever_stands_in_empty_ones():
    lens = [500, 1, 0, 33]
    entries = split_rows(plan([1] * 4, lens), None, 5)
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((4, 512)), rng.standard_normal((4, 512, 8))
    W = len(entries.row)
    acc, m, l = (np.full(shape, np.nan, np.float32) for shape in ((W, 1, 1, 8), (W, 1, 1), (W, 1, 1)))
    for i, (row, first, stop) in enumerate(zip(entries.row, entries.first, entries.stop, strict=True)):
        if stop > 0:
            s = scores[row, first:stop]
            p = np.exp(s - s.max())
            acc[i, 0, 0], m[i], l[i] = p @ values[row, first:stop], s.max(), p.sum()
    acc, m, l = (np.asarray(x)[:, 0, 0] for x in join_parts(entries, tuple(map(jnp.asarray, (acc, m, l)))))
    for row, length in enumerate(lens):
        if not length:
            assert m[row] == NEG and l[row] == 0 and (acc[row] == 0).all()
            continue
        weights = np.exp(scores[row, :length])
        np.testing.assert_allclose(
            acc[row] / l[row], weights @ values[row, :length] / weights.sum(), atol=1e-6
        )
        np.testing.assert_allclose(m[row] + np.log(l[row]), np.log(weights.sum()), atol=1e-6)


def test_entries_of_queries_cover_every_token_of_longer_rows_once():
    lens = [1, 1, 2, 17, 40]
    ragged = plan(lens, [length + 3 for length in lens])
    counts = jnp.array([0, 0, 1, 2, 3, 0], jnp.int32)
    before = jnp.array([0, 0, 0, 0, 8, 0], jnp.int32)
    (row, first_pos, stop, token), tokens = cut_rows(ragged, counts, before, 16, 9)
    covered = tokens[tokens < ragged.num_tokens_bucket].tolist()
    # 2 and 17 whole, of the 40 those behind the first 8.
    assert covered == [*range(2, 4), *range(4, 21), *range(29, 61)]
    assert row[:6].tolist() == [2, 3, 3, 4, 4, 4]
    assert (stop - first_pos).tolist() == [2, 16, 1, 16, 16, 0, 0, 0, 0]
    assert first_pos[:5].tolist() == [3, 3, 19, 11, 27] and token[:5].tolist() == [2, 4, 20, 29, 45]
