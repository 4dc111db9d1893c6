"""Printed figures beside ours: how ours is read from the rows, and the one rule that judges every claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

TableRow = dict[str, Any]
# What a claim reads from the rows: one number a seed, in order of the seeds; none where a smoke run says nothing.
Value = Callable[[list[TableRow]], list[float]]
Kind = Literal["figure", "input", "identity"]

TOLERANCE = 0.10  # the only one: relative, for every printed figure and for the ends of every printed range
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Claim:
    """A printed figure and how ours is read from the rows.

    Attributes:
        text: What is claimed.
        paper: The printed value, or the (least, most) of a printed range; None where only our value is of interest.
        source: Where it is printed.
        ours: Rows → our value, a number a seed.
        kind: "figure" is judged by `TOLERANCE`; "input": ours was fitted to the printed value or read from it, so it
            proves nothing and is not judged; "identity": true by construction or by arithmetic, must be equal.
        decimals: Of an identity: to so many decimals, as printed; None: exactly.
        beside: The same figure under the other calibrated machine, where it depends on host work.
    """

    text: str
    paper: float | tuple[float, float] | None
    source: str
    ours: Value
    kind: Kind = "figure"
    decimals: int | None = None
    beside: Value | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"kind={self.kind!r}: must be one of {', '.join(get_args(Kind))}; a claim has no tolerance"
            )
        if self.decimals is not None and self.kind != "identity":
            raise ValueError(f"decimals={self.decimals}: is of an identity; leave it out")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval.

    Attributes:
        mean: Of the values.
        half: Half the width of the interval by Student's t; 0 where there is one value only.
        count: Values.
    """

    mean: float
    half: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Estimate | None:
        """None where there is no value."""
        if not values:
            return None
        count, mean = len(values), math.fsum(values) / len(values)
        if count == 1:
            return cls(mean, 0.0, 1)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
        half = _T95[min(count - 1, len(_T95) - 1)] * spread / math.sqrt(count)
        return cls(mean, half if half > 1e-12 * abs(mean) else 0.0, count)  # equal but for rounding is equal


def cell(column: str, *, least: int = 1, **where: Any) -> Value:
    """Rows → `column` of the rows whose columns equal `where`, one a seed.

    Args:
        column: Name of the value; rows in which it is None are left out.
        least: Rows below which there is no answer: a smoke run's rows match, but say nothing.
        where: Column → value.
    """

    def pick(rows: list[TableRow]) -> list[float]:
        return list(_by_seed(rows, column, where).values()) if len(rows) >= least else []

    return pick


def ratio(column: str, of: dict[str, Any], over: dict[str, Any], *, least: int = 1) -> Value:
    """Rows → `column` of the rows that equal `of` over that of the rows that equal `over`, seed by seed."""

    def pick(rows: list[TableRow]) -> list[float]:
        if len(rows) < least:
            return []
        above, below = _by_seed(rows, column, of), _by_seed(rows, column, over)
        return [above[seed] / below[seed] for seed in above if below.get(seed)]

    return pick


def _by_seed(rows: list[TableRow], column: str, where: dict[str, Any]) -> dict[Any, float]:
    """Seed → value; the first row of a seed counts."""
    found: dict[Any, float] = {}
    for row in rows:
        if row.get(column) is not None and all(row.get(k) == v for k, v in where.items()):
            found.setdefault(row.get("seed"), float(row[column]))
    return found


def rule(claim: Claim) -> str:
    """By what a claim is judged, in words."""
    if claim.paper is None:
        return "ours alone"
    if claim.kind == "input":
        return "an input: not judged"
    if claim.kind == "identity":
        return "identity: equal" + (f" to {claim.decimals} decimals" if claim.decimals is not None else "")
    return f"within {TOLERANCE:.0%}" + (" of the range" if isinstance(claim.paper, tuple) else "")


def verdict(claim: Claim, ours: Estimate | None) -> str:
    """In one word whether a claim holds, by `rule`.

    A figure is "reproduced" where the whole interval lies within the tolerance, "differs" where all of it lies
    outside, and "undecided" where the seeds leave it open.
    """
    if ours is None or claim.paper is None or claim.kind == "input":
        return ""
    low, high = claim.paper if isinstance(claim.paper, tuple) else (claim.paper, claim.paper)
    if claim.kind == "identity":
        digits = 12 if claim.decimals is None else claim.decimals
        ends = (round(ours.mean - ours.half, digits), round(ours.mean + ours.half, digits))
        return "equal" if ends == (round(low, digits), round(high, digits)) else "NOT equal"
    low, high = low - TOLERANCE * abs(low), high + TOLERANCE * abs(high)
    least, most = ours.mean - ours.half, ours.mean + ours.half
    if low <= least and most <= high:
        return "reproduced"
    return "differs" if most < low or least > high else "undecided"


def claim_rows(claims: tuple[Claim, ...], rows: list[TableRow], *, judged: bool = True) -> list[TableRow]:
    """Claims beside ours, as a table.

    Args:
        claims: Of an experiment.
        rows: Its rows.
        judged: False under settings other than the experiment's own: a printed figure says nothing about those.
    """
    table = []
    others = [Estimate.of(claim.beside(rows)) if claim.beside is not None else None for claim in claims]
    several = any(other is not None and other.count > 1 for other in others)
    for claim, beside in zip(claims, others):
        ours = Estimate.of(claim.ours(rows))
        single = claim.paper if isinstance(claim.paper, float | int) else None
        table.append(
            {
                "claim": claim.text,
                "ours": ours and ours.mean,
                "± 95 %": ours.half if ours and ours.count > 1 else None,
                "seeds": ours and ours.count,
                f"other machine{'' if several else ', one seed'}": beside and beside.mean,
                "paper": f"{claim.paper[0]:g} to {claim.paper[1]:g}"
                if isinstance(claim.paper, tuple)
                else claim.paper,
                "ratio": ours.mean / single if ours and single else None,
                "judged by": rule(claim) if judged else "other settings: not judged",
                "verdict": verdict(claim, ours) if judged else "",
                "source": claim.source,
            }
        )
    return [{k: v for k, v in row.items() if any(r[k] is not None for r in table)} for row in table]
