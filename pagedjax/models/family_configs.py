"""How each family spells its `config.json`: a Hugging Face dictionary → `ModelConfig`.

One row of `FAMILIES` per model_type: the keys it reads and the function that reads them, with the defaults of
transformers' own config classes. A key that no row reads is refused (`config_keys`), and so is a value that the
decoder lacks (partly rotated heads, scaled layers); a fact that stands in two places must be the same in both. What
several readers share is in `config_parts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedjax.models.config import LIMITS, ModelConfig, ModelError, RopeScaling, check_range
from pagedjax.models.config_keys import GENERATION, NO_EFFECT, Reader, check_keys, refuse_key
from pagedjax.models.config_parts import (
    GATED,
    WINDOWS,
    Family,
    common_fields,
    ends_of,
    no_bias,
    one_value,
    one_window,
    rope_table,
    rotary_fields,
    size_under,
    windows_of,
)
from pagedjax.models.expert_configs import EXPERT_FAMILIES
from pagedjax.models.latent_configs import LATENT_FAMILIES
from pagedjax.paths import shipped_file

WHERE = "config.json"


def read_shape(source: str | Path) -> ModelConfig:
    """The config of a model without its weights: a `config.json`, or one of `configs/shapes/` by its name.

    Raises:
        ValueError: No such file; the message lists the names.
        ModelError: It is no config of ours.
    """
    path = shipped_file("shapes", source)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: is not JSON ({error}); give a config.json") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must hold one JSON object; give a config.json")
    return config_from_hf(values)


def config_from_hf(config: Mapping[str, Any], notes: list[str] | None = None) -> ModelConfig:
    """Read the dictionary of a Hugging Face `config.json`.

    Args:
        config: The dictionary.
        notes: Takes a line for each fact that stands in two places with two values, and which one counts.

    Raises:
        ModelError: The architecture is not one of ours, a key is unknown, or a value is missing, out of range,
            or in conflict with another place that says the same.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(
            f"model_type={kind!r}: config.json must name the architecture; is this a language model?"
        )
    if kind not in FAMILIES:
        raise ModelError(
            f"model_type={kind!r}: no decoder for it; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[kind]
    check_keys(config, family.keys, WHERE, no_effect={*NO_EFFECT, *GENERATION})
    return family.read(Reader(config, WHERE, notes=notes))


# ---- families --------------------------------------------------------------------------------------------


def _llama(r: Reader) -> ModelConfig:
    bias = r.flag("attention_bias", False)
    return ModelConfig(
        **common_fields(r, "llama", ends=(1, 2)),
        **rotary_fields(r),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
    )


def _smollm3(r: Reader) -> ModelConfig:
    """SmolLM3: a Llama of which every fourth layer has no positions at all."""
    common = common_fields(r, "llama", kv_heads=4, tied=True, ends=(128000, 128001))
    num_layers, bias = common["num_layers"], r.flag("attention_bias", False)
    pattern = r.get("no_rope_layers")
    if pattern is None:
        every = r.whole("no_rope_layer_interval", 4)
        check_range("no_rope_layer_interval", every, 1, LIMITS["num_layers"])
        pattern = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(pattern, list) or any(v not in (0, 1) for v in pattern) or len(pattern) != num_layers:
        r.fail("no_rope_layers", f"must have 0 or 1 for each of {num_layers} layers")
    slides = r.flag("use_sliding_window", False)
    return ModelConfig(
        **common,
        **rotary_fields(r, 2e6),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        rope_layers=tuple(bool(v) for v in pattern),
        windows=windows_of(
            r, num_layers, r.optional_whole("sliding_window"), [slides and not v for v in pattern]
        ),
    )


def _mistral(r: Reader) -> ModelConfig:
    no_bias(r)
    common = common_fields(r, "llama", kv_heads=8, ends=(1, 2))
    window = r.optional_whole("sliding_window", 4096)
    return ModelConfig(**common, **rotary_fields(r), windows=one_window(r, common["num_layers"], window))


def _qwen_windows(r: Reader, num_layers: int) -> tuple[int | None, ...]:
    slides = r.flag("use_sliding_window", False)
    first = r.whole("max_window_layers", 28)
    size = r.optional_whole("sliding_window", 4096) if slides else None
    return windows_of(r, num_layers, size, [layer >= first for layer in range(num_layers)])


def _qwen2(r: Reader) -> ModelConfig:
    common = common_fields(r, "llama", kv_heads=32)
    if not r.flag("attention_bias", True):
        r.fail("attention_bias", "this family always has one on queries, keys and values")
    return ModelConfig(
        **common, **rotary_fields(r), qkv_bias=True, windows=_qwen_windows(r, common["num_layers"])
    )


def _qwen3(r: Reader) -> ModelConfig:
    common, bias = common_fields(r, "llama", kv_heads=32, head_dim=128), r.flag("attention_bias", False)
    return ModelConfig(
        **common,
        **rotary_fields(r),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(r, common["num_layers"]),
    )


def _phi3(r: Reader) -> ModelConfig:
    no_bias(r)
    common = common_fields(r, "phi3", eps=1e-5, ends=(1, 32000))
    name = "rope_scaling" if r.table("rope_scaling") else "rope_parameters"
    kind = r.table(name).get("rope_type", r.table(name).get("type"))
    # Its files say "su" or "yarn" where they mean LongRoPE, as transformers has it.
    rotary = _longrope(r, name) if kind in ("longrope", "su", "yarn") else rotary_fields(r)
    if rotary["rope_scaling"] is not None and rotary["rope_scaling"].kind != "longrope":
        raise ModelError(
            f"{r.where}: rope_scaling={rotary['rope_scaling'].kind!r}: this family knows only LongRoPE; "
            "use a model with that, or one that is not stretched"
        )
    windows = one_window(r, common["num_layers"], r.optional_whole("sliding_window"))
    return ModelConfig(**common, **rotary, windows=windows)


_LONGROPE = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"),
    *("short_factor", "long_factor", "original_max_position_embeddings"),
)


def _longrope(r: Reader, name: str) -> dict[str, Any]:
    """Two tables of divisors; the temperature grows with the ratio of the lengths."""
    table = r.table(name)
    for key, value in table.items():
        if key not in _LONGROPE and value is not None:
            refuse_key(f"{r.where}: {name} of type longrope", key, value, _LONGROPE)
    p = Reader(table, f"{r.where}: {name}")
    for part in (p, r):
        if part.positive("partial_rotary_factor", 1.0) != 1.0:
            part.fail("partial_rotary_factor", "must be 1: partly rotated heads are not supported")
    key, longest = "original_max_position_embeddings", r.whole("max_position_embeddings")
    inside, beside = p.get(key), r.get(key)
    r.prefer(key, beside, f"{name}.{key}", inside)
    original = (p if beside is None and inside is not None else r).whole(key, longest)
    check_range(key, original, 2, LIMITS["max_model_len"])
    factor = p.optional_positive("factor") or longest / original
    attention = p.optional_positive("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    r.prefer(f"{name}.rope_theta", p.get("rope_theta"), "rope_theta", r.get("rope_theta"))
    theta = (p if p.get("rope_theta") is not None else r).positive("rope_theta", 10000.0)
    scaling = RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=attention,
        divisors=_divisors(p, "long_factor"),
        short_divisors=_divisors(p, "short_factor"),
    )
    return dict(rope_theta=theta, rope_scaling=scaling)


def _divisors(p: Reader, key: str) -> tuple[float, ...]:
    values = p.get(key)
    numbers = isinstance(values, list) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < LIMITS["max_model_len"]
        for v in values
    )
    if not numbers:
        p.fail(key, f"must be a list of numbers below {LIMITS['max_model_len']}, one per rotated pair")
    return tuple(float(v) for v in values)


def _gemma(r: Reader, family: str) -> dict[str, Any]:
    no_bias(r)
    common = common_fields(
        r, family, kv_heads=4, head_dim=256, activation="hidden_activation", tied=True, ends=(2, 1)
    )
    if r.get("hidden_act") is not None and r.activation("hidden_act", "") != common["activation"]:
        r.fail("hidden_act", f"differs from hidden_activation, which decides ({common['activation']})")
    cap, last = (50.0, 30.0) if family == "gemma2" else (None, None)
    if family == "gemma3" and r.get("attn_logit_softcapping") is not None:
        # Its files leave it null; transformers passes over it, and a cap would be another model.
        r.fail("attn_logit_softcapping", "must be null: scores of this family are not capped")
    return common | dict(
        query_scale=r.positive("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=math.sqrt(common["d_model"]),
        post_norms=True,
        attn_soft_cap=r.optional_positive("attn_logit_softcapping", cap) or 0.0,
        logit_soft_cap=r.optional_positive("final_logit_softcapping", last) or 0.0,
    )


def _gemma2(r: Reader) -> ModelConfig:
    common = _gemma(r, "gemma2")
    layers = common["num_layers"]
    size = r.optional_whole("sliding_window", 4096)
    r.prefer("sliding_window", size, "sliding_window_size", r.get("sliding_window_size"))
    windows = windows_of(r, layers, size, [layer % 2 == 0 for layer in range(layers)])
    return ModelConfig(**common, **rotary_fields(r), windows=windows)


def _gemma3(r: Reader) -> ModelConfig:
    """Gemma 3: layers that slide rotate by a base of their own, unscaled."""
    common = _gemma(r, "gemma3")
    layers, every = common["num_layers"], r.whole("sliding_window_pattern", 6)
    check_range("sliding_window_pattern", every, 1, LIMITS["num_layers"])
    size = r.optional_whole("sliding_window", 4096)
    nested = r.table("rope_parameters")
    for key, value in nested.items():
        if key not in ("full_attention", "sliding_attention") and value is not None:
            refuse_key(f"{r.where}: rope_parameters", key, value, ("full_attention", "sliding_attention"))
    tables = Reader(nested, f"{r.where}: rope_parameters")
    full, slides = tables.table("full_attention"), tables.table("sliding_attention")
    if r.table("rope_scaling"):
        scaled = r.table("rope_scaling")
        if full and any(full.get(key, value) != value for key, value in scaled.items()):
            raise ModelError(
                f"{r.where}: rope_scaling and rope_parameters.full_attention differ: both say how positions are "
                "rotated; remove one"
            )
        full = {**full, **scaled}
    theta, scaling = rope_table(r, "rope_parameters.full_attention", full, 1e6)
    beside = {
        "max_position_embeddings": r.whole("max_position_embeddings"),
        "rope_theta": r.get("rope_local_base_freq"),
    }
    local, local_scaling = rope_table(
        Reader(beside, r.where), "rope_parameters.sliding_attention", slides, 10000.0
    )
    if local_scaling is not None:
        raise ModelError(
            f"{r.where}: rope_parameters.sliding_attention: must not be scaled; use a model whose are not"
        )
    return ModelConfig(
        **common,
        qk_norm=True,
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local,
        windows=windows_of(r, layers, size, [(layer + 1) % every != 0 for layer in range(layers)]),
    )


def _gpt2(r: Reader) -> ModelConfig:
    width = size_under(r, ("n_embd", "hidden_size"), 768)
    heads = size_under(r, ("n_head", "num_attention_heads"), 12)
    check_range("n_head", heads, 1, LIMITS["num_heads"])
    check_range("n_embd", width, 1, LIMITS["d_model"])
    if width % heads:
        r.fail("n_embd", f"must be a multiple of n_head={heads}")
    length = size_under(r, ("n_positions", "max_position_embeddings"), 1024)
    one_value(r.where, "n_positions", length, "n_ctx", r.get("n_ctx"))
    inner, vocab_size = r.optional_whole("n_inner"), r.whole("vocab_size", 50257)
    return ModelConfig(
        family="gpt2",
        num_layers=size_under(r, ("n_layer", "num_hidden_layers"), 12),
        d_model=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        d_mlp=4 * width if inner is None else inner,
        vocab_size=vocab_size,
        max_model_len=length,
        norm="layer",
        norm_eps=r.positive("layer_norm_epsilon", 1e-5),
        tie_embeddings=r.flag("tie_word_embeddings", True),
        **ends_of(r, vocab_size, 50256, 50256),
        query_scale=0.0 if r.flag("scale_attn_weights", True) else 1.0,
        positions="learned",
        activation=r.activation("activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _opt(r: Reader) -> ModelConfig:
    width, heads = r.whole("hidden_size", 768), r.whole("num_attention_heads", 12)
    check_range("num_attention_heads", heads, 1, LIMITS["num_heads"])
    if width % heads:
        r.fail("hidden_size", f"must be a multiple of num_attention_heads={heads}")
    if not r.flag("do_layer_norm_before", True):
        r.fail("do_layer_norm_before", "layers that normalise afterwards (opt-350m) are not supported")
    if r.optional_whole("word_embed_proj_dim", width) not in (None, width):
        r.fail("word_embed_proj_dim", "projected embeddings (opt-350m) are not supported")
    if not r.flag("layer_norm_elementwise_affine", True):
        r.fail("layer_norm_elementwise_affine", "norms without scales are not supported")
    if r.flag("_remove_final_layer_norm", False):
        r.fail("_remove_final_layer_norm", "a decoder without its last norm is not supported")
    bias, vocab_size = r.flag("enable_bias", True), r.whole("vocab_size", 50272)
    return ModelConfig(
        family="opt",
        num_layers=r.whole("num_hidden_layers", 12),
        d_model=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        d_mlp=r.whole("ffn_dim", 3072),
        vocab_size=vocab_size,
        max_model_len=r.whole("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,
        tie_embeddings=r.flag("tie_word_embeddings", True),
        **ends_of(r, vocab_size, 2, 2),
        positions="learned",
        activation=r.activation("activation_function", "relu"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


_GEMMA = (
    *GATED,
    *WINDOWS,
    "hidden_activation",
    "attention_bias",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_QWEN = (*GATED, *WINDOWS, "use_sliding_window", "max_window_layers", "attention_bias")
_LEARNED = (
    "model_type",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "activation_function",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
# "original_max_position_embeddings" stands beside the table in Phi-3's files, and in others that were stretched.
_ORIGINAL = "original_max_position_embeddings"

FAMILIES: dict[str, Family] = {
    **EXPERT_FAMILIES,
    "llama": Family(frozenset((*GATED, _ORIGINAL, "attention_bias", "mlp_bias")), _llama),
    "smollm3": Family(
        frozenset(
            (
                *GATED,
                *WINDOWS,
                _ORIGINAL,
                "use_sliding_window",
                "max_window_layers",  # a copy of Qwen's that nobody reads
                "no_rope_layers",
                "no_rope_layer_interval",
                "attention_bias",
                "mlp_bias",
            )
        ),
        _smollm3,
    ),
    "mistral": Family(frozenset((*GATED, *WINDOWS, _ORIGINAL, "attention_bias")), _mistral),
    "qwen2": Family(frozenset((*_QWEN, _ORIGINAL)), _qwen2),
    "qwen3": Family(frozenset((*_QWEN, _ORIGINAL)), _qwen3),
    "phi3": Family(frozenset((*GATED, *WINDOWS, _ORIGINAL, "attention_bias")), _phi3),
    "gemma2": Family(frozenset((*_GEMMA, "sliding_window_size")), _gemma2),
    "gemma3_text": Family(
        # "_sliding_window_pattern" is a copy that transformers writes beside layer_types.
        frozenset((*_GEMMA, "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")),
        _gemma3,
    ),
    "gpt2": Family(
        frozenset(
            (
                *_LEARNED,
                "n_embd",
                "n_head",
                "n_layer",
                "n_positions",
                "n_ctx",
                "n_inner",
                "layer_norm_epsilon",
                "scale_attn_weights",
            )
        ),
        _gpt2,
    ),
    "opt": Family(
        frozenset(
            (
                *_LEARNED,
                "ffn_dim",
                "do_layer_norm_before",
                "word_embed_proj_dim",
                "layer_norm_elementwise_affine",
                "_remove_final_layer_norm",
                "enable_bias",
            )
        ),
        _opt,
    ),
    **LATENT_FAMILIES,
}
