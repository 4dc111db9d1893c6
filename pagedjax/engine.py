"""The engine: requests in, outputs out, one step at a time, over any runner.

`Engine` knows neither jax nor a model. A `Runner` executes a `StepPlan`; the real one is
`pagedjax.runtime.JaxRunner`, the simulated one lives in `pagedjax.sim`. Both run under this very code.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagedjax.cache import KVCacheManager
from pagedjax.cache.hashing import ExtraKeys, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from pagedjax.scheduler import Scheduler, StepPlan
from pagedjax.text_stream import TextStream


@dataclass(frozen=True)
class StepResult:
    """What a runner gives back for a plan.

    Attributes:
        tokens: One per sample, in row order.
        logprobs: One per sample, natural log; empty where the runner computes none.
        ranks: One per sample, of its token among all (1 is the likeliest); empty where nobody asked.
        top_ids: i32[Q, K], a row per sample: the likeliest tokens, best first. None where nobody asked:
            beams ask always (see `pagedjax.beam`), others with logprobs=k.
        top_logprobs: f32[Q, K], natural log, of these.
        prompt: Per row of the plan that asked for `prompt_logprobs`, what its tokens predict.
        elapsed_s: Seconds the step took, on the runner's clock (virtual in a simulation).
        pack_s: Of these, seconds spent building arrays on the host.
        dispatch_s: Of these, seconds until the device call returned to the host.
        copy_s: Of these, seconds spent on the plan's block copies.
    """

    tokens: list[int]
    logprobs: list[float]
    elapsed_s: float
    pack_s: float = 0.0
    dispatch_s: float = 0.0
    copy_s: float = 0.0


class Runner(Protocol):
    """Executes plans; owns the KV pool, or stands in for it.

    Attributes:
        num_blocks: Blocks its pool holds, the null block included; the manager's must be equal.
        block_size: Tokens per block of the pool.
    """

    num_blocks: int
    block_size: int

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's copies, then compute its rows."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """One step as the metrics hook sees it; seconds are on the engine's clock.

    Attributes:
        plan: What ran.
        result: What came back.
        schedule_s: Seconds to plan.
        commit_s: Seconds to book the result: indexing, forks, stop rules.
    """

    plan: StepPlan
    result: StepResult
    schedule_s: float
    commit_s: float


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
        for name in ("num_blocks", "block_size", "pool_blocks"):
            ours, theirs = getattr(manager, name, None), getattr(runner, name, None)
            if ours != theirs and None not in (ours, theirs):
                raise ValueError(
                    f"{name}: the manager counts {ours}, the runner's pool has {theirs}; build both from one config"
                )
        self.manager = manager
        self.runner = runner
        block_bytes = getattr(runner, "block_bytes", ())
        self.scheduler = Scheduler(manager, config, max_model_len, block_bytes)
        self.max_model_len = max_model_len
        self.on_step = on_step
        self._eos = frozenset(eos_token_ids)
        self._decode = decode
        self._hash_scheme = hash_scheme
        self._seed = seed
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._streams: dict[int, TextStream] = {}
        self._seq_ids = itertools.count()
        self._num_added = 0

    # ------------------------------------------------------------------ input

    def check(self, prompt_token_ids: Seq[int] | np.ndarray, sampling: SamplingParams) -> None:
        """Raise what `add` would raise for this prompt, without adding it."""
        self.scheduler.check(len(prompt_token_ids), sampling.n)
        if sampling.stop and self._decode is None:
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
            request_id = str(self._num_added)
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: is in use by a live request; choose another")
        prompt = tuple(np.asarray(prompt_token_ids, dtype=np.int32).tolist())
        seed = sampling.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, self._num_added]).generate_state(1)[0])
        self._num_added += 1
        request = Request(request_id, prompt, sampling, seed, arrival=self._clock(), priority=priority)
        chain = TokenChain(prompt, block_size=self.manager.block_size, hash=self._hash_scheme, extra=extra)
        for index in range(sampling.n):
            own = chain if index == 0 else chain.fork()
            seq = Sequence(next(self._seq_ids), request, index, own)
            request.sequences.append(seq)
            if self._decode is not None:
                self._streams[seq.seq_id] = TextStream(self._decode, sampling.stop)
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks go back. None where it is not live (already ended, or unknown)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for seq in request.live:
            self.scheduler.finish(seq, FinishReason.ABORT)
        return self._output(request)

    # ------------------------------------------------------------------- work

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Plan, run and book one step.

        Returns:
            One output for each request that got a token or ended in this step.
        """
        clock = self._clock
        started = clock()
        plan = self.scheduler.schedule(self.scheduler.step + 1)
        scheduled = clock()
        touched: dict[str, Request] = {}
        if plan.rows or plan.copies:
            result = self.runner.execute(plan)
            executed = clock()
            if self.scheduler.config.preemption == "auto":
                prefills = sum(row.num_tokens > 1 for row in plan.rows)
                self.scheduler.costs.observe(plan.num_tokens, prefills, plan.copies, result)
            for seq in self.scheduler.update(plan, result.tokens, result.logprobs, self.scheduler.step):
                request = seq.request
                touched[request.request_id] = request
                if request.first_token_at is None:
                    request.first_token_at = executed
                self._apply_stop_rules(seq)
            if self.on_step is not None:
                self.on_step(StepRecord(plan, result, scheduled - started, clock() - executed))
        for seq in self.scheduler.ended:
            touched[seq.request.request_id] = seq.request
        self.scheduler.ended.clear()
        return [self._output(request) for request in touched.values()]

    def stream(
        self,
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling: SamplingParams = SamplingParams(),
        *,
        extra: ExtraKeys = ExtraKeys(),
    ) -> Iterator[RequestOutput]:
        """Add a request and yield its outputs as they grow; other requests advance beside it.

        Leaving the loop early aborts the request.
        """
        request_id = self.add(prompt_token_ids, sampling, extra=extra)
        try:
            finished = False
            while not finished:
                for output in self.step():
                    if output.request_id == request_id:
                        finished = output.finished
                        yield output
        finally:
            self.abort(request_id)

    def _apply_stop_rules(self, seq: Sequence) -> None:
        sampling = seq.request.sampling
        token = seq.chain.tokens[-1]
        ends = token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos)
        stream = self._streams.get(seq.seq_id)
        if stream is not None and not ends and stream.push(token):
            ends = True
        if ends:
            self.scheduler.finish(seq, FinishReason.STOP)
        elif seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= self.max_model_len:
            if stream is not None:
                stream.finish()
            stopped = stream is not None and stream.stopped
            self.scheduler.finish(seq, FinishReason.STOP if stopped else FinishReason.LENGTH)

    # ----------------------------------------------------------------- output

    def _output(self, request: Request) -> RequestOutput:
        finished = not request.live
        outputs = tuple(self._completion(seq) for seq in request.sequences)
        if finished:
            self._requests.pop(request.request_id, None)
            for seq in request.sequences:
                self._streams.pop(seq.seq_id, None)
        first = request.first_token_at
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=request.num_cached_tokens or 0,
            miss_reason=request.miss_reason,
            matched_tokens=request.matched_tokens,
            num_copies=request.num_copies + sum(self.manager.num_copies(seq.seq_id) for seq in request.live),
            num_preemptions=request.num_preemptions,
            ttft_s=None if first is None else first - request.arrival,
            latency_s=self._clock() - request.arrival if finished else None,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        stream = self._streams.get(seq.seq_id)
        text = ""
        if stream is not None:
            if seq.finished:
                stream.finish()
                text = stream.text
            else:
                text = stream.settled
        logprobs = tuple(seq.logprobs) if seq.request.sampling.logprobs else None
        return CompletionOutput(seq.index, text, tuple(seq.output_token_ids), seq.finish_reason, logprobs)
