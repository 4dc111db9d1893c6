"""A fleet of one is `simulate`; fleets conserve requests, tokens, bytes and blocks through joins and deaths."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine.step import StepPlan
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.fleet import (
    Arrivals,
    Change,
    FleetResult,
    Gaps,
    InstanceSpec,
    Level,
    LinkSpec,
    Promise,
    StoreSpec,
    run_fleet,
)
from pagedjax.sim.routing import ROUTERS, LoadAware
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

BLOCK = 4
COST = CostModel(HardwareSpec.read("h100-80gb"), read_shape("llama-3-8b"), BLOCK)
CONFIG = SchedulerConfig(max_num_seqs=4, token_budget=16)
MAX_LEN = 96


class Spec:
    """Makes instances and keeps their managers, to look at after the run."""

    def __init__(self) -> None:
        self.managers: list[PagedManager] = []

    def __call__(
        self, name: str, *, role: str = "mixed", num_blocks: int = 41, **manager: object
    ) -> InstanceSpec:
        def make(log: object) -> PagedManager:
            made = PagedManager(num_blocks=num_blocks, block_size=BLOCK, events=log, **manager)  # type: ignore[arg-type]
            self.managers.append(made)
            return made

        return InstanceSpec(name, make, COST, CONFIG, MAX_LEN, role)


def workload(seed: int, count: int = 20, gap_s: float = 0.02) -> Trace:
    """Prompts with shared stems, answers of up to 20 tokens, close enough together to preempt."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 999, 40) for _ in range(3)]
    rows, now = [], 0.0
    for _ in range(count):
        stem = stems[int(rng.integers(3))][: int(rng.integers(1, 40))]
        tokens = np.concatenate([stem, rng.integers(0, 999, 3)]).astype(np.int32)
        now += float(rng.exponential(gap_s))
        outputs = rng.integers(0, 999, int(rng.integers(1, 20)))
        given = {"output_ids": outputs} if rng.random() < 0.5 else {}
        rows.append(
            TraceRequest(
                now, len(tokens), len(outputs), token_ids=tokens, session=str(rng.integers(6)), **given
            )
        )
    return Trace("rows", "test", 1, True, lambda: iter(rows))


def assert_one_is_simulate(
    trace: Trace, make, config: SchedulerConfig, max_len: int, cost: CostModel
) -> None:  # type: ignore[no-untyped-def]
    """Equal plan hashes where every step is planned, equal records and totals where quiet ones are not."""
    for hashing in (True, False):
        alone = simulate(trace, make(None), cost, config, max_model_len=max_len, hash_plans=hashing)
        spec = InstanceSpec("only", make, cost, config, max_len)
        fleet = run_fleet(trace, [spec], router="cache-aware", hash_plans=hashing)
        assert [r.times for r in fleet.records] == alone.records
        totals = fleet.instances[0]
        assert (totals.plan_hash, totals.steps) == (alone.plan_hash, alone.num_steps)
        assert totals.busy_s == alone.busy_s and len(fleet.refused) == alone.refused
        assert bool(totals.plan_hash) == hashing
    return sum(r.num_preemptions for r in alone.records)


def test_fleet_of_one_is_simulate() -> None:
    preempted = 0
    for seed in range(50):
        kind = {"policy": ("lru", "lfu")[seed % 2], "partial": seed % 3, "prefix_caching": seed % 7 != 0}
        trace = workload(seed, count=8)

        def make(log, kind=kind):  # type: ignore[no-untyped-def]
            return PagedManager(num_blocks=31, block_size=BLOCK, events=log, **kind)

        preempted += assert_one_is_simulate(trace, make, CONFIG, MAX_LEN, COST)
    assert preempted > 0, "no workload preempted: the test compares too little"


@pytest.mark.full
@pytest.mark.parametrize("name", ["mooncake_conversation_trace", "mooncake_synthetic_trace"])
def test_fleet_of_one_is_simulate_on_mooncake(data_dir, name: str) -> None:  # type: ignore[no-untyped-def]
    trace = open_trace(data_dir / "data" / "traces" / f"{name}.jsonl.gz").head(2000)
    cost = CostModel(HardwareSpec.read("h100-80gb").idealised(4), read_shape("llama-3-8b"), 512)

    def make(log):  # type: ignore[no-untyped-def]
        return PagedManager(num_blocks=cost.kv_blocks(), block_size=512, events=log)

    assert_one_is_simulate(trace, make, SchedulerConfig(max_num_seqs=256, token_budget=8192), 131_072, cost)


@pytest.mark.parametrize("router", ROUTERS)
def test_equal_seeds_give_equal_runs_whatever_the_names(router: str) -> None:
    trace = workload(3, count=24, gap_s=0.004)
    names = [f"h{i}" for i in range(8)]
    runs = [
        run_fleet(trace, [Spec()(n) for n in order], router=router, seed=5)
        for order in (names, names, names[::-1])
    ]
    first, again, renamed = (run.to_dict() for run in runs)
    assert first == again and runs[0].records == runs[1].records
    other = dict(zip(names, names[::-1]))
    assert [replace(r, instance=other[r.instance]) for r in runs[0].records] == runs[2].records
    assert len({r.instance for r in runs[0].records}) > 1
    assert {k: v for k, v in first.items() if k != "instances"} == {
        k: v for k, v in renamed.items() if k != "instances"
    }


# ----------------------------------------------------------------- conservation


class Books:
    """Follows every plan: which positions of which request are computed, taken from a cache, and computed again."""

    def __init__(self) -> None:
        self.end: dict[tuple[int, str, int], int] = {}
        self.lives: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self.computed = self.taken = self.again = 0

    def __call__(self, number: int, plan: StepPlan) -> None:
        for row in plan.rows:
            name = row.seq.request.request_id
            key = (number, name, row.seq.seq_id)
            life = (row.seq.seq_id, row.seq.request.num_preemptions)
            if (number, *life) not in self.lives[name]:
                self.lives[name].add((number, *life))  # type: ignore[arg-type]
                self.again += self.end.get(key, 0)  # what it had is lost, what it begins with was taken
                self.taken += row.start
            else:
                assert row.start == self.end[key], "a life's positions follow each other"
            self.end[key] = row.start + row.num_tokens
            self.computed += row.num_tokens


def random_fleet(seed: int) -> tuple[FleetResult, Spec, Books, Trace]:
    """Mixed or disaggregated, with or without a store, with deaths, joins and leaves at random times."""
    rng = np.random.default_rng([seed, 7])
    spec, books = Spec(), Books()
    trace = workload(seed, count=30, gap_s=0.006)
    split = bool(rng.integers(2))
    roles = ["prefill", "decode"] * 2 if split else ["mixed"] * 3
    small = int(rng.integers(28, 60))
    instances = [spec(f"h{i}", role=role, num_blocks=small) for i, role in enumerate(roles)]
    span = 30 * 0.006
    changes = [
        Change(float(rng.uniform(0, span)), "die", str(rng.choice(["h0", "h1"]))),
        Change(float(rng.uniform(0, span)), "join", instance=spec("new0", role=roles[0], num_blocks=small)),
        Change(float(rng.uniform(0, span)), "join", instance=spec("new1", role=roles[-1], num_blocks=small)),
        Change(float(rng.uniform(0, span)), "leave", "h2"),
    ]
    store = StoreSpec(
        30 * BLOCK * COST.kv_bytes_per_token, 40 * BLOCK * COST.kv_bytes_per_token, pooled=seed % 3 > 0
    )
    # Slow wires: what is on its way when somebody dies is to be found.
    result = run_fleet(
        trace,
        instances,
        router=str(rng.choice(list(ROUTERS))),
        changes=changes,
        links=LinkSpec(1e8, 1e-3, ("whole", "layers")[seed % 2]),
        store=store if rng.integers(2) else None,
        seed=seed,
        on_plan=books,
        log_rates=True,
        skip=False,
    )
    return result, spec, books, trace


def check_conservation(seed: int) -> tuple[int, int, int, int]:
    result, spec, books, trace = random_fleet(seed)
    requests = list(trace)
    seen = sorted([r.number for r in result.records] + [r.number for r in result.refused])
    assert seen == list(range(len(requests))), "every request ends once, or is refused"
    assert all(r.reason for r in result.refused)
    for record in result.records:
        assert (record.times.num_input, record.times.num_output) == (
            requests[record.number].num_input,
            requests[record.number].num_output,
        )
        assert record.times.arrival_s <= record.times.first_token_s <= record.times.finished_s
    check_tokens(result, books)
    check_transfers(result)
    for manager in spec.managers:
        manager.check_invariants()
        assert manager.num_free == manager.num_usable, "no block is held after the end"
    rerouted = sum(r.lives - 1 for r in result.records)
    return rerouted, result.lost_bytes, sum(any(r.fetched) for r in result.records), books.again


def check_tokens(result: FleetResult, books: Books) -> None:
    """Computed + taken = needed by those that ended + lost in preemptions, deaths and refusals on the way."""
    numbers = {totals.name: i for i, totals in enumerate(result.instances)}
    needed, final = 0, set()
    for record in result.records:
        prompt, output, name = record.times.num_input, record.times.num_output, str(record.number)
        needed += prompt + output - 1  # the last token's KV is never computed
        if record.decode_instance:
            needed += prompt  # once where it was computed, once where it was decoded
        for place in filter(None, (record.instance, record.decode_instance)):
            lives = [key for key in books.end if key[:2] == (numbers[place], name)]
            final.add(max(lives, key=lambda key: key[2]))
    lost = sum(end for key, end in books.end.items() if key not in final)
    assert books.computed + books.taken == needed + books.again + lost
    assert books.computed == sum(totals.computed_tokens for totals in result.instances)


def check_transfers(result: FleetResult) -> None:
    """No link carries more than it can, bytes sent arrive or are lost with who died; rates times seconds are bytes."""
    assert result.rates is not None
    assert result.sent_bytes == result.received_bytes + result.lost_bytes
    now: dict[int, tuple[float, float]] = {}
    moved: dict[int, float] = defaultdict(float)
    paths = {t.number: t for _, t, _ in result.rates}
    for at, transfer, rate in result.rates:
        since, old = now.get(transfer.number, (at, 0.0))
        moved[transfer.number] += old * (at - since)
        now[transfer.number] = (at, rate)
    for number, transfer in paths.items():
        if not transfer.left and not now[number][1]:
            assert moved[number] == pytest.approx(transfer.num_bytes, rel=1e-9, abs=1)
    running: dict[int, float] = {}
    for (at, transfer, rate), (following, _, _) in pairwise([*result.rates, (np.inf, None, 0.0)]):  # type: ignore[list-item]
        running[transfer.number] = rate
        if following > at:  # all changes of one moment are in
            load: dict[str, float] = defaultdict(float)
            limits = {link.name: link.bytes_per_s for n in running for link in paths[n].path}
            for n, r in running.items():
                for link in paths[n].path:
                    load[link.name] += r
            assert all(load[name] <= limits[name] * (1 + 1e-9) for name in load)


def test_fleets_conserve() -> None:
    totals = np.sum([check_conservation(seed) for seed in range(16)], axis=0)
    assert all(totals > 0), f"rerouted, lost bytes, fetched, again: {totals}: the test sees too little"


@pytest.mark.full
def test_fleets_conserve_on_many() -> None:
    for seed in range(16, 250):
        check_conservation(seed)


# ---------------------------------------------------------------- hand-over, store


def one_by_one(lengths: list[tuple[int, int]], gap_s: float = 5.0) -> Trace:
    """Requests far apart, all prompts beginnings of one text."""
    text = np.arange(5000, dtype=np.int32)
    rows = [TraceRequest(gap_s * i, n, m, token_ids=text[:n]) for i, (n, m) in enumerate(lengths)]
    return Trace("rows", "test", 1, True, lambda: iter(rows))


def large(name: str, role: str = "mixed", num_blocks: int = 400, node: str = "") -> InstanceSpec:
    cost = replace(COST, block_size=16)

    def make(log: object) -> PagedManager:
        return PagedManager(num_blocks=num_blocks, block_size=16, events=log)  # type: ignore[arg-type]

    return InstanceSpec(
        name, make, cost, SchedulerConfig(max_num_seqs=8, token_budget=2048), 6000, role, node
    )


def test_a_handed_prompt_is_sent_once_and_hit_whole() -> None:
    """Bytes on the wire are the prompt's less what the decoder has, which computes only the broken block's rest."""
    for handover in ("whole", "layers"):
        result = run_fleet(
            one_by_one([(1000, 5), (2000, 5)]),
            [large("p", "prefill"), large("d", "decode")],
            links=LinkSpec(1e9, 1e-3, handover),
        )
        decoder = result.instances[1]
        have = 1000 // 16 * 16
        assert result.sent_bytes == (1000 + 2000 - have) * COST.kv_bytes_per_token == result.links["out:p"]
        assert decoder.received_bytes == result.received_bytes == result.sent_bytes
        rest = sum(n + 1 - n // 16 * 16 for n in (1000, 2000))  # the tail, and the first token
        assert decoder.computed_tokens == rest + 2 * 3


def test_layers_hide_behind_the_computation() -> None:
    """With a wire as fast as the computation, all but the last layer's share arrives while the prompt is computed."""
    trace = one_by_one([(2000, 2)])
    prefill_s = run_fleet(trace, [large("m")]).records[0].times.ttft_s
    num_bytes = 2000 * COST.kv_bytes_per_token
    wire = num_bytes / prefill_s
    seconds = {}
    for handover in ("whole", "layers"):
        specs = [large("p", "prefill"), large("d", "decode")]
        times = run_fleet(trace, specs, links=LinkSpec(wire, 0.0, handover)).records[0].times
        assert times.ttft_s == pytest.approx(
            prefill_s, rel=0.01
        )  # the first token is the prompt's instance's
        seconds[handover] = times.finished_s - times.first_token_s
    step = run_fleet(trace, [large("m")]).records[0].times
    decode_s = step.finished_s - step.first_token_s
    assert seconds["whole"] - decode_s == pytest.approx(prefill_s, rel=0.05)
    assert seconds["layers"] - decode_s == pytest.approx(prefill_s / 32, rel=0.05)  # the last layer's share


def test_what_is_handed_over_stays_until_it_is_sent() -> None:
    """A second prompt waits for room that a slow transfer still holds, and does not take it."""
    specs = [large("p", "prefill", num_blocks=80), large("d", "decode")]
    text = np.arange(5000, dtype=np.int32)
    rows = [TraceRequest(0.001 * i, 1000, 2, token_ids=text[1000 * i : 1000 * (i + 1)]) for i in range(2)]
    result = run_fleet(Trace("rows", "test", 1, True, lambda: iter(rows)), specs, links=LinkSpec(1e8, 0.0))
    first, second = sorted(result.records, key=lambda r: r.number)
    sent_s = 1000 * COST.kv_bytes_per_token / 1e8
    assert second.times.admitted_s == pytest.approx(first.times.first_token_s + sent_s, abs=1e-6)
    assert {r.times.reason for r in result.records} == {"length"}


@pytest.mark.parametrize(("bus", "fetched"), [(25e9, True), (2e6, False)])
def test_a_store_is_asked_where_that_is_sooner(bus: float, fetched: bool) -> None:
    """The pool holds one prompt, memory all: what comes again is fetched over a quick bus, not over a slow one."""
    hardware = replace(COST.hardware, host_bytes_per_s=bus)
    spec = large("m", num_blocks=127)
    spec = replace(spec, cost=replace(spec.cost, hardware=hardware))  # type: ignore[type-var]
    text = np.arange(8000, dtype=np.int32)
    prompts = [text[:2000], text[4000:6000], text[:2000]]
    rows = [TraceRequest(1000.0 * i, 2000, 2, token_ids=p) for i, p in enumerate(prompts)]
    trace = Trace("rows", "test", 1, True, lambda: iter(rows))
    bare = run_fleet(trace, [spec])
    stored = run_fleet(trace, [spec], store=StoreSpec(memory_bytes=4000 * COST.kv_bytes_per_token))
    assert [r.times.num_cached for r in bare.records] == [0, 0, 0]
    last = stored.records[-1]
    assert last.fetched == ((1984, 0, 0) if fetched else (0, 0, 0))
    assert last.times.num_cached == (1984 if fetched else 0)
    faster = last.times.ttft_s < bare.records[-1].times.ttft_s
    assert faster == fetched


def test_tiers_are_near_and_far() -> None:
    """Own memory, another node's, a disk: each is found where it is, and the pool holds a block once."""
    size = 1000 * COST.kv_bytes_per_token // 16 * 16
    text = np.arange(9000, dtype=np.int32)
    order = [0, 1, 2, 0]
    rows = [
        TraceRequest(10.0 * i, 1000, 2, token_ids=text[1000 * k : 1000 * k + 1000])
        for i, k in enumerate(order)
    ]
    trace = Trace("rows", "test", 1, True, lambda: iter(rows))
    sunk = run_fleet(trace, [large("m", num_blocks=70)], store=StoreSpec(size, 4 * size)).records[-1]
    assert sunk.fetched == (0, 0, 992)
    pair = [large("a", num_blocks=70), large("b", num_blocks=70)]
    rows[:] = [replace(rows[0], arrival_s=10.0 * i) for i in range(2)]
    for pooled, expected in ((True, (0, 992, 0)), (False, (0, 0, 0))):
        result = run_fleet(trace, pair, store=StoreSpec(4 * size, pooled=pooled))
        assert [r.instance for r in result.records] == ["a", "b"]
        assert result.records[-1].fetched == expected
    near = run_fleet(trace, [replace(spec, node="one") for spec in pair], store=StoreSpec(4 * size))
    assert near.records[-1].fetched == (992, 0, 0)


# ------------------------------------------------------------------ arrivals, promise


def test_closed_loops_keep_so_many_under_way() -> None:
    trace = workload(1, count=40)
    for kind, many in (("fleet", 3), ("instance", 6)):
        result = run_fleet(trace, [Spec()("a"), Spec()("b")], arrivals=Arrivals(kind, concurrency=3))
        assert len(result.records) == 40
        steps: dict[float, int] = defaultdict(int)
        for record in result.records:
            steps[record.times.arrival_s] += 1
            steps[record.times.finished_s] -= 1
        under_way = np.cumsum([steps[at] for at in sorted(steps)])
        assert (under_way[: -many - 1] == many).all() and under_way[-1] == 0


def test_scaled_times_are_the_traces() -> None:
    trace = workload(1, count=10, gap_s=1.0)
    result = run_fleet(trace, [Spec()("a")], arrivals=Arrivals(scale=8.0))
    arrivals = sorted(r.times.arrival_s for r in result.records)
    assert arrivals == [r.arrival_s / 8 for r in trace]


def test_what_would_miss_the_promise_is_refused_at_once() -> None:
    trace = workload(2, count=60, gap_s=0.001)
    loose = run_fleet(trace, [Spec()("a"), Spec()("b")], router="least-requests")
    limit = loose.summary().ttft_s[50]
    strict = run_fleet(
        trace, [Spec()("a"), Spec()("b")], router="least-requests", promise=Promise(ttft_s=limit, reject=True)
    )
    assert strict.refusals()["ttft"] == len(strict.refused) == 60 - len(strict.records)
    assert 0 < len(strict.refused) < 60
    good = strict.summary(ttft_limit_s=limit).goodput
    assert good > loose.summary(ttft_limit_s=limit).goodput
    none = run_fleet(trace, [Spec()("a")], promise=Promise(tbt_s=1e-4, reject=True))
    assert none.refusals() == {"tbt": 60} and none.to_dict()["hit_by_token"] is None


def test_prompts_too_long_and_fleets_gone_are_refused_by_name() -> None:
    rows = [TraceRequest(0.0, 500, 2), TraceRequest(0.0, 10, 2), TraceRequest(9.0, 10, 2)]
    trace = Trace("rows", "test", 0, True, lambda: iter(rows))
    result = run_fleet(trace, [Spec()("a")], changes=[Change(5.0, "leave", "a")])
    assert [(r.number, r.reason) for r in result.refused] == [(0, "too long"), (2, "no instance")]
    assert result.instances[0].alive_s == 5.0
    # F081: which prefixes are equal nobody said.
    out = result.to_dict()
    assert out["hit_by_token"] is out["instances"][0]["hit_by_token"] is result.hit_by_token is None
    assert out["instances"][0]["cached_tokens"] is result.records[0].times.num_cached is None


def test_a_join_takes_those_that_waited() -> None:
    rows = [TraceRequest(1.0, 10, 2)]
    trace = Trace("rows", "test", 0, True, lambda: iter(rows))
    changes = [Change(0.5, "die", "a"), Change(3.0, "join", instance=Spec()("b"))]
    (record,) = run_fleet(trace, [Spec()("a")], changes=changes).records
    assert record.instance == "b" and record.times.admitted_s == 3.0 and record.lives == 1


def test_reports_arrive_after_their_delay() -> None:
    """The second request is known to be cached only if the report of the first had the time to arrive."""
    trace = one_by_one([(200, 2), (200, 2)], gap_s=5.0)
    expected = []
    for delay in (0.0, 4.0, 6.0):
        result = run_fleet(trace, [large("a"), large("b")], router="load-aware", delay_s=delay)
        expected.append(result.records[-1].expected)
    assert expected == [192, 192, 0]


# --------------------------------------------------------------------------- books


def test_gaps_and_levels() -> None:
    gaps = Gaps()
    assert gaps.percentile(50) is None
    gaps.add(0.01, 60)
    gaps.add_each(np.array([0.1, 0.1, 5.0]), 10)
    assert [gaps.percentile(p) for p in (50, 80, 99)] == pytest.approx([0.01, 0.1, 5.0], rel=0.01)
    level = Level(most=4, width_s=1.0)
    level.set(2, 0.5)
    level.set(1, 1.5)
    level.set(0, 7.5)  # 4 bins of 2 s
    assert level.width_s == 2.0
    assert level.means() == pytest.approx([(2 * 1.0 + 0.5) / 2, 1.0, 1.0, 0.75])


def test_totals_add_up() -> None:
    trace = chat(20, turns=4, user_tokens=30, output_tokens=10, seed=3)
    specs = [large("a"), large("b")]
    result = run_fleet(trace, specs, router="session")
    out = result.to_dict(ttft_limit_s=1.0)
    requests = list(trace)
    assert out["requests"] == len(requests) == sum(t["routed"] for t in out["instances"])
    assert sum(t["prompt_tokens"] for t in out["instances"]) == sum(r.num_input for r in requests)
    assert out["hit_by_token"] == result.summary().hit_by_token > 0
    spread = [t["busy_s"] / t["alive_s"] for t in out["instances"]]
    assert out["imbalance_busy"] == pytest.approx(max(spread) / np.mean(spread))
    assert sum(x * out["under_way"]["bin_s"] for x in out["under_way"]["mean"]) == pytest.approx(
        sum(r.times.finished_s - r.times.arrival_s for r in result.records)
    )


class ToTheLast(LoadAware):
    """A router from outside: the last worker."""

    def choose(self, prompt, view, now):  # type: ignore[no-untyped-def]
        return super().choose(prompt, view, now)._replace(worker=view.workers[-1], reason="last")


def test_a_router_from_outside_is_found_by_module_and_class() -> None:
    trace = workload(0, count=5)
    result = run_fleet(
        trace, [Spec()("a"), Spec()("b")], router=f"{__name__}:ToTheLast", options={"beta": 2.0}
    )
    assert {(r.instance, r.reason) for r in result.records} == {("b", "last")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instances": []}, "none given"),
        ({"knowledge": "perfect"}, "knowledge=perfect: must be one of none, approximate, exact"),
        ({"delay_s": -1.0}, "delay_s=-1.0"),
        ({"decode_router": "kv-overlap"}, "nothing is known of what decoders have cached"),
        ({"changes": [Change(0.1, "die", "zoe")]}, "no instance zoe is alive then"),
        ({"changes": [Change(0.0, "join", instance=Spec()("a"))]}, "instance a: is there already"),
        ({"instances": [Spec()("a"), Spec()("p", role="prefill")]}, "need each other"),
        (
            {"instances": [Spec()("a"), large("b")], "store": StoreSpec(1 << 30)},
            "a store wants one block size",
        ),
    ],
)
def test_bad_fleets_are_named(change: dict[str, object], words: str) -> None:
    arguments = {"instances": [Spec()("a")], **change}
    with pytest.raises(ValueError, match=words):
        run_fleet(workload(0, count=5), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinkSpec(bytes_per_s=0), "links.bytes_per_s=0: must be positive"),
        (lambda: LinkSpec(handover="parts"), "must be one of whole, layers"),
        (lambda: StoreSpec(disk_bytes=5), "needs memory_bytes"),
        (lambda: Arrivals("fleet"), "must be at least 1 in a closed loop"),
        (lambda: Arrivals(scale=0), "arrivals.scale=0"),
        (lambda: Promise(reject=True), "needs a promise"),
        (lambda: Change(1.0, "join"), "only a join, brings an instance"),
        (lambda: Change(-1.0, "die", "a"), "must be a time from 0"),
        (lambda: Change(1.0, "die"), "must name an instance"),
        (lambda: replace(large("a"), role="both"), "role=both: must be one of mixed"),
        (lambda: replace(large("a"), role="decode", cost=lambda plan: 1.0), "needs a cost model"),
    ],
)
def test_bad_settings_are_named(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()
