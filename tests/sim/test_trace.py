"""Readers and generators: what they accept, what they refuse and how they say it."""

import gzip
import inspect
import json
import lzma
import re
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pagedjax.sim.records import TraceError
from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.synth import GENERATORS, Arrivals, system_prompt, target_sharing
from pagedjax.sim.trace import Trace, open_trace, write_trace


def _write(path: Path, rows: list[object]) -> Path:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _mooncake(t: float = 0, n: int = 1000, ids: tuple[int, ...] = (0, 1), out: int = 5) -> dict[str, object]:
    return {"timestamp": t, "input_length": n, "output_length": out, "hash_ids": list(ids)}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_mooncake_rows_come_back(tmp_path: Path, suffix: str) -> None:
    trace = open_trace(_write(tmp_path / f"t{suffix}", [_mooncake(), _mooncake(1500, 513, (0, 2), 7)]))
    rows = list(trace)
    assert (trace.format, trace.granularity, trace.tail_ids) == ("mooncake", 512, True)
    assert [r.arrival_s for r in rows] == [0.0, 1.5]
    assert rows[1].granule_ids.tolist() == [0, 2] and rows[1].num_output == 7
    assert [r.num_input for r in trace] == [1000, 513]  # a second pass


def _local(i: int) -> dict[str, object]:
    """A session of one request that holds the local id `i`."""
    return {"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [i]}]}


MALFORMED = {
    "hash-count": ([_mooncake(), _mooncake(n=1025)], ":2: 2 hash_ids for input_length=1025: must be ceil"),
    "negative-length": ([_mooncake(out=-1)], ":1: output_length=-1: must be a whole number"),
    "zero-input": ([_mooncake(n=0, ids=())], ":1: input_length=0: must be a whole number"),
    "fraction": ([_mooncake(n=10.5, ids=(0,))], ":1: input_length=10.5: must be a whole number"),
    "unsorted": ([_mooncake(2000), _mooncake(1000)], ":2: time 1 s after 2 s: times must not decrease"),
    "missing": ([{"timestamp": 0, "hash_ids": [1]}], ":1: fields .* must hold input_length"),
    "negative-id": ([_mooncake(ids=(0, -1))], ":1: hash_ids holds -1 to 0"),
    "text-id": ([_mooncake(ids=("a", "b"))], ":1: hash_ids: must be a"),
    "ids-no-list": ([{**_mooncake(), "hash_ids": 3}], ":1: hash_ids=int: must be a list"),
    "not-an-object": ([_mooncake(), [1]], ":2: a JSON list: must be one object a line"),
    "granularity": ([_mooncake(), {**_mooncake(), "block_size": 64}], ":2: block_size=64: must be 512"),
    "nobody's": ([{"foo": 1}], r":1: fields \['foo'\]: must hold hash_ids"),
    "token-count": ([{"token_ids": [1, 2], "input_toks": 3}], ":1: input_toks=3 for 2 ids"),
    "token-empty": ([{"token_ids": []}], ":1: an empty prompt"),
    "token-range": ([{"token_ids": [2**31]}], ":1: token_ids holds"),
    "bool": ([{**_mooncake(), "timestamp": True}], ":1: timestamp=True: must be a number"),
    "agentic-count": (
        [{"block_size": 64, "requests": [{"t": 0, "in": 130, "out": 1, "hash_ids": [1]}]}],
        ":1: 1 hash_ids for in=130 at t=0: must be floor",
    ),
    "half-id": ([_mooncake(ids=(0, 2.5))], ":1: hash_ids: must be a flat list"),
    "bool-id": ([_mooncake(ids=(0, True))], ":1: hash_ids: must be a flat list"),
    "late-text-id": ([_mooncake(ids=(0, "1"))], ":1: hash_ids: must be a flat list"),
    "nested-ids": ([_mooncake(ids=([0], [1]))], ":1: hash_ids: must be a flat list"),
    "huge-id": ([_mooncake(ids=(0, 2**63))], f":1: hash_ids holds 0 to {2**63}: ids must fit int64"),
    **{
        f"agentic-id-{i}": ([_local(1), _local(i)], f":2: hash_ids holds {i} to {i}: ids must fit uint32")
        for i in (2**32, 2**32 + 1, 2**63 - 1, 2**63, -1)
    },
    "agentic-unsorted": (
        [{"block_size": 64, "requests": [{"t": t, "in": 64, "out": 1, "hash_ids": [1]} for t in (2, 1)]}],
        ":1: time 1 s after 2 s",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_name_file_line_and_rule(tmp_path: Path, name: str) -> None:
    rows, message = MALFORMED[name]
    path = _write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(TraceError, match=f"bad.jsonl{message}"):
        list(open_trace(path))


def test_wrong_json_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(_mooncake()) + '\n{"timestamp": 1,\n')
    with pytest.raises(TraceError, match=r"bad.jsonl:2: wrong JSON at column \d+"):
        list(open_trace(path))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_cut_compression_names_line(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    rows = [_mooncake(i, 1000, tuple(rng.integers(0, 10**9, 2).tolist())) for i in range(5000)]
    path = _write(tmp_path / f"t.jsonl{suffix}", rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(TraceError, match=r"t.jsonl.*:\d+: the compressed stream ends early"):
        list(open_trace(path))


def test_damaged_gzip_and_bad_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"not gzip at all")
    with pytest.raises(TraceError, match="damaged compression"):
        list(open_trace(path))
    path = tmp_path / "t.jsonl"
    for before in (0, 1, 5000):  # in the first chunk that is decoded, and far behind it
        path.write_bytes(b'{"token_ids": [1]}\n' * before + b'{"token_ids": [1], "session": "\xff"}\n')
        with pytest.raises(TraceError, match=rf"t\.jsonl:{before + 1}: byte 0xff is not UTF-8"):
            list(open_trace(path))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.csv", "t.json.xz"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"t\..*:1: no line holds a record"):
        list(open_trace(_write(tmp_path / name, [])))


def test_length_files(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    rows = list(open_trace(azure))
    assert [(r.num_input, r.num_output) for r in rows] == [(374, 44), (396, 109)]
    assert rows[1].arrival_s == pytest.approx(4.314579)
    azure.write_text(azure.read_text() + "2023-11-16 18:15:51.0,-3,1\n")
    with pytest.raises(TraceError, match=r"a\.csv:4: ContextTokens=-3"):
        list(open_trace(azure))
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374\n")
    with pytest.raises(TraceError, match=r"a\.csv:2: 2 cells: must be 3"):
        list(open_trace(azure))
    alpaca = tmp_path / "a.json"
    alpaca.write_text(
        json.dumps([{"id": "1", "L_gt": 54, "L_t0.5": 3}, {"id": "2", "L_gt": 13, "L_t0.5": 4}])
    )
    assert [r.num_output for r in open_trace(alpaca)] == [54, 13]
    assert [r.num_output for r in open_trace(alpaca, columns={"output": "L_t0.5"})] == [3, 4]
    rated = open_trace(alpaca).with_arrivals(2.0, seed=1)
    assert [r.arrival_s for r in rated] == [r.arrival_s for r in rated] and next(iter(rated)).arrival_s > 0


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MIXED = "must have a time zone in every row or in none"


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ((AZURE, "2023-11-16 18:15:46,1,1", "2023-11-16T18:15:47+00:00,1,1"), f":3: TIMESTAMP=.*{MIXED}"),
        ((AZURE, "2023-11-16T18:15:46Z,1,1", "2023-11-16T18:15:47,1,1"), f":3: TIMESTAMP=.*{MIXED}"),
        (
            (AZURE, "2023-11-16 18:15:46,1,1", "2023-11-16 18:15:47,1," + "1" * 140_000),
            ":3: GeneratedTokens='1{1,60}: ",
        ),
        ((AZURE, '"x' * 140_000 + ",1,1"), ":2: wrong CSV "),
        (("x" * 140_000 + ",ContextTokens", "1,1"), r":2: fields \['ContextTokens', 'x{1,300}: must hold"),
        ((AZURE, "x" * 100_000 + ",1,1"), ":2: TIMESTAMP='x{1,60}: must be an ISO date"),
        ((AZURE, "2023-11-16,1," + "1" * 5000), ":2: GeneratedTokens='1{1,60}: must be a number"),
    ],
    ids=["zone later", "zone first", "long cell", "long time", "long header", "no time", "long number"],
)
def test_odd_length_files_name_file_and_line(tmp_path: Path, rows: tuple[str, ...], part: str) -> None:
    (tmp_path / "a.csv").write_text("\n".join(rows))
    with pytest.raises(TraceError, match=rf"a\.csv{part}"):
        list(open_trace(tmp_path / "a.csv"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", f"{AZURE}\n2023-11-16 18:15:46+01:00,3,1\n2023-11-16 18:15:46+00:00,3,1\n"),
        ("a.jsonl", '{"token_ids": [1, 2, 3]}\n' * 2),
        ("a.json", '[{"L_gt": 3}, {"L_gt": 4}]'),
        ("a.txt", "abc\nabc\n"),
        ("a.jsonl.gz", '{"prompt": "abc"}\n' * 2),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, text: str) -> None:
    marked = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(marked) if name.endswith(".gz") else marked)
    rows = list(open_trace(tmp_path / name, encode=lambda text: list(text.encode())))
    assert [r.num_input for r in rows] == ([19, 19] if name == "a.json" else [3, 3])


def test_prompts_need_a_tokenizer(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.jsonl", [{"prompt": "ab"}, {"text": "abc", "num_output": 2}])
    with pytest.raises(ValueError, match="give a tokenizer"):
        open_trace(path)
    rows = list(open_trace(path, encode=lambda text: list(text.encode()), output_tokens=9))
    assert [(r.token_ids.tolist(), r.num_output) for r in rows] == [([97, 98], 9), ([97, 98, 99], 2)]
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert len(list(open_trace(tmp_path / "p.txt", encode=lambda text: list(text.encode())))) == 2


def _session(name: str, ids: list[list[int]], nested: list[list[int]] | None = None) -> dict[str, object]:
    def request(t: float, own: list[int]) -> dict[str, object]:
        return {"t": t, "in": 64 * len(own) + 3, "out": 4, "hash_ids": own}

    requests: list[object] = [request(10.0 * i, own) for i, own in enumerate(ids)]
    if nested:
        inner = [request(7.0 * i, own) for i, own in enumerate(nested)]
        requests.insert(1, {"t": 5.0, "tool_tokens": 64, "system_tokens": 0, "requests": inner})
    return {"id": name, "block_size": 64, "tool_tokens": 64, "system_tokens": 64, "requests": requests}


def test_agentic_sessions_nest_and_keep_ids_apart(tmp_path: Path) -> None:
    sessions = [_session("a", [[1, 2, 3], [1, 2, 3, 4]], [[9], [9, 10]]), _session("b", [[1, 2, 5]])]
    path = _write(tmp_path / "s.jsonl", sessions)
    rows = list(open_trace(path))
    # The sub-agent starts 5 s into the session and its clock from 0: 5 and 12 around the parent's 10.
    assert [(r.session, r.arrival_s, r.num_input) for r in rows] == [
        ("a", 0.0, 195), ("a", 5.0, 67), ("a", 10.0, 259), ("a", 12.0, 131), ("b", 12.0, 195),
    ]  # fmt: skip
    assert replay(open_trace(path), 64, Unbounded()).hit_blocks == 3 + 1
    # Shared: tools and system granules of session b (ids 1, 2), and the sub-agent's tools (id 9 = id 1).
    shared = replay(open_trace(path, common_prefix=True), 64, Unbounded())
    assert shared.hit_blocks == 3 + 1 + 2 + 1


def test_ids_of_sessions_never_meet(tmp_path: Path) -> None:
    ends = (0, 1, 2**32 - 1)
    path = _write(tmp_path / "s.jsonl", [_local(i) for i in ends for _ in range(3)])
    assert len({r.granule_ids[0] for r in open_trace(path)}) == 9


def test_positions_of_common_prefixes_never_meet(tmp_path: Path) -> None:
    long = 2**20 + 1
    sessions = [
        {"block_size": 1, "tool_tokens": tools, "requests": [{"t": 0, "in": n, "out": 1, "hash_ids": ids}]}
        for tools, n, ids in ((long, long, list(range(long))), (2, 2, [0, 1]))
    ]
    first, second = open_trace(_write(tmp_path / "s.jsonl", sessions), common_prefix=True)
    assert not set(first.granule_ids.tolist()) & set(second.granule_ids.tolist())


def test_converted_trace_hits_alike(tmp_path: Path) -> None:
    source = open_trace(_write(tmp_path / "s.jsonl", [_session("a", [[1, 2, 3], [1, 2, 3, 4]])]))
    assert write_trace(tmp_path / "m.jsonl.gz", source, granularity=64, tail_ids=False) == 2
    converted = open_trace(tmp_path / "m.jsonl.gz")
    assert (converted.format, converted.granularity) == ("mooncake", 64)
    ours, theirs = (replay(t, 64, Unbounded()) for t in (source, converted))
    assert ours.hit_blocks == theirs.hit_blocks == 3 and ours.hit_tokens == theirs.hit_tokens
    assert theirs.blocks == ours.blocks + 2  # tails have ids now
    tokens = system_prompt(5, system_tokens=50)
    write_trace(tmp_path / "t.jsonl", tokens, granularity=1, tail_ids=True)
    for a, b in zip(tokens, open_trace(tmp_path / "t.jsonl"), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.output_ids.tolist() == b.output_ids.tolist()
        assert a.arrival_s == b.arrival_s and a.num_output == b.num_output


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_seeded_ordered_and_complete(name: str) -> None:
    make = GENERATORS[name]
    first, second, other = (list(islice(make(seed=s), 60)) for s in (3, 3, 4))
    assert [r.token_ids.tobytes() for r in first] == [r.token_ids.tobytes() for r in second]
    assert [r.token_ids.tobytes() for r in first] != [r.token_ids.tobytes() for r in other]
    times = [r.arrival_s for r in first]
    assert times == sorted(times)
    for r in first:
        assert len(r.token_ids) == r.num_input and len(r.output_ids) == r.num_output > 0
    assert make(seed=3).digest() == make(seed=3).digest() != make(seed=4).digest()


def test_generated_sharing_is_what_was_asked() -> None:
    for share in (0.0, 0.25, 0.8):
        counts = replay(target_sharing(200, prompt_tokens=400, share=share), 1, Unbounded())
        assert counts.by_token == pytest.approx(share * 199 / 200, abs=2e-3)
    assert replay(system_prompt(50, timestamp=True), 16, Unbounded()).hit_blocks == 0
    bursts = [r.arrival_s for r in target_sharing(12, arrivals=Arrivals(2.0, burst=4))]
    assert [len(set(bursts[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1] and len(set(bursts)) == 3


def test_chat_turns_repeat_their_history() -> None:
    rows = list(GENERATORS["chat"](20, seed=1))
    last: dict[str, list[int]] = {}
    repeated = 0
    for r in rows:
        prompt = r.token_ids.tolist()
        if r.session in last:
            assert prompt[: len(last[r.session])] == last[r.session]
            repeated += 1
        last[r.session] = prompt + r.output_ids.tolist()
    assert repeated > 20


def test_streaming_is_bounded() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        for _ in target_sharing(count, prompt_tokens=20, output_tokens=2):
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(6000) < 1.5 * peak(600) + 100_000


BAD_ARRIVALS = [(r, 1) for r in (0.0, -1.0, np.nan, np.inf, 1e-320)] + [(1.0, b) for b in (0, -1, 10**400)]


def test_head_and_bad_arguments() -> None:
    trace: Trace = system_prompt(10)
    assert len(list(trace.head(3))) == 3
    with pytest.raises(ValueError, match="num_requests=0"):
        trace.head(0)
    for rate, burst in BAD_ARRIVALS:
        for make in (Arrivals, lambda rate, burst: trace.with_arrivals(rate, burst=burst)):
            with pytest.raises(ValueError, match=r"^(rate|burst)=.*: must be from 1"):
                make(rate, burst)


NUMBERS = [
    (kind, name, type(parameter.default))
    for kind, make in GENERATORS.items()
    for name, parameter in inspect.signature(make).parameters.items()
    if type(parameter.default) in (int, float)
]


@pytest.mark.parametrize(("kind", "name", "type_"), NUMBERS)
def test_every_parameter_is_checked_before_anything_is_drawn(
    kind: str, name: str, type_: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedjax.sim.synth._rng", lambda *where: pytest.fail("drew"))
    bad = [-1, -0.5, np.nan, np.inf, 1e300] if type_ is float else [-1, -(2**70)]
    bad += [] if type_ is float or name == "seed" else [2**31]
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{name}={re.escape(str(value))}: must be from [01]"):
            GENERATORS[kind](**{name: value})


@pytest.mark.parametrize(("kind", "name", "type_"), NUMBERS)
def test_the_least_of_every_parameter_makes_a_trace_that_can_be_read(
    kind: str, name: str, type_: type, tmp_path: Path
) -> None:
    count = (
        "num_sessions" if "num_sessions" in inspect.signature(GENERATORS[kind]).parameters else "num_requests"
    )
    path = tmp_path / "t.jsonl"
    try:
        trace = GENERATORS[kind](**{count: 3, name: type_(0)})
    except ValueError as error:
        assert str(error) == f"{name}=0: must be from 1 to 2,147,483,647; raise it"
        trace = GENERATORS[kind](**{count: 3, name: 1})
    written = write_trace(path, trace, granularity=1, tail_ids=True)
    assert len(list(open_trace(path))) == written > 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, "an entry '[[[[[[[[[[[[[[[[[[[['"),
        ('[{"a": ' + "[" * 100_000, "JSON nested too deeply"),
        ('{"token_ids": [1], "arrival_s": Infinity}', "arrival_s=inf: must be a number"),
        ('{"token_ids": [1], "arrival_s": 1' + "0" * 400 + "}", "must be a number"),
        ('{"token_ids": [1], "num_output": 1' + "0" * 30 + "}", "below 2**31"),
        ('{"hash_ids": [1], "input_length": 3, "timestamp": 0, "block_size": Infinity}', "block_size=inf"),
        ('{"hash_ids": [1], "input_length": 3, "timestamp": 0, "block_size": null}', "block_size=None"),
        ('{"block_size": 64, "requests": [5]}', "an entry 5: must be an object"),
        ('{"prompt": "\\ud800"}', "a lone surrogate"),
        ('{"prompt": "no token"}', "prompt='no token' without a token"),
        ('{"token_ids": [' + "1" * 5000 + "]}", "JSON with a number of thousands of digits"),
        ('[{"a": ' + "1" * 5000 + "}]", "JSON with a number of thousands of digits"),
        ('{"token_ids": [' + "1" * 4000 + "]}", "ids must fit int32 from 0"),
    ],
)
def test_odd_values_name_file_and_line(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "odd.jsonl").write_text(text + "\n")
    with pytest.raises(TraceError) as caught:
        list(
            open_trace(tmp_path / "odd.jsonl", encode=lambda text: list(text.encode()) * (text != "no token"))
        )
    assert "odd.jsonl:1: " in str(caught.value) and part in str(caught.value)
