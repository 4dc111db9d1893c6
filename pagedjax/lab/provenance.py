"""What fixes a result: the units, the data, and a digest of every source that rows can depend on."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
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
        for pattern in ("*.py", "*.cc", "*.h", "*.toml")
        for path in _ROOT.rglob(pattern)
        if path.relative_to(_ROOT).parts[0].removesuffix(".py") not in _SHOW
    )
    configs = sorted(path for path in shipped("configs").rglob("*") if path.suffix in (".toml", ".json"))
    return {
        "package": digest([[path.relative_to(_ROOT).as_posix(), fingerprint(path)] for path in package]),
        "configs": digest([[path.name, fingerprint(path)] for path in configs]),
    }


def work_of(path: Path) -> str:
    """The statements of an experiment that its units and its run need; of a file without an `EXPERIMENT`, all.

    No row depends on docstrings, claims, notes or plots. What of these is said beside the rows (kind, definition)
    stands in the header itself.
    """
    text = path.read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    if isinstance(nodes[0], ast.Expr):
        del nodes[0]
    makers = [
        keyword.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _names(node) == {"EXPERIMENT"}
        for keyword in node.value.keywords
        if keyword.arg in ("units", "run")
    ]
    if makers:
        nodes = _reached(nodes, makers)
    lines = text.splitlines()
    return "\n".join(_text(node, lines) for node in nodes)


def _text(node: ast.stmt, lines: Sequence[str]) -> str:
    """Of a statement, decorators and all; of an import, whatever its layout, a line."""
    if isinstance(node, ast.ImportFrom):
        names = ", ".join(sorted(f"{alias.name} as {alias.asname or alias.name}" for alias in node.names))
        return f"from {'.' * node.level}{node.module or ''} import {names}"
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _reached(nodes: list[ast.stmt], roots: Sequence[ast.AST]) -> list[ast.stmt]:
    """Those statements of a module that the roots need, by the names they use; one that defines nothing is needed."""
    nodes = [single for node in nodes for single in _one_name_each(node)]
    needed: list[ast.stmt] = []
    queue: list[ast.AST] = [*(node for node in nodes if not _names(node)), *roots]
    while queue:
        root = queue.pop()
        if isinstance(root, ast.stmt):
            needed.append(root)
        used = {node.id for node in ast.walk(root) if isinstance(node, ast.Name)}
        queue += [node for node in nodes if node not in needed and node not in queue and _names(node) & used]
    return [node for node in nodes if node in needed]


def _one_name_each(node: ast.stmt) -> list[ast.stmt]:
    """An import of several names as several imports; anything else as it is."""
    if isinstance(node, ast.ImportFrom):
        return [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]
    return [node]


def _names(node: ast.stmt) -> set[str]:
    """What a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    found = [name for target in targets if target is not None for name in ast.walk(target)]
    return {name.id for name in found if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


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
