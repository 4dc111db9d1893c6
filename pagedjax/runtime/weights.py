"""Weights of a runner: other ones in their place, laid row by row, and dealt out to the processes of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from pagedjax.models.weights import flat

if TYPE_CHECKING:
    from pagedjax.runtime.hosts import Channel
    from pagedjax.runtime.mesh import Placement

Array = Any


def check_same_shapes(ours: dict[str, Any], theirs: Any) -> None:
    """Refuse weights of another model: the compiled steps take these names, shapes and dtypes and no others.

    Raises:
        ValueError: Names the first leaf that differs.
    """

    def leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): (
                np.shape(x),
                str(getattr(x, "dtype", "?")),
            )
            for path, x in found
        }

    have, given = leaves(ours), leaves(theirs)
    for name in sorted(have.keys() | given.keys()):
        if have.get(name) != given.get(name):
            wanted, got = (
                "no such leaf" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
                for leaf in (have.get(name), given.get(name))
            )
            raise ValueError(
                f"weights {name}: given {got}, this model has {wanted}; weights are changed for others of the same "
                "shapes and dtypes, for another model build another LLM"
            )


def in_place_of(old: Array, new: Array) -> Array:
    """A new array where the old one lies, so that no program is compiled anew for it."""
    if isinstance(old, jax.Array):
        new = jax.device_put(new, old.sharding if old.committed else None)
    return row_by_row(new)


def row_by_row(array: Array) -> Array:
    """The array, its elements in row-major order.

    By default XLA:TPU lays an array out in the order that pads least, column by column for a [V, 576] embedding,
    and then copies it in every step to multiply by it (docs/kernels.md, "Without the device").
    """
    if not isinstance(array, jax.Array):
        return array
    place: Any = array.format  # type: ignore[attr-defined]
    rows = tuple(range(array.ndim))
    if place.layout.major_to_minor == rows:
        return array
    return jax.device_put(array, Format(Layout(rows), place.sharding))


def deal(channel: Channel, place: Placement, params: dict[str, Any]) -> None:
    """Whole leaves to the other processes, to each its devices' parts, one at a time."""
    sent: dict[int, tuple[str, ...]] = {}
    for name, leaf in flat(params):
        path = tuple(name.split("/"))
        if id(leaf) in sent:  # tied
            channel.tell(("tie", path, sent[id(leaf)]))
            continue
        sent[id(leaf)] = path
        host = np.asarray(leaf)

        def own(process: int, path: tuple[str, ...] = path, host: np.ndarray = host) -> tuple[Any, ...]:
            return (place.parts_for(process, path, host),)

        channel.tell(("part", path, host.shape), own)
