"""RadixIndex: the bookkeeping faults its kind has met, and the same hits as the hash index."""

import gzip
import json
import random

import pytest

from pagedjax.cache import POLICIES, PagedManager, TokenChain
from pagedjax.cache.protocol import InvariantError
from pagedjax.cache.radix_index import RadixIndex


def _counts(d):
    """(tokens in the tree, evictable ones, protected ones)."""
    pool = d.m._groups[0].pool
    indexed = [b for b, key in enumerate(pool.keys) if key is not None]
    protected = sum(pool.ref[b] > 0 for b in indexed)
    size = d.m.block_size
    return len(indexed) * size, pool.num_evictable * size, protected * size


def test_B046_a_lock_protects_the_node_itself_and_the_path_to_it(drive, tokens):
    d = drive(index="radix")
    a, b = tokens.new(4), tokens.new(4)
    d.send([*a, *tokens.new(4)])  # a sibling, so that A and B are nodes of their own
    d.send(a + b)
    root = d.m._groups[0].index._roots[b""]
    (node,) = root.children.values()
    assert len(node.blocks) == 1 and len(node.children) == 2
    seq = d.start([*a, *b, 1])
    ref = d.ref
    path = d.m.table(seq)[:2]
    assert [ref[x] for x in path] == [1, 1]
    assert d.m.evict(8) == 1  # the sibling alone
    assert d.m.peek(d.chain([*a, *b, 2])) == 8
    d.m.release(seq)
    assert d.m.evict(8) == 2
    assert _counts(d) == (0, 0, 0)


def test_B048_split_and_growth_keep_the_counts(drive):
    d = drive(index="radix", block_size=1, dedup=True)
    d.send([1, 2, 3, 4, 5, 6])
    assert _counts(d) == (6, 6, 0)
    lock = 90
    hit = d.m.begin(lock, d.chain([1, 2, 3, 4, 5, 6, 9]))
    assert hit.num_tokens == 6 and d.m.reserve(lock, 0)
    assert _counts(d) == (6, 0, 6)
    d.send([1, 2, 3, 7, 8])
    assert _counts(d) == (8, 2, 6)
    d.m.release(lock)
    assert _counts(d) == (8, 8, 0)


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.full)])
def test_B048_random_operations_keep_the_counts(drive, count):
    d, rng, live = drive(index="radix", block_size=1, usable=40, dedup=True), random.Random(2), []
    for _ in range(count):
        if live and rng.random() < 0.45:
            d.m.release(live.pop(rng.randrange(len(live))))
        elif rng.random() < 0.1:
            d.m.evict(rng.randrange(5))
        else:
            seq = d.start([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
            live += [seq] if seq >= 0 else []
        total, evictable, protected = _counts(d)
        assert evictable + protected == total and min(evictable, protected) >= 0
        d.m.check_invariants()


def test_B050_a_duplicate_is_replaced_in_its_owners_table(drive, tokens):
    d, prompt = drive(index="radix", dedup=True), tokens.new(8)
    memory = {}

    def write(seq, lo, hi):
        table = d.m.table(seq)
        for p in range(lo, hi):
            memory[table[p // 4], p % 4] = tuple(d.chains[seq].tokens[: p + 1])

    for seq in (0, 1):
        d.chains[seq] = d.chain(prompt)
        d.m.begin(seq, d.chains[seq])
        assert d.m.reserve(seq, 8)
        write(seq, 0, 8)
    own = d.m.table(1)
    d.m.commit(0, 8, 1.0)
    d.m.commit(1, 8, 1.0)
    d.m.check_invariants()
    assert d.m.table(1) == d.m.table(0) and set(own) <= set(d.queue)
    assert d.m.stats.dedup_blocks == 2
    d.chains[2] = d.chain(tokens.new(8))
    d.m.begin(2, d.chains[2])
    assert d.m.reserve(2, 8) and set(d.m.table(2)) == set(own)
    write(2, 0, 8)
    held = [memory[d.m.table(1)[p // 4], p % 4] for p in range(8)]
    assert held == [tuple(prompt[: p + 1]) for p in range(8)]


def test_dedup_rewrites_the_tables_of_forks_too(drive, tokens):
    d, prompt = drive(dedup=True), tokens.new(6)
    for seq in (0, 1):
        d.chains[seq] = d.chain(prompt)
        d.m.begin(seq, d.chains[seq])
        assert d.m.reserve(seq, 6)
    d.chains[1].extend([1, 2])
    d.m.reserve(1, 8)
    d.m.commit(1, 4, 1.0)  # the first block of 1 is indexed
    d.m.fork(0, 5, d.chain(prompt))  # shares nothing yet: nothing of 0 is written
    d.m.commit(0, 3, 1.0)
    d.m.fork(0, 6, d.chain(prompt))
    d.m.commit(0, 4, 1.0)
    d.m.check_invariants()
    assert d.m.table(0)[0] == d.m.table(6)[0] == d.m.table(1)[0]


def test_B052_preempting_all_frees_the_whole_tree(drive, tokens):
    d = drive(index="radix", usable=20)
    for _ in range(3):
        d.start(tokens.new(9))
    for seq in range(3):
        d.m.release(seq)
    total, evictable, protected = _counts(d)
    assert (protected, evictable) == (0, total) and total == 24
    d.m.evict(100)
    assert d.m._groups[0].pool.num_evictable == 0 and d.m.num_free == 20
    d.start(tokens.new(9))
    assert d.m.reset("preempt") and d.m.num_free == 20 and _counts(d) == (0, 0, 0)


def test_an_inner_block_cannot_go():
    index = RadixIndex(8, 4)
    chain = TokenChain(range(8), block_size=4)
    index.register(chain, 0, [1, 2], 0, dedup=True)
    with pytest.raises(InvariantError, match="something continues it"):
        index.forget([1], [chain.digest(0)])


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"belady"}))
def test_policies_that_want_a_head_get_a_tail_below_it(drive, policy):
    d, rng = drive(index="radix", usable=12, policy=policy, dedup=True), random.Random(1)
    for _ in range(200):
        d.send([rng.randrange(2) for _ in range(rng.randrange(1, 30))])


def _hits(index, prompts, capacity, size):
    m = PagedManager(num_blocks=capacity + 1, block_size=size, index=index, dedup=True)
    hits = []
    for seq, prompt in enumerate(prompts):
        chain = TokenChain(prompt, block_size=size)
        hit = m.begin(seq, chain)
        if m.reserve(seq, len(chain) - hit.num_tokens):
            m.commit(seq, len(chain), float(seq))
        hits.append(hit.num_tokens)
        m.release(seq)
    m.check_invariants()
    return hits, m.stats.evictions


@pytest.mark.parametrize("size", [1, 4, 16])
def test_radix_and_hash_hit_the_same_on_random_requests(size):
    rng = random.Random(size)
    stems = [[rng.randrange(50) for _ in range(rng.randrange(60))] for _ in range(12)]
    prompts = []
    for _ in range(1000):
        stem = rng.choice(stems)
        prompts.append(
            stem[: rng.randrange(len(stem) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        )
    hash_hits, evictions = _hits("hash", prompts, 400 // size, size)
    assert _hits("radix", prompts, 400 // size, size) == (hash_hits, evictions)
    assert sum(hash_hits) > 1000 and evictions > 1000 // size


def _turns(records):
    """Each prompt, and five prompts later the next turn of its conversation."""
    records = [(r["input_tok_ids"], r["output_tok_ids"]) for r in records]
    prompts = []
    for i, (prompt, _) in enumerate(records):
        prompts.append(prompt)
        if i >= 5:
            earlier, answer = records[i - 5]
            prompts.append([*earlier, *answer, 1])
    return prompts


@pytest.mark.parametrize("name", ["sharegpt_llama31_tokens_300", "sharegpt_qwen3_tokens_300"])
def test_radix_and_hash_hit_the_same_on_token_traces(data_dir, name):
    with gzip.open(data_dir / "data" / "traces" / f"{name}.jsonl.gz", "rt") as lines:
        prompts = _turns(map(json.loads, lines))
    hash_hits, evictions = _hits("hash", prompts, 3000, 16)
    assert _hits("radix", prompts, 3000, 16) == (hash_hits, evictions)
    assert sum(hash_hits) > 1000 and evictions > 0
