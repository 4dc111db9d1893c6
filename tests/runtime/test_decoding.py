"""Beams, penalties, best-of and log-probabilities on the real decoder, against dense float64 judges."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from judges import beams_model, dense_beams, numpy_forward

from pagedjax.cache import TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine.request import Request, SamplingParams, Sequence
from pagedjax.runtime import Adjustments, Buckets
from pagedjax.runtime.adjust import adjust
from pagedjax.runtime.asked import ON_ONE_DEVICE, AskedPrograms


@pytest.fixture(scope="session")
def dense_logits(tiny):
    """`dense_logits(tokens)`: f64[T, V] of the tiny model, remembered."""
    config, params = tiny
    host = jax.tree.map(np.asarray, params)
    known = {}

    def logits(tokens):
        key = tuple(tokens)
        if key not in known:
            known[key] = numpy_forward(config, host, list(tokens))
        return known[key]

    return logits


@pytest.fixture(scope="session")
def dense_logprobs(dense_logits):
    """`dense_logprobs(tokens)`: f64[V] of what follows."""

    def logprobs(tokens):
        last = dense_logits(tokens)[-1]
        return last - last.max() - np.log(np.exp(last - last.max()).sum())

    return logprobs


def greedy(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def prompt_of(length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, 256, size=length).tolist()


# --------------------------------------------------------------------------- beams


def test_B058_beams_equal_the_dense_reference(tiny, make_engine, run_all, dense_logprobs):
    """Width 4, 20 steps, free blocks poisoned; ids, order, scores; each beam re-scored in one pass."""
    engine = make_engine(tiny, shuffle=4, poison=True)
    prompts = [prompt_of(9), prompt_of(6)]
    jobs = [
        engine.add(prompt, greedy(20, beam_width=4, n=4, length_penalty=penalty, logprobs=2))
        for prompt, penalty in zip(prompts, (1.0, 0.6))
    ]
    outputs = run_all(engine)
    for request_id, prompt, penalty in zip(jobs, prompts, (1.0, 0.6)):
        want = dense_beams(dense_logprobs, prompt, 4, 20, penalty)
        for beam, (ids, worth) in zip(outputs[request_id].outputs, want, strict=True):
            assert list(beam.token_ids) == ids
            assert beam.score == pytest.approx(worth, abs=1e-4)
            whole = [*prompt, *ids]
            rescored = [dense_logprobs(whole[:i])[whole[i]] for i in range(len(prompt), len(whole))]
            np.testing.assert_allclose(beam.logprobs, rescored, atol=1e-4)
            assert [d.token.token_id for d in beam.details] == ids
            assert all(len(d.top) == 2 and d.top[0].rank == 1 for d in beam.details)
    assert sum(outputs[i].num_copies for i in jobs) > 0


BEAM_GOLDENS = json.loads((Path(__file__).parent / "beams.json").read_text())


@pytest.mark.parametrize("free", [64, 24])
def test_B058_beams_equal_what_transformers_froze(tiny, make_engine, run_all, monkeypatch, free):
    """Widths 2, 4, 6, penalties 0.6, 1, 2, early stopping on, off and never; together, also in a tight pool."""
    config, params = beams_model()
    assert config == tiny[0]  # its programs serve
    engine = make_engine(tiny, shuffle=1, poison=True)
    monkeypatch.setattr(engine.runner, "_params", jax.device_put(params))
    hog = TokenChain([0] * ((engine.manager.num_usable - free) * 4), block_size=4)
    engine.manager.begin(-1, hog)
    assert engine.manager.reserve(-1, len(hog))
    ids = []
    for job in BEAM_GOLDENS:
        sampling = greedy(
            job["steps"],
            n=job["width"],
            beam_width=job["width"],
            length_penalty=job["penalty"],
            early_stopping=job["early"],
            stop_token_ids=job["ends"],
        )
        ids.append(engine.add(job["prompt"], sampling))
    outputs = run_all(engine)
    assert any(outputs[i].num_preemptions for i in ids) == (free == 24)
    for request_id, job in zip(ids, BEAM_GOLDENS, strict=True):
        found = outputs[request_id].outputs
        assert [list(o.token_ids) for o in found] == [tokens for tokens, _ in job["beams"]], job
        np.testing.assert_allclose([o.score for o in found], [score for _, score in job["beams"]], atol=1e-4)
    assert len({(job["width"], job["penalty"], job["early"]) for job in BEAM_GOLDENS}) == 27
    ended = [tokens[-1] in job["ends"] for job in BEAM_GOLDENS for tokens, _ in job["beams"]]
    assert 30 < sum(ended) < len(ended) - 30


def test_B058_preempted_beams_on_the_real_decoder(tiny, make_engine, run_all):
    def run(occupied, preemption="recompute"):
        engine = make_engine(tiny, host_blocks=64, preemption=preemption, poison=True)
        # A stranger holds most of the pool: less room in the programs that are compiled already.
        engine.manager.begin(-1, TokenChain([0, 0], block_size=4))
        assert engine.manager.reserve(-1, 4 * occupied)
        engine.add(prompt_of(10, 1), greedy(40))
        ids = [engine.add(prompt_of(7, 2), greedy(16, beam_width=3, n=3)) for _ in range(2)]
        outputs = run_all(engine)
        return [[o.token_ids for o in outputs[i].outputs] for i in ids], engine.scheduler

    ample, _ = run(0)
    for preemption in ("recompute", "swap"):
        tight, scheduler = run(108, preemption)
        assert scheduler.num_preemptions > 0
        assert (scheduler.num_swaps > 0) == (preemption == "swap")
        assert tight == ample


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 117])
def test_B107_prompt_logprobs_are_whole_on_cached_prompts(tiny, make_engine, run_all, dense_logits, length):
    """Cold, warm, chunked: one entry per token, the first None; the cache is left filled for others."""
    engine = make_engine(tiny, block_size=16)
    prompt = prompt_of(length)
    results = []
    for _ in range(2):
        request_id = engine.add(prompt, greedy(2, prompt_logprobs=3))
        results.append(run_all(engine)[request_id])
    chunked = make_engine(tiny, block_size=16, chunk_tokens=7)
    request_id = chunked.add(prompt, greedy(2, prompt_logprobs=3))
    results.append(run_all(chunked)[request_id])
    logits = dense_logits(prompt)
    full = logits - logits.max(-1, keepdims=True)
    full -= np.log(np.exp(full).sum(-1, keepdims=True))
    for result in results:
        entries = result.prompt_logprobs
        assert len(entries) == length and entries[0] is None
        assert result.num_cached_tokens == 0
        assert [e.token.token_id for e in entries[1:]] == prompt[1:]
        own = full[np.arange(length - 1), prompt[1:]]
        np.testing.assert_allclose([e.token.logprob for e in entries[1:]], own, atol=1e-4)
        ranks = 1 + (full[:-1] > own[:, None]).sum(-1)
        assert np.mean(np.array([e.token.rank for e in entries[1:]]) == ranks) > 0.95  # near-ties may swap
        for e, row in zip(entries[1:], full):
            assert [t.rank for t in e.top] == [1, 2, 3]
            np.testing.assert_allclose([t.logprob for t in e.top], np.sort(row)[::-1][:3], atol=1e-4)
    cold, warm = ([e.token.logprob for e in r.prompt_logprobs[1:]] for r in results[:2])
    np.testing.assert_allclose(warm, cold, atol=1e-5)
    plain = engine.add([*prompt, 1], greedy(1))
    assert run_all(engine)[plain].num_cached_tokens == length // 16 * 16


def test_prompt_logprobs_add_no_step_program_and_survive_preemption(tiny, make_engine, run_all):
    engine = make_engine(tiny)
    engine.add(prompt_of(40), greedy(3, prompt_logprobs=0))
    want = run_all(engine)["0"].prompt_logprobs
    programs = engine.runner.num_programs
    engine = make_engine(tiny, chunk_tokens=9)
    engine.add(prompt_of(40), greedy(3, prompt_logprobs=0))
    for step in range(4):
        engine.step()
        if step in (1, 3):
            engine.scheduler._preempt(engine.scheduler.running[0])
    got = run_all(engine)["0"].prompt_logprobs
    np.testing.assert_allclose(
        [e.token.logprob for e in got[1:]], [e.token.logprob for e in want[1:]], atol=1e-4
    )
    assert engine.runner.num_programs == programs
    assert engine.runner.prompt_scores.num_programs <= len(engine.runner.buckets.ladder)


def test_logprobs_list_the_likeliest_tokens_before_penalties(tiny, make_engine, run_all, dense_logprobs):
    engine = make_engine(tiny)
    prompt = prompt_of(12)
    likeliest = int(dense_logprobs(prompt).argmax())
    params = greedy(6, logprobs=4, presence_penalty=50.0, logit_bias={likeliest: -100.0})
    request_id = engine.add(prompt, params)
    only = run_all(engine)[request_id].outputs[0]
    tokens = list(prompt)
    for token, detail in zip(only.token_ids, only.details, strict=True):
        full = dense_logprobs(tokens)
        assert detail.token.logprob == pytest.approx(full[token], abs=1e-4)
        assert detail.token.rank == 1 + int((full > full[token] + 1e-6).sum())
        np.testing.assert_allclose([t.logprob for t in detail.top], np.sort(full)[::-1][:4], atol=1e-4)
        tokens.append(token)
    assert max(d.token.rank for d in only.details) > 1


# ------------------------------------------------------------------------- penalties


def penalized(logits, prompt, answer, p):
    """By the definition, one token at a time."""
    out = logits.copy()
    for token in set(prompt) | set(answer):
        out[token] = (
            out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        )
    for token in set(answer):
        out[token] -= p.presence_penalty + p.frequency_penalty * answer.count(token)
    for token, bias in p.logit_bias.items():
        out[token] += bias
    return out


@pytest.mark.parametrize(
    "values",
    [
        dict(repetition_penalty=1.8),
        dict(repetition_penalty=0.6),
        dict(presence_penalty=1.5),
        dict(frequency_penalty=-0.7),
        dict(logit_bias={7: 3.0, 200: 4.5}),
        dict(
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.4,
            logit_bias={3: 4.0, 9: -100.0},
        ),
    ],
)
def test_penalties_equal_their_definition_beside_rows_without(
    tiny, make_engine, run_all, dense_logits, values
):
    engine = make_engine(tiny)
    prompt, plain = prompt_of(20), prompt_of(11)
    params = greedy(24, **values)
    changed, same = engine.add(prompt, params), engine.add(plain, greedy(10))
    outputs = run_all(engine)
    answer = []
    for _ in range(24):
        logits = penalized(dense_logits([*prompt, *answer])[-1], prompt, answer, params)
        answer.append(int(logits.argmax()))
    assert list(outputs[changed].outputs[0].token_ids) == answer
    expected = []
    for _ in range(10):
        expected.append(int(dense_logits([*plain, *expected])[-1].argmax()))
    assert list(outputs[same].outputs[0].token_ids) == expected


def test_adjustments_longer_than_a_slice():
    """300 listed tokens of 1000: three turns of the loop, no other logit touched."""
    logits = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    ids, bias = np.full((3, 384), 1000, np.int32), np.zeros((3, 384), np.float32)
    order = np.random.default_rng(1).permutation(1000)[:300]
    ids[1, :300], bias[1, :300] = order, np.linspace(-3, 30, 300)
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    lists = Adjustments(ids, np.full((3, 384), -1, np.int32), bias, ones, zeros, zeros, np.array(3, np.int32))
    want = logits.copy()
    want[1, order] += bias[1, :300]
    np.testing.assert_array_equal(np.asarray(jax.jit(adjust)(logits, lists)), want)


def test_no_step_program_is_added_by_penalties_logprobs_and_beams(tiny, make_engine, run_all):
    engine = make_engine(tiny)
    engine.runner.warm_up()
    programs = engine.runner.num_programs
    engine.add(prompt_of(5), greedy(4, repetition_penalty=1.2, logprobs=5))
    engine.add(prompt_of(9), greedy(4, beam_width=3))
    engine.add(prompt_of(9), SamplingParams(max_tokens=4, min_tokens=4, temperature=1.0, n=2, best_of=3))
    run_all(engine)
    assert engine.runner.num_programs == programs <= 12
    asked = [program._cache_size() for program in ON_ONE_DEVICE]
    for n in range(5):  # what was compiled for those who ask serves all who come after
        engine.add(prompt_of(5 + n), greedy(4, presence_penalty=0.5, logprobs=n, min_tokens=2))
    engine.add(prompt_of(3), SamplingParams(max_tokens=4, temperature=1.0, top_p=0.5, logit_bias={5: 1.0}))
    run_all(engine)
    assert [program._cache_size() for program in ON_ONE_DEVICE] == asked


def test_a_step_nobody_asks_anything_of_calls_no_other_program(tiny, make_engine, run_all, monkeypatch):
    def called(*_):
        raise AssertionError("nobody asked")

    engine = make_engine(tiny)
    monkeypatch.setattr(engine.runner, "_asked", AskedPrograms(called, called))
    engine.add(prompt_of(5), greedy(4))
    engine.add(prompt_of(6), SamplingParams(max_tokens=4, temperature=1.0, top_k=5, n=2))
    assert all(o.finished for o in run_all(engine).values())


# ---------------------------------------------------------------- ends, several samples


def test_min_tokens_hold_end_tokens_off(tiny, make_engine, run_all, dense_logits):
    engine = make_engine(tiny)
    prompt, answer = prompt_of(8), []
    for _ in range(8):
        answer.append(int(dense_logits([*prompt, *answer])[-1].argmax()))
    stops = (answer[1], answer[3])
    held = []
    for n in range(12):
        logits = dense_logits([*prompt, *held])[-1].copy()
        if n < 5:
            logits[list(stops)] = -np.inf
        held.append(int(logits.argmax()))
        if held[-1] in stops:
            break
    early = engine.add(prompt, greedy(12, stop_token_ids=stops))
    late = engine.add(prompt, greedy(12, stop_token_ids=stops, min_tokens=5))
    outputs = run_all(engine)
    first = next(i for i, token in enumerate(answer) if token in stops)
    assert list(outputs[early].outputs[0].token_ids) == answer[: first + 1]
    assert list(outputs[late].outputs[0].token_ids) == held
    assert len(held) > 5 > first + 1


@pytest.mark.parametrize(("num_output", "held"), [(2, True), (3, False)])
def test_min_tokens_let_the_token_after_them_end(num_output, held):
    """Of min_tokens=3 the first three tokens may not end a sample, the fourth may."""
    request = Request(
        "0", (1, 2), SamplingParams(max_tokens=9, min_tokens=3), 0, end_token_ids=frozenset([7])
    )
    chain = TokenChain([1, 2, *[5] * num_output], block_size=4)
    lists = Adjustments.pack([Sequence(0, request, 0, chain)], 1, 11, 64)
    assert (lists is not None) is held
    assert not held or np.asarray(adjust(np.zeros((1, 11), np.float32), lists)).argmin() == 7


def test_best_of_returns_the_likeliest_of_all_samples(tiny, make_engine, run_all):
    engine = make_engine(tiny)
    drawn = dict(temperature=3.0, seed=5)
    all_ = engine.add(prompt_of(6), greedy(8, n=6, logprobs=True, **drawn))
    best = engine.add(prompt_of(6), greedy(8, n=2, best_of=6, **drawn))
    outputs = run_all(engine)
    means = {o.index: np.mean(o.logprobs) for o in outputs[all_].outputs}
    want = sorted(means, key=lambda i: -means[i])[:2]
    assert [o.index for o in outputs[best].outputs] == want
    assert [o.score for o in outputs[best].outputs] == pytest.approx([means[i] for i in want], abs=1e-5)
    by_index = {o.index: o.token_ids for o in outputs[all_].outputs}
    assert [o.token_ids for o in outputs[best].outputs] == [by_index[i] for i in want]


def test_B066_buckets_chunks_and_budget_agree():
    """Budget 317: the largest bucket holds it, and no bucket more; a chunk beyond the budget is no bucket."""
    for chunk in (0, 100, 317):
        ladder = Buckets(SchedulerConfig(16, 317, chunk)).ladder
        assert max(b.num_prefill_tokens for b in ladder) == 317
        assert all(b.num_prefill_tokens <= 317 for b in ladder)
