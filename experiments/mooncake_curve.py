"""What hit ratio does a prefix cache of C tokens reach on Mooncake's traces?

Source: Mooncake, FAST'25, Fig. 9 and Table 2. Expected: 3M tokens reach 41 % of the best ratio on
conversation and 46 % on synthetic. Cost: seconds.
    pagedjax experiment run mooncake-curve
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, Row, Unit, Value, cell
from pagedjax.sim.curve import belady_bound, load_references, lru_curve
from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.trace import open_trace

FILES = {t: f"data/traces/mooncake_{t}_trace.jsonl.gz" for t in ("conversation", "synthetic")}
TOKENS = (10_000, 100_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000, 10_000_000, 50_000_000)
BLOCK = 512


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"trace": "synthetic", "block_size": BLOCK, "bound": False}]
    return [{"trace": t, "block_size": b, "bound": b == BLOCK} for t in FILES for b in (128, 256, 512)]


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    trace = open_trace(data / FILES[unit["trace"]])
    size = unit["block_size"]
    refs = load_references(trace, size)
    curve = lru_curve(refs)
    ideal = curve.by_block(math.inf)
    for tokens in (*TOKENS, math.inf):
        blocks = tokens / size if tokens == math.inf else tokens // size
        row = {
            "trace": unit["trace"],
            "block_size": size,
            "capacity_tokens": None if tokens == math.inf else tokens,
            "lru_by_block": curve.by_block(blocks),
            "lru_by_full_block": curve.by_full_block(blocks),
            "lru_by_token": curve.by_token(blocks),
            "share_of_ideal": curve.by_block(blocks) / ideal,
        }
        if unit["bound"]:
            row["bound_by_block"] = belady_bound(refs, min(int(min(blocks, 1e9)), len(refs.keys))) / len(
                refs.keys
            )
        if tokens == math.inf:
            counts = replay(trace, size, Unbounded())
            row |= {"mean_per_request": counts.mean_per_request, "by_engine": counts.by_engine}
        yield row


def _at(trace: str, tokens: int | None, column: str) -> Value:
    return cell(column, trace=trace, block_size=BLOCK, capacity_tokens=tokens)


def _plot(rows: list[Row], axes: Any) -> None:
    for name in FILES:
        own = [r for r in rows if r["trace"] == name and r["block_size"] == BLOCK and r["capacity_tokens"]]
        at = [r["capacity_tokens"] for r in own]
        axes.plot(at, [r["lru_by_block"] for r in own], marker="o", label=f"{name}, LRU")
        if all("bound_by_block" in r for r in own):
            axes.plot(at, [r["bound_by_block"] for r in own], linestyle=":", label=f"{name}, bound")
    axes.set_xscale("log")
    axes.set_xlabel("capacity, tokens")
    axes.set_ylabel("hit ratio by block")
    axes.legend(fontsize=8)


_FIG = "Mooncake FAST'25, Fig. 9 (text)"
_TABLE = "Mooncake FAST'25, Table 2"
EXPERIMENT = Experiment(
    name="mooncake-curve",
    question="What hit ratio does a prefix cache of a given size reach on Mooncake's traces?",
    kind="counted",
    definition=(
        "hit blocks over blocks, tails included, contiguous prefixes; all blocks of a request inserted at arrival "
        "and touched tail first; one pass over all capacities; by_engine: this engine's rules, over tokens"
    ),
    claims=(
        Claim("conversation, ideal", 0.40, _TABLE, _at("conversation", None, "lru_by_block")),
        Claim("synthetic, ideal", 0.66, _TABLE, _at("synthetic", None, "lru_by_block")),
        Claim(
            "conversation, share of ideal at 3M tokens",
            0.41,
            _FIG,
            _at("conversation", 3_000_000, "share_of_ideal"),
        ),
        Claim(
            "synthetic, share of ideal at 3M tokens",
            0.46,
            _FIG,
            _at("synthetic", 3_000_000, "share_of_ideal"),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
    note=(
        "the paper gives no formula for its ratio. On the published conversation trace every definition (by block "
        ".366, full blocks .382, tokens .374, mean per request .409) but the last lies below its 40 %, and the curve "
        "runs 3 to 4 points under Fig. 9 above 10^4 tokens; synthetic lies on the published curve"
    ),
)
