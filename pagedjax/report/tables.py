"""Rows of plain data as a terminal table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def render(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows as lines, or as columns where there are few rows of many figures.

    Args:
        title: Above the table.
        rows: Equal keys share a column; keys that some rows lack stay empty there. Numbers are
            right-aligned, floats shown with three significant digits.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), show_edge=False)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if len(rows) < len(keys) > 6:
        table.show_header = False
        table.add_column()
        for _ in rows:
            table.add_column(justify="right", no_wrap=True)
        for key in keys:
            table.add_row(_words(key), *(cell(row.get(key)) for row in rows))
        return table
    for key in keys:
        numeric = all(isinstance(row.get(key), int | float | None) for row in rows)
        table.add_column(_words(key), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(key)) for key in keys))
    return table


def _words(key: str) -> str:
    return key.replace("_", " ")


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
