"""Whose turn it is: a fair lock between threads that share an engine, and mailboxes of those who wait for outputs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pagedjax.engine.interrupts import HeldInterrupts
from pagedjax.engine.request import RequestOutput


class FairLock:
    """A reentrant lock that goes to whoever has waited longest.

    A lock of Python's own is often taken again by the thread that has just let it go: one that makes steps in a loop
    would keep the others from ever adding a request.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    @contextmanager
    def held(self, interrupts: HeldInterrupts) -> Iterator[None]:
        """Wait for the lock and hold it; only the waiting can be interrupted.

        Args:
            interrupts: The context under which it is taken, so that it is let go in any case.
        """
        self._acquire(interrupts)
        try:
            yield
        finally:
            self._release()

    def _acquire(self, interrupts: HeldInterrupts) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):  # free, with nobody waiting, or ours
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            waiting = (me, turn)
            self._queue.append(waiting)
        try:
            with interrupts.allowed():
                turn.acquire()  # `_release` opens it, once the lock is ours
        except BaseException:
            with self._mutex:
                given = waiting not in self._queue
                if not given:
                    self._queue.remove(waiting)
            if given:
                self._release()
            raise

    def _release(self) -> None:
        with self._mutex:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._queue:
                self._owner, turn = self._queue.popleft()
                self._depth = 1
                turn.release()


class Mailbox:
    """The newest output of each request that somebody waits for, until he takes it."""

    def __init__(self) -> None:
        self._outputs: dict[str, RequestOutput] = {}

    def put(self, output: RequestOutput) -> None:
        self._outputs[output.request_id] = output

    def take(self) -> list[RequestOutput]:
        """What is new since the last call."""
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())
