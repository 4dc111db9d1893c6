"""The few shapes that steps are padded to: one compiled program each, known to whoever has to say what a step costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagedjax.cache.rules import next_power_of_two
from pagedjax.config import SchedulerConfig
from pagedjax.engine.step import StepPlan


@dataclass(frozen=True, order=True)
class Bucket:
    """The static shapes of one compiled step.

    Attributes:
        num_decodes: One-token rows it has room for.
        num_prefill_tokens: Tokens of longer rows it has room for; 0: a pure decode step.
        num_seqs: Rows in total.
        num_samples: Rows that draw a token.
    """

    num_decodes: int
    num_prefill_tokens: int
    num_seqs: int
    num_samples: int

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    def fits(self, decodes: int, prefill_tokens: int, seqs: int, samples: int) -> bool:
        return (
            decodes <= self.num_decodes
            and prefill_tokens <= self.num_prefill_tokens
            and seqs <= self.num_seqs
            and samples <= self.num_samples
        )

    def __str__(self) -> str:
        return f"{self.num_decodes} decodes + {self.num_prefill_tokens} prefill tokens"


# Of a deterministic engine: few, as a decode step pays for all of them; enough that prefill reads the weights seldom.
SLICE_TOKENS = 32
SLICE = Bucket(SLICE_TOKENS, 0, SLICE_TOKENS, SLICE_TOKENS)


class Buckets:
    """The ladder of step shapes: at most 12, so at most 12 compiled programs.

    Up to three sizes of decode batch (max_num_seqs, 1, a quarter of it), alone and beside up to three sizes
    of prefill tokens (the largest chunk or budget, a quarter, a sixteenth). Warm-up and packing read this
    one object, so they cannot drift.

    Args:
        config: Limits of one step.
        decode_sizes: 1 to 3. Fewer compile sooner and pad more.
        prefill_sizes: 1 to 3, likewise.
    """

    # A step of prefills alone seldom ends more prompts than this; one that does takes a wider bucket.
    _FEW_SAMPLES = 8

    def __init__(self, config: SchedulerConfig, decode_sizes: int = 3, prefill_sizes: int = 3) -> None:
        for name, size in (("decode_sizes", decode_sizes), ("prefill_sizes", prefill_sizes)):
            if not 1 <= size <= 3:
                raise ValueError(f"{name}={size}: must be 1, 2 or 3; 3 pads least")
        seqs, most = config.max_num_seqs, config.token_budget
        chunk = config.chunk_tokens or most
        decodes = sorted({seqs, *(1, next_power_of_two(max(1, seqs // 4)))[: decode_sizes - 1]})
        parts = (next_power_of_two(max(2, chunk // 4)), next_power_of_two(max(2, chunk // 16)))
        prefill = sorted({most, *(min(p, most) for p in parts[: prefill_sizes - 1])})
        ladder = {Bucket(d, 0, d, d) for d in decodes}
        for tokens in prefill:
            ladder.add(Bucket(0, tokens, seqs, min(self._FEW_SAMPLES, seqs)))
            beside = decodes[1:] if decodes[0] == 1 and seqs > 1 else decodes
            ladder |= {Bucket(d, tokens, seqs, max(d, min(self._FEW_SAMPLES, seqs))) for d in beside}
        self.ladder = tuple(sorted(ladder, key=lambda b: (b.num_tokens, b.num_samples)))

    def smallest(self, plan: StepPlan) -> Bucket:
        """The bucket with the fewest tokens that holds the plan."""
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        return smallest(self.ladder, decodes, plan.num_tokens - decodes, len(plan.rows), plan.num_samples)


def smallest(ladder: Iterable[Bucket], decodes: int, prefill_tokens: int, seqs: int, samples: int) -> Bucket:
    """The first bucket of a ladder, in order of tokens, that holds so much.

    Raises:
        ValueError: None does.
    """
    need = (decodes, prefill_tokens, seqs, samples)
    last = None
    for last in ladder:
        if last.fits(*need):
            return last
    raise ValueError(f"step of {need}: exceeds every bucket up to {last}; widen the limits")
