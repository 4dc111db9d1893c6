"""What the GPU kernels share: queries laid in rows of 64, a program per (work entry, KV head), states joined at last.

A kernel is a function of entries. Decode entries are parts of rows, so that a long row is split over many programs;
prefill entries are up to 64 rows of queries of one sequence, the G heads of a token side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pagedjax.kernels import xla
from pagedjax.kernels.entries import cut_rows, join_parts, split_rows
from pagedjax.kernels.layout import KVPool, RaggedBatch, read_rows
from pagedjax.kernels.xla import State

ROWS = 64  # of queries that a program works
KEYS = 64  # of one key tile
# Programs that keep the device busy where rows are few: twice the multiprocessors of an H100.
PROGRAMS = 264
SUBLANES = 8  # rows of one swizzled shared-memory tile
# (queries f[Q, K, R, H], entry=(table, which query, position, first key, stop), group=, causal=) → a state per entry.
Kernel = Callable[..., State]


@dataclass(frozen=True)
class GpuShape:
    """What a compiled kernel is specialised on."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    table_width: int
    rows: int  # query rows that are copied in and out, a multiple of 8
    group: int  # rows that belong to one token
    causal: bool  # more than one token: rows see different keys
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def unit(self) -> int:
        """Keys that one copy brings."""
        return min(self.block_size, KEYS)

    @property
    def swizzle(self) -> int:
        """Bytes of the widest swizzle whose lanes divide the head."""
        return next(s for s in (128, 64, 32) if self.head_dim % (s // 2) == 0)


def check(pool: KVPool, ragged: RaggedBatch, group: int, why_not_float32: str) -> None:
    """Raises NotImplementedError for what no GPU kernel takes."""
    layout = pool.layout
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"jax {jax.__version__}: must be 0.12 or later; use 'xla' here")
    if layout.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"dtype={layout.dtype}: must be bfloat16 or float16 ({why_not_float32})")
    if not SUBLANES <= layout.block_size <= ragged.chunk_tokens:
        raise NotImplementedError(
            f"block_size={layout.block_size}: must be between {SUBLANES} and chunk_tokens={ragged.chunk_tokens}"
        )
    if layout.head_dim % 16:
        raise NotImplementedError(f"head_dim={layout.head_dim}: must be a multiple of 16")
    if group > ROWS:
        raise NotImplementedError(f"{group} query heads per KV head: must be at most {ROWS}")


def attend_rows(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    params: xla.Params,
    sinks: jax.Array | None,
    entries: Callable[..., State],
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) by a kernel of entries.

    Args:
        entries: A `Kernel` that also takes pool=, rows=, the i32[S, M] pool rows of every table, and params=.
    """
    K = pool.layout.num_kv_heads
    rows = read_rows(pool.layout, layer, ragged.block_tables)
    call = functools.partial(entries, pool=pool, rows=rows, params=params)
    return xla.assemble(
        q,
        pool,
        layer,
        ragged,
        params,
        sinks,
        decode=lambda: _decode(q, ragged, call, K, params.window),
        tiles=lambda state: _tiles(q, ragged, call, K, state),
    )


def _decode(q: jax.Array, ragged: RaggedBatch, call: Kernel, K: int, window: int | None) -> State:
    """State of the decode rows, [Sd, K, G, …]: one entry per part of a row, joined row by row."""
    Sd, (N, H) = ragged.decode_bucket, q.shape[1:]
    G = N // K
    entries = split_rows(ragged, window, -(-PROGRAMS // K))
    pos = ragged.seq_lens[entries.row] - 1
    parts = call(
        q[:Sd].reshape(Sd, K, G, H),
        entry=(entries.row, entries.row, pos, entries.first, entries.stop),
        group=G,
        causal=False,
    )
    return join_parts(entries, tuple(x[:, :, :G] for x in parts))


def _tiles(q: jax.Array, ragged: RaggedBatch, call: Kernel, K: int, state: State) -> State:
    """`state` with the tokens of longer rows written over it: one entry per 64 rows of queries."""
    T, N, H = q.shape
    G = N // K
    size = ROWS // G
    starts, ends = ragged.query_start_loc[:-1], ragged.query_start_loc[1:]
    index = jnp.arange(len(starts), dtype=jnp.int32)
    counts = jnp.where(index >= ragged.num_decodes, (ends - starts + size - 1) // size, 0)
    most = -(-T // size) + min(len(starts), T // 2)
    (row, first_pos, stop, _), tokens = cut_rows(ragged, counts, jnp.zeros_like(starts), size, most)
    stop = jnp.where(stop > first_pos, stop, 0)
    tiles = q[jnp.minimum(tokens, T - 1)].reshape(most, size, K, G, H).swapaxes(1, 2)
    parts = call(
        tiles.reshape(most, K, size * G, H),
        entry=(row, jnp.arange(most, dtype=jnp.int32), first_pos, jnp.zeros_like(stop), stop),
        group=G,
        causal=True,
    )

    def by_token(x: jax.Array) -> jax.Array:
        x = x[:, :, : size * G].reshape(most, K, size, G, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(most * size, K, G, *x.shape[4:])

    at = tokens.reshape(-1)
    return tuple(s.at[at].set(by_token(x), mode="drop") for s, x in zip(state, parts))
