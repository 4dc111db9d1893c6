"""Checks at the kernels' doors, made while tracing: shapes in the letters of layout.py, dtypes, the plan and its pool.

A compiled step pays nothing for them. chex judges shapes and dtypes; what it finds is raised as ValueError, with the
argument's name and the rule.
"""

from __future__ import annotations

import numbers
import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch

if TYPE_CHECKING:
    import chex


def dimensions(**letters: int) -> chex.Dimensions:
    """Sizes by letter, for `require`."""
    import chex  # a sixth of a second, which a process that traces nothing need not spend

    return chex.Dimensions(**letters)


def require(dims: chex.Dimensions, name: str, x: Any, letters: str, kind: Any) -> None:
    """Raises ValueError unless x has this shape and dtype.

    Args:
        dims: Binds every letter.
        name: Of the argument, for the message.
        x: Anything with a shape and a dtype.
        letters: One letter per axis, as "TNH".
        kind: `float` (any floating dtype), `int` (any integer dtype) or one dtype.
    """
    import chex

    try:
        chex.assert_shape(x, dims[letters])
        chex.assert_type(x, kind)
    except (AssertionError, AttributeError) as error:
        axes = ", ".join(f"{letter}={size}" for letter, size in zip(letters, dims[letters], strict=True))
        what = {float: "floating", int: "integer"}.get(kind) or jnp.dtype(kind).name
        found = f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', []))}"
        raise ValueError(f"{name}={found}: must be {what} [{axes}]") from error


def check_pool(pool: KVPool) -> None:
    """Raises ValueError where the array is not what its layout says: rows behind its end would be read or written."""
    layout = pool.layout
    rows, block_size, width = layout.shape
    require(dimensions(R=rows, B=block_size, W=width), "pool.data", pool.data, "RBW", layout.storage)


def check_layer(layout: KVLayout, layer: Any) -> None:
    """Raises ValueError where a layer known while tracing is outside [0, L): its rows would be another layer's.

    A traced one outside writes nothing, and its attention is NaN.
    """
    if isinstance(layer, (int, np.integer)):
        if not 0 <= layer < layout.num_layers:
            raise ValueError(
                f"layer={layer}: must be between 0 and {layout.num_layers - 1}, the pool's layers"
            )
    elif jnp.shape(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer={layer}: must be an int or an integer scalar")


def check_ragged(ragged: RaggedBatch, layout: KVLayout) -> None:
    """Raises ValueError where a plan was not made for this pool, or is no plan."""
    if ragged.block_size != layout.block_size:
        raise ValueError(
            f"ragged.block_size={ragged.block_size}: must be the pool's {layout.block_size}; plan with that block_size"
        )
    T, (S, M) = ragged.num_tokens_bucket, np.shape(ragged.block_tables)
    dims = dimensions(T=T, S=S, M=M, E=S + 1)
    for name, letters in (
        ("slot_mapping", "T"),
        ("block_tables", "SM"),
        ("seq_lens", "S"),
        ("query_start_loc", "E"),
        ("num_seqs", ""),
        ("num_decodes", ""),
        ("num_tiles", ""),
    ):
        require(dims, f"ragged.{name}", getattr(ragged, name), letters, np.int32)


def check_query(q: Any, layout: KVLayout, ragged: RaggedBatch) -> None:
    """Raises ValueError unless q is f[T, N, H] of this plan and pool, N a multiple of K."""
    heads = np.shape(q)[1] if np.ndim(q) == 3 else 0
    require(dimensions(T=ragged.num_tokens_bucket, N=heads, H=layout.head_dim), "q", q, "TNH", float)
    if heads % layout.num_kv_heads or not heads:
        raise ValueError(f"N={heads} query heads: must be a multiple of K={layout.num_kv_heads}")


def real(name: str, value: Any) -> float:
    """A Python float: another kind of number would widen the arithmetic where `jax_enable_x64` is on."""
    if isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return float(value)
    raise ValueError(f"{name}={value!r}: must be a number known while tracing")


def window_tokens(value: Any) -> int | None:
    """The window as a Python int of at least 1, or None."""
    if value is None:
        return None
    try:
        window = operator.index(value)
    except TypeError:
        raise ValueError(f"window={value!r}: must be an integer or None, which sees all") from None
    if window < 1:
        raise ValueError(f"window={window}: must be at least 1 (the query's own key); None sees all")
    return window


def known_ids(name: str, ids: Any) -> jax.Array:
    """ids as i32[n]; wider integers are refused, since an id beyond int32 would wrap to one that is there."""
    if np.ndim(ids) != 1:
        raise ValueError(f"{name}.shape={np.shape(ids)}: must be one-dimensional block ids")
    require(
        dimensions(n=np.shape(ids)[0]),
        name,
        ids if hasattr(ids, "dtype") else np.asarray(ids, np.int32),
        "n",
        np.int32,
    )
    return jnp.asarray(ids, jnp.int32)
