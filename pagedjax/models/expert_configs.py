"""How families of experts spell their `config.json`, with the defaults of transformers' config classes.

`deepseek_experts` reads the experts' part of DeepSeek's files, whose attention `latent_configs` reads.
"""

from __future__ import annotations

from typing import Any

from pagedjax.models.config import LIMITS, ModelConfig, check_range
from pagedjax.models.config_keys import Reader
from pagedjax.models.config_parts import (
    GATED,
    WINDOWS,
    Family,
    common_fields,
    no_bias,
    one_value,
    one_window,
    rotary_fields,
    size_under,
    windows_of,
)
from pagedjax.models.mixture import Experts

# Of training, or of what a transformers call returns: they change no answer.
_ROUTER_NOTES = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")


def _count(r: Reader, default: int) -> int:
    return size_under(r, ("num_experts", "num_local_experts"), default)


def _mixtral(r: Reader) -> ModelConfig:
    no_bias(r)
    common = common_fields(r, "mixtral", kv_heads=8, eps=1e-5, ends=(1, 2))
    experts = Experts(_count(r, 8), r.whole("num_experts_per_tok", 2), common["d_mlp"], normalise=True)
    window = r.optional_whole("sliding_window")
    windows = one_window(r, common["num_layers"], window)
    return ModelConfig(**common, **rotary_fields(r, 1e6), windows=windows, experts=experts)


def _qwen3_moe(r: Reader) -> ModelConfig:
    common, bias = common_fields(r, "llama", kv_heads=4), r.flag("attention_bias", False)
    layers, every = common["num_layers"], r.whole("decoder_sparse_step", 1)
    check_range("decoder_sparse_step", every, 1, LIMITS["num_layers"])
    dense = r.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < layers for i in dense):
        r.fail("mlp_only_layers", f"must be numbers of layers below {layers}")
    count = _count(r, 128)
    sparse = tuple(i not in dense and count > 0 and (i + 1) % every == 0 for i in range(layers))
    experts = None
    if any(sparse):
        experts = Experts(
            count,
            r.whole("num_experts_per_tok", 8),
            r.whole("moe_intermediate_size", 768),
            layers=() if all(sparse) else sparse,
            normalise=r.flag("norm_topk_prob", False),
        )
    # transformers drops the window where use_sliding_window is off, and slides in every layer where it is on.
    size = r.optional_whole("sliding_window", 4096) if r.flag("use_sliding_window", False) else None
    return ModelConfig(
        **common,
        **rotary_fields(r),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=one_window(r, layers, size),
        experts=experts,
    )


def _olmoe(r: Reader) -> ModelConfig:
    common, bias = common_fields(r, "llama", eps=1e-5, ends=(None, 50279)), r.flag("attention_bias", False)
    if r.get("clip_qkv") is not None:
        r.fail("clip_qkv", "must be null: queries, keys and values that are cut off are not supported")
    if common["head_dim"] * common["num_heads"] != common["d_model"]:
        r.fail(
            "head_dim",
            "must be hidden_size over num_attention_heads: queries are normed over hidden_size lanes",
        )
    experts = Experts(
        _count(r, 64),
        r.whole("num_experts_per_tok", 8),
        common["d_mlp"],
        normalise=r.flag("norm_topk_prob", False),
    )
    return ModelConfig(
        **common,
        **rotary_fields(r),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        qk_norm_whole=True,
        experts=experts,
    )


_OSS_ROPE = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


def _gpt_oss(r: Reader) -> ModelConfig:
    """gpt-oss: sinks, every other layer slides, experts with biases whose gate and up are cut off."""
    common = common_fields(r, "gpt_oss", kv_heads=8, head_dim=64, eps=1e-5)
    layers, bias = common["num_layers"], r.flag("attention_bias", True)
    if common["activation"] != "silu":
        r.fail("hidden_act", "must be silu: experts of this family have no other gate")
    experts = Experts(
        _count(r, 128),
        size_under(r, ("num_experts_per_tok", "experts_per_token"), 4),
        common["d_mlp"],
        routing="softmax-of-chosen",
        router_bias=True,
        expert_bias=True,
        clamp=r.positive("swiglu_limit", 7.0),
        alpha=r.positive("swiglu_alpha", 1.702),
    )
    where = r
    if not r.table("rope_scaling") and not r.table("rope_parameters"):
        where = Reader({**r.values, "rope_scaling": _OSS_ROPE}, r.where, notes=r.notes)
    # A copy of the length before stretching, which the rope table gives as well.
    original = r.get("initial_context_length")
    rotary = rotary_fields(where, 150000.0)
    if original is not None and rotary["rope_scaling"] is not None:
        one_value(
            r.where,
            "initial_context_length",
            original,
            "the original length of rope_scaling",
            rotary["rope_scaling"].original_len,
        )
    size = r.optional_whole("sliding_window", 128)
    return ModelConfig(
        **common,
        **rotary,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        windows=windows_of(r, layers, size, [layer % 2 == 0 for layer in range(layers)]),
        experts=experts,
    )


# ---- DeepSeek --------------------------------------------------------------------------------------------

DEEPSEEK_EXPERT_KEYS = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "moe_layer_freq",
    "aux_loss_alpha",  # training
    "seq_aux",  # training
    "output_router_logits",
    "ep_size",  # how its own program deals experts out
)
_V2: dict[str, Any] = dict(
    count=64, per_token=None, width=1407, shared=2, first=0, scale=1.0, groups=None, kept=None
)
_V3: dict[str, Any] = dict(count=256, per_token=8, width=2048, shared=1, first=3, scale=2.5, groups=8, kept=4)


def deepseek_experts(r: Reader, num_layers: int, version: int) -> Experts | None:
    """The experts of a DeepSeek-V2 or V3 file (version 2 or 3); None where every layer is dense."""
    d = _V2 if version == 2 else _V3
    first = r.whole("first_k_dense_replace", d["first"])
    check_range("first_k_dense_replace", first, 0, LIMITS["num_layers"])
    if r.whole("moe_layer_freq", 1) != 1:
        r.fail("moe_layer_freq", "must be 1: every layer from first_k_dense_replace on has experts")
    if first >= num_layers:
        return None
    scoring = r.get("scoring_func", "softmax" if version == 2 else "sigmoid")
    method = r.get("topk_method", "greedy" if version == 2 else "noaux_tc")
    fits = ("softmax", ("greedy", "group_limited_greedy")) if version == 2 else ("sigmoid", ("noaux_tc",))
    if scoring != fits[0]:
        r.fail("scoring_func", f"must be {fits[0]}: this family has no other")
    if method not in fits[1]:
        r.fail("topk_method", f"must be {' or '.join(fits[1])}: this family has no other")
    if version == 2 and r.flag("norm_topk_prob", False):
        r.fail("norm_topk_prob", "must be false: transformers passes over it in this family")
    groups, kept = (
        1 if size is None else size
        for size in (r.optional_whole("n_group", d["groups"]), r.optional_whole("topk_group", d["kept"]))
    )
    if version == 2 and method == "greedy":
        groups = kept = 1
    width = r.whole("moe_intermediate_size", d["width"])
    return Experts(
        size_under(r, ("n_routed_experts", "num_experts", "num_local_experts"), d["count"]),
        r.whole("num_experts_per_tok", d["per_token"]),
        width,
        layers=() if first == 0 else tuple(layer >= first for layer in range(num_layers)),
        routing=scoring,
        normalise=version == 3 and r.flag("norm_topk_prob", True),
        scale=r.positive("routed_scaling_factor", d["scale"]),
        choice_bias=version == 3,
        num_groups=groups,
        groups_per_token=kept,
        group_score="best" if version == 2 else "best-two",
        d_shared=width * (r.optional_whole("n_shared_experts", d["shared"]) or 0),
    )


_COUNTS = ("num_experts", "num_local_experts", "num_experts_per_tok")
_ORIGINAL = "original_max_position_embeddings"

EXPERT_FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        frozenset((*GATED, *WINDOWS, *_COUNTS, *_ROUTER_NOTES, _ORIGINAL, "attention_bias")), _mixtral
    ),
    "qwen3_moe": Family(
        frozenset(
            (
                *GATED,
                *WINDOWS,
                *_COUNTS,
                *_ROUTER_NOTES,
                _ORIGINAL,
                "attention_bias",
                "use_sliding_window",
                "max_window_layers",  # a copy of Qwen's that nobody reads
                "moe_intermediate_size",
                "decoder_sparse_step",
                "mlp_only_layers",
                "norm_topk_prob",
            )
        ),
        _qwen3_moe,
    ),
    "olmoe": Family(
        frozenset((*GATED, *_COUNTS, *_ROUTER_NOTES, "attention_bias", "clip_qkv", "norm_topk_prob")), _olmoe
    ),
    "gpt_oss": Family(
        frozenset(
            (
                *GATED,
                *WINDOWS,
                *_COUNTS,
                *_ROUTER_NOTES,
                "attention_bias",
                "experts_per_token",
                "swiglu_limit",
                "swiglu_alpha",
                "initial_context_length",
                _ORIGINAL,
            )
        ),
        _gpt_oss,
    ),
}
