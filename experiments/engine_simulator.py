"""Does the simulator do what the engine does, and take as long?

Source: none needed: simulated tables rest on it. Measured on the real decoder: its plans, step by step, against the
simulator's on the same requests; step times as `pagedjax calibrate` measures them, on steps of another design. Cost:
two minutes.
    pagedjax experiment run engine-simulator
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.engine.step import StepPlan
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import bars, label_axes, panels
from pagedjax.sim.calibration import errors, make_phases, measure, padded_work, reached_roofline, warm_phases
from pagedjax.sim.cost import CostModel
from pagedjax.sim.play import Followed, Played, follow, play
from pagedjax.sim.programs import StepSample, StepTimes, fit_steps, limit_numbers, load_of, shape_numbers
from pagedjax.sim.requests import PlayRequests
from pagedjax.sim.trace import Trace, TraceRequest

from ._decoder import NOTE, SIZES, SmallEngine, tokens

INDEXES = ("hash", "radix")
SHARE = 0.2  # of the blocks for eight sequences at full length: there are evictions and preemptions


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = (
        {"requests": 6, "stem": 24, "outputs": 8, "runs": 1, "repeats": 1}
        if smoke
        else {"requests": 48, "stem": 160, "outputs": 96, "runs": 5, "repeats": 3}
    )
    return [{"smoke": smoke, "index": index, "seed": seed, **sizes} for index in INDEXES[: 1 if smoke else 2]]


def _requests(decoder: SmallEngine, unit: Unit) -> PlayRequests:
    """All at once: three stems in turn, each cut where it falls, then tokens of its own."""
    seed = unit["seed"]
    stems = [tokens(seed + k, unit["stem"]) for k in range(3)]
    prompts = [
        stems[i % 3][: unit["stem"] - 7 * (i % 3)] + tokens(seed + 100 + i, 3 + i % 11)
        for i in range(unit["requests"])
    ]
    rows = [TraceRequest(0.0, len(p), unit["outputs"], token_ids=np.array(p, np.int32)) for p in prompts]
    trace = Trace("stems", "tokens", 1, True, lambda: iter(rows), spec=f"stems {unit}")
    return PlayRequests(trace, decoder.model.vocab_size)


def _calibrated(decoder: SmallEngine, unit: Unit) -> tuple[StepTimes, list[StepSample], list[StepSample]]:
    """Step times, the steps they were fitted to, and those held out."""
    vocab_size, pool = decoder.model.vocab_size, decoder.manager().num_usable * decoder.block_size
    shape = {"max_seqs": decoder.scheduler.max_num_seqs, "longest": min(decoder.length, pool // 2)}
    decoder.renew()
    runner: Any = decoder.engine.runner
    ladder = runner.buckets.ladder
    measure(decoder.engine, decoder.program, warm_phases(ladder, **shape), vocab_size=vocab_size)
    phases = make_phases(ladder, **shape, pool_tokens=pool, repeats=unit["repeats"])
    decoder.renew()
    kept, held = measure(
        decoder.engine, decoder.program, phases, vocab_size=vocab_size, seed=unit["seed"] + 1
    )
    bare = StepTimes(
        shape_numbers(decoder.model),
        limit_numbers(decoder.scheduler),
        decoder.block_size,
        {ladder[0]: 1.0},
    )
    return fit_steps(kept, bare), kept, held


def _followed(decoder: SmallEngine, played: Played, index: str, step_s: Any) -> tuple[Followed, PagedManager]:
    twin = decoder.manager(index=index)
    assert played.timeline is not None
    return follow(played.timeline, twin, decoder.scheduler, step_s, max_model_len=decoder.length), twin


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    decoder = SmallEngine(smoke=unit["smoke"], share=SHARE)
    index = unit["index"]
    times, kept, held = _calibrated(decoder, unit)
    roof, reason = reached_roofline(decoder.model, 4, decoder.block_size, times, kept)
    roofline = CostModel(roof, decoder.model, decoder.block_size, itemsize=4)

    def padded_s(plan: StepPlan) -> float:
        program = decoder.program(plan)
        work = padded_work(roofline, StepSample(program, load_of(plan, program), 0.0))
        return roofline.seconds(work, len(plan.rows))

    ratios, roofs, off = [], [], []
    for _ in range(unit["runs"]):
        decoder.renew(index=index)
        played = play(_requests(decoder, unit), decoder.engine, keep=True)
        found, twin = _followed(decoder, played, index, times.seconds)
        seconds = np.array(played.timeline.seconds if played.timeline is not None else ())
        ratios.append(float(found.seconds.sum() / seconds.sum()))
        off.append(float(np.median(np.abs(found.seconds / seconds - 1))))
        if not reason:
            by_roof, _ = _followed(decoder, played, index, padded_s)
            roofs.append(float(by_roof.seconds.sum() / seconds.sum()))
    stats = decoder.engine.manager.stats
    said = errors(times, held)
    yield {
        "index": index,
        "steps": found.steps,
        "equal_plans": found.equal_steps / found.steps,
        "equal_books": vars(twin.stats) == vars(stats),
        "hit_tokens": stats.hit_tokens,
        "evictions": stats.evictions,
        "copies": stats.copies,
        "preemptions": sum(r.num_preemptions for r in played.result.records),
        "measured_s": float(seconds.sum()),
        "simulated_s": float(found.seconds.sum()),
        "time": statistics.median(ratios),
        "time_least": min(ratios),
        "time_most": max(ratios),
        "step_error_median": statistics.median(off),
        "held_out_steps": said.steps,
        "held_out": said.ratio,
        "held_out_error_median": said.median,
        "roofline": reason or "fitted",
        "time_roofline": statistics.median(roofs) if roofs else None,
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Simulated over measured seconds of the same steps, by two models of a step's time."""
    (axes,) = panels(figure, ["all steps of a run on the device"], width=6.0)
    columns = {"time": "measured steps, by program", "time_roofline": "roofline over the same steps"}
    there = {
        label: [r.get(column) for r in rows]
        for column, label in columns.items()
        if any(r.get(column) is not None for r in rows)
    }
    if there:  # the committed rows of an older question have neither
        bars(axes, [f"{r['index']} index" for r in rows], there)
    axes.axhline(1.0, linewidth=0.8)
    label_axes(axes, "simulated over measured seconds")


EXPERIMENT = Experiment(
    name="engine-simulator",
    question="Does the simulator do what the engine does, and take as long?",
    kind="measured",
    definition=(
        "share of steps whose plan (rows, tables, copies) has the same digest; simulated over measured seconds of "
        "all steps, planning and booking among them, median of five runs, none of whose steps was used to fit: by "
        "each program's measured seconds and four rates (`pagedjax.sim.programs`), and by a roofline fitted to the "
        f"same designed steps as wide as their programs (`pagedjax.sim.cost.calibrate`); decoder: {SIZES}"
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
                f"{i} index: simulated over measured time", 1.0, "a simulator should", cell("time", index=i)
            )
            for i in INDEXES
        ),
        *(
            Claim(f"{i} index: {text}", None, "ours", cell(column, index=i))
            for text, column in (
                ("median error of a step", "step_error_median"),
                ("median error of a held-out step", "held_out_error_median"),
                ("by a roofline, over measured time", "time_roofline"),
            )
            for i in INDEXES
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    note=(
        f"{NOTE}. A step is padded to one of a few compiled programs, and on a host the seconds of these are no smooth "
        "function of their width, so a roofline misses by much in both directions; each program has seconds of its "
        "own. On a machine that is not idle the ratio means little: its steps wait for others"
    ),
)
