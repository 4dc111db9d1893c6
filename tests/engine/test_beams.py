"""Beams: the search against its definition, and the engine's blocks against the search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from judges import dense_beams

from pagedjax.engine.beam import Beam, BeamSearch, Candidates, Hypothesis
from pagedjax.engine.request import FinishReason, SamplingParams


def row_of(logprobs):
    order = np.argsort(-np.asarray(logprobs), kind="stable")
    return Candidates(order, np.asarray(logprobs)[order])


def search_all(search, next_logprobs):
    """Run a search without engine or blocks; (ids, score), best first."""
    while not search.done:
        search.advance([row_of(next_logprobs(list(beam.token_ids))) for beam in search.running])
    return [(list(h.beam.token_ids), h.score) for h in search.finished]


def beams(width, steps, *, ends=(), **more):
    sampling = dict(max_tokens=steps, beam_width=width, n=width, stop_token_ids=tuple(ends), ignore_eos=True)
    return SamplingParams(**(sampling | more))


def found(output):
    return [(list(o.token_ids), pytest.approx(o.score, abs=1e-9)) for o in output.outputs]


# ------------------------------------------------------------------------- search


@pytest.mark.parametrize(("early", "stops"), [(False, True), ("never", False), (True, True)])
def test_B061_reach_of_the_best_running_beam(early, stops):
    """Score -1.0 finished; sum -3.3 at length 3 of 6: -1.1 as it stands, -0.55 at best."""
    search = BeamSearch(1, 6, 1.0, early, frozenset([0]), num_steps=2)
    ended = Beam((5, 0), (-1.0, -1.0), -2.0)
    search.finished = [Hypothesis(ended, ended.score(1.0), FinishReason.STOP)]
    search.running = [Beam((7, 7), (-1.0, -1.3), -2.3)]
    choices = search.advance([Candidates(np.array([4, 3, 0]), np.array([-1.0, -9.0, -9.5]))])
    assert search.done is stops
    assert len(choices) == (0 if stops else 1)
    assert search.finished[0].score == -1.0


@pytest.mark.parametrize("early", [True, False, "never"])
def test_B062_ends_at_the_step_limit_with_all_beams(early):
    search = BeamSearch(4, 10, 1.0, early)
    found = search_all(
        search, lambda ids: np.log(np.random.default_rng([len(ids), *ids]).dirichlet([1.0] * 9))
    )
    assert search.num_steps == 10
    assert [len(ids) for ids, _ in found] == [10] * 4


def test_B062_an_end_token_forced_at_once_ends_the_best_beam_at_length_1(make_engine, run_all):
    forced = np.log(np.array([1 - 1e-6] + [1e-7] * 10))
    found = search_all(BeamSearch(2, 10, end_ids=frozenset([0])), lambda ids: forced)
    assert found[0][0] == [0]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_texts(penalty):
    """Brute force: 3 tokens, one of which ends, up to 3 steps."""

    def model(ids):
        return np.log(np.random.default_rng([3, *ids]).dirichlet([0.7] * 3))

    texts = {}
    for length in (1, 2, 3):
        for ids in itertools.product(range(3), repeat=length):
            if 0 not in ids[:-1] and (ids[-1] == 0 or length == 3):
                total = sum(model(ids[:i])[ids[i]] for i in range(length))
                texts[ids] = total / length**penalty
    wide = search_all(BeamSearch(16, 3, penalty, "never", frozenset([0])), model)
    best = sorted(texts.values(), reverse=True)[: len(wide)]
    np.testing.assert_allclose([score for _, score in wide], best)


def test_min_tokens_pass_over_end_tokens():
    model = np.log(np.array([0.5, 0.3, 0.2]))
    found = search_all(BeamSearch(2, 6, end_ids=frozenset([0]), min_tokens=3), lambda ids: model)
    assert found and all(len(ids) >= 4 or 0 not in ids for ids, _ in found)
    assert min(len(ids) for ids, _ in found) == 4


# ------------------------------------------------------------------------- engine


@pytest.mark.parametrize(("width", "penalty"), [(2, 0.6), (4, 1.0), (6, 2.0)])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_B058_beams_equal_the_definition(
    make_engine, run_all, logprobs_judge, width, penalty, early, block_size
):
    engine = make_engine(num_blocks=400, block_size=block_size)
    prompts = [[1, 2, 3, 4, 5, 6], [9], list(range(20, 33))]
    ids = [
        engine.add(p, beams(width, 20, ends=(7, 11), length_penalty=penalty, early_stopping=early))
        for p in prompts[: 8 // width]
    ]
    outputs = run_all(engine)
    for request_id, prompt in zip(ids, prompts):
        want = dense_beams(logprobs_judge, prompt, width, 20, penalty, early, (7, 11))
        assert found(outputs[request_id]) == want
        for beam in outputs[request_id].outputs:  # re-scored in one pass
            whole = [*prompt, *beam.token_ids]
            total = sum(logprobs_judge(whole[:i])[whole[i]] for i in range(len(prompt), len(whole)))
            assert beam.score == pytest.approx(total / len(beam.token_ids) ** penalty)
    assert engine.manager.num_free == engine.manager.num_usable


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_B058_preempted_beams_come_back_the_same(
    make_engine, run_all, logprobs_judge, judge, preemption, chunk, caching
):
    options = dict(preemption=preemption, host_blocks=200) if preemption == "swap" else {}
    engine = make_engine(
        num_blocks=21, block_size=4, max_num_seqs=16, chunk_tokens=chunk, prefix_caching=caching, **options
    )
    first = engine.add(list(range(60, 70)), SamplingParams(max_tokens=40, ignore_eos=True))
    jobs = {}
    for n, prompt in enumerate([[1, 2, 3, 4, 5, 6, 7], [40, 41], [50, 51, 52]]):
        jobs[engine.add(prompt, beams(3 + n % 2, 14, ends=(3,)))] = (prompt, 3 + n % 2)
    outputs = run_all(engine)
    assert sum(outputs[i].num_preemptions for i in jobs) > 0
    assert (engine.scheduler.num_swaps > 0) == (preemption == "swap")
    assert list(outputs[first].outputs[0].token_ids) == judge(list(range(60, 70)), 40)
    for request_id, (prompt, width) in jobs.items():
        want = dense_beams(logprobs_judge, prompt, width, 14, ends=(3,))
        assert found(outputs[request_id]) == want
    assert engine.manager.num_free == engine.manager.num_usable


def test_B062_engine_runs_max_tokens_steps(make_engine, run_all):
    engine = make_engine()
    request_id = engine.add([1, 2, 3], beams(4, 10))
    output = run_all(engine)[request_id]
    assert len(engine.runner.plans) == 10
    assert [len(o.token_ids) for o in output.outputs] == [10] * 4
    assert {o.finish_reason for o in output.outputs} == {FinishReason.LENGTH}


def test_B053_beams_share_blocks_and_copy_the_last_one(make_engine, run_all):
    engine = make_engine(block_size=4)
    request_id = engine.add(list(range(1, 15)), beams(4, 12))  # 3 full blocks and 2 tokens
    engine.step()
    engine.step()
    plan = engine.runner.plans[-1]
    assert len(plan.rows) == 4
    assert sum(len(batch.src) for batch in plan.copies.batches) == 3  # the last owner writes in place
    assert (plan.num_named_blocks, plan.num_held_blocks) == (16, 7)
    output = run_all(engine)[request_id]
    assert output.num_copies >= 3
    assert all(plan.num_held_blocks < plan.num_named_blocks for plan in engine.runner.plans[1:])


def test_beams_that_come_back_compute_once_what_they_share(make_engine):
    """To the token: the first computes up to where they part, the others from there."""
    engine = make_engine(prefix_caching=False)
    engine.add([1, 2, 3, 4, 5], beams(3, 30))
    for _ in range(6):
        engine.step()
    (request,) = engine.scheduler.running
    texts = [seq.chain.tokens.copy() for seq in request.sequences]
    common = next(i for i in range(len(texts[0])) if len({text[i] for text in texts}) > 1)
    assert 5 <= common < len(texts[0]) - 1
    engine.scheduler._preempt(request)
    for _ in range(2):
        engine.step()
    first, second = engine.runner.plans[-2:]
    assert [(row.start, row.num_tokens) for row in first.rows] == [(0, common)]
    assert {(row.start, row.start + row.num_tokens) for row in second.rows} == {(common, len(texts[0]))}
    assert len(second.rows) == 3


def test_B104_beams_report_cached_tokens_once(make_engine, run_all, greedy):
    engine = make_engine(num_blocks=64, block_size=16)
    prompt = list(range(1, 50))
    cold = engine.add(prompt, greedy(2))
    outputs = run_all(engine)
    warm = engine.add(prompt, beams(4, 6))
    outputs |= run_all(engine)
    assert (outputs[cold].num_cached_tokens, outputs[warm].num_cached_tokens) == (0, 48)
    assert engine.manager.stats.hit_tokens == 48


def test_beams_that_outgrow_the_pool_end_with_a_status(make_engine, run_all):
    engine = make_engine(num_blocks=8, block_size=4)
    request_id = engine.add([1, 2, 3, 4, 5], beams(3, 60))
    output = run_all(engine)[request_id]
    assert {o.finish_reason for o in output.outputs} == {FinishReason.CAPACITY}
    assert [o.score for o in output.outputs] == sorted((o.score for o in output.outputs), reverse=True)
    assert engine.manager.num_free == engine.manager.num_usable


def test_aborted_beams_give_their_blocks_back(make_engine, run_all):
    engine = make_engine()
    request_id = engine.add([1, 2, 3], beams(4, 30))
    for _ in range(5):
        assert engine.step() == []  # nothing to show before the end
    output = engine.abort(request_id)
    assert output.finished and len(output.outputs) == 4
    assert {o.finish_reason for o in output.outputs} == {FinishReason.ABORT}
    run_all(engine)
    assert engine.manager.num_free == engine.manager.num_usable


def test_fewer_beams_are_returned_than_searched(make_engine, run_all):
    engine = make_engine()
    few, all_ = engine.add([4, 4], beams(4, 8, n=2)), engine.add([4, 4], beams(4, 8))
    outputs = run_all(engine)
    assert outputs[few].outputs == outputs[all_].outputs[:2]


def test_beams_take_their_places_before_they_fork(make_engine, run_all, greedy):
    engine = make_engine(max_num_seqs=5, num_blocks=200)
    ids = [engine.add([n, 1], beams(4, 6)) for n in range(3)] + [engine.add([8, 8], greedy(9))]
    outputs = run_all(engine)
    assert max(len(plan.rows) for plan in engine.runner.plans) <= 5
    assert all(outputs[i].finished for i in ids)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(beam_width=-1), "beam_width=-1"),
        (dict(beam_width=2, n=3), "n=3: must not exceed beam_width=2"),
        (dict(beam_width=2, temperature=1.0), "temperature"),
        (dict(beam_width=2, stop=["x"]), "stop"),
        (dict(beam_width=2, best_of=2), "best_of"),
        (dict(beam_width=2, repetition_penalty=1.2), "penalties"),
        (dict(beam_width=2, early_stopping="soon"), "early_stopping='soon'"),
        (dict(n=3, best_of=2), "best_of=2"),
        (dict(min_tokens=9, max_tokens=8), "min_tokens=9"),
        (dict(logprobs=65), "logprobs=65"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0"),
        (dict(presence_penalty=float("nan")), "presence_penalty=nan"),
        (dict(logit_bias={-1: 2.0}), r"logit_bias\[-1\]"),
        (dict(logit_bias=dict.fromkeys(range(301), 1.0)), "logit_bias of 301"),
    ],
)
def test_parameters_that_contradict_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_widths_the_step_cannot_serve_are_refused(make_engine):
    engine = make_engine(max_num_seqs=64)
    with pytest.raises(ValueError, match="needs 120 candidates"):
        engine.add([1], beams(40, 5, ends=(1, 2)))
    with pytest.raises(ValueError, match="known at the end only"):
        next(engine.stream([1], beams(2, 5)))


def test_beams_that_end_before_their_first_token_say_why(make_engine):
    engine = make_engine()
    request = engine.add([1, 2, 3], beams(2, 4))
    (only,) = engine.abort(request).outputs
    assert only.token_ids == () and only.finish_reason is FinishReason.ABORT
