"""Routers that look at load or at names, never at what is cached."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar

from pagedjax.sim.routing.protocol import Choice, Prompt, Router, View, Worker


def least(workers: Sequence[Worker]) -> Worker:
    """The one with fewest requests under way."""
    return min(workers, key=lambda worker: (worker.in_flight, worker.number))


@dataclass
class Random(Router):
    """Any worker, uniformly. Source: the `random` policy of SGLang's gateway, and the baseline of Mooncake §6.2."""

    knows: ClassVar[str] = "none"

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        return Choice(view.workers[int(view.rng.integers(len(view.workers)))], "random")


@dataclass
class RoundRobin(Router):
    """Each in turn. Source: the `round_robin` policy of SGLang's gateway and of production-stack.

    The sources index a fixed list; where workers join and leave, ours goes on with the next number.
    """

    knows: ClassVar[str] = "none"
    _last: int = field(default=-1, init=False)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        worker = next((w for w in view.workers if w.number > self._last), view.workers[0])
        self._last = worker.number
        return Choice(worker, "turn")


@dataclass
class LeastRequests(Router):
    """The fewest requests under way.

    Source: "shortest queue" of SGLang's gateway (pull request 2114), "load balancing" of Mooncake §6.2. They leave ties
    open; ours go by number.
    """

    knows: ClassVar[str] = "none"

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        return Choice(least(view.workers), "load")


@dataclass
class LeastTokens(Router):
    """The fewest prompt tokens under way. Source: `total_tokens` of SGLang's data-parallel controller.

    The source counts what the workers report; ours is the router's own book, so answers under way are not counted.
    """

    knows: ClassVar[str] = "none"

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        return Choice(min(view.workers, key=lambda w: (w.tokens, w.number)), "load")


class Ring:
    """Consistent hashing: each worker at `replicas` points of a circle; a key belongs to the next point.

    Workers stand by number, not by name, so that renaming them moves nothing.
    """

    def __init__(self, replicas: int) -> None:
        if replicas < 1:
            raise ValueError(f"replicas={replicas}: must be at least 1; try 160")
        self._replicas = replicas
        self._numbers: tuple[int, ...] = ()
        self._points: list[tuple[int, int]] = []

    def _rebuild(self, numbers: tuple[int, ...]) -> None:
        if numbers != self._numbers:
            self._numbers = numbers
            points = ((_point(f"{n}:{r}".encode()), n) for n in numbers for r in range(self._replicas))
            self._points = sorted(points)

    def walk(self, key: bytes, workers: Sequence[Worker]) -> Iterator[Worker]:
        """The workers in the order in which the circle meets them after the key."""
        self._rebuild(tuple(worker.number for worker in workers))
        by_number = {worker.number: worker for worker in workers}
        start, count = bisect.bisect_left(self._points, (_point(key), -1)), len(self._points)
        for i in range(start, start + count):
            worker = by_number.pop(self._points[i % count][1], None)
            if worker is not None:
                yield worker


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


@dataclass
class Session(Router):
    """One worker per session, by consistent hashing (Karger et al., STOC'97).

    Source: `session` of vLLM's production-stack, which hashes a header onto a ring and sends requests without one to
    the endpoint of the lowest rate; ours sends those to the fewest requests under way.

    Attributes:
        replicas: Points of each worker on the ring.
    """

    knows: ClassVar[str] = "none"
    replicas: int = 160

    def __post_init__(self) -> None:
        self._ring = Ring(self.replicas)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        if not prompt.session:
            return Choice(least(view.workers), "no session")
        return Choice(next(self._ring.walk(prompt.session.encode(), view.workers)), "session")


@dataclass
class PrefixHash(Router):
    """Consistent hashing of the first blocks, with bounded load: no worker above `load_factor` × the mean.

    Source: Mirrokni, Thorup, Zadimoghaddam, SODA'18 (capacity ⌈c·m/n⌉, the new request counted), as KubeAI's
    `PrefixHash` (factor 1.25, replication 256) applies it to prompts. KubeAI hashes the first 100 characters; ours
    the first `blocks` full blocks, or what full blocks there are. A prompt without one goes to the fewest requests.

    Attributes:
        blocks: Blocks hashed, of the smallest block size among the workers.
        load_factor: c, at least 1.
        replicas: Points of each worker on the ring.
    """

    knows: ClassVar[str] = "none"
    blocks: int = 1
    load_factor: float = 1.25
    replicas: int = 256

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks}: must be at least 1")
        if not self.load_factor >= 1:
            raise ValueError(f"load_factor={self.load_factor}: must be at least 1; try 1.25")
        self._ring = Ring(self.replicas)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        workers = view.workers
        digests = prompt.digests(min(worker.block_size for worker in workers))[: self.blocks]
        if not digests:
            return Choice(least(workers), "no prefix")
        most = math.ceil(self.load_factor * (sum(w.in_flight for w in workers) + 1) / len(workers))
        walk = enumerate(self._ring.walk(digests[-1], workers))
        place, worker = next((i, w) for i, w in walk if w.in_flight + 1 <= most)
        return Choice(worker, "bounded load" if place else "prefix")
