"""What does the block size cost and bring on real token traces?

Source: PagedAttention §7.2 in words (16 is large enough to use the device, small enough to share).
Counted on the real manager with an unbounded pool. Cost: about a minute.
    pagedjax experiment run block-size
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import Series, at_each, curves, from_zero, label_axes, panels
from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.trace import open_trace

FILES = {t: f"data/traces/sharegpt_{t}_tokens_300.jsonl.gz" for t in ("llama31", "qwen3")}
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PRINTED = {8: 0.0765, 16: 0.0759, 32: 0.0751, 64: 0.0734, 128: 0.0687, 256: 0.0637}


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"trace": "llama31", "block_size": 64, "partial": 0, "head": 60}]
    return [
        {"trace": t, "block_size": b, "partial": p, "head": 0}
        for t in FILES
        for b in SIZES
        for p in ((0, 1) if b > 1 else (0,))
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """Requests one after another, answers cached too; the pool is large enough never to evict."""
    trace = open_trace(data / FILES[unit["trace"]])
    if unit["head"]:
        trace = trace.head(unit["head"])
    size = unit["block_size"]
    total = sum(-(-(r.num_input + r.num_output) // size) for r in trace)
    manager = PagedManager(num_blocks=total + 2, block_size=size, partial=unit["partial"])
    requests = prompt_tokens = slots = tokens = hashes = 0
    for seq, request in enumerate(trace):
        assert request.token_ids is not None and request.output_ids is not None
        chain = TokenChain(request.token_ids, block_size=size)
        hit = manager.begin(seq, chain)
        chain.extend(request.output_ids.tolist())
        manager.reserve(seq, len(chain) - hit.num_tokens)
        manager.commit(seq, len(chain), float(seq))
        requests += 1
        prompt_tokens += request.num_input
        tokens += len(chain)
        slots += len(manager.table(seq)) * size
        hashes += chain.num_full_blocks
        manager.release(seq)
    stats = manager.stats
    counts = replay(trace, size, Unbounded(), insert="prompt+output")
    yield {
        "trace": unit["trace"],
        "block_size": size,
        "partial_reuse": bool(unit["partial"]),
        "hit_by_token": counts.by_token,
        "hit_engine": stats.hit_tokens / prompt_tokens,
        "recomputed_tokens": counts.hit_tokens - stats.hit_tokens,
        "fragmentation": 1 - tokens / slots,
        "worst_tail_tokens": size - 1,
        "hashes_per_request": hashes / requests,
        "lookups_per_request": counts.full_blocks / requests,
        "copies": stats.copies,
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Prompt tokens found by the engine's rules at each block size: whole blocks, and parts of blocks copied."""
    made = panels(figure, list(FILES), columns=2, share_y=True)
    for name, axes in zip(FILES, made):
        series = [
            Series(label, [r["block_size"] for r in own], [r["hit_engine"] for r in own])
            for partial, label in ((False, "whole blocks"), (True, "and parts"))
            if (own := [r for r in rows if r["trace"] == name and r["partial_reuse"] == partial])
        ]
        curves(axes, series)
        at_each(axes, [r["block_size"] for r in rows], base=2)
        label_axes(axes, "block size, tokens", "prompt tokens from the cache" if axes is made[0] else "")
    from_zero(*made)


EXPERIMENT = Experiment(
    name="block-size",
    question="What does the block size cost and bring on real token traces, with and without parts of blocks?",
    kind="counted",
    definition=(
        "hit_by_token: replay with an infinite cache, prompts and answers inserted; hit_engine: PagedManager under "
        "its own rules, requests one after another; fragmentation: unused slots over slots of the final tables"
    ),
    claims=tuple(
        Claim(
            f"llama31, block size {b}: hit by token",
            v,
            "counted by another program on the published trace",
            cell("hit_by_token", least=2, trace="llama31", block_size=b, partial_reuse=False),
            "identity",
            4,
        )
        for b, v in PRINTED.items()
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
)
