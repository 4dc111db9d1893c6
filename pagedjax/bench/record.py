"""What recording costs: the same run with and without a record, in turn, of a simulation and of a tiny model."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache import CopyPlan, PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.engine.request import SamplingParams
from pagedjax.models.family_configs import read_shape
from pagedjax.report.record import Recorder
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat

Row = dict[str, Any]
Note = Callable[[str], None]


class _Clocked(Recorder):
    """A recorder that knows what it cost: CPU seconds in `spent_s`, the clock's own included."""

    spent_s = 0.0

    def _timed(self, told: Callable[..., None], *args: Any) -> None:
        started = time.thread_time()
        told(*args)
        _Clocked.spent_s += time.thread_time() - started

    def added(self, *args: Any) -> None:
        self._timed(super().added, *args)

    def stepped(self, *args: Any) -> None:
        self._timed(super().stepped, *args)

    def quiet(self, *args: Any) -> None:
        self._timed(super().quiet, *args)

    def ended(self, *args: Any) -> None:
        self._timed(super().ended, *args)


class _Marked(PagedManager):
    """A manager that notes when each step is planned."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.planned: list[float] = []

    def take_copies(self) -> CopyPlan:
        self.planned.append(time.perf_counter())
        return super().take_copies()


def run(*, rounds: int = 7, sessions: int = 60, note: Note = lambda _: None) -> list[Row]:
    """Run twice a round, once with a record; which comes first alternates.

    Args:
        rounds: Pairs of runs; the median of their ratios is kept.
        sessions: Chats of the simulated run, four turns each.
        note: Told what is being done.

    Returns:
        One row per run and kind of file: seconds without (CPU seconds of the simulation, seconds on the clock of the
        model), ratio with to without, `steps_ratio`, share of a run's seconds that the recorder's own calls took,
        steps, frames, bytes a step. Runs differ by more than a record takes, and equal runs have equal steps:
        `steps_ratio` is between sums over the steps of the least time on the clock that each took in all rounds, from
        its start to the next one's. Of a real model, whose steps differ, the share says more.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        simulated = partial(_simulated, sessions)
        for name in ("run.jsonl", "run.jsonl.gz"):
            note(f"simulation, {name}")
            rows.append(_row("simulated", Path(folder, name), simulated, rounds))
        note("tiny model")
        engine = _tiny_engine()
        rows.append(_row("tiny model, 8 rows", Path(folder, "run.jsonl"), partial(_decoded, engine), rounds))
    return rows


def _row(
    what: str,
    path: Path,
    once: Callable[[type[Recorder], Path | None], tuple[float, int, list[float]]],
    rounds: int,
) -> Row:
    for _ in range(
        2
    ):  # what is compiled or cached at first is no part of it, nor the shapes of cached prompts
        once(Recorder, None)
    _Clocked.spent_s = 0.0
    clocked, *_ = once(_Clocked, path)
    ratios, least, steps = [], float("inf"), 0
    least_steps: dict[Path | None, np.ndarray] = {}
    for number in range(rounds):
        seconds = {}
        for target in (None, path) if number % 2 else (path, None):
            gc.collect()
            seconds[target], steps, times = once(Recorder, target)
            least_steps[target] = np.minimum(least_steps.get(target, np.inf), np.diff(times))
        ratios.append(seconds[path] / seconds[None])
        least = min(least, seconds[None])
    lines = path.read_bytes().count(b"\n") if path.suffix != ".gz" else None
    return {
        "run": what,
        "file": "gzip" if path.suffix == ".gz" else "plain",
        "steps": steps,
        "frames": lines,
        "without_s": least,
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "steps_ratio": float(least_steps[path].sum() / least_steps[None].sum()),
        "recorder_share": _Clocked.spent_s / clocked,
        "bytes_per_step": path.stat().st_size / steps,
    }


def _simulated(sessions: int, kind: type[Recorder], path: Path | None) -> tuple[float, int, list[float]]:
    """CPU seconds and steps of chats on a simulated A100, up to 48 at once; times from plan to plan."""
    trace = chat(sessions, turns=4, system_tokens=200, user_tokens=60, output_tokens=120, seed=1, pause_s=1.0)
    cost = CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16)
    manager = _Marked(num_blocks=2000, block_size=16)
    limits = SchedulerConfig(max_num_seqs=48, token_budget=2048)
    observe = None if path is None else partial(kind, path, about={"kind": "simulated"})
    first, started = time.perf_counter(), time.process_time()
    result = simulate(trace, manager, cost, limits, max_model_len=4096, observe=observe)
    seconds = time.process_time() - started
    return seconds, result.num_steps, [first, *manager.planned, time.perf_counter()]


def _tiny_engine() -> Engine:
    from pagedjax.models.decoder import pool_layout
    from pagedjax.runtime import JaxRunner
    from pagedjax.testing import tiny_config, tiny_params

    config = tiny_config()
    limits = SchedulerConfig(max_num_seqs=8, token_budget=512)
    layout = pool_layout(config, 256, 16)
    runner = JaxRunner(config, tiny_params(config), layout, limits, max_model_len=256)
    return Engine(PagedManager(num_blocks=256, block_size=16), runner, limits, max_model_len=256)


def _decoded(engine: Engine, kind: type[Recorder], path: Path | None) -> tuple[float, int, list[float]]:
    """Seconds and steps of 16 requests of a tiny model, whose steps are as short as real ones get; its times."""
    first = engine.scheduler.step
    recorder = None if path is None else kind(path, engine, {"kind": "measured"})
    times = [time.perf_counter()]
    for number in range(16):
        prompt = np.random.default_rng(number).integers(0, 256, 64).tolist()
        engine.add(prompt, SamplingParams(max_tokens=64, ignore_eos=True))
    while engine.has_work:
        engine.step()
        times.append(time.perf_counter())
    if recorder is not None:
        recorder.close()
    times[-1] = time.perf_counter()
    return times[-1] - times[0], engine.scheduler.step - first, times
