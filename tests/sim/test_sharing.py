"""The prefix check-up against pairwise brute force, and where prompts part."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.sim.replay import Unbounded, replay
from pagedjax.sim.sharing import Sorted, check_up, prefix_groups
from pagedjax.sim.synth import system_prompt
from pagedjax.sim.trace import Trace, TraceRequest


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def _walks(seed: int, count: int) -> list[list[int]]:
    """Prompts with shared prefixes of every length, duplicates and prefixes of each other among them."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        base = prompts[int(rng.integers(len(prompts)))] if prompts and rng.random() < 0.8 else []
        keep = int(rng.integers(0, len(base) + 1))
        new = rng.integers(0, 3, int(rng.integers(0, 30))).tolist()
        prompts.append(base[:keep] + new or [1])
    return prompts


def _brute_force(prompts: list[list[int]]) -> tuple[Counter[int], list[float]]:
    pairs: Counter[int] = Counter()
    best = [0] * len(prompts)
    for (i, a), (j, b) in combinations(enumerate(prompts), 2):
        n = _common(a, b)
        pairs[n] += 1
        best[i], best[j] = max(best[i], n), max(best[j], n)
    return pairs, [n / len(p) for n, p in zip(best, prompts)]


def _as_trace(prompts: list[list[int]]) -> Trace:
    rows = [TraceRequest(0.0, len(p), 0, token_ids=np.array(p, np.int32)) for p in prompts]
    return Trace("prompts", "tokens", 1, True, lambda: iter(rows))


@pytest.mark.parametrize("seed", range(3))
def test_equals_pairwise_brute_force_on_200_prompts(seed: int) -> None:
    prompts = _walks(seed, 200)
    result = check_up(prompts, block_sizes=(1, 4, 16))
    pairs, shares = _brute_force(prompts)
    assert result.pair_histogram == dict(sorted(pairs.items()))
    assert result.shares.tolist() == shares
    for saving in result.savings:
        counts = replay(_as_trace(prompts), saving.block_size, Unbounded())
        assert saving.shared_blocks == counts.hit_full_blocks
    nodes = {tuple(p[:k]) for p in prompts for k in range(1, len(p) + 1)}
    assert result.saved_tokens == sum(map(len, prompts)) - len(nodes)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_groups_are_the_trees_branchings(prompts: list[list[int]]) -> None:
    ordered = Sorted.of(prompts)
    groups, pairs = prefix_groups(ordered)
    assert dict(pairs) == dict(_brute_force(prompts)[0])
    assert sum(g.saved_tokens for g in groups) == int(ordered.lcp.sum())
    for g in groups:
        prefix = ordered.tokens(g.first).tolist()[: g.depth]
        assert sum(p[: g.depth] == prefix for p in prompts) == g.count


def test_ledger_1000_users_of_one_prompt() -> None:
    """187.5 GB against 0.1875 GB at 0.125 GB per 1,000 tokens."""
    prompts = [np.arange(1500)] * 1000
    result = check_up(prompts, block_sizes=(1,))
    gb_per_token = 0.125 / 1000
    assert result.num_tokens * gb_per_token == 187.5
    assert (result.num_tokens - result.saved_tokens) * gb_per_token == 0.1875


@pytest.mark.parametrize(("block_size", "reduction"), [(1, 4.98), (16, 4.89), (128, 3.99)])
def test_ledger_2000_of_2500_tokens_common(block_size: int, reduction: float) -> None:
    rng = np.random.default_rng(0)
    common = rng.integers(0, 1000, 2000)
    prompts = [np.concatenate([common, [2000 + i], rng.integers(0, 1000, 499)]) for i in range(1000)]
    result = check_up(prompts, block_sizes=(block_size,))
    assert np.allclose(result.shares, 0.8)
    assert round(result.savings[0].reduction, 2) == reduction


def test_different_documents_share_nothing() -> None:
    rng = np.random.default_rng(1)
    prompts = [np.concatenate([[5000 + i], rng.integers(0, 1000, 800)]) for i in range(100)]
    result = check_up(prompts)
    assert [s.reduction for s in result.savings] == [1.0] * 7
    assert result.saved_tokens == 0 and result.divergences == ()


@pytest.mark.parametrize("at", [0, 37])
def test_a_timestamp_near_the_front_is_named(at: int) -> None:
    rng = np.random.default_rng(2)
    before, after = rng.integers(0, 9000, at), rng.integers(0, 9000, 1000)
    prompts = [
        np.concatenate([before, [10_000 + i, 20_000 + i % 7], after, [30_000 + i], rng.integers(0, 9000, 60)])
        for i in range(150)
    ]
    result = check_up(prompts, block_sizes=(16,))
    assert result.savings[0].shared_blocks == at // 16 * 149
    (found, *_) = result.divergences
    (field,) = found.fields
    assert (field.position, found.count, field.num_values, field.longest) == (at, 150, 150, 2)
    assert field.before == tuple(before[-8:].tolist()) if at else field.before == ()
    assert all(10_000 <= e[0] < 20_000 <= e[1] for e in field.examples)
    assert found.saved_now == at * 149
    assert found.saved_if_moved == (at + 1000) * 149


def _text(rng: np.random.Generator, length: int) -> str:
    return "".join(chr(c) for c in rng.integers(97, 123, length))


def _moves(prompts: list[str]) -> tuple[list[tuple[int, int, int]], int]:
    """(position, values, longest) of each field of the first group with any, and what moving them gains, in bytes."""
    result = check_up([list(p.encode()) for p in prompts])
    if not result.divergences:
        return [], 0
    (found, *_) = result.divergences
    fields = [(f.position, f.num_values, f.longest) for f in found.fields]
    return fields, found.saved_if_moved - found.saved_now


def test_F082_values_are_counted_whole() -> None:
    rng = np.random.default_rng(0)
    common = _text(rng, 900)
    fields, _ = _moves([f"[12:{i // 10}{i % 10}] {common} Q{i}" for i in range(60)])
    assert fields == [(4, 60, 2)]


def test_F082_a_long_field_at_the_front_is_found() -> None:
    rng = np.random.default_rng(1)
    common = _text(rng, 5000)
    fields, gain = _moves([_text(rng, 100) + common + _text(rng, 9) for _ in range(40)])
    assert fields == [(0, 40, 100)] and 39 * 5000 <= gain < 39 * 5010


def test_F082_all_fields_are_found_and_counted_together() -> None:
    rng = np.random.default_rng(2)
    common = _text(rng, 5000)
    prompts = [
        f"Time: {_text(rng, 8)}. You are a helpful assistant. User: {_text(rng, 12)}. {common}"
        for _ in range(40)
    ]
    fields, gain = _moves(prompts)
    assert [(values, longest) for _, values, longest in fields] == [(40, 8), (40, 12)]
    assert gain == pytest.approx(196_000, rel=0.01)


def test_F082_gains_too_small_to_matter_are_no_advice() -> None:
    rng = np.random.default_rng(3)
    head = _text(rng, 1000)
    # What is common behind the field is 8 bytes long: 792 of 104,400.
    assert _moves([f"{head}{_text(rng, 6)} commons{_text(rng, 30)}" for _ in range(100)]) == ([], 0)
    two = [f"A {_text(rng, 5)} " + head if i % 2 else f"B {_text(rng, 7)} " + head[::-1] for i in range(60)]
    result = check_up([list(p.encode()) for p in two])
    assert [d.count for d in result.divergences] == [30, 30]  # two templates, each with its own field


def test_generated_timestamps_are_named_too() -> None:
    result = check_up([r.token_ids for r in system_prompt(40, timestamp=True)])
    (found, *_) = result.divergences
    assert found.fields[0].position == 0 and found.saved_if_moved >= 39 * 1500


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="none given"):
        check_up([])
    with pytest.raises(ValueError, match="one is empty"):
        check_up([[1], []])


def test_work_grows_with_the_prompts_not_with_their_pairs() -> None:
    """Comparisons of neighbours are counted, not timed: 20 times the prompts, 20 times the steps."""
    steps: Counter[str] = Counter()

    def count(items, label, total):  # type: ignore[no-untyped-def]
        for item in items:
            steps[label] += 1
            yield item

    sizes = []
    for n in (50, 1000):
        steps.clear()
        check_up([r.token_ids for r in system_prompt(n, system_tokens=20)], progress=count)
        sizes.append(steps.total())
    assert sizes[1] <= 21 * sizes[0]
