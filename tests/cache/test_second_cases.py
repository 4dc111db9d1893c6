"""Cases met in practice, by id: identities, groups that stop a match, lookups that must move nothing."""

import pytest

from pagedjax.cache import INDEXES, ExtraKeys, Hints, KVGroup, MediaItem, MissReason, TokenChain
from pagedjax.cache.hashing import HASHES
from pagedjax.cache.verified_index import VerifiedHashIndex

FINDERS = [*sorted(INDEXES.keys() - {"table"}), VerifiedHashIndex]


@pytest.mark.parametrize("index", FINDERS)
@pytest.mark.parametrize(
    "other", [dict(adapter_path="/b"), dict(weight_version="2"), dict(adapter_path=None)]
)
def test_B148_a_name_is_no_identity(drive, index, other):
    d, prompt = drive(index=index), list(range(9))
    x = dict(adapter="x", adapter_path="/a", weight_version="1")
    assert d.send(prompt, **x) == 0
    assert d.send(prompt, **(x | other)) == 0  # from another path, of another version, from nowhere
    assert d.send(prompt, **x) == 8
    assert d.send(prompt) == 0  # the base model
    assert d.send(prompt, **(x | other)) == 8


@pytest.mark.parametrize("scheme", sorted(HASHES))
@pytest.mark.parametrize("index", FINDERS)
def test_B150_media_is_told_apart_by_its_content(drive, index, scheme):
    d = drive(usable=64, block_size=16, index=index)
    prompt = [7] * 49

    def hit(digest, start=20):
        items = (MediaItem(digest, start, 10),)
        seq = next(d.ids)
        chain = TokenChain(prompt, block_size=16, hash=scheme, extra=ExtraKeys(items=items))
        found = d.m.begin(seq, chain).num_tokens
        assert d.m.reserve(seq, len(chain) - found)
        d.m.commit(seq, len(chain), 0.0)
        d.m.check_invariants()
        d.m.release(seq)
        return found

    a, b = b"A" * 32, b"B" * 32
    assert hit(a) == 0
    assert hit(b) == 16  # the block before the item is shared, the item's and later ones are not
    assert hit(a) == 48 and hit(b) == 48
    assert hit(a, start=21) == 16  # the same, one token later
    assert hit(a[:-2] + b"\x00\x01") == 16 and hit(a[:-2] + b"\x00\x02") == 16  # the last two bytes count


def _drop(group, blocks):
    group.pool._recycle(blocks, evicted=True)
    group.pool.blank += blocks


@pytest.mark.parametrize("windowed", [0, 1])
def test_B152_a_group_that_lost_its_blocks_is_named(drive, windowed):
    groups = [KVGroup(), KVGroup()]
    groups[windowed] = KVGroup(window=8)
    d, prompt = drive(groups=groups), list(range(21))
    d.send(prompt)
    d.m.check_invariants()
    hit = d.m.begin(90, d.chain(prompt))
    assert (hit.num_tokens, hit.reason, hit.group) == (
        20,
        MissReason.LAST_TOKEN,
        None,
    ) or hit.num_tokens == 20
    group = d.m._groups[windowed]
    _drop(group, [b for b in group.index.resident(d.chain(prompt), 5) if b])
    hit = d.m.begin(90, d.chain(prompt))
    assert (hit.num_tokens, hit.reason, hit.group) == (0, MissReason.EVICTED, windowed)
    hit = d.m.begin(91, d.chain(range(500, 521)))
    assert (hit.num_tokens, hit.reason, hit.group) == (0, MissReason.NO_MATCH, None)


def test_B152_part_of_a_window_is_enough_to_stop(drive):
    d, prompt = drive(groups=[KVGroup(), KVGroup(window=8)]), list(range(21))
    d.send(prompt)
    group = d.m._groups[1]
    _drop(group, [group.index.resident(d.chain(prompt), 5)[4]])
    hit = d.m.begin(90, d.chain(prompt))
    assert (hit.num_tokens, hit.reason, hit.group) == (16, MissReason.EVICTED, 1)


@pytest.mark.parametrize("index", FINDERS)
@pytest.mark.parametrize("groups", [None, [KVGroup(), KVGroup(window=8)]])
def test_B170_lookups_of_a_waiting_request_move_nothing(drive, index, groups):
    d = drive(usable=8, index=index, host_blocks=16, groups=groups)
    first, second = list(range(17)), list(range(100, 117))
    d.send(first)
    d.send(second)
    blocker = d.start(range(200, 232))
    assert blocker >= 0 and d.m.num_free == 0
    before, tiers = d.m.snapshot(), [list(g.tier._slot_of) for g in d.m._groups]
    assert tiers[0]
    for _ in range(50):
        assert d.m.peek(d.chain(first)) == 16
        assert d.m.begin(50, d.chain(first), Hints()).num_tokens == 16
        assert not d.m.reserve(50, 1)  # no room: nothing is admitted
        d.m.release(50)
    assert d.m.take_copies().num_copies == 0
    after = d.m.snapshot()
    assert after == before and [list(g.tier._slot_of) for g in d.m._groups] == tiers
    d.m.release(blocker)
    d.m.check_invariants()
