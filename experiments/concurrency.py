"""How does the hit rate change with the number of requests that run at once?

Source: a worked example: what runs holds blocks, so the more runs, the less is left for prefixes of those that will
come. Simulated: questions over documents on OPT-13B and one A100-40GB, all asked at once. Cost: a minute.
    pagedjax experiment run concurrency
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.lab import Experiment, TableRow, Unit, Value, cell
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import document_questions

from ._serving import MACHINES, MAX_LEN, SCHEDULER, cost, figure, manager, over_seeds

RUNNING = (1, 4, 8, 16, 32)  # sequences at most
DOCUMENTS = (
    12,
    30,
)  # of 1,000 tokens: the memory of 15.7K tokens holds the first number, and half of the second


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        units = [{"running": n, "requests": 12, "documents": 3, "document_tokens": 300} for n in (1, 4)]
        return [{**unit, "hardware": MACHINES[0], "seed": seed} for unit in units]
    return over_seeds(
        (
            {"running": n, "requests": 200, "documents": documents, "document_tokens": 1000}
            for documents in DOCUMENTS
            for n in RUNNING
        ),
        seed,
    )


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace = document_questions(
        unit["requests"],
        num_documents=unit["documents"],
        document_tokens=unit["document_tokens"],
        seed=unit["seed"],
    ).with_arrivals(1e6, seed=unit["seed"])
    held = manager("paged+sharing")
    scheduler = replace(SCHEDULER, max_num_seqs=unit["running"])
    result = simulate(
        trace, held, cost("opt-13b", hardware=unit["hardware"]), scheduler, max_model_len=MAX_LEN
    )
    summary = result.summary()
    yield {
        "documents": unit["documents"],
        "running": unit["running"],
        "hardware": unit["hardware"],
        "seed": unit["seed"],
        "hit_by_token": summary.hit_by_token,
        "batch": result.batch,
        "requests_per_s": summary.requests_per_s,
        "evictions": held.stats.evictions,
        "preemptions": summary.preemptions,
    }


def _hit(documents: int, running: int) -> Callable[[str], Value]:
    return lambda machine: cell(
        "hit_by_token", least=9, documents=documents, running=running, hardware=machine
    )


def _plot(rows: list[TableRow], axes: Any) -> None:
    for documents in dict.fromkeys(r["documents"] for r in rows):
        own = [r for r in rows if (r["documents"], r["hardware"]) == (documents, MACHINES[0])]
        counts = list(dict.fromkeys(r["running"] for r in own))
        means = [np.mean([r["hit_by_token"] for r in own if r["running"] == n]) for n in counts]
        axes.plot(counts, means, marker="o", label=f"{documents} documents")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sequences that run at once, at most")
    axes.set_ylabel("hit rate by token (simulated)")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    name="concurrency",
    question="How does the hit rate change with the number of requests that run at once?",
    kind="simulated",
    definition=(
        "prompt tokens found over prompt tokens, by this engine's rules; 200 questions over 12 or 30 documents of "
        "1,000 tokens in random order, all there at once; 15.7K KV slots, block size 16, LRU; five seeds"
    ),
    claims=tuple(
        figure(f"{d} documents, at most {n} at once: hit rate", None, "our setting", _hit(d, n))
        for d in DOCUMENTS
        for n in RUNNING
    ),
    units=_units,
    run=_run,
    plot=_plot,
    open=("hardware",),
    note=(
        "where memory just holds all documents, what runs takes the place of some, and the rate falls; where it "
        "does not, those that run keep the document they share, and the rate stays. Requests of one document that "
        "start in the same step cannot share either: the first has written nothing yet"
    ),
)
