"""Greedy tokens judge the cache only if they depend on it: what is done to any one block shows in the tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.cache import CopyPlan
from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import KVPool

PROMPT = np.random.default_rng(0).integers(0, 256, 47).tolist()
NUM_OUTPUT = 16


def overwrite(pool, block, values):
    """The pool with the block of every layer set to values."""
    layout = pool.layout
    rows = np.arange(layout.num_layers) * layout.num_blocks + int(block)
    return KVPool(pool.data.at[jnp.asarray(rows)].set(values), layout)


def decode(engine, run_all, after_first_step, n=1):
    """Tokens of each of n greedy samples; `after_first_step` may spoil what the prompt left."""
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True, n=n))
    outputs = {output.request_id: output for output in engine.step()}
    after_first_step()
    return [list(sample.token_ids) for sample in (outputs | run_all(engine))[request_id].outputs]


@pytest.mark.parametrize("block_size", [4, 16])
def test_noise_in_any_one_block_changes_tokens(tiny, make_engine, run_all, greedy_judge, block_size):
    want = greedy_judge(PROMPT, NUM_OUTPUT)
    rng = np.random.default_rng(0)
    blocks = range(-(-len(PROMPT) // block_size))
    for spoiled in (None, *blocks):
        engine = make_engine(tiny, block_size=block_size)
        runner = engine.runner

        def spoil(engine=engine, runner=runner, at=spoiled):
            (running,) = engine.scheduler.running
            (tables,) = engine.manager.tables([running.sequences[0].seq_id], len(blocks))
            if at is not None:
                block = tables[0, at]
                (pool,) = runner.pools
                old = np.asarray(pool.data)[np.arange(2) * pool.layout.num_blocks + block]
                spread = np.nanstd(old, axis=(1, 2), keepdims=True)
                noise = rng.standard_normal(old.shape, np.float32) * spread
                runner.pools = (overwrite(pool, block, noise),)

        (got,) = decode(engine, run_all, spoil)
        assert (got == want) == (spoiled is None), f"block {spoiled} of {len(blocks)}"


@pytest.mark.parametrize("kind", [None, "cow", "swap_out", "swap_in"])
def test_copies_that_write_constants_change_tokens(
    tiny, make_engine, run_all, greedy_judge, monkeypatch, kind
):
    """Two samples of one prompt part in its last block, one of them is swapped out and in again."""
    engine = make_engine(tiny, host_blocks=200, preemption="swap", prefix_caching=False)
    runner, seen = engine.runner, []
    run_copies = type(runner).run_copies

    def copy_and_spoil(copies):
        for batch in copies.batches:
            run_copies(runner, CopyPlan((batch,)))
            seen.append(batch.kind)
            if batch.kind == kind == "swap_out":
                runner.copies.hosts[batch.group].data[batch.dst] = 0.5
            elif batch.kind == kind:
                for block in batch.dst:
                    runner.pools = (overwrite(runner.pools[0], block, 0.5),)

    monkeypatch.setattr(runner, "run_copies", copy_and_spoil)
    got = decode(engine, run_all, lambda: engine.scheduler._preempt(engine.scheduler.running[0]), n=2)
    assert {"cow", "swap_out", "swap_in"} <= set(seen)
    assert (got == [greedy_judge(PROMPT, NUM_OUTPUT)] * 2) == (kind is None)
