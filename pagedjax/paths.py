"""Where things are: what is kept between runs, and the files that come with the package."""

from __future__ import annotations

from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


def user_cache_dir() -> Path:
    """Models, compiled programs and the native library, unless a caller says otherwise."""
    return platformdirs.user_cache_path("pagedjax", appauthor=False)


def checkout() -> Path | None:
    """The folder of the sources that this package is imported from; None where it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "experiments").is_dir() else None


def shipped(folder: str) -> Path:
    """`experiments/` or `configs/`: beside the package in a checkout, inside it in an installed wheel.

    Raises:
        FileNotFoundError: Neither place has it: the package was copied without its files.
    """
    root = checkout()
    place = _PACKAGE / "shipped" / folder if root is None else root / folder
    if not place.is_dir():
        raise FileNotFoundError(
            f"{place}: the installed package lacks it; install pagedjax from a wheel or a checkout"
        )
    return place


def shipped_file(folder: str, name: str | Path) -> Path:
    """A file by its path, or one that comes with the package by its name ("a100-40gb", with or without suffix).

    Args:
        folder: Below `configs/`: "hardware", "shapes" or "serve".
        name: Path of a file, or the name of one in that folder.

    Raises:
        ValueError: Neither exists; the message lists the names.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = sorted((p for p in (shipped("configs") / folder).iterdir() if p.is_file()), key=lambda p: p.stem)
    for file in known:
        if str(name) in (file.name, file.stem):
            return file
    raise ValueError(
        f"{name}: must be a file, or one of {', '.join(file.stem for file in known)} (configs/{folder}/)"
    )
