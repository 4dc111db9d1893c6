"""Is it quicker to swap a preempted request's blocks, or to compute them again?

Source: PagedAttention §7.3, Fig. 19: swapping suffers at small blocks (many small transfers), recomputation does not
depend on the block size and never costs more than 20 % above swapping; 16 to 64 comparable end to end. Simulated.
    pagedjax experiment run swap-recompute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager
from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, ratio
from pagedjax.lab.drawing import at_each, curves, from_zero, label_axes, mean_curve, panels
from pagedjax.sim.simulator import simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    KV_SLOTS,
    LENGTH_NOTE,
    MACHINES,
    MAX_LEN,
    SCHEDULER,
    SEEDS,
    cost,
    figure,
    over_seeds,
    workload,
)

SIZES = (8, 16, 32, 64, 128, 256)
RATE = 3.0  # ShareGPT requests per second: above what the memory holds, so that requests are preempted
TRANSFER_S = 5e-6  # of the A100 file: an assumption, so the figures are given for twice as much, too
MODES = ("recompute", "swap", "auto")


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = (16, 256) if smoke else SIZES
    units = [
        {"block_size": b, "mode": m, "transfer_s": TRANSFER_S, "requests": 60 if smoke else 250}
        for b in sizes
        for m in MODES
    ]
    if smoke:
        return [{**unit, "hardware": MACHINES[0], "seed": seed} for unit in units]
    slower = [{**u, "transfer_s": 2 * TRANSFER_S} for u in units if u["mode"] == "swap"]
    return over_seeds(units, seed) + [
        {**unit, "hardware": MACHINES[0], "seed": seed + i} for unit in slower for i in range(SEEDS)
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    size = unit["block_size"]
    model = cost("opt-13b", size, unit["hardware"])
    model = replace(model, hardware=replace(model.hardware, transfer_s=unit["transfer_s"]))
    trace = workload("sharegpt", data, unit["requests"], unit["seed"]).with_arrivals(RATE, seed=unit["seed"])
    host = 0 if unit["mode"] == "recompute" else KV_SLOTS // size
    # No prefix cache: a request computed again finds nothing, as in the paper.
    held = PagedManager(
        num_blocks=KV_SLOTS // size + 1, block_size=size, prefix_caching=False, host_blocks=host
    )
    config = replace(SCHEDULER, preemption=unit["mode"])
    result = simulate(trace, held, model, config, max_model_len=MAX_LEN)
    summary = result.summary()
    yield {
        "block_size": size,
        "mode": unit["mode"],
        "transfer_s": unit["transfer_s"],
        "hardware": unit["hardware"],
        "seed": unit["seed"],
        "normalized_s": summary.normalized_s,
        "requests_per_s": summary.requests_per_s,
        "preemptions": summary.preemptions,
        "swaps": result.num_swaps,
        "swap_out_and_in_of_256_tokens_s": 2 * model.swap_s(-(-256 // size)),
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Normalized latency by block size where preempted requests are swapped, recomputed, or the sooner of both."""
    own = [r for r in rows if r["hardware"] == rows[0]["hardware"]]
    waits = list(dict.fromkeys(r["transfer_s"] for r in own))
    made = panels(figure, [f"{1e6 * w:g} µs to start a transfer" for w in waits], columns=2, share_y=True)
    for wait, axes in zip(waits, made):
        there = [r for r in own if r["transfer_s"] == wait]
        modes = [m for m in MODES if any(r["mode"] == m for r in there)]
        series = [
            mean_curve((r for r in there if r["mode"] == m), "block_size", "normalized_s", m) for m in modes
        ]
        curves(axes, series, style={m: i for i, m in enumerate(MODES)}, dodge=1.12)
        at_each(axes, [r["block_size"] for r in there], base=2)
        label_axes(axes, "block size, tokens", "s per token (simulated)" if axes is made[0] else "")
    from_zero(*made)


def _over(column: str, of: TableRow, over: TableRow) -> Callable[[str], Value]:
    return lambda machine: ratio(column, {**of, "hardware": machine}, {**over, "hardware": machine})


def _swap(size: int, transfer_s: float = TRANSFER_S) -> TableRow:
    return {"block_size": size, "mode": "swap", "transfer_s": transfer_s}


def _recompute(size: int) -> TableRow:
    return {"block_size": size, "mode": "recompute"}


EXPERIMENT = Experiment(
    name="swap-recompute",
    question="Is it quicker to swap a preempted request's blocks, or to compute them again?",
    kind="simulated",
    definition=(
        "mean latency over answer tokens, ShareGPT lengths at 3 requests per second; A100-40GB file, OPT-13B shape; "
        "a block moves as two transfers per layer, each with its own start; five seeds"
    ),
    claims=(
        *(
            figure(
                f"block size {size}: swapping over recomputing, normalized latency",
                1.0,
                "PagedAttention §7.3 (comparable)",
                _over("normalized_s", _swap(size), _recompute(size)),
            )
            for size in (16, 32, 64)
        ),
        *(
            Claim(
                f"block size {size}: the same, copies that start in {2e6 * TRANSFER_S:g} µs",
                None,
                "sensitivity to an assumption",
                _over("normalized_s", _swap(size, 2 * TRANSFER_S), _recompute(size))(MACHINES[0]),
            )
            for size in (8, 16)
        ),
        figure(
            "block size 8: swapping over recomputing, normalized latency",
            None,
            "PagedAttention §7.3 (excessive overhead)",
            _over("normalized_s", _swap(8), _recompute(8)),
        ),
        figure(
            "moving 256 tokens out and in: block size 8 over 256",
            None,
            "PagedAttention Fig. 19a (no numbers printed)",
            _over("swap_out_and_in_of_256_tokens_s", _swap(8), _swap(256)),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT),
    open=("hardware",),
    note=LENGTH_NOTE,
)
