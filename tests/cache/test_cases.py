"""Fault kinds that paged caches have met in practice, as the manager alone sees them; named by case id."""

import hashlib
import itertools
import random
import struct
import subprocess
import sys

import pytest

from pagedjax.cache import EventLog, ExtraKeys, Hints, InvariantError, MissReason, PagedManager, TokenChain
from pagedjax.cache.block import BlockPool
from pagedjax.cache.eviction import LRU
from pagedjax.cache.hash_index import HashIndex
from pagedjax.cache.hashing import CanonicalHash
from pagedjax.cache.protocol import NO_COPIES


def test_B001_token_ids_are_hashed_whole(drive):
    d = drive()
    prompts = [[65, 1, 2, 3, 9], [321, 1, 2, 3, 9], [65601, 1, 2, 3, 9]]
    assert [d.send(p) for p in prompts] == [0, 0, 0]
    assert len({d.chain(p).digest(0) for p in prompts}) == 3
    assert d.send(prompts[0]) == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dict(adapter="X"), dict(salt="X")),
        (dict(adapter="a", salt="b"), dict(adapter="b", salt="a")),
        (dict(salt="ab", adapter="c"), dict(salt="a", adapter="bc")),
        (dict(weight_version="X"), dict(salt="X")),
        (dict(adapter="X", adapter_path="Y"), dict(adapter="XY")),
    ],
)
def test_B003_extra_keys_are_typed(drive, tokens, first, second):
    d, prompt = drive(), tokens.new(9)
    assert d.send(prompt, **first) == 0
    assert d.send(prompt, **second) == 0
    assert d.send(prompt, **first) == 8


def test_B003_empty_salt_is_rejected():
    with pytest.raises(ValueError, match="salt='': must not be empty"):
        ExtraKeys(salt="")


def test_B005_salt_enters_once_and_separates_every_block():
    def chain(salt):
        return TokenChain(range(12), block_size=4, extra=ExtraKeys(salt=salt))

    chains = [chain("s1"), chain("s2"), chain(None)]
    for i in range(3):
        assert len({c.digest(i) for c in chains}) == 3
    extra = ExtraKeys(salt="s1")
    assert extra.in_block(0, 4) and not extra.in_block(1, 4)
    # The unsalted chain is the plain recipe, with nothing where the salt would be.
    digest = hashlib.sha256(b"pagedjax block hash 1:").digest()
    for i in range(3):
        digest = hashlib.sha256(digest + struct.pack("<I4i", 4, *range(4 * i, 4 * i + 4))).digest()
        assert chains[2].digest(i) == digest


def test_B007_digests_are_the_same_in_every_process():
    code = (
        "from pagedjax.cache import TokenChain, ExtraKeys\n"
        "c = TokenChain(range(12), block_size=4, extra=ExtraKeys(adapter='a', salt='s'))\n"
        "print([c.digest(i).hex() for i in range(3)])"
    )
    outputs = set()
    for seed in (None, "0", "123"):
        env = {"PATH": "/usr/bin:/bin"} | ({} if seed is None else {"PYTHONHASHSEED": seed})
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    plain = TokenChain(range(12), block_size=4)
    seeded = TokenChain(
        range(12),
        block_size=4,
        hash=CanonicalHash("sha256", lambda b: hashlib.sha256(b).digest(), seed="other"),
    )
    assert all(plain.digest(i) != seeded.digest(i) for i in range(3))


def test_B011_a_recycled_block_drops_its_old_entry(drive):
    d = drive(usable=2)
    a, b = list(range(8)), list(range(100, 108))
    d.send(a)
    d.send(b)
    assert d.m.peek(d.chain([*a, 1])) == 0
    keys = d.m.snapshot()["groups"][0]["keys"]
    chain = d.chain(b)
    assert set(keys.values()) == {chain.digest(0), chain.digest(1)}
    index = d.m._groups[0].index
    for block, key in keys.items():
        stored = bytes(index._content(block))
        i = [chain.digest(0), chain.digest(1)].index(key)
        assert stored == struct.pack("<4i", *b[4 * i : 4 * i + 4])


def test_B013_lookup_stops_at_first_miss():
    for gone, left in ((0, 0), (1, 1), (2, 2)):
        index = HashIndex(8, 4)
        chain = TokenChain(range(12), block_size=4)
        index.register(chain, 0, [1, 2, 3], 0, dedup=False)
        index.forget([gone + 1], [chain.digest(gone)])
        assert index.lookup(chain, 12) == ([1, 2, 3][:left], 4 * left)


@pytest.mark.parametrize(("length", "hit"), [(32, 16), (33, 32), (16, 0), (15, 0), (17, 16)])
def test_B015_a_token_is_always_left_to_compute(drive, tokens, length, hit):
    d, prompt = drive(block_size=16), tokens.new(length)
    assert d.send(prompt) == 0
    assert d.send(prompt) == hit
    reason = MissReason.LAST_TOKEN if length in (16, 32) else MissReason.NONE
    assert d.hits[1].reason == reason


def test_B015_with_partial_reuse_all_but_the_last_token_hits(drive, tokens):
    d, prompt = drive(block_size=16, partial=1), tokens.new(32)
    d.send(prompt)
    assert d.send(prompt) == 31


def test_B017_below_the_block_floor_is_told_from_no_match(drive, tokens):
    d = drive(block_size=16)
    shared, tail = tokens.new(15), tokens.new(40)
    d.send(shared + tail[:9])
    d.send(shared + tail[10:20])
    assert (d.hits[1].num_tokens, d.hits[1].reason, d.hits[1].matched_tokens) == (
        0,
        MissReason.BELOW_BLOCK_FLOOR,
        15,
    )
    d.send(tokens.new(20))
    assert (d.hits[2].reason, d.hits[2].matched_tokens) == (MissReason.NO_MATCH, 0)


def test_B017_the_nearest_of_many_children_is_found(drive):
    rng = random.Random(1)
    d = drive(usable=500, block_size=8)
    prompts = [[rng.randrange(3) for _ in range(8)] for _ in range(200)]
    for prompt in prompts:
        d.send([*prompt, 9])
    for _ in range(200):
        asked = [rng.randrange(3) for _ in range(8)]
        best = max(next((i for i in range(8) if p[i] != asked[i]), 8) for p in prompts)
        hit = d.m.begin(10_000, d.chain([*asked, 9]))
        assert hit.matched_tokens == (8 if best == 8 else best)


def test_miss_reasons_name_the_cause(drive, tokens):
    d = drive(usable=4)
    a = tokens.new(9)
    d.send(a, salt="s")
    d.send(a)
    assert d.hits[1].reason == MissReason.OTHER_NAMESPACE
    d.send(tokens.new(16))  # four blocks: everything before is gone
    d.send(a)
    assert d.hits[3].reason == MissReason.EVICTED
    d.send(a, hints=Hints(cache_read=False))
    assert d.hits[4].reason == MissReason.OPTED_OUT
    off = drive(prefix_caching=False)
    off.send(a)
    assert off.hits[0].reason == MissReason.DISABLED


def test_cache_write_off_leaves_nothing(drive, tokens):
    d, prompt = drive(), tokens.new(9)
    d.send(prompt, hints=Hints(cache_write=False))
    assert d.send(prompt) == 0
    assert d.send(prompt) == 8


def test_B019_a_block_is_taken_by_the_token_that_needs_it(drive, tokens):
    d = drive(usable=1)
    seq = d.start(tokens.new(3))
    assert d.m.num_free == 0
    assert d.grow(seq, [1])  # 3 -> 4: the slot is there
    before = d.state()
    assert not d.grow(seq, [2])  # 4 -> 5: needs a second block
    assert d.state() == before


def test_B020_resume_counts_hits_before_it_schedules(drive, tokens):
    d = drive(usable=4)
    prompt = tokens.new(14)
    seq = d.start(prompt)
    d.m.release(seq)
    hit = d.m.begin(seq, d.chains[seq], Hints(resumed=True))
    scheduled = len(prompt) - hit.num_tokens
    assert (hit.num_tokens, scheduled) == (12, 2)
    assert d.m.reserve(seq, scheduled)
    assert len(d.m.table(seq)) == 4


def test_B022_resume_looks_up_prompt_and_output(drive, tokens):
    d = drive()
    seq = d.start(tokens.new(6))
    assert d.grow(seq, tokens.new(4))
    d.chains[seq].append(77)  # the fifth token: sampled, its KV not computed
    d.m.release(seq)
    hit = d.m.begin(seq, d.chains[seq], Hints(resumed=True))
    assert len(d.chains[seq]) == 11 and hit.num_tokens == 8
    assert d.m.reserve(seq, 3)
    assert d.m.num_computed(seq) == 8


def test_B024_two_growing_sequences_both_finish(drive, tokens):
    d = drive(usable=10)
    prompts = [tokens.new(4), tokens.new(4)]
    older, younger = d.start(prompts[0]), d.start(prompts[1])
    preemptions = 0
    for i in range(20):
        assert d.grow(older, [i]) or preemptions < 6
        if younger is not None and not d.grow(younger, [i]):
            d.m.release(younger)
            younger, preemptions = None, preemptions + 1
    assert len(d.m.table(older)) == 6
    d.m.release(older)
    again = d.start(prompts[1] + list(range(20)))
    assert again >= 0 and preemptions == 1


def _pool(num_blocks=9):
    return BlockPool(num_blocks, LRU(num_blocks), HashIndex(num_blocks, 4))


def test_B025_a_block_freed_twice_in_one_call():
    pool = _pool()
    (b,) = pool.take(1)
    pool.share([b])
    free = pool.num_free
    pool.free([b, b])
    assert pool.ref[b] == 0 and pool.num_free == free + 1 and pool.blank.count(b) == 1
    (b,) = pool.take(1)
    before = (list(pool.ref), list(pool.blank), pool.num_free)
    with pytest.raises(InvariantError, match="freed more often"):
        pool.free([b, b])
    assert (pool.ref, pool.blank, pool.num_free) == before


def test_B025_list_links_agree_after_every_operation(drive, tokens):
    d, rng = drive(usable=20), random.Random(3)
    live = []
    for _ in range(300):
        if live and rng.random() < 0.5:
            d.m.release(live.pop(rng.randrange(len(live))))
        else:
            seq = d.start([rng.randrange(3) for _ in range(rng.randrange(1, 20))])
            live += [seq] if seq >= 0 else []
        policy, pool = d.m._groups[0].pool.policy, d.m._groups[0].pool
        forward = policy.victim(1000, 0.0)
        assert len(forward) == len(set(forward)) == pool.num_evictable
        around = [0, *forward, 0]
        assert all(policy._prev[b] == a for a, b in itertools.pairwise(around))


@pytest.mark.parametrize("when", ["waiting", "running", "finishing"])
def test_B027_release_is_idempotent(drive, tokens, when):
    d = drive()
    free, prompt = d.m.num_free, tokens.new(9)
    d.m.begin(50, d.chain(prompt))
    if when != "waiting":
        assert d.m.reserve(50, 9)
    if when == "finishing":
        d.m.commit(50, 9, 1.0)
    for _ in range(3):
        d.m.release(50)
        d.m.release(999)
        d.m.check_invariants()
        assert d.m.num_free == free


@pytest.mark.parametrize("seam", range(21))
def test_B029_a_release_in_two_parts_frees_each_block_once(drive, tokens, seam):
    d = drive(block_size=8, prefix_caching=False)
    free = d.m.num_free
    seq = d.start(tokens.new(20))
    assert d.m.num_free == free - 3
    d.m.truncate(seq, seam)
    d.m.check_invariants()
    d.m.release(seq)
    d.m.check_invariants()
    assert d.m.num_free == free and sorted(d.queue) == list(range(1, 65))


@pytest.mark.parametrize(("need", "left"), [(1, 8), (2, 4), (3, 0)])
def test_B031_the_tail_of_a_chain_goes_first(drive, tokens, need, left):
    queues = set()
    for _ in range(200):
        d = drive(usable=3)
        a = list(range(12))
        d.send(a)
        d.send(list(range(100, 100 + 4 * need)))
        assert d.m.peek(d.chain([*a, 1])) == left
        queues.add(tuple(d.queue))
    assert len(queues) == 1


def test_B033_only_the_shortfall_is_evicted(drive, tokens):
    d = drive(usable=10)
    for _ in range(8):
        d.send(tokens.new(4))
    assert d.m.reserve(d.m.begin(90, d.chain(tokens.new(12))) and 90, 12)  # 2 blank, so one is evicted
    assert d.m.stats.evictions == 1
    e = drive(usable=10)
    for _ in range(10):
        e.send(tokens.new(4))
    assert e.m.evict(2) == 2  # 5 slots need two blocks of 4
    assert sum(4 for _ in e.m.snapshot()["groups"][0]["keys"]) == 32
    assert e.m.evict(100) == 8
    assert e.m.evict(1) == 0
    e.m.check_invariants()


def test_B037_hits_in_the_queue_are_consumed(drive, tokens):
    for usable, admitted in ((5, False), (6, True)):
        d = drive(usable=usable)
        shared = tokens.new(8)
        d.send(shared)
        before = d.state()
        hit = d.m.begin(70, d.chain(shared + tokens.new(16)))
        assert hit.num_tokens == 8
        assert d.m.reserve(70, 16) is admitted
        d.m.check_invariants()
        if not admitted:
            after = d.state()
            after["tables"].pop(70)
            assert after == before
            d.m.release(70)
            assert d.state() == before


def test_a_refused_admission_changes_nothing_however_often(drive, tokens):
    log = EventLog()
    d = drive(usable=5, events=log)
    shared = tokens.new(8)
    d.send(shared)
    before, events = d.state(), list(log.events)
    chain = d.chain(shared + tokens.new(16))
    for _ in range(1000):
        d.m.begin(70, chain)
        assert not d.m.reserve(70, 16)
        d.m.release(70)
    assert d.state() == before and list(log.events) == events


def test_B040_a_chunk_that_does_not_fit_is_refused_not_raised(drive, tokens):
    d = drive(usable=44, block_size=16)
    d.m.begin(0, d.chain(tokens.new(2048)))
    assert not d.m.reserve(0, 2048)
    assert d.m.reserve(0, 704)
    d.m.commit(0, 704, 1.0)
    before = d.state()
    assert not d.m.reserve(0, 1)
    assert d.state() == before


def test_B041_a_block_is_visible_after_the_step_that_wrote_it(drive, tokens):
    d = drive(block_size=16)
    prompt = tokens.new(32)
    for seq in (0, 1):
        hit = d.m.begin(seq, d.chain(prompt))
        assert hit.num_tokens == 0
        assert d.m.reserve(seq, 32)
    assert hit.reason == MissReason.SAME_STEP_TWIN
    assert not set(d.m.table(0)) & set(d.m.table(1))
    d.m.commit(0, 32, 1.0)
    d.m.commit(1, 32, 1.0)
    d.m.check_invariants()
    assert d.m.stats.same_step_twins == 2
    assert d.m.begin(2, d.chain(prompt)).num_tokens == 16


def test_B043_only_written_tokens_become_visible(drive, tokens):
    d, prompt = drive(), tokens.new(24)
    d.m.begin(0, d.chain(prompt))
    d.m.release(0)
    assert d.m.peek(d.chain(prompt)) == 0
    d.m.begin(0, d.chain(prompt))
    assert d.m.reserve(0, 16)
    d.m.commit(0, 16, 1.0)
    assert d.m.reserve(0, 4)  # 20 scheduled, 16 computed
    d.m.release(0)
    assert d.m.peek(d.chain(prompt)) == 16
    e = drive()
    e.m.begin(0, e.chain(prompt))
    assert e.m.reserve(0, 24)
    e.m.release(0)
    assert e.m.peek(e.chain(prompt)) == 0 and len(e.m.snapshot()["groups"][0]["keys"]) == 0


@pytest.mark.parametrize("chunk", [100, 7, 16, 33])
def test_B045_chunks_leave_the_same_digests(drive, tokens, chunk):
    prompt = tokens.new(200)
    d, whole = drive(block_size=16), drive(block_size=16)
    d.start(prompt, chunk=chunk)
    whole.start(prompt)
    keys = [list(x.m.snapshot()["groups"][0]["keys"].values()) for x in (d, whole)]
    assert keys[0] == keys[1] and len(keys[0]) == 12


def test_B053_parallel_samples_copy_on_write(drive, tokens):
    d = drive()
    first = d.start(tokens.new(6))
    chains = [d.chains[first].fork() for _ in range(2)]
    for child, chain in zip((101, 102), chains):
        d.m.fork(first, child, chain)
        d.chains[child] = chain
    full, part = d.m.table(first)
    assert (d.ref[full], d.ref[part]) == (3, 3)
    copies = 0
    for seq in (first, 101, 102):
        d.chains[seq].append(seq)
        assert d.m.reserve(seq, 1)
        d.m.check_invariants()
    plan = d.m.take_copies()
    copies = plan.num_copies
    assert copies == 2 and all(batch.kind == "cow" for batch in plan.batches)
    assert [d.m.num_copies(s) for s in (first, 101, 102)] == [1, 1, 0]  # the last owner writes in place
    assert len(d.ref) == 4 and d.ref[full] == 3
    assert {src for batch in plan.batches for src in batch.src.tolist()} == {part}
    assert d.m.table(102)[1] == part


def test_copies_are_ordered_when_a_fork_is_forked_in_one_step(drive, tokens):
    d = drive()
    d.start(tokens.new(6))
    d.m.fork(0, 11, d.chains[0].fork())
    assert d.m.reserve(11, 1)  # copies the partial block
    d.m.fork(11, 12, d.chains[0].fork())
    d.chains[0].append(5)
    assert d.m.reserve(12, 1) and d.m.reserve(0, 1)
    plan = d.m.take_copies()
    content = {d.m.table(0)[1]: "old"}
    for batch in plan.batches:
        src, dst = batch.src.tolist(), batch.dst.tolist()
        assert len(set(dst)) == len(dst) and not set(src) & set(dst)
        content |= {b: content.get(a) for a, b in zip(src, dst)}
    assert content[d.m.table(11)[1]] == content[d.m.table(12)[1]] == "old"
    assert len(plan.batches) == 2


def test_release_cancels_the_copies_nobody_needs(drive, tokens):
    d = drive()
    d.start(tokens.new(6))
    d.m.fork(0, 11, d.chains[0].fork())
    assert d.m.reserve(11, 1)
    d.m.release(11)
    d.m.check_invariants()
    assert d.m.take_copies() is NO_COPIES


def test_the_source_of_a_pending_copy_is_not_handed_out(drive, tokens):
    d = drive(usable=4)
    d.start(tokens.new(6))
    d.m.fork(0, 11, d.chains[0].fork())
    part = d.m.table(0)[1]
    assert d.m.reserve(11, 1)
    d.m.release(0)  # the source has no owner now, but its copy has not run
    d.m.check_invariants()
    assert part not in d.queue and d.m.num_free == 1
    d.m.take_copies()
    d.m.check_invariants()
    assert part in d.queue and d.m.num_free == 2


def test_a_held_block_can_be_hit_before_its_copy_has_run(drive, tokens):
    d, prompt = drive(partial=1), tokens.new(8)
    first = d.start(prompt)
    d.m.begin(50, d.chain(prompt[:6] + tokens.new(2)))
    assert d.m.reserve(50, 2)  # copies half of the first sequence's second block
    source = d.m.table(first)[1]
    d.m.release(first)
    assert source not in d.queue and source not in d.ref
    d.m.begin(51, d.chain([*prompt, 1]))
    assert d.m.reserve(51, 1) and d.m.table(51)[1] == source and d.ref[source] == 1
    d.m.check_invariants()
    d.m.release(51)
    d.m.check_invariants()
    d.m.take_copies()
    d.m.check_invariants()
    assert d.queue.count(source) == 1


def test_B063_what_can_never_fit_is_known_at_once(drive):
    m = PagedManager(num_blocks=50, block_size=16)
    assert (m.num_blocks_for(1002), m.num_usable) == (63, 49)


def test_B067_tables_are_fresh_and_null_padded(drive, tokens):
    d = drive(usable=120, block_size=4)
    first = d.start(tokens.new(54 * 4))
    (a,) = d.m.tables([first], 60)
    d.m.release(first)
    second = d.start(tokens.new(43 * 4))
    (b,) = d.m.tables([second], 60)
    assert b is not a and (b[0, 43:] == 0).all() and (b[0, :43] != 0).all()
    assert (a[0, :54] != 0).all()  # the earlier step's array was not written
    with pytest.raises(ValueError, match="width=3"):
        d.m.tables([second], 3)


def test_B069_a_hit_is_in_the_table_in_order_of_position(drive, tokens):
    d = drive(usable=7)
    shared = tokens.new(8)
    other = d.start(tokens.new(8))
    d.send(shared)
    d.m.release(other)
    seq = d.start(shared + tokens.new(4))
    assert d.hits[seq].num_tokens == 8
    assert d.m.table(seq)[:2] == [3, 4]


def test_B101_rehits_of_preempted_sequences_are_counted_apart(drive, tokens):
    d = drive()
    for _ in range(10):
        seq = d.start(tokens.new(13))
        d.m.release(seq)
        d.m.begin(seq, d.chains[seq], Hints(resumed=True))
        assert d.m.reserve(seq, 1)
        d.m.commit(seq, 13, 1.0)
        d.m.release(seq)
    assert d.m.stats.hit_rate == 0.0
    assert d.m.stats.resumed_hit_tokens == 10 * 12


def test_B104_counts_per_sequence_add_up(drive, tokens):
    d = drive(block_size=16)
    prompts = [tokens.new(n) for n in (5, 40, 33, 64)]
    hits = [d.send(p) for p in prompts + prompts]
    assert hits == [0, 0, 0, 0, 0, 32, 32, 48]
    assert d.m.stats.hit_tokens == sum(hits)
    assert d.m.stats.prompt_tokens == 2 * sum(map(len, prompts))


def test_stats_snapshot_and_delta(drive, tokens):
    d, prompt = drive(), tokens.new(9)
    d.send(prompt)
    before = d.m.stats.snapshot()
    d.send(prompt)
    change = d.m.stats.delta(before)
    assert (change.requests, change.hit_tokens, change.miss_reasons) == (1, 8, {"none": 1})
    assert before.hit_tokens == 0


def test_reset_makes_recorded_hits_stale(drive, tokens):
    d, prompt = drive(), tokens.new(9)
    d.send(prompt)
    d.m.begin(5, d.chain(prompt))
    assert d.m.reset("strict")
    assert not d.m.reserve(5, 1)
    assert d.m.begin(5, d.chain(prompt)).num_tokens == 0 and d.m.reserve(5, 9)
    d.m.check_invariants()


def test_B105_reset_says_what_it_did(drive, tokens):
    d, prompt = drive(), tokens.new(9)
    running = [d.start(prompt), d.start(tokens.new(9))]
    before = d.state()
    refused = d.m.reset("strict")
    assert not refused and refused.blocked_by == 2 and d.state() == before
    done = d.m.reset("preempt")
    assert done and list(done.preempted) == running and done.num_cleared == 4
    d.m.check_invariants()
    assert d.m.peek(d.chain(prompt)) == 0 and d.m.num_free == d.m.num_usable
    assert d.m.reset("strict")
    with pytest.raises(ValueError, match="strict or preempt"):
        d.m.reset("maybe")


def test_F013_an_indexed_block_is_copied_before_it_is_written(drive, tokens):
    """Held once and by its writer alone, but findable: what others find there must stay."""
    d, prompt = drive(), tokens.new(8)
    seq = d.start(prompt)
    d.m.truncate(seq, 6)
    old = d.m.table(seq)
    assert d.ref[old[1]] == 1 and not d.m.writable()[0][old[1]]
    assert d.m.reserve(seq, 2)
    new = d.m.table(seq)
    (batch,) = d.m.take_copies().batches
    assert (batch.kind, batch.src.tolist(), batch.dst.tolist()) == ("cow", [old[1]], [new[1]])
    assert new[0] == old[0] and new[1] != old[1] and d.m.writable()[0][new[1]]
    assert d.m.peek(d.chain([*prompt, 1])) == 8
    d.m.commit(seq, 8, 1.0)
    d.m.check_invariants()


def test_what_is_computed_again_after_a_truncation_is_indexed_again(drive, tokens):
    d, prompt = drive(), tokens.new(8)
    seq = d.start(prompt)
    d.m.truncate(seq, 4)
    assert d.m.evict(9) == 1 and d.m.peek(d.chain([*prompt, 1])) == 4
    assert d.m.reserve(seq, 4)
    d.m.commit(seq, 8, 1.0)
    assert d.m.peek(d.chain([*prompt, 1])) == 8
    d.m.check_invariants()


def test_B037_the_source_of_a_partial_hit_needs_room_too(drive, tokens):
    """Three evictable blocks: two hits and the source take them all, and the new block finds no room."""
    d, prompt = drive(usable=4, partial=1), tokens.new(12)
    d.send(prompt)
    keeper = d.start(tokens.new(3))
    before, chain = d.state(), d.chain([*prompt[:10], *tokens.new(2)])
    assert d.m.begin(70, chain).num_tokens == 10 and d.m.num_free == 3
    assert not d.m.reserve(70, 2)
    assert d.state()["groups"] == before["groups"]
    d.m.release(keeper)
    assert d.m.reserve(70, 2)
    d.m.check_invariants()
    assert (d.m.stats.partial_hits, d.m.stats.hit_tokens, d.m.stats.copies) == (1, 10, 1)


def test_of_twins_the_oldest_is_found():
    index, chain = HashIndex(8, 4), TokenChain(range(4), block_size=4)
    for block in (5, 2, 7):
        index.register(chain, 0, [block], 0, dedup=False)
    for block in (5, 2, 7):
        assert index.lookup(chain, 4) == ([block], 4) and index.copies(chain.digest(0)) > 0
        index.forget([block], [chain.digest(0)])
    assert index.copies(chain.digest(0)) == 0


def test_an_invariant_error_dumps_the_books(drive):
    d = drive(usable=3)
    d.m._groups[0].pool.ref[1] = 5
    with pytest.raises(InvariantError, match="block 1: is"):
        d.m.check_invariants()
