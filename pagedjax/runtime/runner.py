"""JaxRunner: parameters, the KV pools, and one jitted step per bucket, the pools donated; on one device or several."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.cache import CopyPlan
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Sequence, SharedPrefix, StepResult
from pagedjax.engine.shapes import SLICE, SLICE_TOKENS, Bucket, Buckets
from pagedjax.engine.step import StepPlan
from pagedjax.kernels import PACKAGED, KVLayout, KVPool, RaggedBatch, Tuning, native, plan_sizes
from pagedjax.kernels.layout import device_class
from pagedjax.kernels.products import choose as choose_products
from pagedjax.kernels.products import prepare as prepare_products
from pagedjax.models import abstract_params, forward, logits, make_decoder
from pagedjax.models.config import ModelConfig
from pagedjax.models.weights import flat, set_leaf
from pagedjax.runtime.asked import ON_ONE_DEVICE, AskedPrograms, ask, wants_scores
from pagedjax.runtime.batch import StepBatch, check_batch, pack, plan_groups, shared_prefixes
from pagedjax.runtime.checked import StepChecks
from pagedjax.runtime.compile_clock import CompileClock
from pagedjax.runtime.following import Led
from pagedjax.runtime.host_pool import BlockCopies
from pagedjax.runtime.hosts import Channel
from pagedjax.runtime.launched import Answered, Computed, Launched, Several, answered
from pagedjax.runtime.mesh import ONE_DEVICE, Placement
from pagedjax.runtime.prompt_scores import PromptScores
from pagedjax.runtime.sampling import sample_tokens
from pagedjax.runtime.settings import own_settings
from pagedjax.runtime.slices import Slice, cut
from pagedjax.runtime.steps import StepsBatch, StepsOutput, make_steps, pack_steps
from pagedjax.runtime.weights import check_same_shapes, deal, in_place_of, row_by_row

Array = Any


class StepOutput(NamedTuple):
    """What a step leaves on the device beside the pools.

    Attributes:
        tokens: i32[Q] drawn tokens.
        logits: f32[Q, V] they were drawn from.
        hidden: f[T, D] of the step's tokens.
        drawn: i32[N] the tokens once more, padded to the most of any bucket: what the next step may be fed.
    """

    tokens: Array
    logits: Array
    hidden: Array
    drawn: Array


class JaxRunner:
    """Runs plans on a jax device, or on several as one, under JAX settings of its own (`runtime.settings`).

    Args:
        model: Shapes of the decoder.
        params: Its weights, a plain dict (dispatch of module trees is slow). Arrays that do not lie row by row
            are copied to lie so. Whole leaves; with several devices also leaves that lie where `place` wants them.
            With shapes in place of arrays nothing is allocated, and programs can be lowered, not run.
        layouts: Shape of the KV pool of all layers, or one per entry of `model.layer_groups`, each with the
            layers of its group: blocks behind a window can then be used again.
        config: Limits of one step; they fix the buckets.
        max_model_len: Longest sequence in tokens; fixes the width of block tables.
        buckets: Step shapes to compile; None is the full ladder of `config`.
        host_blocks: Host blocks per group, where swapped and evicted ones go.
        implementation: Attention implementation; None tries the preferred order.
        on_compile: Called with a bucket before its program is compiled.
        writable: Checked mode: bool[P] per group, blocks that may be written now (the manager's `writable`);
            every step is asserted on the device before it runs. None: nothing is asserted, at no cost.
        prefix_groups: Whether prefixes that decode rows share are worked once: the setting of this name.
        deterministic: The setting of this name: one program of one shape computes every step, slice by slice.
        tuning: The user's own sizes of kernels' pieces, before those of the package.
        place: The devices, from `runtime.mesh.make_place`.
        products: Who multiplies with weights: the setting of this name.
        num_steps: Most steps of decode rows in one call: the setting of this name.

    Attributes:
        layouts: Of the whole model's pools; a device's part is `pools[group].layout`.
        pools: The KV pool of each group, donated to each step and replaced by what it returns. With several devices its
            minor axis holds their parts side by side.
        may_plan: Whether plans may come here; not to a process that follows another.
        products: "native" or "xla", what the setting came to.
        weights_version: Grows with every change of the weights; the engine sees it and computes anew what is cached.

    Raises:
        ValueError: As many layouts are given as neither one nor the model's groups, or they disagree.
    """

    @own_settings()
    def __init__(
        self,
        model: ModelConfig,
        params: dict[str, Any],
        layouts: KVLayout | Seq[KVLayout],
        config: SchedulerConfig,
        *,
        max_model_len: int,
        buckets: Buckets | None = None,
        host_blocks: int = 0,
        implementation: str | None = None,
        on_compile: Callable[[Bucket], None] | None = None,
        writable: Callable[[], tuple[np.ndarray, ...]] | None = None,
        prefix_groups: str = "auto",
        deterministic: bool = False,
        tuning: Tuning = PACKAGED,
        place: Placement = ONE_DEVICE,
        products: str = "auto",
        num_steps: int = 1,
    ) -> None:
        native.prepare(implementation)
        prepare_products(products)
        self.model = model
        self.place = place
        self._params = jax.tree.map(row_by_row, place.put(params))
        self.weights_version = 0
        self.layouts = (layouts,) if isinstance(layouts, KVLayout) else tuple(layouts)
        windows = _windows(model, self.layouts)
        self.pool_blocks = tuple(layout.num_blocks for layout in self.layouts)
        self.block_size = self.layout.block_size
        self.vocab_size: int | None = model.vocab_size
        self.buckets = buckets or Buckets(config)
        self.deterministic = deterministic
        self._parts = tuple(place.layout(layout) for layout in self.layouts)
        self.pools: tuple[KVPool, ...] = self._new_pools()
        self._compiling = CompileClock()
        self.copies = BlockCopies(self._parts, host_blocks, self._compiling, place)
        self._asked = ON_ONE_DEVICE if place.devices == 1 else AskedPrograms.on(place)
        self.on_compile = on_compile
        self.writable = writable
        self._check_step = StepChecks(self.layouts, [w[0] if len(w) == 1 else None for w in windows])
        self._table_width = -(-max_model_len // self.block_size)
        self._most_samples = most_samples = max(bucket.num_samples for bucket in self.programs)
        self._drawn = self._nothing_drawn()
        self._compiled: set[tuple[Bucket, bool, bool]] = set()
        self.num_steps = num_steps
        dtype = jax.tree.leaves(params)[0].dtype
        beside = _beside_linear(model, dtype)
        self.products = choose_products(products, dtype, place.devices, beside=beside)
        graphdef = make_decoder(model, dtype, place.cut, self.products)
        sizes = plan_sizes(self.layout, model.num_heads, tuning)
        shapes: dict[str, Any] = {
            "block_size": self.block_size,
            "windows": windows,
            "chunk_tokens": sizes["chunk_tokens"],
        }
        self._pack: Callable[..., StepBatch] = functools.partial(
            pack,
            table_width=self._table_width,
            tile_queries=sizes["tile_queries"],
            apart=deterministic,
            tuning=tuning,
            most_samples=most_samples,
            **shapes,
        )
        self._plan_work: Callable[..., tuple[RaggedBatch, ...]] = functools.partial(
            plan_groups, tile_queries=sizes["tile_queries"], tuning=tuning, **shapes
        )
        mode = "off" if deterministic else prefix_groups
        self._shared: Callable[..., tuple[SharedPrefix, ...]] = functools.partial(
            shared_prefixes, mode=mode, device=device_class(), **shapes
        )

        def run_decoder(
            params: dict[str, Any], batch: StepBatch, pools: tuple[KVPool, ...]
        ) -> tuple[Array, tuple[KVPool, ...]]:
            tokens = jnp.where(batch.tokens < 0, batch.drawn[-1 - batch.tokens], batch.tokens)
            call: Callable[..., Any] = functools.partial(
                forward, graphdef, params, tokens, batch.positions, implementation=implementation
            )
            if len(pools) > 1:
                return call(pools, batch.ragged)
            hidden, pool = call(pools[0], batch.ragged[0])  # one pool serves layers of any window
            return hidden, (pool,)

        def step(
            params: dict[str, Any], pools: tuple[KVPool, ...], batch: StepBatch
        ) -> tuple[StepOutput, tuple[KVPool, ...]]:
            check_batch(batch)  # while tracing; a compiled step has nothing of it
            hidden, pools = run_decoder(params, batch, pools)
            rows = logits(graphdef, params, hidden[batch.sample_index])
            tokens = sample_tokens(rows, batch.sampling, place.vocabulary)
            drawn = jnp.pad(tokens, (0, batch.drawn.shape[0] - tokens.shape[0]))
            return StepOutput(tokens, rows, hidden, drawn), pools

        results = (StepOutput("whole", "logits", "whole", "whole"), "pool")
        self.step_fn = place.program(step, ("weights", "pool", "whole"), results, donate=(1,))
        steps = make_steps(run_decoder, functools.partial(logits, graphdef), place.vocabulary)
        self.steps_fn = place.program(
            steps, ("weights", "pool", "whole"), (StepsOutput("whole", "whole", "whole"), "pool"), donate=(1,)
        )
        self.prompt_scores = PromptScores(functools.partial(logits, graphdef), place)
        self._max_model_len = max_model_len
        self._channel: Channel | None = None
        self._done_at = 0.0  # when the last step had ended
        self.may_plan = True

    def lead(self, channel: Channel) -> None:
        """From now on tell other processes' runners what this one's devices do (`runtime.following`)."""
        self._channel = channel
        self._asked = AskedPrograms(
            Led(channel, "draw", self._asked.draw, slice(2, 3)),
            Led(channel, "score", self._asked.score, slice(0)),
        )
        scores = self.prompt_scores
        scores._score = Led(channel, "prompt", scores._score, slice(2, 4))

    def _new_pools(self) -> tuple[KVPool, ...]:
        """Empty pools, committed to the weights' device where those are: a step returns them so.

        A pool that is not would give the first bucket's program a second time, with every later pool.
        """
        if isinstance(jax.tree.leaves(self._params)[0], jax.ShapeDtypeStruct):
            return tuple(self.place.pool_shape(layout) for layout in self._parts)  # programs are only lowered
        pools = tuple(self.place.make_pool(layout) for layout in self._parts)
        if self.place.devices > 1:
            return pools
        held = (x.sharding for x in jax.tree.leaves(self._params) if isinstance(x, jax.Array) and x.committed)
        return jax.device_put(pools, next(held, None))

    def _nothing_drawn(self) -> Array:
        """i32[N] of zeros where a step leaves what it drew, so that every step's program is given it alike."""
        data = self.pools[0].data
        if isinstance(data, jax.ShapeDtypeStruct):
            return np.zeros(self._most_samples, np.int32)  # programs are only lowered
        zeros = self.place.zeros(self._most_samples)
        if self.place.devices > 1 or not data.committed:
            return zeros
        return jax.device_put(zeros, data.sharding)

    @property
    def params(self) -> dict[str, Any]:
        """The weights, to read: a plain dict made afresh. `update_weights` changes them.

        With several devices they are put together on the host, of several hosts on the first: `leaves` gives one at a
        time.
        """
        own: dict[str, Any] = {}
        for path, leaf in self.leaves():
            set_leaf(own, path, leaf)
        return own

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Array]]:
        """(path, whole leaf) of the weights, in sorted order; with several devices made whole one by one."""
        for name, leaf in flat(self._params):
            path, channel = tuple(name.split("/")), self._channel
            ask = None if channel is None else functools.partial(channel.ask, ("leaf", path))
            yield path, self.place.whole(path, leaf, ask)

    @own_settings()
    def update_weights(self, params: dict[str, Any], *, source: tuple[str, str] | None = None) -> None:
        """Compute with other weights from the next step on.

        What the pools hold was computed with the old ones. The engine above sees that `weights_version` has grown and
        computes anew what is cached, pinned or running (`Engine.step`); `LLM.update_weights` does it at once.

        Args:
            params: As given at first: the same names, shapes and dtypes. On several hosts process 0 deals out what no
                `source` says.
            source: The model that they were read from, as a setting and a digest of a sample of it; the other
                processes of a run on several hosts read it, too.

        Raises:
            ValueError: Names what differs; nothing was changed, and nobody told.
        """
        ours, channel = self._params, self._channel
        dealt = [self.place.holds(leaf) for leaf in jax.tree.leaves(params)]
        if not all(dealt):  # whole ones
            ours = abstract_params(self.model, jax.tree.leaves(ours)[0].dtype)
        check_same_shapes(ours, params)
        if channel is not None and source is None and self.place.num_here < self.place.devices and any(dealt):
            raise ValueError(
                "update_weights: arrays lie on this process's devices alone; give whole ones, as runner.params has them"
            )
        with self._together():
            if channel is not None and source is None:
                deal(channel, self.place, params)
            if channel is not None:
                channel.tell(("weights", source))
            self._params = jax.tree.map(in_place_of, self._params, self.place.put(params))
            self.weights_version += 1

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Where something fails in here, the other processes end: nobody knows how far they got."""
        try:
            yield
        except BaseException as error:
            if self._channel is not None:
                self._channel.abandon(error)
            raise

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each group, on all devices together."""
        return tuple(self.place.devices * part.num_bytes // part.num_blocks for part in self._parts)

    @property
    def layout(self) -> KVLayout:
        """Layout of the first group's pool."""
        return self.layouts[0]

    @own_settings()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's copies, then its rows; the pools are updated in place."""
        self.check_may_plan()
        with self._together():
            return self._collect(self._launch(plan, None))

    @own_settings()
    def launch(self, plan: StepPlan, after: Launched | None) -> Launched:
        """Begin a step, behind those that run; see `AheadRunner.launch`.

        Raises:
            ValueError: `after` is not the step begun last, or steps are deterministic: a step is several calls there.
        """
        self._check_launch(after)
        with self._together():
            return self._launch(plan, after)

    @own_settings()
    def collect(self, launched: Launched) -> StepResult:
        """Wait for the end of a step."""
        with self._together():
            return self._collect(launched)

    @own_settings()
    def launch_several(self, plans: Seq[StepPlan], after: Launched | None) -> Launched:
        """Begin several steps in one call; see `SeveralRunner.launch_several`, and `launch` for what is raised.

        Raises:
            ValueError: They are more than `num_steps`.
        """
        if len(plans) > self.num_steps:
            raise ValueError(
                f"launch_several of {len(plans)} steps: the runner was built for num_steps={self.num_steps}"
            )
        self._check_launch(after)
        with self._together():
            return self._launch(plans[0], after, plans)

    @own_settings()
    def collect_several(self, launched: Launched) -> list[StepResult]:
        """Wait for the end of steps that were begun together."""
        with self._together():
            return self._collect_several(launched)

    def _check_launch(self, after: Launched | None) -> None:
        self.check_may_plan()
        if after is not None and after.drawn is not self._drawn:
            raise ValueError("launch: after must be the step begun last; what it drew is on the device")
        if self.deterministic:
            raise ValueError("launch: a deterministic step is several calls; use execute")

    def check_may_plan(self) -> None:
        """Refuse what only process 0 may ask for.

        Raises:
            ValueError: This process follows it.
        """
        if not self.may_plan:
            raise ValueError(
                "this process follows another: process 0 plans; call LLM.follow() here, the rest there"
            )

    def _launch(self, plan: StepPlan, after: Launched | None, plans: Seq[StepPlan] = ()) -> Launched:
        started = time.perf_counter()
        compiling = self._compiling
        compiling.seconds = 0.0
        self.run_copies(plan.copies)
        copied = time.perf_counter()
        copy_s = copied - started - compiling.seconds
        samples = [seq for row in plan.rows for seq in row.samples]
        shared: tuple[SharedPrefix, ...] = ()
        parts: list[Computed | Answered] = []
        slices: list[Slice] = []
        several: Several | None = None
        shared_s = 0.0
        if plan.rows:
            shared = self._shared(plan)
            shared_s = time.perf_counter() - copied
            if self.deterministic:
                slices = cut(plan, SLICE_TOKENS)
                scored = wants_scores(samples)
                # Each is waited for: the logits of all would be much to hold.
                parts += [answered(self._compute(one.plan, SLICE, (), scored, {})) for one in slices]
            else:
                drawn = {} if after is None else {seq: i for i, seq in enumerate(after.samples)}
                bucket = self.buckets.smallest(plan)
                if plans:
                    several = self._compute_several(plans, bucket, shared, drawn)
                else:
                    parts.append(self._compute(plan, bucket, shared, None, drawn))
        return Launched(
            samples,
            parts,
            slices,
            self._drawn,
            shared,
            started,
            shared_s,
            copy_s,
            compiling.seconds,
            plans,
            several,
        )

    def _collect(self, step: Launched) -> StepResult:
        result, self._done_at = step.wait(self._done_at)
        return result

    def _collect_several(self, step: Launched) -> list[StepResult]:
        results, self._done_at = step.wait_for_several(self._done_at)
        return results

    def _compute_several(
        self,
        plans: Seq[StepPlan],
        bucket: Bucket,
        shared: tuple[SharedPrefix, ...],
        drawn: Mapping[Sequence, int],
    ) -> Several:
        """Begin one call for several steps."""
        began = time.perf_counter()
        first = self._pack(plans[0], bucket, shared=shared, drawn=drawn)

        def plan_work(lens: np.ndarray) -> tuple[RaggedBatch, ...]:
            return self._plan_work(np.ones(len(lens), np.int32), lens, plans[0].tables, bucket, shared)

        batch, work = pack_steps(first, plans, self.num_steps, plan_work)
        if self.writable is not None:
            for one in work:
                self._check_step(one, self.writable())
        packed = time.perf_counter()
        before = self._compiling.seconds
        out = self._dispatch_several(bucket, batch, bool(shared))
        out.tokens.copy_to_host_async()
        out.taken.copy_to_host_async()
        dispatch_s = time.perf_counter() - packed - (self._compiling.seconds - before)
        return Several(out, packed - began, dispatch_s)

    def _compute(
        self,
        plan: StepPlan,
        bucket: Bucket,
        shared: tuple[SharedPrefix, ...],
        scored: bool | None,
        drawn: Mapping[Sequence, int],
    ) -> Computed:
        """Begin one call of a program, and what its samples' requests ask for."""
        compiling = self._compiling
        began = time.perf_counter()
        batch = self._pack(plan, bucket, shared=shared, drawn=drawn)
        if self.writable is not None:
            self._check_step(batch.ragged, self.writable())
        packed = time.perf_counter()
        before = compiling.seconds
        out = self._dispatch(bucket, batch, bool(shared))
        dispatch_s = time.perf_counter() - packed - (compiling.seconds - before)
        samples = [seq for row in plan.rows for seq in row.samples]
        asking = ask(
            samples,
            out.tokens,
            out.logits,
            batch.sampling,
            self._max_model_len,
            compiling,
            self._asked,
            scored,
        )
        prompt = self.prompt_scores.of(plan, self._params, out.hidden, compiling)
        return Computed(asking, prompt, packed - began, dispatch_s)

    @own_settings()
    def recover(self) -> bool:
        """New pools where a failed step, to which the old ones were donated, did not give them back.

        Returns:
            Whether contents were lost; those of the host are not.
        """
        self._drawn = self._nothing_drawn()
        try:
            jax.block_until_ready([pool.data for pool in self.pools])
        except RuntimeError:  # deleted, or the result of a computation that failed
            self.pools = self._new_pools()
            return True
        return False

    @own_settings()
    def run_copies(self, copies: CopyPlan) -> None:
        """Run block copies alone; `execute` begins with it."""
        with self._together():
            if self._channel is not None and copies.batches:
                self._channel.tell(("copies", copies))
            self.pools = self.copies.run(self.pools, copies)

    def read_blocks(self, group: int, ids: np.ndarray) -> np.ndarray:
        """Blocks on the host as one device's pool holds them: i32[C] → [C, L, B, width of `layouts[group]`]."""
        channel = self._channel
        ask = None if channel is None else functools.partial(channel.ask, ("read", group, ids))
        with self._together():
            blocks = self.place.all_blocks(self.copies.read(self.pools[group], ids), ask)
        return self.place.whole_heads(blocks, self.layouts[group])

    def write_blocks(self, group: int, ids: np.ndarray, blocks: np.ndarray) -> None:
        """Put what `read_blocks` returned, on however many devices, into blocks i32[C], none twice."""
        own = self.place.own_heads(blocks, self.layouts[group])
        with self._together():
            if self._channel is not None:
                self._channel.tell(
                    ("write", group, ids), lambda process: (self.place.blocks_for(process, own),)
                )
            self.put_blocks(group, ids, self.place.blocks_for(jax.process_index(), own))

    def put_blocks(self, group: int, ids: np.ndarray, own: np.ndarray) -> None:
        """Blocks [C, L, B, devices here * width] into those of this process's devices alone."""
        pools = list(self.pools)
        pools[group] = self.copies.write(pools[group], ids, own)
        self.pools = tuple(pools)

    @own_settings()
    def warm_up(
        self, on_done: Callable[[Bucket], None] | None = None, buckets: Iterable[Bucket] | None = None
    ) -> None:
        """Compile buckets' programs and those of copies by running them on nothing but padding.

        Args:
            on_done: Called after each bucket.
            buckets: Which; None is the whole ladder. Others compile when they are first needed.
        """
        self.check_may_plan()
        empty: StepPlan = StepPlan(0, (), (), CopyPlan())
        with self._together():
            if self._channel is not None:
                self._channel.tell(("warm copies",))
            self.pools = self.copies.warm_up(self.pools)
            for bucket in self.programs if buckets is None else buckets:
                first = self._pack(empty, bucket)
                self._dispatch(bucket, first)
                if self.num_steps > 1 and not bucket.num_prefill_tokens:
                    nothing, _ = pack_steps(first, (), self.num_steps, lambda lens: ())
                    self._dispatch_several(bucket, nothing)
                if on_done is not None:
                    on_done(bucket)

    @property
    def dtype(self) -> str:
        """Of the weights, as `model.dtype` names it."""
        return str(jax.tree.leaves(self._params)[0].dtype)

    def program_of(self, plan: StepPlan[Any]) -> str:
        """What computes a plan, for people."""
        if self.deterministic:
            return f"slices of {SLICE_TOKENS} rows"
        return str(self.buckets.smallest(plan))

    @property
    def programs(self) -> tuple[Bucket, ...]:
        """The shapes that steps are computed in."""
        return (SLICE,) if self.deterministic else self.buckets.ladder

    @own_settings()
    def step_args(
        self, bucket: Bucket, layout: KVLayout | None = None
    ) -> tuple[dict[str, Any], tuple[KVPool, ...], StepBatch]:
        """Arguments of `step_fn` for a bucket without rows: the weights, the shapes of the pools, the batch.

        Args:
            bucket: Shapes of the step.
            layout: Of a single pool of another size than the runner's; nothing is allocated.
        """
        layouts = self.layouts if layout is None else (layout,)
        pools = tuple(self.place.pool_shape(self.place.layout(l)) for l in layouts)
        empty: StepPlan = StepPlan(0, (), (), CopyPlan())
        return self._params, pools, self._pack(empty, bucket)

    @own_settings()
    def lower(self, bucket: Bucket, layout: KVLayout | None = None) -> jax.stages.Lowered:
        """The step of a bucket, lowered but not run, for memory analysis; arguments as of `step_args`."""
        return self.step_fn.lower(*self.step_args(bucket, layout))

    @property
    def num_programs(self) -> int:
        """Step programs compiled so far."""
        count: int = self.step_fn._cache_size() + self.steps_fn._cache_size()
        return count

    def _dispatch(self, bucket: Bucket, batch: StepBatch, grouped: bool = False) -> StepOutput:
        self._note_program(bucket, grouped)
        if self._channel is not None:
            self._channel.tell(("step", bucket, batch, grouped))
        batch = replace(batch, drawn=self._drawn)
        out, self.pools = self._compiling.call(self.step_fn, self._params, self.pools, batch)
        if batch.ragged[0].num_seqs:  # not of a warm-up
            self._drawn = out.drawn
        return out

    def _dispatch_several(self, bucket: Bucket, batch: StepsBatch, grouped: bool = False) -> StepsOutput:
        self._note_program(bucket, grouped, several=True)
        if self._channel is not None:
            self._channel.tell(("several", bucket, batch, grouped))
        batch = replace(batch, first=replace(batch.first, drawn=self._drawn))
        out, self.pools = self._compiling.call(self.steps_fn, self._params, self.pools, batch)
        if batch.first.ragged[0].num_seqs:  # not of a warm-up
            self._drawn = out.drawn
        return out

    def _note_program(self, bucket: Bucket, grouped: bool, several: bool = False) -> None:
        if (bucket, grouped, several) not in self._compiled:
            if self.on_compile is not None:
                self.on_compile(bucket)
            self._compiled.add((bucket, grouped, several))


def _beside_linear(model: ModelConfig, dtype: np.dtype) -> str:
    """What of a model multiplies with weights other than by the products of `pagedjax.kernels.products`."""
    if model.latent is not None:
        return "latent attention"
    # A router of 8 bits would choose other experts.
    return "a model with experts" if model.experts is not None and dtype == np.int8 else ""


def _windows(model: ModelConfig, layouts: tuple[KVLayout, ...]) -> tuple[tuple[int | None, ...], ...]:
    """Attention windows that each pool's layers use.

    Raises:
        ValueError: The layouts are not one pool for all layers, nor one for each of the model's groups.
    """
    groups = model.layer_groups
    have = [layout.num_layers for layout in layouts]
    if len({layout.block_size for layout in layouts}) != 1:
        raise ValueError(f"block sizes {[layout.block_size for layout in layouts]}: must be the same")
    if have == [model.num_layers]:
        return (tuple(group.window for group in groups),)
    if have != [len(group.layers) for group in groups]:
        raise ValueError(
            f"layouts of {have} layers: must be one of all {model.num_layers}, or one per layer group "
            f"({[len(group.layers) for group in groups]})"
        )
    return tuple((group.window,) for group in groups)
