"""What does sharing a prefix save, in memory?

Source: the arithmetic that motivates prefix caching (anchor figures in the claims). Counted by a real
manager: blocks in use with sharing, against blocks that the prompts need alone. Cost: seconds.
    pagedjax experiment run ledger
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell

GB_PER_TOKEN = 0.125 / 1000
TIMESTAMP = "timestamp as token 0"


def _units(smoke: bool, seed: int) -> list[Unit]:
    users = 100 if smoke else 1000
    cases: list[tuple[str, int, int, int, int]] = [
        *(("one prompt, many users", users, 1500, 0, size) for size in ((4,) if smoke else (1, 4))),
        *(("2,000 of 2,500 common", users, 2000, 500, size) for size in ((16,) if smoke else (1, 16, 128))),
        ("all different", users // 10, 0, 2500, 16),
        (TIMESTAMP, users // 10, 0, 2500, 16),
    ]
    names = ("case", "users", "common", "own", "block_size")
    return [{**dict(zip(names, case)), "seed": seed} for case in cases]


def _prompts(unit: Unit) -> Iterator[list[int]]:
    rng = np.random.default_rng(unit["seed"])
    common = rng.integers(0, 30_000, unit["common"]).tolist()
    story = rng.integers(0, 30_000, unit["own"]).tolist()
    for i in range(unit["users"]):
        if unit["case"] == TIMESTAMP:
            yield [100_000 + i, *story[1:]]
        elif unit["own"]:
            yield [*common, 100_000 + i, *rng.integers(0, 30_000, unit["own"] - 1).tolist()]
        else:
            yield list(common)


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """All requests live at once; a shared block is in use once, however many tables name it.

    The last prompt token is computed by every request, in a block of its own: where a prompt is shared
    whole, `stored` counts what must be kept of it, the indexed blocks.
    """
    size = unit["block_size"]
    per_request = -(-(unit["common"] + unit["own"]) // size)
    manager = PagedManager(num_blocks=unit["users"] * per_request + 2, block_size=size)
    for seq, prompt in enumerate(_prompts(unit)):
        hit = manager.begin(seq, TokenChain(prompt, block_size=size))
        if not manager.reserve(seq, len(prompt) - hit.num_tokens):
            raise RuntimeError("the pool was sized for all requests without sharing")
        manager.commit(seq, len(prompt), float(seq))
    held = {block for seq in range(unit["users"]) for block in manager.table(seq)}
    twins = manager.stats.same_step_twins
    alone = unit["users"] * per_request
    stored = len(held) - twins
    yield {
        "case": unit["case"],
        "users": unit["users"],
        "block_size": size,
        "shared_share": unit["common"] / (unit["common"] + unit["own"]),
        "blocks_alone": alone,
        "blocks_shared": stored,
        "last_token_blocks": twins,
        "reduction": alone / stored,
        "gb_alone": alone * size * GB_PER_TOKEN,
        "gb_shared": stored * size * GB_PER_TOKEN,
        "hit_tokens": manager.stats.hit_tokens,
    }


def _claim(text: str, paper: float, case: str, size: int, column: str, decimals: int | None) -> Claim:
    users = 100 if case in ("all different", TIMESTAMP) else 1000
    ours = cell(column, case=case, block_size=size, users=users)
    return Claim(text, paper, "worked example", ours, "identity", decimals)


_COMMON = "2,000 of 2,500 common"
EXPERIMENT = Experiment(
    name="ledger",
    question="What does sharing a prefix save in KV memory?",
    kind="counted",
    definition=(
        "distinct blocks in use by a real PagedManager with all requests live, against ceil(tokens / block size) "
        "each; the private block that a request needs to compute the last token of a prompt that is shared whole "
        "is listed apart (last_token_blocks); gigabytes are of blocks in both columns, 0.125 per 1,000 tokens of room"
    ),
    claims=(
        _claim(
            "1,000 users of one 1,500-token prompt, alone, GB",
            187.5,
            "one prompt, many users",
            1,
            "gb_alone",
            1,
        ),
        _claim("the same, shared, GB", 0.1875, "one prompt, many users", 1, "gb_shared", 4),
        _claim("2,000 of 2,500 common, block size 1: reduction", 4.98, _COMMON, 1, "reduction", 2),
        _claim("the same, block size 16", 4.89, _COMMON, 16, "reduction", 2),
        _claim("the same, block size 128", 3.99, _COMMON, 128, "reduction", 2),
        _claim("all different: reduction", 1.0, "all different", 16, "reduction", None),
        _claim("timestamp as token 0: reduction", 1.0, TIMESTAMP, 16, "reduction", None),
    ),
    units=_units,
    run=_run,
)
