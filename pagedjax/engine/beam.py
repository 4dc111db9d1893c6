"""Beam search over forks: which continuations live on, and how their blocks follow them.

Two parts, both without jax:

- `BeamSearch` is the search of one request. It sees tokens and log-probabilities, no block. Each step it is
  given one row of candidates per running beam and says which (parent, token) pairs go on.
- `reseat` makes the block tables follow: of the children of one beam the best keeps its sequence, the others
  `fork` from it, beams without a child are `release`d. Nothing is copied here; a shared block that is not full
  is copied by whoever writes into it next (PagedAttention §4.4).

A runner takes part by filling `StepResult.top_ids` and `top_logprobs`, a row per sample, best first; a
simulated runner draws them. `Engine` calls `advance` once all beams of a request have their row.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagedjax.cache import KVCacheManager
from pagedjax.engine.request import MAX_CANDIDATES, FinishReason, Request, Sequence, Status

EarlyStopping = bool | str


class Candidates(NamedTuple):
    """The likeliest next tokens of one beam, best first.

    Attributes:
        token_ids: i32[K].
        logprobs: f32[K], natural log, of each token given the beam.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


class Choice(NamedTuple):
    """A continuation that lives on: `token` appended to running beam number `parent`."""

    parent: int
    token: int


@dataclass(frozen=True)
class Beam:
    """Generated tokens with what they cost.

    Attributes:
        token_ids: Generated tokens, an end token included.
        logprobs: One per token.
        total: Their sum.
        rows: The candidates each token was chosen from.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    rows: tuple[Candidates, ...] = ()

    def then(self, row: Candidates, place: int) -> Beam:
        """This beam with the candidate at `place` of its row appended."""
        logprob = float(row.logprobs[place])
        return Beam(
            (*self.token_ids, int(row.token_ids[place])),
            (*self.logprobs, logprob),
            self.total + logprob,
            (*self.rows, row),
        )

    def score(self, length_penalty: float) -> float:
        """total / length ** length_penalty."""
        return self.total / max(len(self.token_ids), 1) ** length_penalty


@dataclass(frozen=True)
class Hypothesis:
    """A beam that ended.

    Attributes:
        beam: Its tokens.
        score: Sum of log-probabilities over length ** length_penalty.
        reason: An end token (STOP), the step limit (LENGTH), or what cut the search short.
    """

    beam: Beam
    score: float
    reason: FinishReason


def num_candidates(width: int, num_end_ids: int) -> int:
    """Candidates looked at in a step: enough that `width` of them do not end, whatever ends."""
    return max(2, 1 + num_end_ids) * width


@dataclass
class BeamSearch:
    """The beam search of one request.

    In each step all continuations of all running beams compete by their summed log-probability. Of the best
    `num_candidates`, those that end and are among the first `width` enter the finished beams, of which the
    `width` best by score are kept; the best `width` that do not end run on.

    The search is done when all candidates ended (always so at `max_tokens`), when `width` beams have
    finished and `early_stopping` is True, or when `width` have finished and the best running beam cannot
    beat the worst of them. What it can reach at best is judged

    - `early_stopping=False`: by its score at its present length, the heuristic stop;
    - `early_stopping="never"`: by its present sum over max_tokens ** length_penalty for a positive penalty,
      the exhaustive stop (sums only fall, so nothing better is missed).

    Ties go to the beam of the better rank, then to the smaller token id.

    Args:
        width: Beams.
        max_tokens: Most tokens to generate, the exact number of steps where nothing ends.
        length_penalty: Exponent of the length in the score; above 0 favours longer texts.
        early_stopping: True, False or "never".
        end_ids: Tokens that end a beam.
        min_tokens: End tokens are passed over before so many tokens.

    Example:
        >>> search = BeamSearch(width=2, max_tokens=2)
        >>> row = Candidates(np.array([5, 3, 8]), np.log([0.6, 0.3, 0.1]))
        >>> search.advance([row])
        [Choice(parent=0, token=5), Choice(parent=0, token=3)]
        >>> search.advance([row, row])
        []
        >>> [h.beam.token_ids for h in search.finished]
        [(5, 5), (5, 3)]

    Source: scores and stops as Hugging Face's `generate(num_beams=...)` defines them.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False
    num_steps: int = 0

    def advance(self, rows: Seq[Candidates]) -> list[Choice]:
        """Choose the beams that run on.

        Args:
            rows: One per running beam, in order; at least `num_candidates` long, or the whole vocabulary.

        Returns:
            The new running beams, best first; none once the search is done.
        """
        if len(rows) != len(self.running) or self.done:
            raise ValueError(f"{len(rows)} rows: must be one for each of {len(self.running)} running beams")
        length = self.num_steps + 1
        last = length >= self.max_tokens
        running: list[Beam] = []
        choices: list[Choice] = []
        for rank, (parent, place) in enumerate(self._best(rows)):
            beam = self.running[parent].then(rows[parent], place)
            ends = beam.token_ids[-1] in self.end_ids
            if ends or last:
                if rank < self.width:
                    self._keep(beam, FinishReason.STOP if ends else FinishReason.LENGTH)
            elif len(running) < self.width:
                running.append(beam)
                choices.append(Choice(parent, beam.token_ids[-1]))
        self.num_steps = length
        self.done = not running or self._stops(running[0])
        if self.done:
            return []
        self.running = running
        return choices

    def end(self, reason: FinishReason) -> None:
        """Cut the search short: running beams enter the finished ones as they stand."""
        if not self.done:
            for beam in self.running:
                if beam.token_ids:
                    self._keep(beam, reason)
            self.done = True

    def _best(self, rows: Seq[Candidates]) -> list[tuple[int, int]]:
        """(beam, place in its row) of the best candidates of all beams, best first."""
        count = num_candidates(self.width, len(self.end_ids))
        ids = [row.token_ids[:count] for row in rows]
        totals = [
            beam.total + row.logprobs[:count].astype(np.float64) for beam, row in zip(self.running, rows)
        ]
        parents = np.repeat(np.arange(len(rows)), [len(i) for i in ids])
        places = np.concatenate([np.arange(len(i)) for i in ids])
        tokens, total = np.concatenate(ids), np.concatenate(totals)
        order = np.lexsort((tokens, parents, -total))
        if self.num_steps < self.min_tokens:
            banned = np.isin(tokens, list(self.end_ids))
            order = order[~banned[order]]
        return [(int(parents[i]), int(places[i])) for i in order[:count]]

    def _keep(self, beam: Beam, reason: FinishReason) -> None:
        self.finished.append(Hypothesis(beam, beam.score(self.length_penalty), reason))
        self.finished.sort(key=lambda h: -h.score)  # stable: the earlier one first
        del self.finished[self.width :]

    def _stops(self, best: Beam) -> bool:
        """`width` beams have finished and no running one is to be waited for."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        exhaustive = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if exhaustive else len(best.token_ids)
        return best.total / length**self.length_penalty <= self.finished[-1].score


def reseat(
    request: Request, choices: Seq[Choice], manager: KVCacheManager, new_id: Callable[[], int]
) -> None:
    """Give each choice a sequence whose blocks are its parent's, and end the parents without a child.

    The first child of a parent goes on in the parent's sequence, so an only child costs nothing; the
    others share all of its blocks. Forks come before releases: no block that is still wanted is given up.

    Args:
        request: Its sequences are the running beams in order; replaced by the new ones.
        choices: From `BeamSearch.advance`.
        manager: Owns the blocks.
        new_id: Gives fresh sequence ids.
    """
    parents = request.sequences
    taken: set[int] = set()
    beams: list[Sequence] = []
    for choice in choices:
        parent = parents[choice.parent]
        if choice.parent in taken:
            child = Sequence(
                new_id(), request, 0, parent.chain.fork(), Status.RUNNING, parent.num_computed_tokens
            )
            manager.fork(parent.seq_id, child.seq_id, child.chain)
            beams.append(child)
        else:
            taken.add(choice.parent)
            beams.append(parent)
    for number, parent in enumerate(parents):
        if number not in taken:
            request.num_copies += manager.num_copies(parent.seq_id)
            manager.release(parent.seq_id)
            parent.status = Status.FINISHED
    for index, (beam, choice) in enumerate(zip(beams, choices)):
        beam.index = index
        beam.candidates = None
        beam.chain.append(choice.token)
    request.sequences = beams


def check_width(width: int, num_end_ids: int) -> None:
    """Refuse a width whose candidates exceed what a step reports.

    Raises:
        ValueError: Names both numbers.
    """
    needed = num_candidates(width, num_end_ids)
    if needed > MAX_CANDIDATES:
        raise ValueError(
            f"beam_width={width}: with {num_end_ids} end tokens needs {needed} candidates a step, at most "
            f"{MAX_CANDIDATES} are reported; lower the width"
        )
