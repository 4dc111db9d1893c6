"""One function per op: shape checks, the choice of an implementation, the order of fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.cache.plugins import Plugins
from pagedjax.kernels import doors, native, pallas_mma, pallas_mosaic, pallas_tpu, xla
from pagedjax.kernels.blocks import new_rows, write_kv
from pagedjax.kernels.layout import (
    KVLayout,
    KVPool,
    RaggedBatch,
    compute_capability,
    device_class,
    device_kind,
    known_layer,
)
from pagedjax.kernels.tuning import PACKAGED, Tuning, heads_of

IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, ...]]] = {
    "pallas_tpu": pallas_tpu.attend,
    "pallas_mosaic": pallas_mosaic.attend,
    "pallas_mma": pallas_mma.attend,
    "native": native.attend,
    "xla": xla.attend,
}
KERNEL_PLUGINS = Plugins("implementation", "pagedjax.kernels", IMPLEMENTATIONS, "xla")


@overload
def paged_attention(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: jax.Array | None = ...,
    implementation: str | Sequence[str] | None = ...,
    return_lse: Literal[False] = ...,
) -> jax.Array: ...


@overload
def paged_attention(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: jax.Array | None = ...,
    implementation: str | Sequence[str] | None = ...,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of a ragged batch over block tables: decode, prefill chunks and mixtures.

    Query i of a row with q tokens and KV length n stands at position n - q + i and sees the keys at
    positions 0 .. n - q + i. Its output is sum_j p_j v_j with p = softmax over j of
    soft_cap * tanh(scale * q·k_j / soft_cap), the mask applied after the cap.

    Args:
        q: f[T, N, H].
        pool: This step's keys must already be written.
        layer: 0 to L-1, Python int or i32[].
        ragged: From `plan_ragged`.
        scale: Usually H ** -0.5.
        window: A query sees this many keys, its own included; None sees all.
        soft_cap: Positive cap on the scaled scores.
        sinks: f[N], one logit per head that joins the softmax without a value.
        implementation: A name of IMPLEMENTATIONS or of an installed plug-in, "module:function", names to try in
            order, or None for the preferred order, which ends in "xla".
        return_lse: Also return the log-sum-exp of the scores (sinks included), f32[T, N].

    Returns:
        f[T, N, H] in q's dtype, or f[T, N, latent_dim] where the pool's values lie in its keys.
        Padding tokens and rows of length 0 give 0 (log-sum-exp -inf). A NaN among what a
        query sees, or in the query, gives NaN; so does a traced layer outside [0, L).

    Raises:
        ValueError: Arguments that no implementation could serve.
        NotImplementedError: The named implementations cannot serve this case; names each limit.

    Source:
        PagedAttention (Kwon et al., SOSP 2023, §4.1); log-sum-exp merging as in FlashAttention
        (Dao et al., 2022) and Flash-Decoding (2023).
    """
    names = _order(implementation)
    attends = [(name, KERNEL_PLUGINS.find(name)) for name in names]
    out, lse = _serve(
        attends, q, pool, layer, ragged, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return (out, lse) if return_lse else out


def _serve(
    attends: Sequence[tuple[str, Callable[..., tuple[jax.Array, ...]]]],
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """What the first of some implementations returns that serves a call; `paged_attention` says of what arguments."""
    _check(q, pool, layer, ragged, sinks)
    scale, window = doors.real("scale", scale), doors.window_tokens(window)
    if soft_cap is not None and not (soft_cap := doors.real("soft_cap", soft_cap)) > 0:
        raise ValueError(f"soft_cap={soft_cap}: must be positive; None leaves scores as they are")
    ragged.decode_list(window)
    ragged = jax.tree.map(jnp.asarray, ragged)
    if not isinstance(layer, (int, np.integer)):
        layer, known = known_layer(pool.layout, layer)
        q = jnp.where(known, q, jnp.nan)  # no layer's keys are its
    refusals = []
    for name, attend in attends:
        try:
            # Kernels count in int32 and compute in float32, whatever `jax_enable_x64` makes of a bare number.
            with jax.enable_x64(False):
                return attend(
                    q, pool, layer, ragged, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
                )
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
    raise NotImplementedError("; ".join(refusals))


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    implementation: str | Sequence[str] | None = None,
    **params: Any,
) -> tuple[KVPool, jax.Array]:
    """`write_kv` of this step's keys and values and `paged_attention` of its queries.

    On TPU a step of decode rows alone is one kernel, which writes the row whose keys it has at hand
    (`fused_write` of the tuning table).

    Args:
        q, pool, layer, ragged, implementation: As for `paged_attention`; the pool lacks this step's keys.
        k, v: As for `write_kv`, to the slots of the plan.
        params: As for `paged_attention`.

    Returns:
        (the pool, f[T, N, H]).
    """
    first = _order(implementation)[0]
    sizes = ragged.sizes("pallas_tpu", pool.layout, q.shape[1]) if np.ndim(q) == 3 else {}
    # Rows apart may be one sequence's, and read one another's keys: all are written first.
    alone = ragged.decode_bucket == ragged.num_tokens_bucket and not ragged.apart
    if first == "pallas_tpu" and alone and sizes.get("fused_write") and not params.get("return_lse"):
        try:
            return _fused(q, k, v, pool, layer, ragged, **params)
        except NotImplementedError:
            pass  # what the kernel cannot serve is refused, or served by another, below
    pool = write_kv(pool, layer, k, v, ragged.slot_mapping)
    return pool, paged_attention(q, pool, layer, ragged, implementation=implementation, **params)


def _fused(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    **params: Any,
) -> tuple[KVPool, jax.Array]:
    new = new_rows(pool, layer, k, v, ragged.slot_mapping)
    if not isinstance(layer, (int, np.integer)):
        layer, known = known_layer(pool.layout, layer)
        q = jnp.where(known, q, jnp.nan)
        ragged = replace(
            ragged, slot_mapping=jnp.where(known, ragged.slot_mapping, -1)
        )  # and nothing is written
    attend = functools.partial(IMPLEMENTATIONS["pallas_tpu"], new=new)
    out, _, data = _serve([("pallas_tpu", attend)], q, pool, layer, ragged, **params)
    return KVPool(data, pool.layout), out


def plan_sizes(layout: KVLayout, num_heads: int, tuning: Tuning = PACKAGED) -> dict[str, int]:
    """`chunk_tokens` and `tile_queries` of a plan on the device that is traced for, by the tuning table."""
    heads = heads_of(num_heads, layout.num_kv_heads, layout.head_dim)
    call = {"device": device_kind(), "heads": heads, "dtype": layout.dtype, "block_size": layout.block_size}
    return tuning.sizes("plan", **call)


def _order(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    if implementation is None:
        gpu = ("pallas_mosaic", "pallas_mma") if compute_capability() == (9, 0) else ("pallas_mma",)
        own = {"tpu": ("pallas_tpu",), "gpu": gpu}.get(device_class(), ())
        if native.available():
            own = ("native",)
        return (*own, "xla")
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        KERNEL_PLUGINS.find(name)
    if not names:
        raise ValueError("implementation=(): must name at least one; None takes the preferred order")
    return names


def _check(
    q: jax.Array, pool: KVPool, layer: int | jax.Array, ragged: RaggedBatch, sinks: jax.Array | None
) -> None:
    doors.check_pool(pool)
    doors.check_layer(pool.layout, layer)
    doors.check_ragged(ragged, pool.layout)
    doors.check_query(q, pool.layout, ragged)
    if sinks is not None:
        doors.require(doors.dimensions(N=q.shape[1]), "sinks", sinks, "N", float)
