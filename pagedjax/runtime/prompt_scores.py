"""Log-probabilities of prompt tokens, for the requests that ask: a program of its own, compiled when needed.

A step computes logits for the rows that sample, not for every prompt token. Its hidden states are handed on,
so what `prompt_logprobs` adds is the output matrix over the asked positions, some rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedjax.engine import TokenScores
from pagedjax.engine.step import StepPlan
from pagedjax.runtime.compile_clock import CompileClock
from pagedjax.runtime.mesh import Placement
from pagedjax.runtime.sampling import score_tokens

Array = Any
_Parts = list[
    tuple[tuple[Array, ...], int]
]  # what a call returned on the device, and how many rows of it count
PendingScores = dict[int, _Parts]  # by row of the plan
_ROWS = 64  # positions per call: bounds the logits held at once


class PromptScores:
    """Scores prompt tokens from a step's hidden states.

    Args:
        logits: (params, hidden f[Q, D]) → f32[Q, V].
        place: The runner's devices.
    """

    def __init__(self, logits: Callable[[dict[str, Any], Array], Array], place: Placement) -> None:
        def score(params: dict[str, Any], hidden: Array, at: Array, tokens: Array) -> tuple[Array, ...]:
            return score_tokens(logits(params, hidden[at]), tokens, place.vocabulary)

        self._score = place.program(score, ("weights", "whole", "whole", "whole"), ("whole",) * 4)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far: one per number of tokens in a bucket that was asked about."""
        count: int = self._score._cache_size()
        return count

    def of(
        self, plan: StepPlan, params: dict[str, Any], hidden: Array, compiling: CompileClock
    ) -> PendingScores:
        """Begin the scores of the rows whose requests ask and whose tokens predict prompt tokens.

        Args:
            plan: What ran.
            params: The model's.
            hidden: f[T, D] of the step's tokens.
            compiling: Takes the seconds of programs that have to be compiled.
        """
        found: PendingScores = {}
        first = 0
        for number, row in enumerate(plan.rows):
            request = row.seq.request
            if request.sampling.prompt_logprobs is not None:
                targets = request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
                if targets:
                    score = functools.partial(compiling.call, self._score, params, hidden)
                    found[number] = _in_parts(score, first, np.array(targets, np.int32))
            first += row.num_tokens
        return found


def bring(pending: PendingScores) -> dict[int, TokenScores]:
    """Wait for scores, by row of the plan."""
    return {
        number: TokenScores(
            *(
                np.concatenate([np.asarray(x)[:count] for x, count in column])
                for column in zip(*([(x, count) for x in scores] for scores, count in parts))
            )
        )
        for number, parts in pending.items()
    }


def _in_parts(score: Callable[[np.ndarray, np.ndarray], Any], first: int, targets: np.ndarray) -> _Parts:
    parts: _Parts = []
    for done in range(0, len(targets), _ROWS):
        count = min(_ROWS, len(targets) - done)
        at, tokens = np.zeros(_ROWS, np.int32), np.zeros(_ROWS, np.int32)
        at[:count] = np.arange(first + done, first + done + count)
        tokens[:count] = targets[done : done + count]
        parts.append((score(at, tokens), count))
    return parts
