"""Hits over windows and groups add up to the whole; times between uses are those of a plain loop."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedjax.cli import main
from pagedjax.config import Config
from pagedjax.sim.curve import count_hits
from pagedjax.sim.fleet import Arrivals as Arrivals_
from pagedjax.sim.fleet import run_fleet
from pagedjax.sim.fleet.file import InstanceTable
from pagedjax.sim.replay import BlockKeys
from pagedjax.sim.reuse import load_timed, parts, reuse_times
from pagedjax.sim.synth import Arrivals, chat
from pagedjax.sim.trace import Trace, open_trace, write_trace
from pagedjax.sim.trial import run_trial


def _trace(seed: int = 1) -> Trace:
    trace = chat(12, seed=seed, user_tokens=6, system_tokens=5, output_tokens=6, arrivals=Arrivals(2.0))
    return replace(trace, source=lambda: (replace(r, group=f"u{len(r.session)}") for r in trace))


@pytest.mark.parametrize("insert", ["prompt", "prompt+output"])
def test_windows_and_groups_add_up_to_the_whole(insert: str) -> None:
    timed = load_timed(_trace(), 4, insert=insert)
    for capacity in (8, 40, math.inf):
        whole = count_hits(timed.refs, capacity)
        for window in (0.0, 1.0, 30.0, 1e9):
            found = parts(timed, (capacity,), window_s=window)
            assert sum(p.hit_tokens[capacity] for p in found) == whole.hit_tokens
            assert len(found) == {0.0: 2, 1e9: 1}.get(window, len(found)) and len(found) > (window < 31)
    rows = list(_trace())
    named = {p.name: p.requests for p in parts(timed)}
    with_blocks = [r for r in rows if insert == "prompt" or r.num_input + r.num_output >= 4]
    assert named == {name: sum(r.group == name for r in with_blocks) for name in ("u1", "u2")}
    some = replace(
        _trace(), source=lambda: (replace(r, group=r.group if r.num_input % 2 else "") for r in rows)
    )
    for source, expected in (
        (some, {"", "u1", "u2"}),
        (replace(some, source=lambda: (replace(r, group="") for r in rows)), {""}),
    ):
        parted = parts(load_timed(source, 4, insert=insert))
        assert {p.name for p in parted} == expected and sum(p.requests for p in parted) == len(with_blocks)
        unnamed = sum(r.group == "" for r in source if insert == "prompt" or r.num_input + r.num_output >= 4)
        assert {p.name: p.requests for p in parted}[""] == unnamed


def test_times_between_uses_are_a_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _trace(3)
    keys, last, expected = BlockKeys(trace, 4), {}, []
    for request in trace:
        for key in keys.refs(request).insert.tolist():
            if key in last:
                expected.append(request.arrival_s - last[key])
            last[key] = request.arrival_s
    assert reuse_times(load_timed(trace, 4)).tolist() == sorted(expected) and len(expected) > 20


def test_the_command_line_has_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "t.jsonl")
    write_trace(path, _trace(), granularity=1, tail_ids=True)
    assert main(["curve", path, "--block-size", "4", "--by-group"]) == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.split()] == ["group", "u1", "u2"]
    write_trace(path, (replace(r, group="") for r in _trace()), granularity=1, tail_ids=True)
    assert main(["curve", path, "--block-size", "4", "--window", "10", "--capacity", "20"]) == 0
    header, *rows = capsys.readouterr().out.split()
    assert header == "window_s,requests,tokens,lru_20,lru_inf" and rows[0].startswith("0,")
    assert main(["curve", path, "--block-size", "4", "--reuse-times"]) == 0
    shares = [float(line.split(",")[1]) for line in capsys.readouterr().out.split()[1:]]
    assert shares == sorted(shares) and len(shares) == 14
    for bad, message in (
        (["--window", "5", "--bound"], "--window: stands alone"),
        (["--by-group", "--reuse-times"], "--by-group: stands alone"),
        (["--by-group"], "names no category or user"),
        (["--window", "0"], "is not in the range"),
        (["--window", "inf"], "must be a finite number of seconds"),
        (["--window", "nan"], "nan is no number"),
    ):
        assert main(["curve", path, *bad]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('{"prompt": "aaaaaaaaaaaaaaaaaaaa", "user": "ann"}\n' * 3)
    assert main(["curve", str(tmp_path / "p.jsonl"), "--by-group", "--block-size", "4"]) == 0
    assert capsys.readouterr().out.split()[1] == f"ann,3,60,{40 / 60:.6f}"
    assert main(["curve", str(tmp_path / "p.jsonl"), "--window", "5"]) == 2
    assert "has no times" in capsys.readouterr().err
    assert np.isfinite(shares).all()


def test_windows_in_which_nobody_comes_take_no_room() -> None:
    timed = load_timed(_trace(), 4)
    fine = parts(timed, window_s=1e-9)
    assert len(fine) == len(set(timed.arrival_s.tolist())) and sum(p.requests for p in fine) == len(
        timed.arrival_s
    )
    assert sum(p.hit_tokens[math.inf] for p in fine) == parts(timed, window_s=1e9)[0].hit_tokens[math.inf]


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_every_curve_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    path = str(tmp_path / "t.jsonl")
    write_trace(path, _trace(), granularity=1, tail_ids=True)
    curves = {
        "capacities": ["--policy", "fifo", "--bound"],
        "sizes": ["--block-size", "8", "--insert", "prompt+output"],
        "windows": ["--window", "10", "--capacity", "20"],
        "groups": ["--by-group", "--insert", "prompt+output"],
        "cdf": ["--reuse-times"],
        "at-once": ["--in-flight", "1", "--in-flight", "4", "--capacity", "60"],
    }
    if form != "png":
        curves = {name: curves[name] for name in ("groups", "cdf")}
    for name, options in curves.items():
        plot = tmp_path / f"{name}.{form}"
        assert main(["curve", path, "--block-size", "4", *options, "--plot", str(plot), "--quiet"]) == 0
        said = capsys.readouterr().out
        first = plot.read_bytes()
        assert len(first) > 3000 and len(said.splitlines()) > 2
        assert main(["curve", path, "--block-size", "4", *options, "--plot", str(plot), "--quiet"]) == 0
        assert (plot.read_bytes(), capsys.readouterr().out) == (first, said)
    assert main(["curve", path, "--plot", str(tmp_path / "p.jpeg")]) == 2
    assert "p.jpeg: must end in .png, .svg, .pdf" in capsys.readouterr().err
    assert main(["curve", path, "--plot", str(tmp_path / "none" / "p.png")]) == 2
    assert "does not exist; make it first" in capsys.readouterr().err


def test_requests_in_flight_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed loop of N on one engine is what a fleet of one instance does in its own closed loop."""
    path = tmp_path / "t.jsonl"
    write_trace(path, _trace(), granularity=1, tail_ids=True)
    options = ["--block-size", "4", "--capacity", "60", "--quiet"]
    counts = ["--in-flight", "1", "--in-flight", "4"]
    assert main(["curve", str(path), *options, *counts]) == 0
    header, *rows = capsys.readouterr().out.split()
    assert header == "block_size,capacity_blocks,policy,in_flight,hit_by_token,requests,refused,preemptions"
    ratios = [float(row.split(",")[4]) for row in rows]
    assert ratios[0] > ratios[1] > 0  # who runs at the same time finds less
    for n, ratio in zip((1, 4), ratios):
        settings = {"cache.num_blocks": 61, "cache.block_size": 4, "max_num_seqs": n, "token_budget": 8192}
        table = InstanceTable(
            cache=Config().replace(settings).cache,
            scheduler=Config().replace(settings).scheduler,
            hardware="h100-80gb",
            shape="llama-3-8b",
        )
        fleet = run_fleet(open_trace(path), table.specs(), arrivals=Arrivals_("fleet", concurrency=n))
        assert ratio == pytest.approx(fleet.summary().hit_by_token, abs=5e-7)
        assert main(
            ["simulate", str(path), "--in-flight", str(n), "--json", "--quiet"]
            + [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
        ) == 0  # fmt: skip
        told = json.loads(capsys.readouterr().out)
        assert told["hit_by_token"] == fleet.summary().hit_by_token
        assert told["latency_s"] == {f"p{p}": v for p, v in fleet.summary().latency_s.items()}
    for bad, message in (
        (["--in-flight", "2"], "--in-flight: needs the engine's pool; give --capacity"),
        (["--in-flight", "2", "--capacity", "9", "--window", "3"], "stands alone"),
        (["--in-flight", "2", "--capacity", "9", "--insert", "prompt+output"], "--insert: has no effect"),
        (["--in-flight", "2", "--capacity", "9", "--bound"], "stands alone"),
    ):
        assert main(["curve", str(path), *bad]) == 2
        assert message in capsys.readouterr().err
    assert main(["simulate", str(path), "--in-flight", "2", "--rate", "1"]) == 2
    assert "a closed loop has no rate" in capsys.readouterr().err


def test_what_rows_ask_of_the_cache_is_named_where_blocks_alone_cannot_do_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"token_ids": [1, 2, 3, 4, 5], "arrival_s": i, "num_output": 1} for i in range(4)]
    rows[1] |= {"cache_read": False}
    rows[2] |= {"cache_read": False, "retention": 9}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "cache_read (in 2 rows), retention (in 1 rows): has no effect on blocks alone"
    plain = ["--block-size", "2"]
    for command in (
        ["curve", str(path), *plain],
        ["curve", str(path), *plain, "--window", "2"],
        ["curve", str(path), *plain, "--reuse-times"],
        ["trace", "info", str(path), *plain],
        ["advise", str(path), *plain],
    ):
        assert main(command) == 0
        assert said in capsys.readouterr().err, command
        assert main([*command, "--quiet"]) == 0
        assert capsys.readouterr().err == ""
    assert load_timed(open_trace(path), 2).refs.unheard == {"cache_read": 2, "retention": 1}
    assert (
        run_trial(open_trace(path), {"cache.num_blocks": 9, "cache.block_size": 2}, 0, "replay")["unheard"]
        == 3
    )
    # The simulator asks: two of the three that could find their blocks do not want to.
    assert main(["curve", str(path), *plain, "--in-flight", "1", "--capacity", "20"]) == 0
    out, err = capsys.readouterr()
    assert "unheard" not in err and "has no effect" not in err
    assert float(out.split()[1].split(",")[4]) == pytest.approx(4 / 20)


def test_a_rate_that_looks_wrong_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.csv"
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i},5,1\n" for i in range(200))
    )
    for unit, asked in (("s", False), ("ms", False), ("us", True), ("ns", True)):
        assert main(["trace", "info", str(path), "--time-unit", unit]) == 0
        assert ("is the unit right?" in capsys.readouterr().err) == asked
