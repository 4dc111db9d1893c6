"""Which eviction policy keeps the right prefixes, and how far is the best possible?

Source: Mooncake report (arXiv 2407.00079) Table 1: LRU is best, LFU and length-aware lose up to 6 points.
Its trace cannot be had; the order on the FAST'25 traces and on agentic sessions stands here instead.
Cost: about 3 minutes. Belady bounds block requests and is no proven optimum for prefix chains.
    pagedjax experiment run eviction-policies
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.cache import POLICIES
from pagedjax.cache.policies import Belady
from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value
from pagedjax.lab.drawing import dots, label_axes, panels, short
from pagedjax.sim.curve import belady_bound, load_references
from pagedjax.sim.replay import PolicyStore, future_of, replay
from pagedjax.sim.trace import Trace, open_trace

FILES = {
    "conversation": "data/traces/mooncake_conversation_trace.jsonl.gz",
    "synthetic": "data/traces/mooncake_synthetic_trace.jsonl.gz",
    "agentic": "data/traces/agentic_coding_64tok_sub68.jsonl.xz",
}
CAPACITIES = (1_000, 10_000, 30_000, 50_000)
AGENTIC_REQUESTS = 1000  # of 4,842: the first sessions; they play one after another, so more add no pressure


def _units(smoke: bool, seed: int) -> list[Unit]:
    traces = ("synthetic",) if smoke else tuple(FILES)
    capacities = (1_000,) if smoke else CAPACITIES
    head = 300 if smoke else 0
    # These traces name no category of request: to a policy that goes by it all would be one.
    policies = [name for name, policy in POLICIES.items() if not getattr(policy, "reads_groups", False)]
    return [
        {"trace": t, "capacity": c, "head": head, "policies": policies} for t in traces for c in capacities
    ]


def _trace(unit: Unit, data: Path) -> Trace:
    trace = open_trace(data / FILES[unit["trace"]])
    head = unit["head"] or (AGENTIC_REQUESTS if unit["trace"] == "agentic" else 0)
    return (trace.head(head) if head else trace).held()


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace = _trace(unit, data)
    size, capacity = trace.granularity, unit["capacity"]
    row: TableRow = {"trace": unit["trace"], "capacity_blocks": capacity, "block_size": size}
    future = future_of(trace, size)
    for name in unit["policies"]:
        policy: Any = (lambda n: Belady(n, future)) if name == "belady" else name
        row[name] = replay(trace, size, PolicyStore(capacity, policy)).by_block
    refs = load_references(trace, size)
    row["bound"] = belady_bound(refs, capacity) / len(refs.keys)
    yield row


def _lead(trace: str, capacity: int, worse: str) -> Value:
    def pick(rows: list[TableRow]) -> list[float]:
        own = [r for r in rows if (r["trace"], r["capacity_blocks"]) == (trace, capacity)]
        return [r["lru"] - r[worse] for r in own[:1]]

    return pick


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hit ratio of every policy at each capacity, a panel for each trace; `bound` is Belady's, and no policy's."""
    traces = list(dict.fromkeys(r["trace"] for r in rows))
    fixed = ("trace", "capacity_blocks", "block_size")
    names = [c for c in dict.fromkeys(c for r in rows for c in r) if c not in fixed]
    last = [r for r in rows if r["trace"] == traces[0]]
    middle = last[len(last) // 2]
    names.sort(key=lambda name: -(middle.get(name) or 0.0))
    capacities = list(dict.fromkeys(r["capacity_blocks"] for r in rows))
    made = panels(figure, traces, columns=len(traces), height=0.9 + 0.24 * len(names))
    for trace, axes in zip(traces, made):
        own = {r["capacity_blocks"]: r for r in rows if r["trace"] == trace}
        series = {
            f"{short(c)} blocks": [own[c].get(n) if c in own else None for n in names] for c in capacities
        }
        first = axes is made[0]
        dots(axes, names if first else [""] * len(names), series, key=first, room=len(capacities))
        axes.set_xlim(left=0)
        label_axes(axes, f"hit ratio, blocks of {next(iter(own.values()))['block_size']} tokens")


_TABLE = "Mooncake report, Table 1 (another trace)"
EXPERIMENT = Experiment(
    name="eviction-policies",
    question="Which eviction policy keeps the right prefixes, and how far is the best possible?",
    kind="counted",
    definition=(
        "hit blocks over blocks, tails included, contiguous prefixes; a request's blocks are used together and "
        "released tail first; bound: Belady with bypass over block requests, contiguous or not"
    ),
    claims=(
        Claim(
            "LRU less LFU at 10,000 blocks, conversation", 0.05, _TABLE, _lead("conversation", 10_000, "lfu")
        ),
        Claim(
            "LRU less LFU at 30,000 blocks, conversation", 0.05, _TABLE, _lead("conversation", 30_000, "lfu")
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
    note="the published table is on a trace that is not public here; only the order can be compared",
)
