"""Paged KV block management on the host: blocks, prefix indexes, eviction, managers. Never imports jax.

As in `pagedjax`, a name is imported when it is first touched: the rules that settings share cost nothing more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Name -> module that defines it.
_PUBLIC = {
    "INDEXES": "indexes",
    "POLICIES": "policies",
    "CacheEvent": "events",
    "CacheStats": "stats",
    "CopyBatch": "protocol",
    "CopyPlan": "protocol",
    "EventLog": "events",
    "EventSnapshot": "events",
    "EvictionPolicy": "eviction",
    "ExtraKeys": "hashing",
    "HashScheme": "hashing",
    "Hints": "protocol",
    "Hit": "protocol",
    "Index": "prefix",
    "InvariantError": "protocol",
    "KVCacheManager": "protocol",
    "KVGroup": "groups",
    "MediaItem": "hashing",
    "MissReason": "protocol",
    "PagedManager": "manager",
    "PrefixIndex": "prefix",
    "ReservationManager": "reservation",
    "ResetReport": "protocol",
    "TokenChain": "hashing",
    "Waste": "reservation",
    "replay": "events",
    "split_blocks": "groups",
}

if TYPE_CHECKING:
    from pagedjax.cache.events import CacheEvent, EventLog, EventSnapshot, replay
    from pagedjax.cache.eviction import EvictionPolicy
    from pagedjax.cache.groups import KVGroup, split_blocks
    from pagedjax.cache.hashing import ExtraKeys, HashScheme, MediaItem, TokenChain
    from pagedjax.cache.indexes import INDEXES
    from pagedjax.cache.manager import PagedManager
    from pagedjax.cache.policies import POLICIES
    from pagedjax.cache.prefix import Index, PrefixIndex
    from pagedjax.cache.protocol import (
        CopyBatch,
        CopyPlan,
        Hints,
        Hit,
        InvariantError,
        KVCacheManager,
        MissReason,
        ResetReport,
    )
    from pagedjax.cache.reservation import ReservationManager, Waste
    from pagedjax.cache.stats import CacheStats

__all__ = [
    "INDEXES",
    "POLICIES",
    "CacheEvent",
    "CacheStats",
    "CopyBatch",
    "CopyPlan",
    "EventLog",
    "EventSnapshot",
    "EvictionPolicy",
    "ExtraKeys",
    "HashScheme",
    "Hints",
    "Hit",
    "Index",
    "InvariantError",
    "KVCacheManager",
    "KVGroup",
    "MediaItem",
    "MissReason",
    "PagedManager",
    "PrefixIndex",
    "ReservationManager",
    "ResetReport",
    "TokenChain",
    "Waste",
    "replay",
    "split_blocks",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pagedjax.cache' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pagedjax.cache.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
