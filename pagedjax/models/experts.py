"""Experts in place of an MLP: which of them a token uses, and products that read each used expert's weights only.

    router logits f[T, E] ─► choose: ids i[T, k], weights f[T, k]      padding tokens choose nobody
    assignments sorted by expert ─► tiles of up to R rows of one expert ─► a loop over the tiles there are
    rows back in the tokens' order ─► summed by weight

Shapes are static and no assignment is dropped; only the number of turns of the loop depends on the step. A tile's
product has one shape wherever it stands, so a row's result does not depend on which other tokens are in the step.
`jax.lax.ragged_dot` is the same sum; on CPU XLA computes it as E dense products (`pagedjax bench experts`). There the
native products (`kernels.products`) do the sorting and the tiles in C++, in one pass over the weights in use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.kernels.products import grouped_product
from pagedjax.models.config import ModelConfig
from pagedjax.models.layers import ACTIVATION_FUNCTIONS, Linear, Mlp, matmul_t, param
from pagedjax.models.mixture import Experts

Array = jax.Array


def choose(logits: Array, experts: Experts, choice_bias: Array | None = None) -> tuple[Array, Array]:
    """A token's experts and their weights.

    Args:
        logits: f32[T, E], the router's.
        experts: How they are chosen.
        choice_bias: f[E], joins the scores for the choice.

    Returns:
        ids i32[T, k], best first (of equal ones the lower number), and weights f32[T, k].
    """
    e = experts
    if e.routing == "softmax-of-chosen":
        best, ids = _best(logits, e.per_token)
        return ids, jax.nn.softmax(best, axis=-1) * e.scale
    scores = jax.nn.sigmoid(logits) if e.routing == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    wanted = scores if choice_bias is None else scores + choice_bias.astype(jnp.float32)[None, :]
    if e.num_groups > 1:
        wanted = _within_groups(wanted, e)
    _, ids = _best(wanted, e.per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if e.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * e.scale


def _best(scores: Array, count: int) -> tuple[Array, Array]:
    """The largest of each row and where they stand; zeros of both signs are equal, which `top_k` does not think."""
    return jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), count)


def _within_groups(wanted: Array, e: Experts) -> Array:
    """Scores f32[T, E] with those outside a token's best groups at -inf."""
    grouped = wanted.reshape(-1, e.num_groups, e.num_experts // e.num_groups)
    best, _ = jax.lax.top_k(grouped, 1 if e.group_score == "best" else 2)
    _, groups = _best(best.sum(axis=-1), e.groups_per_token)
    kept = jax.nn.one_hot(groups, e.num_groups, dtype=bool).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(wanted.shape)


def tile_rows(tokens: int, experts: Experts) -> int:
    """R, rows of a tile: up to 8 tokens every expert has one, above that as many rows as it has on average."""
    if tokens <= 8:
        return tokens
    mean = -(-tokens * experts.per_token // experts.num_experts)
    return min(max(8, 1 << (mean - 1).bit_length()), 128)


class ExpertMlp(nnx.Module):
    """The MLP of a layer with experts, behind the same norm and with the same shapes as `Mlp`.

    `expert_up` has the rows of expert 0's gate, of its up, then expert 1's, f[E * 2 * Fe, D]; `expert_down` is
    f[E * D, Fe]. With an `axis` it is one device's part: narrower experts, whose products are summed over the devices.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, axis: str | None = None) -> None:
        assert config.experts is not None
        self.axis = axis
        self.experts = e = config.experts
        self.router = Linear(config.d_model, e.num_experts, dtype, bias=e.router_bias)
        # Always float32, as files have it: rounded to bfloat16 it would choose other experts.
        self.choice_bias = param((e.num_experts,), jnp.dtype("float32")) if e.choice_bias else None
        self.expert_up = Linear(config.d_model, e.num_experts * 2 * e.d_expert, dtype, bias=e.expert_bias)
        self.expert_down = Linear(e.d_expert, e.num_experts * config.d_model, dtype, bias=e.expert_bias)
        self.activation = config.activation
        self.shared = Mlp(config, dtype, axis, width=e.d_shared) if e.d_shared else None

    def __call__(self, x: Array, num_tokens: Array | None = None) -> Array:
        """x f[T, D] → f[T, D]; of padding tokens, those from num_tokens i32[] on, only the shared part."""
        e, tokens = self.experts, x.shape[0]
        logits = self.router.product(x, jnp.float32)
        if self.router.bias is not None:
            logits = logits + self.router.bias[...].astype(jnp.float32)[None, :]
        ids, weights = choose(logits, e, None if self.choice_bias is None else self.choice_bias[...])
        if num_tokens is not None:
            real = jnp.arange(tokens, dtype=jnp.int32)[:, None] < num_tokens
            ids, weights = jnp.where(real, ids, e.num_experts), jnp.where(real, weights, 0.0)
        native = self.expert_up.products == "native"
        rows = self._native_products(x, ids) if native else self._products(x, ids)
        y = _weighted(rows, weights, ids < e.num_experts)
        if self.axis is not None:
            y = jax.lax.psum(y, self.axis)
        if self.expert_down.bias is not None:
            biases = self.expert_down.bias[...].reshape(e.num_experts, -1)[
                jnp.minimum(ids, e.num_experts - 1)
            ]
            y = y + (biases.astype(jnp.float32) * weights[:, :, None]).sum(axis=1)
        y = y.astype(x.dtype)
        return y if self.shared is None else y + self.shared(x)

    def _products(self, x: Array, ids: Array) -> Array:
        """Outputs of every token's experts, f[T, k, D]; of nobody (number E) whatever stands there."""
        e, (tokens, width), k = self.experts, x.shape, ids.shape[1]
        R, total = tile_rows(tokens, e), tokens * k
        order = jnp.argsort(ids.reshape(-1), stable=True).astype(jnp.int32)
        tile_expert, tile_start, num_tiles = _tiles(ids.reshape(-1)[order], e.num_experts, R)
        up = self.expert_up.weight[...].reshape(e.num_experts, 2 * e.d_expert, width)
        down = self.expert_down.weight[...].reshape(e.num_experts, width, e.d_expert)
        up_bias = None
        if self.expert_up.bias is not None:
            up_bias = self.expert_up.bias[...].reshape(e.num_experts, 2 * e.d_expert)
        token_of = jnp.concatenate([order // k, jnp.zeros(R, jnp.int32)])

        def tile(turn: Array, out: Array) -> Array:
            expert, start = tile_expert[turn], tile_start[turn]
            rows = x[jax.lax.dynamic_slice_in_dim(token_of, start, R)]
            hidden = matmul_t(rows, jax.lax.dynamic_index_in_dim(up, expert, keepdims=False))
            if up_bias is not None:
                hidden = hidden + up_bias[expert][None, :]
            done = matmul_t(
                self._activate(hidden), jax.lax.dynamic_index_in_dim(down, expert, keepdims=False)
            )
            # Rows past the expert's last belong to the next tile, which writes them again.
            return jax.lax.dynamic_update_slice_in_dim(out, done, start, 0)

        empty = jnp.zeros((total + R, width), x.dtype)
        out = jax.lax.fori_loop(0, num_tiles, tile, empty)
        place = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32))
        return out[place].reshape(tokens, k, width)

    def _native_products(self, x: Array, ids: Array) -> Array:
        """As `_products`, in one pass over the weights of the experts in use; of nobody finite numbers stand there."""
        (tokens, k), groups, of = ids.shape, self.experts.num_experts, ids.reshape(-1)
        hidden = grouped_product(x, self.expert_up.weight[...], of, groups)
        if self.expert_up.bias is not None:
            biases = self.expert_up.bias[...].astype(jnp.float32).reshape(groups, -1)
            hidden = hidden + biases[jnp.minimum(of, groups - 1)]
        done = grouped_product(self._activate(hidden), self.expert_down.weight[...], of, groups)
        return done.reshape(tokens, k, -1)

    def _activate(self, hidden: Array) -> Array:
        gate, up = jnp.split(hidden, 2, axis=-1)
        clamp = self.experts.clamp
        if not clamp:
            return ACTIVATION_FUNCTIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
        return (up + 1) * gate * jax.nn.sigmoid(gate * self.experts.alpha)


def _tiles(sorted_ids: Array, num_experts: int, rows: int) -> tuple[Array, Array, Array]:
    """Tiles of up to `rows` assignments of one expert each, in their order.

    Args:
        sorted_ids: i32[A] of each assignment; the number of experts stands for nobody.
        num_experts, rows: E, R.

    Returns:
        expert i32[W] and first assignment i32[W] of each tile, and how many tiles there are, i32[].
    """
    total = sorted_ids.shape[0]
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    ends = jnp.searchsorted(sorted_ids, numbers, side="right").astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = (ends - starts + rows - 1) // rows
    last = jnp.cumsum(counts, dtype=jnp.int32)
    turns = jnp.arange(min(num_experts, total) + total // rows, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, turns, side="right").astype(jnp.int32), num_experts - 1)
    return expert, starts[expert] + (turns - last[expert] + counts[expert]) * rows, last[-1]


def _weighted(rows: Array, weights: Array, used: Array) -> Array:
    """Sum of a token's rows f[T, k, D] by weight f32[T, k], f32[T, D]; what is not used may hold anything."""
    rows = jnp.where(used[:, :, None], rows.astype(jnp.float32), 0.0)
    return (rows * weights[:, :, None]).sum(axis=1)
