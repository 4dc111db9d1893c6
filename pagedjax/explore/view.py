"""The state of an exploration as plain values: what a page draws, and what tests compare with the manager."""

from __future__ import annotations

import unicodedata
from dataclasses import asdict
from typing import Any

from pagedjax.explore.exploration import Exploration
from pagedjax.explore.settings import settings_of
from pagedjax.explore.stage import Explored

MOST_LINES = 200  # of the history, the latest
MOST_PIECES = 256  # blocks of a sequence whose text is shown
_PIECE = 48  # characters of a block's text


def state(exploration: Exploration) -> dict[str, Any]:
    """Everything a page shows; JSON has no other types.

    `pool`, `tables` and `stats` are `PagedManager.snapshot`'s, digests in hex, keys as JSON has them (strings).
    """
    manager = exploration.stage.manager
    snapshot = manager.snapshot()
    (pool,) = snapshot["groups"]
    waiting = set(range(1, manager.num_blocks)) - pool["ref"].keys() - set(pool["free_queue"])
    keys = {block: key.hex() for block, key in pool["keys"].items()}
    return {
        "revision": exploration.revision,
        "settings": settings_of(exploration.settings),
        "choices": exploration.choices,
        "tokenizer": exploration.tokenizer,
        "pool": {
            "num_blocks": manager.num_blocks,
            "ref": {str(b): n for b, n in pool["ref"].items()},
            "keys": {str(b): key for b, key in keys.items()},
            "free_queue": pool["free_queue"],
            "num_blank": pool["num_blank"],
            "num_evictable": pool["num_evictable"],
            "waiting": sorted(waiting),  # released, and a planned copy still reads them
        },
        "content": {
            key: _visible(exploration.text(exploration.stage.known[digest]))
            for digest, key in sorted({(key, key.hex()) for key in pool["keys"].values()})
            if digest in exploration.stage.known
        },
        "tables": {str(seq): tables[0] for seq, tables in snapshot["tables"].items()},
        "sequences": [
            _sequence(exploration, seq, known) for seq, known in sorted(exploration.stage.seqs.items())
        ],
        "stats": asdict(snapshot["stats"]),
        "history": _history(exploration),
    }


def _sequence(exploration: Exploration, seq: int, known: Explored) -> dict[str, Any]:
    size, chain = exploration.settings.block_size, known.chain
    blocks = min(-(-len(chain) // size), MOST_PIECES)
    return {
        "seq": seq,
        "tokens": len(chain),
        "indexed": 0 if known.swapped else exploration.stage.manager.num_computed(seq),
        "filled": 0 if known.swapped else known.filled,
        "state": "on the host" if known.swapped else "looked up" if known.recorded else "holds blocks",
        "hit": None if known.hit is None else known.hit.num_tokens,
        "reason": None if known.hit is None else known.hit.reason.value,
        "parent": known.parent,
        "salt": None if chain.extra.salt is None else _visible(chain.extra.salt),
        "copies": exploration.stage.manager.num_copies(seq),
        "pieces": [
            _visible(exploration.text(chain.tokens[i * size : (i + 1) * size])) for i in range(blocks)
        ],
    }


def _history(exploration: Exploration) -> dict[str, Any]:
    first = max(len(exploration.history) - MOST_LINES, 0)
    lines = zip(exploration.history[first:], exploration.outcomes[first:])
    return {
        "total": len(exploration.history),
        "lines": [
            [first + i, _visible(str(command), 200), outcome.ok, outcome.said]
            for i, (command, outcome) in enumerate(lines, 1)
        ],
    }


def _visible(text: str, most: int = _PIECE) -> str:
    """Text of which nothing is hidden: controls, marks of direction and lone surrogates by their number."""
    cut = text[:most] + "…" if len(text) > most else text
    return "".join(
        "⏎"
        if c == "\n"
        else f"⟨{ord(c):X}⟩"
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else c
        for c in cut
    )
