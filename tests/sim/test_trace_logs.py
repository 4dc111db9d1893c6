"""Chat and gateway logs as they are found: each is read as it means, or refused in one line that names the mend."""

# ruff: noqa: E501  (rows stand as they would in a file)

import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagedjax.cli import main
from pagedjax.sim.trace import open_trace

Row = tuple[int, int]  # prompt tokens, answer tokens


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return '"' + text.replace('"', '""') + '"'


def chatml(*messages: tuple[str, str]) -> int:
    """Bytes of a ChatML prompt."""
    return sum(len(f"<|im_start|>{r}\n{c}<|im_end|>\n".encode()) for r, c in messages) + len(
        "<|im_start|>assistant\n"
    )


HI = chatml(("user", "hi"))
BODY = {"model": "m", "messages": said("hi"), "max_tokens": 9}
CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
CALLED = json.dumps(CALL, sort_keys=True)
CHUNKS = [{"choices": [{"index": 0, "delta": {"content": c}}]} for c in ("ye", "s", None)]
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 11}}


def sse(*chunks: object) -> str:
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n"


def gateway(body: object, *reply: object) -> str:
    names = "request_body,response_body"[: 12 if not reply else None]
    return f"{names}\n{','.join(cell(c) for c in (body, *reply))}\n"


READ: dict[str, tuple[str, str | bytes, list[Row]]] = {
    "a byte order mark": ("c.jsonl", "\ufeff" + jsonl({"messages": said("hi", "yes")}), [(HI, 3)]),
    "CRLF": ("c.jsonl", jsonl({"messages": said("hi", "yes")}).replace("\n", "\r\n"), [(HI, 3)]),
    "CRLF and quotes": ("g.csv", gateway(BODY, "yes").replace("\n", "\r\n"), [(HI, 3)]),
    "semicolons": ("g.csv", gateway(BODY, "yes").replace("body,", "body;").replace('","', '";"'), [(HI, 3)]),
    "tabs in a .csv": ("g.csv", gateway(BODY, "yes").replace("body,", "body\t").replace('","', '"\t"'), [(HI, 3)]),
    "capital suffixes": ("C.JSONL.GZ", gzip.compress(jsonl({"prompt": "abc"}).encode()), [(3, 0)]),
    "two gzip members": ("c.jsonl.gz", 2 * gzip.compress(jsonl({"prompt": "abc"}).encode()), [(3, 0), (3, 0)]),
    "null fields": (
        "c.jsonl",
        jsonl({"messages": said("hi"), "num_output": None, "created": None, "user": None, "tools": None, "response": None}),
        [(HI, 0)],
    ),
    "empty cells": ("p.csv", "prompt,num_output\nabc,\nde,5\n", [(3, 0), (2, 5)]),
    "numbers as text": ("c.jsonl", jsonl({"prompt": "abc", "num_output": "7"}), [(3, 7)]),
    "letters of 4 bytes": ("c.jsonl", json.dumps({"prompt": "😀é"}, ensure_ascii=False) + "\n", [(6, 0)]),
    "a NUL": ("c.jsonl", jsonl({"prompt": "a\0b"}), [(3, 0)]),
    "a cell of a megabyte": ("g.csv", gateway({"messages": said("x" * 2**20)}), [(HI - 2 + 2**20, 0)]),
    "a tool call and its result": (
        "c.jsonl",
        jsonl({"messages": [*said("hi"), {"role": "assistant", "content": None, "tool_calls": CALL},
                            {"role": "tool", "tool_call_id": "1", "content": "5"}, {"role": "assistant", "content": "five"}]}),
        [(chatml(("user", "hi"), ("assistant", f"\n{CALLED}"), ("tool", "5")), 4)],
    ),
    "a tool call as the answer": (
        "c.jsonl",
        jsonl({"messages": [*said("hi"), {"role": "assistant", "content": None, "tool_calls": CALL}]}),
        [(HI, len(CALLED))],
    ),
    "a tool call in a response": (
        "g.csv",
        gateway(BODY, {"choices": [{"message": {"content": None, "tool_calls": CALL}}]}),
        [(HI, len(CALLED))],
    ),
    "text parts and a refusal": (
        "c.jsonl",
        jsonl({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]},
                            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}),
        [(HI, 2)],
    ),
    "a prefilled answer stays in the prompt": (
        "g.csv",
        gateway({"messages": said("hi", "ye")}, {"choices": [{"message": {"content": "s"}}]}),
        [(chatml(("user", "hi"), ("assistant", "ye")), 1)],
    ),
    "an error as the response": (
        "g.csv",
        gateway({"messages": said("hi", "ye")}, {"error": {"message": "overloaded"}}),
        [(chatml(("user", "hi"), ("assistant", "ye")), 0)],
    ),
    "no response": ("g.csv", gateway({"messages": said("hi", "ye")}, ""), [(chatml(("user", "hi"), ("assistant", "ye")), 0)]),
    "usage wins over text": (
        "g.csv",
        gateway(BODY, {"choices": [{"message": {"content": "yes"}}], "usage": {"completion_tokens": 7}}),
        [(HI, 7)],
    ),
    "usage is null": ("g.csv", gateway(BODY, {"choices": [{"message": {"content": "yes"}}], "usage": None}), [(HI, 3)]),
    "of several choices the first": (
        "g.csv",
        gateway(BODY, {"choices": [{"message": {"content": "yes"}}, {"message": {"content": "no"}}],
                       "usage": {"completion_tokens": 50}}),
        [(HI, 3)],
    ),
    "a stream": ("g.csv", gateway(BODY, sse(*CHUNKS)), [(HI, 3)]),
    "a stream with usage": ("g.csv", gateway(BODY, sse(*CHUNKS, USAGE)), [(HI, 11)]),
    "a stream of another choice": (
        "g.csv",
        gateway(BODY, sse(*CHUNKS, {"choices": [{"index": 1, "delta": {"content": "no"}}]})),
        [(HI, 3)],
    ),
    "a list of chunks": ("g.jsonl", jsonl({"body": BODY, "response": [*CHUNKS, USAGE]}), [(HI, 11)]),
    "a streamed tool call": (
        "g.csv",
        gateway(BODY, sse({"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]})),
        [(HI, len("\nf{}"))],
    ),
    "an answer that is JSON": ("c.jsonl", jsonl({"messages": said("hi"), "response": '{"a": 1}'}), [(HI, 8)]),
    "an answer that is cut JSON": ("c.jsonl", jsonl({"messages": said("hi"), "response": '{"a": '}), [(HI, 6)]),
    "JSON quoted twice": ("g.csv", gateway(json.dumps(json.dumps(BODY))), [(HI, 0)]),
    "one prompt in a list": ("g.jsonl", jsonl({"body": {"prompt": ["abc"]}}, {"body": {"prompt": [[1, 2]]}}), [(3, 0), (2, 0)]),
    "the Responses API": (
        "g.jsonl",
        jsonl({"body": {"instructions": "be", "input": "hi"},
               "response": {"output": [{"type": "message", "content": [{"type": "output_text", "text": "yes"}]}]}},
              {"body": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
               "response": {"output": [], "usage": {"output_tokens": 5}}}),
        [(chatml(("system", "be"), ("user", "hi")), 3), (HI, 5)],
    ),
    "items of the Responses API": (
        "g.jsonl",
        jsonl({"body": {"input": [{"role": "user", "content": "hi"}, {"type": "function_call", "name": "f"},
                                  {"type": "function_call_output", "output": "5"}]}}),
        [(chatml(("user", "hi"), ("assistant", '\n[{"name": "f", "type": "function_call"}]'), ("tool", "5")), 0)],
    ),
    "an index column without a name": ("g.csv", ",prompt\n0,abc\n", [(3, 0)]),
    "a developer speaks": (
        "c.jsonl",
        jsonl({"messages": [{"role": "developer", "content": "x"}, *said("hi")]}),
        [(chatml(("developer", "x"), ("user", "hi")), 0)],
    ),
    "dates of a warehouse": ("c.jsonl", jsonl({"prompt": "a", "created_at": "2024-05-01 10:00:00 UTC"}), [(1, 0)]),
    "dates to the nanosecond": ("c.jsonl", jsonl({"prompt": "a", "created_at": "2024-05-01T10:00:00.123456789Z"}), [(1, 0)]),
}  # fmt: skip

REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "nothing": ("c.jsonl", "", ":1: no line holds a record"),
    "blank lines": ("c.jsonl", "\n \n\n", ":3: no line holds a record"),
    "an empty gzip": ("c.jsonl.gz", b"", ":1: no line holds a record"),
    "a cut gzip": ("c.jsonl.gz", gzip.compress(jsonl({"prompt": "a"}).encode())[:-9], "the compressed stream ends early"),
    "no gzip": ("c.jsonl.gz", jsonl({"prompt": "a"}), "damaged compression (Not a gzipped file"),
    "garbage behind a gzip": ("c.jsonl.gz", gzip.compress(jsonl({"prompt": "a"}).encode()) + b"xx", "damaged compression"),
    "a gzip by another name": ("c.jsonl", gzip.compress(b"{}"), "the file is a gzip file: name it .gz"),
    "bzip2": ("c.jsonl", bz2.compress(b"{}" * 99), "the file is a bzip2 file: unpack it first"),
    "UTF-16": ("c.jsonl", jsonl({"prompt": "a"}).encode("utf-16"), "the file is UTF-16: convert it first (iconv"),
    "Latin-1": ("c.jsonl", '{"prompt": "caf\u00e9"}\n'.encode("latin-1"), ":1: byte 0xe9 is not UTF-8: must be UTF-8"),
    "a lone surrogate": ("c.jsonl", '{"prompt": "\\ud800"}\n', ":1: a lone surrogate: must be text that UTF-8 can hold"),
    "no message": ("c.jsonl", jsonl({"messages": []}), ":1: an empty list of messages: must be a non-empty list"),
    "null messages": ("c.jsonl", jsonl({"messages": said("hi")}, {"messages": None}), ":2: messages=NoneType: must be a non-empty"),
    "a picture": (
        "c.jsonl",
        jsonl({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
        ":1: a content part of type 'image_url': must be text: what stands for a picture or a sound has no tokens here",
    ),
    "a number as content": ("c.jsonl", jsonl({"messages": [{"role": "user", "content": 5}]}), "content=int: must be text"),
    "no role": ("c.jsonl", jsonl({"messages": [{"content": "x"}]}), "a message without a role"),
    "half a token": ("c.jsonl", jsonl({"prompt": "a", "num_output": 7.5}), "num_output=7.5: must be a whole number"),
    "an answer of -1": ("g.csv", gateway(BODY, {"usage": {"completion_tokens": -1}}), ":2: completion_tokens=-1: must be"),
    "null where a length must be": ("l.jsonl", jsonl({"input_tokens": 5, "output_tokens": None}), "output_tokens=None: must be a number"),
    "a cut body": ("g.csv", gateway(json.dumps(BODY)[:-5]), ":2: wrong JSON at column"),
    "a cut response": ("g.csv", gateway(BODY, '{"choices": ['), ":2: wrong JSON at column"),
    "a cut stream": ("g.csv", gateway(BODY, 'data: {"choices": ['), ":2: wrong JSON at column"),
    "a null body": ("g.csv", gateway("null"), ":2: request_body=NoneType: must be an object, or its JSON text"),
    "an embedding": ("g.csv", gateway({"input": "abc"}), ":2: an `input` without messages: must be of the Responses API: an embedding"),
    "turns that stand elsewhere": (
        "g.csv",
        gateway({"input": "abc", "instructions": "x", "previous_response_id": "r"}),
        ":2: previous_response_id: must be absent: the turns before stand elsewhere",
    ),
    "several prompts": ("g.csv", gateway({"prompt": ["a", "b"]}), ":2: 2 prompts in one request: must be one"),
    "cells not quoted": ("g.csv", 'request_body\n"{\\"messages\\": []}"\n', ":2: wrong CSV"),
    "no comma in an array": ("a.json", '[{"prompt": "a"} {"prompt": "b"}]', "behind element 1: must be an array of objects with commas"),
    "a comma too many": ("a.json", '[{"prompt": "a"},]', "a comma before the end of the array"),
    "an infinite time": ("c.jsonl", '{"prompt": "a", "arrival_s": 1e400}\n', "arrival_s=inf: must be a number"),
    "a switch as a time": ("c.jsonl", jsonl({"prompt": "a", "created": True}), "created=True: must be a number"),
    "another country's date": ("c.jsonl", jsonl({"prompt": "a", "created_at": "05/01/2024"}), "must be an ISO date and time"),
    "brackets without end": ("c.jsonl", '{"messages": ' + "[" * 10**5 + "]" * 10**5 + "}\n", "JSON nested too deeply"),
}  # fmt: skip


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("name", READ)
def test_what_is_odd_is_read_as_it_means(tmp_path: Path, name: str) -> None:
    file, content, expected = READ[name]
    trace = open_trace(write(tmp_path, file, content), encode=encode)
    assert [(r.num_input, r.num_output) for r in trace] == expected
    for request in trace:
        assert request.output_ids is None or len(request.output_ids) == request.num_output


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file, content, message = REFUSED[name]
    assert main(["trace", "info", str(write(tmp_path, file, content)), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert len(err) < 1500


def test_a_pipe_is_refused_before_anybody_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "t.jsonl")
    for command in (["trace", "info"], ["simulate"], ["curve"], ["advise"]):
        assert main([*command, str(tmp_path / "t.jsonl")]) == 2
        assert "a pipe: traces are read more than once; save it to a file first" in capsys.readouterr().err


def test_what_was_answered_is_found_by_the_next_turn(tmp_path: Path) -> None:
    """A tool call is written in the answer as the template writes it in the next prompt."""
    first: list[dict[str, Any]] = [*said("hi"), {"role": "assistant", "content": "", "tool_calls": CALL}]
    path = write(tmp_path, "c.jsonl", jsonl({"messages": first}, {"messages": [*first, *said("so", "no")]}))
    asked, then = open_trace(path, encode=encode)
    assert asked.output_ids is not None and asked.token_ids is not None and then.token_ids is not None
    both = [*asked.token_ids.tolist(), *b"\n", *asked.output_ids.tolist()]
    assert then.token_ids.tolist()[: len(both)] == both
