"""What does sharing a prefix save, in memory?

Source: the arithmetic that motivates prefix caching (anchor figures in the claims). Counted by a real
manager: blocks in use with sharing, against blocks that the prompts need alone. Cost: seconds.
    pagedjax experiment run ledger
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Claim, Experiment, Row, Unit
from pagedjax.cache import PagedManager, TokenChain

GB_PER_TOKEN = 0.125 / 1000


def _units(smoke: bool, seed: int) -> list[Unit]:
    users = 100 if smoke else 1000
    cases = [
        {"case": "one prompt, many users", "requests": users, "common": 1500, "own": 0, "block_size": b}
        for b in ((4,) if smoke else (1, 4))
    ]
    for size in (16,) if smoke else (1, 16, 128):
        cases.append(
            {
                "case": "2,000 of 2,500 common",
                "requests": users,
                "common": 2000,
                "own": 500,
                "block_size": size,
            }
        )
    cases.append(
        {"case": "all different", "requests": users // 10, "common": 0, "own": 2500, "block_size": 16}
    )
    cases.append(
        {
            "case": "timestamp as token 0",
            "requests": users // 10,
            "common": 0,
            "own": 2500,
            "block_size": 16,
            "clock": True,
        }
    )
    return [{**case, "seed": seed} for case in cases]


def _prompts(unit: Unit) -> Iterator[list[int]]:
    rng = np.random.default_rng(unit["seed"])
    common = rng.integers(0, 30_000, unit["common"]).tolist()
    story = rng.integers(0, 30_000, unit["own"]).tolist()
    for i in range(unit["requests"]):
        if unit.get("clock"):
            yield [100_000 + i, *story[1:]]
        elif unit["own"]:
            yield [*common, 100_000 + i, *rng.integers(0, 30_000, unit["own"] - 1).tolist()]
        else:
            yield list(common)


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    """All requests live at once; a shared block is in use once, however many tables name it.

    The last prompt token is computed by every request, in a block of its own: where a prompt is shared
    whole, `stored` counts what must be kept of it, the indexed blocks.
    """
    size = unit["block_size"]
    per_request = -(-(unit["common"] + unit["own"]) // size)
    manager = PagedManager(num_blocks=unit["requests"] * per_request + 2, block_size=size)
    tokens = 0
    for seq, prompt in enumerate(_prompts(unit)):
        tokens += len(prompt)
        hit = manager.begin(seq, TokenChain(prompt, block_size=size))
        if not manager.reserve(seq, len(prompt) - hit.num_tokens):
            raise RuntimeError("the pool was sized for all requests without sharing")
        manager.commit(seq, len(prompt), float(seq))
    held = {block for seq in range(unit["requests"]) for block in manager.table(seq)}
    twins = manager.stats.same_step_twins
    alone = unit["requests"] * per_request
    stored = len(held) - twins
    yield {
        "case": unit["case"],
        "requests": unit["requests"],
        "block_size": size,
        "shared_share": unit["common"] / (unit["common"] + unit["own"]),
        "blocks_alone": alone,
        "blocks_shared": stored,
        "last_token_blocks": twins,
        "reduction": alone / stored,
        "gb_alone": tokens * GB_PER_TOKEN,
        "gb_shared": stored * size * GB_PER_TOKEN,
        "hit_tokens": manager.stats.hit_tokens,
    }


def _value(case: str, size: int, column: str) -> Any:
    def pick(rows: list[Row]) -> float | None:
        full = [
            r for r in rows if r["case"] == case and r["block_size"] == size and r["requests"] in (1000, 100)
        ]
        return next((float(r[column]) for r in full if r["requests"] == 1000 or case[0] in "at"), None)

    return pick


_SET = "worked example"
EXPERIMENT = Experiment(
    name="ledger",
    question="What does sharing a prefix save in KV memory?",
    kind="counted",
    definition=(
        "distinct blocks in use by a real PagedManager with all requests live, against ceil(tokens / block size) "
        "each; the private block that a request needs to compute the last token of a prompt that is shared whole "
        "is listed apart (last_token_blocks); 0.125 GB per 1,000 tokens"
    ),
    claims=(
        Claim(
            "1,000 users of one 1,500-token prompt, alone, GB",
            187.5,
            _SET,
            _value("one prompt, many users", 1, "gb_alone"),
            1e-9,
        ),
        Claim("the same, shared, GB", 0.1875, _SET, _value("one prompt, many users", 1, "gb_shared"), 1e-9),
        Claim(
            "2,000 of 2,500 common, block size 1: reduction",
            4.98,
            _SET,
            _value("2,000 of 2,500 common", 1, "reduction"),
            2e-3,
        ),
        Claim("the same, block size 16", 4.89, _SET, _value("2,000 of 2,500 common", 16, "reduction"), 2e-3),
        Claim(
            "the same, block size 128", 3.99, _SET, _value("2,000 of 2,500 common", 128, "reduction"), 2e-3
        ),
        Claim("all different: reduction", 1.0, _SET, _value("all different", 16, "reduction"), 0.0),
        Claim(
            "timestamp as token 0: reduction", 1.0, _SET, _value("timestamp as token 0", 16, "reduction"), 0.0
        ),
    ),
    units=_units,
    run=_run,
)
