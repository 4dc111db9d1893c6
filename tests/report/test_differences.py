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
from pagedjax.report.differences import TokenOrigin, Told, compare, compare_records
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
    assert main(["compare", "seed=1", "runtime.seed=1", *prompts, *common]) == 2
    assert "A and B: are the same settings" in capsys.readouterr().err


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
    assert main(["compare", str(a), str(a)]) == 0
    assert main(["compare", str(a), "block_size=4"]) == 2 and main(["compare", str(a), str(a), "prompt"]) == 2
    broken = _record(tmp_path / "d.jsonl", [{"frame": "step", "n": 1, "rows": [[1, "r"]]}])
    with pytest.raises(RecordError, match="a step frame does not follow"):
        compare_records(read_record(a), read_record(broken))
