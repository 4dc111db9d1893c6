"""What a router is asked and what it sees: prompts, its own book of what it sent where, what is known of caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from pagedjax.cache.hashing import NO_EXTRA, TokenChain, hash_scheme
from pagedjax.sim.routing.knowledge import Knowledge

_SCHEME = hash_scheme("sha256")  # the engines' default, which simulated ones have


class Prompt:
    """A request as a router sees it: tokens and perhaps a session, never the length of the answer.

    Args:
        number: Of the request, in order of arrival.
        tokens: i32[n].
        session: Conversation it belongs to; "" where unknown.
    """

    __slots__ = ("_digests", "number", "session", "tokens")

    def __init__(self, number: int, tokens: np.ndarray, session: str = "") -> None:
        self.number = number
        self.tokens = tokens
        self.session = session
        self._digests: dict[int, list[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def digests(self, block_size: int) -> list[bytes]:
        """Names of the prompt's full blocks, as the managers' events name them; not to be changed."""
        found = self._digests.get(block_size)
        if found is None:
            full = self.num_tokens // block_size * block_size
            packed = np.ascontiguousarray(self.tokens[:full], dtype="<i4").tobytes()
            found = list(_SCHEME.extend(_SCHEME.root, 0, packed, block_size, NO_EXTRA))
            self._digests[block_size] = found
        return found

    def chain(self, block_size: int) -> TokenChain:
        """The prompt's chain, with digests that are computed once; the caller's own."""
        return TokenChain.hashed(self.tokens, self.digests(block_size), block_size=block_size)


@dataclass(slots=True)
class Sent:
    """A request in the router's book, from sending it to seeing its end.

    Attributes:
        prompt: What was sent.
        uncached: Prompt tokens that the router expected to be computed.
        prefill_ns: What it expected that to take, in whole nanoseconds, whose sums stay exact. None: nobody asked.
    """

    prompt: Prompt
    uncached: int
    prefill_ns: int | None = None


@dataclass(eq=False)
class Worker:
    """An instance as the router knows it: what it was told at the start, and its own book since.

    Attributes:
        number: In order of joining; all ties are broken by it.
        name: For tables.
        role: "mixed", "prefill" or "decode".
        block_size / num_blocks: Of its pool.
        prefill_s: (tokens to compute, tokens before them) → predicted seconds.
        sent: Requests under way, by number.
        unstarted: Those of which no token has come back, in order of sending.
        tokens: Prompt tokens of all under way.
        prefill_tokens / prefill_ns: Expected of those without a token.
        head_since_s: Since when the first of `unstarted` is the first.
    """

    number: int
    name: str
    role: str
    block_size: int
    num_blocks: int
    prefill_s: Callable[[int, int], float]
    sent: dict[int, Sent] = field(default_factory=dict)
    unstarted: dict[int, Sent] = field(default_factory=dict)
    tokens: int = 0
    prefill_tokens: int = 0
    head_since_s: float = 0.0
    _priced_ns: int = 0
    _unpriced: dict[int, Sent] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Requests sent and not seen to end."""
        return len(self.sent)

    def queue_s(self, now: float) -> float:
        """Predicted seconds until a new prompt would begin: what is unstarted, less what the first has had already."""
        if not self.unstarted:
            return 0.0
        total, first = self.prefill_ns, next(iter(self.unstarted.values())).prefill_ns
        assert first is not None
        return (total - min(int((now - self.head_since_s) * 1e9), first)) / 1e9

    @property
    def prefill_ns(self) -> int:
        for entry in self._unpriced.values():  # predictions cost time, and many routers never ask
            cached = entry.prompt.num_tokens - entry.uncached
            entry.prefill_ns = round(1e9 * self.prefill_s(entry.uncached, cached)) if entry.uncached else 0
            self._priced_ns += entry.prefill_ns
        self._unpriced.clear()
        return self._priced_ns

    def send(self, entry: Sent, now: float) -> None:
        """Book a request that is sent."""
        if not self.unstarted:
            self.head_since_s = now
        self.sent[entry.prompt.number] = self.unstarted[entry.prompt.number] = entry
        self.tokens += entry.prompt.num_tokens
        self.prefill_tokens += entry.uncached
        self._unpriced[entry.prompt.number] = entry

    def start(self, number: int, now: float) -> None:
        """Book its first token; a second call changes nothing."""
        if self.unstarted and next(iter(self.unstarted)) == number:
            self.head_since_s = now
        entry = self.unstarted.pop(number, None)
        if entry is not None:
            self.prefill_tokens -= entry.uncached
            if self._unpriced.pop(number, None) is None:
                assert entry.prefill_ns is not None
                self._priced_ns -= entry.prefill_ns

    def end(self, number: int, now: float) -> None:
        """Book its end, whatever it was."""
        self.start(number, now)
        entry = self.sent.pop(number, None)
        if entry is not None:
            self.tokens -= entry.prompt.num_tokens


class Forecast(NamedTuple):
    """Predicted seconds of a request on a worker, and the tokens behind them.

    Attributes:
        queue_s: Until its prompt begins.
        fetch_s: To bring KV from a store, beside the queue.
        prefill_s: To compute what is left of it.
        matched: Prompt tokens believed to be in the worker's own cache.
        fetched: Further ones that would be brought.
    """

    queue_s: float
    fetch_s: float
    prefill_s: float
    matched: int
    fetched: int

    @property
    def ttft_s(self) -> float:
        """Fetching goes on while others compute, so the longer of the two counts."""
        return max(self.queue_s, self.fetch_s) + self.prefill_s


class View:
    """All that a router may look at while it chooses.

    Attributes:
        workers: Those that take this request, by number; at least one.
        knowledge: What is believed to be cached where.
        rng: The only source of chance.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        knowledge: Knowledge,
        rng: np.random.Generator,
        forecast: Callable[[Prompt, Worker, float, bool], Forecast] | None = None,
    ) -> None:
        self.workers = workers
        self.knowledge = knowledge
        self.rng = rng
        self._forecast = forecast

    def matched(self, prompt: Prompt, worker: Worker) -> int:
        """Tokens of the prompt believed to be in the worker's cache, in whole blocks."""
        if not self.knowledge.informs:
            return 0
        return self.knowledge.matched(prompt.digests(worker.block_size), worker.number) * worker.block_size

    def forecast(self, prompt: Prompt, worker: Worker, now: float, *, fetch: bool = True) -> Forecast:
        """What the request would meet at a worker; `fetch`: with what a store could bring, if there is one."""
        if self._forecast is not None:
            return self._forecast(prompt, worker, now, fetch)
        matched = min(self.matched(prompt, worker), prompt.num_tokens - 1)
        return Forecast(
            worker.queue_s(now), 0.0, worker.prefill_s(prompt.num_tokens - matched, matched), matched, 0
        )


class Choice(NamedTuple):
    """Where a request goes, and why in a word."""

    worker: Worker
    reason: str


class Router(Protocol):
    """Chooses a worker for each request. Options are dataclass fields; state is its own.

    Attributes:
        knows: Knowledge it is given unless the fleet's settings say otherwise: "none", "approximate" or "exact".
    """

    knows: ClassVar[str]

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        """One of `view.workers`; the request is sent there unless it is refused."""
        ...

    def sent(self, prompt: Prompt, worker: Worker, view: View, now: float) -> None:
        """The request goes to the worker; its book and the knowledge do not say so yet."""
        return None

    def started(self, prompt: Prompt, worker: Worker, now: float) -> None:
        """The first token of a request that was sent has passed by."""
        return None

    def ended(self, prompt: Prompt, worker: Worker, now: float) -> None:
        """A request that was sent has ended, or its worker has died."""
        return None
