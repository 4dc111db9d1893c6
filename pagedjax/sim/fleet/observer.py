"""What a fleet tells whoever looks on, such as a record that is being written; nobody looks on unless asked."""

from __future__ import annotations

from typing import Protocol

from pagedjax.engine import Engine
from pagedjax.sim.fleet.settings import InstanceSpec


class FleetObserver(Protocol):
    """Told of what happens between instances; what happens within one its engine tells. Seconds on its clock."""

    def joined(self, number: int, spec: InstanceSpec, node: str, engine: Engine, now: float) -> None:
        """An instance is there; its engine has not run yet."""

    def gone(self, number: int, why: str, now: float) -> None:
        """An instance is there no more ("left", "died"), or the run is over ("end")."""

    def routed(self, request: int, to: int, reason: str, expected: int | None, now: float) -> None:
        """A request was sent to an instance; with what the router expected to be cached there."""

    def engaged(self, request: int, to: int, now: float) -> None:
        """An instance that decodes was chosen for a request."""

    def refused(self, request: int, reason: str, now: float) -> None:
        """A request was refused."""

    def moved(
        self,
        what: str,
        source: str,
        target: str,
        num_bytes: int,
        began_s: float,
        ended_s: float,
        request: int | None,
        arrived: bool,
    ) -> None:
        """KV moved: "hand-over", "fetch", "keep" (into a node's memory) or "sink" (from there to its disk)."""
