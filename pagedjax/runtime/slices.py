"""A deterministic engine's step, cut into slices that one program computes, whatever the step holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pagedjax.cache import CopyPlan
from pagedjax.engine import Row, StepPlan, TokenScores


@dataclass(frozen=True)
class Slice:
    """Some tokens of a step, in the step's order.

    Attributes:
        plan: Pieces of the step's rows; a sequence's tokens come after those before them, here or in an earlier slice.
        rows: Number of each piece's row in the step's plan.
    """

    plan: StepPlan
    rows: tuple[int, ...]


def cut(plan: StepPlan, size: int) -> list[Slice]:
    """Slices of at most `size` tokens and as many samples, each but the last as full as can be.

    More samples of one row than a slice draws are drawn in the next ones, from its last token fed once more: its keys
    and values are written again as they are.
    """
    slices: list[Slice] = []
    pieces: list[tuple[int, Row]] = []
    tokens = samples = 0

    def close() -> None:
        nonlocal pieces, tokens, samples
        numbers = tuple(number for number, _ in pieces)
        rows = tuple(piece for _, piece in pieces)
        tables = tuple(table[list(numbers)] for table in plan.tables)
        slices.append(Slice(StepPlan(plan.step, rows, tables, CopyPlan()), numbers))
        pieces, tokens, samples = [], 0, 0

    for number, row in enumerate(plan.rows):
        at, end, waiting = row.start, row.start + row.num_tokens, row.samples
        while at < end or waiting:
            if tokens == size or samples == size:
                close()
            at = min(at, end - 1)  # the last token once more, for samples that wait
            take = min(end - at, size - tokens)
            drawn = waiting[: size - samples] if at + take == end else ()
            pieces.append((number, Row(row.seq, at, take, drawn)))
            at, waiting = at + take, waiting[len(drawn) :]
            tokens, samples = tokens + take, samples + len(drawn)
    if pieces:
        close()
    return slices


def join_scores(parts: Iterable[tuple[Slice, Mapping[int, TokenScores]]]) -> dict[int, TokenScores]:
    """Scores by row of the step from those by piece of each slice."""
    found: dict[int, list[TokenScores]] = {}
    for one, scores in parts:
        for piece, part in scores.items():
            found.setdefault(one.rows[piece], []).append(part)
    return {
        row: TokenScores(*(np.concatenate(column) for column in zip(*several)))
        for row, several in found.items()
    }
