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
had a row then and have none now. `step`, `end` and `close` carry `blocks`: `[group, block, owners]` of every block that
changed since the frame before, with a fourth entry where its content did (the digest in hex, null: not indexed any
more). `tables` are `[sequence, group, position, blocks]` to write into a table, `gone` sequences that hold none any
more. An exploration's frames carry the `command` that they come from. Replaying the frames gives the manager's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager
from pagedjax.cache.changes import Changed
from pagedjax.engine.engine import Engine
from pagedjax.engine.request import Request, RequestOutput
from pagedjax.engine.request import Sequence as Seq
from pagedjax.engine.step import StepPlan, StepResult
from pagedjax.report.replay import VERSION, Record, RecordError, Replay, open_text, read_record, replay

__all__ = ["Record", "RecordError", "RecordFile", "Recorder", "Replay", "read_record", "replay"]

_Lists = tuple[list[int], ...]  # a sequence's table in each group
_Told = tuple[int, int, int, list[int]]  # sequence, group, position, blocks from there on
_MOST_HELD = 32  # frames that a kill may cost


class RecordFile:
    """The file of a record, frame after frame.

    Args:
        path: File to write; an older one is replaced. Its folder must exist.
        first: The `run` frame, without its name and version.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | Path, first: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._file = open_text(self.path, "w")
        self.line = self._file.write  # writes a frame that is JSON already, with its end of line
        self.frame("run", {"version": VERSION, **first})

    def frame(self, kind: str, values: Mapping[str, Any], tag: str = "") -> None:
        """Write a frame of a kind that is rare."""
        rest = json.dumps(values, separators=(",", ":"), allow_nan=False)[1:]
        self.line(f'{{"frame":"{kind}"{tag}{"," if rest != "}" else ""}{rest}\n')

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


class Recorder:
    """Writes an engine's run down, frame by frame.

    Where the manager is a `PagedManager`, its pools tell which blocks changed; nothing is scanned. Close it (or leave
    its `with` block) to write the closing frame; a record without one can be read all the same. Frames of steps are
    put together as text, field by field: a step of a simulation takes no longer than encoding a dictionary would.

    Args:
        path: File to write; an older one is replaced. Its folder must exist. Or a fleet's file that is being written.
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
        self._size = self._manager.block_size
        self._keys: list[list[bytes | None]] = [[None] * count for count in self._manager.pool_blocks]
        self._tables: dict[int, _Lists] = {}
        self._owners: dict[int, str] = {}  # sequence with a table → its request
        self._admitted: dict[str, int] = {}  # request id → preemptions when it was last seen to run
        self._preemptions = 0
        # Of each row of the step before, its sequence, and the position behind what it fed.
        self._seqs: tuple[Seq, ...] = ()
        self._ends: tuple[int, ...] = ()
        self._held: list[Any] = []  # frames that are not text yet
        self._lost: dict[str, str] = {}  # preempted since the frame before → how
        self._gone: dict[str, int] = {}  # request id → its preemptions that were told
        self._branched = 0  # requests of several samples or beams that have not ended
        self._zero = engine.now if instance is None else 0.0  # times are seconds since the record began
        self._tag = "" if instance is None else f',"i":{instance}'
        self._own = not isinstance(path, RecordFile)
        if isinstance(path, RecordFile):
            self._file = path
        else:
            first = {
                **about,
                "block_size": self._size,
                "pool_blocks": list(self._manager.pool_blocks),
                "text": decode is not None,
            }
            self._file = RecordFile(path, first)
        self.path = self._file.path
        self._open = True
        self._changes = paged.watch() if paged is not None else None
        # Who came back from the host may hold blocks without having a row.
        swaps = engine.scheduler.config.preemption != "recompute"
        self._fresh = swaps or self._changes is None or self._changes.books_tables
        engine.observer = self

    # ------------------------------------------------------- told by the engine

    def added(self, request: Request) -> None:
        """A request was queued."""
        many = request.sampling.num_sequences
        self._branched += many > 1
        text = "" if self._decode is None else f',"text":{_quoted(self._decode(request.prompt_token_ids))}'
        self._held.append(
            f'{{"frame":"add"{self._tag},"id":{_quoted(request.request_id)},"t":{request.arrival - self._zero!r},'
            f'"prompt":{request.num_prompt_tokens},"max_new":{request.sampling.max_tokens},"n":{many}{text}}}\n'
        )

    def stepped(self, plan: StepPlan[Seq], result: StepResult, started_s: float, ended_s: float) -> None:
        """A step is booked."""
        parts: list[str] = []
        seqs, starts, counts, samples = zip(*plan.rows) if plan.rows else ((), (), (), ())
        # Rows that only go on, as in most steps, are compared as a whole.
        if (
            seqs == self._seqs
            and starts == self._ends
            and sum(counts) == len(seqs) == sum(map(len, samples))
            and not self._branched
        ):
            size = self._size
            grown = [i for i, start in enumerate(starts) if not start % size]
            self._ends = tuple([start + 1 for start in starts])
        else:
            grown = self._rows(plan, parts)
            self._seqs = seqs
            self._ends = tuple([start + count for start, count in zip(starts, counts)])
        left: list[int] = []
        if self._lost or self._scheduler.num_preemptions != self._preemptions:
            left = self._preempted(parts)
        if plan.copies:
            parts.append(f',"copies":{_copies(plan)}')
        if result.copy_s:
            parts.append(f',"copy_s":{result.copy_s!r}')
        if result.compile_s:
            parts.append(f',"compile_s":{result.compile_s!r}')
        blocks = self._changes.take() if self._changes is not None else []
        tables: list[_Told] = []
        if blocks or self._paged is None:
            left += self._table_changes(plan, grown, tables)
        if left:
            parts.append(f',"gone":{left}')
        held = self._held
        held.append((plan.step, started_s, ended_s, parts, blocks, tables))
        if len(held) >= _MOST_HELD:
            self.flush()

    def _rows(self, plan: StepPlan[Seq], parts: list[str]) -> list[int]:
        """Tell rows that do more than go on, who is admitted, who paused; the rows whose tables may have grown."""
        before = {seq.seq_id: end for seq, end in zip(self._seqs, self._ends)}
        rows: list[str] = []
        admitted: list[str] = []
        grown: list[int] = []  # rows that begin, or fill a block
        for number, (seq, start, num_tokens, samples) in enumerate(plan.rows):
            seq_id = seq.seq_id
            if before.pop(seq_id, None) == start and num_tokens == 1 and len(samples) == 1:
                if not start % self._size or seq_id not in self._tables:
                    grown.append(number)
                continue
            grown.append(number)
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
        return grown

    def quiet(self, first_step: int, count: int, started_s: float, ended_s: float) -> None:
        """Steps in which every running sequence got its next token, and nothing else happened."""
        self._ends = tuple([end + count for end in self._ends])
        self._held.append((first_step, count, started_s, ended_s))

    def ended(self, request: Request, output: RequestOutput, now: float) -> None:
        """A request ended, in a step or between two."""
        seqs = [seq.seq_id for seq in request.sequences]
        self._forget([seq for seq in seqs if seq in self._tables])
        self._admitted.pop(request.request_id, None)
        self._gone.pop(request.request_id, None)
        self._branched -= request.sampling.num_sequences > 1
        reason = str(output.outputs[0].finish_reason) if output.outputs else "abort"
        ttft = "null" if output.ttft_s is None else repr(output.ttft_s)
        text = (
            f'{{"frame":"end"{self._tag},"id":{_quoted(request.request_id)},"t":{now - self._zero!r},'
            f'"reason":{_quoted(reason)},"tokens":{[len(o.token_ids) for o in output.outputs]},"ttft_s":{ttft},'
            f'"cached":{output.num_cached_tokens},"copies":{output.num_copies},"seqs":{seqs}'
        )
        self._held.append((text, self._changes.take() if self._changes is not None else []))

    def flush(self) -> None:
        """Write the frames that were only noted: they become text together, which is sooner than one by one."""
        out: list[str] = []
        tag, zero = self._tag, self._zero
        for item in self._held:
            if isinstance(item, str):
                out.append(item)
            elif len(item) == 6:
                step, started, ended, parts, blocks, tables = item
                out.append(f'{{"frame":"step"{tag},"n":{step},"t":{started - zero!r},"s":{ended - started!r}')
                out += parts
                out.append(self._blocks(blocks))
                if tables:
                    told = [f"[{seq},{group},{at},{new}]" for seq, group, at, new in tables]
                    out.append(f',"tables":[{",".join(told)}]')
                out.append("}\n")
            elif len(item) == 4:
                first, count, started, ended = item
                out.append(
                    f'{{"frame":"quiet"{tag},"n":{first},"count":{count},"t":{started - zero!r},'
                    f'"s":{ended - started!r}}}\n'
                )
            else:
                out += (item[0], self._blocks(item[1]), "}\n")
        self._held.clear()
        self._file.line("".join(out))

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

    def _blocks(self, changed: Changed) -> str:
        """What changed since the frame before, as the field of a frame; empty where nothing did."""
        out: list[str] = []
        for number, *columns in changed:
            known = self._keys[number]
            for block, owners, key in zip(*columns):
                if known[block] is key or known[block] == key:
                    out.append(f"[{number},{block},{owners}]")
                else:
                    known[block] = key
                    content = "null" if key is None else f'"{key.hex()}"'
                    out.append(f"[{number},{block},{owners},{content}]")
        return f',"blocks":[{",".join(out)}]' if out else ""

    def _table_changes(self, plan: StepPlan[Seq], grown: list[int], out: list[_Told]) -> list[int]:
        """Tell tables that differ from what the record says; the sequences that hold none any more.

        Where only rows have tables and booking leaves them alone, those that may have grown are looked at; else all.
        """
        left: list[int] = []
        if self._fresh or self._branched:
            running = self._engine.scheduler.running
            seqs = [seq for r in running for seq in (r.live if r.forked else r.live[:1])]
            tables = self._manager.tables([seq.seq_id for seq in seqs], self._width)
            left = sorted(self._tables.keys() - {seq.seq_id for seq in seqs})
            self._forget(left)
            for i, seq in enumerate(seqs):
                self._differences(seq, tuple(_trimmed(table[i].tolist()) for table in tables), out)
        else:
            live = self._changes.tables if self._changes is not None else None
            for i in range(len(plan.rows)) if plan.copies else grown:
                seq = plan.rows[i].seq
                lists = live(seq.seq_id) if live is not None else None
                old_lists = self._tables.get(seq.seq_id)
                if lists is not None and old_lists is not None and not plan.copies:
                    for group, (new, old) in enumerate(zip(lists, old_lists)):
                        if len(new) > (first := len(old)):
                            told = new[first:]
                            old += told
                            out.append((seq.seq_id, group, first, told))
                    continue
                if lists is None:  # it ended in this step: what the plan had
                    lists = tuple(_trimmed(table[i].tolist()) for table in plan.tables)
                self._differences(seq, lists, out)
        return left

    def _differences(self, seq: Seq, lists: _Lists, out: list[_Told]) -> None:
        """Tell where a table differs from the one last told, and remember it."""
        seq_id = seq.seq_id
        old_lists = self._tables.get(seq_id)
        if old_lists is None:
            self._tables[seq_id] = tuple(new.copy() for new in lists)
            self._owners[seq_id] = seq.request.request_id
            out += [(seq_id, group, 0, new.copy()) for group, new in enumerate(lists)]
            return
        for group, (new, old) in enumerate(zip(lists, old_lists, strict=True)):
            if new == old:
                continue
            shorter = min(len(new), len(old))
            first = next((i for i in range(shorter) if new[i] != old[i]), shorter)
            told = new[first:] + [0] * (len(old) - len(new))
            out.append((seq_id, group, first, told))
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
            parts.append(self._blocks(self._changes.take()))
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

    def __exit__(self, *error: object) -> None:
        self.close()


def _trimmed(table: list[int]) -> list[int]:
    """Without the padding at its end."""
    end = len(table)
    while end and not table[end - 1]:
        end -= 1
    return table[:end]


def _copies(plan: StepPlan[Seq]) -> str:
    batches = [[b.kind, b.group, b.src.tolist(), b.dst.tolist()] for b in plan.copies.batches]
    return json.dumps(batches, separators=(",", ":"))
