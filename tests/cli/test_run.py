"""`pagedjax run` and `calibrate`: the real decoder on a trace, reported and compared as a simulation is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.cli import main
from pagedjax.report.record import read_record, replay
from pagedjax.sim.cost import HardwareSpec
from pagedjax.sim.trace import open_trace

# One sequence at a time: five small programs, three of which its steps can need.
SETTINGS = [
    "--set",
    "max_num_seqs=1",
    "--set",
    "token_budget=4",
    "--set",
    "num_blocks=80",
    "--set",
    "block_size=4",
]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    stem = [7, 3, 9, 1, 8, 2, 6, 4, 11, 30, 12]
    lines: list[dict[str, Any]] = [
        {"arrival_s": 0.02 * n, "token_ids": [*stem[: 11 - n], 40 + n, 41], "num_output": 3 + n}
        for n in range(6)
    ]
    lines[1]["output_ids"] = [5, 6, 7, 8]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def machine(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of the tiny model with compiled programs kept between the runs of this module."""
    cache = tmp_path_factory.mktemp("cache")
    return [
        "--model",
        str(tiny_folder),
        "--cache-dir",
        str(cache),
        "--set",
        "max_model_len=128",
        *SETTINGS,
        "--quiet",
    ]


@pytest.fixture(scope="module")
def hardware(machine: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "here.toml"
    assert main(["calibrate", str(path), "--repeats", "1", *machine]) == 0
    return path


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_trace_runs_and_is_planned_and_told_as_simulated(
    trace_file: Path, hardware: Path, machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    spec = HardwareSpec.read(hardware)
    assert spec.steps is not None and len(spec.steps.programs) == 3 and "not fitted" in hardware.read_text()
    record, lines = tmp_path / "run.jsonl.gz", tmp_path / "lines.jsonl"
    out = _json(
        capsys, "run", trace_file, *machine, "--beside-simulation", hardware, "--record", record, "--records", lines,
        "--ttft", "1e6",
    )  # fmt: skip
    requests = list(open_trace(trace_file))
    assert out["kind"] == "measured" and out["requests"] == len(requests) and out["refused"] == 0
    assert out["ended"] == {"length": len(requests)} and out["good_share"] == 1.0
    same = out["beside"]
    assert same["equal_plans"] and same["plan_hash"] == out["plan_hash"] and same["steps"] == out["steps"]
    assert same["basis"] == "measured steps of 3 programs" and same["measured_s"] == pytest.approx(
        out["busy_s"]
    )
    assert same["ratio"] == same["simulated_s"] / same["measured_s"] > 0
    keys = set(out["simulated"]) - {"cost"}
    assert keys <= set(out) and out["simulated"]["requests"] == len(requests)
    wall = out["busy_s"] + out["idle_s"] + out["compile_s"] + out["between_s"]
    assert out["wall_s"] == pytest.approx(wall)
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sorted((r["num_input"], r["num_output"]) for r in told) == sorted(
        (r.num_input, r.num_output) for r in requests
    )
    frames = list(read_record(record))
    assert frames[0]["kind"] == "measured" and frames[0]["trace"] == out["trace"]["sha256"]
    replay(frames)


def test_what_run_prints_is_simulates_report_and_both_beside(
    trace_file: Path, hardware: Path, machine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    arguments = ["run", str(trace_file), *machine, "--no-warm-up", "--max-tokens", "2", "--head", "3"]
    assert main([*arguments, "--beside-simulation", str(hardware)]) == 0
    text = capsys.readouterr().out
    parts = (
        "engine            tiny here",
        "per token",
        "matches stopped",
        "cut               0 prompts, 3 answers",
        "simulated         measured steps",
        "the same plans    all",
        "on its own clock",
        "first token p50",
    )
    for part in parts:
        assert part in text, part
    assert "OTHER PLANS" not in text


def test_block_ids_and_text_run_too(
    machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.jsonl"
    rows = [
        {"timestamp": t, "input_length": 14, "output_length": 2, "hash_ids": [0, k]}
        for t, k in ((0, 1), (1, 2))
    ]
    rows[0] |= {"block_size": 8, "time_unit": "ms"}
    ids.write_text("\n".join(map(json.dumps, rows)))
    out = _json(capsys, "run", ids, *machine, "--no-warm-up")
    assert out["requests"] == 2 and out["hit_by_token"] == pytest.approx(8 / 28)
    text = tmp_path / "p.jsonl"
    text.write_text(json.dumps({"prompt": "Once upon a time", "num_output": 2}))
    out = _json(capsys, "run", text, *machine, "--no-warm-up")
    assert out["requests"] == 1 and out["requests_per_s"] > 0
    told = tmp_path / "r.jsonl"
    _json(capsys, "run", text, *machine, "--no-warm-up", "--records", told)
    assert json.loads(told.read_text())["num_input"] == 16  # in the model's own tokens, one a byte


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--burst", "2"], "--burst: has an effect with --rate only"),
        (["--record-text"], "--record-text: needs --record FILE"),
        (["--beside-simulation", "nope"], "nope"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--until", "1e-9"], "no request ended before --until"),
        (["--set", "num_blocks=2"], "none of 6 requests can run"),
        (["--from", "5"], "none of 0 requests can run"),
        (
            ["--beside-simulation", "HERE", "--set", "model.dtype=bfloat16"],
            "its steps were measured with dtype=",
        ),
    ],
)
def test_bad_options_end_in_one_line(
    trace_file: Path,
    hardware: Path,
    machine: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    capsys.readouterr()
    given = [str(hardware) if a == "HERE" else a for a in arguments]
    older = [tmp_path / name for name in ("records", "out", "record")]
    if "--record-text" in given or "--until" in given:  # the second has steps to tell
        older.pop()
    for path in older:
        path.write_text("older")
        given += [f"--{path.name}", str(path)]
    assert main(["run", str(trace_file), *machine, "--no-warm-up", *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert {path.read_text() for path in older} == {"older"}


def test_who_is_refused_is_named(
    machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "l.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n1,600,4\n")
    loud = [a for a in machine if a != "--quiet"]
    assert main(["run", str(path), *loud, "--no-warm-up", "--rate-scale", "100"]) == 0
    out, err = capsys.readouterr()
    assert "request 1 is refused: prompt of 600 tokens" in err and "1 refused" in out
    assert "hit rate          unknown" in out


def test_simulate_takes_the_measured_steps(
    trace_file: Path, hardware: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of another model it says why it does not; a shape of just these numbers serves."""
    capsys.readouterr()
    spec = HardwareSpec.read(hardware)
    assert spec.steps is not None
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 258,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(config))
    limits = [*SETTINGS, "--hardware", hardware, "--max-model-len", "512"]
    out = _json(capsys, "simulate", trace_file, "--shape", shape, *limits)
    assert out["cost"] == "measured steps of 3 programs"
    least = min(spec.steps.programs.values())
    assert out["busy_s"] >= least * out["steps"]
    other = _json(capsys, "simulate", trace_file, "--shape", "opt-13b", *limits)
    assert other["cost"].startswith("roofline: its steps were measured with ")


@pytest.mark.full
@pytest.mark.parametrize("arrivals", [0.0, 30.0])
def test_200_requests_of_stories_are_planned_as_simulated(
    data_dir: Path, tmp_path: Path, arrivals: float
) -> None:
    """The real weights of stories260K; what a simulated step takes is printed, not asserted."""
    from judges import read_stories

    found = _stories(data_dir, arrivals, read_stories, runs=5)
    shown = ", ".join(f"{ratio:.3f}" for ratio in found["ratios"])
    median = float(np.median(found["ratios"]))
    print(f"\nstories260K, arrivals {arrivals or 'at once'}: simulated over measured {median:.3f} ({shown})")
    assert found["equal"] == [True] * len(found["ratios"])


def _stories(data_dir: Path, rate: float, read_stories: Any, runs: int = 1) -> dict[str, Any]:
    """Calibrate on designed steps, then play 200 requests on fresh engines; plans compared, seconds told."""
    import jax

    from pagedjax.cache import PagedManager
    from pagedjax.config import SchedulerConfig
    from pagedjax.engine import Engine
    from pagedjax.kernels import KVLayout
    from pagedjax.runtime import JaxRunner
    from pagedjax.sim.calibration import make_phases, measure, warm_phases
    from pagedjax.sim.play import follow, play
    from pagedjax.sim.programs import StepTimes, fit_steps, limit_numbers, shape_numbers
    from pagedjax.sim.requests import PlayRequests
    from pagedjax.sim.trace import Trace, TraceRequest

    config, params = read_stories(data_dir / "data" / "models" / "stories260K.bin")
    limits, blocks = SchedulerConfig(max_num_seqs=8, token_budget=128), 257
    layout = KVLayout(config.num_layers, blocks, 16, config.num_kv_heads, config.head_dim, "float32")
    runner = JaxRunner(config, jax.tree.map(jax.device_put, params), layout, limits, max_model_len=512)
    runner.warm_up()

    def manager() -> PagedManager:
        return PagedManager(num_blocks=blocks, block_size=16)

    def engine() -> Engine:
        return Engine(manager(), runner, limits, max_model_len=512)

    ladder = runner.buckets.ladder
    shapes = dict(max_seqs=8, longest=512)
    measure(engine(), runner.buckets.smallest, warm_phases(ladder, **shapes), vocab_size=config.vocab_size)
    phases = make_phases(ladder, **shapes, pool_tokens=4096)
    kept, _ = measure(engine(), runner.buckets.smallest, phases, vocab_size=config.vocab_size)
    bare = StepTimes(shape_numbers(config), limit_numbers(limits), 16, {ladder[0]: 1.0})
    times = fit_steps(kept, bare)
    rng = np.random.default_rng(11)
    stems = rng.integers(3, 512, (4, 200)).astype(np.int32)
    rows, now = [], 0.0
    for _ in range(200):
        now += float(rng.exponential(1 / rate)) if rate else 0.0
        own = rng.integers(3, 512, int(rng.integers(3, 60))).astype(np.int32)
        prompt = np.concatenate([stems[rng.integers(4)][: int(rng.integers(10, 200))], own])
        rows.append(TraceRequest(now, len(prompt), int(rng.integers(8, 80)), token_ids=prompt))
    trace = Trace("stems", "tokens", 1, True, lambda: iter(rows))
    out: dict[str, Any] = {"equal": [], "ratios": []}
    for _ in range(runs):
        played = play(PlayRequests(trace, config.vocab_size), engine(), keep=True)
        assert played.timeline is not None and len(played.result.records) == 200
        found = follow(played.timeline, manager(), limits, times.seconds, max_model_len=512)
        out["equal"].append(found.equal and found.plan_hash == played.result.plan_hash)
        out["ratios"].append(float(found.seconds.sum() / sum(played.timeline.seconds)))
    return out


@pytest.mark.full
@pytest.mark.smollm
def test_200_requests_of_smollm_are_planned_as_simulated(
    data_dir: Path, smollm_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that a person types; seconds are printed, not asserted."""
    machine = ["--cache-dir", str(smollm_cache), "--set", "max_num_seqs=8", "--quiet"]
    hardware = tmp_path / "here.toml"
    assert main(["calibrate", str(hardware), *machine]) == 0
    said = capsys.readouterr().out
    trace = data_dir / "data" / "traces" / "sharegpt_llama31_tokens_300.jsonl.gz"
    cut = ["--head", "200", "--made-tokens", "--max-prompt", "64", "--max-tokens", "16", "--rate", "1000"]
    ratios = []
    for _ in range(5):
        out = _json(capsys, "run", trace, *machine, *cut, "--beside-simulation", hardware)
        assert out["requests"] == 200 and out["beside"]["equal_plans"]
        ratios.append(out["beside"]["ratio"])
    with capsys.disabled():
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"\n{said}\nsmollm2-135m: simulated over measured {np.median(ratios):.3f} ({shown})")
