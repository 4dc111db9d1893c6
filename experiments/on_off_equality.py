"""Does the prefix cache change any answer?

Source: none needed: a cache that changes answers is broken. Measured on the real decoder, greedy. Cost: a minute.
    pagedjax experiment run on-off-equality
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell

from ._decoder import SIZES, SmallEngine, tokens

CASES = ((True, "hash"), (True, "radix"))


def _units(smoke: bool, seed: int) -> list[Unit]:
    return [
        {
            "smoke": smoke,
            "requests": 8 if smoke else 64,
            "stem": 40 if smoke else 300,
            "outputs": 4 if smoke else 24,
            "seed": seed,
        }
    ]


def _prompts(unit: Unit) -> list[list[int]]:
    """Three stems in turn, each cut where it falls, then 5 tokens of its own."""
    stems = [tokens(unit["seed"] + k, unit["stem"]) for k in range(3)]
    return [
        stems[i % 3][: unit["stem"] - 7 * (i % 4)] + tokens(unit["seed"] + 100 + i, 5)
        for i in range(unit["requests"])
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    prompts = _prompts(unit)
    decoder = SmallEngine(smoke=unit["smoke"], prefix_caching=False)
    off = [o.outputs[0].token_ids for o in decoder.run(prompts, unit["outputs"])]
    for caching, index in CASES:
        decoder.renew(prefix_caching=caching, index=index)
        outputs = decoder.run(prompts, unit["outputs"])
        equal = [sum(a == b for a, b in zip(o.outputs[0].token_ids, r)) for o, r in zip(outputs, off)]
        yield {
            "index": index,
            "requests": len(prompts),
            "cached_tokens": sum(o.num_cached_tokens for o in outputs),
            "prompt_tokens": sum(len(p) for p in prompts),
            "tokens": sum(len(r) for r in off),
            "equal_tokens": sum(equal),
            "equal_share": sum(equal) / sum(len(r) for r in off),
        }


EXPERIMENT = Experiment(
    name="on-off-equality",
    question="Does the prefix cache change any answer?",
    kind="measured",
    definition=f"greedy tokens with the cache on that equal those with it off; decoder: {SIZES}",
    claims=tuple(
        Claim(
            f"{index} index: share of equal tokens",
            1.0,
            "what a cache must do",
            cell("equal_share", index=index),
            "identity",
        )
        for _, index in CASES
    ),
    units=_units,
    run=_run,
)
