"""Records read back: their frames, and the state of the blocks that these tell when they are replayed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pagedjax.cache.stats import CacheStats

VERSION = 3
_MOST = 1e15  # seconds, bytes and counts; sums of them stay finite
_LONGEST = 1 << 24  # blocks of a table; an edited file shall not take all memory
Frame = dict[str, Any]


class RecordError(ValueError):
    """A record cannot be read; the message names file, line and rule."""


def _open_text(path: Path) -> IO[str]:
    """A text file, gzip where its name ends in .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


class Record:
    """The frames of a record, the `run` frame first; read anew each time one begins with them.

    What happened to blocks and tables is told as `blocks` and `tables`, as `pagedjax.report.record` says. A last line
    that a kill cut is left out. Iterating raises `RecordError` where the file is no record, of another version, or has
    a broken line that is not the last. A notebook shows what ran, the pool over the run's clock, and
    whose first token took longest.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[Frame]:
        return _frames(self.path)

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from pagedjax.report.facts import notebook

        return notebook(self)


def read_record(path: str | Path) -> Record:
    """A record's frames, to iterate over; nothing is read before the first is asked for.

    Raises, while iterating:
        RecordError: No record, of another version, or a broken line that is not the last.
        OSError: The file cannot be read.
    """
    return Record(path)


def _frames(path: Path) -> Iterator[Frame]:
    with _open_text(path) as file:
        yield from read_frames(file, path)


def read_frames(lines: Iterable[str], path: str | Path) -> Iterator[Frame]:
    """As `read_record`, of lines; `path` is what messages call them."""
    broken: tuple[int, str] | None = None
    told: dict[int | None, _Told] = {}  # instance of a fleet → what was told of it so far
    first = True
    try:
        for number, line in enumerate(lines, 1):
            if broken is not None:
                break
            try:
                frame = json.loads(line, parse_constant=_no_json, parse_float=_finite)
                if not isinstance(frame, dict) or not isinstance(frame.get("frame"), str):
                    raise ValueError("no frame")
                if "e" in frame or "events" in frame or "pools" in frame:
                    told.setdefault(frame.get("i"), _Told()).complete(frame)
            except (
                ValueError,
                TypeError,
                LookupError,
                AttributeError,
                ArithmeticError,
                RecursionError,
            ) as error:
                broken = (number, str(error))
                continue
            if first:
                _check_first(path, frame)
                first = False
            yield frame
        else:
            if first:
                raise RecordError(
                    f"{path}: holds no frame: a record begins with a run frame; give what --record wrote"
                )
            return
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        if first:
            raise RecordError(
                f"{path}: is no record ({error}); give what --record wrote, whole, .gz where it is packed"
            ) from None
        return  # cut by a kill: what was whole has been told
    assert broken is not None
    raise RecordError(f"{path}:{broken[0]}: no frame of a record ({broken[1][:120]}); was the file edited?")


# Values of each event.
_VALUES = {
    "take": 1,
    "share": 1,
    "free": 1,
    "fill": 1,
    "drop": 1,
    "grow": 2,
    "hit": 2,
    "leave": 1,
    "put": 3,
    "cut": 2,
}


class _Told:
    """Owners and contents of an engine's blocks, its tables and its clock, from what happened to them."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], int] = {}
        self._contents: dict[tuple[int, int], str] = {}
        self._tables: dict[tuple[int, int], list[int]] = {}  # (sequence, group) → its table
        self._ended: float | None = None  # when the last step had
        self._was: dict[tuple[int, int], str | None] = {}  # contents of a frame's blocks before it
        # (sequence, group) of tables that changed in a frame → how long they were, the first position that changed.
        self._changed: dict[tuple[int, int], tuple[int, int]] = {}
        self._passing: list[list[Any]] = []

    def complete(self, frame: Frame) -> None:
        """Put what a reader gets in the place of what the file says.

        Raises:
            ValueError, TypeError, LookupError, AttributeError, ArithmeticError: It makes no sense.
        """
        if "e" in frame:
            ended, began = frame.pop("e"), frame.setdefault("t", self._ended)
            if began is None:
                raise ValueError("does not say when it began")
            frame["s"], self._ended = ended - began, ended
        if "pools" in frame:  # version 2: no tables among them
            for group, events in enumerate(frame.pop("pools")):
                for what, named, *digests in events:
                    self._blocks_event(what, group, named, digests)
        text = frame.pop("digests", "")
        digests = text.split(",") if text else []
        told = 0
        events, at = frame.pop("events", []), 0
        while at < len(events):
            what = events[at]
            name, _, number = what.partition(" ")
            if name not in _VALUES or (number and not number.isdecimal()):
                raise ValueError(f"{what!r} is nothing that happens to a block")
            values = events[at + 1 : at + 1 + _VALUES[name]]
            at += 1 + len(values)
            if type(values[-1]) is int and name not in ("leave", "cut"):
                values[-1] = [values[-1]]
            if name == "fill":
                values.append(",".join(digests[told : told + len(values[0])]))
                told += len(values[0])
            self._event(name, int(number or 0), values)
        if told != len(digests):
            raise ValueError(f"{len(digests)} digests of {told} blocks")
        self._fold(frame)

    def _event(self, what: str, group: int, values: list[Any]) -> None:
        if what in ("grow", "hit", "leave", "put", "cut"):
            seq, *rest = values
            table = self._tables.setdefault((seq, group), [])
            if what == "grow":
                self._blocks_event("take", group, rest[0], [])
                self._write(seq, group, table, len(table), rest[0])
            elif what == "hit":
                self._blocks_event("share", group, rest[0], [])
                self._write(seq, group, table, 0, rest[0])
            elif what == "put":
                self._write(seq, group, table, *rest)
            elif what == "cut":
                if not 0 <= rest[0] <= len(table):
                    raise ValueError(f"length {rest[0]} of a table of {len(table)}")
                self._changed.setdefault((seq, group), (len(table), rest[0]))
                self._note(seq, group, rest[0])
                del table[rest[0] :]
            else:
                self._blocks_event("free", group, [b for b in table if b], [])
                self._leave(seq, group, table)
        else:
            self._blocks_event(what, group, values[0], values[1:])

    def _write(self, seq: int, group: int, table: list[int], position: int, blocks: list[int]) -> None:
        if not 0 <= position <= len(table):
            raise ValueError(f"position {position} of a table of {len(table)}")
        self._changed.setdefault((seq, group), (len(table), position))
        self._note(seq, group, position)
        table[position : position + len(blocks)] = blocks

    def _note(self, seq: int, group: int, position: int) -> None:
        was, first = self._changed[seq, group]
        self._changed[seq, group] = (was, min(first, position))

    def _leave(self, seq: int, group: int, table: list[int]) -> None:
        was, first = self._changed.get((seq, group), (len(table), len(table)))
        if len(table) > first:
            self._passing.append([seq, group, first, table[first:]])
        self._changed[seq, group] = (was, 0)
        del self._tables[seq, group]

    def _blocks_event(self, what: str, group: int, named: list[int], digests: list[str]) -> None:
        owners, contents, was = self._owners, self._contents, self._was
        places = [(group, block) for block in named]
        for place in places:
            if place not in was:
                was[place] = contents.get(place)
        if what == "take":
            owners.update(dict.fromkeys(places, 1))
        elif what in ("share", "free"):
            step = 1 if what == "share" else -1
            for place in places:
                owners[place] = owners.get(place, 0) + step
                if owners[place] < 0:
                    raise ValueError(f"block {place[1]} has fewer owners than none")
        elif what == "drop":
            for place in places:
                contents.pop(place, None)
        elif what == "fill":
            contents.update(zip(places, digests[0].split(","), strict=True))
        else:
            raise ValueError(f"{what!r} is nothing that happens to a block")

    def _fold(self, frame: Frame) -> None:
        """Write down what the events left of every block and table that they named."""
        owners, contents = self._owners, self._contents
        if self._was:
            out: list[list[Any]] = []
            for place, had in self._was.items():
                content = contents.get(place)
                out.append([*place, owners.get(place, 0)] + ([content] if content != had else []))
            frame["blocks"] = out
            self._was = {}
        if not self._changed:
            return
        tables, gone = [], []
        here = {seq for seq, _ in self._tables}
        for (seq, group), (was, first) in self._changed.items():
            if seq in here:
                table = self._tables.get((seq, group), [])
                tables.append([seq, group, first, table[first:] + [0] * (was - len(table))])
            elif was and seq not in gone:
                gone.append(seq)
        for name, found in (("tables", tables), ("gone", gone), ("passing", self._passing)):
            if found:
                frame[name] = [*frame.get(name, ()), *found]
        self._changed, self._passing = {}, []


def _finite(text: str) -> float:
    value = float(text)
    if not -_MOST <= value <= _MOST:
        raise ValueError(f"{text[:20]} is more than any number of a record")
    return value


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def taken(take: Callable[[Frame], object], frame: Frame, number: int, name: str) -> None:
    """Give a frame to a reader of a record.

    Args:
        take: Reads one frame.
        frame: The frame.
        number: Its line, from 1.
        name: What messages call the record.

    Raises:
        RecordError: The reader cannot make sense of it.
    """
    try:
        take(frame)
    except RecordError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"[:120]
        raise RecordError(
            f"{name}: frame {number} ({frame['frame'][:20]}) does not follow from those before it ({why}); "
            "was the file edited?"
        ) from None


def _check_first(path: str | Path, frame: Frame) -> None:
    if frame["frame"] != "run":
        raise RecordError(
            f"{path}:1: a record begins with a run frame, this is {frame['frame']!r:.60}; give a record"
        )
    if frame.get("version") not in range(1, VERSION + 1):
        raise RecordError(
            f"{path}:1: version {frame.get('version')!r:.60} of records; this pagedjax reads 1 to {VERSION}"
        )
    for name, kind in (("block_size", int), ("pool_blocks", list)):
        if not isinstance(frame.get(name), kind):
            raise RecordError(
                f"{path}:1: {name}={frame.get(name)!r:.60}: must be a {kind.__name__}; write the record anew"
            )


@dataclass
class Replay:
    """State of the blocks as the frames tell it.

    Attributes:
        ref: Per group, block → references, of those that have any.
        keys: Per group, block → digest.
        tables: Sequence → table per group.
        queue: Per group, the order of the free queue; known after the closing frame.
    """

    ref: list[dict[int, int]] = field(default_factory=list)
    keys: list[dict[int, bytes]] = field(default_factory=list)
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    queue: list[list[int]] | None = None
    stats: CacheStats | None = None
    pool_blocks: list[int] = field(default_factory=list)

    def apply(self, frame: Frame) -> None:
        """Take one frame, in order."""
        kind = frame["frame"]
        if kind == "run":
            self.pool_blocks = list(frame["pool_blocks"])
            self.ref = [{} for _ in self.pool_blocks]
            self.keys = [{} for _ in self.pool_blocks]
            return
        for group, block, owners, *content in frame.get("blocks", ()):
            _set(self.ref[group], block, owners)
            if content:
                _set(self.keys[group], block, bytes.fromhex(content[0]) if content[0] else None)
        for seq in frame.get("gone", ()):
            self.tables.pop(seq, None)
        for seq, group, position, blocks in frame.get("tables", ()):
            if not 0 <= position <= _LONGEST:
                raise ValueError(f"position {position} of a table")
            table = self.tables.setdefault(seq, [[] for _ in self.pool_blocks])[group]
            table += [0] * (position + len(blocks) - len(table))
            table[position : position + len(blocks)] = blocks
            while table and not table[-1]:
                table.pop()
        if kind == "end":
            for seq in frame["seqs"]:
                self.tables.pop(seq, None)
        elif kind == "close" and "queue" in frame:
            self.queue = frame["queue"]
            self.stats = CacheStats(**frame["stats"])

    def snapshot(self) -> dict[str, Any]:
        """As `PagedManager.snapshot`; without queue and counters where no closing frame was read."""
        groups = []
        for number, usable in enumerate(self.pool_blocks):
            ref, keys = self.ref[number], self.keys[number]
            evictable = sum(block not in ref for block in keys)
            group: dict[str, Any] = {
                "num_blank": usable - 1 - len(ref.keys() | keys.keys()),
                "num_evictable": evictable,
                "ref": dict(sorted(ref.items())),
                "keys": dict(sorted(keys.items())),
            }
            if self.queue is not None:
                group["free_queue"] = self.queue[number]
            groups.append(group)
        state: dict[str, Any] = {"groups": groups, "tables": self.tables}
        if self.stats is not None:
            state["stats"] = self.stats
        return state


def _set(mapping: dict[int, Any], block: int, value: Any) -> None:
    if value:
        mapping[block] = value
    else:
        mapping.pop(block, None)


def replay(frames: Iterable[Frame]) -> Replay:
    """The state after all frames."""
    state = Replay()
    for frame in frames:
        state.apply(frame)
    return state
