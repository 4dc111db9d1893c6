"""Who gets a request: the routers and their books, and what is refused before it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pagedjax.sim.fleet.member import Job, Member
from pagedjax.sim.fleet.moves import Moves
from pagedjax.sim.fleet.observer import FleetObserver
from pagedjax.sim.fleet.settings import Promise
from pagedjax.sim.routing import Choice, Knowledge, Router, Sent, View


class Dispatch:
    """Asks the routers, and writes down what they will have seen.

    Args:
        members: By number; the fleet's own table, which grows.
        moves: Predicts what a store could bring, and is told of a prompt that will be handed over.
        router: Chooses who computes a prompt.
        decode_router: Chooses who decodes what prefill instances hand over.
        knowledge: What is believed to be cached where.
        promise: Limits of early rejection.
        seed: Of the routers' chance.
        observer: Told of what was routed.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        moves: Moves,
        router: Router,
        decode_router: Router,
        knowledge: Knowledge,
        promise: Promise,
        seed: int,
        observer: FleetObserver | None,
    ) -> None:
        self.router = router
        self.decode_router = decode_router
        self._members = members
        self._moves = moves
        self._knowledge = knowledge
        self._promise = promise
        self._rng = np.random.default_rng([seed, 0xF1EE7])
        self._observer = observer

    def offered(self, role: str = "") -> list[Member]:
        """Members that take requests: prompts, or those of a role."""
        wanted = (role,) if role else ("mixed", "prefill")
        return [m for m in self._members.values() if m.accepting and m.spec.role in wanted]

    def _view(self, members: Sequence[Member]) -> View:
        workers = [m.worker for m in members]
        if self._moves.store is None:
            return View(workers, self._knowledge, self._rng)

        def forecast(prompt, worker, now, fetch):  # type: ignore[no-untyped-def]
            return self._moves.forecast(self._members, view, prompt, worker, now, fetch)

        view = View(workers, self._knowledge, self._rng, forecast)
        return view

    def send(self, job: Job, now: float) -> tuple[str, Member | None]:
        """Choose who computes a request, and write the router's book.

        Returns:
            Why it is refused, or ""; and who will decode it, where that is another one.
        """
        members = self.offered()
        if not members:
            return "no instance", None
        self._knowledge.age(now)
        view = self._view(members)
        choice = self.router.choose(job.prompt, view, now)
        member = self._members[choice.worker.number]
        if member not in members:
            raise ValueError(f"router {type(self.router).__name__}: chose {member.spec.name}, not offered")
        decoder: Member | None = None
        if member.spec.role == "prefill" and job.request.num_output > 1:
            decoder = self.decoder(job, now)
            if decoder is None:
                return "no instance", None
        reason = self._objection(job, member, decoder, view, now)
        if reason:
            return reason, None
        job.member, job.decoder, job.lives = member, None, job.lives + 1
        job.reason = choice.reason
        self._book(job, member, choice, view, now)
        if self._observer is not None:
            self._observer.routed(job.number, member.number, job.reason, job.expected, now)
        return "", decoder

    def decoder(self, job: Job, now: float) -> Member | None:
        """Who would decode a request; None: nobody is there."""
        members = self.offered("decode")
        if not members:
            return None
        view = self._view(members)
        return self._members[self.decode_router.choose(job.prompt, view, now).worker.number]

    def _objection(self, job: Job, member: Member, decoder: Member | None, view: View, now: float) -> str:
        """Why a request is refused before it is sent; "" where it is not."""
        tokens = job.request.num_input
        # A decoder gets the first token as a part of the prompt.
        if not member.fits(job, tokens) or not (decoder is None or decoder.fits(job, tokens + 1)):
            return "too long"
        promise = self._promise
        if promise.reject:
            if view.forecast(job.prompt, member.worker, now).ttft_s > promise.ttft_s:
                return "ttft"
            if (decoder or member).tbt_s(tokens) > promise.tbt_s:
                return "tbt"
        return ""

    def _book(self, job: Job, member: Member, choice: Choice, view: View, now: float) -> None:
        prompt, worker = job.prompt, choice.worker
        matched = min(view.matched(prompt, worker), prompt.num_tokens - 1)
        job.expected = matched if self._knowledge.informs else None
        self.router.sent(prompt, worker, view, now)
        if self._knowledge.informs:
            self._knowledge.sent(prompt.digests(worker.block_size), worker.number, now)
        worker.send(Sent(prompt, prompt.num_tokens - matched), now)
        member.totals.routed += 1
        member.totals.peak_queue = max(member.totals.peak_queue, len(worker.unstarted))
        member.jobs[job.number] = job

    def engage(self, job: Job, decoder: Member, now: float) -> None:
        """A decoder is chosen: from here on the request would be lost with it."""
        job.decoder = decoder
        decoder.jobs[job.number] = job
        decoder.totals.routed += 1
        if self._observer is not None:
            self._observer.engaged(job.number, decoder.number, now)
        prompt = job.prompt
        self.decode_router.sent(prompt, decoder.worker, self._view([decoder]), now)
        decoder.worker.send(Sent(prompt, 0), now)
        self._moves.begin_hand_over(job)

    def left(self, job: Job, now: float) -> None:
        """Who computed its prompt has no more to do with it."""
        assert job.member is not None
        worker = job.member.worker
        worker.end(job.number, now)
        self.router.ended(job.prompt, worker, now)
