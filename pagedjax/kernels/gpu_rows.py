"""What the GPU kernels share outside of their programs: entries of a step, and results in the order of its tokens.

A kernel is a function of entries. Decode entries are parts of rows, so that a long row is split over many programs, and
their states join afterwards; prefill entries are up to 64 rows of queries of one sequence, the G heads of a token side
by side. Queries stay in the flat array of all tokens, and so do outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.kernels import xla
from pagedjax.kernels.entries import cut_rows, join_parts, split_rows
from pagedjax.kernels.layout import KVLayout, KVPool, RaggedBatch, num_multiprocessors, read_rows
from pagedjax.kernels.xla import NEG, State

ROWS = 64  # of queries that a program works
KEYS = 64  # of one key tile
FEW = 16  # query heads of a KV head up to which a decode row is worked with keys as rows
SUBLANES = 8  # rows of one swizzled shared-memory tile


@dataclass(frozen=True)
class Entry:
    """Work entries, each field i32[W].

    Attributes:
        table: Which of the tables.
        token: The first of its tokens, among the step's T.
        count: How many, 1 of decode parts.
        pos: Position of the first.
        first: First key.
        stop: Key behind the last; 0 where there is no work.
    """

    table: jax.Array
    token: jax.Array
    count: jax.Array
    pos: jax.Array
    first: jax.Array
    stop: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.table, self.token, self.count, self.pos, self.first, self.stop


# (queries f[T, K, G, H], entries, tokens, sinks, pool=, rows=, params=, programs=) → results of `gpu_programs.run`.
Kernel = Callable[..., State]


@dataclass(frozen=True)
class GpuShape:
    """What a compiled kernel is specialised on."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    table_width: int
    group: int  # query heads of a KV head
    tokens: int  # most of an entry
    parts: bool  # of decode rows: all of a program's queries see the same keys, and its state joins others
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool = False
    exact: bool = False  # outputs stay float32, to be joined with others
    codes: str = ""  # of a quantised pool, its kind
    scaled: bool = False  # whether codes have scales with them

    @property
    def narrow(self) -> bool:
        """Keys are the 64 rows of a product and queries its columns: a few of them do not pay for 64."""
        return self.parts and self.group <= FEW and self.head_dim % ROWS == 0

    @property
    def walks(self) -> bool:
        """Programs go from item to item; others, whose results need the room of keys and values, end with one."""
        return self.narrow or not self.parts

    @property
    def queries(self) -> int:
        """Of a program, in the products' multiples."""
        return -(-self.group // SUBLANES) * SUBLANES if self.narrow else ROWS

    @property
    def unit(self) -> int:
        """Keys that one copy brings."""
        return min(self.block_size, KEYS)


def device_programs(each: int) -> int:
    """Programs of the GPU that is traced for, so many on every multiprocessor; of an H100 where none is told."""
    return each * (num_multiprocessors() or 132)


def widest_shapes(layout: KVLayout) -> tuple[GpuShape, GpuShape]:
    """The kernels that take most of a chip: prefill, and decode parts of many heads."""

    def shape(parts: bool) -> GpuShape:
        sizes = layout.block_size, layout.num_kv_heads, layout.head_dim
        return GpuShape(*sizes, 1, ROWS, 1, parts, 1.0, None, None, False, False, *codes_of(layout))

    return shape(False), shape(True)


def codes_of(layout: KVLayout) -> tuple[str, bool]:
    """`GpuShape.codes` and `scaled`."""
    return layout.dtype if layout.quantised else "", layout.scaled


def worked_in(layout: KVLayout, queries: Any, why_not_float32: str) -> Any:
    """Dtype of products and results: the pool's, or where that holds codes the queries'.

    Raises:
        NotImplementedError: Products would round it.
    """
    dtype = jnp.dtype(queries if layout.quantised else layout.dtype)
    if dtype not in ("bfloat16", "float16"):
        of = f"queries of {dtype} over dtype={layout.dtype}" if layout.quantised else f"dtype={dtype}"
        raise NotImplementedError(f"{of}: must be bfloat16 or float16 ({why_not_float32})")
    return dtype


def check(pool: KVPool, ragged: RaggedBatch, group: int) -> None:
    """Raises NotImplementedError for what no GPU kernel takes."""
    layout = pool.layout
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"jax {jax.__version__}: must be 0.12 or later; use 'xla' here")
    if not SUBLANES <= layout.block_size <= ragged.chunk_tokens:
        raise NotImplementedError(
            f"block_size={layout.block_size}: must be between {SUBLANES} and chunk_tokens={ragged.chunk_tokens}"
        )
    if layout.latent_dim:
        raise NotImplementedError(
            f"latent_dim={layout.latent_dim}: values within keys are not read by GPU kernels; use 'xla'"
        )
    if layout.head_dim % 16:
        raise NotImplementedError(f"head_dim={layout.head_dim}: must be a multiple of 16")
    if ragged.apart:
        raise NotImplementedError(
            "a plan of rows apart: rows are cut by what else is in the step; use 'xla' here"
        )
    if group > ROWS:
        raise NotImplementedError(f"{group} query heads per KV head: must be at most {ROWS}")


def attend_rows(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    params: xla.Params,
    sinks: jax.Array | None,
    kernel: Kernel,
    programs: int,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) by a kernel of entries, so many of whose programs work side by side.

    Args:
        dtype: Of `worked_in`.
    """
    (T, N, H), K, Sd = q.shape, pool.layout.num_kv_heads, ragged.decode_bucket
    rows = read_rows(pool.layout, layer, ragged.block_tables)
    queries = q.astype(dtype).reshape(T, K, N // K, H)

    call = functools.partial(kernel, pool=pool, params=params, programs=programs)
    if ragged.tile_queries:
        out, lse = _prefill(queries, ragged, functools.partial(call, rows=rows), sinks)
    else:
        out, lse = jnp.zeros((T, N, H), queries.dtype), jnp.full((T, N), -jnp.inf)
    if Sd:
        part = _decode(queries, ragged, functools.partial(call, rows=rows), params.window, -(-programs // K))
        shared = _groups(queries, pool, layer, ragged, params, call, -(-programs // K))
        if shared is None:
            acc, m, l = xla.with_groups(part, q, pool, layer, ragged, params)
        else:
            acc, m, l = xla.merge(*(jnp.stack(x, axis=1) for x in zip(part, *shared)))
        first, first_lse = xla.finalise(acc.reshape(Sd, N, H), m.reshape(Sd, N), l.reshape(Sd, N), sinks)
        decodes = (jnp.arange(Sd) < ragged.num_decodes)[:, None]
        out = out.at[:Sd].set(jnp.where(decodes[..., None], first.astype(out.dtype), out[:Sd]))
        lse = lse.at[:Sd].set(jnp.where(decodes, first_lse, lse[:Sd]))
    live = jnp.arange(T) < ragged.query_start_loc[-1]
    out = jnp.where(live[:, None, None], out, 0).astype(q.dtype)
    return out, jnp.where(live[:, None], lse, -jnp.inf)


def _decode(q: jax.Array, ragged: RaggedBatch, call: Kernel, window: int | None, spare: int) -> State:
    """State of the decode rows, [Sd, K, G, …]: one entry per part of a row, joined row by row."""
    G = q.shape[2]
    parts = split_rows(ragged, window, spare)
    one, pos = jnp.ones_like(parts.row), ragged.seq_lens[parts.row] - 1
    acc, m, l = call(q, Entry(parts.row, parts.row, one, pos, parts.first, parts.stop), None, None)
    return join_parts(parts, (acc, m[:, :, :G], l[:, :, :G]))


def _groups(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    params: xla.Params,
    call: Kernel,
    busy: int,
) -> list[State] | None:
    """The state of the decode rows over the shared chunks of each of their groups, [Sd, K, G, …].

    An entry is up to 64 rows of queries of a group's rows, over a part of its chunks: as many parts as make `busy`
    entries. None: a program's results in float32 do not fit the chip, and XLA works the groups.
    """
    _, K, G, H = q.shape
    work, chunk, size = ragged.decode_list(params.window), ragged.chunk_tokens, ROWS // G
    count, Sd = work.group_rows.shape
    if not count:
        return []
    room = -(-Sd // size)
    parts = max(1, -(-busy // (count * room)))
    packed = jnp.pad(jnp.minimum(work.group_rows, Sd - 1), ((0, 0), (0, room * size - Sd)))
    nth = jnp.arange(count * parts * room, dtype=jnp.int32)
    group, part, tile = nth // (parts * room), nth // room % parts, nth % room
    last = work.group_chunks[group]
    per = (last - work.group_first[group] + parts - 1) // parts
    first = work.group_first[group] + part * per
    num = jnp.clip((work.group_rows < Sd).sum(axis=1, dtype=jnp.int32)[group] - tile * size, 0, size)
    live = (num > 0) & (first < last) & (group < work.num_groups)
    stop = jnp.where(live, jnp.minimum(first + per, last) * chunk, 0)
    # All of these keys lie before all of the queries.
    entry = Entry(group, nth * size, num, stop - 1, first * chunk, stop)
    order = jnp.argsort(~live, stable=True)
    entry = Entry(*(x[order] for x in entry.arrays))
    rows = read_rows(pool.layout, layer, ragged.block_tables[packed[:, 0]])
    queries = q[jnp.broadcast_to(packed[:, None], (count, parts, room * size)).reshape(-1)]
    try:
        out, m, l = call(queries, entry, size, None, rows=rows, exact=True)
    except NotImplementedError:
        return None
    place = jnp.argsort(order)
    m, l = (x[place][:, :, : size * G].reshape(-1, K, size, G).swapaxes(1, 2) for x in (m, l))
    shape = (count, parts, room * size, K, G)
    seen = jnp.repeat(live, size).reshape(*shape[:3], 1, 1)
    lse = jnp.where(seen, (m + jnp.log(l)).reshape(shape), NEG)
    out = jnp.where(seen[..., None], out.reshape(*shape, H), 0)
    states = (out, lse, jnp.broadcast_to(seen, shape).astype(jnp.float32))
    return [
        xla.of_rows(members, xla.merge(*(x[i].swapaxes(0, 1) for x in states)))
        for i, members in enumerate(work.group_rows)
    ]


def _prefill(
    q: jax.Array, ragged: RaggedBatch, call: Kernel, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) of the tokens of longer rows: one entry per 64 rows of queries.

    Other tokens' outputs are undefined, their log-sum-exp is -inf.
    """
    T, K, G, H = q.shape
    size = ROWS // G
    starts, ends = ragged.query_start_loc[:-1], ragged.query_start_loc[1:]
    index = jnp.arange(len(starts), dtype=jnp.int32)
    counts = jnp.where(index >= ragged.num_decodes, (ends - starts + size - 1) // size, 0)
    most = -(-T // size) + min(len(starts), T // 2)
    (row, first_pos, stop, token), tokens = cut_rows(ragged, counts, jnp.zeros_like(starts), size, most)
    none = jnp.zeros_like(stop)
    entry = Entry(row, token, stop - first_pos, first_pos, none, jnp.where(stop > first_pos, stop, 0))
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(K, G), (1, -(-ROWS // G)))[:, :ROWS]
    out, m, l = call(q, entry, size, sinks)
    lse = (m + jnp.log(l))[:, :, : size * G].reshape(most, K, size, G).swapaxes(1, 2)
    lse = jnp.full((T, K * G), -jnp.inf).at[tokens.reshape(-1)].set(lse.reshape(-1, K * G), mode="drop")
    return out.reshape(T, K * G, H), lse
