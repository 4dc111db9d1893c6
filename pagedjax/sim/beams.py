"""Where simulated beams take their next tokens from: drawn, or as a run of the real engine recorded them.

The search itself is `pagedjax.engine.beam`, in a simulation as on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pagedjax.engine import Runner, StepResult
from pagedjax.engine.beam import num_candidates
from pagedjax.engine.request import SamplingParams, Sequence
from pagedjax.engine.step import StepPlan


class CandidateSource(Protocol):
    """Where beams' next tokens come from."""

    def rows(self, samples: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """i32[Q, K] ids and f32[Q, K] log-probabilities, a row per sample, best first."""
        ...


@dataclass(frozen=True)
class Beams:
    """Every request is a beam search.

    Attributes:
        width: Beams.
        gap: Mean gap in nats between one candidate and the next (`DrawnCandidates`).
        seed: Of the draws.
    """

    width: int
    gap: float = 1.0
    seed: int = 0

    def drawn(self) -> DrawnCandidates:
        """Candidates of one run."""
        return DrawnCandidates(num_candidates(self.width, 0), self.gap, self.seed)


class DrawnCandidates:
    """Next tokens of beams, drawn: what a model's distributions do to the shape of a search, without one.

    The gap in log-probability from one candidate to the next is exponential with mean `gap`, the likeliest
    has what is left of the probability; every beam draws for itself.

    Args:
        count: Candidates per beam.
        gap: Mean gap in nats; a small one lets beams part, a large one makes the best beam's children win.
        seed: Of the draws.
    """

    def __init__(self, count: int, gap: float, seed: int) -> None:
        self._count = count
        self._gap = gap
        self._rng = np.random.default_rng(seed)

    def rows(self, samples: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """i32[Q, K] ids and f32[Q, K] log-probabilities, a row per sample, best first."""
        gaps = self._rng.exponential(self._gap, (len(samples), self._count))
        gaps[:, 0] = 0.0
        scores = -np.cumsum(gaps, axis=1)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        ids = np.broadcast_to(np.arange(self._count, dtype=np.int32), scores.shape)
        return ids, scores.astype(np.float32)


class RecordedBeams:
    """What beams chose from in one run, to be chosen from again in another.

    Stands before the runner of a run and writes down the candidates of every beam, by request and by what
    the beam had generated; a request without beams needs no record, its tokens are the trace's. Replayed, a
    beam that was not recorded is an error, so a run that goes another way cannot pass for the same.

    Args:
        runner: Executes the plans.

    Attributes:
        sampling: Request id → how its beams were searched.

    Example:
        engine.runner = recorded = RecordedBeams(engine.runner)
        ...                                                   # run the engine until it is idle
        simulate(trace, manager, cost, config, max_model_len=128, beams=recorded)
    """

    def __init__(self, runner: Runner) -> None:
        self.pool_blocks = runner.pool_blocks
        self.vocab_size = runner.vocab_size
        self.block_size = runner.block_size
        self.block_bytes = runner.block_bytes
        self.sampling: dict[str, SamplingParams] = {}
        self._runner = runner
        self._rows: dict[tuple[str, tuple[int, ...]], list[tuple[np.ndarray, np.ndarray]]] = {}

    @property
    def weights_version(self) -> int:
        """The runner's."""
        return self._runner.weights_version

    def recover(self) -> bool:
        """What the runner says."""
        return self._runner.recover()

    def execute(self, plan: StepPlan) -> StepResult:
        """What the runner says, written down."""
        result = self._runner.execute(plan)
        samples = [seq for row in plan.rows for seq in row.samples]
        for at, seq in enumerate(samples):
            request = seq.request
            if not request.sampling.beam_width or result.top_ids is None or result.top_logprobs is None:
                continue
            ends = tuple(sorted(request.end_token_ids))
            self.sampling[request.request_id] = replace(
                request.sampling, stop_token_ids=ends, ignore_eos=request.sampling.ignore_eos or bool(ends)
            )
            # Recomputed after a preemption, a row is there once more.
            found = self._rows.setdefault(_beam_key(seq), [])
            found.append((result.top_ids[at], result.top_logprobs[at]))
        return result

    def rows(self, samples: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """i32[Q, K] ids and f32[Q, K] log-probabilities, as recorded; zeros for samples that are no beams.

        Raises:
            KeyError: A beam was never recorded, or not so often.
        """
        width = max((len(ids) for found in self._rows.values() for ids, _ in found), default=0)
        ids = np.zeros((len(samples), width), np.int32)
        logprobs = np.zeros((len(samples), width), np.float32)
        for at, seq in enumerate(samples):
            if seq.request.sampling.beam_width:
                key = _beam_key(seq)
                if not self._rows.get(key):
                    raise KeyError(f"beam {key}: is not in the record, or not so often; the runs differ")
                ids[at], logprobs[at] = self._rows[key].pop(0)
        return ids, logprobs


def _beam_key(seq: Sequence) -> tuple[str, tuple[int, ...]]:
    return seq.request.request_id, tuple(seq.output_token_ids)
