"""HashIndex: one dictionary from block digest to block, as in vLLM V1, with children below one block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from pagedjax.cache.hashing import TokenChain, pack_tokens
from pagedjax.cache.prefix import Index, PrefixIndex, common_prefix_tokens
from pagedjax.cache.protocol import InvariantError
from pagedjax.cache.siblings import Siblings


class HashIndex(Index):
    """Finds full blocks by digest, stops at the first miss.

    Several blocks may hold one content: the first registered is found, the others take over in order of
    registration when it goes.

    Beside the dictionary it keeps each block's tokens in one flat array and each digest's children, so that
    it can say how many tokens match below one block, and where. Blocks that overlap a multimodal item have
    no children's entry: their tokens do not tell their content.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._size = 4 * block_size
        self._block_of: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # copies after the first, oldest first
        self._children: dict[bytes, int | Siblings] = {}  # several: (tokens, block)
        self._parent: list[bytes | None] = [None] * num_blocks
        self._namespaced = False  # some block was registered under extra keys of its own
        self._firsts: dict[int, bytes] = {}  # first blocks of sequences, of all namespaces: their tokens
        self._num_firsts: dict[bytes, int] = {}  # and how many blocks have these tokens
        self._tokens = bytearray(num_blocks * self._size)
        self._rows = np.frombuffer(self._tokens, dtype="<i4").reshape(num_blocks, block_size)

    def verifying(self) -> PrefixIndex | None:
        from pagedjax.cache.verified_index import VerifiedHashIndex

        # What derives from this class has its reasons; it says itself what verifies in its place.
        return VerifiedHashIndex(self._num_blocks, self._size // 4) if type(self) is HashIndex else None

    # -------------------------------------------------------------- look up

    def lookup(self, chain: TokenChain, max_tokens: int) -> tuple[list[int], int]:
        count = max_tokens // chain.block_size
        digests = chain.digests(count)
        get = self._block_of.get
        found: list[int] = []
        at, width = 0, 4  # most misses come at once, most long hits are long: look up in growing pieces
        while at < count:
            part = list(map(get, digests[at : min(at + width, count)]))
            at += width
            width = 64
            if None in part:
                found += part[: part.index(None)]  # type: ignore[arg-type]
                break
            found += part  # type: ignore[arg-type]
        return found, len(found) * chain.block_size

    def resident(self, chain: TokenChain, num_blocks: int) -> list[int]:
        get = self._block_of.get
        return [get(digest, 0) for digest in chain.digests(num_blocks)[:num_blocks]]

    def below(self, chain: TokenChain, num_blocks: int, max_tokens: int) -> tuple[int, int]:
        size = chain.block_size
        at = num_blocks * size
        max_tokens = min(max_tokens, size)
        if max_tokens <= 0 or (chain.extra.items and chain.extra.overlapping(num_blocks, size)):
            return 0, 0
        children = self._children.get(self._parent_key(chain, num_blocks))
        if children is None:
            return 0, 0
        if max_tokens == size:
            wanted = bytes(chain.packed(num_blocks + 1)[4 * at : 4 * (at + size)])
        else:
            wanted = pack_tokens(chain.tokens[at : at + max_tokens])
        near = [children] if isinstance(children, int) else self._neighbours(children, wanted)
        shared, best = max([(common_prefix_tokens(self._content(b), wanted), b) for b in near])
        return (best, shared) if shared else (0, 0)

    def foreign(self, chain: TokenChain) -> bool:
        if chain.num_full_blocks == 0 or not (self._namespaced or chain.extra.namespace):
            return False
        return bytes(chain.packed(1)[: self._size]) in self._num_firsts

    def copies(self, key: bytes) -> int:
        return (key in self._block_of) + len(self._twins.get(key, ()))

    def _content(self, block: int) -> Any:
        """The block's tokens, i32le; compares with bytes."""
        return self._tokens[block * self._size : (block + 1) * self._size]

    @staticmethod
    def _neighbours(children: Siblings, wanted: bytes) -> list[int]:
        """Of children sorted by tokens, those between which `wanted` falls: one shares most with it."""
        return [item[1] for item in children.around((wanted,))]

    def _parent_key(self, chain: TokenChain, index: int) -> bytes:
        return chain.digests(index)[index - 1] if index else chain.scheme.root + chain.extra.namespace

    # ------------------------------------------------------------- register

    def register(
        self, chain: TokenChain, first: int, blocks: list[int], previous: int, *, dedup: bool
    ) -> tuple[list[int], int]:
        digests = chain.digests(first + len(blocks))[first : first + len(blocks)]
        fresh = self._block_of.keys().isdisjoint(digests)
        if fresh:
            self._block_of.update(zip(digests, blocks))
            known, twins = blocks, 0
        else:
            known, twins = self._register_each(digests, blocks, dedup)
        self._keep_tokens(chain, first, blocks)
        parents = [self._parent_key(chain, first), *digests[:-1]]
        if fresh and not chain.extra.items:
            self._adopt(chain, parents, blocks, is_first=first == 0)
        else:
            for i, b in enumerate(blocks):
                mixed = chain.extra.items and chain.extra.overlapping(first + i, chain.block_size)
                if known[i] == b and self._parent[b] is None and not mixed:
                    self._adopt(chain, [parents[i]], [b], is_first=first + i == 0)
        return known, twins

    def _register_each(self, digests: list[bytes], blocks: list[int], dedup: bool) -> tuple[list[int], int]:
        """Register one at a time, where some content is resident already."""
        known = list(blocks)
        twins = 0
        for i, (digest, block) in enumerate(zip(digests, blocks)):
            first = self._block_of.setdefault(digest, block)
            if first == block or block in self._twins.get(digest, ()):
                continue
            twins += 1
            if dedup:
                known[i] = first
            else:
                self._twins.setdefault(digest, []).append(block)
        return known, twins

    def _keep_tokens(self, chain: TokenChain, first: int, blocks: list[int]) -> None:
        size = self._size
        packed = chain.packed(first + len(blocks))
        if len(blocks) == 1:
            at = blocks[0] * size
            self._tokens[at : at + size] = packed[first * size : (first + 1) * size]
        else:
            part = packed[first * size : (first + len(blocks)) * size]
            self._rows[blocks] = np.frombuffer(part, dtype="<i4").reshape(len(blocks), -1)

    def _adopt(self, chain: TokenChain, parents: list[bytes], blocks: list[int], *, is_first: bool) -> None:
        """Enter blocks as children of their parents."""
        children, parent_of = self._children, self._parent
        if is_first:
            self._namespaced |= bool(chain.extra.namespace)
            tokens = self._firsts[blocks[0]] = bytes(self._content(blocks[0]))
            self._num_firsts[tokens] = self._num_firsts.get(tokens, 0) + 1
            # First blocks are always kept as siblings, so that `forget` meets them on its careful path.
            self._children.setdefault(parents[0], Siblings())
        for b, parent in zip(blocks, parents):
            parent_of[b] = parent
        # The first may join others under a parent that many continue; the rest follow each other.
        self._add_child(parents[0], blocks[0])
        parents, blocks = parents[1:], blocks[1:]
        if children.keys().isdisjoint(parents):
            children.update(zip(parents, blocks))
        else:
            for b, parent in zip(blocks, parents):
                self._add_child(parent, b)

    def _add_child(self, parent: bytes, block: int) -> None:
        known = self._children.setdefault(parent, block)
        if isinstance(known, int):
            if known == block:
                return
            other, known = known, Siblings()
            known.add((bytes(self._content(other)), other))
            self._children[parent] = known
        known.add((self._firsts.get(block) or bytes(self._content(block)), block))

    def _drop_child(self, parent: bytes, block: int) -> None:
        known = self._children[parent]
        if isinstance(known, int):
            del self._children[parent]
            return
        known.remove((bytes(self._content(block)), block))
        if not known:
            del self._children[parent]

    # --------------------------------------------------------------- forget

    def forget(self, blocks: list[int], keys: list[bytes]) -> None:
        block_of, twins, parent_of = self._block_of, self._twins, self._parent
        take_child = self._children.pop
        for b, key in zip(blocks, keys):
            if twins and key in twins:
                self._forget_copy(key, b)
            else:
                del block_of[key]
            # Nearly every block is the only child of its parent, and then the entry is the block itself.
            parent = parent_of[b]
            known = take_child(parent, None)  # type: ignore[arg-type]
            if known == b:
                parent_of[b] = None
            elif parent is not None:
                self._children[parent] = known  # type: ignore[assignment]
                self._forget_child(b)

    def _forget_child(self, block: int) -> None:
        parent = self._parent[block]
        if parent is None:
            return
        self._drop_child(parent, block)
        self._parent[block] = None
        tokens = self._firsts.pop(block, None)
        if tokens is not None:
            left = self._num_firsts.pop(tokens) - 1
            if left:
                self._num_firsts[tokens] = left

    def _forget_copy(self, key: bytes, block: int) -> None:
        others = self._twins[key]
        if self._block_of[key] == block:
            self._block_of[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._twins[key]

    def check(self, keys: list[bytes | None]) -> None:
        named = dict.fromkeys(b for b, key in enumerate(keys) if key is not None)
        found: dict[int, bytes] = {}
        for key, block in self._block_of.items():
            for b in [block, *self._twins.get(key, ())]:
                if b in found or keys[b] != key:
                    raise InvariantError(f"block {b}: is indexed under {key.hex()}, its key is {keys[b]!r}")
                found[b] = key
        if found.keys() != named.keys() or not self._twins.keys() <= self._block_of.keys():
            raise InvariantError(f"indexed blocks {sorted(found)} are not the named ones {sorted(named)}")
        for parent, known in self._children.items():
            for b in [known] if isinstance(known, int) else [item[1] for item in known]:
                if b not in found or self._parent[b] != parent:
                    raise InvariantError(f"block {b}: is kept as a child of {parent!r}, which it is not")
        if Counter(self._firsts.values()) != self._num_firsts or not self._firsts.keys() <= found.keys():
            raise InvariantError(f"first blocks {sorted(self._firsts)} are not those that are counted")
