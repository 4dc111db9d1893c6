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

from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, cell
from pagedjax.lab.drawing import Series, curves, from_zero, label_axes, panels, plain_log
from pagedjax.sim.curve import belady_bound, load_references, lru_curve
from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.trace import open_trace

FILES = {t: f"data/traces/mooncake_{t}_trace.jsonl.gz" for t in ("conversation", "synthetic")}
TOKENS = (10_000, 100_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000, 10_000_000, 50_000_000)
BLOCK = 512
# Fig. 9 prints no numbers; read off the plot, to about half a point.
READ_OFF = {
    "conversation": {
        10**4: 0.045,
        10**5: 0.073,
        10**6: 0.087,
        2 * 10**6: 0.12,
        3 * 10**6: 0.17,
        10**7: 0.325,
    },
    "synthetic": {10**5: 0.012, 10**6: 0.148, 2 * 10**6: 0.235, 3 * 10**6: 0.31, 10**7: 0.58},
}


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"trace": "synthetic", "block_size": BLOCK, "bound": False}]
    return [{"trace": t, "block_size": b, "bound": b == BLOCK} for t in FILES for b in (128, 256, 512)]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
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
            head = replay(trace.head(counts.requests // 2), size, Unbounded())
            row |= {"mean_per_request": counts.mean_per_request, "by_engine": counts.by_engine}
            row["last_half_by_block"] = (counts.hit_blocks - head.hit_blocks) / (counts.blocks - head.blocks)
            row["last_half_by_token"] = (counts.hit_tokens - head.hit_tokens) / (counts.tokens - head.tokens)
        yield row


def _at(trace: str, tokens: int | None, column: str) -> Value:
    return cell(column, trace=trace, block_size=BLOCK, capacity_tokens=tokens)


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hit ratio by block of LRU and Belady's bound against capacity, a panel for each trace."""
    made = panels(figure, list(FILES), columns=2, share_y=True)
    for name, axes in zip(FILES, made):
        own = [r for r in rows if r["trace"] == name and r["block_size"] == BLOCK and r["capacity_tokens"]]
        series = []
        for column, label in (("lru_by_block", "LRU"), ("bound_by_block", "bound")):
            there = [r for r in own if r.get(column) is not None]
            series.append(Series(label, [r["capacity_tokens"] for r in there], [r[column] for r in there]))
        curves(axes, series)
        plain_log(axes.xaxis, axes.set_xscale)
        label_axes(axes, "capacity, tokens", "hit ratio by block" if axes is made[0] else "")
    from_zero(*made)


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
        *(
            Claim(f"{name}, ideal", paper, _TABLE, _at(name, None, "lru_by_block"))
            for name, paper in (("conversation", 0.40), ("synthetic", 0.66))
        ),
        *(
            Claim(
                f"{name}, share of ideal at 3M tokens",
                paper,
                "Mooncake FAST'25, Fig. 9 (text)",
                _at(name, 3_000_000, "share_of_ideal"),
            )
            for name, paper in (("conversation", 0.41), ("synthetic", 0.46))
        ),
        *(
            Claim(
                f"{name}, {tokens:,} tokens",
                paper,
                "Mooncake FAST'25, read off Fig. 9",
                _at(name, tokens, "lru_by_block"),
            )
            for name, values in READ_OFF.items()
            for tokens, paper in values.items()
        ),
        *(
            Claim(
                f"{name}, ideal, of the last half by {what}",
                paper,
                _TABLE,
                _at(name, None, f"last_half_by_{what}"),
            )
            for name, paper in (("conversation", 0.40), ("synthetic", 0.66))
            for what in ("block", "token")
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
    note=(
        "the paper gives no formula for its ratio. On the published conversation trace every definition (by block "
        ".366, full blocks .382, tokens .374, mean per request .409) but the last lies below its 40 %, and the curve "
        "runs 3 to 4 points under Fig. 9 above 10^4 tokens: worst, in proportion, at 10^5 and 10^6. Counting the last "
        "half only, with a warm cache, gives its 40 % there, but .85 where it prints .66 for synthetic, so that is not "
        "the paper's definition. Synthetic lies on the published curve; at 10^5 tokens the difference is half a point, "
        "what reading off a plot can miss"
    ),
)
