"""Which router keeps prefixes warm without hot spots?

Sources: SGLang v0.4 (pull requests 2114 and 2170): on generated shared prefixes, Llama-3.1-8B on 8 replicas, the
gateway of that time (a probability, no thresholds) reaches 158,596 tokens/s at 75 % hits, round robin 82,665 at 20 %.
Mooncake, arXiv 2407.00079 §6.2: mean time to the first token 92.07 s (random), 60.41 (load balancing), 14.36 (cache-
aware), 6.26 (its own), 8 prefill and 8 decode instances, 23,000 requests of a trace that is not here. Preble: 1.5 to
14.5 x lower mean latency on its own workloads, which are not here. Simulated. Cost: six minutes.
    pagedjax experiment run routing
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell, ratio
from pagedjax.sim.fleet import Arrivals, run_fleet

from ._fleet import (
    AGENTIC,
    CONVERSATION,
    LLAMA,
    NAMES,
    agents,
    instances,
    mooncake,
    panels,
    row,
    shared_prefixes,
)

# Of the conversation trace: times its rate for each instance; one instance computes about its whole prompts' rate.
RATES = (0.4, 0.6)
SEEDS = 5


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        base = {"workload": "conversation", "rate": 2.0, "instances": 2, "requests": 12, "seed": seed}
        return [{**base, "router": router} for router in ("round-robin", "cache-aware")]
    units: list[Unit] = []
    for router in NAMES:
        for count in (4, 8):
            units += [
                {
                    "workload": "conversation",
                    "rate": rate * count,
                    "instances": count,
                    "requests": 600,
                    "seed": seed,
                    "router": router,
                }
                for rate in RATES
            ]
        units.append(
            {
                "workload": "agentic",
                "rate": 1.0,
                "instances": 8,
                "requests": 192,
                "seed": seed,
                "router": router,
            }
        )
        runs = SEEDS if router in ("round-robin", "cache-aware-v1") else 1
        units += [
            {
                "workload": "shared-prefix",
                "rate": 1.0,
                "instances": 8,
                "requests": 1024,
                "seed": seed + s,
                "router": router,
            }
            for s in range(runs)
        ]
    return units


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    name, seed, count = unit["workload"], unit["seed"], unit["requests"]
    if name == "conversation":
        trace, block = mooncake(data, count), 512
    elif name == "agentic":
        trace, block = agents(data, count // 12, 12, 20.0 / unit["rate"], seed), 64
    else:
        trace, block = shared_prefixes(count // 16, 16, 2048, 128, 256, seed), 16
    arrivals = Arrivals(scale=unit["rate"] if name == "conversation" else 1.0)
    result = run_fleet(
        trace, instances(unit["instances"], block), router=unit["router"], arrivals=arrivals, seed=seed
    )
    columns = ("workload", "rate", "instances", "router", "seed")
    yield row(result, **{c: unit[c] for c in columns})


def _plot(rows: list[TableRow], axes: Any) -> None:
    """Hits against mean time to the first token, a panel for each load; each point is a router."""
    cases = list(dict.fromkeys((r["workload"], r["instances"], r["rate"]) for r in rows))
    titles = [
        f"{w}, {n} instances" + (f", {rate:g} x rate" if w == "conversation" else "") for w, n, rate in cases
    ]
    for case, inset in zip(cases, panels(axes, titles, 3)):
        own = [r for r in rows if (r["workload"], r["instances"], r["rate"]) == case]
        seen = {r["router"]: r for r in own[::-1]}.values()
        for r in seen:
            inset.plot(r["hit_by_token"], r["ttft_mean_s"], ".", color="tab:blue", markersize=4)
            inset.annotate(
                r["router"],
                (r["hit_by_token"], r["ttft_mean_s"]),
                xytext=(2, 1),
                textcoords="offset points",
                fontsize=4,
            )
        inset.set_yscale("log")
        inset.set_xlabel("hit rate", fontsize=6, labelpad=0)
        inset.set_ylabel("mean TTFT, s", fontsize=6, labelpad=0)


def _at(router: str, workload: str = "shared-prefix") -> dict[str, Any]:
    return {"router": router, "workload": workload}


_LOADED = {"workload": "conversation", "instances": 8, "rate": RATES[1] * 8}
EXPERIMENT = Experiment(
    name="routing",
    question="Which router keeps prefixes warm without hot spots?",
    kind="simulated",
    definition=(
        f"{LLAMA}; conversation: the first 600 requests of Mooncake's trace at a multiple of its rate, "
        "block size 512; agentic: 16 coding sessions of up to 12 requests that begin 20 s apart, block size "
        "64; shared-prefix: 64 x 16 prompts of 2,048 + 128 tokens and 256 answered ones, all at once, block "
        "size 16; routers with their defaults"
    ),
    claims=(
        Claim(
            "hit rate, round robin",
            0.20,
            "SGLang pull request 2170",
            cell("hit_by_token", **_at("round-robin")),
        ),
        Claim(
            "hit rate, gateway's first form",
            0.75,
            "SGLang pull request 2170",
            cell("hit_by_token", **_at("cache-aware-v1")),
        ),
        Claim(
            "prompt tokens/s, the gateway's first form over round robin",
            158_596 / 82_665,
            "SGLang pull request 2170",
            ratio("input_tokens_per_s", _at("cache-aware-v1"), _at("round-robin")),
        ),
        Claim(
            "mean TTFT, random over least predicted (conversation, 8 instances)",
            None,
            "Mooncake §6.2 prints 92.07 / 6.26 = 14.7 on another trace, prefill and decode apart",
            ratio("ttft_mean_s", {**_LOADED, "router": "random"}, {**_LOADED, "router": "mooncake"}),
        ),
        Claim(
            "mean latency, round robin over Preble (agentic)",
            None,
            "Preble prints 1.5 to 14.5 on its own workloads, over the then best systems",
            ratio("latency_mean_s", _at("round-robin", "agentic"), _at("preble", "agentic")),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(CONVERSATION, AGENTIC),
    note="",
)
