"""A trace's requests as a model can compute them: token ids of its vocabulary, answers as long as the trace says.

What the trace knows is kept: its token ids where it has some; where it has ids of blocks, tokens are made from them, so
that prompts are equal exactly as far as the ids are. A prompt that the trace says nothing of but its length is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagedjax.engine.request import SamplingParams
from pagedjax.sim.trace import Trace, TraceRequest

_WORD = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


@dataclass(frozen=True, slots=True, eq=False)
class PlayRequest:
    """One request of a trace, ready for an engine.

    Attributes:
        name: Its number in the trace.
        arrival_s: Seconds from the start.
        tokens: i32[n], the prompt.
        sampling: How it is decoded.
        answer: i32[m], what its first sample is to answer; None: what the model says.
        cut: Tokens that were cut off prompt and answer.
        known: The trace says which prefixes the prompt shares with others.
    """

    name: str
    arrival_s: float
    tokens: np.ndarray
    sampling: SamplingParams
    answer: np.ndarray | None = None
    cut: tuple[int, int] = (0, 0)
    known: bool = True


@dataclass(frozen=True)
class PlayRequests:
    """A trace's requests, made anew in each pass and equal each time.

    Attributes:
        trace: Where they come from.
        vocab_size: Token ids lie below it.
        n: Samples of each request; several are drawn at temperature 1, each its own.
        max_prompt: Prompts are cut to so many tokens; None: as they are.
        max_tokens: Answers likewise.
        made: Make token ids from those of the trace, equal as far as they are equal: for files that were tokenised for
            another vocabulary.
        seed: Of made tokens, and of samples.
    """

    trace: Trace
    vocab_size: int
    n: int = 1
    max_prompt: int | None = None
    max_tokens: int | None = None
    made: bool = False
    seed: int = 0

    def __iter__(self) -> Iterator[PlayRequest]:
        """Requests in order of arrival.

        Raises:
            ValueError: A token id of the trace is none of the model's.
        """
        for number, request in enumerate(self.trace):
            yield self._request(number, request)

    def _request(self, number: int, request: TraceRequest) -> PlayRequest:
        prompt, answer = self._tokens(number, request)
        length = max(request.num_output, 1)
        kept_prompt = prompt if self.max_prompt is None else prompt[: self.max_prompt]
        kept = length if self.max_tokens is None else min(length, self.max_tokens)
        sampling = SamplingParams(
            max_tokens=kept,
            n=self.n,
            temperature=0.0 if self.n == 1 else 1.0,
            ignore_eos=True,
            seed=(self.seed + number) % (1 << 32),
            group=request.group,
            **(request.wishes or {}),
        )
        return PlayRequest(
            name=str(number),
            arrival_s=request.arrival_s,
            tokens=kept_prompt,
            sampling=sampling,
            answer=answer[:kept] if answer is not None and len(answer) >= kept else None,
            cut=(len(prompt) - len(kept_prompt), length - kept),
            known=request.token_ids is not None or request.granule_ids is not None,
        )

    def _tokens(self, number: int, request: TraceRequest) -> tuple[np.ndarray, np.ndarray | None]:
        """i32 of the whole prompt, and of the answer where the trace has it."""
        if request.token_ids is None:
            return self._from_granules(number, request), None
        prompt, answer = request.token_ids, request.output_ids
        if self.made:
            both = _chained(prompt if answer is None else np.concatenate([prompt, answer]), self.vocab_size)
            return both[: len(prompt)], None if answer is None else both[len(prompt) :]
        for what, ids in (("prompt", prompt), ("answer", answer)):
            if ids is not None and len(ids) and ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{self.trace.name}: request {number}: token {ids.max()} of its {what}: must be below "
                    f"{self.vocab_size}, the model's vocabulary; read the file's text with the model's tokenizer, or "
                    "take made tokens (--made-tokens), equal as far as these are"
                )
        return prompt, answer

    def _from_granules(self, number: int, request: TraceRequest) -> np.ndarray:
        size, rest = self.trace.granularity, request.num_input
        parts = []
        for granule in () if request.granule_ids is None else request.granule_ids.tolist():
            parts.append(self._drawn((1, granule & _WORD), min(size, rest)))
            rest -= len(parts[-1])
        if rest:
            parts.append(self._drawn((2, number), rest))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _drawn(self, key: tuple[int, int], count: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *key])
        return rng.integers(0, self.vocab_size, count, dtype=np.int32)


def _chained(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids of another vocabulary, each made from all up to it: equal prefixes stay equal, and others part."""
    out = np.empty(len(ids), np.int32)
    state = 0
    for at, token in enumerate(ids.tolist()):
        state = ((state ^ (token + 1)) * _MIX) & _WORD
        state ^= state >> 29
        out[at] = state % vocab_size
    return out
