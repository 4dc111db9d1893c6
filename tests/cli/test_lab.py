"""trace, curve, advise and experiment on the command line."""

import csv
import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pagedjax import lab
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


def test_advise_names_the_timestamp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p\u202e.jsonl"
    common = "You answer questions about trains. " * 20
    path.write_text("".join(json.dumps({"prompt": f"[12:{i:02d}] {common} Q{i}?"}) + "\n" for i in range(60)))
    assert main(["advise", str(path), "--block-size", "16", "--kv-bytes-per-token", "1000"]) == 0
    text = capsys.readouterr().out
    assert "changing field at 4 bytes, 60 values" in text and "after '[12:'" in text and "KV memory" in text
    assert "p\\xe2\\x80\\xae.jsonl' --moved moved.jsonl" in text and "\u202e" not in text


def test_every_proof_that_advice_names_can_be_run_and_proves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands are those of this very file: its columns, its unit, its window."""
    monkeypatch.chdir(tmp_path)
    common = "You answer questions about trains. " * 8
    rows = [{"q": f"Hello! [12:{i:02d}] {common} Q{i % 9}?", "at": i, "x": 0} for i in range(60)]
    (tmp_path / "my log.csv").write_text(
        "q,at\n" + "".join(f"{json.dumps(r['q'])},{r['at']}\n" for r in [*rows, *rows[:20]])
    )
    typed = [
        "my log.csv",
        "--column",
        "prompt=q",
        "--column",
        "time=at",
        "--time-unit",
        "ms",
        "--sort",
        "--to",
        "0.05",
    ]
    assert (
        main(["advise", *typed, "--block-size", "8", "--block-size", "64", "--policy", "fifo", "--quiet"])
        == 0
    )
    text = capsys.readouterr().out
    proofs = [line.split("proof: ")[1] for line in text.splitlines() if "proof: " in line]
    assert len(proofs) == 4 and all("'my log.csv' --column prompt=q --column time=at" in p for p in proofs)
    printed = {}
    for proof in proofs:
        for command in proof.split(", then "):
            assert main([*shlex.split(command)[1:], "--quiet"]) == 0, command
            printed[command] = capsys.readouterr().out
    info, pools, policies, *_ = printed.values()
    assert main(["advise", *typed, "--block-size", "8", "--policy", "fifo", "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert f"{said['sizes'][0]['found'] / said['tokens']:.4f}" in info
    curve = [line.split(",") for line in pools.splitlines()[1:]]
    for pool, row in zip(said["pools"], curve):
        assert row[1] == str(pool["blocks"]) and float(row[3]) == pytest.approx(
            pool["hit_tokens"] / said["tokens"], abs=1e-6
        )
    row = policies.splitlines()[1].split(",")
    found = {policy["name"]: policy["hit_blocks"] / said["blocks"] for policy in said["policies"]}
    assert float(row[2]) == pytest.approx(found["lru"], abs=1e-6)
    assert float(row[4]) == pytest.approx(found["fifo"], abs=1e-6)
    assert float(row[5]) == pytest.approx(said["bound_blocks"] / said["blocks"], abs=1e-6)
    (move,) = said["prompts"]["moves"]
    written = [json.loads(line) for line in (tmp_path / "moved.jsonl").read_text().splitlines()]
    asked = sorted((r for r in [*rows, *rows[:20]] if r["at"] < 50), key=lambda r: r["at"])
    assert [sorted(w["token_ids"]) for w in written] == [sorted(r["q"].encode()) for r in asked]
    assert main(["advise", "moved.jsonl", "--block-size", "1", "--json", "--quiet"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert move["saved_if_moved"] == one["sizes"][0]["found"] + one["sizes"][0]["last_token"]
    assert main(["advise", *typed[:1], *typed[1:3], "--top", "0", "--moved", "m.jsonl", "--quiet"]) == 2
    assert "has no field worth moving" in capsys.readouterr().err


def test_experiment_list_and_single_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", "list"]) == 0
    assert "hit-length" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    arguments = ["--set", "prompt=14", "--set", "prefix=10", "--set", "block-size=4", "--no-plots"]
    assert main(["experiment", "run", "hit-length", *arguments]) == 0
    assert (tmp_path / "results" / "hit-length.jsonl").is_file()
    assert "8 hit (#), 6 computed (.)" in capsys.readouterr().out
    assert main(["experiment", "run", "ledger", "--users", "3"]) == 2
    assert main(["experiment", "run"]) == 2


def test_F102_every_field_and_several_seeds_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, rows and header say what was set; rows of several seeds stand as means with intervals, too."""
    monkeypatch.chdir(tmp_path)
    fields = ["--set", "users=50", "--set", "block-size=16", "--set", "common=64"]
    command = ["experiment", "run", "ledger", "--smoke", *fields, "--no-plots", "--out", "a"]
    assert main([*command, "--seeds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "| users |" in printed and "| seeds |" in printed
    table = (tmp_path / "a" / "ledger.md").read_text()
    assert "Set: users=50, block_size=16, common=64" in table and "Seeds of each row: 3" in table
    header, *units = map(json.loads, (tmp_path / "a" / "ledger.jsonl").read_text().splitlines())
    assert "--seeds 3 --set users=50" in header["command"] and header["seeds"] == 3
    rows = [row for unit in units for row in unit["rows"]]
    assert [r["seed"] for r in rows[:3]] == [0, 1, 2] and {r["users"] for r in rows} == {50}
    (row, *_) = csv.DictReader((tmp_path / "a" / "ledger-means.csv").read_text().splitlines())
    assert row["seeds"] == "3" and row["users"] == "50"
    # Fewer seeds keep nothing of it, and one alone is the run without.
    assert main([*command, "--resume"]) == 0
    assert "an earlier run had other" in capsys.readouterr().err
    _, *one = (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()
    assert len(one) * 3 == len(units)
    for bad, message in (
        (["ledger", "--seeds", "0"], "0 is not in the range"),
        (["hit-length", "--seeds", "2"], "--seeds 2: hit-length draws nothing; leave it out"),
        (["ledger", "--set", "seed=3", "--seeds", "2"], "--set seed says what it says, too"),
        (["--all", "--seeds", "2"], "--seeds: is of one experiment"),
        (["ledger", "--set", "user=5"], "did you mean users?"),
        (
            ["ledger", "--smoke", "--set", "users=0", "--jobs", "1"],
            "ledger with users=0: cannot be run (ZeroDivisionError: division by zero); set another value",
        ),
    ):
        assert main(["experiment", "run", *bad]) == 2
        assert message in capsys.readouterr().err


def test_means_over_seeds_are_those_of_rows_in_one_place() -> None:
    rows = [
        {"a": a, "seed": s, "v": float(a + s), "w": None if s else 1.0} for s in (0, 1, 2) for a in (1, 5)
    ]
    first, second = lab.means_over_seeds([*rows, {"a": 9, "v": 1.0}])[:2]
    assert first == {"a": 1, "v": 2.0, "v ± 95 %": pytest.approx(4.303 / 3**0.5), "w": None, "seeds": 3}
    assert second["v"] == 6.0 and lab.means_over_seeds([*rows, {"a": 9, "v": 1.0}])[2] == {"a": 9, "v": 1.0}
    assert lab.means_over_seeds(rows[:-1]) == [] == lab.means_over_seeds(rows[:2])


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz"])
def test_memory_is_announced_before_a_large_trace_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A plain file by its size, before a block is kept; one whose size says little as soon as there are many."""
    monkeypatch.setattr("pagedjax.cli.trace._MANY", 1500)
    monkeypatch.setattr("pagedjax.cli.trace._SMALL_FILE", 0)
    rows = [{"prompt": f"{i:064d}" * 4, "num_output": 2} for i in range(100)]
    text = json.dumps(rows) if form == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / f"p.{form}"
    path.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
    monkeypatch.setattr("pagedjax.cli.trace._LOOKED_AT", 10)
    for command in (["curve", str(path)], ["trace", "info", str(path)]):
        assert main(command) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if "block references" in line]
        first = "about 1.6e+03" if form == "jsonl" else "more than 1,500"
        assert len(told) == 2 and first in told[0] and "1,600 block references: at most 0.0 GB" in told[1]
        assert main([*command, "--quiet"]) == 0
        assert capsys.readouterr().err == ""


def test_experiment_run_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "run", "hit-length", "--smoke", "--out", str(tmp_path), "--no-plots"]) == 0
    assert {p.suffix for p in tmp_path.iterdir()} == {".jsonl", ".md", ".csv", ".html"}
    assert main(["experiment", "report", "--results", str(tmp_path), "--out", str(tmp_path / "R.md")]) == 0
    assert "hit-length" in (tmp_path / "R.md").read_text()


GOOD = '{"token_ids": [1, 2, 3], "arrival_s": 0}\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(GOOD * 3)
    (tmp_path / "cut.jsonl").write_text(GOOD + '{"token_ids": [1')
    (tmp_path / "plain.jsonl").write_text('{"prompt": "abc"}\n')
    (tmp_path / "head.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    (tmp_path / "junk.json").write_bytes(b"\xff\xfe\x00")
    return tmp_path


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("curve cut.jsonl", "cut.jsonl:2: wrong JSON"),
        ("curve good.jsonl --capacity -5", "-5 is not in the range x>=1"),
        ("curve good.jsonl --block-size 0", "0 is not in the range x>=1"),
        ("curve good.jsonl --policy lruu", "must be one of lru"),
        ("curve good.jsonl --policy belady", "give --bound instead"),
        ("trace info head.csv", "holds no request"),
        ("trace info good.jsonl --capacity -1", "-1 is not in the range x>=0"),
        ("trace info good.jsonl --tokenizer junk.json", "must be a tokenizer.json file"),
        ("trace make chat new.jsonl --seed -1", "-1 is not in the range x>=0"),
        ("trace make chat new.jsonl --set turns", "must be NAME=VALUE"),
        ("trace make chat new.jsonl --set turns=a", "must be a whole number"),
        ("trace make system-prompt new.jsonl --set timestamp=yes", "must be true or false"),
        ("trace make chat new.jsonl --set pause_s=nan", "pause_s=nan: must be from 0.0 to"),
        ("trace make agents new.jsonl --set pause_s=inf", "pause_s=inf: must be from 0.0 to"),
        ("trace make chat new.jsonl --set pause_s=-1", "pause_s=-1.0: must be from 0.0 to"),
        ("trace make chat new.jsonl --set num_sessions=0", "num_sessions=0: must be from 1 to"),
        ("trace make chat new.jsonl --set system_tokens=-3", "system_tokens=-3: must be from 0 to"),
        ("trace make few-shot new.jsonl --set prefix_tokens=-1", "prefix_tokens=-1: must be from 0 to"),
        ("trace make system-prompt new.jsonl --set num_systems=0", "num_systems=0: must be from 1 to"),
        ("trace make target-sharing new.jsonl --set prompt_tokens=0", "prompt_tokens=0: must be from 1 to"),
        ("trace make chat new.jsonl --rate nan", "rate=nan: must be from"),
        ("trace make chat new.jsonl --rate 1e-320", "rate=1e-320: must be from"),
        ("trace convert head.csv new.jsonl", "new.jsonl: would hold no request"),
        ("trace convert head.csv good.jsonl", "good.jsonl: would hold no request"),
        ("trace make chat none/new.jsonl", "none/new.jsonl: its folder none does not exist; make it first"),
        ("trace make chat /dev/full --set num_sessions=2", "/dev/full: no space left on device"),
        ("trace convert good.jsonl /dev/full", "/dev/full: no space left on device"),
        ("trace info /proc/self/mem", "/proc/self/mem: input/output error"),
        ("advise good.jsonl --parameters nan", "must be a number of weights"),
        ("advise good.jsonl --top -1", "-1 is not in the range x>=0"),
        ("experiment run hit-length --jobs 0", "0 is not in the range x>=1"),
        ("experiment run ledgr", "did you mean ledger?"),
        ("curve good.jsonl --from 100 --to 200", "holds no request"),
        ("curve good.jsonl --from 100 --window 3", "holds no request"),
        (
            "trace convert good.jsonl new.csv",
            "new.csv: would hold JSON lines, and be read as .csv; name it new.jsonl",
        ),
        ("trace convert good.jsonl new.txt.gz", "would hold JSON lines, and be read as .txt"),
        (
            "trace info good.jsonl --chat-template plain",
            "--chat-template plain: good.jsonl holds no messages",
        ),
        ("trace info plain.jsonl --time-unit s", "time_unit=s: plain.jsonl holds no times; leave it out"),
        ("experiment run hit-length --set prompt=a", "prompt=a: must be a whole number; try prompt=16"),
    ],
)
def test_bad_input_leaves_stdout_empty(
    files: Path, capsys: pytest.CaptureFixture[str], args: str, part: str
) -> None:
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    assert main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and part in err, err
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


def test_a_trace_is_written_whole_or_not_at_all(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (files / "good.jsonl").read_bytes()
    assert main(["trace", "convert", "cut.jsonl", "good.jsonl"]) == 2
    assert (files / "good.jsonl").read_bytes() == old
    assert main(["trace", "convert", "good.jsonl", "good.jsonl"]) == 0  # onto itself
    assert len((files / "good.jsonl").read_text().splitlines()) == 3
    (files / "link.jsonl").symlink_to("good.jsonl")
    assert main(["trace", "make", "chat", "link.jsonl", "--set", "num_sessions=1"]) == 0
    assert (files / "link.jsonl").is_symlink() and b'"session"' in (files / "good.jsonl").read_bytes()
    old = (files / "good.jsonl").read_bytes()

    def interrupted(path: Path, *args: object, **options: object) -> int:
        Path(path).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr("pagedjax.sim.trace.write_trace", interrupted)
    assert main(["trace", "make", "chat", "good.jsonl"]) == 130
    assert (files / "good.jsonl").read_bytes() == old
    assert not [path for path in files.iterdir() if "part" in path.name]


START = "import sys; from pagedjax.cli import main; sys.exit(main())"


def test_a_trace_goes_to_a_pipe(files: Path) -> None:
    command = [sys.executable, "-c", START, "trace", "convert", "good.jsonl", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 3 and "3 requests" in done.stderr


@pytest.mark.parametrize("args", [["curve", "good.jsonl"], ["experiment", "list"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(files: Path, args: list[str]) -> None:
    command = [sys.executable, "-u", "-c", START, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_a_models_tokenizer_and_template_make_the_tokens(
    tmp_path: Path, smollm_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}], "created": 1_700_000_000}
    (tmp_path / "chat.jsonl").write_text(json.dumps(said) + "\n")
    lengths = {}
    for name, options in {
        "model": ["--tokenizer", "smollm2-135m"],
        "plain": ["--tokenizer", "smollm2-135m", "--chat-template", "plain"],
        "bytes": [],
    }.items():
        assert (
            main(["trace", "convert", str(tmp_path / "chat.jsonl"), str(tmp_path / "t.jsonl"), *options]) == 0
        )
        lengths[name] = len(json.loads((tmp_path / "t.jsonl").read_text())["token_ids"])
    # The model's template puts its system message in front; ChatML's marks are one token each there.
    assert lengths["bytes"] == len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert lengths["plain"] < 10 < lengths["model"] < lengths["bytes"]
    assert main(["trace", "info", str(tmp_path / "chat.jsonl"), "--chat-template", "model"]) == 2
    assert "--tokenizer bytes has none; take chatml or plain" in capsys.readouterr().err


def test_convert_hides_what_was_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "p.jsonl").write_text(json.dumps({"prompt": "secret " * 9, "user": "ann"}) + "\n")
    assert main(["trace", "convert", "p.jsonl", "out.jsonl", "--anonymise", "bailian", "--salt", "x"]) == 0
    text = (files / "out.jsonl").read_text()
    assert "secret" not in text and "ann" not in text and len(json.loads(text)["hash_ids"]) == 4
    assert main(["trace", "convert", "p.jsonl", "out.jsonl", "--salt", "x"]) == 2
    assert "--salt: has an effect with --anonymise only" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trace info", "curve", "fleet", "advise", "simulate"])
def test_all_commands_read_with_one_set_of_options(files: Path, command: str) -> None:
    (files / "q.csv").write_text("q,at\nabcabcabcabcabcabc,5\nabcabcabcabcabcabc,7\n")
    options = ["--column", "prompt=q", "--column", "time=at", "--time-unit", "ms", "--sample", "1", "--quiet"]
    assert main([*command.split(), "q.csv", *options]) == 0


def test_F081_hits_of_lengths_are_unknown_not_0(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    (files / "l.json").write_text('[{"L_gt": 5}]')
    for name in ("a.csv", "l.json"):
        assert main(["trace", "info", name]) == 0
        out = capsys.readouterr().out
        assert "hit rate          unknown" in out and "0.0000" not in out
        for command in ("fleet", "simulate"):
            assert main([command, name, "--quiet"]) == 0
            out = capsys.readouterr().out
            assert "hit rate          unknown" in out and "0.0000" not in out
        for command in ("curve", "advise"):
            assert main([command, name]) == 2
            out, err = capsys.readouterr()
            assert out == "" and "no identity of prefixes, so its hits are unknown" in err
