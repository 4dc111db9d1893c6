"""KV on the move in a fleet: prompts handed over, blocks written to a store and fetched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from pagedjax.cache import CacheEvent
from pagedjax.sim.fleet.member import Job, Member
from pagedjax.sim.fleet.observer import FleetObserver
from pagedjax.sim.fleet.settings import LinkSpec, StoreSpec, require
from pagedjax.sim.routing import Forecast, Prompt, View, Worker
from pagedjax.sim.transfer import Link, Network, Place, Store, Transfer


class Moves:
    """Links, store, and the transfers of all jobs.

    Args:
        links: Wires between nodes.
        store: The store's size; None: there is none.
        resume: Called with a job whose transfers have all ended, and the time.
        pinned: Called with an instance whose pins have changed, so when it may step.
        log_rates: Keep every change of a transfer's rate.
        observer: Told of each transfer when it ends.
    """

    def __init__(
        self,
        links: LinkSpec,
        store: StoreSpec | None,
        resume: Callable[[Job, float], None],
        pinned: Callable[[Member], None],
        *,
        log_rates: bool = False,
        observer: FleetObserver | None = None,
    ) -> None:
        self._observer = observer
        self._told: dict[int, Callable[[float, bool], None]] = {}  # transfers that somebody looks at
        self.network = Network(log_rates=log_rates)
        self.links = links
        self.store: Store | None = None
        self._spec = store
        self._resume = resume
        self._pinned = pinned
        self._out: dict[str, Link] = {}
        self._in: dict[str, Link] = {}
        self._disk: dict[str, Link] = {}
        self._buses: list[Link] = []
        self._block: tuple[int, int] | None = None  # tokens and bytes of a stored block
        self._fetching: dict[int, tuple[Job, list[str]]] = {}  # jobs that fetch, from which nodes

    @property
    def wants_events(self) -> bool:
        """Instances' cache events are needed, and what lands at them is to be brought in."""
        return self._spec is not None

    # ------------------------------------------------------------- who is there

    def join(self, member: Member) -> None:
        """A member's links, and its node's part of the store."""
        node = member.node
        if member.bus is not None:
            self._buses.append(member.bus)
        if node not in self._out:
            self._out[node] = Link(f"out:{node}", self.links.bytes_per_s, self.links.start_s)
            self._in[node] = Link(f"in:{node}", self.links.bytes_per_s, self.links.start_s)
        if self._spec is None:
            return
        block = (member.worker.block_size, member.worker.block_size * member.token_bytes)
        require(
            member.token_bytes > 0, f"{member.spec.name}: a store needs cost models, whose KV bytes are moved"
        )
        require(
            self._block in (None, block),
            f"{member.spec.name}: blocks of {block[0]} tokens and {block[1]} bytes: a store wants one block "
            f"size and model, others have {self._block}",
        )
        if self.store is None:
            self._block = block
            memory, disk = (size // block[1] for size in (self._spec.memory_bytes, self._spec.disk_bytes))
            self.store = Store(memory, disk, pooled=self._spec.pooled)
        self.store.join(node)
        if self._spec.disk_bytes and node not in self._disk:
            self._disk[node] = Link(f"disk:{node}", self._spec.disk_bytes_per_s, self._spec.disk_start_s)

    def node_gone(self, node: str, now: float) -> None:
        """The last instance of a node is gone: its memory and disk too; who fetched from it computes instead."""
        if self.store is None:
            return
        self.store.leave(node)
        for job, nodes in list(self._fetching.values()):
            if node in nodes:
                self.cancel(job, now)
                job.fetched = (0, 0, 0)
                self._resume(job, now)

    def all_links(self) -> Iterator[Link]:
        """Every link, in order of joining."""
        for table in (self._out, self._in, self._disk):
            yield from table.values()
        yield from self._buses

    # --------------------------------------------------------------- bookkeeping

    def cancel(self, job: Job, now: float) -> None:
        """Stop what moves for a job, and let go of what waits or is held for it."""
        for transfer in job.transfers:
            self.network.cancel(transfer, now)
            self._tell(transfer, now, arrived=False)
        job.transfers.clear()
        self._fetching.pop(job.number, None)
        self.settle(job)
        self._release(job)

    def settle(self, job: Job) -> None:
        """What has landed for a job has been brought in, or is not wanted any more."""
        if job.landed is not None:
            member, digests = job.landed
            job.landed = None
            if member.landing is not None:
                member.landing.drop(digests)

    def _release(self, job: Job) -> None:
        if job.held is not None:
            member, chain = job.held
            job.held = None
            member.unpin(chain)
            self._pinned(member)

    def _land(self, job: Job, member: Member, digests: list[bytes]) -> None:
        if member.landing is not None:
            member.landing.add(digests)
            job.landed = (member, digests)

    def _send(
        self,
        job: Job,
        way: tuple[str, str, str],
        path: Sequence[Link],
        num_bytes: int,
        now: float,
        done: Callable[[float], None],
    ) -> None:
        def arrived(at: float) -> None:
            job.transfers.remove(transfer)
            done(at)

        transfer = self._start(way, path, num_bytes, now, arrived, job.number)
        job.transfers.append(transfer)

    def _start(
        self,
        way: tuple[str, str, str],
        path: Sequence[Link],
        num_bytes: int,
        now: float,
        done: Callable[[float], None],
        request: int | None = None,
    ) -> Transfer:
        """Start a transfer: what for, from where and to where is for whoever looks on."""
        observer = self._observer
        if observer is None:
            return self.network.start(path, num_bytes, now, done)

        def arrived(at: float) -> None:
            self._tell(transfer, at, arrived=True)
            done(at)

        transfer = self.network.start(path, num_bytes, now, arrived)
        self._told[transfer.number] = lambda at, whole: observer.moved(
            *way, num_bytes, now, at, request, whole
        )
        return transfer

    def _tell(self, transfer: Transfer, now: float, *, arrived: bool) -> None:
        told = self._told.pop(transfer.number, None)
        if told is not None:
            told(now, arrived)

    # ----------------------------------------------------------------- hand-over

    def _wire(self, source: Member, target: Member) -> list[Link]:
        """Over the network, or within a node over both buses."""
        if source.node != target.node:
            return [self._out[source.node], self._in[target.node]]
        return [bus for bus in (source.bus, target.bus) if bus is not None]

    def begin_hand_over(self, job: Job) -> None:
        """A prompt is to be decoded by `job.decoder`: what that has cached already is not sent."""
        assert job.decoder is not None
        job.sent_tokens = job.decoder.manager.peek(job.prompt.chain(job.decoder.worker.block_size))

    def send_layers(self, job: Job, end: int, began: float, ended: float) -> None:
        """A step has computed the prompt up to `end`: each layer's KV follows behind the next layer's computation.

        All but the last layer's share may move from the end of the first layer on, the last one's after the step.
        """
        source, target = job.member, job.decoder
        assert source is not None and target is not None
        tokens = end - job.sent_tokens
        if tokens <= 0:
            return
        job.sent_tokens = end
        layers = source.spec.cost.model.num_layers  # type: ignore[union-attr]
        last = tokens * source.token_bytes // layers
        path, way = self._wire(source, target), ("hand-over", source.spec.name, target.spec.name)

        def rest(at: float) -> None:
            self._send(
                job, way, path, last, max(at, ended), lambda now: self._handed(job, source, target, now)
            )

        self._count(source, target, tokens * source.token_bytes)
        first = began + (ended - began) / layers
        self._send(job, way, path, tokens * source.token_bytes - last, first, rest)

    def hand_over(self, job: Job, now: float) -> None:
        """A prompt is computed: send what has not been sent yet, holding it until it has arrived."""
        source, target = job.member, job.decoder
        assert source is not None and target is not None
        chain = job.prompt.chain(source.worker.block_size)
        source.pin(chain)
        self._pinned(source)
        job.held = (source, chain)
        num_bytes = max(job.prompt.num_tokens - job.sent_tokens, 0) * source.token_bytes
        job.sent_tokens = job.prompt.num_tokens
        if num_bytes or not job.transfers:
            self._count(source, target, num_bytes)
            path, way = self._wire(source, target), ("hand-over", source.spec.name, target.spec.name)
            self._send(job, way, path, num_bytes, now, lambda at: self._handed(job, source, target, at))

    @staticmethod
    def _count(source: Member, target: Member, num_bytes: int) -> None:
        source.totals.sent_bytes += num_bytes
        target.totals.received_bytes += num_bytes

    def _handed(self, job: Job, source: Member, target: Member, now: float) -> None:
        if job.transfers or job.first is None:  # more is under way, or to come
            return
        self._release(job)
        self._land(job, target, job.prompt.digests(target.worker.block_size))
        self._resume(job, now)

    # --------------------------------------------------------------------- store

    def keep(self, member: Member, events: Sequence[CacheEvent], now: float) -> None:
        """Write what an instance has newly cached to its node's memory, behind the computation."""
        if self.store is None or self._block is None:
            return
        fresh = [key for e in events if e.kind == "stored" and e.medium == "device" for key in e.keys]
        fresh = self.store.missing(member.node, dict.fromkeys(fresh))
        if not fresh or member.bus is None:
            return
        node, num_bytes = member.node, len(fresh) * self._block[1]

        member.totals.sent_bytes += num_bytes
        way = ("keep", member.spec.name, f"memory of {node}")
        self._start(way, [member.bus], num_bytes, now, lambda at: self._put(node, fresh, at))

    def _put(self, node: str, digests: Sequence[bytes], now: float) -> None:
        """Hold blocks in a node's memory; what sinks to its disk is written there."""
        assert self.store is not None and self._block is not None
        sunk = self.store.put(node, digests)
        if sunk:
            way = ("sink", f"memory of {node}", f"disk of {node}")
            self._start(way, [self._disk[node]], sunk * self._block[1], now, lambda at: None)

    def _path(self, place: Place, member: Member) -> list[Link]:
        path = [self._disk[place.node]] if place.tier == "disk" else []
        if place.node != member.node:
            path += [self._out[place.node], self._in[member.node]]
        return [*path, member.bus] if member.bus is not None else path

    def plan_fetch(
        self, member: Member, prompt: Prompt, matched: int, queue_s: float
    ) -> tuple[Forecast, list[Place]]:
        """What fetching would bring behind `matched` tokens, cut where the predicted time to first token is least."""
        worker = member.worker
        prefill_s, size, total = worker.prefill_s, worker.block_size, prompt.num_tokens
        best = Forecast(queue_s, 0.0, prefill_s(total - matched, matched), matched, 0)
        if self.store is None or self._block is None:
            return best, []
        first, last = matched // size, (total - 1) // size
        places = self.store.find(member.node, prompt.digests(size)[first:last])
        kept = 0
        count = 0
        for _, run in groupby(places):
            count += len(list(run))
            by_place = {place: places[:count].count(place) for place in dict.fromkeys(places[:count])}
            fetch_s = sum(
                self.network.expected_s(self._path(place, member), n * self._block[1])
                for place, n in by_place.items()
            )
            have = (first + count) * size
            found = Forecast(queue_s, fetch_s, prefill_s(total - have, have), matched, have - matched)
            if found.ttft_s < best.ttft_s:
                best, kept = found, count
        return best, places[:kept]

    def forecast(
        self,
        members: Mapping[int, Member],
        view: View,
        prompt: Prompt,
        worker: Worker,
        now: float,
        fetch: bool,
    ) -> Forecast:
        """As `View.forecast`, with what the store could bring."""
        matched = min(view.matched(prompt, worker), prompt.num_tokens - 1)
        if not fetch or self.store is None:
            rest = worker.prefill_s(prompt.num_tokens - matched, matched)
            return Forecast(worker.queue_s(now), 0.0, rest, matched, 0)
        return self.plan_fetch(members[worker.number], prompt, matched, worker.queue_s(now))[0]

    def fetch(self, job: Job, now: float) -> bool:
        """Start fetching what pays; False: nothing does. The job is resumed once all has arrived."""
        member = job.member
        assert member is not None
        if self.store is None or self._block is None:
            return False
        size = member.worker.block_size
        matched = member.manager.peek(job.prompt.chain(size)) // size * size
        forecast, places = self.plan_fetch(member, job.prompt, matched, member.worker.queue_s(now))
        if not places:
            return False
        digests = job.prompt.digests(size)[: (matched + forecast.fetched) // size]
        self.store.touch(member.node, digests[matched // size :])
        counts = [0, 0, 0]
        for place in places:
            counts[2 if place.tier == "disk" else place.node != member.node] += size
        job.fetched = (counts[0], counts[1], counts[2])
        self._fetching[job.number] = (job, [place.node for place in dict.fromkeys(places)])

        from_disk = [d for d, p in zip(digests[matched // size :], places) if p == Place(member.node, "disk")]

        def arrived(at: float) -> None:
            if not job.transfers:
                if from_disk:
                    self._put(member.node, from_disk, at)
                del self._fetching[job.number]
                self._land(job, member, digests)
                self._resume(job, at)

        for place in dict.fromkeys(places):
            num_bytes = places.count(place) * self._block[1]
            member.totals.received_bytes += num_bytes
            way = ("fetch", f"{place.tier} of {place.node}", member.spec.name)
            self._send(job, way, self._path(place, member), num_bytes, now, arrived)
        return True
