"""PolicySuite: what every eviction policy has to keep to, as tests that two lines run over a plug-in.

from pagedjax.testing import PolicySuite
class TestMRU(PolicySuite): policy = "mru_policy:MRU"
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from pagedjax.cache import INDEXES, Hints, TokenChain
from pagedjax.cache.eviction import EvictionPolicy
from pagedjax.cache.policies import PolicyFactory, make_policy
from pagedjax.testing.world import World

PLAIN = Hints()


class PolicySuite:
    """Tests of one policy; derive a class whose name begins with Test.

    Attributes:
        policy: As settings name it, or a class or factory num_blocks -> EvictionPolicy.
    """

    policy: str | PolicyFactory = "lru"

    def make(self, num_blocks: int) -> EvictionPolicy:
        """A new policy."""
        return make_policy(self._named(), num_blocks)

    def _named(self) -> str | PolicyFactory:
        named = vars(type(self)).get("policy", self.policy)  # a plain function would be bound as a method
        return named if isinstance(named, str) else (lambda num_blocks: named(num_blocks))

    def _history(self, *policies: EvictionPolicy, seed: int) -> Iterator[tuple[float, set[int]]]:
        """The same random calls to each, as a pool makes them; yields (now, evictable blocks) after each."""
        rng = random.Random(seed)
        used: set[int] = set()
        idle: set[int] = set()
        blank = set(range(1, 30))
        for now in map(float, range(400)):
            action = rng.randrange(4)
            if action == 0 and blank:
                blocks = rng.sample(sorted(blank), rng.randrange(1, min(len(blank), 5) + 1))
                keys = [b"%d" % rng.randrange(60) for _ in blocks]
                hints, first = self._hints(rng), rng.randrange(4)
                for policy in policies:
                    policy.insert(blocks, keys, first, hints, now)
                blank.difference_update(blocks)
                used.update(blocks)
            elif action == 1 and used:
                blocks = rng.sample(sorted(used), rng.randrange(1, len(used) + 1))
                for policy in policies:
                    policy.release(blocks, now)
                used.difference_update(blocks)
                idle.update(blocks)
            elif action == 2 and idle | used:
                blocks = rng.sample(sorted(idle | used), rng.randrange(1, min(len(idle | used), 6) + 1))
                hints = rng.choice((PLAIN, self._hints(rng)))
                for policy in policies:
                    policy.hit(blocks, [b for b in blocks if b in idle], 0, hints, now)
                idle.difference_update(blocks)
                used.update(blocks)
            elif action == 3 and idle:
                count = rng.randrange(1, len(idle) + 1)
                named = [policy.victim(count, now) for policy in policies]
                assert all(victims == named[0] for victims in named), (
                    f"now={now}: equal histories name {named}; what is not told may not decide"
                )
                victims = named[0]
                assert len(victims) == count == len(set(victims)) and set(victims) <= idle, (
                    f"now={now}: {count} victims asked for among {sorted(idle)}, named {victims}"
                )
                for policy in policies:
                    policy.remove(victims)
                idle.difference_update(victims)
                blank.update(victims)
            yield now, idle

    @staticmethod
    def _hints(rng: random.Random) -> Hints:
        return Hints(priority=rng.randrange(3), ttl_s=5.0, group=rng.choice(("", "chat", "api")))

    def test_every_evictable_block_is_named_once(self) -> None:
        """Random histories against the plain set of evictable blocks."""
        for seed in range(3):
            policy = self.make(30)
            for now, idle in self._history(policy, seed=seed):
                found = policy.evictable()
                assert sorted(found) == sorted(idle), (
                    f"now={now}: evictable {found}, should be {sorted(idle)}"
                )

    def test_asking_for_victims_changes_nothing(self) -> None:
        """Of two with equal histories, one is asked all the time for its whole order."""
        for seed in range(3):
            asked, left_alone = self.make(30), self.make(30)
            for now, idle in self._history(asked, left_alone, seed=seed):
                order = asked.victim(len(idle), now)
                assert asked.victim(len(idle), now) == order, f"now={now}: asked again, another order"
                for count in range(len(idle)):
                    assert asked.victim(count, now) == order[:count], f"now={now}: {count} are not the first"

    def test_it_drives_a_manager_with_every_index(self) -> None:
        """Histories of admissions, forks, swaps, pins, failures: each step judged by the naive model."""
        for seed, index in enumerate(INDEXES):
            more: dict[str, Any] = {"partial": 1} if index != "table" else {}
            world = World(host_blocks=4, index=index, policy=self._named(), **more)
            rng = random.Random(seed)
            for _ in range(200):
                world.act(rng.randrange)
            assert world.m.stats.blocks_taken > 50

    def test_a_tree_lets_go_of_its_first_leaf(self) -> None:
        """Whatever the policy's order: no inner block leaves before what continues it."""
        world = World(usable=12, block_size=1, index="radix", policy=self._named())
        manager, rng = world.m, random.Random(1)
        for seq in range(150):
            chain = TokenChain([rng.randrange(3) for _ in range(rng.randrange(1, 10))], block_size=1)
            hit = manager.begin(seq, chain).num_tokens
            assert manager.reserve(seq, len(chain) - hit), "an idle pool has room"
            manager.commit(seq, len(chain), float(seq))
            manager.release(seq)
            manager.check_invariants()
        assert manager.stats.evictions > 100
