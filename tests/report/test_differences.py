"""`pagedjax compare`: the first token that two runs draw differently, and whether rounding explains it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax.cli import main
from pagedjax.engine.request import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)
from pagedjax.kernels.quant import QUANTISED
from pagedjax.report.differences import ROUNDING, TokenOrigin, Told, compare, compare_records
from pagedjax.report.replay import RecordError, read_record


def _told(name: str, *scores: dict[int, float], cached: int = 0) -> Told:
    """A run of one sample that draws the likeliest token of each place."""
    tops = [sorted(one.items(), key=lambda pair: -pair[1]) for one in scores]
    details = tuple(
        PositionLogprobs(
            TokenLogprob(*top[0], 1), tuple(TokenLogprob(t, x, i + 1) for i, (t, x) in enumerate(top))
        )
        for top in tops
    )
    tokens = tuple(top[0][0] for top in tops)
    sample = CompletionOutput(0, "", tokens, FinishReason.LENGTH, details=details)
    output = RequestOutput("r", (1, 2), (sample,), True, cached, "end", 0, 0, 0)
    return Told(name, {("r", 0): [TokenOrigin(name, at, at) for at in range(len(tokens))]}, [output])


def test_a_near_tie_is_explained_and_a_fault_is_not() -> None:
    same = {5: -0.1, 6: -3.0}
    a = _told("a", same, {7: -1.0, 8: -1.0001, 9: -4.0})
    near = _told("b", {5: -0.10001, 6: -3.0}, {8: -1.0, 7: -1.0001, 9: -4.0}, cached=16)
    [found] = compare(a, near, ["float32"])
    assert found is not None and found.rounding
    assert (found.position, found.tokens, found.cached) == (1, (7, 8), (0, 16))
    assert found.swing == pytest.approx(2e-4) and found.noise == pytest.approx(1e-5)
    assert found.gaps == (pytest.approx(1e-4), pytest.approx(1e-4))
    assert found.places == (TokenOrigin("a", 1, 1), TokenOrigin("b", 1, 1))
    far = _told("b", same, {8: -1.0, 7: -1.1, 9: -4.0})
    [found] = compare(a, far, ["float32"])
    assert found is not None and not found.rounding
    [found] = compare(a, far, ["bfloat16", "float32"])
    assert found is not None and found.rounding
    for swing, explained in {
        0.05: {"float16", "bfloat16", *QUANTISED},
        0.3: {"bfloat16", *QUANTISED},
        0.8: set(),
    }.items():
        other = _told("b", same, {8: -1.0, 7: -1.0001 - swing, 9: -4.0})
        told = {name: next(iter(compare(a, other, ["float32", name]))) for name in ROUNDING}
        assert {name for name, one in told.items() if one is not None and one.rounding} == explained
    [found] = compare(a, _told("b", same, {30: -0.5, 9: -4.0}), ["float32"])
    assert found is not None and found.swing is None and not found.rounding
    assert list(compare(a, a, ["float32"])) == [None]


def test_one_that_ends_sooner_differs_there() -> None:
    long, short = _told("a", {1: -0.1, 2: -1.0}, {1: -0.2, 2: -2.0}), _told("b", {1: -0.1, 2: -1.0})
    [found] = compare(long, short, ["float32"])
    assert found is not None and found.tokens == (1, None) and found.places[1] is None and not found.rounding


def test_two_settings_on_the_tiny_model(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    common = ["--model", str(tiny_folder), "--cache-dir", str(tmp_path), "--raw", "--max-tokens", "8", "-q"]
    common += [
        "--set",
        "max_model_len=64",
        "--set",
        "num_blocks=80",
        "--set",
        "block_size=4",
        "--set",
        "max_num_seqs=2",
    ]
    prompts = ["abcdefgh abcdefgh", "abcdefgh abcdefgh x"]
    assert main(["compare", "", "prefix_caching=false,chunk_tokens=4", *prompts, *common, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 2 and all(d["rounding"] for d in told["differences"])
    assert told["configs"]["B"]["scheduler"]["chunk_tokens"] == 4
    templates = [f"chat_template={tmp_path / name}" for name in ("one.jinja", "other.jinja")]
    for name, end in (("one.jinja", "."), ("other.jinja", "!")):
        (tmp_path / name).write_text("{{ messages[0].content }}" + end)
    for line, said in {
        ("seed=1", "runtime.seed=1"): "A and B: are the same settings",
        ("", "model=nope"): "model='nope': no such file",
        ("", "block_size=8", "--max-tokens", "0"): "max_tokens=0: must be at least 1",
        (*templates, "--chat"): "choose models of one tokenizer",
    }.items():
        assert main(["compare", *line[:2], *prompts, *common, *line[2:]]) == 2
        told = capsys.readouterr()
        assert (
            said in told.err and told.err.startswith("error: ") and told.err.count("\n") == 1 and not told.out
        )


def _record(path: Path, frames: list[dict[str, Any]]) -> Path:
    first = {"frame": "run", "version": 2, "kind": "simulated", "block_size": 4, "pool_blocks": [9]}
    text = "".join(json.dumps(frame) + "\n" for frame in [first, *frames]).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_records_are_compared_step_by_step_however_steps_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = {"frame": "step", "n": 1, "rows": [[1, "r", 0, 0, 5, 1]], "admitted": [["r", 0, 0, "end"]]}
    quiet = {"frame": "quiet", "n": 2, "count": 3}
    one_by_one = [{"frame": "step", "n": n} for n in (2, 3, 4)]
    a = _record(tmp_path / "a.jsonl", [begin, quiet])
    b = _record(tmp_path / "b.jsonl.gz", [begin, *one_by_one])
    assert compare_records(read_record(a), read_record(b)) is None
    longer = _record(tmp_path / "c.jsonl", [begin, *one_by_one, {"frame": "step", "n": 5}])
    found = compare_records(read_record(a), read_record(longer))
    assert found is not None and found.step == 5 and found.rows == ([], [("r", 0, 8, 1)])
    assert main(["compare", str(a), str(longer)]) == 1
    assert "only B: request r, sample 0: 1 tokens from 8 on" in capsys.readouterr().out
    assert main(["compare", str(a), str(b)]) == 0
    broken = _record(tmp_path / "d.jsonl", [{"frame": "step", "n": 1, "rows": [[1, "r"]]}])
    with pytest.raises(RecordError, match="a step frame does not follow"):
        compare_records(read_record(a), read_record(broken))


def test_records_that_cannot_be_compared_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(name: str, prompt: int) -> dict[str, Any]:
        return {"frame": "add", "id": name, "t": 0.0, "prompt": prompt, "max_new": 4, "n": 1}

    def begin(name: str, prompt: int) -> dict[str, Any]:
        return {
            "frame": "step",
            "n": 1,
            "rows": [[1, name, 0, 0, prompt, 1]],
            "admitted": [[name, 0, 0, "end"]],
        }

    a = str(_record(tmp_path / "a.jsonl", [add("r", 5), begin("r", 5), {"frame": "close"}]))
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    empty, plain, cut = (tmp_path / name for name in ("empty.jsonl", "plain.jsonl.gz", "cut.jsonl.gz"))
    empty.write_bytes(b"")
    plain.write_bytes(Path(a).read_bytes())
    cut.write_bytes(gzip.compress(Path(a).read_bytes())[:30])
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n' * 2)
    fleet = _record(tmp_path / "fleet.jsonl", [])
    fleet.write_text(fleet.read_text().replace('"version"', '"fleet": true, "version"'))
    longer = _record(tmp_path / "longer.jsonl", [add("r", 6), begin("r", 6)])
    others = _record(tmp_path / "others.jsonl", [add("s", 5), begin("s", 5)])
    for line, said in [
        ([a, a], "are the same file"),
        ([a, str(tmp_path / "none.jsonl")], "none.jsonl: no such file; give a record"),
        ([a, str(folder)], "folder.jsonl: is a folder; give a record"),
        ([a, str(empty)], "holds no frame: a record begins with a run frame; give what --record wrote"),
        ([a, str(trace)], "trace.jsonl:1: no frame of a record"),
        ([a, str(plain)], "is no record (Not a gzipped file"),
        ([str(cut), a], "is no record (Compressed file ended"),
        ([a, str(fleet)], "tells of a fleet: must be the record of one engine's run; give"),
        ([a, str(longer)], "request r is of 5 + 4 tokens, 1 samples and of 6 + 4 tokens"),
        ([a, str(others)], "tell of requests r and s: must be runs of the same requests"),
        ([a, "block_size=4"], "block_size=4: must be a record, as the other is"),
        ([a, str(longer), "prompt"], "PROMPTS: have no effect with two records"),
        ([a, str(longer), "--max-tokens", "3"], "--max-tokens: has no effect with two records"),
        ([a, str(longer), "--set", "block_size=4"], "--set: has no effect with two records"),
    ]:
        assert main(["compare", *line]) == 2, line
        told = capsys.readouterr()
        assert (
            said in told.err and told.err.startswith("error: ") and told.err.count("\n") == 1 and not told.out
        )

    short = str(_record(tmp_path / "short.jsonl", [add("r", 5)]))
    assert main(["compare", a, short]) == 1
    told = capsys.readouterr().out
    assert "B ends before it: the record was cut" in told and "A ends" not in told
