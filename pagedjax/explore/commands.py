"""The commands of an exploration: what may be asked of a manager by hand, as plain values that a file can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.cache.rules import require

MOST_TOKENS = 100_000  # of one command
MOST_NUMBER = 1_000_000
_SHOWN = 80  # characters of a stranger's value in a message

# Command -> the fields that it must have, the fields that it may have.
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lookup": (("seq", "tokens"), ("salt", "priority")),
    "allocate": (("seq",), ("count",)),
    "fill": (("seq",), ("count",)),
    "index": (("seq",), ()),
    "write": (("seq", "tokens"), ()),
    "fork": (("seq", "child"), ()),
    "free": (("seq",), ()),
    "truncate": (("seq", "count"), ()),
    "swap_out": (("seq",), ()),
    "swap_in": (("seq",), ()),
    "evict": (("count",), ()),
    "reset": ((), ("mode",)),
    "settings": (("values",), ()),
}


@dataclass(frozen=True)
class Command:
    """One command. Which fields one of a kind has is in `FORMS`; the others are None.

    Attributes:
        op: What to do, a key of `FORMS`.
        seq: Number of the sequence.
        child: Number of the sequence that a fork makes.
        tokens: Token ids of a prompt, or to write behind it.
        count: Tokens to allocate, fill or keep; blocks to evict. None: all that there are.
        salt: Of a lookup: sequences share blocks only under equal salts.
        priority: Of a lookup: higher stays longer under the retention policy.
        mode: Of a reset: "strict" or "preempt".
        values: Settings of the cache to change, name to value.
    """

    op: str
    seq: int | None = None
    child: int | None = None
    tokens: tuple[int, ...] | None = None
    count: int | None = None
    salt: str | None = None
    priority: int | None = None
    mode: str | None = None
    values: Mapping[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON has it; `read_command` takes it back."""
        out = {name: value for name, value in vars(self).items() if value is not None}
        if self.tokens is not None:
            out["tokens"] = list(self.tokens)
        if self.values is not None:
            out["values"] = dict(self.values)
        return out

    def __str__(self) -> str:
        """As the history shows it."""
        if self.op == "settings":
            return "settings " + ", ".join(f"{k}={_short(v)}" for k, v in (self.values or {}).items())
        out = self.op.replace("_", " ")
        if self.seq is not None:
            out += f" {self.seq}"
        if self.child is not None:
            out += f" into {self.child}"
        if self.tokens is not None:
            out += f": {len(self.tokens)} tokens"
        if self.count is not None:
            out += f" {self.count}" if self.op == "evict" else f", {self.count} tokens"
        for name in ("salt", "priority", "mode"):
            if getattr(self, name) is not None:
                out += f", {name} {_short(getattr(self, name))}"
        return out


def read_command(values: Any, encode: Callable[[str], Sequence[int]] | None = None) -> Command:
    """A command from plain values, each field checked.

    Args:
        values: A mapping as `Command.plain` gives it; `text` may stand in place of `tokens`.
        encode: Text → token ids; None: `text` is refused.

    Raises:
        ValueError: No command, an unknown field, or a value that is out of range.
    """
    require(
        isinstance(values, Mapping), f"command {_short(values)}: must be an object with op; try op=lookup"
    )
    given = {name: value for name, value in values.items() if value is not None}
    op = given.pop("op", None)
    require(
        isinstance(op, str) and op in FORMS, f"op={_short(op)}: must be one of {', '.join(FORMS)}; try lookup"
    )
    must, may = FORMS[op]
    if "text" in given and "tokens" in (*must, *may):
        require("tokens" not in given, f"{op}: has text and tokens; give one of them")
        given["tokens"] = _encoded(given.pop("text"), encode)
    fields = " and ".join((*must, *may)) or "no field"
    for name in given:
        require(name in must or name in may, f"{op}: takes {fields}, not {_short(name)}; leave it out")
    for name in must:
        require(name in given, f"{op}: needs {name}; give it")
    return Command(op, **{name: _CHECKS[name](name, value) for name, value in given.items()})


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _number(name: str, value: Any) -> int:
    least = 1 if name == "count" else 0
    require(
        type(value) is int and least <= value <= MOST_NUMBER,
        f"{name}={_short(value)}: must be a whole number from {least} to {MOST_NUMBER}; try {least}",
    )
    return int(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    require(isinstance(value, list | tuple), f"{name}={_short(value)}: must be a list of token ids")
    require(
        0 < len(value) <= MOST_TOKENS,
        f"{name}: {len(value)} of them; must be 1 to {MOST_TOKENS}, give "
        + ("a shorter prompt" if value else "a prompt"),
    )
    for token in value:
        require(
            type(token) is int and 0 <= token < 2**31,
            f"token id {_short(token)}: must be a whole number from 0 to 2147483647; check the prompt",
        )
    return tuple(value)


def _encoded(text: Any, encode: Callable[[str], Sequence[int]] | None) -> list[int]:
    require(isinstance(text, str), f"text={_short(text)}: must be a string; try text=hello")
    if encode is None:
        raise ValueError("text: there is no tokenizer here; give tokens")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text: holds half a character (a lone surrogate); paste it anew") from None
    require(
        len(text) <= 10 * MOST_TOKENS,
        f"text of {len(text)} characters: must be at most {10 * MOST_TOKENS}; give a shorter prompt",
    )
    return list(encode(text))


def _salt(name: str, value: Any) -> str:
    require(
        isinstance(value, str) and 0 < len(value) <= 200,
        f"{name}={_short(value)}: must be a text of 1 to 200 characters; leave it out to have none",
    )
    return str(value)


def _mode(name: str, value: Any) -> str:
    require(value in ("strict", "preempt"), f"{name}={_short(value)}: must be strict or preempt; try strict")
    return str(value)


def _settings(name: str, value: Any) -> dict[str, Any]:
    plain = (str, int, bool, type(None))
    require(
        isinstance(value, Mapping)
        and 0 < len(value) <= 20
        and all(isinstance(k, str) and type(v) in plain for k, v in value.items()),
        f"{name}={_short(value)}: must be settings of the cache, name to value; try block_size 4",
    )
    return dict(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "seq": _number,
    "child": _number,
    "count": _number,
    "priority": _number,
    "tokens": _token_ids,
    "salt": _salt,
    "mode": _mode,
    "values": _settings,
}
