"""A fleet from a TOML file and `key=value` strings: tables of instances, a router and its options, links, a store."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from pagedjax.config import NOT_SIMULATED, CacheConfig, SchedulerConfig, parse_value, read_toml
from pagedjax.engine.managers import make_manager
from pagedjax.models.family_configs import read_shape
from pagedjax.paths import shipped_file
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.fleet import TREE_TOKENS
from pagedjax.sim.fleet.settings import (
    Arrivals,
    Change,
    InstanceSpec,
    LinkSpec,
    Promise,
    StoreSpec,
    require,
)

MOST = 10_000  # instances of a table


@dataclass(frozen=True)
class FleetTable:
    """The table [fleet]; see `run_fleet`.

    Attributes:
        router / knowledge / delay_s / tree_tokens / ttl_s / decode_router / seed / until_s: As there.
    """

    router: str = "round-robin"
    knowledge: str = ""
    delay_s: float = 0.0
    tree_tokens: int = TREE_TOKENS
    ttl_s: float = math.inf
    decode_router: str = "least-tokens"
    seed: int = 0
    until_s: float = math.inf

    def __post_init__(self) -> None:
        require(self.seed >= 0, f"fleet.seed={self.seed}: must be at least 0")
        require(self.tree_tokens >= 1, f"fleet.tree_tokens={self.tree_tokens}: must be at least 1")
        require(0 <= self.delay_s < math.inf, f"fleet.delay_s={self.delay_s}: must be from 0, in seconds")
        for name in ("ttl_s", "until_s"):
            value = getattr(self, name)
            require(value > 0, f"fleet.{name}={value}: must be positive, in seconds; leave it out for no end")


@dataclass(frozen=True)
class InstanceTable:
    """One table [[instance]]: so many equal instances.

    Attributes:
        name: Of the one, or the beginning of the names of all.
        count: How many.
        hardware / devices: A hardware file or its name, and how many of them make up one instance: a slice whose links
            take their time.
        free_links: The devices' links take none: an upper bound, and what hardware without links can do.
        shape: A model's shape: a config.json or its name.
        role: "mixed", "prefill" or "decode".
        per_node: Instances that share a node's host memory and network; 1: each is its own node.
        max_model_len: Longest sequence in tokens.
        reserve: Share of the memory that is neither weights nor KV, where cache.num_blocks is auto.
        cache / scheduler: As in [cache] and [scheduler] elsewhere.
    """

    name: str = "h"
    count: int = 1
    hardware: str = "h100-80gb"
    devices: int = 1
    free_links: bool = False
    shape: str = "llama-3-8b"
    role: str = "mixed"
    per_node: int = 1
    max_model_len: int = 131_072
    reserve: float = 0.1
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=256, token_budget=8192)
    )

    def __post_init__(self) -> None:
        for name in ("count", "devices", "per_node", "max_model_len"):
            value = getattr(self, name)
            require(value >= 1, f"instance.{name}={value}: must be at least 1")
        # Each is an engine of its own: a slip of the finger would fill the memory before anything is said.
        require(self.count <= MOST, f"instance.count={self.count}: must be at most {MOST:,}; simulate a part")
        require(0 <= self.reserve < 1, f"instance.reserve={self.reserve}: must be from 0 and below 1")

    def specs(self) -> list[InstanceSpec]:
        """The instances.

        Raises:
            ValueError: No such hardware, shape, index or policy, or the model does not fit.
        """
        one = HardwareSpec.read(self.hardware)
        hardware = one.idealised(self.devices) if self.free_links else one.times(self.devices)
        cost = CostModel(
            hardware, read_shape(self.shape), self.cache.block_size, kv_dtype=self.cache.dtype
        ).under(self.scheduler)
        blocks = self.cache.num_blocks or cost.kv_blocks(self.reserve)

        def make(log: Any) -> Any:
            return make_manager(self.cache, num_blocks=blocks, max_model_len=self.max_model_len, events=log)

        return [
            InstanceSpec(
                name=f"{self.name}{i}" if self.count > 1 else self.name,
                manager=make,
                cost=cost,
                scheduler=self.scheduler,
                max_model_len=self.max_model_len,
                role=self.role,
                node=f"{self.name}-node{i // self.per_node}" if self.per_node > 1 else "",
            )
            for i in range(self.count)
        ]


_TABLES: dict[str, type] = {
    "fleet": FleetTable,
    "arrivals": Arrivals,
    "links": LinkSpec,
    "store": StoreSpec,
    "promise": Promise,
}


@dataclass(frozen=True)
class FleetFile:
    """A fleet's settings, read and checked.

    Attributes:
        tables: [fleet], [arrivals], [links], [store], [promise] by name.
        options: [router]: the router's options.
        instances: [[instance]].
        changes: [[change]]: (at_s, kind, name, who joins).
    """

    tables: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    instances: tuple[InstanceTable, ...] = (InstanceTable(),)
    changes: tuple[tuple[float, str, str, InstanceTable | None], ...] = ()

    def specs(self) -> list[InstanceSpec]:
        """The instances that are there from the start."""
        return [spec for table in self.instances for spec in table.specs()]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `run_fleet`."""
        changes = [
            Change(at_s, kind, name, joins.specs()[0] if joins is not None else None)
            for at_s, kind, name, joins in self.changes
        ]
        return {
            **vars(self.tables["fleet"]),
            "options": self.options,
            "changes": changes,
            "arrivals": self.tables["arrivals"],
            "links": self.tables["links"],
            "store": self.tables["store"] if self.tables["store"].memory_bytes else None,
            "promise": self.tables["promise"],
        }


def read_fleet(source: str | Path | None = None, settings: Iterable[str] = ()) -> FleetFile:
    """Read a TOML file, then apply `key=value` strings in order.

    Args:
        source: Path of a file, or the name of one in configs/fleets/; None: one instance, all defaults.
        settings: "fleet.router=mooncake", "router.threshold=0.4", "links.handover=layers", "instance.count=8",
            "instance.cache.policy=lfu": what stands under `instance` changes every table of instances.

    Raises:
        ValueError: No such file, not TOML, an unknown key (the nearest is named), a bad value.
    """
    values: dict[str, Any] = {}
    where = "fleet"
    if source is not None:
        path = shipped_file("fleets", source)
        where = str(path)
        values = read_toml(path, "see configs/fleets/ for examples")
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: must be key=value; try --set fleet.router=mooncake")
        _set(values, key.strip().split("."), _Typed(value.strip()))
    try:
        return _from_dict(values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if source is not None else str(error)) from None


class _Typed(str):
    """A value as typed on the command line, where numbers are text; in a file they are not."""


def _set(values: dict[str, Any], path: list[str], value: str) -> None:
    if path[0] == "instance":
        tables = values.setdefault("instance", [{}])
        for table in tables if isinstance(tables, list) else [tables]:
            _put(table, path[1:], value)
        return
    _put(values, path, value)


def _put(table: dict[str, Any], path: list[str], value: str) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
        require(isinstance(table, dict), f"{'.'.join(path)}: {part} is no table")
    table[path[-1] if path else ""] = value


def _from_dict(values: Mapping[str, Any]) -> FleetFile:
    known = [*_TABLES, "router", "instance", "change"]
    for name in values:
        require(name in known, f"{name}: is no table of a fleet; {_near(name, known)}")
    tables = {name: _typed(kind, name, values.get(name, {})) for name, kind in _TABLES.items()}
    instances = tuple(_instance("instance", table) for table in _list(values, "instance")) or (
        InstanceTable(),
    )
    options = values.get("router", {})
    require(
        isinstance(options, dict), "router: must be a table of options; the router itself is fleet.router"
    )
    changes = tuple(_change(table) for table in _list(values, "change"))
    return FleetFile(tables, {name: _number(value) for name, value in options.items()}, instances, changes)


def _number(value: Any) -> Any:
    """An option as typed on the command line; what it may be is the router's to say."""
    if isinstance(value, _Typed):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    tables = values.get(name, [])
    require(isinstance(tables, list), f"{name}: must be a list of tables; write [[{name}]]")
    return list(tables)


def _near(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def _parsed(key: str, value: Any, kind: Any) -> Any:
    return parse_value(key, value, kind, typed=isinstance(value, _Typed))


def _typed(kind: type, where: str, values: Any) -> Any:
    """A dataclass from a table, every key known and every value of its kind."""
    require(isinstance(values, dict), f"{where}: must be a table; write [{where}]")
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in values.items():
        require(name in hints, f"{where}.{name}: is not a setting; {_near(name, hints)}")
        given[name] = _parsed(f"{where}.{name}", value, hints[name])
    return kind(**given)


def _instance(where: str, values: Any) -> InstanceTable:
    require(isinstance(values, dict), f"{where}: must be a table; write [[{where}]]")
    cache, scheduler = values.get("cache", {}), values.get("scheduler", {})
    require(isinstance(cache, dict), f"{where}.cache: must be a table")
    for name, remedy in NOT_SIMULATED.items():
        require(name not in cache, f"{where}.cache.{name}: has no effect in a simulation; {remedy}")
    rest = {name: value for name, value in values.items() if name not in ("cache", "scheduler")}
    table: InstanceTable = _typed(InstanceTable, where, rest)
    merged = vars(table.scheduler) | (scheduler if isinstance(scheduler, dict) else {"": scheduler})
    return replace(
        table,
        cache=_typed(CacheConfig, f"{where}.cache", cache),
        scheduler=_typed(SchedulerConfig, f"{where}.scheduler", merged),
    )


def _change(values: Any) -> tuple[float, str, str, InstanceTable | None]:
    require(isinstance(values, dict), "change: must be a table; write [[change]]")
    rest = dict(values)
    joins = rest.pop("instance", None)
    table = None if joins is None else _instance("change.instance", joins)
    require(
        table is None or table.count == 1,
        "change.instance.count: one joins at a time; write another [[change]]",
    )
    kinds = {"at_s": float, "kind": str, "name": str}
    for name in rest:
        require(name in kinds, f"change.{name}: is not a setting; {_near(name, [*kinds, 'instance'])}")
    for name in ("at_s", "kind"):
        require(name in rest, f"change: must have {name}")
    typed = {name: _parsed(f"change.{name}", value, kinds[name]) for name, value in rest.items()}
    return typed["at_s"], typed["kind"], typed.get("name", ""), table
