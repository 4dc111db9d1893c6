"""How each family spells its config: Hugging Face dictionaries and GGUF metadata → `ModelConfig`.

One function per family and format, in `HF` and `GGUF`. A value that would change the model's answers and
that the decoder lacks (experts, partly rotated heads, scaled layers) is refused, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedjax.models.config import ACTIVATIONS, LIMITS, ModelConfig, ModelError, RopeScaling, check_range
from pagedjax.paths import shipped_file


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


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the dictionary of a Hugging Face `config.json`.

    Raises:
        ModelError: The architecture is not one of ours, or a value is missing or out of range.
    """
    family = _str(config, "model_type", "config.json")
    if family not in HF:
        raise ModelError(f"model_type={family!r}: no decoder for it; supported are {', '.join(sorted(HF))}")
    return HF[family](_Reader(config, "config.json"))


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file (key → plain value).

    Raises:
        ModelError: The architecture is not one of ours, or a value is missing or out of range.
    """
    arch = _str(metadata, "general.architecture", "GGUF metadata")
    if arch not in GGUF:
        raise ModelError(
            f"general.architecture={arch!r}: no decoder for it; supported are {', '.join(sorted(GGUF))}"
        )
    return GGUF[arch](_Reader(metadata, "GGUF metadata", prefix=f"{arch}."))


def _str(mapping: Mapping[str, Any], key: str, where: str) -> str:
    value = mapping.get(key)
    if not isinstance(value, str):
        raise ModelError(f"{key}={value!r}: {where} must name the architecture; is this a language model?")
    return value


class _Reader:
    """Typed look-ups in an outside mapping; a wrong type is an error that names the key."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(
                f"{self.prefix}{key}={value!r}: {self.where} must give a whole number; check the file"
            )
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self.prefix}{key}={value!r}: {self.where} must give a number; check the file")
        return float(value)

    def bool(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(
                f"{self.prefix}{key}={value!r}: {self.where} must say true or false; check the file"
            )
        return value

    def activation(self, default: str) -> str:
        names = [self.get(key) for key in ("hidden_activation", "hidden_act", "activation_function")]
        name = next((n for n in names if n is not None), default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise ModelError(f"activation {name!r}: must be one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


def _token_ids(value: Any, key: str) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{key}={value!r}: must be a token id or a list of them; check the file")
    return ids


def _hf_rope(r: _Reader, base: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from either spelling: rope_theta + rope_scaling, or rope_parameters."""
    params = r.get("rope_parameters") or r.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ModelError(f"rope_scaling={params!r}: must be a table; check config.json")
    p = _Reader(params, "rope_scaling")
    theta = p.float("rope_theta", r.float("rope_theta", base))
    kind = p.get("rope_type", p.get("type", "default"))
    if kind == "default":
        return theta, None
    original = p.int("original_max_position_embeddings", r.int("max_position_embeddings"))
    attention = p.get("attention_factor")
    return theta, RopeScaling(
        kind=str(kind),
        factor=p.float("factor"),
        original_len=original,
        low_freq_factor=p.float("low_freq_factor", 1.0),
        high_freq_factor=p.float("high_freq_factor", 4.0),
        beta_fast=p.float("beta_fast", 32.0),
        beta_slow=p.float("beta_slow", 1.0),
        attention_factor=0.0 if attention is None else p.float("attention_factor"),
        truncate=p.bool("truncate", True),
    )


def _hf_common(r: _Reader, family: str, activation: str = "silu", rope: bool = True) -> dict[str, Any]:
    """The fields that every rotary, gated family spells alike; rope=False leaves the base to the caller."""
    num_heads, d_model = r.int("num_attention_heads"), r.int("hidden_size")
    check_range("num_attention_heads", num_heads, 1, LIMITS["num_heads"])
    theta, scaling = _hf_rope(r) if rope else (10000.0, None)
    bos = _token_ids(r.get("bos_token_id"), "bos_token_id")
    return dict(
        family=family,
        num_layers=r.int("num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=r.int("num_key_value_heads", num_heads),
        head_dim=r.int("head_dim", d_model // num_heads),
        d_mlp=r.int("intermediate_size"),
        vocab_size=r.int("vocab_size"),
        max_model_len=r.int("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=r.float("rms_norm_eps", 1e-6),
        activation=r.activation(activation),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_token_ids(r.get("eos_token_id"), "eos_token_id"),
    )


def _hf_llama(r: _Reader) -> ModelConfig:
    bias = r.bool("attention_bias", False)
    return ModelConfig(
        **_hf_common(r, "llama"),
        tie_embeddings=r.bool("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=r.bool("mlp_bias", False),
    )


def _hf_smollm3(r: _Reader) -> ModelConfig:
    """SmolLM3: a Llama of which every fourth layer has no positions at all."""
    config = replace(_hf_llama(r), tie_embeddings=r.bool("tie_word_embeddings", True))
    pattern = r.get("no_rope_layers")
    if pattern is None:
        every = r.int("no_rope_layer_interval", 4)
        check_range("no_rope_layer_interval", every, 1, LIMITS["num_layers"])
        pattern = [(layer + 1) % every != 0 for layer in range(config.num_layers)]
    if not isinstance(pattern, list) or any(v not in (0, 1) for v in pattern):
        raise ModelError(f"no_rope_layers={pattern!r}: must be a list of 0 and 1; check config.json")
    return replace(
        config,
        rope_layers=tuple(bool(v) for v in pattern),
        windows=_hf_windows(r, config.num_layers, lambda layer: bool(r.bool("use_sliding_window", False))),
    )


def _hf_windows(r: _Reader, num_layers: int, windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types where the file lists them, else by the family's own rule."""
    size, kinds = r.get("sliding_window"), r.get("layer_types")
    check_range("num_layers", num_layers, 1, LIMITS["num_layers"])
    if kinds is None:
        kinds = [
            "sliding_attention" if size is not None and windowed(layer) else "full_attention"
            for layer in range(num_layers)
        ]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or any(k not in known for k in kinds):
        raise ModelError(f"layer_types={kinds!r}: must be a list of {' and '.join(known)}; check config.json")
    if "sliding_attention" not in kinds:
        return ()
    width = r.int("sliding_window")
    check_range("sliding_window", width, 1, LIMITS["max_model_len"])
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def _hf_mistral(r: _Reader) -> ModelConfig:
    common = _hf_common(r, "llama")
    return ModelConfig(
        **common,
        tie_embeddings=r.bool("tie_word_embeddings", False),
        windows=_hf_windows(r, common["num_layers"], lambda layer: True),
    )


def _hf_qwen2(r: _Reader) -> ModelConfig:
    common = _hf_common(r, "llama")
    return ModelConfig(
        **common,
        tie_embeddings=r.bool("tie_word_embeddings", False),
        qkv_bias=True,
        windows=_qwen_windows(r, common["num_layers"]),
    )


def _hf_qwen3(r: _Reader) -> ModelConfig:
    common, bias = _hf_common(r, "llama"), r.bool("attention_bias", False)
    if r.get("head_dim") is None:
        common["head_dim"] = 128
    return ModelConfig(
        **common,
        tie_embeddings=r.bool("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(r, common["num_layers"]),
    )


def _qwen_windows(r: _Reader, num_layers: int) -> tuple[int | None, ...]:
    if not r.bool("use_sliding_window", False):
        return ()
    first = r.int("max_window_layers", num_layers)
    return _hf_windows(r, num_layers, lambda layer: layer >= first)


def _hf_phi3(r: _Reader) -> ModelConfig:
    if r.float("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor={r.get('partial_rotary_factor')}: must be 1; partly rotated heads are "
            "not supported"
        )
    common = _hf_common(r, "phi3")
    return ModelConfig(
        **common,
        tie_embeddings=r.bool("tie_word_embeddings", False),
        windows=_hf_windows(r, common["num_layers"], lambda layer: True),
    )


def _hf_gemma2(r: _Reader) -> ModelConfig:
    common = _hf_gemma_common(r, "gemma2")
    return ModelConfig(
        **common,
        attn_soft_cap=r.float("attn_logit_softcapping", 0.0),
        logit_soft_cap=r.float("final_logit_softcapping", 0.0),
        windows=_hf_windows(r, common["num_layers"], lambda layer: layer % 2 == 0),
    )


def _hf_gemma3(r: _Reader) -> ModelConfig:
    common = _hf_gemma_common(r, "gemma3")
    every = r.int("sliding_window_pattern", 6)
    check_range("sliding_window_pattern", every, 1, LIMITS["num_layers"])
    if r.bool("use_bidirectional_attention", False):
        raise ModelError("use_bidirectional_attention=True: decoders see only the past; use a decoder model")
    rope = r.get("rope_parameters", {})
    local = r.float("rope_local_base_freq", 10000.0)
    if isinstance(rope, Mapping) and "full_attention" in rope:  # one table per kind of layer
        full, sliding = rope["full_attention"], rope.get("sliding_attention", {})
        table = _Reader({**r.values, "rope_parameters": full}, r.where)
        common["rope_theta"], common["rope_scaling"] = _hf_rope(table, 1e6)
        local, scaled = _hf_rope(_Reader({**r.values, "rope_parameters": sliding}, r.where), local)
        if scaled is not None:
            raise ModelError("rope_parameters of sliding layers: must not be scaled; check config.json")
    else:
        common["rope_theta"], common["rope_scaling"] = _hf_rope(r, 1e6)
    return ModelConfig(
        **common,
        qk_norm=True,
        attn_soft_cap=r.float("attn_logit_softcapping", 0.0),
        logit_soft_cap=r.float("final_logit_softcapping", 0.0),
        windows=_hf_windows(r, common["num_layers"], lambda layer: (layer + 1) % every != 0),
        local_rope_theta=local,
    )


def _hf_gemma_common(r: _Reader, family: str) -> dict[str, Any]:
    if r.bool("attention_bias", False):
        raise ModelError("attention_bias=True: this family has none here; check config.json")
    common = _hf_common(r, family, activation="gelu_tanh", rope=family != "gemma3")
    check_range("hidden_size", common["d_model"], 1, LIMITS["d_model"])
    scalar = r.float("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise ModelError(f"query_pre_attn_scalar={scalar}: must be positive; check config.json")
    common |= dict(
        head_dim=r.int("head_dim", 256),
        query_scale=scalar**-0.5,
        embed_scale=math.sqrt(common["d_model"]),
        post_norms=True,
        tie_embeddings=r.bool("tie_word_embeddings", True),
    )
    return common


def _hf_gpt2(r: _Reader) -> ModelConfig:
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if r.bool(key, False):
            raise ModelError(f"{key}=True: not supported; use a plain GPT-2")
    width, heads = r.int("n_embd", 768), r.int("n_head", 12)
    check_range("n_head", heads, 1, LIMITS["num_heads"])
    bos = _token_ids(r.get("bos_token_id"), "bos_token_id")
    return ModelConfig(
        family="gpt2",
        num_layers=r.int("n_layer", 12),
        d_model=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        d_mlp=r.int("n_inner", 4 * width),
        vocab_size=r.int("vocab_size"),
        max_model_len=r.int("n_positions", 1024),
        norm="layer",
        norm_eps=r.float("layer_norm_epsilon", 1e-5),
        tie_embeddings=r.bool("tie_word_embeddings", True),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_token_ids(r.get("eos_token_id"), "eos_token_id"),
        positions="learned",
        activation=r.activation("gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _hf_opt(r: _Reader) -> ModelConfig:
    width, heads = r.int("hidden_size"), r.int("num_attention_heads")
    check_range("num_attention_heads", heads, 1, LIMITS["num_heads"])
    if not r.bool("do_layer_norm_before", True) or r.int("word_embed_proj_dim", width) != width:
        raise ModelError(
            "do_layer_norm_before=False or word_embed_proj_dim: this size normalises after each layer and "
            "projects its embedding (opt-350m does); use another size"
        )
    if not r.bool("layer_norm_elementwise_affine", True) or r.bool("_remove_final_layer_norm", False):
        raise ModelError("layer_norm_elementwise_affine, _remove_final_layer_norm: must be as published")
    bias = r.bool("enable_bias", True)
    bos = _token_ids(r.get("bos_token_id"), "bos_token_id")
    return ModelConfig(
        family="opt",
        num_layers=r.int("num_hidden_layers"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        d_mlp=r.int("ffn_dim"),
        vocab_size=r.int("vocab_size"),
        max_model_len=r.int("max_position_embeddings"),
        norm="layer",
        norm_eps=1e-5,
        tie_embeddings=r.bool("tie_word_embeddings", True),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_token_ids(r.get("eos_token_id"), "eos_token_id"),
        positions="learned",
        activation=r.activation("relu"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


def _gguf_vocab(r: _Reader) -> int:
    tokens = r.values.get("tokenizer.ggml.tokens")
    return r.int("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _gguf_eos(r: _Reader) -> tuple[int, ...]:
    """End of text and, where the file names one, end of turn."""
    found: dict[int, None] = {}
    for key in ("eos", "eot", "eom"):
        name = f"tokenizer.ggml.{key}_token_id"
        found.update(dict.fromkeys(_token_ids(r.values.get(name), name)))
    return tuple(found)


def _gguf_rope_scaling(r: _Reader) -> RopeScaling | None:
    kind = r.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return RopeScaling(
        kind=str(kind),
        factor=r.float("rope.scaling.factor"),
        original_len=r.int("rope.scaling.original_context_length", r.int("context_length")),
        attention_factor=r.float("rope.scaling.attn_factor", 0.0),
    )


def _gguf_common(r: _Reader, family: str) -> dict[str, Any]:
    num_heads, d_model = r.int("attention.head_count"), r.int("embedding_length")
    check_range("attention.head_count", num_heads, 1, LIMITS["num_heads"])
    head_dim = r.int("attention.key_length", d_model // num_heads)
    if r.int("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{r.prefix}rope.dimension_count={r.int('rope.dimension_count')}: must equal the head dim "
            f"({head_dim}); partly rotated heads are not supported"
        )
    bos = _token_ids(r.values.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")
    return dict(
        family=family,
        num_layers=r.int("block_count"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=r.int("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_mlp=r.int("feed_forward_length"),
        vocab_size=_gguf_vocab(r),
        max_model_len=r.int("context_length"),
        rope_theta=r.float("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(r),
        norm_eps=r.float("attention.layer_norm_rms_epsilon"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_gguf_eos(r),
    )


def _gguf_llama(r: _Reader) -> ModelConfig:
    if r.int("expert_count", 0):
        raise ModelError(
            f"{r.prefix}expert_count={r.int('expert_count')}: mixtures of experts are not supported"
        )
    # GGUF has no key for tying: the file leaves the output matrix out, and the loader looks.
    return ModelConfig(**_gguf_common(r, "llama"), tie_embeddings=True)


def _gguf_smollm3(r: _Reader) -> ModelConfig:
    config = _gguf_llama(r)
    return replace(config, rope_layers=tuple((layer + 1) % 4 != 0 for layer in range(config.num_layers)))


def _gguf_qwen2(r: _Reader) -> ModelConfig:
    return ModelConfig(**_gguf_common(r, "qwen"), tie_embeddings=True, qkv_bias=True)


def _gguf_qwen3(r: _Reader) -> ModelConfig:
    return ModelConfig(**_gguf_common(r, "qwen"), tie_embeddings=True, qk_norm=True)


HF: dict[str, Callable[[_Reader], ModelConfig]] = {
    "llama": _hf_llama,
    "smollm3": _hf_smollm3,
    "mistral": _hf_mistral,
    "qwen2": _hf_qwen2,
    "qwen3": _hf_qwen3,
    "phi3": _hf_phi3,
    "gemma2": _hf_gemma2,
    "gemma3_text": _hf_gemma3,
    "gpt2": _hf_gpt2,
    "opt": _hf_opt,
}
GGUF: dict[str, Callable[[_Reader], ModelConfig]] = {
    "llama": _gguf_llama,
    "smollm3": _gguf_smollm3,
    "qwen2": _gguf_qwen2,
    "qwen3": _gguf_qwen3,
}
