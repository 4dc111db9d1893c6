"""The engine with another runner: a trace played on a virtual clock.

Scheduler, engine, manager and beam search are the real ones. `SimRunner` (`sim.runner`) answers each plan with the
trace's own output tokens, or with drawn or recorded candidates for beams, and advances the clock by what the cost model
says; nothing else differs from decoding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagedjax.cache.hashing import TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.engine.quiet import book_quiet_steps, num_quiet_steps
from pagedjax.engine.request import Request, RequestOutput, SamplingParams, Sequence
from pagedjax.engine.step import StepPlan
from pagedjax.sim.beams import Beams, CandidateSource, RecordedBeams
from pagedjax.sim.cost import CostModel
from pagedjax.sim.metrics import RequestRecord, Summary, summarize
from pagedjax.sim.runner import SimRunner, VirtualClock
from pagedjax.sim.tokens import Prompts, own_token
from pagedjax.sim.trace import Trace, TraceRequest

_MOST_SKIPPED = 4096


_UNDER_WAY = RequestOutput("", (), (), False, 0, "", 0, 0, 0)


class _Quiet(Engine):
    """The engine, which builds no output of a request under way: here nobody reads it."""

    def _output(self, request: Request) -> RequestOutput:
        return _UNDER_WAY if request.live else super()._output(request)


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
        num_swaps: Preemptions that moved blocks to the host.
        held: Share of the pool that sequences hold, averaged over busy time.
        most_held: Its largest value.
    """

    records: list[RequestRecord] = field(default_factory=list)
    num_steps: int = 0
    busy_s: float = 0.0
    batch: float = 0.0
    plan_hash: str = ""
    sampled: dict[str, float] = field(default_factory=dict)
    refused: int = 0
    num_swaps: int = 0
    held: float = 0.0
    most_held: float = 0.0

    def summary(self, **limits: float) -> Summary:
        return summarize(self.records, **limits)


def hash_plan(plan: StepPlan) -> bytes:
    """Who runs, how many tokens, in which blocks, and which copies come first."""
    rows = [(row.seq.seq_id, row.start, row.num_tokens, len(row.samples)) for row in plan.rows]
    hasher = hashlib.sha256(np.array(rows, dtype=np.int64).tobytes())
    for table in plan.tables:
        hasher.update(np.ascontiguousarray(table).tobytes())
    for batch in plan.copies.batches:
        hasher.update(f"{batch.kind} {batch.group}".encode() + batch.src.tobytes() + batch.dst.tobytes())
    return hasher.digest()


class Instance:
    """One engine on a virtual clock of its own, moved event by event; `simulate` and fleets drive it.

    Between two planned steps lie *quiet* ones, in which nothing can happen but the next token: `look_ahead` finds
    how long they take without running them, `catch_up` books those that begin before a given time.

    Args:
        manager: Any cache manager.
        cost: A cost model, or seconds of a plan.
        config: Limits of one step.
        max_model_len: Longest sequence in tokens.
        n / beams / watch / hash_plans: As for `simulate`.
        on_step: Called with each planned step and its seconds, when it begins.
        on_quiet: Called with f64[count] seconds of quiet steps that were booked, and their rows.

    Attributes:
        clock: End of the last step, or the arrival that woke it since.
        result: Totals so far; the records are the caller's to keep.
        started: Names of requests that got their first token in the last planned step.
    """

    def __init__(
        self,
        manager: Any,
        cost: CostModel | Callable[[StepPlan], float],
        config: SchedulerConfig,
        *,
        max_model_len: int,
        n: int = 1,
        beams: Beams | RecordedBeams | None = None,
        watch: Callable[[StepPlan], dict[str, float]] | None = None,
        hash_plans: bool = False,
        on_step: Callable[[StepPlan, float], None] | None = None,
        on_quiet: Callable[[np.ndarray, int], None] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.live: dict[str, tuple[TraceRequest, float]] = {}
        self.admitted: dict[str, float] = {}
        self.started: list[str] = []
        self.result = Simulation()
        self._manager = manager
        self.n = n
        self.beams = beams
        self._watch = watch
        self._on_step = on_step
        self._on_quiet = on_quiet
        self._hasher = hashlib.sha256() if hash_plans else None
        self._cost = cost if isinstance(cost, CostModel) else None
        self._step_s = cost.step_s if isinstance(cost, CostModel) else cost
        self._ahead: np.ndarray | None = None  # ends of the quiet steps found, the first entry is now
        self._ahead_s: np.ndarray = np.empty(0)  # what each of them takes
        candidates: CandidateSource | None = beams.drawn() if isinstance(beams, Beams) else beams
        runner = SimRunner(
            manager.pool_blocks,
            manager.block_size,
            self._timed,
            self.clock,
            self._answer,
            candidates,
            (manager.block_size * cost.kv_bytes_per_token,) if isinstance(cost, CostModel) else (),
            cost.copy_s if isinstance(cost, CostModel) else _nothing,
        )
        self.engine = _Quiet(manager, runner, config, max_model_len=max_model_len, clock=self.clock)

    @property
    def due_s(self) -> float:
        """When the next step has to be planned; infinite where no request is queued or runs."""
        if not self.engine.has_work:
            return math.inf
        return self.clock.now if self._ahead is None else float(self._ahead[-1])

    def _held(self) -> float:
        """Share of the pool that sequences hold."""
        return 1 - self._manager.num_free / self._manager.num_usable

    def _answer(self, request_id: str, sample: int, position: int) -> int:
        request, _ = self.live[request_id]
        if request.output_ids is not None and sample == 0:
            return int(request.output_ids[position])
        return own_token(int(request_id) * self.n + sample)

    def _answers(self, seq: Sequence, count: int) -> list[int]:
        first = seq.num_output_tokens
        return [self._answer(seq.request.request_id, seq.index, first + i) for i in range(count)]

    def _timed(self, plan: StepPlan) -> float:
        admitted, now = self.admitted, self.clock.now
        for row in plan.rows:
            name = row.seq.request.request_id
            if name not in admitted:
                admitted[name] = now
            if row.samples and not row.seq.num_output_tokens:
                self.started.append(name)
        elapsed = self._step_s(plan)
        result = self.result
        result.num_steps += 1
        result.busy_s += elapsed
        result.batch += elapsed * len(plan.rows)
        held = self._held()
        result.held += elapsed * held
        result.most_held = max(result.most_held, held)
        if self._watch is not None:
            for name, value in self._watch(plan).items():
                result.sampled[name] = result.sampled.get(name, 0.0) + elapsed * value
        if self._hasher is not None:
            self._hasher.update(hash_plan(plan))
        if self._on_step is not None:
            self._on_step(plan, elapsed)
        return elapsed

    def accepts(self, name: str, request: TraceRequest, tokens: np.ndarray) -> bool:
        """Whether `add` would take such a request, or it could never run here."""
        try:
            self.engine.check(tokens, self.sampling(request, name))
        except ValueError:
            return False
        return True

    def add(
        self,
        name: str,
        request: TraceRequest,
        tokens: np.ndarray,
        now: float,
        *,
        chain: TokenChain | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Queue one request; it waits for the end of a step under way at `now`.

        Args:
            name: A number, not in use.
            request: Its lengths and times.
            tokens: i32[num_input], the prompt.
            now: When it comes.
            chain: The prompt's, where it is hashed already, to be the request's own.
            sampling: What `sampling` gave for it, if that was asked before.

        Raises:
            ValueError: It can never run here.
        """
        sampling = sampling or self.sampling(request, name)
        self.catch_up(now)
        if not self.engine.has_work:
            self.clock.now = max(self.clock.now, now)
        self.live[name] = (request, request.arrival_s)
        self.engine.add(tokens, sampling, request_id=name, chain=chain)

    def cancel(self, name: str, now: float) -> bool:
        """End a request without a record; False: it is not here any more."""
        self.catch_up(now)
        self.admitted.pop(name, None)
        if self.live.pop(name, None) is None:
            return False
        self.engine.abort(name)
        return True

    def sampling(self, request: TraceRequest, name: str = "") -> SamplingParams:
        """How a request is decoded."""
        if isinstance(self.beams, RecordedBeams) and name in self.beams.sampling:
            return self.beams.sampling[name]
        width = self.beams.width if isinstance(self.beams, Beams) else 0
        # The engine tells the manager how long an answer will be where nothing can end it early (Orca's Oracle).
        return SamplingParams(
            max_tokens=max(request.num_output, 1),
            n=width or self.n,
            beam_width=width,
            ignore_eos=True,
            seed=0,
            group=request.group,
            **(request.wishes or {}),
        )

    def wake(self, now: float) -> None:
        """The next step begins no sooner than now, where nothing is under way."""
        if self._ahead is None:
            self.clock.now = max(self.clock.now, now)

    def step(self) -> list[tuple[str, RequestRecord]]:
        """Run the quiet steps found, then plan and run one; its ended requests by name."""
        self.catch_up(math.inf)
        self.started.clear()
        return [self._book(output) for output in self.engine.step() if output.finished]

    def look_ahead(self) -> None:
        """Find the decode steps in which nothing can happen but the next token, without planning each.

        Which these are the scheduler's room says (`engine.quiet`). They count as long as nobody is added.
        """
        self._ahead = None
        scheduler = self.engine.scheduler
        count = num_quiet_steps(scheduler, _MOST_SKIPPED)
        if count < 1 or self._cost is None:
            return
        running = scheduler.running
        cached = sum(request.sequences[0].num_computed_tokens for request in running)
        again = 0
        if self._cost.hardware.shared_read < 1:
            tables = [scheduler.manager.table(request.sequences[0].seq_id) for request in running]
            named = [block for table in tables for block in table if block]
            again = len(named) - len(set(named))
        elapsed = self._cost.decode_steps_s(len(running), cached, count, again)
        self._ahead, self._ahead_s = np.cumsum(np.concatenate([[self.clock.now], elapsed])), elapsed

    def catch_up(self, until_s: float) -> None:
        """Book the quiet steps found that begin before `until_s`; the others are to be found anew."""
        ends, self._ahead = self._ahead, None
        if ends is None:
            return
        count = int(np.searchsorted(ends[:-1], until_s, side="left"))
        if count < 1:
            return
        scheduler = self.engine.scheduler
        first = scheduler.step + 1
        book_quiet_steps(scheduler, count, self._answers, float(ends[count]))
        if self.engine.observer is not None:
            self.engine.observer.quiet(first, count, float(ends[0]), float(ends[count]))
        busy = float(ends[count] - ends[0])
        self.clock.now = float(ends[count])
        self.result.num_steps += count
        self.result.busy_s += busy
        self.result.batch += busy * len(scheduler.running)
        self.result.held += busy * self._held()  # quiet steps take no block and give none back
        if self._on_quiet is not None:
            self._on_quiet(self._ahead_s[:count], len(scheduler.running))

    def _book(self, output: RequestOutput) -> tuple[str, RequestRecord]:
        name = output.request_id
        request, arrival = self.live.pop(name)
        admitted = self.admitted.pop(name, self.clock.now)
        first = self.clock.now if output.ttft_s is None else output.ttft_s
        produced = sum(len(o.token_ids) for o in output.outputs)
        latency = output.latency_s or 0.0
        # The engine's times count from `add`, which waits for the step under way at the arrival.
        added = self.clock.now - latency
        known = request.token_ids is not None or request.granule_ids is not None
        return name, RequestRecord(
            arrival_s=arrival,
            admitted_s=max(admitted, arrival),
            first_token_s=added + first if output.ttft_s is not None else self.clock.now,
            finished_s=self.clock.now,
            num_input=request.num_input,
            num_output=max(produced, 1),
            num_cached=output.num_cached_tokens if known else None,
            num_preemptions=output.num_preemptions,
            reason=str(output.outputs[0].finish_reason),
        )

    def finish(self) -> Simulation:
        """Averages over busy time, and the hash of all plans; called once, at the end."""
        result = self.result
        busy = result.busy_s or 1.0
        result.batch /= busy
        result.held /= busy
        result.num_swaps = self.engine.scheduler.num_swaps
        result.sampled = {k: v / busy for k, v in result.sampled.items()}
        result.plan_hash = self._hasher.hexdigest() if self._hasher is not None else ""
        return result


def _nothing(plan: StepPlan) -> float:
    return 0.0


def simulate(
    trace: Trace,
    manager: Any,
    cost: CostModel | Callable[[StepPlan], float],
    config: SchedulerConfig,
    *,
    max_model_len: int,
    n: int = 1,
    beams: Beams | RecordedBeams | None = None,
    until_s: float = float("inf"),
    in_flight: int = 0,
    watch: Callable[[StepPlan], dict[str, float]] | None = None,
    hash_plans: bool = False,
    skip: bool = True,
    observe: Callable[[Engine], AbstractContextManager[object]] | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> Simulation:
    """Play a trace through the real engine on a virtual clock.

    Args:
        trace: Requests in order of arrival.
        manager: Any cache manager.
        cost: A cost model, or seconds of a plan.
        config: Limits of one step.
        max_model_len: Longest sequence in tokens.
        n: Samples per request.
        beams: Decode with beam search instead: all requests, with drawn candidates; or those that were recorded
            as beams under their number in the trace ("0", "1", …), with what was recorded.
        until_s: Stop then; requests still running are left out of the records.
        in_flight: A closed loop: so many requests at once, in the trace's order; the next one comes when one has ended,
            whatever its own time. 0: by their times.
        watch: Called with each plan; its values are averaged over busy time.
        hash_plans: Hash every plan, to compare two runs.
        skip: Do not plan decode steps in which nothing but the next token can happen; same records, much
            sooner. Needs a cost model and one sample per request, and gives way to `watch` and `hash_plans`.
        observe: Engine → what is entered for the run, such as a `pagedjax.report.record.Recorder` of it.
        on_record: Gets each record in place of the result, which then keeps none: memory stays flat.

    Returns:
        Records and totals.

    Raises:
        ValueError: `in_flight` is negative.
    """
    if in_flight < 0:
        raise ValueError(
            f"in_flight={in_flight}: must be a number of requests, or 0 for the trace's own times"
        )
    run = Instance(
        manager,
        cost,
        config,
        max_model_len=max_model_len,
        n=n,
        beams=beams,
        watch=watch,
        hash_plans=hash_plans,
    )
    skips = skip and not (watch is not None or hash_plans or n > 1 or beams is not None)
    keep = run.result.records.append if on_record is None else on_record
    prompts = Prompts(trace, 1 if getattr(manager, "partial", 0) else manager.block_size)
    coming = iter(enumerate(trace))
    following = next(coming, None)

    def due() -> float:
        """When the following request comes."""
        if following is None:
            return math.inf
        if in_flight:
            return run.clock.now if len(run.live) < in_flight else math.inf
        return following[1].arrival_s

    with nullcontext() if observe is None else observe(run.engine):
        while (following is not None or run.engine.has_work) and run.clock.now < until_s:
            if following is not None and not run.engine.has_work:
                run.clock.now = max(run.clock.now, due())
            while following is not None and due() <= run.clock.now:
                number, request = following
                if in_flight:
                    request = replace(request, arrival_s=run.clock.now)
                name, tokens = str(number), prompts.tokens(number, request)
                if run.accepts(name, request, tokens):
                    run.add(name, request, tokens, request.arrival_s)
                else:
                    run.result.refused += 1
                following = next(coming, None)
            if run.engine.has_work:
                for _, record in run.step():
                    keep(record)
                if skips:
                    run.look_ahead()
                    run.catch_up(min(until_s, due()))
    return run.finish()
