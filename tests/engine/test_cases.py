"""Cases of the engine, by id: waits, limits, records, times."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from pagedjax.engine.request import SamplingParams


def test_F021_a_prompt_longer_than_a_chunk_runs_whole_where_chunking_is_off(
    make_engine, run_all, greedy, judge
):
    engine = make_engine(chunked_prefill=False, chunk_tokens=8, token_budget=64)
    prompts = [list(range(1, 12)), [20, 21], list(range(30, 94))]
    ids = [engine.add(prompt, greedy(5)) for prompt in prompts]
    outputs = run_all(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 5)
    firsts = [row for plan in engine.runner.plans for row in plan.rows if row.start == 0]
    assert sorted(row.num_tokens for row in firsts) == [2, 11, 64]


def test_F025_a_kept_record_stays_what_it_was(make_engine, run_all):
    engine = make_engine(num_blocks=12, host_blocks=16, preemption="swap")
    kept, copies = [], []

    def keep(record):
        kept.append(record)
        copies.append(copy.deepcopy(record))

    engine.on_step = keep
    for i in range(4):
        engine.add([i, 2, 3, 4, 5], SamplingParams(max_tokens=9, n=1 + i % 2, temperature=1.0, seed=i))
    run_all(engine)
    assert engine.scheduler.num_swaps and len(kept) > 9
    for record, then, plan in zip(kept, copies, engine.runner.plans, strict=True):
        assert record.plan.rows == then.plan.rows and record.result.tokens == then.result.tokens
        for row, ran in zip(record.plan.rows, plan.rows, strict=True):
            assert (row.seq.seq_id, row.start, row.num_tokens) == (ran.seq.seq_id, ran.start, ran.num_tokens)
            assert row.start + row.num_tokens <= row.seq.num_tokens
            for seq in row.samples:
                assert row.start + row.num_tokens == seq.num_tokens
        for table in record.plan.tables:
            with pytest.raises(ValueError, match="read-only"):
                table[:] = 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.plan.rows[0].seq.num_tokens = 0
    ended = [row.seq.finish_reason for record in kept for row in record.plan.rows]
    assert sum(reason is not None for reason in ended) == 6 and ended[0] is None
