"""Cases found in this project's own code, by id: identity, victims and books of the cache."""

import math
import random
import sys
from types import SimpleNamespace

import pytest

from pagedjax.cache import (
    INDEXES,
    POLICIES,
    EventLog,
    Hints,
    Index,
    KVGroup,
    PagedManager,
    TokenChain,
    replay,
)
from pagedjax.cache.hash_index import HashIndex
from pagedjax.cache.hashing import CanonicalHash
from pagedjax.cache.policies import Belady, Retention
from pagedjax.cache.radix_index import RadixIndex
from pagedjax.cache.verified_index import VerifiedHashIndex

ZERO = CanonicalHash("zero", lambda data: bytes(32))  # every content has one name


class Driver:
    """Requests one after another; `hits` of each."""

    def __init__(self, manager, scheme=ZERO):
        self.m, self.scheme, self.seq = manager, scheme, 0

    def run(self, tokens, **extra):
        chain = TokenChain(tokens, block_size=self.m.block_size, hash=self.scheme, **extra)
        self.seq += 1
        hit = self.m.begin(self.seq, chain).num_tokens
        assert self.m.reserve(self.seq, len(chain) - hit)
        self.m.take_copies()
        self.m.commit(self.seq, len(chain), float(self.seq))
        self.m.check_invariants()
        self.m.release(self.seq)
        self.m.take_copies()
        self.m.check_invariants()
        return hit


class _OfItsOwn(HashIndex):
    """Somebody's index: what it does beside its parent nobody knows."""


VERIFY = {
    "a name": "hash",
    "another name": "radix",
    "a class": HashIndex,
    "the tree's class": RadixIndex,
    "the verifying class": VerifiedHashIndex,
    "a factory": lambda num_blocks, block_size: HashIndex(num_blocks, block_size),
    "registered": "mine",
    "imported": "pagedjax.cache.hash_index:HashIndex",
}


@pytest.mark.parametrize("name", VERIFY)
@pytest.mark.parametrize("groups", [1, 2])
def test_F002_verify_tokens_holds_for_whatever_names_the_index(monkeypatch, name, groups):
    monkeypatch.setitem(INDEXES, "mine", HashIndex)
    kinds = [KVGroup(), KVGroup(window=8)][:groups]
    manager = PagedManager(num_blocks=30, block_size=4, index=VERIFY[name], verify_tokens=True, groups=kinds)
    d = Driver(manager)
    assert d.run([1, 2, 3, 4, 5]) == 0
    assert d.run([9, 2, 3, 4, 5]) == 0  # another prompt under the same digest
    assert d.run([1, 2, 3, 4, 6]) == 4 and d.run([9, 2, 3, 4, 6]) == 4


@pytest.mark.parametrize("index", [_OfItsOwn, lambda n, size: _OfItsOwn(n, size), f"{__name__}:_OfItsOwn"])
def test_F002_an_index_that_cannot_verify_is_refused(monkeypatch, index):
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))
    with pytest.raises(ValueError, match=r"verify_tokens=true: index .*_OfItsOwn serves blocks on the word"):
        PagedManager(num_blocks=30, block_size=4, index=index, verify_tokens=True)
    PagedManager(num_blocks=30, block_size=4, index=index)
    PagedManager(num_blocks=30, block_size=4, index=index, verify_tokens=True, prefix_caching=False)


def test_F002_dedup_follows_from_the_index_not_from_its_name():
    for index in ("radix", RadixIndex, lambda n, size: RadixIndex(n, size)):
        assert PagedManager(num_blocks=9, block_size=4, index=index).dedup
        assert not PagedManager(num_blocks=9, block_size=4, index=index, dedup=False).dedup
    for index in ("hash", HashIndex, "table", VerifiedHashIndex):
        assert not PagedManager(num_blocks=9, block_size=4, index=index).dedup


def test_F002_an_index_that_says_nothing_of_its_nature_is_refused():
    class Silent:
        indexes = leaf_only = exclusive = False

    with pytest.raises(
        ValueError, match=r"does not say whether it is verifies.*derive from pagedjax.cache.Index"
    ):
        PagedManager(num_blocks=9, block_size=4, index=lambda n, size: Silent())
    assert not Index.verifies and Index().verifying() is None


@pytest.mark.parametrize("index", sorted(INDEXES))
def test_a_cancelled_copy_lets_its_source_go(index):
    """Else a tree's only leaf waits for a copy that never comes, and blocks counted as free are not."""
    m = PagedManager(num_blocks=6, block_size=4, index=index, partial=1)
    chain = TokenChain(range(12), block_size=4)
    m.begin(0, chain)
    assert m.reserve(0, 12)
    m.commit(0, 12, 1.0)
    m.release(0)
    m.begin(1, TokenChain([*range(10), 99, 98], block_size=4))
    assert m.reserve(1, 1)  # a copy of the third block is pending
    m.release(1)
    m.check_invariants()
    m.begin(2, TokenChain(range(50, 70), block_size=4))
    assert m.num_free == 5 and m.reserve(2, 20)
    m.check_invariants()


@pytest.mark.parametrize("index", ["hash", "radix", VerifiedHashIndex])
@pytest.mark.parametrize("groups", [1, 2])
def test_F001_the_host_does_not_trust_digests_where_the_device_compares_tokens(index, groups):
    log = EventLog()
    kinds = [KVGroup(), KVGroup()][:groups]
    m = PagedManager(
        num_blocks=4, block_size=4, host_blocks=4, verify_tokens=True, index=index, groups=kinds, events=log
    )
    d = Driver(m)
    hits = [d.run(tokens) for tokens in ([1, 2, 3, 4, 5], range(50, 61), range(91, 96))]
    assert hits == [0, 0, 0] and m.stats.swapped_out_blocks > 0
    assert replay(log.events) == m.resident()
    assert d.run([1, 2, 3, 4, 5]) == 4 and m.stats.host_hit_tokens == 4  # what is there is found
    assert d.run([1, 2, 3, 9, 5]) == 0
    assert m.reset("strict") and d.run([1, 2, 3, 4, 5]) == 0


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_F001_a_foreign_copy_on_the_device_does_not_keep_a_content_from_the_host(index):
    """What leaves is stored there although other contents of its digest stay."""
    m = PagedManager(num_blocks=5, block_size=4, host_blocks=8, verify_tokens=True, index=index)
    d = Driver(m)
    for start in (10, 20, 30, 40, 50, 60):
        assert d.run(range(start, start + 5)) == 0
    assert [d.run(range(start, start + 5)) for start in (10, 20, 60)] == [4, 4, 4]


@pytest.mark.parametrize("policy", ["fifo", "s3fifo", "cost"])
@pytest.mark.parametrize(("first", "second"), [(5, 3), (3, 5)])
def test_F003_the_older_leaf_goes_whatever_its_token(policy, first, second):
    m = PagedManager(num_blocks=16, block_size=1, index="radix", policy=policy)
    chains = [TokenChain(tokens, block_size=1) for tokens in ([1], [1, first], [1, second])]
    for seq, chain in enumerate(chains):
        hit = m.begin(seq, chain).num_tokens
        assert m.reserve(seq, len(chain) - hit)
        m.commit(seq, len(chain), float(seq))
    for seq in range(3):
        m.release(seq)
    assert m.evict(1) == 1
    left = [m.begin(9, TokenChain([*chain.tokens, 0], block_size=1)).num_tokens for chain in chains]
    assert left == [1, 1, 2]


def _leaves_by_full_scan(pool, count, now):
    """The judge: one at a time, the first leaf of the policy's whole order."""
    out = []
    for _ in range(count):
        order = pool.policy.victim(pool.num_evictable, now)
        leaf = next(b for b in order if not pool.index.leaf_only or pool.index.is_leaf(b))
        pool._recycle([leaf], evicted=True)
        out.append(leaf)
    return out


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"belady"}))
@pytest.mark.parametrize("index", sorted(INDEXES))
def test_F003_the_victim_is_the_policys_first_leaf(monkeypatch, index, policy):
    managers = [PagedManager(num_blocks=21, block_size=2, index=index, policy=policy) for _ in range(2)]
    monkeypatch.setattr(
        managers[1]._groups[0].pool,
        "evict",
        lambda n, now=0.0: _leaves_by_full_scan(managers[1]._groups[0].pool, n, now),
    )
    rng = random.Random(f"{index} {policy}")
    for seq in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 26))]
        held = []
        for m in managers:
            chain = TokenChain(tokens, block_size=2)
            hit = m.begin(seq, chain).num_tokens
            if m.reserve(seq, len(chain) - hit):
                m.commit(seq, len(chain), float(seq))
            held.append(m.table(seq))
            for other in (seq, seq - 1) if seq % 3 else (seq - 2,):
                m.release(other)
        assert held[0] == held[1], seq
    managers[0].check_invariants()
    assert managers[0].stats.evictions > 100 or index == "table"


def test_F005_what_is_dear_to_recompute_goes_tail_first(drive):
    d = drive(usable=5, block_size=1, policy="cost")  # a store of 4, and a block for the token after it
    chain = d.chain([1, 2, 3, 4, 5])
    d.m.begin(0, chain, Hints(cache_write=True))
    assert d.m.reserve(0, 4)
    d.m.commit(0, 4, 1.0)
    d.m.release(0)
    d.m.begin(1, d.chain([9, 5]))
    assert d.m.reserve(1, 2)
    d.m.commit(1, 1, 2.0)
    d.m.release(1)
    assert d.m.peek(chain) == 3


def test_F005_a_head_is_never_worth_less_than_its_tail():
    """Random requests on the flat index: whatever is evicted, nothing resident continues it."""
    rng = random.Random(5)
    m = PagedManager(num_blocks=25, block_size=1, policy="cost")
    pool = m._groups[0].pool
    parents = {}

    def on_evict(blocks, keys, tell=pool.on_evict):
        left = {key for b, key in enumerate(pool.keys) if key is not None and b not in blocks}
        assert all(parents[key] is None or parents[key] in left for key in left)
        tell(blocks, keys)

    pool.on_evict = on_evict
    live = []
    for seq in range(1500):
        chain = TokenChain([rng.randrange(3) for _ in range(rng.randrange(1, 12))], block_size=1)
        digests = chain.digests(len(chain))
        parents |= dict(zip(digests, [None, *digests[:-1]]))
        hit = m.begin(seq, chain).num_tokens
        if m.reserve(seq, len(chain) - hit):
            m.commit(seq, len(chain), float(seq))
            live.append(seq)
        while len(live) > rng.randrange(3):
            m.release(live.pop(rng.randrange(len(live))))
    m.check_invariants()
    assert m.stats.evictions > 1000


def test_F006_what_has_expired_goes_by_its_last_release():
    policy = Retention(8)
    policy.insert([1], [b"a"], 0, Hints(priority=1, ttl_s=2.0), 0.0)
    policy.release([1], 0.0)
    policy.insert([2], [b"b"], 0, Hints(), 1.0)
    policy.release([2], 1.0)
    assert policy.victim(2, 1.5) == [2, 1]
    assert policy.victim(2, 5.0) == [1, 2]


def test_F007_a_use_that_passed_without_a_hit_is_no_next_use():
    """Full scan and policy agree on random sequences."""
    rng = random.Random(7)
    keys = {b: b"%d" % b for b in range(1, 20)}
    for _ in range(40):
        future = {k: sorted(rng.sample(range(60), rng.randrange(0, 6))) for k in keys.values()}
        policy, released, arrivals, used = Belady(20, future), {}, 0, set()
        policy.insert(list(keys), list(keys.values()), 0, Hints(), 0.0)
        used.update(keys)
        passed = 0
        for now in range(60):
            for b in rng.sample(sorted(used), min(len(used), rng.randrange(4))):
                used.discard(b)
                arrivals += 1
                released[b] = arrivals
                policy.release([b], float(now))
            if released and rng.random() < 0.3:
                b = rng.choice(sorted(released))
                policy.hit([b], [b], 0, Hints(), float(now))
                del released[b]
                used.add(b)

            def following(b, now=now, future=future):
                return next((t for t in future[keys[b]] if t > now), math.inf)

            passed += sum(now in future[keys[b]] for b in released)
            expected = sorted(released, key=lambda b: (-following(b), released[b]))
            assert policy.victim(len(released), float(now)) == expected, now
        assert passed > 0


@pytest.mark.parametrize("dedup", [False, True, None])
@pytest.mark.parametrize("index", sorted(INDEXES.keys() - {"table"}))
def test_F008_what_follows_a_recomputed_tail_is_found(drive, index, dedup):
    """B016: the last block of a prompt sent twice is computed again; what is generated behind it hits."""
    d = drive(index=index, dedup=dedup)
    d.send([1, 2, 3, 4, 5, 6, 7, 8])
    seq = d.start([1, 2, 3, 4, 5, 6, 7, 8])
    assert d.hits[seq].num_tokens == 4
    assert d.grow(seq, [9, 10, 11, 12, 13])
    third = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20]
    assert d.m.peek(d.chain(third)) == 12
    d.m.release(seq)
    d.m.check_invariants()
    assert d.send(third) == 12


def test_F008_the_first_copy_is_held_as_long_as_something_is_registered_behind_it(drive):
    d = drive(usable=8, index="radix", dedup=False)
    d.send(range(8))
    seq = d.start(range(8))
    assert d.grow(seq, [9, 10, 11, 12])  # 3 blocks of its own, the second a twin, and the first copy of that
    child = 77
    d.m.fork(seq, child, d.chains[seq].fork())
    d.m.release(seq)
    d.m.check_invariants()
    assert d.m.num_free == 8 - 4 and d.m.evict(9) == 0
    d.m.truncate(child, 6)
    d.m.check_invariants()
    assert d.m.num_free == 8 - 2  # the twin and the first block stay
    d.m.release(child)
    assert d.m.num_free == 8 and d.m.reset("strict")


def test_F011_nothing_is_hit_in_an_empty_cache():
    for groups in ([KVGroup(window=1)], [KVGroup(window=1), KVGroup(window=1)]):
        m = PagedManager(num_blocks=20, block_size=4, groups=groups)
        d = Driver(m, "sha256")
        assert d.run(range(17)) == 0 and m.stats.hit_tokens == 0
        assert d.run(range(17)) == 16  # the second finds what the first left


def test_F012_who_opted_out_is_counted_apart(drive):
    d = drive()
    prompt = list(range(9))
    d.send(prompt)
    before = d.m.stats.snapshot()
    d.send(prompt)
    rate = d.m.stats.delta(before).hit_rate
    d.send(prompt, hints=Hints(cache_read=False))
    stats = d.m.stats.delta(before)
    assert stats.hit_rate == rate == 8 / 9
    assert (stats.requests, stats.prompt_tokens, stats.opted_out_requests, stats.opted_out_tokens) == (
        1,
        9,
        1,
        9,
    )
    assert stats.miss_reasons == {"last_token": 1, "opted_out": 1} or sum(stats.miss_reasons.values()) == 2


@pytest.mark.parametrize("index", ["hash", "radix", VerifiedHashIndex])
def test_F013_an_indexed_block_is_not_written_after_truncate(drive, index):
    d = drive(index=index)
    seq = d.start(range(9))
    second = d.m.table(seq)[1]
    d.m.truncate(seq, 6)  # within the second block, which is indexed and held once
    d.m.check_invariants()
    del d.chains[seq].tokens[6:]  # as a chain of its own would be
    d.chains[seq] = d.chain([*range(6), 50, 51])
    d.m._seqs[seq].chain = d.chains[seq]
    assert d.m.reserve(seq, 2)
    assert d.m.table(seq)[1] != second and d.m.take_copies().num_copies == 1
    d.m.commit(seq, 8, 9.0)
    d.m.check_invariants()
    d.m.release(seq)
    assert d.m.peek(d.chain([*range(8), 9])) == 8 and d.m.peek(d.chain([*range(6), 50, 51, 9])) == 8


def test_of_twins_that_leave_together_one_goes_to_the_host():
    m = PagedManager(num_blocks=6, block_size=4, host_blocks=4)
    for seq in (0, 1):  # neither can see the other
        m.begin(seq, TokenChain(range(5), block_size=4))
        assert m.reserve(seq, 5)
    for seq in (0, 1):
        m.commit(seq, 5, 1.0)
        m.release(seq)
    d = Driver(m, "sha256")
    assert d.run(range(50, 70)) == 0  # evicts both in one go
    assert m.stats.swapped_out_blocks == 1 and d.run(range(5)) == 4
