"""Blocks really move to the host and back: swapped sequences, evicted prefixes, resets; the cold run's logits."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import KVLayout, make_pool
from pagedjax.runtime.host_pool import BlockCopies


def greedy(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=1, **more)


def _prompts(count, length=30, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, length)).tolist()


def _run(engine, every=None, seed=0):
    """Step until idle; every so many steps a random running request is preempted."""
    rng = np.random.default_rng(seed)
    outputs, step = {}, 0
    while engine.has_work:
        step += 1
        running = engine.scheduler.running
        if every and step % every == 0 and running:
            engine.scheduler._preempt(running[int(rng.integers(len(running)))])
        for output in engine.step():
            outputs[output.request_id] = output
        engine.manager.check_invariants()
    return outputs


def _assert_same(outputs, ids, expected):
    for request_id, wanted in zip(ids, expected, strict=True):
        for got, want in zip(outputs[request_id].outputs, wanted.outputs, strict=True):
            assert got.token_ids == want.token_ids
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def undisturbed():
    return {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_preemption_gives_the_undisturbed_tokens_and_logits(tiny, make_engine, undisturbed, mode, n):
    sampling = greedy(16, n=n, temperature=1.0 if n > 1 else 0.0, seed=3)
    prompts = _prompts(6 // n)
    if n not in undisturbed:
        engine = make_engine(tiny)
        ids = [engine.add(prompt, sampling) for prompt in prompts]
        outputs = _run(engine)
        undisturbed[n] = [outputs[i] for i in ids]
    engine = make_engine(
        tiny, preemption=mode, host_blocks=256, poison=True, shuffle=1, prefix_caching=mode == "recompute"
    )
    ids = [engine.add(prompt, sampling) for prompt in prompts]
    outputs = _run(engine, every=3)
    _assert_same(outputs, ids, undisturbed[n])
    scheduler = engine.scheduler
    assert scheduler.num_preemptions >= 4
    assert scheduler.num_swaps == (scheduler.num_preemptions if mode == "swap" else 0)


def test_a_tier_hit_gives_the_cold_logits(tiny, make_engine):
    """A prompt is evicted to the host by strangers, comes back on a hit, and is never computed again."""
    engine = make_engine(tiny, host_blocks=256, poison=True, shuffle=2)
    prompt = _prompts(1, length=81)[0]
    cold = engine.add(prompt, greedy(8))
    outputs = _run(engine)
    for stranger in _prompts(8, length=100, seed=1):
        engine.add(stranger, greedy(1))
        outputs |= _run(engine)
    stats = engine.manager.stats
    assert stats.evictions >= 20 and stats.host_hit_tokens == 0
    plans = []
    engine.on_step = lambda record: plans.append(record.plan)
    warm = engine.add(prompt, greedy(8))
    outputs |= _run(engine)
    assert outputs[warm].num_cached_tokens == stats.host_hit_tokens == 80
    assert sum(len(b.src) for p in plans for b in p.copies.batches if b.kind == "swap_in") == 20
    assert plans[0].num_tokens == 1
    _assert_same(outputs, [warm], [outputs[cold]])


def test_windowed_groups_swap_and_use_the_tier_too(make_engine):
    import jax

    from pagedjax.testing import tiny_config, tiny_params

    config = tiny_config(windows=(8, None))
    model = (config, jax.device_put(tiny_params(config)))
    prompts = [prompt[: 20 + n] for n, prompt in enumerate(_prompts(5, length=40))]
    texts = []
    for options in (dict(), dict(preemption="swap", host_blocks=200)):
        engine = make_engine(model, group_blocks=[130, 50], chunk_tokens=16, poison=True, **options)
        outputs = {}
        ids = []
        for _ in range(2):  # the second time much of it is on the host
            ids += [engine.add(prompt, greedy(12)) for prompt in prompts]
            outputs |= _run(engine, every=4 if options else None)
            for stranger in _prompts(6, length=90, seed=3):
                engine.add(stranger, greedy(1))
                outputs |= _run(engine)
        texts.append([outputs[i] for i in ids])
        if options:
            assert engine.scheduler.num_swaps > 4
            assert engine.manager.stats.host_hit_tokens > 0
            _assert_same(outputs, ids, texts[0])


def test_B105_after_a_reset_nothing_stale_is_served(tiny, make_engine):
    """New weights: a strict reset refuses while requests run; after it outputs are a fresh engine's."""
    import jax

    from pagedjax.testing import tiny_params

    config, _ = tiny
    engine = make_engine(tiny, host_blocks=64)
    prompts = _prompts(2, length=30)
    for prompt in prompts:
        engine.add(prompt, greedy(20))
    engine.step()
    free = engine.manager.num_free
    report = engine.manager.reset("strict")
    assert not report and report.blocked_by == 2 and engine.manager.num_free == free
    _run(engine)
    assert engine.manager.reset("strict")
    other = jax.device_put(tiny_params(config, seed=1))
    params = engine.runner.params
    engine.runner.update_weights(other)
    try:
        again = engine.add(prompts[0], greedy(8))
        after = _run(engine)[again]
        fresh = make_engine(tiny)
        fresh.runner.update_weights(other)
        expected = fresh.add(prompts[0], greedy(8))
        _assert_same({again: after}, [again], [_run(fresh)[expected]])
    finally:
        engine.runner.update_weights(params)
    assert after.num_cached_tokens == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 8, 9, 64, 130])
def test_blocks_survive_the_round_trip_bitwise(dtype, count):
    layout = KVLayout(3, 200, 4, 2, 24, dtype)
    copies = BlockCopies((layout,), 200)
    rng = np.random.default_rng(count)
    ids = rng.permutation(200)[:count].astype(np.int32)
    blocks = rng.standard_normal((count, 3, 4, layout.width)).astype(copies.hosts[0].data.dtype)
    pool = copies.write(make_pool(layout), ids, blocks)
    assert (copies.read(pool, ids) == blocks).all()
    others = np.setdiff1d(np.arange(200, dtype=np.int32), ids)
    assert not copies.read(pool, others).any()
