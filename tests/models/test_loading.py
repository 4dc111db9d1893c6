"""From files to leaves: GGUF, safetensors, folders; equal logits, and one clear line when something is off."""

import json
import os
import pickle
import struct
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from pagedjax.models import abstract_params, load_model
from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.formats import QUANTISATIONS, GgufFile, SafetensorsFiles
from pagedjax.models.weights import flat
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
# K-quants pack 256 values a row.
WIDE = tiny_config(
    d_model=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    d_mlp=256,
    vocab_size=270,
    max_model_len=64,
    num_layers=1,
)


def _hf_config(config: ModelConfig) -> dict:
    return dict(
        model_type="llama",
        hidden_size=config.d_model,
        intermediate_size=config.d_mlp,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_model_len,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_embeddings,
        eos_token_id=config.vocab_size - 1,
    )


def _write_folder(path, config, tensors, shards=1):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(_hf_config(config)))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path / "tokenizer.json"))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names, table = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({n: tensors[n] for n in mine}, path / file)
        table |= dict.fromkeys(mine, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return path


def _equal(a, b):
    a, b = dict(flat(a)), dict(flat(b))
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


@pytest.fixture
def gguf_path(tmp_path, write_gguf, hf_tensors):
    return write_gguf(tmp_path / "tiny.gguf", CONFIG, hf_tensors(CONFIG))


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_one_file_and_shards_give_equal_leaves(tmp_path, write_gguf, hf_tensors, tied):
    config = replace(CONFIG, tie_embeddings=tied)
    tensors = hf_tensors(config)
    from_gguf = load_model(write_gguf(tmp_path / "m.gguf", config, tensors), progress=False)
    one = load_model(_write_folder(tmp_path / "one", config, tensors), progress=False)
    three = load_model(_write_folder(tmp_path / "three", config, tensors, shards=3), progress=False)
    _equal(one.params, three.params)
    _equal(one.params, from_gguf.params)
    assert from_gguf.config.tie_embeddings is tied
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), one.params)
    assert shapes == jax.tree.map(lambda x: (x.shape, str(x.dtype)), abstract_params(config))
    w = one.params["layer_01"]["qkv"]["weight"]
    np.testing.assert_array_equal(w[:64], tensors["model.layers.1.self_attn.q_proj.weight"])
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    np.testing.assert_array_equal(one.params["lm_head"]["weight"], tensors[head])


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_stored_and_wanted_types(tmp_path, hf_tensors, stored):
    kind = np.dtype(getattr(ml_dtypes, stored, stored))
    tensors = {n: w.astype(kind) for n, w in hf_tensors(CONFIG).items()}
    folder = _write_folder(tmp_path / "m", CONFIG, tensors)
    for wanted in ("float32", "bfloat16"):
        got = load_model(folder, dtype=wanted, progress=False).params
        assert {str(x.dtype) for x in jax.tree.leaves(got)} == {wanted}
        expected = tensors["model.layers.0.mlp.down_proj.weight"].astype(got["embed"].dtype)
        np.testing.assert_array_equal(np.asarray(got["layer_00"]["mlp"]["down"]["weight"]), expected)


def _k_quant_bytes(rng, kind, rows, values):
    """Random but finite packed rows: the library quantises only the simple kinds."""
    import gguf

    block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, values // block, width), dtype=np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for offset in at:
        data[..., offset : offset + 2] = scale
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_every_quantisation_equals_the_reference(tmp_path, hf_tensors, write_gguf, kind):
    """Strips read by us = the whole tensor dequantised by the gguf library at once."""
    import gguf

    tensors = hf_tensors(WIDE)
    if kind.endswith("_K"):
        rng = np.random.default_rng(0)
        path = tmp_path / "k.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        packed = _k_quant_bytes(rng, kind, 300, 512)
        writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        path = write_gguf(tmp_path / "m.gguf", WIDE, tensors, kind)
    reader = gguf.GGUFReader(path)
    file = GgufFile(path)
    assert set(file.tensors) == {t.name for t in reader.tensors}
    assert any(info.kind == kind for info in file.tensors.values())
    for t in reader.tensors:
        want = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        shape = file.tensors[t.name].shape
        assert shape == want.shape == tuple(int(n) for n in t.shape[::-1])
        if len(shape) == 2:
            got = np.concatenate(
                [file.rows(t.name, r, min(r + 37, shape[0])) for r in range(0, shape[0], 37)]
            )
        else:
            got = file.rows(t.name, 0, shape[0])
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)
    if not kind.endswith("_K"):
        # MXFP4's scales are powers of two: the largest of a block may be cut off by a quarter.
        bits = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.01, "MXFP4": 0.25}.get(kind, 0.2)
        got = load_model(path, progress=False).params["layer_00"]["out"]["weight"]
        want = tensors["model.layers.0.self_attn.o_proj.weight"]
        assert np.abs(got - want).max() <= bits * np.abs(want).max()


def test_metadata_equals_the_library(gguf_path):
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    want = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert GgufFile(gguf_path).metadata == want


def test_rope_factors_in_a_gguf_file_scale_the_frequencies(tmp_path, write_gguf, hf_tensors, judge):
    """Llama 3.1 files carry their scaling as one divisor per pair."""
    from pagedjax.models.layers import rope_frequencies

    tensors = hf_tensors(CONFIG)
    divisors = np.array([1, 1, 2, 8], np.float32)
    path = write_gguf(tmp_path / "r.gguf", CONFIG, tensors, extra={"rope_freqs.weight": divisors})
    config = load_model(path, progress=False).config
    plain, _ = rope_frequencies(8, config.rope_theta, None)
    scaled, factor = rope_frequencies(8, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(scaled, plain / divisors)
    assert factor == 1.0


# ---- what is refused ----


def test_a_missing_source_names_what_can_be_given(tmp_path):
    for source in (tmp_path / "no.gguf", "no such model", "smollm-135m", str(tmp_path / "nowhere")):
        with pytest.raises(ModelError, match=r"no such file.*smollm2-135m"):
            load_model(source, progress=False)
    with pytest.raises(ModelError, match="dtype='int7'"):
        load_model("smollm2-135m", dtype="int7", progress=False)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"must be \.gguf"):
        load_model(tmp_path / "weights.bin", progress=False)


def test_truncated_gguf_at_any_length(gguf_path, tmp_path):
    data, cut = gguf_path.read_bytes(), tmp_path / "cut.gguf"
    for length in (0, 3, 4, 11, 20, 100, 1000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf.*download"):
            load_model(cut, progress=False)


def test_unsupported_quantisation_is_named(tmp_path, hf_tensors, write_gguf):
    path = write_gguf(tmp_path / "t.gguf", WIDE, hf_tensors(WIDE), "TQ1_0")
    with pytest.raises(ModelError, match=r"stored as TQ1_0: supported are F32, .*MXFP4; convert"):
        load_model(path, progress=False)


def test_wrong_shape_missing_and_foreign_tensors(tmp_path, hf_tensors, write_gguf):
    tensors = hf_tensors(CONFIG)
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "missing": ({n: w for n, w in tensors.items() if n != name}, "is missing"),
        "shape": (
            tensors | {name: tensors[name][:-1].copy()},
            r"has shape \(95, 64\): the config asks for \(96, 64\)",
        ),
        "foreign": (
            tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)},
            "is not part of",
        ),
    }
    for label, (changed, message) in cases.items():
        with pytest.raises(ModelError, match=message):
            load_model(_write_folder(tmp_path / label, CONFIG, changed), progress=False)
        if label != "foreign":
            with pytest.raises(ModelError, match=message):
                load_model(write_gguf(tmp_path / f"{label}.gguf", CONFIG, changed), progress=False)
    deeper = hf_tensors(replace(CONFIG, num_layers=3))
    with pytest.raises(ModelError, match=r"layers.2.* is not part of"):
        load_model(_write_folder(tmp_path / "deeper", CONFIG, deeper), progress=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers(tmp_path, hf_tensors, write_gguf, value):
    tensors = hf_tensors(CONFIG)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = value
    with pytest.raises(ModelError, match=r"down_proj.weight' holds values that are not finite"):
        load_model(_write_folder(tmp_path / "m", CONFIG, tensors), progress=False)
    with pytest.raises(ModelError, match=r"ffn_down.weight' holds values that are not finite"):
        load_model(write_gguf(tmp_path / "m.gguf", CONFIG, tensors, "F16"), progress=False)


def test_other_architecture(tmp_path, hf_tensors):
    folder = _write_folder(tmp_path / "m", CONFIG, hf_tensors(CONFIG))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    with pytest.raises(ModelError, match=r"model_type='mamba2': no decoder for it; supported are .*llama"):
        load_model(folder, progress=False)


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_a_folder_is_named(tmp_path, hf_tensors, gone):
    folder = _write_folder(tmp_path / "m", CONFIG, hf_tensors(CONFIG))
    (folder / gone).unlink()
    with pytest.raises(ModelError, match=gone):
        load_model(folder, progress=False)


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_no_pickle_is_ever_read(tmp_path, hf_tensors, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = _write_folder(tmp_path / "m", CONFIG, hf_tensors(CONFIG))
    (folder / "model.safetensors").unlink()
    bomb = pickle.dumps(_Bomb())
    (folder / "pytorch_model.bin").write_bytes(bomb)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, which is never read"):
        load_model(folder, progress=False)
    table = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match="pickles are never read"):
        load_model(folder, progress=False)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(bomb)
    with pytest.raises(ModelError, match=r"model.safetensors"):
        load_model(folder, progress=False)
    assert not (tmp_path / "unpickled").exists()


def test_links_may_not_leave_the_folder(tmp_path, hf_tensors):
    folder = _write_folder(tmp_path / "m", CONFIG, hf_tensors(CONFIG))
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(ModelError, match=r"model\.safetensors: leads to .*outside"):
        load_model(folder, progress=False)
    (folder / "model.safetensors").unlink()
    table = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match="leads to"):
        load_model(folder, progress=False)


def test_a_hub_snapshot_may_link_into_its_own_blobs_only(tmp_path, hf_tensors):
    repo = tmp_path / "models--me--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    folder = _write_folder(repo / "snapshots" / "abc", CONFIG, hf_tensors(CONFIG))
    for path in list(folder.iterdir()):
        blob = repo / "blobs" / path.name
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, folder))
    assert load_model(folder, progress=False).config.num_layers == 2
    other = tmp_path / "models--you--tiny" / "blobs"
    other.mkdir(parents=True)
    (repo / "blobs" / "model.safetensors").rename(other / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")
    with pytest.raises(ModelError, match="leads to"):
        load_model(folder, progress=False)


def test_one_tensor_in_two_shards(tmp_path):
    for name in ("a", "b"):
        save_file({"w": np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"'w' is in a.safetensors and b.safetensors"):
        SafetensorsFiles([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_integer_weights_are_refused(tmp_path, hf_tensors):
    tensors = hf_tensors(CONFIG) | {"model.norm.weight": np.ones(64, np.int8)}
    with pytest.raises(ModelError, match=r"norm.weight' is stored as I8"):
        load_model(_write_folder(tmp_path / "m", CONFIG, tensors), progress=False)


def test_progress_ends_at_the_result_and_the_sharding_rule_sees_every_leaf(gguf_path):
    told, asked = [], {}
    second = jax.sharding.SingleDeviceSharding(jax.devices()[1])

    def rule(path, shape):
        asked["/".join(path)] = shape
        return second

    loaded = load_model(gguf_path, progress=lambda *event: told.append(event), sharding=rule)
    size = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
    assert told[-1] == ("read tiny", size, size)
    assert asked == {name: leaf.shape for name, leaf in flat(loaded.params)}
    assert all(x.sharding == second for x in jax.tree.leaves(loaded.params))


@pytest.mark.parametrize(
    "kind", ["F8_E8M0", "F4", "F6_E2M3", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E4M3", "BOOL"]
)
def test_B132_every_type_of_the_format_is_known(tmp_path, hf_tensors, kind):
    """A tensor of it that the decoder does not need loads; one that it needs is named with its type."""
    bits = {"F4": 4, "F6_E2M3": 6, "C64": 64}.get(kind, 8)
    for name, outcome in (
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("model.norm.weight", f"model.norm.weight' is stored as {kind}: weights must be"),
    ):
        folder = _write_folder(tmp_path / name, CONFIG, hf_tensors(CONFIG))
        _add_tensor(folder / "model.safetensors", name, kind, [64], bits * 64 // 8)
        if outcome is None:
            assert load_model(folder, progress=False).config.num_layers == 2
        else:
            with pytest.raises(ModelError, match=outcome):
                load_model(folder, progress=False)


def _add_tensor(path, name, kind, shape, num_bytes):
    """Puts a tensor of zeros at the end of a safetensors file, over one of the same name."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    start = len(body)
    if name in header:  # its bytes get another name: the format allows no gap
        header["unused.rotary_emb.inv_freq"] = header.pop(name)
    header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + num_bytes]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body + bytes(num_bytes))
