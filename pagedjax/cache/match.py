"""How much of a chain is resident, where, and why no more."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from pagedjax.cache.groups import Group, common_hit
from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import Hit, MissReason
from pagedjax.cache.sequence import SeqState


@dataclass(eq=False)
class Matcher:
    """Looks chains up over all groups; changes nothing but the state it is given.

    Attributes:
        groups: KV groups.
        block_size: Tokens per block.
        partial: Least gain in tokens for a partial hit; 0: none.
        has_host: The groups have host tiers.
        one: The only group, if it is one of full attention: the quick path.
    """

    groups: list[Group]
    block_size: int
    partial: int
    has_host: bool = field(init=False)
    one: Group | None = field(init=False)

    def __post_init__(self) -> None:
        self.has_host = self.groups[0].tier.num_blocks > 0
        self.one = self.groups[0] if len(self.groups) == 1 and self.groups[0].window is None else None

    def count(self, chain: TokenChain, limit: int) -> int:
        """Tokens that a lookup of at most `limit` would hit now."""
        tables, tokens = self.match(chain, limit)
        if tokens % self.block_size == 0:
            tokens += self.below(chain, tables, tokens, limit)[0]
        return tokens

    def look_up(self, state: SeqState, limit: int, filling: Container[bytes]) -> Hit:
        """Record in a sequence's state what it may take from the cache.

        Args:
            state: Of a sequence that holds nothing yet.
            limit: Most tokens.
            filling: Digests of the blocks that running sequences are computing.
        """
        chain = state.chain
        state.tables, tokens = self.match(chain, limit)
        full = tokens // self.block_size
        state.computed = tokens
        state.indexed = full
        if self.has_host:  # what comes from the host has to be indexed again
            state.indexed = min([leading(table) for table in state.tables])
        if not self.groups[0].index.indexes:  # a table index matches to the token
            reason = MissReason.LAST_TOKEN if tokens == limit < len(chain) else MissReason.NO_MATCH
            return Hit(tokens, reason, tokens)
        gain, sources, below = self.below(chain, state.tables, tokens, limit)
        if gain:
            state.partial = sources
            state.computed += gain
        reason = self.reason(chain, full, gain, below, limit, filling)
        if self.one is None and tokens + self.block_size <= limit:
            group, evicted = self._stopped_by(chain, full, limit)
            if evicted and reason is MissReason.NO_MATCH:
                reason = MissReason.EVICTED
            return Hit(tokens + gain, reason, tokens + below, group)
        return Hit(tokens + gain, reason, tokens + below)

    def _stopped_by(self, chain: TokenChain, full: int, limit: int) -> tuple[int | None, bool]:
        """(the group that ends a hit of `full` blocks alone, if one does, whether it lost blocks to eviction)."""
        count = limit // self.block_size
        resident = [group.resident(chain, count) for group in self.groups]
        longest = [group.fit(blocks, count) for group, blocks in zip(self.groups, resident)]
        shortest = min(longest)
        evicted = False
        for group, blocks, own in zip(self.groups, resident, longest):
            if own == shortest:
                needed = range(group.first_needed((full + 1) * self.block_size), count)
                evicted |= any(not blocks[i] and chain.digest(i) in group.evicted for i in needed)
        alone = longest.count(shortest) == 1 and len(longest) > 1
        return (longest.index(shortest) if alone else None), evicted

    def still_there(self, state: SeqState) -> bool:
        """The blocks recorded in a state still hold what `look_up` found."""
        again, tokens = self.match(state.chain, state.computed)
        if again != state.tables or tokens + sum(t for _, t in state.partial[:1]) != state.computed:
            return False
        if not state.partial:
            return True
        return self.below(state.chain, again, tokens, state.computed)[1] == state.partial

    def match(self, chain: TokenChain, limit: int, *, host: bool = True) -> tuple[list[list[int]], int]:
        """Resident blocks per group, and how many tokens of at most `limit` they hold.

        With `host`, host slot h counts as resident and is written -1 - h until it is brought in.
        """
        if limit <= 0:
            return [[] for _ in self.groups], 0
        if self.one is not None:
            blocks, tokens = self.one.index.lookup(chain, limit)
            if self.has_host and host and len(self.one.tier) and tokens + self.block_size <= limit:
                self._continue_on_host(self.one, chain, blocks, limit // self.block_size)
                tokens = len(blocks) * self.block_size
            return [blocks], tokens
        count = limit // self.block_size
        resident = [group.resident(chain, count, host=host) for group in self.groups]
        count = common_hit(self.groups, resident, count)
        tables = []
        for group, blocks in zip(self.groups, resident):
            skip = group.first_needed(count * self.block_size)
            tables.append([0] * min(skip, count) + blocks[skip:count])
        return tables, count * self.block_size

    @staticmethod
    def _continue_on_host(group: Group, chain: TokenChain, blocks: list[int], count: int) -> None:
        """Go on with what the host has."""
        names, tier = group.names(chain, count), group.tier
        resident: list[int] = []
        for i in range(len(blocks), count):
            slot = tier.find(names[i])
            if slot >= 0:
                blocks.append(-1 - slot)
                continue
            resident = resident or group.index.resident(chain, count)
            if not resident[i]:
                break
            blocks.append(resident[i])

    def below(
        self, chain: TokenChain, tables: list[list[int]], tokens: int, limit: int
    ) -> tuple[int, list[tuple[int, int]], int]:
        """(tokens to copy, a source per group, tokens that match) in the block after the hit."""
        full = tokens // self.block_size
        room = len(chain) - tokens
        found = [group.index.below(chain, full, room) for group in self.groups]
        below = min(shared for _, shared in found)
        gain = min(below, limit - tokens)
        if not self.partial or gain < self.partial:
            return 0, [], below
        if self.has_host and min([leading(table) for table in tables]) < full:
            return 0, [], below  # what follows a block from the host need not be reachable on the device
        # The source must stay while it is copied: leave it a block outside the sequence's own.
        if -(-len(chain) // self.block_size) >= min(group.pool.num_usable for group in self.groups):
            return 0, [], below
        return gain, found, below

    def reason(
        self,
        chain: TokenChain,
        full: int,
        gain: int,
        below: int,
        limit: int,
        filling: Container[bytes],
    ) -> MissReason:
        """Why a hit of `full` blocks and `gain` tokens is not longer.

        Args:
            below: Tokens that match in the block after the full ones.
            limit: Most tokens the hit might have had.
            filling: Digests of the blocks that running sequences are computing.
        """
        size = self.block_size
        tokens = full * size + gain
        if below >= min(size, len(chain) - full * size) and tokens >= limit // size * size:
            return MissReason.LAST_TOKEN
        if tokens == limit:
            return MissReason.NONE
        if full < chain.num_full_blocks:
            digest = chain.digest(full)
            if digest in filling:
                return MissReason.SAME_STEP_TWIN
            if any(digest in group.evicted for group in self.groups):
                return MissReason.EVICTED
        if below > gain:
            return MissReason.BELOW_BLOCK_FLOOR
        if full == 0 and self.groups[0].index.foreign(chain):
            return MissReason.OTHER_NAMESPACE
        if full * size >= limit // size * size:
            return MissReason.NONE
        return MissReason.NO_MATCH


def leading(table: list[int]) -> int:
    """Entries of a recorded table before the first that is still on the host."""
    return next((i for i, b in enumerate(table) if b < 0), len(table))
