"""Eviction policies by name; LRU is in `eviction.py`, the others here, a module for each family.

To add one: a class with the hooks of `EvictionPolicy`, a line in `POLICIES`; the tests run their suite over every
name in it. From outside it needs no line: see docs/plugins.md.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedjax.cache.eviction import LRU, EvictionPolicy
from pagedjax.cache.plugins import Plugins
from pagedjax.cache.policies.adaptive import ARC, LeCaR, WTinyLFU
from pagedjax.cache.policies.category import WorkloadAware
from pagedjax.cache.policies.credit import ReuseCredit
from pagedjax.cache.policies.future import Belady
from pagedjax.cache.policies.queues import LIRS, S3FIFO, SIEVE, SLRU, TwoQ
from pagedjax.cache.policies.scored import FIFO, LFU, LRU2, LengthAware
from pagedjax.cache.policies.worth import GDSF, CostAware, GDSFKept, Retention

PolicyFactory = Callable[[int], EvictionPolicy]


def _needs_a_future(num_blocks: int) -> EvictionPolicy:
    raise ValueError(
        "policy=belady: has to know the future; pass policy=lambda n: Belady(n, future), as the simulator does"
    )


POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "sieve": SIEVE,
    "2q": TwoQ,
    "arc": ARC,
    "lru-2": LRU2,
    "lirs": LIRS,
    "w-tinylfu": WTinyLFU,
    "lecar": LeCaR,
    "gdsf": GDSF,
    "gdsf-kept": GDSFKept,
    "length-aware": LengthAware,
    "cost": CostAware,
    "reuse-credit": ReuseCredit,
    "workload-aware": WorkloadAware,
    "retention": Retention,
    "belady": _needs_a_future,
}
POLICY_PLUGINS = Plugins("policy", "pagedjax.policies", POLICIES, "lru")

_HOOKS = ("insert", "hit", "release", "victim", "remove", "evictable")


def make_policy(policy: str | PolicyFactory, num_blocks: int) -> EvictionPolicy:
    """A policy that a setting names: a name, "module:Class", or a factory num_blocks -> EvictionPolicy.

    Raises:
        ValueError: Unknown name; see `pagedjax.cache.plugins`.
    """
    built: EvictionPolicy = POLICY_PLUGINS.make(policy, num_blocks, hooks=_HOOKS)
    return built


__all__ = [
    "ARC",
    "FIFO",
    "GDSF",
    "LFU",
    "LIRS",
    "LRU",
    "LRU2",
    "POLICIES",
    "POLICY_PLUGINS",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "Belady",
    "CostAware",
    "GDSFKept",
    "LeCaR",
    "LengthAware",
    "PolicyFactory",
    "Retention",
    "ReuseCredit",
    "TwoQ",
    "WTinyLFU",
    "WorkloadAware",
    "make_policy",
]
