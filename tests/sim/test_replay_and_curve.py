"""Hit counts and curves against brute force, and against figures measured on the shared traces."""

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.cache import POLICIES
from pagedjax.cache.policies import Belady
from pagedjax.sim.curve import (
    NEVER,
    _earlier_and_greater,
    belady_bound,
    count_hits,
    load_references,
    lru_curve,
    stack_distances,
)
from pagedjax.sim.references import PEAK_BYTES, Ranks, References, next_uses, replay_references
from pagedjax.sim.replay import BlockKeys, LRUStore, PolicyStore, Unbounded, chain_keys, future_of, replay
from pagedjax.sim.synth import chat, document_questions
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

CAPACITIES = (1, 3, 17, 100, 1000)


def _tree_trace(seed: int, requests: int, fan: int, depth: int, granularity: int = 4) -> Trace:
    """Random walks down a random tree: true chains, many shared prefixes."""
    rng = np.random.default_rng(seed)
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for i in range(requests):
        length = int(rng.integers(1, depth + 1))
        short = int(rng.integers(0, granularity))
        path: tuple[int, ...] = ()
        own = []
        for step in range(length):
            path += (int(rng.integers(fan)),)
            # A cut granule is another content than the whole one, hence another id.
            content = (*path, -short) if short and step == length - 1 else path
            own.append(ids.setdefault(content, len(ids)))
        num_input = granularity * length - short
        rows.append(TraceRequest(float(i), num_input, 1, granule_ids=np.array(own)))
    return Trace("tree", "generated", granularity, True, lambda: iter(rows), spec=f"tree{seed}")


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 4), st.integers(1, 8))
def test_curve_equals_replay_at_every_capacity(seed: int, requests: int, fan: int, depth: int) -> None:
    trace = _tree_trace(seed, requests, fan, depth)
    refs = load_references(trace, 4)
    curve = lru_curve(refs)
    for capacity in range(1, refs.num_distinct + 2):
        slow = replay(trace, 4, LRUStore(capacity))
        assert curve.hits(capacity) == slow.hit_blocks
        assert curve.by_token(capacity) == slow.by_token
        assert curve.by_full_block(capacity) == slow.by_full_block
        assert belady_bound(refs, capacity) >= slow.hit_blocks
    assert (
        curve.hits(math.inf) == replay(trace, 4, Unbounded()).hit_blocks == belady_bound(refs, len(refs.keys))
    )


@given(st.lists(st.integers(0, 50), unique=True, max_size=40))
def test_inversions(values: list[int]) -> None:
    ranks = np.argsort(np.argsort(values)) if values else np.empty(0, np.int64)
    expected = [sum(v > values[i] for v in values[:i]) for i in range(len(values))]
    assert _earlier_and_greater(ranks).tolist() == expected


def test_ids_that_are_no_chain_count_contiguous_hits() -> None:
    rows = [[5, 6, 7], [6, 8], [5, 6], [7, 5], [8, 6]]
    requests = [TraceRequest(float(i), 4 * len(r), 1, granule_ids=np.array(r)) for i, r in enumerate(rows)]
    trace = Trace("loose", "generated", 4, True, lambda: iter(requests))
    curve = lru_curve(load_references(trace, 4))
    for capacity in range(1, 6):
        assert curve.hits(capacity) == replay(trace, 4, LRUStore(capacity)).hit_blocks
    rows.append([5, 5])
    requests.append(TraceRequest(9.0, 8, 1, granule_ids=np.array([5, 5])))
    with pytest.raises(ValueError, match="request 5: holds a block id twice"):
        load_references(trace, 4)


@pytest.mark.parametrize("gap", [1, 10**9], ids=["near", "far"])
def test_ids_become_ranks_without_gaps(gap: int) -> None:
    """By a table where ids lie near each other, else by a sort: stores and curves have a place for every rank."""
    rows = [[10, 14, 16], [10, 16], [12]]
    requests = [
        TraceRequest(float(i), 4 * len(r), 1, granule_ids=gap * np.array(r)) for i, r in enumerate(rows)
    ]
    refs = load_references(Trace("gaps", "generated", 4, True, lambda: iter(requests)), 4)
    assert refs.keys.tolist() == [0, 2, 3, 0, 3, 1]


def test_belady_is_no_less_than_an_exhaustive_optimum() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        rows = [[int(x)] for x in rng.integers(0, 5, 9)]
        requests = [TraceRequest(float(i), 4, 1, granule_ids=np.array(r)) for i, r in enumerate(rows)]
        refs = load_references(Trace("t", "generated", 4, True, lambda r=requests: iter(r)), 4)
        states = {frozenset(): 0}
        for (key,) in rows:  # single-block requests: the optimum by trying every choice
            grown: dict[frozenset[int], int] = {}
            for held, hits in states.items():
                gained = hits + (key in held)
                choices = [held] if key in held or len(held) < 2 else [held - {v} for v in held]
                for kept in [*(c | {key} for c in choices), held]:
                    grown[kept] = max(grown.get(kept, 0), gained)
            states = grown
        assert belady_bound(refs, 2) == max(states.values())


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_policy_store_under_lru_is_lru(seed: int, capacity: int) -> None:
    trace = _tree_trace(seed, 40, 3, 6)
    assert replay(trace, 4, PolicyStore(capacity, "lru")) == replay(trace, 4, LRUStore(capacity))


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_the_bound(name: str) -> None:
    for seed in range(5):
        trace = _tree_trace(seed, 200, 4, 5)
        refs = load_references(trace, 4)
        future = future_of(trace, 4)
        policy = (lambda n, f=future: Belady(n, f)) if name == "belady" else name
        for capacity in (3, 10, 40):
            store = PolicyStore(capacity, policy)
            hits = replay(trace, 4, store).hit_blocks
            assert hits <= belady_bound(refs, capacity)
            assert len(store.present) <= capacity
            assert (
                name != "belady" or capacity < 10 or hits >= replay(trace, 4, LRUStore(capacity)).hit_blocks
            )


def test_empty_trace_has_an_empty_curve() -> None:
    curve = lru_curve(load_references(Trace("none", "generated", 4, True, lambda: iter(())), 4))
    assert curve.by_block(math.inf) == curve.by_token(3) == 0.0


def test_distances_of_a_drawn_example() -> None:
    # Touched 2 1 0, then 3 0: before the third request the stack is 0 3 1 2.
    rows = [[0, 1, 2], [0, 3], [0, 1, 2], [4]]
    requests = [TraceRequest(float(i), 4 * len(r), 1, granule_ids=np.array(r)) for i, r in enumerate(rows)]
    refs = load_references(Trace("t", "generated", 4, True, lambda: iter(requests)), 4)
    assert stack_distances(refs).tolist() == [NEVER, NEVER, NEVER, 1, NEVER, 1, 3, 4, NEVER]


def test_block_size_must_divide() -> None:
    trace = _tree_trace(0, 3, 2, 2, granularity=8)
    with pytest.raises(ValueError, match="block_size=3: must divide"):
        BlockKeys(trace, 3)
    with pytest.raises(ValueError, match="needs token ids"):
        BlockKeys(trace, 8, "prompt+output")


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_granules_divide_as_their_tokens_would(block_size: int) -> None:
    """A granule trace and a token trace of the same prompts hit alike at every finer block size."""
    trace = _tree_trace(3, 60, 2, 5, granularity=8)
    rows = []
    for r in trace:
        tokens = [g * 8 + i for g in r.granule_ids.tolist() for i in range(8)][: r.num_input]
        rows.append(TraceRequest(r.arrival_s, r.num_input, 1, token_ids=np.array(tokens, np.int32)))
    tokens_trace = Trace("tokens", "generated", 1, True, lambda: iter(rows))
    for store in (Unbounded, lambda: LRUStore(20)):
        ours, theirs = (replay(t, block_size, store()) for t in (trace, tokens_trace))
        assert ours.full_blocks == theirs.full_blocks and ours.hit_full_blocks == theirs.hit_full_blocks
        assert ours.engine_tokens == theirs.engine_tokens


def test_F081_hits_of_lengths_alone_are_unknown() -> None:
    rows = [TraceRequest(0.0, 100, 5) for _ in range(4)]
    trace = Trace("l", "lengths", 0, False, lambda: iter(rows))
    counts = replay(trace, 16, Unbounded())
    assert counts.blocks == 28
    for share in (
        counts.by_block,
        counts.by_full_block,
        counts.by_token,
        counts.mean_per_request,
        counts.by_engine,
    ):
        assert math.isnan(share)
    with pytest.raises(ValueError, match="no identity of prefixes, so its hits are unknown"):
        load_references(trace, 16)


def test_last_token_is_computed_under_the_engines_rules() -> None:
    tokens = np.arange(32, dtype=np.int32)
    rows = [TraceRequest(0.0, 32, 1, token_ids=tokens)] * 2
    counts = replay(Trace("t", "tokens", 1, True, lambda: iter(rows)), 16, Unbounded())
    assert (counts.hit_tokens, counts.engine_tokens) == (32, 16)
    assert (
        chain_keys(tokens, 16)[0].tolist()
        == chain_keys(tokens[:31], 1)[0][[]].tolist()
        + chain_keys(np.arange(40, dtype=np.int32), 16)[0].tolist()
    )


def test_answers_are_found_by_the_next_turn() -> None:
    trace = chat(30, seed=2)
    prompt_only = replay(trace, 16, Unbounded())
    with_answers = replay(trace, 16, Unbounded(), insert="prompt+output")
    assert with_answers.hit_tokens > prompt_only.hit_tokens > 0


# ----------------------------------------------------- figures of the shared traces


def test_B111_conversation_hit_rate_by_four_definitions(data_dir: Path) -> None:
    trace = open_trace(data_dir / "data/traces/mooncake_conversation_trace.jsonl.gz")
    counts = replay(trace, 512, Unbounded())
    assert counts.requests == 12031 and counts.blocks == 288_500
    assert round(counts.by_block, 4) == 0.3664
    assert round(counts.by_full_block, 4) == 0.3819
    assert round(counts.by_token, 4) == 0.3736
    assert round(counts.mean_per_request, 4) == 0.4094
    assert round(replay(trace, 512, LRUStore(10_000)).by_block, 4) == 0.2116
    assert 0.37 < counts.by_engine < counts.by_token


def test_synthetic_hit_rates(data_dir: Path) -> None:
    counts = replay(open_trace(data_dir / "data/traces/mooncake_synthetic_trace.jsonl.gz"), 512, Unbounded())
    assert counts.requests == 3993 and counts.blocks == 121_877
    assert (round(counts.by_block, 4), round(counts.by_token, 4)) == (0.6396, 0.6512)


SHAREGPT = {
    "llama31": {8: 0.0765, 16: 0.0759, 32: 0.0751, 64: 0.0734, 128: 0.0687, 256: 0.0637},
    "qwen3": {8: 0.0798, 256: 0.0663},
}


@pytest.mark.parametrize("tokenizer", SHAREGPT)
def test_sharegpt_hit_rates_by_block_size(data_dir: Path, tokenizer: str) -> None:
    trace = open_trace(data_dir / f"data/traces/sharegpt_{tokenizer}_tokens_300.jsonl.gz")
    for block_size, expected in SHAREGPT[tokenizer].items():
        counts = replay(trace, block_size, Unbounded(), insert="prompt+output")
        assert round(counts.by_token, 4) == expected, block_size
    assert counts.requests == 300


def test_agentic_subset_hit_rate_within_sessions(data_dir: Path) -> None:
    path = data_dir / "data/traces/agentic_coding_64tok_sub68.jsonl.xz"
    own = replay(open_trace(path), 64, Unbounded())
    assert own.requests == 4842 and round(own.blocks / 1e6, 1) == 8.8
    assert round(own.by_block, 4) == 0.9612
    few, shared = (
        replay(open_trace(path, common_prefix=c).head(300), 64, Unbounded()) for c in (False, True)
    )
    assert shared.hit_blocks > few.hit_blocks


@pytest.mark.full
def test_agentic_whole_hit_rate_within_sessions(data_dir: Path) -> None:
    trace = open_trace(data_dir / "data/traces/agentic_coding_64tok_all.jsonl.xz")
    counts = replay(trace, 64, Unbounded())
    assert counts.requests == 49_334 and round(counts.blocks / 1e6, 1) == 94.3
    assert round(counts.by_block, 4) == 0.9634


LENGTHS = {
    "azure_llm_2023_code.csv.gz": (8819, 2047.8, 27.9),
    "azure_llm_2023_conv.csv.gz": (19366, 1154.7, 211.1),
    "sharegpt_8k_llama2.csv.gz": (30731, 2340.0, 438.7),
    "arxiv_summarization_llama2.csv.gz": (28257, 2588.1, 291.4),
    "alpaca_response_len_train10k.json.gz": (10000, 19.0, 65.5),
    "alpaca_response_len_val10k.json.gz": (10000, 19.0, 65.7),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_length_files_of_the_shared_data(data_dir: Path, name: str) -> None:
    rows = list(open_trace(data_dir / "data/lengths" / name))
    count, mean_input, mean_output = LENGTHS[name]
    assert len(rows) == count
    assert round(sum(r.num_input for r in rows) / count, 1) == mean_input
    assert round(sum(r.num_output for r in rows) / count, 1) == mean_output


def test_conversation_curve_is_exact(data_dir: Path) -> None:
    trace = open_trace(data_dir / "data/traces/mooncake_conversation_trace.jsonl.gz")
    refs = load_references(trace, 512)
    curve = lru_curve(refs)
    assert len(refs.keys) == 288_500
    for capacity in (30, 10_000, 150_000):
        counts = replay(trace, 512, LRUStore(capacity))
        assert counts.hit_blocks == curve.hits(capacity)
        assert counts.by_token == curve.by_token(capacity)
        assert counts.hit_blocks <= belady_bound(refs, capacity)


def test_curves_cover_block_sizes() -> None:
    from pagedjax.sim.curve import curves

    trace = document_questions(100, num_documents=8, document_tokens=600)
    by_size = curves(trace, (16, 64))
    assert by_size[16].by_token(math.inf) > by_size[64].by_token(math.inf) > 0.5
    for size, curve in by_size.items():
        assert [curve.hits(c) for c in CAPACITIES] == [
            replay(trace, size, LRUStore(c)).hit_blocks for c in CAPACITIES
        ]


@pytest.mark.parametrize("size", [1, 64, 65, 64 << 12, (64 << 12) + 1, 700_000])
def test_ranks_are_counts_of_what_lies_below(size: int) -> None:
    rng = np.random.default_rng(size)
    ranks, inside = Ranks(size), np.zeros(size, bool)
    for part in np.array_split(rng.permutation(size)[: max(1, size // 3)], 3):
        ranks.add(part)
        inside[part] = True
        asked = np.append(rng.integers(0, size, 300), [0, size - 1])
        np.testing.assert_array_equal(ranks.below(asked), (np.cumsum(inside) - inside)[asked])
    assert ranks.count == inside.sum()


def _many(form: str, requests: int, blocks: int, different: int) -> Trace:
    """`different` prompts of `blocks` blocks (512 tokens by id, 8 by token), drawn with repetition."""

    def source() -> Iterator[TraceRequest]:
        rng = np.random.default_rng(1)
        for i in range(requests):
            number = int(rng.integers(different))
            if form == "ids":
                ids = np.arange(number * blocks, number * blocks + blocks)
                yield TraceRequest(float(i), 512 * blocks, 1, granule_ids=ids)
            else:
                tokens = np.arange(number, number + 8 * blocks, dtype=np.int32)
                yield TraceRequest(float(i), 8 * blocks, 1, token_ids=tokens)

    return Trace(form, "generated", 512 if form == "ids" else 1, True, source)


def _small_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("pagedjax.sim.references.CHUNK", size)
    monkeypatch.setattr("pagedjax.sim.curve.CHUNK", size)
    monkeypatch.setattr(References.chunks, "__defaults__", (size,))


@pytest.mark.parametrize(
    ("form", "requests", "blocks", "different"),
    [("ids", 1_000, 60, 300), ("ids", 3_000, 9, 10**7), ("ids", 8_000, 1, 10**7), ("tokens", 1_500, 20, 700)],
)
def test_F090_at_most_24_bytes_a_reference_in_every_form_and_none_a_request(
    form: str, requests: int, blocks: int, different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_chunks(monkeypatch, 256)
    trace = _many(form, requests, blocks, different)
    count = requests * blocks
    fixed = 100_000  # chunks, whatever the trace's size
    tracemalloc.start()
    try:
        refs = load_references(trace, 512 if form == "ids" else 8)
        for work in (lru_curve, count_hits, lambda refs: count_hits(refs, 1000), next_uses):
            work(refs)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES * count + fixed
        assert tracemalloc.get_traced_memory()[0] < 8 * count + fixed
    finally:
        tracemalloc.stop()
    assert PEAK_BYTES == 24


def test_F090_a_trace_is_read_once_for_all_capacities_and_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedjax.cli import main
    from pagedjax.sim.trace import rows, write_trace

    path = tmp_path / "t.jsonl"
    write_trace(path, chat(10, seed=1), granularity=1, tail_ids=True)
    opened = []
    lines = rows.records
    monkeypatch.setattr(rows, "records", lambda path: opened.append(path) or lines(path))
    arguments = ["curve", str(path), *("--capacity", "8", "--capacity", "50", "--capacity", "90")]
    assert main([*arguments, "--policy", "lru", "--policy", "fifo", "--policy", "lfu", "--bound"]) == 0
    assert len(opened) == 2  # the first row, and one pass
    for row in capsys.readouterr().out.splitlines()[1:]:
        _, _, lru, _, again, *_ = row.split(",")
        assert lru == again


@pytest.mark.parametrize("insert", ["prompt", "prompt+output"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_counts_of_references_equal_the_replay_by_every_definition(insert: str, block_size: int) -> None:
    """Also for chains that overlap, prompts shorter than a block, and where a chunk ends."""
    trace = chat(60, seed=3, user_tokens=9, system_tokens=7, output_tokens=8)
    refs = load_references(trace, block_size, insert=insert)
    curve = lru_curve(refs)
    for capacity in (1, 40, 300, 10**6, math.inf):
        ours = count_hits(refs, capacity)
        theirs = replay(
            trace, block_size, Unbounded() if capacity == math.inf else LRUStore(capacity), insert=insert
        )
        assert ours.token_ratios == pytest.approx(theirs.token_ratios)
        assert replace(ours, token_ratios=0) == replace(theirs, token_ratios=0)
        assert (curve.by_block(capacity), curve.by_token(capacity)) == (theirs.by_block, theirs.by_token)
        if capacity < 10**6:
            again = replay_references(refs, PolicyStore(int(capacity), "lru"))
            assert replace(again, token_ratios=0) == replace(theirs, token_ratios=0)


def test_categories_of_references_are_those_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named from the middle on, more than a byte can count, requests without a block between; chunks of any size."""
    rng = np.random.default_rng(8)
    names = ["", *map(str, range(600))]
    rows = []
    for n, request in enumerate(_tree_trace(5, 900, 3, 6)):
        group = names[int(rng.integers(len(names)))] if n > 50 else ""
        rows.append(replace(request, group=group))
        if n % 7 == 0:
            rows.append(replace(request, num_input=1, granule_ids=np.empty(0, np.int64), group="none"))
    trace = Trace("t", "generated", 4, True, lambda: iter(rows))
    theirs = [replay(trace, 4, PolicyStore(c, "workload-aware")) for c in (20, 60)]
    lru = [replay(trace, 4, PolicyStore(c, "lru")) for c in (20, 60)]
    for chunk in (1 << 14, 5):
        _small_chunks(monkeypatch, chunk)
        refs = load_references(trace, 4)
        assert refs.groups is not None and refs.groups.dtype == np.uint16
        held = [r.group for r in rows if len(r.granule_ids)]
        assert [refs.group_names[number] for number in refs.groups] == held
        ours = [replay_references(refs, PolicyStore(c, "workload-aware")) for c in (20, 60)]
        assert [c.hit_blocks for c in ours] == [c.hit_blocks for c in theirs] != [c.hit_blocks for c in lru]
    unnamed = load_references(_tree_trace(5, 90, 3, 6), 4)
    assert unnamed.groups is None and unnamed.group_names == ()


def test_chunks_end_with_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _tree_trace(4, 300, 3, 7)
    whole = load_references(trace, 4)
    expected = [(c, lru_curve(whole).hits(c), belady_bound(whole, c)) for c in (1, 5, 50, 500)]
    _small_chunks(monkeypatch, 5)
    small = load_references(trace, 4)
    assert all((getattr(small, n) == getattr(whole, n)).all() for n in ("keys", "flags", "sizes"))
    assert [(c, lru_curve(small).hits(c), belady_bound(small, c)) for c in (1, 5, 50, 500)] == expected


@pytest.mark.parametrize(
    ("capacity", "first", "second"),
    [(10_000, 0.2302, 0.2511), pytest.param(3_000, 0.0977, 0.1069, marks=pytest.mark.full)],
)
def test_reuse_credit_closes_a_part_of_the_gap(
    data_dir: Path, capacity: int, first: float, second: float
) -> None:
    """The goal was .238 at 10,000 blocks, where LRU has .2116; the constants are of the first half."""
    trace = open_trace(data_dir / "data" / "traces" / "mooncake_conversation_trace.jsonl.gz")
    store = PolicyStore(capacity, "reuse-credit")
    half = 12_031 // 2
    parts = [trace.head(half), replace(trace, source=lambda: islice(iter(trace), half, None))]
    counts = [replay(part, 512, store) for part in parts]
    assert [c.by_block for c in counts] == pytest.approx([first, second], abs=5e-5)
    hits, blocks = (sum(getattr(c, name) for c in counts) for name in ("hit_blocks", "blocks"))
    assert blocks == 288_500 and (capacity < 10_000 or hits / blocks >= 0.238)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "size"),
    [
        ("mooncake_conversation_trace.jsonl.gz", 512),
        ("mooncake_synthetic_trace.jsonl.gz", 512),
        ("agentic_coding_64tok_sub68.jsonl.xz", 64),
        ("sharegpt_llama31_tokens_300.jsonl.gz", 16),
        ("sharegpt_qwen3_tokens_300.jsonl.gz", 16),
    ],
)
def test_reuse_credit_is_nowhere_a_point_below_lru(data_dir: Path, file: str, size: int) -> None:
    trace = open_trace(data_dir / "data" / "traces" / file)
    trace = (trace.head(1000) if size == 64 else trace).held()
    curve = lru_curve(load_references(trace, size))
    for capacity in (1_000, 3_000, 10_000, 30_000, 50_000):
        ours = replay(trace, size, PolicyStore(capacity, "reuse-credit")).by_block
        assert ours >= curve.by_block(capacity) - 0.01, (file, capacity)
