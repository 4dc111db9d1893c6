"""Where the seconds of a request went: waiting, computing, copying, compiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Seconds(NamedTuple):
    """Where a request's seconds went; together they are all of its time.

    Attributes:
        waiting_s: In the queue, preempted, or between steps.
        computing_s: In steps it had a part in, their planning included.
        copying_s: Of these steps, block copies: on write, to the host and back.
        compiling_s: Of these steps, programs that were not there yet: once a machine, in no later request.
    """

    waiting_s: float
    computing_s: float
    copying_s: float
    compiling_s: float


class StepSeconds(Protocol):
    """What a step's result says of its time; see `StepResult`."""

    @property
    def elapsed_s(self) -> float: ...

    @property
    def copy_s(self) -> float: ...

    @property
    def compile_s(self) -> float: ...


@dataclass
class Spent:
    """Seconds of the steps that a request had a part in, so far."""

    computing_s: float = 0.0
    copying_s: float = 0.0
    compiling_s: float = 0.0

    def add(self, step_s: float, result: StepSeconds) -> None:
        """A step of so many seconds on the engine's clock, copies and compiling among them."""
        self.computing_s += step_s - result.copy_s - result.compile_s
        self.copying_s += result.copy_s
        self.compiling_s += result.compile_s

    def of(self, total_s: float) -> Seconds:
        """The parts of all seconds since the request came; what no step accounts for is waiting."""
        parts = (self.computing_s, self.copying_s, self.compiling_s)
        return Seconds(total_s - sum(parts), *parts)
