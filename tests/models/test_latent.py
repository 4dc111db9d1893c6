"""Latent attention's two forms of the same sums, on weights of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.models.latent import LatentProjection
from pagedjax.models.weights import quantise, set_leaf
from pagedjax.testing import tiny_latent_config, tiny_params


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_absorbed_queries_meet_rows_as_queries_meet_expanded_keys(dtype):
    config = tiny_latent_config()
    plain = tiny_params(config)["layer_00"]["latent"]
    params = plain
    if dtype == "int8":
        params = {name: dict(leaves) for name, leaves in plain.items()}
        for name, leaves in plain.items():
            if "weight" in leaves:
                whole, scales = quantise(leaves["weight"])
                set_leaf(params, (name, "weight"), whole)
                set_leaf(params, (name, "weight_scale"), scales)
    graph, _ = nnx.split(LatentProjection(config, config.latent, jnp.dtype(dtype)))
    layer = nnx.merge(graph, jax.tree.map(jnp.asarray, params))
    rng, a = np.random.default_rng(0), config.latent
    query = jnp.asarray(rng.standard_normal((5, config.num_heads, a.query_dim), np.float32))
    rows = jnp.asarray(rng.standard_normal((7, 1, a.row_dim), np.float32))
    keys, values = layer.expand(rows)
    want = jnp.einsum("qnd,knd->qnk", query, keys)
    got = jnp.einsum("qnr,kr->qnk", layer.absorb(query), rows[:, 0])
    close = dict(rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
    np.testing.assert_allclose(got, want, **close)
    latent = jnp.broadcast_to(rows[:, :, : a.kv_lora_rank], (7, config.num_heads, a.kv_lora_rank))
    np.testing.assert_allclose(layer.values(latent), values, rtol=0, atol=1e-5 * float(jnp.abs(values).max()))
