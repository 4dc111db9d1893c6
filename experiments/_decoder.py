"""A real decoder on this machine's device: seeded weights, the real engine, runner and kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine, StepRecord
from pagedjax.engine.request import RequestOutput, SamplingParams
from pagedjax.engine.step import StepPlan
from pagedjax.models.config import ModelConfig

if TYPE_CHECKING:
    from pagedjax.runtime import Bucket

SIZES = "6 layers of 384, 6 heads of 64 over 2 KV heads, MLP of 1,024, 258 tokens; seeded float32 weights"
SEQS = 8
NOTE = (
    "times are of the machine that wrote the file and of a small decoder; ratios within the table carry over"
)


def config(smoke: bool) -> ModelConfig:
    """The decoder of the measured tables, or the tiny one of the tests."""
    from pagedjax.testing import tiny_config

    if smoke:
        return tiny_config(num_layers=1, max_model_len=96)
    return tiny_config(
        num_layers=6, d_model=384, num_heads=6, num_kv_heads=2, head_dim=64, d_mlp=1024, max_model_len=1024
    )


class SmallEngine:
    """One engine with its weights; `block_size` and caching as asked.

    Args:
        smoke: The tiny decoder.
        block_size: Tokens per block.
        prefix_caching: Reuse prefixes.
        index: Prefix index.
        share: Of the blocks that all sequences at full length would take, how many the pool has.
    """

    def __init__(
        self,
        *,
        smoke: bool,
        block_size: int = 16,
        prefix_caching: bool = True,
        index: str = "hash",
        share: float = 1.0,
    ) -> None:
        import jax

        from pagedjax.kernels import KVLayout
        from pagedjax.runtime import Buckets, JaxRunner
        from pagedjax.testing import tiny_params

        model = config(smoke)
        length = model.max_model_len
        scheduler = SchedulerConfig(max_num_seqs=SEQS, token_budget=length + SEQS)
        num_blocks = int(share * SEQS * length) // block_size + 1
        layout = KVLayout(
            model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim, "float32"
        )
        params = jax.tree.map(jax.device_put, tiny_params(model))
        buckets = Buckets(scheduler, decode_sizes=1 if smoke else 2, prefill_sizes=1 if smoke else 3)
        runner = JaxRunner(model, params, layout, scheduler, max_model_len=length, buckets=buckets)
        self.model, self.scheduler, self.length = model, scheduler, length
        self._runner = runner
        self.renew(prefix_caching=prefix_caching, index=index)

    def renew(
        self,
        *,
        prefix_caching: bool = True,
        index: str = "hash",
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """A new manager and engine on the same compiled runner; what the pool holds is not known to them."""
        manager = self.manager(prefix_caching=prefix_caching, index=index)
        self.engine = Engine(
            manager, self._runner, self.scheduler, max_model_len=self.length, on_step=on_step
        )

    def manager(self, *, prefix_caching: bool = True, index: str = "hash") -> PagedManager:
        """An empty manager for the runner's pool."""
        return PagedManager(
            num_blocks=self._runner.pool_blocks[0],
            block_size=self._runner.block_size,
            index=index,
            prefix_caching=prefix_caching,
        )

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[RequestOutput]:
        """Answer prompts together; outputs in order of the prompts."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        ids = [self.engine.add(list(prompt), sampling) for prompt in prompts]
        done: dict[str, RequestOutput] = {}
        while self.engine.has_work:
            done |= {o.request_id: o for o in self.engine.step() if o.finished}
        return [done[i] for i in ids]

    def seconds(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, list[RequestOutput]]:
        """`run`, and how long it took."""
        started = time.perf_counter()
        outputs = self.run(prompts, max_tokens)
        return time.perf_counter() - started, outputs

    def program(self, plan: StepPlan) -> Bucket:
        """Which of the compiled programs runs a plan."""
        return self._runner.buckets.smallest(plan)

    @property
    def block_size(self) -> int:
        return self._runner.block_size

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.engine.manager.reset()


def tokens(seed: int, *counts: int) -> list[int]:
    """Seeded byte tokens, each part from a stream of its own: equal (seed, part) give equal tokens."""
    parts = [np.random.default_rng([seed, i]).integers(0, 256, n).tolist() for i, n in enumerate(counts)]
    return [token for part in parts for token in part]
