"""Units on other machines: an executor over a dask cluster that is there, and data that follows them by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from pagedjax.lab import catalog, provenance
from pagedjax.lab.claims import TableRow
from pagedjax.lab.experiment import Unit
from pagedjax.lab.workers import local
from pagedjax.paths import AnyPath, place, user_cache_dir

_RETRIES = 3  # a unit whose worker was lost is begun again so often


class LacksData(RuntimeError):
    """A worker has not got some files; `names` lists them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.names = names


@contextmanager
def workers_on(on: str) -> Iterator[Executor]:
    """The executor that a place names.

    Args:
        on: "local:4", so many processes of this machine, or "dask://host:port", an existing cluster's scheduler.

    Raises:
        ValueError: It is neither.
        ModuleNotFoundError: dask's `distributed` is missing; the message names the extra that brings it.
        ConnectionError: No scheduler answers there.
    """
    kind, _, rest = on.partition(":")
    if kind == "local" and rest.isdigit() and int(rest) >= 1:
        with local(int(rest)) as executor:
            yield executor
        return
    host, colon, port = rest.removeprefix("//").rpartition(":")
    if kind != "dask" or not rest.startswith("//") or not (host and colon and port.isdigit()):
        raise ValueError(f"--on {on}: must be local:PROCESSES or dask://HOST:PORT; try local:4")
    with Cluster(on, f"tcp://{host}:{port}") as cluster:
        yield cluster


class Cluster(Executor):
    """A dask cluster with the interface of `concurrent.futures`; its workers have this very pagedjax installed.

    A worker that lacks a file of data is sent it once, by its content. What a lost worker was at is done by another.

    Args:
        name: As the user gave it, for messages.
        address: The scheduler's, as dask writes it.
        timeout_s: Until the scheduler must have answered.
    """

    def __init__(self, name: str, address: str, timeout_s: float = 10.0) -> None:
        try:
            from distributed import Client
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"--on {name}: needs dask's distributed; pip install 'pagedjax[cluster]'"
            ) from None
        self._name = name
        self._files: dict[str, AnyPath] = {}
        self._sent: dict[str, Any] = {}
        self._tasks: dict[Future[Any], Any] = {}
        self._lock = Lock()
        try:
            self._client = Client(address, timeout=timeout_s, set_as_default=False)
        except (OSError, TimeoutError):
            raise ConnectionError(
                f"--on {name}: no scheduler answers there; start one with `dask scheduler`"
            ) from None

    def offer(self, files: Mapping[str, AnyPath]) -> None:
        """Files that units may ask for: name → where it lies here."""
        self._files |= files

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call on some worker."""
        future: Future[Any] = Future()
        future.add_done_callback(self._cancelled)
        self._begin(future, fn, args, kwargs, {})
        return future

    def _begin(
        self,
        future: Future[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Any,
    ) -> None:
        task = self._client.submit(_call, fn, args, kwargs, given, pure=False, retries=_RETRIES)
        with self._lock:
            self._tasks[future] = task
        task.add_done_callback(lambda done: self._settle(done, future, fn, args, kwargs))

    def _settle(
        self,
        task: Any,
        future: Future[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        with self._lock:
            if self._tasks.pop(future, None) is not task:
                return  # cancelled by whoever asked
        try:
            if task.status == "finished":
                result = task.result()
                if isinstance(result, LacksData):
                    self._begin(
                        future, fn, args, kwargs, {name: self._content(name) for name in result.names}
                    )
                else:
                    future.set_result(result)
            elif task.status == "error":
                future.set_exception(task.exception())
            else:  # cancelled, or lost with the scheduler
                raise ConnectionError
        except Exception as error:
            if isinstance(error, ConnectionError) or type(error).__name__ in (
                "CancelledError",
                "FutureCancelledError",
            ):
                error = ConnectionError(
                    f"--on {self._name}: the scheduler is gone; what was finished is kept, --resume goes on with it"
                )
            if not future.done():
                future.set_exception(error)

    def _cancelled(self, future: Future[Any]) -> None:
        """Whoever asked has cancelled it: so do we."""
        with self._lock:
            task = self._tasks.pop(future, None) if future.cancelled() else None
        if task is not None:
            self._client.cancel([task], force=True)

    def _content(self, name: str) -> Any:
        """A file's bytes on the cluster, sent there once."""
        with self._lock:
            if name not in self._sent:
                self._sent[name] = self._client.scatter(self._files[name].read_bytes(), hash=True)
            return self._sent[name]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the cluster go; what is queued or runs for us is cancelled."""
        with self._lock:
            tasks, self._tasks = list(self._tasks.values()), {}
        if tasks and self._client.status == "running":
            self._client.cancel(tasks, force=True)
        self._client.close(timeout=2)


def _call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, bytes]
) -> Any:
    """On a worker: keep what was sent along, then call; what is lacking is told as a value, not as a failed task."""
    for name, content in given.items():
        _keep(name, content)
    try:
        return fn(*args, **kwargs)
    except LacksData as error:
        return error


def _store() -> Path:
    return user_cache_dir() / "experiment-data"


def _kept(name: str, content: str) -> Path:
    """Where a file that was sent along lies, by its content; the last part of its name says how it is read."""
    return _store() / content / Path(name).name


def _keep(name: str, content: bytes) -> None:
    _write(_kept(name, hashlib.sha256(content).hexdigest()), content)


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    part.write_bytes(content)
    os.replace(part, path)


@lru_cache(maxsize=256)
def _fingerprint(path: Path, size: int, changed_ns: int) -> str:
    return provenance.fingerprint(path)


def _is(path: Path, content: str) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    return _fingerprint(path, stat.st_size, stat.st_mtime_ns) == content


@lru_cache(maxsize=64)
def _sources(name: str) -> TableRow:
    return provenance.sources(name)


def place_of(data: Path, needs: Mapping[str, str]) -> Path:
    """A folder in which all files are, with the content they must have.

    Args:
        data: Where they are on the machine that asks, perhaps here too.
        needs: Name → sha256.

    Raises:
        LacksData: Some are not here.
    """
    if all(_is(data / name, content) for name, content in needs.items()):
        return data
    sources: dict[str, Path] = {}
    for name, content in needs.items():
        for path in (data / name, _kept(name, content)):
            if _is(path, content):
                sources[name] = path
    if missing := tuple(name for name in needs if name not in sources):
        raise LacksData(missing)
    folder = _store() / provenance.digest(dict(needs))
    for name, content in needs.items():
        if not _is(folder / name, content):
            _write(folder / name, sources[name].read_bytes())
    return folder


@lru_cache(maxsize=64)
def _package() -> TableRow:
    return provenance.package_sources()


@lru_cache(maxsize=64)
def _behind(url: str) -> str:
    """sha256 of what this process finds behind a URL, read once."""
    return provenance.fingerprint(place(url))


def file_of(name: str, content: str) -> str:
    """A path under which a file with that content lies here, or its URL.

    Raises:
        LacksData: It is not here.
        ValueError: The URL has another content here than where it was asked for.
    """
    path = place(name)
    if not isinstance(path, Path):
        if _behind(name) != content:
            raise ValueError(f"{name}: a worker finds another content there; give all of them the same file")
        return name
    for known in (path, _kept(name, content)):
        if _is(known, content):
            return str(known)
    raise LacksData((name,))


def point_there(
    work: Callable[..., TableRow],
    needs: Mapping[str, str],
    wanted: TableRow,
    point: Unit,
    *more: Any,
) -> TableRow:
    """One point of a sweep on a worker: under the same sources, with the same files wherever they lie here.

    Args:
        work: As of `Sweep`.
        needs: Path or URL → sha256.
        wanted: Digests of the package and of `configs/` there.
        point / more: Arguments of `work`.

    Raises:
        LacksData: Some of the files are not here.
        ValueError: The worker's pagedjax is another one.
    """
    if _package() != wanted:
        differs = ", ".join(key for key in wanted if _package().get(key) != wanted[key])
        raise ValueError(
            f"sweep: a worker has another {differs} than this machine; install the same pagedjax on all of them"
        )
    lacking = []
    found = {}
    used = [v for table in (point, *more) if isinstance(table, Mapping) for v in table.values()]
    for name in needs:
        if name in used:
            try:
                found[name] = file_of(name, needs[name])
            except LacksData:
                lacking.append(name)
    if lacking:
        raise LacksData(tuple(lacking))

    def here(table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        return {k: found.get(v, v) if isinstance(v, str) else v for k, v in table.items()}

    return work(here(point), *map(here, more))


def work_there(
    name: str, unit: Unit, data: str, said_of: Sequence[str], needs: Mapping[str, str], wanted: TableRow
) -> list[TableRow]:
    """`pagedjax.lab.run.work` on a worker: under the same sources, with the same data.

    Raises:
        LacksData: Some of the data is not here.
        ValueError: The worker's pagedjax is another one.
    """
    from pagedjax.lab.run import work

    if catalog.path_of(name) and _sources(name) != wanted:
        differs = ", ".join(key for key in wanted if _sources(name).get(key) != wanted[key])
        raise ValueError(
            f"{name}: a worker has another {differs} than this machine; install the same pagedjax on all of them"
        )
    return work(name, unit, str(place_of(Path(data), needs)), said_of)
