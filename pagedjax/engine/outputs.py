"""From a request's sequences to what its user sees: texts, log-probabilities, the best of several, times."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from pagedjax.cache import KVCacheManager
from pagedjax.engine.beam import BeamSearch, Hypothesis
from pagedjax.engine.request import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    Request,
    RequestOutput,
    Sequence,
    TokenLogprob,
)
from pagedjax.engine.text_stream import TextStream


class Outputs:
    """Texts and beams of the live requests, and the outputs made of them.

    Args:
        manager: Asked for the copies of live sequences.
        decode: Token ids to text; None: token ids only.
        clock: Seconds.

    Attributes:
        searches: Beam searches by request id.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        decode: Callable[[Seq[int]], str] | None,
        clock: Callable[[], float],
    ) -> None:
        self.searches: dict[str, BeamSearch] = {}
        self._manager = manager
        self._decode = decode
        self._clock = clock
        self._streams: dict[int, TextStream] = {}

    @property
    def has_text(self) -> bool:
        """There is a tokenizer."""
        return self._decode is not None

    def start(self, seq: Sequence) -> None:
        """A sequence begins; the text of beams is decoded at their end."""
        sampling = seq.request.sampling
        if self._decode is not None and not sampling.beam_width:
            self._streams[seq.seq_id] = TextStream(self._decode, sampling.stop)

    def forget(self, request: Request) -> None:
        """Nothing more will be told of a request."""
        self.searches.pop(request.request_id, None)
        for seq in request.sequences:
            self._streams.pop(seq.seq_id, None)

    # ------------------------------------------------------------------ steps

    def completes_stop(self, seq: Sequence, may_stop: bool) -> bool:
        """Take a sequence's newest token into its text; True: it completes a stop string."""
        stream = self._streams.get(seq.seq_id)
        return stream is not None and stream.push(seq.chain.tokens[-1], may_stop=may_stop)

    def ends_in_stop(self, seq: Sequence) -> bool:
        """No token follows: True where the characters that were still held back complete a stop string."""
        stream = self._streams.get(seq.seq_id)
        if stream is None:
            return False
        stream.finish()
        return stream.stopped

    # ----------------------------------------------------------------- output

    def of(self, request: Request) -> RequestOutput:
        """A request as it stands."""
        finished = not request.live
        search = self.searches.get(request.request_id)
        first = request.first_token_at
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(request.prompt_details.get(i) for i in range(request.num_prompt_tokens))
        elapsed_s = self._clock() - request.arrival
        copies = sum(self._manager.num_copies(seq.seq_id) for seq in request.live)
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=self._samples(request) if search is None else self._beams(request, search),
            finished=finished,
            num_cached_tokens=request.num_cached_tokens or 0,
            miss_reason=request.miss_reason,
            matched_tokens=request.matched_tokens,
            num_copies=request.num_copies + copies,
            num_preemptions=request.num_preemptions,
            ttft_s=None if first is None else first - request.arrival,
            latency_s=elapsed_s if finished else None,
            ttft_times=request.first_times,
            times=request.spent.of(elapsed_s),
            prompt_logprobs=prompt_logprobs,
        )

    def _samples(self, request: Request) -> tuple[CompletionOutput, ...]:
        outputs = tuple(self._completion(seq) for seq in request.sequences)
        if not request.sampling.waits_for_all:
            return outputs
        # One that ended before its first token has no score, and stands last.
        means = {
            seq.index: sum(seq.logprobs) / len(seq.logprobs) if seq.logprobs else None
            for seq in request.sequences
        }
        scored = [replace(output, score=means[output.index]) for output in outputs]
        scored.sort(key=lambda o: math.inf if o.score is None else -o.score)  # stable: ties in sample order
        return tuple(scored[: request.sampling.n])

    def _completion(self, seq: Sequence) -> CompletionOutput:
        stream = self._streams.get(seq.seq_id)
        text = ""
        if stream is not None:
            if seq.finished:
                stream.finish()
                text = stream.text
            else:
                text = stream.settled
        asked = seq.request.sampling.logprobs is not None
        return CompletionOutput(
            seq.index,
            text,
            tuple(seq.output_token_ids),
            seq.finish_reason,
            tuple(seq.logprobs) if asked else None,
            tuple(seq.details) if asked else None,
        )

    def _beams(self, request: Request, search: BeamSearch) -> tuple[CompletionOutput, ...]:
        """The n best, best first; a search that was cut short counts its running beams as they stand."""
        if not request.live:
            search.end(request.sequences[0].finish_reason or FinishReason.ABORT)
        best = enumerate(search.finished[: request.sampling.n])
        found = tuple(self._hypothesis(request, rank, hypothesis) for rank, hypothesis in best)
        if not found and not request.live:  # ended before the first token: say why
            return (CompletionOutput(0, "", (), request.sequences[0].finish_reason),)
        return found

    def _hypothesis(self, request: Request, rank: int, found: Hypothesis) -> CompletionOutput:
        beam, count = found.beam, request.sampling.logprobs
        details = []
        for token, logprob, row in zip(beam.token_ids, beam.logprobs, beam.rows):
            place = int(np.flatnonzero(row.token_ids == token)[0])
            top = ranked(row.token_ids, row.logprobs, count or 0)
            details.append(PositionLogprobs(TokenLogprob(token, logprob, place + 1), top))
        ids = beam.token_ids
        shown = ids[:-1] if found.reason is FinishReason.STOP else ids
        return CompletionOutput(
            rank,
            self._decode(shown) if self._decode is not None else "",
            ids,
            found.reason,
            beam.logprobs if count is not None else None,
            tuple(details) if count is not None else None,
            found.score,
        )


def ranked(ids: np.ndarray, logprobs: np.ndarray, count: int) -> tuple[TokenLogprob, ...]:
    """The first `count` of a row of likeliest tokens."""
    pairs = zip(ids[:count].tolist(), logprobs[:count].tolist())
    return tuple(TokenLogprob(token, logprob, place + 1) for place, (token, logprob) in enumerate(pairs))
