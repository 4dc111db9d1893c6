"""F101: every option of every command is used, or refused by name."""

import ast
import inspect
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pagedjax.cli import cli, main
from pagedjax.cli.options import emit_json, shell
from pagedjax.config import Config

# What the options of `common_options` end in, by the attribute of `Common` that carries it.
CARRIED = {
    "as_json": {"as_json"},
    "quiet": {"note", "bars", "quiet", "llm"},
    "cache_dir": {"cache_dir", "llm"},
}


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(cli))
# Those that take the common options, which arrive as one `Common`.
COMMON = {path: command for path, command in COMMANDS.items() if hasattr(command.callback, "useful")}


def body(command: click.Command) -> ast.FunctionDef:
    tree = ast.parse(inspect.getsource(sys.modules[inspect.unwrap(command.callback).__module__]))
    name = inspect.unwrap(command.callback).__name__
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def reached(command: click.Command) -> list[ast.AST]:
    """The callback and everything of its module that it can come to."""
    tree = ast.parse(inspect.getsource(sys.modules[inspect.unwrap(command.callback).__module__]))
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found: dict[str, ast.AST] = {}
    queue = [body(command).name]
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = named[name]
            loaded = {node.id for node in ast.walk(named[name]) if isinstance(node, ast.Name)}
            queue += [other for other in loaded if other in named]
    return list(found.values())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_F101_every_parameter_of_a_command_is_read(path: tuple[str, ...]) -> None:
    function = body(COMMANDS[path])
    loaded = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    taken = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    taken += [function.args.kwarg.arg] if function.args.kwarg else []
    assert set(taken) <= loaded, f"{' '.join(path)} ignores {sorted(set(taken) - loaded)}"


@pytest.mark.parametrize("path", COMMON, ids=" ".join)
def test_F101_what_the_common_options_carry_is_used(path: tuple[str, ...]) -> None:
    command = COMMON[path]
    there = {p.name for p in command.params}
    nodes = [node for top in reached(command) for node in ast.walk(top)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for option, carriers in CARRIED.items():
        assert option not in there or used & carriers, f"{' '.join(path)} ignores {option}"


@pytest.mark.parametrize("path", COMMON, ids=" ".join)
def test_F101_a_setting_is_used_or_refused(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A command takes any setting and builds an engine of them, or says which it takes and refuses the others."""
    command = COMMON[path]
    there = {p.name for p in command.params}
    if "settings" not in there:
        assert not there & {"model", "config_file", "checked"}
        return
    nodes = [node for top in reached(command) for node in ast.walk(top)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if "checked" in there:  # all of them
        assert "llm" in used or "digest" in used
        return
    useful = command.callback.useful
    for setting in useful:  # read by its name, or handed on with its whole section
        assert used & set(setting.split(".")), f"{' '.join(path)} ignores {setting}"
    given = {
        f"{s}.{n}": "auto" if v is None else v for s, vs in Config().to_dict().items() for n, v in vs.items()
    }
    needed = {"compile": ["--target", "v5e"], "convert": ["/nowhere/new"], "simulate": [__file__]}
    arguments = needed.get(path[0], [])
    for setting, value in given.items():
        if setting not in useful:
            assert main([*path, *arguments, "--set", f"{setting}={value}"]) == 2
            assert "has no effect here" in capsys.readouterr().err, setting


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("demo --explain --json", "--json: has no effect with --explain"),
        ("demo --explain --model x", "--model: has no effect with --explain"),
        ("demo --explain --set block_size=32", "--set: has no effect with --explain"),
        ("bench in-place --model x", "No such option '--model'"),
        ("bench in-place --set block_size=32", "No such option '--set'"),
        ("bench kernels --set model.dtype=bfloat16", "No such option '--set'"),
        ("bench cache --checked", "No such option '--checked'"),
        ("bench cache --set scheduler.max_num_seqs=3", "this command uses cache.index, cache.policy"),
        ("convert --set block_size=8 new", "this command uses model.model, model.dtype"),
        ("compile --target v5e --table --model x", "--model: has no effect with --table"),
        ("compile --target v5e --pool-bytes 9", "--pool-bytes: has no effect with --kernels"),
        ("compile --target v5e --bundles --step", "--step and --bundles: each is another thing"),
        ("compile --target v5e --step --table", "--step and --table: each is another thing"),
        ("generate --logprobs x", "--logprobs: is printed with --json only"),
        ("generate --prompt-logprobs x", "--prompt-logprobs: is printed with --json only"),
        ("generate --record-text x", "--record-text: needs --record FILE"),
        ("experiment run --all --set seed=3", "changes one experiment"),
        ("experiment run eviction-policies --seed 3", "eviction-policies draws nothing"),
        ("generate --raw --system x y", "--system: needs a chat prompt"),
    ],
)
def test_F101_options_without_effect_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and part in err, err


def test_F101_a_file_that_serves_several_commands_is_taken_and_its_rest_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\nmodel = "/nowhere"\n[cache]\nblock_size = 32\n')
    assert main(["convert", "--config", str(path), str(tmp_path / "new")]) == 2
    assert "c.toml: cache.block_size has no effect here" in capsys.readouterr().err


def test_json_has_no_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"a": math.nan, "b": [1.5, math.inf, (-math.inf, 2)], "c": {"d": True, "e": None, "f": "nan"}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, None, [None, 2]],
        "c": {"d": True, "e": None, "f": "nan"},
    }


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("t.jsonl", "t.jsonl"),
        ("my log's.csv", "'my log'\"'\"'s.csv'"),
        ("é.csv", "'é.csv'"),
        ("a\u202egnp.csv", "$'a\\xe2\\x80\\xaegnp.csv'"),
        ("a\x1b[2J\n'\\ b", "$'a\\x1b[2J\\x0a\\'\\\\ b'"),
        ("\udcff", "$'\\xff'"),
    ],
)
def test_a_command_that_is_shown_hides_nothing_and_can_be_typed(word: str, typed: str) -> None:
    assert shell(["x", word]) == f"x {typed}" and typed.isprintable()
    if bash := shutil.which("bash"):
        said = subprocess.run([bash, "-c", f"printf %s {typed}"], capture_output=True, check=True).stdout
        assert said == word.encode(errors="surrogateescape")
