"""Mutated headers: each ends in a ModelError of one line or in a correct load, quickly and in little memory."""

import json
import re
import resource
import struct
import time

import numpy as np
import pytest
from safetensors.numpy import save
from tokenizers import Tokenizer, models

from pagedjax.models import load_model
from pagedjax.models.config import ModelError
from pagedjax.models.formats import GgufFile
from pagedjax.testing import tiny_config

CONFIG = tiny_config(
    num_layers=1,
    d_model=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_mlp=32,
    vocab_size=258,
    max_model_len=32,
)
CASES = [100, pytest.param(2000, marks=pytest.mark.full)]  # of each format
HUGE = [0, 1, 2, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
MAX_SECONDS, MAX_EXTRA_BYTES = 2.0, 200 << 20


def _mutate(data: bytes, header: int, rng) -> bytes:
    """One to four random edits within the first `header` bytes; one case in eight is cut short."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, min(header, len(out))))
        match rng.integers(0, 6):
            case 0:
                out[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                out[at] = int(rng.integers(0, 256))
            case 2:
                out[at : at + 8] = struct.pack("<Q", HUGE[rng.integers(0, len(HUGE))])
            case 3:
                out[at : at + 4] = struct.pack("<I", HUGE[rng.integers(0, len(HUGE))] & 0xFFFFFFFF)
            case 4:
                del out[at : at + int(rng.integers(1, 9))]
            case 5:
                out[at:at] = rng.integers(0, 256, int(rng.integers(1, 9)), dtype=np.uint8).tobytes()
    return bytes(out[: int(rng.integers(0, len(out)))] if rng.integers(0, 8) == 0 else out)


def _rewrite_json(data: bytes, rng) -> bytes:
    """A safetensors header of valid JSON in which one number, name or type is another."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = list(header)[rng.integers(0, len(header))]
    entry = header[name]
    odd = [-1, 0, 1.5, None, "x", [], {}, True, 2**31, 2**63, 10**30, [2**40], "F8_E5M2", "I64"]
    value = odd[rng.integers(0, len(odd))]
    match rng.integers(0, 5):
        case 0:
            entry["shape"] = value
        case 1:
            entry["data_offsets"] = value
        case 2:
            entry["dtype"] = value
        case 3:
            key = ("shape", "data_offsets")[rng.integers(0, 2)]
            entry[key][rng.integers(0, len(entry[key]))] = value
        case 4:
            header[name] = value
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]


@pytest.fixture(scope="module")
def originals(tmp_path_factory, write_gguf, hf_tensors):
    folder = tmp_path_factory.mktemp("fuzz")
    tensors = hf_tensors(CONFIG)
    gguf_data = write_gguf(folder / "m.gguf", CONFIG, tensors, "Q8_0").read_bytes()
    config = dict(
        model_type="llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=258,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder, gguf_data, save(tensors)


def _outcome(path):
    """(error or None, seconds); anything but a ModelError escapes and fails the test."""
    begin = time.perf_counter()
    try:
        loaded = load_model(path, progress=False)
    except ModelError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000
        return str(error), time.perf_counter() - begin
    assert loaded.params["embed"].shape == (loaded.config.vocab_size, loaded.config.d_model)
    return None, time.perf_counter() - begin


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_headers(originals, kind, cases):
    folder, gguf_data, st_data = originals
    path, target, data = {
        "gguf": (folder / "f.gguf", folder / "f.gguf", gguf_data),
        "safetensors": (folder / "model.safetensors", folder, st_data),
    }[kind]
    path.write_bytes(data)
    if kind == "gguf":
        header = min(info.offset for info in GgufFile(path).tensors.values())
    else:
        header = 8 + struct.unpack("<Q", data[:8])[0]
    assert _outcome(target)[0] is None
    rng = np.random.default_rng(2026)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    errors, slowest = [], 0.0
    for case in range(cases):
        rewrite = kind == "safetensors" and case % 2
        path.write_bytes(_rewrite_json(data, rng) if rewrite else _mutate(data, header, rng))
        error, seconds = _outcome(target)
        errors.append(error)
        slowest = max(slowest, seconds)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert slowest < MAX_SECONDS and grown < MAX_EXTRA_BYTES
    # The edits reach deep: most are noticed, by many different rules.
    noticed = [e for e in errors if e]
    assert len(noticed) > cases // 2
    assert len({re.sub(r"\d+", "", e) for e in noticed}) > 12
