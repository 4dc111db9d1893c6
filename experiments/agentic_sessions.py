"""What do coding agents' sessions look like, and what share of a session's prompts is found again?

Source: README of kv-cache-tester (739 sessions; hit rate a session with no warm prefix: least 61 %, quartiles 92, 96
and 97 %, mean 93 %; requests a session: median 48, mean 80; input P10, P50, P90 43,475, 109,903, 300,118; output 103,
218, 937). Counted on the 710 of its sessions that are at hand. Cost: two minutes.
    pagedjax experiment run agentic-sessions
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import Series, curves, from_zero, label_axes, panels
from pagedjax.sim.replay import BlockKeys, Unbounded
from pagedjax.sim.trace import open_trace

FILE = "data/traces/agentic_coding_64tok_all.jsonl.xz"
PERCENTILES = (0, 10, 25, 50, 75, 90)
# Quantity -> percentile, or "mean" -> as printed.
PRINTED: dict[str, dict[str, float]] = {
    "hit rate of a session": {"0": 0.61, "25": 0.92, "50": 0.96, "75": 0.97, "mean": 0.93},
    "requests of a session": {"50": 48, "mean": 80},
    "input tokens of a request": {"10": 43_475, "50": 109_903, "90": 300_118},
    "output tokens of a request": {"10": 103, "50": 218, "90": 937},
}


def _units(smoke: bool, seed: int) -> list[Unit]:
    return [{"head": 300 if smoke else 0}]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace = open_trace(data / FILE)
    if unit["head"]:
        trace = trace.head(unit["head"])
    keys = BlockKeys(trace, trace.granularity)
    values: dict[str, list[float]] = {name: [] for name in PRINTED}
    hit = total = 0
    for _, requests in groupby(trace, key=lambda request: request.session):
        store, found, asked, count = Unbounded(), 0, 0, 0
        for request in requests:
            refs = keys.refs(request)
            found += store.hits(refs.lookup)
            asked += len(refs.lookup)
            store.touch(refs.insert)
            count += 1
            values["input tokens of a request"].append(request.num_input)
            values["output tokens of a request"].append(request.num_output)
        values["requests of a session"].append(count)
        if asked:
            values["hit rate of a session"].append(found / asked)
        hit, total = hit + found, total + asked
    for name, drawn in values.items():
        row: TableRow = {"quantity": name, "count": len(drawn), "mean": float(np.mean(drawn))}
        yield row | {str(p): float(np.percentile(drawn, p)) for p in PERCENTILES}
    yield {"quantity": "hit rate of all blocks", "count": total, "mean": hit / total}


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Percentiles over sessions of the share of a session's blocks that are found again, beside the printed ones."""
    (axes,) = panels(figure, ["hit rate of a session that starts cold"], width=5.5)
    names = [str(p) for p in PERCENTILES]
    (own,) = [r for r in rows if r["quantity"] == "hit rate of a session"]
    printed = {int(k): v for k, v in PRINTED["hit rate of a session"].items() if k != "mean"}
    curves(
        axes,
        [
            Series(f"{own['count']} sessions", PERCENTILES, [own[n] for n in names]),
            Series("739 sessions, printed", list(printed), list(printed.values()), printed=True),
        ],
    )
    from_zero(axes)
    label_axes(axes, "percentile of the sessions", "hit rate by block")


EXPERIMENT = Experiment(
    name="agentic-sessions",
    question="What do coding agents' sessions look like, and what share of a session's prompts is found again?",
    kind="counted",
    definition=(
        "hit blocks over full blocks of 64 tokens of a session that starts cold and evicts nothing, requests of "
        "sub-agents among its own; percentiles over sessions, or over requests"
    ),
    claims=tuple(
        Claim(
            f"{quantity}, {'mean' if at == 'mean' else f'percentile {at}'}",
            value,
            "README of kv-cache-tester",
            cell(at, least=5, quantity=quantity),
        )
        for quantity, printed in PRINTED.items()
        for at, value in printed.items()
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(FILE,),
    note="29 of the 739 sessions, the longest, are not at hand, so long inputs and counts come out lower",
)
