"""Peak memory of a load: the result and little more, whichever format it comes from."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from pagedjax.testing import tiny_config

# 35 M parameters, 140 MB in float32, no leaf above a tenth of it.
CONFIG = tiny_config(
    num_layers=12, d_model=512, num_heads=8, num_kv_heads=4, head_dim=64, d_mlp=1408, vocab_size=4096
)

PEAK = """
import sys
import jax
from pagedjax.models import load_model
import gguf, safetensors, tokenizers

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

jax.block_until_ready(jax.device_put(0))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew from what is resident now
before = status("VmRSS")
params = load_model(sys.argv[1], progress=False, dtype=sys.argv[2]).params
size = sum({leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(params)}.values())
print((status("VmHWM") - before) / size, size)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory, write_gguf, hf_tensors):
    folder = tmp_path_factory.mktemp("m")
    tensors = hf_tensors(CONFIG)
    write_gguf(folder / "m.gguf", CONFIG, tensors, "Q8_0")
    save_file(tensors, folder / "model.safetensors")
    config = dict(
        model_type="llama",
        hidden_size=CONFIG.d_model,
        intermediate_size=CONFIG.d_mlp,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        vocab_size=CONFIG.vocab_size,
        max_position_embeddings=CONFIG.max_model_len,
        tie_word_embeddings=False,
    )
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return {"gguf": folder / "m.gguf", "safetensors": folder}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_is_at_most_a_fifth_above_the_result(sources, kind, dtype):
    command = [sys.executable, "-c", PEAK, str(sources[kind]), dtype]
    ratio, size = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    assert int(size) > 50e6
    assert float(ratio) <= 1.2


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_a_folder_of_experts_of_two_gigabytes_peaks_at_little_more(tmp_path):
    """192 tensors of experts in a file a layer; random numbers, one expert's drawn and written again and again."""
    layers, experts, width, inner = 5, 64, 1024, 512
    rng, where = np.random.default_rng(0), {}
    drawn = [(rng.standard_normal((inner, width)) / 32).astype(np.float32) for _ in range(3)]

    def write(name, tensors):
        save_file(tensors, tmp_path / name)
        where.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        at, tensors = f"model.layers.{layer}.", {}
        for expert in range(experts):
            gate, up, down = (np.roll(w, expert) for w in drawn)
            stem = f"{at}mlp.experts.{expert}."
            tensors |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
            tensors[f"{stem}down_proj.weight"] = down.reshape(width, inner)
        tensors[f"{at}mlp.gate.weight"] = np.ones((experts, width), np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(width, np.float32)
        for name, shape in (
            ("q", (512, width)),
            ("k", (128, width)),
            ("v", (128, width)),
            ("o", (width, 512)),
        ):
            tensors[f"{at}self_attn.{name}_proj.weight"] = np.ones(shape, np.float32)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = np.ones(64, np.float32)
        write(f"layer{layer}.safetensors", tensors)
    write(
        "ends.safetensors",
        {"model.embed_tokens.weight": drawn[0], "model.norm.weight": np.ones(width, np.float32)},
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = dict(
        model_type="qwen3_moe", hidden_size=width, intermediate_size=inner, moe_intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=experts,
        num_experts_per_tok=8, vocab_size=inner, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    out = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path, "float32"], capture_output=True, text=True, check=True
    )
    ratio, size = map(float, out.stdout.split())
    print(f"{size / 1e9:.2f} GB, peak {ratio:.3f} times")
    assert size > 2e9 and ratio <= 1.2
