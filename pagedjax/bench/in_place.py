"""Is the pool really updated in place? One decode step over a small and a large pool, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import psutil

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.engine.request import SamplingParams
from pagedjax.lab.claims import TableRow
from pagedjax.models.decoder import pool_layout
from pagedjax.runtime import JaxRunner
from pagedjax.testing import tiny_config, tiny_params


def run(
    sizes: tuple[int, int] = (1024, 65536),
    *,
    batch: int = 8,
    context: int = 64,
    steps: int = 200,
    note: Callable[[str], None] = lambda _: None,
) -> list[TableRow]:
    """Decode with a tiny seeded model over pools of two sizes, step by step in turn.

    A step that copied the pool would take longer with the larger one, need temporaries of its size, and
    alias fewer bytes than the pool holds.

    Args:
        sizes: Blocks of the small and of the large pool.
        batch: Sequences decoded at once.
        context: Prompt length, tokens.
        steps: Timed steps of each; the median is kept.
        note: Told what is being done.

    Returns:
        One row per size: median step seconds, its ratio to the small pool's, bytes of pool, aliased and
        temporary memory of the compiled step, and resident memory that the process gained by it.
    """
    config = tiny_config()
    params = jax.device_put(tiny_params(config))
    limits = SchedulerConfig(max_num_seqs=batch, token_budget=batch * context)
    process = psutil.Process()
    engines, rows = [], []
    for num_blocks in sizes:
        note(f"pool of {num_blocks:,} blocks")
        before = process.memory_info().rss
        layout = pool_layout(config, num_blocks, 16)
        runner = JaxRunner(config, params, layout, limits, max_model_len=context + steps + 16)
        manager = PagedManager(num_blocks=num_blocks, block_size=16)
        engine = Engine(manager, runner, limits, max_model_len=context + steps + 16)
        for at in range(batch):
            prompt = np.random.default_rng(at).integers(0, 256, context).tolist()
            engine.add(prompt, SamplingParams(max_tokens=steps + 8, ignore_eos=True))
        for _ in range(4):  # the prefill, and steps that compile
            engine.step()
        memory: Any = runner.lower(runner.buckets.ladder[-1]).compile().memory_analysis()
        engines.append(engine)
        rows.append(
            {
                "blocks": num_blocks,
                "pool_bytes": layout.num_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "gained_bytes": process.memory_info().rss - before,
            }
        )
    note(f"{steps} steps of each, in turn")
    seconds = np.zeros((steps, len(sizes)))
    for step in range(steps):
        for which, engine in enumerate(engines):
            started = time.perf_counter()
            engine.step()
            seconds[step, which] = time.perf_counter() - started
    medians = np.median(seconds, axis=0)
    for row, median in zip(rows, medians, strict=True):
        row["step_s"] = float(median)
        row["ratio"] = float(median / medians[0])
    return rows
