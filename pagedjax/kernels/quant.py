"""Keys and values of eight bits: one scale for each token and head, behind the lanes of its row, or none at all.

A number is `scale * code`. Codes of int8 are whole numbers from -127 to 127, those of fp8_e4m3 its own; the scale maps
the largest magnitude of a head's lanes to the largest code, so that nothing is clipped. Scales are float32, kept as
four bytes each, so that blocks of codes and scales copy, swap and leave as one array of bytes. Of fp8_e4m3_unscaled a
code is the number itself, and what is beyond 448 becomes that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.cache.rules import SCALED

# Largest code of each kind.
QUANTISED = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e4m3_unscaled": 448.0}


def quantise(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of heads.

    Args:
        x: f[T, K, H].
        kind: Of QUANTISED.

    Returns:
        The codes' bytes i8[T, K, H] and the scales' bytes i8[T, K, 4], or i8[T, K, 0] of a kind without. A NaN or
        infinity in a head makes its scale NaN.
    """
    wide = x.astype(jnp.float32)
    if kind not in SCALED:
        codes = jnp.clip(wide, -QUANTISED[kind], QUANTISED[kind]).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(codes, jnp.int8), jnp.zeros((*x.shape[:-1], 0), jnp.int8)
    largest = jnp.abs(wide).max(axis=-1)
    scale = jnp.where(jnp.isfinite(largest), largest / QUANTISED[kind], jnp.nan)
    codes = jnp.where((scale > 0)[..., None], wide / scale[..., None], 0.0)
    if kind == "int8":
        stored = jnp.round(codes).astype(jnp.int8)
    else:
        stored = jax.lax.bitcast_convert_type(codes.astype(jnp.float8_e4m3fn), jnp.int8)
    return stored, jax.lax.bitcast_convert_type(scale, jnp.int8)


def dequantise(codes: jax.Array, scales: jax.Array, kind: str) -> jax.Array:
    """Numbers f32[..., H] of codes' bytes i8[..., H] and, of a kind that has some, scales' bytes i8[..., 4]."""
    if kind != "int8":
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    if kind not in SCALED:
        return codes.astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(scales, jnp.float32)
    return codes.astype(jnp.float32) * scale[..., None]
