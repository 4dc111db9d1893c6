"""Choosing the next token on the device: greedy, temperature, filters, per-sequence keys, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.request import MAX_CANDIDATES, Sequence

Array = Any


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
    def pack(cls, sequences: list[Sequence], size: int) -> SamplingBatch:
        """Build the arrays on the host, fresh ones each step, padded with greedy rows up to `size`."""
        params = [seq.request.sampling for seq in sequences]
        pad = size - len(sequences)

        def column(values: list[Any], fill: Any, dtype: Any) -> np.ndarray:
            return np.array(values + [fill] * pad, dtype)

        return cls(
            temperature=column([p.temperature for p in params], 0.0, np.float32),
            top_k=column([p.top_k for p in params], 0, np.int32),
            top_p=column([p.top_p for p in params], 1.0, np.float32),
            min_p=column([p.min_p for p in params], 0.0, np.float32),
            seed=column([seq.request.seed for seq in sequences], 0, np.uint32),
            sample=column([seq.index for seq in sequences], 0, np.int32),
            position=column([seq.num_tokens for seq in sequences], 0, np.int32),
        )


def sample_tokens(logits: Array, batch: SamplingBatch) -> Array:
    """Draw one token per row.

    The key of a row is (seed, sample, position): what is drawn depends on neither the batch nor on
    how often the sequence was preempted. Work nobody asked for is skipped at run time: an all-greedy
    batch costs one argmax, the sort runs only where a row filters.

    Args:
        logits: f32[Q, V].
        batch: Parameters of the Q rows.

    Returns:
        i32[Q].
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = batch.temperature > 0.0
    filters = random & ((batch.top_k > 0) | (batch.top_p < 1.0) | (batch.min_p > 0.0))

    def draw(_: None) -> Array:
        scaled = logits / jnp.where(random, batch.temperature, 1.0)[:, None]
        noise = jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(
            batch.seed, batch.sample, batch.position, logits.shape[-1]
        )
        drawn = jax.lax.cond(
            jnp.any(filters),
            lambda: _draw_filtered(scaled, noise, batch),
            lambda: jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32),
        )
        return jnp.where(random, drawn, greedy)

    return jax.lax.cond(jnp.any(random), draw, lambda _: greedy, None)


def score_tokens(logits: Array, tokens: Array) -> tuple[Array, Array, Array, Array]:
    """Log-probability and rank of given tokens, and the likeliest tokens, under softmax(logits).

    Args:
        logits: f32[Q, V].
        tokens: i32[Q].

    Returns:
        logprobs f32[Q], natural log; ranks i32[Q], 1 is the likeliest; the likeliest tokens, best first,
        i32[Q, min(64, V)], and their log-probabilities f32[Q, min(64, V)].
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    ranks = 1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32)
    top, ids = jax.lax.top_k(logits, min(MAX_CANDIDATES, logits.shape[-1]))
    return own[:, 0] - total, ranks, ids.astype(jnp.int32), top - total[:, None]


def _gumbel(seed: Array, sample: Array, position: Array, size: int) -> Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _draw_filtered(scaled: Array, noise: Array, batch: SamplingBatch) -> Array:
    """Filter by rank, cumulative probability and relative probability, then Gumbel-max.

    The noise belongs to the token, not to its rank: a filter that drops nothing changes nothing.
    Order as usual: top-k, then top-p over what is left renormalised, then min-p.
    """
    vocab = scaled.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), scaled.shape)
    negated, order = jax.lax.sort((-scaled, ids), dimension=-1, num_keys=1)
    ranked = -negated
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    top_k = jnp.where(batch.top_k > 0, batch.top_k, vocab)[:, None]
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The most likely token always stays: before[0] is 0. A cap of 1 keeps what rounding would drop.
    keep = (before < batch.top_p[:, None]) | (batch.top_p >= 1.0)[:, None]
    keep &= probs >= batch.min_p[:, None] * probs[:, :1]
    keep |= rank == 0
    noised = jnp.where(keep, ranked + jnp.take_along_axis(noise, order, axis=-1), -jnp.inf)
    best = jnp.argmax(noised, axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0]
