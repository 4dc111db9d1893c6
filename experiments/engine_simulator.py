"""Does the simulator do what the engine does, and take as long?

Source: none needed: simulated tables rest on it. Measured on the real decoder: its plans, step by step, against the
simulator's on the recorded answers, with each program's step time taken from other prompts. Cost: a minute.
    pagedjax experiment run engine-simulator
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.engine import StepRecord
from pagedjax.engine.request import RequestOutput
from pagedjax.engine.step import StepPlan
from pagedjax.lab import Claim, Experiment, Row, Unit, cell
from pagedjax.sim.simulator import hash_plan, simulate
from pagedjax.sim.trace import Trace, TraceRequest

from ._decoder import NOTE, SIZES, Decoder, tokens

if TYPE_CHECKING:
    from pagedjax.runtime import Bucket

INDEXES = ("hash", "radix")
SHARE = 0.2  # of the blocks for eight sequences at full length: there are evictions and preemptions


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = (
        {"requests": 6, "stem": 24, "outputs": 8} if smoke else {"requests": 48, "stem": 160, "outputs": 96}
    )
    return [{"smoke": smoke, "index": index, "seed": seed, **sizes} for index in INDEXES[: 1 if smoke else 2]]


def _prompts(unit: Unit, seed: int) -> list[list[int]]:
    """Three stems in turn, each cut where it falls, then tokens of its own."""
    stems = [tokens(seed + k, unit["stem"]) for k in range(3)]
    return [
        stems[i % 3][: unit["stem"] - 7 * (i % 3)] + tokens(seed + 100 + i, 3 + i % 11)
        for i in range(unit["requests"])
    ]


class _Recorded:
    """A run of the real engine, step by step."""

    def __init__(self, decoder: Decoder, unit: Unit, seed: int) -> None:
        self.hashes: list[bytes] = []
        self.steps: list[tuple[StepPlan, float]] = []
        decoder.renew(index=unit["index"], on_step=self._book)
        self.prompts = _prompts(unit, seed)
        self.outputs: list[RequestOutput] = decoder.run(self.prompts, unit["outputs"])
        self.stats = vars(decoder.engine.manager.stats)

    def _book(self, record: StepRecord) -> None:
        self.hashes.append(hash_plan(record.plan))
        self.steps.append((record.plan, record.result.elapsed_s))

    def trace(self) -> Trace:
        """The same requests with the answers that were decoded."""
        rows = [
            TraceRequest(
                0.0, len(p), len(ids), token_ids=np.array(p, np.int32), output_ids=np.array(ids, np.int32)
            )
            for p, ids in zip(self.prompts, (o.outputs[0].token_ids for o in self.outputs))
        ]
        return Trace("recorded", "tokens", 1, True, lambda: iter(rows), spec="recorded")


def _by_program(decoder: Decoder, steps: list[tuple[StepPlan, float]]) -> Callable[[StepPlan], float]:
    """Seconds of a plan: the median of the steps that ran the same compiled program."""
    times: dict[Bucket, list[float]] = defaultdict(list)
    for plan, seconds in steps:
        times[decoder.program(plan)].append(seconds)
    return lambda plan: float(np.median(times[decoder.program(plan)]))


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    decoder = Decoder(smoke=unit["smoke"], share=SHARE)
    _Recorded(decoder, unit, unit["seed"] + 500)  # compiles
    other = _Recorded(decoder, unit, unit["seed"] + 1000)
    real = _Recorded(decoder, unit, unit["seed"])
    ours: list[bytes] = []

    def watch(plan: StepPlan) -> dict[str, float]:
        ours.append(hash_plan(plan))
        return {}

    twin = decoder.manager(index=unit["index"])
    step_s = _by_program(decoder, other.steps)
    result = simulate(
        real.trace(), twin, step_s, decoder.scheduler, max_model_len=decoder.length, watch=watch
    )
    measured = sum(seconds for _, seconds in real.steps)
    yield {
        "index": unit["index"],
        "steps": len(real.hashes),
        "equal_plans": sum(map(bytes.__eq__, ours, real.hashes)) / max(len(ours), len(real.hashes)),
        "equal_books": vars(twin.stats) == real.stats,
        "hit_tokens": real.stats["hit_tokens"],
        "evictions": real.stats["evictions"],
        "copies": real.stats["copies"],
        "preemptions": sum(o.num_preemptions for o in real.outputs),
        "measured_s": measured,
        "simulated_s": result.busy_s,
        "time": result.busy_s / measured,
    }


def _plot(rows: list[Row], axes: Any) -> None:
    for k, column in enumerate(("measured_s", "simulated_s")):
        axes.bar([i + 0.4 * k for i in range(len(rows))], [r[column] for r in rows], 0.4, label=column)
    axes.set_xticks([i + 0.2 for i in range(len(rows))], [f"{r['index']} index" for r in rows])
    axes.set_ylabel("seconds of all steps")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    name="engine-simulator",
    question="Does the simulator do what the engine does, and take as long?",
    kind="measured",
    definition=(
        "share of steps whose plan (rows, tables, copies) has the same digest; simulated over measured seconds of all "
        f"steps, a step simulated as the median of its program's steps on other prompts; decoder: {SIZES}"
    ),
    claims=(
        *(
            Claim(
                f"{i} index: share of equal plans",
                1.0,
                "a simulator must",
                cell("equal_plans", index=i),
                "identity",
            )
            for i in INDEXES
        ),
        *(
            Claim(
                f"{i} index: simulated over measured time",
                1.0,
                "a simulator should",
                cell("time", index=i),
            )
            for i in INDEXES
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    note=NOTE,
)
