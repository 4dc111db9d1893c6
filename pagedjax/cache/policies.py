"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from pagedjax.cache.eviction import LRU, EvictionPolicy

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRU}


def make_policy(policy: str | Callable[[int], EvictionPolicy], num_blocks: int) -> EvictionPolicy:
    """A policy by name, or from a factory num_blocks -> EvictionPolicy.

    Raises:
        ValueError: Unknown name.
    """
    if callable(policy):
        return policy(num_blocks)
    if policy not in POLICIES:
        raise ValueError(f"policy={policy}: must be one of {', '.join(POLICIES)}; try lru")
    return POLICIES[policy](num_blocks)
