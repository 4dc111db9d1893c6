"""What does the prefix cache cost where nothing is ever found?

Source: vLLM V1 blog (2025-01-27): prefix caching costs under 1 % of throughput at a hit rate of 0. SGLang §6:
ShareGPT, 100 requests, 74.3 s, of which 0.2 s go into the tree (under 0.3 %). Measured on the real decoder: requests
that share nothing, cache off, hash chain and radix tree in turn. Cost: two minutes.
    pagedjax experiment run no-hit-cost
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell

from ._decoder import NOTE, SIZES, SmallEngine, tokens

CASES = ("off", "hash", "radix")
# What the engine asks of a manager: looking up, naming, indexing, evicting are all within these.
CALLS = ("begin", "reserve", "commit", "release", "tables", "take_copies")


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = {"requests": 4, "prompt": 24, "outputs": 4, "rounds": 1} if smoke else {
        "requests": 24, "prompt": 512, "outputs": 64, "rounds": 5}  # fmt: skip
    return [{"smoke": smoke, "seed": seed, **sizes}]


class _Clocked:
    """A manager whose calls are timed, in seconds of the processor: what else the machine does is not in them."""

    def __init__(self, manager: PagedManager) -> None:
        self.manager, self.seconds = manager, 0.0
        for name in CALLS:
            setattr(manager, name, self._timed(getattr(manager, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.thread_time() - started

        return timed


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """Cases in turn, round by round; a first round compiles and is dropped."""
    decoder = SmallEngine(smoke=unit["smoke"])
    taken: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    count = 0
    for number in range(unit["rounds"] + 1):
        for case in CASES:
            decoder.renew(prefix_caching=case != "off", index="hash" if case == "off" else case)
            clocked = _Clocked(decoder.engine.manager)
            # Every prompt of every round is another one: nothing can be found.
            first = unit["seed"] + 1000 * number
            prompts = [tokens(first + i, unit["prompt"]) for i in range(unit["requests"])]
            began = time.process_time()
            seconds, outputs = decoder.seconds(prompts, unit["outputs"])
            spent = time.process_time() - began
            if any(output.num_cached_tokens for output in outputs):
                raise RuntimeError("prompts of different seeds share a block")
            count = sum(len(output.outputs[0].token_ids) for output in outputs)
            if number:
                taken[case].append((seconds, spent, clocked.seconds))
    for case, rounds in taken.items():
        # Beside the same round's run without the cache.
        pairs = list(zip(rounds, taken["off"]))
        yield {
            "index": case,
            "requests": unit["requests"],
            "tokens_per_s": count / min(seconds for seconds, _, _ in rounds),
            "slower_by": float(np.median([ours[0] / off[0] for ours, off in pairs])) - 1,
            "manager_share": float(np.median([inside / spent for _, spent, inside in rounds])),
            "added_share": float(np.median([(ours[2] - off[2]) / off[1] for ours, off in pairs])),
            "rounds": len(rounds),
        }


EXPERIMENT = Experiment(
    name="no-hit-cost",
    question="What does the prefix cache cost where nothing is ever found?",
    kind="measured",
    definition=(
        "added_share: processor seconds inside the manager's calls, less those of the same round with the "
        "cache off, over all processor seconds of that round: what naming, looking up and indexing add; "
        "manager_share: all inside the manager, block tables included; medians of 5 rounds in one process; "
        f"24 prompts of 512 tokens without a common block, 64 answer tokens; decoder: {SIZES}"
    ),
    claims=(
        Claim(
            "hash chain: what the cache adds at a hit rate of 0",
            (0.0, 0.01),
            "vLLM V1 blog (under 1 %)",
            cell("added_share", least=3, requests=24, index="hash"),
        ),
        Claim(
            "radix tree: what the tree adds",
            (0.0, 0.003),
            "SGLang §6 (0.2 of 74.3 s)",
            cell("added_share", least=3, requests=24, index="radix"),
        ),
        Claim(
            "cache off: share of the time inside the manager",
            None,
            "what block tables alone cost",
            cell("manager_share", least=3, requests=24, index="off"),
        ),
    ),
    units=_units,
    run=_run,
    note=(
        f"{NOTE}: its step is as short as one of a model on a GPU, and all host work is Python. Processor "
        "seconds are of all threads, so on two cores a share of the clock is up to twice as large. "
        "slower_by is the whole clock, and says something on an idle machine only"
    ),
)
