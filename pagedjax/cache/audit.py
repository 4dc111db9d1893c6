"""Views of the whole books: snapshots, the resident set, and the checks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pagedjax.cache.block import BlockPool
from pagedjax.cache.events import Resident
from pagedjax.cache.groups import Group
from pagedjax.cache.tier import HostTier


def pool_state(pool: BlockPool, now: float) -> dict[str, Any]:
    """A pool in plain values: its queue in order, references, keys."""
    return {
        "free_queue": pool.blank[::-1] + pool.policy.victim(pool.num_evictable, now),
        "num_blank": len(pool.blank),
        "num_evictable": pool.num_evictable,
        "ref": {b: r for b, r in enumerate(pool.ref) if r},
        "keys": {b: key for b, key in enumerate(pool.keys) if key is not None},
    }


def resident(groups: list[Group], tiers: list[HostTier]) -> Resident:
    """Copies of each content, by (group, medium, digest)."""
    out: Resident = {}
    for group, tier in zip(groups, tiers):
        counts = Counter(key for key in group.pool.keys if key is not None)
        out |= {(group.id, "device", key): count for key, count in counts.items()}
        out |= {(group.id, "host", key): 1 for key in tier.contents()}
    return out


def check_group(group: Group, tables: list[list[int]]) -> None:
    """Raise `InvariantError` unless pool, index and the tables that hold blocks agree."""
    references = Counter(b for table in tables for b in table if b)
    group.pool.check(references)
    group.index.check(group.pool.keys)
