"""What a preemption really costs, by swapping and by recomputing, beside what the cost rule predicts.

A decoding request loses its blocks and gets them back in the next step. What that costs is the time to its
next token, less the time of an undisturbed decode step taken in the same round.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.engine.request import SamplingParams

if TYPE_CHECKING:
    from pagedjax.engine import StepRecord
    from pagedjax.llm import LLM

from pagedjax.lab.claims import TableRow

_CLEAR = 1.25  # two costs closer than this are a tie on a shared machine


def run(
    llm: LLM, contexts: Sequence[int], *, rounds: int = 5, note: Callable[[str], None] = lambda _: None
) -> list[TableRow]:
    """Measure both ways at each length.

    Args:
        llm: With host blocks for the longest context, and without prefix caching, which would give what was
            dropped back for nothing.
        contexts: Prompt lengths, tokens.
        rounds: Interleaved rounds; the median of each counts.
        note: Told what is being measured.

    Returns:
        One row per length: measured and predicted milliseconds of both ways, what the rule chooses, and
        whether the choice was the quicker one.

    Raises:
        ValueError: The engine has no host blocks, caches prefixes, or a context does not fit.
    """
    _check(llm, contexts)
    llm.warm_up(mixed=False)
    costs = llm.engine.scheduler.costs
    before = llm.engine.on_step
    llm.engine.on_step = lambda record: _observe(costs, record)
    rows = []
    try:
        for context in contexts:
            note(f"context {context}: {rounds} rounds of swap and recompute")
            rows.append(_measure(llm, context, rounds))
    finally:
        llm.engine.on_step = before
    return rows


def _check(llm: LLM, contexts: Sequence[int]) -> None:
    if llm.config.cache.prefix_caching:
        raise ValueError(
            "cache.prefix_caching=true: a recomputation would be served from the cache; turn it off"
        )
    for context in contexts:
        needed, usable = llm.manager.demand(context + 4, context + 4)
        most = min(usable, llm.manager.host_blocks)
        if needed > most or context + 64 > llm.max_model_len:
            raise ValueError(
                f"--context {context}: needs {needed} blocks of {most} on device and host, and must leave 64 tokens "
                f"of max_model_len={llm.max_model_len}; lower it or raise cache.host_blocks"
            )


def _observe(costs: Any, record: StepRecord) -> None:
    plan = record.plan
    prefills = sum(row.num_tokens > 1 for row in plan.rows)
    costs.observe(plan.num_tokens, prefills, plan.copies, record.result)


def _measure(llm: LLM, context: int, rounds: int) -> TableRow:
    engine, scheduler = llm.engine, llm.engine.scheduler
    prompt = np.random.default_rng(context).integers(3, llm.model_config.vocab_size, context).tolist()
    request_id = engine.add(prompt, SamplingParams(max_tokens=llm.max_model_len, ignore_eos=True))
    seconds: dict[str, list[float]] = {"swap": [], "recompute": []}
    wanted = scheduler.config
    try:
        while not engine.step():
            pass
        (request,) = scheduler.running
        for _ in range(rounds):
            for mode, times in seconds.items():
                plain = _until_next_token(llm)
                scheduler.config = dataclasses.replace(wanted, preemption=mode)
                scheduler._preempt(request)
                times.append(_until_next_token(llm) - plain)
        scheduler.config = wanted
        (seq,) = request.live
        blocks = llm.manager.num_lone_blocks(seq.seq_id)
        tokens = seq.num_computed_tokens
    finally:
        scheduler.config = wanted
        engine.abort(request_id)
    swap_s, recompute_s = (max(float(np.median(times)), 1e-9) for times in seconds.values())
    predicted = scheduler.costs.recompute_s(tokens)
    assert predicted is not None  # the prefill above was observed
    swaps = scheduler.costs.swap_pays(blocks, tokens)
    ratio = swap_s / recompute_s
    quicker = "swap" if ratio < 1 / _CLEAR else "recompute" if ratio > _CLEAR else "tie"
    rule = "swap" if swaps else "recompute"
    return {
        "context": context,
        "blocks": sum(blocks),
        "swap ms": swap_s * 1e3,
        "recompute ms": recompute_s * 1e3,
        "swap / recompute": ratio,
        "predicted swap ms": scheduler.costs.swap_s(blocks) * 1e3,
        "predicted recompute ms": predicted * 1e3,
        "rule": rule,
        "quicker": quicker,
        "rule holds": quicker in (rule, "tie"),
    }


def _until_next_token(llm: LLM) -> float:
    started = time.perf_counter()
    while not llm.engine.step():
        pass
    return time.perf_counter() - started
