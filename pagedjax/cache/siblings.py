"""Siblings: a sorted list of any length in which an insert moves a bounded number of entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

_MOST = 256  # entries of a part; a fuller one is cut in two


class Siblings:
    """What may follow one prefix, sorted, so that the nearest is found by looking at its neighbours.

    Equal items may be in it several times. Items are compared by `<` alone: bytes, or tuples that begin
    with bytes; comparing those takes no Python code.
    """

    __slots__ = ("_lasts", "_parts")

    def __init__(self) -> None:
        self._parts: list[list[Any]] = []  # none empty
        self._lasts: list[Any] = []  # the last item of each part

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part

    def add(self, item: Any) -> None:
        """Put an item in its place."""
        if not self._parts:
            self._parts.append([item])
            self._lasts.append(item)
            return
        at = min(bisect_left(self._lasts, item), len(self._parts) - 1)
        part = self._parts[at]
        insort(part, item)
        if len(part) > _MOST:
            half = len(part) // 2
            self._parts[at : at + 1] = [part[:half], part[half:]]
            self._lasts[at : at + 1] = [part[half - 1], part[-1]]
        else:
            self._lasts[at] = part[-1]

    def remove(self, item: Any) -> None:
        """Take an item out, one if there are several.

        Raises:
            KeyError: It is not there.
        """
        at = bisect_left(self._lasts, item)
        part = self._parts[at] if at < len(self._parts) else []
        place = bisect_left(part, item)
        if place == len(part) or part[place] != item:
            raise KeyError(item)
        del part[place]
        if not part:
            del self._parts[at], self._lasts[at]
        else:
            self._lasts[at] = part[-1]

    def around(self, item: Any) -> list[Any]:
        """The nearest smaller item and the nearest that is not smaller, those that there are."""
        at = bisect_left(self._lasts, item)
        if at == len(self._parts):
            return self._lasts[-1:]
        part = self._parts[at]
        place = bisect_left(part, item)
        if place:
            return part[place - 1 : place + 1]
        return [self._lasts[at - 1], part[0]] if at else part[:1]

    def before(self, item: Any) -> Iterator[Any]:
        """Items smaller than this one, the nearest first."""
        at = bisect_left(self._lasts, item)
        if at < len(self._parts):
            yield from reversed(self._parts[at][: bisect_left(self._parts[at], item)])
        for part in reversed(self._parts[:at]):
            yield from reversed(part)

    def after(self, item: Any) -> Iterator[Any]:
        """This item, if it is there, and greater ones, the nearest first."""
        at = bisect_left(self._lasts, item)
        if at < len(self._parts):
            part = self._parts[at]
            for i in range(bisect_left(part, item), len(part)):
                yield part[i]
            for later in self._parts[at + 1 :]:
                yield from later
