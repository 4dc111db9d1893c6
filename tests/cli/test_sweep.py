"""`pagedjax sweep`: the product, resumed after a kill, equal on one worker and two, with a policy from outside."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagedjax.cli import main
from pagedjax.lab.sweep import over_seeds
from pagedjax.sim.synth import Arrivals, chat
from pagedjax.sim.trace import open_trace, write_trace
from pagedjax.sim.trial import MEASURES, known_keys, run_trial

POLICY = """from pagedjax.cache.policies import FIFO

class Oldest(FIFO):
    \"\"\"First in, first out, under a name of its own.\"\"\"
"""
SMALL = [
    "--set",
    "shape=opt-13b",
    "--set",
    "hardware=a100-40gb",
    "--set",
    "max_num_seqs=8",
    "--set",
    "num_blocks=120",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_policy.py").write_text(POLICY)
    for number in range(2):
        trace = chat(4, seed=number, turns=2, output_tokens=12, arrivals=Arrivals(4.0))
        write_trace(tmp_path / f"t{number}.jsonl", trace, granularity=1, tail_ids=True)
    return tmp_path


def _rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["sweep", *arguments, "--json", "--quiet"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


GRID = [
    "--grid",
    "cache.block_size=8,16",
    "--grid",
    "cache.policy=lru,own_policy:Oldest",
    "--grid",
    "rate=2,8",
]


def test_the_product_is_the_trials_one_by_one_and_the_same_on_two_workers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["t0.jsonl", *GRID, *SMALL, "--seeds", "2"]
    one = _rows(capsys, *arguments, "--jobs", "1", "--out", "one")
    assert len(one) == 2 * 2 * 2 * 2
    assert [(r["cache.block_size"], r["cache.policy"], r["rate"], r["seed"]) for r in one][:5] == [
        (8, "lru", 2, 0), (8, "lru", 2, 1), (8, "lru", 8, 0), (8, "lru", 8, 1), (8, "own_policy:Oldest", 2, 0),
    ]  # fmt: skip
    row = one[5]
    settings = {k: row[k] for k in row if k in known_keys("simulate")}
    ours = run_trial(open_trace("t0.jsonl"), settings, row["seed"])
    assert {k: row[k] for k in ours} == ours
    assert _rows(capsys, *arguments, "--jobs", "2", "--out", "two") == one
    for name in ("sweep.csv", "sweep-means.csv", "sweep.jsonl"):
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes()
    table = list(csv.DictReader((folder / "one" / "sweep-means.csv").read_text().splitlines()))
    assert len(table) == 8 and float(table[0]["ttft_s_p50_low"]) <= float(table[0]["ttft_s_p50"])
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    assert parquet.read_table(folder / "one" / "sweep.parquet").num_rows == 16


def test_54_units_killed_on_two_workers_go_on_and_equal_one_worker(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in the middle, a policy from outside among the settings; not a byte differs from one worker's file."""
    arguments = [
        "t0.jsonl", "t1.jsonl", *SMALL, "--grid", "cache.block_size=4,8,16",
        "--grid", "cache.policy=lru,lfu,own_policy:Oldest", "--grid", "token_budget=32,64,256",
    ]  # fmt: skip
    whole = _rows(capsys, *arguments, "--jobs", "1", "--out", "whole")
    assert len(whole) == 54 and {row["cache.policy"] for row in whole} == {"lru", "lfu", "own_policy:Oldest"}
    start = "import sys; from pagedjax.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "sweep", *arguments, "--jobs", "2", "--out", "cut"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as process:
        file, begun = folder / "cut" / "sweep.jsonl", time.monotonic()
        while (
            not (file.exists() and file.read_bytes().count(b'{"unit"') >= 3)
            and time.monotonic() - begun < 100
        ):
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    kept = file.read_bytes()
    finished = kept.count(b'{"unit"')
    assert 3 <= finished < 54
    file.write_bytes(kept + b'{"unit": 53, "rows": [{"trac')  # a kill may cut a line
    again = _rows(capsys, *arguments, "--jobs", "2", "--out", "cut", "--resume")
    assert again == whole
    for name in ("sweep.jsonl", "sweep.csv", "sweep-means.csv"):
        assert (folder / "whole" / name).read_bytes() == (folder / "cut" / name).read_bytes()
    # Other points are another sweep: nothing is kept.
    assert (
        main(["sweep", "t0.jsonl", *SMALL, "--grid", "cache.block_size=8", "--out", "cut", "--resume"]) == 0
    )
    assert "an earlier run had other units, data; started anew" in capsys.readouterr().err


def test_a_resumed_sweep_begins_no_finished_unit_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["sweep", "t0.jsonl", *SMALL, "--grid", "cache.block_size=4,8,16", "--jobs", "1", "--quiet"]
    assert main(arguments) == 0
    file = folder / "results" / "sweep.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    ran: list[Any] = []
    true = run_trial
    monkeypatch.setattr("pagedjax.sim.trial.run_trial", lambda *a: ran.append(a[1]) or true(*a))
    assert main([*arguments, "--resume"]) == 0
    assert [settings["cache.block_size"] for settings in ran] == [16]


def test_a_file_says_what_options_say_and_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.toml").write_text(
        '[sweep]\nmeasure = "replay"\n[grid]\nnum_blocks = [9, 33]\n[grid.cache]\npolicy = ["lru", "fifo"]\n'
        "[set.cache]\nblock_size = 8\n"
    )
    told = _rows(
        capsys, "mine.toml", "t0.jsonl", "t1.jsonl", "--x", "num_blocks", "--y", "by_token",
        "--hue", "cache.policy", "--panel", "trace",
    )  # fmt: skip
    assert (folder / "results" / "mine.png").stat().st_size > 5000
    typed = _rows(
        capsys, "t0.jsonl", "t1.jsonl", "--measure", "replay", "--set", "block_size=8", "--grid", "num_blocks=9,33",
        "--grid", "policy=lru,fifo",
    )  # fmt: skip
    assert told == typed and len(told) == 8
    assert main(["curve", "t0.jsonl", "--block-size", "8", "--capacity", "32", "--quiet"]) == 0
    _, row, _ = capsys.readouterr().out.splitlines()
    (same,) = (
        r
        for r in told
        if r["trace"] == "t0.jsonl" and r["cache.num_blocks"] == 33 and r["cache.policy"] == "lru"
    )
    assert f"{same['by_block']:.6f}" == row.split(",")[2]


def test_means_stand_with_intervals_and_the_unknown_stays_unknown() -> None:
    rows = [
        {"a": a, "seed": s, "v": float(a + s), "w": None if s else 1.0} for a in (1, 5) for s in (0, 1, 2)
    ]
    first, second = over_seeds(rows, ["a"])
    assert (first["v"], first["seeds"], second["v"]) == (2.0, 3, 6.0)
    assert first["v_high"] - first["v"] == pytest.approx(4.303 / 3**0.5) and "w" not in first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t0.jsonl", "--grid", "blok_size=8"], "did you mean cache.block_size?"),
        (["t0.jsonl", "--grid", "model.dtype=float32"], "has no effect there"),
        (["t0.jsonl", "--measure", "replay", "--grid", "cache.dtype=int8"], "has no effect there"),
        (["t0.jsonl", "--grid", "event_log=0,5"], "has no effect there"),
        (["t0.jsonl", "--measure", "replay", "--grid", "rate=2"], "rate: is no setting of replay"),
        (
            ["t0.jsonl", "--measure", "guess", "--grid", "rate=2"],
            "measure=guess: must be one of simulate, replay",
        ),
        (["t0.jsonl", "--grid", "block_size=8,8"], "a value stands twice"),
        (["t0.jsonl", "--grid", "block_size=24"], "cache.block_size=24: must be a power of two"),
        (["t0.jsonl", "--seeds", "3"], "nothing is drawn"),
        (["t0.jsonl", "--x", "seed"], "a plot needs both"),
        (
            ["t0.jsonl", "--grid", "block_size=8", "--grid", "cache.block_size=16"],
            "cache.block_size: stands twice",
        ),
        (
            ["t0.jsonl", "--set", "block_size=8", "--grid", "block_size=16,32"],
            "stands twice among --set and --grid",
        ),
        (["t0.jsonl", "--name", "../x"], "--name ../x: must be a file's name"),
        (["t0.jsonl", "--grid", "head=-1"], "head=-1: must be a number from 0"),
        (["t0.jsonl", "--grid", "until_s=nan"], "until_s=nan: must be above 0"),
        (["t0.jsonl", "--grid", "n=0,1"], "n=0: must be above 0"),
        (["t0.jsonl", "--grid", "rate=2", "--set", "in_flight=3"], "in_flight=3: a closed loop has no rate"),
        (["t0.jsonl", "--set", "burst=3"], "burst=3: has an effect with a rate only"),
        (["seeds.toml", "t0.jsonl"], "sweep.seeds=True: must be a whole number"),
        (["measure.toml", "t0.jsonl"], "measure=3: must be one of simulate, replay"),
        (
            ["t0.jsonl", "--measure", "replay", "--set", "num_blocks=9", "--set", "insert=all"],
            "insert=all: must be one of",
        ),
        (["t0.jsonl", "--hue", "seed"], "with --x and --y only"),
        (["both.toml", "t0.jsonl"], "cache.num_blocks: stands twice among the tables of both.toml"),
        (
            ["grid.toml", "t0.jsonl", "--set", "num_blocks=none"],
            "num_blocks=none",
        ),  # typed: before the file's
        (["own.toml"], "give one trace or more"),
        (["own.toml", "t0.jsonl"], "own.toml: gird: must be one of the tables"),
        (["t0.jsonl", "--measure", "replay", "--grid", "block_size=8"], "a replay needs a number of blocks"),
    ],
)
def test_bad_sweeps_end_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (folder / "own.toml").write_text("[gird]\na = [1]\n")
    (folder / "both.toml").write_text("[grid]\nnum_blocks = [9]\n[set]\ncache.num_blocks = 11\n")
    (folder / "grid.toml").write_text("[grid]\nnum_blocks = [9, 11]\n")
    (folder / "seeds.toml").write_text("[sweep]\nseeds = true\n[set]\nrate = 1\n")
    (folder / "measure.toml").write_text("[sweep]\nmeasure = 3\n")
    assert main(["sweep", *arguments, "--jobs", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


def test_every_setting_of_a_trial_is_known_by_its_full_name() -> None:
    for measure in MEASURES:
        assert len(set(known_keys(measure))) == len(known_keys(measure))
