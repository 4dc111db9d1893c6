"""Several steps for one dispatch: what runs behind a step of decode rows, planned before their tokens are known."""

from __future__ import annotations

from dataclasses import replace

from pagedjax.cache import CopyPlan, InvariantError
from pagedjax.engine.request import Sequence
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.step import Row, StepPlan


def plan_behind(scheduler: Scheduler, plan: StepPlan[Sequence], most: int) -> list[StepPlan[Sequence]] | str:
    """Plan the steps that run behind one in its dispatch; in place of them, the rule by which it runs alone.

    Each feeds its rows what the one before has drawn. Their blocks are reserved here, before the dispatch, and only
    where there is room for all of them: nobody is preempted for a step ahead. A row whose length is known to be reached
    is in no later step; one that ends by its token is, and `Scheduler.update` passes over it. While somebody waits, no
    step runs behind the first one after which a row's place is known to be free.

    Args:
        scheduler: Has planned `plan` just now, and counts what is on its way.
        plan: Not begun yet; of a plan that was made ahead, too.
        most: Steps of the dispatch, `plan` among them.

    Returns:
        All plans of the dispatch, at least two; the first is `plan` with the tables and copies that serve all.
    """
    if any(row.num_tokens > 1 for row in plan.rows) or _fills(scheduler):
        return "prefill"
    if reason := scheduler.must_wait():
        return reason
    asked = [row.seq.request.sampling for row in plan.rows]
    if any(p.logprobs is not None or p.waits_for_all for p in asked):
        return "logprobs"
    left = [_num_left(scheduler, row.seq) for row in plan.rows]
    count = min((min if scheduler.waiting else max)(left, default=0), most - 1)
    if count < 1:
        return "end"
    ends = [row.start + 1 for row in plan.rows]
    while count and _new_blocks(scheduler, ends, left, count) > scheduler.manager.num_free:
        count -= 1
    if not count:
        return "no room"
    return _plan_all(scheduler, plan, [min(n, count) for n in left], count)


def _fills(scheduler: Scheduler) -> bool:
    """Whether a prompt is under way."""
    return any(
        not request.forked
        or any(s.num_tokens + s.num_drawn - s.num_computed_tokens - s.num_flying > 1 for s in request.live)
        for request in scheduler.running
    )


def _num_left(scheduler: Scheduler, seq: Sequence) -> int:
    """Steps, behind those that are planned, in which a sequence may be fed before its length ends it."""
    tokens, request = seq.num_tokens + seq.num_drawn, seq.request
    most = request.num_prompt_tokens + request.sampling.max_tokens
    return max(min(scheduler.max_model_len, most) - tokens, 0)


def _new_blocks(scheduler: Scheduler, ends: list[int], left: list[int], count: int) -> int:
    """Blocks of each group for rows that reach to `ends`, for `count` steps more or as many as each has left."""
    size = scheduler.manager.block_size
    return sum(-(-(end + min(n, count)) // size) + -end // size for end, n in zip(ends, left, strict=True))


def _plan_all(
    scheduler: Scheduler, plan: StepPlan[Sequence], further: list[int], count: int
) -> list[StepPlan[Sequence]]:
    manager = scheduler.manager
    for row, n in zip(plan.rows, further, strict=True):
        if not manager.reserve(row.seq.seq_id, row.seq.num_flying, lookahead=n):
            raise InvariantError(
                f"sequence {row.seq.seq_id}: no room for {n} steps that room was counted for"
            )
        row.seq.num_flying += n
        row.seq.num_drawn += n
    tables = manager.tables([row.seq.seq_id for row in plan.rows], scheduler.table_width)
    # What had to leave for the blocks further ahead goes to the host before any step.
    copies = CopyPlan((*plan.copies.batches, *manager.take_copies().batches))
    plans = [replace(plan, tables=tables, copies=copies)]
    numbers = list(range(len(further)))
    for step in range(1, count + 1):
        if (lasting := [i for i in numbers if further[i] >= step]) != numbers:
            numbers, tables = lasting, tuple(table[lasting] for table in plans[0].tables)
        rows = tuple(
            Row(row.seq, row.start + step, 1, row.samples) for row in map(plan.rows.__getitem__, numbers)
        )
        plans.append(StepPlan(plan.step + step, rows, tables, CopyPlan()))
    scheduler.step += count
    return plans
