"""A trace on a real engine: the judge of `play` is `simulate`, of `follow` the run's own plans."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.engine.shapes import Bucket, Buckets
from pagedjax.engine.step import StepPlan
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.calibration import errors, make_phases, measure, reached_roofline, warm_phases
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.play import check_request, follow, play
from pagedjax.sim.programs import (
    RATES,
    Load,
    StepSample,
    StepTimes,
    fit_steps,
    limit_numbers,
    load_of,
    shape_numbers,
)
from pagedjax.sim.requests import PlayRequests
from pagedjax.sim.runner import SimRunner, VirtualClock
from pagedjax.sim.simulator import hash_plan, simulate
from pagedjax.sim.trace import Trace, TraceRequest

LIMITS = SchedulerConfig(max_num_seqs=4, token_budget=16)
BLOCKS, SIZE, LONGEST, VOCAB = 41, 4, 96, 258


def _trace(rows: list[TraceRequest], granularity: int = 1) -> Trace:
    return Trace("rows", "test", granularity, True, lambda: iter(rows))


def _workload(seed: int, count: int = 14, gap: float = 0.5, answers: bool = False) -> Trace:
    """Prompts that share stems, at random times; some with the answer that they are to get."""
    rng = np.random.default_rng([7, seed])
    stems = rng.integers(0, 256, (2, 30)).astype(np.int32)
    rows, now = [], 0.0
    for _ in range(count):
        now += float(rng.exponential(gap))
        stem = stems[rng.integers(2)][: int(rng.integers(4, 30))]
        prompt = np.concatenate([stem, rng.integers(0, 256, 3).astype(np.int32)])
        length = int(rng.integers(1, 30))
        given = rng.integers(0, 256, length).astype(np.int32) if answers and rng.integers(2) else None
        rows.append(TraceRequest(now, len(prompt), length, token_ids=prompt, output_ids=given))
    return _trace(rows)


def _virtual(
    step_s: Any, blocks: int = BLOCKS, limits: SchedulerConfig = LIMITS
) -> tuple[Engine, VirtualClock]:
    """An engine whose device takes no real time."""
    clock = VirtualClock()
    manager = PagedManager(num_blocks=blocks, block_size=SIZE)
    runner = SimRunner(manager.pool_blocks, SIZE, step_s, clock, lambda name, sample, position: 7)
    return Engine(manager, runner, limits, max_model_len=LONGEST, clock=clock), clock


def _sleep(clock: VirtualClock) -> Any:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    return sleep


def _seconds(plan: StepPlan) -> float:
    return 0.1 + 0.01 * plan.num_tokens


@pytest.mark.parametrize(("seed", "in_flight"), [(0, 0), (1, 0), (2, 0), (3, 2), (4, 6)])
def test_play_on_a_virtual_clock_is_simulate(seed: int, in_flight: int) -> None:
    trace = _workload(seed)
    given = _trace([replace(r, output_ids=np.full(r.num_output, 7, np.int32)) for r in trace])
    engine, clock = _virtual(_seconds)
    requests = PlayRequests(given, VOCAB)
    played = play(requests, engine, in_flight=in_flight, hash_plans=True, sleep=_sleep(clock))
    manager = PagedManager(num_blocks=BLOCKS, block_size=SIZE)
    ours = simulate(
        given, manager, _seconds, LIMITS, max_model_len=LONGEST, hash_plans=True, in_flight=in_flight
    )
    assert played.result.plan_hash == ours.plan_hash
    assert len(played.result.records) == len(ours.records) == 14
    for mine, theirs in zip(played.result.records, ours.records):
        for name in ("arrival_s", "admitted_s", "first_token_s", "finished_s"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name)), name
        rest = ("num_input", "num_output", "num_cached", "num_preemptions", "reason")
        assert [getattr(mine, n) for n in rest] == [getattr(theirs, n) for n in rest]
    for name in ("num_steps", "busy_s", "batch", "held", "most_held"):
        assert getattr(played.result, name) == pytest.approx(getattr(ours, name)), name
    assert played.wall_s == pytest.approx(played.result.busy_s + played.idle_s)


@pytest.fixture(scope="module")
def real_runner() -> Any:
    jax = pytest.importorskip("jax")
    from judges import compile_quickly

    from pagedjax.kernels import KVLayout
    from pagedjax.runtime import JaxRunner
    from pagedjax.testing import tiny_config, tiny_params

    model = tiny_config()
    layout = KVLayout(model.num_layers, BLOCKS, SIZE, model.num_kv_heads, model.head_dim, "float32")
    params = jax.tree.map(jax.device_put, tiny_params(model))
    buckets = Buckets(LIMITS, decode_sizes=1, prefill_sizes=1)
    runner = JaxRunner(model, params, layout, LIMITS, max_model_len=LONGEST, buckets=buckets, host_blocks=40)
    compile_quickly(runner)
    return runner


REAL = {
    "room for all": {},
    "tight": dict(num_blocks=24),
    "swap": dict(num_blocks=24, host_blocks=40, preemption="swap"),
    "several samples": dict(n=2),
    "given answers": dict(answers=True),
    "stopped": dict(until=12),
}


@pytest.mark.parametrize("case", sorted(REAL))
def test_a_run_is_planned_the_same_once_more(real_runner: Any, case: str) -> None:
    """Plan by plan what the decoder did, with the arrivals where they were, though they came by the clock."""
    options = dict(REAL[case])
    limits = replace(LIMITS, preemption=options.pop("preemption", "recompute"))
    n, answers, until = (options.pop(name, None) for name in ("n", "answers", "until"))
    used = options.pop("num_blocks", BLOCKS)
    trace = _workload(5, count=20, gap=0.004, answers=bool(answers))
    requests = PlayRequests(trace, VOCAB, n=n or 1)

    def manager() -> PagedManager:
        made = PagedManager(num_blocks=BLOCKS, block_size=SIZE, **options)
        if used < BLOCKS:  # somebody holds the rest
            from pagedjax.cache import TokenChain

            hog = TokenChain([0] * ((BLOCKS - used) * SIZE), block_size=SIZE)
            made.begin(-1, hog)
            assert made.reserve(-1, len(hog))
        return made

    engine = Engine(manager(), real_runner, limits, max_model_len=LONGEST)
    hashes: list[bytes] = []
    execute = real_runner.execute

    def watched(plan: StepPlan) -> Any:
        hashes.append(hash_plan(plan))
        if until is not None and len(hashes) == until:
            clock_end.append(True)
        return execute(plan)

    clock_end: list[bool] = []
    real_runner.execute = watched
    try:
        stop = _StopAt(engine, until) if until else None
        played = play(requests, engine, keep=True, until_s=stop or float("inf"))  # type: ignore[arg-type]
    finally:
        del real_runner.execute
    timeline = played.timeline
    assert timeline is not None and timeline.digests == hashes
    assert played.result.plan_hash == hashlib.sha256(b"".join(hashes)).hexdigest()
    assert engine.runner is real_runner and not engine.has_work
    twin = manager()
    found = follow(
        timeline,
        twin,
        limits,
        lambda plan: 0.5 * len(plan.rows),
        max_model_len=LONGEST,
        block_bytes=real_runner.block_bytes,
    )
    assert found.equal and found.steps == len(hashes) and found.plan_hash == played.result.plan_hash
    assert found.seconds.sum() > 0 and np.count_nonzero(found.seconds) == len(hashes)
    if until is None:
        assert twin.stats == engine.manager.stats
        assert len(played.result.records) == 20 and twin.stats.hit_tokens > 0
    else:
        assert len(hashes) == until and len(played.result.records) < 20
    if case in ("tight", "swap"):
        assert sum(r.num_preemptions for r in played.result.records) > 0
        assert (played.result.num_swaps > 0) == (case == "swap")
    if answers:
        rows = list(trace)
        told = [i for i, row in enumerate(rows) if row.output_ids is not None]
        assert told and all(timeline.answers[str(i), 0] == rows[i].output_ids.tolist() for i in told)
    # The judge can tell: under other limits, and where the first request comes a step later than it did.
    other = follow(
        timeline, manager(), replace(limits, token_budget=9), lambda plan: 1.0, max_model_len=LONGEST
    )
    assert not other.equal
    step, at, request = timeline.requests[0]
    timeline.requests[0] = (step + 1, at, request)
    other = follow(timeline, manager(), limits, lambda plan: 1.0, max_model_len=LONGEST)
    assert not other.equal and other.equal_steps == 0


class _StopAt(float):
    """A time that has come once an engine has made so many steps."""

    def __new__(cls, engine: Engine, steps: int) -> _StopAt:
        made = super().__new__(cls, 1e9)
        made.engine, made.steps = engine, steps
        return made

    def __gt__(self, now: float) -> bool:
        return self.engine.scheduler.step < self.steps


def test_what_cannot_run_to_its_end_is_refused_by_name() -> None:
    rows = [
        TraceRequest(0.0, 90, 4),
        TraceRequest(0.0, 90, 7),
        TraceRequest(0.0, 96, 1),
        TraceRequest(0.0, 40, 50),
    ]
    refused: dict[str, str] = {}
    engine, clock = _virtual(_seconds, blocks=24)
    requests = PlayRequests(_trace(rows, 0), VOCAB)
    played = play(requests, engine, on_refused=refused.__setitem__, sleep=_sleep(clock))
    assert played.result.refused == 3 and sorted(refused) == ["0", "1", "2"]  # the pool has 92 tokens
    assert [r.num_input for r in played.result.records] == [40]
    engine, clock = _virtual(_seconds, blocks=30)
    refused.clear()
    cut = replace(requests, max_prompt=90, max_tokens=6)
    played = play(cut, engine, on_refused=refused.__setitem__, sleep=_sleep(clock))
    assert not refused and played.cut == (1, 2)
    assert sorted((r.num_input, r.num_output) for r in played.result.records) == [
        (40, 6),
        (90, 1),
        (90, 4),
        (90, 6),
    ]
    with pytest.raises(ValueError, match=r"prompt of 90 and answer of 7 tokens: must fit .* 96"):
        check_request(engine, list(requests)[1])
    with pytest.raises(ValueError, match=r"need 23 blocks, the pool has 22 usable"):
        check_request(_virtual(_seconds, blocks=23)[0], list(requests)[3])


def test_tokens_are_equal_as_far_as_the_ids_are() -> None:
    ids = [[1, 2], [1, 3], [1, 2], [-5, 2], [2**40, 2]]
    rows = [TraceRequest(0.0, 9, 2, granule_ids=np.array(i)) for i in ids]
    made = [r.tokens.tolist() for r in PlayRequests(_trace(rows, 4), VOCAB)]
    assert made == [r.tokens.tolist() for r in PlayRequests(_trace(rows, 4), VOCAB)]
    assert made[0][:8] == made[2][:8] and made[0] != made[2]  # behind the ids each has tokens of its own
    assert made[0][:4] == made[1][:4] and made[0][4:8] != made[1][4:8]
    assert len({tuple(m[:4]) for m in made}) == 3
    assert all(0 <= token < VOCAB for m in made for token in m)
    plain = [r.tokens.tolist() for r in PlayRequests(_trace([TraceRequest(0.0, 5, 1)] * 2, 0), VOCAB)]
    assert plain[0] != plain[1]


def test_ids_of_another_vocabulary_are_refused_or_made_anew() -> None:
    prompts = [[5, 9, 900], [5, 9, 901, 3], [5, 9, 900, 70, 71, 8]]
    rows = [TraceRequest(0.0, len(p), 2, token_ids=np.array(p, np.int32)) for p in prompts]
    rows[0] = replace(rows[0], output_ids=np.array([70, 71], np.int32))
    with pytest.raises(ValueError, match=r"request 0: token 900 of its prompt: must be below 258"):
        list(PlayRequests(_trace(rows), VOCAB))
    first, second, third = PlayRequests(_trace(rows), VOCAB, made=True)
    assert first.tokens[:2].tolist() == second.tokens[:2].tolist() and first.tokens[2] != second.tokens[2]
    assert third.tokens[:5].tolist() == [*first.tokens.tolist(), *first.answer.tolist()]  # type: ignore[union-attr]
    assert max(t.max() for t in (first.tokens, second.tokens, third.tokens)) < VOCAB


# ----------------------------------------------------------- step times by program

SHAPE = read_shape("smollm2-135m")
LADDER = Buckets(SchedulerConfig(8, 64)).ladder


def _times(**rates: float) -> StepTimes:
    limits = SchedulerConfig(8, 64)
    seconds = {b: 0.002 + 3e-4 * i * i for i, b in enumerate(LADDER)}  # no smooth function of the shape
    return StepTimes(shape_numbers(SHAPE), limit_numbers(limits), SIZE, seconds, **rates)


TRUE = _times(s_per_row=3e-5, s_per_key=2e-6, s_per_tile=4e-5, s_per_score=1e-7)


def _calibrated(noise: float = 0.0, repeats: int = 1) -> tuple[list[StepSample], list[StepSample]]:
    """Designed steps on an engine whose device takes what `TRUE` says, and now and then ten times as long."""
    rng = np.random.default_rng(3)
    clock = VirtualClock()
    manager = PagedManager(num_blocks=400, block_size=SIZE)

    def step_s(plan: StepPlan) -> float:
        spike = 10.0 if noise and rng.uniform() < 0.05 else 1.0
        return TRUE.seconds(plan) * spike * float(1 + noise * rng.uniform(-1, 1))

    runner = SimRunner(manager.pool_blocks, SIZE, step_s, clock, lambda name, sample, position: 7)
    limits = SchedulerConfig(8, 64)
    engine = Engine(manager, runner, limits, max_model_len=256, clock=clock)
    phases = make_phases(LADDER, max_seqs=8, longest=256, pool_tokens=1600, repeats=repeats)
    found = measure(engine, TRUE.program, phases, vocab_size=VOCAB)
    assert engine.runner is runner and not engine.has_work
    return found


def test_designed_steps_reach_every_program_and_give_its_seconds_back() -> None:
    kept, held = _calibrated()
    found = fit_steps(kept, _times())
    assert set(found.programs) == set(LADDER)
    for bucket, seconds in TRUE.programs.items():
        assert found.programs[bucket] == pytest.approx(seconds, rel=1e-3)
    assert found.rates == pytest.approx(TRUE.rates, rel=0.02)
    assert errors(found, held).ratio == pytest.approx(1, abs=1e-3)
    # Held out means that no such step was fitted.
    assert held and not {(s.program, s.load) for s in held} & {(s.program, s.load) for s in kept}


def test_spikes_of_a_busy_machine_move_nothing() -> None:
    kept, held = _calibrated(noise=0.05, repeats=3)
    found = fit_steps(kept, _times())
    for bucket, seconds in TRUE.programs.items():
        assert found.programs[bucket] == pytest.approx(seconds, rel=0.08)
    said = errors(found, held)
    assert said.median < 0.06 and said.p90 > said.median and said.steps == len(held)
    calm = [s for s in held if s.seconds < 5 * TRUE.sample_seconds(s)]
    assert errors(found, calm).ratio == pytest.approx(1, abs=0.02)


def test_a_rate_that_steps_do_not_show_is_0() -> None:
    bucket = LADDER[0]
    steps = [StepSample(bucket, Load(1, k, 0, 0.0), 0.01 - 1e-6 * k) for k in range(1, 60)]
    found = fit_steps(steps, _times())
    assert found.s_per_key == 0.0 and found.sample_seconds(steps[0]) == pytest.approx(0.00997, rel=1e-3)
    with pytest.raises(ValueError, match="must be at least 3 of one program"):
        fit_steps(steps[:2], _times())


def test_a_file_gives_the_steps_back_and_they_serve_their_engine_only(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    spec = HardwareSpec('a "name"', 1e12, 1e11, 1e10, steps=replace(TRUE, device="cpu"))
    spec.write(path, ["written by a test"])
    assert HardwareSpec.read(path) == spec
    limits = SchedulerConfig(8, 64)
    cost = CostModel(spec, SHAPE, SIZE)
    assert cost.under(limits).steps == spec.steps and cost.under(limits).basis(limits).startswith(
        "measured steps"
    )
    for other in (SchedulerConfig(9, 64), SchedulerConfig(8, 64, 16)):
        assert cost.under(other).steps is None and "measured with" in cost.basis(other)
    known = replace(spec, steps=replace(TRUE, dtype="int8, KV float32"))
    assert CostModel(known, SHAPE, SIZE, kv_dtype="float32").under(limits).steps == known.steps
    coded = CostModel(known, SHAPE, SIZE, kv_dtype="int8").under(limits)
    assert coded.steps is None and "measured with int8, KV float32, this has KV int8" in coded.basis(limits)
    assert "block_size=4, this has 8" in replace(cost, block_size=8).under(limits).basis(limits)
    assert "num_layers=30" in replace(cost, model=read_shape("opt-13b")).under(limits).basis(limits)
    assert CostModel(spec.idealised(2), SHAPE, SIZE).under(limits).steps is None
    text = path.read_text()
    edits = (
        ("s_per_row = 3e-05", "s_per_row = -1.0"),
        ("num_layers = 30\n", ""),
        ("num_seqs = 8", "seqs = 8"),
    )
    for old, new in edits:
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=r"here\.toml: steps"):
            HardwareSpec.read(path)


def test_measured_steps_on_a_simulated_clock_skip_as_they_plan() -> None:
    limits = SchedulerConfig(8, 64)
    spec = HardwareSpec("x", 1e12, 1e11, 1e10, steps=TRUE)
    cost = CostModel(spec, SHAPE, SIZE).under(limits)
    runs = []
    for skip in (False, True):
        manager = PagedManager(num_blocks=60, block_size=SIZE)
        runs.append(simulate(_workload(2, gap=0.02), manager, cost, limits, max_model_len=LONGEST, skip=skip))
    whole, skipped = runs
    assert [r.finished_s for r in skipped.records] == pytest.approx([r.finished_s for r in whole.records])
    assert skipped.busy_s == pytest.approx(whole.busy_s) and whole.num_steps == skipped.num_steps
    assert cost.decode_steps_s(9, 100, 1) > cost.decode_steps_s(
        8, 100, 1
    )  # as a router asks for a full instance


def test_the_load_of_a_plan_is_counted_in_tiles() -> None:
    engine, _ = _virtual(lambda plan: loads.append(load_of(plan, program)) or 1.0)  # type: ignore[func-returns-value]
    loads: list[Load] = []
    program = Bucket(4, 8, 4, 4)  # 12 tokens, so tiles of 12 queries
    engine.add(list(range(16)))
    engine.step()
    engine.step()
    assert loads == [Load(1, 0, 2, 12.0 * (12 + 16)), Load(1, 17, 0, 0.0)]


def test_the_roofline_beneath_measured_steps() -> None:
    kept, _ = _calibrated()
    times = fit_steps(kept, _times())
    spec, reason = reached_roofline(SHAPE, 4, SIZE, times, kept)
    assert spec.compute_efficiency == spec.bandwidth_efficiency == 1.0
    assert reason == "" or "the fit gives efficiencies" in reason
    assert len({p.rows for p in warm_phases(LADDER, max_seqs=8, longest=64)}) == 4


def test_the_sources_of_step_times_are_named(tmp_path: Path) -> None:
    assert json.dumps(TRUE.to_dict()) and RATES[0] in TRUE.to_dict()
    assert CostModel(HardwareSpec.read("h100-80gb"), SHAPE, 16).basis(LIMITS) == "roofline"
