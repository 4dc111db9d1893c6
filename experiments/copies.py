"""How many blocks does a request copy?

Source: worked examples: a 200-token prefix is shared in 12 blocks of 16 with one copy; most requests copy 0 or 1
blocks. Counted by a real manager: samples that fork from one prompt, and real token traces with parts of blocks reused.
Cost: seconds.
    pagedjax experiment run copies
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.sim.trace import open_trace

TRACE = "data/traces/sharegpt_llama31_tokens_300.jsonl.gz"
BLOCK = 16
SAMPLES = "samples of a prompt"


def _units(smoke: bool, seed: int) -> list[Unit]:
    samples = [{"case": SAMPLES, "prompt": 200, "n": n, "block_size": BLOCK} for n in (2, 4, 6)]
    sizes = (64,) if smoke else (16, 64, 256)
    traces = [{"case": "sharegpt", "partial": p, "block_size": b} for b in sizes for p in (0, 1)]
    return [*samples, *({**t, "head": 60 if smoke else 0} for t in traces)]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    yield from _forked(unit) if unit["case"] == SAMPLES else _traced(unit, data)


def _forked(unit: Unit) -> Iterator[TableRow]:
    """The prompt is computed once, each sample writes a first token of its own."""
    size, prompt = unit["block_size"], list(range(unit["prompt"]))
    manager = PagedManager(num_blocks=2 * unit["n"] * (len(prompt) // size + 2), block_size=size)
    manager.begin(0, TokenChain(prompt, block_size=size))
    if not manager.reserve(0, len(prompt)):
        raise RuntimeError("the pool was sized for all samples")
    manager.commit(0, len(prompt), 0.0)
    for child in range(1, unit["n"]):
        manager.fork(0, child, TokenChain(prompt, block_size=size))
    for seq in range(unit["n"]):
        if not manager.reserve(seq, 1):
            raise RuntimeError("the pool was sized for all samples")
    tables = [manager.table(seq) for seq in range(unit["n"])]
    common = set(tables[0]).intersection(*tables[1:])
    copies = manager.stats.copies
    yield {
        "case": unit["case"],
        "block_size": size,
        "prompt": unit["prompt"],
        "n": unit["n"],
        "requests": 1,
        "shared_blocks": len(common),
        "copies": copies,
        "copies_per_sample": copies / unit["n"],
    }


def _traced(unit: Unit, data: Path) -> Iterator[TableRow]:
    """One request after another, prompts and answers cached, a pool that never evicts."""
    trace = open_trace(data / TRACE)
    if unit["head"]:
        trace = trace.head(unit["head"])
    size = unit["block_size"]
    total = sum(-(-(r.num_input + r.num_output) // size) for r in trace)
    manager = PagedManager(num_blocks=total + 2, block_size=size, partial=unit["partial"])
    counts: list[int] = []
    for seq, request in enumerate(trace):
        assert request.token_ids is not None and request.output_ids is not None
        chain = TokenChain(request.token_ids, block_size=size)
        before = manager.stats.copies
        hit = manager.begin(seq, chain)
        chain.extend(request.output_ids.tolist())
        if not manager.reserve(seq, len(chain) - hit.num_tokens):
            raise RuntimeError("the pool was sized for all requests")
        manager.commit(seq, len(chain), float(seq))
        counts.append(manager.stats.copies - before)
        manager.release(seq)
    yield {
        "case": unit["case"],
        "block_size": size,
        "partial_reuse": bool(unit["partial"]),
        "requests": len(counts),
        "copies": sum(counts),
        "most_of_a_request": max(counts),
        "share_with_0_or_1": sum(c <= 1 for c in counts) / len(counts),
    }


EXPERIMENT = Experiment(
    name="copies",
    question="How many blocks does a request copy?",
    kind="counted",
    definition=(
        "blocks that a real PagedManager copies before a write: of samples that fork from one prompt when each writes "
        "its first token; of requests one after another, with and without reuse of parts of blocks"
    ),
    claims=(
        Claim(
            "200-token prompt, two samples: blocks shared",
            12,
            "worked example",
            cell("shared_blocks", case=SAMPLES, n=2, prompt=200, block_size=BLOCK),
            "identity",
        ),
        Claim(
            "the same: copies",
            1,
            "worked example",
            cell("copies", case=SAMPLES, n=2, prompt=200, block_size=BLOCK),
            "identity",
        ),
        *(
            Claim(
                f"ShareGPT, block size {size}, parts of blocks reused: share of requests with 0 or 1 copies",
                (0.5, 1.0),
                "worked example (most requests)",
                cell("share_with_0_or_1", least=9, block_size=size, partial_reuse=True),
            )
            for size in (16, 64, 256)
        ),
    ),
    units=_units,
    run=_run,
    data=(TRACE,),
)
