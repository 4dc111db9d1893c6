"""Which experiments there are, and where: one file each in `experiments/`, in a checkout and in a wheel alike."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from pagedjax.lab.experiment import Experiment
from pagedjax.paths import checkout, shipped

_PACKAGE = "pagedjax_experiments"  # a name that no other package on the path has


def folder() -> Path:
    """Where the questions lie."""
    return shipped("experiments")


def default_data() -> Path:
    """Folder that holds data/ where none is given: `shared` beside a checkout, else the current folder."""
    root = checkout()
    return Path.cwd() if root is None else root.parent / "shared"


def names() -> list[str]:
    """All experiments, by file name."""
    return sorted(p.stem.replace("_", "-") for p in folder().glob("*.py") if not p.stem.startswith("_"))


def path_of(name: str) -> Path:
    """The file of an experiment."""
    return folder() / f"{name.replace('-', '_')}.py"


def module(name: str) -> ModuleType:
    """The module of an experiment, imported from where the package's own experiments lie.

    Raises:
        ValueError: No such experiment.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"experiment={name}: must be one of {', '.join(names())}{remedy}")
    if _PACKAGE not in sys.modules:
        # Not found by the path: an installed wheel's lie inside the package, and others may have an experiments/.
        spec = importlib.machinery.ModuleSpec(_PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [str(folder())]
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name.replace('-', '_')}")


def load(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ValueError: No such experiment.
    """
    experiment: Experiment = module(name).EXPERIMENT
    return experiment
