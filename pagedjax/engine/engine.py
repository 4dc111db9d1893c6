"""The engine: requests in, outputs out, one step at a time, over any runner.

`Engine` knows neither jax nor a model. A `Runner` executes a `StepPlan`; the real one is
`pagedjax.runtime.JaxRunner`, the simulated one lives in `pagedjax.sim`. Both run under this very code.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from weakref import WeakValueDictionary

import numpy as np

from pagedjax.cache import InvariantError, KVCacheManager, ResetReport
from pagedjax.cache.hashing import ExtraKeys, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine.flight import Flights
from pagedjax.engine.interrupts import HeldInterrupts
from pagedjax.engine.limits import check_chain, check_ends, check_input
from pagedjax.engine.outputs import Outputs
from pagedjax.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from pagedjax.engine.results import Results
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.step import Lengths, Observer, Runner, StepRecord
from pagedjax.engine.turns import FairLock, Mailbox


class Engine:
    """Continuous batching of requests over a shared, paged KV cache.

    Args:
        manager: Host decisions about blocks.
        runner: Device side.
        config: Limits of one step.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens that end a sample unless it ignores them.
        decode: Token ids to text, for texts and stop strings; None: token ids only.
        hash_scheme: Block hash of new chains.
        seed: Root of the seeds of requests that give none.
        clock: Seconds; the simulator passes its virtual clock.
        on_step: Called with each step's record.
        overlap: Plan the next step while one runs, where the scheduler can (`Scheduler.schedule_ahead`); the runner
            is an `AheadRunner`. Tokens are booked a step behind; what comes out is the same.
        num_steps: Most steps of decode rows in one dispatch (`several.plan_behind` says which); above 1 the runner is a
            `SeveralRunner`. What comes out is the same.

    Attributes:
        flights: Steps on their way. Its `overlap` and `num_steps` may be set back between two steps.
        overlaps, dispatches: Steps so far by `StepRecord.overlap` and by `StepRecord.dispatch`.

    Raises:
        ValueError: The manager's blocks are not the pool's (case B087), or limits contradict each other.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        runner: Runner,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        eos_token_ids: Seq[int] = (),
        decode: Callable[[Seq[int]], str] | None = None,
        hash_scheme: str = "sha256",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepRecord], None] | None = None,
        overlap: bool = False,
        num_steps: int = 1,
    ) -> None:
        for name, ours, theirs in (
            ("pool_blocks", manager.pool_blocks, runner.pool_blocks),
            ("block_size", manager.block_size, runner.block_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{name}: the manager counts {ours}, the runner's pool has {theirs}; build both from one config"
                )
        self.manager = manager
        self.runner = runner
        self.scheduler = Scheduler(manager, config, max_model_len, runner.block_bytes)
        self.flights = Flights(self.scheduler, lambda: self.now, overlap=overlap, num_steps=num_steps)
        self.overlaps: Counter[str] = Counter()
        self.dispatches: Counter[str] = Counter()
        self.max_model_len = max_model_len
        self.on_step = on_step
        self.observer: Observer | None = None  # a record that is being written (`pagedjax.report.record`)
        self._hash_scheme = hash_scheme
        self._seed = seed
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._outputs = Outputs(manager, decode, clock)
        self._results = Results(self.scheduler, self._outputs, eos_token_ids)
        self._touched: dict[str, Request] = {}  # have something new to tell
        self._ready: dict[str, RequestOutput] = {}  # what they tell, until a step has returned it
        # Requests that somebody waits for. The mailbox is his: where he is gone (Ctrl-C may strike at any line of his),
        # so is the entry, and the request is aborted.
        self._held: WeakValueDictionary[str, Mailbox] = WeakValueDictionary()
        self._turn = FairLock()  # who makes the next step
        self._books = FairLock()  # all of the above, the scheduler and the manager
        self._stepping = False
        self._weights_version = runner.weights_version
        self._num_added = 0

    # ------------------------------------------------------------------ input

    def check(self, prompt_token_ids: Seq[int] | np.ndarray, sampling: SamplingParams) -> None:
        """Raise what `add` would raise for this prompt, without adding it."""
        check_input(prompt_token_ids, sampling, self.runner.vocab_size, has_text=self._outputs.has_text)
        self.scheduler.check(len(prompt_token_ids), sampling)
        check_ends(sampling, self._results.end_ids(sampling))

    def add(
        self,
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling: SamplingParams = SamplingParams(),
        *,
        request_id: str | None = None,
        extra: ExtraKeys = ExtraKeys(),
        priority: int = 0,
        chain: TokenChain | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt_token_ids: i32[n], n at least 1.
            sampling: How to continue it.
            request_id: Unique among live requests; None assigns the next number.
            extra: Extra keys of its blocks (adapter, cache salt): requests share blocks only under equal keys.
            priority: Higher is admitted first and preempted last; equals go by arrival.
            chain: The prompt's, where the caller has hashed it already; the request's own from here on.

        Raises:
            ValueError: The request can never run, its id is taken, or the chain is another's. Nothing was queued.
        """
        added: list[str] = []
        if chain is not None:
            check_chain(
                chain, len(prompt_token_ids), self.manager.block_size, hash=self._hash_scheme, extra=extra
            )
        try:
            with HeldInterrupts() as interrupts, self._books.held(interrupts):
                self._add(
                    added, prompt_token_ids, sampling, request_id, extra, priority, self._clock(), chain
                )
            return added[0]
        except KeyboardInterrupt:  # the caller never learns the id
            for name in added:
                self.abort(name)
            raise

    def _add(
        self,
        added: list[str],
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling: SamplingParams,
        request_id: str | None,
        extra: ExtraKeys,
        priority: int,
        arrival: float,
        chain: TokenChain | None = None,
    ) -> None:
        """Queue a request and append its id to `added`; called with the books held."""
        self.check(prompt_token_ids, sampling)
        if request_id is None:
            names = map(str, itertools.count(self._num_added))
            request_id = next(name for name in names if not self._is_taken(name))
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r}: must be a string; leave it out for the next number")
        if not isinstance(priority, int):
            raise ValueError(f"priority={priority!r}: must be a whole number; 0 is the common one")
        if self._is_taken(request_id):
            raise ValueError(f"request_id={request_id!r}: is in use by a live request; choose another")
        if chain is None:
            tokens = np.asarray(prompt_token_ids)
            chain = TokenChain(
                tokens, block_size=self.manager.block_size, hash=self._hash_scheme, extra=extra
            )
        prompt = tuple(chain.tokens)
        seed = sampling.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, self._num_added]).generate_state(1)[0])
        self._num_added += 1
        request = Request(request_id, prompt, sampling, seed, arrival=arrival, priority=priority)
        self._results.start(request, chain)
        self._requests[request_id] = request
        self.scheduler.add(request)
        if self.observer is not None:
            self.observer.added(request)
        added.append(request_id)

    def _is_taken(self, request_id: str) -> bool:
        return any(request_id in names for names in (self._requests, self._ready, self._held))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, from any thread or hook; its blocks go back. None where it is not live.

        Whoever waits for it (`complete`, `stream`) gets it as aborted; of one that ended in a step whose outputs were
        not returned, nothing is told any more.
        """
        with HeldInterrupts() as interrupts, self._books.held(interrupts):
            self._ready.pop(request_id, None)
            request = self._requests.get(request_id)
            if request is None:
                return None
            for seq in request.live:
                self.scheduler.finish(seq, FinishReason.ABORT)
            self._touched.pop(request_id, None)
            return self._output(request)

    # ------------------------------------------------------------------- work

    @property
    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._clock()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._touched or self._ready or self.scheduler.ended)

    def step(self) -> list[RequestOutput]:
        """Plan, run and book one step; from several threads, each in its turn.

        What the runner or `on_step` raises comes through, and so does Ctrl-C, and the engine can go on: requests of
        a step that did not run to its end go back to the queue, outputs that were not delivered are the next step's.

        Returns:
            One output for each request that got a token or ended in this step and that nobody else waits for; of
            beams and best_of only once they have ended.

        Raises:
            ValueError: Called from `on_step`.
        """
        outputs: dict[str, RequestOutput] = {}
        try:
            with HeldInterrupts() as interrupts:
                self._step(interrupts)
                interrupts.raise_noted()
                with self._books.held(interrupts):
                    outputs, self._ready = self._ready, {}
            return list(outputs.values())
        except KeyboardInterrupt:  # not delivered
            self._ready = outputs | self._ready
            raise

    def _step(self, interrupts: HeldInterrupts) -> None:
        """One step; what there is to tell goes to those who wait for it, or into `_ready`."""
        with self._turn.held(interrupts):
            if self._stepping:
                raise ValueError("step: runs already around this hook; call it from outside")
            self._stepping = True
            try:
                with self._books.held(interrupts):
                    record = self._advance(interrupts)
                    self._tell()
                if record is not None and self.on_step is not None:
                    # The books are whole and nobody's: a hook, or a thread beside it, may add and abort.
                    with interrupts.allowed():
                        self.on_step(record)
            finally:
                self._stepping = False

    def _tell(self) -> None:
        """Make outputs of the requests that have something to tell."""
        for seq in self.scheduler.ended:
            self._touched[seq.request.request_id] = seq.request
        self.scheduler.ended.clear()
        touched, self._touched = self._touched, {}
        for request in touched.values():
            if request.awaited and request.request_id not in self._held:
                self.abort(request.request_id)
            elif not (request.live and request.sampling.waits_for_all):
                output = self._output(request)
                if not request.awaited:
                    self._ready[request.request_id] = output

    def _advance(self, interrupts: HeldInterrupts) -> StepRecord | None:
        """Plan, run and book; leaves the requests that have something to tell in `_touched`. None: nothing ran."""
        clock = self._clock
        if self.runner.weights_version != self._weights_version:
            self.start_over()
        flight = self.flights.land(self.runner, interrupts, watched=self.observer is not None)
        if flight is None:
            return None
        plan, result, began, executed = flight.plan, flight.result, flight.began, flight.executed
        for request in {row.seq.request for row in plan.rows}:
            request.spent.add(executed - began, result)
        lengths = Lengths(plan) if self.on_step is not None else None
        self._touched |= self._results.book(plan, result, executed)
        self.overlaps[flight.overlap] += 1
        self.dispatches[flight.dispatch] += 1
        self.flights.drop_unwanted()
        if self.observer is not None:
            self.observer.stepped(plan, result, began, executed)
        if lengths is None:
            return None
        return StepRecord(
            lengths.record(), result, flight.schedule_s, clock() - executed, flight.overlap, flight.dispatch
        )

    # ---------------------------------------------------------------- waiting

    def complete(
        self,
        jobs: Seq[tuple[Seq[int] | np.ndarray, SamplingParams]],
        *,
        request_ids: Seq[str] | None = None,
        extra: ExtraKeys = ExtraKeys(),
        priority: int = 0,
        on_end: Callable[[RequestOutput], None] = lambda output: None,
    ) -> list[RequestOutput]:
        """Add requests and make steps until all of them have ended, beside whoever else makes steps.

        Threads that wait take turns; each gets its own outputs. One that is aborted elsewhere has ended, too. Where
        this call is left by an exception, all its requests are aborted.

        Args:
            jobs: Prompts i32[n] and how to continue them.
            request_ids: One for each; None assigns numbers.
            extra, priority: Of all of them, as in `add`.
            on_end: Called with each output as its request ends.

        Returns:
            The last output of each, in order.

        Raises:
            ValueError: One of them can never run; none was started.
        """
        names: Seq[str | None] = [None] * len(jobs) if request_ids is None else request_ids
        if len(names) != len(jobs):
            raise ValueError(f"request_ids: {len(names)} given for {len(jobs)} prompts; give one for each")
        for prompt, sampling in jobs:
            self.check(prompt, sampling)
        arrival, added, box = self._clock(), list[str](), Mailbox()
        done: dict[str, RequestOutput] = {}
        with HeldInterrupts() as interrupts:
            try:
                with self._books.held(interrupts):
                    for (prompt, sampling), name in zip(jobs, names, strict=True):
                        self._add(added, prompt, sampling, name, extra, priority, arrival)
                        self._hold(added[-1], box)
                while len(done) < len(added):
                    for output in self._wait(box, interrupts):
                        if output.finished:
                            done[output.request_id] = output
                            on_end(output)
                    interrupts.raise_noted()
            finally:
                self._leave(added, interrupts)
        return [done[name] for name in added]

    def stream(
        self,
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling: SamplingParams = SamplingParams(),
        *,
        request_id: str | None = None,
        extra: ExtraKeys = ExtraKeys(),
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Add a request and yield its outputs as they grow; other requests advance beside it.

        Whoever makes the steps (another stream, `complete`), each stream yields its own outputs. Leaving the
        loop early aborts the request.

        Raises:
            ValueError: As `add`, or the request has no text before its end (beams, best_of).
        """
        if sampling.waits_for_all:
            raise ValueError(
                "stream: what beam_width or best_of return is known at the end only; call generate instead"
            )
        added, box = list[str](), Mailbox()
        try:
            with HeldInterrupts() as interrupts, self._books.held(interrupts):
                self._add(added, prompt_token_ids, sampling, request_id, extra, priority, self._clock())
                self._hold(added[0], box)
            finished = False
            while not finished:
                with HeldInterrupts() as interrupts:
                    outputs = self._wait(box, interrupts)
                for output in outputs:
                    finished = output.finished
                    yield output
        finally:
            with HeldInterrupts() as interrupts:
                self._leave(added, interrupts)

    def _wait(self, box: Mailbox, interrupts: HeldInterrupts) -> list[RequestOutput]:
        """What is new for one who waits; makes a step where nothing is."""
        with self._turn.held(interrupts):  # who steps now may be about to tell it
            for step in (False, True):
                if step:
                    idle = not self.scheduler.has_work
                    self._step(interrupts)
                with self._books.held(interrupts):
                    if outputs := box.take():
                        return outputs
            if idle and not self.scheduler.has_work:
                raise InvariantError("somebody waits for a request that the engine does not have")
        return []

    def start_over(self) -> ResetReport:
        """Forget all that is cached, pinned or swapped; requests that run begin again and keep their tokens.

        A step does it by itself where the runner's weights have changed since the last one.
        """
        with HeldInterrupts() as interrupts, self._books.held(interrupts):
            self.flights.forget()
            self.scheduler.requeue_all()
            self._weights_version = self.runner.weights_version
            return self.manager.reset("preempt")

    def _hold(self, name: str, box: Mailbox) -> None:
        self._held[name] = box
        self._requests[name].awaited = True

    def _leave(self, names: Seq[str], interrupts: HeldInterrupts) -> None:
        """Nobody waits for these any more; those that still run are aborted."""
        with self._books.held(interrupts):
            for name in names:
                self._held.pop(name, None)
                self.abort(name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs and no request comes or goes while the context lasts, whatever other threads ask for.

        For those who reach past the engine to its manager or runner. Ctrl-C is not held back inside.
        """
        with (
            HeldInterrupts() as interrupts,
            self._turn.held(interrupts),
            self._books.held(interrupts),
            interrupts.allowed(),
        ):
            yield

    # ----------------------------------------------------------------- output

    def _output(self, request: Request) -> RequestOutput:
        output = self._outputs.of(request)
        if output.finished:
            self._requests.pop(request.request_id, None)
            self._outputs.forget(request)
            if self.observer is not None:
                self.observer.ended(request, output, self._clock())
        if (box := self._held.get(request.request_id)) is not None:
            box.put(output)
        return output
