"""The committed example report is what its documented commands write today, and the site needs nothing from outside."""

import json
import re
import shlex
from pathlib import Path

import pytest

from pagedjax.cli import main
from pagedjax.report.record import VERSION

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "example" / "twelve-chats.html"


def _commands():
    page = (ROOT / "docs" / "example.md").read_text(encoding="utf-8")
    lines = re.search(r"```\n(.*?)```", page, re.S)[1].splitlines()
    assert all(line.startswith("pagedjax ") for line in lines) and len(lines) == 3
    return [shlex.split(line)[1:] for line in lines]


def _parts(text):
    """(data, markup without data, scripts and styles) of a page."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    bare = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    return json.loads(data), re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", bare)


def _shape(value):
    """Names and kinds, all the way down; of equal entries of a list, one."""
    if isinstance(value, dict):
        return {key: _shape(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(_shape(inner)) for inner in value})
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the commands write here and now."""
    folder = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in _commands():
            assert main([*words, "--quiet"] if words[0] != "report" else words) == 0
        frame = json.loads((folder / "run.jsonl").read_text().splitlines()[0])
        assert frame["version"] == VERSION
        return (folder / "twelve-chats.html").read_text(encoding="utf-8")


REMEDY = (
    "docs/example/twelve-chats.html is old: run the commands of docs/example.md and put the new one there"
)


def test_the_example_is_what_the_commands_write(written):
    ours, theirs = EXAMPLE.read_text(encoding="utf-8"), written
    (data, markup), (new_data, new_markup) = _parts(ours), _parts(theirs)
    (run,), (new_run,) = data["runs"], new_data["runs"]
    for about in (run["about"], new_run["about"]):
        about.pop("settings")  # a new setting alone makes no page old
    assert _shape(data) == _shape(new_data), REMEDY
    assert len(run["requests"]) == len(new_run["requests"]) == 36
    assert run["pool_blocks"] == new_run["pool_blocks"]
    assert shlex.split(run["about"]["command"])[1:] in _commands()
    assert re.findall(r"<(?:section|h\d|div)[^>]*>", markup) == re.findall(
        r"<(?:section|h\d|div)[^>]*>", new_markup
    ), REMEDY


def test_the_example_is_small_and_shows_what_the_text_promises():
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    (run,) = _parts(text)[0]["runs"]
    shared = max(state[2] for state in run["counts"])
    assert shared > 0 and run["left"] and any(r["preemptions"] for r in run["requests"])
    assert "docs/example/twelve-chats.html" in (ROOT / "README.md").read_text(encoding="utf-8")
