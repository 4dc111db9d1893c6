"""One sequence's books, and what running sequences are about to fill."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import Hints, Hit


@dataclass(eq=False, slots=True)
class SeqState:
    """One sequence's books.

    Attributes:
        tables: Block ids per group. Before the first `reserve` these are the hits of `begin`: recorded,
            not touched.
        computed: Positions whose KV is written.
        indexed: Blocks that were registered or taken from the cache, from the start.
        recorded: The hit waits for its first `reserve`.
        partial: Per group the (source block, tokens) of a partial hit; empty without one.
        seen: Recycle counts of the pools at `begin`: unchanged, no hit can have gone stale.
        frontier: Digest of the next block this sequence fills, if known.
        copies: Blocks copied on write for it.
        anchors: (group, position) to the registered copy of a block of which this sequence has a twin, where
            what follows the twin is registered behind that copy: referenced, in no table.
    """

    chain: TokenChain
    hints: Hints
    tables: list[list[int]]
    computed: int = 0
    indexed: int = 0
    recorded: bool = False
    partial: list[tuple[int, int]] = field(default_factory=list)
    seen: int = 0
    hit: Hit | None = None
    frontier: bytes | None = None
    copies: int = 0
    anchors: dict[tuple[int, int], int] = field(default_factory=dict)

    def fork(self, seq: int, child: int, chain: TokenChain) -> SeqState:
        """The books of a child that shares all written blocks; the caller adds the references.

        Args:
            seq, child: Names, for the errors.
            chain: The child's own tokens.

        Raises:
            ValueError: There are no blocks to share, or the chain is not this one's as far as KV is written.
        """
        if self.recorded:
            raise ValueError(f"sequence {seq}: has no blocks to share yet; reserve first")
        if len(chain) < self.computed:
            raise ValueError(f"chain of {len(chain)} tokens: the parent has computed {self.computed}")
        same = chain.tokens[: self.computed] == self.chain.tokens[: self.computed]
        if not same or chain.extra != self.chain.extra:
            raise ValueError(
                f"chain of {child}: differs from what {seq} has computed; fork the parent's chain"
            )
        count = -(-self.computed // chain.block_size)
        tables = [table[:count] for table in self.tables]
        return SeqState(chain, self.hints, tables, self.computed, self.indexed, anchors=dict(self.anchors))


class Filling:
    """Digests of the blocks that running sequences fill next, so that a twin can be told from a stranger."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._counts

    def start(self, state: SeqState) -> None:
        """Name the block the sequence fills next."""
        self.stop(state)
        if state.indexed < state.chain.num_full_blocks:
            digest = state.chain.digest(state.indexed)
            state.frontier = digest
            self._counts[digest] = self._counts.get(digest, 0) + 1

    def stop(self, state: SeqState) -> None:
        """The sequence fills nothing any more."""
        digest = state.frontier
        if digest is not None:
            state.frontier = None
            left = self._counts[digest] - 1
            if left:
                self._counts[digest] = left
            else:
                del self._counts[digest]
