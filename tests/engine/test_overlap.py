"""Steps that are planned while one runs: the same tokens, nothing found of what was computed too far, rules by name."""

import random

import pytest

from pagedjax.config import Config
from pagedjax.engine.limits import choose_overlap
from pagedjax.engine.request import SamplingParams
from pagedjax.report.record import Recorder

BLOCK = 4


def _records(engine):
    records = []
    engine.on_step = records.append
    return records


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 64},
        {"num_blocks": 14, "partial": 1},
        {"num_blocks": 10, "host_blocks": 16, "preemption": "swap", "index": "radix"},
    ],
    ids=["roomy", "recompute", "swap"],
)
def test_tokens_are_the_judges_and_most_steps_are_planned_ahead(make_engine, run_all, judge, options):
    rng = random.Random(0)
    engine = make_engine(
        block_size=BLOCK,
        max_model_len=40,
        token_budget=16,
        chunk_tokens=5,
        max_num_seqs=4,
        overlap=True,
        **options,
    )
    asked, stop = {}, {}
    for _ in range(12):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 12))]
        full = judge(prompt, 20)
        ends = rng.random() < 0.5
        at = rng.randint(1, 12)
        params = SamplingParams(
            max_tokens=20,
            n=rng.choice([1, 1, 2]),
            ignore_eos=True,
            stop_token_ids=(full[at],) if ends else (),
        )
        name = engine.add(prompt, params)
        asked[name], stop[name] = prompt, full.index(full[at]) + 1 if ends else 20
    done = run_all(engine)
    for name, prompt in asked.items():
        for sample in done[name].outputs:
            assert list(sample.token_ids) == judge(prompt, stop[name])
    assert engine.manager.num_free == engine.manager.num_usable
    assert engine.overlaps["ahead"] > 0.4 * engine.overlaps.total()
    if engine.manager.num_usable < 20:
        assert engine.overlaps["no room"] and engine.scheduler.num_preemptions


def test_nothing_is_indexed_of_a_step_too_far(make_engine, run_all, judge):
    """A stop token that fills no block: the next position was computed, and nobody may find it."""
    engine = make_engine(block_size=BLOCK, overlap=True)
    prompt = [1, 2, 3, 4, 5]
    full = judge(prompt, 8)
    at = next(i for i in range(2, 8) if full[i] not in full[:i])
    request = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(full[at],)))
    (seq,) = engine._requests[request].sequences
    output = run_all(engine)[request].outputs[0]
    assert list(output.token_ids) == full[: at + 1] and output.finish_reason == "stop"
    fed = max(row.start + row.num_tokens for plan in engine.runner.plans for row in plan.rows)
    assert fed == len(seq.chain)  # the last token's own position, which no step without overlap computes
    keys = set(engine.manager.snapshot()["groups"][0]["keys"].values())
    assert keys == {seq.chain.digest(i) for i in range((len(seq.chain) - 1) // BLOCK)}
    assert not engine.flights and engine.manager.num_free == engine.manager.num_usable


def test_a_stop_string_ends_a_step_behind(make_engine, run_all, judge):
    engine = make_engine(overlap=True, decode=lambda ids: "".join(chr(200 + i) for i in ids))
    full = judge([1, 2, 3], 9)
    stop = "".join(chr(200 + i) for i in full[3:5])
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True, stop=stop))
    output = run_all(engine)[request].outputs[0]
    assert list(output.token_ids) == full[:5]
    assert output.text == "".join(chr(200 + i) for i in full[:3])


def test_aborted_while_its_step_is_on_its_way(make_engine, run_all, greedy, judge):
    engine = make_engine(overlap=True)
    first, second = engine.add([1, 2, 3], greedy(9)), engine.add([4, 5], greedy(9))
    engine.step()
    assert engine.flights
    assert engine.abort(first).outputs[0].finish_reason == "abort"
    assert list(run_all(engine)[second].outputs[0].token_ids) == judge([4, 5], 9)
    third = engine.add([1, 2, 3], greedy(9))
    engine.step()
    engine.abort(third)
    assert not engine.has_work and engine.step() == []
    assert engine.manager.num_free == engine.manager.num_usable


def test_new_weights_while_a_step_is_on_its_way(make_engine, run_all, greedy, judge):
    engine = make_engine(overlap=True)
    request = engine.add([1, 2, 3, 4, 5], greedy(9))
    engine.step()
    assert engine.flights
    engine.runner.weights_version += 1
    engine.runner.pool[:] = -7  # what it held belongs to the weights before
    assert list(run_all(engine)[request].outputs[0].token_ids) == judge([1, 2, 3, 4, 5], 9)


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("beams", dict(beam_width=2)),
        ("penalties", dict(presence_penalty=0.5, ignore_eos=True)),
        ("min_tokens", dict(min_tokens=3, stop_token_ids=(5,))),
        ("fork", dict(n=2, ignore_eos=True)),
    ],
)
def test_a_step_that_has_to_wait_says_by_which_rule(make_engine, run_all, rule, params):
    engine = make_engine(overlap=True)
    records = _records(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=5, **params))
    run_all(engine)
    assert [r.overlap for r in records[:2]] == ["first", rule]
    assert (records[-1].overlap == "ahead") == (rule in ("fork", "min_tokens"))
    assert engine.overlaps.total() == len(records)


def test_somebody_who_waits_is_admitted_before_the_next_step(make_engine, run_all, greedy):
    """And a prompt hits what the step before wrote, as without overlap."""
    engine = make_engine(overlap=True, token_budget=8)
    records = _records(engine)
    first = engine.add(list(range(8)), greedy(6))
    second = engine.add([*range(8), 9], greedy(6))
    done = run_all(engine)
    assert [r.overlap for r in records[:3]] == ["first", "admission", "ahead"]
    assert done[first].num_cached_tokens == 0 and done[second].num_cached_tokens == 8


def test_a_record_is_of_steps_one_after_another(make_engine, run_all, greedy, tmp_path):
    engine = make_engine(overlap=True)
    records = _records(engine)
    with Recorder(tmp_path / "run.jsonl", engine, {"kind": "measured"}):
        engine.add([1, 2, 3], greedy(3))
        run_all(engine)
    assert [r.overlap for r in records] == ["first", "record", "record"]


def test_what_the_setting_comes_to():
    config = Config()
    assert choose_overlap(config, "gpu").on and not choose_overlap(config, "cpu").on
    on = config.replace({"runtime.overlap": "on"})
    assert choose_overlap(on, "cpu").on
    assert not choose_overlap(on.replace({"runtime.overlap": "off"}), "gpu").on
    assert not choose_overlap(config.replace({"runtime.deterministic": True}), "gpu").on
    reserved = {"cache.reservation": "max"}
    assert not choose_overlap(config.replace(reserved), "gpu").on
    with pytest.raises(ValueError, match=r"runtime\.overlap=on: a reservation .*set overlap to auto or off"):
        choose_overlap(on.replace(reserved), "gpu")
    with pytest.raises(
        ValueError, match=r"runtime\.overlap=on: a step of runtime\.deterministic is several calls"
    ):
        on.replace({"runtime.deterministic": True})
    with pytest.raises(ValueError, match=r"runtime\.overlap=maybe: must be one of auto, on, off; try auto"):
        config.replace({"runtime.overlap": "maybe"})
