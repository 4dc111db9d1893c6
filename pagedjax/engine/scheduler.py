"""Who runs in the next step, and how many tokens: admission, chunked prefill, decode, preemption.

The scheduler decides *who and how many tokens*; the cache manager decides *where*; the runner *how*.
One call of `schedule` makes one `StepPlan`; one call of `update` books its result.

Policy (by priority, then first come, first served):

1. Running requests first, in that order. Every decode token is paid for before any prefill chunk.
   Where the pool has no room the last of them gives its blocks up and goes back to its place in the
   queue; the first is never preempted, so every step makes progress. What becomes of the blocks is
   `SchedulerConfig.preemption`: dropped and recomputed, or moved to the host and back.
2. Then waiting requests, in order, while the token budget and the sequence limit last and nobody was
   preempted in this step. The first one that does not fit stops admission: nobody overtakes it.

A request of n samples is admitted, preempted and resumed as one. Its prompt is computed once, by its
first live sequence; the others fork from it at the prompt's end and copy blocks on write. A beam search
starts as one sequence, holds a place for each beam, and is forked by the engine after each of its steps;
when it comes back after a preemption, its beams fork where they part.

`schedule_ahead` plans a step while the one before it runs, before that one's tokens are known: only what is running,
and only where what they are changes nothing but the tokens that the next step is fed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from pagedjax.cache import Hit, KVCacheManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine.limits import check_limits, check_request, chunk_tokens, expected_output
from pagedjax.engine.preemption import PreemptionCost
from pagedjax.engine.request import FinishReason, Request, SamplingParams, Sequence, Status
from pagedjax.engine.step import Row, StepPlan


def _insert(queue: list[Request] | deque[Request], request: Request) -> None:
    """Put a request where it belongs: the highest priority first, then the earliest."""
    place = (-request.priority, request.number)
    if queue and place < (-queue[0].priority, queue[0].number):
        queue.insert(0, request)
        return
    at = len(queue)
    while at and place < (-queue[at - 1].priority, queue[at - 1].number):
        at -= 1
    queue.insert(at, request)


def _num_common(lists: list[list[int]]) -> int:
    """Length of the prefix that all lists share."""
    first, last = min(lists), max(lists)
    limit = min(len(first), len(last))
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def _is_long(row: Row[Sequence]) -> bool:
    return row.num_tokens > 1


class Scheduler:
    """Continuous batching over one cache manager.

    Args:
        manager: Owns the blocks.
        config: Limits of one step.
        max_model_len: Longest sequence in tokens; also the width of the block tables.
        block_bytes: Bytes of one block per KV group; needed where swapping and recomputing are weighed.

    Attributes:
        ahead: Steps may be planned before the one before them is booked.

    Raises:
        ValueError: The limits contradict each other, or preemption asks for a host that is not there.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        max_model_len: int,
        block_bytes: tuple[int, ...] = (),
    ) -> None:
        check_limits(config, manager, max_model_len, block_bytes)
        self.costs = PreemptionCost(block_bytes, config.swap_bandwidth_bytes)
        self.manager = manager
        self.config = config
        self.max_model_len = max_model_len
        self.table_width = -(-max_model_len // manager.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.step = 0
        self.num_added = 0
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that moved blocks to the host
        self.ended: list[Sequence] = []  # finished for want of blocks; drained by the engine
        self.ahead = False
        # Who was refused for want of blocks when somebody else ran, and how many were free then.
        self._refused: tuple[Request, int] | None = None
        self._short = False  # the last plan was made ahead, and blocks ran out
        self.chunk_tokens = chunk_tokens(config)  # most of one sequence in a step

    # ------------------------------------------------------------------ queue

    def check(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """Raise what makes a request impossible to run; see `limits.check_request`."""
        check_request(self.config, self.manager, self.max_model_len, num_prompt_tokens, sampling)

    def add(self, request: Request) -> None:
        """Queue a request that passed `check`."""
        request.number = self.num_added
        self.num_added += 1
        _insert(self.waiting, request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_running_seqs(self) -> int:
        """Places taken under max_num_seqs: a request holds one for each live sample from the start."""
        return sum(request.num_places for request in self.running)

    # --------------------------------------------------------------- planning

    def schedule(self) -> StepPlan[Sequence]:
        """Plan the next step; rows is empty where nothing can run."""
        self.step += 1
        self._short = False
        rows: list[Row[Sequence]] = []
        active = {request.number: self._active(request) for request in self.running}
        # Decode tokens are paid for first: no prefill chunk may starve them.
        budget = self.config.token_budget - sum(
            self._pending(seq) == 1 for seqs in active.values() for seq in seqs
        )
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):
            request = self.running[index]
            own, budget = self._continue(active[request.number], budget)
            if index < len(self.running) and self.running[index] is request:
                rows += own
                index += 1
        if self.num_preemptions == preemptions:
            self._admit(rows, budget)
        return self._plan(rows)

    def schedule_ahead(self) -> StepPlan[Sequence] | str:
        """Plan the step behind the one that runs; in place of a plan, the rule by which that one is booked first.

        Nobody is admitted (a prompt may hit what the running step writes), preempted or forked by such a plan, and
        nothing is reserved for a sequence that ends with the running step whatever its token is. One that ends by its
        token is computed one token too far: `update` passes over it. Where blocks run out the rest waits, and the next
        plan is one that may preempt. Changes nothing where there is no plan.
        """
        if reason := self.must_wait():
            return reason
        budget = self.config.token_budget - sum(
            self._pending(seq) == 1 for request in self.running for seq in self._active(request)
        )
        rows: list[Row[Sequence]] = []
        for request in self.running:
            for seq in self._active(request):
                pending = self._pending(seq)
                want = pending if pending <= 1 else min(pending, budget, self.chunk_tokens)
                if want < 1:
                    continue
                if not self.manager.reserve(seq.seq_id, seq.num_flying + want):
                    self._short = True
                    break
                if pending > 1:
                    budget -= want
                rows.append(self._row(seq, want))
            if self._short:
                break
        if not rows:
            return "no room" if self._short else "first"  # all end with the running step
        self.step += 1
        return self._plan(rows)

    def must_wait(self) -> str:
        """The first rule by which the running step has to be booked before another is planned; "" is none."""
        if self._short:
            return "no room"
        for request in self.running:
            sampling = request.sampling
            if sampling.beam_width:
                return "beams"
            if sampling.has_adjustments:
                return "penalties"
            if sampling.min_tokens and any(s.num_output_tokens < sampling.min_tokens for s in request.live):
                return "min_tokens"
            leader = request.live[0]
            if not request.forked and leader.num_computed_tokens + leader.num_flying == request.fork_at:
                return "fork"
        if self.waiting:
            head, places = self.waiting[0], self.config.max_num_seqs - self.num_running_seqs
            known = self._refused is not None and self._refused[0] is head
            if head.num_places <= places and not (known and self.manager.num_free <= self._refused[1]):  # type: ignore[index]
                return "admission"
        return ""

    def _plan(self, rows: list[Row[Sequence]]) -> StepPlan[Sequence]:
        rows.sort(key=_is_long)  # stable: one-token rows first
        copies = self.manager.take_copies()
        tables = self.manager.tables([row.seq.seq_id for row in rows], self.table_width)
        if self.ahead:
            for row in rows:
                row.seq.num_flying += row.num_tokens
                for sample in row.samples:
                    sample.num_drawn += 1
        return StepPlan(self.step, tuple(rows), tables, copies)

    def _continue(self, active: list[Sequence], budget: int) -> tuple[list[Row[Sequence]], int]:
        """Rows of a running request's active sequences; none where it lost its blocks to an older one or ended."""
        rows = []
        for seq in active:
            if seq.finished:
                continue
            pending = self._pending(seq)
            want = pending if pending == 1 else min(pending, budget, self.chunk_tokens)
            if want < 1:
                continue
            if not self._make_room(seq, want):
                break
            if pending > 1:
                budget -= want
            rows.append(self._row(seq, want))
        return rows, budget

    def _admit(self, rows: list[Row[Sequence]], budget: int) -> None:
        """Move waiting requests into the batch while budget, places and blocks last."""
        if not self.waiting:
            return
        places = self.config.max_num_seqs - self.num_running_seqs
        while self.waiting and budget > 0:
            request = self.waiting[0]
            live = request.live
            if request.num_places > places:
                return
            if request.swapped:
                if self._swap_in(request):
                    places -= request.num_places
                    budget = self._start(request, rows, budget)
                    continue
                if self.running:
                    self._refused = request, self.manager.num_free
                    return
                self._drop_blocks(request)  # nobody is left to make room: recompute what fits
            leader = live[0]
            hit = self._look_up(request, leader)
            pending = self._pending(leader)
            want = min(pending, budget, self.chunk_tokens)
            # What a preempted request has to recompute may exceed the budget, whatever its prompt did.
            if want < pending and not (self.config.chunked_prefill or request.num_preemptions):
                self._take_back(leader)
                return
            # With nobody running nobody makes more room: then the first chunk is all there is to ask for.
            ask = self.config.admission == "whole" and bool(self.running)
            if not self.manager.reserve(leader.seq_id, want, whole=len(leader.chain) if ask else 0):
                self._take_back(leader)
                if self.running:
                    self._refused = request, self.manager.num_free
                    return
                self._end_for_capacity(request)  # nobody is left to free a block: waiting on is a hang
                continue
            if request.num_cached_tokens is None:
                request.num_cached_tokens = hit.num_tokens
                request.miss_reason = hit.reason
                request.matched_tokens = hit.matched_tokens
            self._run(request)
            places -= request.num_places
            budget -= want
            rows.append(self._row(leader, want))

    def _run(self, request: Request) -> None:
        """The first of the waiting requests runs."""
        self.waiting.popleft()
        _insert(self.running, request)
        for seq in request.live:
            seq.status = Status.RUNNING

    def _swap_in(self, request: Request) -> bool:
        """Bring a swapped request back, with a block left for each sequence to go on; False: no room."""
        seqs = self._active(request)
        if not self.manager.swap_in(*[seq.seq_id for seq in seqs], spare=len(seqs)):
            return False
        for seq in seqs:
            seq.num_computed_tokens = self.manager.num_computed(seq.seq_id)
        request.swapped = False
        return True

    def _start(self, request: Request, rows: list[Row[Sequence]], budget: int) -> int:
        """Rows of a request that came back from the host, as far as budget and room go; what is left of it."""
        self._run(request)
        for seq in self._active(request):
            want = min(self._pending(seq), budget, self.chunk_tokens)
            if want < 1 or not self.manager.reserve(seq.seq_id, want):
                break
            budget -= want
            rows.append(self._row(seq, want))
        return budget

    def _look_up(self, request: Request, leader: Sequence) -> Hit:
        request.forked = len(request.live) == 1
        sampling = request.sampling
        if sampling.beam_width and not request.forked:
            request.fork_at = _num_common([seq.chain.tokens for seq in request.live])
        # The hit must leave the leader a token to compute before the others fork from it.
        limit = None if request.forked else request.fork_at - 1
        scored = len(request.prompt_details) >= request.num_prompt_tokens - 1
        hints = replace(
            expected_output(sampling, leader.num_output_tokens),
            resumed=request.num_preemptions > 0,
            max_hit_tokens=limit,
            priority=sampling.retention,
            ttl_s=sampling.ttl_s,
            group=sampling.group,
            cache_read=sampling.cache_read and (sampling.prompt_logprobs is None or scored),
            cache_write=sampling.cache_write,
        )
        hit = self.manager.begin(leader.seq_id, leader.chain, hints)
        leader.num_computed_tokens = hit.num_tokens
        return hit

    def _take_back(self, leader: Sequence) -> None:
        self.manager.release(leader.seq_id)
        leader.num_computed_tokens = 0

    def _active(self, request: Request) -> list[Sequence]:
        """Sequences with a block table of their own: all live ones once forked, the leader before."""
        live = request.live
        return live if request.forked else live[:1]

    def _pending(self, seq: Sequence) -> int:
        """Tokens of `seq` still to be fed; an unforked leader stops where it is to be forked.

        None where it ends with the token that a running step draws.
        """
        request, drawn = seq.request, seq.num_drawn
        if not request.forked:
            return request.fork_at - seq.num_computed_tokens - seq.num_flying
        tokens = seq.num_tokens + drawn
        if drawn and (
            tokens >= self.max_model_len or tokens - request.num_prompt_tokens >= request.sampling.max_tokens
        ):
            return 0
        return tokens - seq.num_computed_tokens - seq.num_flying

    def _row(self, seq: Sequence, num_tokens: int) -> Row[Sequence]:
        start = seq.num_computed_tokens + seq.num_flying
        end = start + num_tokens
        if seq.request.forked:
            return Row(seq, start, num_tokens, (seq,) if seq.num_tokens + seq.num_drawn == end else ())
        return Row(seq, start, num_tokens, tuple(s for s in seq.request.live if s.num_tokens == end))

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Reserve blocks for a running sequence, preempting from the far end; False: `seq` lost."""
        request = seq.request
        while not self.manager.reserve(seq.seq_id, num_tokens):
            if len(self.running) > 1:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return False
            elif request.sampling.beam_width:
                self._end_for_capacity(request)  # beams are judged together
                return False
            else:
                # Alone and out of blocks: the last sample gives way, so that the others may finish.
                last = request.live[-1]
                self.finish(last, FinishReason.CAPACITY)
                self.ended.append(last)
                if last is seq:
                    return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks away: to the host, or it recomputes what the cache does not give back."""
        self.running.remove(request)
        if self._swap_out(request):
            self.num_swaps += 1
        else:
            self._drop_blocks(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Back to its place among those that wait."""
        for seq in request.live:
            seq.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        _insert(self.waiting, request)

    def _swap_out(self, request: Request) -> bool:
        """Move a request's blocks to the host where that is wanted, pays and finds room."""
        if self.config.preemption == "recompute":
            return False
        seqs = self._active(request)
        ids = [seq.seq_id for seq in seqs]
        if self.config.preemption == "auto":
            shared = request.num_prompt_tokens if request.forked else 0
            tokens = sum(max(seq.num_computed_tokens - shared, 0) for seq in seqs) + shared
            if not self.costs.swap_pays(self.manager.num_lone_blocks(*ids), tokens):
                return False
        request.swapped = self.manager.swap_out(*ids)
        return request.swapped

    def _end_for_capacity(self, request: Request) -> None:
        for seq in request.live:
            self.finish(seq, FinishReason.CAPACITY)
            self.ended.append(seq)

    # ---------------------------------------------------------------- results

    def update(
        self, plan: StepPlan[Sequence], tokens: list[int], logprobs: list[float], now: float
    ) -> list[tuple[int, Sequence]]:
        """Book a step's result: index written blocks, fork samples, append tokens.

        Args:
            plan: The plan that ran.
            tokens: One per sample, in row order.
            logprobs: One per sample, or empty where none were computed.
            now: Logical time.

        Returns:
            (number of the sample in the step, its sequence) of those that live, in row order. Beams get no
            token here: which of them go on is the engine's to find out, and so are the stop rules.
        """
        grown: list[tuple[int, Sequence]] = []
        at = 0
        for row in plan.rows:
            seq, samples = row.seq, row.samples
            if self.ahead:
                seq.num_flying -= row.num_tokens
                for sample in samples:
                    sample.num_drawn -= 1
            if not seq.finished:
                seq.num_computed_tokens = row.start + row.num_tokens
                self.manager.commit(seq.seq_id, seq.num_computed_tokens, now)
                if not seq.request.forked and seq.num_computed_tokens == seq.request.fork_at:
                    self._fork(seq)
            for sample in samples:
                if not sample.finished:
                    if not sample.request.sampling.beam_width:
                        sample.chain.append(tokens[at])
                        if logprobs:
                            sample.logprobs.append(logprobs[at])
                    grown.append((at, sample))
                at += 1
        return grown

    def undo(self, plan: StepPlan[Sequence]) -> None:
        """A plan failed on its way: nobody knows how far it ran, so what it was to write is computed again.

        Contents that were indexed before are whole: no step writes into them.
        """
        self.manager.lose(plan.copies)
        self.requeue_all()

    def requeue_all(self) -> None:
        """All running requests go back to the queue without their blocks, and swapped ones lose theirs."""
        for request in self.waiting:
            if request.swapped:
                self._drop_blocks(request)
        while self.running:
            request = self.running.pop()
            self._drop_blocks(request)
            self._requeue(request)

    def _fork(self, leader: Sequence) -> None:
        request = leader.request
        for seq in request.live:
            if seq is not leader:
                self.manager.fork(leader.seq_id, seq.seq_id, seq.chain)
                seq.num_computed_tokens = leader.num_computed_tokens
        request.forked = True

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence and give its blocks back; a second call changes nothing."""
        if seq.finished:
            return
        request = seq.request
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self._drop_sequence(seq)
        if not request.live:
            if request in self.running:
                self.running.remove(request)
            elif request in self.waiting:
                self.waiting.remove(request)

    def _drop_blocks(self, request: Request) -> None:
        for seq in reversed(request.live):
            self._drop_sequence(seq)
            seq.num_computed_tokens = seq.num_flying = seq.num_drawn = 0
            seq.candidates = None
        request.forked = len(request.live) == 1
        request.swapped = False

    def _drop_sequence(self, seq: Sequence) -> None:
        seq.request.num_copies += self.manager.num_copies(seq.seq_id)
        self.manager.release(seq.seq_id)
