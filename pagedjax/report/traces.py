"""What a page shows of a trace: hit ratio against capacity of every policy, and the check-up of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pagedjax.cache import POLICIES
from pagedjax.sim.advice import Advice, advise
from pagedjax.sim.curve import belady_bound, lru_curve
from pagedjax.sim.references import References, load_references, replay_references
from pagedjax.sim.replay import PolicyStore
from pagedjax.sim.sharing import Checkup, check_up
from pagedjax.sim.trace import Trace

MOST_REPLAYED = 20_000_000  # references × policies × capacities that are replayed without being asked to
Progress = Callable[[str], Callable[[Iterable[Any]], Iterable[Any]]]


def _silent(label: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return iter


def curve_facts(
    trace: Trace,
    *,
    block_size: int = 0,
    policies: Sequence[str] | None = None,
    command: str = "",
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Hit ratios at powers of two, in plain values: by block and by token, Belady's bound by block alone.

    Args:
        trace: With identity of prefixes.
        block_size: Tokens per block; 0: the trace's granularity, or 16.
        policies: Names beside LRU; None: every built-in one, where that takes no more than `MOST_REPLAYED` references
            looked up in all, and none else. `left_out` says which were left out.
        command: Start of a command that prints the same; the rest is added.
        progress: Label → what wraps a stream of requests.

    Raises:
        ValueError: No identity, or a name that is no policy.
    """
    size = block_size or (trace.granularity if trace.granularity > 1 else 16)
    refs = load_references(trace, size, progress=progress(f"{trace.name}: read"))
    curve = lru_curve(refs)
    capacities = [2**k for k in range(max(refs.num_distinct, 1).bit_length() + 1)]
    left_out: list[str] = []
    if policies is None:
        policies = [name for name in POLICIES if name not in ("lru", "belady")]
        if len(refs.keys) * len(policies) * len(capacities) > MOST_REPLAYED:
            policies, left_out = [], list(policies)
    by_block: dict[str, list[float]] = {"lru": [curve.by_block(c) for c in capacities]}
    by_token: dict[str, list[float]] = {"lru": [curve.by_token(c) for c in capacities]}
    for name in dict.fromkeys(policies):
        if name == "lru":
            continue
        counts = [_replayed(refs, c, name, progress) for c in capacities]
        by_block[name] = [count.by_block for count in counts]
        by_token[name] = [count.by_token for count in counts]
    by_block["bound"] = [belady_bound(refs, c) / max(len(refs.keys), 1) for c in capacities]
    more = "".join(f" --policy {name}" for name in by_token if name != "lru")
    return {
        "name": trace.name,
        "sha256": trace.digest(),
        "command": f"{command or 'pagedjax curve ' + trace.name} --block-size {size}{more} --bound",
        "block_size": size,
        "requests": refs.totals.requests,
        "capacities": capacities,
        "policies": by_block,
        "by_token": by_token,
        "left_out": left_out,
    }


def _replayed(refs: References, capacity: int, policy: str, progress: Progress) -> Any:
    bar = progress(f"{policy}, {capacity} blocks")
    return replay_references(refs, PolicyStore(capacity, policy), progress=bar)


def checkup_facts(
    trace: Trace,
    *,
    block_sizes: Sequence[int] = (),
    unit: str = "tokens",
    decode: Callable[[Iterable[int]], str] | None = None,
    command: str = "",
    top: int = 5,
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Where the tokens of all prompts go by block size, and what `advise` says of it, in plain values.

    Args:
        trace: With identity of prefixes.
        block_sizes: As `advise` takes them.
        unit: What a token is, for the sentences.
        decode: Token ids → text: fields that change are shown in their text; None keeps every text out.
        command: Start of a command that prints the same.
        top: Fields and groups to keep.
        progress: Label → what wraps a stream of requests.

    Raises:
        ValueError: No identity, no request, or a block size that does not fit the trace.
    """
    advice = advise(trace, block_sizes=block_sizes, policies=(), progress=progress)
    checkup = None
    if trace.granularity == 1:
        prompts = (request.token_ids for request in progress(f"{trace.name}: compare")(trace))
        sizes = [size.block_size for size in advice.sizes]
        checkup = check_up((p for p in prompts if p is not None), block_sizes=sizes, top=top)
    return {
        "name": trace.name,
        "sha256": trace.digest(),
        "command": command or f"pagedjax advise {trace.name}",
        "unit": unit,
        "requests": advice.requests,
        "tokens": advice.tokens,
        "sizes": [asdict(size) for size in advice.sizes],
        "best": advice.best_size.block_size if advice.best_size.found else None,
        "said": _said(advice),
        "moves": [] if checkup is None else _moves(checkup, advice.tokens, unit, decode),
        "looked_for_fields": checkup is not None,
        "texts": decode is not None,
    }


def _said(advice: Advice) -> list[str]:
    return [advice.size_sentence, *advice.pool_sentences]


def _moves(
    checkup: Checkup, tokens: int, unit: str, decode: Callable[[Iterable[int]], str] | None
) -> list[dict[str, Any]]:
    return [
        {
            "said": move.sentence(unit, tokens),
            "fields": [
                {
                    "position": field.position,
                    "values": field.num_values,
                    "longest": field.longest,
                    "before": None if decode is None else decode(field.before),
                    "examples": None if decode is None else [decode(e) for e in field.examples],
                }
                for field in move.fields
            ],
        }
        for move in checkup.divergences
    ]
