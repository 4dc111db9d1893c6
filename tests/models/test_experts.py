"""Routing and grouped products of experts beside loops over tokens in numpy that share no code with them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from judges import QUICK, choose_experts, expert_mlp

from pagedjax.kernels import native, products
from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.experts import ExpertMlp, choose, tile_rows
from pagedjax.models.layers import Linear
from pagedjax.models.mixture import Experts
from pagedjax.testing import tiny_config, tiny_params

ROUTINGS = {
    "softmax": Experts(12, 4, 8),
    "normalised": Experts(12, 4, 8, normalise=True, scale=1.5),
    "of the chosen": Experts(9, 3, 8, routing="softmax-of-chosen"),
    "groups": Experts(12, 4, 8, num_groups=4, groups_per_token=2, scale=16.0),
    "sigmoid": Experts(
        16, 4, 8, routing="sigmoid", normalise=True, choice_bias=True, num_groups=4, groups_per_token=2,
        group_score="best-two", scale=2.5,
    ),
    "all": Experts(5, 5, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_choose_as_loops_and_sorted_lists_do(name):
    """A third of the logits is coarse, so that equal scores are everywhere: the lower number goes first."""
    e, rng = ROUTINGS[name], np.random.default_rng(0)
    logits = rng.standard_normal((300, e.num_experts)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    bias = rng.integers(-2, 3, e.num_experts) / np.float32(8) if e.choice_bias else None
    ids, weights = choose(jnp.asarray(logits), e, None if bias is None else jnp.asarray(bias))
    # Scores in float32: the judge must see the same ties.
    scores = np.float32 if e.routing == "sigmoid" else np.float64
    for row, got, share in zip(logits, np.asarray(ids), np.asarray(weights), strict=True):
        want = choose_experts(row.astype(scores), bias, e)
        if e.routing == "sigmoid" and [n for n, _ in want] != got.tolist():
            _same_but_for_a_rounding(row, bias, want, got)
            continue
        assert [n for n, _ in want] == got.tolist()
        np.testing.assert_allclose(share, [w for _, w in want], rtol=3e-6)


def _same_but_for_a_rounding(row, bias, want, got):
    """Sums of a sigmoid and a bias that differ in the last bit are ties to one side and none to the other."""
    score = 1 / (1 + np.exp(-row.astype(np.float64))) + bias
    theirs, ours = (np.sort(score[list(ids)]) for ids in ([n for n, _ in want], got))
    groups = [np.sort(score.reshape(4, 4))[:, 2:].sum(-1)]
    close = np.abs(theirs - ours).max() < 1e-6 or np.diff(np.sort(groups[0])).min() < 1e-6
    assert close, (row, want, got)


CASES = {
    "gated": dict(experts=Experts(6, 2, 20, normalise=True)),
    "clamped": dict(
        experts=Experts(
            5, 3, 12, routing="softmax-of-chosen", router_bias=True, expert_bias=True, clamp=0.8, alpha=1.3
        )
    ),
    "shared": dict(
        activation="gelu_tanh", experts=Experts(8, 2, 12, routing="sigmoid", choice_bias=True, d_shared=24)
    ),
}


NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler here")
)


@pytest.fixture(params=["xla", NATIVE])
def made(request):
    """Who multiplies."""
    products.prepare(request.param)
    return request.param


def _layer(config: ModelConfig, seed: int = 0, options=QUICK, made="xla"):
    """(the compiled layer, its parameters) of a model of one layer."""
    params = tiny_params(replace(config, num_layers=1), seed)["layer_00"]["mlp"]
    layer = ExpertMlp(config, jnp.dtype("float32"))
    for _, module in nnx.iter_graph(layer):
        if isinstance(module, Linear):
            module.products = made
    graph, _ = nnx.split(layer)
    return jax.jit(lambda p, x, n: nnx.merge(graph, p)(x, n), compiler_options=options), params


@pytest.mark.parametrize("name", CASES)
def test_products_are_the_slow_ones_whoever_is_chosen(name, made):
    """Random choices; one expert for all tokens; all experts by turns; and fewer real tokens than entries."""
    config = tiny_config(**CASES[name])
    layer, params = _layer(config, made=made)
    e, rng = config.experts, np.random.default_rng(1)
    for tokens in (1, 24) if name == "gated" else (24,):
        x = rng.standard_normal((tokens, config.d_model)).astype(np.float32)
        for steer in (None, "one", "turns"):
            # Along a direction of its own every token finds the expert that is wanted for it.
            p, inputs = dict(params), x
            if steer is not None:
                router = np.zeros_like(params["router"]["weight"])
                router[:, : e.num_experts] = np.eye(e.num_experts) * 4
                p["router"] = {**params["router"], "weight": router}
                inputs = x.copy()
                wanted = np.zeros(tokens, int) if steer == "one" else np.arange(tokens) % e.num_experts
                inputs[:, : e.num_experts] = np.eye(e.num_experts)[wanted] + 0.1 * np.arange(e.num_experts)
            real = max(1, tokens - 3)
            got = np.asarray(layer(p, jnp.asarray(inputs), jnp.int32(real)))
            want = expert_mlp(inputs.astype(np.float64), _wide(p), config)
            np.testing.assert_allclose(got[:real], want[:real], atol=2e-5 * np.abs(want).max(), rtol=0)


def _wide(tree):
    return {k: _wide(v) if isinstance(v, dict) else v.astype(np.float64) for k, v in tree.items()}


def test_a_row_is_bitwise_the_same_whatever_stands_beside_it(made):
    config = tiny_config(experts=Experts(6, 2, 20))
    layer, params = _layer(config, options=None, made=made)  # as users compile it
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, config.d_model)).astype(np.float32)
    alone = np.asarray(layer(params, jnp.asarray(x), jnp.int32(40)))
    for _ in range(4):
        order = rng.permutation(40)
        others = np.where(rng.random(40)[:, None] < 0.5, x, rng.standard_normal(x.shape).astype(np.float32))
        kept = (others == x).all(axis=1)[order]
        moved = np.asarray(layer(params, jnp.asarray(others[order]), jnp.int32(40)))
        np.testing.assert_array_equal(moved[kept], alone[order][kept])


def test_padding_reaches_no_expert(made):
    """Not even where it is NaN, or would fill up every tile: the loop turns once for each expert in use."""
    config = tiny_config(experts=Experts(6, 2, 20))
    layer, params = _layer(config, made=made)
    x = np.random.default_rng(3).standard_normal((8, config.d_model)).astype(np.float32)
    want = np.asarray(layer(params, jnp.asarray(x), jnp.int32(3)))[:3]
    x[3:] = np.nan
    got = np.asarray(layer(params, jnp.asarray(x), jnp.int32(3)))
    np.testing.assert_array_equal(got[:3], want)
    assert not got[3:].any()


@pytest.mark.parametrize(
    ("tokens", "experts", "rows"),
    [(1, 64, 1), (8, 64, 8), (64, 64, 8), (256, 64, 32), (4096, 8, 128)],
)
def test_tiles_hold_what_an_expert_has(tokens, experts, rows):
    assert tile_rows(tokens, Experts(experts, 8, 4)) == rows


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (dict(per_token=7), "experts per token=7: must be a whole number in [1, 6]"),
        (dict(num_groups=4), "in 4 groups"),
        (dict(num_groups=3, per_token=3), "hold the 3 experts of a token"),
        (dict(num_groups=6, groups_per_token=2, group_score="best-two"), "groups of 1 expert"),
        (dict(routing="hash"), "routing='hash': must be one of softmax"),
        (dict(clamp=-1.0), "expert clamp=-1.0"),
        (dict(scale=0.0), "expert scale=0.0"),
    ],
)
def test_what_no_mixture_can_be_is_refused(changes, part):
    with pytest.raises(ModelError) as caught:
        Experts(**{**dict(num_experts=6, per_token=2, d_expert=4), **changes})
    assert part in str(caught.value)


def test_a_config_with_experts_comes_back_from_its_own_table():
    config = tiny_config(experts=Experts(6, 2, 20, layers=(False, True), d_shared=8), sinks=True)
    values = config.to_dict()
    values["experts"]["layers"] = list(values["experts"]["layers"])  # as JSON returns it
    assert ModelConfig.from_dict(values) == config
    with pytest.raises(ModelError, match="experts 'wide': not a field"):
        ModelConfig.from_dict({**values, "experts": {"wide": 1}})
    with pytest.raises(ModelError, match=r"experts.layers has 3 entries"):
        replace(config, experts=replace(config.experts, layers=(True,) * 3))


def test_parameters_are_counted_whole_active_and_as_a_step_reads_them():
    config = tiny_config(experts=Experts(8, 2, 20, layers=(False, True), d_shared=12))
    one = 3 * config.d_model * 20
    assert config.expert_parameters == 8 * one
    assert config.layer_parameters - config.active_layer_parameters == 6 * one
    beside = config.layer_parameters - 8 * one
    assert config.read_layer_parameters(1) == pytest.approx(beside + 2 * one)
    # Of 8 experts two tokens pass over one with probability (3/4)²; many use all.
    assert config.read_layer_parameters(2) == pytest.approx(beside + 8 * one * (1 - 0.75**2))
    assert config.read_layer_parameters(1000) == pytest.approx(config.layer_parameters)
    assert config.active_parameters == config.active_layer_parameters + config.vocab_size * config.d_model


def test_step_times_of_one_mixture_do_not_serve_another():
    """Their widths are the same; what a step reads and multiplies is not."""
    from pagedjax.config import SchedulerConfig
    from pagedjax.engine.shapes import Bucket
    from pagedjax.sim.programs import StepTimes, limit_numbers, shape_numbers

    limits, plain = SchedulerConfig(), tiny_config()
    mixed = tiny_config(experts=Experts(8, 2, 20))
    shapes = [plain, mixed, replace(mixed, experts=replace(mixed.experts, per_token=3))]

    def times(model):
        rates = dict(s_per_row=0.0, s_per_key=0.0, s_per_tile=0.0, s_per_score=0.0)
        made = StepTimes(
            programs={Bucket(8, 8, 8, 8): 1.0}, shape=shape_numbers(model), limits=limit_numbers(limits), block_size=16,
            dtype="float32", implementation="xla", device="cpu", **rates,
        )  # fmt: skip
        return StepTimes.from_dict(made.to_dict())

    for ours in shapes:
        for theirs in shapes:
            assert bool(times(ours).differs(theirs, 16, limits)) == (ours != theirs)


def test_the_bias_of_the_choice_stays_float32_in_bfloat16_models():
    """A bias of 13 leaves a bfloat16 steps of 1/16: with it the wrong expert would be chosen."""
    config = tiny_config(experts=Experts(4, 1, 8, routing="sigmoid", choice_bias=True))
    params = tiny_params(config, dtype="bfloat16")["layer_00"]["mlp"]
    assert (params["choice_bias"].dtype, params["router"]["weight"].dtype) == (np.float32, "bfloat16")
    graph, _ = nnx.split(ExpertMlp(config, jnp.dtype("bfloat16")))
    params["choice_bias"] = np.float32([13.0, 13.01, 13.0, 13.0])
    params["router"]["weight"] = np.zeros_like(params["router"]["weight"])
    x = jnp.ones((3, config.d_model), "bfloat16")
    layer = jax.jit(lambda p: nnx.merge(graph, p)(x), compiler_options=QUICK)
    alone = dict(params, choice_bias=np.float32([0.0, 1.0, 0.0, 0.0]))
    np.testing.assert_array_equal(layer(params), layer(alone))
    assert layer(alone).any()
