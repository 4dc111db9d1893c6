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
    that is not Python's own. The second Ctrl-C does not wait, so that a hang can be left.
    """

    def __enter__(self) -> Self:
        self._noted = self._allowed = False
        self._active = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._active:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._noted and kind is None:
                raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A part of the context that may be interrupted at any place."""
        self._allowed = True
        try:
            if self._noted:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False

    def _note(self, number: int, frame: Any) -> None:
        if self._noted or self._allowed:
            signal.default_int_handler(number, frame)
        self._noted = True
