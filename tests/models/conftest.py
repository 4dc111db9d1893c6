"""Model files written for the tests, and the judges as one fixture."""

from __future__ import annotations

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
    """Writes a tiny model as GGUF: (path, config, hf-style tensors, kind, extra tensors, arch)."""
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
}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_TO_GGUF[rest]}.{kind}"
    return f"{_TO_GGUF[stem]}.{kind}"


def _interleave(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (i, i + H / 2) of each head side by side, as GGUF files of this architecture hold q and k."""
    heads = w.reshape(-1, 2, head_dim // 2, *w.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(w.shape)


def _write_gguf(path: Path, config, tensors, kind="F32", extra=None, arch="llama") -> Path:
    import gguf

    c = config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_model_len)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(c.d_mlp)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    _add_tokenizer(writer, c.vocab_size)
    quant = gguf.GGMLQuantizationType[kind]
    for name, w in tensors.items():
        if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            w = _interleave(w, c.head_dim)
        q = quant if w.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(w, q), raw_dtype=q)
    for name, w in (extra or {}).items():
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
