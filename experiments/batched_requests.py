"""How many requests run at once under each memory manager, and where does the memory go?

Source: PagedAttention Fig. 13 (batched requests: ShareGPT at 2 req/s 7.00, 9.81, 13.62, 30.42; Alpaca at
30 req/s 7.00, 43.24, 72.75, 132.44) and Fig. 2 (token states 20.4, 26.8, 38.2, 96.3 %). Simulated: OPT-13B,
one A100-40GB, Poisson arrivals. Cost: about 3 minutes.
    pagedjax experiment run batched-requests
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, Row, Unit, Value, cell, ratio
from pagedjax.sim.simulator import simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    LENGTH_NOTE,
    MAX_LEN,
    SCHEDULER,
    SYSTEMS,
    cost,
    manager,
    memory_watch,
    workload,
)

RATES = {"sharegpt": 2.0, "alpaca": 30.0}
BATCHES = {"sharegpt": (7.00, 9.81, 13.62, 30.42), "alpaca": (7.00, 43.24, 72.75, 132.44)}
TOKEN_STATES = (0.204, 0.268, 0.382, 0.963)
SPAN_S = {"sharegpt": 600.0, "alpaca": 120.0}  # of the paper's hour: steady after a minute


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"workload": "sharegpt", "system": s, "span_s": 10.0, "seed": seed} for s in SYSTEMS]
    return [{"workload": w, "system": s, "span_s": SPAN_S[w], "seed": seed} for w in RATES for s in SYSTEMS]


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    name, rate, span = unit["workload"], RATES[unit["workload"]], unit["span_s"]
    trace = workload(name, data, int(rate * span), unit["seed"]).with_arrivals(rate, seed=unit["seed"])
    held = manager(unit["system"])
    result = simulate(
        trace, held, cost("opt-13b"), SCHEDULER, max_model_len=MAX_LEN, until_s=span, watch=memory_watch(held)
    )
    yield {
        "workload": name,
        "system": unit["system"],
        "rate_per_s": rate,
        "batch": result.batch,
        "normalized_s": result.summary().normalized_s if result.records else None,
        "finished_per_s": len(result.records) / span,
        **result.sampled,
    }


def _value(name: str, system: str, column: str) -> Value:
    return cell(column, least=len(SYSTEMS) + 1, workload=name, system=system)


def _ratio(name: str, system: str) -> Value:
    return ratio(
        "batch",
        {"workload": name, "system": "paged"},
        {"workload": name, "system": system},
        least=len(SYSTEMS) + 1,
    )


def _plot(rows: list[Row], axes: Any) -> None:
    names = list(dict.fromkeys(r["workload"] for r in rows))
    for k, name in enumerate(names):
        own = [r for r in rows if r["workload"] == name]
        axes.bar(
            [i + 0.2 * (2 * k) for i in range(len(own))],
            [r["batch"] for r in own],
            label=f"{name}, ours",
        )
        printed = BATCHES[name][: len(own)]
        axes.bar(
            [i + 0.2 * (2 * k + 1) for i in range(len(own))], printed, 0.2, label=f"{name}, paper", alpha=0.5
        )
    axes.set_xticks([i + 0.2 for i in range(len(SYSTEMS))], SYSTEMS, fontsize=8)
    axes.set_ylabel("requests running at once")
    axes.set_yscale("log")
    axes.legend(fontsize=8)


_FIG = "PagedAttention Fig. 13"
EXPERIMENT = Experiment(
    name="batched-requests",
    question="How many requests run at once under each memory manager, and where does the memory go?",
    kind="simulated",
    definition=(
        "sequences per step and shares of the KV memory, averaged over busy simulated time; A100-40GB file, OPT-13B "
        "shape, 15.7K KV slots (Table 1), block size 16, Poisson arrivals from an empty system"
    ),
    claims=(
        *(
            Claim(
                f"{name}, {system}: batched requests",
                paper,
                _FIG,
                _value(name, system, "batch"),
            )
            for name, values in BATCHES.items()
            for system, paper in zip(SYSTEMS, values)
        ),
        Claim("ShareGPT: paged over Oracle", 2.2, _FIG, _ratio("sharegpt", "orca-oracle")),
        Claim("ShareGPT: paged over Max", 4.3, _FIG, _ratio("sharegpt", "orca-max")),
        *(
            Claim(
                f"ShareGPT, {system}: token states",
                paper,
                "PagedAttention Fig. 2",
                _value("sharegpt", system, "token_states_of_used" if system == "paged" else "token_states"),
                "input" if system == "orca-max" else "figure",
            )
            for system, paper in zip(SYSTEMS, TOKEN_STATES)
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT),
    note=(
        LENGTH_NOTE
        + "; token states of the paged system are of the blocks in use. The spread of the answers comes from "
        "the Orca (Max) column of Fig. 2, so that row of Fig. 2 is an input, the others are results. What "
        "differs is the paged system on Alpaca: with the A100 file's host work per sequence 30 requests a "
        "second are more than it serves, so its queue grows and memory fills. Calibration has this figure "
        "under the host work of two machines; the paper's lies between them"
    ),
)
