"""How many requests per second does each memory manager sustain before its latency rises?

Source: PagedAttention, normalized latency over request rate. Fig. 12: ShareGPT 1.7x to 2.7x the rate of Orca (Oracle),
2.7x to 8x that of Orca (Max), over three models. §6.3, Alpaca: 1.3x Orca (Oracle) with one
answer, 2.3x with a beam search of width 6. Fig. 16 (§6.4), translation with a shared prefix of 80 and 341
tokens: 1.67x and 3.58x the throughput of Orca (Oracle). Fig. 17 (§6.5), chat histories: 2x all three Orcas.
Simulated: OPT-13B and LLaMA-13B, one A100-40GB, Poisson arrivals. Cost: half an hour.
    pagedjax experiment run latency-rate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.lab import Experiment, TableRow, Unit, Value
from pagedjax.lab.drawing import Series, curves, label_axes, mean_curve, panels, plain_log, rule
from pagedjax.sim.simulator import Beams, simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    LENGTH_NOTE,
    MACHINES,
    MAX_LEN,
    SCHEDULER,
    SEEDS,
    SYSTEMS,
    TURNS,
    WMT,
    cost,
    figure,
    manager,
    workload,
)
from .beam_search import GAP

_SHARING = ("orca-oracle", "paged", "paged+sharing")
BEAMS = 6
# Workload -> model, systems, seconds of arrivals, a rate that every system sustains, beams of each request (0: none).
SETTINGS: dict[str, tuple[str, tuple[str, ...], float, float, int]] = {
    "sharegpt": ("opt-13b", SYSTEMS, 300.0, 0.5, 0),
    "alpaca": ("opt-13b", SYSTEMS, 60.0, 3.0, 0),
    "alpaca, beam search": ("opt-13b", ("orca-oracle", "paged"), 60.0, 1.5, BEAMS),
    "wmt-80": ("llama-13b", _SHARING, 60.0, 10.0, 0),
    "wmt-341": ("llama-13b", _SHARING, 60.0, 5.0, 0),
    "chatbot": ("opt-13b", SYSTEMS, 300.0, 0.3, 0),
}
CLAIMED = {  # systems that a claim compares
    "alpaca": ("orca-oracle", "paged"),
    "wmt-80": ("orca-oracle", "paged+sharing"),
    "wmt-341": ("orca-oracle", "paged+sharing"),
}
FACTOR = 1.15  # from one rate to the next
# Normalized latency at which rates are compared: several times the unloaded one, before the limit.
SIMILAR_S = 0.2
LIMIT_S = 0.5  # a curve ends above


def _units(smoke: bool, seed: int) -> list[Unit]:
    """A whole curve of the first seed on the first machine; of the others as much as the comparison needs."""
    if smoke:
        return [
            _unit("alpaca", s, {"span_s": 2.0, "first": 4.0, "rates": 1}, MACHINES[0], seed) for s in SYSTEMS
        ]
    units = []
    for name, (_, systems, _, _, _) in SETTINGS.items():
        for system in systems:
            units.append(_unit(name, system, {}, MACHINES[0], seed))
            if system in CLAIMED.get(name, systems):
                ends = {"limit_s": SIMILAR_S}
                units += [_unit(name, system, ends, MACHINES[0], seed + i) for i in range(1, SEEDS)]
                units.append(_unit(name, system, ends, MACHINES[1], seed))
    return units


def _unit(name: str, system: str, other: Unit, hardware: str, seed: int) -> Unit:
    _, _, span, first, beams = SETTINGS[name]
    plain = {
        "span_s": span,
        "first": first,
        "factor": FACTOR,
        "rates": 30,
        "limit_s": LIMIT_S,
        "beams": beams,
    }
    return {"workload": name, "system": system, **plain, **other, "hardware": hardware, "seed": seed}


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    name, system, seed, width = unit["workload"], unit["system"], unit["seed"], unit["beams"]
    model = cost(SETTINGS[name][0], hardware=unit["hardware"])
    for i in range(unit["rates"]):
        rate = unit["first"] * unit["factor"] ** i
        lengths = workload(name.partition(",")[0], data, int(rate * unit["span_s"]), seed)
        result = simulate(
            lengths.with_arrivals(rate, seed=seed),
            manager(system),
            model,
            SCHEDULER,
            max_model_len=MAX_LEN,
            beams=Beams(width, GAP, seed) if width else None,
        )
        summary = result.summary()
        # The simulator divides by all tokens that were generated, the paper by the answer's length.
        normalized_s = summary.normalized_s * max(1, width)
        yield {
            "workload": name,
            "system": system,
            "hardware": unit["hardware"],
            "seed": seed,
            "rate_per_s": rate,
            "normalized_s": normalized_s,
            "batch": result.batch,
            "preemptions": summary.preemptions,
            "hit_by_token": summary.hit_by_token,
        }
        if normalized_s > unit["limit_s"]:
            return


def _sustained(rows: list[TableRow], name: str, system: str, hardware: str) -> dict[int, float]:
    """Seed → rate at which the normalized latency first passes `SIMILAR_S`, between two rates that were run."""
    found: dict[int, float] = {}
    own = [r for r in rows if (r["workload"], r["system"], r["hardware"]) == (name, system, hardware)]
    for below, above in pairwise(own):
        same = below["seed"] == above["seed"]
        if same and below["normalized_s"] <= SIMILAR_S < above["normalized_s"]:
            logs = [np.log([r["normalized_s"], r["rate_per_s"]]) for r in (below, above)]
            part = (np.log(SIMILAR_S) - logs[0][0]) / (logs[1][0] - logs[0][0])
            found.setdefault(above["seed"], float(np.exp(logs[0][1] + part * (logs[1][1] - logs[0][1]))))
    return found


def _over(name: str, system: str, other: str) -> Callable[[str], Value]:
    def value(machine: str) -> Value:
        def pick(rows: list[TableRow]) -> list[float]:
            ours, theirs = (_sustained(rows, name, s, machine) for s in (system, other))
            return [ours[seed] / theirs[seed] for seed in ours if seed in theirs]

        return pick

    return value


def _up_to(one: Series, most: float) -> Series:
    """A curve to where it first rises above `most`, as a straight line between two rates does."""
    for k, (x, y) in enumerate(zip(one.x, one.y)):
        if y > most:
            part = 0.0 if not k else (most - one.y[k - 1]) / (y - one.y[k - 1])
            x = one.x[k - 1] + part * (x - one.x[k - 1]) if k else x
            return Series(
                one.label, [*one.x[:k], x], [*one.y[:k], most], [*one.half[:k], 0.0] if one.half else []
            )
    return one


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Normalized latency against the rate of requests; the dotted line is where rates are compared."""
    names = [n for n in SETTINGS if any(r["workload"] == n for r in rows)]
    systems = (*SYSTEMS, "paged+sharing")
    style = {system: i for i, system in enumerate(systems)}
    made = panels(figure, names, columns=2, height=2.4)
    for name, axes in zip(names, made):
        own = [r for r in rows if (r["workload"], r["hardware"]) == (name, rows[0]["hardware"])]
        series = []
        for system in systems:
            one = mean_curve((r for r in own if r["system"] == system), "rate_per_s", "normalized_s", system)
            series.append(_up_to(one, LIMIT_S))
        curves(axes, series, style=style)
        axes.set_ylim(0, LIMIT_S)
        rule(axes, SIMILAR_S, "")
        plain_log(axes.xaxis, axes.set_xscale)
        label_axes(axes, "requests per second", "s per token" if axes in made[::2] else "")


EXPERIMENT = Experiment(
    name="latency-rate",
    question="How many requests per second does each memory manager sustain before its latency rises?",
    kind="simulated",
    definition=(
        f"rate at which the mean of latency over answer tokens passes {SIMILAR_S} s, between two simulated rates "
        f"{FACTOR} apart; all requests run to their end; A100-40GB file, 15.7K KV slots (Table 1), block size 16, one "
        "scheduler; five seeds"
    ),
    claims=(
        figure(
            "ShareGPT: paged over Oracle",
            (1.7, 2.7),
            "PagedAttention §6.2",
            _over("sharegpt", "paged", "orca-oracle"),
        ),
        figure(
            "ShareGPT: paged over Max",
            (2.7, 8.0),
            "PagedAttention §6.2",
            _over("sharegpt", "paged", "orca-max"),
        ),
        figure(
            "Alpaca: paged over Oracle", 1.3, "PagedAttention §6.3", _over("alpaca", "paged", "orca-oracle")
        ),
        figure(
            f"Alpaca, beam search of width {BEAMS}: paged over Oracle",
            2.3,
            "PagedAttention §6.3",
            _over("alpaca, beam search", "paged", "orca-oracle"),
        ),
        *(
            figure(
                f"{prefix}-token prefix: sharing over Oracle",
                paper,
                "PagedAttention §6.4",
                _over(f"wmt-{prefix}", "paged+sharing", "orca-oracle"),
            )
            for prefix, paper in ((80, 1.67), (341, 3.58))
        ),
        *(
            figure(
                f"chat histories: paged over {s}", 2.0, "PagedAttention §6.5", _over("chatbot", "paged", s)
            )
            for s in SYSTEMS[:-1]
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT, TURNS, *WMT.values()),
    open=("hardware",),
    note=(
        LENGTH_NOTE
        + "; WMT16: tokens are words times an assumed factor; chat histories: turns of the named file, Llama-2 "
        "tokenizer instead of OPT's; beams: candidates as in beam-search, each beam of Orca's reserves for itself. The "
        "order of the systems and the growth with the prefix hold. With 341 tokens in common the shared system runs "
        "several times Oracle's rows, so host work per row decides. Chat histories: paged memory holds twice Max's "
        "requests, as the rows' batches say, but twice the rows are not twice the speed: each reads its KV of a "
        "thousand tokens and waits for twice the prompts, whatever the host does"
    ),
)
