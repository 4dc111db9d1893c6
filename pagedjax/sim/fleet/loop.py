"""The fleet's event loop: N real engines on one virtual clock, in order of events."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from pagedjax.cache import CacheEvent
from pagedjax.config import SchedulerConfig
from pagedjax.sim.fleet.books import FleetRecord, FleetResult, Refusal
from pagedjax.sim.fleet.dispatch import Dispatch
from pagedjax.sim.fleet.member import Job, Member, OnPlan, predictor
from pagedjax.sim.fleet.moves import Moves
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
from pagedjax.sim.metrics import RequestRecord
from pagedjax.sim.routing import Knowledge, Prompt, Router
from pagedjax.sim.tokens import Prompts, own_token
from pagedjax.sim.trace import Trace, TraceRequest

# What comes first at equal times: what steps have brought, then changes of the fleet, then reports.
_BOOKED, _CHANGE, _REPORT = range(3)


class Fleet:
    """One run of a trace through a fleet; see `run_fleet`."""

    def __init__(
        self,
        trace: Trace,
        instances: Sequence[InstanceSpec],
        router: Router,
        knowledge: Knowledge,
        *,
        delay_s: float,
        decode_router: Router,
        changes: Sequence[Change],
        arrivals: Arrivals,
        links: LinkSpec,
        store: StoreSpec | None,
        promise: Promise,
        seed: int,
        until_s: float,
        skip: bool,
        hash_plans: bool,
        on_plan: OnPlan | None,
        log_rates: bool,
        observer: FleetObserver | None,
    ) -> None:
        self.observer = observer
        self.knowledge = knowledge
        self.result = FleetResult()
        self.moves = Moves(links, store, self._resume, self._queue, log_rates=log_rates, observer=observer)
        self.members: dict[int, Member] = {}
        self._predictors: dict[
            tuple[int, SchedulerConfig], Callable[[int, int], float]
        ] = {}  # one a kind of instance
        self._dispatch = Dispatch(
            self.members, self.moves, router, decode_router, knowledge, promise, seed, observer
        )
        self._delay_s = delay_s
        self._arrivals = arrivals
        self._until_s = until_s
        self._skip = skip and not hash_plans
        self._hash_plans = hash_plans
        self._on_plan = on_plan
        self._prompts = Prompts(trace)
        self._identified = trace.granularity > 0
        self._coming: Iterator[tuple[int, TraceRequest]] = iter(enumerate(trace))
        self._next: tuple[float, int, TraceRequest] | None = None
        self._exhausted = False
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._steps: list[tuple[float, int, int]] = []
        self._stranded: list[Job] = []
        self._joins_left = 0
        self._under_way = 0
        self._now = 0.0
        for spec in instances:
            self._join(spec, 0.0)
        for change in changes:
            self._joins_left += change.kind == "join"
            self._at(change.at_s, _CHANGE, lambda now, change=change: self._change(change, now))  # type: ignore[misc]

    # ------------------------------------------------------------------ the loop

    def run(self) -> FleetResult:
        """Play the trace to its end."""
        network = self.moves.network
        if self._arrivals.kind == "trace":
            self._pull(0.0)
        else:
            many = self._arrivals.concurrency * (
                len(self._dispatch.offered()) if self._arrivals.kind == "instance" else 1
            )
            for _ in range(many):
                self._at(0.0, _CHANGE, self._arrive_in_loop)
        while self._under_way or not self._exhausted:
            while self._steps and self._steps[0][2] != self.members[self._steps[0][1]].version:
                heapq.heappop(self._steps)
            event = self._events[0][0] if self._events else math.inf
            arrival = self._next[0] if self._next is not None else math.inf
            step = self._steps[0][0] if self._steps else math.inf
            now = min(event, network.next_s, arrival, step)
            if now >= self._until_s or now == math.inf:
                break
            self._now = now
            if event == now:
                heapq.heappop(self._events)[3](now)
            elif network.next_s == now:
                network.advance(now)
            elif arrival == now:
                self._arrive(now)
            else:
                self._step(self.members[heapq.heappop(self._steps)[1]])
        return self._finish()

    def _at(self, at: float, order: int, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, order, next(self._order), action))

    def _queue(self, member: Member) -> None:
        """Its next step is due at another time than before, perhaps."""
        member.version += 1
        if member.alive:
            due = member.due_s
            if due < math.inf:  # one that had to wait for room goes on now
                heapq.heappush(self._steps, (max(due, self._now), member.number, member.version))

    def _finish(self) -> FleetResult:
        result = self.result
        for job in self._stranded:
            self._refuse(job, result.end_s, "no instance")
        for member in self.members.values():
            if member.alive:
                for job in list(member.jobs.values()):  # cut off by `until_s`
                    self.moves.cancel(job, result.end_s)
                member.abort_all()
                self._close(member, "end", max(result.end_s, 0.0))
        result.instances = [member.totals for member in self.members.values()]
        if not self._identified:  # nothing was equal because nothing was known to be
            for totals in result.instances:
                totals.cached_tokens = None
        network = self.moves.network
        result.sent_bytes, result.received_bytes = network.sent_bytes, network.received_bytes
        result.lost_bytes, result.rates = network.lost_bytes, network.log
        result.links = {link.name: link.moved_bytes for link in self.moves.all_links() if link.moved_bytes}
        return result

    # ------------------------------------------------------------------ arrivals

    def _pull(self, now: float) -> None:
        """The next request of the trace, at its time or now."""
        following = next(self._coming, None)
        if following is None:
            self._next, self._exhausted = None, True
            return
        number, request = following
        at = request.arrival_s / self._arrivals.scale if self._arrivals.kind == "trace" else now
        if at != request.arrival_s:
            request = replace(request, arrival_s=at)
        self._next = (at, number, request)

    def _arrive(self, now: float) -> None:
        assert self._next is not None
        _, number, request = self._next
        self._next = None
        if self._arrivals.kind == "trace":
            self._pull(now)
        self._count_under_way(1, now)
        prompt = Prompt(number, self._prompts.tokens(number, request), request.session)
        self._route(Job(number, request, prompt), now)

    def _arrive_in_loop(self, now: float) -> None:
        self._pull(now)
        if self._next is not None:
            self._arrive(now)

    def _count_under_way(self, step: int, now: float) -> None:
        self._under_way += step
        self.result.under_way.set(self._under_way, now)

    def _leaves(self, now: float) -> None:
        """A request is through, one way or another."""
        self.result.end_s = max(self.result.end_s, now)
        self._count_under_way(-1, now)
        if self._arrivals.kind != "trace":
            self._at(now, _CHANGE, self._arrive_in_loop)

    def _refuse(self, job: Job, now: float, reason: str) -> None:
        self.result.refused.append(Refusal(job.number, now, reason))
        if self.observer is not None:
            self.observer.refused(job.number, reason, now)
        self._leaves(now)

    # ------------------------------------------------------------------- routing

    def _route(self, job: Job, now: float) -> None:
        """Choose who computes a request, and send it there or refuse it."""
        if self._joins_left and not self._dispatch.offered():
            self._stranded.append(job)
            return
        reason, decoder = self._dispatch.send(job, now)
        if reason:
            self._refuse(job, now, reason)
            return
        if decoder is not None and self.moves.links.handover == "layers":
            self._dispatch.engage(job, decoder, now)
        if not self.moves.fetch(job, now):
            self._resume(job, now)

    def _resume(self, job: Job, now: float) -> None:
        """All that was on its way to an instance is there: queue the request in its engine."""
        member = job.member
        assert member is not None
        request, tokens = job.request, job.prompt.tokens
        target = member if job.first is None else job.decoder
        assert target is not None
        chain = job.prompt.chain(target.worker.block_size)
        if job.first is not None:  # its first token belongs to the prompt now
            first = own_token(job.number) if request.output_ids is None else request.output_ids[0]
            tokens = np.append(tokens, np.int32(first))
            chain.append(int(first))
            rest = None if request.output_ids is None else request.output_ids[1:]
            request = replace(
                request, num_input=len(tokens), num_output=request.num_output - 1, output_ids=rest
            )
            del member.jobs[job.number]  # whatever becomes of it now, this one goes on
            if not member.accepting and not member.jobs:
                self._gone(member, now)
        elif member.spec.role == "prefill":
            request = replace(request, num_output=1)
        sampling = job.sampling if request is job.request else None
        target.run.add(str(job.number), request, tokens, now, chain=chain, sampling=sampling)
        self._queue(target)

    # -------------------------------------------------------------------- steps

    def _step(self, member: Member) -> None:
        run = member.run
        run.wake(self._now)
        ended = run.step()
        end = run.clock.now
        if self._skip:
            run.look_ahead()
        if member.fed and self.moves.links.handover == "layers":
            for number, start, count in member.fed:
                job = member.jobs[number]
                if job.decoder is not None:
                    self.moves.send_layers(job, start + count, member.began_s, end)
        started = [member.life(name) for name in run.started]
        records = [(*member.life(name), record) for name, record in ended]
        events = member.drain()
        if started or records or events:
            self._at(end, _BOOKED, lambda now: self._booked(member, started, records, events, now))
        self._queue(member)

    def _booked(
        self,
        member: Member,
        started: list[tuple[Job, int]],
        ended: list[tuple[Job, int, RequestRecord]],
        events: list[CacheEvent],
        now: float,
    ) -> None:
        """A step is over: what it brought is seen from here on, unless the instance has died in it."""
        if not member.alive:
            return
        if events:
            self.moves.keep(member, events, now)
            if self.knowledge.wants_events and member.spec.role != "decode":
                self._report(member, events, now)
        for job, life in started:
            if job.lives == life and job.number in member.jobs:
                self.moves.settle(job)
                member.worker.start(job.number, now)
                if member is job.member:
                    self._dispatch.router.started(job.prompt, member.worker, now)
        for job, life, record in ended:
            if job.lives == life and job.number in member.jobs:
                self._ended(member, job, record, now)
        if not member.accepting and not member.jobs:
            self._gone(member, now)

    def _report(self, member: Member, events: list[CacheEvent], now: float) -> None:
        if not self._delay_s:
            self.knowledge.report(member.number, events)
            return

        def arrive(at: float) -> None:
            if member.alive:
                self.knowledge.report(member.number, events)

        self._at(now + self._delay_s, _REPORT, arrive)

    def _ended(self, member: Member, job: Job, record: RequestRecord, now: float) -> None:
        if member is job.member and member.spec.role == "prefill" and job.request.num_output > 1:
            job.first = record
            self._dispatch.left(job, now)
            if job.decoder is None:
                decoder = self._dispatch.decoder(job, now)
                if decoder is None:
                    del member.jobs[job.number]
                    self._refuse(job, now, "no instance")
                    return
                self._dispatch.engage(job, decoder, now)
            self.moves.hand_over(job, now)
            return
        if job.first is None:
            self._dispatch.left(job, now)
            times = record
        else:
            first = job.first
            member.worker.end(job.number, now)
            self._dispatch.decode_router.ended(job.prompt, member.worker, now)
            times = replace(
                first,
                finished_s=record.finished_s,
                num_output=record.num_output + 1,
                num_preemptions=first.num_preemptions + record.num_preemptions,
                reason=record.reason,
            )
        self._forget(job)
        assert job.member is not None
        self.result.records.append(
            FleetRecord(
                job.number,
                times,
                job.member.spec.name,
                member.spec.name if member is not job.member else "",
                job.reason,
                job.expected,
                job.fetched,
                job.lives,
            )
        )
        self._leaves(now)

    def _forget(self, job: Job) -> None:
        for place in (job.member, job.decoder):
            if place is not None:
                place.jobs.pop(job.number, None)

    # ------------------------------------------------------- joins, leaves, deaths

    def _join(self, spec: InstanceSpec, now: float) -> None:
        names = [m.spec.name for m in self.members.values() if m.alive]
        require(spec.name not in names, f"instance {spec.name}: is there already; choose another name")
        kind = (id(spec.cost), spec.scheduler)
        if kind not in self._predictors:
            self._predictors[kind] = predictor(spec.cost, spec.scheduler)
        member = Member(
            len(self.members),
            spec,
            now,
            events=self.knowledge.wants_events or self.moves.wants_events,
            hash_plans=self._hash_plans,
            gaps=self.result.gaps,
            on_plan=self._on_plan,
            lands=spec.role == "decode" or self.moves.wants_events,
            prefill_s=self._predictors[kind],
        )
        self.members[member.number] = member
        if self.observer is not None:
            self.observer.joined(member.number, spec, member.node, member.run.engine, now)
        self.moves.join(member)
        self.knowledge.joined(member.number, member.worker.block_size)

    def _change(self, change: Change, now: float) -> None:
        if change.instance is not None:
            self._joins_left -= 1
            self._join(change.instance, now)
            stranded, self._stranded = self._stranded, []
            for job in stranded:
                self._route(job, now)
            return
        found = [m for m in self.members.values() if m.alive and m.spec.name == change.name]
        require(
            bool(found), f"change {change.kind} at {change.at_s:g} s: no instance {change.name} is alive then"
        )
        member = found[0]
        member.accepting = False
        if change.kind == "die":
            self._die(member, now)
        elif not member.jobs:
            self._gone(member, now)

    def _close(self, member: Member, why: str, now: float) -> None:
        member.close(now)
        if self.observer is not None:
            self.observer.gone(member.number, why, now)

    def _gone(self, member: Member, now: float, why: str = "left") -> None:
        self._close(member, why, now)
        self._queue(member)
        self.knowledge.gone(member.number)
        if not any(m.alive and m.node == member.node for m in self.members.values()):
            self.moves.node_gone(member.node, now)

    def _die(self, member: Member, now: float) -> None:
        """All it had is lost; its requests begin anew elsewhere, in order of arrival."""
        lost = [member.jobs[number] for number in sorted(member.jobs)]
        for job in lost:
            self.moves.cancel(job, now)
            dispatch = self._dispatch
            for place, router in ((job.member, dispatch.router), (job.decoder, dispatch.decode_router)):
                if place is not None and job.number in place.worker.sent:
                    place.worker.end(job.number, now)
                    router.ended(job.prompt, place.worker, now)
                if place is not None and place is not member and place.run.cancel(str(job.number), now):
                    self._queue(place)
            self._forget(job)
            job.member = job.decoder = job.first = None
            job.fetched, job.sent_tokens = (0, 0, 0), 0
        member.abort_all()
        self._gone(member, now, "died")
        for job in lost:
            self._route(job, now)
