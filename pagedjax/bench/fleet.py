"""What a fleet costs beside its instances alone: the same requests, once through the fleet, once each by itself."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pagedjax.sim.fleet import InstanceSpec, run_fleet
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import Trace, TraceRequest

LIMIT = 1.3
_PLACES = ("1/4", "1/2", "whole")


def run(
    trace: Trace,
    specs: Sequence[InstanceSpec],
    arguments: dict[str, Any],
    routers: Sequence[str],
    *,
    rounds: int,
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """CPU seconds of a fleet, and of `simulate` for each instance on the requests it was sent; best of rounds.

    Args:
        trace: Requests; they are read into memory before anything is timed.
        specs / arguments: As for `run_fleet`.
        routers: One row each.
        rounds: Both sides in turn, so often.
        note: Told what goes on.

    Returns:
        A row per router: requests, CPU seconds of both sides, their ratio beside its limit, the ratio by the clock on
        the wall, and the megabytes held when a quarter, half and all of the requests have come (traced in a run of its
        own; the requests themselves left out).
    """
    rows = list(trace)
    held = replace(trace, source=rows.__iter__)
    table = []
    for router in routers:
        note(f"fleet: {router}, {len(rows):,} requests, {len(specs)} instances")
        given = {**arguments, "router": router}
        times = [_round(held, rows, specs, given) for _ in range(rounds)]
        (fleet_s, alone_s), walls = (tuple(map(min, zip(*part))) for part in zip(*times))
        table.append(
            {
                "router": router,
                "requests": len(rows),
                "fleet s": fleet_s,
                "instances alone s": alone_s,
                "ratio": fleet_s / alone_s,
                "limit": LIMIT,
                "by the wall": walls[0] / walls[1],
                **{f"MB at {place}": size / 1e6 for place, size in _held(trace, rows, specs, given).items()},
            }
        )
    return table


class _Clock:
    """CPU and wall seconds since it was made."""

    def __init__(self) -> None:
        gc.collect()
        self._began = time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.process_time() - self._began[0], time.perf_counter() - self._began[1]


def _round(
    trace: Trace, rows: list[TraceRequest], specs: Sequence[InstanceSpec], given: dict[str, Any]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """CPU seconds of the fleet and of its instances alone, and the same by the wall."""
    clock = _Clock()
    result = run_fleet(trace, specs, **given)
    fleet_s, fleet_wall_s = clock.read()
    own: dict[str, list[TraceRequest]] = {spec.name: [] for spec in specs}
    for record in sorted(result.records, key=lambda r: r.number):
        own[record.instance].append(replace(rows[record.number], arrival_s=record.times.arrival_s))
    alone_s = alone_wall_s = 0.0
    for spec in specs:
        if mine := own[spec.name]:
            part = replace(trace, source=mine.__iter__)
            clock = _Clock()
            simulate(part, spec.manager(None), spec.cost, spec.scheduler, max_model_len=spec.max_model_len)
            cpu_s, wall_s = clock.read()
            alone_s, alone_wall_s = alone_s + cpu_s, alone_wall_s + wall_s
    return (fleet_s, alone_s), (fleet_wall_s, alone_wall_s)


def _held(
    trace: Trace, rows: list[TraceRequest], specs: Sequence[InstanceSpec], given: dict[str, Any]
) -> dict[str, int]:
    """Bytes held at each place of a run, what it will give back included."""
    held: dict[str, int] = {}
    stops = dict(zip((len(rows) // 4, len(rows) // 2, len(rows)), _PLACES))

    def source() -> Iterator[TraceRequest]:
        for number, request in enumerate([*rows, None]):
            if number in stops:
                gc.collect()
                held[stops[number]] = tracemalloc.get_traced_memory()[0]
            if request is not None:
                yield request

    gc.collect()
    tracemalloc.start()
    run_fleet(replace(trace, source=source), specs, **given)
    tracemalloc.stop()
    return held
