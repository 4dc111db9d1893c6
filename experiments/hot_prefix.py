"""What do routers make of a few prefixes, one of which is much hotter than the others?

Source: the case for bounded loads and for load in the score (Mirrokni et al., SODA'18; production-stack pull request
1035: "every request for a hot prefix lands on the one engine holding it, which queues while its peers idle"); no
figure of them has this setting. llm-d's blog prints 92 s at the 90th percentile for random routing and 0.54 s for
exact prefix routing of 150 prefixes of 6,000 tokens over 8 pods of Qwen3-32B; its arrivals are not printed in full,
so it is not claimed. Simulated. Cost: two minutes.
    pagedjax experiment run hot-prefix
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.lab import Claim, Experiment, TableRow, Unit, ratio
from pagedjax.lab.drawing import dots, panels
from pagedjax.sim.fleet import run_fleet
from pagedjax.sim.trace import Trace, TraceRequest

from ._fleet import LLAMA, NAMES, instances, row

PREFIXES, PREFIX, QUESTION, OUTPUT = 16, 6000, 200, 100
SKEWS = (0.0, 1.0, 2.0)


def trace(count: int, skew: float, rate: float, seed: int) -> Trace:
    """Questions on one of 16 documents, the k-th drawn in proportion to 1 / k ** skew; Poisson arrivals."""

    def requests() -> Iterator[TraceRequest]:
        rng = np.random.default_rng([seed, 0x407])
        weights = 1.0 / np.arange(1, PREFIXES + 1) ** skew
        now = 0.0
        for i in range(count):
            now += float(rng.exponential(1 / rate))
            which = int(rng.choice(PREFIXES, p=weights / weights.sum()))
            prefix = np.random.default_rng([seed, which]).integers(3, 32_000, PREFIX)
            own = np.random.default_rng([seed, 1 << 20, i]).integers(3, 32_000, QUESTION)
            tokens = np.concatenate([prefix, own]).astype(np.int32)
            yield TraceRequest(now, len(tokens), OUTPUT, token_ids=tokens, session=str(i))

    return Trace("hot-prefix", "tokens", 1, True, requests, spec=f"hot-prefix,{count},{skew},{rate},{seed}")


def _units(smoke: bool, seed: int) -> list[Unit]:
    names = ("session", "prefix-hash") if smoke else NAMES
    skews = SKEWS[-1:] if smoke else SKEWS
    count, rate = (20, 20.0) if smoke else (600, 100.0)
    return [
        {"router": name, "skew": skew, "requests": count, "rate": rate, "instances": 8, "seed": seed}
        for name in names
        for skew in skews
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    played = trace(unit["requests"], unit["skew"], unit["rate"], unit["seed"])
    result = run_fleet(played, instances(unit["instances"], 64), router=unit["router"], seed=unit["seed"])
    yield row(result, **{c: unit[c] for c in ("router", "skew", "rate", "seed")})


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Routers under prefixes of unequal popularity (skew of a Zipf law), best worst wait first."""
    columns = {
        "hit_by_token": "hit rate",
        "imbalance": "busy time, largest over mean",
        "ttft_p99_s": "p99 TTFT, s",
    }
    worst = {r["router"]: r["ttft_p99_s"] for r in rows}  # the last skew of each
    names = sorted(worst, key=lambda name: worst[name])
    found = {(r["router"], r["skew"]): r for r in rows}
    for place, (column, axes) in enumerate(zip(columns, panels(figure, list(columns.values()), height=3.6))):
        series = {
            f"skew {s:g}": [found[n, s][column] if (n, s) in found else None for n in names]
            for s in dict.fromkeys(r["skew"] for r in rows)
        }
        shown = [""] * len(names) if place else names
        dots(axes, shown, series, log=column == "ttft_p99_s", key=not place, room=len(series))


def _at(router: str) -> dict[str, Any]:
    return {"router": router, "skew": SKEWS[-1]}


EXPERIMENT = Experiment(
    name="hot-prefix",
    question="What do routers make of a few prefixes, one of which is much hotter than the others?",
    kind="simulated",
    definition=(
        f"{LLAMA}; 8 instances, 600 questions of 200 tokens on 16 documents of 6,000, 100 a second, 100 "
        "tokens answered; the k-th document is asked for in proportion to 1 / k to the power of the skew; "
        "block size 64"
    ),
    claims=(
        Claim(
            "p99 TTFT, round robin over bounded prefix hash, skew 2",
            None,
            "our setting",
            ratio("ttft_p99_s", _at("round-robin"), _at("prefix-hash")),
        ),
        Claim(
            "p99 TTFT, SGLang's first form over its later one, skew 2",
            None,
            "our setting",
            ratio("ttft_p99_s", _at("cache-aware-v1"), _at("cache-aware")),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
)
