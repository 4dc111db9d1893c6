"""What `runtime.deterministic` costs: the same prefills and decode steps of two engines, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagedjax.bench.decode import StepRecords, check_fits, running, timed_step
from pagedjax.lab.claims import TableRow

if TYPE_CHECKING:
    from pagedjax.llm import LLM

MOST = 3.0  # times the usual engine's: what the mode may cost


def run(
    usual: LLM,
    deterministic: LLM,
    batches: Sequence[int],
    *,
    context: int = 256,
    tokens: int = 16,
    rounds: int = 3,
    note: Callable[[str], None] = lambda _: None,
) -> list[TableRow]:
    """Measure each batch size.

    Args:
        usual, deterministic: Engines of the same settings but one; compiled here first.
        batches: Sequences prefilled and decoded at once.
        context: Prompt length, tokens.
        tokens: Decode steps per round; the fastest counts.
        rounds: Of one engine and the other, in turn; the fastest of each counts.
        note: Told what is being measured.

    Returns:
        One row per batch size: tokens per second of both, and the deterministic engine's seconds over the usual one's.

    Raises:
        ValueError: A batch does not fit the engines' limits or pools.
    """
    engines = {"usual": usual, "deterministic": deterministic}
    for llm in engines.values():
        check_fits(llm, batches, context, tokens)
        llm.warm_up()
    rows = []
    for batch in batches:
        note(f"batch {batch}: {rounds} rounds of both engines")
        prefill: dict[str, list[float]] = {name: [] for name in engines}
        step: dict[str, list[float]] = {name: [] for name in engines}
        for round_ in range(rounds):
            for name, llm in engines.items():
                seed = round_ * 1000 + batch
                with StepRecords(llm) as recorder, running(llm, batch, context, seed=seed) as seconds:
                    prefill[name].append(seconds)
                    step[name].append(min(timed_step(recorder) for _ in range(tokens)))
        row: TableRow = {"batch": batch, "context": context}
        for what, taken, count in (("prefill", prefill, batch * context), ("decode", step, batch)):
            best = {name: min(times) for name, times in taken.items()}
            row |= {f"{name} {what} tok/s": count / seconds for name, seconds in best.items()}
            row[f"{what} cost"] = best["deterministic"] / best["usual"]
        rows.append(row)
    return rows
