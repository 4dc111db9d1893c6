"""How much of LRU's gap to the best possible can a policy close that does not know the future?

The policy is this project's own `reuse-credit`; beside it what LRU, five policies from the literature, and LRU that is
told which blocks are seen once would find, and the bound. No paper prints these figures. Cost: about 3 minutes.
    pagedjax experiment run policy-gap
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache.eviction import EvictionPolicy
from pagedjax.cache.policies import ReuseCredit
from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, cell
from pagedjax.lab.drawing import Series, at_each, curves, from_zero, label_axes, panels
from pagedjax.sim.curve import belady_bound, load_references
from pagedjax.sim.replay import BlockStore, LRUStore, PolicyStore, replay, stream_refs
from pagedjax.sim.trace import Trace, open_trace

FILES = {
    "conversation": "data/traces/mooncake_conversation_trace.jsonl.gz",
    "synthetic": "data/traces/mooncake_synthetic_trace.jsonl.gz",
    "agentic": "data/traces/agentic_coding_64tok_sub68.jsonl.xz",
    "sharegpt-llama": "data/traces/sharegpt_llama31_tokens_300.jsonl.gz",
    "sharegpt-qwen": "data/traces/sharegpt_qwen3_tokens_300.jsonl.gz",
}
TOKEN_BLOCK = 16  # where a trace has token ids
AGENTIC_REQUESTS = 1000  # as in eviction-policies
CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)
CLASSICAL = ["slru", "s3fifo", "arc", "lirs", "gdsf-kept"]  # eviction-policies has all
FEW = ["arc", "gdsf-kept"]  # sessions one after another: all policies find the same


class _NoUses(ReuseCredit):
    def _worth(self, uses: int) -> float:
        return 0.0


class _EachUse(ReuseCredit):
    def _worth(self, uses: int) -> float:
        return float(uses - 1)


class _NothingLearned(ReuseCredit):
    def _class(self, length: int, last: bool) -> int:
        return 0


class _NoLength(ReuseCredit):
    def _class(self, length: int, last: bool) -> int:
        return int(last)


class _NoLast(ReuseCredit):
    def _class(self, length: int, last: bool) -> int:
        return length.bit_length()


ABLATION: dict[str, Callable[[int], EvictionPolicy]] = {
    "whole": ReuseCredit,
    "no memory after eviction": lambda n: ReuseCredit(n, remembered=0.0),
    "uses do not count": _NoUses,
    "nothing is learned": _NothingLearned,
    "length is not told apart": _NoLength,
    "last block is not told apart": _NoLast,
    "each use counts, not each doubling": _EachUse,
    "no credit: LRU": lambda n: ReuseCredit(n, credit=0.0),
}
CONSTANTS = {
    "credit": (0.5, 0.75, 1.25, 1.5, 2.0),
    "remembered": (0.5, 1.0, 3.0, 4.0),
    "prior": (2.0, 200.0),
    "fade": (2.5, 40.0),
}


class _Known(LRUStore):
    """LRU that is told which blocks are seen once: they never take a place."""

    def __init__(self, capacity: int, trace: Trace, size: int) -> None:
        super().__init__(capacity)
        counts = Counter(key for refs in stream_refs(trace, size) for key in refs.lookup.tolist())
        self._once = {key for key, count in counts.items() if count == 1}

    def touch(self, keys: np.ndarray) -> None:
        super().touch(np.array([key for key in keys.tolist() if key not in self._once], np.int64))


class _ByRequest:
    """A store, and the (hits, blocks) of each request."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.counts: list[tuple[int, int]] = []

    def hits(self, keys: np.ndarray) -> int:
        hits = self._store.hits(keys)
        self.counts.append((hits, len(keys)))
        return hits

    def touch(self, keys: np.ndarray) -> None:
        self._store.touch(keys)


def _played(trace: Trace, size: int, store: BlockStore) -> tuple[float, float, float]:
    """Hit ratio by block of all requests, of the first half, and of the second, in one run."""
    by_request = _ByRequest(store)
    ratio = replay(trace, size, by_request).by_block
    half = len(by_request.counts) // 2
    first, second = (
        sum(hits for hits, _ in part) / sum(blocks for _, blocks in part)
        for part in (by_request.counts[:half], by_request.counts[half:])
    )
    return ratio, first, second


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        common = {"trace": "synthetic", "capacity": 1_000, "head": 200}
        return [
            {"part": "trace", **common, "policies": FEW},
            {"part": "ablation", **common, "variant": "uses do not count"},
            {"part": "constant", **common, "constant": "remembered", "value": 1.0},
        ]
    units: list[Unit] = [
        {"part": "trace", "trace": t, "capacity": c, "head": AGENTIC_REQUESTS if t == "agentic" else 0,
         "policies": FEW if t == "agentic" else CLASSICAL} for t in FILES for c in CAPACITIES]  # fmt: skip
    tight = {"trace": "conversation", "capacity": 10_000, "head": 0}
    units += [{"part": "ablation", **tight, "variant": v} for v in ABLATION]
    units += [
        {"part": "constant", **tight, "constant": name, "value": value}
        for name, values in CONSTANTS.items()
        for value in values
    ]
    return units


def _opened(unit: Unit, data: Path) -> tuple[Trace, int]:
    trace = open_trace(data / FILES[unit["trace"]])
    if unit["head"]:
        trace = trace.head(unit["head"])
    return trace.held(), max(trace.granularity, TOKEN_BLOCK)


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace, size = _opened(unit, data)
    capacity, part = unit["capacity"], unit["part"]
    policy: Any = ReuseCredit
    what = "reuse-credit"
    if part == "ablation":
        what, policy = unit["variant"], ABLATION[unit["variant"]]
    elif part == "constant":
        constant = {unit["constant"]: unit["value"]}
        what, policy = f"{unit['constant']} {unit['value']:g}", lambda n: ReuseCredit(n, **constant)
    row: TableRow = {"part": part, "trace": unit["trace"], "capacity_blocks": capacity, "block_size": size}
    ours = _played(trace, size, PolicyStore(capacity, policy))
    row |= {"what": what} | dict(zip(("by_block", "first_half", "second_half"), ours))
    if part == "trace":
        row |= _beside(trace, size, capacity, ours[0], unit["policies"])
    yield row


def _beside(trace: Trace, size: int, capacity: int, ours: float, policies: list[str]) -> TableRow:
    """LRU, what the literature has, and what cannot be had."""
    lru = _played(trace, size, LRUStore(capacity))
    row: TableRow = dict(zip(("lru", "lru_first_half", "lru_second_half"), lru))
    others = {name: replay(trace, size, PolicyStore(capacity, name)).by_block for name in policies}
    refs = load_references(trace, size)
    bound = belady_bound(refs, capacity) / len(refs.keys)
    gap = bound - lru[0]
    known = replay(trace, size, _Known(capacity, trace, size)).by_block
    best = max(others, key=lambda name: others[name])
    return row | {
        "best_other": others[best],
        "best_is": best,
        "one_timers_known": known,
        "bound": bound,
        "gap_closed": (ours - lru[0]) / gap if gap > 1e-9 else None,
        **others,
    }


def _at(column: str, capacity: int = 10_000, trace: str = "conversation") -> Value:
    return cell(column, part="trace", trace=trace, capacity_blocks=capacity)


def _share_of_gap(column: str) -> Value:
    """What a column adds to LRU over what the bound adds, conversation, 10,000 blocks."""

    def pick(rows: list[TableRow]) -> list[float]:
        lru, bound, value = (_at(name)(rows) for name in ("lru", "bound", column))
        return [(v - low) / (high - low) for v, low, high in zip(value, lru, bound)]

    return pick


def _least_over_lru(rows: list[TableRow]) -> list[float]:
    own = [r for r in rows if r["part"] == "trace"]
    whole = len(own) == len(FILES) * len(CAPACITIES)
    return [min(100 * (r["by_block"] - r["lru"]) for r in own)] if whole else []


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hit ratio against capacity of LRU, the best classical policy, reuse-credit and what bounds them, by trace."""
    labels = {"lru": "LRU", "best_other": "best of the others", "by_block": "reuse-credit",
              "one_timers_known": "LRU, one-timers known", "bound": "bound"}  # fmt: skip
    traces = list(dict.fromkeys(r["trace"] for r in rows if r["part"] == "trace"))
    made = panels(figure, traces, columns=min(len(traces), 2), width=4.5)
    for trace, axes in zip(traces, made):
        own = [r for r in rows if r["part"] == "trace" and r["trace"] == trace]
        series = []
        for column, label in labels.items():
            there = [r for r in own if r.get(column) is not None]
            series.append(Series(label, [r["capacity_blocks"] for r in there], [r[column] for r in there]))
        curves(axes, series, style={label: i for i, label in enumerate(labels.values())})
        at_each(axes, [r["capacity_blocks"] for r in own], base=10)
        label_axes(axes, "capacity, blocks", "hit ratio by block")
    from_zero(*made)


_OWN = "no paper: this project's policy on Mooncake's conversation trace"
EXPERIMENT = Experiment(
    name="policy-gap",
    question="How much of LRU's gap to the best possible can a policy close that does not know the future?",
    kind="counted",
    definition=(
        "hit blocks over blocks, tails included, contiguous prefixes, by the engine's manager one request at a time; "
        "halves: of the requests, in one run; reuse-credit with one set of constants for all traces and capacities, "
        "chosen on the first half of conversation at 10,000 blocks; one-timers known: LRU that gives no place to "
        "blocks the trace asks for once; bound: Belady with bypass over block requests; gap closed: what reuse-credit "
        "adds to LRU over what the bound adds"
    ),
    claims=(
        Claim("conversation, 10,000 blocks, LRU", None, _OWN, _at("lru")),
        Claim("conversation, 10,000 blocks, best of the others", None, _OWN, _at("best_other")),
        Claim("conversation, 10,000 blocks, reuse-credit", None, _OWN, _at("by_block")),
        Claim("the same, second half, LRU", None, _OWN, _at("lru_second_half")),
        Claim("the same, second half, reuse-credit", None, _OWN, _at("second_half")),
        Claim("share of LRU's gap that reuse-credit closes", None, _OWN, _share_of_gap("by_block")),
        Claim("share that the best of the others closes", None, _OWN, _share_of_gap("best_other")),
        Claim("share that knowing the one-timers closes", None, _OWN, _share_of_gap("one_timers_known")),
        Claim(
            "least of reuse-credit less LRU, points, all traces and capacities", None, _OWN, _least_over_lru
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
    note=(
        "the constants were chosen on the first half of conversation at 10,000 blocks, but the policy's form was found "
        "on the whole of it, and other traces and capacities were looked at before both were fixed: the second half "
        "is no unseen data in the strict sense, other traffic is. Agentic sessions play one after another, where all "
        "policies find the same"
    ),
)
