"""The programs of the TPU kernels: what one work entry does on its core.

A program walks the chunks of keys that its entry's queries see. A chunk's blocks come by one hand-written DMA each
into one of two buffers, while the other is worked; the last chunk of an entry already fetches the first chunk of the
core's next, so that short rows leave no gap. What a program leaves for the next (buffers, which of them is next,
copies under way) is its core's own: each core works neighbouring entries, and begins and ends by itself.
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

from pagedjax.kernels import tpu_chunk
from pagedjax.kernels.layout import LANES
from pagedjax.kernels.tpu_sizes import SHORT_QUERIES, SUBLANES, TpuShape
from pagedjax.kernels.xla import NEG


@dataclass(frozen=True)
class Entries:
    """The scalars of all entries, in SMEM; `bounds` has each core's first entry and, last, how many there are."""

    table: Any
    first_pos: Any
    stop: Any
    first_key: Any
    first_chunk: Any
    last_chunk: Any
    bounds: Any
    rows: Any


@dataclass(frozen=True)
class EntryPlace:
    """Which entry a program works, and where among its core's it stands: (number, whether the first, end of them)."""

    entry: Any
    is_first: Any
    end: Any


def _place(bounds: Any, shape: TpuShape) -> EntryPlace:
    if shape.cores == 1:
        w = pl.program_id(0)
        return EntryPlace(w, w == 0, bounds[1])
    core, nth = pl.program_id(0), pl.program_id(1)
    return EntryPlace(bounds[core] + nth, nth == 0, bounds[core + 1])


def _if_there(place: EntryPlace, shape: TpuShape, work: Callable[[], None]) -> None:
    """Of several cores the one with the most entries sets how many programs each has: some have nothing to do."""
    if shape.cores == 1:
        work()
    else:
        pl.when(place.entry < place.end)(work)


@dataclass(frozen=True)
class _Write:
    """A token's new row on its way into the pool: into the chunk that is worked, and out with the 8 rows around it.

    Eight rows are what a copy can name. They are in the buffer, in a block that is this row's alone.

    Attributes:
        target: i32[W] pool rows, -1 is dropped.
        new_ref: [1, width] what is written.
        pool_out: The pool.
        tile: [8, width] the rows on their way.
        sem: Of the copy.
        under_way: Whether this core has one.
    """

    target: Any
    new_ref: Any
    pool_out: Any
    tile: Any
    sem: Any
    under_way: Any

    def begin(self, place: EntryPlace) -> None:
        @pl.when(place.is_first)
        def none_yet() -> None:
            self.under_way[0] = 0

    def end(self, place: EntryPlace) -> None:
        pl.when(place.entry + 1 == place.end)(self._wait)

    def _wait(self) -> None:
        @pl.when(self.under_way[0] == 1)
        def wait() -> None:
            self._copy(0, 0).wait()
            self.under_way[0] = 0

    def _copy(self, row: Any, at: Any) -> Any:
        target = self.pool_out.at[row, pl.ds(at, SUBLANES)]
        return pltpu.make_async_copy(self.tile, target, self.sem.at[0])

    def into(self, place: EntryPlace, stop: Any, shape: TpuShape, buffer: Any, start: Any) -> None:
        """Puts the new row where the entry's last key lies in the chunk that begins at start, and sends it off."""
        pos = stop[place.entry] - 1
        block, of_block = (pos - start) // shape.block_size, pos % shape.block_size
        at = pl.multiple_of(of_block // SUBLANES * SUBLANES, SUBLANES)
        old = buffer[block, pl.ds(at, SUBLANES), :].astype(jnp.float32)
        mine = lax.broadcasted_iota(jnp.int32, old.shape, 0) == of_block - at
        rows = jnp.where(mine, self.new_ref[...].astype(jnp.float32), old).astype(self.tile.dtype)
        buffer[block, pl.ds(at, SUBLANES), :] = rows
        row = self.target[place.entry]

        @pl.when(row >= 0)
        def send() -> None:
            self._wait()
            self.tile[...] = rows
            self._copy(row, at).start()
            self.under_way[0] = 1


def writing_decode_kernel(
    table: Any, first_pos: Any, stop: Any, first_key: Any, target: Any, first: Any, last: Any, bounds: Any, rows: Any,
    q_ref: Any, pool_ref: Any, new_ref: Any, o_ref: Any, lse_ref: Any, pool_out: Any, *scratch: Any, shape: TpuShape,
) -> None:  # fmt: skip
    """As `decode_kernel`, for rows whose last key and value are not in the pool yet: it writes them."""
    *state, tile, sem, under_way = scratch
    write = _Write(target, new_ref, pool_out, tile, sem, under_way)
    scalars = (table, first_pos, stop, first_key, first, last, bounds, rows)
    decode_kernel(*scalars, q_ref, pool_ref, o_ref, lse_ref, *state, shape=shape, write=write)


def decode_kernel(
    table: Any, first_pos: Any, stop: Any, first_key: Any, first: Any, last: Any, bounds: Any, rows: Any,
    q_ref: Any, pool_ref: Any, o_ref: Any, lse_ref: Any, *scratch: Any, shape: TpuShape,
    write: _Write | None = None,
) -> None:  # fmt: skip
    """One token's heads, on a block diagonal, over the keys of its row."""
    entries = Entries(table, first_pos, stop, first_key, first, last, bounds, rows)
    place = _place(bounds, shape)
    _, _, _, m_ref, l_ref, acc_ref, *_ = scratch
    patch = None if write is None else functools.partial(write.into, place, stop, shape)

    def work() -> None:
        m_ref[...] = jnp.full_like(m_ref, NEG)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if write is not None:
            write.begin(place)
        _walk(entries, place, lambda part: q_ref[part], pool_ref, scratch, shape, patch)
        if write is not None:
            write.end(place)
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

    _if_there(place, shape, work)


def tile_kernel(
    table: Any, first_pos: Any, stop: Any, first_key: Any, token: Any, num: Any, first: Any, last: Any, bounds: Any,
    rows: Any, q_hbm: Any, pool_ref: Any, *refs: Any, shape: TpuShape, has_out: bool,
) -> None:  # fmt: skip
    """Queries side by side in the flat array of all: neighbours of one row, or the rows that share a prefix."""
    inputs = shape.sinks + has_out  # `out` itself is the same memory as out_hbm
    sink_ref = refs[0] if shape.sinks else None
    out_hbm, lse_ref, *scratch = refs[inputs:]
    of_walk = 7 if shape.scaled else 6
    scratch, (q_in, o_buffer, *relaid, sems) = scratch[:of_walk], scratch[of_walk:]
    q_rows, stage = relaid or (None, None)
    entries = Entries(table, first_pos, stop, first_key, first, last, bounds, rows)
    place = _place(bounds, shape)
    arrays = _TileArrays(q_hbm, out_hbm, lse_ref, sink_ref, q_in, o_buffer, q_rows, stage, sems)
    work = functools.partial(_work_tile, entries, place, token, num, arrays, pool_ref, scratch, shape)
    _if_there(place, shape, work)


@dataclass(frozen=True)
class _TileArrays:
    """What a tile's queries come from and go to: flat arrays in HBM, and in VMEM what lies between.

    Of latent rows there is one key for all heads: queries are multiplied token by token, as they come, and q_rows and
    stage, in which they are laid head by head, are None.
    """

    q_hbm: Any
    out_hbm: Any
    lse_ref: Any
    sink_ref: Any
    q_in: Any
    o_buffer: Any
    q_rows: Any
    stage: Any
    sems: Any


def _work_tile(
    entries: Entries,
    place: EntryPlace,
    token: Any,
    num: Any,
    arrays: _TileArrays,
    pool_ref: Any,
    scratch: Any,
    shape: TpuShape,
) -> None:
    q_hbm, out_hbm, sems = arrays.q_hbm, arrays.out_hbm, arrays.sems
    q_in, q_rows, stage, o_buffer = arrays.q_in, arrays.q_rows, arrays.stage, arrays.o_buffer
    _, _, _, m_ref, l_ref, acc_ref, *_ = scratch
    w, H, G, tile = place.entry, shape.head_dim, shape.heads_per_kv, shape.tile
    K, T = shape.num_heads // G, q_hbm.shape[0]

    def pieces(entry: Any, act: Callable[[Any, Any, int], None]) -> None:
        """The entry's tokens as copies of two fixed sizes: (first of all, first of the tile, tokens)."""
        queries, whole = num[entry], 0
        if T >= SHORT_QUERIES:
            whole = queries // SHORT_QUERIES * SHORT_QUERIES
            many = lambda i, _: act(token[entry] + i * SHORT_QUERIES, i * SHORT_QUERIES, SHORT_QUERIES)  # noqa: E731
            lax.fori_loop(0, queries // SHORT_QUERIES, many, None)
        lax.fori_loop(whole, queries, lambda i, _: act(token[entry] + i, i, 1), None)

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
    pl.when(place.is_first)(lambda: queries(w, slot, "start"))
    pl.when(w + 1 < place.end)(lambda: queries(w + 1, 1 - slot, "start"))
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

    if not shape.latent_dim:
        lax.fori_loop(0, tile // SHORT_QUERIES, lay_down, None)
    if arrays.sink_ref is None:
        m_ref[...] = jnp.full_like(m_ref, NEG)
        l_ref[...] = jnp.zeros_like(l_ref)
    else:
        # A sink is a key without a value, seen before all others.
        m_ref[...] = arrays.sink_ref[...]
        l_ref[...] = jnp.where(lax.broadcasted_iota(jnp.int32, l_ref.shape, 2) == 0, 1.0, 0.0)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def rows_of(part: int) -> jax.Array:
        return q_in[slot].reshape(tile * G, H) if shape.latent_dim else q_rows[part]

    _walk(entries, place, rows_of, pool_ref, scratch, shape)

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
            arrays.lse_ref[part, pl.ds(at, square.shape[0])] = jnp.sum(jnp.where(own, square, 0.0), axis=0)
    pl.when(jnp.logical_not(place.is_first))(lambda: outputs(w - 1, "wait"))

    def take_up(sub: Any, _: None) -> None:
        for n in range(shape.num_heads):
            for part, lanes in vectors:
                head = acc_ref[n // G, of_group(sub, n), lanes]
                stage[of_head(part, sub, n), : head.shape[1]] = head
        for t in range(SHORT_QUERIES):
            for part, lanes in vectors:
                token = stage[of_token(part, sub, t), : lanes.stop - lanes.start]
                o_buffer[sub * SHORT_QUERIES + t, :, lanes] = token.astype(o_buffer.dtype)

    if shape.latent_dim:
        o_buffer[...] = acc_ref[0].reshape(o_buffer.shape).astype(o_buffer.dtype)
    else:
        lax.fori_loop(0, tile // SHORT_QUERIES, take_up, None)
    outputs(w, "start")
    pl.when(w + 1 == place.end)(lambda: outputs(w, "wait"))


def _walk(
    entries: Entries,
    place: EntryPlace,
    queries_of: Callable[[int], jax.Array],
    pool_ref: Any,
    scratch: Any,
    shape: TpuShape,
    patch: Callable[[Any, Any], None] | None = None,
) -> None:
    """Works the chunks of this program's entry, fetching one ahead, the core's next entry's first at the end.

    Args:
        queries_of: Number of a part → its rows of queries.
        patch: Told the last chunk's buffer and first position when it has come, before it is worked.
    """
    buffers, sems, slot_ref, m_ref, l_ref, acc_ref, *picks = scratch
    w, end = place.entry, place.end
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
        after = jnp.minimum(w + 1, end - 1)

        @pl.when((w + 1 < end) & (entries.first_chunk[after] < entries.last_chunk[after]))
        def start_after() -> None:
            copies(after, entries.first_chunk[after], slot, "start")

    @pl.when(place.is_first)
    def start_first_entry() -> None:
        slot_ref[0] = 0
        for ref in picks:
            ref[...] = tpu_chunk.scale_picks(ref.shape, shape)

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
        # (With a row to put in, the last chunk is one of them though it may be seen whole.)
        at_an_end = (start + shape.chunk - (patch is None) > first_pos) | (start < first_key)
        if shape.window is not None:
            at_an_end |= start <= stop - 1 - shape.window

        def work(masked: bool) -> None:
            if masked and patch is not None:
                pl.when(chunk + 1 >= last)(lambda: patch(buffer, start))
            if masked and shape.codes != "int8":  # whose every code is a number
                tpu_chunk.clear_unseen_values(buffer, start, first_pos, stop, shape)
            kv = buffer[...].reshape(shape.chunk, -1)
            seen = (
                functools.partial(tpu_chunk.seen_keys, start, first_pos, first_key, shape) if masked else None
            )
            scales = tpu_chunk.turned_scales(kv, picks[0], shape) if shape.scaled else None
            tpu_chunk.work_chunk(kv, queries_of, m_ref, l_ref, acc_ref, seen, shape, scales)

        pl.when(at_an_end)(lambda: work(True))
        pl.when(jnp.logical_not(at_an_end))(lambda: work(False))
        slot_ref[0] = 1 - slot

    lax.fori_loop(first, last, one_chunk, None)
