"""Bad files and bad numbers: one line, exit code 2, nothing on stdout, and before any long work."""

import json
import subprocess
import sys

import pytest

from pagedjax.cli import COMMANDS, main


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command line in an empty folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        code = main([*args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def _refused(answer, *parts):
    code, out, err = answer
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    for part in parts:
        assert part in err


def _groups():
    """Commands with commands of their own, found by asking click."""
    import importlib

    import click

    for name, module in COMMANDS.items():
        command = importlib.import_module(module).command
        if isinstance(command, click.Group):
            yield name, list(command.commands)


SUBCOMMANDS = [(group, name) for group, names in _groups() for name in names]


@pytest.mark.parametrize(("group", "name"), SUBCOMMANDS, ids=lambda part: part)
def test_every_subcommand_has_help(run, group, name):
    code, out, err = run(group, name, "--help")
    assert (code, err) == (0, "") and out.startswith(f"Usage: pagedjax {group} {name}")


@pytest.mark.parametrize(("group", "name"), SUBCOMMANDS, ids=lambda part: part)
def test_a_mistyped_subcommand_names_the_nearest(run, group, name):
    _refused(run(group, name + "e"), name + "e", "Did you mean", f"'{name}'", f"pagedjax {group} --help")


@pytest.mark.parametrize("group", [name for name, _ in _groups()])
def test_a_group_alone_shows_its_help(run, group):
    code, out, err = run(group)
    assert (code, out) == (2, "") and err.startswith(f"Usage: pagedjax {group}")


@pytest.mark.parametrize("command", ["demo", "generate", "doctor", "convert", "bench decode"])
def test_a_mistyped_option_names_the_nearest(run, command):
    _refused(run(*command.split(), "--confg", "x"), "--confg", "--config", f"pagedjax {command} --help")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"x = [", ["is not valid TOML"]),
        (b"\xff\xfe", ["is not valid TOML"]),
        (b"[cache]\nblok_size = 16\n", ["cache.blok_size", "did you mean cache.block_size?"]),
        (b"[cach]\nblock_size = 16\n", ["cach.block_size", "did you mean cache.block_size?"]),
        (b'[cache]\nblock_size = "a"\n', ["cache.block_size=a", "whole number"]),
        (b"[cache]\nblock_size = 24\n", ["cache.block_size=24", "power of two", "try 16 or 32"]),
        (b"[cache]\nnum_blocks = 0\n", ["cache.num_blocks=0", "at least 2"]),
    ],
)
@pytest.mark.parametrize("command", [("generate", "x"), ("doctor",), ("bench", "decode")], ids=" ".join)
def test_a_bad_config_file_is_named(run, tmp_path, command, text, parts):
    (tmp_path / "bad.toml").write_bytes(text)
    _refused(run(*command, "--config", "bad.toml"), "bad.toml", *parts)


def test_a_folder_is_no_config_file(run, tmp_path):
    _refused(run("generate", "x", "--config", str(tmp_path)), str(tmp_path), "is not a file", ".toml")


@pytest.mark.parametrize("command", [("generate", "x"), ("convert", "target")], ids=" ".join)
@pytest.mark.parametrize(
    ("files", "model", "parts"),
    [
        ({"junk.gguf": b"junk"}, "junk.gguf", ["junk.gguf", "GGUF"]),
        ({"cut.gguf": b"GGUF\3\0\0\0"}, "cut.gguf", ["cut.gguf"]),
        ({"m/other": b""}, "m", ["m/config.json", "check the path"]),
        ({"m/config.json": b"{"}, "m", ["config.json", "must be a JSON object"]),
        ({}, "gone.gguf", ["gone.gguf", "no such file"]),
        ({}, "", ["model.model=''", "smollm2-135m"]),
    ],
    ids=["no magic", "cut short", "no config", "broken config", "missing", "no name"],
)
def test_a_bad_model_is_named(run, tmp_path, command, files, model, parts):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    _refused(run(*command, "--model", model, "--cache-dir", str(tmp_path / "cache"), "--quiet"), *parts)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--file", "latin.txt"], ["latin.txt", "UTF-8"]),
        (["--file", "."], ["is not a file"]),
        (["--file", "a\x1b[2J\u202e"], ["--file a\\x1b[2J\\u202e: no such file"]),
        (["x", "--stop", ""], ["stop=''", "empty"]),
        (["x", "--temperature", "nan"], ["temperature=nan"]),
        (["x", "--top-k", "-3"], ["top_k=-3"]),
        (["x", "--seed", "-1"], ["seed=-1"]),
        (["x", "--set", "memory_bytes=lots"], ["cache.memory_bytes=lots", "512MiB"]),
        (["x", "--set", "memory_bytes=-1"], ["cache.memory_bytes=-1", "positive"]),
        (["x", "--set", "dtype=float32"], ["dtype", "model.dtype or cache.dtype"]),
    ],
)
def test_bad_prompts_and_numbers(run, tmp_path, args, parts):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    _refused(run("generate", *args), *parts)


@pytest.mark.parametrize("option", ["--batch", "--context", "--tokens", "--rounds"])
def test_a_bench_refuses_zero_before_it_loads_a_model(run, monkeypatch, option):
    from pagedjax.cli.options import Common

    monkeypatch.setattr(Common, "llm", lambda self, **hooks: pytest.fail("loaded a model"))
    _refused(run("bench", "decode", option, "0"), option, "0")


@pytest.mark.parametrize("setting", ["policy=lruu", "index=hsh"])
def test_bench_cache_refuses_a_name_before_it_measures(run, monkeypatch, setting):
    from pagedjax.bench import cache

    monkeypatch.setattr(cache, "run", lambda *args, **options: pytest.fail("measured"))
    _refused(run("bench", "cache", "--set", setting), setting.split("=")[1], "must be one of")


def test_stdout_of_a_process_is_json_alone(tmp_path):
    """The entry point in a process of its own, where libraries may write to the real stdout and stderr."""
    start = "import sys; from pagedjax.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", start, "doctor", "--json", "--cache-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["implementations"]["xla"] == "serves"
    assert "Traceback" not in done.stderr


def test_a_library_that_is_not_installed_is_named_without_a_traceback(monkeypatch, capsys):
    def missing(*_, **__):
        raise ModuleNotFoundError("hash=xxh3_128: needs xxhash; pip install 'pagedjax[hashes]'")

    monkeypatch.setattr("click.Group.invoke", missing)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: hash=xxh3_128: needs xxhash; pip install 'pagedjax[hashes]'"
    ]


def test_the_installed_command_ends_at_once_when_interrupted():
    """XLA's threads may still compile, and crash an interpreter that is taken down around them."""
    code = (
        "import atexit, pagedjax.cli as cli\n"
        "atexit.register(print, 'taken down')\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "cli.cli.main = stop\n"
        "print('kept', end='')\n"
        "cli.script()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "kept", "interrupted\n")
