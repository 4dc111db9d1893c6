"""An exploration: a history of commands, the manager that they led to, undo, and other settings for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagedjax.cache.hashing import HASHES
from pagedjax.cache.indexes import INDEX_PLUGINS
from pagedjax.cache.policies import POLICY_PLUGINS
from pagedjax.cache.rules import require
from pagedjax.config import CacheConfig
from pagedjax.explore.commands import Command, read_command
from pagedjax.explore.settings import START, change, check
from pagedjax.explore.stage import Outcome, Stage

MOST_COMMANDS = 5000  # all are run again for an undo
MOST_HISTORY_TOKENS = 1_000_000
_RUN_AGAIN = Outcome(True, "all commands are of a new manager with these settings")


class Exploration:
    """Commands in, a manager's state out; knows nothing of pages. Not to be used by two threads at once.

    Args:
        settings: The cache's to begin with. Policies and indexes that are no name of a registry ("module:Class") can
            come from here alone, never from a command or a file.
        encode: Text → token ids; None: the bytes of its UTF-8.
        decode: Token ids → text, for the reader's eye.
        tokenizer: What the two are called.

    Attributes:
        stage: The manager and its sequences.
        history: Every command so far.
        outcomes: What each did, on the manager of today's settings.
        revision: Grows with every change.

    Raises:
        ValueError: A setting is out of range, or none that can be explored.

    Example:
        >>> exploration = Exploration()
        >>> exploration.apply({"op": "lookup", "seq": 0, "text": "the old lamp"}).ok
        True
        >>> exploration.apply({"op": "allocate", "seq": 0}).said
        'table 1 2 3: 3 blocks taken, 0 evicted for them, 0 to be copied on write'
        >>> str(exploration.undo())
        'allocate 0'
    """

    def __init__(
        self,
        settings: CacheConfig = START,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        tokenizer: str = "bytes",
    ) -> None:
        self._encode = encode or (lambda text: list(text.encode()))
        self._decode = decode or _text_of_bytes
        self.tokenizer = tokenizer
        self.choices = {
            "policy": _with(settings.policy, [n for n in POLICY_PLUGINS.names() if n != "belady"]),
            "index": _with(settings.index, INDEX_PLUGINS.names()),
            "hash": list(HASHES),
        }
        check(settings, self.choices)
        self.start = settings
        self.stage = Stage(settings)
        self.history: list[Command] = []
        self.outcomes: list[Outcome] = []
        self.revision = 0

    @property
    def settings(self) -> CacheConfig:
        """Of the cache, as they are now."""
        return self.stage.settings

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids for the reader's eye: their text, or the ids where they have none."""
        try:
            return self._decode(list(tokens)) or str(list(tokens))
        except (ValueError, OverflowError, TypeError, KeyError, IndexError):  # ids that no tokenizer made
            return str(list(tokens))

    def apply(self, command: Command | Mapping[str, Any]) -> Outcome:
        """Carry a command out and remember it.

        Where there is no room the outcome is not ok, nothing of the cache has changed, and the command stands in the
        history all the same: with other settings there may be room.

        Raises:
            ValueError: The command makes no sense, or makes none now; nothing has changed.
        """
        if not isinstance(command, Command):
            command = read_command(command, self._encode)
        self._check_length([*self.history, command])
        if command.op == "settings":
            outcome = self._change(command)
        else:
            outcome = self.stage.run(command)
            self.history.append(command)
            self.outcomes.append(outcome)
        self.revision += 1
        return outcome

    def undo(self) -> Command:
        """Forget the last command: all before it are run again on a fresh manager.

        Raises:
            ValueError: There is none.
        """
        require(bool(self.history), "undo: there is no command to undo; give one first")
        *rest, last = self.history
        self._become(self.start, rest)
        return last

    def restart(self) -> None:
        """Forget every command and every change of settings."""
        self._become(self.start, [])

    def replace(self, start: CacheConfig, commands: Iterable[Command]) -> None:
        """Begin with other settings and run other commands, as when a file is loaded.

        Raises:
            ValueError: A setting or a command is refused, or there are too many; nothing has changed.
        """
        commands = list(commands)
        check(start, self.choices)
        self._check_length(commands)
        self._become(start, commands)

    # -------------------------------------------------------------- parts

    def _become(self, start: CacheConfig, commands: list[Command]) -> None:
        settings = start
        for command in commands:
            if command.op == "settings":
                settings = change(settings, command.values or {}, self.choices)
        stage, outcomes = self._run(settings, commands)
        self.start, self.stage, self.history, self.outcomes = start, stage, commands, outcomes
        self.revision += 1

    def _run(self, settings: CacheConfig, commands: list[Command]) -> tuple[Stage, list[Outcome]]:
        """All commands on a fresh manager."""
        stage, outcomes = Stage(settings), []
        for number, command in enumerate(commands, 1):
            if command.op == "settings":
                outcomes.append(_RUN_AGAIN)
                continue
            try:
                outcomes.append(stage.run(command))
            except ValueError as error:
                raise ValueError(f"command {number} ({command}) is refused then: {error}") from None
        return stage, outcomes

    def _change(self, command: Command) -> Outcome:
        settings = change(self.settings, command.values or {}, self.choices)
        try:
            stage, outcomes = self._run(settings, self.history)
        except ValueError as error:
            raise ValueError(f"{command}: {error}; undo to before it, or choose otherwise") from None
        plain = [o for o, c in zip(outcomes, self.history) if c.op != "settings"]
        outcome = Outcome(
            True,
            f"{len(plain)} commands have been run again on a new manager, {sum(not o.ok for o in plain)} of them found "
            "no room or nothing to do",
        )
        self.stage, self.history = stage, [*self.history, command]
        self.outcomes = [*outcomes, _RUN_AGAIN]
        return outcome

    @staticmethod
    def _check_length(commands: list[Command]) -> None:
        require(
            len(commands) <= MOST_COMMANDS,
            f"history: {MOST_COMMANDS} commands are the most, all are run again for an undo; save it and start anew",
        )
        tokens = sum(len(c.tokens or ()) for c in commands)
        require(
            tokens <= MOST_HISTORY_TOKENS,
            f"history: {tokens} tokens, at most {MOST_HISTORY_TOKENS}; save it and start anew",
        )


def _with(name: str, names: list[str]) -> list[str]:
    return names if name in names else [*names, name]


def _text_of_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(
        errors="replace"
    )  # an id over 255 is no byte: ValueError, and the id is shown
