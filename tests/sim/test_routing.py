"""Every router beside a brute-force judge; what routers know; one table of tests, filled from ROUTERS."""

import copy

import numpy as np
import pytest
from routing_judge import Judge, Sending

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine.step import StepPlan
from pagedjax.sim.fleet import Change, InstanceSpec, run_fleet
from pagedjax.sim.routing import (
    ROUTERS,
    ApproximateKnowledge,
    Choice,
    ExactKnowledge,
    Prompt,
    Router,
    View,
    Worker,
    make_router,
)
from pagedjax.sim.trace import Trace, TraceRequest

BLOCK = 4
# Options under which a few dozen requests reach every branch.
OPTIONS = {
    "cache-aware-v1": {"probability": 0.7},
    "cache-aware": {"balance_abs": 2},
    "prefix-hash": {"blocks": 2, "load_factor": 1.1},
    "preble": {"window_s": 12.0, "balance": 1.2},
}
VARIANTS = [(name, OPTIONS.get(name, {})) for name in ROUTERS] + [("kv-overlap", {"temperature": 0.5})]


def _seconds(plan: StepPlan) -> float:
    return 0.2 + 0.05 * sum(row.num_tokens for row in plan.rows)


def _spec(name: str, num_blocks: int = 18) -> InstanceSpec:
    return InstanceSpec(
        name,
        lambda log: PagedManager(num_blocks=num_blocks, block_size=BLOCK, events=log),
        _seconds,
        SchedulerConfig(max_num_seqs=4, token_budget=16),
        64,
    )


def _workload(seed: int, count: int = 24) -> Trace:
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 999, 40) for _ in range(3)]
    rows, now = [], 0.0
    for i in range(count):
        stem = stems[int(rng.integers(3))][: int(rng.choice([0, 6, 16, 32, 32, 40]))]
        tokens = np.concatenate([stem, rng.integers(0, 999, int(rng.integers(1, 8)))]).astype(np.int32)
        session = str(rng.integers(5)) if rng.random() < 0.8 else ""
        now += float(rng.exponential(1.0 if i < count // 2 else 0.3))  # a queue grows in the second half
        rows.append(
            TraceRequest(now, len(tokens), int(rng.integers(1, 9)), token_ids=tokens, session=session)
        )
    return Trace("rows", "test", 1, True, lambda: iter(rows))


def _judged(inner: Router, judge: Judge, verdicts: list[tuple[str, int, int]]) -> type[Router]:
    """A router that answers as `inner` does, and notes (reason, its choice, the judge's) each time."""

    class Judged(Router):
        knows = judge.knowledge

        def choose(self, prompt: Prompt, view: View, now: float) -> Choice:
            rng = copy.deepcopy(view.rng)
            choice = inner.choose(prompt, view, now)
            right = judge.choose(prompt, list(view.workers), now, rng)
            verdicts.append((choice.reason, choice.worker.number, right))
            return choice

        def sent(self, prompt: Prompt, worker: Worker, view: View, now: float) -> None:
            matched = judge.matched(prompt, worker.number)
            have = min(matched, prompt.num_tokens - 1)
            seconds = round(1e9 * worker.prefill_s(prompt.num_tokens - have, have))
            inner.sent(prompt, worker, view, now)
            judge.history.append(Sending(prompt, worker.number, now, have, seconds))

        def started(self, prompt: Prompt, worker: Worker, now: float) -> None:
            inner.started(prompt, worker, now)
            sending = next(s for s in judge.history[::-1] if s.prompt is prompt)
            sending.started = now
            full = -(-sending.have // BLOCK)
            if full:
                judge.waits.append((now, prompt.digests(BLOCK)[full - 1], worker.number, now - sending.at))

        def ended(self, prompt: Prompt, worker: Worker, now: float) -> None:
            inner.ended(prompt, worker, now)
            sending = next(s for s in judge.history[::-1] if s.prompt is prompt)
            sending.ended = now
            if sending.started is not None:
                judge.decoded.append(now - sending.started)

    return Judged


def _verdicts(monkeypatch, name: str, options: dict[str, float], seed: int) -> list[tuple[str, int, int]]:  # type: ignore[no-untyped-def]
    inner = make_router(name, options)
    judge = Judge(name, inner.knows, BLOCK, options)
    report = ExactKnowledge.report

    def noted(self, worker, events):  # type: ignore[no-untyped-def]
        judge.events += [(worker, event) for event in events]
        report(self, worker, events)

    monkeypatch.setattr(ExactKnowledge, "report", noted)
    verdicts: list[tuple[str, int, int]] = []
    changes = [Change(6.0, "die", "a"), Change(9.0, "join", instance=_spec("d"))] if seed % 2 else []
    result = run_fleet(
        _workload(seed),
        [_spec(n) for n in "abc"],
        router=_judged(inner, judge, verdicts),
        seed=seed,
        changes=changes,
    )
    assert len(result.records) == 24
    monkeypatch.undo()
    return verdicts


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_judge_agrees(monkeypatch, name: str, options: dict[str, float]) -> None:  # type: ignore[no-untyped-def]
    verdicts = [v for seed in range(8) for v in _verdicts(monkeypatch, name, options, seed)]
    assert [ours for _, ours, _ in verdicts] == [right for _, _, right in verdicts]
    assert len({ours for _, ours, _ in verdicts}) > 1
    reached = {
        "prefix-hash": {"prefix", "bounded load", "no prefix"},
        "session": {"session", "no session"},
        "cache-aware-v1": {"load", "match", "room"},
        "cache-aware": {"load", "match", "room"},
        "preble": {"exploit", "explore", "rebalance", "replicate"},
    }
    assert {reason for reason, _, _ in verdicts} >= reached.get(name, set())


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_judge_agrees_on_200_workloads(monkeypatch, name: str, options: dict[str, float]) -> None:  # type: ignore[no-untyped-def]
    for seed in range(8, 200):
        verdicts = _verdicts(monkeypatch, name, options, seed)
        assert [ours for _, ours, _ in verdicts] == [right for _, _, right in verdicts], seed


@pytest.mark.parametrize("name", ROUTERS)
def test_docstring_cites_its_source(name: str) -> None:
    assert "Source: " in (ROUTERS[name].__doc__ or "")


def test_exact_knowledge_follows_a_manager() -> None:
    """What the events say is what `peek` finds, through evictions; a guess from the prompts is not."""
    from pagedjax.cache import EventLog

    rng = np.random.default_rng(0)
    log = EventLog()
    manager = PagedManager(num_blocks=12, block_size=BLOCK, events=log)
    exact, guess = ExactKnowledge(), ApproximateKnowledge(400)
    exact.joined(3, BLOCK)
    guess.joined(3, BLOCK)
    stems = [rng.integers(0, 99, 20).tolist() for _ in range(4)]
    wrong = 0
    for number in range(60):
        tokens = [*stems[int(rng.integers(4))][: int(rng.integers(5, 20))], 100 + number]
        prompt = Prompt(number, np.array(tokens, np.int32))
        chain = TokenChain(tokens, block_size=BLOCK)
        digests = prompt.digests(BLOCK)
        full = (len(tokens) - 1) // BLOCK  # a hit leaves the last token to compute
        assert min(exact.matched(digests, 3), full) * BLOCK == manager.peek(chain)
        wrong += min(guess.matched(digests, 3), full) * BLOCK != manager.peek(chain)
        hit = manager.begin(number, chain)
        assert manager.reserve(number, len(tokens) - hit.num_tokens)
        manager.commit(number, len(tokens), float(number))
        manager.release(number)
        exact.report(3, list(log.events))
        log.events.clear()
        guess.sent(digests, 3, float(number))
        assert exact.size(3) == len(manager.resident())
    assert wrong > 0, "nothing was evicted: the test compares too little"
    exact.gone(3)
    exact.joined(3, BLOCK)
    assert exact.size(3) == 0


def test_guesses_are_forgotten_by_number_and_by_age() -> None:
    digests = [bytes([i]) for i in range(6)]
    small = ApproximateKnowledge(4 * BLOCK + 3)
    small.joined(0, BLOCK)
    small.sent(digests, 0, 0.0)
    assert small.matched(digests, 0) == 4 and list(small.oldest(0, 1)) == [
        digests[3]
    ]  # tails go before heads
    aged = ApproximateKnowledge(400, ttl_s=10.0)
    for worker in range(2):
        aged.joined(worker, BLOCK)
    aged.sent(digests[:2], 0, 0.0)
    aged.sent(digests[2:], 1, 9.0)
    assert aged.matched(digests, 0) == 2
    aged.sent(digests[2:], 1, 10.0)
    assert aged.matched(digests, 0) == 0


@pytest.mark.parametrize(("gap_s", "expected"), [(50.0, 8), (100.0, 0)])
def test_a_guess_is_as_old_when_the_next_request_comes_as_the_time_says(gap_s: float, expected: int) -> None:
    """After a pause, too, in which nothing was sent."""
    prompt = np.arange(9, dtype=np.int32)
    rows = [TraceRequest(at, 9, 1, token_ids=prompt) for at in (0.0, gap_s)]
    trace = Trace("rows", "test", 1, True, lambda: iter(rows))
    found = run_fleet(trace, [_spec("a")], router="cache-aware", ttl_s=99.0).records
    assert [record.expected for record in found] == [0, expected]


def test_equal_costs_of_kv_overlap_go_to_the_smaller_tree() -> None:
    workers = [Worker(i, str(i), "mixed", BLOCK, 50, lambda count, before: 1.0) for i in range(2)]
    knowledge = ApproximateKnowledge(400)
    for worker in range(2):
        knowledge.joined(worker, BLOCK)
    knowledge.sent([b"x"], 0, 0.0)
    view = View(workers, knowledge, np.random.default_rng(0))
    prompt = Prompt(0, np.arange(9, dtype=np.int32))
    assert make_router("kv-overlap").choose(prompt, view, 0.0).worker.number == 1


@pytest.mark.parametrize(
    ("router", "options", "words"),
    [
        ("nearest", {}, "must be one of random, round-robin"),
        ("cache-aware", {"treshold": 0.5}, "cache-aware has threshold, balance_abs, balance_rel"),
        ("random", {"seed": 1}, "random has none"),
        ("cache-aware", {"threshold": 2.0}, "threshold=2.0: must be from 0 to 1"),
        ("cache-aware", {"balance_abs": 2.5}, "must be a whole number"),
        ("load-aware", {"beta": "1"}, "must be a number"),
        ("prefix-hash", {"load_factor": 0.5}, "must be at least 1"),
        ("preble", {"window_s": 0.0}, "must be positive"),
    ],
)
def test_bad_routers_are_named(router: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_router(router, options)
