"""The record of a run: immutable frames, written as the run goes; what pages, notebooks and post-mortems read.

A record is JSON lines (gzip where the name ends in .gz). Each line is one frame:

- `run`, first: what ran (kind, model, settings, trace, command), block size, pools
- `add`: a request came: id, time, prompt and most new tokens, samples; its text only where that was asked for
- `step`: one step: number, start, seconds; rows; what was admitted with which hit, preempted; copies; tables
- `quiet`: steps in which every row of the frame before got its next token and nothing else happened
- `end`: a request ended: why, its output tokens, its times
- `close`, last, of a run that was closed: order of each free queue, counters

Frames hold what changed. `rows` are `[sequence, request, sample, start, tokens, samples drawn]` of a step's rows,
without those that feed one token right behind what the sequence fed in the step before; `paused` names sequences that
had a row then and have none now. `step`, `end` and `close` carry `blocks`: `[group, block, owners]` of every block that
changed since the frame before, with a fourth entry where its content did (the digest in hex, null: not indexed any
more). `tables` are `[sequence, group, position, blocks]` to write into a table, `gone` sequences that hold none any
more. Replaying the frames gives the manager's state.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.cache.stats import CacheStats
from pagedjax.engine.engine import Engine
from pagedjax.engine.request import Request, RequestOutput
from pagedjax.engine.request import Sequence as Seq
from pagedjax.engine.step import StepPlan, StepResult

VERSION = 1
Frame = dict[str, Any]


class RecordError(ValueError):
    """A record cannot be read; the message names file, line and rule."""


class Recorder:
    """Writes an engine's run down, frame by frame.

    Where the manager is a `PagedManager`, its pools tell which blocks changed; nothing is scanned. Close it (or leave
    its `with` block) to write the closing frame; a record without one can be read all the same.

    Args:
        path: File to write; an older one is replaced. Its folder must exist.
        engine: Whose steps; it must be idle.
        about: Goes into the first frame: kind ("simulated" or "measured"), model, command, trace, settings.
        decode: Token ids → text: prompts are written, too, for readers who may see them; None writes no text.

    Raises:
        ValueError: The engine has requests, or is being recorded already.
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        engine: Engine,
        about: Mapping[str, Any],
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        if engine.has_work:
            raise ValueError("record: the engine has requests already; begin before the first is added")
        if engine.observer is not None:
            raise ValueError("record: this engine is being recorded already; close that record first")
        self.path = Path(path)
        self._engine = engine
        self._manager = engine.manager
        self._decode = decode
        paged = self._manager if isinstance(self._manager, PagedManager) else None
        self._paged = paged
        self._width = engine.scheduler.table_width
        self._keys: list[dict[int, bytes | None]] = [{} for _ in self._manager.pool_blocks]
        self._tables: dict[int, tuple[np.ndarray, ...]] = {}
        self._owners: dict[int, str] = {}  # sequence with a table → its request
        self._admitted: dict[str, int] = {}  # request id → preemptions when it was last seen to run
        self._preemptions = 0
        self._fed: dict[int, int] = {}  # of each row of the step before, the position behind what it fed
        self._gone: dict[str, int] = {}  # request id → its preemptions that were told
        self._zero = engine.now  # times are seconds since the record began
        self._file: IO[str] = _open(self.path, "w")
        first = {
            "frame": "run",
            "version": VERSION,
            **about,
            "block_size": self._manager.block_size,
            "pool_blocks": list(self._manager.pool_blocks),
            "text": decode is not None,
        }
        self._write(first)
        self._changes = paged.watch() if paged is not None else None
        # Who came back from the host may hold blocks without having a row.
        swaps = engine.scheduler.config.preemption != "recompute"
        self._fresh = swaps or self._changes is None or self._changes.books_tables
        engine.observer = self

    # ------------------------------------------------------- told by the engine

    def added(self, request: Request) -> None:
        """A request was queued."""
        frame: Frame = {
            "frame": "add",
            "id": request.request_id,
            "t": request.arrival - self._zero,
            "prompt": request.num_prompt_tokens,
            "max_new": request.sampling.max_tokens,
            "n": request.sampling.num_sequences,
        }
        if self._decode is not None:
            frame["text"] = self._decode(request.prompt_token_ids)
        self._write(frame)

    def stepped(self, plan: StepPlan[Seq], result: StepResult, started_s: float, ended_s: float) -> None:
        """A step is booked."""
        frame: Frame = {
            "frame": "step",
            "n": plan.step,
            "t": started_s - self._zero,
            "s": ended_s - started_s,
        }
        rows = []
        before, now = self._fed, dict[int, int]()
        admitted = self._admitted
        gone: dict[str, str] = {}  # preempted since the frame before → how
        for row in plan.rows:
            seq, start, num_tokens, samples = row
            seq_id = seq.seq_id
            now[seq_id] = start + num_tokens
            if before.pop(seq_id, None) == start and num_tokens == 1 and len(samples) == 1:
                continue
            request = seq.request
            name = request.request_id
            if admitted.get(name) != request.num_preemptions:
                again = name in admitted
                if again and self._gone.get(name, 0) != request.num_preemptions:
                    gone[name] = "recompute"  # in a step that failed, and came back at once
                    self._gone[name] = request.num_preemptions
                admitted[name] = request.num_preemptions
                hit = start if again else request.num_cached_tokens
                reason = "resumed" if again else str(request.miss_reason)
                frame.setdefault("admitted", []).append([name, hit, request.matched_tokens, reason])
            rows.append([seq_id, name, seq.index, start, num_tokens, len(samples)])
        if rows:
            frame["rows"] = rows
        if before:
            frame["paused"] = list(before)
        self._fed = now
        scheduler = self._engine.scheduler
        if scheduler.num_preemptions != self._preemptions:
            self._preemptions = scheduler.num_preemptions
            for request in scheduler.waiting:
                if self._gone.get(request.request_id, 0) != request.num_preemptions:
                    gone[request.request_id] = "swap" if request.swapped else "recompute"
                    self._gone[request.request_id] = request.num_preemptions
        if gone:
            frame["preempted"] = [[name, how] for name, how in gone.items()]
            frame["gone"] = [seq for seq in self._tables if self._owners[seq] in gone]
            self._forget(frame["gone"])
        if plan.copies:
            frame["copies"] = [
                [batch.kind, batch.group, batch.src.tolist(), batch.dst.tolist()]
                for batch in plan.copies.batches
            ]
        for name in ("copy_s", "compile_s"):
            if value := getattr(result, name):
                frame[name] = value
        blocks = self._blocks()
        if blocks:
            frame["blocks"] = blocks
        if blocks or self._paged is None:
            self._table_changes(plan, frame)
        self._write(frame)

    def quiet(self, first_step: int, count: int, started_s: float, ended_s: float) -> None:
        """Steps in which every running sequence got its next token, and nothing else happened."""
        self._fed = {seq: end + count for seq, end in self._fed.items()}
        self._write(
            {
                "frame": "quiet",
                "n": first_step,
                "count": count,
                "t": started_s - self._zero,
                "s": ended_s - started_s,
            }
        )

    def ended(self, request: Request, output: RequestOutput, now: float) -> None:
        """A request ended, in a step or between two."""
        self._forget([seq for seq, owner in self._owners.items() if owner == request.request_id])
        self._admitted.pop(request.request_id, None)
        self._gone.pop(request.request_id, None)
        frame: Frame = {
            "frame": "end",
            "id": request.request_id,
            "t": now - self._zero,
            "reason": str(output.outputs[0].finish_reason) if output.outputs else "abort",
            "tokens": [len(o.token_ids) for o in output.outputs],
            "ttft_s": output.ttft_s,
            "cached": output.num_cached_tokens,
            "copies": output.num_copies,
            "seqs": [seq.seq_id for seq in request.sequences],
        }
        blocks = self._blocks()
        if blocks:
            frame["blocks"] = blocks
        self._write(frame)

    # -------------------------------------------------------------------- parts

    def _blocks(self) -> list[list[Any]]:
        if self._changes is None:
            return []
        out: list[list[Any]] = []
        for number, changed in enumerate(self._changes.take()):
            known = self._keys[number]
            for block, owners, key in changed:
                if known.get(block) == key:
                    out.append([number, block, owners])
                else:
                    known[block] = key
                    out.append([number, block, owners, key.hex() if key is not None else None])
        return out

    def _table_changes(self, plan: StepPlan[Seq], frame: Frame) -> None:
        """Tell tables that differ from what the record says.

        Where only rows have tables and booking leaves them alone, the plan's own serve; else the manager is asked.
        """
        known, owners = self._tables, self._owners
        if self._fresh or any(row.seq.request.sampling.num_sequences > 1 for row in plan.rows):
            running = self._engine.scheduler.running
            seqs = [seq for r in running for seq in (r.live if r.forked else r.live[:1])]
            tables = self._manager.tables([seq.seq_id for seq in seqs], self._width)
            gone = sorted(known.keys() - {seq.seq_id for seq in seqs})
            if gone:
                frame.setdefault("gone", []).extend(gone)
                self._forget(gone)
            chosen: Iterable[int] = range(len(seqs))
        else:
            seqs, tables = [row.seq for row in plan.rows], plan.tables
            copied, size = bool(plan.copies), self._manager.block_size
            chosen = [  # a table grows where a row begins or fills a block, and changes where blocks were copied
                i
                for i, row in enumerate(plan.rows)
                if copied or row.num_tokens > 1 or row.start % size == 0 or row.seq.seq_id not in known
            ]
        out: list[list[Any]] = []
        for i in chosen:
            seq, new_rows = seqs[i].seq_id, tuple(table[i] for table in tables)
            old_rows = known.get(seq)
            for group, new in enumerate(new_rows):
                out += _differences(seq, group, new, old_rows[group] if old_rows is not None else None)
            known[seq] = new_rows
            owners[seq] = seqs[i].request.request_id
        if out:
            frame["tables"] = out

    def _forget(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            del self._tables[seq], self._owners[seq]

    def _write(self, frame: Frame) -> None:
        self._file.write(json.dumps(frame, separators=(",", ":"), allow_nan=False) + "\n")

    def close(self) -> None:
        """Write the closing frame and let the engine go on unrecorded; a second call changes nothing."""
        if self._file.closed:
            return
        frame: Frame = {"frame": "close"}
        if self._paged is not None:
            frame["blocks"] = self._blocks()
            state = self._paged.snapshot()
            frame["queue"] = [group["free_queue"] for group in state["groups"]]
            frame["stats"] = asdict(state["stats"])
        if self._changes is not None:
            self._changes.stop()
        self._write(frame)
        self._engine.observer = None
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _differences(seq: int, group: int, new: np.ndarray, old: np.ndarray | None) -> list[list[Any]]:
    used = int(np.flatnonzero(new)[-1]) + 1 if new.any() else 0
    if old is None:
        return [[seq, group, 0, new[:used].tolist()]]
    at = np.flatnonzero(new != old)
    if not at.size:
        return []
    first, last = int(at[0]), int(at[-1]) + 1
    return [[seq, group, first, new[first:last].tolist()]]


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode + "t", encoding="utf-8", compresslevel=5)  # type: ignore[return-value]
    return path.open(mode, encoding="utf-8")


# ------------------------------------------------------------------------ reading


class Record:
    """The frames of a record, the `run` frame first; read anew each time one begins with them.

    A last line that a kill cut is left out. Iterating raises `RecordError` where the file is no record, of another
    version, or has a broken line that is not the last. A notebook shows what ran, the pool over the run's clock, and
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
    broken: tuple[int, str] | None = None
    first = True
    try:
        with _open(path, "r") as file:
            for number, line in enumerate(file, 1):
                if broken is not None:
                    break
                try:
                    frame = json.loads(line)
                    if not isinstance(frame, dict) or not isinstance(frame.get("frame"), str):
                        raise ValueError("no frame")
                except ValueError as error:
                    broken = (number, str(error))
                    continue
                if first:
                    _check_first(path, frame)
                    first = False
                yield frame
            else:
                if first:
                    raise RecordError(f"{path}: holds no frame; a record begins with a run frame")
                return
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        if first:
            raise RecordError(f"{path}: is no record ({error})") from None
        return  # cut by a kill: what was whole has been told
    assert broken is not None
    raise RecordError(f"{path}:{broken[0]}: no frame of a record ({broken[1]}); was the file edited?")


def _check_first(path: Path, frame: Frame) -> None:
    if frame["frame"] != "run":
        raise RecordError(
            f"{path}:1: a record begins with a run frame, this is {frame['frame']!r}; give a record"
        )
    if frame.get("version") != VERSION:
        raise RecordError(
            f"{path}:1: version {frame.get('version')!r} of records; this pagedjax reads {VERSION}"
        )
    for name, kind in (("block_size", int), ("pool_blocks", list)):
        if not isinstance(frame.get(name), kind):
            raise RecordError(
                f"{path}:1: {name}={frame.get(name)!r}: must be a {kind.__name__}; write the record anew"
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
