"""Config mapping: what a config.json and GGUF metadata become, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pagedjax.models.config import ModelConfig, ModelError, RopeScaling
from pagedjax.models.family_configs import config_from_hf
from pagedjax.models.gguf_configs import config_from_gguf
from pagedjax.models.mixture import Experts
from pagedjax.testing import tiny_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_smollm2_is_the_same_from_both_formats():
    config = config_from_hf(LLAMA)
    # A GGUF file's start and ends stand with its tokenizer.
    assert replace(config, bos_token_id=None, eos_token_ids=()) == config_from_gguf(GGUF)
    assert (config.num_layers, config.d_model, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.num_groups, config.rope_theta) == (64, 3, 100000.0)
    # 2 x 30 layers x 3 heads x 64 x 4 bytes
    assert config.kv_bytes_per_token(4) == 46080


def test_defaults_where_the_file_is_silent():
    minimal = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta")}
    config = config_from_hf(minimal | {"tie_word_embeddings": False, "eos_token_id": [2, 5]})
    assert (config.num_kv_heads, config.rope_theta, config.tie_embeddings) == (9, 10000.0, False)
    assert config.eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling("linear", 4.0, 8192)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            RopeScaling("llama3", 8.0, 1024),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "rope_theta": 5e5,
                    "attention_factor": 1.1,
                }
            },
            RopeScaling("yarn", 2.0, 8192, attention_factor=1.1),
        ),
    ],
)
def test_rope_scaling_spellings(given, expected):
    config = config_from_hf(LLAMA | given)
    assert config.rope_scaling == expected
    assert config.rope_theta == (5e5 if "rope_parameters" in given else 1e5)


def test_smollm3_leaves_every_fourth_layer_without_positions():
    config = config_from_hf(LLAMA | {"model_type": "smollm3", "num_hidden_layers": 8})
    assert config.family == "llama"
    assert [config.uses_rope(layer) for layer in range(8)] == [True, True, True, False] * 2
    assert config_from_hf(
        LLAMA | {"model_type": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [0, 1]}
    ).rope_layers == (False, True)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"num_hidden_layers": 1 << 40}, "num_layers="),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 2}, "num_kv_heads=2"),
        ({"head_dim": 63}, "head_dim=63"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling='longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\]"),
    ],
)
def test_bad_values_are_named_in_one_line(change, names):
    with pytest.raises(ModelError, match=names) as caught:
        config_from_hf(LLAMA | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"general.architecture": "rwkv"}, "'rwkv'"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count=32"),
        ({"llama.block_count": True}, "block_count=True"),
        ({"llama.attention.head_count": [9, 9]}, "head_count"),
        ({"llama.expert_count": 8}, "expert_used_count=None"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "experts per token=9"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_weights_scale": 2.0},
            "scale=2.0",
        ),
        ({"llama.expert_gating_func": 2}, "expert_gating_func"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_feed_forward_length": 7},
            "expert_feed_forward_length=7: must be",
        ),
        ({"llama.block_count": 1 << 40}, "block_count="),
        ({"llama.embedding_length": -9}, "embedding_length=-9"),
        ({"llama.attention.key_length": 0}, "attention.key_length=0"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor=None"),
    ],
)
def test_bad_gguf_metadata_is_named(change, names):
    with pytest.raises(ModelError, match=names):
        config_from_gguf(GGUF | change)


def test_round_trip_through_json():
    config = tiny_config(
        windows=(4, None), rope_layers=(True, False), rope_scaling=RopeScaling("yarn", 2.0, original_len=64)
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ModelError, match="'wheels'"):
        ModelConfig.from_dict(config.to_dict() | {"wheels": 4})


def test_per_layer_patterns_must_fit():
    with pytest.raises(ModelError, match="windows has 3 entries"):
        tiny_config(windows=(4, None, 4))
    with pytest.raises(ModelError, match="own key"):
        tiny_config(windows=(0, None))


LONGROPE = dict(
    model_type="phi3", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, original_max_position_embeddings=16,
    rope_scaling=dict(type="su", short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[1.0, 1.7, 4.0, 9.0]),
)  # fmt: skip


def test_longrope_is_one_table_by_the_longest_sequence():
    """The temperature is the same for both: sqrt(1 + ln(128 / 16) / ln 16)."""
    from pagedjax.models.layers import rope_frequencies

    config = config_from_hf(LONGROPE)
    plain = 10000.0 ** (-np.arange(4) / 4)
    for longest, key in ((16, "short_factor"), (17, "long_factor"), (128, "long_factor")):
        scaling = config.for_length(longest).rope_scaling
        freq, factor = rope_frequencies(8, config.rope_theta, scaling)
        np.testing.assert_allclose(freq, plain / LONGROPE["rope_scaling"][key])
        assert factor == pytest.approx((1 + np.log(8) / np.log(16)) ** 0.5)
    llama = tiny_config()
    assert llama.for_length(9) is llama
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("table", "part"),
    [
        (dict(long_factor=[1.0, 2.0]), "has 2 divisors: must have one per pair"),
        (dict(short_factor=None), "short_factor=None: must be a list of numbers"),
        (dict(short_factor=[1, 2, 3, "4"]), "must be a list of numbers"),
        (dict(long_factor=[1.0, 2.0, 0.0, 1.0]), "must be positive numbers"),
        (dict(long_factor=[1, 2, 3, 10**400]), "long_factor="),
        (dict(short_factor=[1.0, 2.0, 3.0, float("nan")]), "short_factor="),
        (dict(short_factor={"0": 1.0}), "short_factor="),
        (dict(long_factor=[]), "has 0 divisors"),
        (dict(factor=-1.0), "factor=-1.0: must be above 0"),
        (dict(attention_factor="hot"), "attention_factor='hot': must be a number"),
        (dict(partial_rotary_factor=0.75), "partly rotated heads"),
        (dict(low_freq_factor=1.0), "low_freq_factor"),
        (dict(type="linear", factor=2.0, short_factor=None, long_factor=None), "knows only LongRoPE"),
    ],
)
def test_other_longrope_tables_are_refused(table, part):
    with pytest.raises(ModelError) as caught:
        config_from_hf({**LONGROPE, "rope_scaling": {**LONGROPE["rope_scaling"], **table}})
    assert part in str(caught.value)


def test_the_first_layers_keep_what_is_said_of_each():
    experts = Experts(6, 2, 24, layers=(False, True))
    config = tiny_config(windows=(4, None), rope_layers=(True, False), experts=experts)
    first = config.first_layers(1)
    assert (first.num_layers, first.windows, first.rope_layers, first.experts) == (1, (4,), (True,), None)
    assert config.first_layers(2) == config


GEMMA3 = {
    "general.architecture": "gemma3", "tokenizer.ggml.tokens": ["a"] * 96,
} | {f"gemma3.{key}": value for key, value in {
    "context_length": 128, "embedding_length": 32, "block_count": 7, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 8,
}.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"attention.sliding_window": None}, "attention.sliding_window=None: must be a whole number"),
        ({"attention.sliding_window": -8}, "a window must hold"),
        ({"block_count": 1 << 31}, "block_count=2147483648"),
        ({"embedding_length": -32}, "embedding_length=-32"),
        ({"attention.key_length": 0}, "attention.key_length=0"),
        ({"attention.head_count": 64, "block_count": 62}, "embedding_length over attention.head_count=0"),
        ({"final_logit_softcapping": -1.0}, "logit_soft_cap=-1.0"),
        ({"rope.freq_base_swa": 0.0}, "rope.freq_base_swa=0.0: must be above 0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_other_gemma3_metadata_is_refused(change, names):
    assert config_from_gguf(GEMMA3).windows == (8, 8, 8, 8, 8, None, 8)
    with pytest.raises(ModelError) as caught:
        config_from_gguf(GEMMA3 | {f"gemma3.{key}": value for key, value in change.items()})
    assert names in str(caught.value) and "\n" not in str(caught.value)


DEEPSEEK2 = {f"deepseek2.{key}": value for key, value in {
    "context_length": 128, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48,
    "vocab_size": 96, "attention.head_count": 4, "attention.head_count_kv": 1, "attention.kv_lora_rank": 18,
    "attention.key_length": 24, "attention.value_length": 18, "attention.key_length_mla": 20,
    "attention.value_length_mla": 9, "rope.dimension_count": 6, "attention.layer_norm_rms_epsilon": 1e-6,
    "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 12,
    "expert_shared_count": 2,
}.items()} | {"general.architecture": "deepseek2"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"attention.key_length_mla": None}, "attention.key_length_mla=None: must be a whole number"),
        ({"attention.key_length": 23}, "attention.key_length=23: must be 24"),
        ({"attention.value_length": 9}, "attention.value_length=9: must be 18"),
        ({"attention.head_count_kv": 4}, "attention.head_count_kv=4: must be 1"),
        ({"attention.key_length_mla": 6}, "latent nope_dim=0"),
        ({"rope.dimension_count": 5, "attention.key_length": 23}, "latent rope_dim=5"),
        ({"attention.temperature_scale": 0.1}, "attention.temperature_scale"),
        ({"expert_gating_func": 3}, "expert_gating_func=3: must be 1 (softmax) or 2 (sigmoid)"),
        ({"expert_count": 160}, "expert_group_count=None: must be given where expert_count=160"),
        ({"expert_group_count": 3, "expert_group_used_count": 1}, "num_experts=8 in 3 groups"),
        ({"expert_group_count": 4}, "expert_group_used_count=None"),
        ({"leading_dense_block_count": -1}, "leading_dense_block_count=-1"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn_log_multiplier"),
        ({"rope.scaling.factor": 4.0}, "yarn_log_multiplier=None: must be above 0 beside linear"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1,
          "rope.scaling.attn_factor": 2.0}, "attn_factor=2.0: must be 1"),
    ],
)  # fmt: skip
def test_other_deepseek2_metadata_is_refused(change, names):
    config = config_from_gguf(DEEPSEEK2)
    assert config.experts.layers == (False, True, True) and config.experts.d_shared == 24
    assert (config.experts.scale, config.experts.num_groups, config.experts.routing) == (1.0, 1, "softmax")
    assert config.latent.nope_dim == 14 and config.query_scale == 20**-0.5
    with pytest.raises(ModelError) as caught:
        config_from_gguf(DEEPSEEK2 | {f"deepseek2.{key}": value for key, value in change.items()})
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_how_many_experts_is_one_number_under_all_its_names():
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    widths = dict(
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=None, n_group=1, topk_group=1
    )  # fmt: skip
    sizes = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")} | widths
    shape = sizes | dict(model_type="deepseek_v3", num_experts_per_tok=2, first_k_dense_replace=0)
    for name in names:
        assert config_from_hf(shape | {name: 5}).experts.num_experts == 5
        for other in names:
            if other != name:
                with pytest.raises(ModelError, match="must be equal"):
                    config_from_hf(shape | {name: 5, other: 6})
    with pytest.raises(ModelError, match="expert groups=0"):
        config_from_hf(shape | {"n_routed_experts": 5, "n_group": 0})
