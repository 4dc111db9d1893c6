"""What a notebook shows of a result: a small table and lines as HTML and SVG, self-contained, on light and dark ground.

No script, no style sheet and no file beside it: text takes the page's colour, lines have middle tones and differ by
their dashes, too. Everything that comes from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

MOST_ROWS = 20
MOST_POINTS = 200  # of a line; more would be drawn on top of each other
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 220, 46, 130, 10, 34
_PLACE = "text-align:left;padding:0 1em 0 0"
# Contrast of at least 3 on white and on black.
_STROKES = (
    ("#2f7fd0", ""),
    ("#d1602b", "6 3"),
    ("#2a9463", "2 3"),
    ("#a566c9", "8 3 2 3"),
    ("#8a8030", "12 3"),
)


def card(title: str, *parts: str) -> str:
    """Parts below a title, in one element."""
    return (
        f'<div style="font-size:13px;line-height:1.4;max-width:60em"><div><b>{escape(title)}</b></div>'
        + "".join(parts)
        + "</div>"
    )


def note(text: str) -> str:
    """A line of text."""
    return f'<div style="opacity:.8">{escape(text)}</div>'


def table(rows: Sequence[Mapping[str, Any]], *, most: int = MOST_ROWS) -> str:
    """Rows of plain values; keys that differ are columns, what a row lacks or does not know is "unknown".

    Args:
        rows: Equal keys share a column.
        most: Rows that are shown; a line says how many are left out.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f'<th scope="col" style="{_PLACE}">{escape(key.replace("_", " "))}</th>' for key in keys)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_PLACE}">{escape(_cell(row.get(key)))}</td>' for key in keys) + "</tr>"
        for row in rows[:most]
    )
    more = note(f"… {len(rows) - most} more rows") if len(rows) > most else ""
    return (
        f'<table style="font-size:inherit"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}'
    )


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "unknown"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, log_x: bool = False) -> str:
    """Lines over one axis, each named at its end; y begins at 0.

    Args:
        series: Name → (x, y) ascending in x; points that are not finite are left out, and of many points some.
        x / y: Names of the axes.
        log_x: Powers of two lie equally far apart; every x must be above 0.
    """
    drawn = {name: _thinned([p for p in line if all(map(math.isfinite, p))]) for name, line in series.items()}
    drawn = {name: line for name, line in drawn.items() if line}
    if not drawn:
        return note("nothing to draw")
    scale = math.log2 if log_x else float
    points = [point for line in drawn.values() for point in line]
    low, high = scale(min(p[0] for p in points)), scale(max(p[0] for p in points))
    top = max(p[1] for p in points) or 1.0
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        share = (scale(point[0]) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + share * wide, 1), round(_TOP + (1 - point[1] / top) * tall, 1)

    out = [
        f'<svg role="img" aria-label="{escape(f"{y} over {x}: " + ", ".join(drawn))}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width:100%;height:auto" '
        'font-family="sans-serif" font-size="11" fill="currentColor">',
        f'<path d="M{_LEFT} {_TOP}V{_TOP + tall}H{_LEFT + wide}" fill="none" stroke="currentColor" '
        'stroke-opacity=".5"/>',
        _text(_LEFT - 4, _TOP + 8, _cell(float(top)), "end"),
        _text(_LEFT - 4, _TOP + tall, "0", "end"),
        _text(_LEFT, _HEIGHT - 20, _cell(min(p[0] for p in points)), "start"),
        _text(_LEFT + wide, _HEIGHT - 20, _cell(max(p[0] for p in points)), "end"),
        _text(_LEFT + wide / 2, _HEIGHT - 6, f"{x}{' (log)' if log_x else ''}", "middle"),
        f'<text x="12" y="{_TOP + tall / 2}" text-anchor="middle" '
        f'transform="rotate(-90 12 {_TOP + tall / 2})">{escape(y)}</text>',
    ]
    labels = []
    for number, (name, line) in enumerate(drawn.items()):
        again = number // len(_STROKES)  # the colours a second time, with other dashes
        colour, dashes = _STROKES[number % len(_STROKES)][0], _STROKES[(number + again) % len(_STROKES)][1]
        path = "L".join(f"{at[0]} {at[1]}" for at in map(place, line))
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        if len(line) == 1:
            out.append('<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*place(line[0]), colour))
        labels.append((*place(line[-1]), name, colour))
    below = -math.inf
    for at_x, at_y, name, colour in sorted(labels, key=lambda label: label[1]):
        below = max(at_y + 4, below + 13)  # labels do not lie on each other
        out.append(_text(at_x + 6, below, name, "start", colour))
    return "".join(out) + "</svg>"


def _text(x: float, y: float, text: str, anchor: str, colour: str = "currentColor") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _thinned(line: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `MOST_POINTS`, the first and the last among them."""
    if len(line) <= MOST_POINTS:
        return line
    last = len(line) - 1
    return [line[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]
