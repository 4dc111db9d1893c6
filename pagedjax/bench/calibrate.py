"""What the steps of a loaded model take on this machine: measured, fitted, and judged on steps not used for the fit."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import psutil

from pagedjax.engine import Engine
from pagedjax.engine.shapes import Bucket
from pagedjax.sim.calibration import (
    FitErrors,
    Phase,
    errors,
    make_phases,
    measure,
    reached_roofline,
    warm_phases,
)
from pagedjax.sim.cost import HardwareSpec
from pagedjax.sim.programs import StepSample, StepTimes, fit_steps, limit_numbers, shape_numbers

if TYPE_CHECKING:
    from pagedjax.llm import LLM


@dataclass(frozen=True)
class Calibration:
    """A machine's cost model, and how far it is to be believed.

    Attributes:
        hardware: With the measured steps of the model.
        held_out: Errors on steps that were not used for the fit; of kinds apart under "decode", "prefill", "mixed".
        fitted: Errors on the others.
        unmeasured: Programs that no step ran; what needs them is charged as the next larger one.
        no_roofline: Why no roofline could be fitted for other models; "" where one was.
    """

    hardware: HardwareSpec
    held_out: dict[str, FitErrors]
    fitted: FitErrors
    unmeasured: tuple[Bucket, ...]
    no_roofline: str


def fresh_engine(llm: LLM) -> Engine:
    """An engine of its own on a model's runner, over an empty manager; `LLM.engine` must be idle meanwhile."""
    return Engine(
        llm.new_manager(),
        llm.runner,
        llm.config.scheduler,
        max_model_len=llm.max_model_len,
        decode=llm.tokenizer.decode,
        hash_scheme=llm.config.cache.hash,
    )


def warm(llm: LLM) -> None:
    """Compile all programs and run each once: the first real step of a program takes longer than the next.

    In checked mode they are compiled only: blocks are then asserted against `LLM.engine`'s books.
    """
    llm.warm_up()
    if llm.config.runtime.checked or llm.config.runtime.deterministic:
        return
    phases = warm_phases(
        llm.runner.buckets.ladder,
        max_seqs=llm.config.scheduler.max_num_seqs,
        longest=min(llm.max_model_len, pool_tokens(llm)),
    )
    engine = fresh_engine(llm)
    measure(engine, llm.runner.buckets.smallest, phases, vocab_size=llm.model_config.vocab_size)


def pool_tokens(llm: LLM) -> int:
    """Tokens of one sequence that the smallest pool of a model holds."""
    return (min(llm.manager.pool_blocks) - 1) * llm.manager.block_size


def computed_how(llm: LLM) -> dict[str, str]:
    """What step times depend on beside shapes and limits: dtype, implementation, device."""
    config = llm.config
    device = jax.devices()[0]
    sharing = f", {config.runtime.tensor_parallel} of them" if config.runtime.tensor_parallel > 1 else ""
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    kind = platform.machine() if device.platform == "cpu" else device.device_kind
    return {
        "dtype": f"{config.model.dtype}, KV {llm.runner.layout.dtype}",
        "implementation": f"{config.runtime.implementation or 'preferred'}, {llm.runner.products} products",
        "device": f"{device.platform} {kind}{cores}{sharing}",
    }


def calibrate(
    llm: LLM,
    *,
    repeats: int = 3,
    seed: int = 0,
    advance: Callable[[Phase, int], None] = lambda phase, phases: None,
) -> Calibration:
    """Measure steps of a model's engine and fit its cost model.

    Args:
        llm: Idle, not in checked mode; compiled and warm (`warm`), or the first steps of programs are left out.
        repeats: How often each designed step comes.
        seed: Of the prompts.
        advance: Called after each phase, with how many there are.

    Raises:
        ValueError: Checked or deterministic mode is on, or too few steps could be made.
    """
    if llm.config.runtime.checked:
        raise ValueError(
            "runtime.checked: its program would be measured with every step; calibrate without it"
        )
    if llm.config.runtime.deterministic:
        raise ValueError(
            "runtime.deterministic: its steps are slices of one program, which the cost model does not know; "
            "calibrate without it"
        )
    ladder, scheduler = llm.runner.buckets.ladder, llm.config.scheduler
    longest = min(llm.max_model_len, pool_tokens(llm) // 2)
    phases = make_phases(
        ladder,
        max_seqs=scheduler.max_num_seqs,
        longest=longest,
        pool_tokens=pool_tokens(llm),
        repeats=repeats,
    )
    kept, held = measure(
        fresh_engine(llm),
        llm.runner.buckets.smallest,
        phases,
        vocab_size=llm.model_config.vocab_size,
        seed=seed,
        on_phase=lambda phase: advance(phase, len(phases)),
    )
    how: dict[str, Any] = dict(computed_how(llm))
    bare = StepTimes(
        shape_numbers(llm.model_config),
        limit_numbers(scheduler),
        llm.manager.block_size,
        {ladder[0]: 1.0},
        **how,
    )
    times = fit_steps(kept, bare)
    itemsize = jax.numpy.dtype(llm.config.model.dtype).itemsize
    kv_dtype = llm.runner.layout.dtype
    roof, reason = reached_roofline(llm.model_config, itemsize, llm.manager.block_size, times, kept, kv_dtype)
    stats = jax.devices()[0].memory_stats() or {}
    hardware = replace(
        roof,
        name=f"this {times.device}",
        memory_bytes=float(stats.get("bytes_limit") or psutil.virtual_memory().total),
        steps=times,
    )
    kinds = {"all": held} | {kind: [s for s in held if _kind(s) == kind] for kind in _KINDS}
    return Calibration(
        hardware,
        {kind: errors(times, steps) for kind, steps in kinds.items() if steps or kind == "all"},
        errors(times, kept),
        tuple(
            bucket
            for bucket in ladder
            if bucket not in times.programs
            and (scheduler.max_num_seqs > 1 or not (bucket.num_decodes and bucket.num_prefill_tokens))
        ),
        reason,
    )


_KINDS = ("decode", "prefill", "mixed")


def _kind(sample: StepSample) -> str:
    if not sample.program.num_prefill_tokens:
        return "decode"
    return "mixed" if sample.load.keys else "prefill"
