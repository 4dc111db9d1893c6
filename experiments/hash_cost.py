"""What does naming blocks cost, by hash function and block size?

Source: vLLM V1 blog (prefix caching costs under 1 % at a hit rate of 0). Measured on the host that runs it:
compare rows, not machines. Cost: seconds.
    pagedjax experiment run hash-cost
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache import TokenChain
from pagedjax.cache.hashing import HASHES
from pagedjax.lab import Experiment, TableRow, Unit
from pagedjax.lab.drawing import at_each, curves, label_axes, mean_curve, panels, plain_log


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = [16] if smoke else [8, 16, 32, 64, 128]
    return [
        {"tokens": 2_000 if smoke else 100_000, "sizes": sizes, "rounds": 3 if smoke else 7, "seed": seed}
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """All functions and sizes in one process, interleaved, the best of each kept."""
    tokens = np.random.default_rng(unit["seed"]).integers(0, 50_000, unit["tokens"]).tolist()
    best: dict[tuple[str, int], float] = {}
    for _ in range(unit["rounds"]):
        for name in HASHES:
            for size in unit["sizes"]:
                chain = TokenChain(tokens, block_size=size, hash=name)
                started = time.perf_counter()
                chain.digests(chain.num_full_blocks)
                taken = time.perf_counter() - started
                best[name, size] = min(taken, best.get((name, size), taken))
    for (name, size), taken in best.items():
        yield {
            "hash": name,
            "block_size": size,
            "us_per_1000_tokens": 1e9 * taken / unit["tokens"],
            "times_sha256": taken / best["sha256", size],
        }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Microseconds to name the blocks of 1,000 tokens, by hash and block size."""
    (axes,) = panels(figure, ["hashing 1,000 tokens"], width=5.0)
    names = list(dict.fromkeys(r["hash"] for r in rows))
    curves(
        axes,
        [
            mean_curve((r for r in rows if r["hash"] == n), "block_size", "us_per_1000_tokens", n)
            for n in names
        ],
    )
    at_each(axes, [r["block_size"] for r in rows], base=2)
    plain_log(axes.yaxis, axes.set_yscale)
    label_axes(axes, "block size, tokens", "µs (measured)")


EXPERIMENT = Experiment(
    name="hash-cost",
    question="What does naming blocks cost, by hash function and block size?",
    kind="measured",
    definition="best of 7 interleaved rounds in one process, microseconds for the digests of 1,000 tokens",
    claims=(),
    units=_units,
    run=_run,
    plot=_plot,
    note="times are of the machine that wrote the file; the ratio to sha256 is what carries over",
)
