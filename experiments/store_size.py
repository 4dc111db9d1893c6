"""How large must a store of host memory be, and what does pooling it over the nodes bring?

Source: Mooncake FAST'25, Fig. 10: 10 prefill nodes with 3M tokens of cache each: one pool over all reaches up to 2.36
x the hit rate of caches apart, and up to 48 % less prefill time, over its three traces (two are here). Simulated.
Cost: five minutes.
    pagedjax experiment run store-size
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, ratio
from pagedjax.lab.drawing import Series, at_each, curves, from_zero, label_axes, panels
from pagedjax.sim.fleet import Arrivals, StoreSpec, run_fleet

from ._fleet import CONVERSATION, LLAMA, SYNTHETIC, instances, mooncake, row

FILES = {"conversation": (CONVERSATION, 3000, 3.0), "synthetic": (SYNTHETIC, 3993, 3.0)}
TOKENS = (0, 300_000, 1_000_000, 3_000_000, 10_000_000)  # of each node's memory
NODES = 10
PRINTED = 3_000_000


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        base = {
            "workload": "synthetic",
            "requests": 30,
            "rate": 20.0,
            "nodes": 2,
            "disk_tokens": 0,
            "seed": seed,
        }
        return [{**base, "tokens": 1_000_000, "pooled": pooled} for pooled in (False, True)]
    units = [
        {
            "workload": name,
            "requests": count,
            "rate": rate,
            "nodes": NODES,
            "tokens": tokens,
            "disk_tokens": 0,
            "pooled": pooled,
            "seed": seed,
        }
        for name, (_, count, rate) in FILES.items()
        for tokens in TOKENS
        for pooled in ((False, True) if tokens else (False,))
    ]
    disk = {"workload": "conversation", "requests": 3000, "rate": 3.0, "nodes": NODES, "seed": seed}
    return [*units, {**disk, "tokens": 300_000, "disk_tokens": 10_000_000, "pooled": True}]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    file = FILES[unit["workload"]][0]
    # A pool of 0.1M tokens on the device: what is kept between requests is the store's to keep.
    specs = instances(unit["nodes"], 512, blocks=256)
    size = specs[0].cost.kv_bytes_per_token  # type: ignore[union-attr]
    store = StoreSpec(unit["tokens"] * size, unit["disk_tokens"] * size, pooled=unit["pooled"])
    result = run_fleet(
        mooncake(data, unit["requests"], file),
        specs,
        router="random",
        arrivals=Arrivals(scale=unit["rate"]),
        store=store if unit["tokens"] else None,
        seed=unit["seed"],
    )
    computed = sum(t.computed_tokens for t in result.instances)
    answered = sum(r.times.num_output - 1 for r in result.records)
    columns = ("workload", "tokens", "disk_tokens", "pooled", "nodes", "seed")
    yield row(result, **{c: unit[c] for c in columns}) | {
        "prefill_tokens": computed - answered,
        "fetched_own": sum(r.fetched[0] for r in result.records),
        "fetched_other": sum(r.fetched[1] for r in result.records),
        "fetched_disk": sum(r.fetched[2] for r in result.records),
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hits and waiting by the memory behind the pools, each node's own or pooled; crosses: with a disk as well."""
    names = list(dict.fromkeys(r["workload"] for r in rows))
    titles = [f"{name}: {what}" for name in names for what in ("hit rate", "mean TTFT, s")]
    made = panels(figure, titles, columns=2)
    for i, axes in enumerate(made):
        name, column = names[i // 2], ("hit_by_token", "ttft_mean_s")[i % 2]
        mine = [r for r in rows if r["workload"] == name]
        series = []
        for pooled, label in ((False, "each its own"), (True, "one pool")):
            own = [r for r in mine if not r["disk_tokens"] and (r["pooled"] == pooled or not r["tokens"])]
            series.append(Series(label, [r["tokens"] / 1e6 for r in own], [r[column] for r in own]))
        disk = [r for r in mine if r["disk_tokens"]]
        series.append(
            Series("with disk", [r["tokens"] / 1e6 for r in disk], [r[column] for r in disk], printed=True)
        )
        curves(axes, series)
        axes.set_xscale("symlog", linthresh=0.3)
        at_each(axes, [r["tokens"] / 1e6 for r in rows])
        label_axes(axes, "millions of tokens of each node" if i >= len(made) - 2 else "")
    from_zero(*made)


def _pool_over_apart(workload: str, column: str) -> Any:
    where = {"workload": workload, "tokens": PRINTED, "disk_tokens": 0}
    return ratio(column, {**where, "pooled": True}, {**where, "pooled": False})


EXPERIMENT = Experiment(
    name="store-size",
    question="How large must a store of host memory be, and what does pooling it over the nodes bring?",
    kind="simulated",
    definition=(
        f"{LLAMA}, but 0.13M tokens of KV on the device, so that the store decides; 10 nodes of one "
        "instance, random router, 400 Gbit/s; a hit in a farther tier is fetched where that is predicted to "
        "be sooner; the first 3,000 requests of the conversation trace and all of the synthetic one, at 3 x "
        "their rates, block size 512"
    ),
    claims=(
        *(
            Claim(
                f"hit rate, one pool over caches apart, 3M tokens a node, {name}",
                2.36,
                "Mooncake FAST'25 Fig. 10 (the most of three traces)",
                _pool_over_apart(name, "hit_by_token"),
            )
            for name in FILES
        ),
        *(
            Claim(
                f"prompt tokens computed, one pool over caches apart, 3M tokens a node, {name}",
                0.52,
                "Mooncake FAST'25 Fig. 10 (up to 48 % less prefill time)",
                _pool_over_apart(name, "prefill_tokens"),
            )
            for name in FILES
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(CONVERSATION, SYNTHETIC),
    note="how much a pool brings hangs on how requests are spread over the nodes: fleet-conditions",
)
