"""The table of cuts: what devices hold adds up to the model, and makes a smaller decoder on each."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.models.config import ModelError
from pagedjax.models.decoder import abstract_params
from pagedjax.models.mixture import Experts
from pagedjax.models.sharding import RULES, Cut, possible_devices, rule_of
from pagedjax.models.weights import flat
from pagedjax.testing import tiny_config, tiny_latent_config

BIASED = dict(norm="layer", positions="learned", gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True)
CONFIGS = {
    "8 over 2": (tiny_config(num_heads=8), (2, 4, 8)),
    "9 over 3": (tiny_config(num_heads=9, num_kv_heads=3, d_mlp=90), (3, 9)),
    "biased": (tiny_config(num_heads=8, num_kv_heads=8, **BIASED), (2, 4, 8)),
    "normed": (tiny_config(num_heads=4, num_kv_heads=1, qk_norm=True, post_norms=True), (2, 4)),
    "latent": (tiny_latent_config(num_heads=4), (2, 4)),
}
MIXED = Experts(
    6, 2, 24, layers=(False, True), choice_bias=True, expert_bias=True, router_bias=True, d_shared=40
)
CONFIGS["experts"] = (tiny_config(num_heads=8, sinks=True, experts=MIXED), (2, 4, 8))
EXPERTS_ONLY = {"sinks", "experts", "expert columns", "shared", "shared columns"}
CASES = [(name, n) for name, (_, counts) in CONFIGS.items() for n in counts]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_parts_make_a_smaller_decoder_and_add_up_to_the_model(name, n):
    config = CONFIGS[name][0]
    cut = Cut(config, n)
    local = dict(flat(abstract_params(cut.local)))
    leaves = dict(flat(abstract_params(config)))
    assert local.keys() == leaves.keys()
    seen = set()
    for leaf, whole in leaves.items():
        path = tuple(leaf.split("/"))
        rule = rule_of(path)
        seen.add(rule.name)
        axis, shape = rule.axis, cut.shape(path, whole.shape)
        if axis is None:
            assert shape == whole.shape == local[leaf].shape
            continue
        assert shape[axis] == n * local[leaf].shape[axis], leaf
        assert shape[:axis] + shape[axis + 1 :] == whole.shape[:axis] + whole.shape[axis + 1 :]
        held = np.zeros(whole.shape[axis], int)
        for device in range(n):
            for start, stop in rule.pieces(cut, device):
                held[start:stop] += 1
        copies = cut.kv_copies if rule.name == "heads" else 1
        assert held.min() == 1 and held.max() == copies, (leaf, held)
    absent = {"heads" if config.latent else "latent heads"} | (set() if config.experts else EXPERTS_ONLY)
    assert seen == {rule.name for rule in RULES} - absent


@pytest.mark.parametrize(("name", "n"), [case for case in CASES if case[0] != "latent"])
def test_a_devices_query_heads_read_the_kv_heads_that_it_holds(name, n):
    cut = Cut(CONFIGS[name][0], n)
    config, H = cut.config, cut.config.head_dim
    for device in range(n):
        queries, keys, values = rule_of(("qkv", "weight")).pieces(cut, device)
        N, K = config.num_heads, config.num_kv_heads
        assert [b - a for a, b in (queries, keys, values)] == [
            cut.heads * H,
            cut.kv_heads * H,
            cut.kv_heads * H,
        ]
        assert (values[0] - keys[0], keys[0] % H) == (K * H, 0)
        first = (keys[0] - N * H) // H
        for i in range(cut.heads):  # query head i of the device, and the KV head that it reads
            whole = queries[0] // H + i
            assert whole // (N // K) == first + i // (cut.heads // cut.kv_heads), (device, i)


@pytest.mark.parametrize(
    ("changes", "n", "parts"),
    [
        (dict(num_heads=9, num_kv_heads=3, d_mlp=1536), 2, ("9 query heads, 3 KV heads", "try 1 or 3")),
        (dict(num_heads=8, num_kv_heads=2, d_mlp=80), 3, ("tensor_parallel=3", "try 1, 2, 4 or 8")),
        (dict(num_heads=12, num_kv_heads=6, d_mlp=96), 4, ("try 1, 2, 3, 6 or 12",)),
        (dict(num_heads=8, num_kv_heads=2, d_mlp=81), 2, ("an MLP of 81", "try 1")),
        (dict(num_heads=8, experts=Experts(6, 2, 30, d_shared=44)), 4, ("an MLP of 30 and 44", "try 1 or 2")),
        (dict(num_heads=8, qk_norm=True, qk_norm_whole=True), 2, ("a norm over all heads", "try 1")),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_those_that_do(changes, n, parts):
    config = tiny_config(**changes)
    with pytest.raises(ModelError) as caught:
        Cut(config, n)
    assert all(part in str(caught.value) for part in parts), caught.value
    for works in possible_devices(config):
        Cut(config, works)
