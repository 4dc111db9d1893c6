"""Sizes of the kernels' pieces on the device that is here: each size of each geometry timed beside the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.bench.kernels import Call, Case, Key, Progress, best_of, make_rows, paged_pool
from pagedjax.kernels import Tuning, native, paged_attention, plan_ragged
from pagedjax.kernels.layout import device_class, device_kind
from pagedjax.kernels.tuning import heads_of, to_toml

# Steps that are timed: decode rows alone, or beside the first tokens of a prompt.
_PROMPT_TOKENS = 512
CASES = {
    "cpu": (Case((9, 3), 64, 8, 512), Case((32, 8), 128, 8, 512)),
    "tpu": tuple(
        Case(heads, head_dim, 64, 4096, block_size=size)
        for (heads, head_dim), size in itertools.product(
            (((9, 3), 64), ((32, 8), 128), ((8, 1), 256)), (16, 64)
        )
    ),
    "gpu": tuple(
        Case(heads, head_dim, 64, 4096, block_size=size)
        for (heads, head_dim), size in itertools.product((((32, 8), 128), ((8, 1), 256)), (16, 64))
    ),
}


@dataclass(frozen=True)
class Trial:
    """One size to settle: whose, its values, and the step that shows it.

    Attributes:
        kernel, size: As in the tuning table.
        values: In turn.
        implementation: That is timed; None is the preferred one.
        prompt: Whether the step is tokens of a prompt and not decode rows.
    """

    kernel: str
    size: str
    values: tuple[int, ...]
    implementation: str | None = None
    prompt: bool = False


TRIALS = {
    "cpu": (
        Trial("plan", "chunk_tokens", (64, 128, 256, 512)),
        Trial("xla", "iteration_bytes", (1 << 19, 1 << 20, 1 << 21, 1 << 22), "xla"),
        Trial("plan", "tile_queries", (32, 64, 128, 256), "xla", prompt=True),
    ),
    "tpu": (
        Trial("pallas_tpu", "chunk_tokens", (128, 256, 512, 1024, 2048), "pallas_tpu"),
        Trial("pallas_tpu", "tile_queries", (32, 64, 128, 256), "pallas_tpu", prompt=True),
    ),
    "gpu": (
        Trial("plan", "chunk_tokens", (128, 256, 512, 1024)),
        *(
            Trial(kernel, size, values, kernel, prompt)
            for kernel in ("pallas_mosaic", "pallas_mma")
            for size, values, prompt in (
                ("decode_stages", (1, 2, 3, 4), False),
                ("prefill_stages", (1, 2, 3, 4), True),
                ("programs", (1, 2, 3, 4), False),
            )
        ),
        Trial("pallas_mma", "value_keys", (16, 32, 64), "pallas_mma", prompt=True),
    ),
}


def run(
    cases: Sequence[Case] | None = None,
    *,
    dtype: str | None = None,
    rounds: int = 15,
    trials: Sequence[Trial] | None = None,
    progress: Progress | None = None,
) -> tuple[str, list[dict[str, Any]]]:
    """Times every size of every case, those of one size in turn in one process.

    Args:
        cases: Geometries, with the batch and context that are timed; None takes CASES of this device.
        dtype: Of the pool; None takes float32 on CPU and bfloat16 elsewhere.
        rounds: Times each value runs; the best counts.
        trials: Sizes; None takes TRIALS of this device.
        progress: Told what is measured next, and which values a kernel refuses.

    Returns:
        (A tuning file with the quickest value of each; rows with kernel, size, heads, block_size, value, ms and
        of_best, the best value's time over this one's.)
    """
    tell = progress or (lambda message: None)
    platform = device_class()
    if platform == "cpu":
        native.prepare()
    dtype = dtype or ("float32" if platform == "cpu" else "bfloat16")
    tables: list[dict[str, Any]] = []
    comments: dict[int, str] = {}
    rows: list[dict[str, Any]] = []
    for case in CASES[platform] if cases is None else cases:
        fits = {
            "device": device_kind(),
            "heads": heads_of(*case.heads, case.head_dim),
            "dtype": dtype,
            "block_size": case.block_size,
        }
        for trial in TRIALS[platform] if trials is None else trials:
            tell(f"{fits['heads']}, blocks of {case.block_size}: {trial.kernel}.{trial.size}")
            best = _times(case, trial, dtype, rounds, tell)
            if not best:
                continue
            quickest = min(best, key=lambda value: best[value])
            comments[len(tables)] = ", ".join(f"{value}: {s * 1e3:.3g} ms" for value, s in best.items())
            tables.append({"kernel": trial.kernel, **fits, trial.size: quickest})
            rows += [
                {
                    "kernel": trial.kernel,
                    "size": trial.size,
                    "heads": fits["heads"],
                    "block_size": case.block_size,
                    "value": value,
                    "ms": seconds * 1e3,
                    "of_best": best[quickest] / seconds,
                }
                for value, seconds in best.items()
            ]
    return to_toml(Tuning.parse({"sizes": tables}, "measured"), comments), rows


def _times(case: Case, trial: Trial, dtype: str, rounds: int, tell: Progress) -> dict[int, float]:
    """Seconds of a step by value; values that the kernel refuses are left out, by name."""
    N, H = case.heads[0], case.head_dim
    kv = make_rows(case, dtype)
    pool, tables = paged_pool(case, kv)
    lens = np.full(case.batch, case.context, np.int32)
    query_lens = np.ones(case.batch, np.int32)
    if trial.prompt:  # the last tokens of one row
        tables, lens = tables[:1], lens[:1]
        query_lens = np.full(1, min(_PROMPT_TOKENS, case.context), np.int32)
    T = int(query_lens.sum())
    q = jax.random.normal(jax.random.key(0), (T, N, H), jnp.dtype(dtype))
    calls: dict[Key, Call] = {}
    for value in trial.values:
        tuning = Tuning.parse({"sizes": [{"kernel": trial.kernel, trial.size: value}]}, "measured")
        plan: dict[str, Any] = {trial.size: value} if trial.kernel == "plan" else {}
        ragged = plan_ragged(
            query_lens,
            lens,
            tables,
            block_size=case.block_size,
            num_tokens_bucket=T,
            num_seqs_bucket=len(lens),
            decode_bucket=0 if trial.prompt else T,
            tuning=tuning,
            **plan,
        )
        args = q, pool, jax.tree.map(jnp.asarray, ragged)

        try:
            calls[None, str(value)] = _compiled(trial.implementation, H**-0.5, args)
        except NotImplementedError as limit:
            tell(f"{trial.kernel}.{trial.size}={value} left out: {limit}")
    found = best_of(calls, rounds)
    return {int(name): seconds for (_, name), seconds in found.items()}


def _compiled(implementation: str | None, scale: float, args: tuple[Any, ...]) -> Call:
    def step(q: jax.Array, pool: Any, ragged: Any) -> jax.Array:
        return paged_attention(q, pool, 0, ragged, scale=scale, implementation=implementation)

    compiled = jax.jit(step).lower(*args).compile()
    return lambda: compiled(*args)
