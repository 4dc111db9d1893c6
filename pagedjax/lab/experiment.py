"""What a question is: `Experiment`, its units of work, and what the command line may set in them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedjax.lab.claims import Claim, TableRow

Unit = dict[str, Any]
Settings = dict[str, str]  # name -> value as typed
Kind = Literal["counted", "simulated", "measured"]
_BOOLS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


@dataclass(frozen=True)
class Experiment:
    """One question.

    Attributes:
        name: As on the command line.
        question: One sentence.
        kind: counted (exact bookkeeping), simulated (cost model) or measured (real time).
        definition: What exactly the numbers are.
        claims: Printed figures it stands beside.
        units: (smoke, seed) → pieces of work: independent, flat dictionaries of plain values.
        run: (unit, data folder) → rows; pure: same unit, same rows.
        plot: (rows, matplotlib figure) → draws it, by `lab.drawing`; its docstring is the caption. None: a table alone.
        data: Files under the data folder that it reads, and is fingerprinted by.
        note: Where it differs from the paper, and why.
        page: One self-contained HTML page, for the experiments that have one.
        draw: Unit → its picture as text, for the experiments that have one.
        open: String fields that take any value, such as an outside plug-in or a file of the user's own.
            The other string fields choose among the units that are there.
    """

    name: str
    question: str
    kind: Kind
    definition: str
    claims: tuple[Claim, ...]
    units: Callable[[bool, int], list[Unit]]
    run: Callable[[Unit, Path], Iterable[TableRow]]
    plot: Callable[[list[TableRow], Any], None] | None = None
    data: tuple[str, ...] = ()
    note: str = ""
    page: Callable[[], str] | None = None
    draw: Callable[[Unit], str] | None = None
    open: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return f"pagedjax experiment run {self.name}"


def parse_settings(texts: Sequence[str]) -> Settings:
    """`key=value` strings, as of `--set`; of two of one name the later counts.

    Raises:
        ValueError: One is no `key=value`.
    """
    settings: Settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--set {text}: must be key=value; try --set seed=1")
        settings[name.strip().replace("-", "_")] = value.strip()
    return settings


def units_of(
    experiment: Experiment,
    *,
    smoke: bool,
    seed: int,
    settings: Mapping[str, str] | None = None,
    seeds: int = 0,
) -> list[Unit]:
    """The pieces of work under some settings, each of them once.

    With `seeds` each piece that draws is done under so many seeds, `seed` and those that follow; 0: under those that
    the experiment itself asks for.

    A number, a switch or a list is set in every unit that has the field. A string chooses: the units that have
    this value stay, unless the experiment leaves the field open.

    Raises:
        ValueError: No unit has a field of this name (the nearest is named), or the value is of another kind or,
            for a string, no unit's; or several seeds are asked of what draws nothing, or of one that is set.
    """
    units = experiment.units(smoke, seed)
    for name, value in (settings or {}).items():
        units = _with(experiment, units, name, value)
    if seeds:
        if "seed" in (settings or {}):
            raise ValueError(f"--seeds {seeds}: --set seed says what it says, too; give one of them")
        if not any("seed" in unit for unit in units):
            raise ValueError(f"--seeds {seeds}: {experiment.name} draws nothing; leave it out")
        several = range(seed, seed + seeds)
        units = [{**u, "seed": s} for u in units for s in several if "seed" in u] + [
            u for u in units if "seed" not in u
        ]
    seen: list[Unit] = []
    for unit in units:
        if unit not in seen:
            seen.append(unit)
    return seen


def _with(experiment: Experiment, units: list[Unit], name: str, value: str) -> list[Unit]:
    known = list(dict.fromkeys(field for unit in units for field in unit))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else "choose one of them"
        raise ValueError(
            f"--set {name}={value}: is not a setting of {experiment.name}, which has {', '.join(known)}; {remedy}"
        )
    values = [unit[name] for unit in units if name in unit]
    if all(isinstance(v, str) for v in values) and name not in experiment.open:
        if value not in values:
            choices = ", ".join(dict.fromkeys(values))
            raise ValueError(f"--set {name}={value}: must be one of {choices}")
        return [unit for unit in units if unit.get(name) == value]
    return [{**unit, name: _parse(name, value, unit[name])} if name in unit else unit for unit in units]


def _parse(name: str, text: str, old: Any) -> Any:
    """`text` as a value of the kind of `old`."""
    if isinstance(old, str):
        return text
    if isinstance(old, list):
        return [_parse(name, part.strip(), old[0] if old else "") for part in text.split(",")]
    if isinstance(old, bool):
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        raise ValueError(f"--set {name}={text}: must be true or false; try {name}=true")
    try:
        number = float(text)
        if isinstance(old, float) and number == number and abs(number) != float("inf"):
            return number
        return int(text.replace("_", ""))
    except ValueError:
        kind, example = ("a number", "0.5") if isinstance(old, float) else ("a whole number", "16")
        raise ValueError(f"--set {name}={text}: must be {kind}; try {name}={example}") from None
