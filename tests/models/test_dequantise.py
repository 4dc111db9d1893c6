"""Packed matrices beside loops over their entries, and folders of packed weights beside plain ones."""

from __future__ import annotations

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from pagedjax.models import load_model
from pagedjax.models.config import ModelError
from pagedjax.models.dequantise import unpack
from pagedjax.models.formats import SafetensorsFiles
from pagedjax.testing import seeded_tensors

_KINDS = {"uint8": "U8", "int32": "I32", "float32": "F32", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}


def write(path, tensors):
    """A safetensors file by hand: the library writes no 8-bit floats from numpy."""
    header, at = {}, 0
    for name, w in tensors.items():
        spans = [at, at := at + w.nbytes]
        header[name] = {"dtype": _KINDS[w.dtype.name], "shape": list(w.shape), "data_offsets": spans}
    head = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(w).tobytes() for w in tensors.values())
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def fp4(code):
    """Sign, two bits of exponent, one of mantissa; the smallest exponent is subnormal."""
    sign, exponent, half = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (half * 0.5 if exponent == 0 else (1 + half / 2) * 2.0 ** (exponent - 1))


def mxfp4(rng):
    blocks = rng.integers(0, 256, (2, 5, 3, 16)).astype(np.uint8)
    scales = rng.integers(120, 132, (2, 5, 3)).astype(np.uint8)
    want = np.zeros((2, 96, 5), np.float32)
    for e, out, group, byte in np.ndindex(blocks.shape):
        scale = 2.0 ** (int(scales[e, out, group]) - 127)
        for half, code in enumerate(
            (int(blocks[e, out, group, byte]) % 16, int(blocks[e, out, group, byte]) // 16)
        ):
            want[e, group * 32 + byte * 2 + half, out] = fp4(code) * scale
    return {"m_blocks": blocks, "m_scales": scales}, {}, "m", want


def fp8(rng):
    values = rng.standard_normal((21, 19)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, 4)).astype(np.float32)
    want = np.array([[float(values[i, j]) * scales[i // 8, j // 5] for j in range(19)] for i in range(21)])
    facts = {"weight_block_size": [8, 5], "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {"m.weight": values, "m.weight_scale_inv": scales}, facts, "m.weight", want


def _packed(numbers, width):
    """Words of 32 bits along the last axis, low bits first."""
    each = 32 // width
    words = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] // each)), np.uint64)
    for i in range(numbers.shape[-1]):
        words[..., i // each] |= numbers[..., i].astype(np.uint64) << np.uint64(width * (i % each))
    return words.astype(np.uint32).view(np.int32)


def gptq(rng, bits=4, order=True, form="gptq"):
    lanes, out, groups = 32, 24, 4
    q, z = rng.integers(0, 1 << bits, (lanes, out)), rng.integers(0, (1 << bits) - 1, (groups, out))
    scales = rng.random((groups, out)).astype(np.float16)
    group = rng.permutation(lanes) // 8 if order else np.arange(lanes) // 8
    more = form == "gptq"
    want = np.array(
        [
            [(q[i, o] - z[group[i], o] - more) * float(scales[group[i], o]) for i in range(lanes)]
            for o in range(out)
        ]
    )
    tensors = {"m.qweight": _packed(q.T, bits).T, "m.qzeros": _packed(z, bits), "m.scales": scales}
    if order:
        tensors["m.g_idx"] = group.astype(np.int32)
    facts = {"bits": bits, "group_size": lanes // groups, "checkpoint_format": form, "desc_act": order}
    return tensors, facts, "m.weight", want


def awq(rng):
    lanes, out, groups = 12, 32, 3
    q, z = rng.integers(0, 16, (lanes, out)), rng.integers(0, 16, (groups, out))
    scales = rng.random((groups, out)).astype(np.float16)
    want = np.array(
        [[(q[i, o] - z[i // 4, o]) * float(scales[i // 4, o]) for i in range(lanes)] for o in range(out)]
    )

    def words(numbers):
        """The i-th four bits of a word hold the even columns first, then the odd ones."""
        order = [c + 8 * word for word in range(out // 8) for c in (0, 2, 4, 6, 1, 3, 5, 7)]
        return _packed(numbers[:, order], 4)

    facts = {"bits": 4, "group_size": lanes // groups, "zero_point": True, "version": "gemm"}
    return {"m.qweight": words(q), "m.qzeros": words(z), "m.scales": scales}, facts, "m.weight", want


CASES = {
    "mxfp4": ("mxfp4", mxfp4),
    "fp8": ("fp8", fp8),
    "gptq": ("gptq", gptq),
    "gptq of 8 bits in order": ("gptq", lambda rng: gptq(rng, 8, False)),
    "gptq of 2 bits, second form": ("gptq", lambda rng: gptq(rng, 2, True, "gptq_v2")),
    "awq": ("awq", awq),
}


@pytest.mark.parametrize("name", CASES)
def test_strips_of_packed_matrices_equal_loops_over_their_entries(tmp_path, name):
    method, make = CASES[name]
    tensors, facts, plain, want = make(np.random.default_rng(0))
    write(tmp_path / "m.safetensors", tensors | {"other": np.ones(3, np.float32)})
    file = unpack(SafetensorsFiles([tmp_path / "m.safetensors"]), facts | {"quant_method": method})
    assert set(file.tensors) == {plain, "other"} and file.tensors[plain].shape == want.shape
    for start, stop in ((0, len(want)), (0, 1), (len(want) // 2, len(want)), (1, len(want) - 1)):
        if start < stop:
            got = file.rows(plain, start, stop)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want[start:stop], rtol=1e-6)


REFUSED = {
    "bits": ("gptq", dict(bits=3), {}, "bits=3: must be 4 or 8 or 2"),
    "no bits": ("gptq", dict(bits=None), {}, "bits"),
    "marlin": ("gptq", dict(checkpoint_format="marlin"), {}, "checkpoint_format='marlin'"),
    "gemv": ("awq", dict(version="gemv"), {}, "version='gemv'"),
    "other floats": ("fp8", dict(fmt="e5m2"), {}, "fmt='e5m2'"),
    "one scale": ("fp8", dict(weight_block_size=None), {}, "weight_block_size=None"),
    "no scales": ("gptq", {}, {"m.scales": None}, "'m.scales' is missing"),
    "scales of another": ("awq", {}, {"m.scales": np.ones((3, 8), np.float16)}, r"asks for \(3, 32\)"),
    "groups": ("gptq", {}, {"m.g_idx": np.full(32, 9, np.int32)}, "names a group that is not there"),
    "blocks": ("fp8", {}, {"m.weight_scale_inv": np.ones((2, 4), np.float32)}, r"asks for \(3, 4\)"),
    "no order": ("gptq", {}, {"m.g_idx": None}, "'m.g_idx' is missing"),
    "groups of another size": (
        "gptq",
        dict(group_size=16),
        {},
        r"'m.scales' has shape \(4, 24\): .* \(2, 24\)",
    ),
    "one group": ("awq", dict(group_size=-1), {}, r"has shape \(3, 32\): .* \(1, 32\)"),
    "size of no group": ("awq", dict(group_size=0), {}, "group_size=0: must be lanes of a group"),
    "no size": ("gptq", dict(group_size=None), {}, "group_size=None: must be lanes"),
    "size that does not divide": ("gptq", dict(group_size=24), {}, r"asks for \(2, 24\)"),
    "rotated": (
        "gptq",
        dict(rotation="hadamard"),
        {},
        "quantization_config: rotation='hadamard': not known here",
    ),
    "no groups": ("awq", {}, {"m.scales": np.ones((0, 32), np.float16)}, r"has shape \(0, 32\)"),
    "scales of one axis": ("gptq", {}, {"m.scales": np.ones(24, np.float16)}, "'m.scales' is F16 of shape"),
    "words of 8 bits": ("gptq", {}, {"m.qweight": np.ones((4, 24), np.uint8)}, "'m.qweight' is U8 of shape"),
    "no zero points": ("awq", {}, {"m.qzeros": None}, "'m.qzeros' is missing"),
    "zero points of 8 bits": (
        "awq",
        {},
        {"m.qzeros": np.ones((3, 4), np.uint8)},
        "'m.qzeros' is U8 of shape",
    ),
    "values of another type": (
        "fp8",
        {},
        {"m.weight": np.ones((21, 19), np.float16)},
        "'m.weight' is F16 of shape",
    ),
    "values missing": ("fp8", {}, {"m.weight": None}, "'m.weight' is missing"),
    "other blocks": ("fp8", dict(weight_block_size=[8, 8]), {}, r"has shape \(3, 4\): .* \(3, 3\)"),
    "blocks of nothing": (
        "fp8",
        dict(weight_block_size=[0, 8]),
        {},
        r"weight_block_size=\[0, 8\]: must be two sizes",
    ),
    "scales of 8 bits": (
        "fp8",
        {},
        {"m.weight_scale_inv": np.ones((3, 4), np.uint8)},
        "_inv' is U8 of shape",
    ),
    "fp4 without scales": ("mxfp4", {}, {"m_scales": None}, "'m_scales' is missing"),
    "fp4 of other scales": ("mxfp4", {}, {"m_scales": np.ones((2, 5, 2), np.uint8)}, r"asks for \(2, 5, 3\)"),
    "fp4 in half blocks": (
        "mxfp4",
        {},
        {"m_blocks": np.ones((2, 5, 3, 8), np.uint8)},
        r"asks for \(2, 5, 3, 16\)",
    ),
    "fp4 as floats": (
        "mxfp4",
        {},
        {"m_blocks": np.ones((2, 5, 3, 16), np.float32)},
        "'m_blocks' is F32 of shape",
    ),
    "plain as well": ("awq", {}, {"m.weight": np.ones(3, np.float32)}, "stored plain and packed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_and_damage_are_refused(tmp_path, name):
    method, changes, others, words = REFUSED[name]
    tensors, facts, plain, _ = CASES[method][1](np.random.default_rng(0))
    tensors = {n: w for n, w in (tensors | others).items() if w is not None}
    write(tmp_path / "m.safetensors", tensors)
    facts = {k: v for k, v in (facts | changes).items() if v is not None or k == "weight_block_size"}
    with pytest.raises(ModelError, match=words) as caught:
        unpack(SafetensorsFiles([tmp_path / "m.safetensors"]), facts | {"quant_method": method}).rows(
            plain, 0, 1
        )
    assert "\n" not in str(caught.value)
    if others and name != "plain as well":
        assert str(caught.value).startswith("m.safetensors: ")


OSS = dict(
    model_type="gpt_oss", vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=3, num_experts_per_tok=2,
    max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def _folder(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path / "tokenizer.json"))
    write(path / "model.safetensors", tensors)
    return load_model(path, progress=False)


def test_folders_of_packed_experts_and_of_eight_bits_load_as_the_plain_ones(tmp_path):
    rng = np.random.default_rng(1)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (96, 32), "model.norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,), f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (16, 32), f"{layer}self_attn.k_proj.weight": (8, 32),
        f"{layer}self_attn.v_proj.weight": (8, 32), f"{layer}self_attn.o_proj.weight": (32, 16),
        f"{layer}self_attn.q_proj.bias": (16,), f"{layer}self_attn.k_proj.bias": (8,),
        f"{layer}self_attn.v_proj.bias": (8,), f"{layer}self_attn.o_proj.bias": (32,),
        f"{layer}self_attn.sinks": (2,), f"{layer}mlp.router.weight": (3, 32), f"{layer}mlp.router.bias": (3,),
        f"{layer}mlp.experts.gate_up_proj_bias": (3, 128), f"{layer}mlp.experts.down_proj_bias": (3, 32),
    }  # fmt: skip
    plain = seeded_tensors(shapes)
    packed = dict(plain)
    for name, out, lanes in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
        blocks = rng.integers(0, 256, (3, out, lanes // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 128, (3, out, lanes // 32)).astype(np.uint8)
        codes = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(3, out, lanes)
        values = np.vectorize(fp4)(codes) * 2.0 ** (np.repeat(scales, 32, axis=2).astype(int) - 127)
        plain[f"{layer}mlp.experts.{name}"] = values.swapaxes(1, 2).astype(np.float32)
        packed |= {f"{layer}mlp.experts.{name}_blocks": blocks, f"{layer}mlp.experts.{name}_scales": scales}
    want = _folder(tmp_path / "plain", OSS, plain).params
    mx = _folder(tmp_path / "mx", OSS | {"quantization_config": {"quant_method": "mxfp4"}}, packed).params
    assert jax.tree.all(jax.tree.map(np.array_equal, want, mx))
    # Rows of gate and up alternate in the file; in the leaf the gates of an expert come first.
    up = np.asarray(want["layer_00"]["mlp"]["expert_up"]["weight"]).reshape(3, 128, 32)
    np.testing.assert_array_equal(up[1, :64], plain[f"{layer}mlp.experts.gate_up_proj"][1].T[::2])

    eight = dict(plain)
    name = f"{layer}self_attn.q_proj.weight"
    eight[name] = plain[name].astype(ml_dtypes.float8_e4m3fn)
    eight[f"{name}_scale_inv"] = scale = rng.random((2, 4)).astype(np.float32)
    facts = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    loaded = _folder(tmp_path / "eight", OSS | {"quantization_config": facts}, eight).params
    by_hand = eight[name].astype(np.float32) * np.repeat(np.repeat(scale, 8, 0), 8, 1)
    np.testing.assert_array_equal(loaded["layer_00"]["qkv"]["weight"][:16], by_hand)


def test_a_left_over_setting_beside_plain_weights_does_no_harm(tmp_path):
    save_file({"m.weight": np.ones((2, 2), np.float32)}, tmp_path / "m.safetensors")
    file = SafetensorsFiles([tmp_path / "m.safetensors"])
    assert unpack(file, {"quant_method": "gptq", "bits": 3}) is file
    assert unpack(file, {}) is file
