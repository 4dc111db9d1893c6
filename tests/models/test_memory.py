"""Peak memory of a load: the result and little more, whichever format it comes from."""

import json
import subprocess
import sys

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
