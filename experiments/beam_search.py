"""What memory does sharing save under beam search?

Source: PagedAttention §6.3, Fig. 15: Alpaca 37.56, 53.13, 55.16 % at beam widths 2, 4, 6; ShareGPT 44.3 to 66.3 %.
Simulated: the engine's own search and forks on drawn candidates. Cost: two minutes.
    pagedjax experiment run beam-search
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Experiment, TableRow, Unit, Value, cell
from pagedjax.lab.drawing import Series, at_each, curves, from_zero, label_axes, mean_curve, panels
from pagedjax.sim.simulator import Beams, simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    LENGTH_NOTE,
    MACHINES,
    MAX_LEN,
    SCHEDULER,
    blocks_watch,
    cost,
    figure,
    manager,
    over_seeds,
    workload,
)

RANGE = (0.443, 0.663)  # of ShareGPT, over the widths
PRINTED = {2: 0.3756, 4: 0.5313, 6: 0.5516}
GAPS = (0.5, 1.0, 2.0)  # nats from one candidate to the next: how sharp the model is
GAP = 1.0


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        units = [{"workload": "alpaca", "width": w, "gap": GAP, "requests": 6} for w in (2, 4)]
        return [{**unit, "hardware": MACHINES[0], "seed": seed} for unit in units]
    sizes = (("alpaca", 100), ("sharegpt", 20))
    claimed = [
        {"workload": name, "width": w, "gap": GAP, "requests": count}
        for name, count in sizes
        for w in PRINTED
    ]
    others = [
        {"workload": name, "width": w, "gap": gap, "requests": count, "hardware": MACHINES[0], "seed": seed}
        for name, count in sizes
        for gap in GAPS
        if gap != GAP
        for w in PRINTED
    ]
    return over_seeds(claimed, seed) + others


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace = workload(unit["workload"], data, unit["requests"], unit["seed"]).with_arrivals(
        1.0, seed=unit["seed"]
    )
    held = manager("paged")
    result = simulate(
        trace,
        held,
        cost("opt-13b", hardware=unit["hardware"]),
        SCHEDULER,
        max_model_len=MAX_LEN,
        beams=Beams(unit["width"], unit["gap"], unit["seed"]),
        watch=blocks_watch,
    )
    yield {
        "workload": unit["workload"],
        "width": unit["width"],
        "gap": unit["gap"],
        "hardware": unit["hardware"],
        "seed": unit["seed"],
        "memory_saved": 1 - result.sampled["held"] / result.sampled["named"],
        "batch": result.batch,
        "copies": held.stats.copies,
    }


def _value(name: str, width: int) -> Callable[[str], Value]:
    return lambda machine: cell(
        "memory_saved", least=3, workload=name, width=width, gap=GAP, hardware=machine
    )


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Share of blocks that beams save by sharing, by the gap in nats between one candidate and the next."""
    names = list(dict.fromkeys(r["workload"] for r in rows))
    made = panels(figure, names, columns=2, share_y=True)
    for name, axes in zip(names, made):
        own = [r for r in rows if (r["workload"], r["hardware"]) == (name, rows[0]["hardware"])]
        gaps = list(dict.fromkeys(r["gap"] for r in own))
        series = [
            mean_curve((r for r in own if r["gap"] == g), "width", "memory_saved", f"gap {g:g}") for g in gaps
        ]
        if name == "alpaca":
            series.append(Series("paper", list(PRINTED), list(PRINTED.values()), printed=True))
        curves(axes, series)
        at_each(axes, [r["width"] for r in own])
        label_axes(axes, "beam width", "share of blocks saved" if axes is made[0] else "")
    from_zero(*made)


EXPERIMENT = Experiment(
    name="beam-search",
    question="What memory does sharing save under beam search?",
    kind="simulated",
    definition=(
        "1 - distinct blocks over blocks named by all tables of a step, both averaged over busy simulated time; "
        "candidates drawn with exponential gaps of mean `gap` nats; five seeds at the gap of the claims"
    ),
    claims=(
        *(
            figure(f"Alpaca, width {w}", v, "PagedAttention Fig. 15", _value("alpaca", w))
            for w, v in PRINTED.items()
        ),
        *(
            figure(f"ShareGPT, width {w}", RANGE, "PagedAttention §6.3", _value("sharegpt", w))
            for w in PRINTED
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT),
    open=("hardware",),
    note=(
        LENGTH_NOTE
        + "; no beam ends early. How soon beams part depends on the model, which is drawn here: the rows give three "
        "gaps, the claims the middle one, fixed before the run. Drawn candidates of two beams are independent; a real "
        "model's beams of width 6 share less than such draws, by the two columns of decoded-sharing, and so do the "
        "paper's. The longer the answer, the more it weighs: on ShareGPT no gap brings width 6 down into its range"
    ),
)
