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

from pagedjax.lab import Experiment, TableRow, Unit, Value, cell
from pagedjax.lab.drawing import at_each, curves, from_zero, label_axes, mean_curve, panels
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


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Hit rate by the number of sequences that may run at once, means over seeds."""
    (axes,) = panels(figure, [rows[0]["hardware"]], width=5.0)
    own = [r for r in rows if r["hardware"] == rows[0]["hardware"]]
    many = list(dict.fromkeys(r["documents"] for r in own))
    curves(
        axes,
        [
            mean_curve((r for r in own if r["documents"] == d), "running", "hit_by_token", f"{d} documents")
            for d in many
        ],
    )
    at_each(axes, [r["running"] for r in own], base=2)
    from_zero(axes)
    label_axes(axes, "sequences that run at once, at most", "hit rate by token (simulated)")


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
