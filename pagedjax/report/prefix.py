"""Tables for the prefix explorer: hit tokens by prompt, prefix and block size, as the real manager gives them."""

from __future__ import annotations

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
    blocks = 2 * (prompt // block_size + 2) + 1
    manager = PagedManager(num_blocks=blocks, block_size=block_size, **options)
    earlier = TokenChain([*range(prefix), *range(10**6, 10**6 + prompt - prefix + 1)], block_size=block_size)
    manager.begin(0, earlier)
    if not manager.reserve(0, len(earlier)):
        raise RuntimeError("the pool was sized to hold both prompts")
    manager.commit(0, len(earlier), 0.0)
    manager.release(0)
    return manager.begin(1, TokenChain(range(prompt), block_size=block_size)).num_tokens


def explorer(most: int = MOST_PROMPT) -> dict[str, Any]:
    """Every case up to a prompt length: mode → block size → hits of (prompt, prefix), row after row.

    Row n (from 1) holds prefixes 0 to n, so that (n, p) is entry n (n + 1) / 2 - 1 + p.
    """
    tables = {
        mode: {
            str(size): [
                hit_tokens(prompt, prefix, size, **options)
                for prompt in range(1, most + 1)
                for prefix in range(prompt + 1)
            ]
            for size in SIZES
        }
        for mode, options in MODES.items()
    }
    return {"most": most, "sizes": list(SIZES), "tables": tables}
