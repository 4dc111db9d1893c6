"""What the experiments on fleets share: instances, workloads that several of them play, rows, and small multiples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.lab import TableRow
from pagedjax.sim.fleet import FleetResult, InstanceSpec
from pagedjax.sim.fleet.file import InstanceTable
from pagedjax.sim.routing import ROUTERS
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

CONVERSATION = "data/traces/mooncake_conversation_trace.jsonl.gz"
SYNTHETIC = "data/traces/mooncake_synthetic_trace.jsonl.gz"
AGENTIC = "data/traces/agentic_coding_64tok_sub68.jsonl.xz"
NAMES = tuple(ROUTERS)
SCHEDULER = SchedulerConfig(max_num_seqs=256, token_budget=8192)
LLAMA = "one H100 file and Llama-3-8B an instance, 90 % of the memory beside the weights for KV, 8,192 tokens a step"


def instances(
    count: int,
    block: int,
    *,
    name: str = "h",
    role: str = "mixed",
    blocks: int | None = None,
    per_node: int = 1,
) -> list[InstanceSpec]:
    """Equal instances of one H100 and Llama-3-8B."""
    table = InstanceTable(
        name=name,
        count=count,
        role=role,
        per_node=per_node,
        cache=CacheConfig(block_size=block, num_blocks=blocks),
        scheduler=SCHEDULER,
    )
    specs = table.specs()
    return specs if count > 1 else [replace(specs[0], name=f"{name}0")]


def mooncake(data: Path, count: int, file: str = CONVERSATION) -> Trace:
    """The first requests of one of Mooncake's traces."""
    return open_trace(data / file).head(count)


def agents(data: Path, sessions: int, turns: int, gap_s: float, seed: int) -> Trace:
    """The first requests of recorded coding sessions that begin one after another, `gap_s` apart on average.

    The file holds sessions one by one, with times from each one's start; here they overlap.
    """

    def requests() -> Iterator[TraceRequest]:
        own: dict[str, list[TraceRequest]] = {}
        for request in open_trace(data / AGENTIC):
            if request.session not in own and len(own) == sessions:
                break
            own.setdefault(request.session, []).append(request)
        starts = np.cumsum(np.random.default_rng([seed, 0xA6E]).exponential(gap_s, sessions))
        rows = []
        for start, session in zip(starts.tolist(), own.values()):
            begun = session[0].arrival_s
            rows += [replace(r, arrival_s=start + r.arrival_s - begun) for r in session[:turns]]
        yield from sorted(rows, key=lambda r: r.arrival_s)

    whole = open_trace(data / AGENTIC)
    return replace(whole, name="agentic", source=requests, spec=f"agentic,{sessions},{turns},{gap_s},{seed}")


def shared_prefixes(groups: int, each: int, prefix: int, question: int, output: int, seed: int) -> Trace:
    """`groups` system prompts, each with `each` questions of its own, in random order, all there at once.

    SGLang's `bench_serving --dataset-name generated-shared-prefix`, whose defaults are 64 x 16 prompts of 2,048 + 128
    tokens and 256 answered ones.
    """

    def requests() -> Iterator[TraceRequest]:
        order = np.random.default_rng([seed, 0x6E]).permutation(groups * each)
        for number in order.tolist():
            rng = np.random.default_rng([seed, number])
            system = np.random.default_rng([seed, 1 << 20, number // each]).integers(3, 32_000, prefix)
            tokens = np.concatenate([system, rng.integers(3, 32_000, question)]).astype(np.int32)
            yield TraceRequest(0.0, len(tokens), output, token_ids=tokens, session=str(number // each))

    words = f"shared-prefixes,{groups},{each},{prefix},{question},{output},{seed}"
    return Trace("shared-prefixes", "tokens", 1, True, requests, spec=words)


def row(result: FleetResult, **columns: Any) -> TableRow:
    """The columns that all of these experiments print."""
    out = result.to_dict()
    prompts = sum(r.times.num_input for r in result.records)
    return {
        **columns,
        "requests": out["requests"],
        "refused": len(result.refused),
        "hit_by_token": out["hit_by_token"],
        "imbalance": out["imbalance_busy"],
        "ttft_mean_s": float(np.mean([r.times.ttft_s for r in result.records])),
        "ttft_p50_s": out["ttft_s"][50],
        "ttft_p90_s": out["ttft_s"][90],
        "ttft_p99_s": out["ttft_s"][99],
        "tbt_p99_s": out["tbt_s"][99],
        "latency_mean_s": float(np.mean([r.times.finished_s - r.times.arrival_s for r in result.records])),
        "tokens_per_s": out["tokens_per_s"],
        "input_tokens_per_s": prompts / out["span_s"],
        "moved_gb": out["sent_bytes"] / 1e9,
    }
