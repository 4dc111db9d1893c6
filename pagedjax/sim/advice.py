"""The check-up turned into an answer: which block size, which pool, which policy, and what to move in the prompt.

Everything counted here is a replay: a request's blocks are found if earlier requests left them, whatever their time.
Requests under way at once would find less; a bound is named a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedjax.cache import POLICIES
from pagedjax.sim.curve import belady_bound, lru_curve, lru_hits
from pagedjax.sim.references import References, leading_hits, load_references, replay_references
from pagedjax.sim.replay import Insert, PolicyStore
from pagedjax.sim.trace import Trace

_MOST_FINE = 20_000_000  # tokens up to which sharing is counted token by token
MOST_REPLAYED = 2_000_000  # references; each policy takes seconds a million
POOL_SHARES = (0.95, 0.99)


@dataclass(frozen=True)
class BlockSizeAdvice:
    """Where the tokens of all prompts go at one block size, in a cache that never evicts.

    looked_up = found + below_block + last_token + new.

    Attributes:
        block_size: Tokens per block.
        looked_up: Prompt tokens.
        found: Taken from the cache under the engine's rules.
        below_block: Shared with an earlier prompt, but in a block that is not shared whole.
        last_token: In whole shared blocks, but computed all the same: every prompt computes its last token.
        new: Shared with no earlier prompt.
    """

    block_size: int
    looked_up: int
    found: int
    below_block: int
    last_token: int
    new: int


@dataclass(frozen=True)
class PoolAdvice:
    """The smallest LRU cache that finds a share of what one without end finds, by prompt tokens.

    Attributes:
        share: Asked for.
        blocks: Its size; 0 where nothing is found at all.
        hit_tokens: What it finds.
    """

    share: float
    blocks: int
    hit_tokens: int


@dataclass(frozen=True)
class PolicyAdvice:
    """A policy at one pool.

    Attributes:
        name: Of the policy.
        hit_blocks: Blocks it finds.
        of_bound: Of what Belady's rule finds, which no policy passes; 1 where that is nothing.
    """

    name: str
    hit_blocks: int
    of_bound: float


@dataclass(frozen=True)
class Advice:
    """What a trace says about its cache.

    Attributes:
        requests / tokens: Read.
        seen_by: Tokens up to which equal prefixes are told apart: 1 for tokens.
        sizes: One per block size.
        block_size: That of pools and policies.
        blocks / distinct: Blocks looked up, and different ones.
        unlimited_tokens: Tokens that a cache without end finds.
        pools: One per `POOL_SHARES`.
        capacity: Blocks at which policies are compared.
        policies: Best first.
        bound_blocks: Blocks that Belady's rule finds there: a bound, no policy.
        unheard: As of `References`: what requests asked of the cache and blocks alone cannot do.
    """

    requests: int
    tokens: int
    seen_by: int
    sizes: tuple[BlockSizeAdvice, ...]
    block_size: int
    blocks: int
    distinct: int
    unlimited_tokens: int
    pools: tuple[PoolAdvice, ...]
    capacity: int
    policies: tuple[PolicyAdvice, ...]
    bound_blocks: int
    unheard: Mapping[str, int]

    @property
    def best_size(self) -> BlockSizeAdvice:
        """The largest block size that finds 95 % of what the best one finds: nearly the same with fewer blocks."""
        most = max(size.found for size in self.sizes)
        return max((s for s in self.sizes if s.found >= 0.95 * most), key=lambda size: size.block_size)

    @property
    def size_sentence(self) -> str:
        """Which block size to take, and why."""
        best = self.best_size
        if not best.found:
            return (
                "No prompt begins like an earlier one for a whole block: a prefix cache finds nothing here."
            )
        return (
            f"Take blocks of {best.block_size}: the largest that find 95 % of what the best size finds "
            f"({share(best.found, best.looked_up)} of all tokens)."
        )

    @property
    def pool_sentences(self) -> list[str]:
        """How many blocks LRU needs for shares of what can be found; none where nothing can."""
        if not self.unlimited_tokens:
            return []
        return [
            f"{pool.share:.0%} of that takes {pool.blocks:,} blocks of {self.block_size} under LRU "
            f"({pool.blocks * self.block_size:,} tokens of KV), beside {self.distinct:,} different ones."
            for pool in self.pools
        ]


def share(part: float, whole: float) -> str:
    """A part in percent, as sentences say it; 0.0% of nothing."""
    return f"{part / whole:.1%}" if whole else "0.0%"


def advise(
    trace: Trace,
    *,
    block_sizes: Sequence[int] = (),
    capacity: int = 0,
    policies: Sequence[str] | None = None,
    insert: Insert = "prompt",
    progress: Callable[[str], Callable[[Iterable[Any]], Iterable[Any]]] = lambda label: iter,
) -> Advice:
    """Replay a trace and count.

    Args:
        trace: With identity of prefixes.
        block_sizes: Tokens per block to compare; the first is that of pools and policies. Empty: 16 to 256, or what
            divides the trace's granularity.
        capacity: Blocks at which policies are compared; 0: half of what LRU needs for 95 %.
        policies: Names of policies to replay beside LRU; None: all that are built in, up to `MOST_REPLAYED` references.
        insert: What each request leaves behind.
        progress: Label → what wraps a stream of requests.

    Raises:
        ValueError: No identity, no request, or a block size that does not divide the granularity.
    """
    granularity = trace.granularity
    if not block_sizes:
        block_sizes = (16, 32, 64, 128, 256)
        if granularity > 1:
            block_sizes = [
                s
                for s in (granularity, *(2**k for k in range(4, 12)))
                if s <= granularity and not granularity % s
            ]
        block_sizes = list(dict.fromkeys(block_sizes))
    chosen = block_sizes[0]
    refs = load_references(trace, chosen, insert=insert, progress=progress("read"))
    if not refs.totals.requests:
        raise ValueError(f"{trace.name}: holds no request; give a trace with at least one")
    fine = granularity
    if granularity == 1 and refs.totals.tokens > _MOST_FINE:
        fine = min(block_sizes)
    seen = (
        refs
        if fine == chosen
        else load_references(trace, fine, insert=insert, progress=progress("count tokens"))
    )
    sizes = _sizes(seen, block_sizes)
    if seen is not refs:
        del seen
    curve = lru_curve(refs)
    unlimited = int(curve.hit_tokens[-1]) if len(curve.hit_tokens) else 0
    pools = []
    for share in POOL_SHARES:
        blocks = curve.smallest(share)
        hit = int(curve.hit_tokens[np.searchsorted(curve.capacities, blocks)]) if unlimited else 0
        pools.append(PoolAdvice(share, blocks, hit))
    capacity = capacity or max(pools[0].blocks // 2, 1)
    bound = belady_bound(refs, capacity)
    if policies is None:
        policies = [n for n in POLICIES if n != "belady"] if len(refs.keys) <= MOST_REPLAYED else ()
    names = list(dict.fromkeys(["lru", *policies]))
    hits = {name: _replayed(refs, capacity, name, progress) for name in names}
    ranked = sorted(hits.items(), key=lambda item: (-item[1], names.index(item[0])))
    return Advice(
        requests=refs.totals.requests,
        tokens=refs.totals.tokens,
        seen_by=fine,
        sizes=sizes,
        block_size=chosen,
        blocks=refs.totals.blocks,
        distinct=refs.num_distinct,
        unlimited_tokens=unlimited,
        pools=tuple(pools),
        capacity=capacity,
        policies=tuple(PolicyAdvice(n, h, h / bound if bound else 1.0) for n, h in ranked),
        bound_blocks=bound,
        unheard=dict(refs.unheard),
    )


def _replayed(
    refs: References,
    capacity: int,
    policy: str,
    progress: Callable[[str], Callable[[Iterable[Any]], Iterable[Any]]],
) -> int:
    bar = progress(f"{policy}, {capacity} blocks")
    return replay_references(refs, PolicyStore(capacity, policy), progress=bar).hit_blocks


def _sizes(refs: References, block_sizes: Iterable[int]) -> tuple[BlockSizeAdvice, ...]:
    """Every size from one count of how many tokens each prompt has in common with an earlier one."""
    sums = {size: [0, 0, 0] for size in block_sizes}
    for start, end, hit in lru_hits(refs):
        leading = leading_hits(refs, start, end, hit)
        common, length = leading.hit_tokens, leading.num_input
        for size, counts in sums.items():
            whole = common // size * size
            found = np.minimum(whole, np.maximum(length - 1, 0) // size * size)
            counts[0] += int(found.sum())
            counts[1] += int((common - whole).sum())
            counts[2] += int((whole - found).sum())
    tokens = refs.totals.tokens
    return tuple(
        BlockSizeAdvice(size, tokens, found, below, last, tokens - found - below - last)
        for size, (found, below, last) in sums.items()
    )
