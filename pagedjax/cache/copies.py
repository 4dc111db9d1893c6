"""Pending block copies and the order in which they may run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedjax.cache.groups import Group
from pagedjax.cache.protocol import NO_COPIES, CopyBatch, CopyPlan, InvariantError


@dataclass(frozen=True, slots=True)
class Copy:
    """One block copy: device to device ("cow"), to the host ("swap_out") or back ("swap_in")."""

    kind: str
    group: int
    src: int
    dst: int


class PendingCopies:
    """Copies planned for the next step, in the order they were decided.

    The source of a copy has a reader until the copy has been handed out: no block that is still to be read
    is given to anyone. A copy whose destination nobody holds any more is cancelled.
    """

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self._pending: list[Copy] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, kind: str, group: int, src: int, dst: int) -> None:
        """Plan a copy; a device source gets a reader."""
        self._pending.append(Copy(kind, group, src, dst))
        if kind == "cow":
            self._groups[group].pool.add_reader(src)

    def fills(self, group: int, blocks: set[int]) -> bool:
        """Some pending copy has still to fill one of these device blocks."""
        return any(c.group == group and c.kind != "swap_out" and c.dst in blocks for c in self._pending)

    def cancel_unneeded(self, now: float) -> None:
        """Drop copies into blocks that nobody holds and no other copy reads."""
        if not self._pending:
            return
        kept: list[Copy] = []
        for copy in reversed(self._pending):  # the reader of a copied block comes after its copy
            pool = self._groups[copy.group].pool
            if copy.kind == "swap_out" or pool.ref[copy.dst] or copy.dst in pool.readers:
                kept.append(copy)
            elif copy.kind == "cow":
                pool.drop_reader(copy.src, now)
        self._pending = kept[::-1]

    def take(self, now: float) -> CopyPlan:
        """All pending copies as batches to be run in order, swap-outs first."""
        if not self._pending:
            self.drop(now)
            return NO_COPIES
        plan = plan_copies(self._pending)
        self.drop(now)
        return plan

    def drop(self, now: float) -> None:
        """Nothing is pending any more; released sources return to their queues."""
        self._pending = []
        for group in self._groups:
            group.pool.settle(now)
            group.tier.settle()

    def check(self) -> None:
        """Raise InvariantError unless exactly the sources of pending copies have readers."""
        for number, group in enumerate(self._groups):
            pool = group.pool
            readers: dict[int, int] = {}
            for copy in self._pending:
                if copy.kind == "cow" and copy.group == number:
                    readers[copy.src] = readers.get(copy.src, 0) + 1
                    if not pool.ref[copy.dst] and copy.dst not in pool.readers:
                        raise InvariantError(f"copy {copy}: its destination is nobody's")
            if readers != pool.readers:
                raise InvariantError(f"pending copies read {readers}, the pool knows of {pool.readers}")


def plan_copies(copies: list[Copy]) -> CopyPlan:
    """Copies as batches to be run in order, swap-outs first; a batch may run all at once."""
    ordered = [c for c in copies if c.kind == "swap_out"]
    ordered += [c for c in copies if c.kind != "swap_out"]
    batches: list[list[Copy]] = []
    written: set[int] = set()
    read: set[int] = set()
    for copy in ordered:
        last = batches[-1][0] if batches else None
        fits = last is not None and (last.kind, last.group) == (copy.kind, copy.group)
        # Ids of one side: swaps cross between two id spaces and cannot collide there.
        crossing = copy.kind != "cow"
        if not fits or copy.dst in written or (not crossing and (copy.dst in read or copy.src in written)):
            batches.append([])
            written, read = set(), set()
        batches[-1].append(copy)
        written.add(copy.dst)
        read.add(copy.src)
    return CopyPlan(tuple(_batch(batch) for batch in batches))


def _batch(copies: list[Copy]) -> CopyBatch:
    return CopyBatch(
        copies[0].kind,
        np.array([c.src for c in copies], dtype=np.int32),
        np.array([c.dst for c in copies], dtype=np.int32),
        copies[0].group,
    )
