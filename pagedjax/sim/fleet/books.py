"""What a fleet's run was like: a record for each request, totals for each instance, load over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedjax.sim.metrics import RequestRecord, Summary, summarize
from pagedjax.sim.transfer import Transfer

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """One request that ended.

    Attributes:
        number: In order of arrival.
        times: As of one engine; `num_cached` counts device hits of its last life, fetched ones included.
        instance / decode_instance: Who computed its prompt and who its answer; "" where that is the same one.
        reason: Why the router chose it.
        expected: Prompt tokens that the router believed to be cached there; None where it knows nothing of caches.
        fetched: Tokens brought from memory of its own node, of others, and from disk.
        lives: Times it was routed: 1, and 1 more for each instance that died under it.
    """

    number: int
    times: RequestRecord
    instance: str
    decode_instance: str
    reason: str
    expected: int | None
    fetched: tuple[int, int, int]
    lives: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """One request that was refused: its number, when, and why ("too long", "ttft", "tbt", "no instance")."""

    number: int
    at_s: float
    reason: str


@dataclass
class InstanceTotals:
    """What one instance did.

    Attributes:
        name / role: As in its spec.
        routed: Requests sent to it, those of before a death included.
        prompt_tokens / cached_tokens: Of requests it admitted for the first time; taken from its cache, None where the
            trace says nothing of which prefixes are equal.
        computed_tokens: Fed in steps, again after preemptions too.
        steps / busy_s / alive_s: Steps run; seconds in steps; seconds from joining to its end.
        peak_queue: Most requests without a first token.
        sent_bytes / received_bytes: Of KV, over all links.
        plan_hash: As of `Simulation`.
    """

    name: str
    role: str
    routed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = 0
    computed_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    alive_s: float = 0.0
    peak_queue: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    plan_hash: str = ""

    @property
    def hit_by_token(self) -> float | None:
        known = self.cached_tokens is not None and self.prompt_tokens > 0
        return (self.cached_tokens or 0) / self.prompt_tokens if known else None


class Gaps:
    """Seconds between tokens, over all tokens after a first one, in bins a hundredth apart: memory stays flat."""

    _LOG = math.log(1.01)
    _LEAST_S = 1e-6
    _BINS = 3000  # up to 1e-6 * 1.01**3000, about 90 days
    _HELD = 1 << 15

    def __init__(self) -> None:
        self._counts = np.zeros(self._BINS, dtype=np.int64)
        self._seconds: list[np.ndarray] = []  # not in the bins yet, and how many tokens each
        self._tokens: list[int] = []
        self._held = 0

    @property
    def counts(self) -> np.ndarray:
        """i64[bins] of tokens."""
        if self._seconds:
            tokens = np.repeat(self._tokens, [len(each) for each in self._seconds])
            logs = (
                np.log(np.maximum(np.concatenate(self._seconds), self._LEAST_S) / self._LEAST_S) / self._LOG
            )
            np.add.at(self._counts, np.minimum(logs.astype(np.int64), self._BINS - 1), tokens)
            self._seconds, self._tokens, self._held = [], [], 0
        return self._counts

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens after so many seconds."""
        if tokens:
            place = int(math.log(max(seconds, self._LEAST_S) / self._LEAST_S) / self._LOG)
            self._counts[min(place, self._BINS - 1)] += tokens

    def add_each(self, seconds: np.ndarray, tokens: int) -> None:
        """The same for f64[n] seconds, `tokens` each."""
        self._seconds.append(seconds)
        self._tokens.append(tokens)
        self._held += len(seconds)
        if self._held > self._HELD:
            _ = self.counts

    def percentile(self, percent: float) -> float | None:
        """None where no token came after another; else within a hundredth."""
        counts = self.counts
        total = int(counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(counts), percent / 100 * total))
        return self._LEAST_S * math.exp((place + 0.5) * self._LOG)


class Level:
    """A count over time as means over equal bins, at most `most` of them: the bins double when they run out."""

    def __init__(self, most: int = 512, width_s: float = 1.0) -> None:
        self.width_s = width_s
        self.sums: list[float] = []
        self._most = most
        self._at = 0.0
        self._value = 0

    def set(self, value: int, now: float) -> None:
        """The count from `now` on."""
        if self._value:
            while now >= self._most * self.width_s:
                self.width_s *= 2
                sums = [*self.sums, 0.0] if len(self.sums) % 2 else self.sums
                self.sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
            first, last = int(self._at // self.width_s), int(now // self.width_s)
            self.sums += [0.0] * (last + 1 - len(self.sums))
            for place in range(first, last + 1):
                begin, end = max(self._at, place * self.width_s), min(now, (place + 1) * self.width_s)
                self.sums[place] += self._value * max(end - begin, 0.0)
        self._at, self._value = now, value

    def means(self) -> list[float]:
        """Mean of each bin; all but the last are `width_s` long."""
        return [total / self.width_s for total in self.sums]


@dataclass
class FleetResult:
    """What a fleet did.

    Attributes:
        records: Requests that ended, in order of their end.
        refused: Requests that were refused, in order.
        instances: Totals, in order of joining.
        links: Name → bytes moved.
        sent_bytes / received_bytes / lost_bytes: Of KV over all links; lost with instances that died.
        gaps: Seconds between tokens.
        under_way: Requests under way over time.
        end_s: When the last request ended.
        rates: (time, transfer, bytes per second from then on) of every change, where asked for.
    """

    records: list[FleetRecord] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    instances: list[InstanceTotals] = field(default_factory=list)
    links: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    lost_bytes: int = 0
    gaps: Gaps = field(default_factory=Gaps)
    under_way: Level = field(default_factory=Level)
    end_s: float = 0.0
    rates: list[tuple[float, Transfer, float]] | None = None

    def summary(self, *, ttft_limit_s: float = math.inf, tpot_limit_s: float = math.inf) -> Summary:
        """All ended requests as of one engine; goodput under the two limits."""
        return summarize(
            [record.times for record in self.records], ttft_limit_s=ttft_limit_s, tpot_limit_s=tpot_limit_s
        )

    @property
    def hit_by_token(self) -> float | None:
        """Prompt tokens taken from caches over those of all instances that compute prompts; None where unknown."""
        own = [t for t in self.instances if t.role != "decode"]
        prompts = sum(t.prompt_tokens for t in own)
        known = [t.cached_tokens for t in own if t.cached_tokens is not None]
        return sum(known) / prompts if prompts and len(known) == len(own) else None

    def imbalance(self, column: str = "busy_s") -> float | None:
        """Largest over mean of a total, over instances of a role, the worst role; by time alive, so 1 is even."""
        worst: float | None = None
        for role in dict.fromkeys(t.role for t in self.instances):
            shares = [
                getattr(t, column) / t.alive_s for t in self.instances if t.role == role and t.alive_s > 0
            ]
            if shares and sum(shares):
                ratio = max(shares) / (sum(shares) / len(shares))
                worst = ratio if worst is None else max(worst, ratio)
        return worst

    def latency_s(self) -> dict[int, float]:
        """Percentile → seconds from arrival to the last token."""
        values = [record.times.finished_s - record.times.arrival_s for record in self.records]
        return {p: float(np.percentile(values, p)) for p in PERCENTILES}

    def refusals(self) -> dict[str, int]:
        """Reason → requests."""
        return {r: sum(x.reason == r for x in self.refused) for r in sorted({x.reason for x in self.refused})}

    def to_dict(self, *, ttft_limit_s: float = math.inf, tpot_limit_s: float = math.inf) -> dict[str, Any]:
        """Everything but the records, as plain values; what is unknown is None."""
        out: dict[str, Any] = {"requests": len(self.records), "refused": self.refusals()}
        if self.records:
            summary = self.summary(ttft_limit_s=ttft_limit_s, tpot_limit_s=tpot_limit_s)
            out |= {
                "span_s": summary.span_s,
                "requests_per_s": summary.requests_per_s,
                "tokens_per_s": summary.tokens_per_s,
                "goodput_per_s": summary.goodput,
                "ttft_s": summary.ttft_s,
                "tpot_s": summary.tpot_s,
                "latency_s": self.latency_s(),
                "preemptions": summary.preemptions,
            }
        out |= {
            "tbt_s": {p: self.gaps.percentile(p) for p in PERCENTILES},
            "hit_by_token": self.hit_by_token,
            "imbalance_busy": self.imbalance(),
            "imbalance_requests": self.imbalance("routed"),
            "rerouted": sum(record.lives - 1 for record in self.records),
            "fetched_tokens": dict(
                zip(("own_memory", "other_memory", "disk"), _sums([r.fetched for r in self.records]))
            ),
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "lost_bytes": self.lost_bytes,
            "links": self.links,
            "under_way": {"bin_s": self.under_way.width_s, "mean": self.under_way.means()},
            "instances": [vars(t) | {"hit_by_token": t.hit_by_token} for t in self.instances],
        }
        return out


def _sums(rows: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows)) if rows else (0, 0, 0)
