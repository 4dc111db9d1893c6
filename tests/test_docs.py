"""The README and the docs are true: examples run, links lead somewhere, commands exist."""

import re
from pathlib import Path

import pytest

from pagedjax.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_readme_example_of_the_manager_prints_what_it_says(capsys):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    (alone,) = [example for example in examples if "LLM(" not in example]
    exec(compile(alone, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["0 no_match 0", "8 below_block_floor 10"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_commands_and_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:pagedjax|tests|docs|experiments|examples|requirements)/[\w/.-]+)`", text):
        made_by_runs = "/results" in path
        assert made_by_runs or (ROOT / path).exists(), f"{page.name}: {path}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for line in re.findall(r"^(?:make) ([a-z-]+)", text, re.M):
        assert line in targets, f"{page.name}: make {line}"
    for name in re.findall(r"`pagedjax ([a-z]+)", text) + re.findall(r"^pagedjax ([a-z]+)", text, re.M):
        assert name in COMMANDS, f"{page.name}: pagedjax {name}"


def test_the_letters_of_the_architecture_page_are_those_of_the_kernels():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = (ROOT / "pagedjax" / "kernels" / "layout.py").read_text(encoding="utf-8")
    for letter, meaning in re.findall(
        r"\b([A-Z]) (tokens this step|sequences|query heads|KV heads|head dim)", source
    ):
        assert re.search(rf"\b{letter} {meaning}", page), f"{letter} {meaning}"


def test_every_page_of_the_site_is_in_a_table_of_contents():
    docs = ROOT / "docs"
    named = {"index"}
    for page in docs.rglob("*.md"):
        for toctree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            entries = [line.strip() for line in toctree.splitlines() if line.strip() and line[0] != ":"]
            named |= {(page.parent / entry).relative_to(docs).as_posix() for entry in entries}
    assert named == {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")}
