"""One decoder for all families: tokens and positions in, hidden states out, KV written on the way.

    embed ─► per layer: norm ─► qkv ─► rotate ─► attend (writes k, v; reads the past) ─► out ─► +
             │                                                      norm ─► mlp ─────────► +
             └─► final norm ─► hidden ─► lm_head of the rows that are sampled

Latent attention (`latent`) stands between the norm and `out` in place of qkv: one row a token is written, and read by
all heads.

Define with flax.nnx, run on a plain dict: `make_decoder` gives a graph definition without arrays, and
`forward` merges it with the parameters while jit traces. Handing the module itself to a jitted function
costs tens of milliseconds per call on the host; a dict of arrays costs a fraction of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.kernels import KVLayout, KVPool, RaggedBatch, doors, write_and_attend
from pagedjax.models.config import ModelConfig
from pagedjax.models.experts import ExpertMlp
from pagedjax.models.latent import LatentProjection
from pagedjax.models.layers import (
    Linear,
    Mlp,
    Norm,
    matrix,
    param,
    rope_frequencies,
    rope_tables,
    rotate,
    soft_cap,
)
from pagedjax.models.sharding import AXIS, Cut

Array = jax.Array
Params = dict[str, Any]


class Attend(Protocol):
    """Attention of one layer: stores k and v in `kv`, returns what the queries gather."""

    def __call__(self, layer: int, q: Array, k: Array, v: Array, kv: Any) -> tuple[Array, Any]:
        """q f[T, N, H], k f[T, K, H], v f[T, K, Hv] → f[T, N, Hv] and the kv that the next layer is given.

        Of latent attention v is the first lanes of k, which are stored once.
        """
        ...


class Block(nnx.Module):
    """One layer: attention and MLP (or experts), each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, axis: str | None = None, layer: int = 0
    ) -> None:
        c = config
        self.attn_norm = Norm(c.d_model, c, dtype)
        if c.latent is None:
            width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
            self.qkv = Linear(c.d_model, width, dtype, bias=c.qkv_bias)
        else:
            self.latent = LatentProjection(c, c.latent, dtype)
        self.out = Linear(c.mixed_width, c.d_model, dtype, bias=c.out_bias, summed_over=axis)
        self.mlp_norm = Norm(c.d_model, c, dtype)
        self.mlp = ExpertMlp(c, dtype, axis) if c.has_experts(layer) else Mlp(c, dtype, axis)
        self.sinks = param((c.num_heads,), dtype) if c.sinks else None
        whole_q, whole_k = (c.num_heads, c.num_kv_heads) if c.qk_norm_whole else (1, 1)
        self.q_norm = Norm(whole_q * c.head_dim, c, dtype) if c.qk_norm else None
        self.k_norm = Norm(whole_k * c.head_dim, c, dtype) if c.qk_norm else None
        self.attn_post_norm = Norm(c.d_model, c, dtype) if c.post_norms else None
        self.mlp_post_norm = Norm(c.d_model, c, dtype) if c.post_norms else None

    def project(
        self, x: Array, config: ModelConfig, table: tuple[Array, Array] | None
    ) -> tuple[Array, Array, Array]:
        """x f[T, D] → q f[T, N, H], k f[T, K, H], v f[T, K, Hv]; q and k rotated by `table`, if any."""
        if config.latent is not None and table is not None:
            query, row = self.latent.project(x, table)
            return self.latent.absorb(query), row, row[..., : config.latent_dim]
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        heads = self.qkv(x).reshape(x.shape[0], n + 2 * k, h)
        q, keys, values = jnp.split(heads, [n, n + k], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            if config.qk_norm_whole:
                q, keys = (y.reshape(x.shape[0], -1) for y in (q, keys))
            q = self.q_norm(q).reshape(x.shape[0], n, h)
            keys = self.k_norm(keys).reshape(x.shape[0], k, h)
        if table is not None:
            q, keys = rotate(q, table), rotate(keys, table)
        return q, keys, values

    def gather(self, mixed: Array) -> Array:
        """What the queries gathered, f[T, N, Hv] → f[T, D]."""
        if hasattr(self, "latent"):
            mixed = self.latent.values(mixed)
        return self.out(mixed.reshape(mixed.shape[0], -1))


class Decoder(nnx.Module):
    """The model. `attend` is handed in, so the same body serves paged and dense attention.

    With a `cut` it is one device's part of the model, to be called inside `shard_map`: of smaller shapes, and x is
    whole on every device.
    """

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, cut: Cut | None = None, products: str = "xla"
    ) -> None:
        self.cut = cut
        # The native products and int8 weights take float32; what the KV pool holds is its own affair.
        self.activations = jnp.dtype(jnp.float32) if products == "native" or dtype == jnp.int8 else dtype
        axis = None if cut is None else AXIS
        self.config = config = config if cut is None else cut.local
        self.embed, self.embed_scale = matrix(config.vocab_size, config.d_model, dtype)
        if config.positions == "learned":
            self.position_embed = param((config.max_model_len, config.d_model), dtype)
        for layer in range(config.num_layers):
            setattr(self, layer_name(layer), Block(config, dtype, axis, layer))
        self.final_norm = Norm(config.d_model, config, dtype)
        # A leaf of its own even where it is tied: loaders then put the embedding's array in both places.
        self.lm_head = Linear(config.d_model, config.vocab_size, dtype)
        for _, module in nnx.iter_graph(self):
            if isinstance(module, Linear):
                module.products = products

    def __call__(
        self, tokens: Array, positions: Array, kv: Any, attend: Attend, num_tokens: Array | None = None
    ) -> tuple[Array, Any]:
        """tokens, positions i32[T] → hidden f[T, D] after the final norm, and kv with this step's rows.

        Entries from num_tokens i32[] on are padding, which no expert sees.
        """
        config = self.config
        x = self._embed(tokens)
        x = x * jnp.asarray(config.embed_scale, x.dtype)
        if config.positions == "learned":
            x = x + self.position_embed[...][positions]
        tables = self._rope(positions)
        for layer in range(config.num_layers):
            block: Block = getattr(self, layer_name(layer))
            table = tables[config.window(layer) is not None] if config.uses_rope(layer) else None
            q, k, v = block.project(block.attn_norm(x), config, table)
            mixed, kv = attend(layer, q, k, v, kv)
            mixed = block.gather(mixed)
            x = x + (mixed if block.attn_post_norm is None else block.attn_post_norm(mixed))
            normed = block.mlp_norm(x)
            mixed = block.mlp(normed, num_tokens) if isinstance(block.mlp, ExpertMlp) else block.mlp(normed)
            x = x + (mixed if block.mlp_post_norm is None else block.mlp_post_norm(mixed))
        return self.final_norm(x), kv

    def logits(self, hidden: Array) -> Array:
        """hidden f[Q, D] → f32[Q, V]; of the device's own tokens where there is a cut, -inf for padding."""
        scores = self.lm_head.product(hidden, jnp.float32)
        scores = soft_cap(scores, self.config.logit_soft_cap)
        if self.cut is None or self.cut.devices * self.cut.tokens == self.cut.config.vocab_size:
            return scores
        ids = self._first_token() + jnp.arange(scores.shape[-1], dtype=jnp.int32)
        return jnp.where((ids < self.cut.config.vocab_size)[None, :], scores, -jnp.inf)

    def _first_token(self) -> Array:
        """Of the device's part of the vocabulary, i32[]."""
        return jax.lax.axis_index(AXIS).astype(jnp.int32) * self.config.vocab_size

    def _embed(self, tokens: Array) -> Array:
        """i32[T] → f[T, D]: each token's row comes from the one device that holds it."""
        table = self.embed[...]
        if self.embed_scale is not None:
            return table[tokens].astype(self.activations) * self.embed_scale[...][tokens][:, None]
        if self.cut is None:
            return table[tokens].astype(self.activations)
        at = tokens - self._first_token()
        here = (at >= 0) & (at < table.shape[0])
        rows = jnp.where(here[:, None], table[jnp.where(here, at, 0)], jnp.zeros((), table.dtype))
        return jax.lax.psum(rows, AXIS)

    def _rope(self, positions: Array) -> dict[bool, tuple[Array, Array]]:
        """cos and sin per kind of layer: windowed (True) or not."""
        c = self.config
        if c.positions != "rope":
            return {}
        scaling = c.rope_scaling and c.rope_scaling.chosen(c.max_model_len)
        full = rope_tables(positions, *rope_frequencies(c.rope_dim, c.rope_theta, scaling))
        if not c.local_rope_theta:
            return {False: full, True: full}
        return {
            False: full,
            True: rope_tables(positions, *rope_frequencies(c.rope_dim, c.local_rope_theta, None)),
        }


def layer_name(layer: int) -> str:
    """Name of a layer's leaves; a string, because orbax returns integer keys as strings."""
    return f"layer_{layer:02d}"


def pool_layout(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: str = "float32",
    num_layers: int | None = None,
) -> KVLayout:
    """The pool that a model's layers, or so many of them, keep keys and values in."""
    layers = config.num_layers if num_layers is None else num_layers
    return KVLayout(
        layers, num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype, config.latent_dim
    )


def make_decoder(
    config: ModelConfig, dtype: str | jnp.dtype = "float32", cut: Cut | None = None, products: str = "xla"
) -> nnx.GraphDef:
    """The decoder's structure, without any array.

    Args:
        config: Shapes and switches.
        dtype: Of parameters and activations; int8 is that of the matrices alone, each with a scale per row.
        cut: How the model is dealt out to devices; `forward` and `logits` then are one device's part, for `shard_map`
            over the axis `sharding.AXIS`.
        products: "xla" or "native", see `pagedjax.kernels.products`; with "native" activations are float32.

    Returns:
        The graph definition that `forward` and `logits` take. Close over it in a jitted function; as a
        static argument it would be hashed at each call.
    """
    return nnx.split(Decoder(config, jnp.dtype(dtype), cut, products))[0]


def abstract_params(config: ModelConfig, dtype: str | jnp.dtype = "float32") -> Params:
    """Shape and dtype of every parameter, as nested dicts of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.split(Decoder(config, jnp.dtype(dtype)))[1])


@overload
def forward(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    positions: Array,
    pool: KVPool,
    ragged: RaggedBatch,
    *,
    implementation: str | Sequence[str] | None = ...,
) -> tuple[Array, KVPool]: ...


@overload
def forward(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    positions: Array,
    pool: tuple[KVPool, ...],
    ragged: tuple[RaggedBatch, ...],
    *,
    implementation: str | Sequence[str] | None = ...,
) -> tuple[Array, tuple[KVPool, ...]]: ...


def forward(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    positions: Array,
    pool: KVPool | tuple[KVPool, ...],
    ragged: RaggedBatch | tuple[RaggedBatch, ...],
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Array, KVPool | tuple[KVPool, ...]]:
    """One step over a ragged batch: write this step's keys and values, attend over the paged past.

    Args:
        graphdef: From `make_decoder`.
        params: Plain nested dict of arrays (`abstract_params` gives the shapes).
        tokens: i32[T]; padding entries may be any id.
        positions: i32[T], 0-based position of each token in its own sequence.
        pool: KV blocks of all layers, or one pool per entry of `config.layer_groups`, each holding the
            layers of its group; donate it to the jitted step.
        ragged: Where each token's KV goes and which blocks each sequence owns; one per pool.
        implementation: Attention implementation, see `pagedjax.kernels.paged_attention`.

    Returns:
        hidden f[T, D] after the final norm, and the pool or pools with this step's rows written.

    Raises:
        ValueError: As many pools are given as neither one nor the model's groups, or an argument is of another shape
            or dtype; judged while tracing.
    """
    decoder: Decoder = nnx.merge(graphdef, params)
    config = decoder.config
    pools: tuple[KVPool, ...] = (pool,) if isinstance(pool, KVPool) else pool
    batches: tuple[RaggedBatch, ...] = (ragged,) if isinstance(ragged, RaggedBatch) else ragged
    if isinstance(pool, KVPool) and isinstance(ragged, RaggedBatch):
        place = {layer: (0, layer) for layer in range(config.num_layers)}
    else:
        groups = config.layer_groups
        if not len(pools) == len(batches) == len(groups):
            raise ValueError(
                f"{len(pools)} pools, {len(batches)} batches: must be one per layer group ({len(groups)}), "
                "or one pool and one batch for all layers"
            )
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    dims = doors.dimensions(T=batches[0].num_tokens_bucket)
    doors.require(dims, "tokens", tokens, "T", jnp.int32)
    doors.require(dims, "positions", positions, "T", jnp.int32)
    for one in pools:
        heads = (one.layout.num_kv_heads, one.layout.head_dim, one.layout.latent_dim)
        if heads != (config.num_kv_heads, config.head_dim, config.latent_dim):
            raise ValueError(
                f"pool of K={heads[0]}, H={heads[1]}: this model has K={config.num_kv_heads}, H={config.head_dim}"
                + (f" of which {config.latent_dim} are the value" if config.latent_dim else "")
            )

    def sinks_of(layer: int) -> Array | None:
        sinks = getattr(decoder, layer_name(layer)).sinks
        return None if sinks is None else sinks[...]

    def attend(
        layer: int, q: Array, k: Array, v: Array, kv: tuple[KVPool, ...]
    ) -> tuple[Array, tuple[KVPool, ...]]:
        group, index = place[layer]
        batch = batches[group]
        written, mixed = write_and_attend(
            q,
            k,
            None if config.latent_dim else v,
            kv[group],
            index,
            batch,
            scale=config.attention_scale,
            window=config.window(layer),
            soft_cap=config.attn_soft_cap or None,
            sinks=sinks_of(layer),
            implementation=implementation,
        )
        return mixed, (*kv[:group], written, *kv[group + 1 :])

    hidden, pools = decoder(tokens, positions, pools, attend, batches[0].query_start_loc[-1])
    return hidden, pools[0] if isinstance(pool, KVPool) else pools


def logits(graphdef: nnx.GraphDef, params: Params, hidden: Array) -> Array:
    """Scores over the vocabulary: hidden f[Q, D] → f32[Q, V]."""
    decoder: Decoder = nnx.merge(graphdef, params)
    dims = doors.dimensions(Q=hidden.shape[0], D=decoder.config.d_model)
    doors.require(dims, "hidden", hidden, "QD", float)
    return decoder.logits(hidden)
