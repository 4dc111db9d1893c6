"""How much more does paging sustain on chat histories, where prompts are long and every baseline reserves 2,048?

Source: PagedAttention §6.5: OPT-13B, history and query cut to the last 1,024 tokens, at most 1,024 answer tokens, no
KV kept between rounds: 2x the request rate of all three Orcas. Simulated at saturation. Cost: two minutes.
    pagedjax experiment run chatbot
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments._serving import MAX_LEN, SCHEDULER, SYSTEMS, cost, manager
from experiments.common import Claim, Experiment, Row, Unit, ratio
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

TURNS = "data/lengths/sharegpt_8k_llama2.csv.gz"  # one row is one turn with its whole history as prompt
LIMIT = 1024


def _units(smoke: bool, seed: int) -> list[Unit]:
    return [{"system": s, "requests": 20 if smoke else 300, "seed": seed} for s in SYSTEMS]


def _trace(data: Path, count: int, seed: int) -> Trace:
    turns = [(r.num_input, r.num_output) for r in open_trace(data / TURNS) if r.num_output > 0]

    def requests() -> Iterator[TraceRequest]:
        for at in np.random.default_rng(seed).integers(0, len(turns), count).tolist():
            num_input, num_output = turns[at]
            yield TraceRequest(0.0, min(num_input, LIMIT), min(num_output, LIMIT - 1))

    return Trace("chatbot", "lengths", 0, False, requests, spec=f"chatbot,{count},{seed}")


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    trace = _trace(data, unit["requests"], unit["seed"])
    result = simulate(trace, manager(unit["system"]), cost("opt-13b"), SCHEDULER, max_model_len=MAX_LEN)
    summary = result.summary()
    yield {
        "system": unit["system"],
        "requests_per_s": summary.requests_per_s,
        "batch": result.batch,
        "preemptions": summary.preemptions,
    }


def _plot(rows: list[Row], axes: Any) -> None:
    axes.bar([r["system"] for r in rows], [r["requests_per_s"] for r in rows])
    axes.set_ylabel("requests per second (simulated)")


EXPERIMENT = Experiment(
    name="chatbot",
    question="How much more does paging sustain on chat histories than reservations do?",
    kind="simulated",
    definition=(
        "finished requests per simulated second with all requests waiting from the start; A100-40GB file, OPT-13B "
        "shape, 15.7K KV slots (Table 1), block size 16; the same scheduler for all systems"
    ),
    claims=tuple(
        Claim(
            f"paged over {system}",
            2.0,
            "PagedAttention §6.5",
            ratio("requests_per_s", {"system": "paged"}, {"system": system}),
            0.15,
        )
        for system in SYSTEMS[:-1]
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(TURNS,),
    note=(
        "lengths of ShareGPT turns with their history, Llama-2 tokenizer instead of OPT's; the paper compares rates at "
        "equal latency, this table saturated rates"
    ),
)
