"""What `pagedjax advise` says, counted again the slow and obvious way: no array, no code of the package.

Prompts are tuples of tokens, or of (granule id, position in it) where a trace has ids. Everything is defined here anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

Prompt = Sequence[Any]


def prompts_of(requests: list[Any], granularity: int) -> list[tuple[Any, ...]]:
    """Each prompt token by token; a token of a granule is the granule's id and its place in it."""
    prompts = []
    for r in requests:
        if granularity == 1:
            prompts.append(tuple(r.token_ids.tolist()))
            continue
        tokens = [(i, k) for i in r.granule_ids.tolist() for k in range(granularity)]
        own = [("own", id(r), k) for k in range(r.num_input)]
        prompts.append(tuple(tokens[: r.num_input] + own[len(tokens) :]))
    return prompts


def blocks_of(prompt: Prompt, size: int, *, tail: bool) -> list[Any]:
    """Names of a prompt's blocks: equal exactly where the whole prefix up to the block's end is."""
    names, parent = [], None
    for at in range(0, len(prompt) if tail else len(prompt) // size * size, size):
        parent = hash((parent, tuple(prompt[at : at + size])))
        names.append((parent, at, len(prompt[at : at + size])))
    return names


def in_common(prompts: list[tuple[Any, ...]], granularity: int, tail_ids: bool) -> list[int]:
    """Tokens at the front of each prompt that an earlier one begins with, as far as identities tell them apart."""
    seen: set[Any] = set()
    found = []
    for prompt in prompts:
        names = blocks_of(prompt, granularity, tail=tail_ids)
        count = 0
        for name in names:
            if name not in seen:
                break
            count += name[2]
        seen.update(names)
        found.append(count)
    return found


def where_tokens_go(prompts: list[tuple[Any, ...]], common: list[int], size: int) -> dict[str, int]:
    """The four parts of all prompt tokens at one block size."""
    parts = dict.fromkeys(("found", "below_block", "last_token", "new"), 0)
    for prompt, shared in zip(prompts, common):
        whole = shared - shared % size
        usable = min(whole, (len(prompt) - 1) - (len(prompt) - 1) % size)
        parts["found"] += usable
        parts["below_block"] += shared - whole
        parts["last_token"] += whole - usable
        parts["new"] += len(prompt) - shared
    return parts


def lru(prompts: list[list[Any]], capacity: float) -> tuple[int, int]:
    """(blocks, tokens) found at the front of each prompt by an LRU list of so many blocks."""
    held: OrderedDict[Any, None] = OrderedDict()
    blocks = tokens = 0
    for names in prompts:
        for name in names:
            if name not in held:
                break
            blocks, tokens = blocks + 1, tokens + name[2]
        for name in reversed(names):
            held.pop(name, None)
            held[name] = None
            if len(held) > capacity:
                held.popitem(last=False)
    return blocks, tokens


def smallest_pool(prompts: list[list[Any]], share: float) -> tuple[int, int]:
    """(blocks, tokens found) of the smallest LRU cache that finds a share of what one without end finds, by bisection.

    A larger LRU cache holds all that a smaller one does, so what it finds never falls.
    """
    most = lru(prompts, float("inf"))[1]
    if not most:
        return 0, 0
    low, high = 0, len({name for names in prompts for name in names})
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lru(prompts, middle)[1] >= share * most else (middle, high)
    return high, lru(prompts, high)[1]


def belady(prompts: list[list[Any]], capacity: int) -> int:
    """Blocks found when the one whose next use is farthest goes, the one just used included."""
    order = [name for names in prompts for name in names]
    later: dict[Any, list[int]] = {}
    for at in range(len(order) - 1, -1, -1):
        later.setdefault(order[at], []).append(at)
    held: dict[Any, int] = {}
    hits = 0
    for name in order:
        later[name].pop()
        hits += name in held
        held.pop(name, None)
        if later[name]:
            held[name] = later[name][-1]
        if len(held) > capacity:
            del held[max(held, key=held.__getitem__)]
    return hits


def tree_saving(prompts: list[tuple[Any, ...]]) -> int:
    """Tokens that a prefix tree of the prompts saves: all of them less its nodes."""
    nodes: dict[Any, dict[Any, Any]] = {}
    count = 0
    for prompt in prompts:
        node = nodes
        for token in prompt:
            if token not in node:
                node[token] = {}
                count += 1
            node = node[token]
    return sum(map(len, prompts)) - count


def moved_to_the_end(prompt: Prompt, stretches: list[tuple[int, int]]) -> tuple[Any, ...]:
    """A prompt with some stretches taken out and put behind it, in order."""
    kept: list[Any] = []
    at = 0
    for begin, end in stretches:
        kept += prompt[at:begin]
        at = end
    return (*kept, *prompt[at:], *(token for begin, end in stretches for token in prompt[begin:end]))
