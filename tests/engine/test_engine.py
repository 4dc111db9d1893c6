"""The engine over the toy runner: what comes out never depends on how the cache was used."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagedjax.cache import ExtraKeys
from pagedjax.engine.request import FinishReason, SamplingParams


def prompts_with_shared_prefixes(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, 90, size=longest).tolist() for _ in range(4)]
    prompts = []
    for _ in range(count):
        stem = stems[rng.integers(4)][: int(rng.integers(1, longest))]
        prompts.append(stem + rng.integers(1, 90, size=int(rng.integers(1, 12))).tolist())
    return prompts


@pytest.mark.parametrize(
    ("block_size", "chunk", "caching", "num_blocks"),
    [
        (bs, chunk, caching, blocks)
        for bs, chunk, caching, blocks in itertools.product(
            (1, 4, 16), (5, 64), (True, False), ("tight", "ample")
        )
    ],
)
def test_greedy_tokens_equal_the_dense_judge(
    make_engine, run_all, judge, greedy, block_size, chunk, caching, num_blocks
):
    prompts = prompts_with_shared_prefixes(24)
    longest = max(map(len, prompts)) + 20
    blocks = {"tight": -(-longest // block_size) + 3, "ample": 24 * -(-longest // block_size) + 1}[num_blocks]
    engine = make_engine(num_blocks=blocks, block_size=block_size, chunk_tokens=chunk, prefix_caching=caching)
    ids = [engine.add(prompt, greedy(12)) for prompt in prompts]
    outputs = run_all(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        output = outputs[request_id]
        assert output.finished
        assert list(output.outputs[0].token_ids) == judge(prompt, 12)
    hits = sum(outputs[i].num_cached_tokens for i in ids)
    assert (hits > 0) == caching or (caching and num_blocks == "tight")
    if num_blocks == "tight":
        assert engine.scheduler.num_preemptions > 0
    assert engine.manager.num_free == engine.manager.num_usable


def test_staggered_arrivals_and_aborts_leave_no_block_behind(make_engine, judge, greedy):
    engine = make_engine(num_blocks=40)
    rng = np.random.default_rng(1)
    prompts = prompts_with_shared_prefixes(60, seed=2)
    expected, results, aborted = {}, {}, set()
    waiting = list(enumerate(prompts))
    for _ in range(1000):
        while waiting and rng.random() < 0.5:
            _, prompt = waiting.pop()
            expected[engine.add(prompt, greedy(8))] = judge(prompt, 8)
        live = [i for i in expected if i not in results and i not in aborted]
        if live and rng.random() < 0.1:
            victim = live[rng.integers(len(live))]
            assert engine.abort(victim).outputs[0].finish_reason is FinishReason.ABORT
            assert engine.abort(victim) is None
            aborted.add(victim)
        for output in engine.step():
            if output.finished:
                results[output.request_id] = list(output.outputs[0].token_ids)
        engine.manager.check_invariants()
        if not waiting and not engine.has_work:
            break
    assert results == {i: t for i, t in expected.items() if i not in aborted}
    assert aborted and not waiting and not engine.has_work
    assert engine.manager.num_free == engine.manager.num_usable


def test_B020_resume_schedules_what_the_cache_does_not_give_back(make_engine, run_all, greedy, judge):
    engine = make_engine(num_blocks=8)
    prompt = list(range(1, 15))
    request_id = engine.add(prompt, greedy(4))
    engine.step()
    scheduler = engine.scheduler
    scheduler._preempt(scheduler.running[0])
    assert engine.manager.num_free == engine.manager.num_usable
    engine.step()
    row = engine.runner.plans[-1].rows[0]
    # 15 tokens by now: 14 of the prompt and 1 generated; the first 3 blocks are still cached.
    assert (row.start, row.num_tokens) == (12, 3)
    assert len(engine.manager.table(row.seq.seq_id)) == 4
    output = run_all(engine)[request_id]
    assert list(output.outputs[0].token_ids) == judge(prompt, 4)
    assert output.num_preemptions == 1


def test_B022_resume_covers_prompt_and_output(make_engine, run_all, greedy, judge):
    engine = make_engine(num_blocks=16)
    prompt = [3, 1, 4, 1, 5, 9]
    request_id = engine.add(prompt, greedy(9))
    for _ in range(5):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.step()
    row = engine.runner.plans[-1].rows[0]
    assert row.start + row.num_tokens == 11
    assert row.start == 8  # KV of 10 tokens was written: 2 full blocks
    output = run_all(engine)[request_id]
    assert list(output.outputs[0].token_ids) == judge(prompt, 9)


def test_B024_the_older_request_is_never_preempted(make_engine, greedy, judge):
    engine = make_engine(num_blocks=11, block_size=4, prefix_caching=False)
    prompts = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    ids = [engine.add(prompt, greedy(19)) for prompt in prompts]  # 24 tokens: 6 blocks each
    outputs = {}
    while engine.has_work:
        before = [seq.num_tokens for request in engine.scheduler.running for seq in request.sequences]
        for output in engine.step():
            outputs[output.request_id] = output
        assert sum(row.num_tokens for row in engine.runner.plans[-1].rows) >= 1, before
    assert outputs[ids[0]].num_preemptions == 0
    assert 1 <= outputs[ids[1]].num_preemptions <= 6
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 19)


@pytest.mark.parametrize("when", ["waiting", "running", "finished", "twice"])
def test_B027_abort_gives_blocks_back_once(make_engine, run_all, greedy, when):
    engine = make_engine(num_blocks=16, max_num_seqs=1)
    first = engine.add([1, 2, 3, 4, 5], greedy(4))
    second = engine.add([6, 7, 8, 9, 10], greedy(4))
    engine.step()
    target = {"waiting": second, "running": first, "twice": first, "finished": first}[when]
    if when == "finished":
        while first in engine._requests:
            engine.step()
        assert engine.abort(target) is None
    else:
        assert engine.abort(target).finished
        engine.manager.check_invariants()
        assert engine.abort(target) is None
    run_all(engine)
    assert engine.manager.num_free == engine.manager.num_usable


def test_B040_alone_and_out_of_blocks_ends_with_a_status(make_engine, run_all, greedy, judge):
    engine = make_engine(num_blocks=5, block_size=4)  # 16 slots
    request_id = engine.add(list(range(1, 11)), greedy(30))
    late = engine.add([50, 51], greedy(3))
    outputs = run_all(engine)
    only = outputs[request_id].outputs[0]
    assert only.finish_reason is FinishReason.CAPACITY
    # KV of 16 tokens fits; the token drawn from the last one needs no slot.
    assert list(only.token_ids) == judge(list(range(1, 11)), 7)
    assert list(outputs[late].outputs[0].token_ids) == judge([50, 51], 3)


def test_B040_a_chunk_that_finds_no_room_waits(make_engine, run_all, greedy, judge):
    engine = make_engine(num_blocks=20, block_size=4, token_budget=64)
    runner = engine.add(list(range(1, 33)), greedy(20))
    engine.step()
    big = engine.add(list(range(40, 80)), greedy(5))
    outputs = run_all(engine)
    assert list(outputs[runner].outputs[0].token_ids) == judge(list(range(1, 33)), 20)
    assert list(outputs[big].outputs[0].token_ids) == judge(list(range(40, 80)), 5)


def test_B041_same_step_twins_never_read_unwritten_slots(make_engine, run_all, greedy, judge):
    engine = make_engine(num_blocks=64, block_size=4, token_budget=128)
    prompt = list(range(1, 33))
    ids = [engine.add(prompt, greedy(6)) for _ in range(2)]
    engine.step()
    assert [row.num_tokens for row in engine.runner.plans[0].rows] == [32, 32]
    outputs = run_all(engine)
    for request_id in ids:
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 6)
        assert outputs[request_id].num_cached_tokens == 0


def test_B063_never_fits_is_refused_naming_both_numbers(make_engine, run_all, greedy):
    engine = make_engine(num_blocks=50, block_size=16, max_model_len=4096, token_budget=2048)
    with pytest.raises(ValueError, match=r"63 blocks.*49 usable"):
        engine.add(list(range(1, 1003)), greedy(1))
    small = engine.add(list(range(10)), greedy(4))
    assert run_all(engine)[small].finished


def test_B063_prompt_fits_but_output_does_not(make_engine, run_all, greedy):
    engine = make_engine(num_blocks=4, block_size=16, max_model_len=4096)
    request_id = engine.add(list(range(40)), greedy(1000))
    assert run_all(engine)[request_id].outputs[0].finish_reason is FinishReason.CAPACITY


@pytest.mark.parametrize(
    ("options", "prompt_tokens", "message"),
    [
        (dict(token_budget=4, max_num_seqs=8), 3, "token_budget=4"),
        (dict(token_budget=32, chunk_tokens=64), 3, "chunk_tokens=64"),
        (
            dict(token_budget=2048, chunked_prefill=False, max_model_len=4096, num_blocks=1024),
            2049,
            "2049 tokens",
        ),
        (dict(max_model_len=16), 16, "max_model_len=16"),
        (dict(), 0, "no token"),
    ],
)
def test_B066_limits_that_contradict_are_refused(make_engine, greedy, options, prompt_tokens, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options).add(list(range(prompt_tokens)), greedy(1))


def test_whole_prompts_only_where_chunking_is_off(make_engine, run_all, greedy, judge):
    engine = make_engine(token_budget=40, chunked_prefill=False, num_blocks=128)
    prompts = [list(range(n, n + 30)) for n in range(6)]
    ids = [engine.add(prompt, greedy(5)) for prompt in prompts]
    outputs = run_all(engine)
    assert all(
        row.num_tokens in (1, 30) for plan in engine.runner.plans for row in plan.rows if row.start == 0
    )
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 5)


def test_B101_rehits_of_preempted_requests_are_counted_apart(make_engine, run_all, greedy):
    engine = make_engine(num_blocks=16, block_size=4)
    rng = np.random.default_rng(7)
    for _ in range(10):
        engine.add(rng.integers(1, 90, size=14).tolist(), greedy(12))
    run_all(engine)
    assert engine.scheduler.num_preemptions > 0
    stats = engine.manager.stats
    assert stats.hit_tokens == 0
    assert stats.resumed_hit_tokens > 0


@pytest.mark.parametrize("path", ["plain", "chunked", "n=4", "resumed"])
def test_B104_cached_tokens_are_reported_once_on_every_path(make_engine, run_all, greedy, path):
    engine = make_engine(num_blocks=64, block_size=16, chunk_tokens=8 if path == "chunked" else 0)
    prompt = list(range(1, 50))
    cold = engine.add(prompt, greedy(2))
    outputs = run_all(engine)
    warm = engine.add(prompt, greedy(6, n=4 if path == "n=4" else 1, temperature=1.0, seed=3))
    engine.step()
    if path == "resumed":
        engine.scheduler._preempt(engine.scheduler.running[0])
    outputs |= run_all(engine)
    assert outputs[cold].num_cached_tokens == 0
    assert outputs[warm].num_cached_tokens == 48
    assert sum(o.num_cached_tokens for o in outputs.values()) == engine.manager.stats.hit_tokens


def test_B053_samples_share_the_prompt_and_copy_on_write(make_engine):
    engine = make_engine(block_size=4)
    engine.add([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1))
    engine.step()
    assert len(engine.runner.plans[0].rows) == 1  # one prefill for all three
    engine.step()
    copies = engine.runner.plans[1].copies
    assert sum(len(batch.src) for batch in copies.batches) == 2
    assert engine.manager.num_usable - engine.manager.num_free == 4


@pytest.mark.parametrize("caching", [True, False])
def test_samples_are_preempted_and_resumed_as_one(make_engine, run_all, caching):
    """A group that loses its blocks shares its prompt again when it comes back."""

    def texts(num_blocks):
        engine = make_engine(num_blocks=num_blocks, block_size=4, prefix_caching=caching)
        engine.add(list(range(60, 70)), SamplingParams(max_tokens=25))
        engine.add(list(range(1, 19)), SamplingParams(max_tokens=16, n=3, temperature=1.0, seed=5))
        outputs = run_all(engine)
        return [tuple(c.token_ids for c in o.outputs) for o in outputs.values()], engine

    ample, _ = texts(128)
    tight, engine = texts(22)
    assert engine.scheduler.num_preemptions > 0
    assert tight == ample
    assert engine.manager.num_free == engine.manager.num_usable


def test_group_that_outgrows_the_pool_ends_sample_by_sample(make_engine, run_all):
    engine = make_engine(num_blocks=8, block_size=4)
    request_id = engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=20, n=3, temperature=1.0, seed=2))
    reasons = [c.finish_reason for c in run_all(engine)[request_id].outputs]
    assert reasons[0] is FinishReason.LENGTH
    assert FinishReason.CAPACITY in reasons


def test_B055_sample_i_is_the_same_in_any_batch(make_engine, run_all):
    def samples(n, mates):
        engine = make_engine(num_blocks=256, max_num_seqs=16)
        request_id = engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=10, n=n, temperature=1.0, seed=7))
        for mate in range(mates):
            engine.add([mate, 9, 9], SamplingParams(max_tokens=6))
        return [c.token_ids for c in run_all(engine)[request_id].outputs]

    four = samples(4, 0)
    assert len(set(four)) == 4
    assert samples(4, 0) == four
    assert samples(8, 0)[:4] == four
    assert samples(4, 3) == four


def test_all_samples_are_drawn_from_one_row_of_the_whole_prompt(make_engine):
    engine = make_engine()
    engine.add(list(range(1, 11)), SamplingParams(max_tokens=4, n=3, temperature=1.0))
    engine.step()
    engine.step()
    first, second = engine.runner.plans
    assert [(row.start, row.num_tokens, len(row.samples)) for row in first.rows] == [(0, 10, 3)]
    assert [(row.start, row.num_tokens, len(row.samples)) for row in second.rows] == [(10, 1, 1)] * 3


def test_requests_without_a_seed_draw_their_own_tokens(make_engine, run_all):
    """Each has a seed of its own; a second engine of the same seed gives the same ones."""

    def draw():
        engine = make_engine()
        ids = [engine.add([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0)) for _ in range(4)]
        outputs = run_all(engine)
        return [outputs[i].outputs[0].token_ids for i in ids]

    assert len(set(draw())) == 4
    assert draw() == draw()


def test_every_chunk_of_a_prompt_is_at_most_chunk_tokens(make_engine, run_all, greedy, judge):
    engine = make_engine(token_budget=64, chunk_tokens=8)
    prompt = list(range(1, 31))
    request_id = engine.add(prompt, greedy(2))
    assert list(run_all(engine)[request_id].outputs[0].token_ids) == judge(prompt, 2)
    assert [plan.num_tokens for plan in engine.runner.plans] == [8, 8, 8, 6, 1]


def test_nobody_is_admitted_in_a_step_that_preempts(make_engine, run_all, greedy, judge):
    """The blocks it freed go to those that run first: who waits would only be preempted in turn."""
    engine = make_engine(num_blocks=8, block_size=4, chunk_tokens=4, max_num_seqs=4, prefix_caching=False)
    prompts = [[*range(10 * n, 10 * n + 7)] for n in range(3)]
    jobs = {engine.add(prompt, greedy(12)): prompt for prompt in prompts}
    preempted, outputs = [], {}
    while engine.has_work:
        before, running = engine.scheduler.num_preemptions, list(engine.scheduler.running)
        for output in engine.step():
            outputs[output.request_id] = output
        if engine.scheduler.num_preemptions > before:
            rows = {row.seq.request.request_id for row in engine.runner.plans[-1].rows}
            preempted.append(rows < {request.request_id for request in running})
    assert preempted and all(preempted)
    for request_id, prompt in jobs.items():
        assert list(outputs[request_id].outputs[0].token_ids) == judge(prompt, 12)


def test_time_to_first_token_counts_from_add_to_the_end_of_the_step(make_engine, greedy):
    """A clock of 1 s a reading: what is told lies between the readings before and after."""
    from pagedjax.cache import PagedManager
    from pagedjax.config import SchedulerConfig
    from pagedjax.engine import Engine

    now = [100.0]

    def clock():
        now[0] += 1.0
        return now[0]

    class SlowRunner(type(make_engine().runner)):
        def execute(self, plan):
            now[0] += 50.0
            return super().execute(plan)

    manager = PagedManager(num_blocks=16, block_size=4)
    engine = Engine(manager, SlowRunner(manager), SchedulerConfig(4, 16), max_model_len=32, clock=clock)
    early = now[0]
    engine.add([1, 2, 3], greedy(2))
    late, now[0] = now[0], now[0] + 1000.0  # it waits
    (output,) = engine.step()
    assert now[0] - late >= output.ttft_s >= 1050.0
    assert output.ttft_s <= now[0] - early and output.latency_s is None
    (last,) = engine.step()
    assert last.finished and last.ttft_s == output.ttft_s
    assert now[0] - early >= last.latency_s >= output.ttft_s + 50.0


def test_a_step_pays_for_decodes_before_chunks(make_engine, run_all, greedy):
    engine = make_engine(num_blocks=256, max_num_seqs=8, token_budget=16)
    for i in range(6):
        engine.add([i + 1, 2, 3], greedy(30))
    for _ in range(4):
        engine.step()
    engine.add(list(range(1, 60)), greedy(2))
    engine.step()
    plan = engine.runner.plans[-1]
    assert [row.num_tokens for row in plan.rows] == [1] * 6 + [10]
    run_all(engine)


def test_salted_requests_do_not_share(make_engine, run_all, greedy):
    engine = make_engine()
    prompt = list(range(1, 20))
    engine.add(prompt, greedy(2), extra=ExtraKeys(salt="a"))
    run_all(engine)
    other = engine.add(prompt, greedy(2), extra=ExtraKeys(salt="b"))
    same = engine.add(prompt, greedy(2), extra=ExtraKeys(salt="a"))
    outputs = run_all(engine)
    assert outputs[other].num_cached_tokens == 0
    assert outputs[same].num_cached_tokens == 16


def test_stop_tokens_eos_and_lengths(make_engine, run_all, judge):
    tokens = judge([1, 2, 3], 10)
    engine = make_engine(eos_token_ids=[tokens[4]])
    cases = {
        engine.add([1, 2, 3], SamplingParams(max_tokens=10)): (5, FinishReason.STOP),
        engine.add([1, 2, 3], SamplingParams(max_tokens=10, ignore_eos=True)): (10, FinishReason.LENGTH),
        engine.add([1, 2, 3], SamplingParams(max_tokens=10, stop_token_ids=[tokens[2]])): (
            3,
            FinishReason.STOP,
        ),
        engine.add([1, 2, 3], SamplingParams(max_tokens=2)): (2, FinishReason.LENGTH),
    }
    outputs = run_all(engine)
    for request_id, (count, reason) in cases.items():
        only = outputs[request_id].outputs[0]
        assert list(only.token_ids) == tokens[:count]
        assert only.finish_reason is reason


@pytest.mark.parametrize(("min_tokens", "count"), [(2, 3), (3, 10)])
def test_a_stop_token_counts_once_min_tokens_are_out(make_engine, run_all, judge, min_tokens, count):
    """The third token is a stop token: with min_tokens=2 it ends the text, with 3 it is passed over."""
    tokens = judge([1, 2, 3], 10)
    assert tokens.count(tokens[2]) == 1
    engine = make_engine()
    sampling = SamplingParams(max_tokens=10, stop_token_ids=[tokens[2]], min_tokens=min_tokens)
    request_id = engine.add([1, 2, 3], sampling)
    assert list(run_all(engine)[request_id].outputs[0].token_ids) == tokens[:count]


def test_stop_string_across_token_borders(make_engine, run_all, judge):
    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    tokens = judge([1, 2, 3], 8)
    stop = f"{tokens[2]}><{tokens[3]}"
    engine = make_engine(decode=decode)
    request_id = engine.add([1, 2, 3], SamplingParams(max_tokens=8, stop=[stop]))
    seen = []
    while engine.has_work:
        for output in engine.step():
            seen.append(output.outputs[0].text)
    final = decode(tokens[:2]) + "<"
    assert seen[-1] == final
    assert all(final.startswith(text) for text in seen)  # nothing shown is ever taken back
    assert engine.abort(request_id) is None


def test_stream_yields_and_leaving_aborts(make_engine, greedy, judge):
    engine = make_engine()
    stream = engine.stream([1, 2, 3], greedy(10))
    first = next(stream)
    assert list(first.outputs[0].token_ids) == judge([1, 2, 3], 1)
    stream.close()
    assert not engine.has_work
    assert engine.manager.num_free == engine.manager.num_usable
    assert list(list(engine.stream([1, 2, 3], greedy(4)))[-1].outputs[0].token_ids) == judge([1, 2, 3], 4)


def test_B087_manager_and_pool_must_count_alike(make_engine):
    engine = make_engine()
    engine.runner.pool_blocks = (65,)
    with pytest.raises(
        ValueError, match=r"pool_blocks: the manager counts \(64,\), the runner's pool has \(65,\)"
    ):
        type(engine)(engine.manager, engine.runner, engine.scheduler.config, max_model_len=64)


def test_ids_in_use_are_refused(make_engine, greedy):
    engine = make_engine()
    engine.add([1], greedy(3), request_id="a")
    with pytest.raises(ValueError, match="in use"):
        engine.add([1], greedy(3), request_id="a")
