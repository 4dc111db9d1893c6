"""One progress bar for all long work, on stderr, so that stdout holds results alone; names in it stay text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def shown(text: str) -> str:
    """Text from outside, names of files above all, as a piece of one line that turns nothing around.

    What a terminal would obey or hide (ends of lines, marks of writing direction, escapes) is spelled.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def bar(
    label: str, total: float | None, enabled: bool = True, unit: str = ""
) -> Iterator[Callable[[float], None]]:
    """Show a bar while the block runs.

    Args:
        label: What is being done.
        total: Amount of work; None shows activity without an end.
        enabled: False draws nothing.
        unit: "B" counts in bytes, with speed; anything else counts things.

    Yields:
        A function that moves the bar on by an amount.
    """
    if not enabled:
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(escape(shown(label)), total=total)
        yield lambda amount: progress.advance(task, amount)
