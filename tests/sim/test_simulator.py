"""The simulator is the engine: same plans, and books that add up under every pressure."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.cache import INDEXES, POLICIES, PagedManager, ReservationManager
from pagedjax.config import KV_DTYPES, CacheConfig, SchedulerConfig
from pagedjax.engine import Engine, StepRecord
from pagedjax.engine.request import SamplingParams
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.step import StepPlan
from pagedjax.kernels import KVLayout
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.cost import CostModel, HardwareSpec, Work, calibrate
from pagedjax.sim.fleet.file import InstanceTable
from pagedjax.sim.metrics import RequestRecord, summarize
from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.requests import PlayRequests
from pagedjax.sim.runner import VirtualClock
from pagedjax.sim.simulator import Beams, hash_plan, simulate
from pagedjax.sim.synth import agents, chat, target_sharing
from pagedjax.sim.tokens import Prompts
from pagedjax.sim.trace import Trace, TraceRequest, open_trace, write_trace

ROOT = Path(__file__).resolve().parents[2]
A100, H100 = (ROOT / "configs" / "hardware" / f"{name}.toml" for name in ("a100-40gb", "h100-80gb"))
CONFIG = SchedulerConfig(max_num_seqs=4, token_budget=16)
NUM_BLOCKS, BLOCK, MAX_LEN = 41, 4, 96
PLAIN_POLICIES = [name for name in POLICIES if name != "belady"]  # which has to know the future


def _second(plan: StepPlan) -> float:
    return 1.0


def _trace(rows: list[TraceRequest], granularity: int = 1) -> Trace:
    return Trace("rows", "test", granularity, True, lambda: iter(rows))


@pytest.fixture(scope="module")
def real_runner():
    """The real runner on the tiny model, compiled once for all workloads."""
    jax = pytest.importorskip("jax")
    from judges import compile_quickly

    from pagedjax.kernels import KVLayout
    from pagedjax.runtime import Buckets, JaxRunner
    from pagedjax.testing import tiny_config, tiny_params

    model = tiny_config()
    layout = KVLayout(model.num_layers, NUM_BLOCKS, BLOCK, model.num_kv_heads, model.head_dim, "float32")
    buckets = Buckets(CONFIG, decode_sizes=1, prefill_sizes=1)
    params = jax.tree.map(jax.device_put, tiny_params(model))
    runner = JaxRunner(model, params, layout, CONFIG, max_model_len=MAX_LEN, buckets=buckets)
    compile_quickly(runner)
    return runner


def _workload(seed: int) -> list[tuple[float, list[int], int]]:
    """(step of arrival, prompt, answer length); prompts share stems and together overflow the pool."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 256, 40).tolist() for _ in range(3)]
    rows = []
    for _ in range(int(rng.integers(3, 9))):
        prompt = stems[int(rng.integers(3))][: int(rng.integers(1, 40))] + rng.integers(0, 256, 3).tolist()
        rows.append((float(rng.integers(0, 12)), prompt, int(rng.integers(1, 30))))
    return sorted(rows, key=lambda row: row[0])


def _manager(seed: int) -> PagedManager:
    """Every index and policy, with and without parts of blocks and dedup, in turn."""
    index = tuple(INDEXES)[seed % len(INDEXES)]
    return PagedManager(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        index=index,
        policy=PLAIN_POLICIES[seed % len(PLAIN_POLICIES)],
        partial=seed % 2 * 2 if index != "table" else 0,
        dedup=seed % 5 == 0,
        prefix_caching=seed % 7 != 0,
    )


def _equal_plans(runner, seed: int) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    rows, manager, clock = _workload(seed), _manager(seed), VirtualClock()
    hashes: list[bytes] = []

    def on_step(record: StepRecord) -> None:
        hashes.append(hash_plan(record.plan))

    engine = Engine(manager, runner, CONFIG, max_model_len=MAX_LEN, clock=clock, on_step=on_step)
    waiting, answers, preemptions = list(rows), {}, 0
    while waiting or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, waiting[0][0])
        while waiting and waiting[0][0] <= clock.now:
            _, prompt, length = waiting.pop(0)
            engine.add(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        # The clock must stand at the step's end when outputs are made, as a simulated one does.
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
                preemptions += output.num_preemptions
        clock.now += 1.0
    assert len(answers) == len(rows)
    trace = _trace(
        [
            TraceRequest(
                t, len(p), len(answers[i]), token_ids=np.array(p, np.int32), output_ids=np.array(answers[i])
            )
            for i, (t, p, _) in enumerate(rows)
        ]
    )
    ours: list[bytes] = []

    def watch(plan: StepPlan) -> dict[str, float]:
        ours.append(hash_plan(plan))
        return {}

    twin = _manager(seed)
    result = simulate(trace, twin, _second, CONFIG, max_model_len=MAX_LEN, watch=watch)
    assert ours == hashes, f"workload {seed}: first difference at step {_first_difference(ours, hashes)}"
    assert vars(twin.stats) == vars(manager.stats)
    assert sum(r.num_preemptions for r in result.records) == preemptions
    return len(hashes), preemptions


def _first_difference(a: list[bytes], b: list[bytes]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("first", [0])
def test_plans_equal_the_real_engines(real_runner, first: int) -> None:  # type: ignore[no-untyped-def]
    totals = [_equal_plans(real_runner, seed) for seed in range(first, first + 12)]
    assert sum(p for _, p in totals) > 0, "no workload preempted: the test compares too little"


@pytest.mark.full
@pytest.mark.parametrize("first", range(12, 200, 47))
def test_plans_equal_the_real_engines_on_200_workloads(real_runner, first: int) -> None:  # type: ignore[no-untyped-def]
    for seed in range(first, first + 47):
        _equal_plans(real_runner, seed)


class _Books:
    """Checks each plan against the one before: lives of a sequence are contiguous, blocks fit the pool."""

    def __init__(self, manager: PagedManager) -> None:
        self.manager = manager
        self.end: dict[int, int] = defaultdict(int)
        self.lives: dict[int, int] = {}
        self.computed = self.taken = self.lost = 0

    def __call__(self, plan: StepPlan) -> dict[str, float]:
        for row in plan.rows:
            key = row.seq.seq_id
            life = row.seq.request.num_preemptions
            if self.lives.get(key) != life:
                self.lives[key] = life
                self.lost += self.end[key]  # what it had is gone, what it starts with was hit
                self.taken += row.start
            else:
                assert row.start == self.end[key]
            self.end[key] = row.start + row.num_tokens
            self.computed += row.num_tokens
        used = {block for table in plan.tables for block in np.unique(table).tolist()} - {0}
        assert len(used) <= self.manager.num_usable
        assert self.manager.num_free >= 0
        return {}


def test_B113_computed_and_hit_tokens_are_the_tokens_needed() -> None:
    rng = np.random.default_rng(0)
    rows = [
        TraceRequest(0.0, 20, 12, token_ids=rng.integers(0, 9000, 20).astype(np.int32)) for _ in range(1024)
    ]
    trace = _trace(rows)
    config = SchedulerConfig(max_num_seqs=1024, token_budget=2048)
    per_request = -(-32 // 4)
    small = PagedManager(num_blocks=68 * per_request + 1, block_size=4)
    books = _Books(small)
    tight = simulate(trace, small, _second, config, max_model_len=64, watch=books)
    assert len(tight.records) == 1024 and tight.summary().preemptions > 0
    needed = 1024 * (20 + 12 - 1)  # the last token's KV is never computed
    assert books.computed + books.taken == needed + books.lost
    assert books.taken == small.stats.hit_tokens + small.stats.resumed_hit_tokens
    large = PagedManager(num_blocks=1024 * per_request + 1, block_size=4)
    roomy = simulate(trace, large, _second, config, max_model_len=64)
    assert roomy.summary().preemptions == 0
    assert tight.summary().requests_per_s <= roomy.summary().requests_per_s


@pytest.mark.parametrize("skip", [False, True])
def test_F080_a_last_chunk_of_one_token_is_no_decode(skip: bool) -> None:
    cost = CostModel(HardwareSpec.read(A100), read_shape("opt-13b"), 16)
    manager = PagedManager(num_blocks=40, block_size=16)
    config = SchedulerConfig(max_num_seqs=4, token_budget=4)
    trace = _trace([TraceRequest(0.0, 21, 14)], 0)
    (record,) = simulate(trace, manager, cost, config, max_model_len=MAX_LEN, skip=skip).records
    assert (round(record.ttft_s, 4), round(record.tpot_s, 4)) == (0.1576, 0.0263)


def _skips_alike(seed: int) -> tuple[int, int]:
    """A random workload under random settings, with and without planning the steps where nothing happens.

    Returns: preemptions, and steps that were not planned.
    """
    rng = np.random.default_rng(seed)

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    spec = replace(HardwareSpec.read(one(A100, H100)), shared_read=one(1.0, 0.45))
    block_size, max_seqs = one(1, 4, 8, 16), one(1, 4, 8, 8)
    cost = CostModel(spec, read_shape(one("llama-3-8b", "opt-13b")), block_size)
    budget = one(max_seqs, max_seqs + 1, 4 * max_seqs, 300)
    host = one(0, 0, 60)
    chunked = one(True, True, False)
    config = SchedulerConfig(
        max_num_seqs=max_seqs,
        token_budget=budget,
        chunk_tokens=one(0, 1, budget) if chunked else 0,
        chunked_prefill=chunked,
        preemption=one("swap", "auto") if host else "recompute",
    )
    gap = one(0.002, 0.02, 0.3)
    rows = [
        TraceRequest(gap * t, len(p), n - 1, token_ids=np.array(p, np.int32))
        for t, p, n in sorted(_workload(seed) + _workload(seed + 1000), key=lambda row: row[0])
    ]
    rows += [TraceRequest(20 * gap + float(rng.random()), int(rng.integers(1, 90)), int(rng.integers(0, 60)))]
    until = one(math.inf, math.inf, 0.5)
    settings: dict[str, Any] = dict(
        index=one(*INDEXES),
        policy=one(*PLAIN_POLICIES),
        partial=one(0, 2) if block_size > 2 else 0,
        prefix_caching=one(True, True, True, False),
        host_blocks=host,
        num_blocks=1 + -(-one(100, 100, 250) // block_size),
    )
    loop = one(0, 0, 0, 1, 5)
    runs, stats = [], []
    for skip in (False, True):
        manager = PagedManager(block_size=block_size, **settings)
        planned = []
        step = Scheduler.schedule

        def counted(self: Scheduler, step: Any = step, planned: Any = planned) -> StepPlan:
            planned.append(self.step)
            return step(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "schedule", counted)
            times = dict(max_model_len=MAX_LEN, until_s=until, in_flight=loop)
            run = simulate(_trace(rows), manager, cost, config, skip=skip, **times)  # type: ignore[arg-type]
        manager.check_invariants()
        runs.append((run, len(planned)))
        stats.append(vars(manager.stats))
    (plain, all_steps), (skipped, some_steps) = runs
    if loop and until == math.inf and plain.records:  # never more than so many at once
        marks = sorted(
            [(r.arrival_s, 1) for r in plain.records] + [(r.finished_s, -1) for r in plain.records]
        )
        levels = np.cumsum([change for _, change in marks])
        assert levels.max() <= min(loop, len(plain.records)), f"workload {seed}"
    assert plain.records == skipped.records, f"workload {seed}"
    assert stats[0] == stats[1], f"workload {seed}"
    assert (plain.num_steps, plain.refused) == (skipped.num_steps, skipped.refused), f"workload {seed}"
    assert skipped.batch == pytest.approx(plain.batch), f"workload {seed}"
    return sum(r.num_preemptions for r in plain.records), all_steps - some_steps


def test_F080_skipped_steps_change_nothing_on_30_workloads() -> None:
    counts = np.array([_skips_alike(seed) for seed in range(30)])
    assert (counts.sum(axis=0) > 30).all(), f"{counts.sum(axis=0)}: too few preemptions or skipped steps"


@pytest.mark.full
def test_F080_skipped_steps_change_nothing_on_300_workloads() -> None:
    for seed in range(30, 300):
        _skips_alike(seed)


def test_beams_draw_share_and_end() -> None:
    trace = target_sharing(4, prompt_tokens=40, output_tokens=12, share=0.0, seed=4)
    saved = []
    for gap in (0.1, 3.0):
        manager = PagedManager(num_blocks=400, block_size=8)
        result = simulate(
            trace,
            manager,
            _second,
            CONFIG,
            max_model_len=96,
            beams=Beams(3, gap),
            watch=lambda plan: {"named": plan.num_named_blocks, "held": plan.num_held_blocks},
        )
        manager.check_invariants()
        assert sum(r.num_output for r in result.records) == 3 * sum(r.num_output for r in trace)
        assert manager.num_free == manager.num_usable
        saved.append(1 - result.sampled["held"] / result.sampled["named"])
    assert min(saved) > 0 and max(saved) < 2 / 3


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_preempted_requests_swap_on_the_clock(mode: str) -> None:
    spec = HardwareSpec.read(A100)
    cost = CostModel(spec, read_shape("opt-13b"), BLOCK)
    rows = [TraceRequest(0.0, 20, 40) for _ in range(6)]
    config = SchedulerConfig(max_num_seqs=6, token_budget=128, preemption=mode)
    spans = []
    for transfer_s in (spec.transfer_s, 100 * spec.transfer_s):
        slow = CostModel(replace(spec, transfer_s=transfer_s), cost.model, BLOCK)
        manager = PagedManager(num_blocks=41, block_size=BLOCK, host_blocks=80)
        result = simulate(_trace(rows, 0), manager, slow, config, max_model_len=MAX_LEN)
        assert len(result.records) == 6 and sum(r.num_preemptions for r in result.records) > 0
        spans.append(result.summary().span_s)
        if mode == "swap":
            assert result.num_swaps > 0
    assert spans[1] > spans[0] if mode == "swap" else spans[1] >= spans[0]


def test_infinite_pool_hits_what_the_replay_counts() -> None:
    """One after another, the engine hits what `replay` counts under the engine's rules."""
    for trace in (chat(15, seed=1), agents(2, turns=8, seed=1, tool_tokens=200, system_tokens=60)):
        spaced = [
            TraceRequest(1e6 * i, r.num_input, r.num_output, token_ids=r.token_ids, output_ids=r.output_ids)
            for i, r in enumerate(trace)
        ]
        manager = PagedManager(num_blocks=40_000, block_size=16)
        config = SchedulerConfig(max_num_seqs=4, token_budget=512)
        result = simulate(_trace(spaced), manager, _second, config, max_model_len=10**6)
        counted = replay(_trace(spaced), 16, Unbounded(), insert="prompt+output").engine_tokens
        # The last answered token's KV is never computed, so a block it fills is not in the cache.
        assert counted - 16 * len(spaced) <= manager.stats.hit_tokens <= counted
        assert sum(r.num_cached for r in result.records) == manager.stats.hit_tokens > 0


def test_granules_become_tokens_that_hit_alike() -> None:
    ids = [[7, 8, 9], [7, 8, 11], [7, 12]]
    rows = [TraceRequest(1e6 * i, 8 * len(g) - 3, 2, granule_ids=np.array(g)) for i, g in enumerate(ids)]
    trace = _trace(rows, granularity=8)
    manager = PagedManager(num_blocks=100, block_size=4)
    simulate(trace, manager, _second, CONFIG, max_model_len=64)
    assert manager.stats.hit_tokens == replay(trace, 4, Unbounded()).engine_tokens == 16 + 8
    bare = _trace([TraceRequest(float(i), 8, 2) for i in range(5)], granularity=0)
    manager = PagedManager(num_blocks=100, block_size=4)
    simulate(bare, manager, _second, CONFIG, max_model_len=64)
    assert manager.stats.hit_tokens == 0
    assert len(Prompts(bare).tokens(3, next(iter(bare)))) == 8


@pytest.mark.parametrize("rule", ["max", "pow2", "oracle"])
def test_reservations_run_under_the_same_engine(rule: str) -> None:
    trace = target_sharing(20, prompt_tokens=20, output_tokens=6, seed=2).with_arrivals(5.0)
    manager = ReservationManager(num_blocks=257, block_size=1, rule=rule, max_tokens=64)
    result = simulate(trace, manager, _second, CONFIG, max_model_len=64, watch=lambda plan: _shares(manager))
    assert len(result.records) == 20
    parts = [v for k, v in result.sampled.items() if k != "total"]
    assert sum(parts) == pytest.approx(result.sampled["total"])
    assert (result.sampled["internal"] > 0) == (rule != "oracle")


def _shares(manager: ReservationManager) -> dict[str, float]:
    waste = manager.waste()
    names = ("token_states", "reservation", "internal", "external", "free", "total")
    return {name: float(getattr(waste, name)) for name in names}


def test_samples_share_and_copy() -> None:
    trace = target_sharing(3, prompt_tokens=18, output_tokens=5, share=0.0, seed=4)
    manager = PagedManager(num_blocks=200, block_size=8)
    result = simulate(trace, manager, _second, CONFIG, max_model_len=64, n=3)
    # A sample that ends with its first token writes nothing, so copies nothing.
    assert manager.stats.copies == sum(2 for r in trace if r.num_output > 1) > 0
    assert len(result.records) == 3
    assert all(r.num_output % 3 == 0 for r in result.records)


def test_a_prompt_that_can_never_run_is_counted() -> None:
    rows = [TraceRequest(0.0, 500, 2), TraceRequest(0.0, 10, 2)]
    result = simulate(_trace(rows, 0), _manager(0), _second, CONFIG, max_model_len=MAX_LEN)
    assert (result.refused, len(result.records)) == (1, 1)


def test_times_add_up() -> None:
    rows = [TraceRequest(0.5, 20, 3), TraceRequest(0.5, 20, 3), TraceRequest(50.0, 4, 1)]
    config = SchedulerConfig(max_num_seqs=4, token_budget=20)
    manager = PagedManager(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    result = simulate(_trace(rows, 0), manager, _second, config, max_model_len=MAX_LEN)
    first, second, third = result.records
    # One prompt fills the budget: the second waits a step. Three tokens: prefill and two decodes.
    assert (first.queue_s, first.prefill_s, first.finished_s) == (0.0, 1.0, 3.5)
    assert second.queue_s == 1.0 and second.ttft_s == second.queue_s + second.prefill_s
    assert (third.arrival_s, third.ttft_s, third.normalized_s) == (50.0, 1.0, 1.0)
    assert first.tpot_s == 1.0


def test_summary_counts_goodput_and_refuses_nothing() -> None:
    records = [RequestRecord(0.0, 1.0, 2.0, 2.0 + k, 10, 11, 5, 0, "length") for k in (1, 10)]
    summary = summarize(records, tpot_limit_s=0.5)
    assert (summary.span_s, summary.goodput, summary.hit_by_token) == (12.0, 1 / 12, 0.5)
    with pytest.raises(ValueError, match="none given"):
        summarize([])


@pytest.mark.parametrize("skip", [True, False])
def test_F081_hits_of_a_trace_without_identity_are_unknown_in_python(skip: bool) -> None:
    rows = [TraceRequest(float(i), 20, 3) for i in range(4)]
    config = SchedulerConfig(max_num_seqs=4, token_budget=20)
    manager = PagedManager(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    result = simulate(_trace(rows, 0), manager, _second, config, max_model_len=MAX_LEN, skip=skip)
    assert [r.num_cached for r in result.records] == [None] * 4
    assert result.summary().hit_by_token is None
    # One request of unknown hits leaves those of all unknown; all known ones add up.
    mixed = [
        replace(result.records[0], num_cached=5),
        *result.records,
        replace(result.records[0], num_cached=5),
    ]
    assert summarize(mixed).hit_by_token is None
    assert summarize([replace(r, num_cached=5) for r in result.records]).hit_by_token == 0.25


# ------------------------------------------------------------------------- cost model


def test_shapes_match_the_published_sizes() -> None:
    opt = read_shape("opt-13b")
    assert opt.kv_bytes_per_token(2) == 2 * 5120 * 40 * 2  # 800 KB, PagedAttention §3
    for name, billions in (("opt-13b", 13.0), ("llama-13b", 13.0), ("llama-3-8b", 8.0)):
        assert read_shape(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.03)
    # All and active; of gpt-oss its model card leaves the input embedding out of the active, as here.
    for name, billions, active in (
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("gpt-oss-120b", 116.83, 5.13),
    ):
        model = read_shape(name)
        assert model.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3), name
        assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.03), name
    with pytest.raises(
        ValueError, match=r"gpt: must be a file, or one of deepseek-67b, .*gpt-oss-120b, llama-13b"
    ):
        read_shape("gpt")


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "hardware").glob("*.toml")), ids=lambda p: p.stem)
def test_hardware_files_cite_a_data_sheet(path: Path) -> None:
    assert "data sheet" in path.read_text()
    spec = HardwareSpec.read(path)
    assert spec.bytes_per_s < spec.flops_per_s


def test_bad_hardware_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes_per_s=0"):
        HardwareSpec("x", 1.0, 0, 1.0)
    with pytest.raises(ValueError, match=r"shared_read=1\.5"):
        HardwareSpec("x", 1.0, 1.0, 1.0, shared_read=1.5)
    with pytest.raises(ValueError, match="compute_efficiency=2"):
        HardwareSpec("x", 1.0, 1.0, 1.0, compute_efficiency=2)
    path = tmp_path / "h.toml"
    path.write_text('name = "x"\nflopps = 3\n')
    with pytest.raises(ValueError, match="flopps: must be among"):
        HardwareSpec.read(path)


def test_roofline_has_both_roofs() -> None:
    """A decode of one is bound by the weights' bytes, a long prefill by the peak."""
    spec = HardwareSpec("x", 100e12, 1e12, 80e9, 1.0, 1.0, 1e-9)
    model = read_shape("llama-3-8b")
    cost = CostModel(spec, model, 16)
    plans: list[tuple[StepPlan, float]] = []

    def step_s(plan: StepPlan) -> float:
        plans.append((plan, cost.step_s(plan)))
        return plans[-1][1]

    trace = _trace([TraceRequest(0.0, 4096, 3)], 0)
    config = SchedulerConfig(max_num_seqs=1, token_budget=4096)
    manager = PagedManager(num_blocks=300, block_size=16)
    simulate(trace, manager, step_s, config, max_model_len=5000)
    (prefill, long), (decode, short), _ = plans
    weights = (model.layer_parameters + model.vocab_size * model.d_model) * 2
    assert short == pytest.approx(
        (weights + 4098 * model.kv_bytes_per_token(2)) / 1e12, rel=1e-6
    )  # both on memory
    linear = 2 * model.layer_parameters * 4096
    scores = 4 * model.num_layers * model.num_heads * model.head_dim * 4096 * 4097 / 2
    assert long == pytest.approx((linear + scores + 2 * model.vocab_size * model.d_model) / 100e12, rel=1e-6)
    assert cost.work(decode).flops < cost.work(prefill).flops
    assert cost.kv_blocks() > 1000 and math.isfinite(long)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_dtype_of_the_pool_decides_its_bytes(dtype: str) -> None:
    """In a cost model as in an engine's pool: blocks that fit, and what is read and moved of them."""
    model = read_shape("llama-3-8b")
    pool = KVLayout(model.num_layers, 1, 16, model.num_kv_heads, model.head_dim, dtype)
    wide, own = (InstanceTable(cache=CacheConfig(dtype=name)).specs()[0].cost for name in ("", dtype))
    assert isinstance(own, CostModel) and isinstance(wide, CostModel)
    assert own.kv_bytes_per_token * 16 == pool.num_bytes
    ratio = wide.kv_bytes_per_token / own.kv_bytes_per_token
    assert own.kv_blocks() == pytest.approx(ratio * wide.kv_blocks(), rel=1e-3)
    long = 1_000_000  # the reading of KV is all of such a step
    assert wide.decode_steps_s(8, long, 1) - wide.decode_steps_s(8, 0, 1) == pytest.approx(
        ratio * (own.decode_steps_s(8, long, 1) - own.decode_steps_s(8, 0, 1)), rel=0.02
    )


def test_reading_a_shared_block_again_costs_its_share() -> None:
    """Four rows over one prefix: the KV of three of them is read again, at the share of a first read."""
    whole = HardwareSpec("x", 100e12, 1e12, 80e9, 1.0, 1.0, 1e-9)
    part = replace(whole, shared_read=0.25)
    model = read_shape("llama-3-8b")
    prefix = np.arange(64, dtype=np.int32)
    rows = [
        TraceRequest(float(i), 70, 40, token_ids=np.append(prefix, np.arange(6, dtype=np.int32) + 900 + i))
        for i in range(4)
    ]
    costs = [CostModel(spec, model, 16) for spec in (whole, part)]
    seen: list[tuple[int, float]] = []

    def step_s(plan: StepPlan) -> float:
        works = [cost.work(plan) for cost in costs]
        saved = works[0].attention_bytes - works[1].attention_bytes
        seen.append((plan.num_named_blocks - plan.num_held_blocks, saved))
        return 0.5

    simulate(_trace(rows), PagedManager(num_blocks=60, block_size=16), step_s, CONFIG, max_model_len=128)
    assert max(again for again, _ in seen) == 3 * 4  # four blocks of 16, read by three more rows
    for again, saved in seen:
        assert saved == pytest.approx(0.75 * again * 16 * model.kv_bytes_per_token(2))


# ------------------------------------------------------------------ slices


def test_a_mixture_reads_the_experts_that_a_step_is_expected_to_use() -> None:
    """By hand, of 128 experts with 8 a token: a batch of 16 reads 64 % of them, and multiplies with 8 a token."""
    model = read_shape("qwen3-235b-a22b")
    cost = CostModel(HardwareSpec.read("h100-80gb").idealised(8), model, 16)
    head, one = model.vocab_size * model.d_model, 94 * 3 * 4096 * 1536
    beside = model.layer_parameters - 128 * one
    expected = replace(
        Work(0, 0, tokens=16, samples=16),
        flops=2.0 * (beside + 8 * one + head) * 16,
        bytes=(beside + 128 * one * (1 - (1 - 8 / 128) ** 16) + head) * 2,
        attention_flops=4.0 * 94 * 64 * 128 * 1616,
        attention_bytes=float((1616 + 16) * cost.held_bytes_per_token),
    )
    assert cost.decode_steps_s(16, 1600, 1)[0] == pytest.approx(cost.seconds(expected, 16), rel=1e-12)


def test_a_slice_pays_for_its_links_and_an_idealised_one_does_not() -> None:
    """By hand: 65 all-reduces of [T, 4096] in bfloat16 and one exchange, on 4 devices of 450 GB/s and 10 us a start."""
    model, one = read_shape("llama-3-8b"), HardwareSpec.read("h100-80gb")
    sliced, free = CostModel(one.times(4), model, 16), CostModel(one.idealised(4), model, 16)
    work = Work(1e12, 16e9, tokens=32, samples=8)
    links = 66 * 10e-6 + (65 * 2 * 3 / 4 * 32 * 4096 * 2 + 8 * 3 * 8) / 450e9
    assert sliced.seconds(work, 8) - free.seconds(work, 8) == pytest.approx(links)
    assert free.hardware.flops_per_s == sliced.hardware.flops_per_s == 4 * one.flops_per_s
    assert (free.hardware.name, sliced.hardware.name) == (f"4 x {one.name}, free links", f"4 x {one.name}")
    assert one.times(1) is one and one.idealised(1) is one
    for cost in (sliced, free):  # skipped steps cost what planned ones do
        steps = cost.decode_steps_s(8, 1000, 3)
        again = cost.seconds(
            replace(
                Work(0, 0, tokens=8, samples=8),
                flops=2.0 * model.layer_parameters * 8 + 2.0 * model.vocab_size * model.d_model * 8,
                bytes=float((model.layer_parameters + model.vocab_size * model.d_model) * 2),
                attention_flops=4.0 * 32 * 32 * 128 * 1008,
                attention_bytes=float(1016 * cost.held_bytes_per_token),
            ),
            8,
        )
        assert steps[0] == pytest.approx(again, rel=1e-12)


def test_heads_that_several_devices_hold_are_read_and_kept_by_each() -> None:
    model, one = read_shape("llama-3-8b"), HardwareSpec.read("h100-80gb")
    eight, sixteen = (CostModel(one.times(n), model, 16) for n in (8, 16))
    assert eight.held_bytes_per_token == eight.kv_bytes_per_token == sixteen.held_bytes_per_token / 2
    free = CostModel(one.idealised(16), model, 16)
    assert sixteen.kv_blocks() == pytest.approx(free.kv_blocks() / 2, abs=1)


def test_slices_without_links_and_models_that_do_not_divide_are_refused() -> None:
    model = read_shape("llama-3-8b")
    bare = replace(HardwareSpec.read("h100-80gb"), link_bytes_per_s=0.0)
    with pytest.raises(ValueError, match=r"devices=2: .* has no link_bytes_per_s; add it .*\(free_links\)"):
        bare.times(2)
    with pytest.raises(
        ValueError, match=r"^devices=3: 32 query heads, 8 KV heads .* try 1, 2, 4, 8, 16 or 32"
    ):
        CostModel(HardwareSpec.read("h100-80gb").times(3), model, 16)
    assert CostModel(bare.idealised(3), model, 16).hardware.devices == 1


def test_calibration_recovers_what_made_the_steps() -> None:
    truth = HardwareSpec("x", 100e12, 1e12, 80e9, 0.45, 0.7, 0.004, 0.0002)
    rng = np.random.default_rng(0)
    works = [
        Work(*map(float, w))
        for w in zip(*(rng.uniform(*ends, 80) for ends in ((1e11, 5e13), (1e9, 4e11)) * 2))
    ]
    rows = rng.integers(1, 64, 80).tolist()
    compute, memory = (
        truth.flops_per_s * truth.compute_efficiency,
        truth.bytes_per_s * truth.bandwidth_efficiency,
    )
    seconds = [
        0.004
        + 0.0002 * n
        + max(w.flops / compute, w.bytes / memory)
        + max(w.attention_flops / compute, w.attention_bytes / memory)
        for n, w in zip(rows, works)
    ]
    start = HardwareSpec("x", 100e12, 1e12, 80e9)
    found = calibrate(start, works, rows, seconds)
    for name in ("compute_efficiency", "bandwidth_efficiency", "step_overhead_s", "host_s_per_row"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    noisy = calibrate(start, works, rows, [t * float(rng.uniform(0.97, 1.03)) for t in seconds])
    assert noisy.compute_efficiency == pytest.approx(0.45, rel=0.05)
    with pytest.raises(ValueError, match="at least 8"):
        calibrate(start, works[:3], rows[:3], seconds[:3])
    with pytest.raises(ValueError, match="correct the peaks"):
        calibrate(start, works, rows, [t / 10 for t in seconds])


def test_calibration_leaves_out_what_the_steps_do_not_show() -> None:
    """Weights in a cache: reading more takes no longer, and no row costs host time."""
    rng = np.random.default_rng(1)
    works = [Work(float(f), float(b)) for f, b in rng.uniform((1e11, 1e9), (5e13, 4e11), (80, 2))]
    rows = rng.integers(1, 64, 80).tolist()
    peaks = HardwareSpec("x", 100e12, 1e12, 80e9)
    seconds = [0.5 + w.flops / 5e13 - 1e-12 * w.bytes for w in works]
    found = calibrate(peaks, works, rows, seconds)
    assert found.compute_efficiency == pytest.approx(0.5, rel=0.05) and found.bandwidth_efficiency == 1.0
    bare = [Work(w.flops, 1.0) for w in works]
    found = calibrate(peaks, bare, rows, [0.5 + w.flops / 5e13 - 3e-3 * n for w, n in zip(works, rows)])
    assert found.compute_efficiency == pytest.approx(0.5, rel=0.05) and found.host_s_per_row == 0.0
    assert 0 < found.step_overhead_s < 0.5


def test_F014_the_category_in_a_trace_reaches_the_policy(tmp_path: Any) -> None:
    """As `tests/engine/test_cases.py` has it, with the trace's own column; read, and written and read."""
    late = (0, 100, 200, 300, 400)
    at = [
        (float(n), 2, "late") if n in late else (float(n), 1, "soon") for n in (*late[:4], *range(381, 411))
    ]
    at += [*((429.0 + n, n, "") for n in (11, 12)), (442.0, 2, "late")]
    rows = [{"arrival_s": t, "token_ids": [n] * 9, "num_output": 1, "group": g} for t, n, g in at]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("\n".join(map(json.dumps, rows)))
    write_trace(second, open_trace(first), granularity=1, tail_ids=True)

    def cached(path: Any, policy: str) -> int:
        manager = PagedManager(num_blocks=9, block_size=4, policy=policy)
        config = SchedulerConfig(2, 16)
        result = simulate(open_trace(path), manager, lambda plan: 0.1, config, max_model_len=16)
        return result.records[-1].num_cached

    found = [cached(path, policy) for path in (first, second) for policy in ("lru", "workload-aware")]
    assert found == [4, 8, 4, 8]
    played = list(PlayRequests(open_trace(first), 99))
    assert {p.sampling.group for p in played} == {"soon", "late", ""}


def test_F014_wishes_in_a_trace_reach_the_policy(tmp_path: Any) -> None:
    """A row kept at 9 is hit again after others went through a pool too small for all; read, and written and read."""
    rows = [{"arrival_s": 0.0, "token_ids": [1] * 8, "num_output": 1, "retention": 9, "ttl_s": 50}]
    rows += [{"arrival_s": float(n), "token_ids": [n] * 8, "num_output": 1} for n in range(2, 7)]
    rows += [{"arrival_s": 9.0, "token_ids": [1] * 9, "num_output": 1}]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("\n".join(map(json.dumps, rows)))
    write_trace(second, open_trace(first), granularity=1, tail_ids=True)

    def cached(path: Any, policy: str) -> int:
        manager = PagedManager(num_blocks=9, block_size=4, policy=policy)
        trace = open_trace(path)
        result = simulate(trace, manager, lambda plan: 0.1, SchedulerConfig(2, 16), max_model_len=16)
        return result.records[-1].num_cached

    assert [cached(path, policy) for path in (first, second) for policy in ("lru", "retention")] == [
        0,
        8,
        0,
        8,
    ]
    first.write_text(json.dumps({**rows[0], "ttl_s": -1}))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: ttl_s=-1: must be a positive number"):
        list(open_trace(first))
