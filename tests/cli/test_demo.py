"""The demo's words: indented at 80 columns, ticks only for what is right, every term in the glossary."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pagedjax.cache.protocol import MissReason
from pagedjax.cli.demo import Demo, _mark, unsupported

CAT = "What is the name of the cat?"


@pytest.mark.parametrize(
    ("answer", "mark"),
    [
        ("The cat is named Biscuit.", "✓"),
        ("The cat is a sea lion named Biscuit.", "~ names Biscuit; not in the text: lion"),
        ("The cat is called Tom.", "✗ expected: Biscuit"),
    ],
)
def test_F103_a_tick_is_for_what_the_document_says(answer, mark):
    assert mark in _mark(CAT, "Biscuit", answer)
    assert ("✓" in _mark(CAT, "Biscuit", answer)) is (mark == "✓")


def test_F103_an_answer_is_judged_by_document_and_question():
    assert unsupported("Who built the lighthouse?", "Ada Hollis, a British engineer, built it in 1874.") == [
        "british"
    ]
    assert unsupported(CAT, "The grey cat's name is Biscuit.") == []


def test_F103_lines_keep_their_indent_at_80_columns():
    out = io.StringIO()
    console = Console(file=out, width=80)
    Demo(None, console.print, wraps=True).line("word " * 60, 4)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) > 3 and all(line.startswith("    word") and len(line) <= 80 for line in lines)
    piped = io.StringIO()
    Demo(None, Console(file=piped, width=80, soft_wrap=True).print).line("\n" + "word " * 60 + "end", 4)
    assert piped.getvalue() == "\n    " + "word " * 60 + "end\n"


def test_F103_every_reason_a_match_stops_for_is_in_the_glossary():
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    assert [reason for reason in MissReason if f"| {reason} |" not in glossary] == []
