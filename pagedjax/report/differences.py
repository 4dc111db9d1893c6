"""Where two runs first differ, by how much their scores parted, and whether rounding can explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from pagedjax.cache.rules import KV_BYTES
from pagedjax.engine.request import RequestOutput
from pagedjax.engine.step import StepPlan, StepRecord
from pagedjax.report.replay import Record, RecordError

LIKELIEST = 20  # tokens of each place whose scores are compared
_EIGHT_BITS = [name for name, size in KV_BYTES.items() if size == 1]
# How far two programs' log-probabilities of one token may lie apart and still be the same sums in another order: some
# thousand roundings of numbers of the size of logits. Faults that were planted part them by far more.
ROUNDING = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5, **dict.fromkeys(_EIGHT_BITS, 0.5)}


@dataclass(frozen=True)
class TokenOrigin:
    """How a token came to be drawn.

    Attributes:
        program: The compiled shapes that computed it.
        rows, tokens: Of the step.
    """

    program: str
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"program of {self.program}, a step of {self.rows} rows and {self.tokens} tokens"


@dataclass
class Told:
    """A run: places by (request, sample), in the order of their tokens; what the requests got."""

    name: str
    places: dict[tuple[str, int], list[TokenOrigin]] = field(default_factory=dict)
    outputs: list[RequestOutput] = field(default_factory=list)

    def hook(self, program: Callable[[StepPlan[Any]], str]) -> Callable[[StepRecord], None]:
        """An engine's `on_step` that takes the places down.

        Args:
            program: Names what computes a plan.
        """

        def step(record: StepRecord) -> None:
            plan = record.plan
            place = TokenOrigin(program(plan), len(plan.rows), plan.num_tokens)
            for row in plan.rows:
                for seq in row.samples:
                    self.places.setdefault((seq.request_id, seq.index), []).append(place)

        return step


@dataclass(frozen=True)
class Difference:
    """The first token of a sample that two runs drew differently.

    Attributes:
        prompt, sample, position: Number of the prompt, of its sample, and of the token in the answer; all from 0.
        tokens: What each drew; None: it had ended.
        gaps: Log-probability of the likeliest token less that of the second, of each.
        swing: How far apart the runs lie on the two tokens' difference; None: one is not among the likeliest.
        noise: Largest difference of a token's log-probability at places before, where both drew alike; None: no place.
        cached: Prompt tokens that each took from the cache.
        preemptions: Of each.
        places: How each came to be drawn; None: it had ended.
        limit: The swing that rounding can explain.
    """

    prompt: int
    sample: int
    position: int
    tokens: tuple[int | None, int | None]
    gaps: tuple[float | None, float | None]
    swing: float | None
    noise: float | None
    cached: tuple[int, int]
    preemptions: tuple[int, int]
    places: tuple[TokenOrigin | None, TokenOrigin | None]
    limit: float

    @property
    def rounding(self) -> bool:
        """Whether it explains the difference: the runs part on the two tokens by no more than it can part them."""
        return self.swing is not None and self.swing <= self.limit


def compare(a: Told, b: Told, dtypes: Sequence[str]) -> Iterator[Difference | None]:
    """For each sample of each prompt the first token that differs, or None.

    Args:
        a, b: The same prompts with the same sampling, `logprobs=LIKELIEST`.
        dtypes: Of weights and keys of both; the coarsest counts.
    """
    limit = max(ROUNDING[name] for name in dtypes)
    for number, (left, right) in enumerate(zip(a.outputs, b.outputs, strict=True)):
        for one, other in zip(left.outputs, right.outputs, strict=True):
            pairs = zip_longest(one.token_ids, other.token_ids)
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
            if at is None:
                yield None
                continue
            tops = [[_scores(d.top) for d in sample.details or ()] for sample in (one, other)]
            drawn = tuple(s.token_ids[at] if at < len(s.token_ids) else None for s in (one, other))
            here = tuple(t[at] if at < len(t) else None for t in tops)
            places = tuple(
                told.places.get((out.request_id, sample.index), [])[at:][:1]
                for told, out, sample in ((a, left, one), (b, right, other))
            )
            yield Difference(
                number,
                one.index,
                at,
                (drawn[0], drawn[1]),
                (_gap(here[0]), _gap(here[1])),
                _swing(here[0], here[1], drawn[0], drawn[1]),
                _noise(tops[0][:at], tops[1][:at]),
                (left.num_cached_tokens, right.num_cached_tokens),
                (left.num_preemptions, right.num_preemptions),
                (next(iter(places[0]), None), next(iter(places[1]), None)),
                limit,
            )


def _scores(top: Iterable[Any]) -> dict[int, float]:
    return {one.token_id: one.logprob for one in top}


def _gap(scores: Mapping[int, float] | None) -> float | None:
    if scores is None or len(scores) < 2:
        return None
    best, second = sorted(scores.values(), reverse=True)[:2]
    return best - second


def _swing(
    a: Mapping[int, float] | None, b: Mapping[int, float] | None, x: int | None, y: int | None
) -> float | None:
    if a is None or b is None or x is None or y is None or not {x, y} <= a.keys() & b.keys():
        return None
    return abs((a[x] - a[y]) - (b[x] - b[y]))


def _noise(a: list[dict[int, float]], b: list[dict[int, float]]) -> float | None:
    apart = [abs(left[t] - right[t]) for left, right in zip(a, b) for t in left.keys() & right.keys()]
    return max(apart, default=None)


@dataclass(frozen=True)
class StepDifference:
    """The first step that two records tell differently.

    Attributes:
        step: Its number.
        rows: (request, sample, first token fed, tokens) of rows that only one of them has.
        hits: Request → prompt tokens taken from the cache, of those admitted in this step.
        ended: Of each: "" where it tells this step, "closed" where the run had ended before, "cut" where the record
            does not say so.
    """

    step: int
    rows: tuple[list[tuple[str, int, int, int]], list[tuple[str, int, int, int]]]
    hits: tuple[dict[str, int], dict[str, int]]
    ended: tuple[str, str] = ("", "")


_Step = tuple[int, frozenset[Any], dict[str, int]]


@dataclass
class _Steps:
    """A record, read to some step: the requests that it told of so far, and whether its run was closed."""

    record: Record
    requests: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    closed: bool = False

    def __iter__(self) -> Iterator[_Step]:
        """(number, rows, hits) of every step, those that a frame tells together one by one."""
        live: dict[int, list[Any]] = {}  # sequence → request, sample, next token to feed
        for frame in self.record:
            kind = frame["frame"]
            try:
                if kind == "run" and (
                    frame.get("fleet") or frame.get("kind") not in ("measured", "simulated")
                ):
                    what = "a fleet" if frame.get("fleet") else repr(frame.get("kind"))
                    raise RecordError(
                        f"{self.record.path}: tells of {what}: must be the record of one engine's run; "
                        "give what run, simulate or generate --record wrote"
                    )
                if kind == "add":
                    self.requests[frame["id"]] = tuple(frame.get(part) for part in ("prompt", "max_new", "n"))
                    self.new.append(frame["id"])
                elif kind == "step":
                    told = {}
                    for seq, request, sample, start, tokens, _ in frame.get("rows", ()):
                        live[seq] = [request, sample, start + tokens]
                        told[seq] = (request, sample, start, tokens)
                    for seq in frame.get("paused", ()):
                        live.pop(seq, None)
                    hits = {request: hit for request, hit, _, _ in frame.get("admitted", ())}
                    yield frame["n"], frozenset({**_next(live, told), **told}.values()), hits
                elif kind == "quiet":
                    for more in range(frame["count"]):
                        yield frame["n"] + more, frozenset(_next(live, {}).values()), {}
                elif kind == "end":
                    for seq in frame["seqs"]:
                        live.pop(seq, None)
                elif kind == "close":
                    self.closed = True
            except (KeyError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, RecordError):
                    raise
                raise RecordError(
                    f"{self.record.path}: a {kind} frame does not follow from those before it "
                    f"({type(error).__name__}: {error}); was the file edited?"
                ) from None


def compare_records(a: Record, b: Record) -> StepDifference | None:
    """The first step whose rows or hits differ; None: the records tell the same steps.

    Raises:
        RecordError: A file is no record, or of a fleet or an exploration, which have no steps of one engine; or the
            two tell of other requests.
    """
    sides = _Steps(a), _Steps(b)
    nothing: _Step = (0, frozenset(), {})
    for number, (left, right) in enumerate(zip_longest(*sides, fillvalue=nothing), 1):
        _check_same_requests(*sides)
        if left[1:] != right[1:] or (left is nothing) != (right is nothing):
            if not sides[0].requests.keys() & sides[1].requests.keys() and all(s.requests for s in sides):
                names = [", ".join(list(s.requests)[:3]) for s in sides]
                raise RecordError(
                    f"{a.path}, {b.path}: tell of requests {names[0]} and {names[1]}: must be runs of the same "
                    "requests; record both from one trace or one list of prompts"
                )
            only = sorted(left[1] - right[1]), sorted(right[1] - left[1])
            ended = tuple(
                "" if told is not nothing else "closed" if side.closed else "cut"
                for told, side in zip((left, right), sides, strict=True)
            )
            return StepDifference(
                left[0] or right[0] or number, only, (left[2], right[2]), (ended[0], ended[1])
            )
    return None


def _check_same_requests(one: _Steps, other: _Steps) -> None:
    """Of requests told of since the last step: where both name one, it must be of the same lengths."""
    for name in (*one.new, *other.new):
        here, there = one.requests.get(name), other.requests.get(name)
        if here is not None and there is not None and here != there:
            told = [f"{prompt} + {most} tokens, {n} samples" for prompt, most, n in (here, there)]
            raise RecordError(
                f"{one.record.path}, {other.record.path}: request {name} is of {told[0]} and of {told[1]}: must be "
                "runs of the same requests; record both from one trace or one list of prompts"
            )
    one.new.clear()
    other.new.clear()


def _next(live: dict[int, list[Any]], told: Mapping[int, Any]) -> dict[int, tuple[Any, ...]]:
    """The rows that go on by one token without being told."""
    rows = {}
    for seq, held in live.items():
        if seq not in told:
            rows[seq] = (held[0], held[1], held[2], 1)
            held[2] += 1
    return rows
