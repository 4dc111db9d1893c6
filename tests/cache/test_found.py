"""Cases found in this project's own code, by id: identity, victims and books of the cache."""

import pytest

from pagedjax.cache import INDEXES, Index, PagedManager, TokenChain
from pagedjax.cache.hash_index import HashIndex
from pagedjax.cache.hashing import CanonicalHash
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
    from pagedjax.cache import KVGroup

    kinds = [KVGroup(), KVGroup(window=8)][:groups]
    manager = PagedManager(num_blocks=30, block_size=4, index=VERIFY[name], verify_tokens=True, groups=kinds)
    d = Driver(manager)
    assert d.run([1, 2, 3, 4, 5]) == 0
    assert d.run([9, 2, 3, 4, 5]) == 0  # another prompt under the same digest
    assert d.run([1, 2, 3, 4, 6]) == 4 and d.run([9, 2, 3, 4, 6]) == 4


@pytest.mark.parametrize("index", [_OfItsOwn, lambda n, size: _OfItsOwn(n, size), f"{__name__}:_OfItsOwn"])
def test_F002_an_index_that_cannot_verify_is_refused(monkeypatch, index):
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(**globals()))
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
