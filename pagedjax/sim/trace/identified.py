"""Traces of block ids (Mooncake, Qwen-Bailian) and of token ids."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from pagedjax.sim.records import Fields, fail
from pagedjax.sim.trace.reading import UNITS, Source, Times, wishes_of
from pagedjax.sim.trace.request import Trace, TraceRequest

MOONCAKE_GRANULARITY = 512
BAILIAN_GRANULARITY = 16
_LOOKED_AT = 1000  # rows that settle granularity, unit and order before the first is handed out

ID_COLUMNS = {
    "time": ("timestamp",),
    "input": ("input_length",),
    "output": ("output_length",),
    "ids": ("hash_ids",),
    "block_size": ("block_size",),
    "unit": ("time_unit",),
    "delay": ("delay",),
    "session": ("session_id", "session"),
    "chat": ("chat_id",),
    "parent": ("parent_chat_id",),
    "group": ("type",),
}


def open_ids(source: Source) -> Trace:
    """Chained block ids, the partly filled last one included: Mooncake and Qwen-Bailian.

    Mooncake: 512 tokens an id (`block_size` in the first row overrides it), milliseconds. Qwen-Bailian has the
    same fields and 16 tokens an id, seconds; `chat_id` tells it apart. Rows of a session that carry `delay` in
    place of a time come that long after the session's row before: the answer in between takes no time.
    """
    bailian = source.column("chat") is not None
    granularity = _granularity(source, BAILIAN_GRANULARITY if bailian else MOONCAKE_GRANULARITY)
    source = _with_unit(source, bailian)
    delays = any(source.column("delay", record) for _, record in islice(source.rows(), _LOOKED_AT))

    def requests() -> Iterator[TraceRequest]:
        times = Times(source, increasing=not delays, some=True)
        last: dict[str, float] | None = {} if delays else None
        roots: dict[str, str] = {}
        for line, record in source.rows():
            row = Fields(source.path, line, record)
            size = row.length(*source.columns["block_size"], least=1, default=granularity)
            if size != granularity:
                row.fail(f"block_size={size}", f"must be {granularity} as in the first row")
            num_input = row.length(*source.columns["input"], least=1)
            ids = row.ids(source.column("ids", record) or source.columns["ids"][0], np.int64)
            want = -(-num_input // granularity)
            if len(ids) != want:
                row.fail(
                    f"{len(ids)} hash_ids for input_length={num_input}",
                    f"must be ceil({num_input} / {granularity}) = {want}",
                )
            session = _root(source, record, roots) if bailian else source.text("session", record)
            yield TraceRequest(
                arrival_s=_arrival(source, row, times, session, last),
                num_input=num_input,
                num_output=row.length(*source.columns["output"]),
                granule_ids=ids,
                session=session,
                group=source.text("group", record),
                wishes=wishes_of(row),
            )

    def ordered() -> Iterator[TraceRequest]:
        return iter(sorted(requests(), key=lambda r: r.arrival_s)) if delays else requests()

    name = "bailian" if bailian else "mooncake"
    notes = ("rows with a delay follow their session's row before; all rows are sorted in memory",)
    stem = source.path.name.split(".")[0]
    return Trace(stem, name, granularity, True, ordered, source.path, notes=notes if delays else ())


def _granularity(source: Source, usual: int) -> int:
    """Tokens per id: given, stated in the first row, or the format's own where the ids agree with it."""
    first = Fields(source.path, *source.first)
    stated = 0
    if any(name in source.first[1] for name in source.columns["block_size"]):
        stated = first.length(*source.columns["block_size"], least=1)
    given = source.reading.granularity
    if given and stated not in (0, given):
        first.fail(f"block_size={stated}", f"must be granularity={given} as given")
    if given or stated:
        return given or stated
    low, high = 1, math.inf
    for line, record in islice(source.rows(), _LOOKED_AT):
        row = Fields(source.path, line, record)
        num_input = row.length(*source.columns["input"], least=1)
        count = len(row.ids(source.column("ids", record) or source.columns["ids"][0], np.int64))
        low = max(low, -(-num_input // max(count, 1)))
        if count > 1:
            high = min(high, -(-num_input // (count - 1)) - 1)
    line, record = source.first
    fits = [2**k for k in range(1, 16) if low <= 2**k <= high]
    if fits and usual not in fits and high < math.inf:
        count = len(record[source.column("ids") or "hash_ids"])
        fail(
            source.path,
            line,
            f"{count} hash_ids for input_length={first.length(*source.columns['input'])}",
            f"fit {fits[0]} tokens an id, not {usual}; give the granularity (--granularity {fits[0]}), and the unit "
            "of its times (--time-unit s or ms)",
        )
    if usual == MOONCAKE_GRANULARITY and BAILIAN_GRANULARITY in fits:
        fail(
            source.path,
            line,
            f"prompts of at most {low} tokens with one id each",
            "fit any granularity; give it (--granularity 512 for Mooncake, 16 for Qwen-Bailian) and the unit of its "
            "times (--time-unit ms or s)",
        )
    return usual


def _with_unit(source: Source, bailian: bool) -> Source:
    """Milliseconds, or what the file says; times in parts of a millisecond ask for an answer."""
    line, record = source.first
    stated = source.text("unit", record)
    if stated:
        if stated not in UNITS:
            fail(source.path, line, f"time_unit={stated!r:.20}", f"must be one of {', '.join(UNITS)}")
        return replace(source, units=dict.fromkeys(source.columns["time"], stated))
    if bailian:
        return replace(source, units=dict.fromkeys(source.columns["time"], "s"))
    if not source.reading.time_unit:
        for at, row in islice(source.rows(), _LOOKED_AT):
            name = source.column("time", row)
            value = row[name] if name else 0
            if isinstance(value, float) and value != int(value if abs(value) < 1e18 else 0):
                fail(
                    source.path,
                    at,
                    f"{name}={value}",
                    "is no whole number of milliseconds; give the unit (--time-unit s, or ms)",
                )
    return source


def _arrival(source: Source, row: Fields, times: Times, session: str, last: dict[str, float] | None) -> float:
    """When a row comes; `last` holds the arrival of each session's last row where rows have delays."""
    at = times.of(row)
    if at is None:
        name = source.column("delay", row.record)
        if not session or name is None:
            row.number(*source.columns["time"])  # refuses: neither time nor delay
        delay = row.number(*source.columns["delay"])
        if last is None:
            row.fail(f"delay={delay:g}", f"must first stand among the first {_LOOKED_AT} rows; sort the file")
        if delay < 0:
            row.fail(f"delay={delay:g}", "must not be negative")
        at = last.get(session, 0.0) + delay * UNITS[source.reading.time_unit or "ms"]
    if last is not None and session:
        last[session] = at
    return at


def _root(source: Source, record: dict[str, object], roots: dict[str, str]) -> str:
    """The chat that a row's chat goes back to; `roots` remembers those that follow another, and no first one."""
    chat, parent = source.text("chat", record), source.text("parent", record)
    if parent in ("", "-1"):
        return chat
    roots[chat] = root = roots.get(parent, parent)
    return root


TOKEN_COLUMNS = {
    "time": ("arrival_time_ns", "arrival_s"),
    "tokens": ("input_tok_ids", "token_ids"),
    "answer": ("output_tok_ids", "output_ids"),
    "input": ("input_toks",),
    "output": ("output_toks", "num_output"),
    "session": ("session", "session_id"),
    "group": ("group",),
}
TOKEN_UNITS = {"arrival_time_ns": "ns", "arrival_s": "s"}


def open_tokens(source: Source) -> Trace:
    """Token ids of prompts, and of answers where they are known; a stated prompt length must be theirs."""

    def requests() -> Iterator[TraceRequest]:
        times = Times(source)
        for line, record in source.rows():
            row = Fields(source.path, line, record)
            ids = row.ids(source.column("tokens", record) or source.columns["tokens"][-1], np.int32)
            if not len(ids):
                row.fail("an empty prompt", "must hold at least one token")
            stated = row.length(*source.columns["input"], default=len(ids))
            if stated != len(ids):
                row.fail(f"input_toks={stated} for {len(ids)} ids", "must be equal")
            name = source.column("answer", record)
            output = None if name is None else row.ids(name, np.int32)
            unknown = source.reading.output_tokens if output is None else len(output)
            yield TraceRequest(
                arrival_s=times.of(row) or 0.0,
                num_input=len(ids),
                num_output=row.length(*source.columns["output"], default=unknown),
                token_ids=ids,
                output_ids=output,
                session=source.text("session", record),
                group=source.text("group", record),
                wishes=wishes_of(row),
            )

    return Trace(source.path.name.split(".")[0], "tokens", 1, True, requests, source.path)
