"""A trace played on a real engine, by a real clock; and the same run once more, plan by plan, without the device.

`play` is open loop: a request is added at the first step that begins after its arrival, however far behind the engine
is. What is planned then depends on how long steps took, so two runs of one trace are not planned alike, and a
simulated one is not either. `follow` therefore takes over when each request came (before which step) and what time it
was, and plans anew with a scheduler and a manager of its own: its plans must be the run's, and what a cost model says
of them is comparable step by step.
"""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine, Runner, StepResult
from pagedjax.engine.request import RequestOutput, Sequence
from pagedjax.engine.step import StepPlan
from pagedjax.sim.metrics import RequestRecord
from pagedjax.sim.requests import PlayRequest
from pagedjax.sim.runner import VirtualClock
from pagedjax.sim.simulator import Simulation, hash_plan
from pagedjax.sim.trace import Trace, TraceRequest


@dataclass
class Timeline:
    """What `follow` needs of a played run; times are seconds from its start, an entry a step.

    Attributes:
        started / executed: When the step began, and when its result was there.
        seconds: What it took, planning, booking and outputs included, compiling not.
        elapsed / copies: `StepResult.elapsed_s` and `copy_s`.
        digests: `hash_plan` of its plan; empty bytes where nothing was planned.
        requests: Those that were taken, each with the step before which it came, and when.
        answers: (name, sample) → its tokens.
    """

    started: array[float] = field(default_factory=lambda: array("d"))
    executed: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    elapsed: array[float] = field(default_factory=lambda: array("d"))
    copies: array[float] = field(default_factory=lambda: array("d"))
    digests: list[bytes] = field(default_factory=list)
    requests: list[tuple[int, float, PlayRequest]] = field(default_factory=list)
    answers: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def trace(self, name: str) -> Trace:
        """The requests that were taken, with the answers that were decoded."""

        def rows() -> Iterable[TraceRequest]:
            for _, _, request in self.requests:
                answer = self.answers.get((request.name, 0), [])
                ended = len(answer) == request.sampling.max_tokens
                s = request.sampling
                yield TraceRequest(
                    request.arrival_s,
                    len(request.tokens),
                    s.max_tokens,
                    token_ids=request.tokens,
                    output_ids=np.array(answer, np.int32) if ended else None,
                    group=s.group,
                    wishes={
                        "retention": s.retention,
                        "ttl_s": s.ttl_s,
                        "cache_read": s.cache_read,
                        "cache_write": s.cache_write,
                    },
                )

        return Trace(f"{name}, as it ran", "tokens", 1, True, lambda: iter(rows()), spec=f"{name} as it ran")


@dataclass
class Played:
    """A real run.

    Attributes:
        result: As of a simulation; `busy_s` is what steps took without compiling.
        wall_s: From the start to the last step's end.
        idle_s: Of these, waiting for arrivals.
        compile_s: Of these, programs that were not there yet.
        between_s: Of these, adding requests and reading outputs, between steps.
        cut: (prompts, answers) that were cut.
        timeline: For `follow`; None where it was not kept.
    """

    result: Simulation
    wall_s: float = 0.0
    idle_s: float = 0.0
    compile_s: float = 0.0
    between_s: float = 0.0
    cut: tuple[int, int] = (0, 0)
    timeline: Timeline | None = None


class WatchedRunner:
    """Stands before a runner: sees what is planned and held as a step computes, and answers what was asked for.

    Args:
        runner: Executes the plans.
        clock: The engine's.
        on_plan: Called with each plan before it runs; its time is not the step's.
        given: (request id, sample, position) → the token to be answered there in place of the drawn one; None: none.

    Attributes:
        own_s: Seconds that watching itself took since it was last set to 0.
        last: The result of the last plan.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float],
        on_plan: Callable[[StepPlan[Sequence]], None],
        given: Callable[[str, int, int], int | None] = lambda name, sample, position: None,
    ) -> None:
        self.pool_blocks = runner.pool_blocks
        self.block_size = runner.block_size
        self.block_bytes = runner.block_bytes
        self.vocab_size = runner.vocab_size
        self.own_s = 0.0
        self.last: StepResult | None = None
        self.on_answer: Callable[[Sequence, int], None] | None = None
        self._runner = runner
        self._clock = clock
        self._on_plan = on_plan
        self._given = given

    @property
    def weights_version(self) -> int:
        """The runner's."""
        return self._runner.weights_version

    def recover(self) -> bool:
        """What the runner says."""
        return self._runner.recover()

    def execute(self, plan: StepPlan[Sequence]) -> StepResult:
        """What the runner says, with the answers that were asked for."""
        began = self._clock()
        self._on_plan(plan)
        planned = self._clock()
        result = self._runner.execute(plan)
        executed = self._clock()
        samples = [seq for row in plan.rows for seq in row.samples]
        for at, seq in enumerate(samples):
            token = self._given(seq.request.request_id, seq.index, seq.num_output_tokens)
            if token is not None:
                result.tokens[at] = token
            if self.on_answer is not None:
                self.on_answer(seq, result.tokens[at])
        self.last = result
        self.own_s += planned - began + self._clock() - executed
        return result


class _Play:
    """One run under way."""

    def __init__(self, engine: Engine, hash_plans: bool, timeline: Timeline | None) -> None:
        self.engine = engine
        self.runner = engine.runner
        self.zero = engine.now
        self.played = Played(Simulation(), timeline=timeline)
        self.live: dict[str, tuple[PlayRequest, float]] = {}
        self.admitted: dict[str, float] = {}
        self._hasher = hashlib.sha256() if hash_plans or timeline is not None else None
        self._swaps = engine.scheduler.num_swaps
        self._rows, self._held = 0, 0.0
        self._digest = b""
        self.watched = WatchedRunner(engine.runner, lambda: engine.now, self._planned, self._given)
        if timeline is not None:
            self.watched.on_answer = self._answered
        engine.runner = self.watched
        self._overlap, engine.flights.overlap = engine.flights.overlap, False

    @property
    def now(self) -> float:
        return self.engine.now - self.zero

    def _given(self, name: str, sample: int, position: int) -> int | None:
        entry = self.live.get(name)
        if sample or entry is None or entry[0].answer is None:
            return None
        return int(entry[0].answer[position])

    def _answered(self, seq: Sequence, token: int) -> None:
        assert self.played.timeline is not None
        tokens = self.played.timeline.answers.setdefault((seq.request.request_id, seq.index), [])
        del tokens[seq.num_output_tokens :]
        tokens.append(token)

    def _planned(self, plan: StepPlan[Sequence]) -> None:
        manager: Any = self.engine.manager
        self._rows = len(plan.rows)
        self._held = 1 - manager.num_free / manager.num_usable
        for row in plan.rows:
            self.admitted.setdefault(row.seq.request.request_id, self._began)
        if self._hasher is not None:
            self._digest = hash_plan(plan)
            self._hasher.update(self._digest)

    def add(self, request: PlayRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: It can never run, or not to its end.
        """
        check_request(self.engine, request)
        at = self.now
        self.engine.add(request.tokens, request.sampling, request_id=request.name)
        self.live[request.name] = (request, at)
        prompts, answers = self.played.cut
        self.played.cut = prompts + bool(request.cut[0]), answers + bool(request.cut[1])
        if (timeline := self.played.timeline) is not None:
            timeline.requests.append((len(timeline.started), at, request))

    def step(self) -> list[RequestRecord]:
        """Make a step and book its seconds."""
        self._began, self._rows, self._digest = self.now, 0, b""
        self.watched.own_s, self.watched.last = 0.0, None
        outputs = self.engine.step()
        ended = self.now
        result, last = self.played.result, self.watched.last
        compile_s = last.compile_s if last is not None else 0.0
        took = ended - self._began - self.watched.own_s - compile_s
        self.played.compile_s += compile_s
        result.num_steps += 1
        result.busy_s += took
        result.batch += took * self._rows
        result.held += took * self._held
        result.most_held = max(result.most_held, self._held)
        if (timeline := self.played.timeline) is not None:
            timeline.started.append(self._began)
            timeline.seconds.append(took)
            timeline.elapsed.append(last.elapsed_s if last is not None else 0.0)
            timeline.copies.append(last.copy_s if last is not None else 0.0)
            timeline.executed.append(self._began + (last.elapsed_s if last is not None else 0.0))
            timeline.digests.append(self._digest)
        return [self._book(output) for output in outputs if output.finished]

    def _book(self, output: RequestOutput) -> RequestRecord:
        request, added = self.live.pop(output.request_id)
        finished = added + (output.latency_s or 0.0)
        first = added + output.ttft_s if output.ttft_s is not None else finished
        return RequestRecord(
            arrival_s=request.arrival_s,
            admitted_s=max(self.admitted.pop(output.request_id, first), request.arrival_s),
            first_token_s=first,
            finished_s=finished,
            num_input=len(request.tokens),
            num_output=max(sum(len(o.token_ids) for o in output.outputs), 1),
            num_cached=output.num_cached_tokens if request.known else None,
            num_preemptions=output.num_preemptions,
            reason=str(output.outputs[0].finish_reason),
        )

    def finish(self) -> Played:
        """Let go of the engine; averages over busy time."""
        for name in list(self.live):
            self.engine.abort(name)
        self.engine.runner = self.runner
        self.engine.flights.overlap = self._overlap
        played, result = self.played, self.played.result
        busy = result.busy_s or 1.0
        result.batch /= busy
        result.held /= busy
        result.num_swaps = self.engine.scheduler.num_swaps - self._swaps
        result.plan_hash = self._hasher.hexdigest() if self._hasher is not None else ""
        played.wall_s = self.now
        played.between_s = played.wall_s - played.idle_s - played.compile_s - result.busy_s
        return played


def check_request(engine: Engine, request: PlayRequest) -> None:
    """Raise where a request could not run here to its end.

    Raises:
        ValueError: Prompt and answer are longer than the longest sequence or the pool; or what `Engine.check` says.
    """
    engine.check(request.tokens, request.sampling)
    prompt, answer = len(request.tokens), request.sampling.max_tokens
    if prompt + answer > engine.max_model_len:
        raise ValueError(
            f"prompt of {prompt} and answer of {answer} tokens: must fit the longest sequence of "
            f"{engine.max_model_len}; raise model.max_model_len, or cut with --max-prompt and --max-tokens"
        )
    needed, usable = engine.manager.demand(prompt + answer - 1, engine.scheduler.chunk_tokens)
    if needed > usable:
        raise ValueError(
            f"prompt of {prompt} and answer of {answer} tokens: need {needed} blocks, the pool has {usable} usable; "
            "raise cache.num_blocks or cache.memory_bytes, or cut with --max-prompt and --max-tokens"
        )


def play(
    requests: Iterable[PlayRequest],
    engine: Engine,
    *,
    until_s: float = math.inf,
    in_flight: int = 0,
    hash_plans: bool = False,
    keep: bool = False,
    on_record: Callable[[RequestRecord], None] | None = None,
    on_refused: Callable[[str, str], None] = lambda name, why: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Played:
    """Play requests on an engine: each comes at its time, by the engine's clock, or when another has ended.

    Each step is planned when the one before is booked, as in a simulation, whatever `runtime.overlap` says.

    Args:
        requests: In order of arrival.
        engine: Idle; fresh, where plans are to be compared.
        until_s: Stop then; what still runs is aborted and not counted.
        in_flight: A closed loop, as in `simulate`: so many requests at once; 0: each at its time.
        hash_plans: Hash all plans; its time is no step's.
        keep: Keep the timeline that `follow` needs.
        on_record: Gets each record in place of the result, which then keeps none.
        on_refused: Called with name and reason of what can never run to its end.
        sleep: Waits; a test's clock has its own.

    Raises:
        ValueError: The engine has requests, or runs several steps a dispatch.
    """
    if engine.has_work:
        raise ValueError("play: the engine has requests already; wait for their end first")
    if engine.flights.num_steps > 1:
        raise ValueError(
            f"runtime.num_steps={engine.flights.num_steps}: a trace is played step by step, as a simulation plans it; "
            "set num_steps to 1"
        )
    run = _Play(engine, hash_plans, Timeline() if keep else None)
    book = run.played.result.records.append if on_record is None else on_record
    coming = iter(requests)
    try:
        following = next(coming, None)
        run.zero = engine.now  # reading the first of a file is no part of the run
        while (following is not None or engine.has_work) and run.now < until_s:
            while following is not None and (
                len(run.live) < in_flight if in_flight else following.arrival_s <= run.now
            ):
                try:
                    run.add(replace(following, arrival_s=run.now) if in_flight else following)
                except ValueError as error:
                    run.played.result.refused += 1
                    on_refused(following.name, str(error))
                following = next(coming, None)
            if engine.has_work:
                for record in run.step():
                    book(record)
            elif following is not None:
                before = run.now
                sleep(max(min(following.arrival_s, until_s) - before, 0.0))
                run.played.idle_s += run.now - before
    finally:
        played = run.finish()
    return played


@dataclass
class Followed:
    """A played run, planned once more.

    Attributes:
        equal_steps: Steps from the first on whose plans were the run's.
        steps: Steps of the run.
        seconds: f64[steps], what the cost model says of each; 0 where nothing was planned.
        plan_hash: Of all plans, as `Simulation.plan_hash`.
    """

    equal_steps: int
    steps: int
    seconds: np.ndarray
    plan_hash: str

    @property
    def equal(self) -> bool:
        """Every plan was the run's."""
        return self.equal_steps == self.steps


class _Repeated:
    """Answers as the played run was answered, and lets its time pass; stops where a plan is another."""

    def __init__(
        self,
        timeline: Timeline,
        manager: Any,
        block_bytes: tuple[int, ...],
        clock: VirtualClock,
        step_s: Callable[[StepPlan], float],
    ) -> None:
        self.pool_blocks = manager.pool_blocks
        self.block_size = manager.block_size
        self.block_bytes = block_bytes
        self.vocab_size: int | None = None
        self.weights_version = 0
        self.at = 0
        self.modelled = np.zeros(len(timeline.started))
        self.hasher = hashlib.sha256()
        self.planned = False
        self._timeline, self._clock, self._step_s = timeline, clock, step_s

    def recover(self) -> bool:
        """Holds no contents that could be lost."""
        return False

    def execute(self, plan: StepPlan[Sequence]) -> StepResult:
        """As it was."""
        timeline, at = self._timeline, self.at
        self.planned = True
        digest = hash_plan(plan)
        self.hasher.update(digest)
        if digest != timeline.digests[at]:
            raise _Other
        self.modelled[at] = self._step_s(plan)
        samples = [seq for row in plan.rows for seq in row.samples]
        tokens = [timeline.answers[s.request.request_id, s.index][s.num_output_tokens] for s in samples]
        self._clock.now = timeline.executed[at]
        return StepResult(tokens, [], timeline.elapsed[at], copy_s=timeline.copies[at])


class _Other(Exception):
    """A plan is not the run's."""


def follow(
    timeline: Timeline,
    manager: Any,
    config: SchedulerConfig,
    step_s: Callable[[StepPlan], float],
    *,
    max_model_len: int,
    block_bytes: tuple[int, ...] = (),
    hash_scheme: str = "sha256",
) -> Followed:
    """Plan a played run once more: requests come before the steps they came before, and time is as it was.

    Args:
        timeline: Of a run on a fresh engine.
        manager: As empty as the run's was.
        config: Its limits.
        step_s: Seconds of a plan by a cost model.
        max_model_len: Longest sequence in tokens.
        block_bytes: Bytes of a block of each group; only preemption = auto weighs them.
        hash_scheme: Block hash of the run's chains.
    """
    clock = VirtualClock()
    runner = _Repeated(timeline, manager, block_bytes, clock, step_s)
    engine = Engine(
        manager, runner, config, max_model_len=max_model_len, clock=clock, hash_scheme=hash_scheme
    )
    requests = iter(timeline.requests)
    coming = next(requests, None)
    equal = 0
    for step, started in enumerate(timeline.started):
        while coming is not None and coming[0] == step:
            clock.now = coming[1]
            engine.add(coming[2].tokens, coming[2].sampling, request_id=coming[2].name)
            coming = next(requests, None)
        clock.now = started
        runner.at, runner.planned = step, False
        try:
            engine.step()
        except _Other:
            break
        if runner.planned != bool(timeline.digests[step]):
            break
        equal += 1
    return Followed(equal, len(timeline.started), runner.modelled, runner.hasher.hexdigest())
