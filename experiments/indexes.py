"""Do the three prefix indexes find the same prefixes, and what do they hold?

Source: PagedAttention (sharing by fork and pinned prefixes), SGLang's RadixAttention, vLLM's hashed blocks.
Expected: hash and radix find the same blocks; the table index finds pinned prefixes only. Cost: seconds.
    pagedjax experiment run indexes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagedjax.cache import INDEXES, PagedManager, TokenChain
from pagedjax.lab import Claim, Experiment, Row, Unit, Value, cell
from pagedjax.sim.synth import agents, chat, document_questions, few_shot, system_prompt
from pagedjax.sim.trace import Trace

TRAFFIC: dict[str, Callable[..., Trace]] = {
    "customer service": lambda n, s: system_prompt(n, seed=s),
    "document analysis": lambda n, s: document_questions(n, num_documents=max(1, n // 2), seed=s),
    "chat": lambda n, s: chat(max(2, n // 5), seed=s),
    "few-shot": lambda n, s: few_shot(n, seed=s),
    "agents": lambda n, s: agents(max(2, n // 50), turns=10, seed=s),
}


def _units(smoke: bool, seed: int) -> list[Unit]:
    n = 20 if smoke else 300
    return [{"traffic": t, "index": i, "requests": n, "seed": seed} for t in TRAFFIC for i in INDEXES]


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    size = 16
    trace = TRAFFIC[unit["traffic"]](unit["requests"], unit["seed"])
    blocks = sum(-(-(r.num_input + r.num_output) // size) for r in trace)
    manager = PagedManager(num_blocks=blocks // 4 + 2000, block_size=size, index=unit["index"])
    tokens = 0
    for seq, request in enumerate(trace):
        assert request.token_ids is not None and request.output_ids is not None
        chain = TokenChain(request.token_ids, block_size=size)
        hit = manager.begin(seq, chain)
        chain.extend(request.output_ids.tolist())
        if manager.reserve(seq, len(chain) - hit.num_tokens):
            manager.commit(seq, len(chain), float(seq))
        manager.release(seq)
        tokens += request.num_input
    stats = manager.stats
    yield {
        "traffic": unit["traffic"],
        "index": unit["index"],
        "requests": stats.requests,
        "prompt_tokens": tokens,
        "hit_tokens": stats.hit_tokens,
        "hit_engine": stats.hit_tokens / tokens,
        "blocks_taken": stats.blocks_taken,
        "evictions": stats.evictions,
    }


def _difference(rows: list[Row]) -> list[float]:
    by = {(r["traffic"], r["index"]): r["hit_tokens"] for r in rows}
    return [float(sum(abs(by[t, "hash"] - by[t, "radix"]) for t in TRAFFIC if (t, "hash") in by))]


def _share(traffic: str) -> Value:
    return cell("hit_engine", traffic=traffic, index="hash")


def _plot(rows: list[Row], axes: Any) -> None:
    names = list(INDEXES)
    for k, index in enumerate(names):
        own = [r for r in rows if r["index"] == index]
        axes.bar([i + 0.25 * k for i in range(len(own))], [r["hit_engine"] for r in own], 0.25, label=index)
    axes.set_xticks(range(len(TRAFFIC)), list(TRAFFIC), fontsize=8)
    axes.set_ylabel("prompt tokens from the cache")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    name="indexes",
    question="Which traffic shares prefixes, and do the three prefix indexes find the same?",
    kind="counted",
    definition=(
        "PagedManager, block size 16, LRU, a pool of a quarter of all blocks and 2,000 more, requests one after "
        "another, answers cached too; prompt tokens taken from the cache over prompt tokens"
    ),
    claims=(
        Claim(
            "hash and radix: tokens of difference",
            0.0,
            "same blocks, two structures",
            _difference,
            "identity",
        ),
        Claim("customer service: share from the cache", None, "our traffic", _share("customer service")),
        Claim("document analysis, two questions each", None, "our traffic", _share("document analysis")),
    ),
    units=_units,
    run=_run,
    plot=_plot,
)
