"""Helpers for tests and examples: a tiny seeded model that needs no file."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.models.config import LatentAttention, ModelConfig

if TYPE_CHECKING:
    from pagedjax.models import LoadedModel

TINY = ModelConfig(
    family="llama",
    num_layers=2,
    d_model=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    d_mlp=80,
    vocab_size=258,
    max_model_len=512,
    rope_theta=10000.0,
    norm_eps=1e-5,
    # Tied, the likeliest next token is nearly always the last one, whatever the cache holds.
    tie_embeddings=False,
    bos_token_id=256,
    eos_token_ids=(257,),
)


def tiny_config(**changes: Any) -> ModelConfig:
    """A 2-layer Llama with 3 query heads per KV head, an output matrix of its own and the byte tokenizer's vocabulary.

    Args:
        changes: Fields of `ModelConfig` to set otherwise.
    """
    return replace(TINY, **changes)


def tiny_latent_config(q_lora_rank: int = 20, **changes: Any) -> ModelConfig:
    """The tiny model with latent attention: 6 heads over one row of 24 + 4 lanes a token.

    Args:
        q_lora_rank: 0 multiplies queries straight out of x.
        changes: Fields of `ModelConfig` to set otherwise.
    """
    latent = LatentAttention(kv_lora_rank=24, nope_dim=8, rope_dim=4, value_dim=6, q_lora_rank=q_lora_rank)
    fields = dict(family="deepseek", num_kv_heads=1, head_dim=latent.row_dim, latent=latent)
    return tiny_config(**{**fields, **changes})


def tiny_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    """Seeded random parameters in the decoder's own leaves, as numpy arrays.

    They do not depend on the jax version: drawn by numpy in float32, leaf by leaf in sorted order.
    Matrices are scaled by 1 / sqrt(fan-in), those behind attention by twice that, so that what is read from the
    cache counts beside the token's own embedding; norm scales lie around 1, and a tied output matrix is the embedding.

    Args:
        config: Shapes and switches.
        seed: Root of the random stream.
        dtype: Of the result; int8 is the float32 parameters rounded.
    """
    from pagedjax.models import abstract_params
    from pagedjax.models.weights import flat, numpy_dtype, quantised, set_leaf

    if dtype == "int8":
        return quantised(tiny_params(config, seed), config)

    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for name, leaf in flat(abstract_params(config, dtype)):
        values = rng.standard_normal(leaf.shape, np.float32)
        if name.endswith("scale"):
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values *= 0.2
        elif name.endswith("weight"):
            values *= (2 if name.endswith("out/weight") else 1) / math.sqrt(leaf.shape[-1])
        set_leaf(params, tuple(name.split("/")), values)
    if config.tie_embeddings:
        params["lm_head"]["weight"] = params["embed"]
    numpy_dtype(dtype)
    kinds = {name: np.dtype(leaf.dtype) for name, leaf in flat(abstract_params(config, dtype))}
    for name, leaf in list(flat(params)):
        set_leaf(params, tuple(name.split("/")), leaf.astype(kinds[name]))
    return params


def tiny_model(seed: int = 0, dtype: str = "float32", **changes: Any) -> LoadedModel:
    """The tiny model as `load_model` would return it, with the byte tokenizer.

    Its greedy tokens depend on all that the KV cache holds, so that equal tokens say that the cache was right.

    Args:
        seed: Of the parameters.
        dtype: Of the parameters.
        changes: Fields of `ModelConfig` to set otherwise.
    """
    import jax

    from pagedjax.models import LoadedModel
    from pagedjax.models.tokenizer import ByteTokenizer

    config = tiny_config(**changes)
    params = jax.tree.map(jax.device_put, tiny_params(config, seed, dtype))
    return LoadedModel("tiny", config, params, ByteTokenizer(), "")


def seeded_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors that depend on nothing but their names, shapes and the seed.

    Vectors whose name says norm are scales around 1 (their biases around 0), all others are drawn with a
    standard deviation of 1.2 / sqrt(last axis), so that a few layers keep signals of order one.
    """
    out = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shape, np.float32)
        if len(shape) > 1:
            values *= np.float32(1.2 / math.sqrt(shape[-1]))
        else:
            values *= np.float32(0.2)
            if name.endswith("weight"):
                values += np.float32(1)
        out[name] = values
    return out
