"""Who gives way, what becomes of the blocks, and which of swap and recompute is chosen: no token changes."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.cache import CopyBatch, CopyPlan
from pagedjax.engine import StepResult
from pagedjax.engine.preemption import PreemptionCost

MODES = {
    "recompute": dict(),
    "swap": dict(preemption="swap", host_blocks=64),
    "swap, small host": dict(preemption="swap", host_blocks=5),
    "swap, no prefix cache": dict(preemption="swap", host_blocks=64, prefix_caching=False),
    "swap, radix": dict(preemption="swap", host_blocks=64, index="radix"),
    "swap, dedup, partial": dict(preemption="swap", host_blocks=64, dedup=True, partial=1),
    "tier": dict(host_blocks=64),
}


def _prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, 90, size=20).tolist() for _ in range(2)]
    return [
        stems[rng.integers(2)][: int(rng.integers(1, 20))] + rng.integers(1, 90, size=3).tolist()
        for _ in range(count)
    ]


def _with_forced_preemptions(engine, every, seed=0):
    """Step until idle; every so many steps a random running request loses its blocks."""
    rng = np.random.default_rng(seed)
    outputs, step = {}, 0
    while engine.has_work:
        step += 1
        running = engine.scheduler.running
        if step % every == 0 and running:
            engine.scheduler._preempt(running[int(rng.integers(len(running)))])
        for output in engine.step():
            outputs[output.request_id] = output
        engine.manager.check_invariants()
        assert step < 3000
    return outputs


@pytest.mark.parametrize("name", sorted(MODES))
def test_every_way_to_preempt_gives_the_judges_tokens(make_engine, judge, greedy, name):
    engine = make_engine(num_blocks=24, block_size=4, **MODES[name])
    prompts = _prompts(14)
    ids = [engine.add(prompt, greedy(14)) for prompt in prompts]
    outputs = _with_forced_preemptions(engine, every=5)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 14)
    scheduler = engine.scheduler
    assert scheduler.num_preemptions > 5
    if "swap" in name:
        assert 0 < scheduler.num_swaps <= scheduler.num_preemptions
        assert (scheduler.num_swaps < scheduler.num_preemptions) or "small" not in name
        assert engine.manager.stats.swapped_in_blocks > 0
    else:
        assert scheduler.num_swaps == 0
    assert engine.manager.num_free == engine.manager.num_usable


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_samples_that_share_blocks_are_swapped_as_one(make_engine, greedy, mode):
    """Shared blocks go out once and are shared again on return; texts equal the undisturbed ones."""

    def run(every, **options):
        engine = make_engine(num_blocks=60, block_size=4, **options)
        ids = [engine.add(list(range(n, n + 10)), greedy(12, n=3, temperature=1.0, seed=n)) for n in (1, 40)]
        if every is None:
            outputs = {}
            while engine.has_work:
                for output in engine.step():
                    outputs[output.request_id] = output
        else:
            outputs = _with_forced_preemptions(engine, every)
        return engine, [[c.token_ids for c in outputs[i].outputs] for i in ids]

    _, expected = run(None)
    engine, texts = run(3, preemption=mode, host_blocks=64)
    assert texts == expected
    assert engine.scheduler.num_preemptions > 2
    assert (engine.scheduler.num_swaps == engine.scheduler.num_preemptions) == (mode == "swap")


def test_a_swapped_request_computes_nothing_twice(make_engine, greedy, judge):
    engine = make_engine(num_blocks=60, block_size=4, preemption="swap", host_blocks=64, prefix_caching=False)
    prompt = list(range(1, 20))
    request_id = engine.add(prompt, greedy(12, n=2))
    outputs = _with_forced_preemptions(engine, every=4)
    assert [list(c.token_ids) for c in outputs[request_id].outputs] == [judge(prompt, 12)] * 2
    assert engine.scheduler.num_swaps >= 2
    fed = sum(row.num_tokens for plan in engine.runner.plans for row in plan.rows)
    assert fed == 19 + 2 * 11  # the prompt once, and each sample's tokens but the last
    # 21 tokens each: 4 full blocks of the prompt are shared and move once, 2 blocks are each sample's own.
    out = [b for plan in engine.runner.plans for b in plan.copies.batches if b.kind == "swap_out"]
    assert len(out[0].src) == 4 + 2 * 2


def test_an_aborted_swapped_request_gives_its_host_blocks_back(make_engine, greedy, run_all):
    engine = make_engine(num_blocks=60, block_size=4, preemption="swap", host_blocks=8)
    request_id = engine.add(list(range(1, 20)), greedy(12))
    for _ in range(3):
        engine.step()
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request)
    assert request.swapped and request.sequences[0].num_computed_tokens == 21
    assert engine.abort(request_id).finished
    engine.manager.check_invariants()
    engine.step()  # nothing runs, yet what was planned is carried out
    second = engine.add(list(range(50, 75)), greedy(4))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    assert engine.scheduler.num_swaps == 2
    assert len(run_all(engine)[second].outputs[0].token_ids) == 4


# ------------------------------------------------------------------ priorities


def test_higher_priority_is_admitted_first_and_preempted_last(make_engine, greedy, judge, run_all):
    engine = make_engine(num_blocks=64, max_num_seqs=1)
    low = [engine.add([n, n + 1], greedy(3), priority=0) for n in (1, 3)]
    high = engine.add([5, 6], greedy(3), priority=2)
    middle = engine.add([7, 8], greedy(3), priority=1)
    order = []
    while engine.has_work:
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == [high, middle, *low]

    engine = make_engine(num_blocks=11, block_size=4, prefix_caching=False)
    prompts = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    first = engine.add(prompts[0], greedy(19))
    second = engine.add(prompts[1], greedy(19), priority=1)
    outputs = run_all(engine)
    assert outputs[second].num_preemptions == 0 < outputs[first].num_preemptions
    for request_id, prompt in zip((first, second), prompts, strict=True):
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 19)


def test_a_preempted_request_returns_to_its_place(make_engine, greedy):
    engine = make_engine(num_blocks=64, max_num_seqs=2)
    ids = [engine.add([n, n + 1, n + 2], greedy(9), priority=n % 2) for n in range(5)]
    engine.step()
    for request in list(engine.scheduler.running):
        engine.scheduler._preempt(request)
    assert [r.request_id for r in engine.scheduler.waiting] == [ids[1], ids[3], ids[0], ids[2], ids[4]]


# ------------------------------------------------------------------- cost rule


def test_the_rule_compares_bytes_moved_twice_with_tokens_computed_again():
    costs = PreemptionCost((1000, 500), bandwidth_bytes=1e6)
    assert costs.swap_s([10, 4]) == pytest.approx(2 * 12_000 / 1e6)
    assert costs.recompute_s(100) is None and not costs.swap_pays([1, 0], 100)
    none = CopyPlan()
    costs.observe(100, 1, none, StepResult([], [], 5.0))  # a step that compiled
    for _ in range(4):
        costs.observe(100, 1, none, StepResult([], [], 0.01))
        costs.observe(8, 0, none, StepResult([], [], 0.5))  # decodes alone say nothing
    assert costs.recompute_s(200) == pytest.approx(0.02)
    assert costs.swap_pays([9, 0], 200) and not costs.swap_pays([11, 0], 200)
    ids = np.arange(4, dtype=np.int32)
    out = CopyPlan((CopyBatch("swap_out", ids, ids, 1),))
    for _ in range(3):
        costs.observe(1, 0, out, StepResult([], [], 0.1, copy_s=0.002))  # 2000 bytes: 1e6 a second
    assert costs.swap_s([1, 0]) == pytest.approx(0.002)
    for _ in range(12):
        costs.observe(1, 0, out, StepResult([], [], 0.1, copy_s=0.02))
    assert costs.swap_s([1, 0]) == pytest.approx(0.02)


@pytest.mark.parametrize(("token_s", "block_s", "swaps"), [(1e-3, 1e-4, True), (1e-5, 1e-3, False)])
def test_auto_does_what_is_predicted_to_be_quicker(make_engine, greedy, judge, token_s, block_s, swaps):
    engine = make_engine(num_blocks=60, block_size=4, preemption="auto", host_blocks=64)
    engine.runner.token_s, engine.runner.block_s = token_s, block_s
    engine.scheduler.costs.bandwidth_bytes = 1000 / block_s
    prompts = [list(range(n, n + 20)) for n in (1, 30, 60)]
    ids = [engine.add(prompt, greedy(12)) for prompt in prompts]
    outputs = _with_forced_preemptions(engine, every=4)
    assert [list(outputs[i].outputs[0].token_ids) for i in ids] == [judge(p, 12) for p in prompts]
    assert engine.scheduler.num_preemptions > 2
    assert engine.scheduler.num_swaps == (engine.scheduler.num_preemptions if swaps else 0)


def test_swapping_without_a_host_is_refused_at_start(make_engine):
    with pytest.raises(ValueError, match=r"preemption=swap: needs host blocks .*cache.host_blocks"):
        make_engine(preemption="swap")
    with pytest.raises(ValueError, match="preemption=later: must be one of recompute, swap, auto"):
        make_engine(preemption="later")
