"""The record of a fleet: one file for all instances on one clock, and what a page shows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.engine import Engine
from pagedjax.report.record import Recorder, RecordFile
from pagedjax.report.replay import Frame, RecordError, read_record, taken
from pagedjax.sim.fleet import InstanceSpec

NUM_BINS = 240
MOST_REQUESTS = 20_000
MOST_MOVES = 4_000


class FleetRecorder:
    """Writes a fleet's run down; give it to `run_fleet` as its `observer`. See `pagedjax.report.record` for the frames.

    Args:
        path: File to write; an older one is replaced when the first request is routed, or the run is over. Its
            folder must exist.
        about: Goes into the first frame: trace, command, settings.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any]) -> None:
        first = {"kind": "simulated", **about, "fleet": True, "block_size": 0, "pool_blocks": []}
        self._file = RecordFile(path, first)
        self._recorders: dict[int, Recorder] = {}

    def joined(self, number: int, spec: InstanceSpec, node: str, engine: Engine, now: float) -> None:
        """An instance is there."""
        manager = engine.manager
        frame = {"name": spec.name, "role": spec.role, "node": node, "t": now}
        pools = {"block_size": manager.block_size, "pool_blocks": list(manager.pool_blocks)}
        self._file.head("join", {"i": number, **frame, **pools})
        self._recorders[number] = Recorder(self._file, engine, {}, instance=number)

    def gone(self, number: int, why: str, now: float) -> None:
        """An instance is there no more, or the run is over."""
        recorder = self._recorders.pop(number, None)
        if recorder is not None:
            recorder.close()
            self._file.frame("gone", {"i": number, "t": now, "why": why})

    def routed(self, request: int, to: int, reason: str, expected: int | None, now: float) -> None:
        """A request was sent to an instance."""
        choice = {"id": str(request), "t": now, "to": to, "reason": reason, "expected": expected}
        self._file.frame("route", choice)

    def engaged(self, request: int, to: int, now: float) -> None:
        """An instance that decodes was chosen for a request."""
        self._file.frame("engage", {"id": str(request), "t": now, "to": to})

    def refused(self, request: int, reason: str, now: float) -> None:
        """A request was refused."""
        self._file.frame("refuse", {"id": str(request), "t": now, "reason": reason})

    def moved(
        self,
        what: str,
        source: str,
        target: str,
        num_bytes: int,
        began_s: float,
        ended_s: float,
        request: int | None,
        arrived: bool,
    ) -> None:
        """KV moved, or was lost on its way."""
        frame = {"what": what, "from": source, "to": target, "bytes": num_bytes, "t": began_s}
        last = {"s": ended_s - began_s, "id": None if request is None else str(request)}
        self._file.frame("move", {**frame, **last, **({} if arrived else {"lost": True})})

    def close(self) -> None:
        """The run is over, or was broken off: what was noted is written."""
        for recorder in self._recorders.values():
            recorder.close()
        self._recorders.clear()
        if not self._file.closed:
            self._file.close()

    def __enter__(self) -> FleetRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._file.refuse()
        self.close()


def instance_frames(path: str | Path, name: str) -> Iterator[Frame]:
    """One instance of a fleet's record as a record of its own; of two of one name the first.

    Raises:
        RecordError: No record of a fleet, or none of its instances has this name.
        OSError: The file cannot be read.
    """
    frames = iter(read_record(path))
    about = next(frames)
    if not about.get("fleet"):
        raise RecordError(f"{path}: is of one engine, not of a fleet; leave --instance {name} out")
    number: int | None = None
    names = []
    for frame in frames:
        if frame["frame"] == "join" and number is None:
            if missing := {"i", "name", "block_size", "pool_blocks"} - frame.keys():
                raise RecordError(f"{path}: a join frame without {min(missing)}; was the file edited?")
            names.append(frame["name"])
            if frame["name"] == name:
                number = frame["i"]
                pools = {key: frame[key] for key in ("block_size", "pool_blocks")}
                yield {**{k: v for k, v in about.items() if k != "fleet"}, **pools, "instance": name}
        elif number is not None and frame.get("i") == number and frame["frame"] not in ("join", "gone"):
            yield frame
    if number is None:
        raise RecordError(f"{path}: --instance {name}: there are {', '.join(names)}")


@dataclass
class _Seen:
    """What the frames tell of one instance; seconds on the fleet's clock."""

    join: Frame
    gone: float | None = None
    why: str = ""
    starts: list[float] = field(default_factory=list)  # of its steps
    ends: list[float] = field(default_factory=list)
    num_steps: int = 0
    ref: dict[int, int] = field(default_factory=dict)
    held: list[tuple[float, int]] = field(default_factory=list)  # blocks with an owner from then on
    under_way: list[tuple[float, int]] = field(default_factory=list)  # +1 and -1


def fleet_facts(path: str | Path) -> dict[str, Any]:
    """All that the page shows of a fleet, in plain values.

    Raises:
        RecordError: No record.
        OSError: The file cannot be read.
    """
    return _FleetReader(str(path)).read(read_record(path))


class _FleetReader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[int, _Seen] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.moves: list[list[Any]] = []
        self.totals: dict[tuple[str, str, str], list[int]] = {}
        self.prefilled: dict[
            str, float
        ] = {}  # request → when the instance that computed its prompt was done with it
        self.num_moves = 0

    def read(self, frames: Iterable[Frame]) -> dict[str, Any]:
        frames = iter(frames)
        about = next(frames)
        takers: dict[str, Callable[[Frame], None]] = {
            "join": self._join, "gone": self._gone, "route": self._route, "refuse": self._refuse, "move": self._move,
            "engage": self._engage, "add": self._add, "end": self._end, "step": self._step, "quiet": self._step,
        }  # fmt: skip
        for number, frame in enumerate(frames, 2):
            if (take := takers.get(frame["frame"])) is not None:
                taken(take, frame, number, self.name)
        try:
            return self._result(about)
        except (LookupError, TypeError, ValueError) as error:
            raise RecordError(
                f"{self.name}: its frames do not fit together ({str(error)[:120]}); was it edited?"
            ) from None

    def _join(self, frame: Frame) -> None:
        self.seen[frame["i"]] = _Seen(frame)

    def _gone(self, frame: Frame) -> None:
        seen = self.seen[frame["i"]]
        seen.gone, seen.why = frame["t"], frame["why"]

    def _request(self, name: str, t: float) -> dict[str, Any]:
        empty: dict[str, Any] = {"id": name, "t": t, "to": [], "decoders": [], "reason": "", "expected": None}
        empty |= {"prompt": None, "cached": None, "end": None, "refused": None}
        return self.requests.setdefault(name, empty)

    def _route(self, frame: Frame) -> None:
        request = self._request(frame["id"], frame["t"])
        request["to"].append(frame["to"])
        request["reason"], request["expected"] = frame["reason"], frame["expected"]

    def _engage(self, frame: Frame) -> None:
        self._request(frame["id"], frame["t"])["decoders"].append(frame["to"])

    def _refuse(self, frame: Frame) -> None:
        self._request(frame["id"], frame["t"])["refused"] = frame["reason"]

    def _move(self, frame: Frame) -> None:
        lost = bool(frame.get("lost"))
        total = self.totals.setdefault((frame["what"], frame["from"], frame["to"]), [0, 0, 0])
        total[0] += 1
        total[2 if lost else 1] += frame["bytes"]
        self.num_moves += 1
        if len(self.moves) < MOST_MOVES:
            keys = ("what", "from", "to", "bytes", "t", "s", "id")
            self.moves.append([*(frame[key] for key in keys), lost])

    def _add(self, frame: Frame) -> None:
        self.seen[frame["i"]].under_way.append((frame["t"], 1))
        request = self._request(frame["id"], frame["t"])
        if request["prompt"] is None:
            request["prompt"] = frame["prompt"]

    def _end(self, frame: Frame) -> None:
        seen = self.seen[frame["i"]]
        seen.under_way.append((frame["t"], -1))
        request = self._request(frame["id"], frame["t"])
        if frame["reason"] != "abort":  # frames of different instances come in no order
            if frame["i"] in request["to"] and frame["t"] >= self.prefilled.get(frame["id"], 0.0):
                request["cached"] = frame["cached"]
                self.prefilled[frame["id"]] = frame["t"]
            request["end"] = max(frame["t"], request["end"] or 0.0)
        self._held(seen, frame, frame["t"])

    def _step(self, frame: Frame) -> None:
        seen = self.seen[frame["i"]]
        start, end = frame["t"], frame["t"] + frame["s"]
        seen.num_steps += frame.get("count", 1)
        seen.starts.append(start)
        seen.ends.append(end)
        self._held(seen, frame, start)

    def _held(self, seen: _Seen, frame: Frame, at: float) -> None:
        blocks = frame.get("blocks", ())
        for group, block, owners, *_ in blocks:
            if not group:
                if owners:
                    seen.ref[block] = owners
                else:
                    seen.ref.pop(block, None)
        if blocks:
            seen.held.append((at, len(seen.ref)))

    def _result(self, about: Frame) -> dict[str, Any]:
        times = [s.gone or 0.0 for s in self.seen.values()]
        span = max([0.0, *times, *(s.ends[-1] for s in self.seen.values() if s.ends)])
        edges = np.linspace(0.0, span or 1.0, NUM_BINS + 1)
        requests = list(self.requests.values())
        for request in requests:
            for key in ("to", "decoders"):
                request[key] = [self.seen[number].join["name"] for number in request[key]]
        chosen: dict[tuple[str, str], int] = {}
        for request in requests:
            if request["to"]:
                choice = (request["to"][-1], request["reason"])
                chosen[choice] = chosen.get(choice, 0) + 1
        return {
            "name": self.name,
            "about": {k: v for k, v in about.items() if k != "frame"},
            "fleet": True,
            "span": span,
            "bins": NUM_BINS,
            "instances": [_line(seen, edges) for seen in self.seen.values()],
            "chosen": [[*key, count] for key, count in sorted(chosen.items())],
            "requests": requests[:MOST_REQUESTS],
            "num_requests": len(requests),
            "moves": self.moves,
            "num_moves": self.num_moves,
            "totals": [[*key, *total] for key, total in self.totals.items()],
        }


def _line(seen: _Seen, edges: np.ndarray) -> dict[str, Any]:
    """An instance over time: means of each bin; None where it was not there."""
    join, width = seen.join, edges[1] - edges[0]
    starts, ends = np.array(seen.starts), np.array(seen.ends)
    took = ends - starts
    spent = np.cumsum(took)  # between two steps it stays, within one it grows
    busy_at = np.concatenate([[0.0], np.stack([starts, ends], axis=1).ravel()])
    busy = np.concatenate([[0.0], np.stack([spent - took, spent], axis=1).ravel()])
    usable = max(sum(count - 1 for count in join["pool_blocks"][:1]), 1)
    alive_to = edges[-1] if seen.gone is None else seen.gone
    there = (edges[1:] > join["t"]) & (edges[:-1] < alive_to)
    columns = {
        "busy": np.diff(np.interp(edges, busy_at, busy)) / width,
        "under_way": _means(_summed(seen.under_way), edges),
        "held": _means(seen.held, edges) / usable,
    }
    return {
        "name": join["name"],
        "role": join["role"],
        "node": join["node"],
        "joined": join["t"],
        "gone": seen.gone,
        "why": seen.why,
        "usable": usable,
        "block_size": join["block_size"],
        "steps": seen.num_steps,
        **{
            name: [round(float(v), 4) if ok else None for v, ok in zip(values, there)]
            for name, values in columns.items()
        },
    }


def _summed(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Changes of a count, in no order, as the count from each time on."""
    out, count = [], 0
    for at, change in sorted(changes):
        count += change
        out.append((at, count))
    return out


def _means(levels: list[tuple[float, int]], edges: np.ndarray) -> np.ndarray:
    """Mean of each bin of a value that holds from each given time to the next."""
    if not levels:
        return np.zeros(len(edges) - 1)
    at = np.array([0.0, *(t for t, _ in levels), max(edges[-1], levels[-1][0])])
    value = np.array([0.0, *(v for _, v in levels)])
    at = np.maximum.accumulate(at)
    integral = np.concatenate([[0.0], np.cumsum(value * np.diff(at))])
    return np.asarray(np.diff(np.interp(edges, at, integral)) / (edges[1] - edges[0]))
