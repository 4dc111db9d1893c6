"""VerifiedHashIndex: the hash nominates, the bytes decide."""

from __future__ import annotations

from pagedjax.cache.hash_index import HashIndex
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import InvariantError


class _Content:
    """An exact content: what is in a block, and the content before it. Kept while anything refers to it."""

    __slots__ = ("name", "refs")

    def __init__(self, name: int) -> None:
        self.name = name
        self.refs = 0


class VerifiedHashIndex(HashIndex):
    """A hash index that serves no block on the word of its digest alone.

    Every content is interned as (content before it, tokens and extra fields), so equality of names is
    equality of whole prefixes, whatever the hash. Blocks are still filed by digest: several contents may
    share one, and among them the name decides.
    """

    verifies = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._filed: dict[bytes, list[int]] = {}
        self._contents: dict[tuple[int, bytes], _Content] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._name = [0] * num_blocks
        self._last_name = 0

    def _payload(self, chain: TokenChain, index: int) -> bytes:
        tokens = chain.packed(index + 1)[index * self._size : (index + 1) * self._size]
        return bytes(tokens) + chain.extra.in_block(index, chain.block_size)

    def _names(self, chain: TokenChain, count: int) -> list[int]:
        """Names of the chain's first contents, up to the first that is not interned."""
        names: list[int] = []
        name = 0
        for i in range(count):
            content = self._contents.get((name, self._payload(chain, i)))
            if content is None:
                break
            name = content.name
            names.append(name)
        return names

    def _intern(self, parent: int, payload: bytes) -> int:
        content = self._contents.get((parent, payload))
        if content is None:
            self._last_name += 1
            content = self._contents[parent, payload] = _Content(self._last_name)
            self._key_of[content.name] = (parent, payload)
            self._refer(parent)
        return content.name

    def _refer(self, name: int) -> None:
        if name:
            self._contents[self._key_of[name]].refs += 1

    def _unrefer(self, name: int) -> None:
        while name:
            key = self._key_of[name]
            content = self._contents[key]
            content.refs -= 1
            if content.refs > 0:
                return
            del self._contents[key], self._key_of[name]
            name = key[0]

    def _find(self, digest: bytes, name: int) -> int:
        return next((b for b in self._filed.get(digest, ()) if self._name[b] == name), 0)

    def lookup(self, chain: TokenChain, max_tokens: int) -> tuple[list[int], int]:
        blocks = self.resident(chain, max_tokens // chain.block_size)
        if 0 in blocks:
            del blocks[blocks.index(0) :]
        return blocks, len(blocks) * chain.block_size

    def resident(self, chain: TokenChain, num_blocks: int) -> list[int]:
        digests = chain.digests(num_blocks)
        blocks = [self._find(d, name) for d, name in zip(digests, self._names(chain, num_blocks))]
        return blocks + [0] * (num_blocks - len(blocks))

    def copies(self, key: bytes) -> int:
        return len(self._filed.get(key, ()))

    def _parent_key(self, chain: TokenChain, index: int) -> bytes:
        if index == 0:
            return super()._parent_key(chain, 0)
        names = self._names(chain, index)
        return names[-1].to_bytes(8, "little") if len(names) == index else b"nowhere"

    def register(
        self, chain: TokenChain, first: int, blocks: list[int], previous: int, *, dedup: bool
    ) -> tuple[list[int], int]:
        end = first + len(blocks)
        digests = chain.digests(end)
        self._keep_tokens(chain, first, blocks)
        known, twins = list(blocks), 0
        fresh = not any(self._name[b] for b in blocks)
        name = 0
        for i in range(end):
            parent, name = name, self._intern(name, self._payload(chain, i))
            if i < first:
                continue
            b = blocks[i - first]
            if self._name[b]:
                continue
            there = self._find(digests[i], name)
            twins += there > 0
            if there and dedup:
                known[i - first] = there
                continue
            self._name[b] = name
            self._refer(name)
            self._filed.setdefault(digests[i], []).append(b)
            if not chain.extra.items or not chain.extra.overlapping(i, chain.block_size):
                key = parent.to_bytes(8, "little") if i else super()._parent_key(chain, 0)
                self._adopt(chain, [key], [b], is_first=i == 0)
        self._collect(chain, end)
        return (blocks, twins) if fresh and known == blocks else (known, twins)

    def _collect(self, chain: TokenChain, count: int) -> None:
        """Contents that were interned on the way and that nothing refers to go again."""
        names = self._names(chain, count)
        if names and self._contents[self._key_of[names[-1]]].refs == 0:
            self._refer(names[-1])
            self._unrefer(names[-1])

    def forget(self, blocks: list[int], keys: list[bytes]) -> None:
        for b, key in zip(blocks, keys):
            filed = self._filed[key]
            filed.remove(b)
            if not filed:
                del self._filed[key]
            self._forget_child(b)
            name, self._name[b] = self._name[b], 0
            self._unrefer(name)

    def check(self, keys: list[bytes | None]) -> None:
        found = {b: key for key, blocks in self._filed.items() for b in blocks}
        named = {b: key for b, key in enumerate(keys) if key is not None}
        if found != named or any(not self._name[b] for b in found):
            raise InvariantError(f"filed blocks {sorted(found)} are not the named ones {sorted(named)}")
        refs = dict.fromkeys(self._key_of, 0)
        for name in [*self._name, *(parent for parent, _ in self._contents)]:
            if name:
                refs[name] += 1
        if any(self._contents[self._key_of[name]].refs != count or not count for name, count in refs.items()):
            raise InvariantError("references to interned contents do not add up")
