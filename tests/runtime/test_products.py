"""The setting `runtime.products` and int8 weights: the same tokens either way, from every kind of file."""

import jax
import numpy as np
import pytest

from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import native
from pagedjax.llm import LLM
from pagedjax.models import load_model
from pagedjax.models.config import ModelError
from pagedjax.models.hub import convert
from pagedjax.models.weights import flat, quantise

pytestmark = pytest.mark.skipif(
    native.compiler() is None, reason="native cannot be built: no C++ compiler here"
)
PROMPTS = [list(range(3, 40)), [7, 8, 9], [100] * 20]


def make(folder, **settings):
    limits = dict(max_num_seqs=4, token_budget=32, num_blocks=64, compilation_cache_dir="off")
    return LLM(str(folder), progress=False, **limits, **settings)


def tokens(llm, max_tokens=12):
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=max_tokens, ignore_eos=True), progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_native_and_xla_products_draw_the_same_tokens(tiny_folder, dtype):
    ours, judge = (make(tiny_folder, model__dtype=dtype, runtime__products=p) for p in ("native", "xla"))
    assert tokens(ours) == tokens(judge)
    assert (ours.runner.products, judge.runner.products) == ("native", "xla")
    assert ours.runner.layout.dtype == "float32"
    bucket = ours.runner.buckets.ladder[0]
    assert "pagedjax_product" in ours.runner.lower(bucket).as_text()
    assert "pagedjax_product" not in judge.runner.lower(bucket).as_text()


def test_bfloat16_weights_are_the_same_numbers_in_float32(tiny_folder):
    """With native products only the weights are rounded: a float32 model of the rounded weights draws the same."""
    rounded = make(tiny_folder, model__dtype="bfloat16", cache__dtype="float32")
    wide = make(tiny_folder)
    wide.update_weights(jax.tree.map(lambda x: x.astype("float32"), rounded.runner.params))
    assert tokens(rounded) == tokens(wide)
    assert rounded.runner.products == "native"


def test_int8_weights_are_the_nearest_and_survive_a_conversion(tiny_folder, tmp_path):
    whole = dict(flat(load_model(tiny_folder, progress=False).params))
    found = dict(flat(load_model(tiny_folder, dtype="int8", progress=False).params))
    for name, leaf in whole.items():
        if found[name].dtype != np.int8:
            np.testing.assert_array_equal(found[name], leaf)
            continue
        scale = np.asarray(found[f"{name}_scale"])
        assert np.abs(np.asarray(found[name]) * scale[:, None] - leaf).max() <= 0.5001 * scale.max()
        assert np.abs(np.asarray(found[name]).astype(int)).max() == 127
    for dtype in ("int8", "float32"):  # stored as int8, or rounded while it is read
        convert(str(tiny_folder), tmp_path / dtype, dtype=dtype, progress=False)
        again = dict(flat(load_model(tmp_path / dtype, dtype="int8", progress=False).params))
        assert again.keys() == found.keys()
        for name, leaf in found.items():
            np.testing.assert_array_equal(again[name], leaf)
    with pytest.raises(ModelError, match="holds int8 weights: dtype must be int8"):
        load_model(tmp_path / "int8", progress=False)


def test_a_row_of_zeros_is_zeros():
    whole, scales = quantise(np.array([[0, 0], [1, -2]], np.float32))
    np.testing.assert_array_equal(whole, [[0, 0], [64, -127]])
    np.testing.assert_allclose(scales, [0, 2 / 127], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (dict(model__dtype="int8", runtime__tensor_parallel=2), "model.dtype=int8: runs on one device"),
        (dict(runtime__products="fast"), "runtime.products=fast: must be one of auto, xla, native"),
        (dict(model__dtype="float16", runtime__products="native"), "bfloat16 and int8, not float16"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tiny_folder, settings, part):
    with pytest.raises((ValueError, NotImplementedError), match=part):
        make(tiny_folder, **settings)


@pytest.mark.smollm
@pytest.mark.full
def test_smollm_draws_the_same_tokens_with_both():
    settings = dict(max_num_seqs=4, num_blocks=200, progress=False)
    texts = ["The capital of France is", "Once upon a time", "To make bread you need"]
    found = []
    for products in ("native", "xla"):
        llm = LLM("smollm2-135m", runtime__products=products, **settings)
        outputs = llm.generate(texts, SamplingParams(max_tokens=64), progress=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
