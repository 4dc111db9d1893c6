"""`runtime.deterministic`: a row's logits are those of its tokens alone and cold, to the last bit."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.cache import INDEXES, POLICIES
from pagedjax.config import Config
from pagedjax.engine.request import SamplingParams
from pagedjax.engine.shapes import SLICE_TOKENS
from pagedjax.llm import LLM
from pagedjax.models.mixture import Experts
from pagedjax.runtime.runner import JaxRunner
from pagedjax.testing import tiny_config, tiny_params
from tests.runtime.test_product import sample_pairwise

LONGEST = 192
FACTORS: dict[str, tuple[Any, ...]] = {
    "index": tuple(INDEXES),
    "policy": tuple(name for name in POLICIES if name != "belady"),
    "block_size": (8, 16, 32, 64),
    "chunk_tokens": (0, 5, 33),
    "preemption": ("none", "recompute", "swap"),
    "host tier": (False, True),
    "prefix_caching": (True, False),
    "partial": (0, 1),
    "at once": (1, 3, 32),
    "kind": ("greedy", "drawn", "n", "beams"),
}
KINDS = {
    "greedy": SamplingParams(max_tokens=6, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.3, top_k=50, logprobs=2, seed=5),
    "n": SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, n=3),
    "beams": SamplingParams(max_tokens=4, ignore_eos=True, beam_width=3),
}
Rows = dict[tuple[int, ...], set[str]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    """Tokens up to a sampled row → digests of the logits that it was given since."""
    found: Rows = {}
    compute, dispatch = JaxRunner._compute, JaxRunner._dispatch
    last: list[Any] = []

    def seen(self: JaxRunner, *args: Any) -> Any:
        last[:] = [dispatch(self, *args)]
        return last[0]

    def recorded(self: JaxRunner, plan: Any, *args: Any) -> Any:
        out = compute(self, plan, *args)
        logits = np.asarray(last[0].logits)
        at = 0
        for row in plan.rows:
            prefix = tuple(row.seq.chain.tokens[: row.start + row.num_tokens])
            for _ in row.samples:
                found.setdefault(prefix, set()).add(hashlib.sha256(logits[at].tobytes()).hexdigest())
                at += 1
        return out

    monkeypatch.setattr(JaxRunner, "_dispatch", seen)
    monkeypatch.setattr(JaxRunner, "_compute", recorded)
    yield found


def _prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    stems = rng.integers(0, 256, (3, 120)).tolist()
    return [
        [*stems[rng.integers(3)][: rng.integers(1, 120)], *rng.integers(0, 256, rng.integers(1, 9)).tolist()]
        for _ in range(count)
    ]


def _run(
    make_engine: Callable[..., Any],
    model: Any,
    combination: dict[str, Any],
    prompts: list[list[int]],
    **more: Any,
) -> dict[str, int]:
    options = dict(combination)
    forced, kind, together = options.pop("preemption"), options.pop("kind"), options.pop("at once")
    tier = options.pop("host tier")
    engine = make_engine(
        model,
        preemption="swap" if forced == "swap" else "recompute",
        host_blocks=100 if tier or forced == "swap" else 0,
        max_num_seqs=32,
        max_model_len=LONGEST,
        quick=False,
        **options,
        **more,
    )
    waiting, step = list(prompts), 0
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler.running) + len(engine.scheduler.waiting) < together:
            engine.add(waiting.pop(), KINDS[kind])
        step += 1
        running = engine.scheduler.running
        if forced != "none" and running and step % 4 == 0 and step <= 40 and kind != "beams":
            engine.scheduler._preempt(running[step % len(running)])
        engine.step()
    stats = engine.manager.stats
    return {"hits": stats.hit_tokens, "preemptions": engine.scheduler.num_preemptions, "copies": stats.copies}


def _alone(make_engine: Callable[..., Any], model: Any, rows: Rows, **more: Any) -> Rows:
    """The same rows, each as the last of a prompt by itself, nothing cached."""
    asked = list(rows)
    rows.clear()
    engine = make_engine(
        model,
        block_size=16,
        prefix_caching=False,
        max_num_seqs=32,
        max_model_len=LONGEST,
        quick=False,
        **more,
    )
    for prefix in asked:
        engine.add(list(prefix), SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_work:
            engine.step()
    return {prefix: set(rows[prefix]) for prefix in asked}


def _differ(
    make_engine: Any,
    model: Any,
    rows: Rows,
    *,
    samples: int,
    each: int,
    seed: int,
    only: Any = None,
    **more: Any,
) -> tuple[int, int]:
    """Rows of random requests, and how many are not those of their tokens alone; asserts that everything came about."""
    rng = np.random.default_rng(seed)
    totals: Counter[str] = Counter()
    factors = FACTORS | (only or {})
    for values in sample_pairwise(factors, samples, seed)[:samples]:
        combination = dict(zip(factors, values, strict=True))
        totals.update(_run(make_engine, model, combination, _prompts(rng, each), **more))
    assert all(totals.values()), totals
    batched = dict(rows)
    alone = _alone(make_engine, model, rows, **more)
    return len(batched), sum(batched[prefix] != alone[prefix] for prefix in batched)


def test_logits_are_those_of_the_row_alone_and_cold(make_engine: Any, tiny: Any, rows: Rows) -> None:
    few = {"block_size": (8, 16, 64)}
    count, differ = _differ(
        make_engine, tiny, rows, samples=20, each=10, seed=1, only=few, deterministic=True
    )
    assert count > 600 and differ == 0


def test_without_the_mode_the_same_requests_differ(make_engine: Any, tiny: Any, rows: Rows) -> None:
    """So that the tests beside it can fail."""
    one = {"block_size": (16,)}
    count, differ = _differ(make_engine, tiny, rows, samples=4, each=6, seed=1, only=one)
    assert differ > count // 50


WIDER = {
    "dense": {},
    "windows": {"windows": (20, None), "attn_soft_cap": 30.0, "qk_norm": True},
    "experts": {"experts": Experts(6, 2, 24, normalise=True, d_shared=24)},
    "wide": {"d_model": 200, "d_mlp": 530, "num_heads": 9, "num_kv_heads": 3, "head_dim": 24},
}


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("kind", WIDER)
def test_logits_of_2000_requests_are_those_of_the_row_alone(
    make_engine: Any, rows: Rows, kind: str, implementation: str | None, dtype: str
) -> None:
    config = tiny_config(**WIDER[kind])
    model = config, jax.device_put(tiny_params(config, dtype=dtype))
    more = {"deterministic": True, "implementation": implementation, "dtype": dtype}
    count, differ = _differ(make_engine, model, rows, samples=100, each=20, seed=2, **more)
    assert count > 5_000 and differ == 0


def test_more_samples_than_a_slice_draws_are_drawn_from_the_same_row(
    make_engine: Any, tiny: Any, rows: Rows
) -> None:
    """And scores of a prompt longer than a slice come in one piece."""
    engine = make_engine(
        tiny, block_size=16, max_num_seqs=64, max_model_len=LONGEST, quick=False, deterministic=True
    )
    prompt = list(range(70))
    params = SamplingParams(
        max_tokens=2, n=SLICE_TOKENS + 8, temperature=2.0, logprobs=1, prompt_logprobs=1, ignore_eos=True
    )
    [output] = engine.complete([(prompt, params)])
    assert len({one.token_ids[0] for one in output.outputs}) > 20
    assert all(len(one.logprobs) == 2 for one in output.outputs)
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    assert all(len(digests) == 1 for digests in rows.values())


@pytest.mark.parametrize(
    ("setting", "why"),
    [("prefix_groups=on", "which rows share"), ("tensor_parallel=2", "sums between devices")],
)
def test_what_would_break_it_is_refused(setting: str, why: str) -> None:
    key, value = setting.split("=")
    with pytest.raises(ValueError, match=f"runtime.{setting}: {why}"):
        Config().replace({"runtime.deterministic": True, f"runtime.{key}": value})


@pytest.mark.full
@pytest.mark.smollm
def test_logits_of_smollm_are_those_of_the_row_alone(smollm_cache: Path, rows: Rows) -> None:
    llm = LLM(
        progress=False,
        cache_dir=smollm_cache,
        model__max_model_len=512,
        cache__num_blocks=600,
        runtime__deterministic=True,
    )
    stem = "The history of computing is longer than that of computers. " * 3
    prompts = [stem[: 20 + 7 * i] + f" Chapter {i}." for i in range(20)]
    llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    llm.generate(prompts[::-1], SamplingParams(max_tokens=3, n=2, temperature=1.0, ignore_eos=True))  # warm
    batched = dict(rows)
    rows.clear()
    for prefix in batched:
        llm.generate([list(prefix)], SamplingParams(max_tokens=1, ignore_eos=True, cache_read=False))
    assert len(batched) > 320
    assert [prefix for prefix in batched if batched[prefix] != rows[prefix]] == []
