"""What do prefill and decode on different instances bring, and at which ratio?

Source: Mooncake, arXiv 2407.00079, and its Fig. 7 on layer-wise transfer; no figure of the paper has this setting:
its model and trace are not here. Simulated, Mooncake's conversation trace. Cost: three minutes.
    pagedjax experiment run disaggregation
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, ratio
from pagedjax.lab.drawing import at_each, curves, from_zero, label_axes, mean_curve, panels, plain_log, rule
from pagedjax.sim.fleet import Arrivals, LinkSpec, run_fleet

from ._fleet import CONVERSATION, LLAMA, instances, mooncake, row

TOTAL = 8
PREFILL = (0, 3, 4, 5, 6, 7)  # of 8 instances; 0: all are mixed
LIMITS = {"ttft_limit_s": 10.0, "tpot_limit_s": 0.05}
WIRES = {
    "400 Gbit/s, whole": (50e9, "whole"),
    "400 Gbit/s, layers": (50e9, "layers"),
    "10 Gbit/s, layers": (1.25e9, "layers"),
}


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        base = {"wire": "400 Gbit/s, layers", "rate": 2.0, "requests": 10, "seed": seed}
        return [{**base, "prefill": p, "total": 2} for p in (0, 1)]
    return [
        {"prefill": p, "total": TOTAL, "wire": wire, "rate": 3.0, "requests": 500, "seed": seed}
        for p in PREFILL
        for wire in WIRES
        if p or wire == "400 Gbit/s, layers"
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    prefill, total = unit["prefill"], unit["total"]
    specs = instances(total, 64)
    if prefill:
        specs = instances(prefill, 64, name="p", role="prefill")
        specs += instances(total - prefill, 64, name="d", role="decode")
    bytes_per_s, handover = WIRES[unit["wire"]]
    result = run_fleet(
        mooncake(data, unit["requests"]),
        specs,
        router="cache-aware",
        arrivals=Arrivals(scale=unit["rate"]),
        links=LinkSpec(bytes_per_s, 1e-3, handover),
        seed=unit["seed"],
    )
    good = result.summary(**LIMITS)
    columns = ("prefill", "total", "wire", "rate", "seed")
    yield row(result, **{c: unit[c] for c in columns}) | {
        "goodput_share": good.goodput / good.requests_per_s,
        "tpot_p90_s": good.tpot_s[90],
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Eight instances split into those that compute prompts and those that decode, by the wire between them."""
    columns = {
        "ttft_p90_s": "p90 time to first token, s",
        "tbt_p99_s": "p99 between tokens, s",
        "goodput_share": f"share within {LIMITS['ttft_limit_s']:g} s and {1e3 * LIMITS['tpot_limit_s']:g} ms",
    }
    made = panels(figure, list(columns.values()), columns=1, width=6.0, height=2.1)
    for column, axes in zip(columns, made):
        mixed = [r[column] for r in rows if not r["prefill"]]
        own = [r for r in rows if r["prefill"]]
        wires = list(dict.fromkeys(r["wire"] for r in own))
        curves(
            axes,
            [mean_curve((r for r in own if r["wire"] == w), "prefill", column, w) for w in wires],
            style={wire: number for number, wire in enumerate(wires)},
            dodge=1.03,
        )
        if column != "goodput_share":
            plain_log(axes.yaxis, axes.set_yscale)
        if mixed:
            rule(axes, mixed[0], "all mixed")
        at_each(axes, [r["prefill"] for r in own])
    from_zero(made[-1])
    label_axes(made[-1], "prefill instances of 8")


_LAYERS, _WHOLE = "400 Gbit/s, layers", "400 Gbit/s, whole"
EXPERIMENT = Experiment(
    name="disaggregation",
    question="What do prefill and decode on different instances bring, and at which ratio?",
    kind="simulated",
    definition=(
        f"{LLAMA}; 8 instances, the first 500 requests of Mooncake's conversation trace at 3 x its rate, "
        "cache-aware router, block size 64; the decoder computes a prompt's broken last block; goodput: 10 "
        "s to the first token and 50 ms a token after it"
    ),
    claims=(
        Claim(
            "p99 between tokens, mixed over 5 prefill and 3 decode",
            None,
            "our setting",
            ratio("tbt_p99_s", {"prefill": 0}, {"prefill": 5, "wire": _LAYERS}),
        ),
        Claim(
            "p90 TTFT, 5 prefill and 3 decode over mixed",
            None,
            "our setting",
            ratio("ttft_p90_s", {"prefill": 5, "wire": _LAYERS}, {"prefill": 0}),
        ),
        Claim(
            "mean latency, layers over whole, 5 prefill and 3 decode",
            None,
            "our setting; Mooncake's Fig. 7 shows storing hidden behind the computation",
            ratio("latency_mean_s", {"prefill": 5, "wire": _LAYERS}, {"prefill": 5, "wire": _WHOLE}),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(CONVERSATION,),
)
