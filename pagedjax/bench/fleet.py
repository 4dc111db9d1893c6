"""What a fleet costs beside its instances alone: the same requests, once through the fleet, once each by itself."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pagedjax.sim.fleet import InstanceSpec, run_fleet
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import Trace, TraceRequest

LIMIT = 1.3


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
        A row per router: requests, seconds of both sides, their ratio beside its limit, and bytes that a request adds
        to the memory that is still held when it has ended (its record), once half of the requests are through.
    """
    rows = list(trace)
    held = replace(trace, source=rows.__iter__)
    table = []
    for router in routers:
        note(f"fleet: {router}, {len(rows):,} requests, {len(specs)} instances")
        given = {**arguments, "router": router}
        times = [_round(held, rows, specs, given) for _ in range(rounds)]
        fleet_s, alone_s = (min(column) for column in zip(*times))
        table.append(
            {
                "router": router,
                "requests": len(rows),
                "fleet s": fleet_s,
                "instances alone s": alone_s,
                "ratio": fleet_s / alone_s,
                "limit": LIMIT,
                "kept B per request": _kept(held, len(rows), specs, given),
            }
        )
    return table


def _round(
    trace: Trace, rows: list[TraceRequest], specs: Sequence[InstanceSpec], given: dict[str, Any]
) -> tuple[float, float]:
    gc.collect()
    began = time.process_time()
    result = run_fleet(trace, specs, **given)
    fleet_s = time.process_time() - began
    own: dict[str, list[TraceRequest]] = {spec.name: [] for spec in specs}
    for record in sorted(result.records, key=lambda r: r.number):
        own[record.instance].append(replace(rows[record.number], arrival_s=record.times.arrival_s))
    alone_s = 0.0
    for spec in specs:
        if mine := own[spec.name]:
            part = replace(trace, source=mine.__iter__)
            gc.collect()
            began = time.process_time()
            simulate(part, spec.manager(None), spec.cost, spec.scheduler, max_model_len=spec.max_model_len)
            alone_s += time.process_time() - began
    return fleet_s, alone_s


def _kept(trace: Trace, count: int, specs: Sequence[InstanceSpec], given: dict[str, Any]) -> float:
    """Held bytes at the end of all requests less those at the end of half of them, per request between."""
    held = []
    for part in (count // 2, count):
        gc.collect()
        tracemalloc.start()
        result = run_fleet(trace.head(part), specs, **given)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del result
    return (held[1] - held[0]) / (count - count // 2)
