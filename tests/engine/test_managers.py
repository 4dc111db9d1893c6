"""The same engine over every way to share and every way to reserve: the same tokens come out."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.cache import (
    INDEXES,
    POLICIES,
    Hints,
    KVGroup,
    PagedManager,
    ReservationManager,
    TokenChain,
)
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.engine.request import SamplingParams

PAGED = {
    "hash, dedup": dict(index="hash", dedup=True),
    **{index: dict(index=index) for index in INDEXES},
    **{f"{index}, partial": dict(index=index, partial=1) for index in INDEXES if index != "table"},
    **{
        f"hash, {policy}": dict(index="hash", policy=policy)
        for policy in sorted(POLICIES)
        if policy != "belady"
    },
}


def _run(engine, prompts, max_tokens):
    ids = [engine.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)) for prompt in prompts]
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] = output
        engine.manager.check_invariants()
    return [outputs[i] for i in ids]


def _prompts(count=20, seed=0):
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, 90, size=30).tolist() for _ in range(3)]
    return [
        stems[rng.integers(3)][: int(rng.integers(1, 30))] + rng.integers(1, 90, size=5).tolist()
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", sorted(PAGED))
def test_every_index_and_policy_gives_the_judges_tokens(make_engine, judge, name):
    engine = make_engine(num_blocks=24, block_size=4, **PAGED[name])
    prompts = _prompts()
    outputs = _run(engine, prompts, 14)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == judge(prompt, 14)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.manager.stats.hit_tokens > 0) == (name != "table")


@pytest.mark.parametrize("rule", ["max", "pow2", "oracle"])
def test_orcas_reservations_run_under_the_same_engine(make_engine, judge, rule):
    runner = type(make_engine().runner)
    manager = ReservationManager(num_blocks=129, block_size=4, rule=rule, max_tokens=64)
    engine = Engine(manager, runner(manager), SchedulerConfig(8, 64), max_model_len=64)
    prompts = _prompts()
    outputs = _run(engine, prompts, 14)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == judge(prompt, 14)
    for plan in engine.runner.plans:
        for row, table in zip(plan.rows, plan.tables[0], strict=True):
            used = -(-(row.start + row.num_tokens) // 4)
            assert (np.diff(table[:used]) == 1).all(), "a reservation is contiguous"


def test_B017_a_block_longer_than_any_sequence_is_warned_of(make_engine):
    with pytest.warns(UserWarning, match=r"block_size=64 exceeds max_model_len=60: .*lower cache.block_size"):
        make_engine(block_size=64, max_model_len=60)
    make_engine(block_size=64, max_model_len=64)  # warnings are errors here


def test_F010_a_reservation_that_can_never_run_is_refused_when_added(make_engine):
    """15 usable blocks of 4: the largest chunk has 8."""
    runner = type(make_engine().runner)
    for rule, max_tokens, blocks in [("max", 4, 16), ("oracle", 60, 16), ("pow2", 40, 16), ("oracle", 28, 0)]:
        manager = ReservationManager(num_blocks=16, block_size=4, rule=rule, max_tokens=64)
        engine = Engine(manager, runner(manager), SchedulerConfig(8, 64), max_model_len=64)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if blocks:
            with pytest.raises(ValueError, match=f"needs {blocks} blocks, the pool has 8 usable"):
                engine.add([1, 2, 3, 4], sampling)
            assert not engine.has_work
        else:
            _run(engine, [[1, 2, 3, 4]] * 3, max_tokens)


def test_F010_what_was_accepted_still_fits_when_it_comes_back():
    """Rounding anew after a preemption may not ask for more than any chunk holds."""
    manager = ReservationManager(num_blocks=17, block_size=4, rule="pow2", max_tokens=256)
    for done in range(32):  # 15 done: 35 tokens and 17 to come, rounded to 32, would be 17 blocks
        needed, usable = manager.demand(20 + done, 4, Hints(max_tokens=32 - done, resumed=done > 0))
        assert needed <= usable == 16, done


@pytest.mark.parametrize("options", [{}, dict(index="radix"), dict(host_blocks=20)], ids=str)
def test_admission_by_the_whole_prompt_computes_less_twice(make_engine, judge, options):
    """60 prompts over 60 blocks, in chunks: who starts early gives its blocks up before its prompt is done."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 90, size=int(rng.integers(20, 120))).tolist() for _ in range(60)]
    computed = {}
    for admission in ("chunk", "whole"):
        manager = make_engine(num_blocks=61, block_size=4, **options).manager
        runner = type(make_engine().runner)(manager)
        engine = Engine(manager, runner, SchedulerConfig(8, 64, 16, admission=admission), max_model_len=256)
        outputs = _run(engine, prompts, 6)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == judge(prompt, 6)
        computed[admission] = sum(plan.num_tokens for plan in runner.plans)
    assert computed["whole"] < computed["chunk"] * (1 if options.get("host_blocks") else 0.95)


def test_admission_by_the_whole_prompt_hangs_on_nothing(make_engine, judge):
    """A prompt as large as the pool runs when nobody else does, even where a pin takes a part."""
    manager = make_engine(num_blocks=21, block_size=4).manager
    engine = Engine(
        manager,
        type(make_engine().runner)(manager),
        SchedulerConfig(4, 32, 8, admission="whole"),
        max_model_len=200,
    )
    prompts = [[5] * 12, list(range(1, 75)), [7] * 30, list(range(2, 76))]
    outputs = _run(engine, prompts, 4)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == judge(prompt, 4)


def test_admission_by_the_whole_prompt_asks_a_window_for_what_it_holds_at_once():
    """100 tokens in steps of 8 under a window of 8 hold 5 blocks of 4 at once, not 25."""

    chain = TokenChain(range(100), block_size=4)
    for blocks, fits in ((6, True), (5, False)):
        manager = PagedManager(num_blocks=60, block_size=4, groups=[KVGroup(), KVGroup(blocks, window=8)])
        manager.begin(0, chain)
        assert manager.reserve(0, 8, whole=100) is fits
    manager = PagedManager(num_blocks=26, block_size=4)
    manager.begin(0, chain)
    before = manager.snapshot()
    assert not manager.reserve(0, 8, whole=101) and manager.snapshot() == before
    assert manager.reserve(0, 8, whole=100) and len(manager.table(0)) == 2  # asked, not taken
