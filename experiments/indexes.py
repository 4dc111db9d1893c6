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
from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, cell
from pagedjax.lab.drawing import bars, label_axes, panels
from pagedjax.sim.synth import agents, chat, document_questions, few_shot, system_prompt
from pagedjax.sim.trace import Trace

TRAFFIC: dict[str, Callable[..., Trace]] = {
    "customer service": lambda n, s: system_prompt(n, seed=s),
    "document analysis": lambda n, s: document_questions(n, num_documents=max(1, n // 2), seed=s),
    "chat": lambda n, s: chat(max(2, n // 5), seed=s),
    "few-shot": lambda n, s: few_shot(n, seed=s),
    "agents": lambda n, s: agents(max(2, n // 50), turns=10, seed=s),
}


POLICIES = ("lru", "fifo", "cost", "s3fifo")
POOLS = {"ample": 2000, "tight": 200}  # blocks beside a share of all that the traffic names


def _units(smoke: bool, seed: int) -> list[Unit]:
    n = 20 if smoke else 300
    plain = [{"policy": "lru", "pool": "ample", "index": i} for i in INDEXES]
    others = (
        []
        if smoke
        else [{"policy": p, "pool": "tight", "index": i} for p in POLICIES for i in ("hash", "radix")]
    )
    return [
        {"traffic": t, **case, "requests": n, "seed": seed} for case in [*plain, *others] for t in TRAFFIC
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    size = 16
    trace = TRAFFIC[unit["traffic"]](unit["requests"], unit["seed"])
    blocks = sum(-(-(r.num_input + r.num_output) // size) for r in trace)
    share = 4 if unit["pool"] == "ample" else 40
    manager = PagedManager(
        num_blocks=blocks // share + POOLS[unit["pool"]],
        block_size=size,
        index=unit["index"],
        policy=unit["policy"],
    )
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
        "policy": unit["policy"],
        "pool": unit["pool"],
        "requests": stats.requests,
        "prompt_tokens": tokens,
        "hit_tokens": stats.hit_tokens,
        "hit_engine": stats.hit_tokens / tokens,
        "blocks_taken": stats.blocks_taken,
        "evictions": stats.evictions,
    }


def _difference(policy: str, pool: str) -> Value:
    """Tokens that one of the two finds and the other does not, over those that the hash index finds."""

    def pick(rows: list[TableRow]) -> list[float]:
        own = [r for r in rows if (r["policy"], r["pool"]) == (policy, pool)]
        by = {(r["traffic"], r["index"]): r["hit_tokens"] for r in own}
        found = sum(by[t, "hash"] for t in TRAFFIC if (t, "hash") in by)
        off = sum(abs(by[t, "hash"] - by[t, "radix"]) for t in TRAFFIC if (t, "hash") in by)
        return [off / found] if found else []

    return pick


def _share(traffic: str) -> Value:
    return cell("hit_engine", traffic=traffic, index="hash", pool="ample")


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Share of prompt tokens found by each index under LRU in an ample pool, a panel for each kind of traffic."""
    kinds = [t for t in TRAFFIC if any(r["traffic"] == t for r in rows)]
    names = list(INDEXES)
    for kind, axes in zip(kinds, panels(figure, kinds, height=1.5)):
        found = {r["index"]: r["hit_engine"] for r in rows if (r["traffic"], r["pool"]) == (kind, "ample")}
        bars(axes, names, {"": [found.get(name) for name in names]})
        axes.set_xlim(0, 1.15)
        label_axes(axes, "prompt tokens from the cache")


EXPERIMENT = Experiment(
    name="indexes",
    question="Which traffic shares prefixes, and do the three prefix indexes find the same?",
    kind="counted",
    definition=(
        "PagedManager, block size 16, requests one after another, answers cached too; prompt tokens from the cache "
        "over prompt tokens. Ample: a pool of a quarter of all blocks and 2,000 more, LRU; tight: a fortieth and 200, "
        "four policies"
    ),
    claims=(
        Claim(
            "hash and radix, LRU, few evictions: share of tokens of difference",
            0.0,
            "same blocks, two structures",
            _difference("lru", "ample"),
            "identity",
        ),
        *(
            Claim(
                f"hash and radix, {policy}, a tight pool: share of tokens of difference",
                None,
                "a tree evicts leaves first, a chain any block",
                _difference(policy, "tight"),
            )
            for policy in POLICIES
        ),
        Claim("customer service: share from the cache", None, "our traffic", _share("customer service")),
        Claim("document analysis, two questions each", None, "our traffic", _share("document analysis")),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    open=("policy", "index"),
    note=(
        "the two find the same while the policy's order keeps heads younger than tails (LRU with tail-first release; "
        "cost) or little is evicted. A radix tree gives up leaves only, a hash chain may lose a block in the middle, "
        "behind which nothing is found; the tight pool shows by how much"
    ),
)
