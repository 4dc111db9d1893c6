"""Many devices, one plan: the tokens of one device, two sums a layer, each device's part of the pool in place."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from judges import QUICK

from pagedjax import LLM
from pagedjax.cache import KVGroup, PagedManager, TokenChain
from pagedjax.config import Config, SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import KVLayout, paged_attention, write_kv
from pagedjax.models import forward, logits, make_decoder
from pagedjax.models.decoder import pool_layout
from pagedjax.models.mixture import Experts
from pagedjax.models.sharding import AXIS
from pagedjax.runtime import Bucket, Buckets, JaxRunner, sample_tokens
from pagedjax.runtime.mesh import DeviceMesh, OneDevice, make_place
from pagedjax.runtime.pools import plan_pools
from pagedjax.runtime.runner import StepOutput
from pagedjax.runtime.snapshot import Owner, load_snapshot, save_snapshot
from pagedjax.testing import tiny_config, tiny_latent_config, tiny_params

BLOCKS, SIZE, HOST = 60, 4, 60
LIMITS = SchedulerConfig(max_num_seqs=4, token_budget=20)
MODELS = {
    "untied": tiny_config(num_heads=8, num_kv_heads=2),
    "windows": tiny_config(
        num_heads=8, num_kv_heads=2, windows=(None, 8), qkv_bias=True, qk_norm=True, logit_soft_cap=20.0
    ),
    "tied": tiny_config(
        num_heads=8, num_kv_heads=8, tie_embeddings=True, norm="layer", positions="learned", gated_mlp=False,
        qkv_bias=True, out_bias=True, mlp_bias=True, post_norms=True, activation="gelu",
    ),
    "experts": tiny_config(
        num_heads=8, num_kv_heads=2, sinks=True, experts=Experts(
            6, 2, 24, layers=(False, True), routing="sigmoid", normalise=True, choice_bias=True, router_bias=True,
            expert_bias=True, d_shared=40),
    ),
    "latent": tiny_latent_config(num_heads=8, qkv_bias=True),
    "codes": tiny_config(num_heads=8, num_kv_heads=4),
}  # fmt: skip
STORED = {"codes": "int8"}  # of pools; float32 is the rule
_rng = np.random.default_rng(3)
_STEM = _rng.integers(0, 256, 26).tolist()
PROMPTS = [[*_STEM[:n], *_rng.integers(0, 256, tail).tolist()] for n, tail in ((26, 3), (0, 5), (26, 1))]
KINDS = {
    "greedy": dict(max_tokens=6),
    "n=3": dict(max_tokens=5, n=3, temperature=1.0, seed=5),
    "beams": dict(max_tokens=5, n=2, beam_width=3),
    "logprobs": dict(max_tokens=5, logprobs=4, prompt_logprobs=2),
    "filtered": dict(max_tokens=6, temperature=0.9, top_p=0.9, top_k=150, seed=2),
    "penalties": dict(max_tokens=6, frequency_penalty=1.5, repetition_penalty=1.3, logit_bias={257: 2.0}),
}


class _Checked(JaxRunner):
    """Asserts after each step that every device drew the same tokens, and that the pool stayed cut."""

    def _dispatch(self, bucket, batch, grouped=False):
        out = super()._dispatch(bucket, batch, grouped)
        first, *others = (np.asarray(shard.data) for shard in out.tokens.addressable_shards)
        assert len(others) == self.place.devices - 1
        assert all(np.array_equal(first, other) for other in others)
        for pool in self.pools:
            assert pool.data.addressable_shards[0].data.shape == pool.layout.shape
        return out


def make_runner(config, devices, params=None, runner=_Checked, dtype="float32", **options):
    """A runner of one step shape, compiled quickly, so that a model costs one program."""
    buckets = Buckets(LIMITS, 1, 1)
    buckets.ladder = (Bucket(4, 20, 4, 8),)
    groups = config.layer_groups
    layouts = [pool_layout(config, BLOCKS, SIZE, dtype, len(g.layers)) for g in groups]
    made = runner(
        config,
        tiny_params(config) if params is None else params,
        layouts,
        LIMITS,
        max_model_len=64,
        buckets=buckets,
        host_blocks=HOST,
        place=make_place(config, devices),
        **options,
    )
    step = made.step_fn
    made.step_fn = jax.jit(step.__wrapped__, donate_argnums=1, compiler_options=QUICK)
    made.as_users_compile_it = step
    return made


@pytest.fixture(scope="module")
def runners():
    """`runners(model, devices)`, each made once."""
    made = {}

    def get(name, devices):
        if (name, devices) not in made:
            made[name, devices] = make_runner(MODELS[name], devices, dtype=STORED.get(name, "float32"))
        return made[name, devices]

    return get


def make_engine(
    runner, *, index="hash", chunk=16, preemption="recompute", caching=True, overlap=False, num_steps=1
):
    groups = [KVGroup(BLOCKS, g.window) for g in runner.model.layer_groups]
    manager = PagedManager(
        num_blocks=BLOCKS,
        block_size=SIZE,
        host_blocks=HOST,
        index=index,
        groups=groups,
        prefix_caching=caching,
    )
    runner.pools = runner._new_pools()
    runner.writable = manager.writable  # checked mode, always
    limits = dataclasses.replace(LIMITS, chunk_tokens=chunk, preemption=preemption)
    return Engine(manager, runner, limits, max_model_len=64, overlap=overlap, num_steps=num_steps)


def run(engine, kind, preempt=False):
    """Tokens, scores and prompt scores of all prompts, the third added late."""
    ids, outputs = [], {}
    params = SamplingParams(ignore_eos=True, **KINDS[kind])

    def drain():
        step = 0
        while engine.has_work:
            step += 1
            running = engine.scheduler.running
            if preempt and running and step in (2, 4, 7):
                engine.scheduler._preempt(running[step % len(running)])
            engine.flights.overlap = engine.scheduler.ahead and step not in (1, 3, 6)  # none on its way then
            for output in engine.step():
                outputs[output.request_id] = output

    ids += [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    drain()
    ids.append(engine.add(PROMPTS[2], params))
    drain()
    engine.manager.check_invariants()
    tokens = [[list(c.token_ids) for c in outputs[i].outputs] for i in ids]
    scores = [list(c.logprobs or []) for i in ids for c in outputs[i].outputs]
    return tokens, np.array([s for row in scores for s in row])


# index, chunk, preemption, kind, from a snapshot of so many devices (0: none)
FACTORS = (
    ("hash", "radix", "table"),
    (5, 16),
    ("none", "recompute", "swap"),
    tuple(KINDS),
    (0, 1, 2),
)


def combinations(count):
    """(model, devices, …) of the whole product, drawn so that every model, number and kind is among the first few."""
    rng = np.random.default_rng(0)
    targets = list(itertools.product(MODELS, (2, 4, 8)))
    kinds = list(KINDS)
    found = []
    for number in range(count):
        model, devices = targets[number % len(targets)]
        rest = [values[int(rng.integers(len(values)))] for values in FACTORS]
        rest[3] = kinds[number % len(kinds)]
        found.append((model, devices, *rest))
    return found


FEW = [
    ("untied", 2, "hash", 5, "swap", "greedy", 0),
    ("untied", 2, "radix", 16, "none", "filtered", 4),
    ("untied", 4, "radix", 16, "recompute", "n=3", 0),
    ("untied", 4, "hash", 5, "none", "logprobs", 2),
    ("untied", 4, "table", 16, "swap", "beams", 0),
    ("untied", 8, "hash", 16, "swap", "beams", 0),
    ("untied", 8, "table", 5, "recompute", "greedy", 0),
    ("untied", 8, "radix", 5, "none", "penalties", 1),
    ("windows", 4, "hash", 5, "swap", "greedy", 0),
    ("windows", 4, "radix", 16, "recompute", "logprobs", 0),
    ("experts", 4, "hash", 5, "swap", "greedy", 0),
    ("latent", 2, "radix", 5, "swap", "n=3", 2),
    ("codes", 2, "hash", 5, "swap", "n=3", 1),
    ("codes", 8, "radix", 16, "recompute", "logprobs", 2),
]


def check(runners, combination, folder):
    model, devices, index, chunk, preemption, kind, saved_on = combination
    expected, expected_scores = run(make_engine(runners(model, 1), caching=False), kind)
    how = dict(index=index, chunk=chunk, preemption="swap" if preemption == "swap" else "recompute")
    how["overlap"] = chunk == 5
    if saved_on:
        _save(runners(model, saved_on), make_engine(runners(model, saved_on)), folder)
    engine = make_engine(runners(model, devices), **how)
    if saved_on and index != "table":
        assert load_snapshot(folder, _owner(engine.runner), engine.manager, engine.runner) == 24
    tokens, scores = run(engine, kind, preempt=preemption != "none")
    assert tokens == expected, combination
    np.testing.assert_allclose(scores, expected_scores, atol=2e-4)
    if saved_on and index != "table" and kind != "logprobs":  # prompt_logprobs reads nothing from the cache
        assert engine.manager.stats.hit_tokens >= 24 * 2 - 4
    if preemption != "none":
        assert engine.scheduler.num_preemptions >= 2
    assert (engine.scheduler.num_swaps > 0) == (preemption == "swap")
    assert bool(engine.overlaps["ahead"]) == (chunk == 5 and kind not in ("beams", "penalties"))


def test_several_steps_a_dispatch_on_several_devices(run_all):
    """Windows in pools of their own, checked; every device stops the same rows and draws the same tokens."""
    config = MODELS["windows"]
    tokens = []
    for devices, steps in ((1, 1), (2, 6)):
        runner = make_runner(config, devices, runner=JaxRunner, num_steps=steps)
        runner.buckets.ladder = (Bucket(4, 0, 4, 4), *runner.buckets.ladder)
        engine = make_engine(runner, num_steps=steps)
        ends = [dict(), dict(temperature=0.9, top_k=50, seed=2), dict(stop_token_ids=tuple(range(60)))]
        for prompt, more in zip(PROMPTS, ends, strict=True):
            engine.add(prompt, SamplingParams(max_tokens=25, ignore_eos=True, **more))
        done = run_all(engine)
        tokens.append([list(output.outputs[0].token_ids) for output in done.values()])
    assert tokens[0] == tokens[1] and engine.dispatches["inner"] > 12


def _owner(runner):
    layouts = runner.layouts
    kinds = tuple((0, l.num_layers, l.num_kv_heads, l.head_dim) for l in layouts)
    return Owner("tiny", "same", layouts[0].dtype, SIZE, kinds, "sha256", {})


def _save(runner, engine, folder):
    run(engine, "greedy")
    chain = TokenChain(_STEM, block_size=SIZE, hash="sha256")
    assert save_snapshot(folder, _owner(runner), [chain], engine.manager, runner) == 24


@pytest.mark.parametrize("combination", FEW, ids=lambda c: "-".join(map(str, c)))
def test_tokens_are_those_of_one_device(runners, combination, tmp_path):
    check(runners, combination, tmp_path / "warm")


@pytest.mark.full
@pytest.mark.parametrize("part", range(3))
def test_tokens_are_those_of_one_device_in_many_combinations(runners, part, tmp_path):
    for number, combination in enumerate(combinations(84)[part::3]):
        check(runners, combination, tmp_path / str(number))


# ------------------------------------------------------------------ one device


def test_on_one_device_the_program_is_that_of_a_plain_jit(runners):
    runner = runners("untied", 1)
    assert isinstance(runner.place, OneDevice)
    graphdef = make_decoder(runner.model, products=runner.products)

    def step(params, pools, batch):
        fed = jnp.where(batch.tokens < 0, batch.drawn[-1 - batch.tokens], batch.tokens)
        hidden, pool = forward(graphdef, params, fed, batch.positions, pools[0], batch.ragged[0])
        rows = logits(graphdef, params, hidden[batch.sample_index])
        tokens = sample_tokens(rows, batch.sampling)
        drawn = jnp.pad(tokens, (0, batch.drawn.shape[0] - tokens.shape[0]))
        return StepOutput(tokens, rows, hidden, drawn), (pool,)

    args = runner.step_args(runner.buckets.ladder[0])
    ours = runner.as_users_compile_it.lower(*args).as_text()
    assert ours == jax.jit(step, donate_argnums=1).lower(*args).as_text()
    assert "all_reduce" not in ours and "sharding" not in ours


# ------------------------------------------------------------------ between devices

MOVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def count(compiled):
    """Collectives of a compiled program by kind."""
    text = compiled.as_text()
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in MOVES}


def compile_step(runner, params=None):
    own, pools, batch = runner.step_args(runner.buckets.ladder[0])
    lowered = runner.as_users_compile_it.lower(own if params is None else params, pools, batch)
    return lowered.compile(compiler_options=QUICK)


@pytest.fixture(scope="module")
def shallow():
    """A step of one layer on two devices, compiled."""
    runner = make_runner(dataclasses.replace(MODELS["untied"], num_layers=1), 2)
    return runner, compile_step(runner)


def test_two_sums_a_layer_and_one_exchange(shallow):
    deep = make_runner(dataclasses.replace(MODELS["untied"], num_layers=3), 2)
    few, many = count(shallow[1]), count(compile_step(deep))
    assert many["all-reduce"] - few["all-reduce"] == 2 * 2
    assert few["all-gather"] == many["all-gather"] == 1  # who drew best
    for name in MOVES[2:]:
        assert few[name] == many[name] == 0
    text = shallow[1].as_text()
    # Nothing of the pool's size crosses: operands of collectives are x, or numbers per row.
    crossing = [line for line in text.splitlines() if re.search(r" (all-reduce|all-gather)(-start)?\(", line)]
    width = shallow[0].pools[0].layout.width
    assert crossing and not any(f",{width}]" in line.split(" all-")[0] for line in crossing)


def test_each_devices_part_of_the_pool_is_updated_in_place(shallow):
    runner, compiled = shallow
    (pool,) = runner.pools
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.layout.num_bytes
    _, (result,) = compiled.output_shardings
    assert result.data.spec == Spec(None, None, AXIS)


def test_a_leaf_that_is_cut_wrongly_shows_in_the_count(shallow):
    runner, compiled = shallow
    params, place = runner.step_args(runner.buckets.ladder[0])[0], runner.place
    wrong = jax.device_put(np.asarray(params["layer_00"]["out"]["weight"]), place.sharding(Spec(AXIS, None)))
    planted = params | {"layer_00": params["layer_00"] | {"out": {"weight": wrong}}}
    assert sum(count(compile_step(runner, planted)).values()) > sum(count(compiled).values())


def test_copies_between_blocks_stay_on_their_device(runners):
    runner = runners("untied", 2)
    ids = np.full(8, -1, np.int32)
    compiled = runner.copies._copy.lower(runner.pools[0], ids, ids).compile()
    assert not any(count(compiled).values())
    assert compiled.memory_analysis().alias_size_in_bytes >= runner.pools[0].layout.num_bytes


# ------------------------------------------------------------------ weights, pools, doors


@pytest.mark.parametrize("devices", [2, 8])
def test_weights_come_back_whole_and_change_on_every_device(devices):
    config = MODELS["untied"]
    params = tiny_params(config)
    runner = make_runner(config, devices)
    for path, leaf in runner.leaves():
        whole = params
        for key in path:
            whole = whole[key]
        np.testing.assert_array_equal(leaf, whole, err_msg="/".join(path))
    other = tiny_params(config, seed=1)
    runner.update_weights(other)
    jax.tree.map(np.testing.assert_array_equal, runner.params, other)
    runner.update_weights(runner.params)
    runner.update_weights(runner.place.put(other))  # as loaded, dealt out
    jax.tree.map(np.testing.assert_array_equal, runner.params, other)
    with pytest.raises(ValueError, match="weights embed: given float32"):
        runner.update_weights(other | {"embed": other["embed"][:-1]})


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_blocks_on_the_host_are_those_of_one_device(devices):
    config = MODELS["untied"]
    place = make_place(config, devices)
    layout = KVLayout(2, 5, SIZE, 2, 8)
    blocks = np.zeros((3, 2, SIZE, layout.width), np.float32)
    blocks[..., :32] = np.random.default_rng(0).standard_normal((3, 2, SIZE, 32))
    own = place.own_heads(blocks, layout)
    part = place.layout(layout)
    assert own.shape[-1] == devices * part.width
    np.testing.assert_array_equal(place.whole_heads(own, layout), blocks)
    last = own[..., -part.width :]  # the last device holds the last KV head
    np.testing.assert_array_equal(last[..., part.kv_width - 8 : part.kv_width], blocks[..., 8:16])


def test_the_pools_memory_counts_every_copy_of_a_head():
    def blocks(devices):
        settings = Config().replace({"runtime.tensor_parallel": devices, "memory_bytes": 1 << 20})
        (layout,) = plan_pools(wide, settings, 64)[1]
        assert layout.num_kv_heads == 2  # of the whole model
        return layout.num_blocks

    wide = tiny_config(num_heads=8, num_kv_heads=2, head_dim=64)
    assert blocks(1) == blocks(2) == 2 * blocks(4) == 4 * blocks(8)


def test_a_lost_pool_comes_back_cut(runners):
    runner = runners("untied", 2)
    for pool in runner.pools:
        pool.data.delete()
    assert runner.recover()
    assert runner.pools[0].data.sharding.spec == Spec(None, None, AXIS)


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        (
            16,
            (
                "runtime.tensor_parallel=16: 8 cpu devices are here",
                "try at most 8, or set JAX_NUM_CPU_DEVICES=16",
            ),
        ),
        (3, ("runtime.tensor_parallel=3: 6 query heads, 2 KV heads and an MLP of 80", "try 1 or 2")),
        (0, ("runtime.tensor_parallel=0: must be a number of devices",)),
    ],
)
def test_devices_that_are_not_there_or_do_not_divide_are_refused(tiny_folder, tmp_path, devices, parts):
    with pytest.raises(ValueError) as caught:
        LLM(str(tiny_folder), progress=False, cache_dir=tmp_path, runtime__tensor_parallel=devices)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.full
def test_an_llm_on_two_devices_and_its_snapshot_on_one(tiny_folder, tmp_path):
    settings = dict(progress=False, cache_dir=tmp_path, model__max_model_len=128, cache__num_blocks=65)
    texts = ["the quick brown fox jumps over the lazy dog", "pack my box"]
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    one, two = (LLM(str(tiny_folder), runtime__tensor_parallel=n, **settings) for n in (1, 2))
    expected = [o.outputs[0].token_ids for o in one.generate(texts, greedy)]
    assert [o.outputs[0].token_ids for o in two.generate(texts, greedy)] == expected
    for saver, loader in ((one, two), (two, one)):
        saver.save_cache(tmp_path / "warm", texts)
        loader.reset_prefix_cache()
        assert loader.load_cache(tmp_path / "warm") == 32
        assert [o.outputs[0].token_ids for o in loader.generate(texts, greedy)] == expected


@pytest.mark.full
@pytest.mark.smollm
def test_smollm_on_three_devices_says_what_it_says_on_one(smollm_cache, tmp_path):
    settings = dict(progress=False, cache_dir=smollm_cache, model__max_model_len=256, cache__num_blocks=400)
    prompts = [f"{i}. {text}" for i in range(5) for text in ("Once", "The sea", "Write a list:", "def f(x):")]
    greedy = SamplingParams(max_tokens=64, ignore_eos=True)
    one, three = (LLM(runtime__tensor_parallel=n, **settings) for n in (1, 3))
    expected = [o.outputs[0].token_ids for o in one.generate(prompts, greedy)]
    assert [o.outputs[0].token_ids for o in three.generate(prompts, greedy)] == expected


# ------------------------------------------------------------------ the op


def test_sinks_are_cut_with_their_heads():
    """No family's decoder has sinks; the op that has them runs on each device's heads."""
    from pagedjax.kernels import make_pool, plan_ragged

    N, K, H, T, n = 8, 2, 8, 6, 4
    layout = KVLayout(1, 6, SIZE, K, H)
    place = DeviceMesh(tiny_config(num_heads=N, num_kv_heads=K, head_dim=H), jax.devices()[:n])
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((T, heads, H), np.float32) for heads in (N, K, K))
    sinks = rng.standard_normal(N, np.float32)
    tables = np.array([[1, 2], [3, 4]], np.int32)
    ragged = plan_ragged(
        np.array([1, 5]), np.array([1, 5]), tables, block_size=SIZE, num_tokens_bucket=T, num_seqs_bucket=2,
        decode_bucket=1, windows=(3,),
    )  # fmt: skip

    def op(pool, q, k, v, sinks):
        pool = write_kv(pool, 0, k, v, ragged.slot_mapping)
        return paged_attention(q, pool, 0, ragged, scale=0.3, window=3, sinks=sinks)

    expected = jax.jit(op)(make_pool(layout), q, k, v, sinks)
    heads = [i * K // n for i in range(n)]  # each KV head on two devices
    cut = Spec(None, AXIS, None)
    mapped = jax.shard_map(
        op,
        mesh=place.mesh,
        in_specs=(Spec(None, None, AXIS), cut, cut, cut, Spec(AXIS)),
        out_specs=cut,
        check_vma=False,
    )
    pool = place.make_pool(place.layout(layout))
    out = jax.jit(mapped)(pool, q, k[:, heads], v[:, heads], sinks)
    assert isinstance(out.sharding, NamedSharding)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert not np.allclose(out, jax.jit(op)(make_pool(layout), q, k, v, jnp.zeros(N)), atol=1e-3)
