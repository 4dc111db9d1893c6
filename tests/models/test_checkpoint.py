"""Orbax: converted, restored in another process bitwise equal, refused by name when it is another model."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from pagedjax.models import convert, load_model
from pagedjax.models.config import ModelError
from pagedjax.models.weights import flat, restore_params
from pagedjax.testing import tiny_config

CONFIG = tiny_config(
    d_model=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    d_mlp=96,
    vocab_size=270,
    max_model_len=64,
    tie_embeddings=True,
)

DIGESTS = """
import hashlib, json, sys
import numpy as np
from pagedjax.models import load_model
from pagedjax.models.weights import flat
m = load_model(sys.argv[1], progress=False)
sums = {n: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for n, x in flat(m.params)}
print(json.dumps([sums, m.tokenizer.encode("hello"), m.config.to_dict()]))
"""


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory, write_gguf, hf_tensors):
    return write_gguf(tmp_path_factory.mktemp("m") / "tiny.gguf", CONFIG, hf_tensors(CONFIG), "Q4_0")


@pytest.fixture(scope="module")
def converted(gguf_path, tmp_path_factory):
    return convert(gguf_path, tmp_path_factory.mktemp("out") / "deep" / "tiny", progress=False)


def test_a_fresh_process_restores_the_same_bits(gguf_path, converted):
    seen = [
        json.loads(
            subprocess.run([sys.executable, "-c", DIGESTS, path], capture_output=True, check=True).stdout
        )
        for path in (gguf_path, converted)
    ]
    assert seen[0] == seen[1]
    assert not [p for p in converted.parent.iterdir() if p != converted]  # no scratch is left


def test_loaded_here_it_is_the_model_it_came_from(gguf_path, converted):
    a, b = load_model(gguf_path, progress=False), load_model(converted, progress=False)
    assert (a.name, a.config, a.chat_template) == (b.name, b.config, b.chat_template)
    assert jax.tree.all(jax.tree.map(np.array_equal, a.params, b.params))


def test_dtype_and_sharding_are_applied_while_reading(converted):
    second = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    got = load_model(converted, dtype="bfloat16", progress=False, sharding=lambda path, shape: second)
    whole = load_model(converted, progress=False)
    for (name, x), (_, y) in zip(flat(got.params), flat(whole.params)):
        assert (x.dtype, x.sharding) == ("bfloat16", second), name
        assert np.array_equal(np.asarray(x), np.asarray(y).astype("bfloat16"))


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (dict(num_layers=3), "layer_02/attn_norm/scale is missing"),
        (dict(num_layers=1), "layer_01/attn_norm/scale is not in"),
        (dict(qkv_bias=True), "layer_00/qkv/bias is missing"),
        (dict(d_mlp=98), r"layer_00/mlp/down/weight has shape \(64, 96\): the config asks for \(64, 98\)"),
        (dict(d_model=32), r"embed has shape \(270, 64\)"),
    ],
)
def test_another_models_tree_is_refused_at_the_first_path(converted, change, first):
    with pytest.raises(ModelError, match=first):
        restore_params(converted / "params", replace(CONFIG, **change))


def test_nothing_is_overwritten_and_nothing_is_left_by_a_failure(gguf_path, converted, tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        convert(gguf_path, converted, progress=False)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="broken"):
        convert(broken, tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == [broken]


# orbax abandons its other reads when one fails; they then complain to a loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_checkpoints_are_named(converted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    facts = json.loads((copy / "pagedjax_model.json").read_text())
    (copy / "pagedjax_model.json").write_text(json.dumps(facts | {"format": 99}))
    with pytest.raises(ModelError, match="format 99: must be 1"):
        load_model(copy, progress=False)
    (copy / "pagedjax_model.json").write_text(json.dumps(facts))
    for path in (copy / "params").rglob("manifest.ocdbt"):
        path.write_bytes(b"not a manifest")
    with pytest.raises(ModelError, match="must be a whole checkpoint") as caught:
        load_model(copy, progress=False)
    assert "\n" not in str(caught.value)
    shutil.rmtree(copy / "params")
    with pytest.raises(ModelError, match="params"):
        load_model(copy, progress=False)
