"""How figures are drawn: small multiples, names beside the curves, intervals, bars from zero, colours for grey print.

Nothing has a legend: a curve is named where it ends, a bar where it ends. Curves of one panel differ in colour, in
marker and in line, so that they can be told apart in grey, too; those that are equal are one curve with both names.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.lab.claims import Estimate, TableRow

# Curves that differ by less, relatively, at every point lie under one another.
HIDDEN = 0.01
# Dark to light and back, of hues that most colour-blind readers tell apart (Okabe and Ito's, two of them darker).
_COLOURS = (
    "#000000",
    "#0072b2",
    "#d55e00",
    "#007a5a",
    "#b0568c",
    "#56b4e9",
    "#b8860b",
    "#666666",
    "#6a3d9a",
    "#7f3b08",
)
_MARKERS = "os^DvPX<>*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
_FILLS = ("#1b4965", "#f4a259", "#d9d9d9", "#8cb369", "#ffffff", "#bc4b51")
SMALL, TINY = 8.0, 7.0


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        label: Its name.
        x, y: Of its points.
        half: Half the 95 % interval of each point; empty: there is none.
        printed: From the paper: crosses without a line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    half: Sequence[float] = ()
    printed: bool = False


@dataclass
class _Ends:
    """Names to be placed once the panel has its size: (x, y, name, colour) of each."""

    axes: Any
    ends: list[tuple[float, float, str, str]] = field(default_factory=list)


def colour(number: int) -> str:
    """Of the curve of a number, for what else belongs to it."""
    return _COLOURS[number % len(_COLOURS)]


def mean_curve(rows: Iterable[TableRow], x: str, y: str, label: str) -> Series:
    """Means of a column over the rows of each x, with the 95 % interval where there are several."""
    groups: dict[float, list[float]] = {}
    for row in rows:
        if row.get(y) is not None and row.get(x) is not None:
            groups.setdefault(row[x], []).append(row[y])
    found = {at: Estimate.of(values) for at, values in sorted(groups.items())}
    kept = {at: estimate for at, estimate in found.items() if estimate is not None}
    several = any(len(values) > 1 for values in groups.values())
    half = [e.half for e in kept.values()] if several else []
    return Series(label, list(kept), [e.mean for e in kept.values()], half)


def panels(
    figure: Any,
    titles: Sequence[str],
    *,
    columns: int = 0,
    share_y: bool = False,
    height: float = 2.5,
    width: float = 0.0,
) -> list[Any]:
    """Small multiples, one for each title, in rows of `columns` (0: at most three); sizes in inches."""
    columns = columns or min(len(titles), 3)
    rows = -(-len(titles) // columns)
    figure.set_size_inches(columns * (width or max(2.9, 7.4 / columns)), rows * height + 0.35)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    made = []
    for place, axes in enumerate(grid.flat):
        if place >= len(titles):
            axes.remove()
            continue
        axes.set_title(titles[place], fontsize=SMALL, loc="left")
        axes.tick_params(labelsize=TINY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.3, color="#cccccc")
        axes.set_axisbelow(True)
        made.append(axes)
    return made


def label_axes(axes: Any, x: str = "", y: str = "") -> None:
    """What stands on the axes."""
    axes.set_xlabel(x, fontsize=SMALL)
    axes.set_ylabel(y, fontsize=SMALL)


def curves(
    axes: Any,
    series: Sequence[Series],
    *,
    named: bool = True,
    style: Mapping[str, int] | None = None,
    dodge: float = 1.0,
) -> None:
    """Draw curves and name each where it ends.

    Args:
        axes: A panel.
        series: Those without a point are left out; equal ones become one, and so do those within a hundredth (≈).
        named: Names beside the curves; off in the second and later panels of equal series.
        style: Label → number of its style, so that a name looks alike in all panels.
        dodge: Factor of x from one curve to the next, which sets their intervals side by side on a log axis.
    """
    ends = _ends_of(axes)
    merged = _merged(series)
    for number, one in enumerate(merged):
        shift = dodge ** (number - (len(merged) - 1) / 2)
        one = Series(one.label, [x * shift for x in one.x], one.y, one.half, one.printed)
        first = re.split(" [=≈]", one.label)[0]
        place = number if style is None else style.get(first, number)
        ink = colour(place)
        if one.printed:
            axes.plot(one.x, one.y, "x", color=ink, markersize=6, markeredgewidth=1.5)
        else:
            look: dict[str, Any] = {
                "marker": _MARKERS[place % len(_MARKERS)],
                "color": ink,
                "linewidth": 1.3,
            }
            look |= {"linestyle": _DASHES[place % len(_DASHES)], "markersize": 3.5 if len(one.x) < 40 else 0}
            if len(one.x) >= 40:
                look["marker"] = "None"
            axes.plot(one.x, one.y, **look)
            if any(one.half):
                look = {"fmt": "none", "ecolor": ink, "elinewidth": 0.9, "capsize": 2}
                _whiskers(axes.errorbar(one.x, one.y, yerr=one.half, **look))
        if named:
            ends.ends.append((one.x[-1], one.y[-1], one.label, ink))


def _whiskers(drawn: Any) -> None:
    """The ends of intervals are lines to matplotlib, and no curves."""
    for cap in drawn[1]:
        cap.set_gid("interval")


def _merged(series: Sequence[Series]) -> list[Series]:
    """Without empty ones; those with equal points, or too near to be told apart, under one name."""
    kept: list[Series] = []
    for one in series:
        if not len(one.y):
            continue
        twin = next(
            (
                i
                for i, other in enumerate(kept)
                if not other.printed
                and not one.printed
                and list(other.x) == list(one.x)
                and _equal(other.y, one.y, HIDDEN)
            ),
            None,
        )
        if twin is None:
            kept.append(one)
        else:
            old = kept[twin]
            sign = "=" if _equal(old.y, one.y, 1e-9) else "≈"
            joint = f" {sign}\n" if len(re.findall(" [=≈]", old.label)) % 3 == 2 else f" {sign} "
            kept[twin] = Series(f"{old.label}{joint}{one.label}", old.x, old.y, old.half)
    return kept


def _equal(a: Sequence[float], b: Sequence[float], share: float) -> bool:
    return all(math.isclose(p, q, rel_tol=share, abs_tol=1e-12) for p, q in zip(a, b))


def bars(
    axes: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    half: Mapping[str, Sequence[float]] | None = None,
    form: Callable[[float], str] = lambda value: f"{value:.3g}",
) -> None:
    """Lying bars from zero, a group for each name, a bar for each series, its value and series named where it ends."""
    count = len(series)
    high = 0.8 / count
    most = max(
        (v or 0.0) + (half or {}).get(s, [0.0] * len(names))[i]
        for s, vs in series.items()
        for i, v in enumerate(vs)
    )
    for k, (label, values) in enumerate(series.items()):
        for i, value in enumerate(values):
            if value is None:
                continue
            y = i - 0.4 + (k + 0.5) * high
            error = 0.0 if half is None else half[label][i]
            look: dict[str, Any] = {
                "facecolor": _FILLS[k % len(_FILLS)],
                "hatch": _HATCHES[k % len(_HATCHES)],
            }
            axes.barh(y, value, 0.92 * high, edgecolor="#333333", linewidth=0.6, **look)
            if error:
                look = {"fmt": "none", "ecolor": "black", "elinewidth": 0.9, "capsize": 2}
                _whiskers(axes.errorbar(value, y, xerr=error, **look))
            text = form(value) + (f"  {label}" if count > 1 and label else "")
            axes.annotate(
                text,
                (value + error, y),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=TINY,
                va="center",
            )
    axes.set_yticks(range(len(names)), names, fontsize=TINY)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.05 or 1.0)
    axes.grid(axis="y", visible=False)


def dots(
    axes: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    log: bool = False,
    key: bool = True,
    room: int = 0,
) -> None:
    """A row for each name, a dot for each series; the series are named above, beside the shape of their dots.

    Args:
        axes: A panel.
        names: Of the rows, from the top.
        series: Label → a value for each name, None where there is none.
        log: A logarithmic axis.
        key: Name the series here; off where a panel beside it does.
        room: Lines kept free above the rows at least, so that panels of a row line up.
    """
    room = max(room, len(series) if len(series) > 1 and key else 0)
    for i, (label, values) in enumerate(series.items()):
        there = [(value, y) for y, value in enumerate(values) if value is not None]
        ink, marker = colour(i), _MARKERS[i % len(_MARKERS)]
        hollow = "white" if i % 2 else ink
        axes.plot(
            [v for v, _ in there],
            [y for _, y in there],
            marker,
            color=ink,
            markersize=4.5,
            markerfacecolor=hollow,
        )
        if key and len(series) > 1 and there:
            high = -1.0 - 0.9 * i
            axes.plot([0.03], [high], marker, color=ink, markersize=4.5, markerfacecolor=hollow, clip_on=False,
                      transform=axes.get_yaxis_transform(), gid="key")  # fmt: skip
            axes.annotate(
                label,
                (0.07, high),
                xycoords=axes.get_yaxis_transform(),
                fontsize=TINY,
                color=ink,
                va="center",
            )
    axes.set_yticks(range(len(names)), names, fontsize=TINY)
    axes.set_ylim(len(names) - 0.5, -0.7 - 0.9 * room)
    axes.grid(axis="y", linewidth=0.3, color="#cccccc")
    if log:
        plain_log(axes.xaxis, axes.set_xscale)


def plain_log(axis: Any, set_scale: Callable[..., None], base: int = 10) -> None:
    """A log scale whose ticks are plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    set_scale("log", base=base)
    low, high = axis.get_view_interval()
    near = base == 10 and high < 300 * low
    axis.set_major_locator(LogLocator(base=base, subs=(1, 2, 5) if near else (1,), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def short(value: float) -> str:
    """4096 as 4,096, 30000 as 30k, 2e6 as 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:g}{letter}"
    return f"{value:,g}" if value < 1e4 else f"{value:g}"


def at_each(axes: Any, values: Iterable[float], *, base: int = 0) -> None:
    """Ticks at the values that were measured, as plain numbers; `base`: on a log scale of it."""
    from matplotlib.ticker import NullLocator

    places = sorted(set(values))
    if base:
        axes.set_xscale("log", base=base)
    axes.set_xticks(places, [short(value) for value in places], fontsize=TINY)
    axes.xaxis.set_minor_locator(NullLocator())


def from_zero(*many: Any) -> None:
    """The y axis begins at 0, with some room above."""
    for axes in many:
        axes.set_ylim(bottom=0)


def rule(axes: Any, y: float, text: str) -> None:
    """A thin line across a panel, named at its left end; after the curves, which say how high the panel is."""
    axes.axhline(y, color="#555555", linewidth=0.7, linestyle=":", gid="rule")
    below = _share(axes, (axes.get_xlim()[0], y, "", "")) > 0.85
    axes.annotate(
        text, (0.01, y), xycoords=("axes fraction", "data"), xytext=(0, -2 if below else 2),
        textcoords="offset points", fontsize=TINY, color="#555555", va="top" if below else "bottom",
    )  # fmt: skip


def _ends_of(axes: Any) -> _Ends:
    """The names that wait for their place, kept with the figure."""
    figure = axes.get_figure()
    waiting: dict[int, _Ends] = figure.__dict__.setdefault("pagedjax_ends", {})
    return waiting.setdefault(id(axes), _Ends(axes))


def place_names(figure: Any) -> None:
    """Put the names of all curves beside their ends, pushed apart where they would cover each other.

    The figure has its final size and limits; call it once.
    """
    figure.draw_without_rendering()  # panels get their size
    for waiting in figure.__dict__.pop("pagedjax_ends", {}).values():
        axes = waiting.axes
        tall = axes.get_window_extent().height * 72 / figure.dpi  # points
        ends = sorted(waiting.ends, key=lambda end: (_share(axes, end), end[0]))
        places = [_share(axes, end) * tall for end in ends]
        spots = _apart(places, [1.5 * TINY * (1 + name.count("\n")) for _, _, name, _ in ends], tall)
        for (x, y, name, ink), spot, place in zip(ends, spots, places):
            right = (1.0, spot / tall)
            moved = abs(spot - place) > 1 or x < axes.get_xlim()[1] * 0.999
            leader = {"arrowstyle": "-", "color": ink, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2}
            axes.annotate(
                name, (x, y), xytext=right, xycoords="data", textcoords=_beside(axes), fontsize=TINY, color=ink,
                va="center", ha="left", annotation_clip=False,
                arrowprops=leader if moved else None,
            )  # fmt: skip


def _beside(axes: Any) -> Any:
    """Coordinates of a name: 6 points right of the panel, by share of its height."""
    from matplotlib.transforms import ScaledTranslation

    return axes.transAxes + ScaledTranslation(6 / 72, 0, axes.get_figure().dpi_scale_trans)


def _share(axes: Any, end: tuple[float, float, str, str]) -> float:
    """Where an end is between bottom and top of its panel."""
    _, high = axes.transAxes.inverted().transform(axes.transData.transform((end[0], end[1])))
    return min(max(float(high), 0.0), 1.0)


def _apart(places: Sequence[float], heights: Sequence[float], tall: float) -> list[float]:
    """Ascending places moved as little as a sweep up and a sweep down need for names of such heights not to touch."""
    spots = list(places)
    for before, after in itertools.pairwise(range(len(spots))):
        spots[after] = max(spots[after], spots[before] + (heights[before] + heights[after]) / 2)
    if spots and spots[-1] > tall:
        spots[-1] = tall
        for after, before in itertools.pairwise(range(len(spots) - 1, -1, -1)):
            spots[before] = min(spots[before], spots[after] - (heights[before] + heights[after]) / 2)
    return spots
