"""Every code block of README, CONTRIBUTING and docs: Python runs, commands parse with their settings, TOML is read.

A block that needs a model, or shows a part of something, has `<!-- compiled only: why -->` in the line above it.
"""

import json
import re
import shlex
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from pagedjax.cli import COMMANDS, cli
from pagedjax.config import Config, full_key

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    compiled_only: bool

    @property
    def place(self):
        return f"{self.page}:{self.line}"


def _blocks():
    found = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        at = 0
        while at < len(lines):
            opening = re.match(r"( *)(`{3,})(.*)", lines[at])
            if opening is None:
                at += 1
                continue
            indent, fence, language = opening.groups()
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence)
            text = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
            marked = at > 0 and lines[at - 1].startswith("<!-- compiled only: ")
            name = page.relative_to(ROOT).as_posix()
            found.append(Block(name, at + 1, language.strip(), text, marked))
            at = end + 1
    return found


BLOCKS = _blocks()
NOTEBOOK = "{code-cell} ipython3"


def _of(*languages):
    return [b for b in BLOCKS if b.language in languages]


def _id(block):
    return block.place


def test_every_kind_of_block_is_judged_here():
    judged = {"python", NOTEBOOK, "toml", "json", "", "text"}
    shown = {b.language for b in BLOCKS} - judged
    assert all(
        re.match(r"\{(include|toctree|eval-rst|raw|command-help|mermaid)\}", name) for name in shown
    ), shown
    assert len(_of("python")) > 8 and len(_of(NOTEBOOK)) > 8 and len(_of("toml")) > 2


@pytest.mark.parametrize("block", [b for b in _of("python") if not b.compiled_only], ids=_id)
def test_python_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.place, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("block", [*(b for b in _of("python") if b.compiled_only), *_of(NOTEBOOK)], ids=_id)
def test_python_compiles(block):
    compile(block.text, block.place, "exec")


def test_what_is_only_compiled_is_little():
    assert sum(b.compiled_only for b in BLOCKS) <= 3


# --------------------------------------------------------------------------- commands


def _commands():
    """Each pagedjax command in a plain block, or in an indented one: place and words."""
    lines = [
        (b.page, b.line + i, line) for b in _of("", "text") for i, line in enumerate(b.text.splitlines(), 1)
    ]
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for i, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if (
                line.startswith("    ")
                and "pagedjax " in line
                and not any(line.strip() == x[2].strip() for x in lines)
            ):
                lines.append((name, i, line))
    out = []
    for page, number, line in lines:
        if not re.search(r"(^|[;&|=.] *)pagedjax ", line.strip()):
            continue
        words: list[str] = []
        lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "host", line), posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        for token in [*lexer, ";"]:
            if re.fullmatch(r"[;&|<>]+", token):
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words and words[0] == "pagedjax":
                    out.append((f"{page}:{number}", words[1:]))
                words = []
            else:
                words.append(token)
    return out


ALL_COMMANDS = _commands()


def test_commands_are_found():
    pages = {place.rpartition(":")[0] for place, _ in ALL_COMMANDS}
    assert len(ALL_COMMANDS) > 60 and {"README.md", "docs/kernels.md", "docs/how-to/sweep.md"} <= pages


@pytest.fixture
def any_file(monkeypatch):
    """Files need not be there: what is judged are names of options, and values that are no file."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: Path(value))


def _parsed(words):
    """The command and its parameters, by the real parser."""
    context = click.Context(cli, info_name="pagedjax")
    command = cli
    path = []
    while isinstance(command, click.Group):
        name, *words = words
        path.append(name)
        inner = command.get_command(context, name)
        assert inner is not None, f"{name}: is no command of {command.name}"
        command = inner
        if not isinstance(command, click.Group):
            context = command.make_context(name, list(words), parent=context)
    return " ".join(path), context.params


def _key(text):
    key, equals, _ = text.partition("=")
    assert equals, f"{text}: is no key=value"
    return key


def _check_settings(path, params):
    settings = params.get("settings", ())
    settings = settings if isinstance(settings, tuple) else ()  # a flag of `experiment list`
    if path == "sweep":
        from pagedjax.sim.trial import resolve

        for text in (*settings, *params["grids"]):
            # Of a file that is not there, the measure is not known: the setting is one of either's.
            try:
                resolve(params["measure"] or "simulate", _key(text))
            except ValueError:
                resolve("replay", _key(text))
    elif path == "trace make":
        from inspect import signature

        from pagedjax.sim.synth import GENERATORS

        for text in settings:
            assert _key(text) in signature(GENERATORS[params["kind"]]).parameters, text
    elif path == "fleet":
        from pagedjax.sim.fleet.file import read_fleet

        read_fleet(None if params["config"] is None else params["config"], settings)
    elif path == "experiment run":
        from pagedjax.lab import load, parse_settings, units_of

        if params["name"] is not None:
            units_of(load(params["name"]), smoke=False, seed=0, settings=parse_settings(settings))
    else:
        config = Config()
        for text in settings:
            key, _, value = text.partition("=")
            if key.startswith(("instance.", "router.")):
                continue
            config = config.replace({full_key(key): value}) if value.find(":") < 0 else config


@pytest.mark.parametrize(("place", "words"), ALL_COMMANDS, ids=[place for place, _ in ALL_COMMANDS])
def test_commands_parse_with_their_settings(place, words, any_file):
    path, params = _parsed(words)
    _check_settings(path, params)


@pytest.mark.parametrize(
    "line",
    [
        "generate --nothing",
        "trace nothing FILE",
        "simulate FILE --hardwear x",
        "sweep a.jsonl --grid cache.blok_size=1",
        "generate x --set cache.blok_size=1",
        "trace make chat OUT --set sesions=1",
        "experiment run ledger --set usres=1",
        "fleet a.jsonl --set instance.cashe.policy=lfu",
    ],
)
def test_a_wrong_command_is_seen(line, any_file):
    with pytest.raises((click.ClickException, ValueError, AssertionError)):
        path, params = _parsed(line.split())
        _check_settings(path, params)


def test_options_named_in_the_text_exist():
    """`pagedjax COMMAND … --option` between backticks: the command, or one of its own, has the option."""
    context = click.Context(cli, info_name="pagedjax")
    for page in PAGES:
        for code in re.findall(r"`pagedjax ([a-z][^`\n]*)`", page.read_text(encoding="utf-8")):
            name, *words = code.replace("…", " ").split()
            assert name in COMMANDS, f"{page.name}: pagedjax {code}"
            command = cli.get_command(context, name)
            many = [command, *getattr(command, "commands", {}).values()]
            known = {opt for c in many for p in c.params for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
            for word in words:
                if word.startswith("--"):
                    assert word.partition("=")[0] in known, f"{page.name}: pagedjax {code}"


# --------------------------------------------------------------------------- settings, data


@pytest.mark.parametrize("block", _of("toml"), ids=_id)
def test_toml_is_what_it_says(block, tmp_path):
    tables = tomllib.loads(block.text)
    if "project" in tables:
        from pagedjax.cache.indexes import INDEX_PLUGINS
        from pagedjax.cache.policies import POLICY_PLUGINS

        known = {POLICY_PLUGINS.group, INDEX_PLUGINS.group, "pagedjax.routers", "pagedjax.kernels"}
        assert tables["project"]["entry-points"].keys() <= known
    elif tables.keys() & {"sweep", "grid"}:
        from pagedjax.cli.sweep import _tables
        from pagedjax.sim.trial import read_settings, resolve

        path = tmp_path / "mine.toml"
        path.write_text(block.text)
        read = _tables(path)
        measure = read["sweep"].get("measure", "simulate")
        axes = {resolve(measure, key): values for key, values in read["grid"].items()}
        assert all(isinstance(values, list) for values in axes.values())
        read_settings({resolve(measure, key): value for key, value in read["set"].items()})
    elif "sizes" in tables:
        from pagedjax.kernels.tuning import Tuning

        assert Tuning.parse(tables, "own.toml")
    else:
        from pagedjax.config import load_config

        path = tmp_path / "config.toml"
        path.write_text(block.text)
        load_config(path)


@pytest.mark.parametrize("block", _of("json"), ids=_id)
def test_json_is_json(block):
    json.loads(block.text)


def test_the_samples_of_trace_files_are_read(tmp_path):
    from pagedjax.sim.trace import open_trace

    samples = [b for b in _of("", "text") if b.page == "docs/traces.md" and "pagedjax " not in b.text]
    assert len(samples) > 10
    for block in samples:
        first = block.text[0]
        path = tmp_path / f"sample.{'jsonl' if first == '{' else 'json' if first == '[' else 'csv'}"
        path.write_text(block.text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace = open_trace(path, encode=lambda text: list(text.encode()))
            assert sum(1 for _ in trace) > 0, block.place
