"""What preempting a request will cost, by moving its blocks to the host and back, or by computing them again.

The rule of `scheduler.preemption = auto`, in one place:

    swap      2 * bytes of its own blocks / bandwidth between device and host
    recompute tokens whose KV is dropped * seconds per prompt token

The smaller wins. Both rates are medians of what the last steps showed, less what they spent on compiling;
before anything was copied the configured bandwidth stands in. Recomputation is taken at its worst: under the
pressure that preempts, what a request leaves in the prefix cache seldom stays.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedjax.cache import CopyPlan
from pagedjax.engine.times import StepSeconds

_WINDOW = 15
_LEAST_TOKENS = 8  # a step of fewer tokens says little about the rate of a prefill


@dataclass(eq=False)
class PreemptionCost:
    """Predicts both costs from the bytes and from measured rates.

    Attributes:
        block_bytes: Bytes of one block, per KV group.
        bandwidth_bytes: Bytes per second between device and host until copies were measured.
    """

    block_bytes: Sequence[int]
    bandwidth_bytes: float
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _byte_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def observe(self, num_tokens: int, num_prefills: int, copies: CopyPlan, result: StepSeconds) -> None:
        """Book a step.

        Args:
            num_tokens: Tokens it computed.
            num_prefills: Rows of more than one token among them; a step without says nothing of prefills.
            copies: Copies it began with.
            result: Its seconds.
        """
        if num_prefills and num_tokens >= _LEAST_TOKENS:
            self._token_s.append((result.elapsed_s - result.copy_s - result.compile_s) / num_tokens)
        swaps = [batch for batch in copies.batches if batch.kind != "cow"]
        if swaps and len(swaps) == len(copies.batches) and self.block_bytes:
            num_bytes = sum(len(batch.src) * self.block_bytes[batch.group] for batch in swaps)
            if num_bytes and result.copy_s > 0:
                self._byte_s.append(result.copy_s / num_bytes)

    def swap_s(self, blocks: Sequence[int]) -> float:
        """Seconds to move so many blocks of each group out and back in."""
        num_bytes = sum(n * size for n, size in zip(blocks, self.block_bytes, strict=True))
        byte_s = statistics.median(self._byte_s) if self._byte_s else 1 / self.bandwidth_bytes
        return 2 * num_bytes * byte_s

    def recompute_s(self, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens again; None before a prefill was measured."""
        return num_tokens * statistics.median(self._token_s) if self._token_s else None

    def swap_pays(self, blocks: Sequence[int], num_tokens: int) -> bool:
        """Whether to swap; while nothing is known of prefills, no."""
        recompute_s = self.recompute_s(num_tokens)
        return recompute_s is not None and self.swap_s(blocks) < recompute_s
