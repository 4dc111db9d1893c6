"""What one program of the GPU kernels does: an entry's queries come in, its key tiles are worked, outputs go out.

An item is (work entry, KV head): up to 64 rows of queries of one sequence, a token's G heads side by side, over a range
of keys. Decode rows with few heads a KV head are worked the other way round (`GpuShape.narrow`): keys, and lanes of
values, are the 64 rows of the tensor core's tile, and the few queries its columns. Queries are read from the flat array
of all tokens, token by token, and normalised outputs of prefill entries are written straight to such an array; parts of
decode rows leave (accumulator, maximum, sum) in float32. As many programs as the device works side by side walk the
items, and the first key tiles of an item are on their way while the one before it is finished. `pallas_mosaic` and
`pallas_mma` give the products, and how blocks come.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pagedjax.cache.rules import SCALE_BYTES
from pagedjax.kernels import gpu_tile, xla
from pagedjax.kernels.gpu_rows import KEYS, ROWS, SUBLANES, Entry, GpuShape, codes_of, device_programs
from pagedjax.kernels.layout import KVPool

plgpu: Any = mosaic_gpu  # jax before 0.12 lacks much of it, and is refused by `gpu_rows.check`


_ACROSS_WARPS = 2 << 10  # bytes of shared memory that sums across warps go through
_BARRIERS = 256
_OF_A_PROGRAM = 1 << 10  # that CUDA takes of a multiprocessor's for each
# Lanes of a swizzled tile of numbers, and of codes: 32 bytes at least.
WIDTHS = (64, 32, 16)
CODE_WIDTHS = WIDTHS[:2]


@dataclass(frozen=True)
class GpuTiling:
    """Sizes of a kernel's pieces, of the tuning table.

    Attributes:
        decode_stages: Key tiles side by side of decode parts; fewer where shared memory has no room.
        prefill_stages: The same of prefill and of shared prefixes.
        programs: That a multiprocessor works side by side.
        value_keys: Keys of a tile whose values are in registers at once, where they come as a product's operand.
    """

    decode_stages: int
    prefill_stages: int
    programs: int
    value_keys: int = KEYS

    def fitting_stages(self, shape: GpuShape, products: Products, room: int) -> int:
        """Key tiles side by side of a program, at least one.

        Args:
            room: Bytes of shared memory.
        """
        most = self.decode_stages if shape.parts else self.prefill_stages

        def fits(stages: int) -> bool:
            return shared_bytes(shape, jnp.float16, products.with_stages(stages)) <= room

        return next((stages for stages in range(most, 1, -1) if fits(stages)), 1)


class Products(Protocol):
    """The products of a kernel, and the shared memory that they need."""

    @property
    def shared_memory(self) -> int:
        """Bytes that a program may take."""

    @property
    def tma(self) -> bool:
        """Whether blocks come by TMA, with barriers; by cp.async otherwise."""

    def layout(self, dtype: Any) -> Any:
        """Of accumulators, scores and values in registers."""

    def stages(self, shape: GpuShape) -> tuple[int, int]:
        """Tiles of keys, and of values, side by side: as many of both by cp.async."""

    def with_stages(self, stages: int) -> Products:
        """These with so many, whether they fit or not."""

    @property
    def narrow_floats(self) -> bool:
        """Whether the chip itself widens fp8."""

    def tile_lanes(self, keys: int, head_dim: int, widths: tuple[int, ...] = WIDTHS) -> int:
        """Lanes of a swizzled tile of keys or values that come so many at a time."""

    def probabilities(self, shape: GpuShape, dtype: Any) -> Any:
        """Shared memory of two tiles' probabilities."""

    def operands(self, shape: GpuShape, dtype: Any) -> list[Any]:
        """Shared memory that queries need beside the place where they are laid first."""

    def queries(self, staged: Any, operands: Any, shape: GpuShape) -> Any:
        """The operand out of what was laid down row by row, untiled."""

    def scores(self, queries: Any, keys: Any, shape: GpuShape) -> Any:
        """f32, unscaled: [64 queries, 64 keys], or [64 keys, a few queries] where `shape` is narrow."""

    def ahead(self, shape: GpuShape) -> bool:
        """A tile's scores are multiplied while the softmax of the tile before is worked."""

    def scores_beside(self, queries: Any, keys: Any, work: Any) -> tuple[Any, Any]:
        """(what `work` returns, `scores`), the product under way meanwhile."""

    def put(self, ref: Any, p: Any, shape: GpuShape) -> Any:
        """Probabilities, as `scores` has them, where the next product takes them: there, if not in registers."""

    def weighted(self, acc: Any, p: Any, values: Any, shape: GpuShape) -> Any:
        """`acc` plus probabilities times a tile's values: [64 queries, H], or [H, a few queries]."""


def run(
    q: jax.Array,
    entry: Entry,
    tokens: int | None,
    sinks: jax.Array | None,
    *,
    pool: KVPool,
    rows: jax.Array,
    params: xla.Params,
    products: Products,
    programs: int,
    interpret: Any,
    exact: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel over work entries.

    Args:
        q: f[T, K, G, H], the step's queries, in the dtype of products.
        entry: Those without work, whose results are undefined, stand behind all others.
        tokens: Most of an entry; None are parts of decode rows, of one token.
        sinks: f32[K, 64] the first key of each row's softmax.
        rows: i32[S, M] pool rows of every table.
        programs: That the device works side by side; they walk the items.
        exact: Normalised outputs are float32, to be joined with others.

    Raises:
        NotImplementedError: A program takes more shared memory than there is.

    Returns:
        (accumulator f32[W, K, G, H] of decode parts, or else normalised outputs f[T, K, G, H] where entries have
        tokens; maximum, sum, each f32[W, K, at least the entry's tokens times G]).
    """
    layout, dtype = pool.layout, q.dtype
    (_, K, G, H), W = q.shape, entry.table.shape[0]
    if params.window is not None:
        start = (entry.pos + 1 - params.window) // KEYS * KEYS
        entry = dataclasses.replace(entry, first=jnp.maximum(entry.first, start))
    shape = GpuShape(
        layout.block_size, K, H, rows.shape[1], G, tokens or 1, tokens is None,
        params.scale, params.window, params.soft_cap, sinks is not None, exact, *codes_of(layout),
    )  # fmt: skip
    if (bytes_ := shared_bytes(shape, dtype, products)) > products.shared_memory:
        raise NotImplementedError(
            f"{bytes_} bytes of shared memory: must be at most {products.shared_memory}"
        )
    # One that has no room would only begin where another ends.
    resident = (products.shared_memory + _OF_A_PROGRAM) // (bytes_ + _OF_A_PROGRAM)
    programs, items = min(programs, device_programs(resident)), W * K
    f32 = jnp.float32
    kind = f32 if shape.parts or exact else dtype
    out = jax.ShapeDtypeStruct((W, K, G, H) if shape.parts else q.shape, kind)
    state = jax.ShapeDtypeStruct((W, K, shape.queries), f32)
    live = (entry.stop > 0).sum(dtype=jnp.int32)[None]
    return plgpu.kernel(
        functools.partial(_program, shape=shape, products=products),
        out_type=[out, state, state],
        grid=(min(programs, items) if shape.walks else items,),
        grid_names=("program",),
        scratch_types=_scratch(shape, dtype, products),
        compiler_params=dataclasses.replace(
            # Layouts stand in the program: their inference knows neither `mma` nor layouts of a token's slab.
            plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=_across_warps(shape)),
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret or None,
    )(live, *entry.arrays, rows.reshape(-1), *([] if sinks is None else [sinks]), q, pool.data)


def _scratch(shape: GpuShape, dtype: Any, products: Products) -> list[Any]:
    """[keys and values, what is laid down by turns, what else the products need, barriers].

    Of codes, keys and values as they come, one tile of each as numbers, then the bytes among which their scales lie,
    and the scales of one tile.
    """
    H, stages = shape.head_dim, products.stages(shape)
    if shape.codes:
        wide = [
            tiled(products.tile_lanes(KEYS, H), (KEYS, H), x) for x in (dtype, weight_dtype(shape, dtype))
        ]
        tiles = [_codes(shape, products, n, H) for n in stages]
        tiles += wide
        if shape.scaled:
            scales = _codes(shape, products, stages[0], scale_lanes(shape, products.tma), scales=True)
            tiles += [scales, scales, plgpu.SMEM((2, KEYS), jnp.float32)]
    else:
        lanes = products.tile_lanes(shape.unit, H)
        tiles = [tiled(lanes, (n, KEYS, H), dtype) for n in stages]
    # Queries, then probabilities, then the result.
    weights = products.probabilities(shape, weight_dtype(shape, dtype))
    turns = [plgpu.SMEM((shape.queries, H), dtype), weights]
    dims = (H, shape.queries) if shape.narrow else (ROWS, H)
    result = plgpu.SMEM(dims, jnp.float32 if shape.parts or shape.exact else dtype)
    # Of a program that goes on to other items, keys and values are on their way already.
    unions = [tiles, plgpu.RefUnion(*turns, result)]
    if not shape.walks:
        unions = [plgpu.RefUnion(tiles, result), plgpu.RefUnion(*turns)]
    barriers = []
    if products.tma:
        barriers = [
            plgpu.Barrier(num_arrivals=copies(shape, values), num_barriers=n)
            for values, n in enumerate(stages)
        ]
    return [*unions, products.operands(shape, dtype), barriers]


def weight_dtype(shape: GpuShape, dtype: Any) -> Any:
    """Of the product of weights and values. Codes are whole in float16, which rounds a scaled weight less."""
    return jnp.dtype(jnp.float16 if shape.scaled else dtype)


def copies(shape: GpuShape, values: int) -> int:
    """That bring a tile of keys (0) or of values (1). With keys come the scales of both: weights need the values'."""
    return KEYS // shape.unit * (1 if values or not shape.scaled else 3)


def scale_lanes(shape: GpuShape, tma: bool) -> int:
    """Bytes of a token's row that come with a head's scale: cp.async deals out four tiles of 8 rows and 32 bytes."""
    return 16 if tma else 32 * max(1, 4 * SUBLANES // shape.unit)


def _codes(shape: GpuShape, products: Products, stages: int, lanes: int, scales: bool = False) -> Any:
    dims = (stages, KEYS, lanes)
    # TMA brings them as they lie, too; there is no tile of 16 bytes.
    if products.tma and (scales or lanes % CODE_WIDTHS[-1]):
        return plgpu.SMEM(dims, jnp.int8)
    return tiled(32 if scales else products.tile_lanes(shape.unit, lanes, CODE_WIDTHS), dims, jnp.int8)


def shared_bytes(shape: GpuShape, dtype: Any, products: Products) -> int:
    """Shared memory of one program."""

    def size(ref: Any) -> int:
        if isinstance(ref, (list, tuple)):
            return sum(size(x) for x in ref)
        if isinstance(ref, plgpu.RefUnion):
            return max(size(x) for x in ref.refs)
        return math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize

    return size(_scratch(shape, dtype, products)[:3]) + _across_warps(shape) + _BARRIERS


def _across_warps(shape: GpuShape) -> int:
    """Bytes for maxima and sums over keys, which lie in one warp where queries are rows."""
    return _ACROSS_WARPS if shape.narrow else 0


def tiled(lanes: int, dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in swizzled tiles of 8 rows."""
    swizzle = plgpu.SwizzleTransform(lanes * jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform((8, lanes)), swizzle)
    return plgpu.SMEM(dims, dtype, transforms=transforms)


def slab(rows: int, head_dim: int, widest: int = 8) -> Any:
    """A layout of [rows, H]: as many of the 128 threads as divide it, the others doing the same again."""
    warps, power = math.gcd(4, rows), head_dim & -head_dim
    lanes = min(32, power)
    vector = min(widest, power // lanes)
    again = plgpu.Replicated
    return plgpu.Layout.TILED(
        plgpu.Tiling(((warps, lanes * vector), (vector,))),
        {4: (-3,), 2: (again(2), -3), 1: (again(4),)}[warps],
        (-2,) if lanes == 32 else (again(32 // lanes), -2),
        -1,
    )


def tiles_behind(values: int, stages: int) -> int:
    """Tiles of keys and of values that were asked for after the one that is awaited, at the place where it is.

    Asked for are the first `stages` tiles of keys, a tile of values behind each but the last, and then, where a tile n
    is worked, values n + stages - 1 and keys n + stages. Keys n are awaited before that, values n behind it.
    """
    return 2 * stages - 1 if values else 2 * (stages - 1)


class _Program:
    """What a program reads of its arrays: items, and the copies of their key tiles.

    A cursor (item, tile of it) runs ahead of the work, through the items that are this program's: so the first tiles
    of an item are on their way while the one before is finished.
    """

    def __init__(self, arrays: Any, pool_ref: Any, tiles: Any, barriers: Any, shape: GpuShape, tma: bool):
        self.live_ref, *self.entry_refs, self.rows_ref = arrays[:8]
        self.pool_ref, self.tiles, self.barriers, self.shape, self.tma = pool_ref, tiles, barriers, shape, tma
        self.me, self.step = lax.axis_index("program"), lax.axis_size("program")
        self.total = self.live_ref[0] * shape.num_kv_heads

    def entry(self, item: Any) -> tuple[Any, Any]:
        """(entry, head) of an item."""
        K = jnp.int32(self.shape.num_kv_heads)
        return lax.div(item, K), lax.rem(item, K)

    def fetch(self, cursor: tuple[Any, Any], values: int, slot: Any) -> tuple[Any, Any]:
        """Starts the copies of a tile's keys (0) or values (1), if there is one; returns the cursor behind it."""
        shape, (item, step) = self.shape, cursor
        there = item < self.total
        entry, head = self.entry(jnp.minimum(item, self.total - 1))
        table, _, _, _, first_ref, stop_ref = self.entry_refs
        first, stop = first_ref[entry], stop_ref[entry]
        base = table[entry] * shape.table_width
        lanes = (values * shape.num_kv_heads + head) * shape.head_dim
        block_bits = shape.block_size.bit_length() - 1

        def copy() -> None:
            for part in range(KEYS // shape.unit):
                # Behind the last token its block is brought again, from the cache.
                key = jnp.minimum(first + step * KEYS + part * shape.unit, stop - 1)
                row = self.rows_ref[base + lax.shift_right_logical(key, jnp.int32(block_bits))]
                # A block larger than a tile is brought in parts; the first key of each is a multiple of the unit.
                within = key & jnp.int32(shape.block_size - shape.unit)
                offset = within if shape.block_size > KEYS else 0
                pieces = [(self.tiles[values], pl.ds(lanes, shape.head_dim))]
                if shape.scaled and not values:
                    pieces += [(self.tiles[4 + of], pl.ds(*self.scale_bytes(of, head))) for of in (0, 1)]
                for tile, bytes_ in pieces:
                    source = self.pool_ref.at[row, pl.ds(offset, shape.unit), bytes_]
                    target = tile.at[slot, pl.ds(part * shape.unit, shape.unit)]
                    if self.tma:
                        plgpu.copy_gmem_to_smem(source, target, self.barriers[values].at[slot])
                    else:
                        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        # By cp.async, tiles behind the last are brought too: what is counted is the copies.
        if self.tma:
            pl.when(there)(copy)
        else:
            copy()
        more = first + (step + 1) * KEYS < stop
        return jnp.where(more, item, item + self.step), jnp.where(more, step + 1, 0)

    def wait(self, values: int, slot: Any) -> None:
        """Awaits a tile's keys or values; before Hopper by how many others may still be on their way."""
        if self.tma:
            plgpu.barrier_wait(self.barriers[values].at[slot])
        else:
            newer = tiles_behind(values, self.tiles[values].shape[0])
            of_values = newer // 2
            groups = (newer - of_values) * copies(self.shape, 0) + of_values * copies(self.shape, 1)
            plgpu.wait_gmem_to_smem(groups)
            gpu_tile.warpgroup_barrier()

    def scale_bytes(self, values: int, head: Any) -> tuple[Any, int]:
        """(first, number) of the bytes of a token's row among which the scale of a head's keys or values lies."""
        width = scale_lanes(self.shape, self.tma)
        return self.scale_at(values, head) & jnp.int32(-width), width

    def scale_at(self, values: int, head: Any) -> Any:
        """First byte of that scale."""
        K = self.shape.num_kv_heads
        return 2 * K * self.shape.head_dim + SCALE_BYTES * (values * K + head)

    def widen(self, values: int, slot: Any, products: Products, dtype: Any) -> Any:
        """A tile's codes as numbers in shared memory, not yet scaled: all are whole in 16 bits."""
        shape, tile = self.shape, self.tiles[2 + values]
        step = products.tile_lanes(KEYS, shape.head_dim)
        for first in range(0, shape.head_dim, step):
            lanes = pl.ds(first, step)
            codes = gpu_tile.load(self.tiles[values].at[slot, :, lanes], products.layout(dtype))
            gpu_tile.store(tile.at[:, lanes], gpu_tile.widened(codes, shape.codes, products, dtype))
        return tile

    def lay_out_scales(self, slot: Any, head: Any, seen: Any, layout: Any) -> None:
        """Puts the scales of a tile's keys and values down as float32, 0 where no query sees them: they may be NaN."""
        for values in (0, 1):
            stored = gpu_tile.load(self.tiles[4 + values].at[slot], layout).astype(jnp.int32) & 255
            byte = plgpu.broadcasted_iota(jnp.int32, stored.shape, 1, layout=layout)
            byte -= self.scale_at(values, head) - self.scale_bytes(values, head)[0]
            there = (byte >= 0) & (byte < SCALE_BYTES) & seen(stored.shape)
            # The four bytes of a float32 do not overlap, so that their sum is it.
            bits = jnp.where(there, stored << (jnp.where(there, byte, 0) * 8), 0).sum(axis=1)
            gpu_tile.store(self.tiles[6].at[values], lax.bitcast_convert_type(bits, jnp.float32))


def _program(*refs: Any, shape: GpuShape, products: Products) -> None:
    *arrays, q_ref, pool_ref, o_ref, m_ref, l_ref, tiles, turns, operands, barriers = refs
    if shape.walks:
        staged, probabilities, result = turns
    else:
        (tiles, result), (staged, probabilities) = tiles, turns
    sinks_ref = arrays[8] if shape.has_sinks else None
    program = _Program(arrays, pool_ref, tiles, barriers, shape, products.tma)
    stages, dtype = products.stages(shape), q_ref.dtype
    layout = products.layout(dtype)
    G, H = shape.group, shape.head_dim
    token_slab = slab(G, H)
    mine = lax.div(program.total - program.me + (program.step - 1), jnp.int32(program.step))

    def one_item(i: Any, carry: Any) -> Any:
        entry, head = program.entry(program.me + i * program.step)
        _, token, count, pos, first, stop = (ref[entry] for ref in program.entry_refs)
        for t in range(shape.tokens):
            # Behind the entry's last token stand other tokens' queries, whose results go nowhere.
            at = jnp.minimum(token + t, q_ref.shape[0] - 1)
            gpu_tile.store(staged.at[pl.ds(t * G, G)], gpu_tile.load(q_ref.at[at, head], token_slab))
        gpu_tile.sync(products)
        queries = products.queries(staged, operands, shape)
        gpu_tile.sync(products)  # before probabilities are written where queries were

        def scaled(x: Any, values: int) -> Any:
            """Scores or probabilities by the scales of codes."""
            if not shape.scaled:
                return x
            of_key = 0 if shape.narrow else 1
            scales = gpu_tile.load(tiles[6].at[values], layout.reduce(1 - of_key))
            return x * lax.broadcast_in_dim(scales, x.shape, [of_key])

        def work_tile(step: Any, carry: Any, s: Any) -> Any:
            number, keys_at, values_at, m, l, acc = carry
            start = first + step * KEYS
            s = scaled(s, 0)
            m, l, shrink, p = gpu_tile.softmax(s, m, l, start, pos, stop, layout, shape)
            p, unit = gpu_tile.in_units(scaled(p, 1), shape) if shape.scaled else (p, None)
            # Two by turns: a slow warp may still multiply the last tile's.
            weights = products.put(probabilities.at[_slot(number, 2)], p.astype(probabilities.dtype), shape)
            # From here on no warp reads this tile's keys, nor the last one's values.
            gpu_tile.sync(products)
            values_at = program.fetch(values_at, 1, _slot(number + stages[1] - 1, stages[1]))
            keys_at = program.fetch(keys_at, 0, _slot(number, stages[0]))
            slot = _slot(number, stages[1])
            program.wait(1, slot)
            values = tiles[1].at[slot]
            if shape.codes:
                values = program.widen(1, slot, products, probabilities.dtype)
                gpu_tile.sync(products)
            if shape.codes != "int8":  # whose every code is a number
                gpu_tile.clear_unseen_values(values, start, pos, stop, shape, products)
            of_query = 1 if shape.narrow else 0
            shrink = shrink if unit is None else shrink / unit
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [of_query])
            acc = products.weighted(acc, weights, values, shape)
            if unit is not None:
                acc = acc * lax.broadcast_in_dim(unit, acc.shape, [of_query])
            return number + 1, keys_at, values_at, m, l, acc

        def keys_of(number: Any, step: Any) -> Any:
            slot = _slot(number, stages[0])
            program.wait(0, slot)
            if not shape.codes:
                return tiles[0].at[slot]
            if shape.scaled:
                seen = functools.partial(gpu_tile.seen_by_any, first + step * KEYS, pos, stop, shape, layout)
                program.lay_out_scales(slot, head, seen, layout)
            keys = program.widen(0, slot, products, dtype)
            gpu_tile.sync(products)
            return keys

        def one_tile(step: Any, carry: Any) -> Any:
            return work_tile(step, carry, products.scores(queries, keys_of(carry[0], step), shape))

        def with_next(step: Any, carry: Any) -> Any:
            *carry, s = carry
            work = functools.partial(work_tile, step, carry, s)
            carry, s = products.scores_beside(queries, keys_of(carry[0] + 1, step + 1), work)
            return *carry, s

        steps = lax.shift_right_logical(stop - first + (KEYS - 1), jnp.int32(KEYS.bit_length() - 1))
        state = gpu_tile.no_keys(None if sinks_ref is None else sinks_ref.at[head], layout, shape)
        if products.ahead(shape):
            s = products.scores(queries, keys_of(carry[0], 0), shape)
            *carry, s = lax.fori_loop(0, steps - 1, with_next, (*carry, *state, s))
            carry = work_tile(steps - 1, carry, s)
        else:
            carry = lax.fori_loop(0, steps, one_tile, (*carry, *state))
        *carry, m, l, acc = carry
        if shape.narrow:
            l = l.sum(axis=0)
        if not shape.parts:
            acc = acc * lax.broadcast_in_dim(1.0 / l, acc.shape, [0])
        if not (products.tma or shape.walks):
            plgpu.wait_gmem_to_smem(0)
        gpu_tile.sync(products)
        gpu_tile.store(result, acc.astype(result.dtype))
        gpu_tile.sync(products)

        def lay_down(t: Any, _: None) -> None:
            if shape.narrow:
                heads = gpu_tile.load(result.at[:, pl.ds(0, G)].T, slab(G, H, 1))
            else:
                heads = gpu_tile.load(result.at[pl.ds(t * G, G)], token_slab)
            gpu_tile.store(o_ref.at[entry, head] if shape.parts else o_ref.at[token + t, head], heads)

        lax.fori_loop(0, count, lay_down, None)
        gpu_tile.store(m_ref.at[entry, head], m)
        gpu_tile.store(l_ref.at[entry, head], l)
        gpu_tile.sync(products)  # before the next item's queries are laid where the result was
        return carry

    @pl.when(mine > 0)
    def work() -> None:
        keys_at = values_at = (program.me, jnp.int32(0))
        # Of values one less: theirs is fetched where a tile's probabilities are there.
        for stage in range(stages[0]):
            keys_at = program.fetch(keys_at, 0, stage)
            if stage < stages[1] - 1:
                values_at = program.fetch(values_at, 1, stage)
        lax.fori_loop(0, mine, one_item, [jnp.int32(0), keys_at, values_at])
        if not products.tma:
            plgpu.wait_gmem_to_smem(0)


def _slot(number: Any, stages: int) -> Any:
    return lax.rem(number, jnp.int32(stages)) if stages & (stages - 1) else number & jnp.int32(stages - 1)
