"""Traces of lengths alone: tables (Azure, BurstGPT, vidur, Sarathi), benchmark results, answer lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagedjax.sim.records import Fields
from pagedjax.sim.trace.reading import Source, Times, wishes_of
from pagedjax.sim.trace.request import Trace, TraceRequest

LENGTH_COLUMNS = {
    "time": ("TIMESTAMP", "Timestamp", "timestamp", "arrived_at", "arrival_s", "arrival_time", "time"),
    "input": (
        "ContextTokens",
        "num_prefill_tokens",
        "Request tokens",
        "num_input",
        "input_tokens",
        "prompt_tokens",
        "input_length",
        "input_len",
    ),
    "output": (
        "GeneratedTokens",
        "num_decode_tokens",
        "Response tokens",
        "num_output",
        "output_tokens",
        "completion_tokens",
        "generated_tokens",
        "output_length",
        "output_len",
    ),
    "session": ("Session ID", "session_id", "session"),
    "group": ("Log Type", "group"),
}
LENGTH_UNITS = {"Timestamp": "s", "arrived_at": "s", "arrival_s": "s"}


def open_lengths(source: Source) -> Trace:
    """Prompt and answer lengths, one request a row; rows with an answer of 0 tokens are kept."""

    def requests() -> Iterator[TraceRequest]:
        times = Times(source)
        for line, record in source.rows():
            row = Fields(source.path, line, record)
            yield TraceRequest(
                arrival_s=times.of(row) or 0.0,
                num_input=row.length(*source.columns["input"], least=1),
                num_output=row.length(*source.columns["output"]),
                session=source.text("session", record),
                group=source.text("group", record),
                wishes=wishes_of(row),
            )

    timed = source.column("time") is not None
    return Trace(_stem(source), "lengths", 0, False, requests, source.path, timed=timed)


ANSWER_COLUMNS = {"output": ("L_gt",)}
FIGURE_11_PROMPT = 19  # tokens; the mean prompt of Alpaca that PagedAttention Fig. 11 prints


def open_answers(source: Source) -> Trace:
    """Alpaca answer lengths; prompts' lengths are not in the file and taken as `FIGURE_11_PROMPT`.

    L_gt is the reference answer's; L_t0.0 … L_t0.7 (Vicuna-7B at that temperature) are asked for by
    `columns={"output": "L_t0.5"}`.
    """

    def requests() -> Iterator[TraceRequest]:
        for line, record in source.rows():
            row = Fields(source.path, line, record)
            yield TraceRequest(0.0, FIGURE_11_PROMPT, row.length(*source.columns["output"]))

    note = f"prompts' lengths are not in the file: {FIGURE_11_PROMPT} tokens each, as PagedAttention Fig. 11 prints"
    return Trace(_stem(source), "alpaca", 0, False, requests, source.path, timed=False, notes=(note,))


BENCHMARK_COLUMNS = {
    "input": ("input_lens",),
    "output": ("output_lens",),
    "time": ("start_times",),
    "errors": ("errors",),
}
BENCHMARK_UNITS = {"start_times": "s"}


def open_benchmark(source: Source) -> Trace:
    """Results of vLLM's and SGLang's serving benchmarks: lists of lengths, one document (or line) a run.

    Requests that failed (their entry of `errors` is not empty) have an answer of 0 tokens. Starts, where they were
    kept, are of a monotonic clock: the first is 0, and requests come in their order.
    """

    def requests() -> Iterator[TraceRequest]:
        begins = 0.0
        for line, record in source.rows():
            row = Fields(source.path, line, record)
            inputs, outputs = (_list(source, row, role) for role in ("input", "output"))
            if len(inputs) != len(outputs):
                row.fail(f"{len(inputs)} input_lens, {len(outputs)} output_lens", "must be equally many")
            starts, errors = (_list(source, row, role, len(inputs)) for role in ("time", "errors"))
            entries = []
            for i, (num_input, num_output, start, error) in enumerate(zip(inputs, outputs, starts, errors)):
                one = Fields(row.path, row.line, {"input_lens": num_input, "output_lens": num_output})
                answered = 0 if error else one.length("output_lens")
                at = (
                    0.0
                    if start is None
                    else Fields(row.path, row.line, {"start_times": start}).number("start_times")
                )
                entries.append((at, i, one.length("input_lens", least=1), answered))
            entries.sort()
            first = entries[0][0] if entries else 0.0
            for at, _, num_input, num_output in entries:
                yield TraceRequest(begins + at - first, num_input, num_output)
            begins += entries[-1][0] - first if entries else 0.0

    timed = source.column("time") is not None
    return Trace(_stem(source), "benchmark", 0, False, requests, source.path, timed=timed)


def _list(source: Source, row: Fields, role: str, length: int | None = None) -> list[Any]:
    """A column that is a list; where it may be missing, `length` entries of None."""
    name = source.column(role, row.record)
    if name is None and length is not None:
        return [None] * length
    value = row.record.get(name or source.columns[role][0])
    if not isinstance(value, list) or (length is not None and len(value) != length):
        many = "" if length is None else f" of {length}"
        row.fail(f"{name or source.columns[role][0]}={type(value).__name__}", f"must be a list{many}")
    return value


def _stem(source: Source) -> str:
    return source.path.name.split(".")[0]
