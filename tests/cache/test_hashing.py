"""Block identity: the specification in docs/hashing.md, its vectors, and keys that must not meet."""

import hashlib
import itertools
import json
import random
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedjax.cache import ExtraKeys, MediaItem, TokenChain
from pagedjax.cache.hashing import CanonicalHash, group_key

DOC = Path(__file__).resolve().parents[2] / "docs" / "hashing.md"
ITEM = MediaItem(bytes.fromhex("00112233"), 10, 12)
KEYS = {
    "none": {},
    "adapter": dict(adapter="adapter-1"),
    "salt": dict(salt="tenant-a"),
    "both": dict(adapter="adapter-1", salt="tenant-a"),
    "item": dict(items=(ITEM,)),
    "everything": dict(
        adapter="adapter-1", adapter_path="/adapters/1", salt="tenant-a", weight_version="v2", items=(ITEM,)
    ),
}


@pytest.fixture(scope="module")
def vectors():
    return json.loads(re.search(r"```json\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)[1])


def _rows():
    rows = [("sha256", name) for name in KEYS]
    return rows + [
        (h, name) for h in ("sha256_cbor", "xxh3_128") for name in ("none", "adapter", "salt", "both")
    ]


@pytest.mark.parametrize(("scheme", "name"), _rows())
def test_B009_golden_vectors(vectors, scheme, name):
    chain = TokenChain(range(64), block_size=16, hash=scheme, extra=ExtraKeys(**KEYS[name]))
    assert [chain.digest(i).hex() for i in range(4)] == vectors["digests"][scheme][name]
    assert chain.scheme.root.hex() == vectors["root"][scheme]


def _from_the_page(tokens, size, adapter=None, path=None, item=None, salt=None, weights=None):
    """docs/hashing.md, read by somebody who has not seen the code."""

    def field(tag, payload):
        return b"" if payload is None else struct.pack("<BI", tag, len(payload)) + payload

    digest = hashlib.sha256(b"pagedjax block hash 1:").digest()
    out = []
    for start in range(0, len(tokens) - size + 1, size):
        data = digest + struct.pack(f"<I{size}i", size, *tokens[start : start + size])
        data += field(1, adapter) + field(2, path)
        if item and item[1] < start + size and item[1] + item[2] > start:
            data += field(3, struct.pack("<q", item[1] - start) + item[0])
        if start == 0:
            data += field(4, salt) + field(5, weights)
        digest = hashlib.sha256(data).digest()
        out.append(digest.hex())
    return out


def test_B009_a_reimplementation_from_the_page_agrees(vectors):
    item, tokens = (bytes.fromhex("00112233"), 10, 12), list(range(64))
    known = vectors["digests"]["sha256"]
    assert _from_the_page(tokens, 16) == known["none"]
    assert _from_the_page(tokens, 16, adapter=b"adapter-1") == known["adapter"]
    assert _from_the_page(tokens, 16, salt=b"tenant-a") == known["salt"]
    assert _from_the_page(tokens, 16, adapter=b"adapter-1", salt=b"tenant-a") == known["both"]
    assert _from_the_page(tokens, 16, item=item) == known["item"]
    everything = dict(adapter=b"adapter-1", path=b"/adapters/1", item=item, salt=b"tenant-a", weights=b"v2")
    assert _from_the_page(tokens, 16, **everything) == known["everything"]


def test_cbor_scheme_agrees_with_a_hand_written_encoding():
    """Canonical CBOR of [bytes, [ints], [["cache_salt", "a"]]], byte by byte."""
    root = hashlib.sha256(b"\x6e" + b"vllm-none-hash").digest()
    tokens = [38, 3, 1, 47]
    body = b"\x83\x58\x20" + root + b"\x84\x18\x26\x03\x01\x18\x2f" + b"\x81\x82\x6acache_salt\x61a"
    chain = TokenChain(tokens, block_size=4, hash="sha256_cbor", extra=ExtraKeys(salt="a"))
    assert chain.digest(0) == hashlib.sha256(body).digest()


@pytest.mark.parametrize(("scheme", "library"), [("sha256_cbor", "cbor2"), ("xxh3_128", "xxhash")])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, scheme, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{scheme}: needs {library}.*pagedjax\[hash\]"):
        TokenChain([1], block_size=1, hash=scheme)


def test_digests_are_those_of_any_history():
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(-5, 100_000) for _ in range(rng.randrange(60))]
        extra = rng.choice([ExtraKeys(), ExtraKeys(adapter="a"), ExtraKeys(items=(ITEM,))])
        whole = TokenChain(np.array(tokens, dtype=np.int32), block_size=4, extra=extra)
        grown = TokenChain([], block_size=4, extra=extra)
        for token in tokens:
            grown.append(token)
            if rng.random() < 0.3:
                grown.digests(grown.num_full_blocks)
            if rng.random() < 0.1:
                other, grown = grown, grown.fork()
                other.append(9)
        count = whole.num_full_blocks
        assert grown.digests(count)[:count] == whole.digests(count)[:count]
        assert grown.packed(count) == whole.packed(count)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 1.5, "a"])
def test_a_token_that_is_no_int32_is_refused(token):
    with pytest.raises(ValueError, match="32 signed bits"):
        TokenChain([token], block_size=1).digest(0)


def test_misuse_is_named():
    chain = TokenChain(range(6), block_size=4)
    for index, message in ((1, "has 1 full blocks"), (-1, "must not be negative")):
        with pytest.raises(ValueError, match=message):
            chain.digest(index)
    with pytest.raises(ValueError, match="hash=md5: must be one of sha256"):
        TokenChain([1], block_size=1, hash="md5")
    with pytest.raises(ValueError, match="needs an adapter"):
        ExtraKeys(adapter_path="/x")
    with pytest.raises(ValueError, match="must name the content"):
        MediaItem(b"", 0, 1)
    assert group_key(b"d", 3) == b"d\0\0\0\3"


def test_an_item_is_in_the_blocks_that_hold_its_tokens_and_in_no_other():
    for start, length, blocks in ((4, 4, [1]), (4, 5, [1, 2]), (3, 1, [0]), (3, 6, [0, 1, 2]), (8, 4, [2])):
        extra = ExtraKeys(items=(MediaItem(b"x", start, length),))
        assert [i for i in range(4) if extra.overlapping(i, 4)] == blocks
        assert [i for i in range(4) if extra.in_block(i, 4)] == blocks
        # Up to the item's first block the digests are those of the plain text.
        mine, plain = (TokenChain(range(16), block_size=4, extra=e).digests(4) for e in (extra, ExtraKeys()))
        assert [i for i in range(4) if mine[i] == plain[i]] == list(range(blocks[0]))


def _texts(rng):
    return "".join(rng.choice("abc123") for _ in range(rng.randrange(1, 4)))


def _lookalikes(rng):
    """Two different inputs that are equal once their parts are joined without tags or lengths."""
    kind = rng.randrange(4)
    if kind == 0:  # salt "ab" + adapter "c" against "a" + "bc"
        text = _texts(rng) + _texts(rng)
        i, j = rng.sample(range(1, len(text) + 1), 2) if len(text) > 1 else (1, 1)
        pairs = [dict(salt=text[:k] or None, adapter=text[k:] or None) for k in (i, j)]
        if pairs[0] == pairs[1]:
            pairs[1] = dict(salt=pairs[0]["adapter"], adapter=pairs[0]["salt"])
        return ([1], pairs[0]), ([1], pairs[1])
    if kind == 1:  # the same text in two fields
        text = _texts(rng)
        a, b = rng.sample(["salt", "adapter", "weight_version"], 2)
        return ([1], {a: text}), ([1], {b: text})
    if kind == 2:  # tokens that read the same as digits: [1, 23] and [12, 3]
        digits = "".join(str(rng.randrange(1, 10)) for _ in range(rng.randrange(3, 8)))
        i, j = rng.sample(range(1, len(digits)), 2)
        return tuple((list(map(int, (digits[:k], digits[k:]))), {}) for k in (i, j))
    # tokens against a field: the payload's bytes as tokens
    text = "".join(rng.choice("abc") for _ in range(4))
    return ([7, 7], dict(salt=text)), ([7, *struct.unpack("<i", text.encode())], {})


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_lookalike_keys_never_meet(count):
    """Salt "ab" + adapter "c" against "a" + "bc", token [1, 23] against [12, 3], and the like."""
    rng = random.Random(4)
    for (tokens_a, extra_a), (tokens_b, extra_b) in (_lookalikes(rng) for _ in range(count)):
        if (tokens_a, extra_a) == (tokens_b, extra_b):
            continue
        a, b = ExtraKeys(**extra_a), ExtraKeys(**extra_b)
        block = [
            TokenChain(t, block_size=len(t), extra=e).digest(0) for t, e in ((tokens_a, a), (tokens_b, b))
        ]
        assert block[0] != block[1], (tokens_a, extra_a, tokens_b, extra_b)
        assert a.namespace != b.namespace or tokens_a != tokens_b


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_lookalike_keys_share_no_block(drive, index):
    rng = random.Random(5)
    d = drive(usable=30_000, block_size=1, index=index)
    seen = {}
    for tokens, extra in itertools.chain.from_iterable(_lookalikes(rng) for _ in range(2000)):
        hit = d.m.peek(d.chain([*tokens, 5], **extra))
        name = ExtraKeys(**extra)
        longest = max((n for n in range(len(tokens) + 1) if (name, tuple(tokens[:n])) in seen), default=0)
        assert hit == longest
        seq = next(d.ids)
        chain = d.chain([*tokens, 5], **extra)
        d.m.begin(seq, chain)
        assert d.m.reserve(seq, len(chain) - hit)
        d.m.commit(seq, len(chain), 0.0)
        d.m.release(seq)
        for n in range(1, len(tokens) + 2):
            seen[name, tuple([*tokens, 5][:n])] = True


@pytest.mark.parametrize("items", [(), (MediaItem(b"x", 3, 3),)])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_with_a_constant_hash_and_verify_tokens_no_wrong_block_is_served(index, items):
    from pagedjax.cache import PagedManager

    constant = CanonicalHash("constant", lambda data: bytes(32))
    m = PagedManager(num_blocks=60, block_size=2, index=index, verify_tokens=True, dedup=True, partial=1)
    rng, memory = random.Random(7), {}
    served = 0
    for seq in range(600):
        extra = ExtraKeys(salt=rng.choice([None, "s", "t"]), items=rng.choice([(), items]))
        chain = TokenChain(
            [rng.randrange(2) for _ in range(rng.randrange(1, 14))], block_size=2, hash=constant, extra=extra
        )
        hit = m.begin(seq, chain)
        assert m.reserve(seq, len(chain) - hit.num_tokens)
        for batch in m.take_copies().batches:
            for src, dst in zip(batch.src.tolist(), batch.dst.tolist()):
                memory |= {(dst, i): memory.get((src, i)) for i in range(2)}
        table = m.table(seq)
        held = [memory.get((table[p // 2], p % 2)) for p in range(hit.num_tokens)]
        # What a token's KV stands for: all tokens up to it, and the extra fields of all blocks up to its own.
        mine = [
            (
                tuple(chain.tokens[: p + 1]),
                extra.namespace,
                tuple(o.digest for o in extra.items if o.start <= p),
            )
            for p in range(len(chain))
        ]
        assert held == mine[: hit.num_tokens]
        for p in range(hit.num_tokens, len(chain)):
            memory[table[p // 2], p % 2] = mine[p]
        m.commit(seq, len(chain), float(seq))
        m.release(seq)
        m.check_invariants()
        served += hit.num_tokens
    assert served > 500


def test_a_chain_of_an_array_is_that_of_its_list():
    rng = np.random.default_rng(5)
    for seed in range(60):
        few = np.repeat(
            rng.integers(-5, 5, 40), rng.integers(1, 30, 40)
        )  # equal ones follow each other, or do not
        tokens = (few if seed % 2 else rng.integers(-(2**31), 2**31, 90)).astype(
            (np.int32, np.int64)[seed % 3 > 0]
        )
        size, first = int(rng.integers(1, 9)), int(rng.integers(0, 12))
        plain, made = (TokenChain(given, block_size=size) for given in (tokens.tolist(), tokens))
        assert made.tokens == plain.tokens and all(type(token) is int for token in made.tokens)
        hashed = TokenChain.hashed(tokens, plain.digests(first)[:first], block_size=size)
        others = [made, hashed, made.fork(), hashed.fork()]
        for chain in (plain, *others):
            chain.extend([7] * 11)
        for count in (0, first, plain.num_full_blocks):
            for chain in others:
                assert chain.digests(count)[:count] == plain.digests(count)[:count]
                assert chain.packed(count)[: 4 * size * count] == plain.packed(count)[: 4 * size * count]
    assert len({id(token) for token in TokenChain(np.full(900, 1 << 30, np.int32), block_size=4).tokens}) == 1
