"""One table for every manager: what the engine relies on, whatever is behind it."""

import numpy as np
import pytest

from pagedjax.cache import (
    INDEXES,
    Hints,
    KVCacheManager,
    KVGroup,
    PagedManager,
    ReservationManager,
    TokenChain,
)
from pagedjax.cache.reservation import RULES

SIZE = 4
MANAGERS = {
    **{
        index: lambda index=index: PagedManager(num_blocks=33, block_size=SIZE, index=index)
        for index in INDEXES
    },
    "off": lambda: PagedManager(num_blocks=33, block_size=SIZE, prefix_caching=False),
    "groups": lambda: PagedManager(
        num_blocks=33, block_size=SIZE, groups=[KVGroup(), KVGroup(window=6)], dedup=True, partial=1
    ),
    "host": lambda: PagedManager(num_blocks=33, block_size=SIZE, host_blocks=8),
    **{
        rule: lambda rule=rule: ReservationManager(num_blocks=33, block_size=SIZE, rule=rule, max_tokens=32)
        for rule in RULES
    },
}


@pytest.fixture(params=sorted(MANAGERS))
def manager(request) -> KVCacheManager:
    return MANAGERS[request.param]()


def _chain(n, start=0):
    return TokenChain(range(start, start + n), block_size=SIZE)


def test_the_life_of_one_sequence(manager):
    free, chain = manager.num_free, _chain(6)
    hit = manager.begin(0, chain, Hints(expected_tokens=5))
    assert hit.num_tokens == 0 and manager.num_free == free and manager.table(0) == []
    assert manager.reserve(0, 6)
    assert manager.take_copies().num_copies == 0
    slots = [(b, i) for b in manager.table(0)[:2] for i in range(SIZE)]
    assert len(set(slots)) == 8 and 0 not in manager.table(0)[:2]
    manager.commit(0, 6, 1.0)
    for now in range(5):
        chain.append(99)
        assert manager.reserve(0, 1)
        manager.commit(0, len(chain), 2.0 + now)
        manager.check_invariants()
    assert manager.num_computed(0) == 11 and len(manager.table(0)) >= 3
    manager.release(0)
    manager.release(0)
    manager.check_invariants()
    assert manager.num_free == free


def test_tables_are_fresh_arrays_padded_with_null(manager):
    for seq in (0, 1):
        manager.begin(seq, _chain(6, 50 * seq), Hints(expected_tokens=2))
        assert manager.reserve(seq, 6)
        manager.commit(seq, 6, 1.0)
    first, second = manager.tables([0, 1], 9), manager.tables([0, 1], 9)
    for a, b in zip(first, second):
        assert a.dtype == np.int32 and a.shape == (2, 9)
        assert a is not b and not np.shares_memory(a, b) and (a == b).all()
    rows = first[0]
    assert not set(rows[0, :2].tolist()) & set(rows[1, :2].tolist())
    assert manager.tables([], 4)[0].shape == (0, 4)


def test_a_fork_never_writes_its_parents_blocks(manager):
    chains = {seq: _chain(6) for seq in (0, 1, 2)}
    manager.begin(0, chains[0], Hints(expected_tokens=4))
    assert manager.reserve(0, 6)
    manager.take_copies()
    manager.commit(0, 6, 1.0)
    for seq in (1, 2):
        manager.fork(0, seq, chains[seq])
    for seq, chain in chains.items():
        chain.append(seq)
        assert manager.reserve(seq, 1)
    written = [manager.table(seq)[1] for seq in chains]
    assert len(set(written)) == 3
    copied = {
        (src, dst) for b in manager.take_copies().batches for src, dst in zip(b.src.tolist(), b.dst.tolist())
    }
    assert {dst for _, dst in copied} >= {manager.table(seq)[1] for seq in chains if manager.num_copies(seq)}
    assert sum(manager.num_copies(seq) > 0 for seq in chains) == 2
    for seq, chain in chains.items():
        manager.commit(seq, len(chain), 2.0)
    manager.check_invariants()
    for seq in chains:
        manager.release(seq)
    manager.check_invariants()


def test_a_refusal_changes_nothing_and_release_takes_it_back(manager):
    manager.begin(0, _chain(30), Hints(expected_tokens=2))
    assert manager.reserve(0, 30)
    manager.commit(0, 30, 1.0)
    before = manager.snapshot()
    manager.begin(1, _chain(130, 500), Hints(expected_tokens=2))
    assert not manager.reserve(1, 130)
    manager.release(1)
    assert manager.snapshot() == before
    manager.check_invariants()


def test_reset_strict_refuses_what_preempt_does(manager):
    manager.begin(0, _chain(8))
    assert manager.reserve(0, 8)
    manager.commit(0, 8, 1.0)
    assert not manager.reset("strict")
    assert manager.reset("preempt").preempted == (0,)
    assert manager.reset("strict") and manager.begin(1, _chain(9)).num_tokens == 0
    manager.check_invariants()


def test_misuse_is_a_value_error_that_names_the_rule(manager):
    with pytest.raises(ValueError, match="sequence 7: unknown; begin it first"):
        manager.reserve(7, 1)
    with pytest.raises(ValueError, match="block_size"):
        manager.begin(0, TokenChain([1], block_size=2 * SIZE))
    with pytest.raises(ValueError):
        manager.begin(0, TokenChain([], block_size=SIZE))
    manager.begin(0, _chain(6))
    with pytest.raises(ValueError, match="must not be negative"):
        manager.reserve(0, -1)
    with pytest.raises(ValueError, match="num_computed=3"):
        manager.commit(0, 3, 1.0)
    assert manager.reserve(0, 6)
    with pytest.raises(ValueError, match="num_computed=7"):
        manager.commit(0, 7, 1.0)
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.begin(0, _chain(6))
    with pytest.raises(ValueError, match="exists already"):
        manager.fork(0, 0, _chain(6))
    manager.release(12345)


@pytest.mark.parametrize("size", [0, 3, 24, 2048])
def test_block_size_is_a_power_of_two(size):
    with pytest.raises(ValueError, match=f"block_size={size}: must be a power of two"):
        PagedManager(num_blocks=9, block_size=size)


def test_names_are_checked():
    for name in ("index", "policy"):
        with pytest.raises(ValueError, match=f"{name}=nonsense: must be one of"):
            PagedManager(num_blocks=9, block_size=4, **{name: "nonsense"})
    with pytest.raises(ValueError, match="num_blocks=1: must be at least 2"):
        PagedManager(num_blocks=1, block_size=4)
    with pytest.raises(ValueError, match="partial=-1"):
        PagedManager(num_blocks=9, block_size=4, partial=-1)
    with pytest.raises(ValueError, match="host_blocks=-1"):
        PagedManager(num_blocks=9, block_size=4, host_blocks=-1)
