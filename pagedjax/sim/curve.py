"""Hit ratio against capacity: all capacities of LRU in one pass, a bound above every policy.

LRU keeps a stack: the blocks a cache of C blocks holds are the C that were touched last. So one number
per block reference, its stack distance at the request's arrival, answers every capacity at once: with C
blocks the reference is resident if its distance is at most C. Hits are contiguous from the front, hence
a reference counts the largest distance among itself and the blocks before it in its request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagedjax.sim.replay import BlockKeys, Progress
from pagedjax.sim.trace import Trace

NEVER = np.iinfo(np.int64).max  # stack distance of a block that was never seen before


@dataclass(frozen=True)
class References:
    """A whole trace as arrays: request r owns references start[r] : start[r + 1].

    Attributes:
        keys: i64[n] dense block numbers 0 … distinct-1, prompts in order, head first.
        start: i64[requests + 1].
        sizes: i32[n] tokens in each block (tails are short).
        num_input: i64[requests] prompt tokens.
        block_size: Tokens per block.
    """

    keys: np.ndarray
    start: np.ndarray
    sizes: np.ndarray
    num_input: np.ndarray
    block_size: int

    @property
    def num_distinct(self) -> int:
        return int(self.keys.max()) + 1 if len(self.keys) else 0

    @property
    def request_of(self) -> np.ndarray:
        """i64[n]: the request of each reference."""
        return np.repeat(np.arange(len(self.num_input)), np.diff(self.start))


def load_references(trace: Trace, block_size: int, *, progress: Progress = iter) -> References:
    """Read a trace's prompt blocks into arrays (16 to 20 bytes a reference).

    Raises:
        ValueError: A request holds a block twice: chained ids cannot repeat.
    """
    keyer = BlockKeys(trace, block_size)
    parts, counts, inputs = [], [], []
    for number, request in enumerate(progress(trace)):
        keys = keyer.refs(request).lookup
        parts.append(keys)
        counts.append(len(keys))
        inputs.append(request.num_input)
        if len(keys) > 1 and len(np.unique(keys)) != len(keys):
            raise ValueError(
                f"request {number}: holds a block id twice; ids must be chained, prefix by prefix"
            )
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    num_input = np.array(inputs, dtype=np.int64)
    sizes = np.full(int(start[-1]), block_size, dtype=np.int32)
    tails = num_input - (np.diff(start) - 1) * block_size
    held = np.diff(start) > 0
    sizes[start[1:][held] - 1] = np.minimum(tails[held], block_size)
    raw = np.concatenate(parts) if parts else np.empty(0, np.int64)
    _, keys = np.unique(raw, return_inverse=True)
    return References(keys.astype(np.int64), start, sizes, num_input, block_size)


def stack_distances(refs: References) -> np.ndarray:
    """i64[n] LRU stack distance of each reference at its request's arrival; NEVER on first sight.

    In touch order (each request tail first) let p(i) be the time the block of access i was last touched.
    Its distance is the number of blocks touched since, itself included: accesses at or after p(i) and
    before the request, less those whose block comes again before the request. The latter are pairs
    (p(j), j) with p(j) >= p(i) and j before the request: an inversion count, taken bit by bit on ranks.
    """
    n = len(refs.keys)
    request = refs.request_of
    head = refs.start[request]
    # Position of each reference in touch order: its request's span, mirrored.
    when = head + refs.start[request + 1] - 1 - np.arange(n)
    touched = np.empty(n, dtype=np.int64)
    touched[when] = refs.keys
    order = np.argsort(touched, kind="stable")
    same = touched[order[1:]] == touched[order[:-1]]
    previous = np.full(n, -1, dtype=np.int64)
    previous[order[1:][same]] = order[:-1][same]

    again = np.flatnonzero(previous >= 0)
    last = previous[again]
    begins = head[again]  # a request's first touch time equals its first reference's position
    # Within a request ascend by last touch, so that no pair inside it counts as an inversion.
    by_request = np.lexsort((last, begins))
    again, last, begins = again[by_request], last[by_request], begins[by_request]
    repeats = _earlier_and_greater(np.argsort(np.argsort(last, kind="stable"), kind="stable"))
    distances = np.full(n, NEVER, dtype=np.int64)
    distances[again] = begins - last - repeats
    return distances[when]


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


@dataclass(frozen=True)
class Curve:
    """Hits of a prefix-aware LRU cache at every capacity.

    Attributes:
        capacities: i64[k] ascending; the hit count changes only there.
        hit_blocks / hit_full_blocks / hit_tokens: i64[k] at these capacities.
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


def lru_curve(refs: References) -> Curve:
    """Hit ratio of LRU at all capacities, contiguous prefixes only, in one pass."""
    depth = stack_distances(refs)
    _running_maximum(depth, refs)
    known = depth != NEVER
    order = np.argsort(depth[known], kind="stable")
    sorted_depth = depth[known][order]
    full = refs.sizes[known][order] == refs.block_size
    last = np.flatnonzero(np.diff(sorted_depth, append=-1))
    return Curve(
        capacities=sorted_depth[last],
        hit_blocks=last + 1,
        hit_full_blocks=np.cumsum(full)[last],
        hit_tokens=np.cumsum(refs.sizes[known][order], dtype=np.int64)[last],
        blocks=len(refs.keys),
        full_blocks=int((refs.sizes == refs.block_size).sum()),
        tokens=int(refs.num_input.sum()),
    )


def _running_maximum(depth: np.ndarray, refs: References) -> None:
    """Replace each distance by the largest up to it in its request, in place.

    True prefix chains touched tail first already ascend; only ids that are no chain need the loop.
    """
    inner = np.ones(len(depth), dtype=bool)
    inner[refs.start[:-1][np.diff(refs.start) > 0]] = False
    falls = np.flatnonzero(inner[1:] & (depth[1:] < depth[:-1])) + 1
    for request in np.unique(refs.request_of[falls]):
        span = slice(refs.start[request], refs.start[request + 1])
        np.maximum.accumulate(depth[span], out=depth[span])


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
    following = np.full(n, n, dtype=np.int64)
    order = np.argsort(refs.keys, kind="stable")
    same = refs.keys[order[1:]] == refs.keys[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    held: dict[int, int] = {}  # block → its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, block); stale entries are skipped
    hits = 0
    for key, nxt in zip(refs.keys.tolist(), following.tolist()):
        if key in held:
            hits += 1
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
    return hits


def curves(trace: Trace, block_sizes: Iterable[int], *, progress: Progress = iter) -> dict[int, Curve]:
    """One LRU curve per block size; capacities are in blocks of that size."""
    return {size: lru_curve(load_references(trace, size, progress=progress)) for size in block_sizes}
