"""Multi-head latent attention: every token keeps one low-rank row, out of which all heads' keys and values come.

    x ─► q_down ─► norm ─► q_up ─► per head | nope │ rope ► rotate
    x ─► kv_down ─► | latent ► norm │ rope ► rotate |  ══ the row that the pool keeps, one for all heads
                       latent ─► k_up ─► per head nope,   latent ─► v_up ─► per head value

*Absorbed*, a head's query is multiplied by its k_up instead of every key: nopeᵀ (k_up latent) = (k_upᵀ nope)ᵀ latent.
So the scores are those of queries as wide as the row, the values are the latent itself, and v_up is multiplied once,
behind the softmax. *Expanded*, rows become keys and values of every head first. Both are the same sums, in another
order.

Source: DeepSeek-V2, arXiv 2405.04434, §2.1 and appendix C.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.models.config import LatentAttention, ModelConfig
from pagedjax.models.layers import Linear, Norm, rotate

Array = jax.Array


class LatentProjection(nnx.Module):
    """The matrices of one layer's latent attention; its `out` is the block's, as in every family."""

    def __init__(self, config: ModelConfig, latent: LatentAttention, dtype: jnp.dtype) -> None:
        a, N, D = latent, config.num_heads, config.d_model
        self.latent, self.num_heads = a, N
        if a.q_lora_rank:
            self.q_down = Linear(D, a.q_lora_rank, dtype, bias=config.qkv_bias)
            self.q_norm = Norm(a.q_lora_rank, config, dtype, eps=a.norm_eps)
        self.q_up = Linear(a.q_lora_rank or D, N * a.query_dim, dtype)
        self.kv_down = Linear(D, a.row_dim, dtype, bias=config.qkv_bias)
        self.kv_norm = Norm(a.kv_lora_rank, config, dtype, eps=a.norm_eps)
        self.k_up = Linear(a.kv_lora_rank, N * a.nope_dim, dtype)
        self.v_up = Linear(a.kv_lora_rank, N * a.value_dim, dtype)

    def project(self, x: Array, table: tuple[Array, Array]) -> tuple[Array, Array]:
        """x f[T, D] → queries f[T, N, query_dim] and the row that is kept, f[T, 1, row_dim]; both rotated.

        Args:
            table: From `rope_tables`, for rope_dim lanes.
        """
        a = self.latent
        low = self.q_norm(self.q_down(x)) if a.q_lora_rank else x
        nope, rope = jnp.split(self.q_up(low).reshape(-1, self.num_heads, a.query_dim), [a.nope_dim], axis=-1)
        latent, shared = jnp.split(self.kv_down(x)[:, None, :], [a.kv_lora_rank], axis=-1)
        query = jnp.concatenate([nope, rotate(rope, table)], axis=-1)
        return query, jnp.concatenate([self.kv_norm(latent), rotate(shared, table)], axis=-1)

    def absorb(self, query: Array) -> Array:
        """Queries f[T, N, query_dim] → f[T, N, row_dim], to be multiplied with rows as they are."""
        a = self.latent
        nope, rope = jnp.split(query, [a.nope_dim], axis=-1)
        k_up = self._by_head(self.k_up)
        return jnp.concatenate([jnp.einsum("tnd,ndr->tnr", nope, k_up), rope], axis=-1)

    def values(self, mixed: Array) -> Array:
        """What absorbed attention gathered, f[T, N, kv_lora_rank] → f[T, N, value_dim]."""
        return jnp.einsum("tnr,nvr->tnv", mixed, self._by_head(self.v_up))

    def _by_head(self, up: Linear) -> Array:
        """A matrix out of the latent as f[N, lanes, kv_lora_rank], int8 weights multiplied by their rows' scales."""
        weight = up.weight[...]
        if up.weight_scale is not None:
            weight = weight.astype(jnp.float32) * up.weight_scale[...][:, None]
        return weight.reshape(self.num_heads, -1, self.latent.kv_lora_rank)

    def expand(self, rows: Array) -> tuple[Array, Array]:
        """Rows f[T, 1, row_dim] → every head's keys f[T, N, query_dim] and values f[T, N, value_dim]."""
        a, T = self.latent, rows.shape[0]
        latent, shared = jnp.split(rows[:, 0], [a.kv_lora_rank], axis=-1)
        nope = self.k_up(latent).reshape(T, self.num_heads, a.nope_dim)
        shared = jnp.broadcast_to(shared[:, None, :], (T, self.num_heads, a.rope_dim))
        values = self.v_up(latent).reshape(T, self.num_heads, a.value_dim)
        return jnp.concatenate([nope, shared], axis=-1), values
