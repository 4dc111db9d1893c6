"""`pagedjax sweep`: the product of settings × traces × seeds over worker processes, as one tidy table."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pagedjax.cli.options import PathOrUrl, emit_json, note
from pagedjax.cli.trace_options import AT_LEAST_1, QUIET, Opener, trace_options
from pagedjax.config import read_toml
from pagedjax.paths import AnyPath, place

_TABLES = ("sweep", "grid", "set", "promise")


def work(point: dict[str, Any], options: dict[str, Any], measure: str) -> dict[str, Any]:
    """One point, in whatever process it runs."""
    from pagedjax.sim.trial import run_trial

    columns = tuple(options["columns"])
    trace = Opener(**{**options, "columns": columns, "quiet": True})(place(point["trace"]))
    settings = {name: value for name, value in point.items() if name not in ("trace", "seed")}
    return run_trial(trace, settings, point["seed"], measure)


@click.command("sweep")
@click.argument("files", nargs=-1, required=True, type=PathOrUrl(exists=True))
@click.option(
    "--grid", "grids", multiple=True, metavar="KEY=V1,V2,…", help="Values of one setting; repeatable."
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="The same in all points; repeatable."
)
@click.option(
    "--seeds", type=AT_LEAST_1, help="So many of each point, where a rate draws arrivals.  [default: 1]"
)
@click.option("--measure", help="simulate (the engine on a virtual clock) or replay.  [default: simulate]")
@click.option(
    "--out",
    type=PathOrUrl(folder=True, written=True),
    default="results",
    show_default=True,
    help="Folder of the rows, or its URL (s3://…).",
)
@click.option("--name", help="Of the files in it.  [default: the TOML file's, or sweep]")
@click.option("--resume", is_flag=True, help="Keep what an interrupted run finished.")
@click.option("--jobs", type=AT_LEAST_1, help="Processes of this machine.  [default: 2]")
@click.option("--on", metavar="PLACE", help="local:PROCESSES, or dask://HOST:PORT, a cluster that is there.")
@click.option("--x", help="Draw small multiples over this column …")
@click.option("--y", help="… of this one …")
@click.option("--panel", default="", help="… a panel for each value of this …")
@click.option("--hue", default="", help="… and a line for each of this.")
@click.option("--json", "as_json", is_flag=True, help="Print all rows as one JSON document on stdout.")
@trace_options
@QUIET
def command(
    files: tuple[AnyPath, ...],
    grids: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: int | None,
    measure: str | None,
    out: AnyPath,
    name: str | None,
    resume: bool,
    jobs: int | None,
    on: str | None,
    x: str | None,
    y: str | None,
    panel: str,
    hue: str,
    as_json: bool,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Measure every combination of settings on every trace: FILES are traces, and at most one sweep in TOML.

    A sweep file has tables [grid] (lists), [set] and [promise] (values), and [sweep] (measure, seeds).
    docs/experiments.md lists settings and columns.
    """
    from pagedjax import lab
    from pagedjax.lab.cluster import workers_on
    from pagedjax.lab.plots import import_matplotlib, small_multiples
    from pagedjax.lab.sweep import over_seeds, run_sweep, write_sweep
    from pagedjax.progress import bar

    if (x is None) != (y is None):
        raise click.UsageError("--x and --y: a plot needs both; give the other one")
    if (panel or hue) and x is None:
        raise click.UsageError("--panel, --hue: have an effect with --x and --y only")
    if jobs is not None and on is not None:
        raise click.UsageError(f"--jobs {jobs}: says what --on says too; give one of them")
    if name is not None and (not name or Path(name).name != name):
        raise click.UsageError(
            f"--name {name}: must be a file's name, without folders; choose those by --out"
        )
    if x is not None:
        import_matplotlib()  # one that is missing is told before the work that it would show
    plans = [file for file in files if file.suffix == ".toml"]
    traces = [file for file in files if file.suffix != ".toml"]
    if len(plans) > 1 or not traces:
        raise click.UsageError("give one trace or more, and at most one sweep in TOML")
    sweep = _sweep(plans[0] if plans else None, traces, grids, settings, seeds, measure, open_file, name)
    keys = [axis for axis in sweep.axes if axis != "seed"]
    if sweep.axes.keys() >= {"trace"}:
        open_file(traces[0])  # its notes, once; and a bad file is told before workers start
    with (
        nullcontext() if on is None else workers_on(on) as executor,
        bar(sweep.name, len(sweep.points), enabled=not quiet and sys.stderr.isatty()) as advance,
    ):
        rows = run_sweep(
            sweep,
            out,
            resume=resume,
            jobs=jobs or 2,
            executor=executor,
            note=lambda text: None if quiet else note(text),
            advance=advance,
        )
    x, y, panel, hue = (_axis(sweep, column) for column in (x, y, panel, hue))
    paths = write_sweep(sweep.name, rows, keys, out)
    means = over_seeds(rows, keys)
    if x is not None and y is not None:
        paths.append(small_multiples(means, out / f"{sweep.name}.png", x=x, y=y, panel=panel, hue=hue))
    if as_json:
        emit_json(rows)
    else:
        print(lab.markdown([_short(row, sweep.axes) for row in means]), end="")
    if not quiet:
        note(f"{len(rows)} points; " + ", ".join(map(str, paths)))


def _axis(sweep: Any, column: str | None) -> Any:
    """The column that was meant: a setting may be named without its section."""
    named = [axis for axis in sweep.axes if column and axis.rpartition(".")[2] == column.replace("-", "_")]
    return named[0] if len(named) == 1 and column not in sweep.axes else column


def _sweep(
    plan: AnyPath | None,
    traces: list[AnyPath],
    grids: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: int | None,
    measure: str | None,
    open_file: Opener,
    name: str | None,
) -> Any:
    """The product that file and options ask for, every point checked."""
    from pagedjax.lab.sweep import Sweep
    from pagedjax.sim.trial import MEASURES, read_settings, resolve

    tables = _tables(plan)
    chosen = measure or str(tables["sweep"].get("measure", "simulate"))
    count = seeds or tables["sweep"].get("seeds", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{plan}: sweep.seeds={count!r}: must be a whole number, at least 1")
    if chosen not in MEASURES:
        raise ValueError(f"measure={chosen}: must be one of {', '.join(MEASURES)}")
    axes: dict[str, list[Any]] = {"trace": [str(path) for path in traces]}

    given: list[str] = []

    def once(name: str, among: str = "--set and --grid") -> str:
        if name in given:
            raise click.UsageError(f"{name}: stands twice among {among}; take one out")
        given.append(name)
        return name

    tables_of = f"the tables of {plan}"
    for key, value in tables["set"].items():
        axes[once(resolve(chosen, key), tables_of)] = [value]
    for key, value in tables["grid"].items():
        if not isinstance(value, list):
            raise ValueError(
                f"{plan}: grid.{key}={value!r}: must be a list of values; a single one goes under [set]"
            )
        axes[once(resolve(chosen, key), tables_of)] = value
    given.clear()  # what is typed counts before the file
    for text in settings:
        key, value = _split("--set", text)
        axes[once(resolve(chosen, key))] = [_value(value)]
    for text in grids:
        key, value = _split("--grid", text)
        axes[once(resolve(chosen, key))] = [_value(part) for part in value.split(",")]
    for key, values in axes.items():
        if len({repr(value) for value in values}) < len(values):
            raise ValueError(f"{key}: a value stands twice among {', '.join(map(str, values))}; take one out")
    if count > 1 and not any(value for value in axes.get("rate", [])):
        raise click.UsageError(
            f"--seeds {count}: nothing is drawn; sweep or set a rate of arrivals, or leave it out"
        )
    axes["seed"] = list(range(count))
    options = {**asdict(open_file), "columns": list(open_file.columns)}
    sweep = Sweep(
        name or (plan.stem if plan is not None else "sweep"),
        axes,
        work,
        (options, chosen),
        _content(axes, open_file.tokenizer),
    )
    for point in sweep.points:
        read_settings({k: v for k, v in point.items() if k not in ("trace", "seed")})
    return sweep


def _content(axes: dict[str, list[Any]], tokenizer: str) -> dict[str, str]:
    """sha256 of every file that points read: traces, and a tokenizer, hardware and shapes where they are files."""
    from pagedjax.lab.provenance import fingerprint

    named = [tokenizer, *axes.get("hardware", []), *axes.get("shape", [])]
    names = [*axes["trace"], *(name for name in named if Path(str(name)).is_file())]
    return {name: fingerprint(place(name)) for name in names}


def _tables(plan: AnyPath | None) -> dict[str, dict[str, Any]]:
    """The tables of a sweep file, [promise] put under [set]; nested keys joined by dots."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    if plan is not None:
        found = read_toml(plan, "docs/experiments.md shows one")
        for name, table in found.items():
            if name not in _TABLES or not isinstance(table, dict):
                raise ValueError(f"{plan}: {name}: must be one of the tables {', '.join(_TABLES)}")
            tables[name] = _flat(table)
        unknown = sorted(tables["sweep"].keys() - {"measure", "seeds"})
        if unknown:
            raise ValueError(f"{plan}: sweep.{unknown[0]}: must be measure or seeds")
    tables["set"] |= tables.pop("promise")
    return tables


def _flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat


def _split(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise click.BadParameter(f"{option} {text}: must be KEY=VALUE, as in {option} cache.block_size=16")
    return key.strip(), value.strip()


def _value(text: str) -> Any:
    """A number or a switch as TOML would have it; else the text, which its setting reads."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return value if isinstance(value, int | float | bool) else text.strip()


def _short(row: dict[str, Any], axes: dict[str, list[Any]]) -> dict[str, Any]:
    """What a terminal has room for: settings that vary, and the first figures; the files have all."""
    from pagedjax.lab.sweep import SHOWN

    varied = {key: row[key] for key, values in axes.items() if len(values) > 1 and key in row}
    return varied | {name: row[name] for name in SHOWN if name in row}
