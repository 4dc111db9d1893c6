"""The record of a run: immutable frames, written as the run goes; what pages, notebooks and post-mortems read.

A record is JSON lines (gzip where the name ends in .gz). Each line is one frame:

- `run`, first: what ran (kind, model, settings, trace, command), block size, pools
- `add`: a request came: id, time, prompt and most new tokens, samples; its text only where that was asked for
- `step`: one step: number, start, seconds; rows; what was admitted with which hit, preempted; copies; tables
- `quiet`: steps in which every row of the frame before got its next token and nothing else happened
- `end`: a request ended: why, its output tokens, its times
- `settings`, of an exploration (`pagedjax.explore`): others were chosen; all that the file says ran under the last
- `close`, last, of a run that was closed: order of each free queue, counters

A fleet's record is one file; frames of an instance carry its number `i`, and these come between them:

- `join`: an instance is there: number, name, role, node, block size, pools
- `route`: a request was sent: to whom, why, what was expected to be cached there
- `engage`: an instance that decodes was chosen for a request
- `refuse`: a request was refused, and why
- `move`: KV moved: what for, from where, to where, bytes, start, seconds; `lost` where it did not arrive
- `gone`: an instance left, died, or was there at the end

Frames hold what changed. `rows` are `[sequence, request, sample, start, tokens, samples drawn]` of a step's rows,
without those that feed one token right behind what the sequence fed in the step before; `paused` names sequences that
had a row then and have none now, though their request goes on. Of `step` and `quiet` the file says when they ended
(`e`), and when they began (`t`) where that is not when the last of them had ended. `step`, `end` and `close` carry
`events`: what happened to blocks and tables since the frame before, in order, one behind the other in one list; where
blocks are named, one alone is a number:

- `"take", blocks`: handed out, one owner each
- `"share", blocks`: one owner more; `"free", blocks`: one less, as often as listed
- `"fill", blocks`: their contents are indexed, `digests` of the frame names all of them in this order, in hex and
  between commas; `"drop", blocks`: not any more
- `"grow", sequence, blocks`: as `take`, and they are the end of its table
- `"hit", sequence, blocks`: as `share`, and its table begins with them
- `"leave", sequence`: as `free` of all that its table names, and the table is gone
- `"put", sequence, position, blocks`: its table names them from there on; `"cut", sequence, length`: it is shorter now

In groups after the first their names are followed by the group's number: `"take 1"`. The first of them tell what the
pools held before, as if it happened then.

Who reads a record gets in their place `t` and `s`, the seconds it took, and `blocks`: `[group, block, owners]` of every
block that anything happened to since the frame before, with a fourth entry where its content changed (the digest in
hex, null: not indexed any more); `tables`: `[sequence, group, position, blocks]` to write into a table; `gone`:
sequences that hold none any more; `passing`: tables that came and went between two frames. Managers of no pages,
explorations and version 1 wrote `blocks`, `tables` and `gone` into the file; version 2 wrote the first five events as
`pools`, a list for each group, with the digests in "fill". Times are seconds, to the nanosecond. An exploration's
frames carry the `command` that they come from. Replaying the frames gives the manager's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from json.encoder import encode_basestring_ascii as _quoted
from operator import itemgetter
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager
from pagedjax.engine.engine import Engine
from pagedjax.engine.request import Request, RequestOutput
from pagedjax.engine.request import Sequence as Seq
from pagedjax.engine.step import Row, StepPlan, StepResult
from pagedjax.paths import Output
from pagedjax.report.replay import VERSION, Record, RecordError, Replay, read_record, replay

__all__ = ["Record", "RecordError", "RecordFile", "Recorder", "Replay", "read_record", "replay"]

_Lists = tuple[list[int], ...]  # a sequence's table in each group
# A frame that waits: how its line begins, a number that comes next (None: none), when it began and ended (None: not
# told), what follows, and how many events and digests there were up to it.
_Held = tuple[str, int | None, float | None, float | None, str, int, int]
_MOST_HELD = 64  # frames that a kill may cost
_END = ";"  # of a frame's events, among those of many
_sequence_of = itemgetter(0)  # a row's


class RecordFile:
    """The file of a record, frame after frame.

    Args:
        path: File to write; an older one is replaced when the first frame comes that tells what happened. Its folder
            must exist.
        first: The `run` frame, without its name and version.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | Path, first: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._file = Output(self.path)
        self.line: Callable[[str], object] = (
            self._file.write
        )  # writes a frame that is JSON already, with its end of line
        self._tell(self._file.head, "run", {"version": VERSION, **first})

    def frame(self, kind: str, values: Mapping[str, Any], tag: str = "") -> None:
        """Write a frame of a kind that is rare."""
        self._tell(self.line, kind, values, tag)

    def head(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write a frame that tells of nothing that a refused run could not have had."""
        self._tell(self.line if self._file.placed else self._file.head, kind, values)

    @staticmethod
    def _tell(write: Callable[[str], object], kind: str, values: Mapping[str, Any], tag: str = "") -> None:
        rest = json.dumps(values, separators=(",", ":"), allow_nan=False)[1:]
        write(f'{{"frame":"{kind}"{tag}{"," if rest != "}" else ""}{rest}\n')

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()

    def refuse(self) -> None:
        """An exception ends the run: where nothing of it is told, an older file stays, and no more is written."""
        if not self._file.placed:
            self._file.refuse()
            self.line = len  # takes a frame, and leaves it


class Recorder:
    """Writes an engine's run down, frame by frame.

    Where the manager is a `PagedManager`, it tells what happens to blocks and tables; nothing is scanned. Close it (or
    leave its `with` block) to write the closing frame; a record without one can be read all the same. Frames wait as
    plain values and turn into text many at a time, events from lists that become JSON in one call each.

    Args:
        path: File to write; an older one is replaced when something happens (a run that is refused before leaves it).
            Its folder must exist. Or a fleet's file that is being written.
        engine: Whose steps; it must be idle.
        about: Goes into the first frame: kind ("simulated" or "measured"), model, command, trace, settings.
        decode: Token ids → text: prompts are written, too, for readers who may see them; None writes no text.
        instance: Its number in a fleet's file, whose frames' times are then the fleet's.

    Raises:
        ValueError: The engine has requests, or is being recorded already.
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: str | Path | RecordFile,
        engine: Engine,
        about: Mapping[str, Any],
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        instance: int | None = None,
    ) -> None:
        if engine.has_work:
            raise ValueError("record: the engine has requests already; begin before the first is added")
        if engine.observer is not None:
            raise ValueError("record: this engine is being recorded already; close that record first")
        self._engine = engine
        self._scheduler = engine.scheduler
        self._manager = engine.manager
        self._decode = decode
        paged = self._manager if isinstance(self._manager, PagedManager) else None
        self._paged = paged
        self._width = engine.scheduler.table_width
        self._tables: dict[int, _Lists] = {}  # as last told, where the manager does not tell
        self._owners: dict[int, str] = {}  # sequence with a table → its request
        self._admitted: dict[str, int] = {}  # request id → preemptions when it was last seen to run
        self._preemptions = 0
        # Of each row of the step before that drew one token, if its request goes on: its sequence, and the position
        # behind what it fed, so many tokens behind the one noted as `_on` says. Of the other rows `_fed` has it.
        self._seqs: list[Seq] = []
        self._ends: list[int] = []
        self._on = 0
        self._fed: dict[int, int] = {}
        self._stepped = False
        self._held: list[_Held] = []  # frames to be written together
        self._mark = self._filled = 0  # events and digests told up to the last of them
        self._last_s: float | None = None  # when the last step told had ended
        self._lost: dict[str, str] = {}  # preempted since the frame before → how
        self._gone: dict[str, int] = {}  # request id → its preemptions that were told
        self._branched = 0  # requests of several samples or beams that have not ended
        self._zero = engine.now if instance is None else 0.0  # times are seconds since the record began
        self._tag = "" if instance is None else f',"i":{instance}'
        self._step_head = f'{{"frame":"step"{self._tag},"n":'
        self._own = not isinstance(path, RecordFile)
        if isinstance(path, RecordFile):
            self._file = path
        else:
            first = {
                **about,
                "block_size": self._manager.block_size,
                "pool_blocks": list(self._manager.pool_blocks),
                "text": decode is not None,
            }
            self._file = RecordFile(path, first)
        self.path = self._file.path
        self._open = True
        self._changes = paged.watch() if paged is not None else None
        engine.observer = self

    # ------------------------------------------------------- told by the engine

    def added(self, request: Request) -> None:
        """A request was queued."""
        many = request.sampling.num_sequences
        self._branched += many > 1
        text = "" if self._decode is None else f',"text":{_quoted(self._decode(request.prompt_token_ids))}'
        head = f'{{"frame":"add"{self._tag},"id":{_quoted(request.request_id)}'
        rest = (
            f',"prompt":{request.num_prompt_tokens},"max_new":{request.sampling.max_tokens},"n":{many}{text}'
        )
        self._held.append((head, None, request.arrival - self._zero, None, rest, self._mark, self._filled))

    def stepped(self, plan: StepPlan[Seq], result: StepResult, started_s: float, ended_s: float) -> None:
        """A step is booked."""
        rows, known, parts = plan.rows, self._seqs, list[str]()
        same, preempted = len(known), self._scheduler.num_preemptions != self._preemptions
        # Whoever drew a token and was neither preempted nor ended feeds that token now, alone, and draws one. Rows of
        # one token come first in a plan: where there are as many as drew, they are the same.
        if (
            len(rows) < same
            or (same and rows[same - 1][2] != 1)
            or preempted
            or self._branched
            or (len(rows) > same and list(map(_sequence_of, rows[:same])) != known)
        ):
            before = {seq.seq_id: end + self._on for seq, end in zip(known, self._ends)} | self._fed
            self._seqs, self._ends, self._on, self._fed = [], [], 0, {}
            self._rows(rows, before, parts)
        else:
            self._on += 1
            if len(rows) > same or self._fed:
                before, self._fed = self._fed, {}
                self._rows(rows[same:], before, parts)
        left: list[int] = []
        if preempted or self._lost:
            left = self._preempted(parts)
        if plan.copies.batches:
            parts.append(f',"copies":{_copies(plan)}')
        if result.copy_s:
            parts.append(f',"copy_s":{result.copy_s!r}')
        if result.compile_s:
            parts.append(f',"compile_s":{result.compile_s!r}')
        changes = self._changes
        if changes is not None:
            self._mark, self._filled = len(changes.events), len(changes.digests)
        else:
            left += self._table_changes(parts)
        if left:
            parts.append(f',"gone":{left}')
        self._stepped = True
        self._moved(self._step_head, plan.step, started_s, ended_s, "".join(parts) if parts else "")

    def _moved(self, head: str, number: int | None, started_s: float, ended_s: float, rest: str) -> None:
        """Note a frame that moves time."""
        began = None if started_s == self._last_s else started_s - self._zero
        self._last_s = ended_s
        self._held.append((head, number, began, ended_s - self._zero, rest, self._mark, self._filled))
        if len(self._held) >= _MOST_HELD:
            self.flush()

    def _rows(self, told: Sequence[Row[Seq]], before: dict[int, int], parts: list[str]) -> None:
        """Tell rows that do more than go on, who is admitted, who of those before paused."""
        rows: list[str] = []
        admitted: list[str] = []
        for seq, start, num_tokens, samples in told:
            seq_id = seq.seq_id
            if len(samples) == 1:
                self._seqs.append(seq)
                self._ends.append(start + num_tokens - self._on)
            else:
                self._fed[seq_id] = start + num_tokens
            if before.pop(seq_id, None) == start and num_tokens == 1 and len(samples) == 1:
                continue
            name = _quoted(seq.request.request_id)
            if self._admitted.get(seq.request.request_id) != seq.request.num_preemptions:
                admitted.append(self._admission(seq.request, name, start))
            rows.append(f"[{seq_id},{name},{seq.index},{start},{num_tokens},{len(samples)}]")
        if admitted:
            parts.append(f',"admitted":[{",".join(admitted)}]')
        if rows:
            parts.append(f',"rows":[{",".join(rows)}]')
        if before:
            parts.append(f',"paused":{list(before)}')

    def quiet(self, first_step: int, count: int, started_s: float, ended_s: float) -> None:
        """Steps in which every running sequence got its next token, and nothing else happened."""
        self._on += count
        head = f'{{"frame":"quiet"{self._tag},"n":{first_step},"count":{count}'
        self._moved(head, None, started_s, ended_s, "")

    def ended(self, request: Request, output: RequestOutput, now: float) -> None:
        """A request ended, in a step or between two."""
        seqs = [seq.seq_id for seq in request.sequences]
        self._forget([seq for seq in seqs if seq in self._tables])
        for seq in request.sequences:
            if seq in self._seqs:
                at = self._seqs.index(seq)
                del self._seqs[at], self._ends[at]
            self._fed.pop(seq.seq_id, None)
        self._admitted.pop(request.request_id, None)
        self._gone.pop(request.request_id, None)
        self._branched -= request.sampling.num_sequences > 1
        reason = str(output.outputs[0].finish_reason) if output.outputs else "abort"
        ttft = "null" if output.ttft_s is None else repr(output.ttft_s)
        if self._changes is not None and self._stepped:
            # What was there at the beginning belongs to a step: a page shows nothing before the first.
            self._mark, self._filled = len(self._changes.events), len(self._changes.digests)
        rest = (
            f',"reason":{_quoted(reason)},"tokens":{[len(o.token_ids) for o in output.outputs]},"ttft_s":{ttft},'
            f'"cached":{output.num_cached_tokens},"copies":{output.num_copies},"seqs":{seqs}'
        )
        head = f'{{"frame":"end"{self._tag},"id":{_quoted(request.request_id)}'
        self._held.append((head, None, now - self._zero, None, rest, self._mark, self._filled))

    def flush(self) -> None:
        """Write the frames that wait."""
        changes, told, known, lines = self._changes, 0, 0, list[str]()
        events: Iterator[str] = iter(())
        if changes is not None:
            events = _events_of(changes.events, [held[5] for held in self._held])
        for head, number, began, ended, rest, mark, filled in self._held:
            if number is not None:
                head = f"{head}{number}"
            # Of nanoseconds: all 17 digits take longer than the rest of the line.
            if began is not None:
                head = f'{head},"t":{began:.9f}'
            if ended is not None:
                head = f'{head},"e":{ended:.9f}'
            if changes is not None and mark > told:
                rest = f"{rest}{_told(next(events), changes.digests[known:filled])}"
                told, known = mark, filled
            lines.append(f"{head}{rest}}}\n")
        if changes is not None:
            del changes.events[:told], changes.digests[:known]
            self._mark = self._filled = 0
        self._file.line("".join(lines))
        self._held.clear()

    # -------------------------------------------------------------------- parts

    def _admission(self, request: Request, name: str, start: int) -> str:
        """How a request that has no row yet, or was preempted, got one."""
        request_id, preemptions = request.request_id, request.num_preemptions
        again = request_id in self._admitted
        if again and self._gone.get(request_id, 0) != preemptions:
            self._lost[request_id] = "recompute"  # in a step that failed, and came back at once
            self._gone[request_id] = preemptions
        self._admitted[request_id] = preemptions
        hit = start if again else request.num_cached_tokens
        reason = "resumed" if again else str(request.miss_reason)
        return f"[{name},{hit},{request.matched_tokens},{_quoted(reason)}]"

    def _preempted(self, parts: list[str]) -> list[int]:
        """Tell who gave its blocks up; the sequences that hold none any more."""
        scheduler, gone = self._scheduler, self._lost
        if scheduler.num_preemptions != self._preemptions:
            self._preemptions = scheduler.num_preemptions
            for request in scheduler.waiting:
                if self._gone.get(request.request_id, 0) != request.num_preemptions:
                    gone[request.request_id] = "swap" if request.swapped else "recompute"
                    self._gone[request.request_id] = request.num_preemptions
        if not gone:
            return []
        parts.append(f',"preempted":{json.dumps(list(gone.items()))}')
        self._lost = {}
        seqs = [seq for seq in self._tables if self._owners[seq] in gone]
        self._forget(seqs)
        return seqs

    def _table_changes(self, parts: list[str]) -> list[int]:
        """Tell tables that differ from what the record says; the sequences that hold none any more."""
        out: list[str] = []
        running = self._engine.scheduler.running
        seqs = [seq for r in running for seq in (r.live if r.forked else r.live[:1])]
        tables = self._manager.tables([seq.seq_id for seq in seqs], self._width)
        left = sorted(self._tables.keys() - {seq.seq_id for seq in seqs})
        self._forget(left)
        for i, seq in enumerate(seqs):
            self._differences(seq, tuple(_trimmed(table[i].tolist()) for table in tables), out)
        if out:
            parts.append(f',"tables":[{",".join(out)}]')
        return left

    def _differences(self, seq: Seq, lists: Sequence[list[int]], out: list[str]) -> None:
        """Tell where a table differs from the one last told, and remember it."""
        seq_id = seq.seq_id
        old_lists = self._tables.get(seq_id)
        if old_lists is None:
            self._tables[seq_id] = tuple(new.copy() for new in lists)
            self._owners[seq_id] = seq.request.request_id
            out += [f"[{seq_id},{group},0,{new}]" for group, new in enumerate(lists)]
            return
        for group, (new, old) in enumerate(zip(lists, old_lists, strict=True)):
            if new == old:
                continue
            shorter = min(len(new), len(old))
            first = next((i for i in range(shorter) if new[i] != old[i]), shorter)
            told = new[first:] + [0] * (len(old) - len(new))
            out.append(f"[{seq_id},{group},{first},{told}]")
            old[first:] = new[first:]

    def _forget(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            del self._tables[seq], self._owners[seq]

    def close(self) -> None:
        """Write the closing frame and let the engine go on unrecorded; a second call changes nothing."""
        if not self._open:
            return
        self._open = False
        self.flush()
        parts = [f'{{"frame":"close"{self._tag}']
        if self._paged is not None and self._changes is not None:
            if self._changes.events:
                (events,) = _events_of(self._changes.events, [len(self._changes.events)])
                parts.append(_told(events, self._changes.digests))
            state = self._paged.snapshot()
            queue = [group["free_queue"] for group in state["groups"]]
            stats = json.dumps(asdict(state["stats"]), separators=(",", ":"), allow_nan=False)
            parts.append(f',"queue":{queue},"stats":{stats}')
        if self._changes is not None:
            self._changes.stop()
        self._file.line("".join([*parts, "}\n"]))
        self._engine.observer = None
        if self._own:
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and self._own and not self._held:
            self._file.refuse()
        self.close()


def _trimmed(table: list[int]) -> list[int]:
    """Without the padding at its end."""
    end = len(table)
    while end and not table[end - 1]:
        end -= 1
    return table[:end]


def _events_of(events: list[Any], marks: Iterable[int]) -> Iterator[str]:
    """The events of each frame that has any, as JSON: made in one go, the names of events need no escapes.

    Args:
        events: Of all frames.
        marks: Of each frame, how many there were up to it.
    """
    told, many = 0, list[Any]()
    for mark in marks:
        if mark != told:
            many += events[told:mark]
            many.append(_END)
            told = mark
    text = repr(many)[1:-1].replace("'", '"').replace(", ", ",")
    return iter(f"{text},".split(f',"{_END}",')[:-1])


def _told(events: str, digests: list[bytes]) -> str:
    """A frame's fields of events."""
    told = f',"events":[{events}]'
    return f'{told},"digests":"{",".join(map(bytes.hex, digests))}"' if digests else told


def _copies(plan: StepPlan[Seq]) -> str:
    batches = [[b.kind, b.group, b.src.tolist(), b.dst.tolist()] for b in plan.copies.batches]
    return json.dumps(batches, separators=(",", ":"))
