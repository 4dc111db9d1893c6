"""One instance within a fleet, and one request on its way through it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from pagedjax.cache import CacheEvent, EventLog
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import NO_COPIES
from pagedjax.config import SchedulerConfig
from pagedjax.engine.limits import chunk_tokens
from pagedjax.engine.request import SamplingParams
from pagedjax.engine.step import Row, StepPlan
from pagedjax.sim.cost import CostModel
from pagedjax.sim.fleet.books import Gaps, InstanceTotals
from pagedjax.sim.fleet.settings import InstanceSpec
from pagedjax.sim.metrics import RequestRecord
from pagedjax.sim.routing import Prompt, Worker
from pagedjax.sim.simulator import Instance
from pagedjax.sim.trace import TraceRequest
from pagedjax.sim.transfer import Landing, Link, Transfer

OnPlan = Callable[[int, StepPlan], None]


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: where it is, and what has to be undone if an instance dies under it.

    Attributes:
        number / request / prompt: As it came.
        lives: Times it was routed.
        member: Who computes its prompt, or the whole of it.
        decoder: Who decodes, where that is another one; None until chosen.
        reason / expected / fetched: As in `FleetRecord`.
        transfers: Under way for it.
        landed: (instance, digests) that wait there to be brought in.
        held: (instance, chain) pinned until the KV is sent.
        first: Record of its prompt, once that is computed elsewhere than its answer.
        sent_tokens: Positions whose KV has been handed to the links.
        sampling: How it is decoded, once somebody has asked.
    """

    number: int
    request: TraceRequest
    prompt: Prompt
    lives: int = 0
    member: Member | None = None
    decoder: Member | None = None
    reason: str = ""
    expected: int | None = None
    fetched: tuple[int, int, int] = (0, 0, 0)
    transfers: list[Transfer] = field(default_factory=list)
    landed: tuple[Member, list[bytes]] | None = None
    held: tuple[Member, TokenChain] | None = None
    first: RequestRecord | None = None
    sent_tokens: int = 0
    sampling: SamplingParams | None = None


def predictor(
    cost: CostModel | Callable[[StepPlan], float], config: SchedulerConfig
) -> Callable[[int, int], float]:
    """(tokens to compute, tokens before them) → seconds of the chunks that a prompt alone would take."""
    step_s = cost.step_s if isinstance(cost, CostModel) else cost
    chunk = chunk_tokens(config)
    nobody: Any = None

    @lru_cache(maxsize=4096)
    def prefill_s(count: int, before: int) -> float:
        seconds = 0.0
        while count > 0:
            now = min(count, chunk) if config.chunked_prefill else count
            seconds += step_s(StepPlan(0, (Row(nobody, before, now, ()),), (), NO_COPIES))
            count, before = count - now, before + now
        return seconds

    return prefill_s


class Member:
    """An instance, its place in the router's book, and its ends of the links.

    Attributes:
        accepting: Takes new requests.
        alive: Has not died, and has not left with nothing to do.
        jobs: Requests that would be lost with it, by number.
        fed: (request, first position, tokens, ends prompt) of prompts in the last planned step.
        began_s: When that step began.
    """

    def __init__(
        self,
        number: int,
        spec: InstanceSpec,
        now: float,
        *,
        events: bool,
        hash_plans: bool,
        gaps: Gaps,
        on_plan: OnPlan | None,
        lands: bool,
        prefill_s: Callable[[int, int], float],
    ) -> None:
        self.number = number
        self.spec = spec
        self.node = spec.node or spec.name
        self.log = EventLog() if events else None
        self.manager = spec.manager(self.log)
        self.run = Instance(
            self.manager,
            spec.cost,
            spec.scheduler,
            max_model_len=spec.max_model_len,
            hash_plans=hash_plans,
            on_step=self._planned,
            on_quiet=self._quiet,
        )
        self.worker = Worker(
            number,
            spec.name,
            spec.role,
            self.manager.block_size,
            self.manager.num_blocks,
            prefill_s,
            head_since_s=now,
        )
        self.totals = InstanceTotals(spec.name, spec.role)
        self.accepting = self.alive = True
        self.jobs: dict[int, Job] = {}
        self.version = 0
        self.fed: list[tuple[int, int, int]] = []
        self.began_s = now
        self.landing = Landing(self.manager) if lands else None
        self.pins: dict[bytes, int] = {}  # digest of a pinned chain's end → requests that hold it
        self.token_bytes = spec.cost.kv_bytes_per_token if isinstance(spec.cost, CostModel) else 0
        hardware = spec.cost.hardware if isinstance(spec.cost, CostModel) else None
        self.bus = (
            Link(f"host:{spec.name}", hardware.host_bytes_per_s, hardware.transfer_s) if hardware else None
        )
        self._gaps = gaps
        self._on_plan = on_plan
        self._joined_s = now

    def _planned(self, plan: StepPlan, elapsed: float) -> None:
        self.fed.clear()
        self.began_s = self.run.clock.now
        if self.spec.role == "prefill":
            for row in plan.rows:
                if not (row.samples and row.seq.num_output_tokens):
                    self.fed.append((int(row.seq.request.request_id), row.start, row.num_tokens))
        tokens = samples = 0
        for _, _, count, drawn in plan.rows:
            tokens += count
            samples += len(drawn)
        self.totals.computed_tokens += tokens
        # One sample a row: those that did not bring a first token brought a later one.
        self._gaps.add(elapsed, samples - len(self.run.started))
        if self._on_plan is not None:
            self._on_plan(self.number, plan)

    def _quiet(self, seconds: np.ndarray, rows: int) -> None:
        self.totals.computed_tokens += rows * len(seconds)
        self._gaps.add_each(seconds, rows)

    def fits(self, job: Job, num_tokens: int) -> bool:
        """Whether a request with a prompt of so many tokens can ever run here."""
        if job.sampling is None:
            job.sampling = self.run.sampling(job.request)
        try:
            self.run.engine.scheduler.check(num_tokens, job.sampling)
        except ValueError:
            return False
        return True

    def life(self, name: str) -> tuple[Job, int]:
        """A request that is here, and which of its lives this is."""
        job = self.jobs[int(name)]
        return job, job.lives

    def drain(self) -> list[CacheEvent]:
        """Cache events since the last call."""
        if self.log is None or not self.log.events:
            return []
        events = list(self.log.events)
        self.log.events.clear()
        return events

    def tbt_s(self, num_tokens: int) -> float:
        """Predicted seconds of a decode step with one request of so many tokens more."""
        cost, worker = self.spec.cost, self.worker
        if not isinstance(cost, CostModel):
            return 0.0
        return float(cost.decode_steps_s(worker.in_flight + 1, worker.tokens + num_tokens, 1)[0])

    # ------------------------------------------------------------------- pins

    def pin(self, chain: TokenChain) -> None:
        """Keep a chain's full blocks until as many calls of `unpin`."""
        if chain.num_full_blocks:
            end = chain.digest(chain.num_full_blocks - 1)
            self.pins[end] = self.pins.get(end, 0) + 1
            if self.pins[end] == 1:
                self.manager.pin(_full(chain))

    def unpin(self, chain: TokenChain) -> None:
        """Undo one `pin`."""
        if chain.num_full_blocks:
            end = chain.digest(chain.num_full_blocks - 1)
            self.pins[end] -= 1
            if not self.pins[end]:
                del self.pins[end]
                self.manager.unpin(_full(chain))

    @property
    def due_s(self) -> float:
        """When it plans next; infinite too where it has to wait until pinned KV is sent and gives room."""
        if self.pins and not self._has_room():
            return math.inf
        return self.run.due_s

    def _has_room(self) -> bool:
        """Whether those that run can end without a pinned block: the scheduler knows nothing of pins that will go."""
        manager, scheduler = self.manager, self.run.engine.scheduler
        need = 0
        for request in scheduler.running:
            seq = request.sequences[0]
            need += manager.num_blocks_for(seq.num_tokens + 1) - len(manager.table(seq.seq_id))
        if not scheduler.running and scheduler.waiting:
            need = manager.num_blocks_for(scheduler.waiting[0].num_prompt_tokens + 1)
        return bool(need <= manager.num_free)

    def close(self, now: float) -> None:
        """It is gone, or the run is over: totals are final and every block is given back."""
        if self.alive:
            self.totals.alive_s = now - self._joined_s
            self.alive = self.accepting = False
        result = self.run.finish()
        totals, stats = self.totals, self.manager.stats
        totals.steps, totals.busy_s, totals.plan_hash = result.num_steps, result.busy_s, result.plan_hash
        totals.prompt_tokens, totals.cached_tokens = stats.prompt_tokens, stats.hit_tokens

    def abort_all(self) -> None:
        """Give back what its requests hold."""
        for name in list(self.run.live):
            self.run.engine.abort(name)
        self.run.live.clear()


def _full(chain: TokenChain) -> TokenChain:
    """The chain without its partly filled tail, which is not indexed."""
    size = chain.block_size
    return TokenChain(chain.tokens[: chain.num_full_blocks * size], block_size=size)
