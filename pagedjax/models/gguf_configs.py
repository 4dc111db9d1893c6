"""What the metadata of a GGUF file says of a model: → `ModelConfig`.

One row of `ARCHITECTURES` per general.architecture. A key of the architecture's own that no row reads is refused,
as in `family_configs`; what stands under `general.` and `tokenizer.` is named in tables of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedjax.models.config import (
    LIMITS,
    LatentAttention,
    ModelConfig,
    ModelError,
    RopeScaling,
    check_range,
)
from pagedjax.models.config_keys import Reader, refuse_key
from pagedjax.models.mixture import Experts

WHERE = "GGUF metadata"

# Under general.: what a file says about itself. Only these of them change what is computed.
_GENERAL = ("general.architecture", "general.alignment", "general.type")
# general.sampling.* are read by `generation`; everything else is about authors, licences and files.
_ABOUT = re.compile(
    r"general\.(name|author|version|organization|description|finetune|basename|size_label|quantized_by|license(\..*)?"
    r"|url|doi|uuid|repo_url|file_type|quantization_version|source\..*|base_model\..*|dataset\..*|datasets|tags"
    r"|languages|sampling\..*|repo|model_card.*)"
)
# Other tools' notes: what the quantiser measured, how a file was split, copies of other formats.
_NOTES = re.compile(r"quantize\.imatrix\..*|mradermacher\..*|imatrix\..*|split\.(no|count|tensors\.count)")

_SCALING = "rope.scaling."
_COMMON = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    f"{_SCALING}type",
    f"{_SCALING}factor",
    f"{_SCALING}attn_factor",
    f"{_SCALING}original_context_length",
    f"{_SCALING}yarn_beta_fast",
    f"{_SCALING}yarn_beta_slow",
    f"{_SCALING}yarn_ext_factor",
    f"{_SCALING}yarn_attn_factor",
    f"{_SCALING}yarn_log_multiplier",
    "vocab_size",
    "attention.causal",
    "attention.sliding_window",
)
# Written by converters and read by no loader of these architectures.
_NO_EFFECT = (f"{_SCALING}finetuned", "tensor_data_layout")


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file (key → plain value).

    The vocabulary's length and the ends of text stand in the tokenizer's part; `tokenizer_from_gguf` checks that.

    Raises:
        ModelError: The architecture is not one of ours, a key is unknown, or a value is missing or out of range.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(
            f"general.architecture={arch!r}: the file must name the architecture; is this a language model?"
        )
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"general.architecture={arch!r}: no decoder for it; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"general.type={kind!r}: must be 'model'; give the GGUF file of a language model")
    row = ARCHITECTURES[arch]
    known = {f"{arch}.{key}" for key in (*_COMMON, *_NO_EFFECT, *row.keys)}
    for key, value in metadata.items():
        if key in known or key in _GENERAL or key.startswith("tokenizer."):
            continue
        if not _ABOUT.fullmatch(key) and not _NOTES.fullmatch(key):
            refuse_key(WHERE, key, value, known)
    return row.read(Reader(metadata, WHERE, prefix=f"{arch}."))


def _vocab_size(r: Reader) -> int:
    tokens = r.values.get("tokenizer.ggml.tokens")
    size = r.whole("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    check_range("vocab_size", size, 1, LIMITS["vocab_size"])
    return size


def _rope_scaling(r: Reader, log_multiplier: float = 0.0) -> RopeScaling | None:
    """As llama.cpp reads it: a factor without a type is linear, a type "none" switches the factor off.

    Args:
        log_multiplier: Of architectures that put yarn's temperature on the scores, and not on cos and sin.
    """
    kind = r.get(f"{_SCALING}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        r.fail(f"{_SCALING}type", "must be none, linear or yarn; others are not supported")
    factor = r.number(f"{_SCALING}factor", r.number("rope.scale_linear", 0.0))
    attention = r.positive(f"{_SCALING}attn_factor", 1.0) * r.positive(f"{_SCALING}yarn_attn_factor", 1.0)
    if kind != "yarn":
        if attention != 1.0:
            r.fail(f"{_SCALING}attn_factor", "must be 1 without yarn")
        return (
            None
            if kind == "none" or factor in (0.0, 1.0)
            else RopeScaling(kind, factor, r.whole("context_length"))
        )
    if r.number(f"{_SCALING}yarn_ext_factor", 1.0) != 1.0:
        r.fail(f"{_SCALING}yarn_ext_factor", "must be 1")
    if r.number(f"{_SCALING}yarn_log_multiplier", 0.0) != log_multiplier:
        r.fail(f"{_SCALING}yarn_log_multiplier", f"must be {log_multiplier:g}")
    factor = r.positive(f"{_SCALING}factor")
    original = r.whole(f"{_SCALING}original_context_length", r.whole("context_length"))
    # llama.cpp multiplies its factor with YaRN's own.
    own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=r.positive(f"{_SCALING}yarn_beta_fast", 32.0),
        beta_slow=r.positive(f"{_SCALING}yarn_beta_slow", 1.0),
        attention_factor=1.0 if log_multiplier else 0.0 if attention == 1.0 else own * attention,
    )


def _same(r: Reader, key: str, value: int, meaning: str) -> None:
    if r.whole(key, value) != value:
        r.fail(key, f"must be {value}: {meaning}")


def _num_heads(r: Reader) -> int:
    num_heads = r.whole("attention.head_count")
    check_range("attention.head_count", num_heads, 1, LIMITS["num_heads"])
    return num_heads


def _read(
    r: Reader, family: str, *, slides: bool = False, row_dim: int = 0, log_multiplier: float = 0.0
) -> dict[str, Any]:
    """The fields that all architectures share.

    Args:
        family: Row of weight names.
        slides: Its layers have a window.
        row_dim: Not 0: lanes of the one latent row that a token keeps, in place of keys and values a head.
        log_multiplier: Of `_rope_scaling`.
    """
    num_heads, d_model = _num_heads(r), r.whole("embedding_length")
    check_range("embedding_length", d_model, 1, LIMITS["d_model"])
    num_layers, vocab_size = r.whole("block_count"), _vocab_size(r)
    check_range("block_count", num_layers, 1, LIMITS["num_layers"])
    head_dim = row_dim or r.whole("attention.key_length", d_model // num_heads)
    if not row_dim:
        check_range("attention.key_length", head_dim, 1, LIMITS["head_dim"])
        _same(r, "attention.value_length", head_dim, "values are as wide as keys here")
        _same(r, "rope.dimension_count", head_dim, "partly rotated heads are not supported")
    if not slides:
        _same(r, "attention.sliding_window", 0, "layers of this architecture do not slide")
    if not r.flag("attention.causal", True):
        r.fail("attention.causal", "decoders see only the past")
    return dict(
        family=family,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=1 if row_dim else r.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_mlp=r.whole("feed_forward_length"),
        vocab_size=vocab_size,
        max_model_len=r.whole("context_length"),
        rope_theta=r.positive("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(r, log_multiplier),
        norm_eps=r.positive("attention.layer_norm_rms_epsilon"),
    )


def _experts(r: Reader, width: str, *, normalise: bool, **how: Any) -> Experts:
    """The experts of a file; what llama.cpp does by the architecture is told, what it reads must agree with it."""
    if r.get("expert_weights_norm") is not None and r.flag("expert_weights_norm", normalise) != normalise:
        r.fail("expert_weights_norm", f"must be {normalise}, as this architecture has it")
    scale = r.number("expert_weights_scale", 0.0)
    if scale not in (0.0, 1.0):
        r.fail("expert_weights_scale", "must be 1 in this architecture")
    _same(r, "expert_shared_count", 0, "this architecture shares none")
    d_expert = r.whole(width)
    _same(
        r, "expert_feed_forward_length", d_expert, f"experts of this architecture are as wide as {width} says"
    )
    return Experts(
        r.whole("expert_count"), r.whole("expert_used_count"), d_expert, normalise=normalise, **how
    )


def _llama(r: Reader) -> ModelConfig:
    # GGUF has no key for tying: the file leaves the output matrix out, and the loader looks.
    experts = None
    if r.whole("expert_count", 0):  # Mixtral
        experts = _experts(r, "feed_forward_length", normalise=True)
    return ModelConfig(**_read(r, "llama"), tie_embeddings=True, experts=experts)


def _smollm3(r: Reader) -> ModelConfig:
    config = _llama(r)
    return replace(config, rope_layers=tuple((layer + 1) % 4 != 0 for layer in range(config.num_layers)))


def _qwen2(r: Reader) -> ModelConfig:
    return ModelConfig(**_read(r, "qwen"), tie_embeddings=True, qkv_bias=True)


def _qwen3(r: Reader) -> ModelConfig:
    return ModelConfig(**_read(r, "qwen"), tie_embeddings=True, qk_norm=True)


def _qwen3moe(r: Reader) -> ModelConfig:
    experts = _experts(r, "expert_feed_forward_length", normalise=True)
    return ModelConfig(**_read(r, "qwen"), tie_embeddings=True, qk_norm=True, experts=experts)


def _olmoe(r: Reader) -> ModelConfig:
    experts = _experts(r, "feed_forward_length", normalise=False)
    return ModelConfig(
        **_read(r, "qwen"), tie_embeddings=True, qk_norm=True, qk_norm_whole=True, experts=experts
    )


def _gpt_oss(r: Reader) -> ModelConfig:
    read = _read(r, "gpt_oss", slides=True)
    experts = _experts(
        r,
        "expert_feed_forward_length",
        normalise=False,
        routing="softmax-of-chosen",
        router_bias=True,
        expert_bias=True,
        clamp=7.0,
    )
    if read["rope_scaling"] is not None:  # the model's own edges are not rounded
        read["rope_scaling"] = replace(read["rope_scaling"], truncate=False)
    return ModelConfig(
        **read | dict(d_mlp=experts.d_expert),
        tie_embeddings=True,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        windows=_sliding(r, read["num_layers"], 2),
        experts=experts,
    )


def _sliding(r: Reader, num_layers: int, every: int) -> tuple[int | None, ...]:
    """The window of each layer, where all but each `every`-th slide."""
    size = r.whole("attention.sliding_window")
    if size == 0:
        return ()
    return tuple(None if (layer + 1) % every == 0 else size for layer in range(num_layers))


def _gemma(r: Reader, family: str, largest: int, every: int) -> dict[str, Any]:
    """Gemma 2 and 3; the largest, known by its number of layers, scales scores by lanes of the model a head."""
    read = _read(r, family, slides=True)
    lanes = read["d_model"] // read["num_heads"] if read["num_layers"] == largest else read["head_dim"]
    check_range("embedding_length over attention.head_count", lanes, 1, LIMITS["head_dim"])
    return read | dict(
        tie_embeddings=True,
        activation="gelu_tanh",
        post_norms=True,
        embed_scale=math.sqrt(read["d_model"]),
        query_scale=lanes**-0.5,
        windows=_sliding(r, read["num_layers"], every),
    )


def _gemma2(r: Reader) -> ModelConfig:
    return ModelConfig(
        **_gemma(r, "gemma2", 46, 2),
        attn_soft_cap=r.positive("attn_logit_softcapping", 50.0),
        logit_soft_cap=r.positive("final_logit_softcapping", 30.0),
    )


def _gemma3(r: Reader) -> ModelConfig:
    read = _gemma(r, "gemma3", 62, 6)
    cap = r.number("final_logit_softcapping", 0.0)
    return ModelConfig(
        **read,
        qk_norm=True,
        logit_soft_cap=cap,
        local_rope_theta=r.positive("rope.freq_base_swa", 10000.0),
    )


def _latent(r: Reader) -> LatentAttention:
    """Widths of latent attention, as converters wrote them before and after they told latent and head apart."""
    num_heads, rank, rope = _num_heads(r), r.whole("attention.kv_lora_rank"), r.whole("rope.dimension_count")
    if r.get("attention.key_length_mla") is None and r.get("attention.value_length_mla") is None:
        query, value = r.whole("attention.key_length"), r.whole("attention.value_length")
        _same(r, "attention.head_count_kv", num_heads, "every head has keys of its own")
    else:
        query, value = r.whole("attention.key_length_mla"), r.whole("attention.value_length_mla")
        _same(r, "attention.head_count_kv", 1, "all heads share the latent row")
        _same(r, "attention.key_length", rank + rope, "a row is the latent and the rotated key")
        _same(r, "attention.value_length", rank, "values are the latent")
    return LatentAttention(
        kv_lora_rank=rank,
        nope_dim=query - rope,
        rope_dim=rope,
        value_dim=value,
        q_lora_rank=r.whole("attention.q_lora_rank", 0),
    )


# DeepSeek models of up to so many experts choose among all of them; files of larger ones must say their groups.
_UNGROUPED = 64


def _deepseek_experts(r: Reader) -> Experts | None:
    layers, dense = r.whole("block_count"), r.whole("leading_dense_block_count", 0)
    check_range("block_count", layers, 1, LIMITS["num_layers"])
    check_range("leading_dense_block_count", dense, 0, LIMITS["num_layers"])
    if dense >= layers:
        return None
    count = r.whole("expert_count")
    gates = {1: "softmax", 2: "sigmoid"}
    gate = r.whole("expert_gating_func", 1)
    if gate not in gates:
        r.fail("expert_gating_func", "must be 1 (softmax) or 2 (sigmoid)")
    if r.get("expert_group_count") is None and count > _UNGROUPED:
        r.fail(
            "expert_group_count",
            f"must be given where expert_count={count}: large models choose within groups, and older converters left "
            "the number out; convert the file again",
        )
    groups = r.whole("expert_group_count", 1) or 1
    width = r.whole("expert_feed_forward_length")
    sigmoid = gates[gate] == "sigmoid"
    return Experts(
        count,
        r.whole("expert_used_count"),
        width,
        layers=tuple(layer >= dense for layer in range(layers)) if dense else (),
        routing=gates[gate],
        normalise=r.flag("expert_weights_norm", False),
        scale=r.number("expert_weights_scale", 0.0) or 1.0,
        choice_bias=sigmoid,
        num_groups=groups,
        groups_per_token=r.whole("expert_group_used_count") if groups > 1 else 1,
        # As DeepSeek-V2 and V3 do; llama.cpp adds up the best two for both.
        group_score="best-two" if sigmoid else "best",
        d_shared=width * r.whole("expert_shared_count", 0),
    )


def _deepseek2(r: Reader) -> ModelConfig:
    latent, log_multiplier = _latent(r), r.number(f"{_SCALING}yarn_log_multiplier", 0.0)
    read = _read(r, "deepseek", row_dim=latent.row_dim, log_multiplier=log_multiplier)
    scaling = read["rope_scaling"]
    temperature = 1.0
    if scaling is not None:
        if scaling.kind != "yarn" or log_multiplier <= 0.0:
            r.fail(
                f"{_SCALING}yarn_log_multiplier",
                f"must be above 0 beside {scaling.kind} scaling by {scaling.factor:g}, and the scaling yarn: it says "
                "how scores are scaled; convert the file again",
            )
        for key in ("attn_factor", "yarn_attn_factor"):
            if r.number(f"{_SCALING}{key}", 1.0) != 1.0:
                r.fail(f"{_SCALING}{key}", "must be 1 in this architecture")
        temperature = 1.0 + log_multiplier * math.log(max(scaling.factor, 1.0))
    return ModelConfig(
        **read,
        tie_embeddings=True,
        latent=latent,
        experts=_deepseek_experts(r),
        query_scale=latent.query_dim**-0.5 * temperature**2,
    )


@dataclass(frozen=True)
class Architecture:
    """What a general.architecture reads.

    Attributes:
        read: Makes the config.
        keys: That it reads beside the common ones.
    """

    read: Callable[[Reader], ModelConfig]
    keys: tuple[str, ...] = ()


_EXPERTS = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_shared_count",
)

_LATENT = (
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "leading_dense_block_count",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, _EXPERTS),
    "smollm3": Architecture(_smollm3),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3moe, _EXPERTS),
    "olmoe": Architecture(_olmoe, _EXPERTS),
    "gpt-oss": Architecture(_gpt_oss, _EXPERTS),
    "deepseek2": Architecture(_deepseek2, (*_EXPERTS, *_LATENT)),
    "gemma2": Architecture(_gemma2, ("attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": Architecture(_gemma3, ("final_logit_softcapping", "rope.freq_base_swa")),
}
