"""Traces: who asked what and when, read as a stream in bounded memory.

A `Trace` can be iterated any number of times; each pass reopens its source. What identifies a prefix
differs by format and is kept as it came: token ids, chained ids of fixed-size granules (Mooncake: 512
tokens, agentic sessions: 64), or nothing at all (length files). `pagedjax.sim.replay.BlockKeys` turns
either identity into keys of blocks of any size.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.sim.records import (
    MOST_COUNT,
    OPENERS,
    RATES,
    Fields,
    RisingTimes,
    fail,
    in_range,
    lines,
    parse,
    records,
)

Encode = Callable[[str], list[int]]

MOONCAKE_GRANULARITY = 512
# Ids local to session s become (s << 32) | id, those of a prefix that sessions share
# -((prefix << 32) | position) - 1: apart as long as ids and positions fit 32 bits.
_SHIFT = 32


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: Seconds from the start of the trace, never decreasing.
        num_input: Prompt tokens.
        num_output: Generated tokens.
        granule_ids: i64[n] chained ids: equal ids mean equal token prefixes up to that granule's end.
        token_ids: i32[num_input] of the prompt.
        output_ids: i32[num_output] of the answer.
        session: Conversation or agent session it belongs to; "" where the trace does not say.
    """

    arrival_s: float
    num_input: int
    num_output: int
    granule_ids: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    output_ids: np.ndarray | None = None
    session: str = ""


@dataclass(frozen=True)
class Trace:
    """A named, re-iterable stream of requests.

    Attributes:
        name: For tables.
        format: Which reader or generator made it.
        granularity: Tokens per granule id; 1 for token ids, 0 where prefixes have no identity.
        tail_ids: A last, partly filled granule has an id too.
        source: Opens one pass.
        path: File it is read from; None for a generated one.
        spec: What generated it, in words that fix it (name, arguments, seed).
    """

    name: str
    format: str
    granularity: int
    tail_ids: bool
    source: Callable[[], Iterator[TraceRequest]]
    path: Path | None = None
    spec: str = ""

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.source()

    def head(self, num_requests: int) -> Trace:
        """The first `num_requests` requests."""
        if num_requests < 1:
            raise ValueError(f"num_requests={num_requests}: must be at least 1")
        return self._derived(f"head={num_requests}", lambda: islice(iter(self), num_requests))

    def with_arrivals(self, rate: float, *, seed: int = 0, burst: int = 1) -> Trace:
        """The same requests at new times: bursts of `burst` requests, Poisson, `rate` requests a second.

        Length files carry no times of their own; PagedAttention §6.1 draws Poisson arrivals for them.
        """
        in_range("rate", rate, *RATES)
        in_range("burst", burst, 1, MOST_COUNT)

        def source() -> Iterator[TraceRequest]:
            rng = np.random.default_rng([seed, 0xA2217A1])
            now = 0.0
            for i, request in enumerate(self):
                if i % burst == 0:
                    now += float(rng.exponential(burst / rate))
                yield replace(request, arrival_s=now)

        return self._derived(f"rate={rate},burst={burst},seed={seed}", source)

    def digest(self) -> str:
        """sha256 of the file as it lies on disk, or of the words that fix a generated trace."""
        hasher = hashlib.sha256(self.spec.encode())
        if self.path is None:
            return hasher.hexdigest()
        hasher = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
        return hasher.hexdigest()

    def _derived(self, what: str, source: Callable[[], Iterator[TraceRequest]]) -> Trace:
        return replace(self, name=f"{self.name}[{what}]", source=source, spec=f"{self.spec};{what}")


# ------------------------------------------------------------------------- readers


def read_mooncake(path: Path) -> Trace:
    """Mooncake block-hash trace: timestamp (ms), input_length, output_length, hash_ids.

    One id per 512 tokens (`block_size` in a row overrides it), the partly filled last one included.
    """
    path = Path(path)
    granularity = Fields(path, *next(records(path))).length(
        "block_size", least=1, default=MOONCAKE_GRANULARITY
    )

    def source() -> Iterator[TraceRequest]:
        clock = RisingTimes()
        for line, record in records(path):
            row = Fields(path, line, record)
            size = row.length("block_size", least=1, default=MOONCAKE_GRANULARITY)
            if size != granularity:
                row.fail(f"block_size={size}", f"must be {granularity} as in the first row")
            num_input = row.length("input_length", least=1)
            ids = row.ids("hash_ids", np.int64)
            want = -(-num_input // granularity)
            if len(ids) != want:
                row.fail(
                    f"{len(ids)} hash_ids for input_length={num_input}",
                    f"must be ceil({num_input} / {granularity}) = {want}",
                )
            yield TraceRequest(
                arrival_s=clock.check(row, row.number("timestamp") / 1e3),
                num_input=num_input,
                num_output=row.length("output_length"),
                granule_ids=ids,
                session=str(record.get("session", "")),
            )

    return Trace(_stem(path), "mooncake", granularity, True, source, path)


def read_tokens(path: Path) -> Trace:
    """Token-id trace: one JSON object a line.

    Fields: input_tok_ids or token_ids; output_tok_ids or output_ids (optional); output_toks or
    num_output; arrival_time_ns or arrival_s (0 where absent); session (optional). input_toks, where
    given, must equal the number of ids.
    """
    path = Path(path)

    def source() -> Iterator[TraceRequest]:
        clock = RisingTimes()
        for line, record in records(path):
            row = Fields(path, line, record)
            ids = row.ids("input_tok_ids" if "input_tok_ids" in record else "token_ids", np.int32)
            if not len(ids):
                row.fail("an empty prompt", "must hold at least one token")
            stated = row.length("input_toks", default=len(ids))
            if stated != len(ids):
                row.fail(f"input_toks={stated} for {len(ids)} ids", "must be equal")
            name = "output_tok_ids" if "output_tok_ids" in record else "output_ids"
            output = row.ids(name, np.int32) if name in record else None
            num_output = row.length("output_toks", "num_output", default=0 if output is None else len(output))
            time_s = row.number("arrival_s", default=0.0)
            if "arrival_time_ns" in record:
                time_s = row.number("arrival_time_ns") / 1e9
            yield TraceRequest(
                arrival_s=clock.check(row, time_s),
                num_input=len(ids),
                num_output=num_output,
                token_ids=ids,
                output_ids=output,
                session=str(record.get("session", "")),
            )

    return Trace(_stem(path), "tokens", 1, True, source, path)


def read_prompts(path: Path, encode: Encode, *, num_output: int = 0) -> Trace:
    """Plain prompts: JSON lines with `prompt` (or `text`), or lines of text in a .txt file.

    Args:
        path: File, plain or compressed.
        encode: Text to token ids.
        num_output: Generated tokens where a row has no `num_output`.
    """
    path = Path(path)
    plain = ".txt" in path.suffixes

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        if plain:
            return ((line, {"prompt": text.rstrip("\n")}) for line, text in lines(path))
        return records(path)

    def source() -> Iterator[TraceRequest]:
        clock = RisingTimes()
        for line, record in rows():
            row = Fields(path, line, record)
            prompt = record.get("prompt", record.get("text"))
            if not isinstance(prompt, str) or not prompt:
                row.fail(f"fields {sorted(record)}", "must hold a non-empty string `prompt` or `text`")
            try:
                ids = np.array(encode(prompt), dtype=np.int32)
            except UnicodeEncodeError:
                row.fail("a lone surrogate", "must be text that UTF-8 can hold")
            if not len(ids):
                row.fail(f"prompt={prompt!r:.40} without a token", "must hold at least one token")
            yield TraceRequest(
                arrival_s=clock.check(row, row.number("arrival_s", default=0.0)),
                num_input=len(ids),
                num_output=row.length("num_output", default=num_output),
                token_ids=ids,
                session=str(record.get("session", "")),
            )

    return Trace(_stem(path), "prompts", 1, True, source, path)


def read_agentic(path: Path, *, common_prefix: bool = False) -> Trace:
    """Agentic coding sessions, one a line, played one after another.

    Ids are local to a session; only granules that are full carry one. A nested sub-agent's entry shares
    its parent's ids and counts time from its own start; a session's requests are played in time order.

    Args:
        path: JSON lines: block_size, tool_tokens, system_tokens, requests[t, in, out, hash_ids].
        common_prefix: Let sessions with equal tool_tokens share the granules of their tools, and with
            equal tool_tokens and system_tokens those of the system prompt too. The file keeps these
            lengths but not the identity, so this is an assumption: equal length means equal text.
    """
    path = Path(path)
    granularity = Fields(path, *next(records(path))).length("block_size", least=1, default=64)

    def source() -> Iterator[TraceRequest]:
        start_s = 0.0
        prefixes: dict[tuple[int, ...], int] = {}
        for index, (line, record) in enumerate(records(path)):
            row = Fields(path, line, record)
            if row.length("block_size", least=1) != granularity:
                row.fail(
                    f"block_size={record['block_size']}", f"must be {granularity} as in the first session"
                )
            agents = list(_agents(row, record, 0.0))
            remap = _common_ids(agents, granularity, prefixes) if common_prefix else None
            played = [(t, entry) for agent in agents for t, entry in agent.requests]
            played.sort(key=lambda pair: pair[0])
            name = str(record.get("id", index))
            now = start_s
            for now, entry in played:
                yield _agentic_request(entry, start_s + now, granularity, index, remap, name)
            start_s += now if played else 0.0

    return Trace(_stem(path), "agentic", granularity, False, source, path)


@dataclass
class _Agent:
    tool_tokens: int
    system_tokens: int
    requests: list[tuple[float, Fields]]


def _agents(row: Fields, record: dict[str, Any], start_s: float) -> Iterator[_Agent]:
    """The agent of `record` and, after it, those nested in it; times from the session's start."""
    own = Fields(row.path, row.line, record)
    agent = _Agent(own.length("tool_tokens", default=0), own.length("system_tokens", default=0), [])
    nested: list[tuple[dict[str, Any], float]] = []
    clock = RisingTimes()
    entries = record.get("requests")
    if not isinstance(entries, list):
        row.fail(f"requests={type(entries).__name__}", "must be a list")
    for entry in entries:
        item = Fields(row.path, row.line, entry)
        time_s = clock.check(item, item.number("t"))
        if "requests" in entry:
            nested.append((entry, start_s + time_s))
        else:
            agent.requests.append((start_s + time_s, item))
    yield agent
    for entry, begins in nested:
        yield from _agents(row, entry, begins)


def _common_ids(
    agents: list[_Agent], granularity: int, prefixes: dict[tuple[int, ...], int]
) -> dict[int, int]:
    """Local id → id shared between sessions, for the tool and system prefix of each agent."""
    remap: dict[int, int] = {}
    for agent in agents:
        if not agent.requests:
            continue
        ids = _local_ids(agent.requests[0][1]).tolist()
        tools = agent.tool_tokens // granularity
        both = (agent.tool_tokens + agent.system_tokens) // granularity
        for position, local in enumerate(ids[:both]):
            key = (agent.tool_tokens,) if position < tools else (agent.tool_tokens, agent.system_tokens)
            number = prefixes.setdefault(key, len(prefixes))
            remap.setdefault(local, -((number << _SHIFT) | position) - 1)
    return remap


def _local_ids(row: Fields) -> np.ndarray:
    return row.ids("hash_ids", np.uint32).astype(np.int64)


def _agentic_request(
    row: Fields, time_s: float, granularity: int, session: int, remap: dict[int, int] | None, name: str
) -> TraceRequest:
    num_input = row.length("in", least=1)
    local = _local_ids(row)
    if len(local) != num_input // granularity:
        row.fail(
            f"{len(local)} hash_ids for in={num_input} at t={row.record['t']}",
            f"must be floor({num_input} / {granularity}) = {num_input // granularity}",
        )
    ids = local + (session << _SHIFT)
    if remap:
        # Shared ids stand at the front: look at positions until the first local one.
        for position, value in enumerate(local.tolist()):
            shared = remap.get(value)
            if shared is None:
                break
            ids[position] = shared
    return TraceRequest(time_s, num_input, row.length("out"), granule_ids=ids, session=name)


def _cells(path: Path, line: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text]))
    except csv.Error as error:
        fail(path, line, f"wrong CSV ({error})", "must be one row of numbers and times")


def read_lengths(path: Path) -> Trace:
    """Length CSV: Azure (TIMESTAMP, ContextTokens, GeneratedTokens) or num_prefill/num_decode_tokens."""
    path = Path(path)

    def source() -> Iterator[TraceRequest]:
        clock = RisingTimes()
        rows = lines(path)
        header = _cells(path, *next(rows))
        base: datetime | None = None
        for line, text in rows:
            cells = _cells(path, line, text)
            row = Fields(path, line, dict(zip(header, cells)))
            if len(cells) != len(header):
                row.fail(f"{len(cells)} cells", f"must be {len(header)} as in the header")
            time_s = 0.0
            if "TIMESTAMP" in row.record:
                try:
                    stamp = datetime.fromisoformat(row.record["TIMESTAMP"])
                except ValueError:
                    row.fail(f"TIMESTAMP={row.record['TIMESTAMP']!r:.60}", "must be an ISO date and time")
                base = base or stamp
                if (stamp.utcoffset() is None) != (base.utcoffset() is None):
                    row.fail(
                        f"TIMESTAMP={row.record['TIMESTAMP']!r:.60}",
                        "must have a time zone in every row or in none",
                    )
                time_s = (stamp - base).total_seconds()
            yield TraceRequest(
                arrival_s=clock.check(row, time_s),
                num_input=row.length("ContextTokens", "num_prefill_tokens", least=1),
                num_output=row.length("GeneratedTokens", "num_decode_tokens"),
            )

    return Trace(_stem(path), "lengths", 0, False, source, path)


def read_alpaca(path: Path, *, field: str = "L_gt", num_input: int = 19) -> Trace:
    """Alpaca answer lengths (JSON array of objects); prompts' lengths are not in the file.

    Args:
        path: JSON file, plain or compressed.
        field: L_gt (reference answer) or L_t0.0 … L_t0.7 (Vicuna-7B at that temperature).
        num_input: Prompt tokens of every request; 19 is the mean that PagedAttention Fig. 11 prints.
    """
    path = Path(path)

    def source() -> Iterator[TraceRequest]:
        text = "".join(text for _, text in lines(path))
        rows = parse(path, 1, text, "must be an array of objects")
        if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
            fail(path, 1, "not an array of objects", "must be a non-empty array of objects")
        for number, record in enumerate(rows, 1):
            # An array has no lines of its own: the place is the element's number.
            row = Fields(path, number, record)
            yield TraceRequest(0.0, num_input, row.length(field, least=0))

    return Trace(_stem(path), "alpaca", 0, False, source, path)


def open_trace(path: str | Path, *, encode: Encode | None = None, common_prefix: bool = False) -> Trace:
    """Open a trace with the reader that its first record asks for.

    Args:
        path: Plain, .gz or .xz file.
        encode: Text to token ids, for files of prompts.
        common_prefix: See `read_agentic`.

    Raises:
        TraceError: No reader knows the fields; the message lists them.
        FileNotFoundError: No such file.
    """
    path = Path(path)
    line, text = next(lines(path))
    if ".txt" in path.suffixes:
        return read_prompts(path, _need(encode, path))
    if ".csv" in path.suffixes:
        return read_lengths(path)
    if text.lstrip().startswith("["):
        return read_alpaca(path)
    _, record = next(records(path))
    if "hash_ids" in record:
        return read_mooncake(path)
    if "requests" in record:
        return read_agentic(path, common_prefix=common_prefix)
    if "input_tok_ids" in record or "token_ids" in record:
        return read_tokens(path)
    if "prompt" in record or "text" in record:
        return read_prompts(path, _need(encode, path))
    fail(
        path,
        line,
        f"fields {sorted(record)}",
        "must hold hash_ids (Mooncake), requests (agentic), token_ids or input_tok_ids (tokens), or prompt/text",
    )


def _need(encode: Encode | None, path: Path) -> Encode:
    if encode is None:
        raise ValueError(f"{path}: holds text; give a tokenizer")
    return encode


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def write_trace(path: str | Path, trace: Iterable[TraceRequest], *, granularity: int, tail_ids: bool) -> int:
    """Write requests as JSON lines, one at a time, and return how many.

    Token ids go out as a token-id trace, granule ids as a Mooncake trace. The Mooncake format wants an
    id for a partly filled last granule and none below 0; where the source is otherwise, ids are renamed
    one by one, without a table (the file may hold more ids than memory).

    Raises:
        ValueError: A request has neither token ids nor granule ids.
    """
    path = Path(path)
    opener = OPENERS.get(path.suffix, open)
    count = fresh = 0
    with opener(path, "wt", encoding="utf-8") as file:
        for request in trace:
            record: dict[str, Any]
            if request.token_ids is not None:
                record = {
                    "arrival_s": request.arrival_s,
                    "token_ids": request.token_ids.tolist(),
                    "num_output": request.num_output,
                }
                if request.output_ids is not None:
                    record["output_ids"] = request.output_ids.tolist()
            elif request.granule_ids is not None:
                numbers = request.granule_ids.tolist()
                if not tail_ids:  # three classes of ids, modulo 3: own, below 0, tails
                    numbers = [3 * i if i >= 0 else -3 * i - 2 for i in numbers]
                    if request.num_input % granularity:
                        numbers.append(3 * fresh + 2)
                        fresh += 1
                record = {
                    "timestamp": round(request.arrival_s * 1e3, 6),
                    "input_length": request.num_input,
                    "output_length": request.num_output,
                    "hash_ids": numbers,
                    "block_size": granularity,
                }
            else:
                raise ValueError("trace: its requests have lengths only, no prefix identity to write")
            if request.session:
                record["session"] = request.session
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count += 1
    return count
