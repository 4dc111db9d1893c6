"""Ragged paged attention for TPUs (Pallas, Mosaic): which entries there are, and the calls that work them.

One program (`tpu_programs`) serves decode rows, prefill and shared prefixes: it works one entry, some queries that see
keys of one sequence.

Decode entries hold one token: its heads are laid on a block diagonal, [N, K*H], and one contraction with the
pool's own [tokens, K*H] rows serves all heads. Prefill entries are up to 128 tokens of one row and contract head
by head; their queries come and their outputs go by DMA, from and to the flat arrays of all tokens, so that nothing
is padded to tiles outside of the chip. Entries of a shared prefix are up to 128 rows of a group in the place of
the tokens, without a causal mask. Head dims and head counts need no padding, since heads are slices of lanes.

Latent rows are one key for all heads: tokens' heads are rows of one product as they lie, and are padded to sixteens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax.kernels import xla
from pagedjax.kernels.entries import cut_rows, row_of
from pagedjax.kernels.layout import LANES, KVPool, RaggedBatch, device_class, read_rows, write_rows
from pagedjax.kernels.quant import QUANTISED
from pagedjax.kernels.tpu_programs import decode_kernel, tile_kernel, writing_decode_kernel
from pagedjax.kernels.tpu_sizes import SHORT_QUERIES, SUBLANES, Sizes, Tiling, TpuShape, chip
from pagedjax.kernels.xla import NEG

HEADS_OF_A_LATENT = 16  # a bfloat16 tile's sublanes
_SERVED = ("float32", "bfloat16", *QUANTISED)


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
    new: jax.Array | None = None,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """(o f[T, N, Hv], lse f32[T, N]) of `paged_attention`.

    Args:
        new: f[T, lanes in use] of the pool's dtype, keys and values of a step of decode rows that are not in the pool
            yet: the kernel writes them where `slot_mapping` says, and the pool's array is returned, too.
        tiling: Sizes of the kernel's pieces; None takes the tuning table's, as far as they fit chip and shape.
        interpret: True or `pltpu.InterpretParams()` runs it on the CPU, for tests.

    Raises:
        NotImplementedError: Not a TPU, float16, blocks under one tile of sublanes, new rows of a quantised pool, or a
            shape whose tables or buffers do not fit the chip.
    """
    _check(pool, interpret)
    if new is not None and pool.layout.quantised:
        raise NotImplementedError(f"dtype={pool.layout.dtype}: new rows must be written before; use write_kv")
    heads = q.shape[1]
    if pool.layout.latent_dim:
        more = -heads % HEADS_OF_A_LATENT
        q = jnp.pad(q, ((0, 0), (0, more), (0, 0)))
        sinks = None if sinks is None else jnp.pad(sinks, (0, more))
    T, N, _ = q.shape
    H = pool.layout.value_dim
    Sd = ragged.decode_bucket
    params = xla.Params(scale, window, soft_cap)
    tiling = (tiling or Tiling()).filled(ragged.sizes("pallas_tpu", pool.layout, N))
    # Codes are whole in bfloat16 and float32: the queries say which.
    dtype = "bfloat16" if q.dtype == jnp.bfloat16 else "float32"
    dtype = dtype if pool.layout.quantised else pool.layout.dtype
    sizes = Sizes(pool.layout, N, sinks is not None, tiling, chip(interpret), dtype)
    call = _Call(pool, layer, ragged, params, sizes, interpret)
    q_pool = q.astype(dtype)
    live = jnp.arange(T) < ragged.query_start_loc[-1]
    if ragged.tile_queries:
        out, lse = _prefill(q_pool, call, sinks)
    else:
        out, lse = jnp.zeros((T, N, H), dtype), jnp.full((T, N), NEG, jnp.float32)
    if Sd:
        state, data = _decode(q_pool, call, new)
        # Behind the write: reading the pool as it was would make XLA keep a copy of it.
        parts = [state, *_shared_prefixes(q_pool, replace(call, pool=KVPool(data, pool.layout)))]
        acc, m, l = xla.merge(*(jnp.stack(x, axis=1) for x in zip(*parts, strict=True)))
        rows, row_lse = xla.finalise(acc.reshape(Sd, N, H), m.reshape(Sd, N), l.reshape(Sd, N), sinks)
        first = (jnp.arange(Sd) < ragged.num_decodes)[:, None]
        out = out.at[:Sd].set(jnp.where(first[..., None], rows.astype(out.dtype), out[:Sd]))
        lse = lse.at[:Sd].set(jnp.where(first, row_lse, lse[:Sd]))
    out, lse = out[:, :heads], lse[:, :heads]
    out = jnp.where(live[:, None, None], out, 0).astype(q.dtype)
    # A sum is NEG where nothing is seen, and only there.
    lse = jnp.where(live[:, None] & (lse != NEG), lse, -jnp.inf)
    return (out, lse) if new is None else (out, lse, data)


def _check(pool: KVPool, interpret: Any) -> None:
    layout = pool.layout
    if not interpret and device_class() != "tpu":
        raise NotImplementedError(f"platform={device_class()}: must be a TPU; use 'xla' here")
    if layout.dtype not in _SERVED:
        raise NotImplementedError(f"dtype={layout.dtype}: must be one of {', '.join(_SERVED)} on TPU")
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
            # The first axis is the cores: each begins and ends by itself.
            dimension_semantics=("parallel", "arbitrary") if shape.cores > 1 else ("arbitrary",),
            # `read_rows` maps every id into the pool, and the plan every chunk into its table.
            disable_bounds_checks=True,
            vmem_limit_bytes=self.sizes.vmem_limit_bytes(shape),
        )


# ---- decode ----------------------------------------------------------------------------------------------


def _decode(q: jax.Array, call: _Call, new: jax.Array | None) -> tuple[xla.State, jax.Array]:
    """State of the decode rows, [Sd, K, G, …]: one entry a row, heads on a block diagonal; and the pool's array."""
    ragged, layout = call.ragged, call.pool.layout
    Sd, (N, H), K = ragged.decode_bucket, q.shape[1:], layout.num_kv_heads
    skip = ragged.decode_list(call.params.window).skip
    lens = ragged.seq_lens[:Sd]
    padded = -(-N // 16) * 16
    own = jnp.arange(N)[:, None] // (N // K) == jnp.arange(K)[None, :]

    def diagonal(at: slice) -> jax.Array:
        """Of some rows: of all at once it would stay in memory while the groups of rows are worked one by one."""
        heads = jnp.where(own[None, :, :, None], q[at, :, None, :], 0).reshape(
            at.stop - at.start, 1, N, K * H
        )
        return jnp.pad(heads, ((0, 0), (0, 0), (0, padded - N), (0, 0)))

    shape = call.shape(0)
    first_key = skip * ragged.chunk_tokens
    if call.params.window is not None:
        first_key = jnp.maximum(first_key, lens - call.params.window)
    outs, data = [], call.pool.data
    target = write_rows(layout, call.layer, ragged.slot_mapping[:Sd] // layout.block_size)
    target = jnp.where(target < layout.shape[0], target, -1)
    for first, last in call.row_groups(Sd):
        count = jnp.clip(ragged.num_decodes - first, 0, last - first)
        at = slice(first, last)
        entry = (jnp.arange(last - first, dtype=jnp.int32), lens[at] - 1, lens[at], first_key[at])
        work = replace(call, pool=KVPool(data, layout))
        rows = call.rows(first, last)
        if new is None:
            out, lse, data = _decode_rows(diagonal(at), rows, entry, count, work, shape, None)
        else:
            writing = (*entry, target[at])
            out, lse, data = _decode_rows(diagonal(at), rows, writing, count, work, shape, new[at])
        outs.append((out, lse))
    out, lse = (jnp.concatenate(parts) for parts in zip(*outs, strict=True))
    live = jnp.arange(Sd) < ragged.num_decodes
    out = jnp.where(live[:, None, None], out[:, 0, :N], 0).reshape(Sd, K, N // K, -1)
    lse = jnp.where(live[:, None], lse[:, 0, :N], NEG).reshape(Sd, K, N // K)
    return (out, lse, jnp.where(lse != NEG, 1.0, 0.0)), data


def _decode_rows(
    q: jax.Array,
    rows: jax.Array,
    entry: tuple[jax.Array, ...],
    count: jax.Array,
    call: _Call,
    shape: TpuShape,
    new: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the decode kernel over entries (table, position, stop, first key[, pool row to write]), each i32[W].

    Args:
        q: f[W, 1, R, K*H].
        count: i32[], entries.
        new: f[W, lanes in use], rows to write; None writes nothing.

    Returns:
        (normalised f32[W, 1, R, Hv], lse f32[W, 1, R], NEG where nothing is seen, both undefined from count on; the
        pool's array).
    """
    W, _, R, lanes = q.shape
    H = shape.value_dim
    chunks = _chunks(shape, *entry[1:4])
    work = _deal(chunks, count, shape.cores)
    scalars, data = (*entry, *chunks, work.bounds, rows), call.pool.data
    kernel: Callable[..., None] = decode_kernel
    arrays, read, written, scratch, aliases = [q, data], [], [], [], {}
    shapes = [jax.ShapeDtypeStruct((W + work.spare, 1, R, n), jnp.float32) for n in (H, LANES)]
    if new is not None:
        width = data.shape[2]
        kernel, aliases = writing_decode_kernel, {len(scalars) + 1: 2}
        arrays.append(jnp.pad(new, ((0, 0), (0, width - new.shape[1]))).reshape(W, 1, width))
        read = [pl.BlockSpec((None, 1, width), work.read(3))]
        written = [pl.BlockSpec(memory_space=pl.ANY)]
        shapes.append(jax.ShapeDtypeStruct(data.shape, data.dtype))
        scratch = [
            pltpu.VMEM((SUBLANES, width), data.dtype),
            pltpu.SemaphoreType.DMA((1,)),
            pltpu.SMEM((1,), jnp.int32),
        ]
    out, lse, *pool = pl.pallas_call(
        functools.partial(kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=work.grid,
            in_specs=[
                pl.BlockSpec((None, 1, R, lanes), work.read(4)),
                pl.BlockSpec(memory_space=pl.ANY),
                *read,
            ],
            out_specs=[
                pl.BlockSpec((None, 1, R, H), work.written(4, W)),
                pl.BlockSpec((None, 1, R, LANES), work.written(4, W)),
                *written,
            ],
            scratch_shapes=[*_state_scratch(call, shape, 1, R), *scratch],
        ),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=call.compiler_params(shape),
        interpret=call.interpret,
        name="paged_decode",
    )(*scalars, *arrays)
    return out[:W], lse[:W, ..., 0], pool[0] if pool else data


@dataclass(frozen=True)
class _Work:
    """Entries dealt out to cores, each core's side by side.

    Attributes:
        bounds: i32[cores + 1], each core's first entry, and how many there are.
        grid: Programs.
        spare: Blocks behind those of the entries: what a core without entries writes.
    """

    bounds: jax.Array
    grid: tuple[Any, ...]
    spare: int

    def read(self, axes: int) -> Callable[..., tuple[Any, ...]]:
        """An index map over blocks of the entries."""
        return self._at(axes, 0)

    def written(self, axes: int, spare: int) -> Callable[..., tuple[Any, ...]]:
        """An index map over blocks that the entries write, and one behind them."""
        return self._at(axes, spare)

    def _at(self, axes: int, none: int) -> Callable[..., tuple[Any, ...]]:
        rest = (0,) * (axes - 1)
        if not self.spare:
            return lambda w, *_: (w, *rest)

        def at(core: Any, nth: Any, *scalars: Any) -> tuple[Any, ...]:
            # A core that is through stays at its last block, which so is not written twice.
            first, end = scalars[-2][core], scalars[-2][core + 1]
            return (jnp.where(end > first, jnp.minimum(first + nth, end - 1), none), *rest)

        return at


def _deal(chunks: tuple[jax.Array, jax.Array], count: jax.Array, cores: int) -> _Work:
    """Neighbouring entries of about as many chunks, one more for each entry, to every core."""
    if cores == 1:
        return _Work(jnp.stack([jnp.zeros_like(count), count]), (count,), 0)
    first, last = chunks
    there = jnp.arange(first.shape[0], dtype=jnp.int32) < count
    upto = jnp.cumsum(jnp.where(there, last - first + 1, 0), dtype=jnp.int32)
    ends = [(there & (upto * cores <= upto[-1] * core)).sum(dtype=jnp.int32) for core in range(1, cores)]
    bounds = jnp.stack([jnp.zeros_like(count), *ends, count])
    return _Work(bounds, (cores, (bounds[1:] - bounds[:-1]).max()), 1)


def _chunks(
    shape: TpuShape, first_pos: jax.Array, stop: jax.Array, first_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(first chunk, chunk behind the last) of entries; equal where no key is seen."""
    first = jnp.maximum(first_key, 0) // shape.chunk
    last = (stop + shape.chunk - 1) // shape.chunk
    return first, jnp.maximum(first, jnp.where(stop > jnp.maximum(first_key, 0), last, 0))


# ---- prefill ---------------------------------------------------------------------------------------------


def _prefill(q: jax.Array, call: _Call, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, Hv] in the pool's dtype, lse f32[T, N], NEG where nothing is seen) of the tokens of longer rows.

    Whole tiles first, then what is left of rows in short entries, so that a row of a few queries does not pay for a
    tile. Other tokens' results are undefined.
    """
    ragged = call.ragged
    T, N, _ = q.shape
    tile = call.sizes.tile_queries(T)
    starts, ends = ragged.query_start_loc[:-1], ragged.query_start_loc[1:]
    index = jnp.arange(starts.shape[0], dtype=jnp.int32)
    length = jnp.where(index >= ragged.num_decodes, ends - starts, 0)
    cut = min(call.sizes.tiling.left_at_most or 0, tile // 2) if tile > SHORT_QUERIES else 0
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
            entry = (row - first, first_pos, stop, first_key, token, stop - first_pos)
            out, part = _tile_entries(q, rows, entry, counts.sum(), out, sinks, call, call.shape(size))
            lse = lse.at[tokens.reshape(-1)].set(part.reshape(-1, N), mode="drop")
    assert out is not None
    return out, lse


# ---- shared prefixes -------------------------------------------------------------------------------------


def _shared_prefixes(q: jax.Array, call: _Call) -> list[xla.State]:
    """The state of the decode rows over the shared chunks of each of their groups, [Sd, K, G, …]."""
    ragged = call.ragged
    work, N, K = ragged.decode_list(call.params.window), q.shape[1], call.pool.layout.num_kv_heads
    num_groups, Sd = work.group_rows.shape
    if not num_groups:
        return []
    shape = call.sizes.shared(ragged.block_tables.shape[1], call.sizes.tile_queries(Sd), call.params)
    room = -(-Sd // shape.tile)  # tiles
    states = []
    for first, last in call.row_groups(num_groups):
        some = slice(first, last)
        out, lse = _groups(q, some, room, call, shape)
        for i, rows in enumerate(work.group_rows[some]):
            state = (out[i].reshape(-1, K, N // K, out.shape[-1]), lse[i].reshape(-1, K, N // K))
            states.append(xla.of_rows(rows, (*state, jnp.where(state[1] != NEG, 1.0, 0.0))))
    return states


def _groups(
    q: jax.Array, some: slice, room: int, call: _Call, shape: TpuShape
) -> tuple[jax.Array, jax.Array]:
    """(o f32[g, room * tile, N, Hv], lse f32[g, room * tile, N]) of some groups' rows, side by side."""
    ragged, tile = call.ragged, shape.tile
    work, N = ragged.decode_list(call.params.window), q.shape[1]
    group_rows = work.group_rows[some]
    count, Sd = group_rows.shape
    packed = jnp.pad(jnp.minimum(group_rows, Sd - 1), ((0, 0), (0, room * tile - Sd)))
    size = (group_rows < Sd).sum(axis=1, dtype=jnp.int32)
    tiles = (size + tile - 1) // tile
    upto, nth = jnp.cumsum(tiles, dtype=jnp.int32), jnp.arange(count * room, dtype=jnp.int32)
    group = row_of(upto, nth)
    within = (nth - (upto - tiles)[group]) * tile
    stop = work.group_chunks[some][group] * ragged.chunk_tokens
    first_key = work.group_first[some][group] * ragged.chunk_tokens
    num = jnp.clip(size[group] - within, 0, tile)
    entry = (group, stop - 1, stop, first_key, group * (room * tile) + within, num)
    rows = read_rows(call.pool.layout, call.layer, ragged.block_tables[packed[:, 0]]).reshape(-1)
    queries = q[packed.reshape(-1)]
    out, lse = _tile_entries(queries, rows, entry, upto[-1], None, None, call, shape)
    # Entries lie side by side; tiles without one are read from another's, and no row is there.
    of_group = jnp.minimum((upto - tiles)[:, None] + jnp.arange(room)[None, :], count * room - 1)
    return out.reshape(count, room * tile, *out.shape[1:]), lse[of_group].reshape(count, room * tile, N)


# ---- tiles of queries ------------------------------------------------------------------------------------


def _tile_entries(
    q: jax.Array,
    rows: jax.Array,
    entry: tuple[jax.Array, ...],
    count: jax.Array,
    out: jax.Array | None,
    sinks: jax.Array | None,
    call: _Call,
    shape: TpuShape,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel over entries (table, first position, stop, first key, first token, tokens), each i32[W].

    Args:
        q: f[T, N, H].
        count: i32[], entries.
        out: f[T, N, Hv], what earlier calls wrote; None is the first call.

    Returns:
        (`out` with the entries' tokens written, lse f32[W, tile, N]).
    """
    T, N, H = q.shape
    tile, G, Hv = shape.tile, shape.heads_per_kv, shape.value_dim
    K, R, W = N // G, tile * G, entry[0].shape[0]
    chunks = _chunks(shape, *entry[1:4])
    work = _deal(chunks, count, shape.cores)
    scalars = (*entry, *chunks, work.bounds, rows)
    arrays, specs = [q, call.pool.data], [pl.BlockSpec(memory_space=pl.ANY)] * 2
    if sinks is not None:
        by_row = sinks.astype(jnp.float32).reshape(K, 1, G)
        if shape.latent_dim:
            by_row = jnp.broadcast_to(by_row, (K, tile, G)).reshape(K, R, 1)
        else:
            by_row = jnp.repeat(by_row, SHORT_QUERIES, axis=2)
            by_row = jnp.broadcast_to(by_row, (K, tile // SHORT_QUERIES, G * SHORT_QUERIES)).reshape(K, R, 1)
        arrays.append(jnp.broadcast_to(by_row, (K, R, LANES)))
        specs.append(pl.BlockSpec((K, R, LANES), lambda *_: (0, 0, 0)))
    aliases = {}
    if out is not None:
        aliases = {len(scalars) + len(arrays): 0}
        arrays.append(out)
        specs.append(pl.BlockSpec(memory_space=pl.ANY))
    dtype = call.sizes.worked_in
    out_dtype = dtype if shape.causal else jnp.float32
    relaid = (
        ()
        if shape.latent_dim
        else (
            pltpu.VMEM((K, R, H), dtype),
            pltpu.VMEM((-(-H // LANES) * tile * shape.padded_heads, LANES), jnp.float32),
        )
    )
    name = "paged_prefill" if tile > SHORT_QUERIES else "paged_prefill_short"
    out, lse = pl.pallas_call(
        functools.partial(tile_kernel, shape=shape, has_out=out is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=work.grid,
            in_specs=specs,
            out_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((None, K, R), work.written(3, W)),
            ],
            scratch_shapes=[
                *_state_scratch(call, shape, K, R),
                pltpu.VMEM((2, tile, N, H), dtype),
                pltpu.VMEM((tile, N, Hv), out_dtype),
                *relaid,
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((T, N, Hv), out_dtype),
            jax.ShapeDtypeStruct((W + work.spare, K, R), jnp.float32),
        ],
        input_output_aliases=aliases,
        compiler_params=call.compiler_params(shape),
        interpret=call.interpret,
        name=name if shape.causal else "paged_shared",
    )(*scalars, *arrays)
    if shape.latent_dim:
        return out, lse[:W].reshape(W, tile, N)
    # Rows lie as (16 tokens, head of the group, token).
    lse = lse[:W].reshape(W, K, tile // SHORT_QUERIES, G, SHORT_QUERIES).transpose(0, 2, 4, 1, 3)
    return out, lse.reshape(W, tile, N)


# ---- what all are made of -------------------------------------------------------------------------------


def _state_scratch(call: _Call, shape: TpuShape, parts: int, R: int) -> list[Any]:
    """Two chunks of keys and values, their semaphores, which of them is next, and the state of the online softmax.

    Of codes with scales also what picks these out of a token's row.
    """
    layout = call.pool.layout
    lanes = shape.scale_lanes
    picks = [pltpu.VMEM((2 * shape.picked_scales, lanes.stop - lanes.start), jnp.bfloat16)]
    return [
        pltpu.VMEM((2, shape.chunk_blocks, layout.block_size, layout.width), call.pool.data.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((parts, R, LANES), jnp.float32),
        pltpu.VMEM((parts, R, LANES), jnp.float32),
        pltpu.VMEM((parts, R, shape.summed_lanes), jnp.float32),
        *(picks if shape.scaled else []),
    ]
