"""Several steps of decode rows in one program: each feeds what the one before drew, and rows stop by token inside.

    first step's batch ──► loop: decoder ─► logits ─► draw ─► stopped? ──► tokens of all steps, pools
                             ▲    writes only where a row goes on     │
                             └──────────── tokens fed ◄───────────────┘

Where a row writes and reads in each step is known before any token is: the host plans it for all steps at once, from
blocks that were reserved ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine import Sequence, StepPlan
from pagedjax.engine.request import MAX_END_IDS
from pagedjax.kernels import KVPool, RaggedBatch
from pagedjax.runtime.batch import StepBatch, check_batch
from pagedjax.runtime.sampling import sample_tokens
from pagedjax.runtime.vocabulary import Vocabulary

Array = Any
_NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepsBatch:
    """All arrays of several steps; row, token and sample i are of one sequence, Q of them.

    Attributes:
        first: Of the first step.
        work: Of all steps what `RaggedBatch` holds of slots, lengths and items, one per KV group, each array behind an
            axis of K steps.
        counts: i32[Q], steps in which the row is fed; 0 is padding.
        ends: i32[Q, E], tokens that end it, filled up with -1.
    """

    first: StepBatch
    work: tuple[dict[str, Any], ...]
    counts: Array
    ends: Array


class StepsOutput(NamedTuple):
    """What the steps leave on the device beside the pools.

    Attributes:
        tokens: i32[K, Q] drawn; of a row that goes on no more its last one.
        taken: i32[], steps that were computed.
        drawn: i32[N], the last tokens, padded to the most of any bucket: what the next step may be fed.
    """

    tokens: Array
    taken: Array
    drawn: Array


def pack_steps(
    first: StepBatch,
    plans: Seq[StepPlan[Sequence]],
    most: int,
    plan_work: Callable[[np.ndarray], tuple[RaggedBatch, ...]],
) -> tuple[StepsBatch, list[tuple[RaggedBatch, ...]]]:
    """Lay steps out for the program.

    Args:
        first: The first plan, packed.
        plans: At most `most`, see `SeveralRunner.launch_several`; none: nothing but padding.
        most: K.
        plan_work: Lengths i32[n] of the first plan's rows in a step → its work in each KV group.

    Returns:
        The arrays, and the work of each step as `StepChecks` asks for it. A row that is fed no more repeats its last
        step there; the program writes nothing of it.
    """
    size = first.tokens.shape[0]
    rows = plans[0].rows if plans else ()
    number = {row.seq: i for i, row in enumerate(rows)}
    counts, ends = np.zeros(size, np.int32), np.full((size, MAX_END_IDS), _NO_TOKEN, np.int32)
    for plan in plans:
        counts[[number[row.seq] for row in plan.rows]] += 1
    for i, row in enumerate(rows):
        tokens = row.seq.request.end_token_ids
        ends[i, : len(tokens)] = list(tokens)
    lens = np.array([row.start + 1 for row in rows], np.int32)
    steps = [first.ragged]
    for step in range(1, len(plans)):
        steps.append(plan_work(lens + np.minimum(step, counts[: len(rows)] - 1)))
    full = [*steps, *[steps[-1]] * (most - len(steps))]
    work = tuple(
        jax.tree.map(lambda *arrays: np.stack(arrays), *(_work(step[group]) for step in full))
        for group in range(len(first.ragged))
    )
    return StepsBatch(first, work, counts, ends), steps


def _work(ragged: RaggedBatch) -> dict[str, Any]:
    """What of a batch changes from step to step."""
    return {name: getattr(ragged, name) for name in ("slot_mapping", "seq_lens", "decode_lists")}


def make_steps(
    decode: Callable[[dict[str, Any], StepBatch, tuple[KVPool, ...]], tuple[Array, tuple[KVPool, ...]]],
    logits: Callable[[dict[str, Any], Array], Array],
    vocabulary: Vocabulary,
) -> Callable[..., tuple[StepsOutput, tuple[KVPool, ...]]]:
    """The program (params, pools, StepsBatch) → (StepsOutput, pools), to be jitted.

    Args:
        decode: A step's hidden states f[T, D], and the pools with its keys and values.
        logits: (params, f[Q, D]) → f32[Q, V].
        vocabulary: What the columns of the logits stand for.
    """

    def steps(
        params: dict[str, Any], pools: tuple[KVPool, ...], batch: StepsBatch
    ) -> tuple[StepsOutput, tuple[KVPool, ...]]:
        first, counts, ends = batch.first, batch.counts, batch.ends
        check_batch(first)  # while tracing
        num_steps = batch.work[0]["seq_lens"].shape[0]
        fed_ahead = first.tokens < 0
        tokens = jnp.where(fed_ahead, first.drawn[-1 - first.tokens], first.tokens)

        def ended(drawn: Array) -> Array:
            return (drawn[:, None] == ends).any(axis=1)

        def goes_on(step: Array, stopped: Array) -> Array:
            return (step < counts) & ~stopped

        def compute(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, tokens, stopped, out, pools = carry
            going = goes_on(step, stopped)
            ragged = []
            for group, work in zip(first.ragged, batch.work, strict=True):
                now = jax.tree.map(lambda x: x[step], work)
                ragged.append(
                    replace(group, **now | {"slot_mapping": jnp.where(going, now["slot_mapping"], -1)})
                )
            sampling = replace(first.sampling, position=first.sampling.position + step)
            one = replace(
                first,
                tokens=tokens,
                positions=first.positions + step,
                ragged=tuple(ragged),
                sampling=sampling,
            )
            hidden, pools = decode(params, one, pools)
            drawn = sample_tokens(logits(params, hidden[first.sample_index]), sampling, vocabulary)
            tokens = jnp.where(going, drawn, tokens)
            return step + 1, tokens, stopped | (going & ended(drawn)), out.at[step].set(tokens), pools

        def more(carry: tuple[Any, ...]) -> Array:
            step, _, stopped, *_ = carry
            return (step < num_steps) & goes_on(step, stopped).any()

        nothing = jnp.zeros((num_steps, tokens.shape[0]), jnp.int32)
        begin = (jnp.zeros((), jnp.int32), tokens, fed_ahead & ended(tokens), nothing, pools)
        taken, last, _, out, pools = jax.lax.while_loop(more, compute, begin)
        drawn = jnp.pad(last, (0, first.drawn.shape[0] - last.shape[0]))
        return StepsOutput(out, taken, drawn), pools

    return steps
