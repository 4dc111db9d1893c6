"""Cases of the whole LLM, by id: JAX settings, scores, seeds, threads, weights, times; and what is reached from it."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.cache import ExtraKeys
from pagedjax.cache.events import replay
from pagedjax.cli.generate import describe
from pagedjax.engine.request import SamplingParams

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def make_llm(tiny_folder):
    compiled = str(tiny_folder.parent / "compiled")

    def make(**settings):
        keys = dict(cache__block_size=8, cache__num_blocks=13, cache__host_blocks=8, model__max_model_len=64)
        keys |= dict(cache__event_log=10_000)
        keys |= dict(
            scheduler__max_num_seqs=2, scheduler__token_budget=16, runtime__compilation_cache_dir=compiled
        )
        return LLM(str(tiny_folder), progress=False, **keys | settings)

    return make


@pytest.fixture(scope="module")
def begun(make_llm):
    """An LLM and its very first output."""
    llm = make_llm()
    assert llm.stats()["cache"]["hit_rate"] is None
    return llm, llm.generate([[5, 6, 7]], GREEDY)[0]


@pytest.fixture
def llm(begun):
    """One for all tests of this file; each finds an empty cache."""
    llm, _ = begun
    llm.reset_prefix_cache(preempt=True)
    yield llm
    llm.engine.on_step = None
    assert not llm.engine.has_work


def _answers(llm, **more):
    """Greedy, drawn, adjusted and searched answers, with scores: all programs of a step are among them."""
    kinds = [
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(
            max_tokens=6, n=2, temperature=20.0, top_k=50, top_p=0.99, seed=5, logit_bias={7: 2.0}
        ),
        SamplingParams(max_tokens=4, beam_width=2, n=2),
    ]
    outputs = [llm.generate([list(range(1, 21))], kind, **more)[0] for kind in kinds]
    tokens = [sample.token_ids for output in outputs for sample in output.outputs]
    scores = [sample.logprobs for output in outputs for sample in output.outputs if sample.logprobs]
    return tokens, scores


SETTINGS_OF_JAX = {
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "partitionable": lambda: jax.threefry_partitionable(False),
    "debug_nans": lambda: jax.debug_nans(True),
}


@pytest.fixture(scope="module")
def plain_answers(begun):
    return _answers(begun[0])


@pytest.mark.parametrize("name", ["all", *(pytest.param(s, marks=pytest.mark.full) for s in SETTINGS_OF_JAX)])
def test_B154_global_settings_of_jax_change_no_answer(make_llm, plain_answers, tmp_path, name):
    chosen = SETTINGS_OF_JAX.values() if name == "all" else [SETTINGS_OF_JAX[name]]
    with contextlib.ExitStack() as stack:
        for setting in chosen:
            stack.enter_context(setting())
        llm = make_llm()
        tokens, scores = _answers(llm)
        prompt = list(range(1, 25))
        assert llm.save_cache(tmp_path / "snapshot", [prompt]) == llm.load_cache(tmp_path / "snapshot") == 24
    assert tokens == plain_answers[0] and len({t for row in tokens for t in row}) > 8
    for ours, theirs in zip(scores, plain_answers[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_B144_scores_of_a_forbidden_token_are_finite(llm):
    greedy = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1))[0].outputs[0].token_ids[0]
    for params in (
        SamplingParams(
            max_tokens=3,
            top_k=1,
            temperature=1.0,
            logprobs=64,
            prompt_logprobs=64,
            logit_bias={greedy: -1e30},
        ),
        SamplingParams(max_tokens=3, best_of=2, n=1, temperature=1.0, logit_bias={greedy: -100}, logprobs=64),
    ):
        (output,) = llm.generate([[5, 6, 7]], params)
        document = json.dumps(describe(output), allow_nan=False)  # strict: no NaN, no Infinity
        for sample in output.outputs:
            assert greedy not in sample.token_ids[:1]
            assert all(np.isfinite(s.logprob) for d in sample.details for s in (d.token, *d.top))
            assert len(sample.details[0].top) == 64 and np.isfinite(sample.logprobs).all()
        assert "Infinity" not in document
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={3: -np.inf})


def test_B144_one_of_several_that_never_began_has_no_score(llm):
    """It stands last, and its score is unknown, not minus infinity."""
    llm.engine.add([5, 6, 7], SamplingParams(max_tokens=3, best_of=2, n=1, temperature=1.0), request_id="a")
    output = llm.abort("a")
    assert [sample.score for sample in output.outputs] == [None]
    json.dumps(describe(output), allow_nan=False)


def test_B146_a_seed_gives_the_same_beside_anything(llm):
    def drawn(*seeds):
        params = [
            SamplingParams(max_tokens=8, temperature=20.0, seed=seed, ignore_eos=True) for seed in seeds
        ]
        prompts = [[5, 6, 7] if seed == 42 else [9, i] for i, seed in enumerate(seeds)]
        outputs = llm.generate(prompts, params)
        return outputs[seeds.index(42)].outputs[0].token_ids

    alone = drawn(42)
    assert len(set(alone)) > 3
    assert drawn(42, None) == drawn(None, 42, 7) == drawn(None, None, 42, None) == alone


def test_F022_ten_threads_call_one_llm(llm, tmp_path):
    greedy = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [[number, 7, 8, *range(number, number + 12)] for number in range(10)]
    expected = [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in prompts]
    llm.reset_prefix_cache()
    failures = []

    def call(number):
        try:
            for turn in range(3):
                (output,) = llm.generate([prompts[number]], greedy)
                assert output.outputs[0].token_ids == expected[number]
                (*_, last) = llm.stream(prompts[number], greedy)
                assert last.outputs[0].token_ids == expected[number]
                if number < 2:
                    assert llm.save_cache(tmp_path / str(number), [prompts[number]]) <= 8
                elif number < 4:
                    llm.pin(prompts[number])
                    llm.unpin(prompts[number])
                elif number == 4:
                    llm.reset_prefix_cache(preempt=bool(turn % 2))
                    assert llm.stats()["engine"]["steps"] > 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)
    llm.manager.check_invariants()


def test_F024_weights_are_changed_in_one_way_and_nothing_outlives_them(llm, tmp_path):
    prompt = np.random.default_rng(2).integers(0, 256, 30).tolist()
    own = llm.runner.params
    others = jax.tree.map(lambda x: np.asarray(x)[..., ::-1].copy(), own)

    def tokens():
        (output,) = llm.generate([prompt], GREEDY)
        return output.outputs[0].token_ids, output.num_cached_tokens

    before = tokens()[0]
    assert tokens() == (before, 24)
    llm.runner.update_weights(others)  # past the LLM: the next step sees it
    expected, cached = tokens()
    assert cached == 0 and expected != before
    llm.update_weights(own)
    assert tokens() == (before, 0)
    llm.save_cache(tmp_path / "old", [prompt])
    llm.pin(prompt)
    llm.engine.add([7, *prompt], GREEDY, request_id="running")
    llm.engine.step()
    version = llm.stats()["engine"]["weights_version"]
    llm.update_weights(others)
    assert tokens() == (expected, 0) and llm.stats()["engine"]["weights_version"] == version + 1
    (running,) = llm.engine.step()
    assert running.request_id == "running" and running.finished  # began again, beside the other
    assert not llm.unpin(prompt)

    llm.save_cache(tmp_path / "new", [prompt])
    with pytest.raises(ValueError, match="weights"):
        llm.load_cache(tmp_path / "old")
    assert llm.reset_prefix_cache() and llm.load_cache(tmp_path / "new") == 24 and tokens() == (expected, 24)
    llm.update_weights(llm.config.model.model)  # a model by name: the first one again
    with pytest.raises(ValueError, match="weights"):
        llm.load_cache(tmp_path / "new")
    assert llm.load_cache(tmp_path / "old") == 24 and tokens() == (before, 24)

    with pytest.raises(AttributeError):
        llm.runner.params = others
    llm.runner.params["embed"] = None  # a copy of the dict: nothing happens
    assert tokens()[0] == before
    for wrong in ({}, {**others, "embed": others["embed"][:-1]}, {**others, "more": others["embed"]}):
        with pytest.raises(ValueError, match="weights "):
            llm.update_weights(wrong)


def test_other_hosts_are_told_of_weights_that_process_0_has_taken(llm, tiny_folder, tmp_path, monkeypatch):
    told, own = [], llm.config.model.model
    channel = SimpleNamespace(tell=told.append, counts=dict)
    for where in (llm, llm.runner):
        monkeypatch.setattr(where, "_channel", channel)
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    facts = json.loads((other / "pagedjax_model.json").read_text())
    facts["config"]["norm_eps"] *= 2
    (other / "pagedjax_model.json").write_text(json.dumps(facts))
    version = llm.runner.weights_version
    for refused, message in (
        (other, "other shapes or settings"),
        (tmp_path / "none", "none"),
        ({"embed": np.zeros(3)}, "weights embed: given"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.update_weights(refused)
    assert told == [] and llm.runner.weights_version == version
    llm.update_weights(own)
    [(what, (source, sample))] = told
    assert (what, source, sample) == ("weights", own, "")  # read by one process: nothing to compare
    assert llm.runner.weights_version == version + 1


def test_F026_times_are_told_apart(llm, begun):
    first, again = begun[1], llm.generate([[5, 6, 7]], GREEDY)[0]
    assert first.ttft_times.compiling_s > 0 == again.times.compiling_s
    for _ in range(2):  # places for two; what three need is compiled once
        outputs = llm.generate([[5, 6, 7], [1, 2], [3, 4]], GREEDY)
    for output in (first, again, *outputs):
        assert sum(output.ttft_times) == pytest.approx(output.ttft_s)
        assert sum(output.times) == pytest.approx(output.latency_s)
        assert min(output.times) >= 0 and output.times.computing_s > 0
    assert outputs[2].times.compiling_s == 0
    assert llm.runner.num_programs <= len(llm.runner.buckets.ladder)  # none was compiled twice
    # The third waits while the others compute.
    assert outputs[2].ttft_times.waiting_s >= outputs[0].times.computing_s - outputs[0].ttft_times.computing_s
    described = describe(outputs[2])
    assert described["times"] == outputs[2].times._asdict() and described["ttft_times"]["compiling_s"] == 0


def test_the_cache_is_reached_from_the_llm(llm):
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    prompt, extra = list(range(30)), ExtraKeys(salt="a")
    assert llm.pin(prompt, extra=extra) == 24 and llm.pin(prompt, extra=extra) == 0
    evictions = llm.stats()["cache"]["evictions"]
    for n in range(5):  # more than the pool holds: all but the pinned ones go
        llm.generate([list(range(100 + n, 130 + n))], greedy)
    report = llm.reset_prefix_cache()
    assert not report and report.blocked_by == 1
    assert llm.generate([prompt], greedy, extra=extra)[0].num_cached_tokens == 24
    assert replay(llm.events.events) == llm.manager.resident()
    assert llm.unpin(prompt, extra=extra) and llm.reset_prefix_cache()
    assert llm.stats()["blocks"] == {"usable": 12, "free": 12}
    stats = llm.stats()["cache"]
    assert stats["evictions"] > evictions and 0 < stats["hit_rate"] < 1
    assert json.dumps(llm.stats())


def test_request_ids_are_the_callers(llm):
    told = []
    llm.engine.on_step = lambda record: told.append(llm.abort("b"))  # the first time it is live
    outputs = llm.generate(
        [[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=9, ignore_eos=True), request_ids=["a", "b"]
    )
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "abort"]
    assert told[0].request_id == "b" and not any(told[1:])
    for ids in (["a"], ["a", "a"], [1, 2]):
        with pytest.raises(ValueError, match="request_id"):
            llm.generate([[1, 2, 3], [4, 5, 6]], request_ids=ids)
    assert not llm.engine.has_work
