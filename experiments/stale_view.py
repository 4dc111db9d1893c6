"""How much does a router lose whose view of the caches is old?

Source: none; routers that read cache events (Dynamo, llm-d, production-stack) do not print what a delay costs.
Simulated, Mooncake's conversation trace and a hot chat. Cost: three minutes.
    pagedjax experiment run stale-view
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, ratio
from pagedjax.lab.drawing import colour, curves, from_zero, label_axes, mean_curve, panels, short
from pagedjax.sim.fleet import Arrivals as Times
from pagedjax.sim.fleet import run_fleet
from pagedjax.sim.synth import Arrivals, chat

from ._fleet import CONVERSATION, LLAMA, instances, mooncake, row

ROUTERS = ("kv-overlap", "load-aware", "mooncake")
DELAYS = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)
WORKLOADS = ("conversation", "chat")


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [
            {
                "workload": "chat",
                "router": "load-aware",
                "knowledge": "exact",
                "delay_s": d,
                "requests": 30,
                "seed": seed,
            }
            for d in (0.0, 30.0)
        ]
    units = [
        {"workload": w, "router": r, "knowledge": "exact", "delay_s": d, "requests": 500, "seed": seed}
        for w in WORKLOADS
        for r in ROUTERS
        for d in DELAYS
    ]
    return units + [
        {
            "workload": w,
            "router": r,
            "knowledge": "approximate",
            "delay_s": 0.0,
            "requests": 500,
            "seed": seed,
        }
        for w in WORKLOADS
        for r in ROUTERS
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    if unit["workload"] == "conversation":
        trace, block, scale = mooncake(data, unit["requests"]), 512, 4.0
    else:
        sessions = max(unit["requests"] // 8, 1)
        turns = {"turns": 8, "system_tokens": 500, "user_tokens": 300, "output_tokens": 150, "pause_s": 4.0}
        trace, block, scale = chat(sessions, **turns, seed=unit["seed"], arrivals=Arrivals(4.0)), 16, 1.0
    result = run_fleet(
        trace,
        instances(8, block),
        router=unit["router"],
        knowledge=unit["knowledge"],
        delay_s=unit["delay_s"],
        arrivals=Times(scale=scale),
        seed=unit["seed"],
    )
    yield row(result, **{c: unit[c] for c in ("workload", "router", "knowledge", "delay_s", "seed")})


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Routers that are told of caches late, by the reports' delay; crosses: their own guess in place of reports."""
    names = list(dict.fromkeys(r["workload"] for r in rows))
    titles = [f"{name}: {what}" for name in names for what in ("hit rate", "p90 TTFT, s")]
    made = panels(figure, titles, columns=2)
    routers = list(dict.fromkeys(r["router"] for r in rows))
    for i, axes in enumerate(made):
        name, column = names[i // 2], ("hit_by_token", "ttft_p90_s")[i % 2]
        series = []
        for router in routers:
            own = [r for r in rows if (r["workload"], r["router"], r["knowledge"]) == (name, router, "exact")]
            series.append(mean_curve(own, "delay_s", column, router))
        curves(axes, series)
        for k, router in enumerate(routers):
            own = [
                r
                for r in rows
                if (r["workload"], r["router"], r["knowledge"]) == (name, router, "approximate")
            ]
            if own:
                axes.plot([150], [own[0][column]], "x", color=colour(k), markeredgewidth=1.5, gid="guess")
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(-0.01, 250)
        delays = sorted({r["delay_s"] for r in rows if r["knowledge"] == "exact"})
        axes.set_xticks([*delays, 150], [*map(short, delays), "guess"], fontsize=7)
        axes.set_xticks([], minor=True)
        label_axes(axes, "delay of reports, s, or the router's own guess" if i >= len(made) - 2 else "")
    from_zero(*made)


def _at(delay_s: float, router: str = "kv-overlap", workload: str = "chat") -> dict[str, Any]:
    return {"workload": workload, "router": router, "knowledge": "exact", "delay_s": delay_s}


EXPERIMENT = Experiment(
    name="stale-view",
    question="How much does a router lose whose view of the caches is old?",
    kind="simulated",
    definition=(
        f"{LLAMA}; 8 instances; conversation: the first 500 requests of Mooncake's trace at 4 x its rate, "
        "block size 512; chat: 62 sessions of 8 turns on average, 4 begin a second, 4 s between turns, "
        "block size 16; cache events reach the router after the delay"
    ),
    claims=tuple(
        Claim(
            f"hit rate, 30 s old over fresh, {router}, {workload}",
            None,
            "our setting",
            ratio("hit_by_token", _at(30.0, router, workload), _at(0.0, router, workload), least=10),
        )
        for workload in WORKLOADS
        for router in ROUTERS
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(CONVERSATION,),
)
