"""The pieces a decoder is made of: linear maps, norms, MLPs and rotary positions.

Modules are built abstractly: a parameter holds a `jax.ShapeDtypeStruct`, so making a decoder of any size
allocates nothing. Arrays come from `weights`; they meet the modules in `nnx.merge` inside jit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.kernels import products
from pagedjax.models.config import ModelConfig, RopeScaling

Array = jax.Array


def param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter of which only shape and dtype exist; what is no matrix is float32 beside int8 ones."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32 if dtype == jnp.int8 else dtype))


def matrix(rows: int, columns: int, dtype: jnp.dtype) -> tuple[nnx.Param, nnx.Param | None]:
    """A matrix, and of int8 the scale of each row."""
    scale = param((rows,), dtype) if dtype == jnp.int8 else None
    return nnx.Param(jax.ShapeDtypeStruct((rows, columns), dtype)), scale


def matmul_t(x: Array, weight: Array, dtype: jnp.dtype | None = None) -> Array:
    """x f[T, D] times the transpose of weight f[O, D], XLA's own product: f[T, O], of `dtype` where given."""
    return products.product(x, weight, dtype=dtype)


class Linear(nnx.Module):
    """y = x Wᵀ + b, with W f[d_out, d_in] as most files have it.

    XLA:CPU reads it as fast as [d_in, d_out] at batch 1, 1.2 to 1.6 times as fast at 8 to 32 rows, and a
    tied output matrix is the embedding itself. `summed_over` names the mesh axis along which x and the columns of W are
    cut: the devices' products are summed, then the bias is added once. `products` is the implementation, which
    `make_decoder` sets.
    """

    def __init__(
        self, d_in: int, d_out: int, dtype: jnp.dtype, bias: bool = False, summed_over: str | None = None
    ) -> None:
        self.weight, self.weight_scale = matrix(d_out, d_in, dtype)
        self.bias = param((d_out,), dtype) if bias else None
        self.summed_over = summed_over
        self.products = "xla"

    def product(self, x: Array, dtype: jnp.dtype | None = None) -> Array:
        """x Wᵀ alone, of `dtype` where given."""
        scale = None if self.weight_scale is None else self.weight_scale[...]
        return products.product(x, self.weight[...], scale, implementation=self.products, dtype=dtype)

    def __call__(self, x: Array) -> Array:
        y = self.product(x)
        if self.summed_over is not None:
            y = jax.lax.psum(y, self.summed_over)
        return y if self.bias is None else y + self.bias[...][None, :]


class Norm(nnx.Module):
    """RMS norm, or layer norm where `config.norm` says so, over the last axis; computed in float32."""

    def __init__(self, width: int, config: ModelConfig, dtype: jnp.dtype, eps: float = 0.0) -> None:
        self.scale = param((width,), dtype)
        self.bias = param((width,), dtype) if config.norm == "layer" else None
        self.eps = eps or config.norm_eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.eps)
        lead = (1,) * (x.ndim - 1)
        wide = wide * self.scale[...].astype(jnp.float32).reshape(*lead, -1)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32).reshape(*lead, -1)
        return wide.astype(x.dtype)


ACTIVATION_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Mlp(nnx.Module):
    """down(act(gate x) * up x) with gate and up in one matrix, or down(act(up x))."""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, axis: str | None = None, width: int | None = None
    ) -> None:
        width = config.d_mlp if width is None else width
        up = 2 * width if config.gated_mlp else width
        self.up = Linear(config.d_model, up, dtype, bias=config.mlp_bias)
        self.down = Linear(width, config.d_model, dtype, bias=config.mlp_bias, summed_over=axis)
        self.gated = config.gated_mlp
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        act = ACTIVATION_FUNCTIONS[self.activation]
        hidden = self.up(x)
        if self.gated:
            gate, up = jnp.split(hidden, 2, axis=-1)
            return self.down(act(gate) * up)
        return self.down(act(hidden))


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Angle per position of each rotated pair.

    Returns:
        f64[H / 2] in radians per token, and the factor on cos and sin (1.0 but for yarn).

    Source:
        RoPE: arXiv 2104.09864. YaRN: arXiv 2309.00071, §3.2 to §3.4.
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return freq, 1.0
    if scaling.kind == "table":
        return freq / np.asarray(scaling.divisors), scaling.attention_factor or 1.0
    if scaling.kind == "linear":
        return freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        # Turns a pair makes over the original length: many turns stay, few are divided, between is blended.
        turns = scaling.original_len * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return freq * keep + freq / scaling.factor * (1 - keep), 1.0

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original length."""
        return head_dim * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / (last - first or 1e-3)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    attention = scaling.attention_factor or (
        0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    )
    return freq * keep + freq / scaling.factor * (1 - keep), attention


def rope_tables(positions: Array, frequencies: np.ndarray, factor: float) -> tuple[Array, Array]:
    """cos and sin of every token's angles, f32[T, H / 2] each."""

    def tables() -> tuple[Array, Array]:
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def zeros() -> tuple[Array, Array]:
        return (jnp.zeros((positions.shape[0], len(frequencies)), jnp.float32),) * 2

    # The branch is always taken, but XLA cannot know. Without one it fuses the cosines into the queries and
    # keys of every layer (a barrier does not stop it on CPU) and computes them anew for each head.
    return jax.lax.cond(positions[0] >= 0, tables, zeros)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + H / 2) of each head: x f[T, N, H], tables f32[T, H / 2].

    This is the one convention of the decoder; loaders of files that pair (2i, 2i + 1) reorder the rows of
    the query and key matrices instead.
    """
    cos, sin = (table[:, None, :] for table in tables)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def soft_cap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap), or x where cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x
