"""Fleets: N simulated engines, each with its own manager, scheduler and cost model, behind a router."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pagedjax.sim.fleet.books import FleetRecord, FleetResult, Gaps, InstanceTotals, Level, Refusal
from pagedjax.sim.fleet.loop import Fleet
from pagedjax.sim.fleet.member import OnPlan
from pagedjax.sim.fleet.observer import FleetObserver
from pagedjax.sim.fleet.settings import (
    Arrivals,
    Change,
    InstanceSpec,
    LinkSpec,
    Promise,
    StoreSpec,
    require,
)
from pagedjax.sim.routing import (
    KNOWLEDGE,
    ApproximateKnowledge,
    ExactKnowledge,
    Knowledge,
    NoKnowledge,
    Router,
    make_router,
)
from pagedjax.sim.trace import Trace

TREE_TOKENS = 1 << 24  # what SGLang's gateway remembers by default, there in characters


def make_knowledge(kind: str, *, tree_tokens: int = TREE_TOKENS, ttl_s: float = math.inf) -> Knowledge:
    """Knowledge by name.

    Raises:
        ValueError: Unknown name, or a number out of its range.
    """
    require(kind in KNOWLEDGE, f"knowledge={kind}: must be one of {', '.join(KNOWLEDGE)}")
    if kind == "approximate":
        return ApproximateKnowledge(tree_tokens, ttl_s)
    return ExactKnowledge() if kind == "exact" else NoKnowledge()


def run_fleet(
    trace: Trace,
    instances: Sequence[InstanceSpec],
    *,
    router: str | type[Router] = "round-robin",
    options: Mapping[str, Any] | None = None,
    knowledge: str = "",
    delay_s: float = 0.0,
    tree_tokens: int = TREE_TOKENS,
    ttl_s: float = math.inf,
    decode_router: str | type[Router] = "least-tokens",
    changes: Sequence[Change] = (),
    arrivals: Arrivals = Arrivals(),
    links: LinkSpec = LinkSpec(),
    store: StoreSpec | None = None,
    promise: Promise = Promise(),
    seed: int = 0,
    until_s: float = math.inf,
    skip: bool = True,
    hash_plans: bool = False,
    on_plan: OnPlan | None = None,
    log_rates: bool = False,
    observer: FleetObserver | None = None,
) -> FleetResult:
    """Play a trace through a fleet of engines; equal arguments give equal results.

    Args:
        trace: Requests in order of arrival.
        instances: Those that are there from the start, at least one.
        router: Name in `ROUTERS`, or a class with the protocol of `Router`; chooses who computes a prompt.
        options: The router's.
        knowledge: "none", "approximate" or "exact"; "" is what the router asks for.
        delay_s: From a cache event to its report, for exact knowledge.
        tree_tokens / ttl_s: What approximate knowledge remembers of each worker, and for how long.
        decode_router: Chooses who decodes what prefill instances hand over; one that looks at load only.
        changes: Who joins, leaves and dies, and when.
        arrivals: By the trace's times, scaled, or in a closed loop.
        links: Wires between nodes.
        store: Host memory and disks behind the pools; None: there is none.
        promise: Limits of early rejection.
        seed: Of the router's chance.
        until_s: Stop then; requests under way are left out of the records.
        skip: Do not plan decode steps in which nothing but the next token can happen; same results, sooner.
        hash_plans: Hash every plan of every instance; plans all steps.
        on_plan: Called with (instance number, plan) for each planned step.
        log_rates: Keep every change of a transfer's rate in the result.
        observer: Told of what happens between instances, such as a `pagedjax.report.fleet.FleetRecorder`.

    Returns:
        Records of all requests, and totals.

    Raises:
        ValueError: No instance, a name twice, a change of an instance that is not there, or settings that contradict
            each other.
    """
    require(bool(instances), "instances: none given; a fleet needs at least one")
    require(0 <= delay_s < math.inf, f"delay_s={delay_s}: must be from 0, in seconds")
    chooser = make_router(router, options)
    decode_chooser = make_router(decode_router)
    require(
        decode_chooser.knows == "none",
        f"decode_router={decode_router}: nothing is known of what decoders have cached; try least-tokens",
    )
    specs = [*instances, *(c.instance for c in changes if c.instance is not None)]
    roles = {spec.role for spec in specs}
    require(
        ("prefill" in roles) == ("decode" in roles),
        f"roles {', '.join(sorted(roles))}: prefill and decode instances need each other; give both, or mixed ones",
    )
    fleet = Fleet(
        trace,
        instances,
        chooser,
        make_knowledge(knowledge or chooser.knows, tree_tokens=tree_tokens, ttl_s=ttl_s),
        delay_s=delay_s,
        decode_router=decode_chooser,
        changes=changes,
        arrivals=arrivals,
        links=links,
        store=store,
        promise=promise,
        seed=seed,
        until_s=until_s,
        skip=skip,
        hash_plans=hash_plans,
        on_plan=on_plan,
        log_rates=log_rates,
        observer=observer,
    )
    return fleet.run()


__all__ = [
    "TREE_TOKENS",
    "Arrivals",
    "Change",
    "FleetObserver",
    "FleetRecord",
    "FleetResult",
    "Gaps",
    "InstanceSpec",
    "InstanceTotals",
    "Level",
    "LinkSpec",
    "Promise",
    "Refusal",
    "StoreSpec",
    "make_knowledge",
    "run_fleet",
]
