"""What a user asks for and what comes back: SamplingParams, Request, Sequence, RequestOutput.

A `Request` owns one or more `Sequence`s (its n parallel samples). A sequence is the unit the scheduler
runs and the cache manager keeps a block table for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from pagedjax.cache.hashing import ExtraKeys, TokenChain
from pagedjax.cache.rules import require
from pagedjax.engine.times import Seconds, Spent

MAX_CANDIDATES = 64  # likeliest tokens a step reports per sample: bounds logprobs=k and the width of beams
MAX_BIASED = 300
MAX_END_IDS = 128
_LARGEST = 3e38  # about float32's own
_WHOLE_OR_NONE = ("seed", "best_of", "logprobs", "prompt_logprobs")
_WHOLE = ("max_tokens", "n", "top_k", "beam_width", "min_tokens", *_WHOLE_OR_NONE)
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "length_penalty",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation stops.

    Attributes:
        max_tokens: Most tokens to generate per sample, at least 1.
        n: Samples of one prompt to return; they fork one prefill and copy blocks on write.
        best_of: Draw so many samples and return the n whose tokens are likeliest on average. None: n.
        beam_width: Beams of a beam search, of which the n best are returned; 0: no beam search.
        length_penalty: Beams: a score is the sum of log-probabilities over length ** length_penalty.
        early_stopping: Beams: True stops once beam_width beams have ended, False where the best running
            beam is no better as it stands, "never" where it cannot become better.
        temperature: 0 is greedy. Otherwise logits are divided by it before the filters below.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches top_p; 1.0 keeps all.
        min_p: Keep tokens at least min_p times as likely as the most likely one; 0.0 keeps all.
        repetition_penalty: Logits of tokens in prompt or answer are divided by it where positive, multiplied
            where negative; 1.0 is off.
        presence_penalty: Taken off the logit of each token that the answer holds; 0.0 is off.
        frequency_penalty: Taken off once for each time the answer holds it; 0.0 is off.
        logit_bias: Token id → what is added to its logit, at most 300 of them.
        seed: Sample i of a request draws from the key (seed, i, position of the token): the same seed
            gives the same text whatever else is in the batch, and sample i of n=4 is sample i of n=8.
            None: the engine draws one per request from its own seed.
        stop: Strings that end a sample; the text ends before the string. They are found across token
            borders.
        stop_token_ids: Tokens that end a sample (beside the model's end-of-sequence tokens).
        ignore_eos: Go on past the model's end-of-sequence tokens.
        min_tokens: No end-of-sequence token, stop token or stop string before so many tokens.
        logprobs: Report the log-probability and rank of each generated token, and the k likeliest tokens
            beside it, under the model's own distribution: before penalties, bias, temperature and
            filters. False or None: nothing; True or 0: the token's own.
        prompt_logprobs: The same for each token of the prompt but the first. What it needs has to be
            computed: such a request takes nothing from the prefix cache (it leaves its blocks there).
        retention: Under the retention policy, how long its blocks stay in the cache: those of a higher number stay
            longer; 0 is the common one, below 0 goes first. Other policies do not look at it.
        ttl_s: Seconds, on the engine's clock, for which `retention` holds; None: for ever.
        group: Under the workload-aware policy, the request's category (kind, application, user), whose blocks come back
            alike; "": none is named. Other policies do not look at it.
        cache_read: False: take nothing from the prefix cache.
        cache_write: False: leave nothing in it.

    Raises:
        ValueError: A value is of another kind or out of its range; the message names got, rule and remedy.
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    retention: int = 0
    ttl_s: float | None = None
    cache_read: bool = True
    cache_write: bool = True
    group: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, none in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:  # as other libraries say "none of them"
                object.__setattr__(self, name, none)
        for name in ("stop", "stop_token_ids"):
            if isinstance(value := getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(value))
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(value := getattr(self, name), bool):
                object.__setattr__(self, name, 0 if value else None)
        if isinstance(self.logit_bias, Mapping):  # a copy: checked once, and the caller's own may change
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check_kinds()
        require(self.max_tokens >= 1, f"max_tokens={self.max_tokens}: must be at least 1")
        require(self.n >= 1, f"n={self.n}: must be at least 1")
        require(
            0.0 <= self.temperature < _LARGEST,
            f"temperature={self.temperature}: must be 0 (greedy) or a positive number; try 0.7",
        )
        require(self.top_k >= 0, f"top_k={self.top_k}: must be 0 (off) or positive")
        require(0.0 < self.top_p <= 1.0, f"top_p={self.top_p}: must be in (0, 1]; 1.0 is off")
        require(0.0 <= self.min_p <= 1.0, f"min_p={self.min_p}: must be in [0, 1]; 0.0 is off")
        require(
            self.seed is None or 0 <= self.seed < 2**32,
            f"seed={self.seed}: must be in [0, 2**32) or None",
        )
        require(all(self.stop), "stop='': a stop string must not be empty; leave it out")
        self._check_choice()
        self._check_several()

    def _check_kinds(self) -> None:
        for name in _WHOLE:
            value, most = getattr(self, name), 32 if name == "seed" else 31
            require(
                (value is None and name in _WHOLE_OR_NONE) or (is_whole(value) and value < 2**most),
                f"{name}={value!r}: must be a whole number below 2**{most}",
            )
        for name in _REAL:
            value = getattr(self, name)
            require(isinstance(value, Real), f"{name}={value!r}: must be a number")
        for name in ("ignore_eos", "cache_read", "cache_write"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name}={value!r}: must be True or False")
        require(
            is_whole(self.retention) and abs(self.retention) < 2**31,
            f"retention={self.retention!r}: must be a whole number; 0 is the common one",
        )
        require(isinstance(self.group, str), f"group={self.group!r}: must be text; '' names no category")
        ttl = self.ttl_s
        require(
            ttl is None or (isinstance(ttl, Real) and not isinstance(ttl, bool) and 0 < ttl < _LARGEST),
            f"ttl_s={ttl!r}: must be a positive number of seconds, or None for ever",
        )
        require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) for text in self.stop),
            f"stop={self.stop!r}: must be a string or several",
        )
        ids = self.stop_token_ids
        require(
            isinstance(ids, tuple) and all(is_whole(i) and 0 <= i < 2**31 for i in ids),
            f"stop_token_ids={ids!r}: must be token ids, such as (2,)",
        )
        biases = self.logit_bias
        require(
            isinstance(biases, Mapping)
            and all(is_whole(i) and isinstance(bias, Real) for i, bias in biases.items()),
            f"logit_bias={biases!r}: must map token ids to numbers, such as {{42: -100.0}}",
        )

    def _check_choice(self) -> None:
        require(
            0.0 < self.repetition_penalty < _LARGEST,
            f"repetition_penalty={self.repetition_penalty}: must be positive; 1.0 is off",
        )
        for name in ("presence_penalty", "frequency_penalty", "length_penalty"):
            value = getattr(self, name)
            require(abs(value) < _LARGEST, f"{name}={value}: must be a finite number")
        require(
            len(self.logit_bias) <= MAX_BIASED,
            f"logit_bias of {len(self.logit_bias)} tokens: at most {MAX_BIASED} are taken; leave some out",
        )
        for token, bias in self.logit_bias.items():
            require(
                token >= 0 and abs(bias) < _LARGEST,
                f"logit_bias[{token}]={bias}: must be a finite number for a token id; -100 all but forbids it",
            )
        require(
            len(self.stop_token_ids) <= MAX_END_IDS // 2,
            f"stop_token_ids: {len(self.stop_token_ids)} given, at most {MAX_END_IDS // 2} are taken",
        )
        require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens}: must be between 0 and max_tokens={self.max_tokens}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            require(
                k is None or 0 <= k <= MAX_CANDIDATES,
                f"{name}={k}: must be between 0 and {MAX_CANDIDATES}, or None for nothing",
            )

    def _check_several(self) -> None:
        """n, best_of and beam_width, and what goes with them."""
        if self.best_of is not None:
            require(
                self.best_of >= self.n,
                f"best_of={self.best_of}: must be at least n={self.n}, which is what is returned",
            )
            require(
                not self.beam_width,
                "best_of: draws samples, beams are not drawn; leave out best_of or beam_width",
            )
        require(self.beam_width >= 0, f"beam_width={self.beam_width}: must be 0 (no beams) or positive")
        require(
            self.early_stopping in (True, False, "never"),
            f'early_stopping={self.early_stopping!r}: must be True, False or "never"',
        )
        if self.beam_width:
            require(
                self.n <= self.beam_width,
                f"n={self.n}: must not exceed beam_width={self.beam_width}, of which n are returned; widen the beam",
            )
            require(self.temperature == 0, "temperature: beams are not drawn; leave it at 0")
            require(not self.stop, "stop: beams end at tokens; give stop_token_ids instead")
            require(
                not self.has_adjustments,
                "penalties, logit_bias: beams follow the model's own probabilities; leave them out",
            )

    @property
    def has_adjustments(self) -> bool:
        """Logits are changed before a token is chosen."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )

    @property
    def num_sequences(self) -> int:
        """Sequences that run together for a request."""
        return max(self.n, self.best_of or 0, self.beam_width)

    @property
    def waits_for_all(self) -> bool:
        """What is returned is known only when all sequences have ended."""
        return bool(self.beam_width or (self.best_of or 0) > self.n)


def is_whole(value: Any) -> bool:
    """An int of Python's or numpy's, and no bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_token_ids(ids: Any, vocab_size: int | None = None) -> None:
    """Refuse a prompt that is not a flat list of the vocabulary's ids: the one check, for every entrance.

    Args:
        ids: i32[n], or a sequence of whole numbers.
        vocab_size: Ids are below it; None: below 2**31.

    Raises:
        ValueError: Naming the first id that is none.
    """
    limit = 2**31 if vocab_size is None else vocab_size
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError, TypeError):  # ragged
        array = np.empty((0, 0))
    if array.ndim == 1 and (not array.size or array.dtype.kind in "iu"):
        if not array.size or 0 <= array.min() <= array.max() < limit:
            return
    elif array.ndim != 1:
        raise ValueError(
            "prompt_token_ids: must be a flat list of whole numbers, such as a tokenizer's encode gives"
        )
    for at, token in enumerate(ids):
        if not (is_whole(token) and 0 <= token < limit):
            known = "" if vocab_size is None else ", the model's vocabulary"
            raise ValueError(f"prompt token {at} is {token!r}: must be a whole number in [0, {limit}){known}")


class TokenLogprob(NamedTuple):
    """A token at one position: its natural log-probability there, and its rank (1 is the likeliest)."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(NamedTuple):
    """The token at a position, and the likeliest ones there, best first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]


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
    pool. The newest token's KV is not: it is computed by the step that feeds it. A beam's `candidates` are
    its next tokens, kept until the other beams have theirs.

    Of steps that are planned and not booked yet (`Scheduler.ahead`): `num_flying` tokens whose KV they write, and
    `num_drawn` tokens that they draw, which only the device knows.
    """

    seq_id: int
    request: Request
    index: int
    chain: TokenChain
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_flying: int = 0
    num_drawn: int = 0
    finish_reason: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)
    details: list[PositionLogprobs] = field(default_factory=list)
    candidates: Any = None

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
        end_token_ids: Tokens that end a sample.
        forked: Each live sequence has a block table of its own. False until what they share is computed.
        fork_at: Tokens that all live sequences share: the prompt; for resumed beams more.
        prompt_details: Of each prompt token computed so far, if asked for; the first has none.
        num_cached_tokens: Prompt tokens hit at the first admission; None before it.
        miss_reason, matched_tokens: What that lookup said.
        num_copies: Blocks copied on write, by sequences that have already given theirs back.
        num_preemptions: Times it lost its blocks.
        first_token_at: Engine clock at its first token, seconds.
        spent: Seconds of the steps it had a part in.
        first_times: Where the seconds to its first token went.
        priority: Higher is admitted first and preempted last; equals go by arrival.
        number: Order of arrival, given by the scheduler.
        swapped: Its sequences' KV is on the host.
        awaited: Somebody waits for it: what it has to tell is his alone.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    extra: ExtraKeys = ExtraKeys()
    arrival: float = 0.0
    sequences: list[Sequence] = field(default_factory=list)
    end_token_ids: frozenset[int] = frozenset()
    forked: bool = False
    fork_at: int = 0
    prompt_details: dict[int, PositionLogprobs] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    miss_reason: str = ""
    matched_tokens: int = 0
    num_copies: int = 0
    num_preemptions: int = 0
    first_token_at: float | None = None
    spent: Spent = field(default_factory=Spent)
    first_times: Seconds | None = None
    priority: int = 0
    number: int = 0
    swapped: bool = False
    awaited: bool = False

    def __post_init__(self) -> None:
        self.fork_at = len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_places(self) -> int:
        """Rows it may need in one step: beams start as one sequence and become beam_width."""
        return max(len(self.live), self.sampling.beam_width)

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not finished."""
        return [s for s in self.sequences if not s.finished]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample as it stands.

    Attributes:
        index: Which of the samples; of beams, the rank.
        text: Decoded text so far, without the stop string; "" where no tokenizer is attached.
        token_ids: Generated tokens so far, the stop token included.
        finish_reason: None while it runs.
        logprobs: One per generated token if asked for, natural log.
        details: The same with ranks and the likeliest tokens at each place, if asked for.
        score: Beams: sum of log-probabilities over length ** length_penalty. best_of: their mean.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] | None = None
    details: tuple[PositionLogprobs, ...] | None = None
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What one request has produced, with what the cache did for it.

    Attributes:
        request_id: As given or assigned.
        prompt_token_ids: The prompt.
        outputs: One per sample, in sample order; of beams and best_of the n best, best first.
        finished: All samples have ended.
        num_cached_tokens: Prompt tokens taken from the cache when the request was first admitted.
        miss_reason: Why the prefix match stopped there (a `MissReason` value).
        matched_tokens: Tokens that matched, counted below block granularity where the index knows it.
        num_copies: Blocks copied on write for this request.
        num_preemptions: Times it lost its blocks and was resumed.
        ttft_s: Seconds from `add` to the first token; None before it.
        latency_s: Seconds from `add` to the last token; None before it finished.
        ttft_times: Where the first went: waiting, computing, copying, compiling.
        times: The same of all seconds from `add` until now.
        prompt_logprobs: One per prompt token if asked for, None for the first.
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
    ttft_times: Seconds | None = None
    times: Seconds | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
