"""Pictures of the pool: which block is blank, in use or cached, and which tables share which blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedjax.cache import PagedManager


@dataclass(frozen=True)
class PoolPicture:
    """The pool at one moment, as plain data.

    Attributes:
        ref: Reference count of each block, the null block included.
        cached: Blocks whose content is indexed.
        tables: Label of a sequence to its block table.
    """

    ref: tuple[int, ...]
    cached: frozenset[int]
    tables: Mapping[str, tuple[int, ...]]

    @classmethod
    def take(cls, manager: PagedManager, sequences: Mapping[str, int]) -> PoolPicture:
        """Copy what is to be drawn out of a manager.

        Args:
            manager: Any paged manager; its first KV group is drawn.
            sequences: Label to sequence id.
        """
        books = manager.snapshot()["groups"][0]
        ref = tuple(books["ref"].get(block, 0) for block in range(manager.num_blocks))
        tables = {label: tuple(manager.table(seq)) for label, seq in sequences.items()}
        return cls(ref, frozenset(books["keys"]), tables)

    def count(self, state: str) -> int:
        return sum(self.state(block) == state for block in range(1, len(self.ref)))

    def state(self, block: int) -> str:
        """blank, in use, shared or cached."""
        if self.ref[block] > 1:
            return "shared"
        if self.ref[block] == 1:
            return "in use"
        return "cached" if block in self.cached else "blank"


_MARK = {"blank": "·", "in use": "■", "shared": "▣", "cached": "□"}
_STYLE = {"blank": "dim", "in use": "cyan", "shared": "bold green", "cached": "yellow"}


def draw_pool(picture: PoolPicture, *, blocks: int = 128, width: int = 64) -> str:
    """The first blocks of the pool, one mark each, with a legend; rich markup.

    Args:
        picture: From `PoolPicture.take`.
        blocks: How many blocks to draw, from block 1.
        width: Marks per line.
    """
    last = min(len(picture.ref), blocks + 1)
    lines = []
    for start in range(1, last, width):
        marks = "".join(_mark(picture.state(block)) for block in range(start, min(start + width, last)))
        lines.append(f"  {start:>5}  {marks}")
    counts = [f"{_mark(state)} {state} {picture.count(state)}" for state in _MARK]
    more = len(picture.ref) - last
    tail = f"   ({more:,} more blocks not drawn)" if more > 0 else ""
    return "\n".join([*lines, "  " + "   ".join(counts) + tail])


def draw_tables(picture: PoolPicture) -> str:
    """One line per sequence: runs of block ids, shared ones marked with how many own them; rich markup."""
    if not picture.tables:
        return "  no sequence holds a block"
    label_width = max(len(label) for label in picture.tables)
    return "\n".join(
        f"  {label:<{label_width}}  {' '.join(_runs(table, picture)) or '(empty)'}"
        for label, table in picture.tables.items()
    )


def _mark(state: str) -> str:
    return f"[{_STYLE[state]}]{_MARK[state]}[/]"


def _runs(table: Sequence[int], picture: PoolPicture) -> list[str]:
    """Consecutive ids under equal reference counts drawn as first-last."""
    out: list[str] = []
    start = 0
    for at in range(1, len(table) + 1):
        ends = (
            at == len(table)
            or table[at] != table[at - 1] + 1
            or picture.ref[table[at]] != picture.ref[table[at - 1]]
        )
        if ends:
            first, last = table[start], table[at - 1]
            span = f"{first}" if first == last else f"{first}-{last}"
            owners = picture.ref[first]
            out.append(f"[bold green]{span}[/] (×{owners})" if owners > 1 else f"[cyan]{span}[/]")
            start = at
    return out
