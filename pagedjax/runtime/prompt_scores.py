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
    ) -> dict[int, TokenScores]:
        """Scores by row of the plan, for the rows whose requests ask and whose tokens predict prompt tokens.

        Args:
            plan: What ran.
            params: The model's.
            hidden: f[T, D] of the step's tokens.
            compiling: Takes the seconds of programs that have to be compiled.
        """
        found: dict[int, TokenScores] = {}
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


def _in_parts(score: Callable[[np.ndarray, np.ndarray], Any], first: int, targets: np.ndarray) -> TokenScores:
    parts = []
    for done in range(0, len(targets), _ROWS):
        count = min(_ROWS, len(targets) - done)
        at, tokens = np.zeros(_ROWS, np.int32), np.zeros(_ROWS, np.int32)
        at[:count] = np.arange(first + done, first + done + count)
        tokens[:count] = targets[done : done + count]
        parts.append([np.asarray(x)[:count] for x in score(at, tokens)])
    return TokenScores(*(np.concatenate(column) for column in zip(*parts)))
