"""Steps that do not run to their end, hooks that raise, and several who step one engine."""

import contextlib
import dataclasses
import random
import signal
import sys
from pathlib import Path

import pytest

import pagedjax
from pagedjax.engine import StepResult
from pagedjax.engine.interrupts import HeldInterrupts
from pagedjax.engine.request import SamplingParams

BLOCK = 4


class Failure(Exception):
    """What a broken runner raises."""


def _fail_in_between(engine, rng, chance):
    """Make steps fail before, between or after their copies, after their rows, or as they are waited for.

    Gives the count as a list.
    """
    runner = engine.runner
    launch, launch_several, failures = runner.launch, runner.launch_several, []

    def broken(plan, after, behind=()):
        if rng.random() >= chance:
            return launch_several([plan, *behind], after) if behind else launch(plan, after)
        failures.append(plan.step)
        batches = plan.copies.batches
        ran = rng.choice([0, rng.randint(0, len(batches)), len(batches)])
        whole = ran == len(batches) and rng.random() < 0.5
        part = dataclasses.replace(plan.copies, batches=batches[:ran])
        some = dataclasses.replace(plan, copies=part)
        if whole:
            begun = launch_several([some, *behind], after) if behind else launch(some, after)
            if rng.random() < 0.5:
                return begun._replace(lost=True)
        else:
            launch(dataclasses.replace(some, rows=(), tables=(some.tables[0][:0],)), None)
        raise Failure

    def collect(begun):
        if begun.lost:
            raise Failure
        return begun.several or begun.result

    runner.launch, runner.collect = broken, collect
    runner.launch_several = lambda plans, after: broken(plans[0], after, plans[1:])
    runner.collect_several = collect
    return failures


def _check_contents(engine, chains):
    """Every indexed block holds the tokens that its digest stands for, on the device and on the host."""
    blocks = {
        c.digest(i): c.tokens[i * BLOCK : i * BLOCK + BLOCK] for c in chains for i in range(c.num_full_blocks)
    }
    for b, key in engine.manager.snapshot()["groups"][0]["keys"].items():
        assert engine.runner.pool[b].tolist() == blocks[key]
    for key in engine.manager._groups[0].tier.contents():
        slot = engine.manager._groups[0].tier.find(key)
        assert engine.runner.host[slot].tolist() == blocks[key]


def _check_answers(engine, judge, asked, done):
    """Every request has ended with the judge's tokens, and holds nothing any more."""
    assert set(done) == set(asked)
    for request_id, output in done.items():
        for sample in output.outputs:
            assert list(sample.token_ids) == judge(asked[request_id], len(sample.token_ids))
    assert engine.manager.num_free == engine.manager.num_usable


@pytest.mark.parametrize("chance", [0.0, 0.2])
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 14, "partial": 1},
        {"num_blocks": 10, "host_blocks": 8, "partial": 2},
        {"num_blocks": 9, "host_blocks": 16, "preemption": "swap", "index": "radix"},
    ],
    ids=["recompute", "host", "swap"],
)
def test_no_failed_step_leaves_a_wrong_token_behind(make_engine, judge, options, chance):
    failures = 0
    for seed in range(8):
        rng = random.Random(seed)
        engine = make_engine(
            block_size=BLOCK,
            max_model_len=32,
            token_budget=16,
            overlap=bool(seed % 2),
            num_steps=4 if seed % 4 > 1 else 1,
            **options,
        )
        counted = _fail_in_between(engine, rng, chance)
        stems = [[rng.randrange(97) for _ in range(16)] for _ in range(2)]
        asked, done, chains = {}, {}, []
        for step in range(200):
            if step < 25 and rng.random() < 0.6:
                prompt = rng.choice(stems)[: rng.randint(1, 16)] + [
                    rng.randrange(97) for _ in range(rng.randint(0, 3))
                ]
                params = SamplingParams(
                    max_tokens=rng.randint(1, 8), n=rng.choice([1, 1, 2]), ignore_eos=True
                )
                request_id = engine.add(prompt, params)
                asked[request_id] = prompt
                chains += [seq.chain for seq in engine._requests[request_id].sequences]
            if rng.random() < 0.05 and len(asked) > len(done):
                withdrawn = rng.choice([i for i in asked if i not in done])
                engine.abort(withdrawn)
                del asked[withdrawn]
            try:
                outputs = engine.step()
            except Failure:
                outputs = []
            done |= {o.request_id: o for o in outputs if o.finished}
            engine.manager.check_invariants()
            _check_contents(engine, chains)
            if step > 25 and not engine.has_work:
                break
        _check_answers(engine, judge, asked, done)
        assert bool(engine.overlaps["ahead"]) == bool(seed % 2)
        assert bool(engine.dispatches["inner"]) == (seed % 4 > 1)
        failures += len(counted)
    assert bool(failures) == bool(chance)


@contextlib.contextmanager
def _ctrl_c_at(line):
    """Ctrl-C arrives when the n-th line of the package runs in this context."""
    package, seen = str(Path(pagedjax.__file__).parent), 0

    def local(frame, event, arg):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGINT)
        return local

    before, tracer = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(package) else None)
    try:
        yield
    finally:
        sys.settrace(tracer)
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 14, "partial": 1}, {"num_blocks": 10, "host_blocks": 16, "preemption": "swap"}],
    ids=["recompute", "swap"],
)
def test_ctrl_c_at_any_line_breaks_no_book(make_engine, judge, options):
    interrupts = 0
    for seed in range(30):
        rng = random.Random(seed)
        engine = make_engine(
            block_size=BLOCK,
            max_model_len=32,
            token_budget=16,
            overlap=bool(seed % 2),
            num_steps=4 if seed % 4 > 1 else 1,
            **options,
        )
        stem = [rng.randrange(97) for _ in range(12)]
        asked, done, chains = {}, {}, []
        for step in range(120):
            outputs = []
            with contextlib.suppress(KeyboardInterrupt), _ctrl_c_at(rng.choice([0, rng.randrange(3000)])):
                interrupts += 1
                if step < 12:
                    prompt = [*stem[: rng.randint(1, 12)], rng.randrange(97)]
                    params = SamplingParams(
                        max_tokens=rng.randint(1, 8), n=rng.choice([1, 2]), ignore_eos=True
                    )
                    request_id = str(step)
                    engine.add(prompt, params, request_id=request_id)
                    asked[request_id] = prompt
                    chains += [seq.chain for seq in engine._requests[request_id].sequences]
                outputs = engine.step()
                interrupts -= 1
            for output in outputs:
                assert output.request_id not in done
                done |= {output.request_id: output} if output.finished else {}
            engine.manager.check_invariants()
            _check_contents(engine, chains)
            if step > 12 and not engine.has_work:
                break
        _check_answers(engine, judge, asked, done)
    assert interrupts > 50


def test_the_second_ctrl_c_does_not_wait():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            reached = 1
            signal.raise_signal(signal.SIGINT)
            reached = 2
        assert reached == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, lambda *_: None)  # somebody's own handler stays
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_hook_that_raises_loses_no_output(make_engine, greedy, judge):
    engine = make_engine()
    calls = []

    def hook(record):
        calls.append(record.plan.step)
        raise Failure

    engine.on_step = hook
    engine.add([1, 2, 3], greedy(1), request_id="a")
    with pytest.raises(Failure):
        engine.step()
    assert engine.has_work  # something is left to tell
    (output,) = engine.step()
    assert output.finished and list(output.outputs[0].token_ids) == judge([1, 2, 3], 1)
    assert calls == [1] and not engine.has_work and engine.step() == []
    engine.add([1, 2, 3], greedy(1), request_id="a")  # the id is free again


def test_a_request_aborted_after_a_failed_hook_is_told_once(make_engine, greedy):
    engine = make_engine(num_blocks=16)

    def hook(record):
        raise Failure

    engine.on_step = hook
    request = engine.add([1, 2, 3], greedy(5))
    with pytest.raises(Failure):
        engine.step()
    assert engine.abort(request).finished and not engine.has_work and engine.step() == []
    assert engine.manager.num_free == engine.manager.num_usable


def test_a_step_inside_a_step_is_refused(make_engine, greedy):
    engine = make_engine()
    engine.on_step = lambda record: engine.step()
    engine.add([1, 2, 3], greedy(2))
    with pytest.raises(ValueError, match="step: runs already"):
        engine.step()
    engine.on_step = None
    assert engine.step()[0].finished


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_runner_of_too_few_or_many_tokens_is_named(make_engine, run_all, greedy, judge, tokens):
    engine = make_engine()
    execute = engine.runner.execute
    request = engine.add([1, 2, 3], greedy(3))
    engine.runner.execute = lambda plan: StepResult(tokens, [], 0.0)
    with pytest.raises(ValueError, match=f"StepResult of {len(tokens)} tokens: the plan samples 1"):
        engine.step()
    engine.runner.execute = execute
    assert list(run_all(engine)[request].outputs[0].token_ids) == judge([1, 2, 3], 3)


def test_streams_side_by_side_each_get_their_own(make_engine, greedy, judge):
    engine = make_engine()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    streams = [engine.stream(prompt, greedy(n)) for prompt, n in zip(prompts, (6, 2, 4), strict=True)]
    first = [next(stream) for stream in streams]
    assert not any(output.finished for output in first)
    for stream, prompt, n in zip(streams, prompts, (6, 2, 4), strict=True):  # the others end meanwhile
        *_, last = stream
        assert last.finished and list(last.outputs[0].token_ids) == judge(prompt, n)
    assert engine.manager.num_free == engine.manager.num_usable


def test_a_stream_ends_where_another_steps_or_aborts(make_engine, run_all, greedy, judge):
    engine = make_engine()
    stream = engine.stream([1, 2, 3], greedy(4))
    request = next(stream).request_id
    run_all(engine)
    assert list(next(stream).outputs[0].token_ids) == judge([1, 2, 3], 4)
    assert list(stream) == []
    stream = engine.stream([1, 2, 3], greedy(4))
    request = next(stream).request_id
    engine.abort(request)
    assert next(stream).outputs[0].finish_reason == "abort" and list(stream) == []


def test_automatic_ids_leave_out_those_in_use(make_engine, greedy):
    engine = make_engine()
    assert engine.add([1, 2, 3], greedy(2), request_id="1") == "1"
    assert [engine.add([1, 2], greedy(2)) for _ in range(3)] == ["2", "3", "4"]
    assert engine.add([1, 2], greedy(2), request_id="6") == "6"
    assert [engine.add([1, 2], greedy(2)) for _ in range(2)] == ["5", "7"]


def test_outputs_of_others_wait_for_the_next_step(make_engine, greedy, judge):
    engine = make_engine()
    mine = engine.add([1, 2, 3], greedy(1))
    assert engine.complete([([4, 5], greedy(3))])[0].finished
    assert engine.has_work
    with pytest.raises(ValueError, match="in use"):
        engine.add([4], greedy(1), request_id=mine)
    (output,) = engine.step()
    assert list(output.outputs[0].token_ids) == judge([1, 2, 3], 1) and not engine.has_work
    mine = engine.add([1, 2, 3], greedy(1))
    engine.complete([([4, 5], greedy(3))])
    assert engine.abort(mine) is None and not engine.has_work
