"""Preble's router: exploit a long match, explore by cost otherwise, and move prefixes whose queue grows."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import ClassVar

from pagedjax.sim.routing.knowledge import Knowledge
from pagedjax.sim.routing.protocol import Choice, Prompt, Router, View, Worker

_SAMPLE_TOKENS = 2048  # prompt from which seconds per token are taken


@dataclass
class Preble(Router):
    """Preble's E2: exploit where more of the prompt is cached than not, else explore by load, eviction and prefill.

    Source: Srivatsa et al., ICLR'25, arXiv 2407.00023, §3, and `global_scheduler_with_time.py` of WukLab/preble.
    Exploit: of the workers with the longest match the one with least load. Explore: the least L + M + P, where L =
    seconds sent to the worker within the window (prefill of uncached tokens, and the mean decode seconds seen), M =
    seconds to compute anew what this prompt would evict, by its uses in the window, P = prefill of what is not cached.
    Rebalancing: an exploited worker that carries the most, more than `balance` × the least, hands the request to the
    least. Replication: where the time to first token of a prefix has doubled from one half of the window to the other,
    it is explored on another worker. The window of 3 minutes and the doubling are the source's; it prints no value for
    `balance` (its code has 15, and the call commented out); its tree is of tokens, ours of blocks; decode seconds come
    from what the router saw end.

    Attributes:
        window_s: Over which load, uses and times are kept.
        balance: Load over the least load from which the request is handed on.
    """

    knows: ClassVar[str] = "approximate"
    window_s: float = 180.0
    balance: float = 2.0

    def __post_init__(self) -> None:
        if not self.window_s > 0:
            raise ValueError(f"window_s={self.window_s}: must be positive; try 180")
        if not self.balance >= 1:
            raise ValueError(f"balance={self.balance}: must be at least 1; try 2")
        self._window: deque[tuple[float, int, int, list[bytes]]] = (
            deque()
        )  # time, worker, ns of prefill, blocks
        self._prefill_ns: Counter[int] = Counter()
        self._count: Counter[int] = Counter()
        self._uses: dict[int, Counter[bytes]] = {}
        self._changes: Counter[int] = Counter()  # of a worker's uses
        self._sums: dict[int, tuple[tuple[int, int] | None, list[int]]] = {}
        self._first: dict[int, tuple[float, bytes]] = {}  # request → when it was sent, the prefix it matched
        self._began: dict[int, float] = {}
        self._ttft: dict[tuple[bytes, int], deque[tuple[float, float]]] = {}
        self._decode_s = 0.0
        self._decoded = 0
        self._token_s: dict[int, float] = {}

    # ------------------------------------------------------------- the window

    def _forget(self, now: float) -> None:
        while self._window and self._window[0][0] < now - self.window_s:
            _, number, prefill_ns, digests = self._window.popleft()
            self._prefill_ns[number] -= prefill_ns
            self._count[number] -= 1
            self._changes[number] += 1
            uses = self._uses[number]
            for digest in digests:
                uses[digest] -= 1
                if not uses[digest]:
                    del uses[digest]

    def _load_s(self, number: int) -> float:
        """L: seconds of work sent within the window."""
        decode = self._decode_s / self._decoded if self._decoded else 0.0
        return self._prefill_ns[number] / 1e9 + self._count[number] * decode

    def _eviction_s(self, prompt: Prompt, worker: Worker, view: View, matched: int) -> float:
        """M: seconds to compute anew what the prompt's new blocks would push out, once per use in the window."""
        new = -(-(prompt.num_tokens - matched) // worker.block_size)
        over = view.knowledge.size(worker.number) + new - (worker.num_blocks - 1)
        if over <= 0:
            return 0.0
        token_s = self._token_s.get(worker.number)
        if token_s is None:
            token_s = self._token_s[worker.number] = worker.prefill_s(_SAMPLE_TOKENS, 0) / _SAMPLE_TOKENS
        return self._lost_uses(worker.number, over, view.knowledge) * worker.block_size * token_s

    def _lost_uses(self, number: int, count: int, knowledge: Knowledge) -> int:
        """Uses within the window of the `count` blocks that would be evicted first.

        Sums are kept until they may have changed: a request is weighed against every worker and sent to one.
        """
        size = knowledge.size(number)
        state = self._changes[number], size
        known, sums = self._sums.get(number, (None, []))
        if known != state or not knowledge.by_sending or len(sums) < min(count, size):
            oldest = knowledge.oldest(number, count + count // 4 + 64)
            sums = list(accumulate(map(self._uses.get(number, Counter()).get, oldest, repeat(0))))
            self._sums[number] = state, sums
        return sums[min(count, len(sums)) - 1] if sums else 0

    # ------------------------------------------------------------- the choice

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        self._forget(now)
        matches = {worker.number: view.matched(prompt, worker) for worker in view.workers}
        longest = max(matches.values())
        loads = {worker.number: self._load_s(worker.number) for worker in view.workers}
        if longest > prompt.num_tokens - longest:
            holders = [worker for worker in view.workers if matches[worker.number] == longest]
            worker = min(holders, key=lambda w: (loads[w.number], w.number))
            reason = "exploit"
            lightest = min(view.workers, key=lambda w: (loads[w.number], w.number))
            key = (prompt.digests(worker.block_size)[longest // worker.block_size - 1], worker.number)
            others = [w for w in view.workers if w is not worker]
            if others and self._has_doubled(key, now):
                del self._ttft[key]
                worker, reason = self._explore(prompt, view, others, matches, loads), "replicate"
            elif loads[worker.number] == max(loads.values()) > self.balance * loads[lightest.number]:
                worker, reason = lightest, "rebalance"
        else:
            worker, reason = self._explore(prompt, view, view.workers, matches, loads), "explore"
        return Choice(worker, reason)

    def _explore(
        self,
        prompt: Prompt,
        view: View,
        workers: Sequence[Worker],
        matches: dict[int, int],
        loads: dict[int, float],
    ) -> Worker:
        def cost(worker: Worker) -> tuple[float, int]:
            matched = min(matches[worker.number], prompt.num_tokens - 1)
            prefill = worker.prefill_s(prompt.num_tokens - matched, matched)
            evicted = self._eviction_s(prompt, worker, view, matched)
            return loads[worker.number] + evicted + prefill, worker.number

        return min(workers, key=cost)

    def _has_doubled(self, key: tuple[bytes, int], now: float) -> bool:
        """Whether the time to first token of a prefix at a worker doubled between the halves of the window."""
        times = self._ttft.get(key)
        while times and times[0][0] < now - self.window_s:
            times.popleft()
        if not times:
            self._ttft.pop(key, None)
            return False
        middle = now - self.window_s / 2
        early = [ttft for at, ttft in times if at < middle]
        late = [ttft for at, ttft in times if at >= middle]
        if not early or not late:
            return False
        return math.fsum(late) / len(late) >= 2 * math.fsum(early) / len(early)

    # ------------------------------------------------------------ what passes by

    def sent(self, prompt: Prompt, worker: Worker, view: View, now: float) -> None:
        matched = view.matched(prompt, worker)
        cached = min(matched, prompt.num_tokens - 1)
        prefill_ns = round(1e9 * worker.prefill_s(prompt.num_tokens - cached, cached))
        digests = prompt.digests(worker.block_size)
        self._window.append((now, worker.number, prefill_ns, digests))
        self._prefill_ns[worker.number] += prefill_ns
        self._count[worker.number] += 1
        self._changes[worker.number] += 1
        self._uses.setdefault(worker.number, Counter()).update(digests)
        if matched:
            self._first[prompt.number] = (now, digests[matched // worker.block_size - 1])

    def started(self, prompt: Prompt, worker: Worker, now: float) -> None:
        self._began[prompt.number] = now
        sent = self._first.pop(prompt.number, None)
        if sent is not None:
            self._ttft.setdefault((sent[1], worker.number), deque()).append((now, now - sent[0]))

    def ended(self, prompt: Prompt, worker: Worker, now: float) -> None:
        self._first.pop(prompt.number, None)
        began = self._began.pop(prompt.number, None)
        if began is not None:
            self._decode_s += now - began
            self._decoded += 1
