"""The real runner on tiny models, with a manager that hands out blocks in random order."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judges import compile_quickly, numpy_forward, read_stories

from pagedjax.cache import CopyPlan, KVGroup, PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine
from pagedjax.kernels import KVPool, make_pool
from pagedjax.kernels.layout import stored_fill
from pagedjax.models.decoder import pool_layout
from pagedjax.runtime import Buckets, JaxRunner
from pagedjax.testing import tiny_config, tiny_params


@pytest.fixture(scope="session")
def tiny():
    """(config, params) of the seeded 2-layer model, on the device."""
    config = tiny_config()
    return config, jax.device_put(tiny_params(config))


@pytest.fixture(scope="session")
def stories(data_dir):
    """(config, params, ids) of stories260K; ids start with BOS and continue with the published text."""
    folder = data_dir / "data" / "models"
    golden = json.loads((folder / "stories260K_greedy_ids.json").read_text())
    config, params = read_stories(folder / "stories260K.bin")
    return config, jax.device_put(params), [golden["start_token"], *golden["greedy_ids"]]


@pytest.fixture(scope="session")
def judge_of() -> Callable[[tuple[Any, Any]], Callable[[list[int], int], list[int]]]:
    """`judge_of((config, params))(prompt, n)`: n greedy tokens by the dense float64 judge."""

    def make(model: tuple[Any, Any]) -> Callable[[list[int], int], list[int]]:
        config, params = model
        host = jax.tree.map(np.asarray, params)
        known: dict[tuple[int, ...], int] = {}

        def decode(prompt: list[int], n: int) -> list[int]:
            tokens = list(prompt)
            for _ in range(n):
                key = tuple(tokens)
                if key not in known:
                    known[key] = int(numpy_forward(config, host, tokens)[-1].argmax())
                tokens.append(known[key])
            return tokens[len(prompt) :]

        return decode

    judges: dict[int, Callable[[list[int], int], list[int]]] = {}
    return lambda model: judges.setdefault(id(model), make(model))


@pytest.fixture(scope="session")
def greedy_judge(tiny, judge_of) -> Callable[[list[int], int], list[int]]:
    """`greedy_judge(prompt, n)`: n greedy tokens of the tiny model by the dense float64 judge."""
    return judge_of(tiny)


HOST_BLOCKS = 256  # of every runner; a manager may use fewer
MOST_STEPS = 8  # a dispatch of every runner; an engine may use fewer


class TestRunner(JaxRunner):
    """Fills every block that nobody owns and no index names with NaN before each step, if `poison` is set.

    Blocks that are wrongly read after they were freed, or before they were written, turn the logits NaN,
    and the greedy token with them.
    """

    manager: PagedManager
    poison: bool

    def _launch(self, plan: Any, after: Any, plans: Any = ()) -> Any:
        if self.poison:
            # Copies first: what they read may be nobody's by now. The second time there is nothing left.
            self.run_copies(plan.copies)
            plan = dataclasses.replace(plan, copies=CopyPlan())
            groups = self.manager.snapshot()["groups"]
            self.pools = tuple(_poison(p, g) for p, g in zip(self.pools, groups, strict=True))
            plans = (plan, *plans[1:]) if plans else ()
        return super()._launch(plan, after, plans)


def _poison(pool: KVPool, group: dict[str, Any]) -> KVPool:
    """NaN in every block that is nobody's, the null block among them: padding entries are never read."""
    layout = pool.layout
    blank = set(range(layout.num_blocks)) - set(group["ref"]) - set(group["keys"])
    rows = np.zeros(layout.shape[0], bool).reshape(layout.num_layers, layout.num_blocks)
    rows[:, sorted(blank)] = True
    return _poisoned(pool, rows.reshape(-1))


@functools.partial(jax.jit, donate_argnums=0)
def _poisoned(pool: KVPool, rows: Any) -> KVPool:
    return KVPool(jnp.where(rows[:, None, None], stored_fill(pool.layout, np.nan), pool.data), pool.layout)


@pytest.fixture(scope="session")
def _runners() -> dict[Any, TestRunner]:
    """Runners by what they were built from: tests that agree on it share the compiled programs."""
    return {}


@pytest.fixture
def make_engine(_runners) -> Callable[..., Engine]:
    """`make_engine((config, params), num_blocks=…, block_size=…, …)` over the real runner.

    The pools start as NaN; `shuffle=seed` hands out blank blocks in random order, `poison=True` fills free
    blocks with NaN before each step. `chunk_tokens` limits the engine's chunks; the compiled shapes do not
    depend on it. `quick=False` compiles as users do.
    """

    def make(
        model: tuple[Any, Any],
        *,
        num_blocks: int = 130,
        block_size: int = 4,
        max_num_seqs: int = 8,
        token_budget: int = 64,
        chunk_tokens: int = 0,
        max_model_len: int = 128,
        group_blocks: Sequence[int] = (),
        host_blocks: int = 0,
        preemption: str = "recompute",
        shuffle: int | None = None,
        poison: bool = False,
        full_ladder: bool = False,
        quick: bool = True,
        deterministic: bool = False,
        implementation: str | None = None,
        dtype: str = "float32",
        overlap: bool = False,
        num_steps: int = 1,
        **options: Any,
    ) -> Engine:
        config, params = model
        layers = [(config.num_layers, num_blocks)]
        if group_blocks:  # the model's own KV groups, with so many blocks each
            num_blocks = group_blocks[0]
            layers = [(len(g.layers), n) for g, n in zip(config.layer_groups, group_blocks, strict=True)]
            options["groups"] = [
                KVGroup(n, g.window) for g, n in zip(config.layer_groups, group_blocks, strict=True)
            ]
        layouts = tuple(pool_layout(config, n, block_size, dtype, num_layers=l) for l, n in layers)
        scheduler = SchedulerConfig(max_num_seqs, token_budget)
        buckets = Buckets(scheduler) if full_ladder else Buckets(scheduler, 1, 1)  # 3 programs compile soon
        key = (
            config,
            layouts,
            buckets.ladder,
            max_model_len,
            quick,
            deterministic,
            implementation,
        )
        if key not in _runners:
            _runners[key] = TestRunner(
                config,
                params,
                layouts,
                scheduler,
                max_model_len=max_model_len,
                buckets=buckets,
                host_blocks=HOST_BLOCKS,
                deterministic=deterministic,
                implementation=implementation,
                num_steps=MOST_STEPS,
            )
            if quick:
                compile_quickly(_runners[key])
        runner = _runners[key]
        runner.manager = manager = PagedManager(
            num_blocks=num_blocks, block_size=block_size, host_blocks=host_blocks, **options
        )
        runner.poison = poison
        runner.pools = tuple(make_pool(layout, np.nan) for layout in runner.layouts)
        for host in runner.copies.hosts:
            host.data[:] = stored_fill(runner.layout, np.nan)
        if shuffle is not None:
            _shuffle_blank_blocks(manager, shuffle)
        limits = dataclasses.replace(scheduler, chunk_tokens=chunk_tokens, preemption=preemption)
        return Engine(
            manager, runner, limits, max_model_len=max_model_len, overlap=overlap, num_steps=num_steps
        )

    return make


def _shuffle_blank_blocks(manager: PagedManager, seed: int) -> None:
    """Take all blocks one by one and give them back in random order, as strangers' requests would."""
    from pagedjax.cache import TokenChain

    order = np.random.default_rng(seed).permutation(manager.num_usable)
    ids = [-1 - i for i in range(manager.num_usable)]
    for i in ids:
        manager.begin(i, TokenChain([0, 0], block_size=manager.block_size))
        assert manager.reserve(i, 1)
    for at in order:
        manager.release(ids[at])


@pytest.fixture
def run_all() -> Callable[[Engine], dict[str, Any]]:
    """`run_all(engine)`: step until idle; the last output of each request by id."""

    def run(engine: Engine) -> dict[str, Any]:
        outputs = {}
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id] = output
        engine.manager.check_invariants()
        return outputs

    return run
