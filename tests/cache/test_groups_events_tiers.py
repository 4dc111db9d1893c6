"""KV groups and windows, the event stream, the host tier and swapping, pinned tables."""

import random

import pytest

from pagedjax.cache import EventLog, Hints, KVGroup, PagedManager, TokenChain, replay, split_blocks
from pagedjax.cache.groups import common_hit

# --- sliding windows


def _group(window, size=4):
    return PagedManager(num_blocks=8, block_size=size, groups=[KVGroup(window=window)])._groups[0]


@pytest.mark.parametrize(("resident", "hit"), [([1, 0, 1, 1, 1], 20), ([1, 1, 1, 0, 1], 12)])
def test_B093_a_window_needs_its_trailing_blocks_only(resident, hit):
    assert _group(8).fit(resident, 5) * 4 == hit


def test_B093_groups_agree_on_a_common_hit():
    groups = [_group(None), _group(8)]
    assert common_hit(groups, [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], 5) * 4 == 12


@pytest.mark.parametrize(("gone", "hit"), [([1], 20), ([3], 12)])
def test_B093_through_the_manager(drive, tokens, gone, hit):
    d, prompt = drive(groups=[KVGroup(window=8)]), tokens.new(21)
    d.send(prompt)
    pool = d.m._groups[0].pool
    blocks = d.m._groups[0].index.resident(d.chain(prompt), 5)
    victims = [blocks[i] for i in gone]
    pool._recycle(victims, evicted=True)
    pool.blank += victims
    d.m.check_invariants()
    assert d.m.peek(d.chain(prompt)) == hit


@pytest.mark.parametrize("window", range(1, 20))
@pytest.mark.parametrize("size", [1, 4])
def test_fit_is_what_trying_every_length_finds(window, size):
    rng = random.Random(window)
    group = _group(window, size)
    for _ in range(100):
        resident = [rng.random() < 0.7 for _ in range(rng.randrange(12))]

        def serves(count, resident=resident):
            lowest = count * size - window + 1  # the first key that the query at `count * size` sees
            lowest = min(lowest, count * size - 1)  # a hit of which nothing is resident is none
            return all(resident[p // size] for p in range(max(lowest, 0), count * size))

        assert group.fit(resident, len(resident)) == max(n for n in range(len(resident) + 1) if serves(n))


def test_blocks_behind_the_window_are_released(drive, tokens):
    d = drive(groups=[KVGroup(), KVGroup(window=8)])
    seq = d.start(tokens.new(40))
    full, window = (group.pool for group in d.m._groups)
    assert (full.num_in_use, window.num_in_use) == (10, 2)
    assert d.m.table(seq, 1)[:8] == [0] * 8
    a, b = d.m.tables([seq], 12)
    assert (a[0, :10] > 0).all() and b[0].tolist()[8:10] == d.m.table(seq, 1)[8:]
    assert d.grow(seq, tokens.new(20)) and window.num_in_use == 2


def test_B096_blocks_behind_the_window_are_kept_warm_by_hits(drive, tokens):
    """Our choice: a hit touches all that is resident of the prefix it stands for, behind the window, too."""
    d, prompt = drive(usable=24, groups=[KVGroup(window=8)]), tokens.new(37)
    d.send(prompt)
    for _ in range(5):
        assert d.send(prompt) == 36
        d.send(tokens.new(40))
    assert d.send(prompt[:12] + tokens.new(1)) == 12


def test_B035_each_group_is_freed_tail_first_on_both_paths(drive, tokens):
    orders = []
    for deferred in (False, True):
        d = drive(usable=6, groups=[KVGroup(), KVGroup(window=100)])
        seq, prompt = 0, list(range(8))
        d.start(prompt)
        if deferred:  # a pending copy reads one of the blocks when they are freed
            for pool, table in zip((g.pool for g in d.m._groups), (d.m.table(seq, 0), d.m.table(seq, 1))):
                pool.add_reader(table[0])
        d.m.release(seq)
        for pool in (g.pool for g in d.m._groups):
            pool.settle()
        orders.append([pool.policy.victim(9, 0.0) for pool in (g.pool for g in d.m._groups)])
    assert orders[0] == orders[1] == [[2, 1], [2, 1]]


def test_split_blocks_lets_groups_run_out_together():
    counts = split_blocks(1 << 20, [1024, 2048], [4, 1])
    assert counts[0] * 1024 + counts[1] * 2048 <= 1 << 20 and counts[0] // counts[1] == 4
    with pytest.raises(ValueError, match="each group needs 2"):
        split_blocks(2048, [1024, 2048], [1, 1])


def test_reserve_is_all_or_nothing_over_groups(drive, tokens):
    d = drive(usable=10, groups=[KVGroup(), KVGroup(num_blocks=3)])
    before = d.state()
    d.m.begin(0, d.chain(tokens.new(12)))
    assert not d.m.reserve(0, 12)
    d.m.release(0)
    assert d.state() == before


# --- events


def test_B097_removed_says_how_many_copies_are_left(tokens):
    log = EventLog()
    m = PagedManager(num_blocks=3, block_size=4, events=log)
    prompt = tokens.new(4)
    for seq in (0, 1):  # twins: neither can see the other
        m.begin(seq, TokenChain(prompt, block_size=4))
        assert m.reserve(seq, 4)
    for seq in (0, 1):
        m.commit(seq, 4, 1.0)
    for seq in (0, 1):
        m.release(seq)
    (digest,) = {key for _, _, key in m.resident()}
    assert m.resident() == {(0, "device", digest): 2} == replay(log.events)
    for left in (1, 0):
        assert m.evict(1) == 1
        event = log.events[-1]
        assert (event.kind, event.keys, event.copies_left) == ("removed", (digest,), (left,))
        assert replay(log.events) == m.resident()
        m.check_invariants()
    assert m.resident() == {}


def test_B100_events_are_numbered_and_placed(drive, tokens):
    log = EventLog()
    d = drive(usable=4, groups=[KVGroup(), KVGroup(window=8)], host_blocks=3, events=log)
    for _ in range(4):
        d.send(tokens.new(12))
    assert d.m.reset()
    assert [e.number for e in log.events] == list(range(len(log.events)))
    assert [e.kind for e in log.events].count("cleared") == 1 and log.events[-1].kind == "cleared"
    places = {(e.kind, e.group, e.medium) for e in log.events}
    assert places >= {(k, g, m) for k in ("stored", "removed") for g in (0, 1) for m in ("device", "host")}
    assert replay(log.events) == d.m.resident() == {}


def test_a_late_reader_starts_from_a_snapshot(drive, tokens):
    log = EventLog(limit=3)
    d = drive(usable=6, events=log)
    for _ in range(5):
        d.send(tokens.new(8))
    with pytest.raises(ValueError, match="0 is missing"):
        replay(log.events)
    start = log.snapshot()
    d.send(tokens.new(8))
    assert replay(log.events, start) == d.m.resident()


def test_the_checker_finds_a_lie(drive, tokens):
    log = EventLog()
    d = drive(usable=2, events=log)
    d.send(tokens.new(8))
    d.send(tokens.new(8))
    honest = list(log.events)
    with pytest.raises(ValueError, match="there are"):
        replay(_renumbered(honest[1:], 0))


def _renumbered(events, first):
    from dataclasses import replace

    return [replace(event, number=first + i) for i, event in enumerate(events)]


def test_stored_events_name_their_parent(drive, tokens):
    log = EventLog()
    d = drive(events=log)
    seq = d.start(tokens.new(4))
    d.grow(seq, tokens.new(4))
    first, second = log.events
    assert first.parent is None and second.parent == first.keys[0] == d.chains[seq].digest(0)


# --- host tier and swapping


def test_evicted_blocks_come_back_from_the_host(drive, tokens):
    d, prompt = drive(usable=3, host_blocks=8), tokens.new(12)
    d.send(prompt)
    d.send(tokens.new(12))  # evicts all three
    assert d.m.peek(d.chain([*prompt, 1])) == 12
    e, other = drive(usable=6, host_blocks=4), tokens.new(12)
    e.send(other)
    e.send(tokens.new(24))  # six blocks: the three of `other` leave, tail first
    hit = e.m.begin(50, e.chain(other))
    assert hit.num_tokens == 8
    assert e.m.reserve(50, 4)  # three blocks: three more are evicted, while two come back
    plan = e.m.take_copies()
    kinds = [batch.kind for batch in plan.batches]
    assert kinds == sorted(kinds, reverse=True) and kinds[0] == "swap_out" and kinds[-1] == "swap_in"
    assert e.m.stats.host_hit_tokens == 8
    e.m.check_invariants()


def test_the_host_is_bounded_and_least_recently_used_goes(drive, tokens):
    d = drive(usable=1, host_blocks=2)
    prompts = [tokens.new(4) for _ in range(4)]
    for prompt in prompts:
        d.send(prompt)
    kept = [d.m.peek(d.chain([*p, 1])) for p in prompts]
    assert kept == [0, 4, 4, 4]  # two on the host, one on the device


def test_swap_out_and_in_all_or_nothing(drive, tokens):
    d = drive(usable=8, host_blocks=2)
    seq = d.start(tokens.new(10))
    before = d.state()
    assert not d.m.swap_out(seq) and d.state() == before  # needs three host blocks
    e = drive(usable=4, host_blocks=3)
    seq = e.start(tokens.new(10))
    assert e.m.swap_out(seq)
    (batch,) = e.m.take_copies().batches
    assert batch.kind == "swap_out" and len(batch.src) == 3
    other = e.start(tokens.new(13))
    before = e.state()
    assert not e.m.swap_in(seq) and e.state() == before
    e.m.release(other)
    assert e.m.swap_in(seq) and e.m.num_computed(seq) == 10
    (batch,) = e.m.take_copies().batches
    assert batch.kind == "swap_in" and len(batch.src) == 3
    e.m.check_invariants()
    assert e.grow(seq, [1])


def test_swap_leaves_shared_blocks_where_they_are(drive, tokens):
    d, prompt = drive(usable=8, host_blocks=8), tokens.new(8)
    d.start([*prompt, 1])
    second = d.start([*prompt, 2])
    shared = d.m.table(second)[:2]
    assert d.m.swap_out(second)
    (batch,) = d.m.take_copies().batches
    assert len(batch.src) == 1  # its own third block; the shared ones lose a reference
    assert d.m.swap_in(second)
    assert d.m.table(second)[:2] == shared and d.m.num_computed(second) == 9
    d.m.check_invariants()


def test_a_shared_block_that_went_meanwhile_is_recomputed(drive, tokens):
    d, prompt = drive(usable=8, host_blocks=1), tokens.new(8)
    first, second = d.start([*prompt, 1]), d.start([*prompt, 2])
    assert d.m.swap_out(second)
    d.m.take_copies()
    d.m.release(first)
    d.m.evict(8)
    assert d.m.swap_in(second) and d.m.num_computed(second) == 0
    d.m.check_invariants()


def test_a_swapped_sequence_can_be_released(drive, tokens):
    d = drive(usable=8, host_blocks=4)
    seq = d.start(tokens.new(10))
    assert d.m.swap_out(seq)
    d.m.take_copies()
    d.m.release(seq)
    d.m.check_invariants()
    assert d.m._groups[0].tier.num_available == 4


# --- pinned tables


def test_pinned_prefix_is_shared_and_never_written(drive, tokens):
    d, prefix = drive(usable=60, block_size=16, index="table"), tokens.new(200)
    owner = d.start(prefix)
    pinned = d.m.table(owner)
    assert len(pinned) == 13 and d.m.pin(d.chain(prefix)) == 200
    d.m.release(owner)
    for seq in (100, 101):
        d.chains[seq] = d.chain(prefix + tokens.new(1))
        assert d.m.begin(seq, d.chains[seq]).num_tokens == 200
        assert d.m.reserve(seq, 0) and d.m.table(seq) == pinned
    assert all(d.ref[b] == 3 for b in pinned)
    for seq in (100, 101):
        assert d.m.reserve(seq, 1)
        plan = d.m.take_copies()
        assert [(b.src.tolist(), b.dst.tolist()) for b in plan.batches] == [
            ([pinned[12]], [d.m.table(seq)[12]])
        ]
        assert d.m.table(seq)[:12] == pinned[:12] and d.m.table(seq)[12] != pinned[12]
        d.m.check_invariants()
    assert d.ref[pinned[12]] == 1


def test_after_unpin_the_last_owner_writes_in_place(drive, tokens):
    d, prefix = drive(usable=60, block_size=16, index="table"), tokens.new(200)
    owner = d.start(prefix)
    d.m.pin(d.chain(prefix))
    d.m.release(owner)
    d.chains[7] = d.chain(prefix + tokens.new(1))
    d.m.begin(7, d.chains[7])
    assert d.m.reserve(7, 0)
    last = d.m.table(7)[12]
    assert d.m.unpin(d.chain(prefix)) and not d.m.unpin(d.chain(prefix))
    assert d.m.reserve(7, 1) and d.m.take_copies().num_copies == 0 and d.m.table(7)[12] == last
    d.m.check_invariants()


def test_a_recorded_hit_does_not_outlive_its_pin(drive, tokens):
    d, prefix = drive(usable=60, index="table"), tokens.new(10)
    d.start(prefix)
    d.m.pin(d.chain(prefix))
    d.m.release(0)
    d.m.begin(7, d.chain([*prefix, 1]))
    d.m.unpin(d.chain(prefix))
    assert not d.m.reserve(7, 1)
    assert d.m.begin(7, d.chain([*prefix, 1])).num_tokens == 0
    assert d.m.reserve(7, 11)
    d.m.check_invariants()


def test_pins_keep_a_hashed_prefix_from_eviction(drive, tokens):
    d, prompt = drive(usable=6), tokens.new(8)
    d.send(prompt)
    assert d.m.pin(d.chain(prompt)) == 8 and d.m.pin(d.chain(prompt)) == 0
    d.send(tokens.new(16))
    d.send(tokens.new(16))
    assert d.send([*prompt, 1]) == 8
    assert not d.m.reset("strict")
    assert d.m.unpin(d.chain(prompt))
    d.send(tokens.new(24))
    assert d.m.peek(d.chain([*prompt, 1])) == 0


def test_a_stale_hit_is_refused_and_found_anew(drive, tokens):
    d, prompt = drive(usable=4), tokens.new(12)
    d.send(prompt)
    d.m.begin(7, d.chain([*prompt, 1]), Hints())
    d.m.begin(8, d.chain(tokens.new(16)))
    assert d.m.reserve(8, 16)
    d.m.commit(8, 16, 1.0)
    d.m.release(8)
    before = d.state()
    assert not d.m.reserve(7, 1) and d.state() == before
    assert d.m.begin(7, d.chain([*prompt, 1])).num_tokens == 0
    assert d.m.reserve(7, 13)


def test_misuse_of_swapped_sequences_is_refused_and_changes_nothing(drive, tokens):
    d = drive(usable=8, host_blocks=8)
    seq, other = d.start(tokens.new(10)), d.start(tokens.new(3))
    chain = d.m._get(seq).chain
    with pytest.raises(ValueError, match="must be named once each"):
        d.m.swap_out(seq, seq)
    assert d.m.swap_out(seq)
    before = d.state()
    with pytest.raises(ValueError, match=f"sequence {seq}: is swapped out; swap it in or release it first"):
        d.m.begin(seq, chain)
    with pytest.raises(ValueError, match=f"sequence {seq}: is swapped out"):
        d.m.fork(other, seq, d.m._get(other).chain.fork())
    with pytest.raises(ValueError, match="must be named once each"):
        d.m.swap_in(seq, seq)
    assert d.state() == before
    assert d.m.swap_in(seq)
    d.m.check_invariants()
