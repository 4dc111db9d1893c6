"""Hits over windows and groups add up to the whole; times between uses are those of a plain loop."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedjax.cli import main
from pagedjax.sim.curve import count_hits
from pagedjax.sim.replay import BlockKeys
from pagedjax.sim.reuse import load_timed, parts, reuse_times
from pagedjax.sim.synth import Arrivals, chat
from pagedjax.sim.trace import Trace, write_trace


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
    ):
        assert main(["curve", path, *bad]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('{"prompt": "aaaaaaaaaaaaaaaaaaaa", "user": "ann"}\n' * 3)
    assert main(["curve", str(tmp_path / "p.jsonl"), "--by-group", "--block-size", "4"]) == 0
    assert capsys.readouterr().out.split()[1] == f"ann,3,60,{40 / 60:.6f}"
    assert main(["curve", str(tmp_path / "p.jsonl"), "--window", "5"]) == 2
    assert "has no times" in capsys.readouterr().err
    assert np.isfinite(shares).all()


def test_a_rate_that_looks_wrong_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.csv"
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i},5,1\n" for i in range(200))
    )
    for unit, asked in (("s", False), ("ms", False), ("us", True), ("ns", True)):
        assert main(["trace", "info", str(path), "--time-unit", unit]) == 0
        assert ("is the unit right?" in capsys.readouterr().err) == asked
