"""IndexSuite: what every prefix index has to keep to, as tests that two lines run over a plug-in.

from pagedjax.testing import IndexSuite
class TestMine(IndexSuite): index = "my_index:MyIndex"
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from pagedjax.cache import ExtraKeys, KVGroup, MediaItem, PagedManager, TokenChain
from pagedjax.cache.hashing import CanonicalHash
from pagedjax.cache.indexes import IndexFactory, make_index
from pagedjax.testing.world import World

GROUPS = {
    "one group": None,
    "a window": (KVGroup(window=5),),
    "two groups": (KVGroup(), KVGroup(num_blocks=10, window=6)),
}


class IndexSuite:
    """Tests of one index; derive a class whose name begins with Test.

    Attributes:
        index: As settings name it, or a class or factory (num_blocks, block_size) -> PrefixIndex.
    """

    index: str | IndexFactory = "hash"

    def _named(self) -> str | IndexFactory:
        named = vars(type(self)).get("index", self.index)  # a plain function would be bound as a method
        return named if isinstance(named, str) else (lambda num_blocks, size: named(num_blocks, size))

    def _manager(self, **options: Any) -> PagedManager:
        return PagedManager(**({"num_blocks": 40, "block_size": 4, "index": self._named()} | options))

    def _send(self, manager: PagedManager, tokens: Any, **extra: Any) -> int:
        """One request from its lookup to its release; tokens that it hit."""
        chain = TokenChain(tokens, block_size=manager.block_size, **extra)
        hit = manager.begin(0, chain).num_tokens
        assert manager.reserve(0, len(chain) - hit), "an idle pool has room"
        manager.take_copies()
        manager.commit(0, len(chain), 1.0)
        manager.check_invariants()
        manager.release(0)
        manager.check_invariants()
        return hit

    def test_it_says_what_it_is(self) -> None:
        built = make_index(self._named(), 8, 4)
        for name in ("indexes", "leaf_only", "exclusive", "verifies"):
            assert isinstance(getattr(built, name), bool), f"{name}: must be True or False"
        assert self._manager().dedup is built.exclusive, "dedup follows from whether it excludes twins"

    def test_random_histories_agree_with_the_naive_model(self) -> None:
        """Every length is tried, every slot simulated; with and without dedup, partial hits, windows, a host."""
        sharing = make_index(self._named(), 8, 4).indexes
        rows = itertools.product(GROUPS.values(), (False, True), (1, 2))
        for seed, (groups, dedup, block_size) in enumerate(rows):
            options: dict[str, Any] = {"host_blocks": 4, "partial": block_size - 1} if sharing else {}
            world = World(index=self._named(), groups=groups, dedup=dedup, block_size=block_size, **options)
            rng = random.Random(seed)
            for _ in range(150):
                world.act(rng.randrange)

    def test_a_prompt_sent_twice_hits_its_full_blocks(self) -> None:
        manager = self._manager()
        sharing = manager._groups[0].index.indexes
        for length, hit in ((9, 8), (8, 4), (3, 0)):
            tokens = range(100 * length, 100 * length + length)
            assert self._send(manager, tokens) == 0
            assert self._send(manager, tokens) == (hit if sharing else 0)

    def test_extra_keys_separate_equal_tokens(self) -> None:
        manager = self._manager()
        sharing = manager._groups[0].index.indexes
        keys = [ExtraKeys(), ExtraKeys(salt="a"), ExtraKeys(salt="b"), ExtraKeys(adapter="a")]
        keys += [ExtraKeys(items=(MediaItem(digest, 2, 3),)) for digest in (b"A", b"B")]
        for expected in (0, 8 if sharing else 0):
            assert [self._send(manager, range(9), extra=extra) for extra in keys] == [expected] * len(keys)

    def test_what_verifies_serves_no_foreign_tokens(self) -> None:
        """Under a hash that calls everything the same."""
        if not make_index(self._named(), 8, 4).verifies:
            return
        zero = CanonicalHash("zero", lambda data: bytes(32))
        manager = self._manager(num_blocks=4, host_blocks=4, verify_tokens=True)
        prompts = [range(start, start + 5) for start in (10, 20, 30, 40)]
        assert [self._send(manager, prompt, hash=zero) for prompt in prompts] == [0, 0, 0, 0]

    def test_a_pool_under_pressure_gives_every_block_again(self) -> None:
        manager, rng = self._manager(num_blocks=12), random.Random(2)
        for _ in range(200):
            self._send(manager, [rng.randrange(2) for _ in range(rng.randrange(1, 40))])
        assert manager.num_free == 11 and manager.reset("strict")
        manager.check_invariants()
        assert manager._groups[0].pool.num_evictable == 0
