"""Windowed layers in KV groups of their own: the same tokens as one full pool, and blocks really freed."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.cache import KVGroup, PagedManager, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine.request import SamplingParams
from pagedjax.engine.scheduler import Scheduler
from pagedjax.testing import tiny_config, tiny_params

WINDOWS = {"mistral": (8, 8), "gemma": (8, None)}
BLOCK = 4


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="session", params=sorted(WINDOWS))
def windowed(request):
    """(config, params) of a tiny model: every layer windowed, or one of two; windows of 8 keys."""
    import jax

    config = tiny_config(windows=WINDOWS[request.param])
    return config, jax.device_put(tiny_params(config))


@pytest.fixture
def make_grouped(windowed, make_engine):
    def make(behind=50, **options):
        blocks = [behind if group.window else 130 for group in windowed[0].layer_groups]
        return make_engine(windowed, group_blocks=blocks, block_size=BLOCK, chunk_tokens=16, **options)

    return make


def _most_held(engine, group):
    """Most blocks of the group that one sequence held in any step, as the device saw it."""
    most = [0]

    def watch(record):
        tables = record.plan.tables[group]
        most[0] = max(most[0], int((tables > 0).sum(axis=1).max(initial=0)))

    engine.on_step = watch
    return most


def test_groups_give_the_tokens_of_one_pool_and_free_what_is_behind(
    windowed, make_engine, make_grouped, run_all
):
    rng = np.random.default_rng(2)
    stem = rng.integers(0, 256, 70).tolist()
    prompts = [stem, stem[:40], [*stem[:40], 9, 9, 9], stem[:3], stem]
    texts = {}
    for name in ("one pool", "groups"):
        engine = (
            make_engine(windowed, block_size=BLOCK, chunk_tokens=16)
            if name == "one pool"
            else make_grouped(shuffle=4, poison=True)
        )
        windowed_group = len(windowed[0].layer_groups) - 1
        most = _most_held(engine, windowed_group if name == "groups" else 0)
        ids = [engine.add(prompts[0], greedy(30))]
        outputs = run_all(engine)
        ids += [engine.add(prompt, greedy(30)) for prompt in prompts[1:]]
        outputs |= run_all(engine)
        texts[name] = [outputs[i].outputs[0].token_ids for i in ids]
        if name == "one pool":
            assert most[0] == 25  # all of 70 + 29 tokens
        else:
            # 7 keys before a step of 16, and the step's own: 23 tokens, begun on a block's border.
            assert most[0] == 6
            assert all(outputs[i].num_cached_tokens > 0 for i in (*ids[1:3], ids[4]))
    assert texts["groups"] == texts["one pool"]


def test_blocks_behind_the_window_serve_other_sequences(windowed, make_engine, make_grouped, run_all):
    """Five sequences of 100 tokens at once over windowed pools that could hold one of them whole."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, 70).tolist() for _ in range(5)]
    texts = []
    for grouped in (True, False):
        engine = make_grouped(poison=True) if grouped else make_engine(windowed, chunk_tokens=16)
        ids = [engine.add(prompt, greedy(30)) for prompt in prompts]
        outputs = run_all(engine)
        texts.append([outputs[i].outputs[0].token_ids for i in ids])
        assert engine.scheduler.num_preemptions == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("gone", "hit"), [((1,), 20), ((3,), 12)])
def test_B093_on_the_device(tiny, make_engine, run_all, gone, hit):
    """21 tokens, block 4, window 8: what is resident serves whoever needs only the trailing window."""
    import jax

    config = tiny_config(windows=(8, 8))
    model = (config, jax.device_put(tiny_params(config)))
    engine = make_engine(model, group_blocks=[50], block_size=4, chunk_tokens=16, poison=True)
    prompt = np.random.default_rng(4).integers(0, 256, 21).tolist()
    cold = engine.add(prompt, greedy(12))
    outputs = run_all(engine)
    manager = engine.manager
    group = manager._groups[0]
    blocks = group.index.resident(TokenChain(prompt, block_size=4), 5)
    assert all(blocks)
    victims = [blocks[i] for i in gone]
    group.pool._recycle(victims, evicted=True)  # as an eviction of just these would
    group.pool.blank += victims
    manager.check_invariants()
    warm = engine.add(prompt, greedy(12))
    outputs |= run_all(engine)
    assert outputs[warm].num_cached_tokens == hit
    assert outputs[warm].outputs[0].token_ids == outputs[cold].outputs[0].token_ids


def test_B096_a_long_prompt_hit_often_keeps_its_first_third(tiny, make_engine, run_all):
    """Hits touch what lies behind the window too: after 5 hits under eviction the first third still hits."""
    import jax

    config = tiny_config(windows=(8, 8))
    model = (config, jax.device_put(tiny_params(config)))
    engine = make_engine(model, group_blocks=[50], block_size=4, chunk_tokens=16, poison=True)
    rng = np.random.default_rng(5)
    long = rng.integers(0, 256, 61).tolist()
    engine.add(long, greedy(1))
    outputs = run_all(engine)
    for _ in range(5):
        engine.add(long, greedy(1))
        outputs |= run_all(engine)
        for _ in range(3):
            engine.add(rng.integers(0, 256, 20).tolist(), greedy(1))
            outputs |= run_all(engine)
    assert engine.manager.stats.evictions > 0
    third = engine.add(long[:21], greedy(6))
    outputs |= run_all(engine)
    cold = make_engine(model, group_blocks=[50], block_size=4, chunk_tokens=16, prefix_caching=False)
    expected = cold.add(long[:21], greedy(6))
    assert outputs[third].num_cached_tokens == 20
    assert outputs[third].outputs[0].token_ids == run_all(cold)[expected].outputs[0].token_ids


def test_a_long_prompt_needs_no_more_windowed_blocks_than_one_step_holds():
    sizes = {"num_blocks": 130, "block_size": 4}
    fits = PagedManager(groups=[KVGroup(30), KVGroup(9, window=8)], **sizes)
    assert fits.demand(100, 16) == (7, 8)
    assert fits.demand(120, 16) == (30, 29)
    limits = SchedulerConfig(4, 64, chunk_tokens=16)
    Scheduler(fits, limits, 128).check(100, SamplingParams())
    with pytest.raises(ValueError, match="needs 30 blocks, the pool has 29 usable"):
        Scheduler(fits, limits, 128).check(120, SamplingParams())
    tight = PagedManager(groups=[KVGroup(30), KVGroup(6, window=8)], **sizes)
    with pytest.raises(ValueError, match="needs 7 blocks, the pool has 5 usable"):
        Scheduler(tight, limits, 128).check(100, SamplingParams())


def test_llm_builds_the_groups_from_the_model(tiny_folder, tmp_path):
    """The first layer windowed: two pools, the windowed one smaller; off, one pool."""
    import json
    import shutil

    folder = tmp_path / "windowed"
    shutil.copytree(tiny_folder, folder)
    facts = json.loads((folder / "pagedjax_model.json").read_text())
    facts["config"]["windows"] = [8, None]
    (folder / "pagedjax_model.json").write_text(json.dumps(facts))
    prompt = np.random.default_rng(6).integers(0, 256, 50).tolist()
    for grouped in (True, False):
        llm = LLM(
            str(folder),
            progress=False,
            model__max_model_len=128,
            cache__block_size=8,
            cache__num_blocks=33,
            cache__window_groups=grouped,
            scheduler__max_num_seqs=1,
            scheduler__token_budget=16,
            runtime__compilation_cache_dir=str(tmp_path / "compiled"),
        )
        if grouped:
            assert len(llm.generate([prompt], greedy(8))[0].outputs[0].token_ids) == 8
        # 23 keys over at most 4 blocks of 8, against 16 of the full group: a quarter of its 32 usable.
        assert llm.manager.pool_blocks == ((33, 9) if grouped else (33,))
        assert llm.runner.pool_blocks == llm.manager.pool_blocks
