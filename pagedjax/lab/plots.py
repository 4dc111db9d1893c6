"""Small multiples of any tidy table."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from pagedjax.lab.claims import TableRow
from pagedjax.lab.tables import is_number
from pagedjax.paths import AnyPath, replace_bytes

FORMS = (".png", ".svg", ".pdf")


def import_matplotlib() -> None:
    """Have matplotlib draw to files.

    Raises:
        ModuleNotFoundError: It is missing; the message names the extra that brings it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib; pip install 'pagedjax[plot]'") from None
    matplotlib.use("Agg")


def check_plot(path: AnyPath) -> None:
    """Refuse a plot that could not be written, before the work that it would show.

    Raises:
        ValueError: A suffix that is none of `FORMS`, or no folder.
        ModuleNotFoundError: matplotlib is missing.
    """
    if path.suffix not in FORMS:
        raise ValueError(f"plot {path}: must end in {', '.join(FORMS)}; try {path.stem}.png")
    if isinstance(path, Path) and not path.parent.is_dir():
        raise ValueError(f"plot {path}: no such folder as {path.parent}; make it first")
    import_matplotlib()


def small_multiples(
    table: Sequence[TableRow],
    path: AnyPath,
    *,
    x: str,
    y: str,
    panel: str = "",
    hue: str = "",
    log: bool = False,
    kind: str = "lines",
) -> AnyPath:
    """A panel for each value of `panel`, in it a line for each of `hue`; intervals where y_low and y_high stand beside.

    Args:
        table: Rows; those in which `y` is unknown are left out.
        path: One of `FORMS`.
        x / y / panel / hue: Columns.
        log: A logarithmic x axis.
        kind: "lines", "steps" (as of a distribution) or "bars", which begin at 0.

    Raises:
        ValueError: A column that is not there, or a form of file that is none.
        ModuleNotFoundError: matplotlib is missing; the message names the extra that brings it.
    """
    columns = list(dict.fromkeys(c for row in table for c in row))
    for option, name in (("x", x), ("y", y), ("panel", panel), ("hue", hue)):
        if name and name not in columns:
            raise ValueError(f"{option}={name}: must be one of {', '.join(columns)}")
    check_plot(path)
    import matplotlib
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(row.get(panel) for row in table)) if panel else [None]
    wide = min(len(panels), 3)
    high = -(-len(panels) // wide)
    size = (max(3.6 * wide, 6.4 if len(panels) == 1 else 0), max(3 * high, 4 if len(panels) == 1 else 0))
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure, grid = plt.subplots(
            high, wide, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for number, value in enumerate(panels):
            axes = grid[number // wide][number % wide]
            own = [r for r in table if (not panel or r.get(panel) == value) and r.get(y) is not None]
            _draw(axes, own, x, y, hue, log, kind)
            axes.set_title(f"{panel} = {value}" if panel else "", fontsize=9)
        for empty in range(len(panels), wide * high):
            grid[empty // wide][empty % wide].axis("off")
        save(figure, path, dpi=110)
        plt.close(figure)
    return path


def save(figure: Any, path: AnyPath, *, dpi: int) -> None:
    """Write a figure of matplotlib's in the form of the path's suffix, one of `FORMS`, without a date."""
    undated = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[path.suffix]
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi, metadata={undated: None})
    replace_bytes(path, drawn.getvalue())


def _draw(axes: Any, rows: list[TableRow], x: str, y: str, hue: str, log: bool, kind: str) -> None:
    """One panel."""
    hues = list(dict.fromkeys(row.get(hue) for row in rows)) if hue else [None]
    numbers = all(is_number(row[x]) for row in rows)
    ticks = list(dict.fromkeys(str(row[x]) for row in rows))
    for number, line in enumerate(hues):
        own = [r for r in rows if not hue or r.get(hue) == line]
        if kind == "bars":
            width = 0.8 / len(hues)
            places = [ticks.index(str(r[x])) + (number - (len(hues) - 1) / 2) * width for r in own]
            axes.bar(places, [r[y] for r in own], width, label=str(line))
            continue
        at = [r[x] for r in own] if numbers else [str(r[x]) for r in own]
        style: dict[str, Any] = (
            {"drawstyle": "steps-post"} if kind == "steps" else {"marker": "o", "markersize": 3}
        )
        (drawn,) = axes.plot(at, [r[y] for r in own], label=str(line), **style)
        if own and f"{y}_low" in own[0]:
            ends = [r[f"{y}_low"] for r in own], [r[f"{y}_high"] for r in own]
            axes.fill_between(at, *ends, color=drawn.get_color(), alpha=0.2)
    if kind == "bars":
        axes.set_xticks(range(len(ticks)), ticks, rotation=30, ha="right", fontsize=7)
        axes.set_ylim(bottom=0)
    elif log and numbers:
        axes.set_xscale("log")
    if hue and rows:
        axes.legend(title=hue, fontsize=7, title_fontsize=7)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
