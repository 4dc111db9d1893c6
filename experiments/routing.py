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
from pagedjax.lab.drawing import dots, panels, short
from pagedjax.sim.fleet import Arrivals, run_fleet

from ._fleet import AGENTIC, CONVERSATION, LLAMA, NAMES, agents, instances, mooncake, row, shared_prefixes

# Times the conversation trace's rate; eight instances compute about six times it.
RATES = (3.0, 5.0)
# What was all there was for KV when the gateway's figures were taken is not printed; a card of 24 GB has about so much.
SMALL = 40_000
SEEDS = 3
SHARED = ("round-robin", "least-requests", "prefix-hash", "cache-aware-v1", "cache-aware")
CLAIMED = ("round-robin", "cache-aware-v1")


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        base = {
            "workload": "conversation",
            "rate": 2.0,
            "instances": 2,
            "requests": 12,
            "kv_tokens": 0,
            "seed": seed,
        }
        return [{**base, "router": router} for router in ("round-robin", "cache-aware")]
    base = {"instances": 8, "kv_tokens": 0, "seed": seed}
    units: list[Unit] = [
        {**base, "workload": "conversation", "rate": rate, "requests": 400, "router": router}
        for router in NAMES
        for rate in RATES
    ]
    units += [
        {**base, "workload": "agentic", "rate": 1.0, "requests": 96, "router": router} for router in NAMES
    ]
    shared = {**base, "workload": "shared-prefix", "rate": 1.0, "requests": 1024}
    for tokens in (0, SMALL):
        for router in SHARED:
            count = SEEDS if router in CLAIMED else 1
            units += [
                {**shared, "kv_tokens": tokens, "router": router, "seed": seed + s} for s in range(count)
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
    specs = instances(unit["instances"], block, blocks=unit["kv_tokens"] // block or None)
    result = run_fleet(trace, specs, router=unit["router"], arrivals=arrivals, seed=seed)
    columns = ("workload", "rate", "instances", "kv_tokens", "router", "seed")
    yield row(result, **{c: unit[c] for c in columns})


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hits above and waiting below, a column for each workload; routers in the order of the conversation's waiting."""
    found = {(r["workload"], r["kv_tokens"], r["rate"], r["router"]): r for r in rows[::-1]}
    order = {
        r["router"]: r["ttft_mean_s"] for r in rows if r["workload"] == "conversation"
    }  # the higher rate
    workloads = list(dict.fromkeys(r["workload"] for r in rows))
    titles = [f"{w}: {what}" for what in ("hit rate", "mean TTFT, s") for w in workloads]
    for i, axes in enumerate(panels(figure, titles, columns=len(workloads), height=3.8)):
        workload, column = workloads[i % len(workloads)], ("hit_by_token", "ttft_mean_s")[i // len(workloads)]
        own = [r for r in rows if r["workload"] == workload]
        names = sorted({r["router"] for r in rows}, key=lambda name: order.get(name, 0.0))
        series = {}
        for tokens, rate in dict.fromkeys((r["kv_tokens"], r["rate"]) for r in own):
            memory = f"{short(tokens)} KV tokens" if tokens else "all KV"
            label = f"{rate:g} x rate" if workload == "conversation" else memory
            cells = [found.get((workload, tokens, rate, name)) for name in names]
            series[label] = [None if cell is None else cell[column] for cell in cells]
        shown = names if not i % len(workloads) else [""] * len(names)
        dots(axes, shown, series, log=column == "ttft_mean_s", room=3)


def _at(router: str, workload: str = "shared-prefix", kv_tokens: int = 0) -> dict[str, Any]:
    return {"router": router, "workload": workload, "kv_tokens": kv_tokens}


_LOADED = {"workload": "conversation", "rate": RATES[1]}
_GATEWAY = "SGLang pull request 2170"


def _gateway(tokens: int) -> tuple[Claim, ...]:
    """The gateway's printed figures, under one size of the KV pool."""
    there = "all of the memory" if not tokens else f"{tokens:,} tokens"
    hits = {"round-robin": 0.20, "cache-aware-v1": 0.75}
    return (
        *(
            Claim(
                f"hit rate, {name}, {there} for KV",
                paper,
                _GATEWAY,
                cell("hit_by_token", **_at(name, kv_tokens=tokens)),
            )
            for name, paper in hits.items()
        ),
        Claim(
            f"prompt tokens/s, first form over round robin, {there} for KV",
            158_596 / 82_665,
            _GATEWAY,
            ratio(
                "input_tokens_per_s",
                _at("cache-aware-v1", kv_tokens=tokens),
                _at("round-robin", kv_tokens=tokens),
            ),
        ),
    )


EXPERIMENT = Experiment(
    name="routing",
    question="Which router keeps prefixes warm without hot spots?",
    kind="simulated",
    definition=(
        f"{LLAMA}; 8 instances; conversation: the first 400 requests of Mooncake's trace at a multiple of its "
        "rate, block size 512; agentic: 8 coding sessions of up to 12 requests that begin 20 s apart, block "
        "size 64; shared-prefix: 64 x 16 prompts of 2,048 + 128 tokens and 256 answered ones, all at once, "
        "block size 16; routers with their defaults"
    ),
    claims=(
        *_gateway(0),
        *_gateway(SMALL),
        Claim(
            "mean TTFT, random over least predicted (conversation)",
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
    note=(
        "the gateway's figures come without the card's memory. With all of an 80 GB card's, two prompts of a "
        "group that round robin sends to one replica nearly always find each other, and it hits half; where "
        "the KV pool holds some 40,000 tokens, as beside an 8B model on 24 GB, the running requests push most "
        "prefixes out before they come again, and the hit rate of round robin is the printed one. That of the "
        "first form, and the gain, hang on how many prompts are computed at once: fleet-conditions"
    ),
)
