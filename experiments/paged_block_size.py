"""Which block size serves best, short answers or long?

Source: PagedAttention §7.2, Fig. 18b: ShareGPT best for 16 to 128; Alpaca well at 16 and 32, much worse above, because
sequences become shorter than blocks. Simulated at fixed request rates. Cost: two minutes.
    pagedjax experiment run paged-block-size
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, ratio
from pagedjax.lab.drawing import at_each, curves, from_zero, label_axes, mean_curve, panels
from pagedjax.sim.simulator import simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    LENGTH_NOTE,
    MACHINES,
    MAX_LEN,
    SCHEDULER,
    WORKLOADS,
    cost,
    figure,
    manager,
    over_seeds,
    workload,
)

SIZES = (8, 16, 32, 64, 128, 256)
RATES = {"sharegpt": 2.0, "alpaca": 30.0}  # of Fig. 13
COUNT = {"sharegpt": 500, "alpaca": 1500}


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [
            {"workload": "alpaca", "block_size": b, "requests": 60, "hardware": MACHINES[0], "seed": seed}
            for b in (16, 256)
        ]
    return over_seeds(
        ({"workload": w, "block_size": b, "requests": COUNT[w]} for w in WORKLOADS for b in SIZES), seed
    )


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    name, size = unit["workload"], unit["block_size"]
    trace = workload(name, data, unit["requests"], unit["seed"]).with_arrivals(RATES[name], seed=unit["seed"])
    held = manager("paged", block_size=size)
    result = simulate(trace, held, cost("opt-13b", size, unit["hardware"]), SCHEDULER, max_model_len=MAX_LEN)
    summary = result.summary()
    yield {
        "workload": name,
        "block_size": size,
        "hardware": unit["hardware"],
        "seed": unit["seed"],
        "normalized_s": summary.normalized_s,
        "batch": result.batch,
        "preemptions": summary.preemptions,
        "worst_tail_tokens": size - 1,
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Normalized latency at each block size, means over seeds."""
    names = list(dict.fromkeys(r["workload"] for r in rows))
    made = panels(figure, names, columns=2)
    for name, axes in zip(names, made):
        own = [r for r in rows if (r["workload"], r["hardware"]) == (name, rows[0]["hardware"])]
        curves(axes, [mean_curve(own, "block_size", "normalized_s", name)], named=False)
        at_each(axes, [r["block_size"] for r in own], base=2)
        label_axes(axes, "block size, tokens", "s per token (simulated)" if axes is made[0] else "")
    from_zero(*made)


def _over_16(name: str, size: int) -> Claim:
    def value(machine: str) -> Value:
        of, over = ({"workload": name, "block_size": b, "hardware": machine} for b in (size, 16))
        return ratio("normalized_s", of, over)

    return figure(
        f"{name}: normalized latency at {size} over that at 16",
        None,
        "PagedAttention Fig. 18b (no numbers printed)",
        value,
    )


EXPERIMENT = Experiment(
    name="paged-block-size",
    question="Which block size serves best, on long answers and on short ones?",
    kind="simulated",
    definition=(
        "mean latency over answer tokens at 2 (ShareGPT) and 30 (Alpaca) requests per second, Poisson; A100-40GB "
        "file, OPT-13B shape, 15.7K KV slots whatever the block size; five seeds"
    ),
    claims=tuple(_over_16(name, size) for name in WORKLOADS for size in (32, 128, 256)),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT),
    open=("hardware",),
    note=(
        LENGTH_NOTE
        + "; only the right half of the paper's curve can appear here: the cost model reads KV at the same speed "
        "whatever the block size, so what small blocks lose in the kernel is not simulated. At these rates the paged "
        "system is near its limit, where each block lost to a tail is paid for in waiting"
    ),
)
