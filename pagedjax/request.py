"""What a user asks for and what comes back: SamplingParams, Request, Sequence, RequestOutput.

A `Request` owns one or more `Sequence`s (its n parallel samples). A sequence is the unit the scheduler
runs and the cache manager keeps a block table for.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pagedjax.cache.hashing import ExtraKeys, TokenChain


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation stops.

    Attributes:
        max_tokens: Most tokens to generate per sample, at least 1.
        n: Parallel samples of one prompt; they fork one prefill and copy blocks on write.
        temperature: 0 is greedy. Otherwise logits are divided by it before the filters below.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches top_p; 1.0 keeps all.
        min_p: Keep tokens at least min_p times as likely as the most likely one; 0.0 keeps all.
        seed: Sample i of a request draws from the key (seed, i, position of the token): the same seed
            gives the same text whatever else is in the batch, and sample i of n=4 is sample i of n=8.
            None: the engine draws one per request from its own seed.
        stop: Strings that end a sample; the text ends before the string. They are found across token
            borders.
        stop_token_ids: Tokens that end a sample (beside the model's end-of-sequence tokens).
        ignore_eos: Go on past the model's end-of-sequence tokens.
        logprobs: Report the log-probability of each generated token under the unfiltered distribution.

    Raises:
        ValueError: A value is out of its range; the message names got, rule and remedy.
    """

    max_tokens: int = 128
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(self.max_tokens >= 1, f"max_tokens={self.max_tokens}: must be at least 1")
        _require(self.n >= 1, f"n={self.n}: must be at least 1")
        _require(
            0.0 <= self.temperature < float("inf"),
            f"temperature={self.temperature}: must be 0 (greedy) or a positive number; try 0.7",
        )
        _require(self.top_k >= 0, f"top_k={self.top_k}: must be 0 (off) or positive")
        _require(0.0 < self.top_p <= 1.0, f"top_p={self.top_p}: must be in (0, 1]; 1.0 is off")
        _require(0.0 <= self.min_p <= 1.0, f"min_p={self.min_p}: must be in [0, 1]; 0.0 is off")
        _require(
            self.seed is None or 0 <= self.seed < 2**32,
            f"seed={self.seed}: must be in [0, 2**32) or None",
        )
        _require(all(self.stop), "stop='': a stop string must not be empty; leave it out")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the user withdrew the request
    CAPACITY = "capacity"  # alone in the engine and the pool has no block left for its next token


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, its hash chain and how far its KV has been computed.

    `chain` holds prompt and generated tokens; `num_computed_tokens` counts those whose KV is in the
    pool. The newest token's KV is not: it is computed by the step that feeds it.
    """

    seq_id: int
    request: Request
    index: int
    chain: TokenChain
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.chain)

    @property
    def num_output_tokens(self) -> int:
        return len(self.chain) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.chain.tokens[self.request.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(eq=False)
class Request:
    """A prompt with its sampling parameters and its sequences.

    Attributes:
        request_id: The caller's name for it, unique among live requests.
        prompt_token_ids: At least one.
        sampling: How to continue it.
        seed: Root of its samples' keys, u32.
        extra: Typed extra keys that separate its blocks from others' (adapter, salt).
        arrival: Engine clock at `Engine.add`, seconds.
        sequences: Its samples, in order.
        forked: Each live sequence has a block table of its own. False until the shared prompt is computed.
        num_cached_tokens: Prompt tokens hit at the first admission; None before it.
        miss_reason, matched_tokens: What that lookup said.
        num_copies: Blocks copied on write, by sequences that have already given theirs back.
        num_preemptions: Times it lost its blocks.
        first_token_at: Engine clock at its first token, seconds.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    extra: ExtraKeys = ExtraKeys()
    arrival: float = 0.0
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    num_cached_tokens: int | None = None
    miss_reason: str = ""
    matched_tokens: int = 0
    num_copies: int = 0
    num_preemptions: int = 0
    first_token_at: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not finished."""
        return [s for s in self.sequences if not s.finished]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample as it stands.

    Attributes:
        index: Which of the n samples.
        text: Decoded text so far, without the stop string; "" where no tokenizer is attached.
        token_ids: Generated tokens so far, the stop token included.
        finish_reason: None while it runs.
        logprobs: One per generated token if asked for, natural log.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What one request has produced, with what the cache did for it.

    Attributes:
        request_id: As given or assigned.
        prompt_token_ids: The prompt.
        outputs: One per sample, in sample order.
        finished: All samples have ended.
        num_cached_tokens: Prompt tokens taken from the cache when the request was first admitted.
        miss_reason: Why the prefix match stopped there (a `MissReason` value).
        matched_tokens: Tokens that matched, counted below block granularity where the index knows it.
        num_copies: Blocks copied on write for this request.
        num_preemptions: Times it lost its blocks and was resumed.
        ttft_s: Seconds from `add` to the first token; None before it.
        latency_s: Seconds from `add` to the last token; None before it finished.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: Seq[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    miss_reason: str
    matched_tokens: int
    num_copies: int
    num_preemptions: int
    ttft_s: float | None = None
    latency_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
