"""Brute force beside the routers: every decision anew from the whole history, by definition and without any index."""

# mypy: disable-error-code="no-untyped-def,no-any-return"
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Any

from pagedjax.sim.routing import Prompt, Worker


@dataclass
class Sending:
    """One request that was sent, and what was believed of it then: tokens cached, nanoseconds to compute the rest."""

    prompt: Prompt
    worker: int
    at: float
    have: int
    seconds: int
    started: float | None = None
    ended: float | None = None


class Judge:
    """Keeps what happened, and says what each router has to answer."""

    def __init__(self, name: str, knowledge: str, block: int, options: dict[str, Any]) -> None:
        self.name, self.knowledge, self.block, self.options = name, knowledge, block, options
        self.history: list[Sending] = []
        self.events: list[tuple[int, Any]] = []
        self.waits: list[tuple[float, bytes, int, float]] = []  # when, prefix, worker, time to first token
        self.decoded: list[float] = []  # seconds from first to last token, in order of ending
        self.last = -1

    def open(self, worker: int) -> list[Sending]:
        return [s for s in self.history if s.worker == worker and s.ended is None]

    def load(self, worker: Worker) -> int:
        return len(self.open(worker.number))

    def matched(self, prompt: Prompt, worker: int) -> int:
        tokens = prompt.tokens.tolist()
        if self.knowledge == "approximate":
            best = 0
            for other in [s.prompt.tokens.tolist() for s in self.history if s.worker == worker]:
                pairs = list(zip(tokens, other))
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                best = max(best, same // self.block * self.block)
            return best
        resident, digests = self.resident(worker), prompt.digests(self.block)
        return next((i for i, d in enumerate(digests) if d not in resident), len(digests)) * self.block

    def resident(self, worker: int) -> list[bytes]:
        copies: list[bytes] = []
        for event, key in [(e, key) for number, e in self.events if number == worker for key in e.keys]:
            copies.append(key) if event.kind == "stored" else copies.remove(key)
        return copies

    def known(self, worker: int) -> list[bytes]:
        """Blocks believed there, the one that would go first first."""
        if self.knowledge != "approximate":
            return list(dict.fromkeys(self.resident(worker)))
        order: list[bytes] = []
        for s in [s for s in self.history if s.worker == worker]:
            fresh = s.prompt.digests(self.block)[::-1]
            order = [d for d in order if d not in fresh] + fresh
        return order

    def queue_s(self, worker: Worker, now: float) -> float:
        sent = [s for s in self.history if s.worker == worker.number]
        if not (left := [s for s in sent if s.started is None and s.ended is None]):
            return 0.0
        before = sent[: sent.index(left[0])]
        since = max([left[0].at, *(min(t for t in (s.started, s.ended) if t is not None) for s in before)])
        return (sum(s.seconds for s in left) - min(int((now - since) * 1e9), left[0].seconds)) / 1e9

    def choose(self, prompt: Prompt, workers: list[Worker], now: float, rng: Any) -> int:
        return getattr(self, "_" + self.name.replace("-", "_"))(prompt, workers, now, rng)

    def _least(self, workers: list[Worker]) -> int:
        return min((self.load(w), w.number) for w in workers)[1]

    def _random(self, prompt, workers, now, rng):
        return workers[int(rng.integers(len(workers)))].number

    def _round_robin(self, prompt, workers, now, rng):
        after = [w.number for w in workers if w.number > self.last]
        self.last = min(after) if after else workers[0].number
        return self.last

    def _least_requests(self, prompt, workers, now, rng):
        return self._least(workers)

    def _least_tokens(self, prompt, workers, now, rng):
        return min((sum(s.prompt.num_tokens for s in self.open(w.number)), w.number) for w in workers)[1]

    @staticmethod
    def _around(key: bytes, workers: list[Worker], replicas: int) -> list[int]:
        names = [(w.number, f"{w.number}:{r}".encode()) for w in workers for r in range(replicas)]
        hashed = [(blake2b(name, digest_size=8).digest(), n) for n, name in names]
        start = blake2b(key, digest_size=8).digest()
        return [n for p, n in sorted(hashed, key=lambda pair: (pair[0] < start, pair))]

    def _session(self, prompt, workers, now, rng):
        if not prompt.session:
            return self._least(workers)
        return self._around(prompt.session.encode(), workers, 160)[0]

    def _prefix_hash(self, prompt, workers, now, rng):
        if not (digests := prompt.digests(self.block)[: self.options.get("blocks", 1)]):
            return self._least(workers)
        loads = {w.number: self.load(w) for w in workers}
        most = math.ceil(self.options.get("load_factor", 1.25) * (sum(loads.values()) + 1) / len(workers))
        return next(n for n in self._around(digests[-1], workers, 256) if loads[n] + 1 <= most)

    def _cached(self, prompt: Prompt, workers: list[Worker], threshold: float) -> int:
        longest, first = max((self.matched(prompt, w.number), -w.number) for w in workers)
        if longest / prompt.num_tokens > threshold:
            return -first
        return min((len(self.known(w.number)), w.number) for w in workers)[1]

    def _cache_aware_v1(self, prompt, workers, now, rng):
        if float(rng.random()) >= self.options.get("probability", 1.0):
            return self._least(workers)
        return self._cached(prompt, workers, 0.5)

    def _cache_aware(self, prompt, workers, now, rng):
        loads = [self.load(w) for w in workers]
        if max(loads) - min(loads) > self.options["balance_abs"] and max(loads) > 1.5 * min(loads):
            return self._least(workers)
        return self._cached(prompt, workers, 0.3)

    def _kv_overlap(self, prompt, workers, now, rng):
        costs = []
        for w in workers:
            waiting = sum(s.prompt.num_tokens - s.have for s in self.open(w.number) if s.started is None)
            prefill = (waiting + prompt.num_tokens - self.matched(prompt, w.number)) / self.block
            here = [s.prompt for s in self.open(w.number)] + [prompt]
            blocks = {d for p in here for d in p.digests(self.block)}
            costs.append(prefill + len(blocks) + sum(p.num_tokens % self.block > 0 for p in here))
        if not (temperature := self.options.get("temperature", 0.0)):
            return min((c, len(self.known(w.number)), w.number) for c, w in zip(costs, workers))[2]
        span = (max(costs) - min(costs)) or 1.0
        weights = [math.exp((min(costs) - c) / span / temperature) for c in costs]
        at = float(rng.random()) * sum(weights)
        sums = [sum(weights[: i + 1]) for i in range(len(weights))]
        return workers[next((i for i, s in enumerate(sums) if at < s), len(workers) - 1)].number

    def _load_aware(self, prompt, workers, now, rng):
        mean = sum(map(self.load, workers)) / len(workers)
        share = {w.number: self.matched(prompt, w.number) / prompt.num_tokens for w in workers}
        relative = {w.number: (self.load(w) - mean) / max(1.0, mean) for w in workers}
        return -max((share[w.number] - relative[w.number], -self.load(w), -w.number) for w in workers)[2]

    def _mooncake(self, prompt, workers, now, rng):
        have = {w.number: min(self.matched(prompt, w.number), prompt.num_tokens - 1) for w in workers}
        rest = {w.number: w.prefill_s(prompt.num_tokens - have[w.number], have[w.number]) for w in workers}
        return min((self.queue_s(w, now) + rest[w.number], w.number) for w in workers)[1]

    def _preble(self, prompt, workers, now, rng):
        window = self.options["window_s"]
        mean = sum(self.decoded) / max(len(self.decoded), 1)
        recent = [s for s in self.history if s.at >= now - window]
        own = {w.number: [s for s in recent if s.worker == w.number] for w in workers}
        load = {n: sum(s.seconds for s in sends) / 1e9 + len(sends) * mean for n, sends in own.items()}
        match = {w.number: self.matched(prompt, w.number) for w in workers}

        def explore(offered: list[Worker]) -> int:
            costs = []
            for w in offered:
                have = min(match[w.number], prompt.num_tokens - 1)
                known = self.known(w.number)
                new = math.ceil((prompt.num_tokens - have) / self.block)
                over = max(len(known) + new - (w.num_blocks - 1), 0)
                uses = Counter(d for s in own[w.number] for d in s.prompt.digests(self.block))
                evicted = sum(uses[d] for d in known[:over]) * self.block * w.prefill_s(2048, 0) / 2048
                prefill = w.prefill_s(prompt.num_tokens - have, have)
                costs.append((load[w.number] + evicted + prefill, w.number))
            return min(costs)[1]

        longest = max(match.values())
        if 2 * longest <= prompt.num_tokens:
            return explore(workers)
        chosen = min((load[n], n) for n in match if match[n] == longest)[1]
        prefix = prompt.digests(self.block)[longest // self.block - 1]
        times = [(at, t) for at, p, n, t in self.waits if (p, n) == (prefix, chosen) and at >= now - window]
        halves = [[t for at, t in times if (at >= now - window / 2) == late] for late in (False, True)]
        others = [w for w in workers if w.number != chosen]
        if others and all(halves) and fmean(halves[1]) >= 2 * fmean(halves[0]):
            self.waits = [x for x in self.waits if (x[1], x[2]) != (prefix, chosen)]
            return explore(others)
        lightest = min((load[n], n) for n in load)[1]
        hands_on = load[chosen] == max(load.values()) > self.options["balance"] * load[lightest]
        return lightest if hands_on else chosen
