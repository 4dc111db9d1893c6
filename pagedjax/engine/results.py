"""From what the runner gave back to the requests: tokens appended, log-probabilities kept, stop rules, beams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

from pagedjax.cache.hashing import TokenChain
from pagedjax.engine.beam import BeamSearch, Candidates, reseat
from pagedjax.engine.outputs import Outputs, ranked
from pagedjax.engine.request import (
    FinishReason,
    PositionLogprobs,
    Request,
    SamplingParams,
    Sequence,
    TokenLogprob,
)
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.step import StepPlan, StepResult


class Results:
    """Books results: what the scheduler does with tokens, and when a sequence has ended.

    Args:
        scheduler: Books blocks and tokens.
        outputs: Texts and beam searches of the requests.
        eos_token_ids: Tokens that end a sample unless it ignores them.
    """

    def __init__(self, scheduler: Scheduler, outputs: Outputs, eos_token_ids: Seq[int]) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._eos = frozenset(eos_token_ids)
        self._seq_ids = itertools.count()

    def end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end a sample."""
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self._eos

    def start(self, request: Request, chain: TokenChain) -> None:
        """Give a new request its sequences; beams start as one.

        Args:
            request: Not queued yet.
            chain: Of its prompt; the first sequence's own from here on.
        """
        sampling = request.sampling
        request.end_token_ids = self.end_ids(sampling)
        if sampling.beam_width:
            self._outputs.searches[request.request_id] = BeamSearch(
                sampling.beam_width,
                min(sampling.max_tokens, self._scheduler.max_model_len - request.num_prompt_tokens),
                sampling.length_penalty,
                sampling.early_stopping,
                request.end_token_ids,
                sampling.min_tokens,
            )
        for index in range(1 if sampling.beam_width else sampling.num_sequences):
            own = chain if index == 0 else chain.fork()
            seq = Sequence(next(self._seq_ids), request, index, own)
            request.sequences.append(seq)
            self._outputs.start(seq)

    def book(self, plan: StepPlan[Sequence], result: StepResult, now: float) -> dict[str, Request]:
        """Book a step.

        Args:
            plan: What ran.
            result: What came back.
            now: Engine clock at its end, seconds.

        Returns:
            The requests that have something new to tell, by id.
        """
        scheduler = self._scheduler
        touched: dict[str, Request] = {}
        if scheduler.config.preemption == "auto":
            prefills = sum(row.num_tokens > 1 for row in plan.rows)
            scheduler.costs.observe(plan.num_tokens, prefills, plan.copies, result)
        grown = scheduler.update(plan, result.tokens, result.logprobs, now)
        self._book_prompts(plan, result)
        for at, seq in grown:
            request = seq.request
            touched[request.request_id] = request
            if request.first_token_at is None:
                request.first_token_at = now
                request.first_times = request.spent.of(now - request.arrival)
            if request.sampling.beam_width:
                seq.candidates = _candidates(result, at)
                self._advance_beams(request)
            else:
                self._book_details(seq, result, at)
                self._apply_stop_rules(seq)
        return touched

    def _apply_stop_rules(self, seq: Sequence) -> None:
        sampling, scheduler = seq.request.sampling, self._scheduler
        early = seq.num_output_tokens <= sampling.min_tokens
        ends = seq.chain.tokens[-1] in seq.request.end_token_ids and not early
        if not ends:
            ends = self._outputs.completes_stop(seq, may_stop=not early)
        if ends:
            scheduler.finish(seq, FinishReason.STOP)
        elif seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= scheduler.max_model_len:
            stopped = self._outputs.ends_in_stop(seq)
            scheduler.finish(seq, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _advance_beams(self, request: Request) -> None:
        """One step of a beam search, once all its beams have their candidates."""
        beams = request.sequences
        if any(seq.candidates is None or seq.num_computed_tokens < seq.num_tokens for seq in beams):
            return  # some are still being recomputed after a preemption
        search = self._outputs.searches[request.request_id]
        choices = search.advance([seq.candidates for seq in beams])
        if search.done:
            for seq in beams:
                self._scheduler.finish(seq, FinishReason.STOP)
        else:
            reseat(request, choices, self._scheduler.manager, lambda: next(self._seq_ids))

    @staticmethod
    def _book_details(seq: Sequence, result: StepResult, at: int) -> None:
        count = seq.request.sampling.logprobs
        if count is not None and result.top_ids is not None and result.top_logprobs is not None:
            own = TokenLogprob(seq.chain.tokens[-1], result.logprobs[at], result.ranks[at])
            top = ranked(result.top_ids[at], result.top_logprobs[at], count)
            seq.details.append(PositionLogprobs(own, top))

    @staticmethod
    def _book_prompts(plan: StepPlan[Sequence], result: StepResult) -> None:
        for number, scores in result.prompt.items():
            row = plan.rows[number]
            request = row.seq.request
            count = request.sampling.prompt_logprobs or 0
            for i, logprob in enumerate(scores.logprobs.tolist()):
                position = row.start + 1 + i
                own = TokenLogprob(request.prompt_token_ids[position], logprob, int(scores.ranks[i]))
                top = ranked(scores.top_ids[i], scores.top_logprobs[i], count)
                request.prompt_details[position] = PositionLogprobs(own, top)


def _candidates(result: StepResult, at: int) -> Candidates:
    if result.top_ids is None or result.top_logprobs is None:
        raise ValueError(
            "StepResult.top_ids: beams need a row of candidates per sample; the runner gave none"
        )
    return Candidates(result.top_ids[at], result.top_logprobs[at])
