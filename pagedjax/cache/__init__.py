"""Paged KV block management on the host: blocks, prefix indexes, eviction, managers. Never imports jax."""

from pagedjax.cache.events import CacheEvent, EventLog, EventSnapshot, replay
from pagedjax.cache.groups import KVGroup, split_blocks
from pagedjax.cache.hashing import ExtraKeys, HashScheme, MediaItem, TokenChain
from pagedjax.cache.manager import PagedManager
from pagedjax.cache.policies import POLICIES
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
from pagedjax.cache.registry import INDEXES
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
    "ExtraKeys",
    "HashScheme",
    "Hints",
    "Hit",
    "InvariantError",
    "KVCacheManager",
    "KVGroup",
    "MediaItem",
    "MissReason",
    "PagedManager",
    "ReservationManager",
    "ResetReport",
    "TokenChain",
    "Waste",
    "replay",
    "split_blocks",
]
