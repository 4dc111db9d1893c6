"""One point of a sweep: a trace under some settings and a seed, simulated or replayed, as one flat row."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pagedjax.config import SIMULATED, Config, full_key, parse_value
from pagedjax.sim.beams import Beams
from pagedjax.sim.fleet.file import InstanceTable
from pagedjax.sim.metrics import Tally
from pagedjax.sim.references import load_references, replay_references
from pagedjax.sim.replay import PolicyStore
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import Trace

MEASURES = ("simulate", "replay")
INSERTS = ("prompt", "prompt+output")
REPLAYED = ("cache.block_size", "cache.num_blocks", "cache.policy")


@dataclass(frozen=True)
class Setup:
    """What is not the engine's: the machine, the model's shape, arrivals, the promise.

    Attributes:
        hardware / devices / free_links / shape / reserve / max_model_len: As in a fleet's table of instances.
        n: Samples per request.
        beam_width / beam_gap: Beam search with drawn candidates, as `Beams` has them; width 0: none.
        rate: New Poisson arrivals, requests a second; 0 keeps the file's.
        burst: With a rate: in groups of this size.
        rate_scale: The file's arrivals, so many times as fast.
        in_flight: A closed loop of so many requests at once; 0: by their times.
        head: The first so many requests; 0: all.
        until_s: Stop the clock then.
        ttft_s / tpot_s: Promised, for goodput.
        insert: Of a replay: "prompt" or "prompt+output".
    """

    hardware: str = "h100-80gb"
    devices: int = 1
    free_links: bool = False
    shape: str = "llama-3-8b"
    reserve: float = 0.1
    max_model_len: int = 131_072
    n: int = 1
    beam_width: int = 0
    beam_gap: float = 1.0
    rate: float = 0.0
    burst: int = 1
    rate_scale: float = 1.0
    in_flight: int = 0
    head: int = 0
    until_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    insert: str = "prompt"

    def __post_init__(self) -> None:
        positive = (
            "devices",
            "max_model_len",
            "n",
            "burst",
            "beam_gap",
            "rate_scale",
            "until_s",
            "ttft_s",
            "tpot_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0; try {getattr(Setup, name)}")
        for name in ("head", "in_flight", "rate", "beam_width"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a number from 0; 0 leaves it out")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: must be a share from 0 and below 1; try 0.1")
        if self.insert not in INSERTS:
            raise ValueError(f"insert={self.insert}: must be one of {', '.join(INSERTS)}")
        if self.burst > 1 and not self.rate:
            raise ValueError(f"burst={self.burst}: has an effect with a rate only; leave it out")
        if self.in_flight and (self.rate or self.rate_scale != 1):
            raise ValueError(
                f"in_flight={self.in_flight}: a closed loop has no rate of arrivals; leave rate and rate_scale out"
            )
        if self.rate and self.rate_scale != 1:
            raise ValueError(
                f"rate={self.rate}: draws arrivals that rate_scale would scale; give one of them"
            )


_REPLAY_SETUP = ("head", "insert")


def known_keys(measure: str) -> tuple[str, ...]:
    """Settings that change what a trial measures."""
    if measure == "replay":
        return (*REPLAYED, *_REPLAY_SETUP)
    return (*SIMULATED, *(f.name for f in fields(Setup) if f.name != "insert"))


def resolve(measure: str, key: str) -> str:
    """The full name of a setting.

    Raises:
        ValueError: Unknown, or without effect on this measure; the nearest is named.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure={measure}: must be one of {', '.join(MEASURES)}")
    known = known_keys(measure)
    name = key.replace("-", "_")
    if name not in known:
        with suppress(ValueError):
            name = full_key(name)
    if name not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
        raise ValueError(f"{key}: is no setting of {measure}, or has no effect there; {remedy}")
    return name


def read_settings(settings: Mapping[str, Any]) -> tuple[Config, Setup]:
    """Settings by their full names, typed and checked.

    Raises:
        ValueError: A value of another kind or out of its range.
    """
    base = Config().replace({"scheduler.max_num_seqs": 256, "scheduler.token_budget": 8192})
    kinds = {f.name: type(f.default) for f in fields(Setup)}
    config = base.replace({k: v for k, v in settings.items() if k not in kinds})
    own = {k: parse_value(k, v, kinds[k]) for k, v in settings.items() if k in kinds}
    return config, replace(Setup(), **own)


def run_trial(
    trace: Trace, settings: Mapping[str, Any], seed: int, measure: str = "simulate"
) -> dict[str, Any]:
    """Measure one point; what is unknown is None.

    Args:
        trace: Requests.
        settings: By full name, as `known_keys` lists them.
        seed: Of arrivals.
        measure: "simulate" (the engine on a virtual clock) or "replay" (blocks alone).

    Raises:
        ValueError: A setting is wrong, or no request ends.
    """
    config, setup = read_settings(settings)
    trace = trace.head(setup.head) if setup.head else trace
    if measure == "replay":
        return _replayed(trace, config, setup)
    if setup.rate:
        trace = trace.with_arrivals(setup.rate, seed=seed, burst=setup.burst)
    if setup.rate_scale != 1:
        trace = trace.faster(setup.rate_scale)
    names = ("hardware", "devices", "free_links", "shape", "reserve", "max_model_len")
    table = InstanceTable(
        cache=config.cache, scheduler=config.scheduler, **{name: getattr(setup, name) for name in names}
    )
    (spec,) = table.specs()
    manager: Any = spec.manager(None)
    tally = Tally(ttft_limit_s=setup.ttft_s, tpot_limit_s=setup.tpot_s)
    result = simulate(
        trace,
        manager,
        spec.cost,
        spec.scheduler,
        max_model_len=spec.max_model_len,
        n=setup.n,
        beams=Beams(setup.beam_width, setup.beam_gap, seed) if setup.beam_width else None,
        until_s=setup.until_s,
        in_flight=setup.in_flight,
        on_record=tally.add,
    )
    if not tally.requests:
        raise ValueError(f"{trace.name}: no request ended; raise until_s, max_model_len or the pool")
    row: dict[str, Any] = {}
    for name, value in asdict(tally.summary()).items():
        row |= {f"{name}_p{p}": v for p, v in value.items()} if isinstance(value, dict) else {name: value}
    promised = min(setup.ttft_s, setup.tpot_s) < math.inf
    row["goodput"] = row["goodput"] if promised else None
    row["good_share"] = tally.good / tally.requests if promised else None
    return row | {
        "refused": result.refused,
        "swaps": result.num_swaps,
        "steps": result.num_steps,
        "busy_s": result.busy_s,
        "batch": result.batch,
        "pool_held": result.held,
        "pool_held_most": result.most_held,
        "blocks": manager.num_usable,
    }


def _replayed(trace: Trace, config: Config, setup: Setup) -> dict[str, Any]:
    cache = config.cache
    if cache.num_blocks is None:
        raise ValueError("cache.num_blocks=auto: a replay needs a number of blocks; set it, or sweep it")
    refs = load_references(trace, cache.block_size, insert=setup.insert)  # type: ignore[arg-type]
    counts = replay_references(refs, PolicyStore(cache.num_blocks - 1, cache.policy))
    shares = ("by_block", "by_full_block", "by_token", "mean_per_request", "by_engine")
    return {
        "requests": counts.requests,
        "blocks": counts.blocks,
        "hit_blocks": counts.hit_blocks,
        "unheard": sum(refs.unheard.values()),
        **{name: getattr(counts, name) for name in shares},
    }
