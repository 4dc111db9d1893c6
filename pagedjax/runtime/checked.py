"""Checked mode: what a step is about to write and read is asserted on the device before it runs.

The red line of the cache, asked of the very arrays that the step is given: every written slot lies in a
block that one sequence holds alone and that is not indexed, every table entry is a block of the pool, every
length lies within its table. The assertions are a program of their own, so the step's program is the same
whether they are on or off, and a step that fails them never touches the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from pagedjax.cache import InvariantError
from pagedjax.kernels import KVLayout, RaggedBatch

Array = Any


class StepChecks:
    """Asserts each group's batch against its pool.

    Args:
        layouts: Of the pools.
        windows: Window of each group; None: its layers read everything.
    """

    def __init__(self, layouts: Sequence[KVLayout], windows: Sequence[int | None]) -> None:
        def checks(batches: tuple[RaggedBatch, ...], writable: tuple[Array, ...]) -> None:
            for group, parts in enumerate(zip(layouts, windows, batches, writable, strict=True)):
                _check_group(group, *parts)

        self._checks = jax.jit(checkify.checkify(checks, errors=checkify.user_checks))

    def __call__(self, batches: tuple[RaggedBatch, ...], writable: tuple[np.ndarray, ...]) -> None:
        """Raise InvariantError naming the first assertion that fails.

        Args:
            batches: What the step is given, one per group.
            writable: bool[P] per group: blocks of one reference and no hash.
        """
        error, _ = self._checks(batches, writable)
        message = error.get()
        if message is not None:
            raise InvariantError(f"checked step: {message.splitlines()[0]}")


def _check_group(
    group: int, layout: KVLayout, window: int | None, batch: RaggedBatch, writable: Array
) -> None:
    blocks, size = layout.num_blocks, layout.block_size
    row = jnp.arange(batch.seq_lens.shape[0])
    live = row < batch.num_seqs
    width = batch.block_tables.shape[1]

    entries = batch.block_tables
    outside = live[:, None] & ((entries < 0) | (entries >= blocks))
    _no(outside, f"group {group}: a block table names {{x}}, outside the pool of {blocks}", entries)

    past = live & (batch.seq_lens > width * size)
    _no(past, f"group {group}: a length of {{x}} is past its table of {width} blocks", batch.seq_lens)
    # Positions that some query of the row reads must have a block.
    queries = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    first = 0 * row if window is None else jnp.maximum(batch.seq_lens - queries - window + 1, 0) // size
    at = jnp.arange(width)[None, :]
    read = live[:, None] & (at >= first[:, None]) & (at < -(-batch.seq_lens // size)[:, None])
    lens = jnp.broadcast_to(batch.seq_lens[:, None], entries.shape)
    _no(read & (entries == 0), f"group {group}: a length of {{x}} is past its table's blocks", lens)

    slots = batch.slot_mapping
    token = jnp.arange(slots.shape[0])
    real = token < batch.query_start_loc[batch.num_seqs]
    block = slots // size
    _no(~real & (slots != -1), f"group {group}: padding is written to slot {{x}}", slots)
    inside = (block >= 1) & (block < blocks)
    _no(real & ~inside, f"group {group}: block {{x}} is to be written, outside the pool of {blocks}", block)
    open_ = writable[jnp.where(inside, block, 0)]
    _no(
        real & inside & ~open_,
        f"group {group}: block {{x}} is to be written, but is shared, indexed or nobody's",
        block,
    )


def _no(bad: Array, message: str, values: Array) -> None:
    """Nothing may be `bad`; the first culprit's value goes into the message."""
    culprit = values.reshape(-1)[jnp.argmax(bad.reshape(-1))]
    checkify.check(~jnp.any(bad), message, x=culprit)
