"""The columns of a logits array as tokens: all of them on one device, or a device's part of several.

What is asked of a whole row of logits (its sum, its largest, who is best) is asked here, so that sampling is written
once. Where columns are dealt out, a device works its own and only numbers per row cross: nobody holds the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


class Vocabulary:
    """All tokens on one device: column i is token i."""

    def size(self, width: int) -> int:
        """Token ids that an array of so many columns stands for."""
        return width

    def ids(self, width: int) -> Array:
        """i32[width], the token of each column."""
        return jnp.arange(width, dtype=jnp.int32)

    def columns(self, width: int, draw: Callable[[int], Array]) -> Array:
        """The own columns of what `draw(size)` gives for every token: f[..., size] → f[..., width]."""
        return draw(width)

    def sum(self, values: Array) -> Array:
        """Over all tokens: [Q, width] → [Q]."""
        return jnp.sum(values, axis=-1)

    def count(self, chosen: Array) -> Array:
        """Over all tokens: bool[Q, width] → i32[Q]."""
        return jnp.sum(chosen, axis=-1, dtype=jnp.int32)

    def max(self, values: Array) -> Array:
        """Over all tokens: f[Q, width] → f[Q, 1]."""
        return values.max(axis=-1, keepdims=True)

    def best(self, scores: Array) -> Array:
        """The token of the highest score, of equal ones the lowest: f[Q, width] → i32[Q]."""
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def logsumexp(self, logits: Array) -> Array:
        """f[Q, width] → f[Q]."""
        return jax.nn.logsumexp(logits, axis=-1)

    def places(self, ids: Array, width: int) -> Array:
        """The own column of each token; `width` where it is another device's."""
        return ids

    def of(self, logits: Array, tokens: Array) -> Array:
        """The logits of given tokens: f[Q, width], i32[Q] → f[Q, 1]."""
        return jnp.take_along_axis(logits, tokens[:, None], axis=-1)

    def top(self, logits: Array, count: int) -> tuple[Array, Array]:
        """The best tokens, best first, of equal ones the lowest first: f[Q, count] and their ids i32[Q, count]."""
        values, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
        return values, ids.astype(jnp.int32)


@dataclass(frozen=True)
class CutVocabulary(Vocabulary):
    """One device's part, inside `shard_map`: columns are the tokens from device * width on, -inf where there is none.

    Attributes:
        axis: Mesh axis along which the columns are dealt out.
        devices: Along it.
        tokens: V of the whole vocabulary.
    """

    axis: str
    devices: int
    tokens: int

    def size(self, width: int) -> int:
        return self.devices * width

    def first(self, width: int) -> Array:
        """Token of the first column, i32[]."""
        return jax.lax.axis_index(self.axis).astype(jnp.int32) * width

    def ids(self, width: int) -> Array:
        return self.first(width) + jnp.arange(width, dtype=jnp.int32)

    def columns(self, width: int, draw: Callable[[int], Array]) -> Array:
        # An element of a threefry draw depends on its index alone: the slice is fused into it, and no more is drawn.
        drawn = draw(self.size(width))
        return jax.lax.dynamic_slice_in_dim(drawn, self.first(width), width, axis=-1)

    def sum(self, values: Array) -> Array:
        return jax.lax.psum(jnp.sum(values, axis=-1), self.axis)

    def count(self, chosen: Array) -> Array:
        return jax.lax.psum(jnp.sum(chosen, axis=-1, dtype=jnp.int32), self.axis)

    def max(self, values: Array) -> Array:
        return jax.lax.pmax(values.max(axis=-1, keepdims=True), self.axis)

    def best(self, scores: Array) -> Array:
        """One exchange of two numbers per row and device: the best score of each and its token."""
        own = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        value = jnp.take_along_axis(scores, own[:, None], axis=-1)[:, 0]
        pair = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), own + self.first(scores.shape[-1])])
        values, tokens = jnp.moveaxis(jax.lax.all_gather(pair, self.axis), 1, 0)
        # Devices stand in the order of their tokens: of equal scores the first is the lowest token.
        winner = jnp.argmax(jax.lax.bitcast_convert_type(values, jnp.float32), axis=0)
        return jnp.take_along_axis(tokens, winner[None, :], axis=0)[0]

    def logsumexp(self, logits: Array) -> Array:
        top = self.max(logits)
        return jnp.log(self.sum(jnp.exp(logits - top))) + top[:, 0]

    def places(self, ids: Array, width: int) -> Array:
        at = ids - self.first(width)
        return jnp.where((at >= 0) & (at < width) & (ids < self.tokens), at, width)

    def of(self, logits: Array, tokens: Array) -> Array:
        width = logits.shape[-1]
        at = self.places(tokens, width)[:, None]
        own = jnp.take_along_axis(logits, jnp.minimum(at, width - 1), axis=-1)
        return jax.lax.psum(jnp.where(at < width, own, 0.0), self.axis)

    def top(self, logits: Array, count: int) -> tuple[Array, Array]:
        """One exchange: each device's best are enough to find the best of all."""
        width = logits.shape[-1]
        values, own = jax.lax.top_k(logits, min(count, width))
        pair = jnp.stack(
            [jax.lax.bitcast_convert_type(values, jnp.int32), own.astype(jnp.int32) + self.first(width)]
        )
        values, ids = (
            jnp.moveaxis(x, 0, 1).reshape(logits.shape[0], -1)
            for x in jnp.moveaxis(jax.lax.all_gather(pair, self.axis), 1, 0)
        )
        top, at = jax.lax.top_k(jax.lax.bitcast_convert_type(values, jnp.float32), min(count, self.tokens))
        return top, jnp.take_along_axis(ids, at, axis=-1)


WHOLE = Vocabulary()
