"""Changes of single logits before a token is chosen: penalties, biases, tokens that may not come yet.

What a row changes is a short list of tokens, not a vector over the vocabulary: its prompt and answer, its
biased tokens, its end tokens while min_tokens lasts. Steps without such a row never come here; one with such
a row draws again from the changed logits, in a program of its own: one per number of samples in a bucket,
compiled when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine.request import MAX_BIASED, MAX_END_IDS, SamplingParams, Sequence
from pagedjax.runtime.vocabulary import WHOLE, Vocabulary

Array = Any
_SLICE = 128  # entries of each row per turn of the loop
_FORBIDDEN = -1e30  # finite: minus infinity less itself would be NaN in a softmax over forbidden tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustments:
    """Lists of E entries for each of Q rows; a token stands at most once in a row's list.

    Attributes:
        ids: i32[Q, E]; padding is V.
        counts: i32[Q, E] times the token stands in the answer; -1: neither in prompt nor answer.
        bias: f32[Q, E] added last.
        repetition: f32[Q], 1 is off.
        presence: f32[Q], 0 is off.
        frequency: f32[Q], 0 is off.
        num_slices: i32[], slices of the lists that hold entries.
    """

    ids: Array
    counts: Array
    bias: Array
    repetition: Array
    presence: Array
    frequency: Array
    num_slices: Array

    @classmethod
    def pack(
        cls, sequences: list[Sequence], rows: int, vocab_size: int, max_model_len: int
    ) -> Adjustments | None:
        """Lists for a step's samples, padded to the most a row can need; None where none changes anything."""
        if not any(_changes(seq) for seq in sequences):
            return None
        entries = min(vocab_size, max_model_len + MAX_BIASED + MAX_END_IDS)
        shape = (rows, -(-entries // _SLICE) * _SLICE)
        ids = np.full(shape, vocab_size, np.int32)
        counts = np.full(shape, -1, np.int32)
        bias = np.zeros(shape, np.float32)
        repetition = np.ones(rows, np.float32)
        presence, frequency = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        longest = 0
        for row, seq in enumerate(sequences):
            if not _changes(seq):
                continue
            lists = _entries(seq, vocab_size)
            longest = max(longest, len(lists[0]))
            for array, values in zip((ids, counts, bias), lists):
                array[row, : len(values)] = values
            p = seq.request.sampling
            repetition[row] = p.repetition_penalty
            presence[row], frequency[row] = p.presence_penalty, p.frequency_penalty
        num_slices = np.array(-(-longest // _SLICE), np.int32)
        return cls(ids, counts, bias, repetition, presence, frequency, num_slices)


def _changes(seq: Sequence) -> bool:
    return seq.request.sampling.has_adjustments or _must_go_on(seq)


def _must_go_on(seq: Sequence) -> bool:
    """End tokens may not come yet. Beams see to that themselves."""
    request = seq.request
    p: SamplingParams = request.sampling
    return bool(seq.num_output_tokens < p.min_tokens and request.end_token_ids and not p.beam_width)


def _entries(seq: Sequence, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, counts and biases of one row's list."""
    p = seq.request.sampling
    held: dict[int, int] = {}
    if p.repetition_penalty != 1.0:
        held = dict.fromkeys(seq.request.prompt_token_ids, 0)
    if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty:
        for token in seq.output_token_ids:
            held[token] = held.get(token, 0) + 1
    bias = dict(p.logit_bias)
    if _must_go_on(seq):
        bias.update(dict.fromkeys(seq.request.end_token_ids, _FORBIDDEN))
    ids = [token for token in {**held, **bias} if token < vocab_size]
    return (
        np.array(ids, np.int32),
        np.array([held.get(token, -1) for token in ids], np.int32),
        np.array([bias.get(token, 0.0) for token in ids], np.float32),
    )


def adjust(logits: Array, a: Adjustments, vocabulary: Vocabulary = WHOLE) -> Array:
    """Change the listed logits: repetition penalty, presence and frequency penalty, bias, in this order.

    Args:
        logits: f32[Q, V].
        a: What to change.
        vocabulary: What the columns of the logits stand for.
    """
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def turn(i: Array, changed: Array) -> Array:
        ids, counts, bias = (
            jax.lax.dynamic_slice_in_dim(x, i * _SLICE, _SLICE, 1) for x in (a.ids, a.counts, a.bias)
        )
        ids = vocabulary.places(ids, logits.shape[-1])
        old = changed.at[rows, ids].get(mode="fill", fill_value=0.0)
        factor = jnp.where(counts >= 0, a.repetition[:, None], 1.0)
        new = jnp.where(old > 0, old / factor, old * factor)
        times = jnp.maximum(counts, 0).astype(jnp.float32)
        new -= a.presence[:, None] * (times > 0) + a.frequency[:, None] * times
        return changed.at[rows, ids].set(new + bias, mode="drop")

    done: Array = jax.lax.fori_loop(0, a.num_slices, turn, logits)
    return done
