"""The script that researchers start from really decodes, shares, and stays short."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from judges import numpy_forward

from pagedjax.testing import tiny_model

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "decode_script.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("decode_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dense_greedy(model, prompt, count):
    tokens = list(prompt)
    params = jax.tree.map(np.asarray, model.params)
    for _ in range(count):
        tokens.append(int(numpy_forward(model.config, params, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def decoder(script):
    return script.Decoder(tiny_model(eos_token_ids=()))


def test_is_under_80_lines():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 80


def test_greedy_tokens_equal_a_dense_forward(decoder):
    """Prompts longer and shorter than a chunk, decoded by the script and by recomputing everything densely."""
    for seq, length in enumerate((1, 5, 64, 70, 130)):
        prompt = np.random.default_rng(length).integers(0, 256, length).tolist()
        ids, _ = decoder.decode(seq, prompt, max_tokens=8)
        assert ids == _dense_greedy(decoder.model, prompt, 8)


def test_second_run_hits_prompt_and_answer(decoder, script):
    prompt = np.random.default_rng(99).integers(0, 256, 40).tolist()
    first, cached = decoder.decode(100, prompt, max_tokens=24)
    assert cached == 0
    again, cached = decoder.decode(101, prompt + first, max_tokens=4)
    # KV exists for 40 + 23 tokens: three full blocks of 16.
    assert cached == 3 * script.BLOCK_SIZE
    assert len(again) == 4
    decoder.manager.check_invariants()


def test_temperature_draws_differently_at_each_position(decoder):
    prompt = [1, 2, 3]
    greedy, _ = decoder.decode(200, prompt, max_tokens=16)
    drawn, _ = decoder.decode(201, prompt, max_tokens=16, temperature=100.0)
    assert drawn != greedy and len(set(drawn)) > 4
