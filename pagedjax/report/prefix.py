"""Tables for the prefix explorer: hit tokens by prompt, prefix and block size, as the real manager gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedjax.cache import KVGroup, PagedManager, TokenChain

MODES: dict[str, dict[str, Any]] = {
    "hash chain, whole blocks": {"index": "hash"},
    "radix tree, whole blocks": {"index": "radix"},
    "hash chain, parts of a block copied": {"index": "hash", "partial": 1},
    "hash chain, window of 16 tokens": {"index": "hash", "groups": [KVGroup(window=16)]},
}
SIZES = (1, 2, 4, 8, 16)
MOST_PROMPT = 48


def hit_tokens(prompt: int, prefix: int, block_size: int, **options: Any) -> int:
    """Tokens that a prompt takes from the cache where one with the same first `prefix` tokens was served before.

    Raises:
        ValueError: A length is out of range, or the manager refuses an option.
    """
    if not 0 <= prefix <= prompt or prompt < 1:
        raise ValueError(f"prompt={prompt}, prefix={prefix}: must satisfy 0 <= prefix <= prompt, prompt >= 1")
    (hit,) = _hits([prompt], prefix, block_size, options)
    return hit


def _hits(prompts: Iterable[int], prefix: int, block_size: int, options: dict[str, Any]) -> list[int]:
    """Hits of prompts of growing lengths, each when one longer by a token that parts from it there was served."""
    lengths = list(prompts)
    blocks = 2 * (max(lengths) // block_size + 2) + 1
    manager = PagedManager(num_blocks=blocks, block_size=block_size, **options)
    earlier = TokenChain(range(prefix), block_size=block_size)
    hits: list[int] = []
    for length in lengths:
        served = len(earlier) if hits else 0
        earlier.extend(range(10**6 + len(earlier) - prefix, 10**6 + length + 1 - prefix))
        if not hits:
            manager.begin(0, earlier)
        if not manager.reserve(0, len(earlier) - served):
            raise RuntimeError("the pool was sized to hold both prompts")
        manager.commit(0, len(earlier), 0.0)
        # A lookup takes nothing, so the one served before it can go on growing.
        hits.append(manager.begin(1, TokenChain(range(length), block_size=block_size)).num_tokens)
    return hits


def explorer(most: int = MOST_PROMPT) -> dict[str, Any]:
    """Every case up to a prompt length: mode → block size → hits of (prompt, prefix), row after row.

    Row n (from 1) holds prefixes 0 to n, so that (n, p) is entry n (n + 1) / 2 - 1 + p.
    """
    tables: dict[str, dict[str, list[int]]] = {mode: {} for mode in MODES}
    for mode, options in MODES.items():
        for size in SIZES:
            columns = [
                _hits(range(max(prefix, 1), most + 1), prefix, size, options) for prefix in range(most + 1)
            ]
            tables[mode][str(size)] = [
                columns[prefix][prompt - max(prefix, 1)]
                for prompt in range(1, most + 1)
                for prefix in range(prompt + 1)
            ]
    return {"most": most, "sizes": list(SIZES), "tables": tables}
