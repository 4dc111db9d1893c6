"""Which steps change nothing but the next token: a simulation books them at once, without planning each."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from pagedjax.engine.request import Sequence
from pagedjax.engine.scheduler import Scheduler


def num_quiet_steps(scheduler: Scheduler, most: int) -> int:
    """Steps from the next one on in which every running sequence gets one token and nothing else happens.

    Nothing waits that could be admitted, no prompt is under way, no block fills, nobody forks and nobody reaches its
    length: each step reserves inside blocks that are there. What ends an answer early (an end token, a stop string)
    is not looked for: the caller knows the answers. Beams are never quiet.

    Args:
        scheduler: Between two steps.
        most: Count no further.
    """
    running = scheduler.running
    if not running or (scheduler.waiting and scheduler.num_running_seqs < scheduler.config.max_num_seqs):
        return 0
    size, count = scheduler.manager.block_size, most
    for request in running:
        sampling = request.sampling
        if sampling.beam_width or not request.forked:
            return 0
        for seq in request.live:
            done, length = seq.num_computed_tokens, seq.num_tokens
            # The newest token is generated: a chunk of one token that ends a prompt brings the first token.
            if length - done != 1 or not seq.num_output_tokens or done % size == 0:
                return 0
            left = sampling.max_tokens - seq.num_output_tokens
            count = min(count, left - 1, size - done % size - 1, scheduler.max_model_len - length - 1)
    return max(count, 0)


def book_quiet_steps(
    scheduler: Scheduler, count: int, tokens: Callable[[Sequence, int], Seq[int]], now: float
) -> None:
    """Book steps that `num_quiet_steps` has counted, as `schedule` and `update` would one by one.

    Args:
        scheduler: Unchanged since they were counted.
        count: How many of them.
        tokens: (sequence, count) → the tokens it gets in them.
        now: Logical time at the end of the last.
    """
    scheduler.step += count
    for request in scheduler.running:
        for seq in request.live:
            seq.chain.extend(list(tokens(seq, count)))
            seq.num_computed_tokens += count
            scheduler.manager.commit(seq.seq_id, seq.num_computed_tokens, now)
