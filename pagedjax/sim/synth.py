"""Seeded generators of token-id traces: the kinds of traffic where prefixes repeat, or do not.

Every generator streams: request i is drawn from a generator seeded with (seed, kind, i), so a trace of
millions takes no more memory than its live sessions. Two traces with equal arguments are equal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagedjax.sim.records import MOST_COUNT, RATES, in_range
from pagedjax.sim.trace import Trace, TraceRequest


@dataclass(frozen=True)
class Arrivals:
    """When requests (or sessions) come.

    Attributes:
        rate: Mean per second.
        burst: They come in groups of this size; 1 is Poisson.
    """

    rate: float = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        in_range("rate", self.rate, *RATES)
        in_range("burst", self.burst, 1, MOST_COUNT)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        now = 0.0
        while True:
            now += float(rng.exponential(self.burst / self.rate))
            for _ in range(self.burst):
                yield now


VOCAB = 32_000
_FIXED = 2**31  # index of texts that every request shares, out of the way of request numbers


def _rng(seed: int, *where: int) -> np.random.Generator:
    return np.random.default_rng([seed, *where])


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(3, VOCAB, size=count, dtype=np.int32)


def _about(rng: np.random.Generator, mean: int) -> int:
    """A length with this mean, at least 1, spread like an exponential (most short, some long)."""
    return 1 + int(rng.exponential(max(mean - 1, 0)))


# What a parameter may be; any other number is a count from 0 to MOST_COUNT.
_SOME = (1, MOST_COUNT)
_RANGES: dict[str, tuple[float, float]] = {
    "num_requests": _SOME,
    "num_sessions": _SOME,
    "num_systems": _SOME,
    "num_documents": _SOME,
    "prompt_tokens": _SOME,
    "share": (0.0, 1.0),
    "pause_s": (0.0, 1e9),
    "seed": (0, math.inf),
}


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """A generator's arguments, before anything is drawn with them."""
    for name, value in arguments.items():
        if isinstance(value, int | float):
            in_range(name, value, *_RANGES.get(name, (0, MOST_COUNT)))
    return dict(arguments)


def _trace(kind: str, arguments: dict[str, Any], source: Callable[[], Iterator[TraceRequest]]) -> Trace:
    words = ",".join(f"{k}={v}" for k, v in sorted(arguments.items()))
    return Trace(kind, "generated", 1, True, source, spec=f"{kind}({words})")


def _single_turn(
    kind: str,
    arguments: dict[str, Any],
    prompt: Callable[[np.random.Generator, int], np.ndarray],
) -> Trace:
    """Independent requests, each with its own prompt."""
    seed, arrivals, output = arguments["seed"], arguments["arrivals"], arguments["output_tokens"]

    def source() -> Iterator[TraceRequest]:
        times = arrivals.times(_rng(seed, _FIXED + 1))
        for i, now in zip(range(arguments["num_requests"]), times):
            rng = _rng(seed, i)
            ids = prompt(rng, i)
            answer = _tokens(rng, _about(rng, output))
            yield TraceRequest(now, len(ids), len(answer), token_ids=ids, output_ids=answer)

    return _trace(kind, {**arguments, "arrivals": tuple(asdict(arrivals).values())}, source)


def system_prompt(
    num_requests: int = 1000,
    *,
    system_tokens: int = 1500,
    user_tokens: int = 100,
    output_tokens: int = 200,
    num_systems: int = 1,
    timestamp: bool = False,
    seed: int = 0,
    arrivals: Arrivals = Arrivals(),
) -> Trace:
    """Customer service: one of `num_systems` system prompts, then a short question of one's own.

    With `timestamp` each prompt opens with a token of its own: nothing is shared any more.
    """
    arguments = _checked(locals())

    def prompt(rng: np.random.Generator, i: int) -> np.ndarray:
        common = _tokens(_rng(seed, _FIXED, int(rng.integers(num_systems))), system_tokens)
        own = _tokens(rng, _about(rng, user_tokens))
        clock = np.array([VOCAB + i], np.int32) if timestamp else np.empty(0, np.int32)
        return np.concatenate([clock, common, own])

    return _single_turn("system-prompt", arguments, prompt)


def few_shot(
    num_requests: int = 1000,
    *,
    prefix_tokens: int = 341,
    query_tokens: int = 40,
    output_tokens: int = 40,
    seed: int = 0,
    arrivals: Arrivals = Arrivals(),
) -> Trace:
    """Few-shot translation: one instruction with examples, then the sentence to translate."""
    arguments = _checked(locals())
    common = _tokens(_rng(seed, _FIXED), prefix_tokens)

    def prompt(rng: np.random.Generator, i: int) -> np.ndarray:
        return np.concatenate([common, _tokens(rng, _about(rng, query_tokens))])

    return _single_turn("few-shot", arguments, prompt)


def document_questions(
    num_requests: int = 1000,
    *,
    num_documents: int = 20,
    document_tokens: int = 6000,
    question_tokens: int = 40,
    output_tokens: int = 100,
    seed: int = 0,
    arrivals: Arrivals = Arrivals(),
) -> Trace:
    """Long documents, many questions on each, in random order."""
    arguments = _checked(locals())

    def prompt(rng: np.random.Generator, i: int) -> np.ndarray:
        document = _tokens(_rng(seed, _FIXED, int(rng.integers(num_documents))), document_tokens)
        return np.concatenate([document, _tokens(rng, _about(rng, question_tokens))])

    return _single_turn("document-questions", arguments, prompt)


def target_sharing(
    num_requests: int = 1000,
    *,
    prompt_tokens: int = 1000,
    share: float = 0.5,
    output_tokens: int = 100,
    seed: int = 0,
    arrivals: Arrivals = Arrivals(),
) -> Trace:
    """Prompts of equal length of which the fraction `share` at the front is common to all."""
    arguments = _checked(locals())
    common = _tokens(_rng(seed, _FIXED), round(share * prompt_tokens))

    def prompt(rng: np.random.Generator, i: int) -> np.ndarray:
        return np.concatenate([common, _tokens(rng, prompt_tokens - len(common))])

    return _single_turn("target-sharing", arguments, prompt)


@dataclass
class _Session:
    index: int
    rng: np.random.Generator
    history: np.ndarray
    turns_left: int


def _sessions(
    kind: str,
    arguments: dict[str, Any],
    opening: Callable[[np.random.Generator], np.ndarray],
    turn_tokens: int,
    pause_s: float,
) -> Trace:
    """Growing contexts: each turn's prompt is all that was said before, and something new.

    Sessions overlap; a heap holds those that are live, ordered by the time of their next turn.
    """
    seed, arrivals, output = arguments["seed"], arguments["arrivals"], arguments["output_tokens"]

    def source() -> Iterator[TraceRequest]:
        starts = iter(zip(range(arguments["num_sessions"]), arrivals.times(_rng(seed, _FIXED + 1))))
        live: list[tuple[float, int, _Session]] = []
        coming = next(starts, None)
        while live or coming:
            while coming and (not live or coming[1] <= live[0][0]):
                index, now = coming
                rng = _rng(seed, index)
                turns = _about(rng, arguments["turns"])
                heapq.heappush(live, (now, index, _Session(index, rng, opening(rng), turns)))
                coming = next(starts, None)
            now, index, session = heapq.heappop(live)
            rng = session.rng
            prompt = np.concatenate([session.history, _tokens(rng, _about(rng, turn_tokens))])
            answer = _tokens(rng, _about(rng, output))
            yield TraceRequest(
                now, len(prompt), len(answer), token_ids=prompt, output_ids=answer, session=str(index)
            )
            session.turns_left -= 1
            if session.turns_left > 0:
                session.history = np.concatenate([prompt, answer])
                heapq.heappush(live, (now + float(rng.exponential(pause_s)), index, session))

    return _trace(kind, {**arguments, "arrivals": tuple(asdict(arrivals).values())}, source)


def chat(
    num_sessions: int = 200,
    *,
    turns: int = 5,
    system_tokens: int = 100,
    user_tokens: int = 80,
    output_tokens: int = 200,
    pause_s: float = 30.0,
    seed: int = 0,
    arrivals: Arrivals = Arrivals(),
) -> Trace:
    """Multi-turn chat under one system prompt; `turns` is the mean, pauses are exponential."""
    arguments = _checked(locals())
    common = _tokens(_rng(seed, _FIXED), system_tokens)
    return _sessions("chat", arguments, lambda rng: common, user_tokens, pause_s)


def agents(
    num_sessions: int = 50,
    *,
    turns: int = 30,
    tool_tokens: int = 4000,
    system_tokens: int = 1000,
    task_tokens: int = 300,
    result_tokens: int = 400,
    output_tokens: int = 80,
    pause_s: float = 3.0,
    seed: int = 0,
    arrivals: Arrivals = Arrivals(),
) -> Trace:
    """Tool-calling agents: common tools and system prompt, a task, then tool results that pile up."""
    arguments = _checked(locals())
    common = _tokens(_rng(seed, _FIXED), tool_tokens + system_tokens)

    def opening(rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([common, _tokens(rng, _about(rng, task_tokens))])

    return _sessions("agents", arguments, opening, result_tokens, pause_s)


GENERATORS: dict[str, Callable[..., Trace]] = {
    "system-prompt": system_prompt,
    "few-shot": few_shot,
    "document-questions": document_questions,
    "target-sharing": target_sharing,
    "chat": chat,
    "agents": agents,
}
