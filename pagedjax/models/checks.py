"""The error of a model's files, and the two checks that all descriptions of models share."""

from __future__ import annotations

import math
from typing import Any


class ModelError(ValueError):
    """A model's files are not what they should be; the message names what, which rule, and the remedy."""


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise ModelError, naming the field, unless its value is a whole number from low to high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(
            f"{name}={value!r}: must be a whole number in [{low}, {high}]; check the model's files"
        )


def check_number(name: str, value: Any, *, above: float | None = None, least: float | None = None) -> None:
    """Raise ModelError, naming the field, unless its value is a finite number above or at least a bound."""
    rule = f"above {above:g}" if above is not None else f"at least {least:g}"
    fits = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    if not (fits and (above is None or value > above) and (least is None or value >= least)):
        raise ModelError(f"{name}={value!r}: must be a finite number {rule}; check the model's files")
