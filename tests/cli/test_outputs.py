"""What every command says where its results, notes and files cannot go as they are."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import pagedjax.cli
from pagedjax.cli import COMMANDS, cli, main
from pagedjax.cli.options import OutputFile, PathOrUrl, note

WRITTEN = {
    "out",
    "records",
    "record",
    "record_file",
    "plot",
    "moved",
    "report",
    "target",
    "save_cache",
    "tune",
}
FOLDER = Path(pagedjax.cli.__file__).parent


def _commands(group=cli, words=()):
    for name in group.list_commands(None):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))
        else:
            yield (*words, name), command


OUTPUTS = [(words, p) for words, command in _commands() for p in command.params if p.name in WRITTEN]


@pytest.mark.parametrize(
    ("words", "param"), OUTPUTS, ids=lambda x: x.name if isinstance(x, click.Parameter) else " ".join(x)
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(words, param, tmp_path):
    assert isinstance(param.type, PathOrUrl) and param.type._written, "an output is checked by its type"
    (tmp_path / "file").write_text("x")
    made = param.type._folder or getattr(param.type, "_deep", False)
    bad = tmp_path / "file" / "x" if made else tmp_path / "missing" / "x.html"
    with pytest.raises(
        click.BadParameter, match="is no folder; name" if made else "does not exist; make it first"
    ):
        param.type_cast_value(click.Context(cli), str(bad))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_the_table_of_outputs_is_whole():
    assert {words[0] for words, _ in OUTPUTS} >= {
        "generate", "simulate", "run", "sweep", "fleet", "report", "advise", "curve", "calibrate", "demo", "trace",
        "experiment", "convert",
    }  # fmt: skip
    for words, command in _commands():
        for param in command.params:
            if isinstance(param.type, OutputFile) or getattr(param.type, "_written", False):
                assert param.name in WRITTEN, f"{' '.join(words)} {param.name}: belongs in this table"


def test_a_missing_folder_is_told_in_one_line(capsys, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"timestamp":0,"input_length":4,"output_length":1,"hash_ids":[1]}\n')
    missing = tmp_path / "no" / "x"
    for line in (
        ["simulate", str(tmp_path / "t.jsonl"), "--out", str(missing)],
        ["fleet", str(tmp_path / "t.jsonl"), "--record", str(missing)],
        ["report", str(missing), "--trace", str(tmp_path / "t.jsonl")],
    ):
        assert main(line) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and "does not exist; make it first" in said.err


def test_notes_and_errors_keep_names_text(capsys):
    note("a\u202eb\nc\x1b[31m: is left out")
    assert capsys.readouterr().err == "a\\u202eb\\nc\\x1b[31m: is left out\n"
    assert main(["explain\u202e\n"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "\u202e" not in said


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_nothing_else_prints_to_stderr(path):
    """`note` is the one way, so that no name of a file turns a line around."""
    allowed = {
        "options.py": 1,
        "__init__.py": 3,
        "trace.py": 1,
    }  # note; interrupted, a group's help, errors; shown
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("print", "echo", "write")
        and ("sys.stderr" in ast.unparse(node) or any(keyword.arg == "err" for keyword in node.keywords))
    ]
    assert len(calls) == allowed.get(path.name, 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "words", [("--help",), ("bench", "--help"), ("trace", "info", "t.csv"), ("demo", "--explain")]
)
def test_a_full_stdout_is_said_in_one_line(words, tmp_path):
    assert words[0].startswith("-") or words[0] in COMMANDS
    (tmp_path / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,4,1\n")
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pagedjax", *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=environment,
        )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 2
        and last.startswith("error: stdout: takes no more; ")
        and "Errno" not in done.stderr
    )
