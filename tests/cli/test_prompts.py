"""Prompts for `generate` that cannot be read: one line that says where they stand, and exit code 2."""

import gzip
import io

import pytest

from pagedjax.cli import main
from pagedjax.cli.generate import _from_file

BINARY = b"\xff\xfe".decode(errors="surrogateescape")  # as Python hands over such an argument
PROMPTS = {
    "latin.txt": b"one\ncaf\xe9\n",
    "empty.txt": b"\n",
    "nest.jsonl": b'{"prompt": "x"}\n' + b"[" * 100_000,
    "digits.jsonl": b'{"token_ids": [' + b"1" * 5000 + b"]}",
    "cut.jsonl": b'{"prompt": ',
    "list.jsonl": b"[1]",
    "null.jsonl": b'{"prompt": "", "messages": null}',
    "half.jsonl": b'{"prompt": "\\ud800"}',
    "said.jsonl": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
}


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Run `generate` beside the files of PROMPTS and see it refuse."""
    for name, content in PROMPTS.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)

    def call(args, parts):
        code = main(["generate", *args])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
        for part in parts:
            assert part in err

    return call


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--file", "latin.txt"], ["latin.txt:2: byte 0xe9 is not UTF-8", "convert it first"]),
        (["--file", "empty.txt"], ["empty.txt:1", "no line holds a record"]),
        (["--file", "nest.jsonl"], ["nest.jsonl:2", "nested too deeply"]),
        (["--file", "digits.jsonl"], ["digits.jsonl:1", "thousands of digits"]),
        (["--file", "cut.jsonl"], ["cut.jsonl:1", "wrong JSON at column"]),
        (["--file", "list.jsonl"], ["list.jsonl:1", "must be an object with one of"]),
        (["--file", "null.jsonl"], ["null.jsonl:1", "must be an object with one of"]),
        (["--file", "half.jsonl"], ["half.jsonl:1", "is not UTF-8 text; convert it first"]),
        (["--file", "said.jsonl"], ["said.jsonl:1", "is not UTF-8 text; convert it first"]),
        ([BINARY], ["prompt: is not UTF-8 text; convert it first"]),
        (["--raw", BINARY], ["prompt: is not UTF-8 text; convert it first"]),
        (["x", "--system", BINARY], ["--system: is not UTF-8 text; convert it first"]),
        (["x", "--salt", BINARY], ["--salt: is not UTF-8 text; convert it first"]),
        (["x", "--stop", BINARY], ["--stop: is not UTF-8 text; convert it first"]),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named(refused, args, parts):
    refused(args, parts)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_binary_prompt_on_stdin_is_named(refused, monkeypatch, errors):
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    refused(["--raw", "-"], ["prompt", "is not UTF-8 text; convert it first"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "\ufeffone\u2028two\n\nthree"),
        ("p.jsonl", '\ufeff{"prompt": "one\u2028two"}\n{"prompt": "three"}\n'),
        ("p.jsonl.gz", '{"prompt": "one\u2028two"}\n{"prompt": "three"}\n'),
    ],
)
def test_a_line_of_a_prompt_file_is_a_prompt(tmp_path, name, content):
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    jobs = list(_from_file(tmp_path / name, chat=False, system=None))
    assert jobs == [{"prompt": "one\u2028two"}, {"prompt": "three"}]
