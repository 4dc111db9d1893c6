"""Several steps a dispatch: the same tokens, rules by name, blocks ahead that come back, nothing found too far."""

import random
from collections import Counter

import pytest

from pagedjax.config import Config
from pagedjax.engine.limits import check_num_steps
from pagedjax.engine.request import SamplingParams
from pagedjax.report.record import Recorder, read_record, replay
from pagedjax.sim.play import play

BLOCK = 4
STEPS = 5


def _records(engine):
    records = []
    engine.on_step = records.append
    return records


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 64},
        {"num_blocks": 14, "partial": 1},
        {"num_blocks": 10, "host_blocks": 16, "preemption": "swap", "index": "radix"},
        {"num_blocks": 14, "host_blocks": 8},
    ],
    ids=["roomy", "recompute", "swap", "tier"],
)
def test_tokens_are_the_judges_and_nobody_is_preempted_for_steps_ahead(
    make_engine, run_all, judge, options, overlap
):
    engines = [
        make_engine(
            block_size=BLOCK,
            max_model_len=40,
            token_budget=16,
            chunk_tokens=5,
            max_num_seqs=4,
            overlap=overlap,
            num_steps=steps,
            **options,
        )
        for steps in (1, STEPS)
    ]
    for engine in engines:
        rng = random.Random(0)
        asked, stop = {}, {}
        for _ in range(12):
            prompt = [rng.randrange(97) for _ in range(rng.randint(1, 12))]
            full = judge(prompt, 20)
            ends = rng.random() < 0.5
            at = rng.randint(1, 12)
            params = SamplingParams(
                max_tokens=rng.randint(13, 20),
                n=rng.choice([1, 1, 2]),
                ignore_eos=True,
                stop_token_ids=(full[at],) if ends else (),
            )
            name = engine.add(prompt, params)
            asked[name], stop[name] = prompt, full.index(full[at]) + 1 if ends else params.max_tokens
        done = run_all(engine)
        for name, prompt in asked.items():
            for sample in done[name].outputs:
                assert list(sample.token_ids) == judge(prompt, stop[name])
        assert engine.manager.num_free == engine.manager.num_usable
    one, several = engines
    assert several.dispatches["inner"] >= 2 * several.dispatches["several"] > 0
    assert set(one.dispatches) == {"off"} and several.dispatches.total() == several.overlaps.total()
    # A row that ends early gives its blocks back later, by at most the steps of a dispatch.
    assert several.scheduler.num_preemptions <= one.scheduler.num_preemptions + 3


def test_no_step_runs_ahead_without_room(make_engine, run_all, greedy, judge):
    """All blocks are taken, and a row's next token needs one: who loses his would have lost them anyway."""
    preemptions = []
    for steps in (1, 8):
        engine = make_engine(num_blocks=5, block_size=BLOCK, num_steps=steps)
        first, second = engine.add([1] * 7, greedy(5)), engine.add([2] * 5, greedy(3))
        done = run_all(engine)
        assert list(done[first].outputs[0].token_ids) == judge([1] * 7, 5)
        assert list(done[second].outputs[0].token_ids) == judge([2] * 5, 3)
        preemptions.append(engine.scheduler.num_preemptions)
    assert engine.dispatches["several"] and engine.dispatches["no room"]
    assert preemptions == [1, 1]


def test_blocks_that_were_not_written_come_back_and_nothing_of_them_is_found(make_engine, run_all, judge):
    engine = make_engine(block_size=BLOCK, num_steps=16)
    prompt = [1, 2, 3, 4, 5]
    full = judge(prompt, 20)
    at = next(i for i in range(3, 9) if full[i] not in full[:i])
    request = engine.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(full[at],)))
    (seq,) = engine._requests[request].sequences
    engine.step()
    engine.step()
    ahead = len(engine.manager.table(seq.seq_id))
    assert ahead == -(-(len(prompt) + 17) // BLOCK) > len(prompt) + at // BLOCK
    output = run_all(engine)[request].outputs[0]
    assert list(output.token_ids) == full[: at + 1] and output.finish_reason == "stop"
    written = {b for b in range(64) if (engine.runner.pool[b] != -1).any()}
    assert len(written) == -(-(len(seq.chain) - 1) // BLOCK)
    keys = set(engine.manager.snapshot()["groups"][0]["keys"].values())
    assert keys == {seq.chain.digest(i) for i in range((len(seq.chain) - 1) // BLOCK)}
    assert not engine.flights and engine.manager.num_free == engine.manager.num_usable


def test_a_stop_string_drops_what_was_computed_behind_it(make_engine, run_all, judge):
    engine = make_engine(num_steps=8, decode=lambda ids: "".join(chr(200 + i) for i in ids))
    full = judge([1, 2, 3], 9)
    stop = "".join(chr(200 + i) for i in full[3:5])
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True, stop=stop))
    (seq,) = engine._requests[request].sequences
    output = run_all(engine)[request].outputs[0]
    assert list(output.token_ids) == full[:5] and output.text == "".join(chr(200 + i) for i in full[:3])
    keys = set(engine.manager.snapshot()["groups"][0]["keys"].values())
    assert keys == {seq.chain.digest(i) for i in range((len(seq.chain) - 1) // BLOCK)}
    assert engine.manager.num_free == engine.manager.num_usable


def test_a_row_ends_inside_by_its_length_and_by_the_longest_one(make_engine, run_all, judge):
    engine = make_engine(num_steps=8, max_model_len=12)
    prompts, lengths = ([1, 2, 3], [4, 5], [6] * 7), (3, 9, 20)
    names = [
        engine.add(p, SamplingParams(max_tokens=n, ignore_eos=True))
        for p, n in zip(prompts, lengths, strict=True)
    ]
    done = run_all(engine)
    for name, prompt, length in zip(names, prompts, (3, 9, 5), strict=True):
        assert list(done[name].outputs[0].token_ids) == judge(prompt, length)
        assert done[name].outputs[0].finish_reason == "length"
    rows = [len(plan.rows) for plan in engine.runner.plans]
    assert rows == [3, 3, 3, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("beams", dict(beam_width=2)),
        ("penalties", dict(presence_penalty=0.5, ignore_eos=True)),
        ("min_tokens", dict(min_tokens=3, stop_token_ids=(5,))),
        ("prefill", dict(ignore_eos=True)),
        ("logprobs", dict(best_of=2, temperature=1.0, ignore_eos=True)),
        ("end", dict(ignore_eos=True)),
    ],
)
def test_a_step_alone_says_by_which_rule(make_engine, run_all, rule, params):
    engine = make_engine(num_steps=4)
    records = _records(engine)
    length = 2 if rule == "end" else 6
    engine.add([1, 2, 3], SamplingParams(max_tokens=length, **params))
    run_all(engine)
    assert records[0].dispatch == "prefill" and rule in (engine.dispatches)
    assert bool(engine.dispatches["several"]) == (rule in ("prefill", "min_tokens"))
    assert engine.dispatches == Counter(record.dispatch for record in records)


def test_out_of_blocks_ends_at_the_token_that_it_ends_at_without(make_engine, run_all, greedy, judge):
    ends = []
    for steps in (1, 8):
        engine = make_engine(num_blocks=6, block_size=BLOCK, num_steps=steps)
        request = engine.add([1, 2, 3], greedy(60, n=2))
        outputs = run_all(engine)[request].outputs
        ends.append([(len(o.token_ids), o.finish_reason) for o in outputs])
        for output in outputs:
            assert list(output.token_ids) == judge([1, 2, 3], len(output.token_ids))
        assert engine.manager.num_free == engine.manager.num_usable
    assert ends[0] == ends[1] and "capacity" in [reason for _, reason in ends[1]]
    assert engine.dispatches["several"]


def test_who_waits_for_a_place_gets_it_as_soon_as_without(make_engine, run_all, greedy):
    starts = []
    for steps in (1, 8):
        engine = make_engine(num_steps=steps, max_num_seqs=2)
        records = _records(engine)
        for prompt, length in (([1, 2], 4), ([3, 4], 9), ([5, 6], 3)):
            engine.add(prompt, greedy(length))
        run_all(engine)
        starts.append([[(row.seq.seq_id, row.start) for row in r.plan.rows] for r in records])
    assert starts[0] == starts[1]
    assert [r.dispatch for r in records[:5]] == ["prefill", "several", "inner", "inner", "prefill"]


def test_aborted_and_new_weights_within_a_dispatch(make_engine, run_all, greedy, judge):
    for overlap in (False, True):
        engine = make_engine(num_steps=4, overlap=overlap)
        first, second = engine.add([1, 2, 3], greedy(12)), engine.add([4, 5], greedy(12))
        engine.step()
        engine.step()
        assert engine.flights
        assert engine.abort(first).outputs[0].finish_reason == "abort"
        engine.step()
        engine.runner.weights_version += 1
        engine.runner.pool[:] = -7  # what it held belongs to the weights before
        assert list(run_all(engine)[second].outputs[0].token_ids) == judge([4, 5], 12)
        third = engine.add([1, 2, 3], greedy(12))
        engine.step()
        engine.step()
        engine.abort(third)
        assert not engine.has_work and engine.step() == []
        assert engine.manager.num_free == engine.manager.num_usable


def test_a_record_holds_each_inner_step(make_engine, run_all, greedy, tmp_path):
    """And replays to what the manager knew after it; the rows are those of a run step by step."""
    rows = []
    for steps in (1, 4):
        engine = make_engine(num_steps=steps)
        with Recorder(tmp_path / "run.jsonl", engine, {"kind": "measured"}):
            engine.add([1, 2, 3], greedy(9))
            engine.add([1, 2, 3, 4, 5], greedy(4))
            run_all(engine)
            after = engine.manager.snapshot()
        frames = list(read_record(tmp_path / "run.jsonl"))
        state = replay(frames).snapshot()
        assert state["groups"][0]["keys"] == after["groups"][0]["keys"] and state["tables"] == after["tables"]
        rows.append([(f["n"], f.get("rows"), f.get("paused")) for f in frames if f["frame"] == "step"])
    assert engine.dispatches["inner"] and rows[0] == rows[1] and len(rows[0]) == 9


def test_what_does_not_go_with_several_steps_is_refused_by_name(make_engine):
    config = Config().replace({"runtime.num_steps": 8})
    check_num_steps(config)
    for given in (0, 65):
        with pytest.raises(ValueError, match=rf"runtime\.num_steps={given}: must be between 1 and 64; try 8"):
            config.replace({"runtime.num_steps": given})
    with pytest.raises(
        ValueError, match=r"runtime\.num_steps=8: a step of runtime\.deterministic is several"
    ):
        config.replace({"runtime.deterministic": True})
    with pytest.raises(ValueError, match=r"runtime\.num_steps=8: a reservation .*set num_steps to 1"):
        check_num_steps(config.replace({"cache.reservation": "max"}))
    with pytest.raises(ValueError, match=r"runtime\.num_steps=8: a trace is played step by step.*to 1"):
        play([], make_engine(num_steps=8))
