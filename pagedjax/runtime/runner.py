"""JaxRunner: parameters, the KV pool, and one jitted step per bucket, the pool donated."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from pagedjax.cache import CopyPlan
from pagedjax.config import SchedulerConfig
from pagedjax.engine import StepResult
from pagedjax.kernels import KVLayout, KVPool, copy_blocks, make_pool
from pagedjax.model_config import ModelConfig
from pagedjax.models import forward, logits, make_decoder
from pagedjax.runtime.batch import Bucket, Buckets, StepBatch, pack
from pagedjax.runtime.sampling import sample_tokens
from pagedjax.scheduler import StepPlan

Array = Any
_COPY_BUCKET = 8  # copies per call: a fork of n samples makes n-1, and padding is gathered too


class JaxRunner:
    """Runs plans on a jax device.

    Args:
        model: Shapes of the decoder.
        params: Its weights, a plain dict (dispatch of module trees is slow).
        layout: Shape of the KV pool.
        config: Limits of one step; they fix the buckets.
        max_model_len: Longest sequence in tokens; fixes the width of block tables.
        buckets: Step shapes to compile; None is the full ladder of `config`.
        implementation: Attention implementation; None tries the preferred order.
        on_compile: Called with a bucket before its program is compiled.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: dict[str, Any],
        layout: KVLayout,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        buckets: Buckets | None = None,
        implementation: str | None = None,
        on_compile: Callable[[Bucket], None] | None = None,
    ) -> None:
        self.model = model
        self.params = params
        self.layout = layout
        self.num_blocks = layout.num_blocks
        self.block_size = layout.block_size
        self.buckets = buckets or Buckets(config)
        self.pool: KVPool = make_pool(layout)
        self.on_compile = on_compile
        self._table_width = -(-max_model_len // layout.block_size)
        self._compiled: set[Bucket] = set()
        graphdef = make_decoder(model, jax.tree.leaves(params)[0].dtype)
        windows = tuple(dict.fromkeys(model.window(layer) for layer in range(model.num_layers)))
        self._pack = functools.partial(
            pack, block_size=self.block_size, table_width=self._table_width, windows=windows
        )

        def step(params: dict[str, Any], pool: KVPool, batch: StepBatch) -> tuple[Array, Array, KVPool]:
            hidden, pool = forward(
                graphdef,
                params,
                batch.tokens,
                batch.positions,
                pool,
                batch.ragged,
                implementation=implementation,
            )
            rows = logits(graphdef, params, hidden[batch.sample_index])
            tokens, logprobs = sample_tokens(rows, batch.sampling)
            return tokens, logprobs, pool

        self.step_fn = jax.jit(step, donate_argnums=1)
        self.copy_fn = jax.jit(copy_blocks, donate_argnums=0)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's copies, then its rows; the pool is updated in place."""
        started = time.perf_counter()
        self._run_copies(plan.copies)
        bucket = self.buckets.smallest(plan)
        batch = self._pack(plan, bucket)
        packed = time.perf_counter()
        tokens, logprobs = self._dispatch(bucket, batch)
        dispatched = time.perf_counter()
        count = plan.num_samples
        token_list = np.asarray(tokens)[:count].tolist()
        logprob_list = np.asarray(logprobs)[:count].tolist()
        ended = time.perf_counter()
        return StepResult(token_list, logprob_list, ended - started, packed - started, dispatched - packed)

    def warm_up(
        self, on_done: Callable[[Bucket], None] | None = None, buckets: Iterable[Bucket] | None = None
    ) -> None:
        """Compile buckets' programs and the copy program by running them on nothing but padding.

        Args:
            on_done: Called after each bucket.
            buckets: Which; None is the whole ladder. Others compile when they are first needed.
        """
        empty = StepPlan(0, (), (), CopyPlan())
        none = np.full(_COPY_BUCKET, -1, np.int32)
        self.pool = self.copy_fn(self.pool, none, none)
        for bucket in self.buckets.ladder if buckets is None else buckets:
            self._dispatch(bucket, self._pack(empty, bucket))
            if on_done is not None:
                on_done(bucket)

    def lower(self, bucket: Bucket, layout: KVLayout | None = None) -> jax.stages.Lowered:
        """The step of a bucket, lowered but not run: for memory analysis and compiling elsewhere.

        Args:
            bucket: Shapes of the step.
            layout: Of a pool of another size than the runner's; nothing is allocated.
        """
        layout = layout or self.layout
        pool = KVPool(jax.ShapeDtypeStruct(layout.shape, layout.dtype), layout)  # type: ignore[arg-type]
        empty = StepPlan(0, (), (), CopyPlan())
        return self.step_fn.lower(self.params, pool, self._pack(empty, bucket))

    @property
    def num_programs(self) -> int:
        """Step programs compiled so far."""
        return self.step_fn._cache_size()  # type: ignore[attr-defined]

    def _dispatch(self, bucket: Bucket, batch: StepBatch) -> tuple[Array, Array]:
        if bucket not in self._compiled:
            if self.on_compile is not None:
                self.on_compile(bucket)
            self._compiled.add(bucket)
        tokens, logprobs, self.pool = self.step_fn(self.params, self.pool, batch)
        return tokens, logprobs

    def _run_copies(self, copies: CopyPlan) -> None:
        """Copy-on-write: within a batch no block is written twice, so padded slices may run in turn."""
        for group in copies.batches:
            for at in range(0, len(group.src), _COPY_BUCKET):
                src = np.full(_COPY_BUCKET, -1, np.int32)
                dst = np.full(_COPY_BUCKET, -1, np.int32)
                part = group.src[at : at + _COPY_BUCKET]
                src[: len(part)] = part
                dst[: len(part)] = group.dst[at : at + _COPY_BUCKET]
                self.pool = self.copy_fn(self.pool, src, dst)
