"""y = x Wᵀ with weights as files have them, W [d_out, d_in]: the one op behind every linear map of a decoder.

`xla` is XLA's own product, the judge and what every device but a CPU gets. `native` (`products.h`, for CPUs) reads each
weight once a step whatever the number of rows, in float32, bfloat16 or int8, and gives a row the same bits in every
batch. Its activations are float32; int8 weights meet them as 16-bit numbers with a scale per row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kernels import native
from pagedjax.kernels.layout import device_class

_SERVED = (jnp.float32, jnp.bfloat16, jnp.int8)


def product(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    implementation: str = "xla",
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """x times the transpose of a weight.

    Args:
        x: f[T, D].
        weight: f[O, D], or int8[O, D] with its scale.
        scale: f32[O]: row o of the weight is `scale[o] * weight[o]`.
        implementation: "xla" or "native", see `choose`.
        dtype: Of the result; None is XLA's choice. The native op gives float32.

    Returns:
        f[T, O].

    Raises:
        NotImplementedError: "native" cannot serve these dtypes here; names the limit.
        ValueError: An int8 weight without a scale.
    """
    if weight.dtype == jnp.int8 and scale is None:
        raise ValueError("weight int8 without a scale: rows of int8 weights have one each")
    if implementation == "native":
        _require(x, weight)
        shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
        scales = jnp.zeros((0,), jnp.float32) if scale is None else scale
        out: jax.Array = jax.ffi.ffi_call("pagedjax_product", shape)(x, weight, scales)
        return out
    if scale is None:
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    y = jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))
    return (y * scale[None, :]).astype(dtype or y.dtype)


def grouped_product(
    x: jax.Array, weight: jax.Array, ids: jax.Array, groups: int, scale: jax.Array | None = None
) -> jax.Array:
    """Rows times the transposes of the weights of their groups, by the native op: those of groups in use are read once.

    Args:
        x: f32[T, K].
        weight: f32, bf16 or int8[G * O, K], group after group.
        ids: i32[A], the group of each assignment, A a multiple of T: the first A / T of them are row 0's, and so on.
            Outside [0, G) stands nobody, whose row is zeros.
        groups: G.
        scale: f32[G * O], of int8 weights.

    Returns:
        f32[A, O]. A row has the same bits whatever else is asked for.

    Raises:
        NotImplementedError: These dtypes, or this device, cannot be served; names the limit.
        ValueError: An int8 weight without a scale.
    """
    if weight.dtype == jnp.int8 and scale is None:
        raise ValueError("weight int8 without a scale: rows of int8 weights have one each")
    _require(x, weight)
    shape = jax.ShapeDtypeStruct((ids.shape[0], weight.shape[0] // groups), jnp.float32)
    scales = jnp.zeros((0,), jnp.float32) if scale is None else scale
    out: jax.Array = jax.ffi.ffi_call("pagedjax_grouped", shape)(
        x, weight, scales, ids, groups=np.int64(groups)
    )
    return out


def prepare(setting: str) -> None:
    """Build and load the library where products of this setting would use it.

    Raises:
        RuntimeError: As `native.prepare`, where "native" was asked for.
    """
    if setting != "xla":
        native.prepare(None if setting == "auto" else "native")


def choose(setting: str, dtype: jnp.dtype, devices: int = 1, beside: str = "") -> str:
    """Which implementation a model's linear maps get: "native" or "xla".

    Args:
        setting: "auto" takes the native op where it serves, "native" asks for it, "xla" does without.
        dtype: Of the weights.
        devices: That work each step together.
        beside: What of the model multiplies with weights by itself, in XLA and in its activations' dtype; "" nothing.

    Raises:
        NotImplementedError: "native" was asked for, or weights are int8, and cannot be served; names the limit.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.int8 and (beside or devices > 1):
        what = beside or f"{devices} devices"
        raise NotImplementedError(f"int8 weights: not served for {what}; try float32 or bfloat16")
    if beside and dtype != jnp.float32:
        refusal = f"{beside}: multiplied by {dtype} in XLA, and its activations are float32"
    else:
        refusal = _refusal(dtype, devices)
    if setting == "native" and refusal:
        raise NotImplementedError(f"products=native: {refusal}; try auto or xla")
    return "xla" if setting == "xla" or refusal else "native"


def _refusal(dtype: jnp.dtype, devices: int) -> str:
    if devices > 1:
        return f"{devices} devices work a step together, and it serves one"
    if device_class() != "cpu":
        return f"it is for CPUs, not {device_class()}"
    if dtype not in _SERVED:
        return f"it reads weights of float32, bfloat16 and int8, not {dtype}"
    if not native.available():
        return "it is not built for this CPU; pagedjax.kernels.native.load() builds it with a C++ compiler"
    return ""


def _require(x: jax.Array, weight: jax.Array) -> None:
    refusal = _refusal(weight.dtype, 1)
    if x.dtype != jnp.float32:
        refusal = refusal or f"activations must be float32, not {x.dtype}"
    if refusal:
        raise NotImplementedError(f"native products: {refusal}")
