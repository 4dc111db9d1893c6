"""Routers as plug-ins: one protocol, one table; what they know of caches is a setting of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from pagedjax.cache.plugins import Plugins
from pagedjax.sim.routing.aware import CacheAware, CacheAwareProbability, KvOverlap, LoadAware, Mooncake
from pagedjax.sim.routing.knowledge import (
    KNOWLEDGE,
    ApproximateKnowledge,
    ExactKnowledge,
    Knowledge,
    NoKnowledge,
)
from pagedjax.sim.routing.plain import LeastRequests, LeastTokens, PrefixHash, Random, RoundRobin, Session
from pagedjax.sim.routing.preble import Preble
from pagedjax.sim.routing.protocol import Choice, Forecast, Prompt, Router, Sent, View, Worker

ROUTERS: dict[str, type[Router]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "session": Session,
    "prefix-hash": PrefixHash,
    "cache-aware-v1": CacheAwareProbability,
    "cache-aware": CacheAware,
    "kv-overlap": KvOverlap,
    "load-aware": LoadAware,
    "preble": Preble,
    "mooncake": Mooncake,
}
PLUGINS: Plugins[type[Router]] = Plugins("router", "pagedjax.routers", ROUTERS, "cache-aware")


def make_router(router: str | type[Router], options: Mapping[str, Any] | None = None) -> Router:
    """A router by name, or from a class.

    Args:
        router: Name in `ROUTERS` or of an installed plug-in, "module:Class", or a class with the protocol of `Router`.
        options: Values of its dataclass fields.

    Raises:
        ValueError: Unknown name or option, or an option's value is of another kind or out of its range.
    """
    found = PLUGINS.find(router)
    name = router if isinstance(router, str) else router.__name__
    known: dict[str, Field[Any]] = {}
    if is_dataclass(found):
        known = {f.name: f for f in fields(found) if f.init}
    values: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key not in known:
            offered = ", ".join(known) or "none"
            raise ValueError(f"router option {key}: {name} has {offered}")
        kind: Any = type(known[key].default)
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"router option {key}={value!r}: must be {wanted}")
        values[key] = kind(value)
    return found(**values)


__all__ = [
    "KNOWLEDGE",
    "PLUGINS",
    "ROUTERS",
    "ApproximateKnowledge",
    "Choice",
    "ExactKnowledge",
    "Forecast",
    "Knowledge",
    "LoadAware",
    "NoKnowledge",
    "Prompt",
    "Router",
    "Sent",
    "View",
    "Worker",
    "make_router",
]
