"""Sizes of the TPU kernels' pieces, and whether they fit a chip: decided while tracing, before a compiler is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pagedjax.cache.rules import SCALE_BYTES
from pagedjax.kernels import xla
from pagedjax.kernels.layout import LANES, KVLayout
from pagedjax.kernels.tuning import PACKAGED, SIZES

SUBLANES = 8
# Queries of a short prefill entry, and those that lie side by side per head (a bfloat16 tile).
SHORT_QUERIES = 16
# Of VMEM, what a kernel may plan for: the rest is the compiler's own (spilled registers, scratch of relayouts).
VMEM_SHARE = 0.6
# Of SMEM, what block tables of one call may take.
SMEM_SHARE = 0.875


@dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel's pieces; None takes the tuning table's.

    Attributes:
        chunk_tokens: Keys of one chunk, a power of two of at least one block; None takes `chunk_bytes` of the pool.
        tile_queries: Most queries of a prefill entry, a power of two of at least 16.
        chunk_bytes: Most keys and values of one chunk.
        chunk_copies: Most blocks of one chunk where `chunk_bytes` decides.
        fused_write: Whether the kernel writes the new keys of a step of decode rows (1), or a scatter before it (0).
        left_at_most: Of what is left of a row behind its whole tiles, as much is worked as short entries.
    """

    chunk_tokens: int | None = None
    tile_queries: int | None = None
    chunk_bytes: int | None = None
    chunk_copies: int | None = None
    left_at_most: int | None = None
    fused_write: int | None = None

    def __post_init__(self) -> None:
        for name, (holds, rule) in SIZES["pallas_tpu"].items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name}={value}: must be {rule}")

    def filled(self, sizes: Mapping[str, int]) -> Tiling:
        """With these sizes where none was given."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return Tiling(**{**sizes, **given})

    def chunk(self, layout: KVLayout) -> int:
        """Keys of one chunk of this pool, whole blocks."""
        sizes = self.filled(PACKAGED.sizes("pallas_tpu"))
        assert sizes.chunk_bytes and sizes.chunk_copies  # the package's table has them
        most = sizes.chunk_bytes // (layout.width * jnp.dtype(layout.storage).itemsize)
        most = min(1 << (max(1, most).bit_length() - 1), sizes.chunk_copies * layout.block_size)
        return max(sizes.chunk_tokens or most, layout.block_size)


@dataclass(frozen=True)
class TpuChip:
    """What decides what fits: VMEM and SMEM of a core in bytes, and cores that work one program (v4, v5p: 2)."""

    vmem_bytes: int
    smem_bytes: int
    num_cores: int = 1


def chip(interpret: Any = False) -> TpuChip:
    """The chip that is traced for; v5e where the kernel is interpreted."""
    if interpret:
        return TpuChip(128 << 20, 1 << 20)
    info = pltpu.get_tpu_info()
    return TpuChip(info.vmem_capacity_bytes, info.smem_capacity_bytes, info.num_cores)


@dataclass(frozen=True)
class TpuShape:
    """What a compiled kernel is specialised on."""

    block_size: int
    chunk_blocks: int
    table_width: int
    kv_width: int
    head_dim: int
    num_heads: int
    heads_per_kv: int
    tile: int  # queries of an entry; 0 is a decode entry, its heads on a diagonal
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool
    cores: int = 1
    causal: bool = True  # else the entry's queries are of rows that share their keys, and all see all
    latent_dim: int = 0  # above 0: the value is the first so many lanes of the one key
    codes: str = ""  # of a quantised pool, its kind
    scaled: bool = False  # whether codes have scales with them

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // self.heads_per_kv

    @property
    def scale_lanes(self) -> slice:
        """Of a quantised row the whole vectors of lanes in which its scales lie."""
        first = 2 * self.kv_width
        return slice(
            first // LANES * LANES, -(-(first + 2 * self.num_kv_heads * SCALE_BYTES) // LANES) * LANES
        )

    @property
    def picked_scales(self) -> int:
        """Rows of scales that a chunk's bytes are made into: key and value of each row of heads, or of each KV head."""
        return 2 * self.state[1] if not self.tile else -(-2 * self.num_kv_heads // 16) * 16

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def values(self) -> tuple[int, int]:
        """(first lane of the values in a token's row, lanes of all of them)."""
        return (0, self.latent_dim) if self.latent_dim else (self.kv_width, self.kv_width)

    @property
    def summed_lanes(self) -> int:
        """Lanes of a part's sum of values."""
        return self.value_dim if self.tile else self.values[1]

    @property
    def chunk(self) -> int:
        return self.chunk_blocks * self.block_size

    @property
    def padded_heads(self) -> int:
        return -(-self.num_heads // SUBLANES) * SUBLANES

    @property
    def state(self) -> tuple[int, int, int]:
        """(parts, rows of a part, lanes of a row) of what is multiplied and summed."""
        if not self.tile:
            return 1, -(-self.num_heads // 16) * 16, self.kv_width
        return self.num_heads // self.heads_per_kv, self.tile * self.heads_per_kv, self.head_dim


@dataclass(frozen=True)
class Sizes:
    """What fits together of one attention on one chip."""

    layout: KVLayout
    num_heads: int
    sinks: bool
    tiling: Tiling
    chip: TpuChip
    dtype: str = ""  # of queries, products and results; "" is the pool's, which of a quantised one is none

    @property
    def worked_in(self) -> jnp.dtype:
        return jnp.dtype(self.dtype or ("bfloat16" if self.layout.quantised else self.layout.dtype))

    def shape(self, table_width: int, tile: int, params: xla.Params) -> TpuShape:
        layout = self.layout
        return TpuShape(
            layout.block_size, self.tiling.chunk(layout) // layout.block_size, table_width, layout.kv_width,
            layout.head_dim, self.num_heads, self.num_heads // layout.num_kv_heads, tile,
            params.scale, params.window, params.soft_cap, self.sinks and tile > 0, self.chip.num_cores,
            latent_dim=layout.latent_dim, codes=layout.dtype if layout.quantised else "", scaled=layout.scaled,
        )  # fmt: skip

    def shared(self, table_width: int, tile: int, params: xla.Params) -> TpuShape:
        """Of a tile of rows that share a prefix: sinks join once, with the rows' own keys; no window is grouped."""
        return replace(self.shape(table_width, tile, params), sinks=False, causal=False, window=None)

    def rows_at_once(self, table_width: int) -> int:
        """Rows whose tables fit SMEM beside the entries' own scalars, eight a row at most.

        Raises:
            NotImplementedError: One row's table does not fit.
        """
        most = int(self.chip.smem_bytes * SMEM_SHARE / 4) // (table_width + 8)
        if most < 1:
            raise NotImplementedError(
                f"block_tables of {table_width} blocks a row: must fit {self.chip.smem_bytes >> 10} KiB of SMEM; "
                "use 'xla'"
            )
        return most

    def tile_queries(self, num_tokens: int) -> int:
        """Queries of a prefill entry: as many as VMEM has room for, no more than the tiling's and the bucket's.

        Raises:
            NotImplementedError: Not even a short entry fits.
        """
        most = self.tiling.filled(PACKAGED.sizes("pallas_tpu")).tile_queries
        assert most  # the package's table has it
        tile = min(most, max(SHORT_QUERIES, 1 << (num_tokens - 1).bit_length()))
        params = xla.Params(1.0, None, None)
        while tile > SHORT_QUERIES and self.vmem_bytes(self.shape(1, tile, params)) > self._room:
            tile //= 2
        self.vmem_limit_bytes(self.shape(1, tile, params))
        return tile

    @property
    def _room(self) -> int:
        return int(self.chip.vmem_bytes * VMEM_SHARE)

    def vmem_bytes(self, shape: TpuShape) -> int:
        """VMEM of one call: its scratch, its blocks twice, and one part's scores three times."""
        item, stored = self.worked_in.itemsize, jnp.dtype(self.layout.storage).itemsize
        parts, rows, lanes = shape.state

        def tiled(rows: int, columns: int, itemsize: int) -> int:
            sublanes = SUBLANES * 4 // itemsize
            return -(-rows // sublanes) * sublanes * -(-columns // LANES) * LANES * itemsize

        summed = shape.summed_lanes
        total = 2 * shape.chunk * self.layout.width * stored
        if shape.codes:  # one part's keys and values as numbers
            total += 2 * tiled(shape.chunk, lanes, item)
        if shape.scaled:
            total += 3 * tiled(shape.picked_scales, shape.chunk, 4)
        total += parts * (2 * tiled(rows, LANES, 4) + tiled(rows, summed, 4)) + 3 * tiled(
            rows, shape.chunk, 4
        )
        if not shape.tile:
            return total + 2 * (
                tiled(rows, lanes, item) + tiled(rows, shape.value_dim, 4) + tiled(rows, LANES, 4)
            )
        out = tiled(shape.num_heads, summed, item if shape.causal else 4)
        total += shape.tile * (2 * tiled(shape.num_heads, lanes, item) + out) + 2 * tiled(parts, rows, 4)
        if not shape.latent_dim:  # whose queries are multiplied as they come
            total += parts * tiled(rows, lanes, item) + tiled(shape.tile * shape.padded_heads, lanes, 4)
        return total + (parts * tiled(rows, LANES, 4) if shape.sinks else 0)

    def vmem_limit_bytes(self, shape: TpuShape) -> int:
        """What the compiler may use.

        Raises:
            NotImplementedError: The kernel's buffers do not fit the chip.
        """
        need = self.vmem_bytes(shape)
        if need > self._room:
            raise NotImplementedError(
                f"{self.layout.dtype}, {self.num_heads} query heads of {self.layout.head_dim}, blocks of "
                f"{self.layout.block_size}: buffers of {need / 2**20:.1f} MiB must fit {VMEM_SHARE:.0%} of "
                f"{self.chip.vmem_bytes >> 20} MiB of VMEM; use 'xla'"
            )
        return min(self.chip.vmem_bytes, max(16 << 20, int(need / VMEM_SHARE)))
