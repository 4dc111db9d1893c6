"""The highest rate of arrivals at which a simulated engine still keeps its promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedjax.sim.metrics import RequestRecord
from pagedjax.sim.simulator import Simulation

_FINEST = 1.005  # ratio of two rates that are not told apart
_BEYOND = 4  # finer steps tried above the last rate that keeps it: kept and broken may alternate
LEAST, MOST = 2.0**-10, 2.0**10  # factors of the rate between which is searched
MOST_RUNS = 100  # and no more runs than these: the finer steps may be kept again and again


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

    def anew(self) -> Watch:
        """The same of another run."""
        return Watch(self._total, *self._limits, self._share)

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


class _Ended(Exception):
    """All runs are used up."""


@dataclass
class FoundRate:
    """What a search found.

    Attributes:
        factor: Largest factor of the rate that was seen to keep the promise; 0 where none tried does.
        bound: What ended the search before a rate that keeps the promise lay beside one that breaks it: "least" or
            "most" factor, or "runs"; "" where nothing did.
        tried: (factor, kept) of every run, in order.
    """

    factor: float
    bound: str = ""
    tried: list[tuple[float, bool]] = field(default_factory=list)


def find_rate(
    run: Callable[[float, Watch], Simulation],
    total: int,
    *,
    ttft_limit_s: float,
    tpot_limit_s: float,
    share: float = 0.9,
    least: float = LEAST,
    most: float = MOST,
    runs: int = MOST_RUNS,
) -> FoundRate:
    """Search the highest factor of a trace's rate at which a share of its requests gets what was promised.

    The factor is doubled or halved until the promise breaks between two of them, then halved in between (as a
    ratio) down to half a percent; because waiting is no smooth function of the rate, a few steps above are tried too.

    Args:
        run: (factor, what gets each record) → a simulation of the trace at so many times its rate.
        total: Requests of the trace.
        ttft_limit_s / tpot_limit_s: Seconds promised to the first token, and per token after it.
        share: Of the requests that must get both.
        least / most: Factors that are not left: no run is slower or faster.
        runs: No more than so many.

    Raises:
        ValueError: No limit, no request, a share outside (0, 1], or bounds without a factor of 1 or a run between.
    """
    if min(ttft_limit_s, tpot_limit_s) == float("inf") or not total or not 0 < share <= 1:
        raise ValueError(
            f"find_rate: ttft={ttft_limit_s}, tpot={tpot_limit_s}, share={share}, {total} requests: must have both "
            "limits, requests, and a share above 0 and at most 1"
        )
    if not (0 < least <= 1 <= most < float("inf") and runs >= 1):
        raise ValueError(
            f"find_rate: least={least}, most={most}, runs={runs}: must be factors around 1, and at least one run"
        )
    search = _Search(run, Watch(total, ttft_limit_s, tpot_limit_s, share), runs)
    found = search.found
    try:
        low, high = _bracket(search, least, most)
        if not found.bound:
            _narrow(search, low, high, most)
    except _Ended:
        found.bound = "runs"
    found.factor = max((factor for factor, kept in found.tried if kept), default=0.0)
    return found


class _Search:
    """Runs, each with a count of its own of those that miss the promise."""

    def __init__(self, run: Callable[[float, Watch], Simulation], watch: Watch, runs: int) -> None:
        self.found = FoundRate(0.0)
        self._run, self._watch, self._runs = run, watch, runs

    def keeps(self, factor: float) -> bool:
        """Whether the promise is kept at so many times the rate.

        Raises:
            _Ended: That would be a run too many.
        """
        if len(self.found.tried) == self._runs:
            raise _Ended
        watch = self._watch.anew()
        try:
            self._run(factor, watch)
            kept = watch.kept()
        except Broken:
            kept = False
        self.found.tried.append((factor, kept))
        return kept


def _bracket(search: _Search, least: float, most: float) -> tuple[float, float]:
    """A factor that keeps the promise and one above it that does not; else the bound that was met is noted."""
    low = high = 1.0
    if search.keeps(1.0):
        while low < most:
            high = min(low * 2, most)
            if not search.keeps(high):
                return low, high
            low = high
        search.found.bound = "most"
        return low, high
    while high > least:
        low = max(high / 2, least)
        if search.keeps(low):
            return low, high
        high = low
    search.found.bound = "least"
    return low, high


def _narrow(search: _Search, low: float, high: float, most: float) -> None:
    """Halve between the two, as a ratio; then a few finer steps above the last that keeps it."""
    while high / low > _FINEST:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if search.keeps(middle) else (low, middle)
    beyond, step = low * _FINEST, 0
    while step < _BEYOND and beyond <= most:
        step = 0 if search.keeps(beyond) else step + 1
        beyond *= _FINEST
    if step < _BEYOND:
        search.found.bound = "most"
