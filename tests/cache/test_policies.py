"""What is particular to each eviction policy; the suite over all of them is in test_suites.py."""

import itertools
import math
import random

import numpy as np
import pytest

from pagedjax.cache import POLICIES, Hints
from pagedjax.cache.eviction import LRU
from pagedjax.cache.policies import (
    GDSF,
    LIRS,
    Belady,
    CostAware,
    GDSFKept,
    Retention,
    ReuseCredit,
    WorkloadAware,
    make_policy,
)
from pagedjax.cache.policies.adaptive import RecentCounts
from pagedjax.sim.replay import PolicyStore

NAMES = sorted(POLICIES)
PLAIN = Hints()


def _make(name, n=16):
    return Belady(n, {}) if name == "belady" else make_policy(name, n)


def _put(policy, blocks, first=0, hints=PLAIN, now=0.0):
    policy.insert(blocks, [b"key%d" % b for b in blocks], first, hints, now)


@pytest.mark.parametrize("name", NAMES)
def test_of_equals_the_tail_of_a_sequence_goes_first(name):
    policy = _make(name)
    _put(policy, [1, 2, 3])
    policy.release([3, 2, 1], 1.0)
    assert policy.victim(3, 1.0) == [3, 2, 1]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "belady"])
def test_every_policy_drives_a_manager(drive, name):
    d, rng = drive(usable=12, policy=name), random.Random(name)
    stems = [[rng.randrange(99) for _ in range(12)] for _ in range(4)]
    hits = sum(d.send([*rng.choice(stems), rng.randrange(99)]) for _ in range(150))
    assert hits > 0 and d.m.stats.evictions > 0


def _three(policy):
    for b in (1, 2, 3):
        _put(policy, [b], now=float(b))
    policy.release([1, 2, 3], 4.0)


def test_lru_goes_by_release_and_fifo_by_arrival():
    for name, order in (("lru", [2, 3, 1]), ("fifo", [1, 2, 3])):
        policy = _make(name)
        _three(policy)
        policy.hit([1], [1], 0, PLAIN, 5.0)
        policy.release([1], 6.0)
        assert policy.victim(3, 7.0) == order


def test_lru_links_agree_both_ways_whatever_leaves_its_queue():
    """Runs that were released together, single blocks, and blocks from anywhere in the queue."""
    rng, policy, queue, out = random.Random(5), LRU(25), [], set(range(1, 25))
    for _ in range(500):
        if out and rng.random() < 0.5:
            blocks = rng.sample(sorted(out), rng.randrange(1, len(out) + 1))
            policy.release(blocks, 0.0)
            queue += blocks
        elif queue:
            at, count = rng.randrange(len(queue)), rng.randrange(1, 6)
            blocks = rng.choice([queue[at : at + count][::-1], rng.sample(queue, min(count, len(queue)))])
            policy.hit(blocks, blocks)
            queue = [b for b in queue if b not in blocks]
        out = set(range(1, 25)) - set(queue)
        assert policy.evictable() == queue
        assert all(policy._prev[b] == a for a, b in itertools.pairwise([0, *queue, 0]))


def test_lfu_counts_hits_of_blocks_in_use_too():
    policy = _make("lfu")
    for b in (1, 2, 3):
        _put(policy, [b])
    policy.hit([1], [], 0, PLAIN, 1.0)
    policy.release([1, 2, 3], 2.0)
    assert policy.victim(3, 2.0) == [2, 3, 1]


def test_slru_protects_what_was_hit_up_to_its_share():
    policy = make_policy(lambda n: __import__("pagedjax.cache.policies", fromlist=["SLRU"]).SLRU(n, 0.1), 21)
    for b in (1, 2, 3, 4):
        _put(policy, [b])
    policy.release([1, 2, 3, 4], 0.0)
    for b in (1, 2, 3):  # two places are protected: the first one hit falls back
        policy.hit([b], [b], 0, PLAIN, 1.0)
        policy.release([b], 2.0)
    assert policy.victim(4, 3.0) == [4, 1, 2, 3]


def test_s3fifo_lets_one_hit_wonders_go_and_remembers_ghosts():
    policy = _make("s3fifo", 11)
    for b in (1, 2, 3):
        _put(policy, [b])
    policy.release([1, 2, 3], 0.0)
    for _ in range(2):
        policy.hit([1], [1], 0, PLAIN, 0.0)
        policy.release([1], 0.0)
    assert policy.victim(2, 0.0) == [2, 3]  # 1 was hit twice: it moves to the main queue
    policy.remove([2])
    _put(policy, [2])  # the ghost remembers it: straight to the main queue
    policy.release([2], 0.0)
    _put(policy, [4])
    policy.release([4], 0.0)
    assert policy.victim(4, 0.0)[:2] == [3, 4]


def test_s3fifo_counts_no_more_than_three_hits():
    """So that what was hit often once goes round the main queue no more often than what was hit three times."""
    policy = _make("s3fifo", 11)
    _put(policy, [2, 1])
    policy.release([1, 2], 0.0)
    policy.remove(policy.victim(2, 0.0))
    _put(policy, [2, 1])  # the ghost remembers them: the main queue, 1 before 2
    for block, hits in ((1, 9), (2, 3)):
        for _ in range(hits):
            policy.hit([block], [], 0, PLAIN, 0.0)
    policy.release([1, 2], 0.0)
    assert policy.victim(2, 0.0) == [1, 2]


def test_cost_aware_keeps_what_is_dear_until_it_ages():
    policy = CostAware(16, base_s=1.0, per_block_s=1.0)
    _put(policy, [1], first=0)
    _put(policy, [2], first=9)
    policy.release([1, 2], 0.0)
    assert policy.victim(2, 0.0) == [1, 2]
    for _ in range(20):  # each eviction raises the age: in the end the dear one is the cheapest
        policy.remove([policy.victim(1, 0.0)[0]])
        _put(policy, [1], first=0)
        policy.release([1], 0.0)
        if 2 not in policy.evictable():
            break
    assert 2 not in policy.evictable()


def test_cost_aware_worth_is_the_age_and_uses_times_cost():
    policy = CostAware(16, base_s=1.0, per_block_s=1.0)
    for block, position in ((1, 9), (2, 3), (3, 0), (5, 11)):
        _put(policy, [block], first=position)
    policy.release([1, 2, 3, 5], 0.0)
    policy.remove([1])  # the age is 10
    policy.remove([3])  # cheaper, as a leaf below a victim may be: the age stays
    _put(policy, [3], first=0)  # 10 + 1 * 1
    _put(policy, [4], first=6)  # 10 + 1 * 7
    policy.hit([2], [2], 3, PLAIN, 0.0)  # 10 + 2 * 4
    policy.release([2, 3, 4], 0.0)
    assert policy.victim(4, 0.0) == [3, 5, 4, 2]  # worth 11, 12, 17, 18


def test_retention_by_priority_until_it_expires():
    policy = Retention(16)
    _put(policy, [1], hints=Hints(priority=5, ttl_s=10.0), now=0.0)
    _put(policy, [2])
    _put(policy, [3], hints=Hints(priority=1))
    policy.release([1, 2, 3], 1.0)
    assert policy.victim(3, 1.0) == [2, 3, 1]
    assert policy.victim(3, 10.0) == [1, 2, 3]  # 1 counts as priority 0 now, and was released before 2


def test_retention_below_0_goes_first_until_something_higher_hits_it_or_it_expires():
    policy = Retention(16)
    for block, hints in ((1, PLAIN), (2, Hints(priority=-1)), (3, Hints(priority=-5, ttl_s=9.0)), (4, PLAIN)):
        _put(policy, [block], hints=hints)
    policy.release([1, 2, 3, 4], 1.0)
    assert policy.victim(4, 2.0) == [3, 2, 1, 4]
    policy.hit([1], [1], 0, Hints(priority=-3), 3.0)  # what is common stays so
    policy.hit([2], [2], 0, PLAIN, 3.0)
    policy.release([1, 2], 4.0)
    assert policy.victim(4, 5.0) == [3, 4, 1, 2]
    policy.hit([3], [3], 0, Hints(priority=-9), 6.0)
    policy.release([3], 6.0)
    assert policy.victim(4, 7.0) == [3, 4, 1, 2]
    assert policy.victim(4, 9.0) == [4, 1, 2, 3]
    policy.remove([3])
    _put(policy, [3])
    policy.release([3], 10.0)
    assert policy.victim(4, 11.0) == [4, 1, 2, 3]


def test_retention_budget():
    policy = Retention(11, pin_budget=0.2)
    for b in (1, 2, 3):
        _put(policy, [b], hints=Hints(priority=1))
    policy.release([1, 2, 3], 1.0)
    assert policy.victim(3, 1.0) == [3, 1, 2]  # two of ten blocks may be held up; the third came too late
    _put(policy, [4], hints=Hints(priority=-1))
    policy.release([4], 2.0)
    assert policy.victim(4, 2.0) == [4, 3, 1, 2]
    policy.hit([4], [4], 0, Hints(priority=7), 3.0)
    policy.release([4], 3.0)
    assert policy.victim(4, 3.0) == [3, 4, 1, 2]  # it is common now, as whatever comes too late


def test_belady_evicts_the_farthest_next_use():
    policy = Belady(8, {b"key1": [1.0, 9.0], b"key2": [2.0, 5.0]})
    for b in (1, 2, 3):
        _put(policy, [b])
    policy.release([1, 2, 3], 3.0)
    assert policy.victim(3, 3.0) == [3, 1, 2]


def test_belady_needs_to_know_the_future():
    with pytest.raises(ValueError, match="policy=belady: has to know the future"):
        make_policy("belady", 8)
    with pytest.raises(ValueError, match="policy=mru: must be one of lru"):
        make_policy("mru", 8)


def test_belady_is_not_beaten_on_single_blocks(drive):
    """One-block prompts: the setting in which it is optimal."""
    rng = random.Random(3)
    asked = [rng.choice([rng.randrange(4), rng.randrange(30)]) for _ in range(600)]
    chains = {}
    hits = {}
    for name in NAMES:
        d = drive(usable=8)
        future = {}
        for now, x in enumerate(asked):
            chains[x] = d.chain([x] * 4 + [99])
            future.setdefault(chains[x].digest(0), []).append(float(now))
        d = drive(usable=8, policy=(lambda n, f=future: Belady(n, f)) if name == "belady" else name)
        hits[name] = sum(
            d.send(chains[x].tokens, now=float(now), hints=Hints()) for now, x in enumerate(asked)
        )
    assert max(hits, key=hits.get) == "belady" and hits["belady"] > hits["fifo"] > 0


# Hit tokens of the trace below. A policy's figures change with its rule, and then only: write the new one down with
# the change that makes it. A new policy gets a row.
FROZEN = {
    "2q": 2540,
    "arc": 2804,
    "belady": 4076,
    "cost": 2560,
    "fifo": 1928,
    "gdsf": 2464,
    "gdsf-kept": 2900,
    "lecar": 2392,
    "length-aware": 1804,
    "lfu": 2744,
    "lirs": 2044,
    "lru": 2148,
    "lru-2": 3192,
    "retention": 2376,
    "reuse-credit": 3100,
    "s3fifo": 2880,
    "sieve": 2936,
    "slru": 3144,
    "w-tinylfu": 2624,
    "workload-aware": 2140,
}


def _trace():
    """(prompt, hints): stems asked all the time, conversations that go on, and scans that are asked once; seeded."""
    rng = random.Random(2026)
    stems = [[rng.randrange(1000) for _ in range(rng.randrange(4, 25))] for _ in range(12)]
    for number in range(400):
        kind = rng.random()
        if kind < 0.6:  # a stem, the first ones more often, as far as it was told
            stem = stems[at := int(rng.random() ** 2 * len(stems))]
            group = Hints(group="often" if at < 2 else "seldom")
            yield [*stem[: rng.randrange(2, len(stem) + 1)], number], group
        elif kind < 0.85:  # the next turn of a conversation
            stem = rng.choice(stems)
            stem += [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
            del stem[40:]
            yield [*stem, number], Hints(priority=1, ttl_s=60.0, group="chat")
        else:
            yield [rng.randrange(1000, 2000) for _ in range(rng.randrange(8, 40))], Hints(group="scan")


@pytest.mark.parametrize("name", NAMES)
def test_hit_tokens_of_one_trace_are_frozen(drive, name):
    future = {}
    for now, (prompt, _) in enumerate(_trace()):
        chain = drive().chain(prompt)
        for digest in chain.digests(chain.num_full_blocks):
            future.setdefault(digest, []).append(float(now))
    d = drive(usable=40, policy=(lambda n: Belady(n, future)) if name == "belady" else name)
    for now, (prompt, hints) in enumerate(_trace()):
        d.send(prompt, now=float(now), hints=hints)
    assert d.m.stats.evictions > 900
    assert d.m.stats.hit_tokens == FROZEN[name]


# --- textbooks: what the papers write down, for single blocks, a step at a time


def _sieve(asked, size):
    queue, visited, hand, hits = [], {}, 0, 0  # old to young
    for x in asked:
        if x in visited:
            visited[x] = True
            hits += 1
            continue
        if len(queue) == size:
            while visited[queue[hand % size]]:
                visited[queue[hand % size]] = False
                hand = hand % size + 1
            hand %= size
            del visited[queue.pop(hand)]
            if hand == len(queue):
                hand = 0  # what stands behind the young end is the old one, not who comes next
        queue.append(x)
        visited[x] = False
    return hits


def _two_q(asked, size):
    new, out, main, hits = [], [], [], 0
    for x in asked:
        if x in main:
            main.remove(x)
            main.append(x)
            hits += 1
        elif x in new:
            hits += 1
        else:
            if len(new) + len(main) == size:
                if len(new) > max(1, int(0.25 * (size + 1))):
                    out.append(new.pop(0))
                    del out[: -max(1, int(0.5 * (size + 1)))]
                else:
                    main.pop(0)
            if x in out:  # asked after room was made, as a manager has to
                out.remove(x)
                main.append(x)
            else:
                new.append(x)
    return hits


def _lru_2(asked, size):
    uses, hits = {}, 0
    for now, x in enumerate(asked, 1):
        if x in uses:
            hits += 1
            uses[x] = (uses[x][1], now)
            continue
        if len(uses) == size:
            del uses[min(uses, key=uses.get)]
        uses[x] = (0, now)
    return hits


def _gdsf(asked, size, kept=False):
    worth, count, arrival, age, hits = {}, {}, {}, 0.0, 0
    for now, x in enumerate(asked):
        if x in worth:
            hits += 1
            count[x] += 1
        else:
            if len(worth) == size:
                victim = min(worth, key=lambda y: (worth[y], arrival[y]))
                age = max(age, worth.pop(victim))
            count[x] = count[x] + 1 if kept and x in count else 1
        worth[x] = age + count[x]
        arrival[x] = now
    return hits


def _lirs(asked, size):
    """With the stack itself, and its pruning; five of the 21 blocks of a pool for what is not low."""
    stack, low, queue, hits = [], set(), [], 0
    for x in asked:
        hits += x in low or x in queue
        if x not in low and x not in queue and len(low) + len(queue) == size:
            if queue:
                queue.pop(0)
            else:
                low.discard(stack[0])
        while stack and stack[0] not in low:
            stack.pop(0)
        becomes_low = x in low or len(low) < 16 or x in stack
        if x in queue:
            queue.remove(x)
        if x in stack:
            stack.remove(x)
        stack.append(x)
        (low.add if becomes_low else queue.append)(x)
        if len(low) > 16:
            low.discard(stack[0])
            queue.append(stack.pop(0))
        while stack[0] not in low:
            stack.pop(0)
    return hits


TEXTBOOKS = {
    "sieve": ("sieve", _sieve),
    "2q": ("2q", _two_q),
    "lru-2": ("lru-2", _lru_2),
    "gdsf": ("gdsf", _gdsf),
    "gdsf-kept": ("gdsf-kept", lambda asked, size: _gdsf(asked, size, kept=True)),
    "lirs": (lambda num_blocks: LIRS(num_blocks, passing=0.25), _lirs),
}


@pytest.mark.parametrize("name", TEXTBOOKS)
def test_single_blocks_as_in_the_textbook(name):
    """A store of 20 among 60 contents, some asked for often, some in bursts; every request one block."""
    rng = random.Random(f"textbook {name}")
    policy, textbook = TEXTBOOKS[name]
    for _ in range(4):
        asked = []
        while len(asked) < 1500:
            x = int(60 * rng.random() ** 2)
            asked += [x] * rng.choice((1, 1, 1, 2))
        store = PolicyStore(20, policy)
        hits = 0
        for x in asked:
            hits += store.hits(np.array([x]))
            store.touch(np.array([x]))
        assert hits == textbook(asked, 20)


def test_arc_gives_the_queue_more_that_was_too_short():
    policy = make_policy("arc", 9)
    _put(policy, [1, 2, 3, 4, 5, 6, 7, 8])
    policy.release([8, 7, 6, 5, 4, 3, 2, 1], 0.0)
    policy.hit([1, 2, 3, 4], [1, 2, 3, 4], 0, PLAIN, 1.0)
    policy.release([4, 3, 2, 1], 1.0)
    assert policy.victim(8, 2.0) == [8, 7, 6, 5, 4, 3, 2, 1]  # no share for what was used once
    policy.remove([8, 7])
    policy.insert([7, 8], [b"key8", b"key7"], 0, PLAIN, 3.0)  # both come back: it should hold two
    policy.release([8, 7], 3.0)
    assert policy.victim(3, 4.0) == [4, 3, 2] and policy.victim(8, 4.0)[-2:] == [6, 5]


def test_lecar_turns_from_the_expert_that_was_wrong():
    policy = make_policy("lecar", 21)
    blocks = list(range(1, 21))
    _put(policy, blocks)
    policy.release(blocks, 0.0)
    policy.hit(blocks[:10], blocks[:10], 0, PLAIN, 1.0)
    policy.release(blocks[:10], 1.0)
    before = policy._lru_weight
    for _ in range(40):  # what LFU alone lets go comes back at once, what LRU lets go never does
        (b,) = policy.victim(1, 2.0)
        ((_, expert),) = [next(policy._sweep())]
        key = policy._keys[b]
        policy.remove([b])
        policy.insert([b], [key if expert == "lfu" else b"new%d" % policy._evictions], 0, PLAIN, 2.0)
        policy.release([b], 2.0)
    assert policy._lru_weight > before + 0.2


def test_tinylfu_lets_nothing_in_that_is_asked_for_less_often():
    policy = make_policy("w-tinylfu", 11)
    _put(policy, [1, 2, 3])
    policy.release([1, 2, 3], 0.0)
    for _ in range(3):
        policy.hit([3], [3], 0, PLAIN, 0.0)
        policy.release([3], 0.0)
    assert policy.victim(3, 0.0) == [1, 2, 3]  # the window is of one block; 3 pushes 1 out
    policy.remove([1])
    _put(policy, [4])
    policy.release([4], 0.0)
    policy.hit([2], [2], 0, PLAIN, 0.0)
    policy.release([2], 0.0)
    assert policy.victim(3, 0.0) == [4, 3, 2]  # new, and asked for less often than 3: it does not enter
    for _ in range(3):
        policy.hit([4], [4], 0, PLAIN, 0.0)
        policy.release([4], 0.0)
    assert policy.victim(3, 0.0) == [3, 4, 2]


def test_length_aware_gives_up_ends_before_heads():
    policy = make_policy("length-aware", 11)
    _put(policy, [1, 2, 3])
    _put(policy, [4, 5])
    policy.release([3, 2, 1], 0.0)
    policy.release([5, 4], 0.0)
    for _ in range(3):
        policy.hit([1, 2, 3], [1, 2, 3], 0, PLAIN, 1.0)
        policy.release([3, 2, 1], 1.0)
    assert policy.victim(5, 2.0) == [3, 5, 2, 4, 1]


def test_recent_counts_fade():
    recent = RecentCounts(10)
    for _ in range(9):
        recent.add(b"a")
    for number in range(90):
        recent.add(b"%d" % number)
    assert recent[b"a"] == 9 and recent[b"5"] == 1
    recent.add(b"a")  # the hundredth: all are halved
    assert recent[b"a"] == 5 and recent[b"5"] == 0 and len(recent._counts) == 1


def _turns(seed):
    """Requests as rows of keys: conversations whose last block is written anew by the next turn, long and short."""
    rng, fresh, open_ = random.Random(seed), itertools.count(1), []
    for _ in range(400):
        if open_ and rng.random() < 0.6:
            row = open_[int(rng.random() ** 2 * len(open_))]
        else:
            row = [] if rng.random() < 0.5 else [0]
            open_.insert(0, row)
            del open_[25:]
        row += [next(fresh) for _ in range(rng.choice((1, 2, 8)))]
        del row[30:]
        yield [*row, next(fresh)]


def _reuse_credit(rows, capacity, fade):
    """Hit blocks a request, scores from the whole history of outcomes; the pool has a block more than the store."""
    pool, outcomes, inserted, epoch, since, arrivals = capacity + 1, [], 0, 0, 0, 0
    held, ghost = {}, {}  # key -> (score, arrival, uses, class); key -> (uses, class)

    def end(classes, returned):
        nonlocal epoch, since
        for c in classes:
            outcomes.append((epoch, c, returned))
            since += 1
            if since >= fade * pool:
                epoch, since = epoch + 1, 0

    def credit(kind):
        ended = returned = own_ended = own_returned = 0.0
        for at, c, came in outcomes:
            weight = 0.5 ** (epoch - at)
            ended, returned = ended + weight, returned + weight * came
            own_ended, own_returned = (
                own_ended + weight * (c == kind),
                own_returned + weight * came * (c == kind),
            )
        share = (returned + 1) / (ended + 1)
        return math.log2((own_returned + 20 * share) / (own_ended + 20) / share)

    for row in rows:
        hit = next((i for i, key in enumerate(row) if key not in held), len(row))
        assert not any(key in held for key in row[hit:]), "a head went before its tail"
        yield hit
        end([held[key][3] for key in row[:hit]], returned=True)
        uses = {key: held.pop(key)[2] + 1 for key in row[:hit]}
        while len(held) + len(row) > capacity:
            victim = min(held, key=held.get)
            ghost[victim] = held.pop(victim)[2:]
        forgotten = list(ghost)[: max(len(ghost) - 2 * pool, 0)]
        end([ghost.pop(key)[1] for key in forgotten], returned=False)
        inserted += len(row) - hit
        end([ghost[key][1] for key in row[hit:] if key in ghost], returned=True)
        uses |= {key: ghost.pop(key, (0, 0))[0] + 1 for key in row[hit:]}
        for key in reversed(row):
            kind = 2 * len(bin(len(row))[2:]) + (key == row[-1])
            arrivals += 1
            score = inserted + pool * credit(kind) + pool * math.log2(uses[key])
            held[key] = score, arrivals, uses[key], kind


def test_reuse_credit_is_what_it_says():
    """Against a judge that keeps every outcome and sorts: the same hits in every request."""
    for seed in range(2):
        rows = list(_turns(seed))
        store = PolicyStore(60, lambda num_blocks: ReuseCredit(num_blocks, fade=3.0))
        ours = []
        for row in rows:
            ours.append(store.hits(np.array(row)))
            store.touch(np.array(row))
        assert ours == list(_reuse_credit(rows, 60, 3.0))


@pytest.mark.parametrize(
    ("less", "same"),
    [(lambda n: ReuseCredit(n, credit=0.0), LRU), (lambda n: GDSFKept(n, remembered=0.0), GDSF)],
)
def test_what_is_taken_away_leaves_the_textbook(less, same):
    rows = list(_turns(7))
    ours, theirs = PolicyStore(60, less), PolicyStore(60, same)
    for row in rows:
        keys = np.array(row)
        assert ours.hits(keys) == theirs.hits(keys)
        ours.touch(keys)
        theirs.touch(keys)


def test_reuse_credit_learns_which_ends_do_not_come_back():
    policy = ReuseCredit(41)
    for turn in range(60):  # requests of three blocks, whose last one is new in every turn
        policy.insert([1, 2, 3], [b"a", b"b", b"end%d" % turn], 0, PLAIN, 0.0)
        policy.release([3, 2, 1], 0.0)
        policy.remove([3, 2, 1])
    policy.insert([1, 2, 3], [b"a", b"b", b"new"], 0, PLAIN, 0.0)
    policy.insert([4], [b"other"], 1, PLAIN, 0.0)
    policy.release([4], 0.0)
    policy.release([3, 2, 1], 0.0)
    assert policy.victim(4, 0.0)[:2] == [4, 3]


def _workload_aware(rows, capacity, fade):
    """Hit blocks a request (category, keys), by every interval since the start and every block's probability."""
    pool, intervals, epoch, since, arrivals = capacity + 1, [], 0, 0, 0
    held, ghost = (
        {},
        {},
    )  # key -> (last use, minus the position, arrival, category); key -> (last use, category)

    def again(category, interval):
        nonlocal epoch, since
        intervals.append((epoch, category, interval))
        since += 1
        if since >= fade * pool:
            epoch, since = epoch + 1, 0

    def mean(*categories):
        own = [(0.5 ** (epoch - at), length) for at, c, length in intervals if c in categories]
        return sum(w * length for w, length in own), sum(w for w, _ in own)

    def probability(key, now):
        total, number = mean("a", "b", "c")
        of_all = total / number if number else 1.0
        own_total, own_number = mean(held[key][3])
        m = (own_total + 20 * of_all) / (own_number + 20)
        # F(t + life) - F(t), as logarithms: far in the tail both are 1 to the last digit
        return math.log(1 - math.exp(-of_all / m)) - (now - held[key][0]) / m

    for now, (category, row) in enumerate(rows):
        hit = next((i for i, key in enumerate(row) if key not in held), len(row))
        yield hit
        for key in row[:hit]:
            last, *_, before = held.pop(key)
            again(before, now - last)
        surplus = len(held) + len(row) - capacity
        if surplus > 0:
            for victim in sorted(held, key=lambda k: (probability(k, now), *held[k][1:3]))[:surplus]:
                last, *_, before = held.pop(victim)
                ghost[victim] = last, before
        for key in list(ghost)[: max(len(ghost) - 2 * pool, 0)]:
            del ghost[key]
        for key in row[hit:]:
            if key in ghost:
                last, before = ghost.pop(key)
                again(before, now - last)
        for place, key in reversed(list(enumerate(row))):
            arrivals += 1
            held[key] = now, -place, arrivals, category


def test_workload_aware_is_what_it_says():
    """Categories that come back after 3, 30 and 100 requests, against a judge that keeps every interval and sorts."""
    found = []
    for seed in range(2):
        rng, rows, due = random.Random(seed), [], {}
        for now in range(400):
            category, back = rng.choice((("a", 3), ("b", 30), ("c", 100)))
            row = due.pop(now, None)
            if row is None:
                row = category, [(seed, now, i) for i in range(rng.randrange(1, 6))]
                back += rng.randrange(3)
            else:
                back = {"a": 3, "b": 30, "c": 100}[row[0]] + rng.randrange(3)
            due[now + back] = row
            rows.append(row)
        names = {key: n for n, key in enumerate({key: 0 for _, row in rows for key in row})}
        rows = [(category, [names[key] for key in row]) for category, row in rows]
        store = PolicyStore(60, lambda num_blocks: WorkloadAware(num_blocks, fade=3.0))
        plain, ours, lru = PolicyStore(60, "workload-aware"), [], PolicyStore(60, "lru")
        for category, row in rows:
            keys = np.array(row)
            ours.append(store.hits(keys))
            store.next_group(category)
            store.touch(keys)
            assert plain.hits(keys) == lru.hits(keys), "one category"
            plain.touch(keys)
            lru.touch(keys)
        assert ours == list(_workload_aware(rows, 60, 3.0))
        found.append(sum(ours))
    assert min(found) > 100


def test_workload_aware_keeps_the_older_block_of_a_category_that_comes_back_later():
    """And a block is of the category that used it last: its last release counts, and its next use is that one's."""
    policy = WorkloadAware(11)
    soon, late = Hints(group="soon"), Hints(group="late")
    _put(policy, [1], hints=soon)
    _put(policy, [2], hints=late)
    policy.release([1, 2], 0.0)
    for now in range(1, 301):
        policy.hit([1], [1], 0, soon, float(now))
        policy.release([1], float(now))
        if now % 100 == 0:
            policy.hit([2], [2], 0, late, float(now))
            policy.release([2], float(now))
    policy.hit([1], [1], 0, soon, 310.0)
    policy.release([1], 310.0)
    assert policy.victim(2, 311.0) == [2, 1]
    assert policy.victim(2, 340.0) == [1, 2], "2 has not been used for longer, and is awaited still"
    policy.hit([1], [1], 0, late, 340.0)
    _put(policy, [3], hints=soon)
    policy.release([3, 1], 340.0)
    assert policy.victim(3, 370.0) == [3, 2, 1]


def test_workload_aware_breaks_ties_by_position_whatever_the_request():
    for groups in (("a", "a"), ("a", "b")):  # nothing is known of either, so both are as likely to come back
        policy = WorkloadAware(11)
        _put(policy, [1, 2], hints=Hints(group=groups[0]))
        _put(policy, [3, 4, 5], hints=Hints(group=groups[1]))
        policy.release([2, 1], 0.0)
        policy.release([5, 4, 3], 0.0)
        assert policy.victim(5, 1.0) == [5, 2, 4, 1, 3]


def test_workload_aware_learns_from_contents_that_come_back_after_eviction():
    policy = WorkloadAware(11, prior=1.0)
    for now in range(0, 200, 20):  # each time the block has left meanwhile
        policy.insert([1], [b"late"], 0, Hints(group="late"), float(now))
        policy.release([1], float(now))
        policy.remove([1])
    assert policy._intervals.mean("late") == pytest.approx(20.0)
    policy = WorkloadAware(11, prior=1.0, remembered=0.0)
    for now in (0.0, 20.0):
        policy.insert([1], [b"late"], 0, Hints(group="late"), now)
        policy.release([1], now)
        policy.remove([1])
    assert policy._intervals.mean("late") == 1.0, "nothing is known"


def test_workload_aware_forgets_users_who_have_gone():
    policy = WorkloadAware(11, fade=1.0)
    for user in range(1000):
        policy._intervals.add(f"user {user}", 1.0)
    assert len(policy._intervals._own) < 150
    for wrong in ({"life": 0.0}, {"prior": -1.0}, {"life": math.nan}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*: must be a positive number; try 1.0"):
            WorkloadAware(11, **wrong)


def test_lirs_promotes_what_comes_back_before_a_low_block():
    policy = LIRS(11, passing=0.2)  # eight low blocks, two others
    _put(policy, list(range(1, 9)))
    policy.release(list(range(8, 0, -1)), 0.0)
    _put(policy, [9])
    policy.release([9], 1.0)
    assert policy.victim(9, 1.0) == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    policy.remove([9])
    _put(policy, [9])  # it is remembered, younger than 8, the low block used longest ago, which falls
    policy.release([9], 2.0)
    assert policy.victim(9, 2.0) == [8, 7, 6, 5, 4, 3, 2, 1, 9]


def test_lirs_block_that_falls_while_it_is_in_use_waits_for_its_release():
    policy = LIRS(11, passing=0.2)
    _put(policy, list(range(1, 9)))
    policy.release(list(range(7, 0, -1)), 0.0)
    for _ in range(2):
        _put(policy, [9])
        policy.release([9], 1.0)
        if policy.victim(1, 1.0) == [9]:
            policy.remove([9])
    assert policy.victim(9, 2.0) == [7, 6, 5, 4, 3, 2, 1, 9]
    policy.release([8], 3.0)
    assert policy.victim(2, 3.0) == [8, 7]
