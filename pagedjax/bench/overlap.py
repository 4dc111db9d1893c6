"""Decoding on a simulated device of so many milliseconds a step: how much of its rate the host lets it have.

The engine, its manager, packing, the dispatch of a program with the step's own arguments and the books are real; only
the computation is not there. A step is done so long after it was begun, or after the one before it, whichever is
later, as on the stream of an accelerator, and costs the host's cores nothing meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.bench.decode import check_fits, host_seconds
from pagedjax.engine import Engine, StepRecord
from pagedjax.engine.request import SamplingParams
from pagedjax.lab.claims import TableRow
from pagedjax.runtime.runner import StepOutput

if TYPE_CHECKING:
    from pagedjax.llm import LLM

WANTED = 0.95  # of the device's rate, with overlap


def run(
    llm: LLM,
    *,
    batch: int = 32,
    context: int = 256,
    tokens: int = 100,
    step_ms: float = 5.0,
    rounds: int = 5,
    note: Callable[[str], None] = lambda _: None,
) -> list[TableRow]:
    """Decode with and without overlap, in turn.

    Args:
        llm: Lends its runner, settings and tokenizer; it must be idle, and its cache is forgotten.
        batch: Sequences decoded at once.
        context: Prompt length, tokens.
        tokens: Decode steps per round.
        step_ms: Milliseconds of the device a step.
        rounds: Of both, in turn; the medians count.
        note: Told what is being measured.

    Returns:
        A row for each: tokens per second, their part of the device's rate, steps planned ahead, and microseconds a
        row that the host takes to plan, pack, dispatch and book.

    Raises:
        ValueError: The batch does not fit the engine's limits or its pool.
    """
    check_fits(llm, [batch], context, tokens)
    note(f"batch {batch}: {rounds} rounds of {tokens} steps of {step_ms:g} ms, overlap off and on")
    rates: dict[bool, list[float]] = {False: [], True: []}
    hosts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    ahead: dict[bool, int] = {False: 0, True: 0}
    with SimulatedDevice(llm, step_ms / 1e3).installed():
        for seed in range(rounds):
            for overlap, taken in rates.items():
                seconds, records = _decode(llm, overlap, batch, context, tokens, seed)
                taken.append(batch * tokens / seconds)
                hosts[overlap].append(np.median([host_seconds(record) for record in records], axis=0))
                ahead[overlap] += sum(record.overlap == "ahead" for record in records)
    device = batch * 1e3 / step_ms
    rows: list[TableRow] = []
    for overlap, taken in rates.items():
        rate, host = statistics.median(taken), np.median(hosts[overlap], axis=0) / batch * 1e6
        row: TableRow = {
            "overlap": "on" if overlap else "off",
            "batch": batch,
            "device ms": step_ms,
            "decode tok/s": rate,
            "of the device": rate / device,
            "wanted": WANTED if overlap else "",
            "planned ahead": ahead[overlap] / (rounds * tokens),
        }
        names = ("schedule", "pack", "dispatch", "commit")
        row |= {f"{name} µs/row": float(value) for name, value in zip(names, host, strict=True)}
        row["host µs/row"] = float(host[0] + host[1] + host[3])
        rows.append(row)
    return rows


def _decode(
    llm: LLM, overlap: bool, batch: int, context: int, tokens: int, seed: int
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
    )
    draw = np.random.default_rng(seed)
    endless = SamplingParams(max_tokens=llm.max_model_len, ignore_eos=True)
    waiting = {
        engine.add(prompt, endless)
        for prompt in draw.integers(3, llm.model_config.vocab_size, (batch, context)).tolist()
    }
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    engine.step()  # the first pure decode step is not timed
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
    """Stands in for a runner's step program: takes all its arguments, computes nothing, and is done later.

    Args:
        llm: Whose runner.
        step_s: Seconds of a step.
    """

    def __init__(self, llm: LLM, step_s: float) -> None:
        self._runner, self._step_s = llm.runner, step_s
        self._vocab_size = llm.model_config.vocab_size
        self._done_at = 0.0

        def nothing(params: Any, pools: Any, batch: Any) -> Any:
            size = batch.sample_index.shape[0]
            return jnp.full(size, 7, jnp.int32), jnp.full(batch.drawn.shape, 7, jnp.int32)

        self._nothing = jax.jit(nothing, keep_unused=True)

    def __call__(self, params: Any, pools: Any, batch: Any) -> Any:
        tokens, drawn = self._nothing(params, pools, batch)
        self._done_at = max(time.perf_counter(), self._done_at) + self._step_s
        logits = jax.ShapeDtypeStruct((tokens.shape[0], self._vocab_size), jnp.float32)
        return StepOutput(_Late(tokens, self._done_at), logits, None, drawn), pools

    def _cache_size(self) -> int:
        return 0  # what it compiles is not the step's

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the runner's place of its program while the context lasts."""
        before, self._runner.step_fn = self._runner.step_fn, self
        try:
            yield
        finally:
            self._runner.step_fn = before
