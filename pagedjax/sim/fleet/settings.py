"""What a fleet is made of: instances, links, a store, arrivals, a promise, and what changes on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedjax.config import SchedulerConfig
from pagedjax.engine.step import StepPlan
from pagedjax.sim.cost import CostModel

ROLES = ("mixed", "prefill", "decode")
CHANGES = ("join", "leave", "die")
HANDOVERS = ("whole", "layers")


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class InstanceSpec:
    """One engine of a fleet.

    Attributes:
        name: Unique.
        manager: Makes its cache manager; is given the event log that the fleet reads, or None.
        cost: A cost model, or seconds of a plan (then nothing can be sent to or from it).
        scheduler: Limits of one step.
        max_model_len: Longest sequence in tokens.
        role: "mixed" does all; "prefill" hands over after the first token, to a "decode" one.
        node: Whose host memory and network it uses; "" is a node of its own.
    """

    name: str
    manager: Callable[[Any], Any]
    cost: CostModel | Callable[[StepPlan], float]
    scheduler: SchedulerConfig
    max_model_len: int
    role: str = "mixed"
    node: str = ""

    def __post_init__(self) -> None:
        require(bool(self.name), "instance name='': must not be empty")
        require(self.role in ROLES, f"role={self.role}: must be one of {', '.join(ROLES)}")
        require(
            self.role == "mixed" or isinstance(self.cost, CostModel),
            f"{self.name}: role={self.role} needs a cost model, whose KV bytes are sent; give a CostModel",
        )


@dataclass(frozen=True)
class Change:
    """What happens to the fleet at a time.

    Attributes:
        at_s: When.
        kind: "join" (of `instance`), "leave" (takes no more requests, ends those it has) or "die" (all it had is lost).
        name: Who leaves or dies.
        instance: Who joins.
    """

    at_s: float
    kind: str
    name: str = ""
    instance: InstanceSpec | None = None

    def __post_init__(self) -> None:
        require(self.kind in CHANGES, f"change {self.kind}: must be one of {', '.join(CHANGES)}")
        require(
            0 <= self.at_s < math.inf, f"change at_s={self.at_s}: must be a time from 0, in seconds; try 60"
        )
        require(
            (self.instance is not None) == (self.kind == "join"),
            f"change {self.kind} at {self.at_s:g} s: a join, and only a join, brings an instance",
        )
        require(self.kind == "join" or bool(self.name), f"change {self.kind}: must name an instance")


@dataclass(frozen=True)
class LinkSpec:
    """The wires between nodes; those between device and host are the hardware's.

    Attributes:
        bytes_per_s: Of each node's network, each way.
        start_s: Until the first byte of a transfer moves.
        handover: "whole" sends a prompt's KV once it is computed; "layers" each layer's behind the next one.
    """

    bytes_per_s: float = 50e9
    start_s: float = 1e-3
    handover: str = "whole"

    def __post_init__(self) -> None:
        require(
            self.bytes_per_s > 0, f"links.bytes_per_s={self.bytes_per_s}: must be positive; try 50000000000"
        )
        require(0 <= self.start_s < math.inf, f"links.start_s={self.start_s}: must be from 0; try 0.001")
        require(
            self.handover in HANDOVERS,
            f"links.handover={self.handover}: must be one of {', '.join(HANDOVERS)}",
        )


@dataclass(frozen=True)
class StoreSpec:
    """A store of host memory on every node, and of its disk.

    Attributes:
        memory_bytes: Of each node; 0: no store.
        disk_bytes: Of each node, behind the memory; 0: no disk.
        disk_bytes_per_s / disk_start_s: Of each node's disk.
        pooled: Nodes read each other's memory and disks, and hold a block once.
    """

    memory_bytes: int = 0
    disk_bytes: int = 0
    disk_bytes_per_s: float = 6e9
    disk_start_s: float = 1e-3
    pooled: bool = False

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes"):
            value = getattr(self, name)
            require(value >= 0, f"store.{name}={value}: must be 0 (none) or positive")
        require(
            self.memory_bytes > 0 or not self.disk_bytes,
            f"store.disk_bytes={self.disk_bytes}: needs memory_bytes before it; set that too",
        )
        require(
            self.disk_bytes_per_s > 0,
            f"store.disk_bytes_per_s={self.disk_bytes_per_s}: must be positive; try 6000000000",
        )
        require(0 <= self.disk_start_s < math.inf, f"store.disk_start_s={self.disk_start_s}: must be from 0")


@dataclass(frozen=True)
class Arrivals:
    """When requests come.

    Attributes:
        kind: "trace": at their times; "fleet" or "instance": closed loop, so many at once over all, or for each
            instance that takes requests.
        scale: Times are divided by it; 8 is eight times the rate.
        concurrency: Requests under way in a closed loop.
    """

    kind: str = "trace"
    scale: float = 1.0
    concurrency: int = 0

    def __post_init__(self) -> None:
        kinds = ("trace", "fleet", "instance")
        require(self.kind in kinds, f"arrivals.kind={self.kind}: must be one of {', '.join(kinds)}")
        require(0 < self.scale < math.inf, f"arrivals.scale={self.scale}: must be positive; try 1")
        require(
            (self.concurrency >= 1) == (self.kind != "trace"),
            f"arrivals.concurrency={self.concurrency}: must be at least 1 in a closed loop (kind fleet or instance), "
            "and is 0 where the trace gives the times",
        )


@dataclass(frozen=True)
class Promise:
    """What users were promised; goodput counts requests that got it.

    Attributes:
        ttft_s: Most seconds to the first token.
        tbt_s: Most seconds between tokens, on average over a request.
        reject: Refuse at once what is predicted to miss it (Mooncake's early rejection).
    """

    ttft_s: float = math.inf
    tbt_s: float = math.inf
    reject: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tbt_s"):
            require(
                getattr(self, name) > 0, f"promise.{name}={getattr(self, name)}: must be positive; try 1.0"
            )
        require(
            not self.reject or min(self.ttft_s, self.tbt_s) < math.inf,
            "promise.reject=true: needs a promise; set promise.ttft_s or promise.tbt_s",
        )
