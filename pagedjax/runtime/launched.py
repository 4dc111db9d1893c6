"""Steps that were begun, on their way to results: what their calls leave on the device, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedjax.engine import Sequence, SharedPrefix, StepResult, TokenScores
from pagedjax.engine.step import StepPlan
from pagedjax.runtime.asked import Asked, Asking
from pagedjax.runtime.prompt_scores import PendingScores, bring
from pagedjax.runtime.slices import Slice, join_scores
from pagedjax.runtime.steps import StepsOutput

Array = Any


class Computed(NamedTuple):
    """Of one call: what its samples get and scores of prompt tokens, on the device; seconds of packing and dispatch."""

    asking: Asking
    prompt: PendingScores
    pack_s: float
    dispatch_s: float


class Several(NamedTuple):
    """Of one call for several steps: what it leaves; seconds of packing and dispatch."""

    out: StepsOutput
    pack_s: float
    dispatch_s: float


class Answered(NamedTuple):
    """Of one call that has ended: what its samples got, and scores of prompt tokens by row."""

    asked: Asked
    prompt: dict[int, TokenScores]
    pack_s: float
    dispatch_s: float


@dataclass(eq=False)
class Launched:
    """A step that was begun.

    Attributes:
        samples: Who draws in it, in row order.
        parts: Its calls: one, or of a deterministic step those of its slices, ended.
        slices: What each of these computes; empty where there is one call.
        plans, several: Of several steps their plans, and their call.
        drawn: i32[N] on the device.
        shared: Prefixes that are worked once.
        started: When it was begun, on the runner's clock.
        shared_s, copy_s, compile_s: Seconds, as in `StepResult`.
    """

    samples: list[Sequence]
    parts: list[Computed | Answered]
    slices: list[Slice]
    drawn: Array
    shared: tuple[SharedPrefix, ...]
    started: float
    shared_s: float
    copy_s: float
    compile_s: float
    plans: Seq[StepPlan] = ()
    several: Several | None = None

    def wait(self, last: float) -> tuple[StepResult, float]:
        """The result of one step, and when it came.

        Args:
            last: When the step before came: a device works one after another.
        """
        parts = [part if isinstance(part, Answered) else answered(part) for part in self.parts]
        prompts = [part.prompt for part in parts]
        prompt = (
            join_scores(zip(self.slices, prompts, strict=True))
            if self.slices
            else {number: scores for one in prompts for number, scores in one.items()}
        )
        asked = [part.asked for part in parts]
        began, done = max(self.started, last), time.perf_counter()
        result = StepResult(
            [token for one in asked for token in one.tokens],
            [x for one in asked for x in one.logprobs],
            done - began,
            pack_s=self.shared_s + sum(part.pack_s for part in parts),
            dispatch_s=sum(part.dispatch_s for part in parts),
            copy_s=self.copy_s,
            compile_s=self.compile_s,
            ranks=[rank for one in asked for rank in one.ranks],
            top_ids=_stacked([one.top_ids for one in asked]),
            top_logprobs=_stacked([one.top_logprobs for one in asked]),
            prompt=prompt,
            shared=self.shared,
        )
        return result, done

    def wait_for_several(self, last: float) -> tuple[list[StepResult], float]:
        """The same of several steps in one call: each has its share of the time, the first what was done once."""
        several = self.several
        assert several is not None
        tokens, taken = np.asarray(several.out.tokens), int(np.asarray(several.out.taken))
        began, done = max(self.started, last), time.perf_counter()
        number = {seq: i for i, seq in enumerate(self.samples)}
        share = 1 / max(taken, 1)  # all rows may have ended before
        once = self.copy_s, self.compile_s  # the first step's
        results = [
            StepResult(
                tokens[i, [number[row.seq] for row in plan.rows]].tolist(),
                [],
                (done - began - sum(once)) * share + sum(first),
                pack_s=(self.shared_s + several.pack_s) * share,
                dispatch_s=several.dispatch_s * share,
                copy_s=first[0],
                compile_s=first[1],
                shared=self.shared,
            )
            for i, (plan, first) in enumerate(zip(self.plans, [once] + [(0.0, 0.0)] * len(self.plans)))
        ]
        return results, done


def answered(part: Computed) -> Answered:
    """Waits for a call's end."""
    return Answered(part.asking.answer(), bring(part.prompt), part.pack_s, part.dispatch_s)


def _stacked(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """The rows of all of them; None where there are none."""
    some = [part for part in parts if part is not None]
    return np.concatenate(some) if some else None
