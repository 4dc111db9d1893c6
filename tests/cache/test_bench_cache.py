"""`bench cache`: it measures every kind of manager; the speed lines, where they are asked for."""

from types import SimpleNamespace

import pytest

from pagedjax.bench import cache as bench
from pagedjax.cache import INDEXES, POLICIES

# Ratios to bare hashlib over the same bytes, at 16 tokens a block, hash index, LRU.
LINES = {"hash": 1.5, "miss": 2.0, "evict": 2.5, "hit": 1.0, "lookup": 0.4}


def test_rows_hold_every_index_policy_and_size():
    config = SimpleNamespace(cache=SimpleNamespace(index="radix", policy="lfu", block_size=32))
    said = []
    rows = bench.run(config, num_blocks=300, rounds=2, block_sizes=(16, 64), progress=said.append)
    assert {row["index"] for row in rows} == set(INDEXES)
    assert {row["policy"] for row in rows} == POLICIES.keys() - {"belady"}
    assert {row["block_size"] for row in rows} == {16, 32, 64}
    assert {row["operation"] for row in rows} == {"hash", "miss", "lookup", "hit", "evict", "append"}
    assert all(row["ratio"] > 0 and row["us_per_block"] > 0 and row["floor_us"] > 0 for row in rows)
    assert len(said) == len({(r["index"], r["policy"], r["block_size"]) for r in rows})


def test_bytes_per_cached_block():
    assert 150 < bench.bytes_per_block(10_000) <= 320


def _ratios(*args, lines):
    """The best of a few runs: other work on the machine only ever adds."""
    best: dict[str, float] = {}
    for _ in range(5):
        for row in bench.measure(*args):
            best[row["operation"]] = min(row["ratio"], best.get(row["operation"], 1e9))
        if all(best[name] <= line for name, line in lines.items()):
            break
    return best


@pytest.mark.full
def test_speed_lines():
    best = _ratios("hash", "lru", 16, 10_000, 60, lines=LINES)
    assert {name: best[name] for name, line in LINES.items() if best[name] > line} == {}


@pytest.mark.full
def test_speed_lines_of_the_radix_index_and_of_a_million_blocks():
    hashed = _ratios("hash", "lru", 16, 10_000, 60, lines=LINES)
    threefold = {name: 3 * ratio for name, ratio in hashed.items()}
    for case in (("radix", "lru", 16, 10_000, 60), ("hash", "lru", 16, 1_000_000, 60)):
        best = _ratios(*case, lines=threefold)
        assert {name: r for name, r in best.items() if r > threefold[name]} == {}, case


@pytest.mark.full
def test_bytes_per_cached_block_of_a_million():
    assert bench.bytes_per_block(1_000_000) <= 320
