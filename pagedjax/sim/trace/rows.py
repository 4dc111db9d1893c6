"""Rows of a trace file as dictionaries, streamed: JSON lines, JSON arrays, CSV, parquet, lines of text."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagedjax.paths import AnyPath
from pagedjax.sim.records import fail, lines, parse, records

Rows = Iterator[tuple[int, dict[str, Any]]]  # line, or number of the element where there are no lines

_CHUNK = 1 << 20
_MOST_ELEMENT = 1 << 28  # characters of one element of an array
_MOST_CELL = 1 << 26  # characters; csv's own limit of 131,072 is below one long prompt
_FAR = 1000  # characters behind an error that cannot be a cut


def rows_of(path: AnyPath) -> Callable[[], Rows]:
    """How to open a file's rows, chosen by its name or its first character.

    Raises:
        TraceError: It holds nothing, or neither name nor first character tells what it is; or it is a pipe.
        OSError: It cannot be opened.
    """
    if isinstance(path, Path) and path.is_fifo():
        fail(path, 1, "a pipe", "traces are read more than once; save it to a file first")
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if ".parquet" in suffixes:
        return lambda: _parquet(path)
    line, text = next(lines(path))
    if ".csv" in suffixes:
        return lambda: _table(path, delimiter_of(text))
    if ".tsv" in suffixes:
        return lambda: _table(path, "\t")
    if ".txt" in suffixes:
        return lambda: ((line, {"prompt": text.rstrip("\n")}) for line, text in lines(path))
    start = text.lstrip()[:1]
    if start == "[":
        return lambda: _elements(path)
    if text.strip() == "{":
        return lambda: _document(path, line)
    return lambda: records(path)


def delimiter_of(header: str) -> str:
    """What parts the cells of a .csv file: a comma, or what its header has in place of one."""
    return next((d for d in (",", ";", "\t", "|") if d in header), ",")


def _document(path: AnyPath, line: int) -> Rows:
    """One JSON object over many lines."""
    text = "".join(text for _, text in lines(path, blank=True))
    record = parse(path, line, text, "must be one object, or one object a line")
    if not isinstance(record, dict):
        fail(path, line, f"a JSON {type(record).__name__}", "must be an object")
    yield line, record


def _elements(path: AnyPath) -> Rows:
    """Objects of a JSON array, one at a time, however it is broken into lines."""
    rule = "must be an array of objects"
    decoder = json.JSONDecoder()
    source = lines(path, most=_CHUNK, blank=True)
    held, at, line, number = "", 0, 1, 0

    def more(least: int) -> bool:
        nonlocal held, at, line
        line += held.count("\n", 0, at)
        parts, size = [held[at:]], 0
        at = 0
        for _, text in source:
            parts.append(text)
            size += len(text)
            if size >= least:
                break
        held = "".join(parts)
        return size > 0

    def skip(separators: str) -> str:
        """The next character that is none of them; "" at the end."""
        nonlocal at
        while True:
            while at < len(held) and held[at] in separators:
                at += 1
            if at < len(held):
                return held[at]
            if not more(_CHUNK):
                return ""

    blank = " \t\r\n\ufeff"
    skip(blank)  # the bracket that opens the array
    at += 1
    while True:
        here = skip(blank)
        if here == "]":
            at += 1
            if skip(blank):
                fail(path, line + held.count("\n", 0, at), "text behind the array", rule)
            break
        if here != "{":
            got = "an array that does not end" if not here else f"an entry {held[at : at + 20]!r}"
            fail(path, line + held.count("\n", 0, at), got, f"{rule}; is the file whole?")
        try:
            record, at = decoder.raw_decode(held, at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated") or error.pos > len(held) - _FAR
            if cut and len(held) - at < _MOST_ELEMENT and more(max(_CHUNK, len(held) - at)):
                continue
            broken = line + held.count("\n", 0, min(error.pos, len(held)))
            fail(path, broken, f"wrong JSON in element {number + 1} ({error.msg})", rule)
        except RecursionError:
            fail(path, line, "JSON nested too deeply", rule)
        except ValueError:
            fail(path, line, "JSON with a number of thousands of digits", rule)
        number += 1
        yield number, record
        here = skip(blank)
        if here == ",":
            at += 1
            here = skip(blank)
            if here == "]":
                fail(path, line + held.count("\n", 0, at), "a comma before the end of the array", rule)
        elif here and here != "]":
            got = f"{held[at : at + 20]!r} behind element {number}"
            fail(path, line + held.count("\n", 0, at), got, f"{rule} with commas between them")
    if not number:
        fail(path, 1, "an empty array", "must hold at least one object")


def _table(path: AnyPath, delimiter: str) -> Rows:
    """CSV rows by the header's names; cells may hold line breaks, quotes and whole prompts."""

    def texts() -> Iterator[str]:
        for _, text in lines(path, blank=True):
            yield text

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        # The limit is the module's: it is ours while a row is read and its owner's in between.
        before = csv.field_size_limit(_MOST_CELL)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fail(path, line, f"wrong CSV ({error})", "must be rows of cells, quoted where they hold breaks")
        finally:
            csv.field_size_limit(before)
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                fail(path, line, f"columns {twice!r:.60} twice", "must have one name each")
            continue
        if len(cells) != len(header):
            fail(path, line, f"{len(cells)} cells", f"must be {len(header)} as in the header")
        yield line, dict(zip(header, cells))


def _parquet(path: AnyPath) -> Rows:
    """Rows of a parquet file, a thousand at a time."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path}: parquet needs pyarrow; pip install 'pagedjax[parquet]', or convert it to CSV"
        ) from None
    number = 0
    try:
        with path.open("rb") as file:
            for batch in ParquetFile(file).iter_batches(batch_size=1000):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except ArrowException as error:
        fail(path, number + 1, f"damaged parquet ({str(error)!r:.60})", "must be a whole parquet file")
    if not number:
        fail(path, 1, "no row", "must hold at least one")
