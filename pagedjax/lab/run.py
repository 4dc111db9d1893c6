"""Running experiments: units to workers, rows to files, finished ones kept for the next try."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path

from pagedjax.lab import catalog
from pagedjax.lab.claims import TableRow
from pagedjax.lab.cluster import Cluster, work_there
from pagedjax.lab.experiment import Unit, units_of
from pagedjax.lab.provenance import MissingData, check_data, provenance
from pagedjax.lab.results import ResultFile
from pagedjax.lab.workers import finished, local
from pagedjax.paths import AnyPath


def work(name: str, unit: Unit, data: str, said_of: Sequence[str]) -> list[TableRow]:
    """Rows of one unit; what was set (fields of it) and is no column yet stands in front.

    Raises:
        ValueError: What was set cannot be run.
    """
    said = {key: unit[key] for key in said_of if key in unit}
    try:
        rows = list(catalog.load(name).run(unit, Path(data)))
    except Exception as error:
        if set(said) <= {"seed"}:
            raise  # nobody asked for anything unusual
        asked = ", ".join(f"{key}={value}" for key, value in said.items())
        got = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} with {asked}: cannot be run ({got}); set another value") from error
    return [{**{k: v for k, v in said.items() if k not in row}, **row} for row in rows]


def run_all(
    chosen: Sequence[str],
    out: AnyPath,
    *,
    smoke: bool = False,
    seed: int = 0,
    settings: Mapping[str, str] | None = None,
    seeds: int = 0,
    resume: bool = False,
    data: Path | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[float], None] = lambda amount: None,
) -> dict[str, list[TableRow]]:
    """Run experiments and leave one result file each.

    Args:
        chosen: Names.
        out: Folder of the result files, here or behind a URL.
        smoke: The small version.
        seed: Root of all random draws.
        settings: Name → value of fields of their units, as `units_of` takes them.
        seeds: So many of each unit that draws, from `seed` on; 0: what the experiment asks for.
        resume: Keep finished units of an earlier run with the same provenance.
        data: Folder that holds data/; None: `catalog.default_data`.
        jobs: Processes; 1 works in this one. What is measured comes last and one unit at a time, in this process:
            beside another unit a clock would show that one, too.
        executor: Who does the units, in place of `jobs`: anything with the interface of `concurrent.futures`; what is
            measured last and one at a time here as well.
        note: Told what is skipped.
        advance: Called with 1 for each finished unit.

    Returns:
        Rows of each experiment that could run, units in order.

    Raises:
        ValueError: No such experiment, or a setting that it does not have.
    """
    data, settings = data or catalog.default_data(), dict(settings or {})
    said = [*settings, *(["seed"] if seeds else [])]
    todo: list[tuple[tuple[str, int], Callable[..., list[TableRow]], tuple[object, ...]]] = []
    alone = list(todo)
    files: dict[str, tuple[ResultFile, TableRow, dict[int, list[TableRow]]]] = {}
    for name in chosen:
        experiment = catalog.load(name)
        units = units_of(experiment, smoke=smoke, seed=seed, settings=settings, seeds=seeds)
        try:
            check_data(experiment, data)
        except MissingData as missing:
            note(f"skipped {missing}")
            continue
        header = provenance(experiment, smoke=smoke, seed=seed, data=data, settings=settings, seeds=seeds)
        file = ResultFile(out / f"{name}.jsonl")
        old, done = file.read()
        if not resume or old != header:
            if resume and old is not None:
                changed = ", ".join(key for key in header if old.get(key) != header[key])
                note(f"{name}: an earlier run had other settings ({changed}); started anew")
            done = {}
        file.start(header, done)
        files[name] = (file, header, done)
        call: Callable[..., list[TableRow]] = work
        more: tuple[object, ...] = ()
        if isinstance(executor, Cluster):
            executor.offer({needed: data / needed for needed in experiment.data})
            call, more = work_there, (header["data"], header["sources"])
        (alone if experiment.kind == "measured" else todo).extend(
            ((name, i), call, (name, unit, str(data), said, *more))
            for i, unit in enumerate(units)
            if i not in done
        )
        for _ in done:
            advance(1)
    asked = local(jobs if len(todo) > 1 else 1) if executor is None else nullcontext(executor)
    last = local(1) if executor is None else nullcontext(executor)
    for calls, by, ahead in ((todo, asked, 0), (alone, last, 1)):
        with by as workers:
            for (name, number), rows in finished(workers, calls, ahead=ahead):
                file, _, done = files[name]
                done[number] = rows
                file.append(number, rows)
                advance(1)
    for file, header, done in files.values():
        file.start(header, done)
    return {name: [r for n in sorted(done) for r in done[n]] for name, (_, _, done) in files.items()}
