"""The buddy allocator and the Orca baselines on it."""

import random

import pytest

from pagedjax.cache import Hints, InvariantError, ReservationManager, TokenChain
from pagedjax.cache.reservation import BuddyAllocator


@pytest.mark.parametrize("size", [1, 2, 7, 13, 64, 100])
def test_buddy_against_a_plain_set_of_units(size):
    rng, buddy, held = random.Random(size), BuddyAllocator(size), {}
    for _ in range(600):
        if held and rng.random() < 0.5:
            start = rng.choice(sorted(held))
            del held[start]
            buddy.free(start)
        else:
            want = rng.randrange(1, size + 1)
            start = buddy.allocate(want)
            units = 1 << max(want - 1, 0).bit_length()
            taken = {u for s, n in held.items() for u in range(s, s + n)}
            if start >= 0:
                assert buddy.units(start) == units and start % units == 0 and start + units <= size
                assert not taken & set(range(start, start + units))
                held[start] = units
            else:
                assert buddy.largest < units
        buddy.check()
    for start in list(held):
        buddy.free(start)
    buddy.check()
    assert buddy.num_free == size and buddy.largest == 1 << (size.bit_length() - 1)
    with pytest.raises(InvariantError, match="no chunk in use starts there"):
        buddy.free(0)


def _chain(n):
    return TokenChain(range(n), block_size=4)


@pytest.mark.parametrize(("rule", "tokens"), [("max", 256), ("pow2", 7 + 32), ("oracle", 7 + 25)])
def test_rules_reserve_what_they_say(rule, tokens):
    """Prompt 7, true output 25: the paper's example of Pow2 is 32 for 25."""
    m = ReservationManager(num_blocks=129, block_size=4, rule=rule, max_tokens=256)
    m.begin(0, _chain(7), Hints(expected_tokens=25))
    assert m.reserve(0, 7)
    m.commit(0, 7, 1.0)
    waste = m.waste()
    assert waste.token_states == 7 and waste.reservation == 25
    assert waste.internal == tokens - 32
    slots = len(m.table(0)) * 4
    assert waste.external == slots - tokens and waste.total == 128 * 4
    table = m.table(0)
    assert table == list(range(table[0], table[0] + len(table))) and 0 not in table
    m.check_invariants()


def test_paged_wastes_less_than_one_block_where_max_wastes_most():
    m = ReservationManager(num_blocks=129, block_size=4, rule="max", max_tokens=256)
    admitted = 0
    for seq in range(10):
        m.begin(seq, _chain(10), Hints(expected_tokens=10))
        if m.reserve(seq, 10):
            m.commit(seq, 10, 1.0)
            admitted += 1
        else:
            m.release(seq)
    assert admitted == 2
    waste = m.waste()
    assert waste.token_states / waste.total < 0.05 and waste.internal / waste.total > 0.9


def test_a_refusal_changes_nothing():
    m = ReservationManager(num_blocks=9, block_size=4, max_tokens=32)
    m.begin(0, _chain(4))
    assert m.reserve(0, 4)
    before = m.snapshot()
    for _ in range(100):
        m.begin(1, _chain(4))
        assert not m.reserve(1, 4)
        m.release(1)
    assert m.snapshot() == before
    m.check_invariants()


def test_external_fragmentation_is_what_a_refused_sequence_cannot_use():
    m = ReservationManager(num_blocks=8, block_size=4, rule="oracle", max_tokens=64)
    m.begin(0, _chain(4), Hints(expected_tokens=4))
    assert m.reserve(0, 4)  # seven blocks: 4 + 2 + 1; two are taken, five are free, four in one piece
    m.begin(1, _chain(4), Hints(expected_tokens=14))
    assert not m.reserve(1, 4)  # five blocks, a chunk of eight
    assert m.waste().external == 5 * 4 and m.waste().free == 0


def test_outgrowing_a_chunk_moves_it():
    m = ReservationManager(num_blocks=17, block_size=4, rule="oracle", max_tokens=64)
    chain = _chain(6)
    m.begin(0, chain, Hints(expected_tokens=1))
    assert m.reserve(0, 6)
    m.commit(0, 6, 1.0)
    old = m.table(0)
    chain.extend(range(6))
    assert m.reserve(0, 6)
    plan = m.take_copies()
    new = m.table(0)
    assert [(b.src.tolist(), b.dst.tolist()) for b in plan.batches] == [(old, new[:2])]
    m.commit(0, 12, 2.0)
    m.check_invariants()
    m.release(0)
    assert m.num_free == 16


def test_forks_copy_into_chunks_of_their_own():
    m = ReservationManager(num_blocks=17, block_size=4, rule="oracle", max_tokens=64)
    m.begin(0, _chain(6), Hints(expected_tokens=2))
    assert m.reserve(0, 6)
    m.commit(0, 6, 1.0)
    m.fork(0, 1, _chain(7))
    m.fork(0, 2, _chain(7))
    m.release(0)  # its chunk stays until the forks have copied it
    m.check_invariants()
    for seq in (1, 2):
        assert m.reserve(seq, 1)
    plan = m.take_copies()
    assert plan.num_copies == 4
    m.check_invariants()
    assert not set(m.table(1)) & set(m.table(2))
    for seq in (1, 2, 2):
        m.release(seq)
    assert m.num_free == 16 and m.reset("strict")


def test_random_histories_keep_the_books():
    rng = random.Random(0)
    for rule in ("max", "pow2", "oracle"):
        m = ReservationManager(num_blocks=40, block_size=4, rule=rule, max_tokens=64)
        live, ids = {}, 0
        for now in range(1500):
            action = rng.randrange(5)
            if action == 0:
                chain = _chain(rng.randrange(1, 20))
                m.begin(ids, chain, Hints(expected_tokens=rng.choice([None, rng.randrange(1, 20)])))
                if m.reserve(ids, len(chain)):
                    m.commit(ids, len(chain), float(now))
                    live[ids] = chain
                else:
                    m.release(ids)
                ids += 1
            elif action in (1, 2) and live:
                seq = rng.choice(list(live))
                if len(live[seq]) < 60:
                    live[seq].append(1)
                    if m.reserve(seq, 1):
                        m.commit(seq, len(live[seq]), float(now))
                    else:
                        live[seq].tokens.pop()
            elif action == 3 and live:
                seq = rng.choice(list(live))
                m.release(seq)
                del live[seq]
            elif live:
                live[ids] = live[rng.choice(list(live))].fork()
                parent = next(s for s, c in live.items() if c.tokens == live[ids].tokens)
                m.fork(parent, ids, live[ids])
                ids += 1
            if rng.random() < 0.5:
                m.take_copies()
            m.check_invariants()
            assert m.waste().total == 39 * 4
            tables = [b for s in live for b in m.table(s)]
            assert len(set(tables)) == len(tables)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="rule=best: must be one of max, pow2, oracle"):
        ReservationManager(num_blocks=9, block_size=4, rule="best")
    m = ReservationManager(num_blocks=9, block_size=4)
    assert m.peek(_chain(9)) == 0 and not m.swap_out(0) and not m.swap_in(0) and m.pin(_chain(9)) == 0
    with pytest.raises(ValueError, match="sequence 4: unknown"):
        m.reserve(4, 1)
