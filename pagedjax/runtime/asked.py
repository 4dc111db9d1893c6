"""What only some requests ask of a step: changed logits, log-probabilities. Others pay nothing for it.

The programs are shared by all runners on one device, one per number of samples in a bucket, compiled when first
asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pagedjax.engine.request import Sequence
from pagedjax.runtime.adjust import Adjustments, adjust
from pagedjax.runtime.compile_clock import CompileClock
from pagedjax.runtime.mesh import ONE_DEVICE, Placement
from pagedjax.runtime.sampling import SamplingBatch, sample_tokens, score_tokens

Array = Any


class Asked(NamedTuple):
    """A step's samples on the host; see the fields of the same names in `StepResult`."""

    tokens: list[int]
    logprobs: list[float]
    ranks: list[int]
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


class AskedPrograms(NamedTuple):
    """The two programs.

    Attributes:
        draw: (logits, SamplingBatch, Adjustments) → i32[Q] drawn from changed logits.
        score: (logits, tokens) → what `score_tokens` returns.
    """

    draw: Any
    score: Any

    @classmethod
    def on(cls, place: Placement) -> AskedPrograms:
        """Programs for a runner's devices."""
        vocabulary = place.vocabulary

        def draw_adjusted(logits: Array, batch: SamplingBatch, adjustments: Adjustments) -> Array:
            return sample_tokens(adjust(logits, adjustments, vocabulary), batch, vocabulary)

        def score(logits: Array, tokens: Array) -> tuple[Array, ...]:
            return score_tokens(logits, tokens, vocabulary)

        return cls(
            place.program(draw_adjusted, ("logits", "whole", "whole"), "whole"),
            place.program(score, ("logits", "whole"), ("whole",) * 4),
        )


ON_ONE_DEVICE = AskedPrograms.on(ONE_DEVICE)  # shared by all runners on one device


def wants_scores(samples: Iterable[Sequence]) -> bool:
    """Whether one of the samples asks for log-probabilities, or for what is made of them."""
    params = (seq.request.sampling for seq in samples)
    return any(p.logprobs is not None or p.waits_for_all for p in params)


class Asking(NamedTuple):
    """What `Asked` will be, still on the device.

    Attributes:
        num_samples: Of the step.
        tokens: i32[Q] drawn.
        scores: What `score_tokens` returns; None where nobody asked.
    """

    num_samples: int
    tokens: Array
    scores: tuple[Array, ...] | None

    def answer(self) -> Asked:
        """Wait for it."""
        drawn = np.asarray(self.tokens)[: self.num_samples].tolist()
        if self.scores is None:
            return Asked(drawn, [], [], None, None)
        logprobs, ranks, ids, top = (np.asarray(x)[: self.num_samples] for x in self.scores)
        return Asked(drawn, logprobs.tolist(), ranks.tolist(), ids, top)


def ask(
    samples: list[Sequence],
    tokens: Array,
    logits: Array,
    batch: SamplingBatch,
    max_model_len: int,
    compiling: CompileClock,
    programs: AskedPrograms = ON_ONE_DEVICE,
    scored: bool | None = None,
) -> Asking:
    """Begin what a step's samples ask for beside their tokens.

    Args:
        samples: The step's, in row order, at most Q.
        tokens: i32[Q] drawn by the step.
        logits: f32[Q, V] they were drawn from.
        batch: Parameters of the Q rows.
        max_model_len: Bounds the length of lists of changed tokens.
        compiling: Takes the seconds of programs that have to be compiled.
        programs: Of the runner's devices.
        scored: Whether log-probabilities are computed; None: where one of these samples asks.
    """
    rows, vocab_size = logits.shape
    adjustments = Adjustments.pack(samples, rows, vocab_size, max_model_len)
    if adjustments is not None:
        tokens = compiling.call(programs.draw, logits, batch, adjustments)
    tokens.copy_to_host_async()  # before the next step is behind it
    scores = None
    if wants_scores(samples) if scored is None else scored:
        scores = compiling.call(programs.score, logits, tokens)
    return Asking(len(samples), tokens, scores)
