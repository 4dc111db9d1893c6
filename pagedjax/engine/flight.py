"""Steps on their way: planned, begun on the runner, and not booked yet; one dispatch may hold several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagedjax.cache import InvariantError
from pagedjax.engine.interrupts import HeldInterrupts
from pagedjax.engine.request import Sequence
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.several import plan_behind
from pagedjax.engine.step import Runner, SeveralRunner, StepPlan, StepResult


@dataclass(eq=False)
class _Dispatch:
    """What a runner is given at once: its steps' plans, what it calls them, and their results once they are there."""

    plans: Seq[StepPlan[Sequence]]
    launched: Any = None
    results: Seq[StepResult] = ()


@dataclass(eq=False)
class Flight:
    """A step on its way.

    Attributes:
        began, executed: When the host's time for it began, and when its result was there.
        schedule_s, overlap, dispatch: As in `StepRecord`.
        number: Which step of its dispatch, from 0.
    """

    batch: _Dispatch
    number: int
    began: float
    schedule_s: float
    overlap: str
    dispatch: str
    executed: float = 0.0

    @property
    def plan(self) -> StepPlan[Sequence]:
        return self.batch.plans[self.number]

    @property
    def result(self) -> StepResult:
        return self.batch.results[self.number]


def _check_result(plan: StepPlan[Sequence], result: StepResult) -> None:
    if len(result.tokens) != plan.num_samples:
        raise ValueError(
            f"StepResult of {len(result.tokens)} tokens: the plan samples {plan.num_samples}; the runner must "
            "give one for each, in row order"
        )


class Flights:
    """Has a runner compute what a scheduler plans, one step after another, ahead of the books where that is allowed.

    Args:
        scheduler: Plans.
        clock: The engine's, seconds.
        overlap: Plan the next dispatch while one runs.
        num_steps: Most steps of a dispatch.

    Attributes:
        overlap, num_steps: As given; between two steps they may be set back, and to what they were.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], *, overlap: bool, num_steps: int
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self.overlap = overlap
        self.num_steps = num_steps
        scheduler.ahead = overlap or num_steps > 1
        self._waiting: deque[Flight] = deque()
        self._reason = "first"  # why the next dispatch was not planned ahead
        self._ended_at = 0.0  # when the last step had ended

    def __len__(self) -> int:
        return len(self._waiting)

    def land(self, runner: Runner, interrupts: HeldInterrupts, *, watched: bool) -> Flight | None:
        """Take the next step, computed; begin one where none is on its way. None: nothing can run.

        Args:
            runner: Of the same kind as those before.
            interrupts: Allowed while the runner works.
            watched: A record is written: nothing is planned while a step runs.
        """
        self.drop_unwanted()
        if not self._waiting:
            started = self._clock()
            plan = self._scheduler.schedule()
            if not (plan.rows or plan.copies):
                return None
            self._begin(plan, started, self._reason if self.overlap else "off", None, runner, interrupts)
        flight = self._waiting[0]
        batch = flight.batch
        if not batch.results:
            if self.overlap:
                self._look_ahead(batch, runner, interrupts, watched)
            with self._running(runner, interrupts):
                results = _compute(batch, runner)
                for plan, result in zip(batch.plans, results, strict=True):
                    _check_result(plan, result)
            batch.results = results
        self._waiting.popleft()
        flight.executed = self._clock()
        if flight.number or flight.overlap == "ahead":
            flight.began = self._ended_at
        self._ended_at = flight.executed
        return flight

    def forget(self) -> None:
        """What is on its way counts for nothing: what it was to draw is drawn again."""
        self._waiting.clear()
        self._reason = "first"

    def drop_unwanted(self) -> None:
        """Forget the next steps where all their sequences have ended: they are too far, and nobody waits for them."""
        while self._waiting and all(
            s.finished for row in self._waiting[0].plan.rows for s in (row.seq, *row.samples)
        ):
            self._waiting.popleft()
            if not self._waiting:
                self._reason = "first"

    def _begin(
        self,
        plan: StepPlan[Sequence],
        started: float,
        overlap: str,
        after: Any,
        runner: Any,
        interrupts: HeldInterrupts,
    ) -> None:
        """Begin a planned step, with those that may run behind it in the same dispatch."""
        behind = plan_behind(self._scheduler, plan, self.num_steps) if self.num_steps > 1 else "off"
        if isinstance(behind, str):
            batch, rule = _Dispatch([plan]), behind
        else:
            batch, rule = _Dispatch(behind), "several"
        planned_s = self._clock() - started
        self._waiting.append(Flight(batch, 0, started, planned_s, overlap, rule))
        self._waiting += [
            Flight(batch, number, started, 0.0, overlap, "inner") for number in range(1, len(batch.plans))
        ]
        with self._running(runner, interrupts):
            if len(batch.plans) > 1:
                batch.launched = runner.launch_several(batch.plans, after)
            elif self.overlap:
                batch.launched = runner.launch(plan, after)

    def _look_ahead(
        self, running: _Dispatch, runner: Runner, interrupts: HeldInterrupts, watched: bool
    ) -> None:
        """Plan and begin what comes behind the dispatch that runs, where the rules let it."""
        started = self._clock()
        plan = "record" if watched else self._scheduler.schedule_ahead()
        if isinstance(plan, str):
            self._reason = plan
        else:
            self._begin(plan, started, "ahead", running.launched, runner, interrupts)

    @contextmanager
    def _running(self, runner: Runner, interrupts: HeldInterrupts) -> Iterator[None]:
        """The runner works; what fails in here, an interrupt too, sends all that runs back to the queue."""
        try:
            with interrupts.allowed():
                yield
        except InvariantError:  # the books are wrong: there is nothing sound to go back to
            raise
        except BaseException as error:
            for flight in self._waiting:
                self._scheduler.undo(flight.plan)
            self.forget()
            if runner.recover():
                self._scheduler.manager.reset("preempt")
                error.add_note("The KV pool was lost with this step: nothing is cached or pinned any more.")
            raise


def _compute(batch: _Dispatch, runner: Any) -> Seq[StepResult]:
    """The results of a dispatch, waited for; one that was not begun runs now."""
    if batch.launched is None:
        return [runner.execute(batch.plans[0])]
    if len(batch.plans) > 1:
        several: SeveralRunner[Any] = runner
        return several.collect_several(batch.launched)
    return [runner.collect(batch.launched)]
