"""CacheStats: what the cache did, counted where it happens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass
class CacheStats:
    """Counters since the manager was made.

    Counted when a sequence is admitted (its first successful `reserve`), so refused admissions leave no
    trace. What a preempted sequence hits again is kept apart: it is no success of the cache.

    Attributes:
        requests: Sequences admitted for the first time that might read the cache.
        prompt_tokens: Their tokens.
        hit_tokens: Of these, taken from the cache.
        opted_out_requests: Sequences admitted for the first time that asked not to read the cache; they are no
            part of the three above, nor of `hit_rate`.
        opted_out_tokens: Their tokens.
        resumed_requests: Admissions after a preemption.
        resumed_tokens: Their tokens.
        resumed_hit_tokens: Of these, taken from the cache.
        miss_reasons: `MissReason` value to first admissions whose match stopped for it.
        blocks_taken: Blocks handed out.
        blocks_indexed: Blocks that became findable.
        evictions: Blocks that lost their content to make room.
        copies: Blocks copied on write, partial hits included.
        partial_hits: Admissions that took part of a block.
        same_step_twins: Blocks that were computed although the same content was resident when they were
            done: their sequences could not see each other.
        dedup_blocks: Of these, freed at once because tables were rewritten to the first copy.
        swapped_out_blocks: Device to host, preemption and tier together.
        swapped_in_blocks: Host to device.
        host_hit_tokens: Hit tokens that came from the host tier.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    opted_out_requests: int = 0
    opted_out_tokens: int = 0
    resumed_requests: int = 0
    resumed_tokens: int = 0
    resumed_hit_tokens: int = 0
    blocks_taken: int = 0
    blocks_indexed: int = 0
    evictions: int = 0
    copies: int = 0
    partial_hits: int = 0
    same_step_twins: int = 0
    dedup_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    host_hit_tokens: int = 0
    miss_reasons: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens of first admissions; 0.0 before the first."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def snapshot(self) -> CacheStats:
        """A copy that no longer changes."""
        return dataclasses.replace(self, miss_reasons=dict(self.miss_reasons))

    def delta(self, before: CacheStats) -> CacheStats:
        """What happened since an earlier snapshot."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "miss_reasons"]
        counts = {name: getattr(self, name) - getattr(before, name) for name in names}
        reasons = {
            reason: count - before.miss_reasons.get(reason, 0)
            for reason, count in self.miss_reasons.items()
            if count != before.miss_reasons.get(reason, 0)
        }
        return CacheStats(**counts, miss_reasons=reasons)
