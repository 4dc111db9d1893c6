"""Latent attention of one layer, absorbed beside expanded, in turns of one process.

*Absorbed* is what the engine runs: queries multiplied into the latent's space, paged attention over rows as they are.
*Expanded* gathers the sequence's rows out of the same pool, multiplies them into every head's keys and values, and
attends densely. Per query, key and head the first takes 2 (2 rank + rope) FLOPs and the second 2 (nope + rope + value),
after 2 rank (nope + value) once a key: with DeepSeek's widths it wins from 171 queries on that share an expanded key.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.kernels import KVPool, make_pool, native, paged_attention, plan_ragged, write_kv
from pagedjax.models.config import LatentAttention, ModelConfig
from pagedjax.models.decoder import pool_layout
from pagedjax.models.latent import LatentProjection
from pagedjax.testing import tiny_config

Note = Callable[[str], None]
WIDTHS = LatentAttention(kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
HEADS = 16
# (queries of one sequence, tokens before them): a decode step, a tile, a chunk, and the same behind a long prefix.
CASES = ((1, 2048), (16, 2048), (128, 0), (128, 2048), (512, 0), (512, 2048))
_BLOCK = 16


def run(*, rounds: int = 5, note: Note = lambda _: None) -> list[dict[str, Any]]:
    """Measure each case.

    Args:
        rounds: Times each candidate runs, in turn; the best counts.
        note: Told what is being done.

    Returns:
        Rows of seconds and FLOPs of both, `ratio` the seconds absorbed over expanded, and by how much their results
        differ at most, over the largest.
    """
    native.prepare()
    config = tiny_config(
        d_model=256, num_layers=1, num_heads=HEADS, num_kv_heads=1, head_dim=WIDTHS.row_dim, latent=WIDTHS
    )
    graph, state = nnx.split(LatentProjection(config, WIDTHS, jnp.dtype("float32")))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / math.sqrt(leaf.shape[-1])),
        nnx.to_pure_dict(state),
    )
    rows = []
    for queries, cached in CASES:
        note(f"{queries} queries behind {cached} tokens")
        rows.append(_measure(config, graph, params, queries, cached, rounds))
    return rows


def _measure(
    config: ModelConfig, graph: nnx.GraphDef, params: dict[str, Any], queries: int, cached: int, rounds: int
) -> dict[str, Any]:
    a, total, rng = WIDTHS, cached + queries, np.random.default_rng(queries + cached)
    table = rng.permutation(-(-total // _BLOCK)).astype(np.int32)[None] + 1
    kept = jnp.asarray(rng.standard_normal((total, 1, a.row_dim), np.float32))
    query = jnp.asarray(rng.standard_normal((queries, HEADS, a.query_dim), np.float32))
    slots = table[0, np.arange(total) // _BLOCK] * _BLOCK + np.arange(total) % _BLOCK
    pool = make_pool(pool_layout(config, table.size + 1, _BLOCK))
    pool = jax.jit(lambda pool, kept: write_kv(pool, 0, kept, None, jnp.asarray(slots)))(pool, kept)
    ragged = plan_ragged(
        [queries], [total], table, block_size=_BLOCK, num_tokens_bucket=queries, num_seqs_bucket=1,
        decode_bucket=int(queries == 1),
    )  # fmt: skip

    @jax.jit
    def absorbed(params: dict[str, Any], query: jax.Array, pool: KVPool) -> jax.Array:
        layer = nnx.merge(graph, params)
        mixed = paged_attention(layer.absorb(query), pool, 0, ragged, scale=config.attention_scale)
        return layer.values(mixed)

    @jax.jit
    def expanded(params: dict[str, Any], query: jax.Array, pool: KVPool) -> jax.Array:
        layer = nnx.merge(graph, params)
        rows = pool.data[jnp.asarray(table[0])].reshape(-1, 1, pool.layout.width)[:total, :, : a.row_dim]
        keys, values = layer.expand(rows)
        scores = jnp.einsum("qnd,knd->nqk", query, keys) * config.attention_scale
        seen = jnp.arange(total)[None, :] <= cached + jnp.arange(queries)[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("nqk,knv->qnv", weights, values)

    seconds = {"absorbed_s": math.inf, "expanded_s": math.inf}
    found: dict[str, jax.Array] = {}
    for round_ in range(rounds + 1):  # the first compiles
        for name, call in (("absorbed_s", absorbed), ("expanded_s", expanded)):
            started = time.perf_counter()
            found[name] = call(params, query, pool).block_until_ready()
            if round_:
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    pairs = HEADS * queries * (cached + (queries + 1) / 2)
    per_key = 2 * a.kv_lora_rank * (a.nope_dim + a.value_dim) * HEADS
    apart = jnp.abs(found["absorbed_s"] - found["expanded_s"]).max() / jnp.abs(found["expanded_s"]).max()
    return {
        "queries": queries,
        "cached": cached,
        **seconds,
        "ratio": seconds["absorbed_s"] / seconds["expanded_s"],
        "absorbed_gflop": (pairs * 2 * (a.row_dim + a.kv_lora_rank) + queries * per_key) / 1e9,
        "expanded_gflop": (pairs * 2 * (a.query_dim + a.value_dim) + total * per_key) / 1e9,
        "apart": float(apart),
    }
