"""Ctrl-C that waits until the books are written: a step counts as a whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self


class HeldInterrupts:
    """While the context lasts, Ctrl-C is only noted; it is raised inside `allowed`, or at the end.

    Changes nothing where Ctrl-C would not raise KeyboardInterrupt here: outside the main thread, or under a handler
    that is neither Python's own nor that of a context around this one. The second Ctrl-C does not wait, so that a hang
    can be left.
    """

    def __enter__(self) -> Self:
        self._noted = self._allowed = False
        self._before: Any = signal.getsignal(signal.SIGINT)
        self._active = threading.current_thread() is threading.main_thread() and (
            self._before is signal.default_int_handler
            or isinstance(getattr(self._before, "__self__", None), HeldInterrupts)
        )
        if self._active:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)
            if self._noted and kind is None:
                self._before(signal.SIGINT, None)  # raises, or the context around notes it

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A part of the context that may be interrupted at any place."""
        before, self._allowed = self._allowed, True
        try:
            self.raise_noted()
            yield
        finally:
            self._allowed = before

    def raise_noted(self) -> None:
        """Raise what was noted: a place where the caller may stop."""
        if self._noted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        if self._noted or self._allowed:
            self._before(number, frame)  # raises, or the context around notes it
        else:
            self._noted = True
