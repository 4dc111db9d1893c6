"""Judges of the decoder: a dense float64 numpy forward that shares no code with it, and file writers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest


def _norm(x, p, c):
    x = x - x.mean(-1, keepdims=True) if c.norm == "layer" else x
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * p["scale"]
    return y + p["bias"] if "bias" in p else y


def _linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _act(x, name):
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def _turn(x, positions, theta):
    """Rotate as complex numbers: pair (i, i + H / 2) is one number, turned by theta ** (-2 i / H) a token."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([z.real, z.imag], -1)


def _cap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def numpy_forward(config, params, tokens) -> np.ndarray:
    """Logits f64[T, V] of one sequence, dense causal attention, no cache. Unscaled rotary positions only."""
    c = config
    assert c.rope_scaling is None
    p = _to64(params)
    tokens = np.asarray(tokens)
    pos = np.arange(len(tokens))
    x = p["embed"][tokens] * c.embed_scale
    if c.positions == "learned":
        x = x + p["position_embed"][pos]
    for layer in range(c.num_layers):
        w = p[f"layer_{layer:02d}"]
        y = _linear(_norm(x, w["attn_norm"], c), w["qkv"]).reshape(len(tokens), -1, c.head_dim)
        q, k, v = np.split(y, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if c.qk_norm:
            q, k = _norm(q, w["q_norm"], c), _norm(k, w["k_norm"], c)
        window = c.windows[layer] if c.windows else None
        if c.positions == "rope" and (not c.rope_layers or c.rope_layers[layer]):
            theta = c.local_rope_theta if window and c.local_rope_theta else c.rope_theta
            q, k = _turn(q, pos, theta), _turn(k, pos, theta)
        mixed = np.zeros_like(q)
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            scores = _cap(q[:, head] @ k[:, kv].T * (c.query_scale or c.head_dim**-0.5), c.attn_soft_cap)
            seen = pos[:, None] >= pos[None, :]
            if window:
                seen &= pos[:, None] - pos[None, :] < window
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        y = _linear(mixed.reshape(len(tokens), -1), w["out"])
        x = x + (_norm(y, w["attn_post_norm"], c) if c.post_norms else y)
        y = _linear(_norm(x, w["mlp_norm"], c), w["mlp"]["up"])
        if c.gated_mlp:
            y = _act(y[:, : c.d_mlp], c.activation) * y[:, c.d_mlp :]
        else:
            y = _act(y, c.activation)
        y = _linear(y, w["mlp"]["down"])
        x = x + (_norm(y, w["mlp_post_norm"], c) if c.post_norms else y)
    return _cap(_norm(x, p["final_norm"], c) @ p["lm_head"]["kernel"], c.logit_soft_cap)


def _to64(tree):
    if isinstance(tree, dict):
        return {k: _to64(v) for k, v in tree.items()}
    return np.asarray(tree).astype(np.float64)


class PagedModel:
    """A decoder over its own pool with scattered blocks: feed chunks of several sequences, get logits."""

    def __init__(self, config, params, *, block_size=4, num_blocks=64, seed=0, tokens=16, seqs=4, width=8):
        import jax

        from pagedjax.kernels import KVLayout, make_pool
        from pagedjax.models import forward, logits, make_decoder

        self.config, self.params, self.block_size = config, params, block_size
        self.tokens, self.seqs, self.width = tokens, seqs, width
        layout = KVLayout(config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.pool = make_pool(layout, fill=np.nan)  # a slot that was not written must never be read
        free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
        self.free, self.tables, self.lens = list(map(int, free)), {}, {}
        graphdef = make_decoder(config)

        def step(params, tokens, positions, pool, ragged):
            hidden, pool = forward(graphdef, params, tokens, positions, pool, ragged)
            return logits(graphdef, params, hidden), pool

        self.step = jax.jit(step, donate_argnums=3)

    def feed(self, chunks: dict[str, list[int]]) -> dict[str, np.ndarray]:
        """Append tokens to each named sequence in one step; logits f32[n, V] of each chunk."""
        from pagedjax.kernels import plan_ragged

        names = sorted(chunks, key=lambda s: len(chunks[s]) != 1)
        tokens, positions, lens = [], [], []
        for s in names:
            start = self.lens.get(s, 0)
            end = start + len(chunks[s])
            table = self.tables.setdefault(s, [])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            tokens += chunks[s]
            positions += range(start, end)
            self.lens[s] = end
            lens.append(end)
        # Two programs in all: decodes alone, and anything else.
        tables = np.zeros((len(names), self.width), np.int32)
        for row, s in enumerate(names):
            tables[row, : len(self.tables[s])] = self.tables[s]
        size = self.seqs if len(tokens) == len(names) else self.tokens
        ragged = plan_ragged(
            [len(chunks[s]) for s in names],
            lens,
            tables,
            block_size=self.block_size,
            num_tokens_bucket=size,
            num_seqs_bucket=self.seqs,
            decode_bucket=self.seqs,
            windows=(None, *sorted({w for w in self.config.windows if w})),
        )
        pad = [0] * (size - len(tokens))
        out, self.pool = self.step(
            self.params, np.int32(tokens + pad), np.int32(positions + pad), self.pool, ragged
        )
        rows = np.split(np.asarray(out)[: len(tokens)], np.cumsum([len(chunks[s]) for s in names])[:-1])
        return dict(zip(names, rows))


@pytest.fixture(scope="session")
def judge() -> SimpleNamespace:
    """`forward`: the dense numpy judge; `Paged`: the decoder driven by hand."""
    return SimpleNamespace(forward=numpy_forward, Paged=PagedModel)


@pytest.fixture(scope="session")
def write_gguf() -> Callable:
    """Writes a tiny model as GGUF: (path, config, hf-style tensors, kind, extra tensors)."""
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
}


def _gguf_name(name: str) -> str:
    parts = name.removeprefix("model.layers.").removesuffix(".weight")
    if name.startswith("model.layers."):
        layer, rest = parts.split(".", 1)
        return f"blk.{layer}.{_TO_GGUF[rest]}.weight"
    return f"{_TO_GGUF[parts]}.weight"


def _interleave(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (i, i + H / 2) of each head side by side, as GGUF files of this architecture hold q and k."""
    heads = w.reshape(-1, 2, head_dim // 2, w.shape[-1])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(w.shape)


def _write_gguf(path: Path, config, tensors, kind="F32", extra=None) -> Path:
    import gguf

    c = config
    writer = gguf.GGUFWriter(path, "llama")
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
        if name.endswith(("q_proj.weight", "k_proj.weight")):
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
    """A byte-level vocabulary: 256 byte characters, one merge, and control tokens up to vocab_size."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he"][:vocab_size]
    tokens += [f"<|{i}|>" for i in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * min(257, vocab_size) + [3] * (vocab_size - min(257, vocab_size)))
    writer.add_token_merges(["h e"] if vocab_size > 256 else [])
    writer.add_eos_token_id(vocab_size - 1)
