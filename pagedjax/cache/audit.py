"""Views of the whole books: snapshots, the resident set, and the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax.cache.block import BlockPool
from pagedjax.cache.events import Resident
from pagedjax.cache.groups import Group
from pagedjax.cache.pins import Pins
from pagedjax.cache.protocol import InvariantError
from pagedjax.cache.sequence import SeqState
from pagedjax.cache.stats import CacheStats


def pool_state(pool: BlockPool, now: float) -> dict[str, Any]:
    """A pool in plain values: its queue in order, references, keys."""
    return {
        "free_queue": pool.blank[::-1] + pool.policy.victim(pool.num_evictable, now),
        "num_blank": len(pool.blank),
        "num_evictable": pool.num_evictable,
        "ref": {b: r for b, r in enumerate(pool.ref) if r},
        "keys": {b: key for b, key in enumerate(pool.keys) if key is not None},
    }


def snapshot(
    groups: Sequence[Group], seqs: Mapping[int, SeqState], stats: CacheStats, now: float
) -> dict[str, Any]:
    """The state in plain values: per group the queue, references and keys; tables; counters."""
    tables = {seq: [list(table) for table in state.tables] for seq, state in seqs.items()}
    pools = [pool_state(group.pool, now) for group in groups]
    return {"groups": pools, "tables": tables, "stats": stats.snapshot()}


def resident(groups: Sequence[Group]) -> Resident:
    """Copies of each content, by (group, medium, digest)."""
    out: Resident = {}
    for group in groups:
        counts = Counter(key for key in group.pool.keys if key is not None)
        out |= {(group.id, "device", key): count for key, count in counts.items()}
        stored = Counter(group.tier.contents())
        out |= {(group.id, "host", key): count for key, count in stored.items()}
    return out


def tables(
    groups: Sequence[Group], states: Sequence[tuple[int, SeqState]], width: int
) -> tuple[np.ndarray, ...]:
    """One fresh i32[S, width] per group, a row per sequence, padded with the null block.

    Raises:
        ValueError: A table is longer than `width`.
    """
    out = []
    for group in groups:
        rows = np.zeros((len(states), width), dtype=np.int32)
        for row, (seq, state) in zip(rows, states):
            table = state.tables[group.id]
            if len(table) > width:
                raise ValueError(f"width={width}: sequence {seq} has {len(table)} blocks; widen the tables")
            row[: len(table)] = table
        out.append(rows)
    return tuple(out)


def writable(groups: Sequence[Group]) -> tuple[np.ndarray, ...]:
    """Per group bool[P]: blocks of one reference and no key."""
    pools = [group.pool for group in groups]
    return tuple(np.array([r == 1 and k is None for r, k in zip(pool.ref, pool.keys)]) for pool in pools)


def check(groups: Sequence[Group], seqs: Mapping[int, SeqState], pins: Pins) -> None:
    """Raise `InvariantError` unless pools, indexes, tiers and the tables that hold blocks agree."""
    for group in groups:
        holding = [s.tables[group.id] for s in seqs.values() if not s.recorded] + pins.tables(group.id)
        holding += [[b for (number, _), b in s.anchors.items() if number == group.id] for s in seqs.values()]
        references = Counter(b for table in holding for b in table if b)
        group.pool.check(references)
        group.index.check(group.pool.keys)
        group.tier.check()
    for seq, state in seqs.items():
        slots = len(state.tables[0]) * groups[0].block_size
        if not state.recorded and state.computed > slots:
            raise InvariantError(f"sequence {seq}: {state.computed} tokens computed in {slots} slots")
