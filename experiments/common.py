"""What every experiment shares: claims, resumable runs, tables, plots.

An experiment is a module with one `EXPERIMENT`. Its `units` are independent pieces of work, plain
dictionaries; `run(unit)` turns one into rows and is pure: same unit, same rows. Results are JSON lines,
provenance first, then one line per finished unit, so a killed run loses at most the unit it was in.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import pagedjax

Row = dict[str, Any]
Unit = dict[str, Any]
Value = Callable[[list[dict[str, Any]]], float | None]  # what a claim reads from the rows
Kind = Literal["counted", "simulated", "measured"]

FOLDER = Path(__file__).resolve().parent
DEFAULT_DATA = FOLDER.parent.parent / "shared"


class MissingData(RuntimeError):
    """An experiment needs files that are not there; the message names them."""


def cell(column: str, *, least: int = 1, **where: Any) -> Value:
    """Rows → `column` of the first row whose columns equal `where`; None where none does.

    Args:
        column: Name of the value.
        least: Rows below which there is no answer: a smoke run's rows match, but say nothing.
        where: Column → value.
    """

    def pick(rows: list[Row]) -> float | None:
        found = (row[column] for row in rows if all(row.get(k) == v for k, v in where.items()))
        return next(found, None) if len(rows) >= least else None

    return pick


def ratio(column: str, of: dict[str, Any], over: dict[str, Any], *, least: int = 1) -> Value:
    """Rows → `column` of the row that equals `of` over that of the row that equals `over`, as `cell` finds them."""
    above, below = cell(column, least=least, **of), cell(column, least=least, **over)

    def pick(rows: list[Row]) -> float | None:
        a, b = above(rows), below(rows)
        return a / b if a is not None and b else None

    return pick


@dataclass(frozen=True)
class Claim:
    """A printed figure and how ours is read from the rows.

    Attributes:
        text: What is claimed.
        paper: The printed value; None where only our value is of interest.
        source: Where it is printed.
        ours: Rows → our value; None where the rows (a smoke run) do not hold it.
        tolerance: Relative difference up to which it counts as reproduced; None: not judged.
    """

    text: str
    paper: float | None
    source: str
    ours: Value
    tolerance: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One question.

    Attributes:
        name: As on the command line.
        question: One sentence.
        kind: counted (exact bookkeeping), simulated (cost model) or measured (real time).
        definition: What exactly the numbers are.
        claims: Printed figures it stands beside.
        units: (smoke, seed) → pieces of work.
        run: (unit, data folder) → rows.
        plot: (rows, axes) → draws one figure; None: a table alone.
        data: Files under the data folder that it reads, and is fingerprinted by.
        note: Where it differs from the paper, and why.
        page: (rows, options) → one self-contained HTML page, for the experiments that have one.
        draw: (options) → text for a single case given on the command line.
    """

    name: str
    question: str
    kind: Kind
    definition: str
    claims: tuple[Claim, ...]
    units: Callable[[bool, int], list[Unit]]
    run: Callable[[Unit, Path], Iterable[Row]]
    plot: Callable[[list[Row], Any], None] | None = None
    data: tuple[str, ...] = ()
    note: str = ""
    page: Callable[[], str] | None = None
    draw: Callable[[Mapping[str, int]], str] | None = None

    @property
    def command(self) -> str:
        return f"pagedjax experiment run {self.name}"


def names() -> list[str]:
    """All experiments, by file name."""
    files = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))
    return [stem.replace("_", "-") for stem in files if stem != "common"]


def load(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ValueError: No such experiment.
    """
    if name not in names():
        raise ValueError(f"experiment={name}: must be one of {', '.join(names())}")
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    experiment: Experiment = importlib.import_module(f"experiments.{name.replace('-', '_')}").EXPERIMENT
    return experiment


# ------------------------------------------------------------------------- running


def fingerprint(path: Path) -> str:
    """sha256 of a file as it lies on disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(experiment: Experiment, *, smoke: bool, seed: int, data: Path) -> Row:
    """What fixes a result: everything but the time."""
    return {
        "experiment": experiment.name,
        "kind": experiment.kind,
        "definition": experiment.definition,
        "command": experiment.command + (" --smoke" if smoke else "") + f" --seed {seed}",
        "smoke": smoke,
        "seed": seed,
        "units": _digest(experiment.units(smoke, seed)),
        "source": _sources(experiment),
        "data": {name: fingerprint(data / name) for name in experiment.data},
        "pagedjax": pagedjax.__version__,
        "python": platform.python_version(),
    }


def _sources(experiment: Experiment) -> str:
    """Digest of the experiment's file and, for a simulation, of what it is simulated on."""
    files = [FOLDER / f"{experiment.name.replace('-', '_')}.py"]
    if experiment.kind == "simulated":
        text = files[0].read_text()
        files += sorted(path for path in FOLDER.glob("_*.py") if f".{path.stem} import" in text)
        files += sorted((FOLDER.parent / "configs").glob("hardware/*.toml"))
        files += sorted((FOLDER.parent / "configs").glob("sweeps/*.toml"))
    return _digest([fingerprint(path) for path in files if path.name != "__init__.py"])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class ResultFile:
    """JSON lines: provenance, then {"unit": number, "rows": [...]} in the order units finished.

    Every line is flushed to the disk before the next begins. Reading drops a line that a kill cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[Row | None, dict[int, list[Row]]]:
        """Provenance (None where there is none) and the finished units."""
        header: Row | None = None
        units: dict[int, list[Row]] = {}
        if self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if not isinstance(record, dict):
                    continue
                if "unit" in record:
                    units.setdefault(record["unit"], record["rows"])
                elif "experiment" in record and "data" in record:
                    header = record
        return header, units

    def start(self, header: Row, units: Mapping[int, list[Row]]) -> None:
        """Write the file anew, whole or not at all, units in order."""
        lines = [header, *({"unit": number, "rows": units[number]} for number in sorted(units))]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def append(self, number: int, rows: list[Row]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"unit": number, "rows": rows}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_data(experiment: Experiment, data: Path) -> None:
    """Raise MissingData where a file is not there."""
    missing = [name for name in experiment.data if not (data / name).is_file()]
    if missing:
        raise MissingData(f"{experiment.name}: needs {', '.join(missing)} under {data}; give --data-dir")


def _work(name: str, unit: Unit, data: str) -> list[Row]:
    return list(load(name).run(unit, Path(data)))


def run_all(
    chosen: Sequence[str],
    out: Path,
    *,
    smoke: bool = False,
    seed: int = 0,
    resume: bool = False,
    data: Path = DEFAULT_DATA,
    jobs: int = 1,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[float], None] = lambda amount: None,
) -> dict[str, list[Row]]:
    """Run experiments and leave one result file each.

    Args:
        chosen: Names.
        out: Folder of the result files.
        smoke: The small version.
        seed: Root of all random draws.
        resume: Keep finished units of an earlier run with the same provenance.
        data: Folder that holds data/.
        jobs: Processes; 1 works in this one.
        note: Told what is skipped.
        advance: Called with 1 for each finished unit.

    Returns:
        Rows of each experiment that could run, units in order.
    """
    todo: list[tuple[str, int, Unit]] = []
    files: dict[str, tuple[ResultFile, Row, dict[int, list[Row]]]] = {}
    for name in chosen:
        experiment = load(name)
        try:
            check_data(experiment, data)
        except MissingData as missing:
            note(f"skipped {missing}")
            continue
        header = provenance(experiment, smoke=smoke, seed=seed, data=data)
        file = ResultFile(out / f"{name}.jsonl")
        old, done = file.read()
        if not resume or old != header:
            if resume and old is not None:
                note(f"{name}: an earlier run had other settings; started anew")
            done = {}
        file.start(header, done)
        files[name] = (file, header, done)
        todo += [(name, i, u) for i, u in enumerate(experiment.units(smoke, seed)) if i not in done]
        for _ in done:
            advance(1)
    for name, number, rows in _finished(todo, data, jobs):
        file, _, done = files[name]
        done[number] = rows
        file.append(number, rows)
        advance(1)
    for file, header, done in files.values():
        file.start(header, done)
    return {name: [r for n in sorted(done) for r in done[n]] for name, (_, _, done) in files.items()}


def _finished(
    todo: list[tuple[str, int, Unit]], data: Path, jobs: int
) -> Iterator[tuple[str, int, list[Row]]]:
    if jobs == 1 or len(todo) < 2:
        for name, number, unit in todo:
            yield name, number, _work(name, unit, str(data))
        return
    others = set(active_children())
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_join, initargs=(sys.path,)
    ) as pool:
        futures = {pool.submit(_work, name, unit, str(data)): (name, number) for name, number, unit in todo}
        failure: BaseException | None = None
        try:
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if error := future.exception():
                    # No new unit is begun; those that run are still kept.
                    failure = failure or error
                    for other in futures:
                        other.cancel()
                    continue
                yield *futures[future], future.result()
        except BaseException:  # Ctrl-C, or rows that cannot be written: the executor would wait for all units
            for worker in set(active_children()) - others:
                worker.terminate()
            raise
        if failure is not None:
            raise failure


def _join(path: list[str]) -> None:
    """Begin a worker: find the experiments, and end with whoever asked, even if that was killed."""
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; who asked decides
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    asker = parent_process()
    if asker is not None:
        asker.join()
        os._exit(1)


# ------------------------------------------------------------------------- reports


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a markdown table; columns in order of appearance."""
    columns = _columns(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_show(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def comma_separated(rows: Sequence[Row]) -> str:
    """Rows as CSV, numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def verdict(claim: Claim, ours: float | None) -> str:
    """In one word whether a claim holds."""
    if ours is None or claim.paper is None or claim.tolerance is None:
        return ""
    return "reproduced" if abs(ours - claim.paper) <= claim.tolerance * abs(claim.paper) else "differs"


def claim_rows(experiment: Experiment, rows: list[Row]) -> list[Row]:
    """Claims beside ours."""
    table = []
    for claim in experiment.claims:
        ours = claim.ours(rows)
        ratio = ours / claim.paper if ours is not None and claim.paper else None
        table.append(
            {
                "claim": claim.text,
                "ours": ours,
                "paper": claim.paper,
                "ratio": ratio,
                "verdict": verdict(claim, ours),
                "source": claim.source,
            }
        )
    return table


def write_tables(experiment: Experiment, rows: list[Row], out: Path) -> list[Path]:
    """The table as markdown and CSV, and the page where there is one."""
    paths = [out / f"{experiment.name}.md", out / f"{experiment.name}.csv"]
    head = f"# {experiment.name}\n\n{experiment.question}\n\n*{experiment.kind}*: {experiment.definition}\n\n"
    claims = claim_rows(experiment, rows)
    paths[0].write_text(head + (markdown(claims) + "\n" if claims else "") + markdown(rows))
    paths[1].write_text(comma_separated(rows))
    if experiment.page is not None:
        paths.append(out / f"{experiment.name}.html")
        paths[-1].write_text(experiment.page())
    return paths


def write_plots(experiment: Experiment, rows: list[Row], out: Path) -> list[Path]:
    """The plot as PNG and SVG; none where the experiment has none.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message names the extra that brings it.
    """
    if experiment.plot is None:
        return []
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib; pip install 'pagedjax[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Fixed ids and no date: the same rows give the same file.
    with matplotlib.rc_context({"svg.hashsalt": experiment.name}):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        experiment.plot(rows, axes)
        axes.set_title(experiment.question, fontsize=9)
        paths = [out / f"{experiment.name}.png", out / f"{experiment.name}.svg"]
        figure.savefig(paths[0], dpi=110, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
        plt.close(figure)
    return paths


def summary(results: Path) -> str:
    """README of all committed results: claim, ours, paper, ratio, kind, definition, trace hash, command."""
    parts = [
        "# Experiments\n\nGenerated by `pagedjax experiment report` from the result files in `results/`; do not edit.\n"
        "*counted* is exact bookkeeping, *simulated* comes from a cost model, *measured* from a clock.\n"
    ]
    for name in names():
        experiment = load(name)
        header, units = ResultFile(results / f"{name}.jsonl").read()
        parts.append(f"\n## {name}\n\n{experiment.question}\n\n")
        if header is None:
            parts.append("No result is committed.\n")
            continue
        rows = [row for number in sorted(units) for row in units[number]]
        parts.append(f"- kind: {experiment.kind}\n- definition: {experiment.definition}\n")
        for path, digest in header["data"].items():
            parts.append(f"- data: `{path}` sha256 `{digest[:16]}…`\n")
        parts.append(f"- command: `{header['command']}`\n- rows: [table](results/{name}.md)")
        parts.append(f", [csv](results/{name}.csv)")
        if experiment.plot is not None:
            parts.append(f", [plot](results/{name}.png)")
        if experiment.page is not None:
            parts.append(f", [page](results/{name}.html)")
        parts.append("\n")
        if experiment.note:
            parts.append(f"- note: {experiment.note}\n")
        if experiment.claims:
            parts.append("\n" + markdown(claim_rows(experiment, rows)))
    return "".join(parts)
