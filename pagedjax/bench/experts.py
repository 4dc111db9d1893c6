"""One layer of experts beside a dense product of the same weights, in turns of one process.

What a step must do is the products of its tokens with the weights of the experts in use, each read once. The dense
candidate is an MLP as wide as all experts in use together, for the same tokens: the same bytes of weights and at least
as much arithmetic, by XLA's products and, where the layer has them, by the native ones. `routing` is how tokens are
steered: every token to experts of its own draw, or all to the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.kernels import products
from pagedjax.models.config import ModelConfig
from pagedjax.models.experts import ExpertMlp, choose
from pagedjax.models.layers import Linear, matmul_t
from pagedjax.models.mixture import Experts
from pagedjax.testing import tiny_config

Note = Callable[[str], None]
EXPERTS = Experts(64, 8, 512, normalise=True)
WIDTH = 1024  # D: 6 MiB of float32 an expert, 384 MiB a layer
TOKENS = (1, 8, 64, 256)


def run(*, rounds: int = 15, note: Note = lambda _: None) -> list[dict[str, Any]]:
    """Measure each number of tokens, spread and all alike.

    Args:
        rounds: Times each candidate runs, in turn; the best counts.
        note: Told what is being done.

    Returns:
        Rows of seconds of the layer with the products that this device gets (`products`) and with XLA's, of the dense
        product of the experts in use (`ratio` is between the layer and the quicker of these) and of all experts, and of
        `jax.lax.ragged_dot` for the same assignments where the tokens are few.
    """
    config = replace(tiny_config(d_model=WIDTH), experts=EXPERTS)
    products.prepare("auto")
    made = products.choose("auto", jnp.dtype("float32"))
    layers = {name: _layer(config, name) for name in dict.fromkeys((made, "xla"))}
    params = _draw(nnx.to_pure_dict(nnx.split(ExpertMlp(config, jnp.dtype("float32")))[1]))
    rows = []
    for tokens in TOKENS:
        for routing in ("spread", "alike"):
            note(f"{tokens} tokens, {routing}")
            rows.append(_measure(layers, params, tokens, routing, rounds))
    return rows


def _layer(config: ModelConfig, made: str) -> Callable[..., jax.Array]:
    layer = ExpertMlp(config, jnp.dtype("float32"))
    for _, module in nnx.iter_graph(layer):
        if isinstance(module, Linear):
            module.products = made
    graph = nnx.split(layer)[0]
    return jax.jit(lambda p, x: nnx.merge(graph, p)(x))


def _draw(shapes: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / np.sqrt(leaf.shape[-1])),
        shapes,
    )


def _measure(
    layers: dict[str, Callable[..., jax.Array]],
    params: dict[str, Any],
    tokens: int,
    routing: str,
    rounds: int,
) -> dict[str, Any]:
    rng = np.random.default_rng(tokens)
    drawn = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    if routing == "alike":
        drawn[:] = drawn[0]
    x = jnp.asarray(drawn)
    ids = np.asarray(choose(matmul_t(x, params["router"]["weight"]), EXPERTS)[0])
    used = np.unique(ids)
    made, *others = layers
    candidates: dict[str, Callable[[], jax.Array]] = {
        "layer_s": lambda: layers[made](params, x),
        "dense_s": _dense(params, x, used, made),
        "all_dense_s": _dense(params, x, np.arange(EXPERTS.num_experts), made),
    }
    for other in others:
        candidates[f"layer_{other}_s"] = partial(layers[other], params, x)
        candidates[f"dense_{other}_s"] = _dense(params, x, used, other)
    if tokens <= 8:
        candidates["ragged_dot_s"] = _ragged(params, x, ids)
    seconds = {name: float("inf") for name in candidates}
    for round_ in range(rounds + 1):  # the first compiles
        for name, call in candidates.items():
            started = time.perf_counter()
            call().block_until_ready()
            if round_:
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    share = EXPERTS.share_used(tokens) if routing == "spread" else EXPERTS.share_used(1)
    return {
        "tokens": tokens,
        "routing": routing,
        "experts_used": len(used),
        "expected": round(share * EXPERTS.num_experts, 1),
        "products": made,
        **seconds,
        "ratio": seconds["layer_s"] / min(seconds["dense_s"], seconds.get("dense_xla_s", float("inf"))),
    }


def _dense(params: dict[str, Any], x: jax.Array, used: np.ndarray, made: str) -> Callable[[], jax.Array]:
    """An MLP of the given experts side by side, router included, by one implementation of the products."""
    e, F = EXPERTS, EXPERTS.d_expert
    gate, up = jnp.split(params["expert_up"]["weight"].reshape(e.num_experts, 2 * F, WIDTH)[used], 2, axis=1)
    wide = jnp.concatenate([gate.reshape(-1, WIDTH), up.reshape(-1, WIDTH)])
    down = (
        params["expert_down"]["weight"]
        .reshape(e.num_experts, WIDTH, F)[used]
        .swapaxes(0, 1)
        .reshape(WIDTH, -1)
    )

    product = partial(products.product, implementation=made)

    @jax.jit
    def mlp(router: jax.Array, wide: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(product(x, wide), 2, axis=-1)
        return product(jax.nn.silu(gate) * up, down) + choose(product(x, router), e)[1].sum()

    return lambda: mlp(params["router"]["weight"], wide, down, x)


def _ragged(params: dict[str, Any], x: jax.Array, ids: np.ndarray) -> Callable[[], jax.Array]:
    """The same products of the same assignments by jax's own operation."""
    e, F = EXPERTS, EXPERTS.d_expert
    order = np.argsort(ids.reshape(-1), kind="stable")
    sizes = jnp.asarray(np.bincount(ids.reshape(-1), minlength=e.num_experts).astype(np.int32))
    rows = x[order // e.per_token]

    @jax.jit
    def ragged(up: jax.Array, down: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        up, down = up.reshape(e.num_experts, 2 * F, WIDTH), down.reshape(e.num_experts, WIDTH, F)
        gate, wide = jnp.split(jax.lax.ragged_dot(rows, up.swapaxes(1, 2), sizes), 2, axis=-1)
        return jax.lax.ragged_dot(jax.nn.silu(gate) * wide, down.swapaxes(1, 2), sizes)

    return lambda: ragged(params["expert_up"]["weight"], params["expert_down"]["weight"], rows, sizes)
