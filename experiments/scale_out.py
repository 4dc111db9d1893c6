"""What happens to hits and waiting when an instance joins, and when one dies?

Source: none; consistent hashing promises that a change moves 1 / N of the keys (Karger et al., STOC'97). Simulated, a
chat over 4 instances: a fifth joins, and one of the first four dies. Cost: two minutes.
    pagedjax experiment run scale-out
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.lab import Claim, Experiment, TableRow, Unit
from pagedjax.lab.drawing import Series, curves, from_zero, label_axes, panels
from pagedjax.sim.fleet import Change, run_fleet
from pagedjax.sim.synth import Arrivals, chat

from ._fleet import LLAMA, instances

ROUTERS = ("round-robin", "session", "prefix-hash", "cache-aware", "kv-overlap", "preble")
SPAN_S, BIN_S = 240.0, 10.0
JOINS_S, DIES_S = 80.0, 160.0


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"router": "session", "instances": 2, "span_s": 12.0, "rate": 1.0, "seed": seed}]
    return [
        {"router": router, "instances": 4, "span_s": SPAN_S, "rate": 1.25, "seed": seed} for router in ROUTERS
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    span, count = unit["span_s"], unit["instances"]
    joins, dies = span * JOINS_S / SPAN_S, span * DIES_S / SPAN_S
    turns = {"turns": 6, "system_tokens": 200, "user_tokens": 1500, "output_tokens": 200, "pause_s": 8.0}
    trace = chat(int(unit["rate"] * span), **turns, seed=unit["seed"], arrivals=Arrivals(unit["rate"]))
    result = run_fleet(
        trace,
        instances(count, 64),
        router=unit["router"],
        seed=unit["seed"],
        changes=[
            Change(joins, "join", instance=instances(1, 64, name="new")[0]),
            Change(dies, "die", "h0"),
        ],
    )
    width = span * BIN_S / SPAN_S
    for number in range(round(span / width)):
        own = [r for r in result.records if number * width <= r.times.arrival_s < (number + 1) * width]
        if own:
            yield {
                "router": unit["router"],
                "seed": unit["seed"],
                "second": (number + 0.5) * width,
                "requests": len(own),
                "hit_by_token": sum(r.times.num_cached for r in own) / sum(r.times.num_input for r in own),
                "ttft_p90_s": float(np.percentile([r.times.ttft_s for r in own], 90)),
                "new_share": sum(r.instance == "new0" for r in own) / len(own),
                "rerouted": sum(r.lives - 1 for r in own),
            }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """A fleet that an instance joins and another dies in: hits, waiting, and the share that the new one gets."""
    columns = {
        "hit_by_token": "hit rate",
        "ttft_p90_s": "p90 TTFT, s",
        "new_share": "share of requests at the new one",
    }
    names = list(dict.fromkeys(r["router"] for r in rows))
    last = max(r["second"] for r in rows)
    made = panels(figure, list(columns.values()), columns=1, width=7.0, height=2.0)
    for column, axes in zip(columns, made):
        own = [[r for r in rows if r["router"] == name and r[column] is not None] for name in names]
        curves(
            axes, [Series(n, [r["second"] for r in o], [r[column] for r in o]) for n, o in zip(names, own)]
        )
        for part, word in ((JOINS_S / SPAN_S, "joins"), (DIES_S / SPAN_S, "dies")):
            axes.axvline(part * last, color="#777777", linewidth=0.6, gid="rule")
            if axes is made[0]:
                axes.annotate(
                    word, (part * last, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 0),
                    textcoords="offset points", fontsize=7, va="bottom",
                )  # fmt: skip
    from_zero(*made)
    label_axes(made[-1], "second")


def _change(router: str, column: str, before: float, after: float) -> Any:
    """Mean of a column over 40 s after a moment, over that of the 40 s before it."""

    def pick(rows: list[TableRow]) -> list[float]:
        own = [r for r in rows if r["router"] == router]
        if len(own) < SPAN_S / BIN_S:
            return []
        means = [
            float(np.mean([r[column] for r in own if low <= r["second"] < high]))
            for low, high in ((before - 40, before), (after, after + 40))
        ]
        return [means[1] / means[0]]

    return pick


EXPERIMENT = Experiment(
    name="scale-out",
    question="What happens to hits and waiting when an instance joins, and when one dies?",
    kind="simulated",
    definition=(
        f"{LLAMA}; a chat of 6 turns on average, 1.25 begin a second, 1,500 tokens a turn, block size 64; 4 "
        "instances, a fifth joins after 80 s, one of the four dies after 160 s; by time of arrival, in "
        "bins of 10 s"
    ),
    claims=tuple(
        Claim(
            f"hit rate, 40 s after over 40 s before {word}, {router}",
            None,
            "our setting",
            _change(router, "hit_by_token", at, at),
        )
        for word, at in (("the join", JOINS_S), ("the death", DIES_S))
        for router in ("session", "cache-aware", "kv-overlap")
    ),
    units=_units,
    run=_run,
    plot=_plot,
)
