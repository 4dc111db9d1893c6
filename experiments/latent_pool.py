"""What do block size, sharing and pool size trade where a token costs an eighth of the bytes?

Source: DeepSeek-V2 (arXiv 2405.04434) for the cost; no printed figure for the trade. Counted over all pool sizes at
once on published token traces. Cost: about a minute.
    pagedjax experiment run latent-pool
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import Series, curves, from_zero, label_axes, panels, plain_log
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.curve import load_references, lru_curve
from pagedjax.sim.trace import open_trace

FILES = {t: f"data/traces/sharegpt_{t}_tokens_300.jsonl.gz" for t in ("llama31", "qwen3")}
SIZES = (16, 64, 128, 512)
GIB = (1, 2, 4, 8, 16, 32, 64)
# What a token costs: 8 KV heads of 128 lanes in 80 layers at 16 bits, and an eighth of it.
COSTS = {"whole": 1, "eighth": 8}


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [{"trace": "llama31", "block_size": 64, "head": 60}]
    return [{"trace": t, "block_size": b, "head": 0} for t in FILES for b in SIZES]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """One pass over the trace gives the hits of every capacity in blocks; bytes only say which capacity."""
    trace = open_trace(data / FILES[unit["trace"]])
    if unit["head"]:
        trace = trace.head(unit["head"])
    size = unit["block_size"]
    curve = lru_curve(load_references(trace, size))
    ideal = curve.by_token(math.inf)
    lengths = [r.num_input + r.num_output for r in trace]
    slack = 1 - sum(lengths) / sum(-(-n // size) * size for n in lengths)
    whole = read_shape("llama-3-70b").kv_bytes_per_token(2)
    for cost, divisor in COSTS.items():
        per_block = whole // divisor * size
        for gib in GIB:
            blocks = gib * 2**30 // per_block
            hits = curve.by_token(blocks) if blocks else 0.0
            yield {
                "trace": unit["trace"],
                "cost": cost,
                "block_size": size,
                "pool_gib": gib,
                "pool_tokens": blocks * size,
                "hit_by_token": hits,
                "share_of_ideal": hits / ideal if ideal else 0.0,
                "kib_per_block": per_block / 1024,
                "unused_in_last_blocks": slack,
                "kib_unused_per_sequence": slack * sum(lengths) / len(lengths) * whole / divisor / 1024,
                "block_numbers_per_4k": 4096 // size,
            }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Prompt tokens found against the pool's bytes: both costs, blocks of 16 and of 512."""
    names = [t for t in FILES if any(r["trace"] == t for r in rows)]
    made = panels(figure, names, columns=2, share_y=True)
    for name, axes in zip(names, made):
        series = []
        for cost in COSTS:
            for size in sorted({r["block_size"] for r in rows} & {16, 64, 512}):
                own = [r for r in rows if (r["trace"], r["cost"], r["block_size"]) == (name, cost, size)]
                if own and (size != 64 or len({r["block_size"] for r in rows}) == 1):
                    series.append(
                        Series(
                            f"{cost}, {size}",
                            [r["pool_gib"] for r in own],
                            [r["hit_by_token"] for r in own],
                        )
                    )
        curves(axes, series)
        plain_log(axes.xaxis, axes.set_xscale, base=2)
        label_axes(axes, "pool, GiB", "prompt tokens from the cache" if axes is made[0] else "")
    from_zero(*made)


def _hits(cost: str, size: int, gib: int) -> Any:
    return cell("hit_by_token", least=2, trace="llama31", cost=cost, block_size=size, pool_gib=gib)


EXPERIMENT = Experiment(
    name="latent-pool",
    question="What do block size, sharing and pool size trade where a token costs an eighth of the bytes?",
    kind="counted",
    definition=(
        "hit_by_token: LRU over contiguous prefixes at the blocks that fit the pool; a whole token costs 320 KiB "
        "(80 layers, 8 KV heads of 128, 16 bits), an eighth 40 KiB; unused_in_last_blocks: slots behind the end of "
        "prompt and answer, share of slots; block_numbers_per_4k: digests, look-ups and table entries of 4,096 tokens"
    ),
    claims=tuple(
        Claim(f"llama31, {what}", None, "no printed figure", _hits(cost, size, gib))
        for what, cost, size, gib in (
            ("whole tokens, 8 GiB in blocks of 16", "whole", 16, 8),
            ("an eighth, 8 GiB in blocks of 16", "eighth", 16, 8),
            ("an eighth, 1 GiB in blocks of 16", "eighth", 16, 1),
            ("an eighth, 8 GiB in blocks of 128, as many bytes as 16 whole tokens", "eighth", 128, 8),
            ("an eighth, 8 GiB in blocks of 512", "eighth", 512, 8),
        )
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=tuple(FILES.values()),
)
