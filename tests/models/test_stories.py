"""stories260K, a real Llama with published greedy text: read, teacher-forced, and decoded."""

import json
import struct

import jax
import numpy as np
import pytest

from pagedjax.model_config import ModelConfig
from pagedjax.models.weights import set_leaf

NEW_TOKENS = 56


def _half_split(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + H / 2)."""
    return w.reshape(-1, head_dim // 2, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def _read(path):
    raw = path.read_bytes()
    d_model, d_mlp, num_layers, num_heads, num_kv_heads, vocab, length = struct.unpack("<7i", raw[:28])
    head_dim = d_model // num_heads
    config = ModelConfig(
        family="llama",
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_mlp=d_mlp,
        vocab_size=vocab,
        max_model_len=length,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    values = np.frombuffer(raw, "<f4", offset=28)
    at = 0

    def take(*shape):
        nonlocal at
        at += (size := int(np.prod(shape)))
        return values[at - size : at].reshape(shape)

    L, D, kv = num_layers, d_model, num_kv_heads * head_dim
    embed, attn_norm = take(vocab, D), take(L, D)
    q, k, v, out = take(L, D, D), take(L, kv, D), take(L, kv, D), take(L, D, D)
    mlp_norm, gate, down, up, final = (
        take(L, D),
        take(L, d_mlp, D),
        take(L, D, d_mlp),
        take(L, d_mlp, D),
        take(D),
    )
    params = {"embed": embed, "final_norm": {"scale": final}, "lm_head": {"kernel": embed.T}}
    for layer in range(L):
        heads = [_half_split(q[layer], head_dim), _half_split(k[layer], head_dim), v[layer]]
        for path, leaf in {
            "attn_norm/scale": attn_norm[layer],
            "qkv/kernel": np.concatenate(heads).T,
            "out/kernel": out[layer].T,
            "mlp_norm/scale": mlp_norm[layer],
            "mlp/up/kernel": np.concatenate([gate[layer], up[layer]]).T,
            "mlp/down/kernel": down[layer].T,
        }.items():
            set_leaf(params, (f"layer_{layer:02d}", *path.split("/")), leaf)
    return config, jax.tree.map(np.ascontiguousarray, params)


@pytest.fixture(scope="module")
def stories(data_dir):
    folder = data_dir / "data" / "models"
    golden = json.loads((folder / "stories260K_greedy_ids.json").read_text())
    return *_read(folder / "stories260K.bin"), [golden["start_token"], *golden["greedy_ids"]]


def test_teacher_forced_over_the_whole_text(stories, judge):
    """Every position's best token is the golden next one, in both the judge and the decoder."""
    config, params, ids = stories
    want = judge.forward(config, params, ids[:-1])
    assert want.argmax(-1).tolist() == ids[1:]
    model = judge.Paged(config, jax.device_put(params), block_size=16, tokens=128, seqs=1, width=32)
    got = np.concatenate([model.feed({"s": ids[i : min(i + 100, 256)]})["s"] for i in range(0, 256, 100)])
    assert got.argmax(-1).tolist() == ids[1:]
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("start", [1, 200])
def test_greedy_decoding_continues_the_golden_text(stories, judge, start):
    config, params, ids = stories
    model = judge.Paged(
        config, jax.device_put(params), block_size=4, num_blocks=128, tokens=128, seqs=1, width=80
    )
    rows = [model.feed({"s": ids[i : min(i + 100, start)]})["s"][-1] for i in range(0, start, 100)]
    found = [int(rows[-1].argmax())]
    while len(found) < NEW_TOKENS:
        found.append(int(model.feed({"s": found[-1:]})["s"][-1].argmax()))
    assert found == ids[start : start + NEW_TOKENS]
