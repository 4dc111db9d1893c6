"""`pagedjax simulate`: the Python simulation's numbers from the command line, and the rate that keeps a promise."""

import gc
import inspect
import json
import math
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.cache import PagedManager
from pagedjax.cli import main
from pagedjax.config import SchedulerConfig
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.metrics import RequestRecord, Tally
from pagedjax.sim.rates import FoundRate, find_rate
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import Arrivals, chat, target_sharing
from pagedjax.sim.trace import Trace, TraceRequest, open_trace, write_trace

CONFIG = SchedulerConfig(max_num_seqs=8, token_budget=256)
SETTINGS = [
    "--set",
    "max_num_seqs=8",
    "--set",
    "token_budget=256",
    "--set",
    "num_blocks=60",
    "--set",
    "policy=lfu",
]


def _cost() -> CostModel:
    return CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    write_trace(
        path, chat(5, seed=2, arrivals=Arrivals(4.0), turns=3, output_tokens=30), granularity=1, tail_ids=True
    )
    return path


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, arguments), "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_is_the_python_simulation(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--hardware", "a100-40gb", "--shape", "opt-13b", "--max-model-len", "4096", *SETTINGS]
    out = _run(capsys, trace_file, *machine, "--hash-plans", "--ttft", "0.5", "--tpot", "0.05")
    manager = PagedManager(num_blocks=60, block_size=16, policy="lfu")
    ours = simulate(open_trace(trace_file), manager, _cost(), CONFIG, max_model_len=4096, hash_plans=True)
    assert out["plan_hash"] == ours.plan_hash
    summary = ours.summary(ttft_limit_s=0.5, tpot_limit_s=0.05)
    for name in ("requests", "goodput", "hit_by_token", "preemptions", "normalized_s"):
        assert out[name] == getattr(summary, name)
    for name in ("queue_s", "ttft_s", "tpot_s", "latency_s"):
        assert out[name] == {f"p{p}": v for p, v in getattr(summary, name).items()}
    assert (out["steps"], out["batch"], out["pool_held"]) == (ours.num_steps, ours.batch, ours.held)
    assert out["match_stopped"] == {str(k): v for k, v in manager.stats.miss_reasons.items()}
    # Without planning every step: the same to the last digit but for sums over steps.
    quick = _run(
        capsys, trace_file, *machine, "--records", tmp_path / "r.jsonl", "--ttft", "0.5", "--tpot", "0.05",
        "--out", tmp_path / "out.json",
    )  # fmt: skip
    assert json.loads((tmp_path / "out.json").read_text()) == quick
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r["finished_s"] for r in records] == [r.finished_s for r in ours.records]
    sums = ("busy_s", "batch", "pool_held")
    assert {k: v for k, v in quick.items() if k not in ("plan_hash", *sums)} == {
        k: v for k, v in out.items() if k not in ("plan_hash", *sums)
    }
    assert [quick[k] for k in sums] == pytest.approx([out[k] for k in sums])


def test_F081_hits_of_lengths_are_not_simulated_as_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "l.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,50,5\n1,60,4\n")
    out = _run(capsys, path, "--rate-scale", "2")
    assert out["hit_by_token"] is None and out["match_stopped"] is None and out["requests"] == 2
    assert main(["simulate", str(path), "--quiet"]) == 0
    assert "hit rate          unknown" in capsys.readouterr().out


def test_the_run_is_written_down_as_the_engine_writes_it(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedjax.report.record import read_record, replay

    out = _run(capsys, trace_file, *SETTINGS, "--head", "5", "--record", tmp_path / "run.jsonl")
    frames = list(read_record(tmp_path / "run.jsonl"))
    assert frames[0]["kind"] == "simulated" and out["requests"] == 5
    replay(frames)


@pytest.mark.parametrize("form", ["tokens", "ids", "far ids", "bailian file"])
def test_100000_requests_would_stream(form: str, tmp_path: Path) -> None:
    """What is held at the end grows by the tally alone (six numbers a request), blocks that come and go included."""

    def requests(count: int) -> Trace:
        if form == "tokens":
            return target_sharing(count, prompt_tokens=20, output_tokens=2, share=0.2, arrivals=Arrivals(2.0))
        far = 2**60 if form == "far ids" else 10**6
        rows = ((i, [far * (form != "ids"), *range(far + 9 * i, far + 9 * i + 9)]) for i in range(count))
        if form == "bailian file":
            (tmp_path / "b.jsonl").write_text(
                "".join(
                    json.dumps(
                        {"chat_id": i, "parent_chat_id": -1, "timestamp": i, "input_length": 155,
                         "output_length": 2, "type": "text", "hash_ids": ids}
                    ) + "\n"
                    for i, ids in rows
                )
            )  # fmt: skip
            return open_trace(tmp_path / "b.jsonl")
        asked = (TraceRequest(float(i), 155, 2, granule_ids=np.array(ids)) for i, ids in rows)
        return Trace("t", "t", 16, True, lambda: asked)

    def held(count: int) -> int:
        tally, sizes = Tally(), []

        def keep(record: Any) -> None:
            tally.add(record)
            if tally.requests == count:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])

        manager = PagedManager(num_blocks=60, block_size=16)
        trace = requests(count)
        tracemalloc.start()
        result = simulate(trace, manager, _cost(), CONFIG, max_model_len=200, on_record=keep)
        tracemalloc.stop()
        assert result.records == [] and tally.requests == count
        return sizes[0]

    held(5)  # what the first run keeps for all
    assert held(210) - held(60) < 150 * 8 * 6 * 2 + 10_000


def test_found_rates_are_those_of_a_fine_scan() -> None:
    trace = target_sharing(24, prompt_tokens=300, output_tokens=8, share=0.0, seed=5, arrivals=Arrivals(2.0))
    limits = dict(ttft_limit_s=0.25, tpot_limit_s=0.06)

    def run(factor: float, keep: Any) -> Any:
        manager = PagedManager(num_blocks=400, block_size=16)
        return simulate(trace.faster(factor), manager, _cost(), CONFIG, max_model_len=2048, on_record=keep)

    found = find_rate(run, 24, share=0.9, **limits)
    best = 0.0
    for factor in np.geomspace(found.factor * 0.99, found.factor * 1.2, 20):  # steps of 1 %
        tally = Tally(**limits)
        run(float(factor), tally.add)
        best = float(factor) if tally.good >= 0.9 * 24 else best
    assert best / found.factor == pytest.approx(1, abs=0.02)
    impossible = find_rate(run, 24, ttft_limit_s=1e-6, tpot_limit_s=1e-6)
    assert impossible.factor == 0.0 and not any(kept for _, kept in impossible.tried)
    assert impossible.bound == "least" and min(factor for factor, _ in impossible.tried) == 2.0**-10
    with pytest.raises(ValueError, match="must have both limits"):
        find_rate(run, 24, ttft_limit_s=math.inf, tpot_limit_s=math.inf)


def test_a_search_of_rates_ends_at_its_bounds() -> None:
    kept = RequestRecord(0.0, 0.0, 1.0, 2.0, 1, 2, None, 0, "length")
    asked: list[float] = []

    def run(factor: float, watch: Any) -> Any:  # breaks at 2, by a chance of arrivals, and nowhere else
        asked.append(factor)
        if factor != 2.0:
            watch(kept)

    limits = dict(ttft_limit_s=9.0, tpot_limit_s=9.0)
    assert (found := find_rate(run, 1, **limits)).bound == "runs" and len(found.tried) == 100
    assert found.factor == max(f for f, kept in found.tried if kept) > 2
    assert find_rate(run, 1, most=2.05, **limits).bound == "most" and max(asked[100:]) <= 2.05
    assert find_rate(run, 1, most=1.5, **limits) == FoundRate(1.5, "most", [(1.0, True), (1.5, True)])
    with pytest.raises(ValueError, match=r"most=0\.5, runs=100: must be factors around 1"):
        find_rate(run, 1, most=0.5, **limits)


def test_find_rate_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    trace = target_sharing(16, prompt_tokens=300, output_tokens=8, share=0.0, seed=5, arrivals=Arrivals(2.0))
    write_trace(path, trace, granularity=1, tail_ids=True)
    promise = [
        "--ttft",
        "0.25",
        "--tpot",
        "0.06",
        *["--hardware", "a100-40gb", "--shape", "opt-13b"],
        *SETTINGS[:4],
    ]
    found = _run(capsys, path, "--find-rate", *promise, "--out", tmp_path / "rate.json")
    assert json.loads((tmp_path / "rate.json").read_text()) == found
    assert found["keeps"] == "some" and {True, False} == {t["kept"] for t in found["tried"]}
    at = _run(capsys, path, "--rate-scale", found["factor"], *promise)
    assert at["good_share"] >= 0.9
    every = _run(capsys, path, "--find-rate", "--ttft", "1e9", *promise[4:])
    assert every["keeps"] == "all" and every["bound"] == "most" and every["factor"] == 1024
    assert main(["simulate", str(path), "--find-rate", "--ttft", "1e9", *promise[4:], "-q"]) == 0
    assert "bound             most: 2^10 times the trace's rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--burst", "2"], "--burst: has an effect with --rate only"),
        (["--rate", "1", "--rate-scale", "2"], "give one of them"),
        (["--find-rate"], "--find-rate: needs a promise"),
        (["--find-rate", "--ttft", "1", "--hash-plans"], "runs many simulations"),
        (
            ["--find-rate", "--ttft", "1", "--until", "9"],
            "--find-rate with --until: what has not ended by then",
        ),
        (["--share", "0.5"], "--share: has an effect with --find-rate only"),
        (["--seed", "3"], "--seed: has an effect with --rate or --beam-width only"),
        (["--beam-gap", "2"], "--beam-gap: has an effect with --beam-width only"),
        (["--beam-width", "2", "--n", "3"], "a beam search has one sample a request"),
        (["--in-flight", "2", "--rate-scale", "3"], "a closed loop has no rate of arrivals"),
        (
            ["--reserve", "0.2", "--set", "num_blocks=9"],
            "--reserve: has an effect where cache.num_blocks is auto",
        ),
        (["--ttft", "nan"], "nan is no number"),
        (["--until", "nan"], "nan is no number"),
        (["--records", "TRACE"], "is the trace itself; name another file"),
        (["--set", "index=json:JSONDecoder"], "must be made of 2 numbers"),
        (["--hardware", "HARDWARE"], "must have flops_per_s, bytes_per_s, memory_bytes"),
        (["--hardware", "WORDS"], "flops_per_s='fast': must be a number"),
        (["--set", "model.dtype=float32"], "has no effect here"),
        (["--set", "cache.dtype=int4"], "cache.dtype=int4: must be one of"),
        (["--set", "cache.dtype=int8", "--shape", "deepseek-v2"], "are not quantised"),
        (["--set", "memory_bytes=1GiB"], "has no effect here"),
        (["--set", "event_log=5"], "has no effect here"),
        (["--shape", "nope"], "nope"),
        (["--hardware", "nope"], "nope"),
        (["--max-model-len", "5"], "no request ended"),
        (["--reserve", "1"], "is not in the range"),
        (["--set", "policy=nope"], "must be one of"),
    ],
)
def test_bad_options_end_in_one_line(
    trace_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = trace_file.read_bytes()
    (trace_file.parent / "h.toml").write_text('name = "x"\n')
    (trace_file.parent / "w.toml").write_text(
        'name = "x"\nflops_per_s = "fast"\nbytes_per_s = 1\nmemory_bytes = 1\n'
    )
    places = {
        "TRACE": trace_file,
        "HARDWARE": trace_file.parent / "h.toml",
        "WORDS": trace_file.parent / "w.toml",
    }
    arguments = [str(places.get(argument, argument)) for argument in arguments]
    older = {option: trace_file.parent / f"older{option}" for option in ("--record", "--records", "--out")}
    if "--find-rate" not in arguments and "--records" not in arguments:
        for option, path in older.items():
            path.write_text("older")
            arguments += [option, str(path)]
    with pytest.warns(UserWarning, match="no block ever fills") if "5" in arguments else _nothing():
        assert main(["simulate", str(trace_file), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert trace_file.read_bytes() == before
    assert {path.read_text() for path in older.values() if path.exists()} <= {"older"}


def test_every_field_of_the_python_simulation_has_its_option() -> None:
    """A new argument of `simulate` must come with an option, or with a reason here."""
    from pagedjax.cli.simulate import command
    from pagedjax.config import CacheConfig
    from pagedjax.sim.beams import Beams

    options = {p.name for p in command.params}
    ways = {
        "trace": "file", "manager": "settings", "config": "settings", "cost": "hardware",
        "max_model_len": "max_model_len", "n": "n", "beams": "beam_width", "until_s": "until",
        "in_flight": "in_flight", "hash_plans": "hash_plans",
        "skip": "no_skip", "observe": "record_file", "on_record": "records",
        "watch": None,  # a function of each plan: what it is for, batch and pool, is printed
    }  # fmt: skip
    assert set(inspect.signature(simulate).parameters) == set(ways)
    assert {way for way in ways.values() if way} <= options
    assert {"width": "beam_width", "gap": "beam_gap", "seed": "seed"}.keys() == {
        f.name for f in fields(Beams)
    }
    assert {
        "beam_gap",
        "seed",
        "shape",
        "devices",
        "free_links",
        "reserve",
        "rate",
        "burst",
        "rate_scale",
        "head",
    } <= options
    taken = {name.removeprefix("cache.") for name in command.callback.useful if name.startswith("cache.")}
    # Of the device, of hashes, or of who watches: no cost knows them.
    idle = {"memory_bytes", "hash", "event_log", "window_groups"}
    assert taken == {f.name for f in fields(CacheConfig)} - idle


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_large_and_small_block_ids_stay_apart(together: int) -> None:
    """Ids go into tokens as they are up to 2^28, beyond through a table, or spelled where a block holds a whole id."""
    from pagedjax.sim.tokens import Prompts
    from pagedjax.sim.trace import Trace, TraceRequest

    ids = [
        3,
        2**28 - 1,
        2**28,
        2**40,
        5,
        -7,
        2**40,
        3,
        2**62 + 1,
        2**62 + 2**22,
        -(2**63),
        2**63 - 1,
        -1,
        2**22,
    ]
    rows = [TraceRequest(0.0, 8, 1, granule_ids=np.array([i, 3])) for i in ids]
    prompts = Prompts(Trace("t", "t", 4, True, lambda: iter(rows)), together)
    tokens = [prompts.tokens(n, row) for n, row in enumerate(rows)]
    for begin in range(5 - together):  # any stretch that is compared as one tells ids apart
        stretches = [tuple(t[begin : begin + together].tolist()) for t in tokens]
        assert len(set(stretches)) == len(set(ids)) and stretches[3] == stretches[6]
    assert tokens[0].tolist() == [3] * 8 and all(t[4:].tolist() == [3] * 4 for t in tokens)
    assert all(t.min() >= 0 and t.max() < 2**29 and t.dtype == np.int32 for t in tokens)
    assert len(prompts._dense) == (8 if together < 3 else 0)


@pytest.mark.parametrize("partial", [0, 2])
def test_large_ids_hit_as_small_ones(partial: int) -> None:
    rng = np.random.default_rng(8)
    paths = [[int(k) for k in rng.integers(0, 3, 4)] for _ in range(60)]

    def simulated(far: int) -> Any:
        rows = []
        for i, path in enumerate(paths):
            names = [sum(3**j * (p + 1) for j, p in enumerate(path[: k + 1])) for k in range(4)]
            ids = np.array([n + far * (n % 5) for n in names], np.int64)
            rows.append(TraceRequest(float(i), 62, 3, granule_ids=ids))
        trace = Trace("t", "t", 16, True, lambda: iter(rows))
        manager = PagedManager(num_blocks=30, block_size=8, partial=partial)
        result = simulate(trace, manager, _cost(), CONFIG, max_model_len=200, hash_plans=True)
        return result.plan_hash, [r.num_cached for r in result.records]

    near = simulated(0)
    assert near == simulated(2**29) == simulated(2**58) and sum(near[1]) > 0


def test_records_hold_no_dictionaries() -> None:
    from pagedjax.sim.metrics import RequestRecord

    record = RequestRecord(0.0, 1.0, 2.0, 3.0, 10, 11, 5, 0, "length")
    assert not hasattr(record, "__dict__") and replace(record, reason="x").reason == "x"
