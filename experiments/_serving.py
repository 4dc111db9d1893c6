"""The PagedAttention paper's setting: models, memory, lengths, and the four systems it compares."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import FOLDER
from pagedjax.cache import PagedManager, ReservationManager
from pagedjax.config import SchedulerConfig
from pagedjax.scheduler import StepPlan
from pagedjax.sim.cost import CostModel, HardwareSpec, ModelShape
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

CONFIGS = FOLDER.parent / "configs"
BLOCK = 16
KV_SLOTS = 15_700  # Table 1: "max KV slots" of a 13B model on one A100-40GB
MAX_LEN = 2048
SYSTEMS = ("orca-max", "orca-pow2", "orca-oracle", "paged")
# vLLM's limits at the time; Orca's batching is iteration-level too, so all systems run under them.
SCHEDULER = SchedulerConfig(max_num_seqs=256, token_budget=2560, chunked_prefill=False)

ALPACA = "data/lengths/alpaca_response_len_train10k.json.gz"
ALPACA_TEXT = "data/text/alpaca_en_demo.json.gz"
WORKLOADS = ("sharegpt", "alpaca")
# Fig. 11: mean prompt and answer, OPT tokenizer.
MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
# The paper's single-turn ShareGPT lengths are not public here, but Fig. 2 tells how the answers spread: of 15.7K
# slots, 7 requests of Orca (Max) hold 13.3 % for tokens still to come. A request met at a random moment has half
# its answer to come, and is met the more often the longer its answer: so twice that is E[answer^2] / E[answer].
SHAREGPT_TO_COME = 0.133 * KV_SLOTS / 7
SHAREGPT_PROMPT_SIGMA = 1.2  # assumed: log-normal prompts
LENGTH_NOTE = (
    "ShareGPT answers: gamma with the mean of Fig. 11 and the spread that Fig. 2 implies (Orca (Max), tokens still to "
    "come); its prompts: log-normal with the mean of Fig. 11, spread assumed, because the paper's single-turn lengths "
    "are not public here. Alpaca: answers and prompts of the named files, scaled to the means of Fig. 11"
)


def cost(model: str, block_size: int = BLOCK) -> CostModel:
    """The one hardware file and the one file of shapes."""
    hardware = HardwareSpec.from_toml(CONFIGS / "hardware" / "a100-40gb.toml")
    return CostModel(hardware, ModelShape.from_toml(CONFIGS / "sweeps" / "shapes.toml", model), block_size)


def manager(system: str, *, block_size: int = BLOCK, prefix_caching: bool = False) -> Any:
    """One of `SYSTEMS` over the memory of Table 1."""
    num_blocks = KV_SLOTS // block_size + 1
    if system == "paged":
        return PagedManager(num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching)
    rule = system.removeprefix("orca-")
    return ReservationManager(num_blocks=num_blocks, block_size=block_size, rule=rule, max_tokens=MAX_LEN)


def _sharegpt(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    mean_input, mean_output = MEANS["sharegpt"]
    variance = 2 * SHAREGPT_TO_COME / mean_output - 1  # over the squared mean
    answers = rng.gamma(1 / variance, mean_output * variance, count)
    sigma = SHAREGPT_PROMPT_SIGMA
    prompts = np.minimum(
        rng.lognormal(0.0, sigma, 10 * count) * mean_input / np.exp(sigma**2 / 2), MAX_LEN / 2
    )
    return prompts[:count] * (mean_input / prompts.mean()), answers


def _alpaca(rng: np.random.Generator, count: int, data: Path) -> tuple[np.ndarray, np.ndarray]:
    mean_input, mean_output = MEANS["alpaca"]
    answers = np.array([r.num_output for r in open_trace(data / ALPACA) if r.num_output > 0])
    with gzip.open(data / ALPACA_TEXT, "rt", encoding="utf-8") as file:
        prompts = np.array([len(f"{p['instruction']} {p['input']}".split()) for p in json.load(file)])
    return (
        rng.choice(prompts, count) * (mean_input / prompts.mean()),
        rng.choice(answers, count) * (mean_output / answers.mean()),
    )


def workload(name: str, data: Path, count: int, seed: int) -> Trace:
    """Requests with the lengths of a workload; no prefix in common, all at time 0."""

    def requests() -> Iterator[TraceRequest]:
        rng = np.random.default_rng(seed)
        prompts, answers = _sharegpt(rng, count) if name == "sharegpt" else _alpaca(rng, count, data)
        for prompt, answer in zip(prompts, answers):
            num_input = min(max(1, round(float(prompt))), MAX_LEN // 2)
            yield TraceRequest(0.0, num_input, min(max(1, round(float(answer))), MAX_LEN - 1 - num_input))

    return Trace(name, "lengths", 0, False, requests, spec=f"{name},{count},{seed}")


def blocks_watch(plan: StepPlan) -> dict[str, float]:
    """Blocks the rows would hold unshared, and blocks they hold."""
    return {"named": float(plan.num_named_blocks), "held": float(plan.num_held_blocks)}


def memory_watch(held: Any) -> Callable[[StepPlan], dict[str, float]]:
    """Shares of the KV memory by use, as in Fig. 2."""

    def reserved(plan: StepPlan) -> dict[str, float]:
        waste = held.waste()
        lost = waste.external + waste.free
        parts = {
            "token_states": waste.token_states,
            "reservation": waste.reservation,
            "internal": waste.internal,
            "external_and_free": lost,
        }
        return {name: value / waste.total for name, value in parts.items()}

    def paged(plan: StepPlan) -> dict[str, float]:
        tokens = sum(row.start + row.num_tokens for row in plan.rows)
        used = (held.num_usable - held.num_free) * held.block_size
        everything = held.num_usable * held.block_size
        return {
            "token_states": tokens / everything,
            "internal": (used - tokens) / everything,
            "external_and_free": 1 - used / everything,
            "token_states_of_used": tokens / used if used else 0.0,
        }

    return paged if isinstance(held, PagedManager) else reserved
