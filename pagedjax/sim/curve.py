"""Hit ratio against capacity: all capacities of LRU in one pass, a bound above every policy.

LRU keeps a stack: the blocks a cache of C blocks holds are the C that were touched last. So one number
per block reference, its stack distance at the request's arrival, answers every capacity at once: with C
blocks the reference is resident if its distance is at most C. Hits are contiguous from the front, hence
a reference counts the largest distance among itself and the blocks before it in its request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagedjax.sim import show
from pagedjax.sim.references import (
    ASKED,
    CHUNK,
    FIRST,
    Ranks,
    References,
    booked,
    load_references,
    mirror,
    next_uses,
    previous_touches,
)
from pagedjax.sim.replay import HitCounts, Progress
from pagedjax.sim.trace import Trace

NEVER = np.iinfo(np.int64).max  # stack distance of a block that was never seen before


def stack_distances(refs: References) -> np.ndarray:
    """i64[n] LRU stack distance of each reference at its request's arrival; NEVER on first sight."""
    parts = [depth for _, _, depth in _distances(refs)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _distances(refs: References) -> Iterator[tuple[int, int, np.ndarray]]:
    """(from, to, i64 distances) of one chunk of references after another.

    In touch order (each request tail first) let p(i) be the time the block of access i was last touched.
    Its distance is the number of blocks touched since, itself included: accesses at or after p(i) and
    before the request, less those whose block comes again before the request. The latter are pairs
    (p(j), j) with p(j) >= p(i) and j before the request: of earlier chunks a rank in a set of all p(j),
    inside the chunk an inversion count, taken bit by bit on ranks.
    """
    previous = previous_touches(refs)
    again = Ranks(len(previous))
    for start, end in refs.chunks():
        places, begins = mirror(refs.flags[start:end] & FIRST)
        last = previous[start:end].astype(np.int64)  # in touch order
        known = np.flatnonzero(last >= 0)
        # A request's first touch time equals its first reference's position, in both orders.
        head = begins[known] + start
        # Within a request ascend by last touch, so that no pair inside it counts as an inversion.
        by_request = np.lexsort((last[known], head))
        known, head = known[by_request], head[by_request]
        touched = last[known]
        repeats = again.count - again.below(touched)
        repeats += _earlier_and_greater(np.argsort(np.argsort(touched, kind="stable"), kind="stable"))
        again.add(touched)
        distances = np.full(end - start, NEVER, dtype=np.int64)
        distances[known] = head - touched - repeats
        yield start, end, distances[places]


def _depths(refs: References) -> Iterator[tuple[int, int, np.ndarray]]:
    """The same with the largest distance so far in each request: what a contiguous prefix needs."""
    for start, end, depth in _distances(refs):
        first = (refs.flags[start:end] & FIRST) > 0
        # True prefix chains touched tail first already ascend; only ids that are no chain need the loop.
        falls = np.flatnonzero(~first[1:] & (depth[1:] < depth[:-1])) + 1
        heads = np.append(np.flatnonzero(first), end - start)
        for at in np.unique(np.searchsorted(heads, falls, side="right") - 1).tolist():
            span = slice(heads[at], heads[at + 1])
            np.maximum.accumulate(depth[span], out=depth[span])
        yield start, end, depth


def _earlier_and_greater(ranks: np.ndarray) -> np.ndarray:
    """For each element of a permutation of 0 … n-1: how many earlier elements are greater.

    Elements are grouped by their high bits, order kept; in a group, an element whose next bit is 0 has
    as many greater ones before it, differing first in this bit, as there are ones before it.
    """
    n = len(ranks)
    counts = np.zeros(n, dtype=np.int64)
    order = np.arange(n)
    for bit in range(max(n - 1, 1).bit_length() - 1, -1, -1):
        values = ranks[order]
        ones = (values >> bit) & 1
        before = np.cumsum(ones) - ones
        group = values >> (bit + 1)
        first = np.searchsorted(group, group)  # ascending: groups stand in order of their high bits
        zero = ones == 0
        counts[order[zero]] += (before - before[first])[zero]
        order = order[np.lexsort((ones, group))]
    return counts


def lru_hits(refs: References, capacity: float = math.inf) -> Iterator[tuple[int, int, np.ndarray]]:
    """(from, to, bool) of one chunk after another: is the block there when it is looked up?

    Raises:
        ValueError: A capacity below 1 block.
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: must be at least 1 block")
    if capacity < math.inf:
        for start, end, depth in _depths(refs):
            yield start, end, depth <= capacity
        return
    previous = previous_touches(refs)
    for start, end in refs.chunks():
        places, _ = mirror(refs.flags[start:end] & FIRST)
        yield start, end, previous[start:end][places] >= 0


def count_hits(refs: References, capacity: float = math.inf) -> HitCounts:
    """Hits of an LRU cache of `capacity` blocks by every definition; `math.inf` never evicts."""
    counts = replace(refs.totals)
    for start, end, hit in lru_hits(refs, capacity):
        booked(refs, start, end, hit, counts)
    return counts


@dataclass(frozen=True)
class Curve:
    """Hits of a prefix-aware LRU cache at every capacity.

    Attributes:
        capacities: i32[k] ascending; the hit count changes only there.
        hit_blocks / hit_full_blocks / hit_tokens: i32[k], i32[k], i64[k] at these capacities.
        blocks / full_blocks / tokens: Denominators.
    """

    capacities: np.ndarray
    hit_blocks: np.ndarray
    hit_full_blocks: np.ndarray
    hit_tokens: np.ndarray
    blocks: int
    full_blocks: int
    tokens: int

    def _at(self, counts: np.ndarray, capacity: float) -> int:
        index = int(np.searchsorted(self.capacities, capacity, side="right"))
        return int(counts[index - 1]) if index else 0

    def by_block(self, capacity: float) -> float:
        """Hit blocks over blocks at a capacity in blocks; `math.inf` never evicts."""
        return self._at(self.hit_blocks, capacity) / max(self.blocks, 1)

    def by_full_block(self, capacity: float) -> float:
        """Hit full blocks over full blocks."""
        return self._at(self.hit_full_blocks, capacity) / max(self.full_blocks, 1)

    def by_token(self, capacity: float) -> float:
        """Hit tokens over prompt tokens."""
        return self._at(self.hit_tokens, capacity) / max(self.tokens, 1)

    def hits(self, capacity: float) -> int:
        """Hit blocks."""
        return self._at(self.hit_blocks, capacity)

    def smallest(self, share: float) -> int:
        """Blocks of the smallest cache that hits at least `share` of what one without end hits, by token."""
        if not len(self.hit_tokens):
            return 0
        return int(
            self.capacities[np.searchsorted(self.hit_tokens, share * self.hit_tokens[-1], side="left")]
        )

    def _repr_html_(self) -> str:
        capacities = self._shown()
        ratios = {
            "by block": [(c, self.by_block(c)) for c in capacities],
            "by token": [(c, self.by_token(c)) for c in capacities],
        }
        rows: list[dict[str, Any]] = [
            {"blocks of LRU": c, "by block": self.by_block(c), "by token": self.by_token(c)}
            for c in capacities[:: max(len(capacities) // 8, 1)]
        ]
        if len(self.capacities):
            rows.append({"blocks of LRU": "without end", "by block": self.by_block(math.inf)})
            rows[-1]["by token"] = self.by_token(math.inf)
        return show.card(
            "Hit ratio of LRU",
            show.note(f"counted: {self.blocks:,} blocks looked up, {self.tokens:,} prompt tokens"),
            show.lines(ratios, x="blocks", y="hit ratio", log_x=True),
            show.table(rows),
        )

    def _shown(self) -> list[int]:
        """Capacities to draw: eight to a doubling, up to the largest where anything changes."""
        if not len(self.capacities):
            return []
        most = int(self.capacities[-1])
        return sorted({min(round(2 ** (k / 8)), most) for k in range(8 * most.bit_length() + 1)})


class Curves(dict[int, Curve]):
    """Block size → its curve; a notebook draws them over the tokens that a cache holds."""

    def _repr_html_(self) -> str:
        lines = {
            f"blocks of {size}": [(c * size, curve.by_token(c)) for c in curve._shown()]
            for size, curve in self.items()
        }
        rows = [
            {
                "block size": size,
                "by token, without end": curve.by_token(math.inf),
                "blocks for 95 % of it": curve.smallest(0.95),
                "for 99 %": curve.smallest(0.99),
            }
            for size, curve in self.items()
        ]
        return show.card(
            "Hit ratio of LRU, by token",
            show.note("counted"),
            show.lines(lines, x="tokens that fit", y="hit ratio", log_x=True),
            show.table(rows),
        )


def lru_curve(refs: References) -> Curve:
    """Hit ratio of LRU at all capacities, contiguous prefixes only, in one pass.

    Blocks that come again are few, or the different ones are: counts are kept by reference or by distance, whichever
    takes less.
    """
    by_distance = 2 * refs.num_distinct <= len(refs.keys)
    blocks = full = tokens = np.empty(0, np.int64)
    codes: list[np.ndarray] = []
    for start, end, depth in _depths(refs):
        if by_distance and not len(blocks):  # only now: before, last touches were being found
            size = refs.num_distinct + 1
            blocks, full = np.zeros(size, np.int32), np.zeros(size, np.int32)
            tokens = np.zeros(size, np.int64)
        known = (depth != NEVER) & ((refs.flags[start:end] & ASKED) > 0)
        at = depth[known]
        sizes = refs.sizes[start:end][known].astype(np.int64)
        if by_distance:
            np.add.at(blocks, at, 1)
            np.add.at(full, at, (sizes >= refs.block_size).astype(np.int32))
            np.add.at(tokens, at, np.minimum(sizes, refs.block_size))
        else:
            codes.append(at << 32 | sizes)
    totals = refs.totals
    denominators = totals.blocks, totals.full_blocks, totals.tokens
    if by_distance:
        some = np.flatnonzero(blocks).astype(np.int32)
        sums = [np.cumsum(count[some], dtype=count.dtype) for count in (blocks, full, tokens)]
        return Curve(some, sums[0], sums[1], sums[2], *denominators)
    held = np.concatenate(codes) if codes else np.empty(0, np.int64)
    codes.clear()
    held.sort()
    last = np.flatnonzero(np.diff(held >> 32, append=-1)).astype(np.int32)
    sizes = held & 0xFFFFFFFF
    return Curve(
        (held[last] >> 32).astype(np.int32),
        last + np.int32(1),
        np.cumsum(sizes >= refs.block_size, dtype=np.int32)[last],
        np.cumsum(np.minimum(sizes, refs.block_size), dtype=np.int64)[last],
        *denominators,
    )


def belady_bound(refs: References, capacity: int) -> int:
    """Most block hits that any policy can have with `capacity` blocks.

    Belady's rule with bypass: of the held blocks and the one just used, drop the one whose next use is
    farthest. Requests are served head first and every resident block counts, contiguous or not, so
    the count lies on or above that of every policy under the prefix rule: such a policy's hits come
    first in a request, and what it keeps afterwards this one could keep as well. It is a bound for
    block requests, not a proven optimum for prefix chains.
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: must be at least 1 block")
    n = len(refs.keys)
    following = next_uses(refs)
    held: dict[int, int] = {}  # block → its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, block); stale entries are skipped
    hits = 0
    for at in range(0, n, CHUNK):
        keys, coming = refs.keys[at : at + CHUNK].tolist(), following[at : at + CHUNK].tolist()
        asked = ((refs.flags[at : at + CHUNK] & ASKED) > 0).tolist()
        for key, nxt, looked_up in zip(keys, coming, asked):
            if key in held:
                hits += looked_up
                del held[key]
            if nxt == n:
                continue  # never used again: not worth a place
            if len(held) >= capacity:
                while True:
                    when, victim = farthest[0]
                    if held.get(victim) == -when:
                        break
                    heapq.heappop(farthest)
                if -when < nxt:
                    continue
                heapq.heappop(farthest)
                del held[victim]
            held[key] = nxt
            heapq.heappush(farthest, (-nxt, key))
            if len(farthest) > 2 * len(held) + 1000:  # stale entries of near uses never come to the top
                farthest = [(-when, block) for block, when in held.items()]
                heapq.heapify(farthest)
    return hits


def curves(trace: Trace, block_sizes: Iterable[int], *, progress: Progress = iter) -> Curves:
    """One LRU curve per block size; capacities are in blocks of that size."""
    return Curves((size, lru_curve(load_references(trace, size, progress=progress))) for size in block_sizes)
