"""A measured run beside simulations of it: once with its own plans, once with the cost model's own clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pagedjax.bench.calibrate import computed_how
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.metrics import RequestRecord
from pagedjax.sim.play import Followed, Played, follow
from pagedjax.sim.simulator import Simulation, simulate

if TYPE_CHECKING:
    from pagedjax.llm import LLM


@dataclass(frozen=True)
class Beside:
    """What a cost model says of a played run.

    Attributes:
        followed: The run's own plans, step by step.
        measured_s / simulated_s: Seconds of all steps, compiling left out; by the clock, and by the cost model.
        step_error_median: Of the relative errors of one step.
        result: Of the same requests simulated on a clock of their own: open loop, as `simulate` has it.
        manager: Of that simulation.
        basis: Where step times come from.
    """

    followed: Followed
    measured_s: float
    simulated_s: float
    step_error_median: float
    result: Simulation
    manager: Any
    basis: str

    @property
    def ratio(self) -> float:
        """Simulated over measured seconds of the same steps."""
        return self.simulated_s / self.measured_s


def cost_of(llm: LLM, hardware: HardwareSpec) -> CostModel:
    """The cost model of a loaded model on some hardware.

    Raises:
        ValueError: The hardware's steps were measured in another precision, on another device, or by another kernel.
    """
    itemsize = jax.numpy.dtype(llm.config.model.dtype).itemsize
    cost = CostModel(hardware, llm.model_config, llm.manager.block_size, itemsize).under(llm.config.scheduler)
    for name, ours in computed_how(llm).items() if cost.steps is not None else ():
        theirs = getattr(cost.steps, name)
        if theirs != ours:
            raise ValueError(
                f"{hardware.name}: its steps were measured with {name}={theirs!r}, this run has {ours!r}; calibrate "
                "again"
            )
    return replace(
        cost, kv_dtype=llm.runner.layout.dtype
    )  # what of it the steps were measured with is in "dtype"


def beside(
    llm: LLM,
    played: Played,
    cost: CostModel,
    *,
    name: str,
    until_s: float,
    in_flight: int = 0,
    known: bool = True,
    on_record: Callable[[RequestRecord], None],
) -> Beside:
    """Plan a run once more, and simulate its requests.

    Args:
        llm: What it ran on.
        played: With its timeline.
        cost: Of `cost_of`.
        name: The trace's.
        until_s: Where the run's clock was stopped.
        in_flight: Of its closed loop; 0: open.
        known: The trace says which prefixes are equal.
        on_record: Gets the simulation's records.

    Raises:
        ValueError: Nothing ran.
    """
    timeline = played.timeline
    if timeline is None or not timeline.requests:
        raise ValueError("beside: no request ran, so there is nothing to compare; play some with keep=True")
    config = llm.config
    followed = follow(
        timeline,
        llm.new_manager(),
        config.scheduler,
        cost.step_s,
        max_model_len=llm.max_model_len,
        block_bytes=llm.runner.block_bytes,
        hash_scheme=config.cache.hash,
    )
    measured = np.array(timeline.seconds)
    ran = np.array([bool(digest) for digest in timeline.digests]) & (
        np.arange(len(measured)) < followed.equal_steps
    )
    manager = llm.new_manager()
    result = simulate(
        timeline.trace(name),
        manager,
        cost,
        config.scheduler,
        max_model_len=llm.max_model_len,
        n=timeline.requests[0][2].sampling.n,
        until_s=until_s,
        in_flight=in_flight,
        on_record=on_record if known else lambda record: on_record(replace(record, num_cached=None)),
    )
    return Beside(
        followed,
        float(measured[ran].sum()),
        float(followed.seconds[ran].sum()),
        float(np.median(np.abs(followed.seconds[ran] / measured[ran] - 1))) if ran.any() else float("nan"),
        result,
        manager,
        cost.basis(config.scheduler),
    )
