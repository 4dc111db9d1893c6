"""How DeepSeek-V2 and V3 spell their `config.json`: latent attention, with the defaults of transformers' classes.

Their experts are read by `expert_configs`.
"""

from __future__ import annotations

from pagedjax.models.config import LIMITS, LatentAttention, ModelConfig, RopeScaling, check_range
from pagedjax.models.config_keys import Reader
from pagedjax.models.config_parts import GATED, Family, common_fields, mscale_factor, rotary_fields
from pagedjax.models.expert_configs import DEEPSEEK_EXPERT_KEYS, deepseek_experts


def _latent(r: Reader, num_heads: int) -> LatentAttention:
    """The widths; what transformers works out of them and writes beside must be the same."""
    rank = r.optional_whole("q_lora_rank", 1536)
    if rank is not None and rank < 1:
        r.fail("q_lora_rank", "must be at least 1; null multiplies queries straight out of x")
    latent = LatentAttention(
        kv_lora_rank=r.whole("kv_lora_rank", 512),
        nope_dim=r.whole("qk_nope_head_dim", 128),
        rope_dim=r.whole("qk_rope_head_dim", 64),
        value_dim=r.whole("v_head_dim", 128),
        q_lora_rank=rank or 0,
        # DeepSeek-V2 has no such key: its pairs always lie side by side.
        interleaved_rope=r.flag("rope_interleave", True),
    )
    for key, value in (("qk_head_dim", latent.query_dim), ("head_dim", latent.rope_dim)):
        if r.get(key, value) != value:
            r.fail(key, f"must be {value}, as the other widths make it")
    if r.optional_whole("num_key_value_heads", num_heads) not in (None, num_heads):
        r.fail(
            "num_key_value_heads", f"must be num_attention_heads={num_heads}: every head has keys of its own"
        )
    return latent


def _score_scale(r: Reader, latent: LatentAttention, scaling: RopeScaling | None) -> float:
    """1 / sqrt(query lanes), times the square of the temperature that the stretched positions ask for."""
    scale = latent.query_dim**-0.5
    if scaling is None:
        return scale
    table = r.table("rope_scaling") or r.table("rope_parameters")
    weight = Reader(table, f"{r.where}: rope_scaling").optional_positive("mscale_all_dim")
    return scale * mscale_factor(scaling.factor, weight) ** 2 if weight else scale


def _deepseek(r: Reader, version: int, ends: tuple[int, int]) -> ModelConfig:
    heads = r.whole("num_attention_heads")
    check_range("num_attention_heads", heads, 1, LIMITS["num_heads"])
    latent, bias, rotary = _latent(r, heads), r.flag("attention_bias", False), rotary_fields(r)
    common = common_fields(r, "deepseek", ends=ends)
    common |= dict(num_kv_heads=1, head_dim=latent.row_dim)
    return ModelConfig(
        **common,
        **rotary,
        latent=latent,
        experts=deepseek_experts(r, common["num_layers"], version),
        query_scale=_score_scale(r, latent, rotary["rope_scaling"]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
    )


_KEYS = (
    *GATED,
    "original_max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "attention_bias",
    *DEEPSEEK_EXPERT_KEYS,
)

LATENT_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(frozenset((*_KEYS, "mlp_bias")), lambda r: _deepseek(r, 2, (1, 2))),
    "deepseek_v3": Family(
        # Layers that predict further tokens lie behind the last one and take no part in a decoder's own answer.
        frozenset((*_KEYS, "rope_interleave", "num_nextn_predict_layers", "num_mtp_layers")),
        lambda r: _deepseek(r, 3, (0, 1)),
    ),
}
