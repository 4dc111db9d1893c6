"""Does the simulator do what the engine does, and take as long?

Source: none needed: simulated tables rest on it. Measured on the real decoder: its plans, step by step, against the
simulator's on the recorded answers; step times by a cost model calibrated on other prompts. Cost: a minute.
    pagedjax experiment run engine-simulator
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.engine import StepRecord
from pagedjax.engine.request import RequestOutput
from pagedjax.engine.step import StepPlan
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import bars, label_axes, panels
from pagedjax.sim.cost import CostModel, HardwareSpec, Work, calibrate
from pagedjax.sim.simulator import hash_plan, simulate
from pagedjax.sim.trace import Trace, TraceRequest

from ._decoder import NOTE, SIZES, SmallEngine, tokens

if TYPE_CHECKING:
    from pagedjax.runtime import Bucket

INDEXES = ("hash", "radix")
# No host reaches these; only their products with the fitted efficiencies count.
PEAKS = HardwareSpec("this machine", flops_per_s=1e13, bytes_per_s=1e12, memory_bytes=1e9)
# Requests at once and tokens of each: steps that vary in rows, in length of prompt and in what is cached.
VARIED = ((1, 40), (2, 200), (4, 90), (8, 30), (8, 90), (3, 600), (1, 760), (6, 150), (5, 20), (2, 500))
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

    def __init__(self, decoder: SmallEngine, index: str, prompts: list[list[int]], outputs: int) -> None:
        self.hashes: list[bytes] = []
        self.steps: list[tuple[StepPlan, float]] = []
        decoder.renew(index=index, on_step=self._book)
        self.prompts = prompts
        self.outputs: list[RequestOutput] = decoder.run(prompts, outputs)
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


def _by_program(decoder: SmallEngine, steps: list[tuple[StepPlan, float]]) -> Callable[[StepPlan], float]:
    """Seconds of a plan: the median of the steps that ran the same compiled program."""
    times: dict[Bucket, list[float]] = defaultdict(list)
    for plan, seconds in steps:
        times[decoder.program(plan)].append(seconds)
    return lambda plan: float(np.median(times[decoder.program(plan)]))


def _padded(decoder: SmallEngine, model: CostModel, plan: StepPlan) -> Work:
    """The work of a plan, its matrix products as wide as the compiled program that runs it."""
    program, config = decoder.program(plan), model.model
    head = config.vocab_size * config.d_model
    flops = 2.0 * config.layer_parameters * program.num_tokens + 2.0 * head * program.num_samples
    return replace(model.work(plan), flops=flops)


def _calibrated(decoder: SmallEngine, steps: list[tuple[StepPlan, float]]) -> CostModel:
    """The cost model of this machine: peaks no host reaches, the rest fitted to steps.

    A step counts with the median of those that ran the same program with as many rows: what else the machine did
    then weighs on no single one.

    Raises:
        ValueError: The steps give no efficiencies between 0 and 1: they vary too little, or other work weighed on them.
    """
    model = CostModel(PEAKS, decoder.model, decoder.block_size, itemsize=4)
    alike: dict[tuple[Bucket, int], list[float]] = defaultdict(list)
    for plan, seconds in steps:
        alike[decoder.program(plan), len(plan.rows)].append(seconds)
    usual = [float(np.median(alike[decoder.program(plan), len(plan.rows)])) for plan, _ in steps]
    works = [_padded(decoder, model, plan) for plan, _ in steps]
    return replace(model, hardware=calibrate(PEAKS, works, [len(plan.rows) for plan, _ in steps], usual))


def _simulated(
    decoder: SmallEngine, real: _Recorded, index: str, step_s: Callable[[StepPlan], float]
) -> tuple[float, list[bytes], PagedManager]:
    """(busy seconds, plan digests, manager) of the recorded requests on the simulator."""
    hashes: list[bytes] = []

    def watch(plan: StepPlan) -> dict[str, float]:
        hashes.append(hash_plan(plan))
        return {}

    twin = decoder.manager(index=index)
    result = simulate(
        real.trace(), twin, step_s, decoder.scheduler, max_model_len=decoder.length, watch=watch
    )
    return result.busy_s, hashes, twin


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    decoder = SmallEngine(smoke=unit["smoke"], share=SHARE)
    seed, index, outputs = unit["seed"], unit["index"], unit["outputs"]
    _Recorded(decoder, index, _prompts(unit, seed + 500), outputs)  # compiles
    other = _Recorded(decoder, index, _prompts(unit, seed + 1000), outputs)
    real = _Recorded(decoder, index, _prompts(unit, seed), outputs)
    measured = sum(seconds for _, seconds in real.steps)
    by_program_s, ours, twin = _simulated(decoder, real, index, _by_program(decoder, other.steps))
    row: TableRow = {
        "index": unit["index"],
        "steps": len(real.hashes),
        "equal_plans": sum(map(bytes.__eq__, ours, real.hashes)) / max(len(ours), len(real.hashes)),
        "equal_books": vars(twin.stats) == real.stats,
        "hit_tokens": real.stats["hit_tokens"],
        "evictions": real.stats["evictions"],
        "copies": real.stats["copies"],
        "preemptions": sum(o.num_preemptions for o in real.outputs),
        "measured_s": measured,
        "by_program_s": by_program_s,
        "time_by_program": by_program_s / measured,
    }
    varied = list(other.steps)
    for number, (count, length) in enumerate(VARIED):
        prompts = [
            tokens(seed + 2000 + 100 * number + i, min(length, decoder.length // 2)) for i in range(count)
        ]
        varied += _Recorded(decoder, index, prompts, min(outputs, 16)).steps
    try:
        model = _calibrated(decoder, varied)
    except ValueError as error:
        yield row | {"calibration": str(error)}
        return

    def step_s(plan: StepPlan) -> float:
        return model.seconds(_padded(decoder, model, plan), len(plan.rows))

    calibrated_s, _, _ = _simulated(decoder, real, index, step_s)
    errors = [abs(step_s(plan) / seconds - 1) for plan, seconds in real.steps]
    yield row | {
        "calibration": "fitted",
        "calibrated_s": calibrated_s,
        "time": calibrated_s / measured,
        "step_error_median": float(np.median(errors)),
        "step_overhead_s": model.hardware.step_overhead_s,
        "host_s_per_row": model.hardware.host_s_per_row,
        "flops_per_s": model.hardware.flops_per_s * model.hardware.compute_efficiency,
        "bytes_per_s": model.hardware.bytes_per_s * model.hardware.bandwidth_efficiency,
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Seconds of all steps of one workload: measured, and predicted by two models of a step's time."""
    (axes,) = panels(figure, ["all steps of a run on the device"], width=6.0)
    columns = {
        "measured_s": "measured",
        "by_program_s": "from each program's time",
        "calibrated_s": "calibrated model",
    }
    there = {
        label: [r.get(column) for r in rows]
        for column, label in columns.items()
        if any(column in r for r in rows)
    }
    bars(axes, [f"{r['index']} index" for r in rows], there)
    label_axes(axes, "seconds")


EXPERIMENT = Experiment(
    name="engine-simulator",
    question="Does the simulator do what the engine does, and take as long?",
    kind="measured",
    definition=(
        "share of steps whose plan (rows, tables, copies) has the same digest; simulated over measured "
        "seconds of all steps, none of which was used to fit: by the cost model with efficiencies and host "
        "times fitted to the steps of other prompts (`pagedjax.sim.cost.calibrate`), and by the median of "
        f"each program's steps on those; decoder: {SIZES}"
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
            Claim(f"{i} index: {text} over measured time", 1.0, "a simulator should", cell(column, index=i))
            for text, column in (("calibrated", "time"), ("simulated by program", "time_by_program"))
            for i in INDEXES
        ),
        *(
            Claim(
                f"{i} index: median error of a step, calibrated",
                None,
                "ours",
                cell("step_error_median", index=i),
            )
            for i in INDEXES
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    note=(
        f"{NOTE}. A step is padded to one of a few compiled programs, so its products are counted as wide as "
        "its program. The weights lie in the processor's cache, so no step shows the memory roof, and "
        "calibrate leaves it out. On a machine that is not idle neither figure means much"
    ),
)
