"""Weight files, opened with suspicion: GGUF and safetensors headers are checked before anything is read.

A model file comes from elsewhere. Every count, length, offset and size in its header is compared with the
size of the file before it is used, so a damaged or hostile header ends in one `ModelError`, never in a crash,
a hang or an allocation that the file itself could not fill. Both readers then give the same small interface:
names with shape and stored type, and rows of one tensor as numpy arrays.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import SafetensorError, safe_open

from pagedjax.models.config import ModelError, kind_of_file
from pagedjax.progress import shown


@dataclass(frozen=True)
class TensorInfo:
    """Shape (row-major, as numpy would have it) and stored type of one tensor in a file."""

    shape: tuple[int, ...]
    kind: str
    path: Path
    offset: int = 0


class TensorFile(Protocol):
    """Named tensors of one model, in one file or several."""

    tensors: dict[str, TensorInfo]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries start to stop along the first axis, as a floating-point array."""
        ...


# ---- GGUF ------------------------------------------------------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# A vocabulary has some hundred thousand entries; these bounds are far above any and keep the Python
# objects of a header made of nothing but array elements under a few hundred megabytes.
_MAX_ARRAY = 1 << 21
_MAX_ELEMENTS = 1 << 22
_MAX_KEYS = 1 << 14
_MAX_TENSORS = 1 << 16
_MAX_STRING = 1 << 24
_MAX_ALIGNMENT = 1 << 16

QUANTISATIONS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
)


class _Header:
    """Reads a GGUF header front to back; no read goes past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.left, self.elements = file, path, size, 0

    def fail(self, got: str, rule: str) -> NoReturn:
        raise ModelError(f"{self.path.name}: {shown(got)}: {rule}; download the GGUF file again")

    def take(self, n: int, what: str) -> bytes:
        if n > self.left:
            self.fail(f"{what} needs {n} bytes", f"only {self.left} are left in the file")
        data = self.file.read(n)
        if len(data) != n:
            self.fail(what, "the file ended while it was read")
        self.left -= n
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, limit: int = _MAX_STRING) -> str:
        n = self.number("Q", f"length of {what}")
        if n > limit:
            self.fail(f"{what} of {n} bytes", f"must be at most {limit}")
        try:
            return self.take(n, what).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(what, "must be UTF-8 text")

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        self.fail(f"{what} of type {kind}", "must be a GGUF value type (0 to 12)")

    def array(self, what: str) -> list[Any]:
        kind, n = self.number("I", what), self.number("Q", what)
        self.elements += n
        if n > _MAX_ARRAY or self.elements > _MAX_ELEMENTS:
            self.fail(
                f"{what} with {n} elements", f"at most {_MAX_ARRAY} in one array, {_MAX_ELEMENTS} in all"
            )
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize("<" + code), what)))
        if kind == _STRING:
            if n * 8 > self.left:
                self.fail(f"{what} with {n} strings", f"only {self.left} bytes are left in the file")
            return [self.text(what) for _ in range(n)]
        self.fail(f"{what} of element type {kind}", "arrays hold scalars or strings")


class GgufFile:
    """One GGUF file: `metadata` (key → plain value) and tensors that dequantise by rows.

    Raises:
        ModelError: The header is damaged, a tensor reaches past the end of the file, or a quantisation is
            not one of `QUANTISATIONS`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(path, "rb") as file:
                self._read(_Header(file, path, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise ModelError(
                f"{path}: {error.strerror}: must be a readable GGUF file; check the path"
            ) from error

    def _read(self, h: _Header) -> None:
        size = h.left
        magic = h.take(4, "magic")
        if magic != b"GGUF":
            kind = kind_of_file(magic + h.take(min(h.left, 60), "the head"))
            if kind is not None:
                raise ModelError(f"{self.path.name}: is no GGUF file but {kind}")
            h.fail(f"magic {magic!r}", "a GGUF file starts with b'GGUF'")
        version = h.number("I", "version")
        if version in (2 << 24, 3 << 24):
            raise ModelError(
                f"{self.path.name}: is a big-endian GGUF file: must be little-endian; convert it"
            )
        if version not in (2, 3):
            h.fail(f"version {version}", "must be 2 or 3, little-endian")
        num_tensors, num_keys = h.number("Q", "tensor count"), h.number("Q", "key count")
        # The shortest key is 13 bytes, the shortest tensor entry 33.
        if num_keys > min(_MAX_KEYS, h.left // 13):
            h.fail(f"{num_keys} keys", f"at most {min(_MAX_KEYS, h.left // 13)} fit")
        if num_tensors > min(_MAX_TENSORS, h.left // 33):
            h.fail(f"{num_tensors} tensors", f"at most {min(_MAX_TENSORS, h.left // 33)} fit")
        for _ in range(num_keys):
            key = h.text("a key", limit=65535)
            if key in self.metadata:
                h.fail(f"key {key!r} twice", "keys are unique")
            self.metadata[key] = h.value(h.number("I", key), key)
        entries = [self._entry(h) for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if isinstance(align, bool) or not isinstance(align, int) or not 1 <= align <= _MAX_ALIGNMENT:
            h.fail(f"general.alignment={align!r}", f"must be a power of two up to {_MAX_ALIGNMENT}")
        if align & (align - 1):
            h.fail(f"general.alignment={align}", "must be a power of two")
        self._place(h, entries, -(-(size - h.left) // align) * align, align, size)

    def _entry(self, h: _Header) -> tuple[str, tuple[int, ...], int, int]:
        name = h.text("a tensor name", limit=256)
        rank = h.number("I", f"rank of {name}")
        if not 1 <= rank <= 4:
            h.fail(f"{name} of rank {rank}", "must be 1 to 4")
        dims = tuple(h.number("Q", f"shape of {name}") for _ in range(rank))
        if min(dims) < 1 or math.prod(dims) > 1 << 48:
            h.fail(f"{name} of shape {dims[::-1]}", "sizes must be at least 1 and their product plausible")
        return name, dims[::-1], h.number("I", f"type of {name}"), h.number("Q", f"offset of {name}")

    def _place(self, h: _Header, entries: list[Any], base: int, align: int, size: int) -> None:
        spans = []
        for name, shape, code, offset in entries:
            if name in self.tensors:
                h.fail(f"tensor {name!r} twice", "names are unique")
            kind = _kind_name(code)
            if kind not in QUANTISATIONS:
                raise ModelError(
                    f"{self.path.name}: {name} is stored as {kind}: supported are {', '.join(QUANTISATIONS)}; "
                    "convert the file to one of them"
                )
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            if shape[-1] % block:
                h.fail(f"{name} with rows of {shape[-1]}", f"{kind} packs multiples of {block}")
            num_bytes = math.prod(shape) // block * width
            start = base + offset
            if offset % align or start + num_bytes > size:
                h.fail(
                    f"{name} at bytes {start} to {start + num_bytes}",
                    f"must be aligned to {align} and end within the file of {size} bytes",
                )
            spans.append((start, start + num_bytes, name))
            self.tensors[name] = TensorInfo(shape, kind, self.path, start)
        spans.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(spans):
            if start < end:
                h.fail(f"{first} and {second} overlap", "tensors must not share bytes")

    def add_part(self, part: GgufFile) -> None:
        """Take in the tensors of another file of the same model.

        Raises:
            ModelError: A tensor is in both.
        """
        for name, info in part.tensors.items():
            if name in self.tensors:
                raise ModelError(
                    f"{name!r} is in {self.tensors[name].path.name} and {info.path.name}: a tensor belongs to one "
                    "part; download the parts again"
                )
            self.tensors[name] = info

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """float32 entries start to stop along the first axis of a tensor, dequantised."""
        info = self.tensors[name]
        kind = GGMLQuantizationType[info.kind]
        block, width = GGML_QUANT_SIZES[kind]
        shape = (stop - start, *info.shape[1:])
        if len(info.shape) == 1:  # the packed axis itself: start and stop must fall on blocks
            row_bytes, first = width, start // block
            num_bytes = (stop - start) // block * width
        else:
            row_bytes, first = math.prod(info.shape[1:]) // block * width, start
            num_bytes = (stop - start) * row_bytes
        data = np.empty(num_bytes, np.uint8)
        # Plain reads, not a memory map: mapped pages would count against this process, and a file that is
        # cut short while it is read would end in a signal instead of an error.
        with open(info.path, "rb") as file:
            file.seek(info.offset + first * row_bytes)
            if file.readinto(data.data) != num_bytes:
                raise ModelError(
                    f"{info.path.name}: {name}: the file ended while it was read; download it again"
                )
        if info.kind == "F32":
            return data.view("<f4").reshape(shape)
        numbers = data.view("<f2") if info.kind == "F16" else data
        packed = numbers.reshape(shape[0] if len(shape) > 1 else 1, -1)
        with np.errstate(all="ignore"):  # a damaged scale is inf or nan; who reads the rows looks for that
            return gguf.quants.dequantize(packed, kind).reshape(shape)


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(path: Path) -> GgufFile:
    """A GGUF file, or all parts of a model that was split into several; any of them may be named.

    Raises:
        ModelError: As `GgufFile`; a part is missing, or is one of another model.
    """
    given = GgufFile(path)
    count = _split_number(given, "split.count", 1)
    if count <= 1:
        return given
    number = _split_number(given, "split.no", 0)
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        raise ModelError(
            f"{path.name}: is part {number + 1} of {count}: must be named NAME-{number + 1:05d}-of-{count:05d}.gguf; "
            "rename the parts, or join them with llama-gguf-split --merge"
        )
    parts = []
    for i in range(count):
        other = path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf")
        if not other.is_file():
            raise ModelError(f"{other}: no such file: {path.name} is one of {count} parts; download it too")
        part = given if i == number else GgufFile(other)
        if _split_number(part, "split.count", 1) != count or _split_number(part, "split.no", 0) != i:
            raise ModelError(f"{other.name}: is not part {i + 1} of {count}; download the parts again")
        parts.append(part)
    whole = parts[0]
    for part in parts[1:]:
        for key, value in part.metadata.items():
            if not key.startswith(("split.", "general.")) and whole.metadata.get(key) != value:
                raise ModelError(f"{part.path.name}: {key}: differs from part 1's; download the parts again")
        whole.add_part(part)
    expected = whole.metadata.get("split.tensors.count")
    if expected is not None and expected != len(whole.tensors):
        raise ModelError(
            f"{path.name}: {len(whole.tensors)} tensors in {count} parts: split.tensors.count={expected!r}; download "
            "the parts again"
        )
    return whole


def _split_number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= 99999:
        raise ModelError(
            f"{file.path.name}: {key}={value!r}: must be a whole number; download the file again"
        )
    return value


def _kind_name(code: int) -> str:
    try:
        return GGMLQuantizationType(code).name
    except ValueError:
        return f"unknown type {code}"


# ---- safetensors -----------------------------------------------------------------------------------------

_ST_READ = ("F32", "F16", "BF16", "F64")

STORED = tuple(dict.fromkeys((*QUANTISATIONS, *_ST_READ)))


class SafetensorsFiles:
    """The tensors of one or several safetensors files.

    Args:
        paths: The files.
        where: Tensor name → name of the file that has it, as the index of a sharded model says: what else a
            file holds is another model's. None: every tensor of every file counts.

    Raises:
        ModelError: A header is damaged, a tensor reaches past the end of its file, a name comes twice, or a
            file lacks what the index says it has.
    """

    def __init__(self, paths: list[Path], where: Mapping[str, str] | None = None) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        for path in paths:
            for name, info in _safetensors_header(path).items():
                if where is not None and where.get(name) != path.name:
                    continue
                if name in self.tensors:
                    raise ModelError(
                        f"{name!r} is in {self.tensors[name].path.name} and {path.name}: a tensor belongs to "
                        "one file; remove the file that is not part of this model"
                    )
                self.tensors[name] = info
        for name, file in (where or {}).items():
            if name not in self.tensors:
                raise ModelError(
                    f"{name!r} is not in {file}, where the index says it is: the files belong to different "
                    "versions; download the model again"
                )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries start to stop along the first axis of a tensor, in the stored type."""
        if self.tensors[name].kind == "F8_E4M3":
            return self._bytes(name, start, stop).view(ml_dtypes.float8_e4m3fn)
        return self._part(name, np.s_[start:stop])

    def columns(self, name: str, start: int, stop: int) -> np.ndarray:
        """Columns start to stop of a matrix, in the stored type, one row after the other."""
        return np.ascontiguousarray(self._part(name, np.s_[:, start:stop]))

    def _part(self, name: str, where: Any) -> np.ndarray:
        info = self.tensors[name]
        # Opened anew each time: the library maps the file, and pages once touched would stay with us.
        try:
            with safe_open(info.path, "numpy") as file:
                return file.get_slice(name)[where]
        except (SafetensorError, OSError) as error:
            raise _not_whole(info.path, f"{name}: {error}") from error

    def _bytes(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries of a tensor of one byte each, which the library has no numpy type for."""
        info = self.tensors[name]
        width = math.prod(info.shape[1:])
        data = np.empty((stop - start) * width, np.uint8)
        with open(info.path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            first = file.tell() + header[name]["data_offsets"][0]  # the library has checked them
            file.seek(first + start * width)
            if file.readinto(data.data) != data.nbytes:
                raise _not_whole(info.path, f"{name}: the file ended while it was read")
        return data.reshape(stop - start, *info.shape[1:])


def _safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and types as the library reads them; it checks every size against the file's."""
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(tuple(part.get_shape()), part.get_dtype(), path)
                for name, part in slices.items()
            }
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror or error}: must be a readable file; check the path"
        ) from error
    except SafetensorError as error:
        with open(path, "rb") as file:
            kind = kind_of_file(file.read(64))
        if kind is not None and "safetensors" not in kind:
            raise ModelError(f"{path.name}: is no safetensors file but {kind}") from None
        raise _not_whole(path, str(error)) from error


def _not_whole(path: Path, complaint: str) -> ModelError:
    first = (complaint.splitlines() or ["damaged"])[0][:200]
    return ModelError(f"{path.name}: {first}: must be a whole safetensors file; download it again")
