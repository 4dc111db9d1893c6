"""Lines and records of trace files, read as a stream; every complaint names file, line, got and rule."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pagedjax.paths import AnyPath

_MOST = 1e300  # leaves out nan, inf and what no float holds
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


MOST_COUNT = 2**31 - 1
RATES = (1e-9, 1e9)  # a second; beyond, times run into infinity or stand still


def in_range(name: str, value: float, least: float, most: float) -> None:
    """Check a parameter; nan lies in no range.

    Raises:
        ValueError: `value` lies outside `least` to `most`.
    """
    if not least <= value <= most:
        remedy = "raise it" if value < least else "lower it" if value > most else "give a number"
        raise ValueError(f"{name}={value}: must be from {least:,} to {most:,}; {remedy}")


class TraceError(ValueError):
    """A trace file breaks a rule; the message holds file, line, what was got and the rule."""


def fail(path: AnyPath, line: int, got: str, rule: str) -> NoReturn:
    """Raise TraceError: file, line, what was got and the rule it breaks."""
    message = " ".join(f"{got}: {rule}".split())  # what was got may hold line breaks
    raise TraceError(f"{path}:{line}: {message}")


def lines(path: AnyPath, *, most: int = -1, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Numbered lines of a plain, .gz or .xz file.

    Args:
        path: The file.
        most: Hand longer lines out in pieces of so many characters; -1: whole.
        blank: Blank lines, too.

    Raises:
        TraceError: The compressed stream is cut or damaged, the text is not UTF-8, or no line holds text.
        OSError: The file cannot be opened or read; it carries the path.
    """
    opener = OPENERS.get(path.suffix.lower(), open)
    number = 0
    seen, begins = False, True
    with ExitStack() as stack:
        if isinstance(path, Path):
            file = stack.enter_context(opener(path, "rt", encoding="utf-8-sig"))
        else:  # what `open` has no name for is wrapped as it comes
            wrap = TextIOWrapper if opener is open else partial(opener, mode="rt")
            file = stack.enter_context(wrap(stack.enter_context(path.open("rb")), encoding="utf-8-sig"))
        while True:
            try:
                text = file.readline(most)
            except EOFError:
                fail(
                    path,
                    number + 1,
                    "the compressed stream ends early",
                    "must be a whole file; fetch it again",
                )
            except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
                fail(path, number + 1, f"damaged compression ({error})", f"must be valid {path.suffix[1:]}")
            except OSError as error:
                error.filename = str(path)
                raise
            except UnicodeDecodeError as error:
                before = error.object[: error.start].count(b"\n")  # text is decoded by the chunk
                got = f"byte {error.object[error.start]:#04x} is not UTF-8"
                fail(path, number + 1 + before, got, _what_it_is(path))
            if not text:
                break
            number += begins
            begins = text.endswith("\n")
            if blank or text.strip():
                seen = seen or bool(text.strip())
                yield number, text
    if not seen:
        fail(path, number or 1, "no line holds a record", "must hold at least one")


_MAGIC = {
    b"\x1f\x8b": "is a gzip file: name it .gz",
    b"\xfd7zXZ": "is an xz file: name it .xz",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "is a zstandard file: unpack it first (zstd -d)",
    b"BZh": "is a bzip2 file: unpack it first (bunzip2)",
    b"PAR1": "is a parquet file: name it .parquet",
    b"\xff\xfe": "is UTF-16: convert it first (iconv -f utf-16 -t utf-8)",
    b"\xfe\xff": "is UTF-16: convert it first (iconv -f utf-16 -t utf-8)",
}


def _what_it_is(path: AnyPath) -> str:
    """What a file is that is no UTF-8 text, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(8)
    what = next((what for magic, what in _MAGIC.items() if start.startswith(magic)), "")
    return f"the file {what}" if what else "must be UTF-8 text; convert it first"


def parse(path: AnyPath, line: int, text: str, rule: str) -> Any:
    """The JSON value of a text that begins at `line`.

    Raises:
        TraceError: It is no JSON, or holds what Python's reader has no room for; the message ends in `rule`.
    """
    try:
        return json.loads(text.rstrip("\n"))  # a text that is cut ends on its own line
    except json.JSONDecodeError as error:
        fail(path, line + error.lineno - 1, f"wrong JSON at column {error.colno} ({error.msg})", rule)
    except RecursionError:
        fail(path, line, "JSON nested too deeply", rule)
    except ValueError:  # Python turns no more than 4300 digits into a number
        fail(path, line, "JSON with a number of thousands of digits", rule)


def records(path: AnyPath) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered JSON objects, one a line.

    Raises:
        TraceError: As `lines`, or a line is no JSON object.
    """
    for number, text in lines(path):
        record = parse(path, number, text, "must be one object a line")
        if not isinstance(record, dict):
            fail(path, number, f"a JSON {type(record).__name__}", "must be one object a line")
        yield number, record


class Fields:
    """Typed, checked access to one record's fields."""

    def __init__(self, path: AnyPath, line: int, record: dict[str, Any]) -> None:
        if not isinstance(record, dict):
            fail(path, line, f"an entry {record!r:.40}", "must be an object")
        self.path, self.line, self.record = path, line, record

    def fail(self, got: str, rule: str) -> NoReturn:
        """Raise TraceError for this record."""
        fail(self.path, self.line, got, rule)

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of the named fields that holds something, or `default`; a null or an empty cell holds nothing.

        Raises:
            TraceError: None is there and there is no default, or it is no number.
        """
        for name in names:
            value = self.record.get(name)
            if value is not None and value != "":
                if isinstance(value, str):
                    with suppress(ValueError):
                        value = float(value)
                if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
                    self.fail(f"{name}={self.record[name]!r:.60}", "must be a number")
                return value
        if default is None:
            if empty := [name for name in names if name in self.record]:
                self.fail(f"{empty[0]}={self.record[empty[0]]!r}", "must be a number")
            self.fail(f"fields {sorted(self.record)}", f"must hold {' or '.join(names)}")
        return default

    def length(self, *names: str, least: int = 0, default: int | None = None) -> int:
        """The same for a whole number of tokens, at least `least`."""
        value = self.number(*names, default=default)
        if value != int(value) or not least <= value < 2**31:
            self.fail(
                f"{names[0]}={value}", f"must be a whole number of tokens, at least {least} and below 2**31"
            )
        return int(value)

    def ids(self, name: str, dtype: type) -> np.ndarray:
        """A flat list of ids as `dtype`[n].

        Raises:
            TraceError: It is none, or an id is negative or does not fit.
        """
        value = self.record.get(name)
        if not isinstance(value, list):
            self.fail(f"{name}={type(value).__name__}", "must be a list of whole numbers")
        # Every element's type: numpy would cut 2.5 to 2 and read "2" and true as numbers.
        if set(map(type, value)) - {int}:
            self.fail(f"{name}", "must be a flat list of whole numbers")
        try:
            ids: np.ndarray = np.array(value, dtype=np.int64)
            low, high = (ids.min(), ids.max()) if value else (0, 0)
        except OverflowError:
            low, high = min(value), max(value)
        if low < 0 or high > np.iinfo(dtype).max:
            self.fail(
                f"{name} holds {low!s:.40} to {high!s:.40}",
                f"ids must fit {np.dtype(dtype).name} from 0",
            )
        return ids.astype(dtype, copy=False)


class RisingTimes:
    """Refuses times that run backwards."""

    def __init__(self) -> None:
        self.last = float("-inf")

    def check(self, row: Fields, time_s: float) -> float:
        """`time_s` itself.

        Raises:
            TraceError: It lies before the last one.
        """
        if time_s < self.last:
            row.fail(f"time {time_s:g} s after {self.last:g} s", "times must not decrease; sort the file")
        self.last = time_s
        return time_s
