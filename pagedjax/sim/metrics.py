"""What a run was like for its users: time to first token, time per token, latency, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RequestRecord:
    """One request's times on one clock, in seconds.

    Attributes:
        arrival_s / admitted_s / first_token_s / finished_s: When it came, first ran, first answered, ended.
        num_input / num_output: Tokens; output summed over samples.
        num_cached: Prompt tokens taken from the cache on first admission.
        num_preemptions: Times it lost its blocks.
        reason: Why it ended.
    """

    arrival_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    num_input: int
    num_output: int
    num_cached: int
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
        hit_by_token: Cached prompt tokens over prompt tokens.
        preemptions: Over all requests.
        ttft_s / queue_s / prefill_s / tpot_s: Percentile → value.
    """

    requests: int
    span_s: float
    requests_per_s: float
    tokens_per_s: float
    goodput: float
    normalized_s: float
    hit_by_token: float
    preemptions: int
    ttft_s: dict[int, float]
    queue_s: dict[int, float]
    prefill_s: dict[int, float]
    tpot_s: dict[int, float]


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
    if not records:
        raise ValueError("records: none given; run until a request ends")
    span = max(r.finished_s for r in records) - min(r.arrival_s for r in records)
    span = max(span, 1e-12)
    good = sum(r.ttft_s <= ttft_limit_s and r.tpot_s <= tpot_limit_s for r in records)

    def percentiles(name: str) -> dict[int, float]:
        values = np.array([getattr(r, name) for r in records])
        return {p: float(np.percentile(values, p)) for p in (50, 90, 99)}

    return Summary(
        requests=len(records),
        span_s=span,
        requests_per_s=len(records) / span,
        tokens_per_s=sum(r.num_output for r in records) / span,
        goodput=good / span,
        normalized_s=float(np.mean([r.normalized_s for r in records])),
        hit_by_token=sum(r.num_cached for r in records) / sum(r.num_input for r in records),
        preemptions=sum(r.num_preemptions for r in records),
        ttft_s=percentiles("ttft_s"),
        queue_s=percentiles("queue_s"),
        prefill_s=percentiles("prefill_s"),
        tpot_s=percentiles("tpot_s"),
    )
