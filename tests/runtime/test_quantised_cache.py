"""An engine over a pool of eight bits: what is hit, copied, swapped and saved is what was computed, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.engine.request import SamplingParams
from pagedjax.kernels.quant import QUANTISED
from pagedjax.llm import LLM
from pagedjax.testing import tiny_config, tiny_params

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, n=2, temperature=0.8, logprobs=3, seed=4)


def _logprobs(engine: Any, prompts: list[list[int]], forced: bool) -> list[Any]:
    done: dict[str, Any] = {}
    ids = [engine.add(prompt, PARAMS) for prompt in prompts]
    step = 0
    while engine.has_work:
        step += 1
        if forced and step % 4 == 0 and step < 30 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[step % len(engine.scheduler.running)])
        done |= {output.request_id: output for output in engine.step()}
    return [[(one.token_ids, one.logprobs) for one in done[i].outputs] for i in ids]


@pytest.mark.parametrize("dtype", list(QUANTISED))
def test_cached_copied_and_swapped_codes_give_the_bits_of_computed_ones(
    make_engine: Any, tiny: Any, dtype: str
) -> None:
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 256, 30).tolist()
    prompts = [[*stem[: 12 + 3 * i], *rng.integers(0, 256, 3).tolist()] for i in range(6)]
    same: dict[str, Any] = dict(deterministic=True, quick=False, dtype=dtype, block_size=4)
    plain = _logprobs(make_engine(tiny, prefix_caching=False, **same), prompts, False)
    engine = make_engine(
        tiny, index="radix", partial=1, host_blocks=100, preemption="swap", poison=False, **same
    )
    assert _logprobs(engine, prompts, True) == plain
    assert _logprobs(engine, prompts, False) == plain  # warm
    stats = engine.manager.stats
    assert stats.hit_tokens and stats.copies and engine.scheduler.num_swaps and stats.partial_hits
    wide = _logprobs(make_engine(tiny, prefix_caching=False, **{**same, "dtype": "float32"}), prompts, False)
    apart = [abs(a[0][1][0] - b[0][1][0]) for a, b in zip(plain, wide)]
    assert 0 < max(apart) < 0.5  # eight bits are not float32, and not far from it


def test_windows_pools_of_codes_give_the_bits_of_one_pool(make_engine: Any) -> None:
    config = tiny_config(windows=(None, 8))
    model = config, jax.device_put(tiny_params(config))
    stem = np.random.default_rng(3).integers(0, 256, 40).tolist()
    prompts = [stem[: 20 + 4 * i] for i in range(5)]
    same: dict[str, Any] = dict(deterministic=True, quick=False, dtype="int8", block_size=4)
    plain = _logprobs(make_engine(model, prefix_caching=False, **same), prompts, False)
    engine = make_engine(model, group_blocks=(120, 60), poison=True, **same)
    assert _logprobs(engine, prompts, True) == _logprobs(engine, prompts, False) == plain
    assert engine.manager.stats.hit_tokens


def test_snapshots_hold_codes_with_their_scales(tiny_folder: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = dict(
        progress=False, cache_dir=tmp_path, model__max_model_len=64, cache__num_blocks=40, cache__block_size=4
    )
    first, second = (LLM(str(tiny_folder), cache__dtype="int8", **common) for _ in range(2))
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    prompt = "what is kept is kept as it is"
    [cold] = first.generate([prompt], params)
    assert first.save_cache(tmp_path / "kept", prompt) > 16
    assert second.load_cache(tmp_path / "kept") > 16
    [loaded], [warm] = second.generate([prompt], params), first.generate([prompt], params)
    assert loaded.num_cached_tokens == warm.num_cached_tokens > 16
    assert loaded.outputs[0].logprobs == warm.outputs[0].logprobs
    assert loaded.outputs[0].token_ids == cold.outputs[0].token_ids
    other = LLM(str(tiny_folder), cache__dtype="fp8_e4m3", **common)
    with pytest.raises(ValueError, match="int8"):
        other.load_cache(tmp_path / "kept")


def test_what_does_not_go_with_eight_bits_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cache.dtype=int4: must be one of .*int8, fp8_e4m3"):
        LLM(str(tiny_folder), cache__dtype="int4", cache_dir=tmp_path)
