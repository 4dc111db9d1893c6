"""Edited files, read by transformers and by us: where we read one at all, both have understood the same."""

import json

import numpy as np
import pytest
from mutations import SIZES, byte_level_tokenizer, edit

pytestmark = pytest.mark.parity

CASES = 400  # of each file
_SIZES = SIZES | dict(eos_token_id=2, tie_word_embeddings=True)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, mscale=0.7)
CONFIGS = {
    "llama": _SIZES
    | dict(model_type="llama", head_dim=16, hidden_act="relu", rope_theta=500.0, rope_scaling=_YARN),
    "llama3": _SIZES
    | dict(
        model_type="llama",
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=700.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": _SIZES | dict(model_type="mistral", sliding_window=9, head_dim=16, rope_theta=900.0),
    "qwen2": _SIZES
    | dict(
        model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2, rope_theta=900.0
    ),
    "smollm3": _SIZES
    | dict(model_type="smollm3", use_sliding_window=True, sliding_window=5, no_rope_layer_interval=2),
    "gemma2": _SIZES | dict(model_type="gemma2", head_dim=16, sliding_window=6, query_pre_attn_scalar=24),
}


def _theirs(config):
    """What transformers' config object says, in our words."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
        factor = 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        frequencies = frequencies.numpy()
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral":
        kinds = ["sliding_attention" if size is not None else "full_attention"] * config.num_hidden_layers
    windows = [size if kind == "sliding_attention" else None for kind in kinds or []]
    return dict(
        sizes=(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.intermediate_size,
            config.vocab_size,
            config.max_position_embeddings,
        ),
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        windows=windows if any(windows) else [],
        bare=[i for i, on in enumerate(getattr(config, "no_rope_layers", None) or []) if not on],
        frequencies=frequencies,
        factor=float(factor),
    )


def _ours(config):
    from pagedjax.models.layers import rope_frequencies

    frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    c = config
    return dict(
        sizes=(
            c.num_layers,
            c.d_model,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.d_mlp,
            c.vocab_size,
            c.max_model_len,
        ),
        eps=c.norm_eps,
        tied=c.tie_embeddings,
        windows=list(c.windows),
        bare=[i for i in range(c.num_layers) if not c.uses_rope(i)],
        frequencies=frequencies,
        factor=factor,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_edited_configs_say_the_same_to_both(torch, name, tmp_path):
    from transformers import AutoConfig

    from pagedjax.models.config import ModelError
    from pagedjax.models.family_configs import config_from_hf

    rng, read = np.random.default_rng(11), 0
    for _ in range(CASES):
        document, kind, touched = edit(CONFIGS[name], rng)
        try:
            ours = _ours(config_from_hf(document))
        except ModelError:
            continue
        (tmp_path / "config.json").write_text(json.dumps(document))
        try:
            theirs = _theirs(AutoConfig.from_pretrained(tmp_path))
        except Exception:  # what they refuse, or cannot use
            continue
        read += 1
        for key, value in theirs.items():
            if key in ("frequencies", "factor", "eps"):
                np.testing.assert_allclose(ours[key], value, rtol=2e-5, err_msg=f"{kind} {touched}: {key}")
            else:
                assert ours[key] == value, f"{kind} {touched}: {key}"
    assert read > CASES // 10


TEXTS = ("abc ab<s>c", "A b</s>", "", "xyz <pad>", " ab  cab")


def test_edited_tokenizers_say_the_same_to_both(torch, tmp_path):
    """Ids of texts, start, end and the prompt that the template makes."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    from pagedjax.models.config import ModelError
    from pagedjax.models.tokenizer import load_tokenizer

    whole = byte_level_tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet()))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        add_bos_token=True,
        add_prefix_space=False,
        split_special_tokens=False,
        clean_up_tokenization_spaces=False,
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    )
    small = {key: value for key, value in whole.items() if key != "model"}
    rng, read = np.random.default_rng(12), 0
    for case in range(CASES):
        files = {"tokenizer.json": whole, "tokenizer_config.json": config}
        if case % 2:
            files["tokenizer_config.json"], kind, touched = edit(config, rng)
        else:
            changed, kind, touched = edit(small, rng)
            files["tokenizer.json"] = {**changed, "model": whole["model"]}
        for name, document in files.items():
            (tmp_path / name).write_text(json.dumps(document))
        try:
            ours = load_tokenizer(tmp_path)
        except ModelError:
            continue
        try:
            theirs = AutoTokenizer.from_pretrained(tmp_path)
            want = [theirs(text, padding=False, truncation=False)["input_ids"] for text in TEXTS]
        except Exception:
            continue
        read += 1
        where = f"{kind} {touched}"
        assert [ours.encode(text) for text in TEXTS] == want, where
        assert ours.bos_token_id == theirs.bos_token_id, where
        assert theirs.eos_token_id is None or theirs.eos_token_id in ours.eos_token_ids, where
        message = [{"role": "user", "content": "x"}]
        if ours.chat_template and theirs.chat_template and theirs.bos_token and theirs.eos_token:
            prompt = theirs.apply_chat_template(message, tokenize=False)
            assert ours.apply_chat(message, add_generation_prompt=False) == prompt, where
    assert read > CASES // 10
