"""Every family against frozen logits of the reference implementation (tests/parity makes and checks them)."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from pagedjax.models import load_model, make_decoder
from pagedjax.models.family_configs import config_from_hf
from pagedjax.testing import seeded_tensors

GOLDENS = json.loads((Path(__file__).parent / "families.json").read_text())


def _load(folder, golden, rename=lambda name: name):
    tensors = seeded_tensors({n: tuple(s) for n, s in golden["shapes"].items()})
    save_file({rename(n): w for n, w in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return load_model(folder, progress=False)


def _dense_logits(loaded, ids):
    """The decoder with attention by numpy over the whole text; the paged one is judged elsewhere."""
    config = loaded.config
    decoder = nnx.merge(make_decoder(config), loaded.params)
    ages = np.subtract.outer(np.arange(len(ids)), np.arange(len(ids)))

    def attend(layer, q, k, v, kv):
        q, k, v = (np.asarray(x) for x in (q, k, v))
        k, v = (np.repeat(x, config.num_groups, axis=1) for x in (k, v))
        scores = np.einsum("qnh,knh->nqk", q, k) * config.attention_scale
        if config.attn_soft_cap:
            scores = config.attn_soft_cap * np.tanh(scores / config.attn_soft_cap)
        scores[:, (ages < 0) | (ages >= (config.window(layer) or len(ids)))] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        sinks = (
            np.asarray(loaded.params[f"layer_{layer:02d}"]["sinks"]) if config.sinks else np.full(1, -np.inf)
        )
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - top)
        return jnp.asarray(np.einsum("nqk,knh->qnh", weights, v)), kv

    hidden, _ = decoder(jnp.asarray(ids), jnp.arange(len(ids)), None, attend)
    return np.asarray(decoder.logits(hidden))


# Of the families of experts two stand for all in the default suite: each costs seconds of compiling.
SELDOM = ("mixtral", "olmoe")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n in SELDOM else n for n in GOLDENS]
)
def test_frozen_logits(tmp_path, name):
    golden = GOLDENS[name]
    loaded = _load(tmp_path, golden)
    ids = golden["ids"]
    got = _dense_logits(loaded, ids)
    for at, row in golden["rows"].items():
        np.testing.assert_allclose(got[int(at)], row, atol=2e-5 * np.abs(row).max(), rtol=0)
    prompt = 24
    assert got[prompt - 1 : -1].argmax(-1).tolist() == ids[prompt:]


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("gpt2", "transformer."), ("opt", "model."), ("llama2", "model."), ("gemma3", "model.")],
)
def test_names_without_the_outer_prefix(tmp_path, name, prefix):
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    a = _load(tmp_path / "with", GOLDENS[name])
    b = _load(tmp_path / "without", GOLDENS[name], lambda n: n.removeprefix(prefix))
    np.testing.assert_array_equal(a.params["embed"], b.params["embed"])
    assert jax.tree.all(jax.tree.map(np.array_equal, a.params, b.params))


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("llama2", "llama"),
        ("smollm3", "smollm3"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
        ("mixtral", "llama"),
        ("qwen3_moe", "qwen3moe"),
        ("olmoe", "olmoe"),
        ("gpt_oss", "gpt-oss"),
    ],
)
def test_gguf_of_a_family_gives_the_same_leaves(tmp_path, write_gguf, name, arch):
    """Names, biases, head norms and the order of rotary pairs of each GGUF architecture."""
    golden = dict(GOLDENS[name])
    if name == "smollm3":  # GGUF has no key for the interval: it is always the published four
        golden["config"] = golden["config"] | {"no_rope_layer_interval": 4, "no_rope_layers": None}
    # What GGUF has no keys for is what the published models have.
    fixed = {"gemma2": dict(query_pre_attn_scalar=16), "gemma3": dict(query_pre_attn_scalar=16)}
    fixed |= {"gpt_oss": dict(swiglu_limit=7.0), "qwen3_moe": dict(mlp_only_layers=[])}
    golden["config"] = golden["config"] | fixed.get(name, {})
    if name == "qwen3_moe":
        shapes = {n: s for n, s in golden["shapes"].items() if "layers.1.mlp." not in n}
        others = {n: s for n, s in shapes.items() if "layers.0.mlp." in n}
        golden["shapes"] = shapes | {n.replace("layers.0.", "layers.1."): s for n, s in others.items()}
    folder = _load(tmp_path, golden)
    tensors = seeded_tensors({n: tuple(s) for n, s in golden["shapes"].items()})
    loaded = load_model(write_gguf(tmp_path / "m.gguf", folder.config, tensors, arch=arch), progress=False)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(folder.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, folder.params))
    # The same model but for the names of its end tokens, and the precision of a float32 in the file.
    same = dict(family="", bos_token_id=None, eos_token_ids=(), norm_eps=1e-5)
    assert replace(loaded.config, **same) == replace(folder.config, **same)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v2", {}),
        ("deepseek_v3", {"rope_scaling": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32,
                                              beta_fast=16, beta_slow=2, mscale=0.707, mscale_all_dim=0.707)}),
        ("deepseek_v3", {"first_k_dense_replace": 3, "q_lora_rank": None}),
    ],
)  # fmt: skip
def test_gguf_of_deepseek_gives_the_same_leaves_and_config(tmp_path, write_gguf, name, changes, split):
    """By the gguf library's own names: matrices of heads as old and new converters keep them, groups, yarn."""
    golden = GOLDENS[name] | {"config": GOLDENS[name]["config"] | changes}
    shapes = dict(golden["shapes"])
    if changes.get("first_k_dense_replace"):  # every layer dense, queries straight out of x
        shapes = {n: v for n, v in shapes.items() if "q_a_" not in n and ".mlp." not in n}
        for layer in range(3):
            at = f"model.layers.{layer}."
            shapes[f"{at}self_attn.q_proj.weight"] = [4 * 17, 32]
            del shapes[f"{at}self_attn.q_b_proj.weight"]
            for part in ("gate", "up", "down"):
                shapes[f"{at}mlp.{part}_proj.weight"] = golden["shapes"][
                    f"model.layers.0.mlp.{part}_proj.weight"
                ]
    golden["shapes"] = shapes
    folder = _load(tmp_path, golden)
    tensors = seeded_tensors({n: tuple(s) for n, s in shapes.items()})
    path = write_gguf(tmp_path / "m.gguf", folder.config, tensors, arch="deepseek2", split=split)
    loaded = load_model(path, progress=False)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(folder.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, folder.params))
    assert loaded.config.query_scale == pytest.approx(folder.config.query_scale, rel=1e-6)
    same = dict(bos_token_id=None, eos_token_ids=(), norm_eps=1e-5, query_scale=0.1)
    assert replace(loaded.config, **same) == replace(folder.config, **same)
    if split and not changes:  # a file for both ways holds the matrices twice
        twice = {
            f"blk.{i}.attn_kv_b.weight": tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
            for i in range(3)
        }
        path = write_gguf(tmp_path / "b.gguf", folder.config, tensors, extra=twice, arch="deepseek2")
        both = load_model(path, progress=False)
        assert jax.tree.all(jax.tree.map(np.array_equal, both.params, folder.params))


def test_windows_and_positions_of_each_family(tmp_path):
    """The pattern that the config's own words ask for, layer by layer."""

    def pattern(name):
        config = config_from_hf(GOLDENS[name]["config"])
        layers = range(config.num_layers)
        return [config.window(i) for i in layers], [config.uses_rope(i) for i in layers]

    assert pattern("llama3") == ([None] * 4, [True] * 4)
    assert pattern("smollm3") == ([None] * 4, [True, False, True, False])
    assert pattern("mistral") == ([7] * 4, [True] * 4)
    assert pattern("qwen2_windows") == ([None, None, 5, 5], [True] * 4)
    assert pattern("gemma2") == ([6, None, 6, None], [True] * 4)
    assert pattern("gemma3") == ([6, 6, 6, 6, 6, None, 6], [True] * 7)
    assert pattern("opt") == ([None] * 4, [False] * 4)
