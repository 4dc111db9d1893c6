"""The highest rate of arrivals at which a simulated engine still keeps its promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedjax.sim.metrics import RequestRecord
from pagedjax.sim.simulator import Simulation

_FINEST = 1.005  # ratio of two rates that are not told apart
_BEYOND = 4  # finer steps tried above the last rate that keeps it: kept and broken may alternate


class Broken(Exception):
    """So many requests missed the promise that the rest cannot mend it."""


class Watch:
    """Counts requests that miss a promise, and stops the run once too many have.

    Args:
        total: Requests of the trace.
        ttft_limit_s / tpot_limit_s: The promise.
        share: Of the requests that must get it.
    """

    def __init__(self, total: int, ttft_limit_s: float, tpot_limit_s: float, share: float) -> None:
        self._limits = ttft_limit_s, tpot_limit_s
        self._total = total
        self._share = share
        self._missed = 0
        self.seen = 0

    def __call__(self, record: RequestRecord) -> None:
        """Count one.

        Raises:
            Broken: The promise is lost.
        """
        self.seen += 1
        self._missed += record.ttft_s > self._limits[0] or record.tpot_s > self._limits[1]
        if self._total - self._missed < self._share * self._total:
            raise Broken

    def kept(self) -> bool:
        """Whether enough requests got it; those that never ended did not."""
        return self.seen - self._missed >= self._share * self._total


@dataclass
class FoundRate:
    """What a search found.

    Attributes:
        factor: Largest factor of the rate that keeps the promise; 0 where none does, infinite where all do.
        tried: (factor, kept) of every run, in order.
    """

    factor: float
    tried: list[tuple[float, bool]] = field(default_factory=list)


def find_rate(
    run: Callable[[float, Watch], Simulation],
    total: int,
    *,
    ttft_limit_s: float,
    tpot_limit_s: float,
    share: float = 0.9,
    least: float = 1e-3,
    most: float = 1e3,
) -> FoundRate:
    """Search the highest factor of a trace's rate at which a share of its requests gets what was promised.

    The factor is doubled or halved until the promise breaks between two of them, then halved in between (as a
    ratio) down to half a percent; because waiting is no smooth function of the rate, a few steps above are tried too.

    Args:
        run: (factor, what gets each record) → a simulation of the trace at so many times its rate.
        total: Requests of the trace.
        ttft_limit_s / tpot_limit_s: Seconds promised to the first token, and per token after it.
        share: Of the requests that must get both.
        least / most: Where the search ends.

    Raises:
        ValueError: No limit, no request, or a share outside (0, 1].
    """
    if min(ttft_limit_s, tpot_limit_s) == float("inf") or not total or not 0 < share <= 1:
        raise ValueError(
            f"find_rate: ttft={ttft_limit_s}, tpot={tpot_limit_s}, share={share}, {total} requests: must have both "
            "limits, requests, and a share above 0 and at most 1"
        )
    found = FoundRate(0.0)

    def keeps(factor: float) -> bool:
        watch = Watch(total, ttft_limit_s, tpot_limit_s, share)
        try:
            run(factor, watch)
            kept = watch.kept()
        except Broken:
            kept = False
        found.tried.append((factor, kept))
        return kept

    low, high = (1.0, 2.0) if keeps(1.0) else (0.5, 1.0)
    while low < 1 and low >= least and not keeps(low):
        low, high = low / 2, low
    while low >= 1 and high <= most and keeps(high):
        low, high = high, high * 2
    if low < least or high > most:
        found.factor = 0.0 if low < least else float("inf")
        return found
    while high / low > _FINEST:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    beyond, step = low, 0
    while step < _BEYOND:
        beyond, step = beyond * _FINEST, step + 1
        if keeps(beyond):
            low, step = beyond, 0
    found.factor = low
    return found
