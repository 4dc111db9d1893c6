"""The numeric examples the documents promise, and vLLM's own answers to a recorded history."""

import json

import pytest

from pagedjax.cache import ExtraKeys, PagedManager, TokenChain


def test_document_example_of_prefix_caching(drive, tokens):
    d = drive()
    shared = tokens.new(10)
    d.send(shared + tokens.new(5))
    seq = d.start(shared + tokens.new(4))
    assert d.hits[seq].num_tokens == 8 and d.hits[seq].matched_tokens == 10
    assert 14 - d.hits[seq].num_tokens == 6


def test_partial_reuse_hits_ten_of_the_example(drive, tokens):
    d = drive(partial=1)
    shared = tokens.new(10)
    d.send(shared + tokens.new(5))
    hit = d.m.begin(90, d.chain(shared + tokens.new(4)))
    assert hit.num_tokens == 10
    assert d.m.reserve(90, 4)
    plan = d.m.take_copies()
    assert plan.num_copies == 1 and plan.batches[0].dst.tolist() == [d.m.table(90)[2]]


def test_partial_reuse_below_the_least_gain_is_left_alone(drive, tokens):
    d = drive(partial=3)
    shared = tokens.new(10)
    d.send(shared + tokens.new(5))
    assert d.send(shared + tokens.new(4)) == 8


def test_a_prompt_sent_twice(drive, tokens):
    d, prompt = drive(block_size=16), tokens.new(32)
    assert [d.send(prompt), d.send(prompt)] == [0, 16]


def test_two_requests_share_twelve_full_blocks(drive, tokens):
    d, shared = drive(block_size=16), tokens.new(200)
    a = d.start(shared + tokens.new(20))
    b = d.start(shared + tokens.new(30))
    common = [x for x, y in zip(d.m.table(a), d.m.table(b)) if x == y]
    assert len(common) == 12 and all(d.ref[x] == 2 for x in common)


@pytest.mark.parametrize(("generated", "hit"), [(6, 8), (7, 12)])
def test_the_next_turn_hits_generated_blocks(drive, tokens, generated, hit):
    d = drive()
    seq = d.start(tokens.new(6))
    assert d.grow(seq, tokens.new(generated - 1))
    d.chains[seq].append(1)  # the last token is sampled, its KV never computed
    d.m.release(seq)
    assert d.send(d.chains[seq].tokens + tokens.new(4)) == hit


def test_release_order_of_the_document_example(drive, tokens):
    d = drive(usable=10)
    first = tokens.new(23)
    r0, r1 = d.start(first), d.start(tokens.new(12))
    d.m.release(r0)
    d.m.release(r1)
    assert d.queue == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    seq = d.start(first[:8] + tokens.new(2))
    assert d.m.table(seq) == [1, 2, 6]


def test_a_fresh_pool_counts_up_and_aborted_blocks_return_in_front(drive, tokens):
    d = drive(usable=8)
    d.m.begin(0, d.chain(tokens.new(24)))
    assert d.m.reserve(0, 24) and d.m.table(0) == [1, 2, 3, 4, 5, 6]
    d.m.release(0)
    assert d.queue == [6, 5, 4, 3, 2, 1, 7, 8]


def test_vllm_order_sample_field_by_field(data_dir):
    """What vLLM's manager answered to 660 random operations, digests included."""
    folder = data_dir / "cases"

    def lines(name):
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    replay = _Replay()
    compared = 0
    for op, answer in zip(
        lines("vllm_order_sample.trace.jsonl"), lines("vllm_order_sample.answers.jsonl"), strict=True
    ):
        if op["op"] == "config":
            continue
        got = replay.apply(op)
        for name in answer.keys() - {"i", "op", "id", "error"}:
            assert got[name] == answer[name], (answer["i"], op, name)
            compared += 1
        replay.m.check_invariants()
    assert compared > 3000


class _Replay:
    """Answers one operation of the sample in its vocabulary, every field of it but `i` and error texts."""

    def __init__(self):
        self.m = PagedManager(num_blocks=41, block_size=4)
        self.live = {}
        self.count = 0

    def _keys(self):
        return list(self.m._groups[0].pool.keys)

    def _chain(self, op):
        return TokenChain(
            op["tokens"], block_size=4, hash="sha256_cbor", extra=ExtraKeys(salt=op.get("salt"))
        )

    def apply(self, op):
        if op["op"] in ("step", "free") and op["id"] not in self.live:
            return {"ok": False}
        keys = self._keys()
        empty = dict(hit_tokens=None, num_tokens=None, num_computed=None, block_table=[], new_blocks=[])
        out = empty | dict(evicted=[], cached=[]) | getattr(self, "_" + op["op"])(op)
        after = self._keys()
        new = out["new_blocks"]
        out["evicted"] = [{"block": b, "hash": keys[b].hex()} for b in new if keys[b] is not None]
        out["cached"] = [
            {"block": b, "hash": after[b].hex()}
            for b in sorted(out["block_table"])
            if after[b] is not None and (keys[b] is None or b in new)
        ]
        queue = self.m.snapshot()["groups"][0]["free_queue"]
        return out | {"free_queue": queue, "free_blocks": len(queue)}

    def _add(self, op):
        self.count += 1
        chain = self._chain(op)
        hit = self.m.begin(self.count, chain)
        held = self.m.table(self.count)
        if not self.m.reserve(self.count, len(chain) - hit.num_tokens):
            self.m.release(self.count)
            return {"ok": False, "hit_tokens": hit.num_tokens}
        self.live[op["id"]] = (self.count, chain)
        return {"hit_tokens": hit.num_tokens} | self._computed(self.count, chain, held)

    def _step(self, op):
        seq, chain = self.live[op["id"]]
        chain.extend(op["new_tokens"])
        held = self.m.table(seq)
        if not self.m.reserve(seq, len(op["new_tokens"])):
            self.m.release(seq)
            del self.live[op["id"]]
            return {"ok": False}
        return self._computed(seq, chain, held)

    def _computed(self, seq, chain, held):
        self.m.commit(seq, len(chain), 0.0)
        table = self.m.table(seq)
        assert table[: len(held)] == held
        return {
            "ok": True,
            "num_tokens": len(chain),
            "num_computed": self.m.num_computed(seq),
            "block_table": table,
            "new_blocks": table[len(held) :],
        }

    def _free(self, op):
        self.m.release(self.live.pop(op["id"])[0])
        return {"ok": True}

    def _lookup(self, op):
        chain = self._chain(op)
        self.m.begin(-1, chain)
        blocks = self.m.table(-1)
        self.m.release(-1)
        return {"ok": True, "hit_tokens": self.m.peek(chain), "hit_blocks": blocks}

    def _state(self, op):
        return {
            "ok": True,
            "ref_counts": list(self.m._groups[0].pool.ref),
            "hashes": {str(b): key.hex() for b, key in enumerate(self._keys()) if key is not None},
            "tables": {name: self.m.table(seq) for name, (seq, _) in self.live.items()},
            "usage": self.m._groups[0].pool.num_in_use / 40,
        }
