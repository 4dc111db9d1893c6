"""What a trace is: requests in order of arrival, opened anew for each pass, and parts of one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from pagedjax.paths import AnyPath
from pagedjax.sim.records import MOST_COUNT, RATES, in_range


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: Seconds from the start of the trace, never decreasing.
        num_input: Prompt tokens.
        num_output: Generated tokens.
        granule_ids: i64[n] chained ids: equal ids mean equal token prefixes up to that granule's end.
        token_ids: i32[num_input] of the prompt.
        output_ids: i32[num_output] of the answer.
        session: Conversation or agent session it belongs to; "" where the trace does not say.
        group: Category or user, where the trace names one; "" where it does not.
        wishes: What the request asks of the cache (`retention`, `ttl_s`, `cache_read`, `cache_write`, as in
            `SamplingParams`); None: nothing.
    """

    arrival_s: float
    num_input: int
    num_output: int
    granule_ids: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    output_ids: np.ndarray | None = None
    session: str = ""
    group: str = ""
    wishes: dict[str, Any] | None = None


@dataclass(frozen=True)
class Trace:
    """A named, re-iterable stream of requests.

    Attributes:
        name: For tables.
        format: Which reader or generator made it.
        granularity: Tokens per granule id; 1 for token ids, 0 where prefixes have no identity.
        tail_ids: A last, partly filled granule has an id too.
        source: Opens one pass.
        path: File it is read from; None for a generated one.
        spec: What generated it, in words that fix it (name, arguments, seed).
        timed: Its requests have times of their own; else all arrive at 0.
        notes: What a reader should know of how the file was understood, a sentence each.
    """

    name: str
    format: str
    granularity: int
    tail_ids: bool
    source: Callable[[], Iterator[TraceRequest]]
    path: AnyPath | None = None
    spec: str = ""
    timed: bool = True
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.source()

    def through(self, watch: Callable[[Iterable[TraceRequest]], Iterator[TraceRequest]]) -> Trace:
        """The same requests, watched as they pass: a progress bar, a count."""
        return replace(self, source=lambda: watch(self.source()))

    def head(self, num_requests: int) -> Trace:
        """The first `num_requests` requests."""
        if num_requests < 1:
            raise ValueError(f"num_requests={num_requests}: must be at least 1")
        return self._derived(f"head={num_requests}", lambda: islice(iter(self), num_requests))

    def held(self) -> Trace:
        """The same with its requests in memory, for who reads it many times."""
        requests = list(self)
        return replace(self, source=lambda: iter(requests))

    def between(self, from_s: float = 0.0, to_s: float = float("inf")) -> Trace:
        """Requests that arrive from `from_s` on and before `to_s`; `from_s` becomes time 0.

        Raises:
            ValueError: The window is empty, or the trace has no times.
        """
        if not 0 <= from_s < to_s:
            raise ValueError(f"from={from_s:g} s, to={to_s:g} s: must be 0 <= from < to; swap or widen them")
        if not self.timed:
            raise ValueError(f"{self.name}: has no times, so no window of them can be taken; take a head")

        def source() -> Iterator[TraceRequest]:
            for request in self:
                if request.arrival_s >= to_s:
                    return  # times do not decrease
                if request.arrival_s >= from_s:
                    yield replace(request, arrival_s=request.arrival_s - from_s)

        return self._derived(f"from={from_s:g},to={to_s:g}", source)

    def sampled(self, share: float, *, seed: int = 0) -> Trace:
        """A seeded share of the requests; where the trace names sessions, of whole sessions.

        Raises:
            ValueError: The share lies outside (0, 1].
        """
        if not 0 < share <= 1:
            raise ValueError(f"sample={share}: must be above 0 and at most 1; try 0.1")

        def source() -> Iterator[TraceRequest]:
            for number, request in enumerate(self):
                name = f"{seed}:s:{request.session}" if request.session else f"{seed}:n:{number}"
                drawn = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                if int.from_bytes(drawn, "little") < share * 2**64:
                    yield request

        return self._derived(f"sample={share},seed={seed}", source)

    def first_sessions(self, count: int) -> Trace:
        """Requests of the first `count` sessions.

        Raises:
            ValueError: `count` is below 1; on reading: a request names no session.
        """
        if count < 1:
            raise ValueError(f"sessions={count}: must be at least 1")

        def source() -> Iterator[TraceRequest]:
            seen: set[str] = set()
            for number, request in enumerate(self):
                if not request.session:
                    raise ValueError(
                        f"{self.name}: request {number} names no session; take a sample or a window instead"
                    )
                if request.session in seen or len(seen) < count:
                    seen.add(request.session)
                    yield request

        return self._derived(f"sessions={count}", source)

    def with_arrivals(self, rate: float, *, seed: int = 0, burst: int = 1) -> Trace:
        """The same requests at new times: bursts of `burst` requests, Poisson, `rate` requests a second.

        Length files carry no times of their own; PagedAttention §6.1 draws Poisson arrivals for them.
        """
        in_range("rate", rate, *RATES)
        in_range("burst", burst, 1, MOST_COUNT)

        def source() -> Iterator[TraceRequest]:
            rng = np.random.default_rng([seed, 0xA2217A1])
            now = 0.0
            for i, request in enumerate(self):
                if i % burst == 0:
                    now += float(rng.exponential(burst / rate))
                yield replace(request, arrival_s=now)

        return replace(self._derived(f"rate={rate},burst={burst},seed={seed}", source), timed=True)

    def faster(self, factor: float) -> Trace:
        """The same requests, `factor` times as many a second.

        Raises:
            ValueError: The factor is not positive, or the trace has no times.
        """
        in_range("rate_scale", factor, *RATES)
        if not self.timed:
            raise ValueError(f"{self.name}: has no times to scale; draw them with a rate")

        def source() -> Iterator[TraceRequest]:
            for request in self:
                yield replace(request, arrival_s=request.arrival_s / factor)

        return self._derived(f"rate_scale={factor}", source)

    def digest(self) -> str:
        """sha256 of the file as it lies on disk, or of the words that fix a generated trace.

        Of a part of a file (`head`, `between`, …): of the file's and of the words that name the part.
        """
        if self.path is None:
            return hashlib.sha256(self.spec.encode()).hexdigest()
        hasher = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
        if not self.spec:
            return hasher.hexdigest()
        return hashlib.sha256(f"{hasher.hexdigest()}{self.spec}".encode()).hexdigest()

    def _derived(self, what: str, source: Callable[[], Iterator[TraceRequest]]) -> Trace:
        return replace(self, name=f"{self.name}[{what}]", source=source, spec=f"{self.spec};{what}")
