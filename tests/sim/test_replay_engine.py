"""Two sources of truth that may not drift apart: replays against the manager as an engine drives it."""

import random
from pathlib import Path

import numpy as np
import pytest

from pagedjax.cache import INDEXES, POLICIES, Hints, InvariantError, PagedManager, TokenChain
from pagedjax.cache.policies import Belady
from pagedjax.cache.policies.scored import Scored
from pagedjax.sim.replay import LRUStore, PolicyStore, replay, stream_refs
from pagedjax.sim.trace import Trace, TraceRequest, open_trace

SIZE = 4


def _tree(rng: random.Random, requests: int) -> list[list[int]]:
    """Requests as paths of keys in a tree that grows: equal keys mean equal prefixes."""
    children: dict[int, list[int]] = {0: []}
    rows, fresh = [], iter(range(1, 10**6))
    for _ in range(requests):
        at, row = 0, []
        for _ in range(rng.randrange(1, 9)):
            known = children[at]
            if known and rng.random() < 0.75:
                at = known[int(rng.random() ** 2 * len(known))]
            else:
                key = next(fresh)
                known.append(key)
                children[key] = []
                at = key
            row.append(at)
        rows.append(row)
    return rows


def _engine(
    policy, index: str, capacity: int, rows: list[list[int]], chunk: int, groups: list[str] | None = None
) -> list[int]:
    """Hit blocks of each request: real tokens, real hashes, prompts computed in chunks, one at a time."""
    m = PagedManager(num_blocks=capacity + 2, block_size=SIZE, policy=policy, index=index)
    hits = []
    for seq, row in enumerate(rows):
        tokens = [key * SIZE + i for key in row for i in range(SIZE)]
        chain = TokenChain([*tokens, 10**7 + seq], block_size=SIZE)
        m.now = float(seq)
        hints = Hints(group=groups[seq]) if groups is not None else Hints()
        done = m.begin(seq, chain, hints).num_tokens
        hits.append(done // SIZE)
        while done < len(chain):
            step = min(chunk, len(chain) - done)
            assert m.reserve(seq, step)
            done += step
            m.commit(seq, done, float(seq))
        m.release(seq)
    m.check_invariants()
    return hits


def _agree(policy: str, index: str, seed: int) -> None:
    rng = random.Random(f"{policy} {index} {seed}")
    rows = _tree(rng, 60)
    capacity = rng.randrange(8, 40)
    groups = [rng.choice(("", "chat", "api")) for _ in rows]
    named = policy
    if policy == "belady":
        futures = []
        for width in (8, 32):  # the engine's digests, and the replay's: 8 bytes of the key
            future: dict[bytes, list[float]] = {}
            for now, row in enumerate(rows):
                chain = TokenChain([k * SIZE + i for k in row for i in range(SIZE)], block_size=SIZE)
                names = chain.digests(len(row)) if width == 32 else [k.to_bytes(8, "little") for k in row]
                for name in names:
                    future.setdefault(name, []).append(float(now))
            futures.append(future)
        stores = [(lambda n, f=f: Belady(n, f)) for f in futures]
    else:
        stores = [named, named]
    store = PolicyStore(capacity, stores[0], index)
    ours = []
    for row, group in zip(rows, groups):
        keys = np.array(row)
        ours.append(store.hits(keys))
        store.next_group(group)
        store.touch(keys)
    assert ours == _engine(stores[1], index, capacity, rows, 10**6, groups)
    assert index == "table" or sum(ours) > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("index", sorted(INDEXES))
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
def test_F004_a_replay_is_the_engine_one_request_at_a_time(policy: str, index: str, count: int) -> None:
    for seed in range(count):
        _agree(policy, index, seed)


def test_F004_of_blocks_that_came_together_the_tail_goes_first() -> None:
    for policy in sorted(POLICIES.keys() - {"belady"}):
        store = PolicyStore(4, policy)
        store.touch(np.array([1, 2, 3, 4]))
        store.touch(np.array([9]))
        assert store.present == {1, 2, 3, 9} and store.hits(np.array([1, 2, 3, 4])) == 3, policy


@pytest.mark.parametrize("seed", range(20))
def test_F004_the_quick_lru_of_a_replay_is_the_engines(seed: int) -> None:
    """`LRUStore` is an ordered dictionary; the engine's queue with its prompts in chunks says the same."""
    rng = random.Random(seed)
    rows, capacity = _tree(rng, 80), rng.randrange(8, 40)
    requests = [TraceRequest(float(i), SIZE * len(r), 1, granule_ids=np.array(r)) for i, r in enumerate(rows)]
    trace = Trace("tree", "generated", SIZE, True, lambda: iter(requests))
    counted = replay(trace, SIZE, LRUStore(capacity))
    assert counted.hit_blocks == sum(_engine("lru", "hash", capacity, rows, chunk=7))


class _AnyOrder(Scored):
    """Evicts heads and tails alike, so that much is computed anew behind a missing block and stands there twice."""

    def _score(self, block: int, now: float) -> float:
        return (block * 7919 + now * 31) % 101


def test_F004_copies_behind_a_missing_block_are_the_managers() -> None:
    most = 0
    for seed in range(20):
        rng = random.Random(seed)
        capacity = rng.randrange(12, 40)
        rows = [
            [2**i + way % 2**i for i in range(rng.randrange(2, 9))] for way in rng.choices(range(8), k=300)
        ]
        store, ours = PolicyStore(capacity, _AnyOrder), []
        for row in rows:
            ours.append(store.hits(np.array(row)))
            store.touch(np.array(row))
            most = max(most, *(len(twins) for twins in store._flat._twins.values()), 0)  # type: ignore[union-attr]
        assert ours == _engine(_AnyOrder, "hash", capacity, rows, 10**6)
    assert most > 1, "three copies of a block"


def test_F004_a_request_that_names_a_block_twice_is_refused() -> None:
    store = PolicyStore(9, "lru")
    store.touch(np.array([1, 1, 2]))
    with pytest.raises(InvariantError, match="a request of 2 blocks names one twice: its keys are no chain"):
        store.touch(np.array([1, 1]))


@pytest.mark.full
def test_the_gain_of_reuse_credit_is_the_engines(data_dir: Path) -> None:
    """The hour of Mooncake's conversations with tokens and hashes, prompts in chunks: the replay's hits, each."""
    trace = open_trace(data_dir / "data" / "traces" / "mooncake_conversation_trace.jsonl.gz")
    names: dict[int, int] = {}
    rows = [[names.setdefault(k, len(names)) for k in r.lookup.tolist()] for r in stream_refs(trace, 512)]
    store = PolicyStore(10_000, "reuse-credit")
    ours = []
    for row in rows:
        keys = np.array(row)
        ours.append(store.hits(keys))
        store.touch(keys)
    assert ours == _engine("reuse-credit", "hash", 10_000, rows, chunk=10**6)
    assert sum(ours) >= 0.238 * sum(map(len, rows))
