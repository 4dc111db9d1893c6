"""Leaves dealt out while they are read: the parts of the whole model, and only this process's are read and held."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pagedjax.models.dealing import Parts
from pagedjax.models.families import leaves_of, names_for
from pagedjax.models.formats import TensorInfo
from pagedjax.models.latent_widths import LatentAttention
from pagedjax.models.mixture import Experts
from pagedjax.models.weights import flat, read_params, restore_params, save_params
from pagedjax.runtime.mesh import make_dealer
from pagedjax.testing import tiny_config

LEARNED = dict(
    norm="layer", positions="learned", gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True
)
HEADS = dict(num_heads=8, num_kv_heads=2)
MIXED = dict(sinks=True, experts=Experts(5, 2, 16, layers=(False, True), router_bias=True, expert_bias=True))
LATENT = dict(num_heads=8, num_kv_heads=1, head_dim=22, latent=LatentAttention(16, 8, 6, 10, q_lora_rank=12))
# What differs between files: pairs side by side, [in, out] matrices, rows left out in front, ones added, fused ones; a
# tensor an expert, or all experts of a layer in one, with gate and up in turns.
ROWS = {
    ("hf", "llama"): HEADS,
    ("gguf", "llama"): HEADS,
    ("hf", "phi3"): HEADS,
    ("hf", "gemma2"): HEADS | dict(post_norms=True, tie_embeddings=True),
    ("hf", "mixtral"): HEADS | dict(experts=Experts(5, 2, 24)),
    ("hf", "gpt_oss"): HEADS | MIXED,
    ("gguf", "gpt_oss"): HEADS | MIXED,
    ("gguf", "deepseek"): LATENT,
    ("hf", "gpt2"): HEADS | dict(num_kv_heads=8, **LEARNED),
    ("hf", "opt"): HEADS | dict(num_kv_heads=8, **LEARNED),
}


class Tensors:
    """A model file in memory, which counts the rows read of each tensor."""

    def __init__(self, config, names, seed=0):
        rng = np.random.default_rng(seed)
        self.held, self.tensors, self.read = {}, {}, {}
        for leaf in leaves_of(config, names, tied=config.tie_embeddings):
            for part in leaf.parts:
                if part.name not in self.held:
                    self.held[part.name] = rng.standard_normal(part.stored_shape, np.float32)
                    self.tensors[part.name] = TensorInfo(part.stored_shape, "F32", Path("memory"))

    def rows(self, name, start, stop):
        self.read[name] = self.read.get(name, 0) + stop - start
        return self.held[name][start:stop]


def same(dealt, whole, place):
    for (name, leaf), (_, expected) in zip(flat(dealt), flat(whole), strict=True):
        np.testing.assert_array_equal(place.whole(tuple(name.split("/")), leaf), expected, err_msg=name)
        assert len(leaf.addressable_shards) == place.devices and leaf.dtype == expected.dtype
        assert place.holds(leaf)


@pytest.mark.parametrize(("row", "devices"), [(row, 8 if i % 2 else 2) for i, row in enumerate(ROWS)])
def test_what_is_dealt_out_is_the_model(row, devices):
    config = tiny_config(**ROWS[row])
    names = names_for(*row)
    place, file, told = make_dealer(devices)(config), Tensors(config, names), []
    whole = read_params(file, config, names, dtype="bfloat16")
    dealt = read_params(file, config, names, dtype="bfloat16", dealer=place, report=told.append)
    same(dealt, whole, place)
    assert sum(told) == sum(leaf.nbytes for _, leaf in flat(whole))
    assert (dealt["lm_head"]["weight"] is dealt["embed"]) == config.tie_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_dealt_out_leaf_by_leaf(tmp_path, tied):
    config, names = tiny_config(**HEADS, tie_embeddings=tied), names_for("hf", "llama")
    whole = read_params(Tensors(config, names), config, names)
    save_params(tmp_path / "params", whole)
    place = make_dealer(4)(config)
    same(restore_params(tmp_path / "params", config, dealer=place), whole, place)


class OneOfFour:
    """As a process sees it that has one device of four: the buffers stay, nothing is joined."""

    def __init__(self, config, device):
        self.mesh, self.device = make_dealer(4)(config), device

    def parts(self, path, shape):
        parts = self.mesh.parts(path, shape)
        width = 0 if parts.axis is None else parts.part_shape[parts.axis]
        return Parts(shape, parts.axis, [*parts.pieces][self.device : self.device + 1] or [()], width)

    def join(self, path, shape, buffers):
        (buffer,) = buffers
        return buffer


@pytest.mark.parametrize("device", [0, 3])
def test_a_process_reads_and_holds_its_own_part(device):
    config, names = tiny_config(**HEADS, d_model=512, d_mlp=1024, vocab_size=6000), names_for("hf", "llama")
    dealer, file = OneOfFour(config, device), Tensors(config, names)
    tracemalloc.start()
    params = read_params(file, config, names, dealer=dealer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    share = sum(part.nbytes for _, part in flat(params))
    largest = max(4 * math.prod(leaf.shape) for leaf in leaves_of(config, names, tied=False))
    assert peak < 1.2 * share + largest, (peak, share, largest)
    embed, queries = (
        file.read[f"model.{name}.weight"] for name in ("embed_tokens", "layers.0.self_attn.q_proj")
    )
    assert embed < 6000 / 4 + 2 * 512 + 1 and queries <= 64  # its rows, and what shares a strip with them
    whole = read_params(Tensors(config, names), config, names)
    assert share < 0.27 * sum(leaf.nbytes for _, leaf in flat(whole))
    for (name, part), (_, leaf) in zip(flat(params), flat(dealer.mesh.put(whole)), strict=True):
        np.testing.assert_array_equal(part, leaf.addressable_shards[device].data, err_msg=name)


def test_a_tensor_that_is_not_finite_is_refused_where_it_is_read():
    config, names = tiny_config(**HEADS), names_for("hf", "llama")
    file = Tensors(config, names)
    file.held["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight' holds values that are not finite"):
        read_params(file, config, names, dealer=make_dealer(2)(config))
