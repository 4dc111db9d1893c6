"""Changes of single logits before a token is chosen: penalties, biases, tokens that may not come yet.

What a row changes is a short list of tokens, not a vector over the vocabulary: its prompt and answer, its
biased tokens, its end tokens while min_tokens lasts. The lists are padded to one static width, so no program
is added, and worked off in slices by a loop that runs zero times where no row changes anything. Such a step
gets the same empty lists again, which lie on the device already: nothing is built and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.request import MAX_BIASED, MAX_END_IDS, SamplingParams, Sequence

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
        num_slices: i32[], slices of the lists that hold entries; 0: nothing to do.
    """

    ids: Array
    counts: Array
    bias: Array
    repetition: Array
    presence: Array
    frequency: Array
    num_slices: Array

    @classmethod
    def none(cls, rows: int, vocab_size: int, max_model_len: int) -> Adjustments:
        """Nothing to change, on the device. E is the most a row can need."""
        entries = min(vocab_size, max_model_len + MAX_BIASED + MAX_END_IDS)
        shape = (rows, -(-entries // _SLICE) * _SLICE)
        ids = np.full(shape, vocab_size, np.int32)
        ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        empty = cls(
            ids, np.full(shape, -1, np.int32), np.zeros(shape, np.float32), ones, zeros, zeros, np.int32(0)
        )
        placed: Adjustments = jax.device_put(empty)
        return placed

    def filled(self, sequences: list[Sequence], vocab_size: int) -> Adjustments:
        """Lists of the same shape for a step's samples; `self` where none of them changes anything."""
        if not any(_changes(seq) for seq in sequences):
            return self
        rows, width = self.ids.shape
        ids = np.full((rows, width), vocab_size, np.int32)
        counts = np.full((rows, width), -1, np.int32)
        bias = np.zeros((rows, width), np.float32)
        factors = np.tile(np.array([[1.0], [0.0], [0.0]], np.float32), (1, rows))
        longest = 0
        for row, seq in enumerate(sequences):
            if not _changes(seq):
                continue
            entries = _entries(seq, vocab_size)
            longest = max(longest, len(entries[0]))
            for array, values in zip((ids, counts, bias), entries):
                array[row, : len(values)] = values
            p = seq.request.sampling
            factors[:, row] = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        num_slices = np.int32(-(-longest // _SLICE))
        repetition, presence, frequency = factors
        lists = Adjustments(ids, counts, bias, repetition, presence, frequency, num_slices)
        placed: Adjustments = jax.device_put(lists)
        return placed


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


def adjust(logits: Array, a: Adjustments) -> tuple[Array, Array]:
    """Change the listed logits.

    Order: repetition penalty, presence and frequency penalty, bias.

    Args:
        logits: f32[Q, V].
        a: What to change.

    Returns:
        The changed logits, in place where nothing else needs the old ones, and f32[Q, E] the old values of
        those changed, for `restored`.
    """
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def turn(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        changed, saved = carry
        ids, counts, bias = (
            jax.lax.dynamic_slice_in_dim(x, i * _SLICE, _SLICE, 1) for x in (a.ids, a.counts, a.bias)
        )
        old = changed.at[rows, ids].get(mode="fill", fill_value=0.0)
        factor = jnp.where(counts >= 0, a.repetition[:, None], 1.0)
        new = jnp.where(old > 0, old / factor, old * factor)
        times = jnp.maximum(counts, 0).astype(jnp.float32)
        new -= a.presence[:, None] * (times > 0) + a.frequency[:, None] * times
        changed = changed.at[rows, ids].set(new + bias, mode="drop")
        return changed, jax.lax.dynamic_update_slice_in_dim(saved, old, i * _SLICE, 1)

    start = (logits, jnp.zeros(a.ids.shape, jnp.float32))
    done: tuple[Array, Array] = jax.lax.fori_loop(0, a.num_slices, turn, start)
    return done


def restored(logits: Array, saved: Array, a: Adjustments) -> Array:
    """The logits before `adjust`, bit for bit."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def turn(i: Array, changed: Array) -> Array:
        ids, old = (jax.lax.dynamic_slice_in_dim(x, i * _SLICE, _SLICE, 1) for x in (a.ids, saved))
        return changed.at[rows, ids].set(old, mode="drop")

    back: Array = jax.lax.fori_loop(0, a.num_slices, turn, logits)
    return back
