"""Is it quicker to swap a preempted request's blocks, or to compute them again?

Source: PagedAttention §7.3, Fig. 19: swapping suffers at small blocks (many small transfers), recomputation does not
depend on the block size and never costs more than 20 % above swapping; 16 to 64 comparable end to end. Simulated.
    pagedjax experiment run swap-recompute
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager
from pagedjax.lab import Claim, Experiment, Row, Unit, ratio
from pagedjax.sim.simulator import simulate

from ._serving import (
    ALPACA,
    ALPACA_TEXT,
    KV_SLOTS,
    LENGTH_NOTE,
    MAX_LEN,
    SCHEDULER,
    cost,
    workload,
)

SIZES = (8, 16, 32, 64, 128, 256)
RATE = 3.0  # ShareGPT requests per second: above what the memory holds, so that requests are preempted
MODES = ("recompute", "swap", "auto")


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = (16, 256) if smoke else SIZES
    return [
        {"block_size": b, "mode": m, "requests": 60 if smoke else 250, "seed": seed}
        for b in sizes
        for m in MODES
    ]


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    size = unit["block_size"]
    model = cost("opt-13b", size)
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
        "normalized_s": summary.normalized_s,
        "requests_per_s": summary.requests_per_s,
        "preemptions": summary.preemptions,
        "swaps": result.num_swaps,
        "swap_out_and_in_of_256_tokens_s": 2 * model.swap_s(-(-256 // size)),
    }


def _plot(rows: list[Row], axes: Any) -> None:
    for mode in MODES:
        own = [r for r in rows if r["mode"] == mode]
        axes.plot([r["block_size"] for r in own], [r["normalized_s"] for r in own], marker="o", label=mode)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("normalized latency, s per token (simulated)")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    name="swap-recompute",
    question="Is it quicker to swap a preempted request's blocks, or to compute them again?",
    kind="simulated",
    definition=(
        "mean latency over answer tokens, ShareGPT lengths at 3 requests per second; A100-40GB file, OPT-13B shape; "
        "a block moves as two transfers per layer, each with its own start"
    ),
    claims=(
        *(
            Claim(
                f"block size {size}: swapping over recomputing, normalized latency",
                1.0,
                "PagedAttention §7.3 (comparable)",
                ratio(
                    "normalized_s",
                    {"block_size": size, "mode": "swap"},
                    {"block_size": size, "mode": "recompute"},
                ),
            )
            for size in (16, 32, 64)
        ),
        Claim(
            "moving 256 tokens out and in: block size 8 over 256",
            None,
            "PagedAttention Fig. 19a (no numbers printed)",
            ratio(
                "swap_out_and_in_of_256_tokens_s",
                {"block_size": 8, "mode": "swap"},
                {"block_size": 256, "mode": "swap"},
            ),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(ALPACA, ALPACA_TEXT),
    note=LENGTH_NOTE,
)
