"""Decoding on a simulated device of so many milliseconds a step: how much of its rate the host lets it have.

Steps are begun one by one, ahead (`runtime.overlap`) and several a dispatch (`runtime.num_steps`), in turn.

The engine, its manager, packing, the dispatch of a program with the step's own arguments and the books are real; only
the computation is not there. A step is done so long after it was begun, or after the one before it, whichever is
later, as on the stream of an accelerator, and costs the host's cores nothing meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.bench.decode import check_fits, host_seconds
from pagedjax.engine import Engine, StepRecord
from pagedjax.engine.request import SamplingParams
from pagedjax.lab.claims import TableRow
from pagedjax.runtime.runner import StepOutput
from pagedjax.runtime.steps import StepsBatch, StepsOutput

if TYPE_CHECKING:
    from pagedjax.llm import LLM

WANTED = 0.95  # of the device's rate, with overlap


def run(
    llm: LLM,
    *,
    batch: int = 32,
    context: int = 256,
    tokens: int = 96,
    step_ms: float = 5.0,
    rounds: int = 5,
    note: Callable[[str], None] = lambda _: None,
) -> list[TableRow]:
    """Decode with and without overlap, one step and several a dispatch, in turn.

    Args:
        llm: Lends its runner, settings and tokenizer; it must be idle, and its cache is forgotten. Several steps are as
            many as its `runtime.num_steps`; with 1 they are left out.
        batch: Sequences decoded at once.
        context: Prompt length, tokens.
        tokens: Decode steps per round, rounded up to whole dispatches.
        step_ms: Milliseconds of the device a step; 0: the model itself computes, on the device that is there.
        rounds: Of all, in turn; the medians count.
        note: Told what is being measured.

    Returns:
        A row for each: tokens per second, their part of the device's rate, the median over the rounds of their ratio to
        those of the first row, steps planned ahead, steps behind the first of a dispatch, and microseconds a row that
        the host takes to plan, pack, dispatch and book (means: what a dispatch costs is its first step's).

    Raises:
        ValueError: The batch does not fit the engine's limits or its pool.
    """
    most = llm.config.runtime.num_steps
    tokens = -(-tokens // most) * most
    check_fits(llm, [batch], context, tokens + most)
    device = f"of {step_ms:g} ms" if step_ms else "of the model"
    note(
        f"batch {batch}: {rounds} rounds of {tokens} steps {device}, overlap off and on, num_steps 1 to {most}"
    )
    ways = [(overlap, steps) for steps in sorted({1, most}) for overlap in (False, True)]
    rates: dict[tuple[bool, int], list[float]] = {way: [] for way in ways}
    records: dict[tuple[bool, int], list[StepRecord]] = {way: [] for way in ways}
    with SimulatedDevice(llm, step_ms / 1e3).installed() if step_ms else nullcontext():
        for seed in range(rounds + (not step_ms)):
            for way in ways:
                seconds, taken = _decode(llm, *way, batch, context, tokens, seed)
                if seed < rounds:  # the first of a real device may have compiled
                    rates[way].append(batch * tokens / seconds)
                    records[way] += taken
                else:
                    rates[way][0] = batch * tokens / seconds
    rows: list[TableRow] = []
    for overlap, steps in ways:
        taken, rate = records[overlap, steps], statistics.median(rates[overlap, steps])
        host = np.mean([host_seconds(record) for record in taken], axis=0) / batch * 1e6
        ratios = [ours / plain for ours, plain in zip(rates[overlap, steps], rates[ways[0]], strict=True)]
        row: TableRow = {
            "overlap": "on" if overlap else "off",
            "num_steps": steps,
            "batch": batch,
            "device ms": step_ms or "",
            "decode tok/s": rate,
            "of the device": rate * step_ms / batch / 1e3 if step_ms else "",
            "wanted": WANTED if overlap and step_ms else "",
            "of the first": statistics.median(ratios),
            "planned ahead": sum(record.overlap == "ahead" for record in taken) / len(taken),
            "inner": sum(record.dispatch == "inner" for record in taken) / len(taken),
        }
        names = ("schedule", "pack", "dispatch", "commit")
        row |= {f"{name} µs/row": float(value) for name, value in zip(names, host, strict=True)}
        row["host µs/row"] = float(host[0] + host[1] + host[3])
        rows.append(row)
    return rows


def _decode(
    llm: LLM, overlap: bool, num_steps: int, batch: int, context: int, tokens: int, seed: int
) -> tuple[float, list[StepRecord]]:
    """Seconds of so many steps of a batch that decodes, and their records."""
    records: list[StepRecord] = []
    engine = Engine(
        llm.new_manager(),
        llm.runner,
        llm.config.scheduler,
        max_model_len=llm.max_model_len,
        decode=llm.tokenizer.decode,
        on_step=records.append,
        overlap=overlap,
        num_steps=num_steps,
    )
    draw = np.random.default_rng(seed)
    endless = SamplingParams(max_tokens=llm.max_model_len, ignore_eos=True)
    waiting = {
        engine.add(prompt, endless)
        for prompt in draw.integers(3, llm.model_config.vocab_size, (batch, context)).tolist()
    }
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    for _ in range(num_steps):  # the first dispatch of pure decode steps is not timed
        engine.step()
    records.clear()
    started = time.perf_counter()
    for _ in range(tokens):
        engine.step()
    return time.perf_counter() - started, records


class _Late:
    """An array that is there only from some time on."""

    def __init__(self, array: Any, ready_at: float) -> None:
        self._array, self._ready_at = array, ready_at

    def copy_to_host_async(self) -> None:
        """What there is to copy is not there yet."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        while (left := self._ready_at - time.perf_counter()) > 0:
            time.sleep(left)
        return np.asarray(self._array)


class SimulatedDevice:
    """Stands in for a runner's programs: takes all their arguments, computes nothing, and is done later.

    Args:
        llm: Whose runner.
        step_s: Seconds of a step.
    """

    def __init__(self, llm: LLM, step_s: float) -> None:
        self._runner, self._step_s = llm.runner, step_s
        self._vocab_size = llm.model_config.vocab_size
        self._done_at = 0.0

        def nothing(params: Any, pools: Any, batch: Any) -> Any:
            one = batch.first if isinstance(batch, StepsBatch) else batch
            shape: tuple[int, ...] = one.sample_index.shape
            if isinstance(batch, StepsBatch):
                shape = (*batch.work[0]["seq_lens"].shape[:1], *shape)
            return jnp.full(shape, 7, jnp.int32), jnp.full(one.drawn.shape, 7, jnp.int32)

        self._nothing = jax.jit(nothing, keep_unused=True)

    def __call__(self, params: Any, pools: Any, batch: Any) -> Any:
        steps = int(batch.counts.max()) if isinstance(batch, StepsBatch) else 1
        tokens, drawn = self._nothing(params, pools, batch)
        self._done_at = max(time.perf_counter(), self._done_at) + steps * self._step_s
        late = _Late(tokens, self._done_at)
        if isinstance(batch, StepsBatch):
            return StepsOutput(late, _Late(np.array(steps), self._done_at), drawn), pools
        logits = jax.ShapeDtypeStruct((tokens.shape[0], self._vocab_size), jnp.float32)
        return StepOutput(late, logits, None, drawn), pools

    def _cache_size(self) -> int:
        return 0  # what it compiles is not the step's

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of the runner's programs while the context lasts."""
        runner = self._runner
        before = runner.step_fn, runner.steps_fn
        runner.step_fn = runner.steps_fn = self
        try:
            yield
        finally:
            runner.step_fn, runner.steps_fn = before
