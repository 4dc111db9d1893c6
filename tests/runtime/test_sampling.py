"""Sampling on the device against an obvious numpy judge of which tokens may be drawn, and how often."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pagedjax.cache import TokenChain
from pagedjax.engine.request import Request, SamplingParams, Sequence
from pagedjax.runtime import SamplingBatch, sample_tokens
from pagedjax.runtime.sampling import score_tokens

V = 11


def batch(rows, **columns):
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample=0, position=0)
    dtypes = dict(
        temperature=np.float32, top_p=np.float32, min_p=np.float32, seed=np.uint32, top_k=np.int32,
        sample=np.int32, position=np.int32,
    )  # fmt: skip
    values = defaults | columns
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtypes[name]), (rows,)).copy()
        for name, value in values.items()
    }
    return SamplingBatch(**arrays)


sample = jax.jit(sample_tokens)


def allowed(logits, temperature, top_k, top_p, min_p):
    """Token → probability by the definition, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[:top_k] if top_k else order
    probs = np.exp(scaled[kept] - scaled[kept].max())
    probs /= probs.sum()
    reach = np.cumsum(probs) - probs
    ok = ((reach < top_p) | (top_p >= 1)) & (probs >= min_p * probs[0])
    kept, probs = kept[ok], probs[ok]
    return dict(zip(kept.tolist(), (probs / probs.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 3, 1.0, 0.0),
        (1.5, 0, 0.6, 0.0),
        (1.0, 0, 1.0, 0.3),
        (2.0, 5, 0.8, 0.2),
        (1.0, 1, 1.0, 0.0),
    ],
)
def test_draws_have_the_right_support_and_frequencies(temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(4).normal(size=V).astype(np.float32) * 1.5
    want = allowed(logits, temperature, top_k, top_p, min_p)
    rows = 4000
    many = batch(
        rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, position=np.arange(rows), seed=9
    )
    tokens = sample(np.tile(logits, (rows, 1)), many)
    counts = np.bincount(np.asarray(tokens), minlength=V)
    assert set(np.flatnonzero(counts)) <= set(want)
    for token, p in want.items():
        # Five standard deviations of a binomial: one false alarm in about a million.
        assert abs(counts[token] - rows * p) <= 5 * np.sqrt(rows * p * (1 - p)) + 1


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(2, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.45, 0.0), (6, 0.5, 0.0), (0, 1.0, 0.9)]
)
def test_equal_scores_are_kept_in_order_of_id(top_k, top_p, min_p):
    """Borders that fall between equal scores, among scores of both signs, zeros and minus infinities."""
    logits = np.array([-np.inf, 0, 2, -3, 2, 0, 2, 2, -3, -np.inf, 2], np.float32)
    want = allowed(logits, 1.0, top_k, top_p, min_p)
    rows = 1000
    many = batch(rows, top_k=top_k, top_p=top_p, min_p=min_p, position=np.arange(rows), seed=3)
    tokens = np.asarray(sample(np.tile(logits, (rows, 1)), many))
    # Half of the rows have other scores: each row has its own borders.
    mixed = np.where(np.arange(rows)[:, None] % 2, logits, -np.arange(V, dtype=np.float32))
    assert set(tokens.tolist()) == set(want)
    assert (np.asarray(sample(mixed, many))[1::2] == tokens[1::2]).all()


def test_a_row_depends_on_its_key_alone():
    logits = np.random.default_rng(0).normal(size=(6, V)).astype(np.float32)
    keys = dict(seed=[1, 2, 3, 4, 5, 6], sample=[0, 0, 1, 1, 2, 2], position=[5, 6, 7, 8, 9, 10])
    together = np.asarray(sample(logits, batch(6, **keys)))
    order = [3, 0, 5, 1, 2, 4]
    shuffled = {name: np.asarray(value)[order] for name, value in keys.items()}
    assert (np.asarray(sample(logits[order], batch(6, **shuffled))) == together[order]).all()
    # A filter that drops nothing on a neighbour's row takes the other branch and changes nothing.
    mixed = batch(6, **keys, top_k=[0, 0, 0, 0, 0, V])
    assert (np.asarray(sample(logits, mixed)) == together).all()


@pytest.mark.parametrize("column", ["seed", "sample", "position"])
def test_each_part_of_the_key_changes_what_is_drawn(column):
    rows = 64
    tokens = np.asarray(sample(np.zeros((rows, V), np.float32), batch(rows, **{column: np.arange(rows)})))
    assert len(set(tokens.tolist())) > V // 2
    assert len(set(np.asarray(sample(np.zeros((rows, V), np.float32), batch(rows))).tolist())) == 1


def test_the_key_of_a_sequence_is_its_seed_its_number_and_the_position():
    request = Request("0", (1, 2, 3), SamplingParams(temperature=0.5, top_k=4, top_p=0.8, min_p=0.1), seed=77)
    sequences = [Sequence(9, request, i, TokenChain([1, 2, 3, *[4] * i], block_size=4)) for i in range(3)]
    packed = SamplingBatch.pack(sequences, [3, 4, 5], 4)
    assert packed.seed.tolist() == [77, 77, 77, 0]
    assert packed.sample.tolist() == [0, 1, 2, 0] and packed.position.tolist() == [3, 4, 5, 0]
    assert packed.temperature.tolist() == [0.5, 0.5, 0.5, 0.0] and packed.top_k.tolist() == [4, 4, 4, 0]
    np.testing.assert_array_equal(packed.top_p, np.float32([0.8, 0.8, 0.8, 1.0]))
    np.testing.assert_array_equal(packed.min_p, np.float32([0.1, 0.1, 0.1, 0.0]))


def test_greedy_rows_are_argmax_beside_random_ones():
    logits = np.random.default_rng(1).normal(size=(5, V)).astype(np.float32)
    temperature = np.array([0.0, 1.0, 0.0, 5.0, 0.0], np.float32)
    tokens = sample(logits, batch(5, temperature=temperature))
    greedy = temperature == 0
    assert (np.asarray(tokens)[greedy] == logits.argmax(-1)[greedy]).all()


def test_logprobs_are_of_the_unfiltered_distribution():
    logits = np.random.default_rng(2).normal(size=(4, V)).astype(np.float32)
    tokens = sample(logits, batch(4, top_k=2, temperature=0.7))
    logprobs, ranks, top_ids, top_logprobs = jax.jit(score_tokens)(logits, tokens)
    full = logits.astype(np.float64)
    full -= np.log(np.exp(full).sum(-1, keepdims=True))
    own = full[np.arange(4), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, own, rtol=1e-5)
    assert np.asarray(ranks).tolist() == (1 + (full > own[:, None]).sum(-1)).tolist()
    order = np.argsort(-full, axis=-1)
    assert (np.asarray(top_ids) == order).all()
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(full, order, -1), rtol=1e-5)


def test_equal_scores_share_the_better_rank():
    logits = np.array([[2.0, 5.0, 5.0, 1.0, 2.0, 5.0]] * 6, np.float32)
    _, ranks, _, _ = score_tokens(logits, np.arange(6, dtype=np.int32))
    assert np.asarray(ranks).tolist() == [4, 1, 1, 6, 4, 1]
