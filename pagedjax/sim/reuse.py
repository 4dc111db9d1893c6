"""When and by whom blocks are used again: hits over time windows and by group, and the time between two uses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pagedjax.sim.curve import lru_hits
from pagedjax.sim.references import FIRST, References, leading_hits, load_references, mirror, previous_touches
from pagedjax.sim.replay import Insert, Progress
from pagedjax.sim.trace import Trace, TraceRequest


@dataclass(frozen=True)
class TimedReferences:
    """Block references with what windows need: 8 bytes more for each request.

    Attributes:
        refs: The references, which know their groups.
        arrival_s: f64[requests with references] when each came.
    """

    refs: References
    arrival_s: np.ndarray


@dataclass(frozen=True)
class TracePart:
    """Hits of some of the requests.

    Attributes:
        name: A group's, or the window's start in seconds.
        requests / tokens: Theirs; prompts without a whole block of identity are left out.
        hit_tokens: Capacity → tokens found at it; `math.inf` never evicts.
    """

    name: str
    requests: int
    tokens: int
    hit_tokens: dict[float, int]


def load_timed(
    trace: Trace, block_size: int, *, insert: Insert = "prompt", progress: Progress = iter
) -> TimedReferences:
    """Read a trace once, with arrivals.

    Raises:
        ValueError: As `load_references`.
    """
    arrivals = array("d")
    came = 0.0

    def watched(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        nonlocal came
        for request in progress(requests):
            came = request.arrival_s
            yield request

    def counted(references: int) -> None:
        if references:
            arrivals.append(came)

    refs = load_references(trace, block_size, insert=insert, progress=watched, on_request=counted)
    return TimedReferences(refs, np.array(arrivals))


def parts(
    timed: TimedReferences, capacities: Iterable[float] = (math.inf,), *, window_s: float = 0.0
) -> list[TracePart]:
    """Hits by group, or with `window_s` by time window; the cache is one for all.

    Args:
        timed: A trace's references.
        capacities: Blocks of an LRU cache.
        window_s: Length of a window; 0: by group.

    Raises:
        ValueError: A window that is negative or has no end.
    """
    if not 0 <= window_s < math.inf:
        raise ValueError(f"window={window_s}: must be a finite number of seconds above 0; try 3600")
    refs = timed.refs
    if window_s:
        part_of = timed.arrival_s // window_s
    else:
        part_of = np.zeros(len(timed.arrival_s), np.uint8) if refs.groups is None else refs.groups
    kept, index = np.unique(part_of, return_inverse=True)  # windows in which nobody comes take no room
    count = len(kept)
    requests, tokens = np.bincount(index, minlength=count), np.zeros(count, np.int64)
    found: dict[float, np.ndarray] = {}
    for capacity in capacities:
        found[capacity] = np.zeros(count, np.int64)
        tokens[:] = 0
        at = 0
        for start, end, hit in lru_hits(refs, capacity):
            leading = leading_hits(refs, start, end, hit)
            own = index[at : at + len(leading.num_input)]
            at += len(own)
            np.add.at(found[capacity], own, leading.hit_tokens)
            np.add.at(tokens, own, leading.num_input)
    groups = refs.group_names or ("",)
    names = [f"{window_s * k:.10g}" if window_s else groups[k] for k in kept.tolist()]
    return [
        TracePart(names[i], int(requests[i]), int(tokens[i]), {c: int(f[i]) for c, f in found.items()})
        for i in range(count)
        if requests[i]
    ]


def reuse_times(timed: TimedReferences) -> np.ndarray:
    """f64[m] ascending: seconds since a block's last use, of every use that is not its first."""
    refs = timed.refs
    starts = np.flatnonzero(refs.flags & FIRST)
    previous = previous_touches(refs)
    times = []
    for start, end in refs.chunks():
        places, begins = mirror(refs.flags[start:end] & FIRST)
        last = previous[start:end][places].astype(np.int64)
        again = last >= 0
        own = np.searchsorted(starts, begins[again] + start, side="right") - 1
        before = np.searchsorted(starts, last[again], side="right") - 1
        times.append(timed.arrival_s[own] - timed.arrival_s[before])
    found = np.concatenate(times) if times else np.empty(0)
    found.sort()
    return found
