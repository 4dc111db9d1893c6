"""Cases of the engine, by id: waits, limits, records, times."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import signal
import threading

import pytest

from pagedjax.cache import INDEXES, InvariantError
from pagedjax.engine.interrupts import HeldInterrupts
from pagedjax.engine.request import SamplingParams
from pagedjax.engine.turns import FairLock


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


@pytest.mark.parametrize("who", ["hook", "thread beside the hook", "another thread"])
def test_F020_generate_ends_when_a_request_is_aborted(make_engine, greedy, judge, who):
    engine = make_engine()
    told = []

    def abort():
        told.append(engine.abort("b"))

    def hook(record):
        if record.plan.step != 2:
            return
        if who == "hook":
            abort()
            return
        thread = threading.Thread(target=abort)
        thread.start()
        if who == "thread beside the hook":  # the hook waits for it
            thread.join(30)
        else:
            threads.append(thread)

    threads = []
    engine.on_step = hook
    jobs = [([1, 2, 3], greedy(60)), ([4, 5, 6], greedy(60))]
    first, second = engine.complete(jobs, request_ids=["a", "b"])
    for thread in threads:
        thread.join(30)
    assert list(first.outputs[0].token_ids) == judge([1, 2, 3], 60)
    assert second.finished and second.outputs[0].finish_reason == "abort" and told[0] == second
    tokens = list(second.outputs[0].token_ids)
    assert 2 <= len(tokens) < 60 and tokens == judge([4, 5, 6], len(tokens))
    assert not engine.has_work and engine.manager.num_free == engine.manager.num_usable


def test_F020_who_waits_for_what_is_not_there_is_told(make_engine, greedy):
    engine = make_engine()
    engine.on_step = lambda record: engine.scheduler.running.clear()
    with pytest.raises(InvariantError, match="waits for a request"):
        engine.complete([([1, 2, 3], greedy(60))])


def test_F022_ten_threads_share_one_engine(make_engine, judge, greedy):
    engine = make_engine(num_blocks=40, max_num_seqs=4)
    steps, failures = [], []
    engine.on_step = lambda record: steps.append(threading.get_ident())

    def call(number):
        try:
            for turn in range(4):
                prompts = [[number, turn, 7, 8, i] for i in range(2)]
                outputs = engine.complete([(p, greedy(6 + number)) for p in prompts])
                for prompt, output in zip(prompts, outputs, strict=True):
                    assert list(output.outputs[0].token_ids) == judge(prompt, 6 + number)
                (*_, last) = engine.stream([number, 9], greedy(3))
                assert list(last.outputs[0].token_ids) == judge([number, 9], 3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert len(set(steps)) > 5  # they take turns
    assert not engine.has_work and engine.manager.num_free == engine.manager.num_usable
    engine.manager.check_invariants()


def test_F022_the_lock_goes_to_who_waited_longest():
    lock, order, entered = FairLock(), [], threading.Event()

    def take(number):
        with HeldInterrupts() as interrupts, lock.held(interrupts):
            order.append(number)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(5)]
    with HeldInterrupts() as interrupts:
        with lock.held(interrupts), lock.held(interrupts):
            for number, thread in enumerate(threads):
                thread.start()
                while len(lock._queue) <= number:
                    entered.wait(0.001)
        with lock.held(interrupts):  # behind all that wait
            order.append("main")
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4, "main"]


def test_F022_ctrl_c_while_another_thread_holds_the_lock():
    lock, held, release = FairLock(), threading.Event(), threading.Event()

    def hold():
        with HeldInterrupts() as interrupts, lock.held(interrupts):
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        held.wait(30)
        threading.Timer(
            0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ).start()
        with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts, lock.held(interrupts):
            raise AssertionError("the lock is the other thread's")
        release.set()
        thread.join(30)
        with HeldInterrupts() as interrupts, lock.held(interrupts):
            assert not lock._queue
    finally:
        signal.signal(signal.SIGINT, before)


def test_F023_every_row_has_a_token(make_engine, run_all, judge):
    """The toy runner asserts it: prompts of whole blocks, several samples, forced preemptions."""
    preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        size = rng.choice([1, 2, 4])
        host = rng.choice([0, 16])
        engine = make_engine(
            num_blocks=rng.randint(6, 20) * max(1, 4 // size),
            block_size=size,
            index=rng.choice([*INDEXES]),
            partial=rng.choice([0, 1]) if size > 1 else 0,
            host_blocks=host,
            preemption=rng.choice(["swap", "recompute"]) if host else "recompute",
            chunk_tokens=rng.choice([0, 4]),
            token_budget=16,
            max_model_len=64,
        )
        stem, asked = [rng.randrange(90) for _ in range(12)], {}
        for _ in range(10):
            prompt = stem[: size * rng.randint(1, 12 // size)]
            with contextlib.suppress(ValueError):  # one that can never fit
                params = SamplingParams(
                    max_tokens=rng.randint(1, 9), n=rng.choice([1, 2, 2, 3]), ignore_eos=True
                )
                asked[engine.add(prompt, params)] = prompt
            engine.step()
            if engine.scheduler.running and rng.random() < 0.5:
                engine.scheduler._preempt(rng.choice(engine.scheduler.running))
        for request_id, output in run_all(engine).items():
            for sample in output.outputs:
                assert list(sample.token_ids) == judge(asked[request_id], len(sample.token_ids))
        preemptions += engine.scheduler.num_preemptions
    assert preemptions > 60


def test_F014_what_a_request_wants_of_the_cache_reaches_the_policy(make_engine, run_all, greedy):
    """With policy retention the blocks of a request kept at 9 are the last to go, until its seconds are over."""

    def kept(policy, retention=0, ttl_s=None, clock=0.0):
        engine = make_engine(num_blocks=9, policy=policy)
        now = [0.0]
        engine._clock = lambda: now[0]
        first = [1, 2, 3, 4, 5, 6, 7, 8]
        engine.add(first, greedy(1, retention=retention, ttl_s=ttl_s))
        run_all(engine)
        now[0] = clock
        for n in range(4):  # 8 blocks of others through a pool of 8
            engine.add([10 + n] * 8, greedy(1))
            run_all(engine)
        again = engine.add([*first, 9], greedy(1))
        return run_all(engine)[again].num_cached_tokens

    assert kept("lru") == kept("lru", 9) == kept("retention") == 0
    assert kept("retention", 9) == kept("retention", 9, 50.0, clock=49.0) == 8
    assert kept("retention", 9, 50.0, clock=51.0) == 0


def test_F014_the_category_of_a_request_reaches_the_policy(make_engine, run_all, greedy):
    """Under workload-aware a prompt of a category that comes back late outlives a younger one that is overdue."""

    def cached(policy, soon="", late=""):
        engine = make_engine(num_blocks=9, policy=policy)
        now = [0.0]
        engine._clock = lambda: now[0]

        def asked(token, at, group):
            now[0] = at
            request = engine.add([token] * 9, greedy(1, group=group))
            return run_all(engine)[request].num_cached_tokens

        for at in (0, 100, 200, 300, *range(381, 411)):
            if at % 100 == 0:
                asked(2, float(at), late)
            else:
                asked(1, float(at), soon)
        for token in (11, 12):  # one block more than the pool has is needed
            asked(token, 440.0, "")
        return asked(2, 441.0, late)

    assert cached("lru", "soon", "late") == cached("workload-aware") == 4
    assert cached("workload-aware", "soon", "late") == 8


def test_F014_requests_that_opt_out_read_nothing_or_leave_nothing(make_engine, run_all, greedy):
    engine = make_engine()
    prompt = list(range(1, 14))

    def cached(**wishes):
        request = engine.add(prompt, greedy(2, **wishes))
        output = run_all(engine)[request]
        return output.num_cached_tokens, output.miss_reason

    assert cached(cache_write=False)[0] == 0
    assert cached() == (0, "no_match")  # nothing was left
    assert cached(cache_read=False) == (0, "opted_out")
    assert cached()[0] == 12


def test_F014_wishes_are_checked_by_name():
    for name, values in {
        "retention": [1.5, None, True, 2**40],
        "ttl_s": [0, -1.0, float("nan"), "x", True],
        "cache_read": [None, 0],
        "cache_write": ["no"],
        "group": [None, 3, b"chat"],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: value})


def test_B153_long_prompts_and_decodes_share_steps(make_engine, run_all, greedy):
    """A running answer gets a token in every step; a short prompt behind a long one starts within two where chunks
    are shorter than the budget. By default they are not: then it waits for the long one's end."""

    def short_waits(chunk_tokens):
        engine = make_engine(num_blocks=260, token_budget=64, chunk_tokens=chunk_tokens, max_model_len=1024)
        victim = engine.add([1, 2, 3], greedy(60))
        engine.step()
        engine.add([n % 90 for n in range(800)], greedy(1))
        engine.step()
        short = engine.add(list(range(10)), greedy(1))
        begun = engine.scheduler.step
        ended = {}
        while engine.has_work:
            for output in engine.step():
                ended.setdefault(output.request_id, engine.scheduler.step)
            if engine.scheduler.step < 15:
                rows = engine.runner.plans[-1].rows
                assert [row.num_tokens for row in rows if row.seq.request.request_id == victim] == [1]
        return ended[short] - begun

    assert short_waits(32) <= 2
    assert short_waits(0) > 10
