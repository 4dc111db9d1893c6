"""PrefixIndex: the protocol of the three ways to find shared prefixes; TableIndex, the first of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import InvariantError


class PrefixIndex(Protocol):
    """Which resident block holds which content, for one KV group.

    Nobody asks an index for its name: what follows from its nature follows from these. Deriving from `Index`
    gives each its plain value.

    Attributes:
        indexes: Full blocks are registered under their digests. False: sharing by fork and pin only.
        leaf_only: A tree: content may go only when nothing registered continues it. The manager sets it to
            False for a group with a window, whose blocks go from the front.
        exclusive: Excludes twins: holds one copy of any content, later copies stay unregistered. A manager
            whose `dedup` is left open then uses the first copy and frees the new one.
        verifies: Compares tokens before it names a block, so that no hash has to be trusted.
    """

    indexes: bool
    leaf_only: bool
    exclusive: bool
    verifies: bool

    def verifying(self) -> PrefixIndex | None:
        """An empty index of this kind that verifies, in place of one that does not; None: there is none."""
        ...

    def lookup(self, chain: TokenChain, max_tokens: int) -> tuple[list[int], int]:
        """Blocks that hold the longest resident prefix of at most `max_tokens` tokens, and its length."""
        ...

    def resident(self, chain: TokenChain, num_blocks: int) -> list[int]:
        """For each of the first full blocks a resident copy, or 0; holes allowed."""
        ...

    def below(self, chain: TokenChain, num_blocks: int, max_tokens: int) -> tuple[int, int]:
        """The block that shares most leading tokens with what follows `num_blocks` matched ones.

        Returns:
            (block, shared tokens, at most `max_tokens`); (0, 0) where none shares any.
        """
        ...

    def foreign(self, chain: TokenChain) -> bool:
        """The chain's first block is resident, but only under other extra keys."""
        ...

    def register(
        self, chain: TokenChain, first: int, blocks: list[int], previous: int, *, dedup: bool
    ) -> tuple[list[int], int]:
        """Blocks `first`, `first + 1`, … of the chain are full and written: make them findable.

        Args:
            blocks: Their ids in the caller's table.
            previous: The table's entry before them (0: none).
            dedup: Name the copy that was there first; else a later copy stays findable beside it.

        Returns:
            (the id registered for each, how many were there before). The first list is `blocks` itself
            where nothing differs. An id that differs from the caller's names the copy that was there
            first; the caller's own is not registered then.
        """
        ...

    def forget(self, blocks: list[int], keys: list[bytes]) -> None:
        """Blocks lose their content."""
        ...

    def copies(self, key: bytes) -> int:
        """Resident copies of a content that is registered."""
        ...

    def leading_leaves(self, blocks: list[int]) -> int:
        """How many of the blocks, in this order, may go because nothing registered continues them then."""
        ...

    def is_leaf(self, block: int) -> bool:
        """Nothing registered continues the block."""
        ...

    def depth(self, block: int) -> int:
        """Position of a registered block in its chain; 0 where not kept."""
        ...

    def check(self, keys: list[bytes | None]) -> None:
        """Raise `InvariantError` unless the index names exactly the blocks that have a key."""
        ...


@dataclass(eq=False)
class _Pinned:
    chain: TokenChain
    blocks: list[int]


class Index:
    """The plain nature of an index: flat (any block may be evicted first), with twins, trusting digests."""

    indexes: bool = True
    leaf_only: bool = False
    exclusive: bool = False
    verifies: bool = False

    def verifying(self) -> PrefixIndex | None:
        return None

    def leading_leaves(self, blocks: list[int]) -> int:
        return len(blocks)

    def is_leaf(self, block: int) -> bool:
        return True

    def depth(self, block: int) -> int:
        return 0


@dataclass(eq=False)
class TableIndex(Index):
    """Sharing by fork and by pinned prefixes only: the block tables of PagedAttention.

    A pinned prefix is found by its tokens, to the token: the last shared block may be partly filled, and
    whoever writes into it first copies it.

    Source: Kwon et al., SOSP 2023, section 4.4.
    """

    indexes: bool = False
    verifies: bool = True
    pinned: list[_Pinned] = field(default_factory=list)

    def pin(self, chain: TokenChain, blocks: list[int]) -> None:
        """Offer the chain's tokens, in these blocks, to every sequence that starts with them."""
        self.pinned.append(_Pinned(chain.fork(), list(blocks)))

    def unpin(self, chain: TokenChain) -> None:
        """Withdraw a pinned prefix."""
        self.pinned = [
            p for p in self.pinned if p.chain.tokens != chain.tokens or p.chain.extra != chain.extra
        ]

    def lookup(self, chain: TokenChain, max_tokens: int) -> tuple[list[int], int]:
        best: tuple[list[int], int] = ([], 0)
        for pinned in self.pinned:
            if pinned.chain.extra == chain.extra:
                shared = common_prefix(pinned.chain.tokens, chain.tokens, max_tokens)
                if shared > best[1]:
                    best = (pinned.blocks[: -(-shared // chain.block_size)], shared)
        return best

    def resident(self, chain: TokenChain, num_blocks: int) -> list[int]:
        size = chain.block_size
        blocks, tokens = self.lookup(chain, num_blocks * size)
        full = blocks[: tokens // size]
        return full + [0] * (num_blocks - len(full))

    def below(self, chain: TokenChain, num_blocks: int, max_tokens: int) -> tuple[int, int]:
        return 0, 0

    def foreign(self, chain: TokenChain) -> bool:
        size = chain.block_size
        return any(
            p.chain.extra != chain.extra and p.chain.tokens[:size] == chain.tokens[:size]
            for p in self.pinned
            if len(p.chain) >= size
        )

    def register(
        self, chain: TokenChain, first: int, blocks: list[int], previous: int, *, dedup: bool
    ) -> tuple[list[int], int]:
        return blocks, 0

    def forget(self, blocks: list[int], keys: list[bytes]) -> None:
        raise InvariantError(f"blocks {blocks}: a table index registers no content")

    def copies(self, key: bytes) -> int:
        return 0

    def check(self, keys: list[bytes | None]) -> None:
        named = [b for b, key in enumerate(keys) if key is not None]
        if named:
            raise InvariantError(f"blocks {named}: have keys under a table index")


def common_prefix(a: list[int], b: list[int], limit: int) -> int:
    """Length of the common prefix of two token lists, at most `limit`."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_prefix_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Whole tokens in the common prefix of two runs of i32le bytes."""
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return size // 4 if not differ else ((differ & -differ).bit_length() - 1) // 32
