"""The named default model, where it has been fetched before: what is in the file, and how it tokenizes."""

import pytest

from pagedjax.models.formats import GgufFile
from pagedjax.models.gguf_configs import config_from_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.hub import named_path
from pagedjax.paths import user_cache_dir

pytestmark = pytest.mark.smollm


@pytest.fixture(scope="module")
def file():
    path = named_path("smollm2-135m", user_cache_dir())
    if not path.is_file():
        pytest.skip(f"{path}: the default model is not there; `pagedjax demo` fetches it")
    return GgufFile(path)


def test_shapes_and_types(file):
    config = config_from_gguf(file.metadata)
    assert (config.num_layers, config.d_model, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.rope_theta, config.vocab_size) == (64, 100000.0, 49152)
    kinds = [info.kind for info in file.tensors.values()]
    assert {k: kinds.count(k) for k in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert "output.weight" not in file.tensors


def test_tokens_and_chat(file):
    tok = tokenizer_from_gguf(file.metadata)
    assert tok.vocab_size == 49152 and tok.eos_token_ids == (2, 0, 4)  # the last two by their text
    for text in ("The capital of France is Paris.", "x = 12345\n", "naïve café 東京 🙂", ""):
        ids = tok.encode(text)
        assert tok.decode(ids) == text and all(i > 16 for i in ids)  # no start token: the file says so
    assert len(tok.encode("2026")) == 4  # digits stand alone
    chat = tok.apply_chat([{"role": "user", "content": "Hi"}])
    assert chat.startswith("<|im_start|>system\n") and chat.endswith("<|im_start|>assistant\n")
    ids = tok.encode(chat, add_special=False)
    assert [ids.count(i) for i in (1, 2)] == [3, 2] and tok.decode(ids, skip_special=False) == chat
