"""Advice equals an independent count, digit for digit, on generated traces and on the shared ones."""

from pathlib import Path

import advice_judge as judge
import numpy as np
import pytest

from pagedjax.sim.advice import advise
from pagedjax.sim.sharing import check_up
from pagedjax.sim.synth import GENERATORS, chat
from pagedjax.sim.trace import Trace, TraceRequest, open_trace


def _equal(trace: Trace, sizes: tuple[int, ...], capacity: int = 0) -> None:
    requests = list(trace)
    ours = advise(trace, block_sizes=sizes, capacity=capacity, policies=["fifo"])
    prompts = judge.prompts_of(requests, trace.granularity)
    common = judge.in_common(prompts, trace.granularity, trace.tail_ids)
    assert (ours.requests, ours.tokens) == (len(prompts), sum(map(len, prompts)))
    for size in ours.sizes:
        parts = judge.where_tokens_go(prompts, common, size.block_size)
        assert {name: getattr(size, name) for name in parts} == parts, size.block_size
        assert size.looked_up == sum(parts.values())
    chosen = ours.block_size
    if trace.granularity == 1 or trace.tail_ids:
        blocks = [judge.blocks_of(prompt, chosen, tail=True) for prompt in prompts]
    else:  # what has no id has no block
        known = [len(r.granule_ids) * trace.granularity for r in requests]
        blocks = [judge.blocks_of(p[:n], chosen, tail=True) for p, n in zip(prompts, known)]
    assert ours.blocks == sum(map(len, blocks)) and ours.distinct == len(
        {n for names in blocks for n in names}
    )
    assert ours.unlimited_tokens == judge.lru(blocks, float("inf"))[1]
    for pool in ours.pools:
        assert (pool.blocks, pool.hit_tokens) == judge.smallest_pool(blocks, pool.share)
    assert ours.capacity == (capacity or max(ours.pools[0].blocks // 2, 1))
    (lru,) = (policy for policy in ours.policies if policy.name == "lru")
    assert lru.hit_blocks == judge.lru(blocks, ours.capacity)[0]
    assert ours.bound_blocks == judge.belady(blocks, ours.capacity)
    assert [p.hit_blocks for p in ours.policies] == sorted(
        (p.hit_blocks for p in ours.policies), reverse=True
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_advice_is_the_judges_on_generated_traces(name: str) -> None:
    small = {
        "system-prompt": dict(num_requests=20, system_tokens=90, user_tokens=20),
        "few-shot": dict(num_requests=20),
        "document-questions": dict(num_requests=20, num_documents=4, document_tokens=150),
        "target-sharing": dict(num_requests=20, prompt_tokens=90),
        "chat": dict(num_sessions=5, system_tokens=30, user_tokens=10, output_tokens=20),
        "agents": dict(
            num_sessions=2, turns=5, tool_tokens=60, system_tokens=20, task_tokens=20, result_tokens=20
        ),
    }
    _equal(GENERATORS[name](**small[name], seed=3), (16, 4, 64))


@pytest.mark.parametrize("tail_ids", [True, False])
def test_advice_is_the_judges_on_block_ids(tail_ids: bool) -> None:
    rng = np.random.default_rng(6)
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for i in range(60):
        length, short = int(rng.integers(1, 5)), int(rng.integers(0, 8))
        path = tuple(rng.integers(0, 2, length).tolist())
        full = [ids.setdefault(path[: k + 1], len(ids)) for k in range(length - 1)]
        if short == 0 or tail_ids:
            full.append(ids.setdefault((*path, -short) if short else path, len(ids)))
        rows.append(TraceRequest(float(i), 8 * length - short, 1, granule_ids=np.array(full, np.int64)))
    trace = Trace("ids", "test", 8, tail_ids, lambda: iter(rows))
    _equal(trace, (8, 2))


def test_moved_fields_gain_what_a_prefix_tree_says() -> None:
    rng = np.random.default_rng(4)
    common, middle = rng.integers(0, 200, 300).tolist(), rng.integers(0, 200, 40).tolist()
    prompts = [
        [1, *(1000 + rng.integers(0, 50, 3)).tolist(), *middle, 2000 + i, *common, 3000 + i]
        for i in range(30)
    ]
    (found,) = check_up(prompts).divergences
    assert [f.num_values for f in found.fields] == [len({tuple(p[1:4]) for p in prompts}), 30]
    moved = [judge.moved_to_the_end(p, [(1, 4), (44, 45)]) for p in prompts]
    assert found.saved_now == judge.tree_saving([tuple(p) for p in prompts])
    assert found.saved_if_moved == judge.tree_saving(moved)


def test_answers_are_found_by_the_next_turn_where_they_are_kept() -> None:
    trace = chat(8, seed=2)
    alone, kept = (
        advise(trace, block_sizes=(16,), policies=(), insert=i) for i in ("prompt", "prompt+output")
    )
    assert kept.sizes[0].found > alone.sizes[0].found
    with pytest.raises(ValueError, match="holds no request"):
        advise(Trace("none", "test", 1, True, lambda: iter(())))


SHARED = {
    "sharegpt": ("traces/sharegpt_llama31_tokens_300.jsonl.gz", 300, (16, 64)),
    "mooncake": ("traces/mooncake_conversation_trace.jsonl.gz", 150, (512, 128)),
    "agentic": ("traces/agentic_coding_64tok_sub68.jsonl.xz", 12, (64,)),
    "chat-log": ("text/glaive_toolcall_en_demo.json.gz", 60, (16, 128)),
}


def _shared(data_dir: Path, name: str) -> Trace:
    return open_trace(data_dir / "data" / SHARED[name][0], encode=lambda text: list(text.encode()))


@pytest.mark.parametrize("name", SHARED)
def test_advice_is_the_judges_on_the_shared_traces(data_dir: Path, name: str) -> None:
    _, head, sizes = SHARED[name]
    _equal(_shared(data_dir, name).head(head), sizes, capacity=200)


@pytest.mark.full
@pytest.mark.parametrize("name", SHARED)
def test_advice_is_the_judges_on_whole_shared_traces(data_dir: Path, name: str) -> None:
    """Whole but for two, of which the judge, which spells every token, reads the first: 4.2 GB of agentic sessions."""
    trace, first = _shared(data_dir, name), {"mooncake": 1000, "agentic": 250}
    _equal(trace.head(first[name]) if name in first else trace, SHARED[name][2])


@pytest.mark.parametrize("name", ["sharegpt", "chat-log"])
def test_groups_of_shared_prompts_are_a_prefix_trees(data_dir: Path, name: str) -> None:
    _, head, sizes = SHARED[name]
    prompts = [tuple(r.token_ids.tolist()) for r in _shared(data_dir, name).head(head)]
    found = check_up(prompts, block_sizes=sizes, top=10**9)
    assert sum(group.saved_tokens for group in found.groups) == judge.tree_saving(prompts) > 0
    for group in found.groups[:20]:
        together: dict[tuple[int, ...], int] = {}
        for prompt in prompts:
            together[prompt[: group.depth]] = together.get(prompt[: group.depth], 0) + 1
        assert group.count in together.values()
    for saving in found.savings:
        blocks = [judge.blocks_of(prompt, saving.block_size, tail=True) for prompt in prompts]
        full = [name for names in blocks for name in names if name[2] == saving.block_size]
        assert saving.total_blocks == sum(map(len, blocks))
        assert saving.shared_blocks == len(full) - len(set(full))
