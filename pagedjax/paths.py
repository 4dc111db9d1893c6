"""Where things are, and how files are replaced: kept between runs, with the package, behind URLs, written by a run."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


def user_cache_dir() -> Path:
    """Models, compiled programs and the native library, unless a caller says otherwise."""
    return platformdirs.user_cache_path("pagedjax", appauthor=False)


def checkout() -> Path | None:
    """The folder of the sources that this package is imported from; None where it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "experiments").is_dir() else None


def shipped(folder: str) -> Path:
    """`experiments/` or `configs/`: beside the package in a checkout, inside it in an installed wheel.

    Raises:
        FileNotFoundError: Neither place has it: the package was copied without its files.
    """
    root = checkout()
    place = _PACKAGE / "shipped" / folder if root is None else root / folder
    if not place.is_dir():
        raise FileNotFoundError(
            f"{place}: the installed package lacks it; install pagedjax from a wheel or a checkout"
        )
    return place


def shipped_file(folder: str, name: str | Path) -> Path:
    """A file by its path, or one that comes with the package by its name ("a100-40gb", with or without suffix).

    Args:
        folder: Below `configs/`: "hardware", "shapes" or "serve".
        name: Path of a file, or the name of one in that folder.

    Raises:
        ValueError: Neither exists; the message lists the names.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = sorted((p for p in (shipped("configs") / folder).iterdir() if p.is_file()), key=lambda p: p.stem)
    for file in known:
        if str(name) in (file.name, file.stem):
            return file
    raise ValueError(
        f"{name}: must be a file, or one of {', '.join(file.stem for file in known)} (configs/{folder}/)"
    )


class UrlPath:
    """A file or folder behind a URL that fsspec knows ("s3://bucket/x"), with those methods of `Path` that are used.

    Files are replaced whole, by one write of an object; where a storage cannot promise that, writing is refused.

    Args:
        url: scheme://place; a trailing slash says nothing.
    """

    # Storages of objects: what is written is there once all of it is, and nothing in between.
    WHOLE = ("memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss")

    def __init__(self, url: str) -> None:
        self._scheme, _, rest = url.partition("://")
        self._rest = rest.rstrip("/")
        self._url = f"{self._scheme}://{self._rest}"
        self._pure = PurePosixPath(self._rest)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"UrlPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlPath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self._url}/{name}" if self._rest else f"{self._url}{name}")

    @property
    def name(self) -> str:
        return self._pure.name

    @property
    def stem(self) -> str:
        return self._pure.stem

    @property
    def suffix(self) -> str:
        return self._pure.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._pure.suffixes

    @property
    def parent(self) -> UrlPath:
        return UrlPath(f"{self._scheme}://{self._rest.rpartition('/')[0]}")

    def with_name(self, name: str) -> UrlPath:
        """Another file beside this one."""
        return self.parent / name

    def _there(self) -> tuple[Any, str]:
        """The file system, and the path on it.

        Raises:
            ModuleNotFoundError: fsspec, or what it needs for this scheme, is missing.
            ValueError: No file system has this scheme.
        """
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"{self}: needs fsspec; pip install fsspec") from None
        try:
            found: tuple[Any, str] = url_to_fs(self._url)
        except ImportError as error:
            raise ModuleNotFoundError(f"{self}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{self}: {error}; give a path, or a URL that fsspec knows") from None
        return found

    def is_file(self) -> bool:
        """Whether a file is there."""
        system, path = self._there()
        return bool(system.isfile(path))

    def exists(self) -> bool:
        """Whether a file or a folder is there."""
        system, path = self._there()
        return bool(system.exists(path))

    def open(self, mode: str = "rb", encoding: str | None = None) -> Any:
        """The file, read as a stream, or written: then it is there once it is closed."""
        if "r" not in mode:
            self.check_writable()
        system, path = self._there()
        try:
            return system.open(path, mode, **({} if "b" in mode else {"encoding": encoding or "utf-8"}))
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(self)) from None

    def read_bytes(self) -> bytes:
        """All of the file."""
        with self.open("rb") as file:
            content: bytes = file.read()
        return content

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of the file as text."""
        return self.read_bytes().decode(encoding)

    def check_writable(self) -> None:
        """Raise ValueError where a file of this storage cannot be replaced whole."""
        if self._scheme not in self.WHOLE:
            raise ValueError(
                f"{self}: {self._scheme} does not replace a file whole or not at all; give a folder, or one of "
                f"{', '.join(self.WHOLE)}"
            )

    def write_bytes(self, content: bytes) -> None:
        """Replace the file, whole or not at all."""
        self.check_writable()
        system, path = self._there()
        system.pipe_file(path, content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Replace the file, whole or not at all."""
        self.write_bytes(text.encode(encoding))

    def upload(self, file: Path) -> None:
        """Replace the file by one of this machine, whole or not at all."""
        self.check_writable()
        system, path = self._there()
        system.put_file(str(file), path)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder, where the storage has folders."""
        self.check_writable()
        system, path = self._there()
        system.makedirs(path, exist_ok=exist_ok)

    def beside(self, pattern: str) -> list[UrlPath]:
        """Files in this folder whose names fit a pattern, in order."""
        system, path = self._there()
        return [self / found.rpartition("/")[2] for found in sorted(system.glob(f"{path}/{pattern}"))]

    def unlink(self) -> None:
        """Remove the file."""
        system, path = self._there()
        system.rm_file(path)


AnyPath = Path | UrlPath


def place(text: str | Path | UrlPath) -> AnyPath:
    """A path as it stands, or what a URL names; file:// URLs are paths of this machine."""
    if isinstance(text, UrlPath):
        return text
    scheme, colon, rest = str(text).partition("://")
    if not colon or not scheme.isalnum() or isinstance(text, Path):
        return Path(text)
    if scheme == "file":
        return Path(unquote(rest))
    return UrlPath(text)


_STREAMS = (
    "/dev/stdout",
    "/dev/stderr",
    "/dev/fd",
    "/proc",
)  # what is open already, if it leads to a file, too


def part_of(path: Path) -> tuple[Path, Path]:
    """Where a file's content goes, and where it is written until it may go there: beside it, or, of a device, there."""
    if (path.exists() and not path.is_file()) or any(map(path.absolute().is_relative_to, _STREAMS)):
        return path, path
    target = path.resolve()
    return target, target.with_name(f".part-{target.name}")  # the suffix chooses the compression


@contextmanager
def told_of(path: AnyPath, *others: Path) -> Iterator[None]:
    """Errors of writing name the file: a full disk does not by itself, and of a file in the making nobody knows."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, *map(str, others)):
            error.filename = str(path)
        raise


class Output:
    """A text file that grows while something runs, gzip where its name ends in .gz.

    What stood at its path goes when the first line comes, or when it is closed; until then it is written beside it.
    A run that is refused before anything happens (leaves the `with` block by an exception) costs nothing.

    Args:
        path: File to write. Its folder must exist.

    Raises:
        OSError: It cannot be written, here and in every call; the error names the path.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.placed = False  # it stands at its path
        self.closed = False
        self._target: Path | None = None
        self._part: Path | None = None
        self._raw: IO[bytes] | None = None
        self._text: IO[str] | None = None
        self._ahead: list[str] = []  # behind a URL nothing may be opened before it is to stand there
        if isinstance(path, Path):
            self._target, self._part = part_of(path)
            self._open(self._part)
            self.placed = self._part == self._target

    def _open(self, path: AnyPath) -> None:
        with told_of(self.path, *self._parts()):
            if path.suffix == ".gz":  # fast rather than small: written while runs go
                self._raw = path.open("wb")
                packed = gzip.GzipFile("", "wb", compresslevel=1, fileobj=self._raw)
                self._text = TextIOWrapper(packed, encoding="utf-8")
            else:
                self._text = path.open("w", encoding="utf-8")

    def _parts(self) -> tuple[Path, ...]:
        return () if self._part is None else (self._part,)

    def _place(self) -> None:
        if self._part is not None and self._target is not None:
            with told_of(self.path, *self._parts()):
                os.replace(self._part, self._target)
        else:
            self._open(self.path)
            self._put("".join(self._ahead))
        self.placed = True

    def _put(self, text: str) -> None:
        assert self._text is not None
        with told_of(self.path):
            self._text.write(text)

    def head(self, text: str) -> None:
        """Write what comes before anything has happened."""
        if self._text is None:
            self._ahead.append(text)
        else:
            self._put(text)

    def write(self, text: str) -> None:
        """Write what has happened."""
        if not self.placed:
            self._place()
        self._put(text)

    def close(self) -> None:
        """The file is whole."""
        if self.closed:
            return
        if self._text is None:
            self._place()
        try:
            self._end()
            if not self.placed:
                self._place()
        finally:
            self._forget()

    def refuse(self) -> None:
        """Close it; where nothing has happened, what stood there stays."""
        if self.placed:
            self.close()
            return
        with suppress(OSError):  # of a file that goes
            self._end()
        self._forget()

    def _end(self) -> None:
        self.closed = True
        with told_of(self.path):
            try:
                if self._text is not None:
                    self._text.close()
            finally:
                if self._raw is not None:
                    self._raw.close()

    def _forget(self) -> None:
        if not self.placed and self._part is not None:
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.refuse()


def check_output(path: Path, *, folder: bool = False) -> None:
    """Raise where nothing could be written at a path, before any work begins; nothing is made or touched.

    Args:
        path: File that will be replaced whole, or a device.
        folder: It is a folder, which is made with those above it.

    Raises:
        ValueError: It, or the folder that it would be in, is no place to write.
    """
    if folder:
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists() or p.is_symlink())
        if not there.is_dir():
            raise ValueError(f"{path}: {there} is no folder; name another one")
    else:
        target, part = part_of(path)
        if part == target:  # a device, a pipe
            there = target
        elif not target.parent.is_dir():
            what = "is no folder" if target.parent.exists() else "does not exist"
            raise ValueError(f"{path}: its folder {path.parent} {what}; make it first, or name another")
        else:
            there = target.parent
    if not os.access(there, os.W_OK):
        raise ValueError(f"{path}: {there} may not be written to; name another place")


def replace_text(path: AnyPath, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: It cannot be written; the error names the path, and what stood there stays.
    """
    with Output(path) as file:
        file.head(text)


def replace_bytes(path: AnyPath, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: It cannot be written; the error names the path, and what stood there stays.
    """
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    target, part = part_of(path)
    try:
        with told_of(path, part):
            part.write_bytes(content)
            if part != target:
                os.replace(part, target)
    finally:
        if part != target:
            part.unlink(missing_ok=True)
