"""Routers that weigh what is believed cached against load: SGLang's two, Dynamo's, production-stack's, Mooncake's."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from pagedjax.sim.routing.plain import least
from pagedjax.sim.routing.protocol import Choice, Prompt, Router, View, Worker


def _within(name: str, value: float, least_value: float, most: float = math.inf) -> None:
    if not least_value <= value <= most:
        raise ValueError(f"{name}={value}: must be from {least_value:g} to {most:g}")


def _best_match(prompt: Prompt, view: View) -> tuple[Worker, float]:
    """The worker with the longest match, and the matched share of the prompt."""
    pairs = [(view.matched(prompt, worker), worker) for worker in view.workers]
    matched, worker = max(pairs, key=lambda pair: (pair[0], -pair[1].number))
    return worker, matched / prompt.num_tokens


def _smallest(view: View) -> Worker:
    """The worker that is believed to hold least."""
    return min(view.workers, key=lambda w: (view.knowledge.size(w.number) * w.block_size, w.number))


@dataclass
class CacheAwareProbability(Router):
    """SGLang's gateway as it came with v0.4: with a probability to the longest match, else to the shortest queue.

    Source: sgl-project/sglang pull request 2114 and its `router.rs`: a matched share above `threshold` goes to the
    worker of the longest match, else the worker with the smallest tree is taken (most room in its cache). Defaults are
    the source's. The source compares characters in radix trees and trims them once a minute; ours compares whole blocks
    and trims at once. Which of several longest matches wins is open there (a hash map's order); ours is the first.

    Attributes:
        threshold: Matched share of the prompt from which the match counts.
        probability: Of looking at the cache at all.
    """

    knows: ClassVar[str] = "approximate"
    threshold: float = 0.5
    probability: float = 1.0

    def __post_init__(self) -> None:
        _within("threshold", self.threshold, 0, 1)
        _within("probability", self.probability, 0, 1)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        if float(view.rng.random()) >= self.probability:
            return Choice(least(view.workers), "load")
        worker, share = _best_match(prompt, view)
        return Choice(worker, "match") if share > self.threshold else Choice(_smallest(view), "room")


@dataclass
class CacheAware(Router):
    """SGLang's gateway in its later form: the shortest queue while load is out of balance, else the cache.

    Source: sgl-project/sglang pull request 2170. Out of balance: most - least > `balance_abs` and most > least ×
    `balance_rel`, in requests under way. Defaults are those that the gateway prints at its start (0.3, 64, 1.5); at
    first they were 0.5, 32 and 1.0001. What `CacheAwareProbability` says of characters, trimming and ties holds here.

    Attributes:
        threshold: Matched share of the prompt from which the match counts.
        balance_abs / balance_rel: See above.
    """

    knows: ClassVar[str] = "approximate"
    threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5

    def __post_init__(self) -> None:
        _within("threshold", self.threshold, 0, 1)
        _within("balance_abs", self.balance_abs, 0)
        _within("balance_rel", self.balance_rel, 1)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        loads = [worker.in_flight for worker in view.workers]
        if max(loads) - min(loads) > self.balance_abs and max(loads) > min(loads) * self.balance_rel:
            return Choice(least(view.workers), "load")
        worker, share = _best_match(prompt, view)
        return Choice(worker, "match") if share > self.threshold else Choice(_smallest(view), "room")


@dataclass
class KvOverlap(Router):
    """Dynamo's KV router: least cost = weight × prompt blocks still to compute + blocks in use, softmax by temperature.

    Source: ai-dynamo/dynamo, `kv_router/scheduler.rs` and docs (`--kv-overlap-score-weight` 1, `--router-temperature`
    0). Prompt blocks: those of all prompts that wait there, and of this one without its overlap. Blocks in use: of all
    requests under way there, this one included, equal blocks once; blocks of answers are not tracked (the source's
    default). Costs are scaled to [0, 1] before the softmax. Ties at temperature 0 go to the smaller tree, then to the
    first; the source gives a set of ties and, in later versions, prints tree sizes beside them.

    Attributes:
        weight: Of the prompt blocks.
        temperature: 0 takes the least cost.
    """

    knows: ClassVar[str] = "exact"
    weight: float = 1.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _within("weight", self.weight, 0)
        _within("temperature", self.temperature, 0)
        self._active: dict[int, Counter[bytes]] = {}
        self._tails: Counter[int] = Counter()

    def _blocks_with(self, prompt: Prompt, worker: Worker) -> int:
        """Blocks in use at the worker if it took this request too."""
        active = self._active.get(worker.number, Counter())
        digests = prompt.digests(worker.block_size)
        fresh = len(digests) - sum(map(active.__contains__, digests))
        tail = len(digests) * worker.block_size < prompt.num_tokens
        return len(active) + self._tails[worker.number] + fresh + tail

    def _book(self, prompt: Prompt, worker: Worker, step: int) -> None:
        active = self._active.setdefault(worker.number, Counter())
        digests = prompt.digests(worker.block_size)
        if step > 0:
            active.update(digests)
        else:
            for digest in digests:
                left = active[digest] - 1
                if left:
                    active[digest] = left
                else:
                    del active[digest]
        self._tails[worker.number] += step * (len(digests) * worker.block_size < prompt.num_tokens)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        costs = []
        for worker in view.workers:
            uncached = prompt.num_tokens - view.matched(prompt, worker)
            waiting = (worker.prefill_tokens + uncached) / worker.block_size
            costs.append(self.weight * waiting + self._blocks_with(prompt, worker))
        return Choice(view.workers[self._pick(costs, view)], "cost")

    def _pick(self, costs: list[float], view: View) -> int:
        low, high = min(costs), max(costs)
        if not self.temperature:
            ties = [i for i, cost in enumerate(costs) if cost == low]
            return min(ties, key=lambda i: (view.knowledge.size(view.workers[i].number), i))
        scale = (high - low) or 1.0
        weights = [math.exp(-(cost - low) / scale / self.temperature) for cost in costs]
        drawn = float(view.rng.random()) * sum(weights)
        for i, weight in enumerate(weights):
            drawn -= weight
            if drawn < 0:
                return i
        return len(costs) - 1

    def sent(self, prompt: Prompt, worker: Worker, view: View, now: float) -> None:
        self._book(prompt, worker, 1)

    def ended(self, prompt: Prompt, worker: Worker, now: float) -> None:
        self._book(prompt, worker, -1)


@dataclass
class LoadAware(Router):
    """production-stack's `loadaware`: matched share of the prompt less β × load relative to the mean.

    Source: vllm-project/production-stack pull request 1035: score = matched / prompt tokens − β × (load − mean) /
    max(1, mean), load in requests under way, β = 1. Ties are not described; ours go to the fewest requests.

    Attributes:
        beta: How much a load of twice the mean counts, in whole prompts matched.
    """

    knows: ClassVar[str] = "exact"
    beta: float = 1.0

    def __post_init__(self) -> None:
        _within("beta", self.beta, 0)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        mean = sum(worker.in_flight for worker in view.workers) / len(view.workers)

        def score(worker: Worker) -> tuple[float, int, int]:
            share = view.matched(prompt, worker) / prompt.num_tokens
            relative = (worker.in_flight - mean) / max(1.0, mean)
            return share - self.beta * relative, -worker.in_flight, -worker.number

        return Choice(max(view.workers, key=score), "score")


@dataclass
class Mooncake(Router):
    """Mooncake's Conductor: the least predicted time to the first token, transfers included.

    Source: Algorithm 1 of arXiv 2407.00079 (§6.1): for each instance queue + prefill on its own match, or, where the
    best prefix to be had is more than `balancing` × its own, transfer + queue + prefill on that one. Queue: the sum of
    predicted prefills that wait. Prediction: the source fits a model to measurements, ours asks the cost model that the
    instance runs on. The threshold's value is not printed; 1 always weighs a transfer, which is then made only where it
    is predicted to pay (the rule of §6.2). Ties by number.

    Attributes:
        balancing: Ratio of the best prefix to the instance's own above which a transfer is weighed.
    """

    knows: ClassVar[str] = "exact"
    balancing: float = 1.0

    def __post_init__(self) -> None:
        _within("balancing", self.balancing, 1)

    def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
        best: tuple[float, int, Worker, str] | None = None
        for worker in view.workers:
            forecast = view.forecast(prompt, worker, now)
            total = forecast.matched + forecast.fetched
            if forecast.fetched and total <= self.balancing * forecast.matched:
                forecast = view.forecast(prompt, worker, now, fetch=False)
            found = (forecast.ttft_s, worker.number, worker, "transfer" if forecast.fetched else "ttft")
            if best is None or found[:2] < best[:2]:
                best = found
        assert best is not None
        return Choice(best[2], best[3])
