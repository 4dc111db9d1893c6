"""A trace's block references in memory: 7 bytes each at rest, at most 24 while they are made, none per request.

Keys become dense numbers; where a request begins and which of its blocks it looks up are bits beside them. What
counts hits works through them in chunks that end with a request, so that its own arrays stay small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pagedjax.sim.replay import BlockKeys, BlockStore, HitCounts, Insert, Progress, teller
from pagedjax.sim.trace import Trace

PEAK_BYTES = 24  # per reference, while they are loaded or counted
FIRST, ASKED = 1, 2
CHUNK = 1 << 14
_MOST = 2**31 - 1
_STRETCH = 12  # of words, as a power of two
_WITHIN = (1 << _STRETCH) - 1


@dataclass(frozen=True)
class References:
    """A whole trace as arrays, requests in order, each head first.

    Attributes:
        keys: i32[n] dense block numbers 0 … distinct-1.
        flags: u8[n] bits: the first of a request; looked up (else only left behind).
        sizes: u16[n] or u32[n] tokens of each block; of the last that a request looks up, tokens to the prompt's end.
        block_size: Tokens per block.
        totals: Requests, blocks, full blocks and tokens, with no hit booked.
        unheard: What requests asked of the cache (`retention`, `cache_read`, …) → how many did. Blocks alone have no
            request to ask: a simulation has.
        groups: u8, u16 or i32[requests with references] number of each one's category; None: no request names one.
        group_names: Of the numbers; "" where a request names none.
    """

    keys: np.ndarray
    flags: np.ndarray
    sizes: np.ndarray
    block_size: int
    totals: HitCounts
    unheard: Mapping[str, int] = field(default_factory=dict)
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] = ()

    @property
    def num_distinct(self) -> int:
        return int(self.keys.max()) + 1 if len(self.keys) else 0

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[int, int]]:
        """(from, to) of stretches of about `size` references that hold whole requests."""
        start, n = 0, len(self.keys)
        while start < n:
            end = min(start + size, n)
            while end < n and not self.flags[end] & FIRST:
                ahead = (self.flags[end : end + CHUNK] & FIRST).argmax()
                end = end + int(ahead) if ahead else min(end + CHUNK, n)
            yield start, end
            start = end

    def requests(self) -> Iterator[tuple[int, int]]:
        """(from, to) of the references of each request that has any."""
        for start, end in self.chunks():
            heads = (np.flatnonzero(self.flags[start:end] & FIRST) + start).tolist()
            yield from zip(heads, [*heads[1:], end])


class _Buffer:
    """An array that grows in place: where it is large the system moves its pages, and nothing is held twice."""

    def __init__(self, dtype: type) -> None:
        self._whole: np.ndarray = np.empty(0, dtype)
        self._used = 0

    def append(self, values: np.ndarray) -> None:
        end = self._used + len(values)
        if end > len(self._whole):
            self._whole.resize(end + max(CHUNK, end // 16), refcheck=False)
        self._whole[self._used : end] = values
        self._used = end

    def joined(self) -> np.ndarray:
        self._whole.resize(self._used, refcheck=False)
        return self._whole


class _Groups:
    """Categories of the requests that have references; no array as long as none is named."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self._unnamed = 0
        self._found: _Buffer | None = None

    def add(self, group: str) -> None:
        if self._found is None:
            if not group:
                self._unnamed += 1
                return
            self._found = _Buffer(np.int32)
            for at in range(0, self._unnamed, CHUNK):
                self._found.append(np.zeros(min(CHUNK, self._unnamed - at), np.int32))
        number = self._numbers.setdefault(group, len(self._numbers))
        self._found.append(np.array([number], np.int32))

    def joined(self) -> tuple[np.ndarray | None, tuple[str, ...]]:
        if self._found is None:
            return None, ()
        most = len(self._numbers)
        small = np.uint8 if most <= 1 << 8 else np.uint16 if most <= 1 << 16 else np.int32
        return self._found.joined().astype(small), tuple(self._numbers)


def load_references(
    trace: Trace,
    block_size: int,
    *,
    insert: Insert = "prompt",
    progress: Progress = iter,
    on_request: Callable[[int], object] = lambda count: None,
) -> References:
    """Read a trace's blocks into arrays, once.

    Args:
        trace: Requests with identity.
        block_size: Tokens per block.
        insert: What each request leaves behind.
        progress: Wraps the stream of requests, for a progress bar.
        on_request: Told how many references each request has.

    Raises:
        ValueError: The trace has no identity of prefixes, a request holds a block twice (chained ids cannot
            repeat), or there are more than 2**31 - 1 references.
    """
    if not trace.granularity:
        raise ValueError(
            f"{trace.name}: holds lengths and no identity of prefixes, so its hits are unknown; give a trace with "
            "token ids, block ids or text"
        )
    keyer = BlockKeys(trace, block_size, insert)
    small = 2 * (block_size + max(trace.granularity, 1)) < 2**16
    raw, flags = _Buffer(np.int64), _Buffer(np.uint8)
    sizes = _Buffer(np.uint16 if small else np.uint32)
    totals = HitCounts()
    unheard: Counter[str] = Counter()
    groups = _Groups()
    count = 0
    for number, request in enumerate(progress(trace)):
        lookup, held, num_input = keyer.refs(request)
        totals.add(len(lookup), 0, num_input, block_size)
        ordered = np.sort(held)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError(
                f"request {number}: holds a block id twice; ids must be chained, prefix by prefix"
            )
        count += len(held)
        on_request(len(held))
        if request.wishes:
            unheard.update(request.wishes.keys())
        if count > _MOST:
            raise ValueError(
                f"{trace.name}: more than {_MOST:,} block references; take a window, a sample or larger blocks"
            )
        # With answers, the prompt's cut last block is looked up and never there: it grew on.
        asked = len(lookup) if insert == "prompt" else num_input // block_size
        bits = np.zeros(len(held), np.uint8)
        bits[:asked] = ASKED
        bits[:1] |= FIRST
        tokens = np.full(len(held), block_size, np.int64)
        if asked:
            tokens[asked - 1] = num_input - (asked - 1) * block_size
        if len(held):
            groups.add(request.group)
        raw.append(held)
        flags.append(bits)
        sizes.append(tokens)
    dense = _dense(raw.joined())
    return References(dense, flags.joined(), sizes.joined(), block_size, totals, unheard, *groups.joined())


def _dense(raw: np.ndarray) -> np.ndarray:
    """i32[n]: the rank of each value among the distinct ones; `raw` is overwritten."""
    if len(raw):
        low, high = int(raw.min()), int(raw.max())
        if high - low < 2 * len(raw):
            return _dense_of_near(raw, low, high - low + 1)
    order = np.argsort(raw)
    seen, before, places = -1, None, order
    for at in range(0, len(raw), CHUNK):
        places = order[at : at + CHUNK]
        values = raw[places]
        new = np.empty(len(values), bool)
        new[0] = before is None or values[0] != before
        new[1:] = values[1:] != values[:-1]
        ranks = seen + np.cumsum(new)
        raw[places] = ranks  # each place is read once, here
        seen, before = int(ranks[-1]), values[-1]
    del order, places  # a view would hold it
    return raw.astype(np.int32)


def _dense_of_near(raw: np.ndarray, low: int, size: int) -> np.ndarray:
    """The same by a table of all values from `low` on, as ids counted up in a file have few gaps: no sort."""
    there = np.zeros(size, bool)
    for at in range(0, len(raw), CHUNK):
        there[raw[at : at + CHUNK] - low] = True
    rank = np.cumsum(there, dtype=np.int32)
    del there
    for at in range(0, len(raw), CHUNK):
        raw[at : at + CHUNK] = rank[raw[at : at + CHUNK] - low] - 1
    del rank
    return raw.astype(np.int32)


def mirror(first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a chunk: i64[n] place of each reference when every request is turned round, and its request's start."""
    n = len(first)
    starts = np.flatnonzero(first)
    request = np.cumsum(first) - 1
    ends = np.append(starts[1:], n)
    begins = starts[request]
    return begins + ends[request] - 1 - np.arange(n), begins


def _neighbours(refs: References, *, touched: bool, following: bool) -> np.ndarray:
    """i32[n]: when each reference's block was used before, or is used next; -1 or n where never.

    Time is the reference's number, or with `touched` its place in touch order (each request tail first).
    """
    n = len(refs.keys)
    found = np.full(n, n if following else -1, np.int32)
    last = np.full(refs.num_distinct, -1, np.int32)  # of each block: when a chunk before used it
    for start, end in refs.chunks():
        when = np.arange(start, end)
        if touched:
            when = start + mirror(refs.flags[start:end] & FIRST)[0]
        # One block's uses side by side, in their order.
        codes = refs.keys[start:end].astype(np.int64) << 32 | when
        codes.sort()
        keys, times = codes >> 32, codes & 0xFFFFFFFF
        new = np.append(True, keys[1:] != keys[:-1])
        earlier = np.where(new, last[keys], np.roll(times, 1))
        if following:
            some = earlier >= 0
            found[earlier[some]] = times[some]
        else:
            found[times] = earlier
        ends = np.append(new[1:], True)
        last[keys[ends]] = times[ends]
    return found


def previous_touches(refs: References) -> np.ndarray:
    """i32[n] in touch order: when the block was touched before; -1 on first sight."""
    return _neighbours(refs, touched=True, following=False)


def next_uses(refs: References) -> np.ndarray:
    """i32[n] in reference order: when the block is used again; n where never."""
    return _neighbours(refs, touched=False, following=True)


class Ranks:
    """A set of whole numbers below `size` that says how many of it lie below each of many.

    Bits in words; within a stretch of 4,096 words sums over ranges of words that halve; and a total of each stretch,
    which are so few that they are summed anew for each question. So neither adding nor asking grows with the size.

    Source:
        Fenwick, "A new data structure for cumulative frequency tables", 1994.
    """

    def __init__(self, size: int) -> None:
        self._words = np.zeros(size // 64 + 1, np.uint64)
        # Entry i: members of word i - 1 and of those before it, as many words as i's last bit says.
        self._sums = np.zeros(len(self._words) + 1, np.int32)
        self._totals = np.zeros((len(self._words) >> _STRETCH) + 1, np.int64)
        self.count = 0

    def add(self, values: np.ndarray) -> None:
        """Put different new numbers in."""
        word = values >> 6
        np.bitwise_or.at(self._words, word, np.uint64(1) << (values & 63).astype(np.uint64))
        np.add.at(self._totals, word >> _STRETCH, 1)
        at = word + 1
        at = at[(at & _WITHIN > 0) & (at < len(self._sums))]
        while len(at):
            np.add.at(self._sums, at, 1)
            at = at + (at & -at)
            at = at[(at & _WITHIN > 0) & (at < len(self._sums))]
        self.count += len(values)

    def below(self, values: np.ndarray) -> np.ndarray:
        """i64[n]: members below each."""
        word = values >> 6
        mask = (np.uint64(1) << (values & 63).astype(np.uint64)) - np.uint64(1)
        found = (np.cumsum(self._totals) - self._totals)[word >> _STRETCH]
        found += np.bitwise_count(self._words[word] & mask)
        # An entry at the border of two stretches is never added to: for who has nothing left to ask it holds 0.
        at = word & _WITHIN
        base = word - at
        while at.any():
            found += self._sums[base + at]
            at &= at - 1
        return found


@dataclass(frozen=True)
class LeadingHits:
    """Of a chunk: what its requests find from the front on.

    Attributes:
        leading: bool[references] found, with all before it in its request.
        num_hits / hit_tokens / num_input: i64[requests] blocks and tokens found, prompt tokens.
    """

    leading: np.ndarray
    num_hits: np.ndarray
    hit_tokens: np.ndarray
    num_input: np.ndarray


def leading_hits(refs: References, start: int, end: int, hit: np.ndarray) -> LeadingHits:
    """Cut a chunk's hits off at each request's first miss.

    Args:
        refs: Whose chunk.
        start / end: The chunk.
        hit: bool[end - start] blocks that are present when they are looked up.
    """
    flags = refs.flags[start:end]
    sizes = refs.sizes[start:end].astype(np.int64)
    heads = np.flatnonzero(flags & FIRST)
    asked = (flags & ASKED) > 0
    misses = asked & ~hit
    missed = np.cumsum(misses)  # up to and with each
    request = np.cumsum(flags & FIRST) - 1
    leading = asked & (missed == (missed[heads] - misses[heads])[request])
    return LeadingHits(
        leading,
        np.add.reduceat(leading, heads, dtype=np.int64),
        np.add.reduceat(np.where(leading, np.minimum(sizes, refs.block_size), 0), heads),
        np.add.reduceat(np.where(asked, sizes, 0), heads),
    )


def booked(refs: References, start: int, end: int, hit: np.ndarray, counts: HitCounts) -> None:
    """Book the leading hits of a chunk's requests.

    Args:
        refs / start / end / hit: As for `leading_hits`.
        counts: Gets them; requests, blocks and tokens are not touched.
    """
    found = leading_hits(refs, start, end, hit)
    full = refs.sizes[start:end] >= refs.block_size
    some = found.num_input > 0
    counts.hit_blocks += int(found.num_hits.sum())
    counts.hit_full_blocks += int((found.leading & full).sum())
    counts.hit_tokens += int(found.hit_tokens.sum())
    counts.token_ratios += float((found.hit_tokens[some] / found.num_input[some]).sum())
    most = np.minimum(found.num_hits[some], (found.num_input[some] - 1) // refs.block_size)
    counts.engine_tokens += int(most.sum()) * refs.block_size


def replay_references(
    refs: References,
    store: BlockStore,
    *,
    progress: Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]] = iter,
) -> HitCounts:
    """The same as `replay` from references in memory: no file is read again.

    Args:
        refs: Of any trace.
        store: `LRUStore(capacity)` or another policy's.
        progress: Wraps the requests' spans, for a progress bar.
    """
    counts = replace(refs.totals)
    spans = iter(progress(refs.requests()))
    next_group, number = teller(store), 0
    for start, end in refs.chunks():
        found = np.zeros(end - start, bool)
        last = start
        while last < end:
            first, last = next(spans)
            keys = refs.keys[first:last]
            if refs.groups is not None:
                next_group(refs.group_names[refs.groups[number]])
                number += 1
            asked = int(((refs.flags[first:last] & ASKED) > 0).sum())
            found[first - start : first - start + store.hits(keys[:asked])] = True
            store.touch(keys)
        booked(refs, start, end, found, counts)
    return counts
