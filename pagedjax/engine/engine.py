"""The engine: requests in, outputs out, one step at a time, over any runner.

`Engine` knows neither jax nor a model. A `Runner` executes a `StepPlan`; the real one is
`pagedjax.runtime.JaxRunner`, the simulated one lives in `pagedjax.sim`. Both run under this very code.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np

from pagedjax.cache import InvariantError, KVCacheManager
from pagedjax.cache.hashing import ExtraKeys, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine.beam import BeamSearch, check_width, reseat
from pagedjax.engine.interrupts import HeldInterrupts
from pagedjax.engine.outputs import Outputs, candidates
from pagedjax.engine.request import (
    MAX_END_IDS,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.step import Lengths, Runner, StepPlan, StepRecord, StepResult


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
        self.max_model_len = max_model_len
        self.on_step = on_step
        self._eos = frozenset(eos_token_ids)
        self._hash_scheme = hash_scheme
        self._seed = seed
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._outputs = Outputs(manager, decode, clock)
        self._touched: dict[str, Request] = {}  # have something new to tell
        self._ready: dict[str, RequestOutput] = {}  # what they tell, until a step has returned it
        self._held: dict[str, RequestOutput | None] = {}  # of each open stream, what it has not yielded yet
        self._stepping = False
        self._seq_ids = itertools.count()
        self._num_added = 0

    # ------------------------------------------------------------------ input

    def check(self, prompt_token_ids: Seq[int] | np.ndarray, sampling: SamplingParams) -> None:
        """Raise what `add` would raise for this prompt, without adding it."""
        if not isinstance(sampling, SamplingParams):
            raise ValueError(
                f"sampling={sampling!r}: must be SamplingParams; try SamplingParams(max_tokens=16)"
            )
        _check_ids(prompt_token_ids)
        self.scheduler.check(len(prompt_token_ids), sampling)
        ends = self._end_ids(sampling)
        if len(ends) > MAX_END_IDS:
            raise ValueError(f"{len(ends)} tokens end a sample: at most {MAX_END_IDS} may; leave some out")
        if sampling.beam_width:
            check_width(sampling.beam_width, len(ends))
        if sampling.stop and not self._outputs.has_text:
            raise ValueError("stop: needs a tokenizer to find strings; give stop_token_ids instead")

    def add(
        self,
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling: SamplingParams = SamplingParams(),
        *,
        request_id: str | None = None,
        extra: ExtraKeys = ExtraKeys(),
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt_token_ids: i32[n], n at least 1.
            sampling: How to continue it.
            request_id: Unique among live requests; None assigns the next number.
            extra: Extra keys of its blocks (adapter, cache salt): requests share blocks only under equal keys.
            priority: Higher is admitted first and preempted last; equals go by arrival.

        Raises:
            ValueError: The request can never run, or its id is taken. Nothing was queued.
        """
        self.check(prompt_token_ids, sampling)
        if request_id is None:
            names = map(str, itertools.count(self._num_added))
            request_id = next(name for name in names if not self._is_taken(name))
        if not isinstance(priority, int):
            raise ValueError(f"priority={priority!r}: must be a whole number; 0 is the common one")
        if self._is_taken(request_id):
            raise ValueError(f"request_id={request_id!r}: is in use by a live request; choose another")
        prompt = tuple(np.asarray(prompt_token_ids).tolist())
        seed = sampling.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, self._num_added]).generate_state(1)[0])
        self._num_added += 1
        request = Request(request_id, prompt, sampling, seed, arrival=self._clock(), priority=priority)
        request.end_token_ids = self._end_ids(sampling)
        chain = TokenChain(prompt, block_size=self.manager.block_size, hash=self._hash_scheme, extra=extra)
        try:
            with HeldInterrupts():
                if sampling.beam_width:
                    self._outputs.searches[request_id] = self._new_search(request)
                for index in range(1 if sampling.beam_width else sampling.num_sequences):
                    own = chain if index == 0 else chain.fork()
                    seq = Sequence(next(self._seq_ids), request, index, own)
                    request.sequences.append(seq)
                    self._outputs.start(seq)
                self._requests[request_id] = request
                self.scheduler.add(request)
        except KeyboardInterrupt:  # the caller never learns the id
            self.abort(request_id)
            raise
        return request_id

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._ready

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks go back. None where it is not live (already ended, or unknown).

        Of one that ended in a step whose outputs were not returned, nothing is told any more.
        """
        self._ready.pop(request_id, None)
        request = self._requests.get(request_id)
        if request is None:
            return None
        with HeldInterrupts():
            for seq in request.live:
                self.scheduler.finish(seq, FinishReason.ABORT)
            self._touched.pop(request_id, None)
            return self._output(request)

    # ------------------------------------------------------------------- work

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._touched or self._ready or self.scheduler.ended)

    def step(self) -> list[RequestOutput]:
        """Plan, run and book one step.

        What the runner or `on_step` raises comes through, and so does Ctrl-C, and the engine can go on: requests of
        a step that did not run to its end go back to the queue, outputs that were not delivered are the next step's.

        Returns:
            One output for each request that got a token or ended in this step; of beams and best_of only
            once they have ended.

        Raises:
            ValueError: Called from `on_step`, or from another thread while a step runs.
        """
        with HeldInterrupts() as interrupts:
            if self._stepping:
                raise ValueError(
                    "step: runs already, in another thread or around this hook; call it from one place"
                )
            self._stepping = True
            try:
                self._advance(interrupts)
                for seq in self.scheduler.ended:
                    self._touched[seq.request.request_id] = seq.request
                self.scheduler.ended.clear()
                touched, self._touched = self._touched, {}
                for request in touched.values():
                    if not (request.live and request.sampling.waits_for_all):
                        self._ready[request.request_id] = self._output(request)
            finally:
                self._stepping = False
        outputs, self._ready = self._ready, {}
        return list(outputs.values())

    def _advance(self, interrupts: HeldInterrupts) -> None:
        """Plan, run and book; leaves the requests that have something to tell in `_touched`."""
        clock = self._clock
        started = clock()
        plan = self.scheduler.schedule()
        scheduled = clock()
        if not (plan.rows or plan.copies):
            return
        try:
            with interrupts.allowed():
                result = self._execute(plan)
        except InvariantError:  # the books are wrong: there is nothing sound to go back to
            raise
        except BaseException as error:  # an interrupt, too
            self.scheduler.undo(plan)
            if self.runner.recover():
                self.manager.reset("preempt")
                error.add_note("The KV pool was lost with this step: nothing is cached or pinned any more.")
            raise
        executed = clock()
        lengths = Lengths(plan) if self.on_step is not None else None
        if self.scheduler.config.preemption == "auto":
            prefills = sum(row.num_tokens > 1 for row in plan.rows)
            self.scheduler.costs.observe(plan.num_tokens, prefills, plan.copies, result)
        grown = self.scheduler.update(plan, result.tokens, result.logprobs, executed)
        self._outputs.book_prompts(plan, result)
        for at, seq in grown:
            request = seq.request
            self._touched[request.request_id] = request
            if request.first_token_at is None:
                request.first_token_at = executed
            if request.sampling.beam_width:
                seq.candidates = candidates(result, at)
                self._advance_beams(request)
            else:
                self._outputs.book_details(seq, result, at)
                self._apply_stop_rules(seq)
        if self.on_step is not None and lengths is not None:
            record = StepRecord(lengths.record(), result, scheduled - started, clock() - executed)
            with interrupts.allowed():
                self.on_step(record)

    def _execute(self, plan: StepPlan[Sequence]) -> StepResult:
        result = self.runner.execute(plan)
        if len(result.tokens) != plan.num_samples:
            raise ValueError(
                f"StepResult of {len(result.tokens)} tokens: the plan samples {plan.num_samples}; the runner must "
                "give one for each, in row order"
            )
        return result

    def keep(self, outputs: Seq[RequestOutput]) -> None:
        """Give back what `step` returned for somebody else: the next step returns it again, streams have theirs."""
        self._ready |= {o.request_id: o for o in outputs if o.request_id not in self._held}

    def stream(
        self,
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling: SamplingParams = SamplingParams(),
        *,
        extra: ExtraKeys = ExtraKeys(),
    ) -> Iterator[RequestOutput]:
        """Add a request and yield its outputs as they grow; other requests advance beside it.

        Whoever makes the steps (another stream, `generate`), each stream yields its own outputs. Leaving the
        loop early aborts the request.

        Raises:
            ValueError: As `add`, or the request has no text before its end (beams, best_of).
        """
        if sampling.waits_for_all:
            raise ValueError(
                "stream: what beam_width or best_of return is known at the end only; call generate instead"
            )
        request_id = self.add(prompt_token_ids, sampling, extra=extra)
        self._held[request_id] = None
        try:
            finished = False
            while not finished:
                output = self._held[request_id]
                if output is None:
                    self.step()
                    continue
                self._held[request_id] = None
                finished = output.finished
                yield output
        finally:
            del self._held[request_id]
            self.abort(request_id)

    def _end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self._eos

    def _apply_stop_rules(self, seq: Sequence) -> None:
        sampling = seq.request.sampling
        token = seq.chain.tokens[-1]
        early = seq.num_output_tokens <= sampling.min_tokens
        ends = token in seq.request.end_token_ids and not early
        if not ends:
            ends = self._outputs.completes_stop(seq, may_stop=not early)
        if ends:
            self.scheduler.finish(seq, FinishReason.STOP)
        elif seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= self.max_model_len:
            stopped = self._outputs.ends_in_stop(seq)
            self.scheduler.finish(seq, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _new_search(self, request: Request) -> BeamSearch:
        sampling = request.sampling
        return BeamSearch(
            sampling.beam_width,
            min(sampling.max_tokens, self.max_model_len - request.num_prompt_tokens),
            sampling.length_penalty,
            sampling.early_stopping,
            request.end_token_ids,
            sampling.min_tokens,
        )

    def _advance_beams(self, request: Request) -> None:
        """One step of a beam search, once all its beams have their candidates."""
        beams = request.sequences
        if any(seq.candidates is None or seq.num_computed_tokens < seq.num_tokens for seq in beams):
            return  # some are still being recomputed after a preemption
        search = self._outputs.searches[request.request_id]
        choices = search.advance([seq.candidates for seq in beams])
        if search.done:
            for seq in beams:
                self.scheduler.finish(seq, FinishReason.STOP)
        else:
            reseat(request, choices, self.manager, lambda: next(self._seq_ids))

    # ----------------------------------------------------------------- output

    def _output(self, request: Request) -> RequestOutput:
        output = self._outputs.of(request)
        if output.finished:
            self._requests.pop(request.request_id, None)
            self._outputs.forget(request)
        if request.request_id in self._held:
            self._held[request.request_id] = output
        return output


def _check_ids(prompt_token_ids: Seq[int] | np.ndarray) -> None:
    try:
        ids = np.asarray(prompt_token_ids)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            "prompt_token_ids: must be a flat list of whole numbers, such as a tokenizer's encode gives"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"prompt_token_ids from {ids.min()} to {ids.max()}: must lie in [0, 2**31)")
