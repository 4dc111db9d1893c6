"""Writes and copies of KV blocks: pure functions that update a donated pool in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.kernels import doors, native
from pagedjax.kernels.layout import KVPool, device_class, read_rows, write_rows
from pagedjax.kernels.quant import quantise

_BYTE_ROWS = 32  # of a tile of bytes, as TPUs lay out an array


def write_kv(
    pool: KVPool, layer: int | jax.Array, k: jax.Array, v: jax.Array | None, slot_mapping: jax.Array
) -> KVPool:
    """Stores this step's keys and values of one layer.

    Args:
        pool: Donate it to the enclosing jit, and use only the returned one.
        layer: 0 to L-1, Python int or i32[]; a traced one outside writes nothing.
        k: f[T, K, H], cast or quantised to the pool's dtype.
        v: f[T, K, H]; None where the pool's values lie in its keys.
        slot_mapping: i32[T], block id * B + offset. Slots outside [0, P*B) are dropped: padding is -1.

    Raises:
        ValueError: k or v is not f[T, K, H] of slot_mapping and pool, v is there or missing against the layout, the
            pool's array is not its layout's, or a layer that is known while tracing is not one of the pool's.
    """
    kv = new_rows(pool, layer, k, v, slot_mapping)
    layout, slots = pool.layout, jnp.asarray(slot_mapping, jnp.int32)
    if native.serves(pool):
        return native.write(pool, layer, kv, slots)  # the same bytes; XLA's scatter takes 15 us a row on CPU
    rows = write_rows(layout, layer, slots // layout.block_size)
    if layout.quantised and layout.block_size >= _BYTE_ROWS and device_class() == "tpu":
        return _write_tiles(pool, kv, rows, slots % layout.block_size)
    at = pool.data.at[rows, slots % layout.block_size, : layout.used_width]
    return KVPool(at.set(kv, mode="drop"), layout)


def _write_tiles(pool: KVPool, kv: jax.Array, rows: jax.Array, offsets: jax.Array) -> KVPool:
    """Bytes i8[T, lanes in use] to (pool row, token of the block), a tile of 32 tokens read and written for each.

    XLA:TPU lays blocks of 32 tokens and more out in such tiles; to write less than one it would copy the whole pool
    twice. It writes tokens one by one in either way.
    """
    layout = pool.layout
    kv = jnp.pad(kv, ((0, 0), (0, layout.width - layout.used_width)))
    row, lane = jnp.arange(_BYTE_ROWS)[:, None], jnp.arange(layout.width)[None, :]

    def body(i: jax.Array, data: jax.Array) -> jax.Array:
        there = rows[i] < layout.shape[0]
        at = (jnp.minimum(rows[i], layout.shape[0] - 1), offsets[i] // _BYTE_ROWS * _BYTE_ROWS, 0)
        old = lax.dynamic_slice(data, at, (1, _BYTE_ROWS, layout.width))
        mine = there & (row == offsets[i] % _BYTE_ROWS) & (lane < layout.used_width)
        return lax.dynamic_update_slice(data, jnp.where(mine, kv[i], old), at)

    return KVPool(lax.fori_loop(0, rows.shape[0], body, pool.data), layout)


def new_rows(
    pool: KVPool, layer: int | jax.Array, k: jax.Array, v: jax.Array | None, slot_mapping: jax.Array
) -> jax.Array:
    """What `write_kv` of these arguments writes: f[T, lanes in use] of the pool's dtype. Raises as it does."""
    layout = pool.layout
    doors.check_pool(pool)
    doors.check_layer(layout, layer)
    slots = doors.known_ids("slot_mapping", slot_mapping)
    dims = doors.dimensions(T=slots.shape[0], K=layout.num_kv_heads, H=layout.head_dim)
    if (v is None) != bool(layout.latent_dim):
        raise ValueError(
            f"v={'None' if v is None else 'an array'}: values of a pool of latent_dim={layout.latent_dim} "
            f"{'lie in its keys; leave v out' if layout.latent_dim else 'lie beside its keys; give them'}"
        )
    parts = {"k": k} if v is None else {"k": k, "v": v}
    for name, x in parts.items():
        doors.require(dims, name, x, "TKH", float)
    flat = (slots.shape[0], layout.kv_width)
    if layout.quantised:
        codes, scales = zip(*(quantise(x, layout.dtype) for x in parts.values()))
        return jnp.concatenate([x.reshape(slots.shape[0], -1) for x in (*codes, *scales)], axis=1)
    return jnp.concatenate([x.reshape(flat) for x in parts.values()], axis=1).astype(pool.data.dtype)


def copy_blocks(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
    """Copies whole blocks in all layers, as one simultaneous assignment.

    Args:
        src: i32[C] block ids.
        dst: i32[C] block ids, none twice; a destination outside [0, P) is dropped: padding is -1.

    Raises:
        ValueError: src and dst differ in shape or are not one-dimensional.
    """
    src, dst = doors.known_ids("src", src), doors.known_ids("dst", dst)
    if src.shape != dst.shape:
        raise ValueError(f"src.shape={src.shape}: must equal dst.shape={dst.shape}")
    return scatter_blocks(pool, dst, gather_blocks(pool, src))


def gather_blocks(pool: KVPool, ids: jax.Array) -> jax.Array:
    """Reads whole blocks of all layers: i32[C] → f[L, C, B, width]; ids outside [0, P) read block 0."""
    doors.check_pool(pool)
    ids = doors.known_ids("ids", ids)
    layers = jnp.arange(pool.layout.num_layers, dtype=jnp.int32)[:, None]
    rows = read_rows(pool.layout, layers, ids[None, :])
    return pool.data.at[rows].get(mode="promise_in_bounds")


def scatter_blocks(pool: KVPool, ids: jax.Array, blocks: jax.Array) -> KVPool:
    """Writes what `gather_blocks` returned: blocks f[L, C, B, width] to i32[C], none twice; -1 is dropped.

    Raises:
        ValueError: blocks does not have the shape that gather_blocks returns for these ids.
    """
    doors.check_pool(pool)
    ids = doors.known_ids("ids", ids)
    layout = pool.layout
    dims = doors.dimensions(L=layout.num_layers, C=ids.shape[0], B=layout.block_size, W=layout.width)
    doors.require(dims, "blocks", blocks, "LCBW", layout.storage if layout.quantised else float)
    layers = jnp.arange(layout.num_layers, dtype=jnp.int32)[:, None]
    rows = write_rows(layout, layers, ids[None, :])
    return KVPool(pool.data.at[rows].set(blocks.astype(pool.data.dtype), mode="drop"), layout)
