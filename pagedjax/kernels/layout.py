"""The arrays that cross into the kernels: the KV pool and one step's ragged batch.

Letters: T tokens this step, S sequences, M blocks per sequence, P blocks in the pool, B block size,
N query heads, K KV heads, H head dim, G = N / K, L layers, C blocks copied.

One pool serves all layers. Row `l*P + b` is block b of layer l, and a token's row holds its K heads,
then its V heads, then padding up to whole 128-lane vectors:

    data[l*P + b, offset] = | k_0 | k_1 | … | k_{K-1} | v_0 | … | v_{K-1} | padding |
                            0     H               K*H                  2*K*H      ceil128(2*K*H)

Latent attention (docs/models.md) keeps one key a token for all heads, K = 1, and no value beside it: the value is the
key's first lanes, `value_dim` of them:

    data[l*P + b, offset] = | latent                  | rotated | padding |
                            0               value_dim           H         ceil128(H)

A quantised pool is an array of bytes: behind the codes of keys and values lie their float32 scales, one for each head
of keys, then one for each head of values (`quant`):

    data[l*P + b, offset] = | k_0 | … | v_{K-1} | scale of k_0 | … | scale of v_{K-1} | padding |
                            0                 2*K*H                          2*K*(H + 4)
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.cache.rules import SCALE_BYTES, SCALED, check_block_size
from pagedjax.kernels.quant import QUANTISED
from pagedjax.kernels.tuning import PACKAGED, Tuning, heads_of

LANES = 128
POOL_DTYPES = ("float32", "bfloat16", "float16", *QUANTISED)
MOST_LANES = 256  # of one head's key or value
MOST_LATENT_LANES = 1024  # of a key that holds its value
_INT32 = 2**31


@dataclass(frozen=True)
class KVLayout:
    """Shape and meaning of one KV pool.

    Attributes:
        num_layers: L, layers that share the pool.
        num_blocks: P, blocks per layer, the null block 0 included.
        block_size: B, tokens per block; a power of two between 1 and 1024.
        num_kv_heads: K.
        head_dim: H, lanes of one head's key: 1 to 256, or to 1024 where it holds the value.
        dtype: "float32", "bfloat16" or "float16" (a dtype object is accepted and becomes its name); "int8" or
            "fp8_e4m3" with a scale for each token and head, "fp8_e4m3_unscaled" without.
        latent_dim: 0: a value of H lanes lies behind the keys. Above 0: nothing does, and the value is the first so
            many lanes of the key, of which there is one a token (K = 1).

    Raises:
        ValueError: A value is out of its range, or slots would not fit int32.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    latent_dim: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in QUANTISED:
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        for name in ("num_layers", "num_blocks", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        check_block_size(self.block_size)
        most = MOST_LATENT_LANES if self.latent_dim else MOST_LANES
        if not 1 <= self.head_dim <= most:
            raise ValueError(f"head_dim={self.head_dim}: must be between 1 and {most}")
        if not 0 <= self.latent_dim <= self.head_dim or (self.latent_dim and self.num_kv_heads > 1):
            raise ValueError(
                f"latent_dim={self.latent_dim}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}: a value "
                "within the key is at most as wide, and a token has one such key; 0 keeps keys and values apart"
            )
        if self.dtype not in POOL_DTYPES:
            raise ValueError(f"dtype={self.dtype}: must be one of {', '.join(POOL_DTYPES)}")
        if self.quantised and self.latent_dim:
            raise ValueError(
                f"dtype={self.dtype}: keys that hold their values are not quantised; use float32, bfloat16 or float16"
            )
        if self.num_blocks * max(self.num_layers, self.block_size) >= _INT32 - 1:
            raise ValueError(
                f"num_blocks={self.num_blocks}: slots and rows must fit int32 with {self.num_layers} layers "
                f"of {self.block_size}-token blocks; use fewer blocks"
            )

    @property
    def width(self) -> int:
        """Minor axis: the lanes in use rounded up to whole 128-lane vectors."""
        return -(-self.used_width // LANES) * LANES

    @property
    def used_width(self) -> int:
        """Lanes of one token that hold something: 2*K*H, or H where the value lies in the key; scales with them."""
        return self.num_kv_heads * sum(self.head_parts)

    @property
    def head_parts(self) -> tuple[int, ...]:
        """Lanes of one head's key, value and scales, in their order: part by part the K heads lie side by side."""
        if self.latent_dim:
            return (self.head_dim,)
        return (self.head_dim,) * 2 + (SCALE_BYTES,) * (2 * self.scaled)

    @property
    def quantised(self) -> bool:
        """Whether keys and values are codes of eight bits."""
        return self.dtype in QUANTISED

    @property
    def scaled(self) -> bool:
        """Whether codes have scales with them."""
        return self.dtype in SCALED

    @property
    def storage(self) -> str:
        """The dtype of the array."""
        return "int8" if self.quantised else self.dtype

    @property
    def kv_width(self) -> int:
        """K*H: lanes of one token's keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Lanes of one head's value."""
        return self.latent_dim or self.head_dim

    @property
    def value_offset(self) -> int:
        """Lane of a token's row where the value of its first head begins."""
        return 0 if self.latent_dim else self.kv_width

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_layers * self.num_blocks, self.block_size, self.width)

    @property
    def num_bytes(self) -> int:
        rows, block_size, width = self.shape
        return rows * block_size * width * jnp.dtype(self.storage).itemsize


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["layout"])
@dataclass(frozen=True)
class KVPool:
    """All layers' KV blocks in one array, donated to each step and returned by it.

    Attributes:
        data: f[L*P, B, layout.width].
        layout: What the array means; static under jit.
    """

    data: jax.Array
    layout: KVLayout


def make_pool(layout: KVLayout, fill: float = 0.0) -> KVPool:
    """A fresh pool; tests fill it with NaN to show that unwritten slots are never read (a scale of all bits is one)."""
    return KVPool(jnp.full(layout.shape, stored_fill(layout, fill), layout.storage), layout)


def stored_fill(layout: KVLayout, fill: float) -> float:
    """What an array holds in every place where all keys and values shall be `fill`, 0 or NaN."""
    return -1 if layout.quantised and math.isnan(fill) else fill


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "row",
        "start",
        "num_items",
        "skip",
        "group_rows",
        "group_first",
        "group_chunks",
        "num_groups",
    ],
    meta_fields=["window"],
)
@dataclass(frozen=True)
class DecodeList:
    """The decode work of one attention window: each item is up to `chunk_tokens` keys of one row.

    Attributes:
        row: i32[W], which sequence; entries from num_items on are padding.
        start: i32[W], first token position of the item, a multiple of chunk_tokens.
        num_items: i32[].
        skip: i32[Sd], first chunk of each row that has an item: those before it lie behind the window
            or are worked by the row's groups.
        group_rows: i32[Wg, Sd], the rows of each shared-prefix group side by side; Sd is none. Any row's table names
            the shared blocks.
        group_first: i32[Wg], first chunk that the group works: where the larger group around it ends.
        group_chunks: i32[Wg], chunks that the group's rows share; the last it works is the one before.
        num_groups: i32[].
        window: Keys a query sees, its own included; None sees all. Static.
    """

    row: Any
    start: Any
    num_items: Any
    skip: Any
    group_rows: Any
    group_first: Any
    group_chunks: Any
    num_groups: Any
    window: int | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "slot_mapping",
        "block_tables",
        "seq_lens",
        "query_start_loc",
        "num_seqs",
        "num_decodes",
        "decode_lists",
        "tile_row",
        "tile_start",
        "num_tiles",
    ],
    meta_fields=["decode_bucket", "chunk_tokens", "tile_queries", "block_size", "apart", "tuning"],
)
@dataclass(frozen=True)
class RaggedBatch:
    """One step's tokens by sequence, and the work list that every layer reuses.

    Built by `plan_ragged` from fresh numpy arrays; it must not be changed after a step was given it
    (on CPU the device reads these very buffers). Rows with one query token (*decode rows*) come first;
    tokens of the other rows are cut into *tiles* of up to `tile_queries` tokens of one sequence.

    Attributes:
        slot_mapping: i32[T], where each token's KV goes (block id * B + offset); -1 is padding.
        block_tables: i32[S, M]; entries behind a sequence's last block are never read.
        seq_lens: i32[S], KV length including this step's tokens.
        query_start_loc: i32[S+1], first token of each row; rows from num_seqs on repeat the end.
        num_seqs: i32[].
        num_decodes: i32[], rows worked by the decode lists: the first ones.
        decode_lists: One per window that the step's layers use.
        tile_row: i32[Wt], the tile's sequence; entries from num_tiles on are padding.
        tile_start: i32[Wt], the tile's first token.
        num_tiles: i32[].
        decode_bucket: Sd, most decode rows; 0 compiles no decode part. Static.
        chunk_tokens: Keys per decode item. Static.
        tile_queries: Tokens per tile; 0 compiles no tile part. Static.
        block_size: B of the pool that was planned for. Static.
        apart: No row's result may depend on the others, to the last bit: parts of a row are joined one by one, in their
            order. Static.
        tuning: The user's own sizes of kernels' pieces, before the package's. Static.
    """

    slot_mapping: Any
    block_tables: Any
    seq_lens: Any
    query_start_loc: Any
    num_seqs: Any
    num_decodes: Any
    decode_lists: tuple[DecodeList, ...]
    tile_row: Any
    tile_start: Any
    num_tiles: Any
    decode_bucket: int
    chunk_tokens: int
    tile_queries: int
    block_size: int
    apart: bool = False
    tuning: Tuning = PACKAGED

    @property
    def num_tokens_bucket(self) -> int:
        return self.slot_mapping.shape[0]

    def sizes(self, kernel: str, layout: KVLayout, num_heads: int) -> dict[str, int]:
        """Sizes of a kernel's pieces on the device that is traced for; see `tuning.SIZES`."""
        return self.tuning.sizes(
            kernel,
            device=device_kind(),
            heads=heads_of(num_heads, layout.num_kv_heads, layout.head_dim),
            dtype=layout.dtype,
            block_size=layout.block_size,
        )

    def decode_list(self, window: int | None) -> DecodeList:
        """The list planned for this window, else the one that leaves nothing out.

        Raises:
            ValueError: The window was not planned and the list of all keys leaves chunks to groups, which see
                every key.
        """
        by_window = {work.window: work for work in self.decode_lists}
        if window not in by_window and by_window[None].group_rows.shape[0]:
            raise ValueError(
                f"window={window}: must be planned where groups are; add it to plan_ragged's windows"
            )
        return by_window.get(window, by_window[None])


def _device() -> Any:
    """What is being traced for: an abstract mesh's device, else the first one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.devices()[0]


def device_kind() -> str:
    """What is being traced for, as JAX names it: "cpu", "TPU v5 lite", "NVIDIA H100 80GB HBM3"."""
    return str(_device().device_kind)


def device_class() -> str:
    """What is being traced for: "tpu", "gpu" or "cpu"."""
    platform = str(_device().platform)
    return "gpu" if platform in ("cuda", "rocm") else platform


def compute_capability() -> tuple[int, int] | None:
    """Of the NVIDIA GPU that is traced for, (major, minor); None elsewhere."""
    said = getattr(_device(), "compute_capability", None)
    if device_class() != "gpu" or not re.fullmatch(r"\d+\.\d+[a-z]?", str(said)):
        return None
    major, minor = str(said).rstrip("abcdefghijklmnopqrstuvwxyz").split(".")
    return int(major), int(minor)


def num_multiprocessors() -> int | None:
    """Of the GPU that is traced for; None where it does not say."""
    if device_class() != "gpu":
        return None
    said = getattr(_device(), "core_count", None) or getattr(_device(), "num_cores", None)
    return int(said) if said else None


def describe_device() -> str:
    """What is being traced for, for messages."""
    capability = compute_capability()
    return f"platform={device_class()}" + (
        "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
    )


def known_layer(layout: KVLayout, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """(layer i32[…] within [0, L), whether it was): one that is traced is not known before."""
    index = jnp.asarray(layer, jnp.int32)
    inside = (index >= 0) & (index < layout.num_layers)
    return jnp.clip(index, 0, layout.num_layers - 1), inside


def read_rows(layout: KVLayout, layer: int | jax.Array, block_ids: jax.Array) -> jax.Array:
    """Pool rows of a layer's blocks; an id outside [0, P) reads the layer's null block, whatever the layer a row."""
    inside = (block_ids >= 0) & (block_ids < layout.num_blocks)
    return jnp.where(inside, block_ids, 0) + known_layer(layout, layer)[0] * layout.num_blocks


def write_rows(layout: KVLayout, layer: int | jax.Array, block_ids: jax.Array) -> jax.Array:
    """Pool rows to write; an id outside [0, P) or a layer outside [0, L) becomes row L*P, which is dropped.

    Without it, id P of layer 0 would be block 0 of layer 1, and -1 the last block of the layer before.
    """
    index, known = known_layer(layout, layer)
    inside = known & (block_ids >= 0) & (block_ids < layout.num_blocks)
    return jnp.where(inside, block_ids + index * layout.num_blocks, layout.num_layers * layout.num_blocks)
