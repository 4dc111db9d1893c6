"""What fixes a result: the units, the data, and a digest of every source that rows can depend on."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pagedjax import __version__
from pagedjax.lab import catalog
from pagedjax.lab.claims import TableRow
from pagedjax.lab.experiment import Experiment, units_of
from pagedjax.paths import AnyPath, shipped

_ROOT = Path(__file__).resolve().parent.parent
# Rooms that show results or start programs: no row can depend on them. Everything else counts, a new room too.
_SHOW = ("bench", "cli", "explore", "lab", "progress", "report", "shipped", "__main__")
# Libraries whose versions can change a counted or a measured row.
_LIBRARIES = ("numpy", "jax", "jaxlib")


class MissingData(RuntimeError):
    """An experiment needs files that are not there; the message names them."""


def check_data(experiment: Experiment, data: Path) -> None:
    """Raise MissingData where a file is not there."""
    missing = [name for name in experiment.data if not (data / name).is_file()]
    if missing:
        raise MissingData(f"{experiment.name}: needs {', '.join(missing)} under {data}; give --data-dir")


def fingerprint(path: AnyPath) -> str:
    """sha256 of a file as it lies on disk, or behind its URL."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(
    experiment: Experiment,
    *,
    smoke: bool,
    seed: int,
    data: Path,
    settings: Mapping[str, str] | None = None,
    seeds: int = 0,
) -> TableRow:
    """What fixes a result: everything but the time.

    A run resumes where all of it is as before; what is changed in the package, in the experiment or in a file of
    `configs/` makes it start anew.
    """
    words = [experiment.command, *(["--smoke"] if smoke else []), f"--seed {seed}"]
    words += [f"--seeds {seeds}"] if seeds else []
    words += [f"--set {name}={value}" for name, value in (settings or {}).items()]
    return {
        "experiment": experiment.name,
        "kind": experiment.kind,
        "definition": experiment.definition,
        "command": " ".join(words),
        "smoke": smoke,
        "seed": seed,
        **({"seeds": seeds} if seeds else {}),
        "settings": dict(settings or {}),
        "units": digest(units_of(experiment, smoke=smoke, seed=seed, settings=settings, seeds=seeds)),
        "sources": sources(experiment.name),
        "data": {name: fingerprint(data / name) for name in experiment.data},
        "pagedjax": __version__,
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
    }


def sources(name: str) -> TableRow:
    """Digests of what an experiment's rows depend on: its own files, the package, and `configs/`."""
    return {"experiment": digest([work_of(path) for path in own_files(name)]), **package_sources()}


def package_sources() -> TableRow:
    """Digests of the package's files on which rows can depend, and of `configs/`."""
    package = sorted(
        path
        for pattern in ("*.py", "*.cc")
        for path in _ROOT.rglob(pattern)
        if path.relative_to(_ROOT).parts[0].removesuffix(".py") not in _SHOW
    )
    configs = sorted(path for path in shipped("configs").rglob("*") if path.suffix in (".toml", ".json"))
    return {
        "package": digest([[path.relative_to(_ROOT).as_posix(), fingerprint(path)] for path in package]),
        "configs": digest([[path.name, fingerprint(path)] for path in configs]),
    }


def work_of(path: Path) -> str:
    """An experiment's text without its docstring and its `EXPERIMENT`: no row depends on claims, notes or labels.

    What of these is said beside the rows (kind, definition) stands in the header itself.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.lineno == 1
        named = isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == [
            "EXPERIMENT"
        ]
        if docstring or named:
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines)


def own_files(name: str) -> list[Path]:
    """An experiment's file and those beside it that it imports, directly or through another."""
    found: list[Path] = []
    queue = [catalog.path_of(name)]
    while queue:
        path = queue.pop(0)
        if path in found:
            continue
        found.append(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                beside = [node.module] if node.module else [alias.name for alias in node.names]
                queue += [path.with_name(f"{stem}.py") for stem in beside]
    return found


def digest(value: object) -> str:
    """16 hex digits of the canonical JSON of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
