"""Slots reserved ahead: held alone, given back where they were not written, and nothing of them is found."""

import random

import pytest

from pagedjax.cache import KVGroup, PagedManager, TokenChain

BLOCK = 4


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("groups", [None, [KVGroup(24), KVGroup(24, window=6)]], ids=["one", "windows"])
def test_blocks_ahead_come_back_and_only_what_was_written_is_found(index, groups):
    unwritten = 0
    for seed in range(12):
        rng = random.Random(seed)
        manager = PagedManager(num_blocks=24, block_size=BLOCK, index=index, groups=groups, host_blocks=4)
        stem = [rng.randrange(50) for _ in range(12)]
        live, chains = {}, {}
        for step in range(60):
            if rng.random() < 0.3 and len(live) < 3:
                tokens = [*stem[: rng.randint(1, 12)], rng.randrange(50)]
                manager.begin(step, chain := TokenChain(tokens, block_size=BLOCK))
                if manager.reserve(step, len(tokens) - manager._seqs[step].hit.num_tokens):
                    manager.commit(step, len(chain), step)
                    live[step] = chains[step] = chain
                else:
                    manager.release(step)
            for seq, chain in list(live.items()):
                if len(live) < 3 and rng.random() < 0.2:
                    manager.fork(seq, 1000 + step, copy := chain.fork())
                    live[1000 + step] = chains[1000 + step] = copy
                    break
                before, ahead = manager.snapshot(), rng.randint(0, 9)
                if not manager.reserve(seq, 1, lookahead=ahead):
                    assert manager.snapshot() == before
                    continue
                end = len(chain) + 1 + ahead
                writable = manager.writable()
                for group, table in enumerate(manager._seqs[seq].tables):
                    assert len(table) == max(-(-end // BLOCK), len(before["tables"][seq][group]))
                    assert all(writable[group][b] for b in table[len(chain) // BLOCK :])
                written = rng.randint(0, 1 + ahead)
                unwritten += 1 + ahead - written
                chain.extend([rng.randrange(50) for _ in range(written)])
                manager.commit(seq, len(chain), step)
                if rng.random() < 0.3:
                    manager.release(seq)
                    del live[seq]
            manager.take_copies()
            manager.check_invariants()
            known = {c.digest(i) for c in chains.values() for i in range(len(c) // BLOCK)}
            assert all(set(group["keys"].values()) <= known for group in manager.snapshot()["groups"])
        for seq in live:
            manager.release(seq)
        manager.check_invariants()
        assert manager.num_free == manager.num_usable
    assert unwritten > 300
