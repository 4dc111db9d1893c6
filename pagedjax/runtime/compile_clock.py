"""Seconds that calls of jitted functions spend on tracing and compiling, apart from those they compute."""

from __future__ import annotations

import time
from typing import Any


class CompileClock:
    """Adds up the seconds of calls that made a new program.

    Such a call returns once the program is compiled (or read from disk) and started; it computes on beside the host.

    Attributes:
        seconds: Since it was last set to 0.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, function: Any, *args: Any) -> Any:
        """Call a jitted function."""
        started, programs = time.perf_counter(), function._cache_size()
        out = function(*args)
        if function._cache_size() > programs:
            self.seconds += time.perf_counter() - started
        return out
