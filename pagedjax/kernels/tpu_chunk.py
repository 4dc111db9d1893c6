"""What a TPU program does with one chunk of keys and values: which of them are seen, and a step of the softmax.

Rows are those of a part: the query heads of a decode row, or the queries of a tile that share a KV head. Pools of
eight bits come with scales, which are turned out of the tokens' rows once a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.cache.rules import SCALE_BYTES
from pagedjax.kernels.layout import LANES
from pagedjax.kernels.tpu_sizes import SHORT_QUERIES, TpuShape
from pagedjax.kernels.xla import NEG


def clear_unseen_values(
    buffer: Any, start: jax.Array, first_pos: jax.Array, stop: jax.Array, shape: TpuShape
) -> None:
    """Zeroes values in the buffer that no query sees: those slots may hold NaN, and 0 * NaN is NaN."""
    first, lanes = shape.values
    values = buffer[:, :, first : first + lanes]
    block = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    pos = start + block * shape.block_size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    written = pos < stop
    if shape.window is not None:
        written &= pos > first_pos - shape.window
    buffer[:, :, first : first + lanes] = jnp.where(written, values, jnp.zeros_like(values))


def seen_keys(
    start: jax.Array, first_pos: jax.Array, first_key: jax.Array, shape: TpuShape, dims: tuple[int, int]
) -> jax.Array:
    """Which keys [rows, chunk] each row sees: none of rows behind the last query's is ever read.

    Where it is not causal, all see the keys up to `first_pos`.
    """
    pos = start + lax.broadcasted_iota(jnp.int32, dims, 1)
    query = first_pos
    if shape.tile and shape.causal:
        row = lax.broadcasted_iota(jnp.int32, dims, 0)
        if shape.latent_dim:
            query = first_pos + row // shape.heads_per_kv
        else:
            of_sub = SHORT_QUERIES * shape.heads_per_kv
            query = first_pos + row // of_sub * SHORT_QUERIES + row % SHORT_QUERIES
    seen = (pos <= query) & (pos >= first_key)
    if shape.window is not None:
        seen &= pos > query - shape.window
    return seen


def scale_picks(dims: tuple[int, int], shape: TpuShape) -> jax.Array:
    """[2 * rows, lanes]: times the bytes of a token's scales, two bytes of each row's scale as one number.

    The upper two in the first half of the rows, the lower two in the other. Rows are those of `TpuShape.picked_scales`.
    """
    rows, K = dims[0] // 2, shape.num_kv_heads
    row, lane = (lax.broadcasted_iota(jnp.int32, dims, axis) for axis in (0, 1))
    upper = row < rows
    row = jnp.where(upper, row, row - rows)
    if shape.tile:
        head, there = row, row < 2 * K
    else:
        of_value = row >= rows // 2
        row = jnp.where(of_value, row - rows // 2, row)
        head = row // shape.heads_per_kv + jnp.where(of_value, K, 0)
        there = row < shape.num_heads
    byte = 2 * shape.kv_width - shape.scale_lanes.start + SCALE_BYTES * head + jnp.where(upper, 2, 0)
    picked = jnp.where(lane == byte + 1, 256.0, jnp.where(lane == byte, 1.0, 0.0))
    return jnp.where(there, picked, 0.0).astype(jnp.bfloat16)


def turned_scales(kv: jax.Array, picks: Any, shape: TpuShape) -> jax.Array:
    """The scales f32[rows, chunk] of rows [chunk, width] of bytes, to the last bit.

    They lie along a token's lanes and are needed along the tokens: a product with ones turns them, of two bytes at a
    time, which float32 holds exactly.
    """
    rows = picks.shape[0] // 2
    stored = (kv[:, shape.scale_lanes].astype(jnp.int32) & 255).astype(jnp.float32).astype(jnp.bfloat16)
    turned = lax.dot_general(
        picks[...], stored, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    return lax.bitcast_convert_type((turned[:rows] << 16) | turned[rows:], jnp.float32)


def _wide(x: jax.Array, lanes: int) -> jax.Array:
    """[R, 128] equal lanes → [R, lanes]."""
    return x[:, :lanes] if lanes <= LANES else jnp.concatenate([x] * -(-lanes // LANES), axis=1)[:, :lanes]


def work_chunk(
    kv: jax.Array,
    queries_of: Callable[[int], jax.Array],
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    seen: Any,
    shape: TpuShape,
    scales: jax.Array | None,
) -> None:
    """One online-softmax step of every part over kv [chunk, width].

    Of codes the scores are multiplied by the keys' scales and the weights by the values' (`turned_scales`).

    Maxima lie in all lanes and sums lane by lane, so that no step turns a column into lanes. A part's value product
    waits until the next part's scores are under way.
    """
    parts, R, summed = acc_ref.shape
    lanes = shape.head_dim if shape.tile else shape.kv_width
    dtype = queries_of(0).dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32, precision=precision)
    mask = None if seen is None else seen((R, shape.chunk))

    def numbers(first: int, width: int) -> jax.Array:
        codes = kv[:, first : first + width]
        if shape.codes.startswith("fp8_e4m3"):
            codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return codes.astype(dtype)

    def scales_of(part: int, value: int) -> jax.Array:
        """Of a part's keys or values: [rows of heads, chunk], or [1, chunk] where the part is one head."""
        assert scales is not None
        first = value * scales.shape[0] // 2 if not shape.tile else value * shape.num_kv_heads + part
        return scales[first : first + (1 if shape.tile else scales.shape[0] // 2)]

    def add_values(part: int, p: jax.Array, shrink: jax.Array) -> None:
        v = numbers(shape.values[0] + part * summed, summed)
        acc_ref[part] = _wide(shrink, summed) * acc_ref[part] + dot(p, v, (((1,), (0,)), ((), ())))

    waiting: tuple[int, jax.Array, jax.Array] | None = None
    for part in range(parts):
        s = dot(queries_of(part), numbers(part * lanes, lanes), (((1,), (1,)), ((), ())))
        s *= shape.scale if scales is None else scales_of(part, 0) * shape.scale
        if shape.soft_cap is not None:
            s = shape.soft_cap * jnp.tanh(s / shape.soft_cap)
        if mask is not None:
            s = jnp.where(mask, s, NEG)
        old = m_ref[part]
        top = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        m_ref[part] = top
        p = jnp.exp(s - _wide(top, shape.chunk))
        shrink = jnp.exp(old - top)
        if shape.chunk >= LANES:
            sums = functools.reduce(jnp.add, (p[:, at : at + LANES] for at in range(0, shape.chunk, LANES)))
            l_ref[part] = shrink * l_ref[part] + sums
        else:
            l_ref[part, :, : shape.chunk] = shrink[:, : shape.chunk] * l_ref[part, :, : shape.chunk] + p
            l_ref[part, :, shape.chunk :] = shrink[:, shape.chunk :] * l_ref[part, :, shape.chunk :]
        if waiting is not None:
            add_values(*waiting)
        if scales is not None:
            p *= scales_of(part, 1)
            p = p if mask is None else jnp.where(mask, p, 0.0)  # a scale that no query sees may be NaN
        waiting = (part, p.astype(dtype), shrink)
    assert waiting is not None
    add_values(*waiting)
