"""The history of an exploration as a file: a record that `pagedjax report` opens and that explore goes on with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pagedjax import __version__
from pagedjax.cache import PagedManager
from pagedjax.explore.commands import Command, read_command
from pagedjax.explore.exploration import Exploration
from pagedjax.explore.settings import change, settings_of
from pagedjax.explore.stage import Explored, Outcome, Stage
from pagedjax.report.replay import VERSION, Frame, RecordError, replay

KIND = "explored by hand; each command counts as one second"


def frames(exploration: Exploration) -> Iterator[Frame]:
    """The record: each command a step of one second, on a manager of today's settings.

    The tokens of every prompt are in it, and their text.
    """
    writer = _Writer(exploration, Stage(exploration.settings))
    yield writer.first()
    for command in exploration.history:
        yield from writer.take(command)
    yield writer.last()


def load(exploration: Exploration, record: Iterable[Frame], name: str) -> str:
    """Replace an exploration's history by a file's.

    Returns:
        What there is to say about it, in a line.

    Raises:
        RecordError: A record, but not of an exploration.
        ValueError: A command of it is refused; nothing has changed.
    """
    held = list(record)
    about = held[0].get("explored")
    if not isinstance(about, dict):
        raise RecordError(f"{name}: is the record of a run, it has no commands; give what explore has saved")
    settings = about.get("settings")
    if not isinstance(settings, dict):
        raise RecordError(
            f"{name}:1: settings={str(settings)[:80]}: must be an object; save the history anew"
        )
    start = change(exploration.start, settings, exploration.choices)
    commands = []
    for frame in held[1:]:
        if "command" in frame:
            try:
                commands.append(read_command(frame["command"]))
            except ValueError as error:
                raise RecordError(f"{name}: command {len(commands) + 1}: {error}") from None
    try:
        exploration.replace(start, commands)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    out = f"{len(commands)} commands of {name} have been run again"
    if about.get("tokenizer") != exploration.tokenizer:
        theirs = str(about.get("tokenizer"))[:80]
        out += f"; its texts came from {theirs}, here they are shown by {exploration.tokenizer}"
    if not _same(exploration.stage.manager, held):
        out += "; the state at the end is not the file's: it was edited, or written by another version"
    return out


def _same(manager: PagedManager, held: list[Frame]) -> bool:
    """Does the file end in this state? What a broken file says about blocks is no reason to refuse its commands."""
    try:
        told, real = replay(held).snapshot(), manager.snapshot()
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError):
        return False
    return bool(told["groups"] == real["groups"] and told.get("stats") == real["stats"])


@dataclass(eq=False)
class _Writer:
    """Frames from the differences of one state and the next: the pools are small."""

    exploration: Exploration
    stage: Stage
    step: int = 0
    blocks: dict[int, tuple[int, bytes | None]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # sequence → its request in the record
    lives: dict[int, int] = field(default_factory=dict)  # sequence → how often the number was used
    admitted: set[int] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)  # sequences that had a row in the frame before
    written: dict[int, int] = field(default_factory=dict)

    def first(self) -> Frame:
        return {
            "frame": "run",
            "version": VERSION,
            "kind": KIND,
            "pagedjax": __version__,
            "command": "pagedjax explore",
            "explored": {
                "settings": settings_of(self.exploration.start),
                "tokenizer": self.exploration.tokenizer,
            },
            "block_size": self.stage.settings.block_size,
            "pool_blocks": list(self.stage.manager.pool_blocks),
            "text": True,
        }

    def take(self, command: Command) -> Iterator[Frame]:
        """The frames of one command; the first carries the command itself."""
        if command.op == "settings":
            yield {"frame": "settings", "command": command.plain()}
            return
        before = {seq: (known, self.stage.manager.num_copies(seq)) for seq, known in self.stage.seqs.items()}
        outcome = self.stage.run(command)
        out = [*self._arrivals(command), self._step(command, outcome), *self._ends(outcome, before)]
        self.step += 1
        yield {**out[0], "command": command.plain()}
        yield from out[1:]

    def last(self) -> Frame:
        state = self.stage.manager.snapshot()
        return {
            "frame": "close",
            "queue": [group["free_queue"] for group in state["groups"]],
            "stats": asdict(state["stats"]),
        }

    def _arrivals(self, command: Command) -> list[Frame]:
        """Who is new: a lookup under a free number, or a fork."""
        seq = command.child if command.op == "fork" else command.seq if command.op == "lookup" else None
        if seq is None:
            return []
        life = self.lives.get(seq, 0)
        if command.op == "lookup" and seq in self.names and seq not in self.admitted:
            life -= 1  # looked up again before anything was allocated
        self.lives[seq] = life + 1
        self.names[seq] = f"{seq}" if not life else f"{seq} ({life + 1})"
        self.admitted.discard(seq)
        self.written[seq] = 0
        known = self.stage.seqs[seq]
        return [
            {
                "frame": "add",
                "id": self.names[seq],
                "t": float(self.step),
                "prompt": known.prompt,
                "max_new": None,
                "n": 1,
                "text": self.exploration.text(known.chain.tokens),
            }
        ]

    def _step(self, command: Command, outcome: Outcome) -> Frame:
        frame: Frame = {"frame": "step", "n": self.step, "t": float(self.step), "s": 1.0}
        rows = []
        if outcome.row is not None:
            seq = command.seq
            assert seq is not None
            start, count, sampled = outcome.row
            rows = [[seq, self.names[seq], 0, start, count, int(sampled)]]
            self.written[seq] += count if command.op == "write" else 0
        now = [] if outcome.row is None or command.seq is None else [command.seq]
        frame["rows"] = rows
        frame["paused"] = [seq for seq in self.rows if seq not in now]
        self.rows = now
        if admitted := self._admissions(command, outcome):
            frame["admitted"] = admitted
        if command.op == "swap_out" and outcome.ok:
            frame["preempted"] = [[self.names[command.seq], "swap"]]  # type: ignore[index]
        if outcome.copies:
            frame["copies"] = [list(batch) for batch in outcome.copies]
        return {**frame, **self._changes()}

    def _admissions(self, command: Command, outcome: Outcome) -> list[list[Any]]:
        seq = command.child if command.op == "fork" else command.seq
        if seq is None or not outcome.ok or seq not in self.stage.seqs:
            return []
        known = self.stage.seqs[seq]
        if command.op == "swap_in":
            return [[self.names[seq], known.filled, known.filled, "resumed"]]
        if known.recorded or seq in self.admitted:
            return []
        self.admitted.add(seq)
        if known.hit is None:
            return [[self.names[seq], known.filled, known.filled, f"forked from {known.parent}"]]
        return [[self.names[seq], known.hit.num_tokens, known.hit.matched_tokens, known.hit.reason.value]]

    def _changes(self) -> Frame:
        """`blocks`, `tables` and `gone`: what differs from the frame before."""
        state = self.stage.manager.snapshot()
        (pool,) = state["groups"]
        ref, keys = pool["ref"], pool["keys"]
        now = {b: (ref.get(b, 0), keys.get(b)) for b in ref.keys() | keys.keys()}
        blocks: list[list[Any]] = []
        for b in sorted(now.keys() | self.blocks.keys()):
            (owners, key), (was, had) = now.get(b, (0, None)), self.blocks.get(b, (0, None))
            if key != had:
                blocks.append([0, b, owners, key.hex() if key is not None else None])
            elif owners != was:
                blocks.append([0, b, owners])
        self.blocks = now
        held = {s: t[0] for s, t in state["tables"].items() if not self.stage.seqs[s].recorded}
        tables = []
        for seq, table in held.items():
            before = self.tables.get(seq)
            if table != before:
                tables.append([seq, 0, 0, table + [0] * (len(before or ()) - len(table))])
        gone = sorted(self.tables.keys() - held.keys())
        self.tables = {seq: list(table) for seq, table in held.items()}
        out: Frame = {}
        for name, value in (("blocks", blocks), ("tables", tables), ("gone", gone)):
            if value:
                out[name] = value
        return out

    def _ends(self, outcome: Outcome, before: dict[int, tuple[Explored, int]]) -> list[Frame]:
        out: list[Frame] = []
        for seq in outcome.ended:
            known, copies = before[seq]
            out.append(
                {
                    "frame": "end",
                    "id": self.names.pop(seq),
                    "t": float(self.step + 1),
                    "reason": "freed",
                    "tokens": [self.written.pop(seq)],
                    "ttft_s": None,
                    "cached": 0 if known.hit is None else known.hit.num_tokens,
                    "copies": copies,
                    "seqs": [seq],
                }
            )
            self.admitted.discard(seq)
            self.rows = [row for row in self.rows if row != seq]
        return out
