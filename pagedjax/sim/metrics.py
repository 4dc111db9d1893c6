"""What a run was like for its users: time to first token, time per token, latency, goodput."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's times on one clock, in seconds.

    Attributes:
        arrival_s / admitted_s / first_token_s / finished_s: When it came, first ran, first answered, ended.
        num_input / num_output: Tokens; output summed over samples.
        num_cached: Prompt tokens taken from the cache on first admission; None where the trace says nothing of which
            prefixes are equal, so that hits are unknown.
        num_preemptions: Times it lost its blocks.
        reason: Why it ended.
    """

    arrival_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    num_input: int
    num_output: int
    num_cached: int | None
    num_preemptions: int
    reason: str

    @property
    def queue_s(self) -> float:
        """Part of the time to the first token that it waited."""
        return self.admitted_s - self.arrival_s

    @property
    def prefill_s(self) -> float:
        """Part of the time to the first token that it ran."""
        return self.first_token_s - self.admitted_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.finished_s - self.first_token_s) / max(self.num_output - 1, 1)

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def normalized_s(self) -> float:
        """Latency over output tokens (PagedAttention §6.1)."""
        return (self.finished_s - self.arrival_s) / self.num_output


@dataclass(frozen=True)
class Summary:
    """A run in numbers; seconds, per second, shares.

    Attributes:
        requests: Finished ones.
        span_s: First arrival to last end.
        requests_per_s / tokens_per_s: Finished requests and output tokens over the span.
        goodput: Requests per second that met both limits given to `summarize`.
        normalized_s: Mean normalized latency.
        hit_by_token: Cached prompt tokens over prompt tokens; None where they are unknown.
        preemptions: Over all requests.
        ttft_s / queue_s / prefill_s / tpot_s / latency_s: Percentile → value.
    """

    requests: int
    span_s: float
    requests_per_s: float
    tokens_per_s: float
    goodput: float
    normalized_s: float
    hit_by_token: float | None
    preemptions: int
    ttft_s: dict[int, float]
    queue_s: dict[int, float]
    prefill_s: dict[int, float]
    tpot_s: dict[int, float]
    latency_s: dict[int, float]


_TIMES = ("ttft_s", "queue_s", "prefill_s", "tpot_s", "latency_s", "normalized_s")
_PERCENTILES = (50, 90, 99)


class Tally:
    """Adds records up without keeping them: six numbers of 8 bytes a request, and counts.

    Args:
        ttft_limit_s / tpot_limit_s: Limits of goodput.

    Attributes:
        requests / good: Records added; of these, within both limits.
        reasons: Why they ended → how many.
    """

    def __init__(self, *, ttft_limit_s: float = math.inf, tpot_limit_s: float = math.inf) -> None:
        self._limits = ttft_limit_s, tpot_limit_s
        self._times = {name: array("d") for name in _TIMES}
        self._first, self._last = math.inf, -math.inf
        self._input = self._output = self._preemptions = 0
        self._cached: int | None = 0  # None once a request's hits are unknown
        self.requests = self.good = 0
        self.reasons: Counter[str] = Counter()

    def add(self, record: RequestRecord) -> None:
        """Count one finished request."""
        for name, values in self._times.items():
            values.append(getattr(record, name))
        self._first = min(self._first, record.arrival_s)
        self._last = max(self._last, record.finished_s)
        self._input += record.num_input
        self._output += record.num_output
        known = self._cached is not None and record.num_cached is not None
        self._cached = (self._cached or 0) + (record.num_cached or 0) if known else None
        self._preemptions += record.num_preemptions
        self.requests += 1
        self.good += record.ttft_s <= self._limits[0] and record.tpot_s <= self._limits[1]
        self.reasons[record.reason] += 1

    def summary(self) -> Summary:
        """What was added, boiled down.

        Raises:
            ValueError: Nothing was added.
        """
        if not self.requests:
            raise ValueError("records: none given; run until a request ends")
        span = max(self._last - self._first, 1e-12)
        times = {name: np.frombuffer(values) for name, values in self._times.items()}
        shares = {
            name: {p: float(np.percentile(values, p)) for p in _PERCENTILES}
            for name, values in times.items()
            if name != "normalized_s"
        }
        return Summary(
            requests=self.requests,
            span_s=span,
            requests_per_s=self.requests / span,
            tokens_per_s=self._output / span,
            goodput=self.good / span,
            normalized_s=float(np.mean(times["normalized_s"])),
            hit_by_token=None if self._cached is None else self._cached / self._input,
            preemptions=self._preemptions,
            **shares,
        )


def summarize(
    records: Sequence[RequestRecord],
    *,
    ttft_limit_s: float = float("inf"),
    tpot_limit_s: float = float("inf"),
) -> Summary:
    """Boil a run down.

    Args:
        records: Finished requests, at least one.
        ttft_limit_s / tpot_limit_s: Limits of goodput.

    Raises:
        ValueError: No record.
    """
    tally = Tally(ttft_limit_s=ttft_limit_s, tpot_limit_s=tpot_limit_s)
    for record in records:
        tally.add(record)
    return tally.summary()
