"""Sweeps: the product of settings × inputs × seeds over workers, one tidy table, means over seeds.

What one point of the product is worth is somebody else's importable function; here it is counted, resumed, laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pagedjax.lab.claims import Estimate, TableRow
from pagedjax.lab.cluster import Cluster, point_there
from pagedjax.lab.experiment import Unit
from pagedjax.lab.provenance import digest, package_sources
from pagedjax.lab.results import ResultFile
from pagedjax.lab.tables import comma_separated, is_number
from pagedjax.lab.workers import finished, local
from pagedjax.paths import AnyPath, place, replace_bytes, replace_text
from pagedjax.sim import show


@dataclass(frozen=True)
class Sweep:
    """A product of settings, and what works one point of it out.

    Attributes:
        name: Of its files.
        axes: Name → values, in the order of the table; the last moves fastest.
        work: `(point, *more)` → the columns it yields; importable, and pure: same point, same columns.
        more: Further plain arguments of `work`, the same for all points.
        data: Path or URL of each file that it reads → sha256; a point, or an option in `more`, names it by just that.
    """

    name: str
    axes: Mapping[str, Sequence[Any]]
    work: Callable[..., TableRow]
    more: tuple[Any, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def points(self) -> list[Unit]:
        """All combinations, each once."""
        return [dict(zip(self.axes, values)) for values in product(*self.axes.values())]


class SweepRows(list[TableRow]):
    """Rows of a sweep; a notebook shows what was varied with the first figures, and draws one of them.

    Attributes:
        axes: As the sweep's.
    """

    def __init__(self, rows: Iterable[TableRow], axes: Mapping[str, Sequence[Any]]) -> None:
        super().__init__(rows)
        self.axes = dict(axes)

    def _repr_html_(self) -> str:
        varied = [name for name, values in self.axes.items() if len(values) > 1]
        keys = [name for name in varied if name != "seed"]
        means = (
            over_seeds(self, [name for name in self.axes if name != "seed"])
            if "seed" in self.axes
            else list(self)
        )
        columns = list(dict.fromkeys(name for row in self for name in row))
        figures = [c for c in columns if c not in self.axes and any(is_number(r.get(c)) for r in self)]
        first = [name for name in SHOWN if name in figures][:5] or figures[:5]
        parts = [show.note(f"{len(self)} points; " + "; ".join(f"{n}: {len(self.axes[n])}" for n in varied))]
        numeric = [name for name in keys if all(map(is_number, self.axes[name]))]
        if numeric and first:
            x, y = numeric[0], first[0]
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in sorted(means, key=lambda row: row[x]):
                if is_number(row.get(y)):
                    name = ", ".join(str(row[key]) for key in keys if key != x) or y
                    lines.setdefault(name, []).append((row[x], row[y]))
            if len(lines) <= 10:
                parts.append(show.lines(lines, x=x, y=y))
        parts.append(show.table([{name: row.get(name) for name in (*keys, *first)} for row in means]))
        return show.card("Sweep", *parts)


# Figures of `pagedjax.sim.trial` that come first where there is room for few.
SHOWN = (
    "requests_per_s",
    "goodput",
    "hit_by_token",
    "by_block",
    "by_token",
    "preemptions",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_p50",
    "pool_held",
)


def run_sweep(
    sweep: Sweep,
    out: AnyPath,
    *,
    resume: bool = False,
    jobs: int = 1,
    executor: Executor | None = None,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[float], None] = lambda amount: None,
) -> SweepRows:
    """Work every point out; rows in the order of the points, whoever finished first.

    Args:
        sweep: What is asked.
        out: Folder, here or behind a URL, of `NAME.jsonl`, which a killed run is resumed from.
        resume: Keep what an earlier run with the same points, data and sources finished.
        jobs: Processes; 1 works in this one.
        executor: Who does the points, in place of `jobs`: anything with the interface of `concurrent.futures`.
        note / advance: Told why an earlier run is not resumed; called with 1 for each finished point.

    Returns:
        One row a point: its settings, then its columns.

    Raises:
        ValueError: An axis without values.
    """
    for name, values in sweep.axes.items():
        if not values:
            raise ValueError(f"{name}: has no value to sweep; give at least one")
    points = sweep.points
    header: TableRow = {
        "experiment": sweep.name,
        "kind": "sweep",
        "units": digest([points, list(sweep.more)]),
        "data": dict(sweep.data),
        "sources": package_sources(),
    }
    file = ResultFile(out / f"{sweep.name}.jsonl")
    old, done = file.read()
    if not resume or old != header:
        if resume and old is not None:
            changed = ", ".join(key for key in header if old.get(key) != header[key])
            note(f"{sweep.name}: an earlier run had other {changed}; started anew")
        done = {}
    file.start(header, done)
    for _ in done:
        advance(1)
    call: Callable[..., TableRow] = sweep.work
    before: tuple[Any, ...] = ()
    if isinstance(executor, Cluster):
        executor.offer({name: place(name) for name in sweep.data})
        call, before = point_there, (sweep.work, header["data"], header["sources"])
    todo = [(i, call, (*before, point, *sweep.more)) for i, point in enumerate(points) if i not in done]
    with local(jobs if len(todo) > 1 else 1) if executor is None else nullcontext(executor) as workers:
        for number, columns in finished(workers, todo):
            done[number] = [{**points[number], **columns}]
            file.append(number, done[number])
            advance(1)
    file.start(header, done)
    return SweepRows((row for number in sorted(done) for row in done[number]), sweep.axes)


def over_seeds(rows: Sequence[TableRow], keys: Sequence[str]) -> list[TableRow]:
    """Rows that differ in their seed alone as one: of each number its mean and, of several, its 95 % interval.

    Args:
        rows: With a column `seed`.
        keys: Columns that tell points apart, without the seed.

    Returns:
        For each column c of numbers: c, c_low, c_high; what is unknown in any row stays unknown.
    """
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(repr([row.get(key) for key in keys]), []).append(row)
    table = []
    for group in groups.values():
        out: TableRow = {key: group[0].get(key) for key in keys}
        out["seeds"] = len(group)
        for name in group[0]:
            values: list[Any] = [row.get(name) for row in group]
            if name in keys or name == "seed" or not all(is_number(v) for v in values):
                continue
            estimate = Estimate.of([float(v) for v in values])
            if estimate is not None:
                out[name] = estimate.mean
                if len(group) > 1:
                    out[f"{name}_low"] = estimate.mean - estimate.half
                    out[f"{name}_high"] = estimate.mean + estimate.half
        table.append(out)
    return table


def write_sweep(name: str, rows: Sequence[TableRow], keys: Sequence[str], out: AnyPath) -> list[AnyPath]:
    """The tidy table and that of means as CSV; as parquet, too, where pyarrow is there."""
    paths: list[AnyPath] = []
    for stem, table in ((name, list(rows)), (f"{name}-means", over_seeds(rows, keys))):
        paths.append(out / f"{stem}.csv")
        replace_text(paths[-1], comma_separated(table))
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ModuleNotFoundError:
            continue
        paths.append(out / f"{stem}.parquet")
        columns = list(dict.fromkeys(column for row in table for column in row))
        written = pa.BufferOutputStream()
        parquet.write_table(pa.table({c: _column([row.get(c) for row in table]) for c in columns}), written)
        replace_bytes(paths[-1], written.getvalue().to_pybytes())
    return paths


def _column(values: list[Any]) -> list[Any]:
    """One type a column, as parquet wants it: settings of several kinds become text."""
    kinds = {type(v) for v in values if v is not None}
    return (
        values
        if len(kinds) <= 1 or kinds <= {int, float}
        else [None if v is None else str(v) for v in values]
    )
