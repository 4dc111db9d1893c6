"""What a router believes to be cached where: nothing, its own guess, or the managers' events after a delay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from pagedjax.cache.events import CacheEvent


class Knowledge(Protocol):
    """Beliefs about every worker's cache, by block digest.

    Attributes:
        informs: Ever believes anything.
        wants_events: The workers' cache events are to be reported.
        by_sending: Changes only where a prompt is sent, or by what is forgotten with time.
    """

    informs: bool
    wants_events: bool
    by_sending: bool

    def matched(self, digests: Sequence[bytes], worker: int) -> int:
        """Leading blocks believed to be there."""
        ...

    def size(self, worker: int) -> int:
        """Blocks believed to be there."""
        ...

    def oldest(self, worker: int, count: int) -> Iterable[bytes]:
        """The `count` blocks that would be evicted first, in that order."""
        ...

    def joined(self, worker: int, block_size: int) -> None:
        """A worker has joined, with nothing cached."""
        ...

    def sent(self, digests: Sequence[bytes], worker: int, now: float) -> None:
        """A prompt was sent to the worker."""
        ...

    def report(self, worker: int, events: Sequence[CacheEvent]) -> None:
        """Events of a worker's manager have arrived, in order."""
        ...

    def age(self, now: float) -> None:
        """It is so late: what has not been said for too long is believed no more."""
        ...

    def gone(self, worker: int) -> None:
        """The worker is no more."""
        ...


def _leading(digests: Sequence[bytes], known: OrderedDict[bytes, float] | dict[bytes, int]) -> int:
    for count, digest in enumerate(digests):
        if digest not in known:
            return count
    return len(digests)


class NoKnowledge:
    """Believes nothing."""

    informs = wants_events = by_sending = False

    def matched(self, digests: Sequence[bytes], worker: int) -> int:
        return 0

    def size(self, worker: int) -> int:
        return 0

    def oldest(self, worker: int, count: int) -> Iterable[bytes]:
        return ()

    def joined(self, worker: int, block_size: int) -> None:
        return None

    def sent(self, digests: Sequence[bytes], worker: int, now: float) -> None:
        return None

    def report(self, worker: int, events: Sequence[CacheEvent]) -> None:
        return None

    def age(self, now: float) -> None:
        return None

    def gone(self, worker: int) -> None:
        return None


class ApproximateKnowledge:
    """Guesses from what was sent: a worker holds the blocks of the prompts it was sent last.

    The routers' own trees (SGLang's gateway over characters, Dynamo without events over blocks) kept as block digests:
    a digest names its whole prefix, so that the leading known digests are the matched path.

    Args:
        most_tokens: Tokens remembered of each worker, in whole blocks; the least recently sent go first, tails before
            heads.
        ttl_s: Seconds after which a block that was not sent again is forgotten.
    """

    informs, wants_events, by_sending = True, False, True

    def __init__(self, most_tokens: int, ttl_s: float = float("inf")) -> None:
        if most_tokens < 1:
            raise ValueError(f"tree_tokens={most_tokens}: must be at least 1; try {1 << 24}")
        if not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: must be positive; try 120")
        self._most_tokens = most_tokens
        self._ttl_s = ttl_s
        self._most: dict[int, int] = {}
        self._trees: dict[int, OrderedDict[bytes, float]] = {}

    def joined(self, worker: int, block_size: int) -> None:
        self._most[worker] = max(self._most_tokens // block_size, 1)
        self._trees[worker] = OrderedDict()

    def matched(self, digests: Sequence[bytes], worker: int) -> int:
        return _leading(digests, self._trees[worker])

    def size(self, worker: int) -> int:
        return len(self._trees[worker])

    def oldest(self, worker: int, count: int) -> Iterable[bytes]:
        return islice(self._trees[worker], count)

    def sent(self, digests: Sequence[bytes], worker: int, now: float) -> None:
        tree = self._trees[worker]
        for digest in reversed(digests):
            tree[digest] = now
            tree.move_to_end(digest)
        while len(tree) > self._most[worker]:
            tree.popitem(last=False)
        self.age(now)

    def age(self, now: float) -> None:
        if self._ttl_s < float("inf"):
            for other in self._trees.values():
                while other and next(iter(other.values())) <= now - self._ttl_s:
                    other.popitem(last=False)

    def report(self, worker: int, events: Sequence[CacheEvent]) -> None:
        return None

    def gone(self, worker: int) -> None:
        del self._trees[worker]


class ExactKnowledge:
    """Holds what the managers' events say, as of their arrival; device and host contents count alike."""

    informs, wants_events, by_sending = True, True, False

    def __init__(self) -> None:
        self._resident: dict[int, dict[bytes, int]] = {}

    def matched(self, digests: Sequence[bytes], worker: int) -> int:
        return _leading(digests, self._resident[worker])

    def size(self, worker: int) -> int:
        return len(self._resident[worker])

    def oldest(self, worker: int, count: int) -> Iterable[bytes]:
        return islice(self._resident[worker], count)

    def joined(self, worker: int, block_size: int) -> None:
        self._resident[worker] = {}

    def sent(self, digests: Sequence[bytes], worker: int, now: float) -> None:
        return None

    def age(self, now: float) -> None:
        return None

    def report(self, worker: int, events: Sequence[CacheEvent]) -> None:
        resident = self._resident[worker]
        for event in events:
            if event.kind == "cleared":
                resident.clear()
            elif event.group == 0:
                step = 1 if event.kind == "stored" else -1
                for key in event.keys:
                    left = resident.get(key, 0) + step
                    if left > 0:
                        resident[key] = left
                    else:
                        resident.pop(key, None)

    def gone(self, worker: int) -> None:
        del self._resident[worker]


KNOWLEDGE = ("none", "approximate", "exact")
