"""The prefix check-up: how much a set of prompts shares, where prompts part, and what that costs.

Prompts are sorted as strings of big-endian token ids, so byte order is token order. Then one array says
it all: the common prefix of each prompt with its neighbour. The longest prefix that prompt i has in
common with any other is with a neighbour; the prompts that share the first p tokens stand together; and
the prefix tree has as many nodes as tokens, less the neighbours' common prefixes. Nothing is quadratic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Progress = Callable[[Iterable[int], str, int], Iterable[int]]

_PROBE = 8  # tokens that must agree again for a difference to count as over
_LONGEST_FIELD = 4096  # tokens: a longer difference is another text, not a field that changes
_SAMPLE = 16  # prompts that are laid beside the first to find fields
_AGREE = 0.9  # of them must have a field for it to be one


def _no_progress(items: Iterable[int], label: str, total: int) -> Iterable[int]:
    return items


@dataclass(frozen=True)
class Sorted:
    """Prompts in token order.

    Attributes:
        texts: Big-endian bytes of each prompt, sorted.
        order: i64[n] which prompt stands at each place.
        lengths: i64[n] tokens of each, in sorted order.
        lcp: i64[n] tokens in common with the prompt before; lcp[0] = 0.
    """

    texts: list[bytes]
    order: np.ndarray
    lengths: np.ndarray
    lcp: np.ndarray

    @classmethod
    def of(cls, prompts: Iterable[np.ndarray | Sequence[int]], progress: Progress = _no_progress) -> Sorted:
        """Sort prompts and measure what neighbours have in common."""
        raw = [np.asarray(p, dtype=">u4").tobytes() for p in prompts]
        order = sorted(range(len(raw)), key=raw.__getitem__)
        texts = [raw[i] for i in order]
        lcp = np.zeros(len(texts), dtype=np.int64)
        for i in progress(range(1, len(texts)), "compare neighbours", len(texts) - 1):
            lcp[i] = _common(texts[i - 1], texts[i])
        lengths = np.array([len(t) // 4 for t in texts], dtype=np.int64)
        return cls(texts, np.array(order, dtype=np.int64), lengths, lcp)

    def tokens(self, place: int) -> np.ndarray:
        """The prompt at a place, as i64."""
        return np.frombuffer(self.texts[place], dtype=">u4").astype(np.int64)

    def longest_shared(self) -> np.ndarray:
        """i64[n]: tokens each prompt has in common with its best partner, in sorted order."""
        return np.maximum(self.lcp, np.append(self.lcp[1:], 0))


def _common(a: bytes, b: bytes) -> int:
    """Tokens that two big-endian prompts have in common at the front."""
    n = min(len(a), len(b)) // 4
    if a[: 4 * n] == b[: 4 * n]:
        return n
    differs = np.frombuffer(a, dtype="<u4", count=n) != np.frombuffer(b, dtype="<u4", count=n)
    return int(differs.argmax())


@dataclass(frozen=True)
class BlockSaving:
    """What sharing full blocks saves at one block size.

    Attributes:
        block_size: Tokens per block.
        total_blocks: Blocks without sharing, tails included.
        shared_blocks: Of these, how many need not be stored nor computed.
        reduction: Blocks without sharing over blocks with it.
        token_share: Tokens of shared blocks over all tokens.
    """

    block_size: int
    total_blocks: int
    shared_blocks: int
    reduction: float
    token_share: float


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that share a prefix and then part: an inner node of the prefix tree.

    Attributes:
        depth: Common tokens at the front.
        count: Prompts in the group.
        saved_tokens: (count - 1) × the tokens this group has in common beyond the group around it; over
            all groups these add up to all that sharing saves.
        num_branches: Different continuations.
        first: Place (in sorted order) of its first prompt.
    """

    depth: int
    count: int
    saved_tokens: int
    num_branches: int
    first: int


@dataclass(frozen=True)
class ChangingField:
    """A stretch that differs from prompt to prompt, with common text behind it.

    Attributes:
        position: Token position in the group's first prompt.
        num_values: Different stretches among the prompts that have the field.
        longest: Tokens of the longest.
        before: Token ids just before it.
        examples: Three of the stretches.
    """

    position: int
    num_values: int
    longest: int
    before: tuple[int, ...]
    examples: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Divergence:
    """A group of prompts that part although what follows is alike: fields that change per request.

    Attributes:
        count: Prompts in the group.
        fields: All of them, front to back.
        saved_now: Tokens the group's prompts share now.
        saved_if_moved: Tokens they would share with all these fields moved to the end.
    """

    count: int
    fields: tuple[ChangingField, ...]
    saved_now: int
    saved_if_moved: int

    def sentence(self, unit: str, tokens: int) -> str:
        """What moving the fields would save, of so many tokens in all."""
        many = "this field" if len(self.fields) == 1 else f"these {len(self.fields)} fields"
        gain = self.saved_if_moved - self.saved_now
        return (
            f"Move {many} of {self.count:,} prompts to the end: they would share {self.saved_if_moved:,} {unit} "
            f"instead of {self.saved_now:,}, {gain / max(tokens, 1):.1%} of all."
        )


@dataclass(frozen=True)
class Checkup:
    """What the check-up found.

    Attributes:
        num_prompts / num_tokens: Size of the set.
        saved_tokens: Tokens that sharing at token granularity would save.
        shares: f64[n] of each prompt, in the order given: longest common prefix with another prompt over
            its own length.
        pair_histogram: Common prefix length → number of pairs of prompts with exactly this length.
        savings: One per block size.
        groups: Prefix groups by tokens saved, best first.
        divergences: Fields that change per request, by what moving them to the end would save.
        moved: Number of a prompt → its tokens with these fields behind the rest, where that was asked for.
    """

    num_prompts: int
    num_tokens: int
    saved_tokens: int
    shares: np.ndarray
    pair_histogram: dict[int, int]
    savings: tuple[BlockSaving, ...]
    groups: tuple[PromptGroup, ...]
    divergences: tuple[Divergence, ...]
    moved: Mapping[int, np.ndarray] = field(default_factory=dict)


def check_up(
    prompts: Iterable[np.ndarray | Sequence[int]],
    *,
    block_sizes: Sequence[int] = (1, 8, 16, 32, 64, 128, 256),
    top: int = 10,
    least_gain: float = 0.01,
    keep_moved: bool = False,
    progress: Progress = _no_progress,
) -> Checkup:
    """Examine a set of prompts.

    Args:
        prompts: Token ids of each, at least one token.
        block_sizes: Tokens per block to report savings for.
        top: Groups and divergences to keep.
        least_gain: Share of all tokens that moving fields must save to be worth a word.
        keep_moved: Hand out the prompts with their fields moved.
        progress: Wraps the long loops, for a progress bar.

    Raises:
        ValueError: No prompts, an empty one, or token ids outside 0 … 2^32 - 1.
    """
    ordered = Sorted.of(prompts, progress)
    n = len(ordered.texts)
    if n == 0 or int(ordered.lengths.min()) == 0:
        raise ValueError(f"prompts: {'none given' if n == 0 else 'one is empty'}; each must hold a token")
    shares = np.empty(n)
    shares[ordered.order] = ordered.longest_shared() / ordered.lengths
    groups, pairs = prefix_groups(ordered, progress)
    groups.sort(key=lambda g: (-g.saved_tokens, g.first))
    moved: dict[int, np.ndarray] | None = {} if keep_moved else None
    divergences = _divergences(ordered, groups, top, least_gain, progress, moved)
    return Checkup(
        num_prompts=n,
        num_tokens=int(ordered.lengths.sum()),
        saved_tokens=int(ordered.lcp.sum()),
        shares=shares,
        pair_histogram=dict(sorted(pairs.items())),
        savings=tuple(_saving(ordered, size) for size in block_sizes),
        groups=tuple(groups[:top]),
        divergences=divergences,
        moved=moved or {},
    )


def _saving(ordered: Sorted, block_size: int) -> BlockSaving:
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    total = int((-(-ordered.lengths // block_size)).sum())
    shared = int((ordered.lcp // block_size).sum())
    return BlockSaving(
        block_size,
        total,
        shared,
        total / (total - shared),
        shared * block_size / int(ordered.lengths.sum()),
    )


@dataclass
class _Open:
    """A group whose end has not been reached: its closed branches, and where the open one began."""

    depth: int
    first: int
    branch: int
    branches: int = 2
    squares: int = 0


def prefix_groups(
    ordered: Sorted, progress: Progress = _no_progress
) -> tuple[list[PromptGroup], Counter[int]]:
    """All inner nodes of the prefix tree, and how many pairs of prompts part at each depth.

    One pass over the neighbours with a stack of open groups. The pairs that part in a group of m prompts
    are those of different branches: (m² - Σ branch²) / 2.
    """
    groups: list[PromptGroup] = []
    pairs: Counter[int] = Counter()
    stack: list[_Open] = []
    n = len(ordered.texts)
    depths = [*ordered.lcp[1:].tolist(), -1]
    for i in progress(range(1, n + 1), "group prefixes", n):
        depth = depths[i - 1]
        first = i - 1
        while stack and stack[-1].depth > depth:
            node = stack.pop()
            first, count = node.first, i - node.first
            squares = node.squares + (i - node.branch) ** 2
            pairs[node.depth] += (count * count - squares) // 2
            parent = max(depth, stack[-1].depth if stack else 0)
            groups.append(
                PromptGroup(node.depth, count, (count - 1) * (node.depth - parent), node.branches, first)
            )
        if depth < 0:
            break
        if stack and stack[-1].depth == depth:
            top = stack[-1]
            top.squares += (i - top.branch) ** 2
            top.branches += 1
            top.branch = i
        else:
            stack.append(_Open(depth, first, i, squares=(i - first) ** 2))
    return groups, pairs


def _divergences(
    ordered: Sorted,
    groups: list[PromptGroup],
    top: int,
    least_gain: float,
    progress: Progress,
    keep: dict[int, np.ndarray] | None,
) -> tuple[Divergence, ...]:
    """Groups that part and come together again, by what moving the differences to the end would gain."""
    totals = np.concatenate([[0], np.cumsum(ordered.lengths)])
    least = least_gain * int(totals[-1])

    def beyond(group: PromptGroup) -> int:
        held = int(totals[group.first + group.count] - totals[group.first])
        return held - group.count * group.depth

    found: list[Divergence] = []
    taken: list[range] = []
    likely = sorted(groups, key=lambda g: (-beyond(g), g.depth))[:50]
    for group in likely:
        if len(found) == top or beyond(group) < least:
            break
        span = range(group.first, group.first + group.count)
        if any(span.start in other or other.start in span for other in taken):
            continue
        divergence, moved = _moved(ordered, group, progress)
        if divergence is not None and divergence.saved_if_moved - divergence.saved_now >= max(least, 1):
            found.append(divergence)
            taken.append(span)
            if keep is not None:
                keep.update(zip(ordered.order[span.start : span.stop].tolist(), moved))
    return tuple(sorted(found, key=lambda d: d.saved_now - d.saved_if_moved))


def _moved(
    ordered: Sorted, group: PromptGroup, progress: Progress
) -> tuple[Divergence | None, list[np.ndarray]]:
    """Measure a group with its changing fields moved behind the rest, and its prompts so; None where it has none."""
    texts = ordered.texts[group.first : group.first + group.count]
    reference = texts[0]
    spans = _fields_of(reference, texts[1 :: max(1, (len(texts) - 1) // _SAMPLE)], group.depth)
    if not spans:
        return None, []
    anchors = [reference[4 * end : 4 * (end + _PROBE)] for _, end in spans]
    values: list[dict[bytes, None]] = [{} for _ in spans]
    moved: list[np.ndarray] = []
    for i in progress(range(len(texts)), "move the fields", len(texts)):
        text, at, kept, stretches = texts[i], 0, [], []
        begin = spans[0][0]
        for number, anchor in enumerate(anchors):
            if number:  # what is common between two fields has the same length in every prompt
                begin = at + spans[number][0] - spans[number - 1][1]
            stop = _find(text, anchor, begin)
            if stop is None:
                break
            kept.append(text[4 * at : 4 * begin])
            stretches.append(text[4 * begin : 4 * stop])
            values[number][stretches[-1]] = None
            at = stop
        moved.append(np.frombuffer(b"".join([*kept, text[4 * at :], *stretches]), dtype=">u4"))
    now = int(ordered.lcp[group.first + 1 : group.first + group.count].sum())
    changing = [
        ChangingField(
            position=begin,
            num_values=len(distinct),
            longest=max(map(len, distinct)) // 4,
            before=_ids(reference[max(0, 4 * (begin - 8)) : 4 * begin]),
            examples=tuple(_ids(value) for value in list(distinct)[:3]),
        )
        for (begin, _), distinct in zip(spans, values)
        if distinct
    ]
    return Divergence(group.count, tuple(changing), now, int(Sorted.of(moved).lcp.sum())), moved


def _ids(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype=">u4").tolist())


def _fields_of(reference: bytes, sample: list[bytes], depth: int) -> list[tuple[int, int]]:
    """(begin, end) in the reference of stretches that nearly all of a sample have otherwise, front to back.

    Each prompt is laid beside the reference: where they part, the first place from which `_PROBE` tokens agree again
    ends the difference. Differences of several prompts that touch are one field.
    """
    windows: dict[bytes, list[int]] = {}
    for at in range(depth, len(reference) // 4 - _PROBE + 1):
        windows.setdefault(reference[4 * at : 4 * (at + _PROBE)], []).append(at)
    seen: list[tuple[int, int, int]] = []
    for number, text in enumerate(sample):
        if number == 4 and not seen:
            return []
        seen += [(begin, end, number) for begin, end in _differences(reference, text, depth, windows)]
    fields: list[tuple[int, int]] = []
    members: set[int] = set()
    for begin, end, number in [*sorted(seen), (1 << 62, 1 << 62, -1)]:
        if fields and begin <= fields[-1][1]:
            fields[-1] = (fields[-1][0], max(fields[-1][1], end))
        else:
            if fields and len(members) < _AGREE * len(sample):
                fields.pop()
            members = set()
            fields.append((begin, end))
        members.add(number)
    return fields[:-1]


def _differences(
    reference: bytes, text: bytes, depth: int, windows: dict[bytes, list[int]]
) -> Iterator[tuple[int, int]]:
    """(begin, end) in the reference of each stretch that `text` has otherwise, as long as it comes back to it."""
    at, there = depth, depth  # in the reference, in the text
    while True:
        same = _common(reference[4 * at :], text[4 * there :])
        at, there = at + same, there + same
        if at >= len(reference) // 4 or there >= len(text) // 4:
            return
        for skip in range(_LONGEST_FIELD + 1):
            begin = 4 * (there + skip)
            if begin + 4 * _PROBE > len(text):
                return
            places = windows.get(text[begin : begin + 4 * _PROBE])
            if places is None:
                continue
            nearest = bisect_left(places, at)
            if nearest < len(places) and places[nearest] - at <= _LONGEST_FIELD:
                yield at, places[nearest]
                at, there = places[nearest], there + skip
                break
        else:
            return


def _find(text: bytes, anchor: bytes, at: int) -> int | None:
    """Token position of `anchor` at most `_LONGEST_FIELD` tokens behind `at`."""
    begin, end = 4 * at, 4 * (at + _LONGEST_FIELD) + len(anchor)
    place = text.find(anchor, begin, end)
    while place >= 0 and place % 4:
        place = text.find(anchor, place + 1, end)
    return None if place < 0 else place // 4
