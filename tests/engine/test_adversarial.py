"""Everything at once: random pools, threads that share an engine, aborts from hooks and threads, failed steps, Ctrl-C.

Whatever happens, no request is stuck, lost or sick, and every wait ends: answers are the judge's as far as they go, the
books are whole, and nothing is held at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import sys
import threading
from pathlib import Path

import pytest

import pagedjax
from pagedjax.engine.request import SamplingParams

PACKAGE = str(Path(pagedjax.__file__).parent)


class Failure(Exception):
    """What a broken runner or hook raises."""


@contextlib.contextmanager
def _ctrl_c_at(line):
    """Ctrl-C arrives when the n-th line of the package runs in this thread; 0: it does not."""
    seen = 0

    def local(frame, event, arg):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGINT)
        return local

    tracer = sys.gettrace()
    if line:
        sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        yield
    finally:
        sys.settrace(tracer)


class History:
    """One run of everything, from a seed."""

    def __init__(self, seed, make_engine, judge):
        rng = self.rng = random.Random(seed)
        self.judge, self.seed = judge, seed
        size = rng.choice([1, 2, 4])
        host = rng.choice([0, 12])
        self.engine = make_engine(
            block_size=size,
            num_blocks=rng.randint(8, 16) * 4 // size,
            index=rng.choice(["hash", "radix", "table"]),
            policy=rng.choice(["lru", "fifo", "lfu", "retention"]),
            partial=rng.choice([0, 1]) if size > 1 else 0,
            host_blocks=host,
            preemption=rng.choice(["swap", "recompute"]) if host else "recompute",
            max_num_seqs=rng.choice([2, 4, 8]),
            token_budget=rng.choice([8, 16]),
            chunk_tokens=rng.choice([0, 4]),
            max_model_len=28,
        )
        self.stems = [[rng.randrange(97) for _ in range(12)] for _ in range(2)]
        self.asked, self.done, self.withdrawn, self.errors = {}, {}, set(), []
        self.quiet = False  # the end: nothing fails any more
        self._lock = threading.Lock()
        self._execute = self.engine.runner.execute
        self.engine.runner.execute = self._broken
        self.engine.on_step = self._hook

    def prompt(self):
        stem = self.rng.choice(self.stems)
        return [
            *stem[: self.rng.randint(1, 12)],
            *(self.rng.randrange(97) for _ in range(self.rng.randint(0, 3))),
        ]

    def params(self):
        n = self.rng.choice([1, 1, 1, 2])
        return SamplingParams(
            max_tokens=self.rng.randint(1, 7), n=n, ignore_eos=True, retention=self.rng.choice([0, 3])
        )

    def note(self, request_id, prompt, params):
        with self._lock:
            self.asked[request_id] = (prompt, params)

    def end(self, outputs):
        with self._lock:
            for output in outputs:
                if output.finished:
                    assert output.request_id not in self.done, "told twice"
                    self.done[output.request_id] = output

    def _broken(self, plan):
        if self.quiet or self.rng.random() > 0.08:
            return self._execute(plan)
        batches = plan.copies.batches[: self.rng.randint(0, len(plan.copies.batches))]
        part = dataclasses.replace(plan, copies=dataclasses.replace(plan.copies, batches=batches))
        if len(batches) == len(plan.copies.batches) and self.rng.random() < 0.5:
            self._execute(part)
        else:
            self._execute(dataclasses.replace(part, rows=(), tables=(part.tables[0][:0],)))
        raise Failure

    def _hook(self, record):
        if self.quiet:
            return
        if self.rng.random() < 0.15:
            self.withdraw()
        if self.rng.random() < 0.05:
            thread = threading.Thread(target=self.withdraw)
            thread.start()
            thread.join(60)  # a hook may wait for a thread that aborts
        if self.rng.random() < 0.05:
            raise Failure

    def withdraw(self):
        live = list(self.engine._requests)
        if live:
            request_id = self.rng.choice(live)
            with self._lock:
                self.withdrawn.add(request_id)
            self.engine.abort(request_id)

    def work(self, number):
        """What a thread does: waits for several, streams (and may leave early), queues for whoever steps."""
        names = []
        try:
            for turn in range(3):
                jobs = [(self.prompt(), self.params()) for _ in range(self.rng.randint(1, 3))]
                names = [f"{number}.{turn}.{i}" for i in range(len(jobs))]
                for name, job in zip(names, jobs, strict=True):
                    self.note(name, *job)
                kind = self.rng.choice(["complete", "stream", "add"])
                try:
                    if kind == "complete":
                        outputs = self.engine.complete(jobs, request_ids=names)
                        assert [output.request_id for output in outputs] == names
                        self.end(outputs)
                        continue
                    for name, (prompt, params) in zip(names, jobs, strict=True):
                        if kind == "add":
                            self.engine.add(prompt, params, request_id=name)
                            continue
                        for output in self.engine.stream(prompt, params, request_id=name):
                            if output.finished:
                                self.end([output])
                            elif self.rng.random() < 0.05:
                                self.withdrawn.add(name)
                                break
                except (Failure, KeyboardInterrupt):
                    self.withdrawn.update(names)  # who waited is told by the exception
        except KeyboardInterrupt:  # while a request was being made
            self.withdrawn.update(names)
        except BaseException as error:
            self.errors.append(error)

    def run(self):
        engine = self.engine
        threads = [threading.Thread(target=self.work, args=(i,)) for i in range(self.rng.randint(0, 3))]
        for thread in threads:
            thread.start()
        for turn in range(6):  # the main thread, where Ctrl-C strikes
            line = self.rng.choice([0, self.rng.randrange(1, 4000)])
            with contextlib.suppress(KeyboardInterrupt, Failure), _ctrl_c_at(line):
                if turn % 2:
                    self.end(engine.step())
                else:
                    self.work(f"main{turn}")
        self.quiet = True
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a wait that does not end"
        for _ in range(600):
            if not engine.has_work:
                break
            self.end(engine.step())
        assert not self.errors, self.errors
        self.check()

    def check(self):
        engine = self.engine
        assert not engine.has_work and not engine._requests and not engine._held and not engine._ready, (
            "stuck"
        )
        engine.manager.check_invariants()
        assert engine.manager.num_free == engine.manager.num_usable, "blocks are held by nobody"
        assert self.asked.keys() <= self.done.keys() | self.withdrawn, "lost"
        for request_id, output in self.done.items():
            prompt, params = self.asked[request_id]
            for sample in output.outputs:
                tokens = list(sample.token_ids)
                assert tokens == self.judge(prompt, len(tokens)), "sick"
                whole = sample.finish_reason not in ("abort", "capacity")
                assert not whole or len(tokens) == min(params.max_tokens, 28 - len(prompt))


def _run(seeds, make_engine, judge):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = withdrawn = 0
    try:
        for seed in seeds:
            history = History(seed, make_engine, judge)
            try:
                history.run()
            except AssertionError as error:
                raise AssertionError(f"history {seed}: {error}") from error
            ended += len(history.done)
            withdrawn += len(history.withdrawn)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended > 2 * len(seeds) and withdrawn > len(seeds)


def test_nothing_is_stuck_lost_or_sick_in_50_histories(make_engine, judge):
    _run(range(50), make_engine, judge)


@pytest.mark.full
@pytest.mark.parametrize("part", range(9))
def test_nothing_is_stuck_lost_or_sick_in_500_histories(make_engine, judge, part):
    _run(range(50 + 50 * part, 100 + 50 * part), make_engine, judge)
