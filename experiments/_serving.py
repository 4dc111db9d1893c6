"""The PagedAttention paper's setting: models, memory, lengths, and the four systems it compares."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pagedjax.cache import PagedManager, ReservationManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine.step import StepPlan
from pagedjax.lab import Claim, Unit, Value
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

BLOCK = 16
# The two machines whose host work was calibrated: every figure that depends on it is given under both.
MACHINES = ("a100-40gb", "a100-40gb-anyscale")
SEEDS = 5  # of every simulated figure
KV_SLOTS = 15_700  # Table 1: "max KV slots" of a 13B model on one A100-40GB
MAX_LEN = 2048
SYSTEMS = ("orca-max", "orca-pow2", "orca-oracle", "paged")
# vLLM's limits at the time; Orca's batching is iteration-level too, so all systems run under them.
SCHEDULER = SchedulerConfig(max_num_seqs=256, token_budget=2560, chunked_prefill=False)

ALPACA = "data/lengths/alpaca_response_len_train10k.json.gz"
ALPACA_TEXT = "data/text/alpaca_en_demo.json.gz"
WORKLOADS = ("sharegpt", "alpaca")
TURNS = "data/lengths/sharegpt_8k_llama2.csv.gz"  # one row is one turn with its whole history as prompt
CHAT_LIMIT = 1024  # §6.5: history and query are cut to so many tokens, and answers too
WMT = {side: f"data/text/wmt16_newstest2016.tc.{side}.gz" for side in ("en", "de")}
# LLaMA tokens per Moses token; no LLaMA tokenizer is at hand, so these are assumed.
TOKENS_PER_WORD = {"en": 1.3, "de": 1.9}
# Fig. 11: mean prompt and answer, OPT tokenizer.
MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
# The paper's single-turn ShareGPT lengths are not public here, but Fig. 2 tells how the answers spread: of 15.7K
# slots, 7 requests of Orca (Max) hold 13.3 % for tokens still to come. A request met at a random moment has half
# its answer to come, and is met the more often the longer its answer: so twice that is E[answer^2] / E[answer].
SHAREGPT_TO_COME = 0.133 * KV_SLOTS / 7
SHAREGPT_PROMPT_SIGMA = 1.2  # assumed: log-normal prompts
DRAWS = 100_000
LENGTH_NOTE = (
    "ShareGPT answers: gamma with the mean of Fig. 11 and the spread that Fig. 2 implies (Orca (Max), tokens still to "
    "come); its prompts: log-normal with the mean of Fig. 11, spread assumed, because the paper's single-turn lengths "
    "are not public here. Alpaca: answers and prompts of the named files, scaled to the means of Fig. 11"
)


def cost(model: str, block_size: int = BLOCK, hardware: str = "a100-40gb") -> CostModel:
    """A hardware file and a shape, each by its name or path."""
    return CostModel(HardwareSpec.read(hardware), read_shape(model), block_size)


def manager(system: str, *, block_size: int = BLOCK) -> Any:
    """One of `SYSTEMS`, or "paged+sharing" with its prefix cache on, over the memory of Table 1."""
    num_blocks = KV_SLOTS // block_size + 1
    if system in ("paged", "paged+sharing"):
        return PagedManager(num_blocks=num_blocks, block_size=block_size, prefix_caching=system != "paged")
    rule = system.removeprefix("orca-")
    return ReservationManager(num_blocks=num_blocks, block_size=block_size, rule=rule, max_tokens=MAX_LEN)


def over_seeds(units: Iterable[Unit], seed: int, count: int = SEEDS) -> list[Unit]:
    """Each unit under so many seeds on the first machine, and under the first seed on the other."""
    units = list(units)
    drawn = [{**unit, "hardware": MACHINES[0], "seed": seed + i} for unit in units for i in range(count)]
    return drawn + [{**unit, "hardware": MACHINES[1], "seed": seed} for unit in units]


def figure(
    text: str,
    paper: float | tuple[float, float] | None,
    source: str,
    value: Callable[[str], Value],
    kind: Literal["figure", "input"] = "figure",
) -> Claim:
    """A claim under the first machine, with the other beside it; `value` is given the machine's name."""
    return Claim(text, paper, source, value(MACHINES[0]), kind, beside=value(MACHINES[1]))


def _even(rng: np.random.Generator, values: np.ndarray, count: int) -> np.ndarray:
    """`count` values in random order that stand for all of `values`: the middles of equal shares of the sorted ones.

    A few hundred independent draws of such wide lengths miss their own mean by a tenth.
    """
    middles = (np.arange(count) + 0.5) * len(values) / count
    return rng.permutation(np.sort(values)[middles.astype(int)])


def _sharegpt(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    mean_input, mean_output = MEANS["sharegpt"]
    variance = 2 * SHAREGPT_TO_COME / mean_output - 1  # over the squared mean
    answers = rng.gamma(1 / variance, mean_output * variance, DRAWS)
    sigma = SHAREGPT_PROMPT_SIGMA
    prompts = np.minimum(rng.lognormal(0.0, sigma, DRAWS) * mean_input / np.exp(sigma**2 / 2), MAX_LEN / 2)
    return _even(rng, prompts * (mean_input / prompts.mean()), count), _even(rng, answers, count)


def _alpaca(rng: np.random.Generator, count: int, data: Path) -> tuple[np.ndarray, np.ndarray]:
    mean_input, mean_output = MEANS["alpaca"]
    answers = np.array([r.num_output for r in open_trace(data / ALPACA) if r.num_output > 0])
    with gzip.open(data / ALPACA_TEXT, "rt", encoding="utf-8") as file:
        prompts = np.array([len(f"{p['instruction']} {p['input']}".split()) for p in json.load(file)])
    return (
        _even(rng, prompts * (mean_input / prompts.mean()), count),
        _even(rng, answers * (mean_output / answers.mean()), count),
    )


def workload(name: str, data: Path, count: int, seed: int) -> Trace:
    """Requests with the lengths of a workload, all at time 0; of "wmt-N" the first N tokens are common to all.

    Args:
        name: One of `WORKLOADS`, "chatbot", or "wmt-N".
        data: Folder of the data.
        count: Requests.
        seed: Of the lengths that are drawn; WMT's sentences come in their order.
    """
    kind, _, prefix = name.partition("-")
    if kind == "wmt":
        return _translations(data, int(prefix), count)

    def requests() -> Iterator[TraceRequest]:
        rng = np.random.default_rng(seed)
        if kind == "chatbot":
            yield from _turns(rng, count, data)
            return
        prompts, answers = _sharegpt(rng, count) if kind == "sharegpt" else _alpaca(rng, count, data)
        for prompt, answer in zip(prompts, answers):
            num_input = min(max(1, round(float(prompt))), MAX_LEN // 2)
            yield TraceRequest(0.0, num_input, min(max(1, round(float(answer))), MAX_LEN - 1 - num_input))

    return Trace(name, "lengths", 0, False, requests, spec=f"{name},{count},{seed}")


def _turns(rng: np.random.Generator, count: int, data: Path) -> Iterator[TraceRequest]:
    turns = [(r.num_input, r.num_output) for r in open_trace(data / TURNS) if r.num_output > 0]
    for at in rng.integers(0, len(turns), count).tolist():
        num_input, num_output = turns[at]
        yield TraceRequest(0.0, min(num_input, CHAT_LIMIT), min(num_output, CHAT_LIMIT - 1))


def _words(data: Path, side: str) -> list[int]:
    with gzip.open(data / WMT[side], "rt", encoding="utf-8") as file:
        return [max(1, round(len(line.split()) * TOKENS_PER_WORD[side])) for line in file]


def _translations(data: Path, prefix: int, count: int) -> Trace:
    """The common prefix, then each sentence; granules of one token: prefix ids, then ids of its own."""
    pairs = list(zip(_words(data, "en"), _words(data, "de")))

    def requests() -> Iterator[TraceRequest]:
        for i in range(count):
            english, german = pairs[i % len(pairs)]
            tokens = np.concatenate([np.arange(prefix), np.full(english, 10_000 + i)]).astype(np.int32)
            yield TraceRequest(0.0, len(tokens), german, token_ids=tokens)

    return Trace(f"wmt-{prefix}", "tokens", 1, True, requests, spec=f"wmt,{prefix},{count}")


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
