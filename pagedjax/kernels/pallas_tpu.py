"""Ragged paged attention for TPUs (Pallas, Mosaic).

One kernel body serves decode and prefill: a program is one work entry, some queries of one sequence. It walks
the chunks of keys they can see; a chunk's blocks come by one hand-written DMA each into one of two buffers,
while the other is worked. The last chunk of an entry already fetches the first chunk of the next, so that
short rows leave no gap.

Decode entries hold one token: its heads are laid on a block diagonal, [N, K*H], and one contraction with the
pool's own [tokens, K*H] rows serves all heads. Prefill entries are up to 128 tokens of one row and contract head
by head; their queries come and their outputs go by DMA, from and to the flat arrays of all tokens, so that nothing
is padded to tiles outside of the chip. Head dims and head counts need no padding, since heads are slices of lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax.kernels import xla
from pagedjax.kernels.entries import cut_rows
from pagedjax.kernels.layout import LANES, KVPool, RaggedBatch, device_class, read_rows
from pagedjax.kernels.tpu_sizes import LEFT_AT_MOST, SHORT_QUERIES, SUBLANES, Sizes, Tiling, TpuShape, chip
from pagedjax.kernels.xla import NEG


def attend(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) of `paged_attention`.

    Args:
        tiling: Sizes of the kernel's pieces; None takes what follows from chip and shape.
        interpret: True or `pltpu.InterpretParams()` runs it on the CPU, for tests.

    Raises:
        NotImplementedError: Not a TPU, float16, blocks under one tile of sublanes, or a shape whose tables or
            buffers do not fit the chip.
    """
    _check(pool, interpret)
    T, N, H = q.shape
    Sd = ragged.decode_bucket
    params = xla.Params(scale, window, soft_cap)
    sizes = Sizes(pool.layout, N, sinks is not None, tiling or Tiling(), chip(interpret))
    call = _Call(pool, layer, ragged, params, sizes, interpret)
    q_pool = q.astype(pool.data.dtype)
    live = jnp.arange(T) < ragged.query_start_loc[-1]
    if ragged.tile_queries:
        out, lse = _prefill(q_pool, call, sinks)
    else:
        out, lse = jnp.zeros((T, N, H), pool.data.dtype), jnp.full((T, N), NEG, jnp.float32)
    if Sd:
        part = _decode(q_pool, call)
        acc, m, l = xla.with_groups(part, q, pool, layer, ragged, params)
        rows, row_lse = xla.finalise(acc.reshape(Sd, N, H), m.reshape(Sd, N), l.reshape(Sd, N), sinks)
        first = (jnp.arange(Sd) < ragged.num_decodes)[:, None]
        out = out.at[:Sd].set(jnp.where(first[..., None], rows.astype(out.dtype), out[:Sd]))
        lse = lse.at[:Sd].set(jnp.where(first, row_lse, lse[:Sd]))
    out = jnp.where(live[:, None, None], out, 0).astype(q.dtype)
    # A sum is NEG where nothing is seen, and only there.
    return out, jnp.where(live[:, None] & (lse != NEG), lse, -jnp.inf)


def _check(pool: KVPool, interpret: Any) -> None:
    layout = pool.layout
    if not interpret and device_class() != "tpu":
        raise NotImplementedError(f"platform={device_class()}: must be a TPU; use 'xla' here")
    if layout.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"dtype={layout.dtype}: must be float32 or bfloat16 on TPU")
    if layout.block_size < SUBLANES:
        raise NotImplementedError(f"block_size={layout.block_size}: must be at least {SUBLANES}")


@dataclass(frozen=True)
class _Call:
    """What all calls of one attention have in common."""

    pool: KVPool
    layer: int | jax.Array
    ragged: RaggedBatch
    params: xla.Params
    sizes: Sizes
    interpret: Any

    def shape(self, tile: int) -> TpuShape:
        return self.sizes.shape(self.ragged.block_tables.shape[1], tile, self.params)

    def row_groups(self, num_rows: int) -> list[tuple[int, int]]:
        """Rows [first, last) whose tables fit SMEM together: each group is a call of its own."""
        most = self.sizes.rows_at_once(self.ragged.block_tables.shape[1])
        return [(first, min(first + most, num_rows)) for first in range(0, num_rows, most)]

    def rows(self, first: int, last: int) -> jax.Array:
        """i32[rows * M] pool rows of some tables."""
        return read_rows(self.pool.layout, self.layer, self.ragged.block_tables[first:last]).reshape(-1)

    def compiler_params(self, shape: TpuShape) -> Any:
        return pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            # `read_rows` maps every id into the pool, and the plan every chunk into its table.
            disable_bounds_checks=True,
            vmem_limit_bytes=self.sizes.vmem_limit_bytes(shape),
        )


# ---- decode ----------------------------------------------------------------------------------------------


def _decode(q: jax.Array, call: _Call) -> tuple[jax.Array, ...]:
    """State of the decode rows, [Sd, K, G, …]: one entry a row, heads on a block diagonal."""
    ragged, layout = call.ragged, call.pool.layout
    Sd, (N, H), K = ragged.decode_bucket, q.shape[1:], layout.num_kv_heads
    work = ragged.decode_list(call.params.window)
    lens = ragged.seq_lens[:Sd]
    padded = -(-N // 16) * 16
    own = jnp.arange(N)[:, None] // (N // K) == jnp.arange(K)[None, :]
    diagonal = jnp.where(own[None, :, :, None], q[:Sd, :, None, :], 0).reshape(Sd, 1, N, K * H)
    diagonal = jnp.pad(diagonal, ((0, 0), (0, 0), (0, padded - N), (0, 0)))
    shape = call.shape(0)
    first_key = work.skip * ragged.chunk_tokens
    if call.params.window is not None:
        first_key = jnp.maximum(first_key, lens - call.params.window)
    outs = []
    for first, last in call.row_groups(Sd):
        count = jnp.clip(ragged.num_decodes - first, 0, last - first)
        at = slice(first, last)
        entry = (jnp.arange(last - first, dtype=jnp.int32), lens[at] - 1, lens[at], first_key[at])
        outs.append(_decode_rows(diagonal[at], call.rows(first, last), entry, count, call, shape))
    out, lse = (jnp.concatenate(parts) for parts in zip(*outs, strict=True))
    live = jnp.arange(Sd) < ragged.num_decodes
    out = jnp.where(live[:, None, None], out[:, 0, :N], 0).reshape(Sd, K, N // K, H)
    lse = jnp.where(live[:, None], lse[:, 0, :N], NEG).reshape(Sd, K, N // K)
    return out, lse, jnp.where(lse != NEG, 1.0, 0.0)


def _decode_rows(
    q: jax.Array,
    rows: jax.Array,
    entry: tuple[jax.Array, ...],
    count: jax.Array,
    call: _Call,
    shape: TpuShape,
) -> tuple[jax.Array, jax.Array]:
    """Runs the decode kernel over entries (table, position, stop, first key), each i32[W].

    Args:
        q: f[W, 1, R, K*H].

    Returns:
        (normalised f32[W, 1, R, H], lse f32[W, 1, R], NEG where nothing is seen); undefined from count on.
    """
    W, _, R, lanes = q.shape
    H = shape.head_dim
    scalars = (*entry, *_chunks(shape, *entry[1:]), count[None], rows)
    out, lse = pl.pallas_call(
        functools.partial(_decode_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                pl.BlockSpec((None, 1, R, lanes), lambda w, *_: (w, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((None, 1, R, H), lambda w, *_: (w, 0, 0, 0)),
                pl.BlockSpec((None, 1, R, LANES), lambda w, *_: (w, 0, 0, 0)),
            ],
            scratch_shapes=_state_scratch(call, shape, 1, R, lanes),
        ),
        out_shape=[jax.ShapeDtypeStruct((W, 1, R, n), jnp.float32) for n in (H, LANES)],
        compiler_params=call.compiler_params(shape),
        interpret=call.interpret,
        name="paged_decode",
    )(*scalars, q, call.pool.data)
    return out, lse[..., 0]


def _chunks(
    shape: TpuShape, first_pos: jax.Array, stop: jax.Array, first_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(first chunk, chunk behind the last) of entries; equal where no key is seen."""
    first = jnp.maximum(first_key, 0) // shape.chunk
    last = (stop + shape.chunk - 1) // shape.chunk
    return first, jnp.maximum(first, jnp.where(stop > jnp.maximum(first_key, 0), last, 0))


# ---- prefill ---------------------------------------------------------------------------------------------


def _prefill(q: jax.Array, call: _Call, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H] in the pool's dtype, lse f32[T, N], NEG where nothing is seen) of the tokens of longer rows.

    Whole tiles first, then what is left of rows in short entries, so that a row of a few queries does not pay for a
    tile. Other tokens' results are undefined.
    """
    ragged = call.ragged
    T, N, _ = q.shape
    tile = call.sizes.tile_queries(T)
    starts, ends = ragged.query_start_loc[:-1], ragged.query_start_loc[1:]
    index = jnp.arange(starts.shape[0], dtype=jnp.int32)
    length = jnp.where(index >= ragged.num_decodes, ends - starts, 0)
    cut = min(LEFT_AT_MOST, tile // 2) if tile > SHORT_QUERIES else 0
    left = length % tile
    # (queries of an entry, entries of each row, of its tokens those before them, room for entries).
    kinds = [(tile, length // tile + (left > cut), jnp.zeros_like(starts), T // (cut + 1) + 1)]
    if cut:
        short = jnp.where(left <= cut, (left + SHORT_QUERIES - 1) // SHORT_QUERIES, 0)
        kinds.append((SHORT_QUERIES, short, length - left, -(-T // SHORT_QUERIES) + min(len(starts), T // 2)))
    window = call.params.window
    out: jax.Array | None = None
    lse = jnp.full((T, N), NEG, jnp.float32)
    for first, last in call.row_groups(len(starts)):
        rows = call.rows(first, last)
        for size, counts, before, most in kinds:
            counts = jnp.where((index >= first) & (index < last), counts, 0)
            entry, tokens = cut_rows(ragged, counts, before, size, most)
            row, first_pos, stop, token = entry
            first_key = jnp.zeros_like(row) if window is None else jnp.maximum(first_pos - window + 1, 0)
            entry = (row - first, first_pos, stop, first_key, token)
            out, part = _prefill_entries(q, rows, entry, counts.sum(), out, sinks, call, size)
            lse = lse.at[tokens.reshape(-1)].set(part.reshape(-1, N), mode="drop")
    assert out is not None
    return out, lse


def _prefill_entries(
    q: jax.Array,
    rows: jax.Array,
    entry: tuple[jax.Array, ...],
    count: jax.Array,
    out: jax.Array | None,
    sinks: jax.Array | None,
    call: _Call,
    tile: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs the prefill kernel over entries (table, first position, stop, first key, first token), each i32[W].

    Args:
        q: f[T, N, H].
        out: f[T, N, H], what earlier calls wrote; None is the first call.

    Returns:
        (`out` with the entries' tokens written, lse f32[W, tile, N]).
    """
    T, N, H = q.shape
    shape = call.shape(tile)
    K, G = N // shape.heads_per_kv, shape.heads_per_kv
    R, W = tile * G, entry[0].shape[0]
    scalars = (*entry, *_chunks(shape, *entry[1:4]), count[None], rows)
    arrays, specs = [q, call.pool.data], [pl.BlockSpec(memory_space=pl.ANY)] * 2
    if sinks is not None:
        by_row = jnp.repeat(sinks.astype(jnp.float32).reshape(K, 1, G), SHORT_QUERIES, axis=2)
        by_row = jnp.broadcast_to(by_row, (K, tile // SHORT_QUERIES, G * SHORT_QUERIES)).reshape(K, R, 1)
        arrays.append(jnp.broadcast_to(by_row, (K, R, LANES)))
        specs.append(pl.BlockSpec((K, R, LANES), lambda w, *_: (0, 0, 0)))
    aliases = {}
    if out is not None:
        aliases = {len(scalars) + len(arrays): 0}
        arrays.append(out)
        specs.append(pl.BlockSpec(memory_space=pl.ANY))
    dtype = call.pool.data.dtype
    out, lse = pl.pallas_call(
        functools.partial(_prefill_kernel, shape=shape, has_out=out is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=specs,
            out_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((None, K, R), lambda w, *_: (w, 0, 0)),
            ],
            scratch_shapes=[
                *_state_scratch(call, shape, K, R, H),
                pltpu.VMEM((2, tile, N, H), dtype),
                pltpu.VMEM((tile, N, H), dtype),
                pltpu.VMEM((K, R, H), dtype),
                pltpu.VMEM((-(-H // LANES) * tile * shape.padded_heads, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((T, N, H), dtype), jax.ShapeDtypeStruct((W, K, R), jnp.float32)],
        input_output_aliases=aliases,
        compiler_params=call.compiler_params(shape),
        interpret=call.interpret,
        name="paged_prefill" if tile > SHORT_QUERIES else "paged_prefill_short",
    )(*scalars, *arrays)
    # Rows lie as (16 tokens, head of the group, token).
    lse = lse.reshape(W, K, tile // SHORT_QUERIES, G, SHORT_QUERIES).transpose(0, 2, 4, 1, 3)
    return out, lse.reshape(W, tile, N)


# ---- what both are made of -------------------------------------------------------------------------------


def _state_scratch(call: _Call, shape: TpuShape, parts: int, R: int, lanes: int) -> list[Any]:
    """Two chunks of keys and values, their semaphores, which of them is next, and the state of the online softmax."""
    layout = call.pool.layout
    return [
        pltpu.VMEM((2, shape.chunk_blocks, layout.block_size, layout.width), call.pool.data.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((parts, R, LANES), jnp.float32),
        pltpu.VMEM((parts, R, LANES), jnp.float32),
        pltpu.VMEM((parts, R, lanes), jnp.float32),
    ]


@dataclass(frozen=True)
class _Entries:
    """The scalars of all entries, in SMEM."""

    table: Any
    first_pos: Any
    stop: Any
    first_key: Any
    first_chunk: Any
    last_chunk: Any
    count: Any
    rows: Any


def _decode_kernel(
    table: Any, first_pos: Any, stop: Any, first_key: Any, first: Any, last: Any, count: Any, rows: Any,
    q_ref: Any, pool_ref: Any, o_ref: Any, lse_ref: Any, *scratch: Any, shape: TpuShape,
) -> None:  # fmt: skip
    entries = _Entries(table, first_pos, stop, first_key, first, last, count, rows)
    _, _, _, m_ref, l_ref, acc_ref = scratch
    m_ref[...] = jnp.full_like(m_ref, NEG)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    _walk(entries, q_ref, pool_ref, scratch, shape)
    m, l, acc = m_ref[0], jnp.sum(l_ref[0], axis=1, keepdims=True), acc_ref[0]
    R, H = o_ref.shape[1:]
    row = lax.broadcasted_iota(jnp.int32, (R, H), 0) // shape.heads_per_kv
    out = jnp.zeros((R, H), jnp.float32)
    for head in range(acc.shape[1] // H):
        out = jnp.where(row == head, acc[:, head * H : (head + 1) * H], out)
    # A NaN among scores is a key seen, whether or not the maximum keeps it.
    seen = (m != NEG) | (l != l)
    safe = jnp.where(seen, l, 1.0)
    o_ref[0] = jnp.where(seen[:, :1], out / safe[:, :1], 0.0)
    lse_ref[0] = jnp.where(seen, m + jnp.log(safe), NEG)


def _prefill_kernel(
    table: Any, first_pos: Any, stop: Any, first_key: Any, token: Any, first: Any, last: Any, count: Any, rows: Any,
    q_hbm: Any, pool_ref: Any, *refs: Any, shape: TpuShape, has_out: bool,
) -> None:  # fmt: skip
    inputs = shape.sinks + has_out  # `out` itself is the same memory as out_hbm
    sink_ref = refs[0] if shape.sinks else None
    out_hbm, lse_ref, *scratch, q_in, o_buffer, q_rows, stage, sems = refs[inputs:]
    entries = _Entries(table, first_pos, stop, first_key, first, last, count, rows)
    _, _, _, m_ref, l_ref, acc_ref = scratch
    w, H, G = pl.program_id(0), shape.head_dim, shape.heads_per_kv
    K, T = shape.num_heads // G, q_hbm.shape[0]

    def pieces(entry: Any, act: Callable[[Any, Any, int], None]) -> None:
        """The entry's tokens as copies of two fixed sizes: (first of all, first of the tile, tokens)."""
        num, whole = stop[entry] - first_pos[entry], 0
        if T >= SHORT_QUERIES:
            whole = num // SHORT_QUERIES * SHORT_QUERIES
            many = lambda i, _: act(token[entry] + i * SHORT_QUERIES, i * SHORT_QUERIES, SHORT_QUERIES)  # noqa: E731
            lax.fori_loop(0, num // SHORT_QUERIES, many, None)
        lax.fori_loop(whole, num, lambda i, _: act(token[entry] + i, i, 1), None)

    def queries(entry: Any, slot: Any, step: str) -> None:
        def copy(of_all: Any, of_tile: Any, size: int) -> None:
            source, target = q_hbm.at[pl.ds(of_all, size)], q_in.at[slot, pl.ds(of_tile, size)]
            getattr(pltpu.make_async_copy(source, target, sems.at[slot]), step)()

        pieces(entry, copy)

    def outputs(entry: Any, step: str) -> None:
        def copy(of_all: Any, of_tile: Any, size: int) -> None:
            source, target = o_buffer.at[pl.ds(of_tile, size)], out_hbm.at[pl.ds(of_all, size)]
            getattr(pltpu.make_async_copy(source, target, sems.at[2]), step)()

        pieces(entry, copy)

    slot = w % 2
    pl.when(w == 0)(lambda: queries(w, slot, "start"))
    pl.when(w + 1 < count[0])(lambda: queries(w + 1, 1 - slot, "start"))
    queries(w, slot, "wait")

    # Rows can be taken at a stride of one vector of lanes only.
    vectors = [(at // LANES, slice(at, min(at + LANES, H))) for at in range(0, H, LANES)]

    def of_token(part: int, sub: Any, t: int) -> Any:
        """Where a token's heads stand in `stage`, a vector of their lanes."""
        at = (part * shape.tile + sub * SHORT_QUERIES + t) * shape.padded_heads
        return pl.ds(pl.multiple_of(at, SUBLANES), shape.num_heads)

    def of_head(part: int, sub: Any, n: int) -> Any:
        """Where the 16 tokens of a head stand in `stage`."""
        at = (part * shape.tile + sub * SHORT_QUERIES) * shape.padded_heads + n
        return pl.ds(at, SHORT_QUERIES, stride=shape.padded_heads)

    def of_group(sub: Any, n: int) -> Any:
        """Where they stand among the rows that are multiplied with their KV head's keys."""
        at = sub * (SHORT_QUERIES * G) + n % G * SHORT_QUERIES
        return pl.ds(pl.multiple_of(at, SHORT_QUERIES), SHORT_QUERIES)

    def lay_down(sub: Any, _: None) -> None:
        """16 tokens: from token by token, as they come, to head by head, as they are multiplied."""
        for t in range(SHORT_QUERIES):
            for part, lanes in vectors:
                token = q_in[slot, sub * SHORT_QUERIES + t, :, lanes].astype(jnp.float32)
                stage[of_token(part, sub, t), : token.shape[1]] = token
        for n in range(shape.num_heads):
            for part, lanes in vectors:
                head = stage[of_head(part, sub, n), :][:, : lanes.stop - lanes.start]
                q_rows[n // G, of_group(sub, n), lanes] = head.astype(q_rows.dtype)

    lax.fori_loop(0, shape.tile // SHORT_QUERIES, lay_down, None)
    if sink_ref is None:
        m_ref[...] = jnp.full_like(m_ref, NEG)
        l_ref[...] = jnp.zeros_like(l_ref)
    else:
        # A sink is a key without a value, seen before all others.
        m_ref[...] = sink_ref[...]
        l_ref[...] = jnp.where(lax.broadcasted_iota(jnp.int32, l_ref.shape, 2) == 0, 1.0, 0.0)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    _walk(entries, q_rows, pool_ref, scratch, shape)

    for part in range(K):
        m, l = m_ref[part], jnp.sum(l_ref[part], axis=1, keepdims=True)
        seen = (m != NEG) | (l != l)
        safe = jnp.where(seen, l, 1.0)
        acc_ref[part] = jnp.where(seen[:, :1], acc_ref[part] / safe[:, :1], 0.0)
        lse = jnp.where(seen, m + jnp.log(safe), NEG)
        for at in range(0, lse.shape[0], LANES):
            # A column becomes a row: of a square of equal lanes, the diagonal.
            square = lse[at : at + LANES, : min(LANES, lse.shape[0] - at)]
            own = lax.broadcasted_iota(jnp.int32, square.shape, 0) == lax.broadcasted_iota(
                jnp.int32, square.shape, 1
            )
            lse_ref[part, pl.ds(at, square.shape[0])] = jnp.sum(jnp.where(own, square, 0.0), axis=0)
    pl.when(w > 0)(lambda: outputs(w - 1, "wait"))

    def take_up(sub: Any, _: None) -> None:
        for n in range(shape.num_heads):
            for part, lanes in vectors:
                head = acc_ref[n // G, of_group(sub, n), lanes]
                stage[of_head(part, sub, n), : head.shape[1]] = head
        for t in range(SHORT_QUERIES):
            for part, lanes in vectors:
                token = stage[of_token(part, sub, t), : lanes.stop - lanes.start]
                o_buffer[sub * SHORT_QUERIES + t, :, lanes] = token.astype(o_buffer.dtype)

    lax.fori_loop(0, shape.tile // SHORT_QUERIES, take_up, None)
    outputs(w, "start")
    pl.when(w + 1 == count[0])(lambda: outputs(w, "wait"))


def _walk(entries: _Entries, q_ref: Any, pool_ref: Any, scratch: Any, shape: TpuShape) -> None:
    """Works the chunks of this program's entry, fetching one ahead, the next entry's first at the end."""
    buffers, sems, slot_ref, m_ref, l_ref, acc_ref = scratch
    w, num_entries = pl.program_id(0), entries.count[0]
    first, last = entries.first_chunk[w], entries.last_chunk[w]

    def copies(entry: Any, chunk: Any, slot: Any, act: str) -> None:
        """Starts or awaits the copies of one chunk's blocks; blocks behind the last token are left out."""
        left = entries.stop[entry] - chunk * shape.chunk
        num_blocks = jnp.minimum((left + shape.block_size - 1) // shape.block_size, shape.chunk_blocks)
        base = entries.table[entry] * shape.table_width + chunk * shape.chunk_blocks

        def one(j: Any, _: None) -> None:
            row = entries.rows[base + j]
            copy = pltpu.make_async_copy(pool_ref.at[row], buffers.at[slot, j], sems.at[slot])
            getattr(copy, act)()

        # Written out, the address arithmetic of neighbours overlaps; only a row's last chunk needs the loop.
        @pl.when(num_blocks == shape.chunk_blocks)
        def whole_chunk() -> None:
            if act == "wait":
                # The semaphore counts bytes, so that one wait is for all.
                pltpu.make_async_copy(buffers.at[slot], buffers.at[slot], sems.at[slot]).wait()
                return
            for j in range(shape.chunk_blocks):
                one(j, None)

        @pl.when(num_blocks < shape.chunk_blocks)
        def part_of_a_chunk() -> None:
            lax.fori_loop(0, num_blocks, one, None)

    def start_next_entry(slot: jax.Array) -> None:
        after = jnp.minimum(w + 1, num_entries - 1)

        @pl.when((w + 1 < num_entries) & (entries.first_chunk[after] < entries.last_chunk[after]))
        def start_after() -> None:
            copies(after, entries.first_chunk[after], slot, "start")

    @pl.when(w == 0)
    def start_first_entry() -> None:
        slot_ref[0] = 0

        @pl.when(first < last)
        def start_first_chunk() -> None:
            copies(w, first, 0, "start")

    @pl.when(first >= last)
    def pass_on() -> None:
        start_next_entry(slot_ref[0])

    first_pos, stop, first_key = entries.first_pos[w], entries.stop[w], entries.first_key[w]

    def one_chunk(chunk: jax.Array, _: None) -> None:
        slot = slot_ref[0]

        @pl.when(chunk + 1 < last)
        def start_next_chunk() -> None:
            copies(w, chunk + 1, 1 - slot, "start")

        @pl.when(chunk + 1 >= last)
        def start_beyond() -> None:
            start_next_entry(1 - slot)

        copies(w, chunk, slot, "wait")
        buffer, start = buffers.at[slot], chunk * shape.chunk
        # Only chunks at either end hold keys that some query does not see: the others pay for no mask.
        at_an_end = (start + shape.chunk - 1 > first_pos) | (start < first_key)
        if shape.window is not None:
            at_an_end |= start <= stop - 1 - shape.window

        def work(masked: bool) -> None:
            if masked:
                _clear_unseen_values(buffer, start, first_pos, stop, shape)
            kv = buffer[...].reshape(shape.chunk, -1)
            seen = functools.partial(_seen, start, first_pos, first_key, shape) if masked else None
            _work_chunk(kv, q_ref, m_ref, l_ref, acc_ref, seen, shape)

        pl.when(at_an_end)(lambda: work(True))
        pl.when(jnp.logical_not(at_an_end))(lambda: work(False))
        slot_ref[0] = 1 - slot

    lax.fori_loop(first, last, one_chunk, None)


def _clear_unseen_values(
    buffer: Any, start: jax.Array, first_pos: jax.Array, stop: jax.Array, shape: TpuShape
) -> None:
    """Zeroes values in the buffer that no query sees: those slots may hold NaN, and 0 * NaN is NaN."""
    values = buffer[:, :, shape.kv_width : 2 * shape.kv_width]
    block = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    pos = start + block * shape.block_size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    written = pos < stop
    if shape.window is not None:
        written &= pos > first_pos - shape.window
    buffer[:, :, shape.kv_width : 2 * shape.kv_width] = jnp.where(written, values, jnp.zeros_like(values))


def _seen(
    start: jax.Array, first_pos: jax.Array, first_key: jax.Array, shape: TpuShape, dims: tuple[int, int]
) -> jax.Array:
    """Which keys [rows, chunk] each row sees: none of rows behind the last query's is ever read."""
    pos = start + lax.broadcasted_iota(jnp.int32, dims, 1)
    query = first_pos
    if shape.tile:
        row = lax.broadcasted_iota(jnp.int32, dims, 0)
        query = first_pos + row // (SHORT_QUERIES * shape.heads_per_kv) * SHORT_QUERIES + row % SHORT_QUERIES
    seen = (pos <= query) & (pos >= first_key)
    if shape.window is not None:
        seen &= pos > query - shape.window
    return seen


def _wide(x: jax.Array, lanes: int) -> jax.Array:
    """[R, 128] equal lanes → [R, lanes]."""
    return x[:, :lanes] if lanes <= LANES else jnp.concatenate([x] * -(-lanes // LANES), axis=1)[:, :lanes]


def _work_chunk(
    kv: jax.Array, q_ref: Any, m_ref: Any, l_ref: Any, acc_ref: Any, seen: Any, shape: TpuShape
) -> None:
    """One online-softmax step of every part over kv [chunk, width].

    Maxima lie in all lanes and sums lane by lane, so that no step turns a column into lanes. A part's value product
    waits until the next part's scores are under way.
    """
    parts, R, lanes = q_ref.shape
    precision = lax.Precision.HIGHEST if kv.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32, precision=precision)
    mask = None if seen is None else seen((R, shape.chunk))

    def add_values(part: int, p: jax.Array, shrink: jax.Array) -> None:
        v = kv[:, shape.kv_width + part * lanes : shape.kv_width + (part + 1) * lanes]
        acc_ref[part] = _wide(shrink, lanes) * acc_ref[part] + dot(p, v, (((1,), (0,)), ((), ())))

    waiting: tuple[int, jax.Array, jax.Array] | None = None
    for part in range(parts):
        k = kv[:, part * lanes : (part + 1) * lanes]
        s = dot(q_ref[part], k, (((1,), (1,)), ((), ()))) * shape.scale
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
        waiting = (part, p.astype(kv.dtype), shrink)
    assert waiting is not None
    add_values(*waiting)
