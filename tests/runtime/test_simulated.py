"""The simulator is the engine: plan for plan what the real decoder did, with swap, host tier and windows."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import pytest

from pagedjax.cache import KVGroup, PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.request import SamplingParams
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
