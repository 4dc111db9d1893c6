"""From a record's frames to what a page shows: series over steps, changes of blocks and tables, a line per request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedjax.report.replay import Frame, Record, RecordError, Replay, read_record, taken
from pagedjax.sim import show

MOST_FRAMES = 200_000


@dataclass
class RequestLine:
    """One request from arrival to end; seconds on the run's clock.

    Attributes:
        id: Its name.
        arrival: When it came.
        prompt, max_new: Tokens; None: nobody said how many new ones.
        samples: How many.
        text: Its prompt, where the record has it.
        hit, matched, reason: Of its first admission: tokens from the cache, tokens known, why no more.
        first: When its first token was there; None: never.
        end: When it ended; None: it was under way when the record ended.
        why: Why it ended.
        tokens: Output tokens per sample.
        spans: [from, to, what]: "wait", "prefill", "decode", "preempted" or "swapped".
        chunks: [step, start, tokens] of its prefill chunks.
        preemptions: [step, how, who ran on].
        copies: Blocks copied on write.
        compile_s, copy_s: Seconds of its steps that went to programs not there yet, and to copies of blocks.
    """

    id: str
    arrival: float
    prompt: int
    max_new: int | None
    samples: int
    text: str | None = None
    hit: int | None = None
    matched: int | None = None
    reason: str = ""
    first: float | None = None
    end: float | None = None
    why: str = ""
    tokens: list[int] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    preemptions: list[list[Any]] = field(default_factory=list)
    copies: int = 0
    compile_s: float = 0.0
    copy_s: float = 0.0


def run_facts(path: str | Path) -> dict[str, Any]:
    """All that the page shows of one record, in plain values.

    Raises:
        RecordError: No record, or one of more frames than a page can hold.
        OSError: The file cannot be read.
    """
    return facts(read_record(path), str(path))


def read_runs(path: str | Path, instances: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the page shows of a record: a run, or of a fleet's the fleet and then the instances asked for.

    Raises:
        RecordError: As for `run_facts`; an instance is not in the fleet.
        OSError: The file cannot be read.
    """
    from pagedjax.report.fleet import fleet_facts, instance_frames

    if not next(iter(read_record(path))).get("fleet"):
        return [run_facts(path)]
    found = [fleet_facts(path)]
    return found + [facts(instance_frames(path, name), f"{path}: instance {name}") for name in instances]


def facts(frames: Iterable[Frame], name: str) -> dict[str, Any]:
    """As `run_facts`, of frames."""
    reader = _Reader(name)
    for number, frame in enumerate(frames):
        if number >= MOST_FRAMES:
            raise RecordError(
                f"{name}: more than {MOST_FRAMES} frames; a page of them would not open. Record a part of the run "
                "(--until), or fewer requests (--sample)"
            )
        taken(reader.take, frame, number + 1, name)
    return reader.result()


def notebook(record: Record) -> str:
    """What a notebook shows of a record: what ran, the pool over the run's clock, whose first token took longest.
    Of a fleet's: how busy each instance was over time, and what it did.

    A record that cannot be read, or has too many frames, shows the reason.
    """
    try:
        if next(iter(record)).get("fleet"):
            return _fleet_card(record)
        run = facts(record, str(record.path))
    except (RecordError, OSError) as error:
        return show.card("Record", show.note(str(error)))
    about, lines = run["about"], run["requests"]
    told = [f"{name}: {about[name]}" for name in ("kind", "model", "command") if about.get(name)]
    pool = (
        f"{run['pool_blocks'][0] - 1:,} usable blocks of {run['block_size']} tokens"
        if run["pool_blocks"]
        else ""
    )
    ends = [step[2] + step[3] for step in run["steps"]]
    of_blocks = {"one owner": 1, "shared": 2, "cached": 3}
    series = {
        name: [(end, float(state[at])) for end, state in zip(ends, run["counts"])]
        for name, at in of_blocks.items()
    }
    slow = sorted(
        lines, key=lambda line: line["arrival"] - (math.inf if line["first"] is None else line["first"])
    )[:5]
    rows = [
        {
            "request": line["id"],
            "prompt tokens": line["prompt"],
            "from the cache": line["hit"],
            "match stopped": line["reason"],
            "first token after, s": line["first"] - line["arrival"] if line["first"] is not None else None,
            "preempted": len(line["preemptions"]),
        }
        for line in slow
    ]
    return show.card(
        f"Record {record.path.name}",
        show.note("; ".join([*told, pool])),
        show.note(
            f"{len(lines):,} requests, {sum(line['end'] is not None for line in lines):,} of them ended, "
            f"in {int(sum(step[1] for step in run['steps'])):,} steps and {ends[-1] if ends else 0:.4g} s"
        ),
        show.lines(series, x="seconds", y="blocks"),
        show.note("Whose first token took longest:"),
        show.table(rows),
    )


def _fleet_card(record: Record) -> str:
    from pagedjax.report.fleet import fleet_facts

    fleet = fleet_facts(record.path)
    width = fleet["span"] / fleet["bins"]
    series = {
        line["name"]: [
            ((i + 0.5) * width, value) for i, value in enumerate(line["busy"]) if value is not None
        ]
        for line in fleet["instances"][:5]
    }
    routed = {
        line["name"]: sum(n for to, _, n in fleet["chosen"] if to == line["name"])
        for line in fleet["instances"]
    }
    rows = [
        {
            "instance": line["name"],
            "role": line["role"],
            "requests": routed[line["name"]],
            "steps": line["steps"],
            "joined, s": line["joined"],
            "gone": line["why"],
        }
        for line in fleet["instances"]
    ]
    return show.card(
        f"Record {record.path.name}",
        show.note(f"a fleet of {len(rows)}: {fleet['num_requests']:,} requests, {fleet['span']:.4g} s"),
        show.lines(series, x="seconds", y="busy share"),
        show.table(rows),
    )


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.about: Frame = {}
        self.replay = Replay()
        self.requests: dict[str, RequestLine] = {}
        # Per frame that moves time: number of its first step, steps, start, seconds, rows, tokens.
        self.steps: list[list[float]] = []
        self.counts: list[list[int]] = []  # of the first group: blank, one owner, shared, cached
        self.blocks: list[list[Any]] = []  # per entry of steps: [group, block, owners, content or absent]
        self.tables: list[list[Any]] = []  # per entry: [seq, group, position, blocks]
        self.gone: list[list[int]] = []
        self.rows: dict[int, list[Any]] = {}  # sequence → [request, position behind what it fed]
        self.owner: dict[int, str] = {}
        self.owned = self.shared = self.cached = 0
        self.left: list[
            list[Any]
        ] = []  # contents that left: [entry, block, digest, request that took the block]

    def take(self, frame: Frame) -> None:
        kind = frame["frame"]
        if kind == "run":
            if frame.get("fleet"):
                raise RecordError(
                    f"{self.name}: is of a fleet; `read_runs` reads it, `instance_frames` one instance"
                )
            self.about = frame
        elif kind == "add":
            arrival = frame["t"] + 0.0  # refuses what is no number
            line = RequestLine(frame["id"], arrival, frame["prompt"], frame["max_new"], frame["n"])
            line.text = frame.get("text")
            self.requests[frame["id"]] = line
        elif kind == "step":
            self._step(frame)
        elif kind == "quiet":
            for row in self.rows.values():
                row[1] += frame["count"]
            self._entry(frame["n"], frame["count"], frame["t"], frame["s"], len(self.rows), len(self.rows))
            self._extend_spans(frame["t"] + frame["s"])
        elif kind == "end":
            self._end(frame)
        self._blocks(frame)
        self.replay.apply(frame)

    def _entry(self, first: int, count: int, start: float, seconds: float, rows: int, tokens: int) -> None:
        self.steps.append([first + 0, count + 0, start, seconds, rows, tokens])  # refuses what is no number
        self.blocks.append([])
        self.tables.append([])
        self.gone.append([])

    def _step(self, frame: Frame) -> None:
        start, end = frame["t"], frame["t"] + frame["s"]
        for request_id, how in frame.get("preempted", ()):
            line = self.requests[request_id]
            line.preemptions.append([frame["n"], how])
            line.spans.append([start, start, "swapped" if how == "swap" else "preempted"])
        for request_id, hit, matched, reason in frame.get("admitted", ()):
            line = self.requests[request_id]
            if line.hit is None:
                line.hit, line.matched, line.reason = hit, matched, reason
                line.spans.append([line.arrival, start, "wait"])
            elif line.spans:
                line.spans[-1][1] = start
        for seq in frame.get("paused", ()):
            self.rows.pop(seq, None)
        for row in self.rows.values():
            row[1] += 1
        new = {row[0] for row in frame.get("rows", ())}
        tokens = sum(seq not in new for seq in self.rows)
        for seq, request_id, _, first, count, samples in frame.get("rows", ()):
            self.rows[seq] = [request_id, first + count]
            self.owner[seq] = request_id
            tokens += count
            line = self.requests[request_id]
            if count > 1 or first < line.prompt:
                line.chunks.append([frame["n"], first, count])
                self._span(line, start, end, "prefill")
            else:
                self._span(line, start, end, "decode")
            if samples and line.first is None:
                line.first = end
        for seq, (request_id, _) in self.rows.items():
            if seq not in new:
                self._span(self.requests[request_id], start, end, "decode")
        for request_id in {request_id for request_id, _ in self.rows.values()}:
            self.requests[request_id].compile_s += frame.get("compile_s", 0.0)
            self.requests[request_id].copy_s += frame.get("copy_s", 0.0)
        self._entry(frame["n"], 1, start, frame["s"], len(self.rows), tokens)
        self.tables[-1] += frame.get("tables", [])
        self.gone[-1] += frame.get("gone", [])

    @staticmethod
    def _span(line: RequestLine, start: float, end: float, what: str) -> None:
        last = line.spans[-1] if line.spans else None
        if last is not None and last[2] == what and start - last[1] <= 1e-9 + 0.01 * (end - start):
            last[1] = end
        elif last is None or last[2] != what or last[1] < end:
            line.spans.append([start, end, what])

    def _extend_spans(self, end: float) -> None:
        for request_id, _ in self.rows.values():
            line = self.requests[request_id]
            if line.spans and line.spans[-1][2] == "decode":
                line.spans[-1][1] = end
            else:
                line.spans.append([line.spans[-1][1] if line.spans else line.arrival, end, "decode"])

    def _end(self, frame: Frame) -> None:
        line = self.requests[frame["id"]]
        line.end, line.why, line.tokens, line.copies = (
            frame["t"],
            frame["reason"],
            frame["tokens"],
            frame["copies"],
        )
        if line.hit is None:
            line.spans.append([line.arrival, frame["t"], "wait"])
        for seq in frame["seqs"]:
            self.rows.pop(seq, None)
        if self.gone:
            self.gone[-1] += frame["seqs"]

    def _blocks(self, frame: Frame) -> None:
        """Changes of blocks go to the step that made them: the last one, also where a request ended after it."""
        if not self.steps:
            return
        ref, keys = self.replay.ref[0], self.replay.keys[0]
        tables = (*frame.get("tables", ()), *frame.get("passing", ()))
        takers = {b: self.owner.get(seq, "") for seq, group, _, blocks in tables for b in blocks if not group}
        for group, block, owners, *content in frame.get("blocks", ()):
            short = [content[0][:8] if content[0] else None] if content else []
            self.blocks[-1].append([group, block, owners, *short])
            if group:
                continue
            before, had = ref.get(block, 0), block in keys
            has = bool(content[0]) if content else had
            self.owned += (owners > 0) - (before > 0)
            self.shared += (owners > 1) - (before > 1)
            self.cached += (has and not owners) - (had and not before)
            if content and had:
                self.left.append([len(self.steps) - 1, block, keys[block].hex()[:8], takers.get(block, "")])
        blank = self.replay.pool_blocks[0] - 1 - self.owned - self.cached
        state = [blank, self.owned - self.shared, self.shared, self.cached]
        if len(self.counts) < len(self.steps):
            self.counts.append(state)
        else:
            self.counts[-1] = state

    def result(self) -> dict[str, Any]:
        lines = list(self.requests.values())
        return {
            "name": self.name,
            "about": {k: v for k, v in self.about.items() if k != "frame"},
            "pool_blocks": self.about.get("pool_blocks", []),
            "block_size": self.about.get("block_size", 0),
            "steps": self.steps,
            "counts": self.counts,
            "blocks": self.blocks,
            "tables": self.tables,
            "gone": self.gone,
            "left": self.left,
            "owner": self.owner,
            "requests": [vars(line) for line in lines],
        }
