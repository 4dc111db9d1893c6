"""How many requests run at once under each memory manager, and where does the memory go?

Source: PagedAttention Fig. 13 (batched requests: ShareGPT at 2 req/s 7.00, 9.81, 13.62, 30.42; Alpaca at
30 req/s 7.00, 43.24, 72.75, 132.44) and Fig. 2 (token states 20.4, 26.8, 38.2, 96.3 %). Simulated: OPT-13B,
one A100-40GB, Poisson arrivals. Cost: four minutes.
    pagedjax experiment run batched-requests
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Estimate, Experiment, TableRow, Unit, Value, cell, ratio
from pagedjax.lab.drawing import bars, label_axes, panels
from pagedjax.sim.simulator import simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    LENGTH_NOTE,
    MACHINES,
    MAX_LEN,
    SCHEDULER,
    SYSTEMS,
    cost,
    figure,
    manager,
    memory_watch,
    over_seeds,
    workload,
)

RATES = {"sharegpt": 2.0, "alpaca": 30.0}
BATCHES = {"sharegpt": (7.00, 9.81, 13.62, 30.42), "alpaca": (7.00, 43.24, 72.75, 132.44)}
TOKEN_STATES = (0.204, 0.268, 0.382, 0.963)
SPAN_S = {"sharegpt": 600.0, "alpaca": 120.0}  # of the paper's hour: steady after a minute


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        units = [{"workload": "sharegpt", "system": s, "span_s": 10.0} for s in SYSTEMS]
        return [{**unit, "hardware": MACHINES[0], "seed": seed} for unit in units]
    return over_seeds(
        ({"workload": w, "system": s, "span_s": SPAN_S[w]} for w in RATES for s in SYSTEMS), seed
    )


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    name, rate, span = unit["workload"], RATES[unit["workload"]], unit["span_s"]
    trace = workload(name, data, int(rate * span), unit["seed"]).with_arrivals(rate, seed=unit["seed"])
    held = manager(unit["system"])
    result = simulate(
        trace,
        held,
        cost("opt-13b", hardware=unit["hardware"]),
        SCHEDULER,
        max_model_len=MAX_LEN,
        until_s=span,
        watch=memory_watch(held),
    )
    yield {
        "workload": name,
        "system": unit["system"],
        "hardware": unit["hardware"],
        "seed": unit["seed"],
        "rate_per_s": rate,
        "batch": result.batch,
        "normalized_s": result.summary().normalized_s if result.records else None,
        "finished_per_s": len(result.records) / span,
        **result.sampled,
    }


def _value(name: str, system: str, column: str) -> Callable[[str], Value]:
    return lambda machine: cell(
        column, least=len(SYSTEMS) + 1, workload=name, system=system, hardware=machine
    )


def _ratio(name: str, system: str) -> Callable[[str], Value]:
    return lambda machine: ratio(
        "batch",
        {"workload": name, "system": "paged", "hardware": machine},
        {"workload": name, "system": system, "hardware": machine},
        least=len(SYSTEMS) + 1,
    )


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Requests that run at once under four ways to reserve memory, means over seeds, beside the printed ones."""
    names = list(dict.fromkeys(r["workload"] for r in rows))
    for name, axes in zip(names, panels(figure, names, columns=2, height=2.8)):
        found = [
            Estimate.of(
                [
                    r["batch"]
                    for r in rows
                    if (r["workload"], r["system"], r["hardware"]) == (name, s, MACHINES[0])
                ]
            )
            for s in SYSTEMS
        ]
        ours = [None if e is None else e.mean for e in found]
        half = [0.0 if e is None else e.half for e in found]
        none = [0.0] * len(SYSTEMS)
        bars(axes, SYSTEMS, {"ours": ours, "paper": list(BATCHES[name])}, half={"ours": half, "paper": none})
        label_axes(axes, "requests running at once")


_FIG = "PagedAttention Fig. 13"
EXPERIMENT = Experiment(
    name="batched-requests",
    question="How many requests run at once under each memory manager, and where does the memory go?",
    kind="simulated",
    definition=(
        "sequences per step and shares of the KV memory, averaged over busy simulated time; A100-40GB file, OPT-13B "
        "shape, 15.7K KV slots (Table 1), block size 16, Poisson arrivals from an empty system; five seeds"
    ),
    claims=(
        *(
            figure(f"{name}, {system}: batched requests", paper, _FIG, _value(name, system, "batch"))
            for name, values in BATCHES.items()
            for system, paper in zip(SYSTEMS, values)
        ),
        figure("ShareGPT: paged over Oracle", 2.2, _FIG, _ratio("sharegpt", "orca-oracle")),
        figure("ShareGPT: paged over Max", 4.3, _FIG, _ratio("sharegpt", "orca-max")),
        *(
            figure(
                f"ShareGPT, {system}: token states, of all KV memory",
                paper,
                "PagedAttention Fig. 2",
                _value("sharegpt", system, "token_states"),
                "input" if system == "orca-max" else "figure",
            )
            for system, paper in zip(SYSTEMS, TOKEN_STATES)
        ),
        figure(
            "ShareGPT, paged: token states, of the blocks in use",
            None,
            "another definition than the rows of Fig. 2 above",
            _value("sharegpt", "paged", "token_states_of_used"),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT),
    open=("hardware",),
    note=(
        LENGTH_NOTE
        + "; token states are of all KV memory in every row; of the blocks in use, the paged system's stand beside. "
        "The spread of the answers comes from the Orca (Max) column of Fig. 2, so that row of Fig. 2 is an input, the "
        "others are results. Reservations fill memory at these rates whatever the host does; the paged batch depends "
        "on it, most on Alpaca: with the A100 file's host work per sequence 30 requests a second are more than it "
        "serves, so its queue grows and memory fills. The paper's figures lie between the two machines"
    ),
)
