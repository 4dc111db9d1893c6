"""Choosing the next token on the device: greedy, temperature, filters, per-sequence keys, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine.request import MAX_CANDIDATES, Sequence
from pagedjax.runtime.vocabulary import WHOLE, Vocabulary

Array = Any
# The bits of an infinite float32; scores lie between it and its negative.
_INFINITY = 0x7F800000
_SCORE_BITS = 32


SAMPLING_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
    "sample": np.int32,
    "position": np.int32,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the Q rows that draw a token; padding rows are greedy.

    Attributes:
        temperature: f32[Q]; 0 is greedy.
        top_k: i32[Q]; 0 keeps all.
        top_p: f32[Q]; 1 keeps all.
        min_p: f32[Q]; 0 keeps all.
        seed: u32[Q], the request's.
        sample: i32[Q], index of the sample within its request.
        position: i32[Q], position the drawn token will have in its sequence.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    sample: Array
    position: Array

    @classmethod
    def pack(cls, sequences: list[Sequence], positions: Seq[int], size: int) -> SamplingBatch:
        """Build the arrays on the host, fresh ones each step, padded with greedy rows up to `size`.

        Args:
            sequences: Who draws.
            positions: Where each one's token will stand.
            size: Q.
        """
        params = [seq.request.sampling for seq in sequences]
        pad = size - len(sequences)

        values: dict[str, tuple[Seq[Any], Any]] = {
            "temperature": ([p.temperature for p in params], 0.0),
            "top_k": ([p.top_k for p in params], 0),
            "top_p": ([p.top_p for p in params], 1.0),
            "min_p": ([p.min_p for p in params], 0.0),
            "seed": ([seq.request.seed for seq in sequences], 0),
            "sample": ([seq.index for seq in sequences], 0),
            "position": (positions, 0),
        }
        return cls(
            **{
                name: np.array([*column, *[fill] * pad], SAMPLING_DTYPES[name])
                for name, (column, fill) in values.items()
            }
        )


def sample_tokens(logits: Array, batch: SamplingBatch, vocabulary: Vocabulary = WHOLE) -> Array:
    """Draw one token per row.

    The key of a row is (seed, sample, position): what is drawn depends on neither the batch nor on
    how often the sequence was preempted. Work nobody asked for is skipped at run time: an all-greedy
    batch costs one argmax, and filters are looked at only where a row has one.

    Args:
        logits: f32[Q, V].
        batch: Parameters of the Q rows.
        vocabulary: What the columns of the logits stand for.

    Returns:
        i32[Q].
    """
    if vocabulary is not WHOLE:
        return _sample_cut(logits, batch, vocabulary)
    greedy = WHOLE.best(logits)
    random, filters = _ask(batch)

    def draw(_: None) -> Array:
        scaled, noise = _perturb(logits, random, batch, WHOLE)
        drawn = jax.lax.cond(
            jnp.any(filters),
            lambda: WHOLE.best(_filtered(scaled, noise, batch, WHOLE)),
            lambda: WHOLE.best(scaled + noise),
        )
        return jnp.where(random, drawn, greedy)

    return jax.lax.cond(jnp.any(random), draw, lambda _: greedy, None)


def _sample_cut(logits: Array, batch: SamplingBatch, vocabulary: Vocabulary) -> Array:
    """`sample_tokens` of columns that are dealt out: scores first, so that the devices ask once who is best."""
    random, filters = _ask(batch)

    def draw(_: None) -> Array:
        scaled, noise = _perturb(logits, random, batch, vocabulary)
        scores = jax.lax.cond(
            jnp.any(filters),
            lambda: _filtered(scaled, noise, batch, vocabulary),
            lambda: scaled + noise,
        )
        return jnp.where(random[:, None], scores, logits)

    return vocabulary.best(jax.lax.cond(jnp.any(random), draw, lambda _: logits, None))


def _ask(batch: SamplingBatch) -> tuple[Array, Array]:
    """Which rows draw, and which of them through a filter: bool[Q] each."""
    random = batch.temperature > 0.0
    return random, random & ((batch.top_k > 0) | (batch.top_p < 1.0) | (batch.min_p > 0.0))


def _perturb(
    logits: Array, random: Array, batch: SamplingBatch, vocabulary: Vocabulary
) -> tuple[Array, Array]:
    """Logits over the temperature, and Gumbel noise: f32[Q, V] each."""
    scaled = logits / jnp.where(random, batch.temperature, 1.0)[:, None]

    def draw(size: int) -> Array:
        rows = (batch.seed, batch.sample, batch.position)
        return jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(*rows, size)

    return scaled, vocabulary.columns(logits.shape[-1], draw)


def score_tokens(
    logits: Array, tokens: Array, vocabulary: Vocabulary = WHOLE
) -> tuple[Array, Array, Array, Array]:
    """Log-probability and rank of given tokens, and the likeliest tokens, under softmax(logits).

    Args:
        logits: f32[Q, V].
        tokens: i32[Q].
        vocabulary: What the columns of the logits stand for.

    Returns:
        logprobs f32[Q], natural log; ranks i32[Q], 1 is the likeliest; the likeliest tokens, best first,
        i32[Q, min(64, V)], and their log-probabilities f32[Q, min(64, V)].
    """
    total = vocabulary.logsumexp(logits)
    own = vocabulary.of(logits, tokens)
    ranks = 1 + vocabulary.count(logits > own)
    top, ids = vocabulary.top(logits, MAX_CANDIDATES)
    return own[:, 0] - total, ranks, ids, top - total[:, None]


def _gumbel(seed: Array, sample: Array, position: Array, size: int) -> Array:
    numbers = jnp.stack([sample, position])
    # By name: another default, such as rbg, draws alike for all rows of a vmapped call.
    start = jax.random.key(seed, impl="threefry2x32")
    # A loop and not two calls: the hash is compiled once.
    key = jax.lax.fori_loop(0, 2, lambda i, key: jax.random.fold_in(key, numbers[i]), start)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _filtered(scaled: Array, noise: Array, batch: SamplingBatch, vocabulary: Vocabulary) -> Array:
    """Perturbed scores, -inf where rank, cumulative probability or relative probability leave a token out.

    The noise belongs to the token, not to its rank: a filter that drops nothing changes nothing.
    Order as usual: top-k, then top-p over what is left renormalised, then min-p.
    """
    likely = jnp.exp(scaled - vocabulary.max(scaled))

    def narrow(which: Array, keep: Array) -> Array:
        """First by rank, then by probability; a cap of 1 keeps what rounding would drop."""
        weights = jnp.where(which == 0, 1.0, jnp.where(keep, likely, 0.0))
        top_k = jnp.where(batch.top_k > 0, batch.top_k.astype(jnp.float32), jnp.inf)
        top_p = jnp.where(batch.top_p < 1.0, batch.top_p * vocabulary.sum(weights), jnp.inf)
        return keep & _leading(scaled, weights, jnp.where(which == 0, top_k, top_p), vocabulary)

    # A loop and not two calls: what it does is compiled once.
    keep = jax.lax.fori_loop(0, 2, narrow, jnp.ones(scaled.shape, bool))
    keep &= likely >= batch.min_p[:, None]
    return jnp.where(keep, scaled + noise, -jnp.inf)


def _leading(scores: Array, weights: Array, limits: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """The likeliest tokens of each row: those before which stands less weight than the row's limit.

    Tokens stand by score, equal ones by id. Nothing is sorted: the last token kept is found by halving, its score in
    32 passes, then its id. A sort of the vocabulary takes ten times as long to run, and on TPU to compile.

    Args:
        scores: f32[Q, V].
        weights: f32[Q, V], not negative.
        limits: f32[Q], positive; inf keeps every token.
        vocabulary: What the columns stand for.

    Returns:
        bool[Q, V].

    Source:
        The dual problem of a filter by sum, as in the sorting-free sampling of FlashInfer (2025).
    """
    Q, V = scores.shape[0], vocabulary.size(scores.shape[1])
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    ids = vocabulary.ids(scores.shape[1])[None, :]

    def before(border: Array, end: Array) -> Array:
        """Tokens of a higher score than the border, or at it and of an id below the end."""
        return (order > border[:, None]) | ((order == border[:, None]) & (ids < end[:, None]))

    def halve(step: Array, ends: tuple[Array, ...]) -> tuple[Array, ...]:
        # The lowest score with too little weight above it, then the lowest id with enough before it.
        low, high, first, last = ends
        by_score = step < _SCORE_BITS
        middle = (low & high) + ((low ^ high) >> 1)  # the sum may not fit 32 bits
        id_ = (first + last) >> 1
        chosen = before(jnp.where(by_score, middle, high), jnp.where(by_score, 0, id_))
        enough = vocabulary.sum(jnp.where(chosen, weights, 0.0)) >= limits
        return (
            jnp.where(by_score & enough, middle, low),
            jnp.where(by_score & ~enough, middle, high),
            jnp.where(by_score | enough, first, id_),
            jnp.where(~by_score & enough, id_, last),
        )

    ends = tuple(jnp.full(Q, x, jnp.int32) for x in (-_INFINITY - 2, _INFINITY, 0, V))
    _, border, _, end = jax.lax.fori_loop(0, _SCORE_BITS + V.bit_length(), halve, ends)
    return before(border, end)
