"""Sizes of the kernels' pieces by device and geometry: the table that comes with the package, and a user's own."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).with_name("tuning.toml")


def _power_of_two(value: int) -> bool:
    return value >= 1 and not value & (value - 1)


_POWER = (_power_of_two, "a power of two")
_POSITIVE = (lambda value: value >= 1, "at least 1")
_TILE = (lambda value: value >= 16 and _power_of_two(value), "a power of two of at least 16")
_Rule = tuple[Callable[[int], bool], str]
_STAGES = (lambda value: 1 <= value <= 4, "1 to 4")
_GPU: dict[str, _Rule] = {
    "decode_stages": _STAGES,
    "prefill_stages": _STAGES,
    "programs": (lambda value: 1 <= value <= 8, "1 to 8"),
}
# By kernel the sizes that it reads.
SIZES: dict[str, dict[str, _Rule]] = {
    "plan": {"chunk_tokens": _POWER, "tile_queries": _POSITIVE},
    "xla": {"iteration_bytes": _POSITIVE, "least_group_rows": _POWER, "shared_keys": _POWER},
    "pallas_tpu": {
        "chunk_tokens": _POWER,
        "chunk_bytes": _POSITIVE,
        "chunk_copies": _POSITIVE,
        "tile_queries": _TILE,
        "left_at_most": _POSITIVE,
        "fused_write": (lambda value: value in (0, 1), "0 or 1"),
    },
    "pallas_mosaic": _GPU,
    "pallas_mma": _GPU | {"value_keys": (lambda value: value in (16, 32, 64), "16, 32 or 64")},
}
# What says which calls a table is for, and the type of each.
FITS = {"device": str, "heads": str, "dtype": str, "block_size": int}


@dataclass(frozen=True)
class TuningRow:
    """One table: whom it is for and its sizes.

    Attributes:
        kernel: Of SIZES.
        fits: (name of FITS, value) of what a call must be.
        sizes: (name, value).
    """

    kernel: str
    fits: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Tuning:
    """The user's own tables, before those of the package; a compiled program is specialised on them.

    Attributes:
        rows: In the file's order.
    """

    rows: tuple[TuningRow, ...] = ()

    @classmethod
    def parse(cls, tables: Mapping[str, Any], source: str) -> Tuning:
        """From a TOML file's tables.

        Raises:
            ValueError: A key or kernel that is not known, or a value out of its range; by its name.
        """
        for key in tables:
            if key != "sizes":
                raise ValueError(f'{source}: {key}: must be [[sizes]] tables; see docs/kernels.md, "Tuning"')
        rows = tables.get("sizes", [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f'{source}: sizes: must be [[sizes]] tables; see docs/kernels.md, "Tuning"')
        return cls(tuple(_row(row, f"{source}: sizes {nth}") for nth, row in enumerate(rows, 1)))

    def sizes(self, kernel: str, **call: Any) -> dict[str, int]:
        """The sizes of a call.

        Args:
            kernel: Of SIZES.
            call: What it is, by the names of FITS; a table that asks for more fits it not.
        """
        found: dict[str, int] = {}
        for rows in (packaged().rows, self.rows):
            fitting = [row for row in rows if row.kernel == kernel and set(row.fits) <= set(call.items())]
            for row in sorted(fitting, key=lambda row: len(row.fits)):
                found |= row.sizes
        return found


# Nothing of a user's own.
PACKAGED = Tuning()


@functools.cache
def packaged() -> Tuning:
    """The table that comes with the package."""
    return Tuning.parse(tomllib.loads(_PACKAGED.read_text(encoding="utf-8")), _PACKAGED.name)


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    """A geometry as the tables name it: "32/8/128" are 32 query and 8 KV heads of 128."""
    return f"{num_heads}/{num_kv_heads}/{head_dim}"


def _row(row: Mapping[str, Any], source: str) -> TuningRow:
    kernel = row.get("kernel")
    if kernel not in SIZES:
        raise ValueError(f"{source}: kernel={kernel!r}: must be one of {', '.join(SIZES)}")
    rules, fits, sizes = SIZES[kernel], [], []
    for name, value in row.items():
        if name == "kernel":
            continue
        if name in FITS:
            if type(value) is not FITS[name]:
                raise ValueError(
                    f"{source}: {name}={value!r}: must be {'an integer' if FITS[name] is int else 'text'}"
                )
            fits.append((name, value))
        elif name in rules:
            holds, rule = rules[name]
            if type(value) is not int or not holds(value):
                raise ValueError(f"{source}: {name}={value!r}: must be {rule}")
            sizes.append((name, value))
        else:
            known = ", ".join([*FITS, *rules])
            raise ValueError(f"{source}: {name}: is no size of {kernel}; must be one of {known}")
    if not sizes:
        raise ValueError(f"{source}: has no size of {kernel}; give one of {', '.join(rules)}")
    return TuningRow(kernel, tuple(fits), tuple(sizes))


def to_toml(tuning: Tuning, comments: Mapping[int, str] | None = None) -> str:
    """The file that `Tuning.parse` reads back.

    Args:
        comments: By row a line above it.
    """
    blocks = []
    for nth, row in enumerate(tuning.rows):
        said = (comments or {}).get(nth)
        values = [("kernel", row.kernel), *row.fits, *row.sizes]
        lines = [f"# {said}"] if said else []
        lines += ["[[sizes]]"]
        lines += [
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in values
        ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)
