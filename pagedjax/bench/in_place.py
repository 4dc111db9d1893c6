"""Is the KV pool updated in place? One decode step of a tiny model over a small and a large pool.

A step that copied its pool, or a layer of it, would take time and temporaries in proportion to the pool.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from pagedjax.cache import CopyPlan, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.kernels import KVLayout
from pagedjax.request import Request, SamplingParams, Sequence
from pagedjax.runtime import JaxRunner
from pagedjax.scheduler import Row, StepPlan
from pagedjax.testing import tiny_model

_CONTEXT = 64


def run(
    small: int = 1024, large: int = 65_536, *, steps: int = 200, block_size: int = 16
) -> list[dict[str, Any]]:
    """Measure one decode step over each pool, interleaved, and ask the compiler what it allocates.

    Args:
        small, large: Blocks in the two pools.
        steps: Steps of each; the fastest counts.
        block_size: Tokens per block.

    Returns:
        A row per pool: blocks, pool bytes, microseconds of a step and its ratio to the small pool's, bytes
        aliased from input to output, temporaries, and the latter's share of the pool.
    """
    model = tiny_model()
    layout = KVLayout(
        model.config.num_layers, small, block_size, model.config.num_kv_heads, model.config.head_dim
    )
    layouts = [layout, dataclasses.replace(layout, num_blocks=large)]
    config = SchedulerConfig(max_num_seqs=1, token_budget=16)
    runners = [
        JaxRunner(model.config, model.params, one, config, max_model_len=2 * _CONTEXT) for one in layouts
    ]
    plan = _decode_plan(block_size)
    for runner in runners:
        runner.execute(plan)
    seconds = [float("inf")] * len(runners)
    for _ in range(steps):
        for i, runner in enumerate(runners):
            started = time.perf_counter()
            runner.execute(plan)
            seconds[i] = min(seconds[i], time.perf_counter() - started)
    rows = []
    for runner, best in zip(runners, seconds, strict=True):
        memory: Any = runner.lower(runner.buckets.smallest(plan)).compile().memory_analysis()
        rows.append(
            {
                "blocks": runner.num_blocks,
                "pool bytes": runner.layout.num_bytes,
                "step µs": best * 1e6,
                "time ratio": best / seconds[0],
                "alias bytes": memory.alias_size_in_bytes,
                "temporary bytes": memory.temp_size_in_bytes,
                "temporaries / pool": memory.temp_size_in_bytes / runner.layout.num_bytes,
            }
        )
    return rows


def _decode_plan(block_size: int) -> StepPlan:
    """One sequence that decodes at position _CONTEXT over blocks 1, 2, 3, …"""
    request = Request("in-place", tuple(range(_CONTEXT)), SamplingParams(), seed=0)
    seq = Sequence(0, request, 0, TokenChain(range(_CONTEXT + 1), block_size=block_size))
    table = np.zeros((1, 2 * _CONTEXT // block_size), np.int32)
    used = _CONTEXT // block_size + 1
    table[0, :used] = np.arange(1, used + 1)
    return StepPlan(1, (Row(seq, _CONTEXT, 1, (seq,)),), (table,), CopyPlan())
