"""Does it matter that a request lets go of its tail first?

Source: vLLM's design of prefix caching (blocks of a request are freed last first, so that a prefix outlives what
follows it). An ablation: LRU on the same trace, blocks of a request used tail first against head first. Cost: a minute.
    pagedjax experiment run release-order
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value
from pagedjax.lab.drawing import Series, at_each, curves, from_zero, label_axes, panels
from pagedjax.sim.replay import LRUStore, replay
from pagedjax.sim.trace import open_trace

FILES = {
    "conversation": "data/traces/mooncake_conversation_trace.jsonl.gz",
    "synthetic": "data/traces/mooncake_synthetic_trace.jsonl.gz",
}
CAPACITIES = (1_000, 3_000, 10_000, 30_000)
ORDERS = ("tail first", "head first")


class _HeadFirst(LRUStore):
    """The same with the order of one request's blocks turned: its head counts as used before its tail."""

    def touch(self, keys: np.ndarray) -> None:
        super().touch(keys[::-1])


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"trace": "synthetic", "capacity": 1_000, "head": 300, "order": o} for o in ORDERS]
    return [
        {"trace": t, "capacity": c, "head": 0, "order": o} for t in FILES for c in CAPACITIES for o in ORDERS
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace = open_trace(data / FILES[unit["trace"]])
    if unit["head"]:
        trace = trace.head(unit["head"])
    store = (LRUStore if unit["order"] == ORDERS[0] else _HeadFirst)(unit["capacity"])
    counts = replay(trace, trace.granularity, store)
    yield {
        "trace": unit["trace"],
        "capacity_blocks": unit["capacity"],
        "order": unit["order"],
        "hit_by_block": counts.by_block,
        "hit_by_token": counts.by_token,
    }


def _lost(trace: str, capacity: int) -> Value:
    def pick(rows: list[TableRow]) -> list[float]:
        own = {
            r["order"]: r["hit_by_block"]
            for r in rows
            if (r["trace"], r["capacity_blocks"]) == (trace, capacity)
        }
        return [own[ORDERS[0]] - own[ORDERS[1]]] if len(own) == 2 else []

    return pick


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hit ratio where a request's blocks are released tail first, and what head first loses of it, by capacity."""
    traces = list(dict.fromkeys(r["trace"] for r in rows))
    titles = [*(f"{t}: tail first" for t in traces), *(f"{t}: lost by head first" for t in traces)]
    made = panels(figure, titles, columns=len(traces), height=1.9)
    for i, axes in enumerate(made):
        trace = traces[i % len(traces)]
        found = {(r["capacity_blocks"], r["order"]): r["hit_by_block"] for r in rows if r["trace"] == trace}
        at = sorted({capacity for capacity, _ in found})
        tail = [found[c, ORDERS[0]] for c in at]
        y = tail if i < len(traces) else [t - found[c, ORDERS[1]] for c, t in zip(at, tail)]
        curves(axes, [Series("", at, y)], named=False)
        at_each(axes, at, base=10)
        label_axes(
            axes,
            "capacity, blocks" if i >= len(traces) else "",
            "hit ratio by block" if not i % len(traces) else "",
        )
    from_zero(*made)


EXPERIMENT = Experiment(
    name="release-order",
    question="Does it matter that a request lets go of its tail first?",
    kind="counted",
    definition=(
        "hit blocks over blocks, tails included, contiguous prefixes; LRU; only the order within a request differs"
    ),
    claims=tuple(
        Claim(
            f"{trace}, {capacity:,} blocks: tail first less head first",
            None,
            "an ablation",
            _lost(trace, capacity),
        )
        for trace in FILES
        for capacity in CAPACITIES
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
    note=(
        "head first, LRU evicts the head of the oldest chain and keeps its tail, which nothing can find any more: "
        "blocks that hold memory and no hits"
    ),
)
