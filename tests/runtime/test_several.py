"""The real runner with several steps a dispatch: what each request gets, stops inside, what a stopped row writes."""

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
        engine.add(prompt, SamplingParams(max_tokens=12, ignore_eos=True, **kind))
    for prompt in PROMPTS:  # drawn alone, to the end
        engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_k=20, seed=9))
    return run_all(engine)


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
def test_every_kind_of_request_gets_what_it_gets_without(tiny, make_engine, run_all, overlap):
    plain = _run(make_engine(tiny, chunk_tokens=5), run_all)
    engine = make_engine(tiny, chunk_tokens=5, overlap=overlap, num_steps=8, poison=True)
    several = _run(engine, run_all)
    assert engine.dispatches["inner"] > 15 and {"prefill", "penalties"} <= set(engine.dispatches)
    assert plain.keys() == several.keys()
    for name, output in plain.items():
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in several[name].outputs]


def test_rows_stop_inside_and_write_no_further(tiny, make_engine, run_all, greedy_judge):
    """Their next slots, in blocks reserved for them, hold what they held: nothing."""
    prompt = PROMPTS[0]
    full = greedy_judge(prompt, 16)
    at = next(i for i in range(3, 8) if full[i] not in full[:i])
    engine = make_engine(tiny, num_steps=8)
    ends = SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=(full[at],))
    first = engine.add(prompt, ends)
    second = engine.add(PROMPTS[2], SamplingParams(max_tokens=16, ignore_eos=True))
    engine.step()
    engine.step()
    (seq,) = engine._requests[first].sequences
    table = engine.manager.table(seq.seq_id)
    size, slots = engine.runner.block_size, range(len(prompt), len(prompt) + 8)
    data = np.asarray(engine.runner.pools[0].data)[:, :, 0]
    written = [not np.isnan(data[table[slot // size], slot % size]) for slot in slots]
    assert written == [i < at for i in range(8)]  # the stop token itself is never fed
    done = run_all(engine)
    assert list(done[first].outputs[0].token_ids) == full[: at + 1]
    assert list(done[second].outputs[0].token_ids) == greedy_judge(PROMPTS[2], 16)


def test_a_row_that_ended_in_the_dispatch_before_is_not_begun(tiny, make_engine, run_all, greedy_judge):
    """With overlap the next dispatch is on its way before its token is known; the device knows it."""
    prompt = PROMPTS[0]
    full = greedy_judge(prompt, 16)
    at = next(i for i in range(2, 8) if full[i] not in full[:i])
    engine = make_engine(tiny, num_steps=8, overlap=True)
    outs = []
    dispatch = engine.runner._dispatch_several

    def seen(*args):
        outs.append(dispatch(*args))
        return outs[-1]

    engine.runner._dispatch_several = seen
    try:
        name = engine.add(prompt, SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=(full[at],)))
        assert list(run_all(engine)[name].outputs[0].token_ids) == full[: at + 1]
    finally:
        del engine.runner._dispatch_several
    assert [int(out.taken) for out in outs][-1] == 0


def test_one_program_a_decode_bucket_made_when_first_asked_for(tiny, make_engine, run_all):
    engine = make_engine(tiny, num_steps=8)
    runner = engine.runner
    _run(engine, run_all)
    assert runner.steps_fn._cache_size() == 1
    with pytest.raises(ValueError, match=r"launch_several of 9 steps: the runner was built for num_steps=8"):
        runner.launch_several([None] * 9, None)
