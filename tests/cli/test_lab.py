"""trace, curve, sharing and experiment on the command line."""

import json
from pathlib import Path

import pytest

from pagedjax.cli import main


def test_trace_make_info_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(tmp_path / "t.jsonl.gz"), str(tmp_path / "c.jsonl")
    assert (
        main(["trace", "make", "few-shot", path, "--set", "num_requests=20", "--set", "prefix-tokens=64"])
        == 0
    )
    assert main(["trace", "info", path, "--block-size", "16", "--insert", "prompt+output"]) == 0
    text = capsys.readouterr().out
    assert "requests          20" in text and "hit rate under the engine's rules" in text
    assert main(["trace", "convert", path, out]) == 0
    assert len(Path(out).read_text().splitlines()) == 20
    assert main(["trace", "make", "few-shot", path, "--set", "nope=1"]) == 2
    assert "must be NAME=VALUE with a name among num_requests" in capsys.readouterr().err


def test_malformed_trace_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["trace", "info", str(path)]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("bad.jsonl:1: 1 hash_ids for input_length=513: must be ceil(513 / 512) = 2")
    )


def test_curve_prints_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "t.jsonl")
    main(
        [
            "trace",
            "make",
            "document-questions",
            path,
            "--set",
            "num_requests=30",
            "--set",
            "document_tokens=64",
        ]
    )
    capsys.readouterr()
    assert main(["curve", path, "--capacity", "8", "--policy", "lru", "--bound"]) == 0
    header, *rows = capsys.readouterr().out.split()
    assert header == "block_size,capacity_blocks,lru,lru_by_token,lru,bound"
    for row in rows:
        _, _, curve, _, replayed, bound = row.split(",")
        assert curve == replayed and float(bound) >= float(curve)


def test_sharing_names_the_timestamp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    common = "You answer questions about trains. " * 20
    path.write_text("".join(json.dumps({"prompt": f"[12:{i:02d}] {common} Q{i}?"}) + "\n" for i in range(60)))
    assert main(["sharing", str(path), "--block-size", "16", "--kv-bytes-per-token", "1000"]) == 0
    text = capsys.readouterr().out
    assert "changing field at token 4" in text and "after '[12:'" in text and "KV memory" in text


def test_experiment_list_and_single_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "list"]) == 0
    assert "hit-length" in capsys.readouterr().out
    arguments = ["experiment", "run", "hit-length", "--prompt", "14", "--prefix", "10", "--block-size", "4"]
    assert main(arguments) == 0
    assert "8 hit (#), 6 computed (.)" in capsys.readouterr().out
    assert main(["experiment", "run", "ledger", "--users", "3"]) == 2
    assert main(["experiment", "run"]) == 2


def test_experiment_run_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "run", "hit-length", "--smoke", "--out", str(tmp_path), "--no-plots"]) == 0
    assert {p.suffix for p in tmp_path.iterdir()} == {".jsonl", ".md", ".csv", ".html"}
    assert main(["experiment", "report", "--results", str(tmp_path), "--out", str(tmp_path / "R.md")]) == 0
    assert "hit-length" in (tmp_path / "R.md").read_text()
