"""How a trace file is to be read: which column is which, units of time, tokenizer; and the clock that checks times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pagedjax.engine.request import SamplingParams
from pagedjax.paths import AnyPath
from pagedjax.sim.records import Fields, fail
from pagedjax.sim.trace.rows import Rows

Encode = Callable[[str], list[int]]
Chat = Callable[[list[dict[str, Any]], list[Any]], str]  # messages, tools → prompt text

WISHES = ("retention", "ttl_s", "cache_read", "cache_write")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_EPOCH_S = (1e9, 4e9)  # 2001 to 2096: a number in here, in some unit, is a date and no offset


@dataclass(frozen=True)
class Reading:
    """Options that all formats share.

    Attributes:
        columns: What a column holds (`prompt`, `time`, … see `FORMATS`) → its name in this file.
        time_unit: Of all times, one of `UNITS`; "": the format's own.
        granularity: Tokens per block id; 0: the format's own.
        encode: Text to token ids; None where the file holds no text.
        chat: Messages and tools to prompt text; None: ChatML.
        output_tokens: Length of answers of which the file says nothing.
        common_prefix: Agentic sessions share tools and system prompts of equal length.
        sort: Order requests by time, in memory; else times that decrease are refused.

    Raises:
        ValueError: An unknown unit, or a number out of range.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str = ""
    granularity: int = 0
    encode: Encode | None = None
    chat: Chat | None = None
    output_tokens: int = 0
    common_prefix: bool = False
    sort: bool = False

    def __post_init__(self) -> None:
        if self.time_unit not in ("", *UNITS):
            raise ValueError(f"time_unit={self.time_unit}: must be one of {', '.join(UNITS)}; try s")
        for name in ("granularity", "output_tokens"):
            if not 0 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 (not given) to 2**31 - 1")


@dataclass(frozen=True)
class Source:
    """A file and what its first row said.

    Attributes:
        path: For messages.
        rows: Opens a pass over it.
        first: Its first row, and where it stands.
        columns: What a column holds → names it may have here; the first that a row has counts.
        units: Name of a time's column → its unit; "" where dates alone are sure.
        reading: The options.
    """

    path: AnyPath
    rows: Callable[[], Rows]
    first: tuple[int, dict[str, Any]]
    columns: Mapping[str, tuple[str, ...]]
    units: Mapping[str, str]
    reading: Reading

    def column(self, role: str, record: Mapping[str, Any] | None = None) -> str | None:
        """The name under which a row (None: the first) has `role`; None where it has not."""
        record = self.first[1] if record is None else record
        return next((n for n in self.columns[role] if record.get(n) not in (None, "")), None)

    def text(self, role: str, record: Mapping[str, Any]) -> str:
        """What stands in a column, as text; "" where nothing does."""
        name = self.column(role, record)
        return "" if name is None else str(record[name])

    @property
    def encode(self) -> Encode:
        """The tokenizer.

        Raises:
            ValueError: None was given.
        """
        if self.reading.encode is None:
            raise ValueError(f"{self.path}: holds text; give a tokenizer")
        return self.reading.encode


class Times:
    """Arrival times of one pass: any unit, dates or offsets; a trace that begins at a date begins at 0.

    Args:
        source: Whose `time` columns they are.
        increasing: Refuse times that run backwards.
        some: Rows without a time are the reader's affair; else all rows have one, or none has.
    """

    def __init__(self, source: Source, *, increasing: bool = True, some: bool = False) -> None:
        self._source = source
        self._timed = None if some else source.column("time") is not None
        self._increasing = increasing and not source.reading.sort
        self._scale = 0.0
        self._base: float | datetime | None = None
        self._last = float("-inf")

    def of(self, row: Fields) -> float | None:
        """Seconds of a row's arrival; None where it has no time.

        Raises:
            TraceError: It is no time, its unit is unknown or does not fit it, or it runs backwards.
        """
        name = self._source.column("time", row.record)
        if self._timed is not None and self._timed != (name is not None):
            times = " or ".join(self._source.columns["time"][:3])
            got, rule = ("no", "must have one") if self._timed else ("a", "must have none")
            row.fail(f"{got} time ({times})", f"{rule} as the first row has")
        if name is None:
            return None
        value = row.record[name]
        if isinstance(value, str):
            try:
                value = int(value) if value.strip().lstrip("-").isdecimal() else float(value)
            except ValueError:
                value = self._date(row, name, value)
        seconds = self._since(row, name, value) if isinstance(value, datetime) else self._offset(row, name)
        return self.check(row, seconds)

    def check(self, row: Fields, seconds: float) -> float:
        """`seconds`, once it is known not to lie before the last one.

        Raises:
            TraceError: It does.
        """
        if self._increasing and seconds < self._last:
            row.fail(
                f"time {seconds:g} s after {self._last:g} s",
                "times must not decrease; sort the file (--sort)",
            )
        self._last = seconds
        return seconds

    def _date(self, row: Fields, name: str, text: str) -> datetime:
        try:
            # BigQuery and others write the zone's name.
            return datetime.fromisoformat(
                text.strip().removesuffix(" UTC") + "+00:00" * text.strip().endswith(" UTC")
            )
        except ValueError:
            row.fail(f"{name}={text!r:.60}", "must be an ISO date and time, or a number")

    def _since(self, row: Fields, name: str, stamp: datetime) -> float:
        base = self._base if self._base is not None else stamp
        if not isinstance(base, datetime):
            row.fail(f"{name}={stamp}", "must be a number as in the first row")
        self._base = base
        if (stamp.utcoffset() is None) != (base.utcoffset() is None):
            row.fail(f"{name}={row.record[name]!r:.60}", "must have a time zone in every row or in none")
        return (stamp - base).total_seconds()

    def _offset(self, row: Fields, name: str) -> float:
        value = row.number(name)
        if self._base is None:
            self._scale = UNITS[self._unit(row, name, value)]
            self._base = value if abs(value * self._scale) >= _EPOCH_S[0] else 0
        if isinstance(self._base, datetime):
            row.fail(f"{name}={row.record[name]!r:.60}", "must be a date as in the first row")
        seconds = (value - self._base) * self._scale  # whole numbers are subtracted exactly
        if self._scale < 1:
            seconds = (value - self._base) / round(1 / self._scale)
        return seconds

    def _unit(self, row: Fields, name: str, value: float) -> str:
        if self._source.reading.time_unit:
            return self._source.reading.time_unit
        known = self._source.units.get(name, "")
        date = next((u for u, scale in UNITS.items() if _EPOCH_S[0] <= value * scale < _EPOCH_S[1]), "")
        if date and known and date != known:
            year = datetime.fromtimestamp(value * UNITS[date], UTC).year
            row.fail(
                f"{name}={value}",
                f"is taken in {known}, but in {date} it would be a date of {year}; give the unit (--time-unit {date})",
            )
        if not (date or known):
            row.fail(
                f"{name}={value}", f"its unit is unknown; give one of {', '.join(UNITS)} (--time-unit s)"
            )
        return known or date


def missing(source_path: AnyPath, line: int, record: Mapping[str, Any], name: str) -> None:
    """Refuse a column that was named and is not there.

    Raises:
        TraceError: `record` has no `name`.
    """
    if name not in record:
        found = ", ".join(map(str, record))
        fail(source_path, line, f"no column {name!r:.60}", f"must be one of {found:.300} (--column)")


def wishes_of(row: Fields) -> dict[str, Any] | None:
    """What a row asks of the cache, where it asks anything; checked as a request's own."""
    wishes = {name: row.record[name] for name in WISHES if name in row.record}
    if not wishes:
        return None
    try:
        SamplingParams(**wishes)
    except ValueError as error:
        got, _, rule = str(error).partition(": ")
        row.fail(got, rule)
    return wishes
