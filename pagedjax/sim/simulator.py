"""The engine with another runner: a trace played on a virtual clock.

Scheduler, engine and manager are the real ones. `SimRunner` answers each plan with the trace's own
output tokens and advances the clock by what the cost model says; nothing else differs from decoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagedjax.cache import Hints, Hit, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine, StepResult
from pagedjax.request import RequestOutput, SamplingParams
from pagedjax.scheduler import StepPlan
from pagedjax.sim.cost import CostModel
from pagedjax.sim.metrics import RequestRecord, Summary, summarize
from pagedjax.sim.trace import Trace, TraceRequest

# Tokens that stand for content a trace does not identify: i32, out of the way of ids and vocabularies.
_OWN_PROMPT = 1 << 29
_OWN_ANSWER = 1 << 30


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimRunner:
    """Stands in for the device: knows what will be answered and how long it takes.

    Args:
        num_blocks / block_size: As the manager counts them.
        step_s: Seconds a plan takes.
        clock: Advanced by it.
        answers: (request id, sample, position in the answer) → token.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        step_s: Callable[[StepPlan], float],
        clock: Clock,
        answers: Callable[[str, int, int], int],
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._step_s = step_s
        self._clock = clock
        self._answers = answers

    def execute(self, plan: StepPlan) -> StepResult:
        """Advance the clock and answer."""
        elapsed = self._step_s(plan)
        self._clock.now += elapsed
        answers = self._answers
        tokens = [
            answers(s.request.request_id, s.index, s.num_output_tokens)
            for row in plan.rows
            for s in row.samples
        ]
        return StepResult(tokens, [], elapsed)


class _Told:
    """A manager that is told each sequence's output length, as the trace knows it (Orca's Oracle)."""

    def __init__(self, manager: Any, lengths: dict[int, int]) -> None:
        self._manager = manager
        self._lengths = lengths
        # What every step calls is bound here: looking it up through __getattr__ costs more than some calls.
        for name in ("reserve", "commit", "release", "tables", "take_copies", "fork", "num_copies"):
            setattr(self, name, getattr(manager, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def begin(self, seq: int, chain: TokenChain, hints: Hints = Hints()) -> Hit:
        # What a resumed sequence generated before is part of its chain now.
        prompt, output = divmod(self._lengths[seq], 1 << 32)
        left = max(output - max(len(chain) - prompt, 0), 1)
        hit: Hit = self._manager.begin(seq, chain, replace(hints, expected_tokens=left))
        return hit


class Prompts:
    """Token ids for a trace's prompts, made so that they are equal exactly where the identities are.

    A granule's tokens are its id, repeated; numbered anew where ids do not fit. What has no identity gets
    a token of its own.
    """

    def __init__(self, trace: Trace) -> None:
        self._granularity = trace.granularity
        self._dense: dict[int, int] = {}

    def tokens(self, number: int, request: TraceRequest) -> np.ndarray:
        """i32[num_input] of request `number`."""
        if request.token_ids is not None:
            return request.token_ids
        own = np.full(request.num_input, _OWN_PROMPT + number, dtype=np.int32)
        if request.granule_ids is not None:
            dense = self._dense
            ids = [dense.setdefault(i, len(dense)) for i in request.granule_ids.tolist()]
            spread = np.repeat(np.array(ids, dtype=np.int32), self._granularity)[: request.num_input]
            own[: len(spread)] = spread
        return own


@dataclass
class Simulation:
    """What a simulated run did.

    Attributes:
        records: Finished requests, in order of their end.
        num_steps: Steps run.
        busy_s: Seconds in which a step ran.
        batch: Sequences per step, averaged over time.
        plan_hash: sha256 over every plan's rows and tables: equal plans, equal hash.
        sampled: Values of the `watch` hook averaged over busy time.
        refused: Requests that could never run.
    """

    records: list[RequestRecord] = field(default_factory=list)
    num_steps: int = 0
    busy_s: float = 0.0
    batch: float = 0.0
    plan_hash: str = ""
    sampled: dict[str, float] = field(default_factory=dict)
    refused: int = 0

    def summary(self, **limits: float) -> Summary:
        return summarize(self.records, **limits)


def hash_plan(plan: StepPlan) -> bytes:
    """Who runs, how many tokens, in which blocks, and which copies come first."""
    rows = [(row.seq.seq_id, row.start, row.num_tokens, len(row.samples)) for row in plan.rows]
    hasher = hashlib.sha256(np.array(rows, dtype=np.int64).tobytes())
    for table in plan.tables:
        hasher.update(np.ascontiguousarray(table).tobytes())
    for batch in plan.copies.batches:
        hasher.update(batch.kind.encode() + batch.src.tobytes() + batch.dst.tobytes())
    return hasher.digest()


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        trace: Trace,
        manager: Any,
        step_s: Callable[[StepPlan], float],
        config: SchedulerConfig,
        max_model_len: int,
        n: int,
        watch: Callable[[StepPlan], dict[str, float]] | None,
        hash_plans: bool,
    ) -> None:
        self.clock = Clock()
        self.lengths: dict[int, int] = {}
        self.live: dict[str, tuple[TraceRequest, float]] = {}
        self.admitted: dict[str, float] = {}
        self.result = Simulation()
        self.prompts = Prompts(trace)
        self.n = n
        self.next_seq = 0
        self.number = 0
        self._watch = watch
        self._hasher = hashlib.sha256() if hash_plans else None
        self._step_s = step_s
        runner = SimRunner(manager.num_blocks, manager.block_size, self._timed, self.clock, self._answer)
        told = _Told(manager, self.lengths)
        self.engine = Engine(
            told,
            runner,
            config,
            max_model_len=max_model_len,
            clock=self.clock,
        )

    def _answer(self, request_id: str, sample: int, position: int) -> int:
        request, _ = self.live[request_id]
        if request.output_ids is not None and sample == 0:
            return int(request.output_ids[position])
        return _OWN_ANSWER + int(request_id) * self.n + sample

    def _timed(self, plan: StepPlan) -> float:
        for row in plan.rows:
            self.admitted.setdefault(row.seq.request.request_id, self.clock.now)
        elapsed = self._step_s(plan)
        result = self.result
        result.num_steps += 1
        result.busy_s += elapsed
        result.batch += elapsed * len(plan.rows)
        if self._watch is not None:
            for name, value in self._watch(plan).items():
                result.sampled[name] = result.sampled.get(name, 0.0) + elapsed * value
        if self._hasher is not None:
            self._hasher.update(hash_plan(plan))
        return elapsed

    def add(self, request: TraceRequest) -> None:
        """Queue one request; what the engine refuses outright is counted."""
        name = str(self.number)
        tokens = self.prompts.tokens(self.number, request)
        self.number += 1
        sampling = SamplingParams(max_tokens=max(request.num_output, 1), n=self.n, ignore_eos=True, seed=0)
        try:
            self.engine.check(tokens, sampling)
        except ValueError:
            self.result.refused += 1
            return
        for _ in range(self.n):
            self.lengths[self.next_seq] = (request.num_input << 32) | sampling.max_tokens
            self.next_seq += 1
        self.live[name] = (request, request.arrival_s)
        self.engine.add(tokens, sampling, request_id=name)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._book(output)

    def _book(self, output: RequestOutput) -> None:
        name = output.request_id
        request, arrival = self.live.pop(name)
        admitted = self.admitted.pop(name, self.clock.now)
        first = self.clock.now if output.ttft_s is None else output.ttft_s
        produced = sum(len(o.token_ids) for o in output.outputs)
        latency = output.latency_s or 0.0
        # The engine's times count from `add`, which waits for the step under way at the arrival.
        added = self.clock.now - latency
        self.result.records.append(
            RequestRecord(
                arrival_s=arrival,
                admitted_s=max(admitted, arrival),
                first_token_s=added + first if output.ttft_s is not None else self.clock.now,
                finished_s=self.clock.now,
                num_input=request.num_input,
                num_output=max(produced, 1),
                num_cached=output.num_cached_tokens,
                num_preemptions=output.num_preemptions,
                reason=str(output.outputs[0].finish_reason),
            )
        )

    def finish(self) -> Simulation:
        result = self.result
        busy = result.busy_s or 1.0
        result.batch /= busy
        result.sampled = {k: v / busy for k, v in result.sampled.items()}
        result.plan_hash = self._hasher.hexdigest() if self._hasher is not None else ""
        return result


def simulate(
    trace: Trace,
    manager: Any,
    cost: CostModel | Callable[[StepPlan], float],
    config: SchedulerConfig,
    *,
    max_model_len: int,
    n: int = 1,
    until_s: float = float("inf"),
    watch: Callable[[StepPlan], dict[str, float]] | None = None,
    hash_plans: bool = False,
) -> Simulation:
    """Play a trace through the real engine on a virtual clock.

    Args:
        trace: Requests in order of arrival.
        manager: Any cache manager; it is told output lengths (`Hints.expected_tokens`), which only the
            Oracle and Pow2 reservations read.
        cost: A cost model, or seconds of a plan.
        config: Limits of one step.
        max_model_len: Longest sequence in tokens.
        n: Samples per request.
        until_s: Stop then; requests still running are left out of the records.
        watch: Called with each plan; its values are averaged over busy time.
        hash_plans: Hash every plan, to compare two runs.

    Returns:
        Records and totals.
    """
    step_s = cost.step_s if isinstance(cost, CostModel) else cost
    run = _Run(trace, manager, step_s, config, max_model_len, n, watch, hash_plans)
    coming = iter(trace)
    request = next(coming, None)
    while (request is not None or run.engine.has_work) and run.clock.now < until_s:
        if request is not None and not run.engine.has_work:
            run.clock.now = max(run.clock.now, request.arrival_s)
        while request is not None and request.arrival_s <= run.clock.now:
            run.add(request)
            request = next(coming, None)
        if run.engine.has_work:
            run.step()
    return run.finish()
