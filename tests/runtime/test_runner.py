"""The real step under the real scheduler and manager: same tokens as the dense judge, in place, few programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import chex
import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.config import RuntimeConfig, SchedulerConfig
from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import KVLayout, KVPool
from pagedjax.runtime import Buckets, JaxRunner
from pagedjax.testing import tiny_config, tiny_params


def greedy(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def prompts_with_shared_prefixes(count, vocab, longest, seed=0):
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, vocab, size=longest).tolist() for _ in range(4)]
    return [
        stems[rng.integers(4)][: int(rng.integers(1, longest))]
        + rng.integers(0, vocab, size=int(rng.integers(1, 8))).tolist()
        for _ in range(count)
    ]


# ------------------------------------------------------------------ golden texts


# By default each block size once and each chunk twice; `full` has the other halves.
STORIES = [
    pytest.param(
        size, chunk, marks=[] if (size, chunk) in ((1, 512), (4, 5), (16, 512), (64, 5)) else pytest.mark.full
    )
    for size, chunk in itertools.product((1, 4, 16, 64), (5, 512))
]


@pytest.mark.parametrize(("block_size", "chunk"), STORIES)
def test_stories_continue_exactly_alone_and_in_a_staggered_batch(
    stories, make_engine, run_all, block_size, chunk
):
    config, params, ids = stories
    engine = make_engine(
        (config, params),
        block_size=block_size,
        num_blocks=8 * 256 // block_size + 1,
        token_budget=512,
        chunk_tokens=chunk,
        max_model_len=512,
        shuffle=block_size,
        quick=block_size != 16,  # once as users compile it
    )
    lengths = (1, 7, 100, 200)

    def add(length):
        return engine.add(ids[:length], SamplingParams(max_tokens=256 - length))

    for length in lengths:
        request_id = add(length)
        assert list(run_all(engine)[request_id].outputs[0].token_ids) == ids[length:256], length
    expected, results = {}, {}
    for length in lengths * 2:  # each length twice, two steps apart: prefills and decodes mix
        expected[add(length)] = ids[length:256]
        for output in engine.step() + engine.step():
            results[output.request_id] = output
    results |= run_all(engine)
    assert {i: list(results[i].outputs[0].token_ids) for i in expected} == expected
    if block_size < 64:
        assert all(
            results[i].num_cached_tokens > 0 for i in expected if len(results[i].prompt_token_ids) >= 100
        )


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 5), (4, 64), (16, 5), (64, 64)])
def test_tiny_model_equals_the_dense_judge(tiny, make_engine, run_all, greedy_judge, block_size, chunk):
    engine = make_engine(
        tiny,
        block_size=block_size,
        num_blocks=max(130, 8 * 128 // block_size + 1),
        chunk_tokens=chunk,
        shuffle=3,
    )
    stem = np.random.default_rng(5).integers(0, 256, size=60).tolist()
    prompts = [stem[:n] for n in (1, 7, 33, 60)]
    alone = [engine.add(prompt, greedy(12)) for prompt in prompts[:1]]
    outputs = run_all(engine)
    ids = []
    for prompt in prompts * 2:
        ids.append(engine.add(prompt, greedy(12)))
        for output in engine.step():
            outputs[output.request_id] = output
    outputs |= run_all(engine)
    for request_id, prompt in zip(alone + ids, prompts[:1] + prompts * 2, strict=True):
        assert list(outputs[request_id].outputs[0].token_ids) == greedy_judge(prompt, 12)


# ------------------------------------------------------------- on/off, cold/warm


def test_B109_caching_on_equals_off_under_poison_and_preemption(tiny, make_engine, run_all):
    """50 prompts x 64 greedy tokens: random block ids, NaN in free blocks, too few blocks to go round."""
    prompts = prompts_with_shared_prefixes(50, 256, longest=48)
    texts, engines = {}, {}
    for caching in (False, True):
        engine = make_engine(tiny, prefix_caching=caching, shuffle=11, poison=True)
        ids = [engine.add(prompt, greedy(64)) for prompt in prompts]
        outputs = run_all(engine)
        texts[caching] = [list(outputs[i].outputs[0].token_ids) for i in ids]
        engines[caching] = engine
    assert texts[True] == texts[False]
    assert all(len(text) == 64 for text in texts[True])
    assert engines[True].manager.stats.hit_tokens > 0
    assert engines[False].manager.stats.hit_tokens == 0
    assert min(engine.scheduler.num_preemptions for engine in engines.values()) > 0


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_B015_a_repeated_prompt_computes_a_token_and_the_same_logits(tiny, make_engine, run_all, length):
    engine = make_engine(tiny, block_size=16)
    prompt = np.random.default_rng(length).integers(0, 256, size=length).tolist()
    sampling = greedy(4, logprobs=True)
    results = []
    for _ in range(2):
        request_id = engine.add(prompt, sampling)
        results.append(run_all(engine)[request_id])
    cold, warm = results
    assert warm.num_cached_tokens == (length - 1) // 16 * 16
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    np.testing.assert_allclose(warm.outputs[0].logprobs, cold.outputs[0].logprobs, atol=1e-5)


def test_B041_same_step_twins_on_a_poisoned_pool(tiny, make_engine, run_all, greedy_judge):
    engine = make_engine(tiny, poison=True)
    prompt = np.random.default_rng(0).integers(0, 256, size=32).tolist()
    ids = [engine.add(prompt, greedy(6)) for _ in range(2)]
    outputs = run_all(engine)
    for request_id in ids:
        assert list(outputs[request_id].outputs[0].token_ids) == greedy_judge(prompt, 6)


def test_B069_prefill_resumes_behind_a_hit_in_scattered_blocks(tiny, make_engine, run_all, greedy_judge):
    engine = make_engine(tiny, shuffle=8)
    prompt = np.random.default_rng(1).integers(0, 256, size=10).tolist()
    engine.add(prompt[:9], greedy(1))
    run_all(engine)
    plans = []
    engine.on_step = lambda record: plans.append(record.plan)
    warm = engine.add(prompt, greedy(8))
    outputs = run_all(engine)
    row, table = plans[0].rows[0], plans[0].tables[0][0]
    assert (row.start, row.num_tokens) == (8, 2)
    assert table[:3].tolist() != sorted(table[:3].tolist())
    assert list(outputs[warm].outputs[0].token_ids) == greedy_judge(prompt, 8)


def test_B067_rows_of_a_step_are_null_behind_their_last_block(tiny, make_engine, run_all, greedy_judge):
    engine = make_engine(tiny, chunk_tokens=32)
    plans = []
    engine.on_step = lambda record: plans.append(record.plan)
    long, short = list(range(100, 154)), list(range(30, 43))
    first = engine.add(long, greedy(2))
    outputs = run_all(engine)
    second = engine.add(short, greedy(4))
    outputs |= run_all(engine)
    for plan in plans:
        for row, table in zip(plan.rows, plan.tables[0], strict=True):
            used = -(-(row.start + row.num_tokens) // 4)
            assert (table[:used] > 0).all() and (table[used:] == 0).all()
    assert list(outputs[first].outputs[0].token_ids) == greedy_judge(long, 2)
    assert list(outputs[second].outputs[0].token_ids) == greedy_judge(short, 4)


def test_B071_a_finished_neighbour_changes_nothing(tiny, make_engine, run_all, greedy_judge):
    prompts = [list(range(n, n + 9)) for n in (10, 60, 110)]
    engine = make_engine(tiny)
    ids = [engine.add(prompt, greedy(3 if n == 0 else 14)) for n, prompt in enumerate(prompts)]
    outputs = run_all(engine)
    for n in (1, 2):
        assert list(outputs[ids[n]].outputs[0].token_ids) == greedy_judge(prompts[n], 14)


def test_B091_every_layer_holds_the_prompt_after_prefill(tiny, make_engine):
    engine = make_engine(tiny)
    (pool,) = engine.runner.pools
    engine.runner.pools = (KVPool(pool.data.at[:].set(0.0), pool.layout),)
    engine.add(list(range(20, 31)), greedy(9))
    engine.step()
    layout = engine.runner.layout

    def written():
        data = np.asarray(engine.runner.pools[0].data).reshape(layout.num_layers, layout.num_blocks, 4, -1)
        return (np.abs(data).sum(-1) > 0).sum(axis=(1, 2)).tolist()

    assert written() == [11] * layout.num_layers
    for length in (12, 13):
        engine.step()
        assert written() == [length] * layout.num_layers


def test_samples_fork_copy_and_differ(tiny, make_engine, run_all):
    def samples(n, mates=0):
        engine = make_engine(tiny, poison=True)
        request_id = engine.add(list(range(5, 11)), greedy(9, n=n, temperature=20.0, seed=7))
        for mate in range(mates):
            engine.add([mate, 1, 2, 3], greedy(12))
        output = run_all(engine)[request_id]
        return output.num_copies, [c.token_ids for c in output.outputs]

    copies, four = samples(4)
    assert copies == 3
    assert len(set(four)) == 4
    assert samples(4) == (3, four)
    assert samples(8)[1][:4] == four
    assert samples(4, mates=3)[1] == four


# ----------------------------------------------------------------- shapes, memory


def test_B089_no_program_is_compiled_after_warm_up(make_engine):
    config = tiny_config(num_layers=1)  # the whole ladder compiles sooner, and is the same for any depth
    engine = make_engine((config, jax.device_put(tiny_params(config))), full_ladder=True)
    runner = engine.runner
    runner.warm_up()
    several = [bucket for bucket in runner.buckets.ladder if not bucket.num_prefill_tokens]
    programs = len(runner.buckets.ladder) + len(several)  # the runner could be asked for several steps a call
    assert runner.num_programs == programs and len(runner.buckets.ladder) <= 12
    copies = runner.copies.num_programs
    rng = np.random.default_rng(0)
    added, live = 0, []
    while added < 200 or engine.has_work:
        if added < 200 and len(live) < 12:
            for _ in range(int(rng.integers(1, 5))):
                prompt = rng.integers(0, 256, size=int(rng.integers(1, 128))).tolist()
                sampling = SamplingParams(
                    max_tokens=int(rng.integers(1, 20)), n=int(rng.choice([1, 1, 1, 3])), temperature=1.0
                )
                live.append(engine.add(prompt, sampling))
                added += 1
        if live and rng.random() < 0.05:
            engine.abort(live[int(rng.integers(len(live)))])
        done = {o.request_id for o in engine.step() if o.finished}
        live = [i for i in live if i not in done and i in engine._requests]
    assert runner.num_programs == programs
    assert runner.copies.num_programs == copies
    assert engine.manager.stats.copies > 0


@pytest.mark.parametrize("seqs", [1, 2, 3, 8, 32, 100])
@pytest.mark.parametrize("budget", [100, 256, 2048])
@pytest.mark.parametrize("sizes", [1, 2, 3])
def test_every_step_the_limits_allow_has_a_bucket(seqs, budget, sizes):
    buckets = Buckets(SchedulerConfig(seqs, budget), sizes, sizes)
    assert len(buckets.ladder) <= 12
    for decodes in range(seqs + 1):
        for prefill in {0, 2, 3, budget // 3, budget - decodes}:
            if prefill == 1 or decodes + prefill == 0 or (prefill and decodes == seqs):
                continue
            rows = decodes + bool(prefill)
            assert any(b.fits(decodes, prefill, rows, seqs) for b in buckets.ladder), (decodes, prefill)


def test_the_step_updates_the_pool_in_place(tiny, make_engine):
    """Aliased bytes equal the pool; temporaries are the same at both sizes and under 1 % of the larger."""
    runner = make_engine(tiny, block_size=16, quick=False).runner
    for bucket in (runner.buckets.ladder[0], runner.buckets.ladder[-1]):
        temporaries = []
        for num_blocks in (1024, 65536):
            layout = dataclasses.replace(runner.layout, num_blocks=num_blocks)
            memory = runner.lower(bucket, layout).compile().memory_analysis()
            assert memory.alias_size_in_bytes == layout.num_bytes
            temporaries.append(memory.temp_size_in_bytes)
        assert temporaries[0] == temporaries[1] < 0.01 * layout.num_bytes


def test_weights_are_laid_row_by_row(tiny):
    """What comes column by column, as XLA:TPU lays out narrow matrices, is copied; what lies right is not."""
    config, params = tiny

    def by_column(x):
        return jax.device_put(x, Format(Layout(tuple(reversed(range(x.ndim)))), x.sharding))

    layout = KVLayout(config.num_layers, 4, 16, config.num_kv_heads, config.head_dim)
    make = functools.partial(
        JaxRunner,
        config,
        layouts=layout,
        config=SchedulerConfig(1, 8),
        max_model_len=64,
        implementation="xla",
    )
    runner = make(jax.tree.map(by_column, params))
    rows = {tuple(range(x.ndim)) for x in jax.tree.leaves(params)}
    assert {x.format.layout.major_to_minor for x in jax.tree.leaves(runner.params)} == rows
    compiled = runner.lower(runner.buckets.ladder[0]).compile()
    weights = compiled.input_formats[0][0]
    assert {x.layout.major_to_minor for x in jax.tree.leaves(weights)} <= rows
    for ours, theirs in zip(jax.tree.leaves(make(params).params), jax.tree.leaves(params), strict=True):
        assert ours is theirs


def test_step_args_are_what_the_step_takes(tiny, make_engine):
    runner = make_engine(tiny, block_size=16).runner
    larger = dataclasses.replace(runner.layout, num_blocks=1 << 20)
    params, [pool], batch = runner.step_args(runner.buckets.ladder[0], larger)
    assert all(a is b for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(runner.params), strict=True))
    assert pool.layout == larger and pool.data.shape == larger.shape
    out, [after] = jax.eval_shape(runner.step_fn, params, (pool,), batch)
    assert after.data.shape == larger.shape and out.tokens.shape == batch.sample_index.shape


def test_a_plan_is_not_read_after_its_buffers_change(tiny, make_engine, run_all, greedy_judge):
    """Each step gets fresh arrays: overwriting the last plan's tables changes no later token."""
    engine = make_engine(tiny)
    execute = engine.runner.execute

    def scribble(plan):
        result = execute(plan)
        for table in plan.tables:
            table[:] = 7
        return result

    engine.runner.execute = scribble
    prompt = list(range(40, 60))
    try:
        request_id = engine.add(prompt, greedy(10))
        assert list(run_all(engine)[request_id].outputs[0].token_ids) == greedy_judge(prompt, 10)
    finally:
        del engine.runner.execute


def test_manager_and_runner_of_different_sizes_are_refused(tiny, make_engine):
    engine = make_engine(tiny)
    manager = PagedManager(num_blocks=65, block_size=4)
    with pytest.raises(ValueError, match="pool_blocks"):
        type(engine)(manager, engine.runner, engine.scheduler.config, max_model_len=64)


@pytest.mark.parametrize("victim", ["step_fn", "copies"])
def test_a_failed_step_that_took_the_pool_with_it_is_done_again(
    tiny, make_engine, greedy_judge, run_all, monkeypatch, victim
):
    """Ctrl-C, or memory that ran out, between the donation of the pools and their return."""
    engine = make_engine(tiny, num_blocks=40, shuffle=1)
    prompts = {
        "old": [5, 6, 7, 8, 9, 10, 11, 12, 13],
        "fork": [5, 6, 7, 8, 20],
        "new": [5, 6, 7, 8, 9, 10, 30],
    }
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.add(prompts["old"], params, request_id="first")
    run_all(engine)
    pinned = TokenChain(prompts["old"], block_size=4)
    assert engine.manager.pin(pinned) == 8 and engine.manager.snapshot()["groups"][0]["keys"]
    engine.add(prompts["old"], params, request_id="old")
    engine.add(prompts["fork"], dataclasses.replace(params, n=2), request_id="fork")
    outputs = {o.request_id: o for _ in range(2) for o in engine.step()}
    runner = engine.runner
    step_fn, copies = runner.step_fn, runner.copies

    def dies(params, pools, batch):
        step_fn(params, pools, batch)
        raise KeyboardInterrupt

    dies._cache_size = step_fn._cache_size

    class Dying:
        def run(self, pools, plan):
            copies._copy(pools[0], np.full(32, -1, np.int32), np.full(32, -1, np.int32))
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, victim, dies if victim == "step_fn" else Dying())
        with pytest.raises(KeyboardInterrupt) as failure:
            engine.step()
    assert "nothing is cached or pinned any more" in failure.value.__notes__[0]
    state = engine.manager.snapshot()["groups"][0]
    assert not state["keys"] and not state["ref"]
    engine.add(prompts["new"], params, request_id="new")
    outputs |= run_all(engine)
    assert {name: list(outputs[name].outputs[0].token_ids) for name in prompts} == {
        name: greedy_judge(prompt, 6) for name, prompt in prompts.items()
    }


def test_a_failed_step_that_left_the_pool_keeps_what_is_cached(tiny, make_engine, run_all, monkeypatch):
    engine = make_engine(tiny, num_blocks=40)
    engine.add([5, 6, 7, 8, 9], SamplingParams(max_tokens=6, ignore_eos=True))
    run_all(engine)
    before = engine.manager.snapshot()["groups"][0]["keys"]

    def dies(*_):
        raise KeyboardInterrupt

    dies._cache_size = engine.runner.step_fn._cache_size
    engine.add([5, 6, 7, 8, 30], SamplingParams(max_tokens=2))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "step_fn", dies)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.manager.snapshot()["groups"][0]["keys"] == before != {}
    run_all(engine)


def test_F028_a_step_whose_rows_share_a_long_prefix_reads_it_once(tiny, make_engine, run_all, monkeypatch):
    """By itself where the rule says that it pays; the record says so; the tokens are those without."""
    engine = make_engine(tiny, num_blocks=130, block_size=16, max_model_len=704)
    runner, rng = engine.runner, np.random.default_rng(4)
    stem = rng.integers(0, 256, 640).tolist()
    prompts = [[*stem, *rng.integers(0, 256, 3 + i).tolist()] for i in range(8)]

    def tokens():
        engine = make_engine(tiny, num_blocks=130, block_size=16, max_model_len=704)
        seen = []
        engine.on_step = lambda record: seen.append((record.result.shared, record.plan))
        engine.add(stem, greedy(1))
        run_all(engine)
        ids = [engine.add(prompt, greedy(6)) for prompt in prompts]
        outputs = run_all(engine)
        return [outputs[i].outputs[0].token_ids for i in ids], seen

    grouped, seen = tokens()
    decodes = [(shared, plan) for shared, plan in seen if all(row.num_tokens == 1 for row in plan.rows)]
    used = [(shared, plan) for shared, plan in decodes if len(plan.rows) == 8]
    assert len(used) >= 4
    for shared, plan in used:
        assert shared == ((tuple(range(8)), 640, 0),)
        assert (plan.tables[0][:, :40] == plan.tables[0][0, :40]).all()
    assert all(not shared for shared, plan in seen if len(plan.rows) < 4)
    monkeypatch.setattr(runner, "_shared", lambda plan: ())
    plain, seen = tokens()
    assert grouped == plain and not any(shared for shared, _ in seen)
    with pytest.raises(ValueError, match="prefix_groups=maybe: must be one of auto, on, off"):
        RuntimeConfig(prefix_groups="maybe")


def test_the_doors_of_runner_and_decoder_name_what_is_wrong(tiny, make_engine):
    """Shapes and dtypes in the letters of the architecture page, judged while tracing."""
    runner = make_engine(tiny).runner
    bucket = runner.buckets.ladder[0]
    params, pools, batch = runner.step_args(bucket)
    T, Q = bucket.num_tokens, bucket.num_samples
    sampling = batch.sampling
    for change, message in (
        (dict(positions=batch.positions[:-1]), rf"positions=int32\[{T - 1}\]: must be int32 \[T={T}\]"),
        (dict(tokens=batch.tokens.astype(np.int64)), rf"tokens=int(32|64)\[{T}\]|tokens"),
        (
            dict(sample_index=batch.sample_index.astype(np.float32)),
            r"sample_index=float32.*must be int32 \[Q=",
        ),
        (dict(sampling=dataclasses.replace(sampling, seed=sampling.seed[:-1])), rf"sampling.seed.*\[Q={Q}\]"),
    ):
        wrong = dataclasses.replace(batch, **change)
        if "tokens" in change:
            with jax.enable_x64(True), pytest.raises(ValueError, match=message):
                jax.eval_shape(runner.step_fn, params, pools, wrong)
            continue
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(runner.step_fn, params, pools, wrong)


def test_one_bucket_is_traced_once_whatever_it_holds(tiny, make_engine, run_all):
    """A budget of traces: chex counts them."""
    engine = make_engine(tiny)
    runner, step = engine.runner, engine.runner.step_fn
    bucket = runner.buckets.ladder[0]
    runner.step_fn = jax.jit(
        chex.assert_max_traces(step.__wrapped__, n=len(runner.buckets.ladder)), donate_argnums=1
    )
    try:
        rng = np.random.default_rng(0)
        for round_ in range(3):
            for i in range(5 + round_):
                more = dict(temperature=1.0, seed=i, top_k=i) if i % 2 else {}
                engine.add(rng.integers(0, 256, 3 + 5 * i).tolist(), greedy(4, n=1 + i % 2, **more))
            run_all(engine)
        assert runner.step_fn._cache_size() <= len(runner.buckets.ladder)
        assert (bucket, False, False) in runner._compiled
    finally:
        runner.step_fn = step
