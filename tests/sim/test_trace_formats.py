"""What people have: a small file of every format, with its counts, times and units; each misuse in one line."""

# ruff: noqa: E501  (samples stand as they would in a file)

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.sim.records import TraceError
from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.synth import system_prompt
from pagedjax.sim.trace import FORMATS, anonymous, open_trace, write_anonymous, write_trace


def utf8(text: str) -> list[int]:
    return list(text.encode())


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _ids(n: int, t: float, tokens: int, **more: object) -> dict[str, object]:
    return {"timestamp": t, "input_length": tokens, "output_length": 5, "hash_ids": list(range(n)), **more}


def _said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


BODY = json.dumps({"model": "m", "messages": _said('hi\n\n"there"'), "user": "u1"})
ANSWER = json.dumps({"choices": [{"message": {"content": "yes"}}], "usage": {"completion_tokens": 7}})
CHATML = len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


# Name → file, text, options, format, (arrival, prompt tokens, answer tokens, session) of each request.
SAMPLES: dict[str, tuple[str, str, dict[str, Any], str, list[tuple[float, int, int, str]]]] = {
    "openai-chat": (
        "chat.jsonl",
        jsonl(
            {"messages": _said("hi", "yes"), "created": 1_700_000_000, "user": "u"},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "created": 1_700_000_004.5},
        ),
        {},
        "chat",
        [(0.0, CHATML, 3, ""), (4.5, CHATML, 0, "")],
    ),
    "openai-batch": (
        "batch.jsonl",
        jsonl(
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": _said("hi")}},
            {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}},
            {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6, 7]}},
        ),
        {"output_tokens": 9},
        "gateway",
        [(0.0, CHATML, 9, ""), (0.0, 5, 9, ""), (0.0, 3, 9, "")],
    ),
    "sharegpt": (
        "sharegpt.json",
        json.dumps(
            [
                {
                    "id": "x",
                    "conversations": [
                        {"from": "human", "value": "hi"},
                        {"from": "gpt", "value": "yes"},
                        {"from": "human", "value": "so"},
                        {"from": "gpt", "value": "no"},
                    ],
                },
                {"id": "y", "conversations": [{"from": "human", "value": "hi"}]},
            ],
            indent=1,
        ),
        {},
        "sharegpt",
        [
            (0.0, CHATML, 3, "x"),
            (0.0, CHATML + len("yes<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"), 2, "x"),
        ],
    ),
    "chat-csv": (
        "chats.csv",
        "messages,created_at\n" + cell(json.dumps(_said("hi", "yes"))) + ",2024-05-01T10:00:00\n"
        + cell(json.dumps(_said("hi"))) + ",2024-05-01 10:00:02\n",
        {},
        "chat",
        [(0.0, CHATML, 3, ""), (2.0, CHATML, 0, "")],
    ),
    "prompt-csv": (
        "prompts.csv",
        "when,question,reply\n0,\"two\n\nlines\",ab\n1.5,one,\n",
        {"columns": {"prompt": "question", "time": "when", "answer": "reply"}, "time_unit": "s"},
        "prompts",
        [(0.0, 10, 2, ""), (1.5, 3, 0, "")],
    ),
    "gateway-csv": (
        "gateway.csv",
        "timestamp,request_body,response_body,status\n"
        + f"2024-05-01T10:00:00Z,{cell(BODY)},{cell(ANSWER)},200\n"
        + f"2024-05-01T10:00:02.5Z,{cell(BODY)},,500\n",
        {},
        "gateway",
        [(0.0, CHATML + 9, 7, ""), (2.5, CHATML + 9, 0, "")],
    ),
    "vllm-benchmark": (
        "bench.json",
        json.dumps(
            {
                "date": "20240501-100000", "backend": "vllm", "num_prompts": 3, "request_rate": "inf",
                "input_lens": [10, 20, 30], "output_lens": [3, 0, 5], "ttfts": [0.1, 0, 0.3],
                "itls": [[0.01], [], [0.02]], "errors": ["", "timeout", ""], "start_times": [50.0, 52.0, 51.0],
            }
        ),
        {},
        "benchmark",
        [(0.0, 10, 3, ""), (1.0, 30, 5, ""), (2.0, 20, 0, "")],
    ),
    "sglang-benchmark": (
        "bench.jsonl",
        jsonl({"backend": "sglang", "input_lens": [8], "output_lens": [2]}, {"input_lens": [9], "output_lens": [1]}),
        {},
        "benchmark",
        [(0.0, 8, 2, ""), (0.0, 9, 1, "")],
    ),
    "mooncake-sessions": (
        "mooncake.jsonl",
        jsonl(
            _ids(2, 1000, 1000, session_id="a"),
            {k: v for k, v in _ids(3, 0, 1500, session_id="a", delay=9000).items() if k != "timestamp"},
            _ids(1, 2000, 100, session_id="b"),
        ),
        {},
        "mooncake",
        [(1.0, 1000, 5, "a"), (2.0, 100, 5, "b"), (10.0, 1500, 5, "a")],
    ),
    "qwen-bailian": (
        "qwen_traceA_blksz_16.jsonl",
        jsonl(
            _ids(33, 61.114, 521, chat_id=159, parent_chat_id=-1, type="text", turn=1),
            _ids(34, 80.5, 530, chat_id=160, parent_chat_id=159, type="text", turn=2),
        ),
        {},
        "bailian",
        [(61.114, 521, 5, "159"), (80.5, 530, 5, "159")],
    ),
    "burstgpt": (
        "BurstGPT_1.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n",
        {},
        "lengths",
        [(5.0, 472, 18, ""), (45.0, 1087, 0, "")],
    ),
    "azure-2023": (
        "azure23.csv.gz",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n",
        {},
        "lengths",
        [(0.0, 374, 44, ""), (4.314579, 396, 109, "")],
    ),
    "azure-2024": (
        "azure24.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01.009930+00:00,2399,6\n",
        {},
        "lengths",
        [(0.0, 2162, 5, ""), (1.0, 2399, 6, "")],
    ),
    "vidur": (
        "vidur.csv",
        "arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio\n0.25,100,10,10.0\n1.5,200,20,10.0\n",
        {},
        "lengths",
        [(0.25, 100, 10, ""), (1.5, 200, 20, "")],
    ),
    "agentic": (
        "agents.jsonl",
        jsonl({"id": "s", "block_size": 64, "requests": [{"t": 2, "in": 70, "out": 3, "hash_ids": [1]}]}),
        {},
        "agentic",
        [(2.0, 70, 3, "s")],
    ),
    "alpaca": (
        "alpaca.json",
        json.dumps([{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Hi", "output": "Ho"}]),
        {},
        "alpaca-text",
        [(0.0, 7, 1, ""), (0.0, 2, 2, "")],
    ),
    "alpaca-lengths": ("lengths.json", '[{"id": "1", "L_gt": 54}]', {}, "alpaca", [(0.0, 19, 54, "")]),
    "tokens": (
        "tokens.jsonl",
        jsonl(
            {"input_tok_ids": [1, 2], "output_toks": 4, "arrival_time_ns": 1_700_000_000_000_000_000},
            {"input_tok_ids": [1], "output_toks": 4, "arrival_time_ns": 1_700_000_001_000_000_001},
        ),
        {},
        "tokens",
        [(0.0, 2, 4, ""), (1.000000001, 1, 4, "")],
    ),
}  # fmt: skip


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_every_format_is_read(tmp_path: Path, name: str) -> None:
    file, text, options, kind, expected = SAMPLES[name]
    trace = open_trace(write(tmp_path, file, text), encode=utf8, **options)
    assert trace.format == kind
    rows = [(r.arrival_s, r.num_input, r.num_output, r.session) for r in trace]
    assert rows == [(pytest.approx(t), *rest) for t, *rest in expected]
    assert trace.timed == any(t > 0 for t, *_ in expected)
    for request in trace:
        if trace.granularity == 1:
            assert len(request.token_ids) == request.num_input
            assert request.output_ids is None or len(request.output_ids) == request.num_output
    # What was read is written and read again.
    write_trace(tmp_path / "again.jsonl", trace, granularity=trace.granularity, tail_ids=trace.tail_ids)
    again = [
        (r.arrival_s, r.num_input, r.num_output, r.session) for r in open_trace(tmp_path / "again.jsonl")
    ]
    assert again == [(pytest.approx(t), *rest) for t, *rest in rows]


@pytest.mark.parametrize("name", SAMPLES)
def test_trace_info_counts_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    from pagedjax.cli import main

    file, text, options, kind, expected = SAMPLES[name]
    typed = [f"--column={role}={column}" for role, column in options.get("columns", {}).items()]
    typed += [f"--{key.replace('_', '-')}={value}" for key, value in options.items() if key != "columns"]
    assert main(["trace", "info", str(write(tmp_path, file, text)), *typed]) == 0
    out = capsys.readouterr().out
    times, inputs, outputs, _ = zip(*expected)
    span = f"over {max(times):,.1f} s" if any(times) else "without times"
    assert f"requests          {len(expected):,} {span}" in out and f"({kind}, " in out
    assert f"{sum(inputs) / len(inputs):,.1f} in, {sum(outputs) / len(outputs):,.1f} out (means)" in out
    none = outputs.count(0)
    assert (f"without an answer {none} of them" in out) == (none > 0)
    assert ("hit rate          unknown" in out) == (
        open_trace(tmp_path / file, encode=utf8, **options).granularity == 0
    )


def test_every_format_has_a_sample_and_a_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
    for name in FORMATS:
        assert f"`{name}`" in page, f"docs/traces.md says nothing of {name}"
    tried = {open_kind for *_, open_kind, _ in SAMPLES.values()}
    assert tried >= {"chat", "gateway", "sharegpt", "prompts", "benchmark", "mooncake", "bailian", "lengths"}


def test_parquet_is_read_as_its_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"question": ["abc", "de"], "at": [1.0, 2.0], "n": [4, 5]}), path)
    columns = {"prompt": "question", "time": "at", "output": "n"}
    trace = open_trace(path, encode=utf8, columns=columns, time_unit="s")
    assert [(r.arrival_s, r.num_input, r.num_output) for r in trace] == [(1.0, 3, 4), (2.0, 2, 5)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"p\.parquet:1: damaged parquet"):
        list(open_trace(path, encode=utf8, columns=columns))


AZURE = SAMPLES["azure-2023"][1]
BURST = SAMPLES["burstgpt"][1]
MISUSES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no such column": ("a.csv", "q,r\na,b\n", {"columns": {"prompt": "question"}}, "no column 'question': must be one of q, r"),
    "no such role": ("a.csv", "q,r\na,b\n", {"columns": {"promt": "q"}}, "column promt=q: must be one of answer, "),
    "no known column": ("a.csv", "q,r\na,b\n", {}, r"fields \['q', 'r'\]: must hold .* --column prompt=NAME"),
    "unit unknown": ("a.jsonl", jsonl({"prompt": "a", "time": 7}), {}, "time=7: its unit is unknown; give one of s, ms"),
    "epoch of another unit": ("m.jsonl", jsonl(_ids(2, 1_700_000_000, 1000)), {}, r"in s it would be a date of 2023; give the unit \(--time-unit s\)"),
    "seconds as milliseconds": ("m.jsonl", jsonl(_ids(2, 61.5, 1000)), {}, "timestamp=61.5: is no whole number of milliseconds; give the unit"),
    "16 tokens an id": ("m.jsonl", jsonl(_ids(33, 61, 521)), {}, "33 hash_ids for input_length=521: fit 16 tokens an id, not 512; give the granularity"),
    "granularity of text": ("a.jsonl", jsonl({"prompt": "a"}), {"granularity": 16}, "granularity=16: .* holds no block ids"),
    "granularity that does not fit": ("m.jsonl", jsonl(_ids(2, 1, 1000)), {"granularity": 16}, r"must be ceil\(1000 / 16\) = 63"),
    "granularity against the file": ("m.jsonl", jsonl(_ids(2, 1, 1000, block_size=512)), {"granularity": 16}, "block_size=512: must be granularity=16 as given"),
    "sessions of lengths": ("a.csv", AZURE, {"common_prefix": True}, "common_prefix: .* holds no agentic sessions"),
    "mixed rows": ("a.jsonl", jsonl({"prompt": "a"}, {"messages": _said("hi")}), {}, ":2: fields .*must hold a non-empty string `prompt`"),
    "some rows without a time": ("a.csv", BURST.replace("45,", ","), {}, r":3: no time \(TIMESTAMP or .*: must have one as the first row has"),
    "some rows with a time": ("a.jsonl", jsonl({"prompt": "a"}, {"prompt": "a", "arrival_s": 3}), {}, ":2: a time .*: must have none as the first row has"),
    "mixed times": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1,1\n5,1,1\n", {}, ":3: TIMESTAMP='5': must be a date as in the first row"),
    "a batch's output": ("b.jsonl", jsonl({"id": "x", "custom_id": "a", "response": {"body": {}}, "error": None}), {}, "the output of a batch: holds no prompts; give the batch's input file"),
    "messages that are no JSON": ("c.csv", "messages\nhi\n", {}, ":2: wrong JSON at column 1 .* messages must be a JSON list of messages"),
    "times of a batch's output": ("b.jsonl", jsonl({"body": {"choices": []}}), {}, "the output file of a batch holds no prompts"),
    "a picture": ("c.jsonl", jsonl({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), {}, "a content part of type 'image_url': must be text"),
    "unsorted": ("a.csv", BURST.replace("45,", "4,"), {}, r":3: time 4 s after 5 s: times must not decrease; sort the file \(--sort\)"),
    "no unit of that name": ("a.csv", BURST, {"time_unit": "h"}, "time_unit=h: must be one of s, ms, us, ns"),
    "cells": ("a.csv", BURST + "1,2\n", {}, ":4: 2 cells: must be 6 as in the header"),
    "array that ends early": ("a.json", '[{"prompt": "a"}, {"prompt"', {}, "a.json:1: wrong JSON in element 2"),
    "array of numbers": ("a.json", '[{"prompt": "a"}, 5]', {}, "an entry '5]': must be an array of objects"),
    "body that is no JSON": ("g.csv", "body\nabc\n", {}, ":2: wrong JSON at column 1 .* body must be a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_answered_by_one_line_that_names_the_mend(tmp_path: Path, name: str) -> None:
    file, text, options, message = MISUSES[name]
    with pytest.raises(ValueError, match=message) as caught:
        list(open_trace(write(tmp_path, file, text), encode=utf8, **options))
    assert "\n" not in str(caught.value)


def test_B136_ids_keep_all_their_64_bits(tmp_path: Path) -> None:
    far = [2**59, 2**60, 2**61, 2**62, 2**63 - 1]
    for step in (2**32, *far[:-1]):
        path = write(
            tmp_path,
            "m.jsonl",
            jsonl(*(_ids(1, i, 500, hash_ids=[h]) for i, h in enumerate((7, 7 + step, 7)))),
        )
        for block_size in (512, 16, 1):
            counts = replay(open_trace(path), block_size, Unbounded())
            per = -(-500 // block_size)
            assert (counts.blocks, counts.hit_blocks) == (3 * per, per), (step, block_size)
        assert write_anonymous(tmp_path / "anon.jsonl", anonymous(open_trace(path)), "mooncake") == 3
        assert replay(open_trace(tmp_path / "anon.jsonl"), 512, Unbounded()).hit_blocks == 1
    for bad in (2**63, 2**63 + 7, 2**64 + 7):
        path = write(
            tmp_path, "m.jsonl", jsonl(_ids(1, 0, 500, hash_ids=[7]), _ids(1, 1, 500, hash_ids=[bad]))
        )
        with pytest.raises(TraceError, match=f":2: hash_ids holds {bad} to {bad}: ids must fit int64"):
            list(open_trace(path))


def test_B138_rows_without_an_answer_are_counted_apart_and_a_window_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedjax.cli import main

    path = str(write(tmp_path, "BurstGPT_1.csv", BURST + "90,GPT-4,10,3,13,API log\n"))
    assert main(["trace", "info", path]) == 0
    out, err = capsys.readouterr()
    assert "requests          3 over 90.0 s" in out and "without an answer 1 of them" in out
    assert err.count("columns not used: Model, Total tokens") == 1
    assert main(["trace", "info", path, "--from", "40", "--to", "90"]) == 0
    assert "requests          1 over 5.0 s" in capsys.readouterr().out


def test_B140_sixteen_tokens_an_id_are_never_taken_for_512(tmp_path: Path) -> None:
    row = _ids(33, 61.114, 521)
    path = write(tmp_path, "m.jsonl", jsonl(row, row))
    with pytest.raises(TraceError, match="fit 16 tokens an id, not 512"):
        open_trace(path)
    with pytest.raises(TraceError, match="is no whole number of milliseconds"):
        open_trace(path, granularity=16)
    trace = open_trace(path, granularity=16, time_unit="s")
    assert (trace.granularity, [r.arrival_s for r in trace]) == (16, [61.114, 61.114])
    short = write(tmp_path, "s.jsonl", jsonl(*(_ids(1, i, 3 + i) for i in range(14))))
    with pytest.raises(TraceError, match="at most 16 tokens with one id each: fit any granularity; give it"):
        open_trace(short)
    first = write(tmp_path, "f.jsonl", jsonl({**row, "block_size": 16, "time_unit": "s"}, row))
    assert [r.arrival_s for r in open_trace(first)] == [61.114, 61.114]


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_B142_dates_become_offsets(tmp_path: Path, unit: str, scale: int) -> None:
    times = [1_700_000_000 * scale + i * scale for i in range(10)]
    samples = {
        "m.jsonl": jsonl(*(_ids(2, t, 1000) for t in times)),
        "p.jsonl": jsonl(*({"prompt": "a", "timestamp": t} for t in times)),
        "l.csv": "timestamp,input_tokens,output_tokens\n" + "".join(f"{t},3,1\n" for t in times),
    }
    for name, text in samples.items():
        trace = open_trace(write(tmp_path, name, text), encode=utf8, time_unit=unit)
        assert [r.arrival_s for r in trace] == list(range(10))
        assert len(list(trace.between(0, 5))) == 5
        if name != "m.jsonl":  # whose unit is milliseconds where nothing else is said
            assert [r.arrival_s for r in open_trace(tmp_path / name, encode=utf8)] == list(range(10))


def test_anonymous_traces_keep_hits_and_nothing_else(tmp_path: Path) -> None:
    secret = "the secret word"
    rows = [
        {"prompt": secret * 60 + str(i % 3), "session": "alice", "arrival_s": 1.7e9 + i} for i in range(9)
    ]
    trace = open_trace(write(tmp_path, "p.jsonl", jsonl(*rows)), encode=utf8)
    for form, size in (("mooncake", 512), ("bailian", 16)):
        files = []
        for salt in (b"a", b"a", b"b", b""):
            path = tmp_path / f"{form}-{len(files)}.jsonl"
            write_anonymous(path, anonymous(trace, form, salt=salt), form)
            files.append(path)
        texts = [path.read_text() for path in files]
        assert texts[0] == texts[1] and len(set(texts)) == 3
        hidden = open_trace(files[0])
        assert (hidden.format, hidden.granularity) == (form, size)
        assert "alice" not in texts[0] and "17000000" not in texts[0] and "secret" not in texts[0]
        ours, theirs = (replay(t, size, Unbounded()) for t in (trace, hidden))
        assert ours == theirs and ours.hit_blocks > 0
        assert [(r.arrival_s, r.num_input, r.num_output) for r in hidden] == [
            (r.arrival_s, r.num_input, r.num_output) for r in trace
        ]
    with pytest.raises(ValueError, match="form=text: must be one of mooncake, bailian"):
        anonymous(trace, "text")


def test_samples_keep_whole_sessions_and_windows_start_at_0(tmp_path: Path) -> None:
    rows = [{"token_ids": [1], "arrival_s": i, "session": f"s{i % 50}"} for i in range(500)]
    trace = open_trace(write(tmp_path, "t.jsonl", jsonl(*rows)))
    kept = [r.session for r in trace.sampled(0.3, seed=1)]
    assert 5 < len(set(kept)) < 25 and all(kept.count(s) == 10 for s in set(kept))
    assert kept == [r.session for r in trace.sampled(0.3, seed=1)] != [r.session for r in trace.sampled(0.3)]
    assert {r.session for r in trace.first_sessions(2)} == {"s0", "s1"}
    window = list(trace.between(100, 103))
    assert [r.arrival_s for r in window] == [0.0, 1.0, 2.0]
    assert len({t.digest() for t in (trace, trace.head(2), trace.head(3), trace.between(0, 9))}) == 4
    with pytest.raises(ValueError, match="names no session"):
        list(system_prompt(3).first_sessions(1))


@pytest.mark.parametrize(
    ("row", "own"),
    [
        ({"messages": _said("hi"), "user": "ann", "category": "code"}, "code"),
        ({"body": {"messages": _said("hi"), "user": "ann"}, "category": "code"}, "ann"),
        ({"body": {"prompt": "hi", "user": "ann"}, "category": "code"}, "ann"),
    ],
)
def test_a_column_that_is_named_says_the_group(tmp_path: Path, row: dict[str, Any], own: str) -> None:
    path = write(tmp_path, "t.jsonl", jsonl({**row, "team": "blue"}))
    assert [r.group for r in open_trace(path, encode=utf8)] == [own]
    assert [r.group for r in open_trace(path, encode=utf8, columns={"group": "team"})] == ["blue"]


@pytest.mark.parametrize("name", ["tokens", "openai-chat", "prompt", "burstgpt-json", "mooncake"])
def test_groups_and_wishes_are_kept_by_every_format_of_single_requests(tmp_path: Path, name: str) -> None:
    wishes = {"retention": 9, "ttl_s": 5.0}
    row = {
        "tokens": {"token_ids": [1], "group": "a"},
        "openai-chat": {"messages": _said("hi"), "user": "a"},
        "prompt": {"prompt": "hi", "category": "a"},
        "burstgpt-json": {"input_tokens": 5, "output_tokens": 2, "Log Type": "a"},
        "mooncake": _ids(2, 0, 1000, type="a"),
    }[name]
    trace = open_trace(write(tmp_path, "t.jsonl", jsonl({**row, **wishes})), encode=utf8)
    assert not any("not used" in note for note in trace.notes)
    write_trace(tmp_path / "again.jsonl", trace, granularity=trace.granularity, tail_ids=trace.tail_ids)
    for found in (trace, open_trace(tmp_path / "again.jsonl")):
        assert [(r.group, r.wishes) for r in found] == [("a", wishes)]
    write_anonymous(tmp_path / "anon.jsonl", anonymous(trace), "mooncake")
    assert "retention" not in (tmp_path / "anon.jsonl").read_text()
    bad = write(tmp_path, "bad.jsonl", jsonl({**row, "retention": "much"}))
    with pytest.raises(TraceError, match=r"bad\.jsonl:1: .*retention"):
        list(open_trace(bad, encode=utf8))


TEXTS = {
    "alpaca_en_demo.json.gz": ("alpaca-text", 999),
    "alpaca_eval_davinci003.json.gz": ("alpaca-text", 805),
    "alpaca_seed_tasks.jsonl": ("alpaca-text", 175),
    "glaive_toolcall_en_demo.json.gz": ("sharegpt", 957),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_files_of_the_shared_data_are_read_whole(data_dir: Path, name: str) -> None:
    trace = open_trace(data_dir / "data" / "text" / name, encode=utf8)
    assert (trace.format, sum(1 for _ in trace)) == TEXTS[name]


def _mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """One seeded change: a byte, a cut, a stretch twice, two parts swapped, or an odd value for a number or word."""
    choice = int(rng.integers(7))
    at, to = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    if choice == 0:
        return data[:at] + bytes([int(rng.integers(256))]) + data[at + 1 :]
    if choice == 1:
        return data[:at]
    if choice == 2:
        return data[:to] + data[at:]
    if choice == 3:
        return data[:at] + data[to:]
    if choice == 4:
        return data[to:] + data[at:to] + data[:at]
    odd = [
        b"-1",
        b"1e999",
        b"NaN",
        b"null",
        b"2.5",
        b'""',
        b"[]",
        b"{}",
        b"true",
        b"9" * 30,
        b'"\\ud800"',
        b"\xff",
        b"\0",
    ]
    words = [i for i, c in enumerate(data) if c in b"0123456789"] or [0]
    place = words[int(rng.integers(len(words)))]
    if choice == 5:
        return data[:place] + b"%d" % rng.integers(10) + data[place + 1 :]
    return data[:place] + odd[int(rng.integers(len(odd)))] + data[place + 1 :]


def _survives(folder: Path, name: str, seed: int) -> bool:
    """Read one mutation: right types in order, or one line that names the file."""
    file, text, options, _, _ = SAMPLES[name]
    rng = np.random.default_rng([seed, len(name)])
    data = text.encode()
    for _ in range(int(rng.integers(1, 3))):
        data = _mutated(rng, data)
    path = folder / file.removesuffix(".gz")
    path.write_bytes(data)
    try:
        last = float("-inf")
        for request in open_trace(path, encode=utf8, **options):
            assert type(request.num_input) is int and request.num_input >= 1
            assert type(request.num_output) is int and request.num_output >= 0
            assert np.isfinite(request.arrival_s) and request.arrival_s >= last
            last = request.arrival_s
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error), f"{name} {seed}: {error}"
        assert len(str(error)) < 1500
        return False
    return True


@pytest.mark.parametrize("name", SAMPLES)
def test_100_mutations_are_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    read = sum(_survives(tmp_path, name, seed) for seed in range(100))
    assert 0 < read < 100


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLES)
def test_2000_mutations_are_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    for seed in range(100, 2000):
        _survives(tmp_path, name, seed)
