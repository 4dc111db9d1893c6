"""The real runner with steps planned ahead: every kind of request gets what it gets without; a device that fails."""

import numpy as np
import pytest

from pagedjax.engine.request import SamplingParams

PROMPTS = [[5, 9, 200, 31, 7, 7, 40, 2, 11, 90][:n] for n in (10, 3, 7, 1)]
KINDS = {
    "drawn": dict(temperature=0.9, top_p=0.9, seed=3, n=3),
    "logprobs": dict(logprobs=3, prompt_logprobs=2),
    "best of": dict(best_of=2, temperature=1.0, seed=5),
    "penalties": dict(presence_penalty=0.7, min_tokens=2),
    "beams": dict(beam_width=2),
}


def _run(engine, run_all):
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    for prompt, kind in zip(PROMPTS * 2, KINDS.values(), strict=False):
        engine.add(prompt, SamplingParams(max_tokens=7, ignore_eos=True, **kind))
    return run_all(engine)


def test_every_kind_of_request_gets_what_it_gets_without(tiny, make_engine, run_all):
    plain = _run(make_engine(tiny, chunk_tokens=5), run_all)
    engine = make_engine(tiny, chunk_tokens=5, overlap=True)
    overlapped = _run(engine, run_all)
    assert engine.overlaps["ahead"] > 5 and {"admission", "fork", "penalties"} <= set(engine.overlaps)
    assert plain.keys() == overlapped.keys()
    for name, output in plain.items():
        other = overlapped[name]
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in other.outputs]
        for ours, theirs in zip(output.outputs, other.outputs, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            np.testing.assert_allclose(ours.logprobs or (), theirs.logprobs or (), atol=2e-5)
        for ours, theirs in zip(output.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (ours is None and theirs is None) or ours.token.token_id == theirs.token.token_id


def test_programs_are_those_without(tiny, make_engine, run_all):
    """What was drawn comes to the same program, from the device or as zeros from the host."""
    engine = make_engine(tiny)
    _run(engine, run_all)
    before = engine.runner.num_programs
    _run(make_engine(tiny, overlap=True), run_all)
    assert engine.runner.num_programs == before


def test_a_device_that_fails_under_two_steps_loses_both_and_nothing_else(
    tiny, make_engine, run_all, greedy_judge
):
    engine = make_engine(tiny, overlap=True)
    request = engine.add(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    assert engine.flights
    collect = engine.runner.collect

    def broken(launched):
        raise RuntimeError("the device is gone")

    engine.runner.collect = broken
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert not engine.flights
    engine.runner.collect = collect
    assert list(run_all(engine)[request].outputs[0].token_ids) == greedy_judge(PROMPTS[0], 8)


def test_only_the_step_begun_last_is_gone_on_from(tiny, make_engine):
    engine = make_engine(tiny, overlap=True)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    first = engine.runner.launch(engine.scheduler.schedule(), None)
    plan = engine.scheduler.schedule_ahead()
    engine.runner.launch(plan, first)
    with pytest.raises(ValueError, match="launch: after must be the step begun last"):
        engine.runner.launch(plan, first)
