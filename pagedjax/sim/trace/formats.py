"""The table of trace formats, and the one door to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagedjax.paths import AnyPath, place
from pagedjax.sim.records import fail
from pagedjax.sim.trace import agentic, identified, lengths, text
from pagedjax.sim.trace.reading import WISHES, Chat, Encode, Reading, Source, missing
from pagedjax.sim.trace.request import Trace, TraceRequest
from pagedjax.sim.trace.rows import delimiter_of, rows_of


@dataclass(frozen=True)
class Format:
    """One way to write requests down.

    Attributes:
        open: Turns a source into a trace.
        columns: What a column holds → names it may have; the first that is there counts.
        marks: What the first row must hold for the file to be of this format.
        units: Name of a time's column → unit.
        also: Other columns that the reader looks at.
    """

    open: Callable[[Source], Trace]
    columns: Mapping[str, tuple[str, ...]]
    marks: tuple[str, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    also: frozenset[str] = frozenset()


# In order: the first whose marks a file's first row holds reads it.
FORMATS: dict[str, Format] = {
    "ids": Format(identified.open_ids, identified.ID_COLUMNS, ("ids",), {"timestamp": "ms"}),
    "agentic": Format(
        agentic.open_agentic, agentic.AGENTIC_COLUMNS, ("requests",), also=agentic.AGENTIC_ALSO
    ),
    "tokens": Format(identified.open_tokens, identified.TOKEN_COLUMNS, ("tokens",), identified.TOKEN_UNITS),
    "benchmark": Format(
        lengths.open_benchmark, lengths.BENCHMARK_COLUMNS, ("input", "output"), lengths.BENCHMARK_UNITS
    ),
    "sharegpt": Format(text.open_sharegpt, text.SHAREGPT_COLUMNS, ("turns",)),
    "chat": Format(text.open_chat, text.CHAT_COLUMNS, ("messages",), text.TIME_UNITS),
    "gateway": Format(text.open_gateway, text.GATEWAY_COLUMNS, ("body",), text.TIME_UNITS),
    "answers": Format(lengths.open_answers, lengths.ANSWER_COLUMNS, ("output",)),
    "alpaca": Format(text.open_alpaca, text.ALPACA_COLUMNS, ("prompt",)),
    "prompts": Format(text.open_prompts, text.PROMPT_COLUMNS, ("prompt",), text.TIME_UNITS),
    "lengths": Format(
        lengths.open_lengths, lengths.LENGTH_COLUMNS, ("input", "output"), lengths.LENGTH_UNITS
    ),
}
_NO_WISHES = ("agentic", "benchmark", "answers")  # rows of many requests, or of lengths alone
ROLES = tuple(sorted({role for entry in FORMATS.values() for role in entry.columns}))


def open_trace(
    path: str | AnyPath,
    *,
    columns: Mapping[str, str] | None = None,
    time_unit: str = "",
    granularity: int = 0,
    encode: Encode | None = None,
    chat: Chat | None = None,
    output_tokens: int = 0,
    common_prefix: bool = False,
    sort: bool = False,
) -> Trace:
    """Open a trace with the reader that its first row asks for.

    Args:
        path: JSON lines, a JSON array, CSV, TSV, lines of text (.txt) or parquet; plain, .gz or .xz.
        columns / time_unit / granularity / encode / chat / output_tokens / common_prefix / sort: See `Reading`.

    Raises:
        TraceError: No format has these columns; the message lists them.
        ValueError: An option out of range, or text without a tokenizer.
        FileNotFoundError: No such file.
    """
    reading = Reading(
        dict(columns or {}), time_unit, granularity, encode, chat, output_tokens, common_prefix, sort
    )
    path = place(path)
    rows = rows_of(path)
    line, record = next(rows(), (1, {}))
    if ".csv" in path.suffixes and not record:
        record = dict.fromkeys(_header(path), "1")
    for role, name in reading.columns.items():
        if role not in ROLES:
            raise ValueError(
                f"column {role}={name}: must be one of {', '.join(ROLES)} (--column prompt=NAME)"
            )
        missing(path, line, record, name)
    for kind, entry in FORMATS.items():
        if not entry.columns.keys() >= reading.columns.keys():
            continue
        named = {role: (name,) for role, name in reading.columns.items()}
        source = Source(path, rows, (line, record), {**entry.columns, **named}, entry.units, reading)
        if all(_holds(source, role) for role in entry.marks):
            return _finish(source, kind, entry)
    if "custom_id" in record and "response" in record:
        fail(path, line, "the output of a batch", "holds no prompts; give the batch's input file")
    rule = (
        "must hold hash_ids and input_length (Mooncake, Qwen-Bailian), requests (agentic), token_ids or input_tok_ids "
        "(tokens), input_lens and output_lens (benchmarks), conversations (ShareGPT), messages (chat logs), body "
        "(gateways, batch files), instruction (Alpaca), prompt or text, or lengths of prompt and answer; name other "
        "columns with --column, as in --column prompt=NAME"
    )
    fail(path, line, f"fields {sorted(map(str, record))!s:.300}", rule)


def _holds(source: Source, role: str) -> bool:
    """Whether the first row has a column for `role`, an empty one included."""
    return any(name in source.first[1] for name in source.columns[role])


def _header(path: AnyPath) -> list[str]:
    import csv

    from pagedjax.sim.records import lines

    text = next(lines(path))[1]
    return [cell.strip() for cell in next(csv.reader([text], delimiter=delimiter_of(text)))]


def _finish(source: Source, kind: str, entry: Format) -> Trace:
    """Open it, order it where that was asked for, and note what nobody reads."""
    reading = source.reading
    if reading.granularity and kind not in ("ids", "agentic"):
        raise ValueError(
            f"granularity={reading.granularity}: {source.path} holds no block ids; leave it out (--granularity)"
        )
    if reading.common_prefix and kind != "agentic":
        raise ValueError(f"common_prefix: {source.path} holds no agentic sessions; leave it out")
    trace = entry.open(source)
    if reading.time_unit and not trace.timed:
        raise ValueError(
            f"time_unit={reading.time_unit}: {source.path} holds no times; leave it out (--time-unit)"
        )
    used = {name for names in source.columns.values() for name in names} | entry.also
    used |= set() if kind in _NO_WISHES else set(WISHES)
    unused = [str(name) or "(without a name)" for name in source.first[1] if name not in used]
    notes = list(trace.notes)
    if unused:
        notes.append(f"columns not used: {', '.join(unused)}")
    if not trace.timed:
        notes.append("no times in the file: all requests arrive at 0")
    trace = replace(trace, notes=tuple(notes))
    if not reading.sort:
        return trace
    inner = trace.source

    def ordered() -> Any:
        requests: list[TraceRequest] = sorted(inner(), key=lambda request: request.arrival_s)
        return iter(requests)

    return replace(trace, source=ordered)
