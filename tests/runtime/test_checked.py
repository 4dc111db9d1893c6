"""Checked mode: planted faults are caught on the device before the pool is touched; a sound step passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedjax.cache import InvariantError
from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import KVLayout, plan_ragged
from pagedjax.runtime.checked import StepChecks

P, B = 8, 4
LAYOUT = KVLayout(2, P, B, 2, 8)


def _batch():
    """A decode row of length 6 in blocks 1, 2 and a prefill of 5 tokens up to length 9 in blocks 3, 4, 5."""
    tables = np.array([[1, 2, 0, 0], [3, 4, 5, 0]], np.int32)
    return plan_ragged(
        [1, 5],
        [6, 9],
        tables,
        block_size=B,
        num_tokens_bucket=12,
        num_seqs_bucket=4,
        decode_bucket=2,
        tile_queries=4,
    )


@pytest.fixture(scope="module")
def checks():
    return {window: StepChecks([LAYOUT], [window]) for window in (None, 4)}


def _writable(*blocks):
    mask = np.zeros(P, bool)
    mask[list(blocks)] = True
    return (mask,)


def _with(batch, **arrays):
    changed = {}
    for name, places in arrays.items():
        changed[name] = getattr(batch, name).copy()
        for place, value in places.items():
            changed[name][place] = value
    return dataclasses.replace(batch, **changed)


def test_a_sound_step_passes(checks):
    checks[None]((_batch(),), _writable(2, 4, 5))


@pytest.mark.parametrize(
    ("changes", "writable", "message"),
    [
        # Decode writes block 2; the prefill 4 and 5.
        ({}, (4, 5), "block 2 is to be written, but is shared, indexed or nobody's"),
        ({}, (2, 4), "block 5 is to be written, but is shared"),
        (dict(slot_mapping={0: P * B}), (2, 4, 5), f"block {P} is to be written, outside the pool of {P}"),
        (dict(slot_mapping={3: 100 * B}), (2, 4, 5), "block 100 is to be written, outside the pool"),
        (dict(slot_mapping={3: 0}), (0, 2, 4, 5), "block 0 is to be written, outside the pool"),
        (dict(slot_mapping={3: -1}), (2, 4, 5), "block -1 is to be written, outside the pool"),
        (dict(slot_mapping={9: 8}), (2, 4, 5), "padding is written to slot 8"),
        (dict(block_tables={(1, 1): P}), (2, 4, 5), f"a block table names {P}, outside the pool of {P}"),
        (dict(block_tables={(0, 3): -3}), (2, 4, 5), "a block table names -3"),
        (dict(block_tables={(1, 0): 0}), (2, 4, 5), "a length of 9 is past its table's blocks"),
        (dict(seq_lens={0: 9}), (2, 4, 5), "a length of 9 is past its table's blocks"),
        (dict(seq_lens={1: 17}), (2, 4, 5), "a length of 17 is past its table of 4 blocks"),
    ],
)
def test_planted_faults_are_named(checks, changes, writable, message):
    with pytest.raises(InvariantError, match=message):
        checks[None]((_with(_batch(), **changes),), _writable(*writable))


@pytest.mark.parametrize("block", [8, 100])
def test_B087_checked_mode_raises_for_ids_past_the_pool(checks, block):
    """The unchecked half (block 7 unchanged) is the kernels'; here the step never runs."""
    with pytest.raises(InvariantError, match=f"block {block} is to be written, outside the pool of 8"):
        checks[None]((_with(_batch(), slot_mapping={0: block * B}),), _writable(2, 4, 5))


def test_blocks_behind_the_window_may_be_null(checks):
    """Window 4, lengths 6 and 9: the decode reads from position 2, the prefill's first query from 1."""
    behind = _with(_batch(), block_tables={(1, 0): 0})
    with pytest.raises(InvariantError, match="a length of 9 is past"):
        checks[4]((behind,), _writable(2, 4, 5))
    longer = _with(_batch(), seq_lens={0: 8}, block_tables={(0, 0): 0})
    checks[4]((longer,), _writable(2, 4, 5))
    with pytest.raises(InvariantError):
        checks[None]((longer,), _writable(2, 4, 5))


# ------------------------------------------------------------------- the runner


@pytest.fixture
def checked_engine(tiny, make_engine):
    engine = make_engine(tiny)
    engine.runner.writable = engine.manager.writable
    yield engine
    engine.runner.writable = None


def greedy(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def test_a_checked_run_gives_the_same_tokens(checked_engine, run_all, greedy_judge):
    engine = checked_engine
    prompts = [list(range(n, n + 13)) for n in (3, 3, 60)]
    ids = [engine.add(prompt, greedy(9, n=2)) for prompt in prompts]
    outputs = run_all(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        for sample in outputs[request_id].outputs:
            assert list(sample.token_ids) == greedy_judge(prompt, 9)
    assert engine.manager.stats.copies > 0


def test_several_steps_of_a_dispatch_are_checked_one_by_one(
    checked_engine, run_all, greedy_judge, monkeypatch
):
    """And a row that may write further than it has blocks stops them before any of them runs."""
    engine = checked_engine
    engine.flights.num_steps, engine.scheduler.ahead = 8, True
    prompt = list(range(40, 53))
    request = engine.add(prompt, greedy(9))
    assert list(run_all(engine)[request].outputs[0].token_ids) == greedy_judge(prompt, 9)
    engine.add(prompt[::-1], greedy(30))
    engine.step()
    reserve = engine.manager.reserve
    monkeypatch.setattr(
        engine.manager, "reserve", lambda seq, n, lookahead=0, whole=0: reserve(seq, n, 0, whole)
    )
    before = np.asarray(engine.runner.pools[0].data).copy()
    with pytest.raises(InvariantError, match="checked step: group 0"):
        engine.step()
    assert np.array_equal(before, np.asarray(engine.runner.pools[0].data), equal_nan=True)
    engine.manager.release(1)


@pytest.mark.parametrize("fault", ["shared", "indexed", "past the pool", "past its table"])
def test_faults_in_the_books_stop_the_step(checked_engine, run_all, fault, monkeypatch):
    """The planted fault is in the manager or the packing; the pool's bytes stay as they were."""
    engine = checked_engine
    manager = engine.manager
    engine.add(list(range(40, 53)), greedy(30, n=2))
    for _ in range(3):
        engine.step()
    table = manager._seqs[0].tables[0]
    if fault == "shared":
        manager._groups[0].pool.ref[table[-1]] += 1
        monkeypatch.setattr(manager, "_unwritable", lambda *_: [])  # copy-on-write forgotten
    elif fault == "indexed":
        manager._groups[0].pool.keys[table[-1]] = b"some digest"
        monkeypatch.setattr(manager, "_unwritable", lambda *_: [])
    elif fault == "past the pool":
        table[-1] = manager.num_blocks  # layer 0: would be the null block of layer 1
        monkeypatch.setattr(manager, "_unwritable", lambda *_: [])
    else:
        monkeypatch.setattr(manager, "reserve", lambda *_, **__: True)  # nothing allocated
        manager._seqs[0].tables[0] = table[:-1]
    before = np.asarray(engine.runner.pools[0].data).copy()
    with pytest.raises(InvariantError, match="checked step: group 0"):
        for _ in range(4):
            engine.step()
    after = np.asarray(engine.runner.pools[0].data)
    if fault in ("past the pool", "past its table"):
        untouched = ~np.isin(np.arange(len(after)) % manager.num_blocks, manager.table(1))
        assert np.array_equal(before[untouched], after[untouched], equal_nan=True)


def test_the_steps_program_is_the_same(checked_engine):
    runner = checked_engine.runner
    bucket = runner.buckets.ladder[0]
    checked = runner.lower(bucket).as_text()
    runner.writable = None
    assert runner.lower(bucket).as_text() == checked
