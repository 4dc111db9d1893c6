"""Steps designed to show what a step costs, run on a real engine; some are kept apart to judge the fit by.

A phase brings so many rows to decode at some length of context, then lets prompts come in beside them. Its steps, those
that computed the contexts among them, are measured as a run's are: planning, computing, booking and outputs. Held-out
phases have other sizes than those that are fitted, and run among them, so that both see the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagedjax.engine import Engine, SamplingParams
from pagedjax.engine.shapes import Bucket
from pagedjax.engine.step import StepPlan
from pagedjax.models.config import ModelConfig
from pagedjax.sim.cost import CostModel, HardwareSpec, Work
from pagedjax.sim.cost import calibrate as fit_roofline
from pagedjax.sim.play import WatchedRunner
from pagedjax.sim.programs import TILE, StepSample, StepTimes, load_of

# Steps of a phase that only decode. On the CPUs measured the first dozen after a prompt are up to 1.7 times as slow
# as those after them; a run has more of the latter.
_DECODES = 32
_MOST_TOKENS = 6000  # of all contexts of a phase: they have to be computed first
_PART = 0.6  # of a program's room, where a held-out step lies
_MANY = 1_000_000  # tokens that no answer of a phase reaches
# Peaks that no machine reaches: only their products with the fitted efficiencies count.
_PEAKS = HardwareSpec("this machine", flops_per_s=1e18, bytes_per_s=1e16, memory_bytes=1e12)


@dataclass(frozen=True)
class Phase:
    """Steps around one batch.

    Attributes:
        rows: Sequences that decode.
        context: Tokens of their prompts.
        prompts: (how many, tokens of each) that come in at once beside them, one entry after another.
        held_out: Not for the fit.
    """

    rows: int
    context: int
    prompts: tuple[tuple[int, int], ...]
    held_out: bool = False


def make_phases(
    ladder: Sequence[Bucket], *, max_seqs: int, longest: int, pool_tokens: int, repeats: int = 3
) -> list[Phase]:
    """Phases that reach every program of a ladder from both ends of its room, and held-out ones between.

    Args:
        ladder: Shapes of the programs.
        max_seqs: Rows of a step, `scheduler.max_num_seqs`.
        longest: Longest sequence in tokens.
        pool_tokens: Tokens that the pool holds.
        repeats: How often each phase comes, and each prompt in it.
    """
    decodes = sorted({bucket.num_decodes for bucket in ladder} - {0})
    prefills = sorted({bucket.num_prefill_tokens for bucket in ladder} - {0})
    room = min(_MOST_TOKENS, int(0.8 * pool_tokens))

    def prompts(part: float | None) -> list[tuple[int, int]]:
        """For each prefill size one prompt of it, or two and eight that share it."""
        out = []
        for below, size in zip([1, *prefills], prefills):
            sizes = [below + 1, size] if part is None else [round(below + part * (size - below))]
            fit = [min(max(s, 2), longest - 2) for s in sizes]
            out += [(1, s) for s in fit]
            out += [(k, fit[-1] // k) for k in ((2, 8) if part is None else (3,)) if fit[-1] // k >= 2]
        return out

    def phases(held_out: bool) -> list[Phase]:
        part = _PART if held_out else None
        beside = prompts(part)
        contexts = (longest // 4,) if held_out else (8, longest // 2)
        alone = [(1, longest - 2)] if not held_out else [(1, int(0.7 * longest))]
        out = [Phase(0, 0, (*beside, *alone), held_out)]
        for below, size in zip([0, *decodes], decodes):
            ends = [below + 1, size] if part is None else [round(below + part * (size - below))]
            for rows in dict.fromkeys(max(end, 1) for end in ends):
                for context in contexts:
                    long = max(min(context, room // rows - _DECODES - 8), 2)
                    others = tuple((min(k, max_seqs - rows), n) for k, n in beside if rows < max_seqs)
                    out.append(Phase(rows, long, others, held_out))
        return out

    if repeats < 1:
        raise ValueError(f"repeats={repeats}: must be at least 1")
    kept, held = phases(False) * repeats, phases(True) * repeats
    return [phase for number, phase in enumerate(kept) for phase in (phase, *held[number :: len(kept)])]


def warm_phases(ladder: Sequence[Bucket], *, max_seqs: int, longest: int) -> list[Phase]:
    """The shortest phases that run every program of a ladder once."""
    decodes = sorted({bucket.num_decodes for bucket in ladder} - {0})
    prefills = sorted({bucket.num_prefill_tokens for bucket in ladder} - {0})
    prompts = tuple((1, min(max(size, 2), longest - 2)) for size in prefills)
    rows = [below + 1 for below in [0, *decodes][: len(decodes)]]
    return [Phase(0, 0, prompts), *(Phase(n, 2, prompts if n < max_seqs else ()) for n in rows)]


def measure(
    engine: Engine,
    program: Callable[[StepPlan], Bucket],
    phases: Sequence[Phase],
    *,
    vocab_size: int,
    seed: int = 0,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> tuple[list[StepSample], list[StepSample]]:
    """Run phases; the steps to fit, and those held out.

    Args:
        engine: Idle; its cache is filled with prompts of chance.
        program: Which compiled program runs a plan.
        phases: What to run, in order.
        vocab_size: Prompts are drawn below it.
        seed: Of the draws.
        on_phase: Called after each.

    Returns:
        Steps without compiling, block copies and prefixes worked once for several rows: those are no measure of a
        program. Held-out steps with the same program and load as one to fit are left out, too: those were seen.
    """
    rng = np.random.default_rng([seed, 0xCA11B])
    meter = _Meter(engine, program)
    try:
        for phase in phases:
            meter.run(phase, lambda n: rng.integers(0, vocab_size, n, dtype=np.int32))
            on_phase(phase)
    finally:
        engine.runner = meter.runner
    kept = meter.samples[False]
    known = {(sample.program, sample.load) for sample in kept}
    return kept, [sample for sample in meter.samples[True] if (sample.program, sample.load) not in known]


class _Meter:
    """Makes steps and measures them."""

    def __init__(self, engine: Engine, program: Callable[[StepPlan], Bucket]) -> None:
        self.samples: dict[bool, list[StepSample]] = {False: [], True: []}
        self.runner = engine.runner
        self._engine = engine
        self._program = program
        self._plan: StepPlan | None = None
        self._number = 0
        self._watched = WatchedRunner(engine.runner, lambda: engine.now, self._planned)
        engine.runner = self._watched

    def _planned(self, plan: StepPlan) -> None:
        self._plan = plan
        program = self._program(plan)
        self._found = program, load_of(plan, program)

    def run(self, phase: Phase, draw: Callable[[int], np.ndarray]) -> None:
        """One phase, from an idle engine to an idle engine."""
        engine, scheduler = self._engine, self._engine.scheduler
        names = [self._add(draw(phase.context), _MANY) for _ in range(phase.rows)]
        while scheduler.waiting or any(not s.num_output_tokens for r in scheduler.running for s in r.live):
            self._step(phase.held_out)
        for _ in range(_DECODES if names else 0):
            self._step(phase.held_out)
        for count, length in phase.prompts:
            begun = len(names)
            for _ in range(count):
                self._add(draw(length), 1)
            while scheduler.has_work and (scheduler.waiting or len(scheduler.running) > begun):
                self._step(phase.held_out)
        for name in names:
            engine.abort(name)

    def _add(self, tokens: np.ndarray, max_tokens: int) -> str:
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)
        return self._engine.add(tokens, sampling, request_id=f"calibrate {self._number}")

    def _step(self, held_out: bool) -> None:
        engine, watched = self._engine, self._watched
        self._plan, watched.own_s, watched.last = None, 0.0, None
        began = engine.now
        engine.step()
        seconds = engine.now - began - watched.own_s
        plan, result = self._plan, watched.last
        if plan is None or result is None or plan.copies or result.compile_s or result.shared:
            return
        self.samples[held_out].append(StepSample(*self._found, seconds))


@dataclass(frozen=True)
class FitErrors:
    """How well step times say what steps took that they were not fitted to.

    Attributes:
        steps: How many.
        measured_s / fitted_s: Of all of them.
        median / p90: Of the relative errors of one step.
    """

    steps: int
    measured_s: float
    fitted_s: float
    median: float
    p90: float

    @property
    def ratio(self) -> float:
        """Fitted over measured seconds."""
        return self.fitted_s / self.measured_s


def errors(times: StepTimes, samples: Sequence[StepSample]) -> FitErrors:
    """Errors on measured steps.

    Raises:
        ValueError: There are none.
    """
    if not samples:
        raise ValueError("no steps were held out: nothing says how good the fit is; measure more")
    measured = np.array([sample.seconds for sample in samples])
    fitted = np.array([times.sample_seconds(sample) for sample in samples])
    off = np.abs(fitted / measured - 1)
    return FitErrors(
        len(samples),
        float(measured.sum()),
        float(fitted.sum()),
        float(np.median(off)),
        float(np.percentile(off, 90)),
    )


def reached_roofline(
    model: ModelConfig,
    itemsize: int,
    block_size: int,
    times: StepTimes,
    samples: Sequence[StepSample],
    kv_dtype: str = "",
) -> tuple[HardwareSpec, str]:
    """The two roofs under measured steps, for models and limits that were not measured.

    Steps are counted as wide as their programs, and those that took twice as long as `times` says, or half, left out.

    Args:
        model: Whose steps.
        itemsize: Bytes of one number of the weights.
        block_size: Tokens per block.
        times: Fitted to the samples.
        samples: Measured steps.
        kv_dtype: Of the KV pool; "" is as the weights.

    Returns:
        Hardware whose peaks are what was reached (efficiencies 1), without a name and memory; and why no roofline
        could be fitted, "" where one was: its rates are then the most that any step reached, and its host time is none.
    """
    cost = CostModel(_PEAKS, model, block_size, itemsize, kv_dtype)
    used = [s for s in samples if 0.5 < s.seconds / times.sample_seconds(s) < 2]
    works = [padded_work(cost, s) for s in used]
    seconds = [s.seconds for s in used]
    try:
        found = fit_roofline(_PEAKS, works, [s.load.rows for s in used], seconds)
    except ValueError as error:
        flops = max((w.flops + w.attention_flops) / t for w, t in zip(works, seconds))
        moved = max((w.bytes + w.attention_bytes) / t for w, t in zip(works, seconds))
        least = min(seconds) / 10
        spec = replace(_PEAKS, flops_per_s=flops, bytes_per_s=moved, step_overhead_s=least)
        return replace(spec, compute_efficiency=1.0, bandwidth_efficiency=1.0), str(error)
    return (
        replace(
            found,
            flops_per_s=found.flops_per_s * found.compute_efficiency,
            bytes_per_s=found.bytes_per_s * found.bandwidth_efficiency,
            compute_efficiency=1.0,
            bandwidth_efficiency=1.0,
        ),
        "",
    )


def padded_work(cost: CostModel, sample: StepSample) -> Work:
    """The work of a measured step, as wide as the program that runs it."""
    model, program, load = cost.model, sample.program, sample.load
    head = model.vocab_size * model.d_model
    pairs = load.keys + load.work
    read = load.keys + load.work / min(TILE, program.num_tokens)
    return Work(
        flops=2.0 * model.active_layer_parameters * program.num_tokens + 2.0 * head * program.num_samples,
        bytes=float((model.read_layer_parameters(program.num_tokens) + head) * cost.itemsize),
        attention_flops=float(model.attention_flops) * pairs,
        attention_bytes=float((read + program.num_tokens) * cost.kv_bytes_per_token),
    )
