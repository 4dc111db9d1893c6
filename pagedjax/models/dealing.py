"""Leaves dealt out to devices while they are read: buffers of this process's parts, filled strip by strip."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pagedjax.models.sharding import Piece

Path = tuple[str, ...]


class Dealer(Protocol):
    """Which parts of a leaf this process's devices hold, and the array that all parts make."""

    def parts(self, path: Path, shape: tuple[int, ...]) -> Parts:
        """What has to be read of a leaf of this one-device shape."""
        ...

    def join(self, path: Path, shape: tuple[int, ...], buffers: Sequence[np.ndarray]) -> Any:
        """The array over all devices, from the filled buffers of `parts`."""
        ...


class Sample:
    """A digest over one row of every tensor, equal where processes that each read their own parts have equal files.

    Args:
        about: What else has to be equal, as text.
    """

    def __init__(self, about: str = "") -> None:
        self._hasher = hashlib.sha256(about.encode())

    def add(self, name: str, shape: Sequence[int], rows: Callable[[int, int], np.ndarray]) -> None:
        """Take in a tensor of this shape, of which `rows` reads entries start to stop of the first axis."""
        at = zlib.crc32(name.encode()) % shape[0]
        row = np.ascontiguousarray(rows(at, at + 1))
        self._hasher.update(f"{name} {list(shape)} {row.dtype}\n".encode())
        self._hasher.update(row.reshape(-1).view(np.uint8).data)

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()


class Parts:
    """Which entries of a leaf's axis each device of this process holds.

    Args:
        shape: Of the one-device leaf.
        axis: That is cut; None: the one buffer is the whole leaf.
        pieces: Per device, in its order.
        width: Entries of a device's part along the axis; what no piece fills is 0.
    """

    def __init__(
        self, shape: tuple[int, ...], axis: int | None, pieces: Sequence[Sequence[Piece]], width: int
    ) -> None:
        self.shape, self.axis, self.pieces = shape, axis, pieces if axis is not None else [()]
        self.part_shape = shape if axis is None else (*shape[:axis], width, *shape[axis + 1 :])

    def allocate(self, dtype: np.dtype) -> list[np.ndarray]:
        """One buffer per device of this process, of zeros."""
        return [np.zeros(self.part_shape, dtype) for _ in self.pieces]

    def wants(self, rows: np.ndarray) -> bool:
        """Whether any of these rows of the leaf belongs to this process."""
        if self.axis != 0:
            return True
        return any(bool(((rows >= a) & (rows < b)).any()) for part in self.pieces for a, b in part)

    def put(
        self, buffers: Sequence[np.ndarray], rows: np.ndarray, values: np.ndarray, first_column: int = 0
    ) -> None:
        """Store entries of the leaf where they belong.

        Args:
            buffers: From `allocate`.
            rows: Rows of the leaf that `values` holds, in any order.
            values: [rows, columns], or [rows] of a vector.
            first_column: Of the leaf, that `values` begins with.
        """
        last = first_column + values.shape[-1]
        for buffer, pieces in zip(buffers, self.pieces, strict=True):
            if self.axis is None:
                _columns(buffer, first_column, last)[rows] = values
            at = 0
            for start, stop in pieces:
                if self.axis == 0:
                    mine = (rows >= start) & (rows < stop)
                    _columns(buffer, first_column, last)[at + rows[mine] - start] = values[mine]
                else:
                    low, high = max(start, first_column), min(stop, last)
                    if low < high:
                        own = values[:, low - first_column : high - first_column]
                        buffer[:, at + low - start : at + high - start][rows] = own
                at += stop - start


def _columns(buffer: np.ndarray, first: int, last: int) -> np.ndarray:
    return buffer if buffer.ndim == 1 else buffer[:, first:last]
