"""Model files written for the tests, and the judges as one fixture."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from judges import PagedModel, numpy_forward


@pytest.fixture(scope="session")
def judge() -> SimpleNamespace:
    """`forward`: the dense numpy judge; `Paged`: the decoder driven by hand."""
    return SimpleNamespace(forward=numpy_forward, Paged=PagedModel)


@pytest.fixture(scope="session")
def write_gguf() -> Callable:
    """Writes a tiny model as GGUF: (path, config, hf-style tensors, kind, extra tensors, arch, split)."""
    return _write_gguf


@pytest.fixture(scope="session")
def hf_tensors() -> Callable:
    """Seeded tensors of a Llama-like config under their Hugging Face names, float32."""
    return _hf_tensors


def _hf_tensors(config, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    c, out = config, {}

    def draw(name, *shape):
        out[name] = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    draw("model.embed_tokens.weight", c.vocab_size, c.d_model)
    for layer in range(c.num_layers):
        at = f"model.layers.{layer}."
        for proj, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            draw(f"{at}self_attn.{proj}_proj.weight", heads * c.head_dim, c.d_model)
        draw(f"{at}self_attn.o_proj.weight", c.d_model, c.num_heads * c.head_dim)
        draw(f"{at}mlp.gate_proj.weight", c.d_mlp, c.d_model)
        draw(f"{at}mlp.up_proj.weight", c.d_mlp, c.d_model)
        draw(f"{at}mlp.down_proj.weight", c.d_model, c.d_mlp)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{norm}.weight"] = 1 + 0.1 * rng.standard_normal(c.d_model).astype(np.float32)
    out["model.norm.weight"] = 1 + 0.1 * rng.standard_normal(c.d_model).astype(np.float32)
    if not c.tie_embeddings:
        draw("lm_head.weight", c.vocab_size, c.d_model)
    return out


_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GEMMA_TO_GGUF = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = re.compile(r"(model\.layers\.(\d+)\.\S*?(?<!shared_)experts)\.(\d+\.)?(\w+)(\.weight)?")
_PROJECTIONS = dict(w1="gate", w3="up", w2="down", gate_proj="gate", up_proj="up", down_proj="down")


def _stacked_experts(tensors):
    """Experts' tensors under GGUF's names, all of a layer in one; and the other tensors as they were."""
    stacks, others = {}, {}
    for name, w in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others[name] = w
            continue
        layer, number, kind = match[2], match[3], match[4]
        if number is not None:
            stacks.setdefault(f"blk.{layer}.ffn_{_PROJECTIONS[kind]}_exps.weight", []).append(w)
            continue
        # gpt-oss: [E, in, out], gate and up in turns.
        ending, w = (".bias", w) if kind.endswith("_bias") else (".weight", w.swapaxes(1, 2))
        parts = {"down": w} if kind.startswith("down") else {"gate": w[:, ::2], "up": w[:, 1::2]}
        stacks |= {f"blk.{layer}.ffn_{part}_exps{ending}": v for part, v in parts.items()}
    return {
        name: np.ascontiguousarray(np.stack(v) if isinstance(v, list) else v) for name, v in stacks.items()
    }, others


def _gguf_name(name: str, arch: str) -> str:
    stem, kind = name.rsplit(".", 1)
    names = _TO_GGUF | (_GEMMA_TO_GGUF if arch.startswith("gemma") else {})
    if arch == "gpt-oss":
        names["post_attention_layernorm"] = "post_attention_norm"
    if kind == "sinks":
        kind = "weight"
    if stem.startswith("model.layers."):
        layer, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[stem]}.{kind}"


def _interleave(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (i, i + H / 2) of each head side by side, as GGUF files of this architecture hold q and k."""
    heads = w.reshape(-1, 2, head_dim // 2, *w.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(w.shape)


def _deepseek_tensors(config, tensors, split):
    """Under GGUF's names, by the library's own table; keys' and values' matrices head by head where split."""
    import gguf

    names, out, a = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config.num_layers), {}, config.latent
    for name, w in tensors.items():
        stem, kind = name.rsplit(".", 1)
        if stem.endswith("kv_b_proj") and split:
            heads = w.reshape(config.num_heads, -1, a.kv_lora_rank)
            keys, values = heads[:, : a.nope_dim].swapaxes(1, 2), heads[:, a.nope_dim :]
            for letter, part in (("k", keys), ("v", values)):
                out[names.get_name(stem.replace("kv_b", f"{letter}_b")) + ".weight"] = np.ascontiguousarray(
                    part
                )
        elif kind == "e_score_correction_bias":
            out[names.get_name(f"{stem}.e_score_correction") + ".bias"] = w
        else:
            out[f"{names.get_name(stem)}.{kind}"] = w
    return out


def _write_latent(writer, config, split: bool) -> None:
    """The metadata of latent attention and of DeepSeek's experts, as converters write it."""
    import gguf

    a, e, s = config.latent, config.experts, config.rope_scaling
    query = a.nope_dim + a.rope_dim
    writer.add_head_count_kv(1 if split else config.num_heads)
    writer.add_key_length(a.kv_lora_rank + a.rope_dim if split else query)
    writer.add_value_length(a.kv_lora_rank if split else a.value_dim)
    if split:
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(a.value_dim)
    writer.add_kv_lora_rank(a.kv_lora_rank)
    if a.q_lora_rank:
        writer.add_q_lora_rank(a.q_lora_rank)
    writer.add_rope_dimension_count(a.rope_dim)
    if s is not None:  # scores are multiplied by the square of 1 + log_mul * ln(factor)
        temperature = np.sqrt(config.query_scale * query**0.5)
        writer.add_rope_scaling_yarn_log_mul(float((temperature - 1) / np.log(s.factor)))
        writer.add_rope_scaling_yarn_beta_fast(s.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(s.beta_slow)
    writer.add_leading_dense_block_count(e.layers.count(False) if e else config.num_layers)
    writer.add_expert_shared_count(e.d_shared // e.d_expert if e else 0)
    if e is not None:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[e.routing.upper()])
        writer.add_expert_group_count(e.num_groups)
        writer.add_expert_group_used_count(e.groups_per_token)
        writer.add_expert_weights_scale(e.scale)
        if e.normalise:
            writer.add_expert_weights_norm(True)


def _write_gguf(path: Path, config, tensors, kind="F32", extra=None, arch="llama", split=True) -> Path:
    import gguf

    c = config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_model_len)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(c.d_mlp)
    writer.add_head_count(c.num_heads)
    if c.latent:
        _write_latent(writer, c, split)
    else:
        writer.add_head_count_kv(c.num_kv_heads)
        writer.add_key_length(c.head_dim)
        writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    if c.experts is not None:
        writer.add_expert_count(c.experts.num_experts)
        writer.add_expert_used_count(c.experts.per_token)
        writer.add_expert_feed_forward_length(c.experts.d_expert)
    if c.windows:
        writer.add_sliding_window(max(w or 0 for w in c.windows))
    if c.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(c.rope_scaling.kind))
        writer.add_rope_scaling_factor(c.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(c.rope_scaling.original_len)
    if c.local_rope_theta:
        writer.add_float32(f"{arch}.rope.freq_base_swa", c.local_rope_theta)
    if c.attn_soft_cap:
        writer.add_attn_logit_softcapping(c.attn_soft_cap)
        writer.add_final_logit_softcapping(c.logit_soft_cap)
    _add_tokenizer(writer, c.vocab_size)
    stacks, tensors = _stacked_experts(tensors)
    extra = stacks | (extra or {})
    if c.latent:
        extra, tensors = extra | _deepseek_tensors(c, tensors, split), {}
    quant = gguf.GGMLQuantizationType[kind]
    for name, w in tensors.items():
        if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            w = _interleave(w, c.head_dim)
        if arch.startswith("gemma") and "norm" in name:
            w = w + np.float32(1)
        q = quant if w.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name, arch), gguf.quants.quantize(w, q), raw_dtype=q)
    for name, w in extra.items():
        writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer, vocab_size: int) -> None:
    """A byte-level vocabulary: byte characters, one merge, and control tokens up to vocab_size."""
    from tokenizers import pre_tokenizers

    characters = min(256, vocab_size - 1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:characters]
    merged = "".join(alphabet[40:42]) if characters < 256 else "he"
    controls = vocab_size - characters - 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*alphabet, merged, *(f"<|{i}|>" for i in range(controls))])
    writer.add_token_types([1] * (characters + 1) + [3] * controls)
    writer.add_token_merges([" ".join(merged)])
    writer.add_eos_token_id(vocab_size - 1)
