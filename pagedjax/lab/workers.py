"""Who does the units: this process, processes beside it, or any executor that a cluster's client gives.

There is one interface, that of `concurrent.futures.Executor`. A unit is a call of an importable function with plain
values, so an executor may run it on another machine that has pagedjax installed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)


class Here(Executor):
    """Runs each call in this process at the moment it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call, and give a future that is done; Ctrl-C comes through."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def local(jobs: int) -> Iterator[Executor]:
    """An executor of so many processes; of this one alone where `jobs` is 1.

    Where the body raises (Ctrl-C, a result that cannot be written) the processes end at once, in the middle of what
    they do. They end, too, with the process that asked, even if that was killed.
    """
    if jobs == 1:
        yield Here()
        return
    others = set(active_children())
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=join, initargs=(sys.path,)) as pool:
        try:
            yield pool
        except BaseException:  # the executor would wait for everything submitted
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def finished(
    executor: Executor, calls: Iterable[tuple[K, Callable[..., Any], tuple[Any, ...]]], *, ahead: int = 0
) -> Iterator[tuple[K, Any]]:
    """Results of calls, each as soon as it is there.

    Args:
        executor: Who does them.
        calls: (key, function, arguments) of each.
        ahead: Calls submitted and not yet finished, at most; 0: all at once, or one at a time for `Here`.

    Raises:
        Exception: The first that a call raised, once those that were running have been yielded; no further call
            is begun then.
    """
    limit = ahead or (1 if isinstance(executor, Here) else sys.maxsize)
    coming = iter(calls)
    running: dict[Future[Any], K] = {}
    failure: BaseException | None = None
    while True:
        while failure is None and len(running) < limit and (call := next(coming, None)) is not None:
            key, function, arguments = call
            running[executor.submit(function, *arguments)] = key
        if not running:
            break
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            key = running.pop(future)
            if future.cancelled():
                continue
            if error := future.exception():
                failure = failure or error
                for other in running:
                    other.cancel()
                continue
            yield key, future.result()
    if failure is not None:
        raise failure


def join(path: list[str]) -> None:
    """Begin a worker process: find what the asker finds, and end with it."""
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; who asked decides
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    asker = parent_process()
    if asker is not None:
        asker.join()
        os._exit(1)
