"""The simulator is the engine: plan for plan what the real decoder did, with swap, host tier, windows and beams."""

from __future__ import annotations

import hashlib
from collections import Counter, deque

import jax
import numpy as np
import pytest

from pagedjax.cache import INDEXES, KVGroup, PagedManager, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine.request import SamplingParams
from pagedjax.sim.beams import RecordedBeams
from pagedjax.sim.simulator import hash_plan, simulate
from pagedjax.sim.trace import Trace, TraceRequest
from pagedjax.testing import tiny_config, tiny_params

CASES = {
    "swap": dict(preemption="swap", host_blocks=200),
    "swap, no cache": dict(preemption="swap", host_blocks=200, prefix_caching=False),
    "tier": dict(host_blocks=200),
}


def _prompts():
    rng = np.random.default_rng(9)
    stems = rng.integers(0, 256, (3, 60)).tolist()
    return [
        [*stems[rng.integers(3)][: int(rng.integers(20, 60))], *rng.integers(0, 256, 4).tolist()]
        for _ in range(24)
    ]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("case", sorted(CASES))
def test_simulated_plans_equal_the_engines(tiny, make_engine, case, windowed):
    options = dict(CASES[case])
    blocks = [130, 50]
    model = tiny
    if windowed:
        config = tiny_config(windows=(8, None))
        model = (config, jax.device_put(tiny_params(config)))
    engine = make_engine(model, chunk_tokens=16, group_blocks=blocks if windowed else (), **options)
    hasher, plans = hashlib.sha256(), []

    def record(step):
        plans.append(step.plan)
        hasher.update(hash_plan(step.plan))

    engine.on_step = record
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
    for prompt in _prompts():
        engine.add(prompt, sampling)
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] = output

    rows = [
        TraceRequest(
            0.0, len(o.prompt_token_ids), 40, None, _ids(o.prompt_token_ids), _ids(o.outputs[0].token_ids)
        )
        for o in (outputs[str(i)] for i in range(len(outputs)))
    ]
    trace = Trace("engine", "tokens", 1, False, lambda: iter(rows))
    preemption = options.pop("preemption", "recompute")
    groups = [KVGroup(n, g.window) for n, g in zip(blocks, model[0].layer_groups)] if windowed else None
    manager = PagedManager(num_blocks=130, block_size=4, groups=groups, **options)
    limits = SchedulerConfig(8, 64, chunk_tokens=16, preemption=preemption)
    result = simulate(trace, manager, lambda _: 1.0, limits, max_model_len=128, hash_plans=True)

    assert result.num_steps == len(plans)
    assert result.plan_hash == hasher.hexdigest()
    assert manager.stats == engine.manager.stats
    kinds = {batch.kind for plan in plans for batch in plan.copies.batches}
    assert {"swap_out", "swap_in"} <= kinds
    assert engine.scheduler.num_preemptions > 0


def _ids(tokens):
    return np.array(tokens, np.int32)


BEAM_RUNS = 20


def _mixed_jobs(rng):
    """(arrival step, prompt, sampling): beams of several widths, ends and penalties among plain requests."""
    stems = rng.integers(0, 256, (2, 40)).tolist()
    jobs, arrival = [], 0
    for number in range(10):
        arrival += int(rng.integers(0, 4))
        stem = stems[rng.integers(2)][: int(rng.integers(3, 40))]
        prompt = [*stem, *rng.integers(0, 256, int(rng.integers(1, 5))).tolist()]
        steps = int(rng.integers(4, 24))
        if number % 3 == 0:
            sampling = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=1.0, seed=number)
        else:
            width = int(rng.integers(2, 7))
            sampling = SamplingParams(
                max_tokens=steps,
                beam_width=width,
                n=int(rng.integers(1, width + 1)),
                length_penalty=float(rng.choice([0.6, 1.0, 2.0])),
                early_stopping=(True, False, "never")[rng.integers(3)],
                stop_token_ids=tuple(rng.integers(0, 256, int(rng.integers(3))).tolist()),
                ignore_eos=True,
            )
        jobs.append((arrival, prompt, sampling))
    return jobs


def _leave_free(manager, num_blocks):
    """Somebody holds all blocks but so many, so that requests meet in a tight pool."""
    hog = TokenChain([0] * ((manager.num_usable - num_blocks) * manager.block_size), block_size=4)
    manager.begin(-1, hog)
    assert manager.reserve(-1, len(hog))


def _run_jobs(engine, jobs):
    """Drive the engine on a clock of one second a step; outputs by request, in order of arrival."""
    waiting, now, outputs = deque(jobs), 0, {}
    while waiting or engine.has_work:
        if not engine.has_work:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, prompt, sampling = waiting.popleft()
            engine.add(prompt, sampling)
        for output in engine.step():
            outputs[output.request_id] = output
        now += 1
    return [outputs[str(i)] for i in range(len(jobs))]


def _compare_beams(tiny, make_engine, seed):
    """One random run on the device and once more in the simulator; what happened in it."""
    rng = np.random.default_rng([31, seed])
    options = dict(
        index=tuple(INDEXES)[rng.integers(len(INDEXES))],
        prefix_caching=bool(rng.integers(4)),
        host_blocks=int(rng.choice([0, 200])),
    )
    preemption = "swap" if options["host_blocks"] and rng.integers(2) else "recompute"
    chunk = int(rng.choice([0, 5, 16]))
    jobs, free = _mixed_jobs(rng), int(rng.integers(18, 34))

    engine = make_engine(tiny, chunk_tokens=chunk, preemption=preemption, **options)
    engine.runner = recorded = RecordedBeams(engine.runner)
    _leave_free(engine.manager, free)
    hasher, plans = hashlib.sha256(), []

    def record(step):
        plans.append(step.plan)
        hasher.update(hash_plan(step.plan))

    engine.on_step = record
    outputs = _run_jobs(engine, jobs)

    rows = []
    for (arrival, prompt, sampling), output in zip(jobs, outputs, strict=True):
        answer = None if sampling.beam_width else _ids(output.outputs[0].token_ids)
        rows.append(TraceRequest(arrival, len(prompt), sampling.max_tokens, None, _ids(prompt), answer))
    manager = PagedManager(num_blocks=130, block_size=4, **options)
    _leave_free(manager, free)
    limits = SchedulerConfig(8, 64, chunk_tokens=chunk, preemption=preemption)
    trace = Trace("engine", "tokens", 1, True, lambda: iter(rows))
    result = simulate(
        trace, manager, lambda _: 1.0, limits, max_model_len=128, hash_plans=True, beams=recorded
    )

    assert result.num_steps == len(plans), seed
    assert result.plan_hash == hasher.hexdigest(), seed
    assert manager.stats == engine.manager.stats, seed
    assert result.num_swaps == engine.scheduler.num_swaps
    assert sum(r.num_preemptions for r in result.records) == engine.scheduler.num_preemptions
    assert sorted(r.num_cached for r in result.records) == sorted(o.num_cached_tokens for o in outputs)

    beams = [o for o, (_, _, sampling) in zip(outputs, jobs) if sampling.beam_width]
    return {
        "hits": manager.stats.hit_tokens,
        "swaps": result.num_swaps,
        "host hits": manager.stats.host_hit_tokens,
        "beams preempted": sum(o.num_preemptions for o in beams),
        "blocks copied for beams": sum(o.num_copies for o in beams),
        "beams that ended early": sum(c.finish_reason == "stop" for o in beams for c in o.outputs),
        "beams that ran to the limit": sum(c.finish_reason == "length" for o in beams for c in o.outputs),
    }


def test_simulated_plans_equal_the_engines_with_beams(tiny, make_engine):
    """Beams that were recorded on the device and are chosen again by the simulator, beside plain requests."""
    totals = Counter()
    for seed in range(BEAM_RUNS):
        totals.update(_compare_beams(tiny, make_engine, seed))
    assert all(totals.values()), f"never happened: {[name for name, count in totals.items() if not count]}"


def test_beams_beyond_the_record_are_an_error(tiny, make_engine):
    engine = make_engine(tiny)
    engine.runner = recorded = RecordedBeams(engine.runner)
    engine.add([1, 2, 3], SamplingParams(max_tokens=4, beam_width=2, n=2, ignore_eos=True))
    while engine.has_work:
        engine.step()
    trace = Trace("engine", "tokens", 1, True, lambda: iter([TraceRequest(0.0, 3, 4, None, _ids([1, 2, 3]))]))

    def replay():
        manager = PagedManager(num_blocks=130, block_size=4)
        return simulate(
            trace, manager, lambda _: 1.0, SchedulerConfig(8, 64), max_model_len=128, beams=recorded
        )

    assert replay().num_steps == 4
    with pytest.raises(KeyError, match="not in the record, or not so often"):
        replay()
