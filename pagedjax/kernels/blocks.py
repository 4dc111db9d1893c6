"""Writes and copies of KV blocks: pure functions that update a donated pool in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.kernels import native
from pagedjax.kernels.layout import KVPool, check_layer, read_rows, write_rows


def write_kv(
    pool: KVPool, layer: int | jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> KVPool:
    """Stores this step's keys and values of one layer.

    Args:
        pool: Donate it to the enclosing jit, and use only the returned one.
        layer: 0 to L-1, Python int or i32[].
        k: f[T, K, H], cast to the pool's dtype.
        v: f[T, K, H].
        slot_mapping: i32[T], block id * B + offset. Slots outside [0, P*B) are dropped: padding is -1.

    Raises:
        ValueError: k or v does not have shape [T, K, H] of slot_mapping and pool, or a layer that is known
            while tracing is not one of the pool's.
    """
    layout = pool.layout
    check_layer(layout, layer)
    slots = jnp.asarray(slot_mapping, jnp.int32)
    expected = (slots.shape[0], layout.num_kv_heads, layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected:
            raise ValueError(f"{name}.shape={x.shape}: must be [T, K, H]={expected} of slots and pool")
    flat = (expected[0], layout.kv_width)
    kv = jnp.concatenate([k.reshape(flat), v.reshape(flat)], axis=1).astype(pool.data.dtype)
    if native.serves(pool):
        return native.write(pool, layer, kv, slots)  # the same bytes; XLA's scatter takes 15 us a row on CPU
    rows = write_rows(layout, layer, slots // layout.block_size)
    at = pool.data.at[rows, slots % layout.block_size, : 2 * layout.kv_width]
    return KVPool(at.set(kv, mode="drop"), layout)


def copy_blocks(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
    """Copies whole blocks in all layers, as one simultaneous assignment.

    Args:
        src: i32[C] block ids.
        dst: i32[C] block ids, none twice; a destination outside [0, P) is dropped: padding is -1.

    Raises:
        ValueError: src and dst differ in shape or are not one-dimensional.
    """
    _check_ids(src=src, dst=dst)
    if src.shape != dst.shape:
        raise ValueError(f"src.shape={src.shape}: must equal dst.shape={dst.shape}")
    return scatter_blocks(pool, dst, gather_blocks(pool, src))


def gather_blocks(pool: KVPool, ids: jax.Array) -> jax.Array:
    """Reads whole blocks of all layers: i32[C] → f[L, C, B, width]; ids outside [0, P) read block 0."""
    _check_ids(ids=ids)
    layers = jnp.arange(pool.layout.num_layers, dtype=jnp.int32)[:, None]
    rows = read_rows(pool.layout, layers, jnp.asarray(ids, jnp.int32)[None, :])
    return pool.data.at[rows].get(mode="promise_in_bounds")


def scatter_blocks(pool: KVPool, ids: jax.Array, blocks: jax.Array) -> KVPool:
    """Writes what `gather_blocks` returned: blocks f[L, C, B, width] to i32[C], none twice; -1 is dropped.

    Raises:
        ValueError: blocks does not have the shape that gather_blocks returns for these ids.
    """
    _check_ids(ids=ids)
    layout = pool.layout
    expected = (layout.num_layers, ids.shape[0], layout.block_size, layout.width)
    if blocks.shape != expected:
        raise ValueError(f"blocks.shape={blocks.shape}: must be [L, C, B, width]={expected}")
    layers = jnp.arange(layout.num_layers, dtype=jnp.int32)[:, None]
    rows = write_rows(layout, layers, jnp.asarray(ids, jnp.int32)[None, :])
    return KVPool(pool.data.at[rows].set(blocks.astype(pool.data.dtype), mode="drop"), layout)


def _check_ids(**arrays: jax.Array) -> None:
    for name, ids in arrays.items():
        if ids.ndim != 1:
            raise ValueError(f"{name}.shape={ids.shape}: must be one-dimensional block ids")
