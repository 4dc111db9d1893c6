"""The runner of a simulation, and its clock: what stands in for the device, and when it is done."""

from __future__ import annotations

from collections.abc import Callable

from pagedjax.engine import StepResult
from pagedjax.engine.step import StepPlan
from pagedjax.sim.beams import CandidateSource


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimRunner:
    """Stands in for the device: knows what will be answered and how long it takes.

    Args:
        pool_blocks / block_size: As the manager counts them.
        step_s: Seconds a plan takes.
        clock: Advanced by it.
        answers: (request id, sample, position in the answer) → token.
        candidates: Candidates that beams choose from; None where there are no beams.
        block_bytes: Bytes of a block; only preemption = auto weighs them.
        copy_s: Seconds of a plan's transfers between device and host, a part of `step_s`.
    """

    def __init__(
        self,
        pool_blocks: tuple[int, ...],
        block_size: int,
        step_s: Callable[[StepPlan], float],
        clock: VirtualClock,
        answers: Callable[[str, int, int], int],
        candidates: CandidateSource | None = None,
        block_bytes: tuple[int, ...] = (),
        copy_s: Callable[[StepPlan], float] = lambda plan: 0.0,
    ) -> None:
        self.pool_blocks = pool_blocks
        self.block_size = block_size
        self.vocab_size: int | None = None
        self.weights_version = 0
        self._step_s = step_s
        self._clock = clock
        self._answers = answers
        self._candidates = candidates
        self.block_bytes = block_bytes
        self._copy_s = copy_s

    def recover(self) -> bool:
        """Holds no contents that could be lost."""
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        """Advance the clock and answer."""
        elapsed = self._step_s(plan)
        self._clock.now += elapsed
        answers = self._answers
        samples = [seq for row in plan.rows for seq in row.samples]
        tokens = [answers(s.request.request_id, s.index, s.num_output_tokens) for s in samples]
        if self._candidates is None:
            return StepResult(tokens, [], elapsed, copy_s=self._copy_s(plan))
        ids, logprobs = self._candidates.rows(samples)
        return StepResult(tokens, [], elapsed, copy_s=self._copy_s(plan), top_ids=ids, top_logprobs=logprobs)
