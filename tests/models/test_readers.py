"""Every reader of a model's files under seeded edits: right, or one line; never a silent change of meaning."""

import json
import resource
import time
from types import SimpleNamespace

import numpy as np
import pytest
from mutations import SIZES, byte_level_tokenizer, judge
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from pagedjax.cli.generate import _from_file
from pagedjax.models import convert
from pagedjax.models.config import ModelError
from pagedjax.models.config_keys import GENERATION, NO_EFFECT
from pagedjax.models.describe import describe_folder
from pagedjax.models.family_configs import config_from_hf
from pagedjax.models.generation import _NO_EFFECT as GENERATION_NO_EFFECT
from pagedjax.models.generation import gguf_sampling, read_generation
from pagedjax.models.gguf_configs import config_from_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.hub import describe_checkpoint
from pagedjax.models.tokenizer import _NO_EFFECT as TOKENIZER_NO_EFFECT
from pagedjax.models.tokenizer import load_tokenizer, read_json
from pagedjax.testing import tiny_config

CASES = [100, pytest.param(2000, marks=pytest.mark.full)]
MAX_SECONDS, MAX_EXTRA_BYTES = 2.0, 200 << 20

COMMON = SIZES | dict(
    eos_token_id=[2, 3],
    pad_token_id=0,
    attention_dropout=0.0,
    use_cache=True,
    torch_dtype="float32",
    architectures=["AModel"],
)
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, attention_factor=1.2
)
CONFIGS = {
    "llama": COMMON
    | dict(
        model_type="llama",
        head_dim=16,
        hidden_act="relu",
        mlp_bias=True,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_theta=500.0,
        rope_scaling=YARN,
    ),
    "qwen3": COMMON
    | dict(
        model_type="qwen3",
        head_dim=16,
        hidden_act="gelu",
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=700.0),
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "gemma3": COMMON
    | dict(
        model_type="gemma3_text",
        head_dim=16,
        hidden_activation="silu",
        sliding_window=6,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        final_logit_softcapping=8.0,
        tie_word_embeddings=False,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=2.0, rope_theta=3000.0),
            sliding_attention=dict(rope_type="default", rope_theta=90.0),
        ),
    ),
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=96,
        n_embd=32,
        n_head=4,
        n_layer=3,
        n_positions=64,
        n_inner=40,
        activation_function="relu",
        layer_norm_epsilon=1e-4,
        scale_attn_weights=False,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        attn_pdrop=0.1,
    ),
}


@pytest.fixture
def bounds():
    """No case takes long, and all of them together little memory."""
    slowest = [0.0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def timed(read):
        def call():
            begin = time.perf_counter()
            try:
                return read()
            finally:
                slowest[0] = max(slowest[0], time.perf_counter() - begin)

        return call

    yield timed
    assert slowest[0] < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_EXTRA_BYTES


def _empty(value):
    return isinstance(value, (dict, list)) and not value


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_config_json(tmp_path, bounds, name, cases):
    path = tmp_path / "config.json"

    def read():
        notes = []
        return config_from_hf(read_json(path), notes), tuple(notes)

    def harmless(where, value, kind):
        key = where[0]
        if kind in ("rename", "add") and len(where) > 1:
            return key in NO_EFFECT  # below a key that is not read
        # A whole table that is empty says nothing, as a null does; these may stand in a table or beside it.
        either = kind == "move" and where[-1] in ("rope_theta", "original_max_position_embeddings")
        return key in NO_EFFECT or key in GENERATION or either or _empty(value)

    told = judge(
        CONFIGS[name],
        path.write_bytes,
        bounds(read),
        cases=cases,
        seed=1,
        harmless=harmless,
        errors=ModelError,
    )
    assert told["refused"] > cases // 3 and told["other"] > cases // 10, told


@pytest.mark.parametrize("cases", CASES)
def test_gguf_metadata(tmp_path, bounds, cases):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lists = {
        "tokenizer.ggml.tokens": [*alphabet, "<s>", "<stop>", "<pad>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3],
        "tokenizer.ggml.merges": [f"{alphabet[40]} {alphabet[41]}"],
    }
    lists["tokenizer.ggml.tokens"].append(alphabet[40] + alphabet[41])
    lists["tokenizer.ggml.token_type"].append(1)
    document = {
        "general.architecture": "llama",
        "general.name": "a name",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 7,
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-4,
        "llama.rope.freq_base": 500.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.vocab_size": 260,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 258,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    path = tmp_path / "metadata.json"

    def read():
        metadata = {**read_json(path), **lists}
        tok = tokenizer_from_gguf(metadata)
        facts = (
            tok.to_json(),
            tok.bos_token_id,
            tok.add_bos,
            tok.eos_sources,
            tok.chat_template,
            tok.special,
        )
        return config_from_gguf(metadata), facts, gguf_sampling(metadata)

    def harmless(where, value, kind):
        return where[0].startswith("general.name") and kind != "rename"

    told = judge(
        document,
        path.write_bytes,
        bounds(read),
        cases=cases,
        seed=2,
        harmless=harmless,
        errors=(ModelError, RuntimeWarning),  # a missing tokenizer.ggml.pre is warned of
    )
    assert told["refused"] > cases // 3 and told["other"] > cases // 20, told


@pytest.fixture(scope="module")
def model(tmp_path_factory, hf_tensors):
    """A folder of two shards with all that may lie beside them, and what it is converted to."""
    folder = tmp_path_factory.mktemp("readers") / "m"
    folder.mkdir()
    shape = dict(num_layers=1, d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, d_mlp=32, vocab_size=96)
    tensors = hf_tensors(tiny_config(**shape, tie_embeddings=True, bos_token_id=None, eos_token_ids=()))
    names = sorted(tensors)
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(shards.values()):
        mine = {name: tensors[name] for name in names if shards[name] == file}
        stale = {name: tensors[name] + 1 for name in names[:3] if shards[name] != file}
        save_file(mine | stale, folder / file)
    letters = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c.isascii()]
    documents = {
        "config.json": dict(
            model_type="llama",
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=96,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": shards},
        "generation_config.json": dict(
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            repetition_penalty=1.1,
            max_new_tokens=9,
            eos_token_id=[2, 4],
            bos_token_id=1,
            pad_token_id=0,
            stop_strings=["stop"],
            no_repeat_ngram_size=0,
            transformers_version="4.40",
        ),
        "tokenizer.json": byte_level_tokenizer(letters[:91]),  # 96 ids in all
        "tokenizer_config.json": dict(
            bos_token="<s>",
            eos_token=dict(content="</s>", lstrip=False, rstrip=False, single_word=False, normalized=False),
            pad_token="<pad>",
            add_bos_token=True,
            add_eos_token=False,
            add_prefix_space=False,
            split_special_tokens=False,
            chat_template="{{ messages }}",
            model_max_length=512,
            tokenizer_class="PreTrainedTokenizerFast",
            clean_up_tokenization_spaces=False,
            added_tokens_decoder={
                str(i): dict(
                    content=text,
                    lstrip=False,
                    rstrip=False,
                    single_word=False,
                    normalized=False,
                    special=True,
                )
                for i, text in enumerate(("<pad>", "<s>", "</s>"))
            },
        ),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return SimpleNamespace(folder=folder, documents=documents, orbax=folder.parent / "orbax")


def _judged(model, name, read, *, document=None, **rule):
    """Hold the reader of one of the folder's files to the rule; the file is put back afterwards."""
    path, own = model.folder / name, model.documents[name]
    try:
        return judge(document or own, path.write_bytes, read, errors=ModelError, **rule)
    finally:
        path.write_text(json.dumps(own))


@pytest.mark.parametrize("cases", CASES)
def test_tokenizer_json(model, bounds, cases):
    document = json.loads(json.dumps(model.documents["tokenizer.json"]))
    keep = ("pad", "s", "a", "b", "c", "ab", "abc", "<pad>", "<s>", "</s>")
    document["model"]["vocab"] = {t: i for t, i in document["model"]["vocab"].items() if t in keep or i > 90}

    def read():
        tok = load_tokenizer(model.folder)
        return tok.to_json(), tok.eos_token_ids

    def harmless(where, value, kind):
        # Off anyway; nulls of the library's own; a token more is a vocabulary like any other.
        more = kind == "add" and where[:2] == ("model", "vocab")
        return where[0] in ("version", "truncation", "padding") or more or _empty(value)

    told = _judged(
        model, "tokenizer.json", bounds(read), document=document, cases=cases, seed=3, harmless=harmless
    )
    assert told["refused"] > cases // 3, told


@pytest.mark.parametrize("cases", CASES)
def test_tokenizer_config_json(model, bounds, cases):
    def read():
        tok = load_tokenizer(model.folder)
        facts = (tok.bos_token_id, tok.eos_sources, tok.chat_template, tok.special, tok.notes)
        return tok.to_json(), tok.encode("ab</s>c"), facts

    def harmless(where, value, kind):
        # Flags of a special token stand in tokenizer.json; an empty list of templates is none.
        return (
            where[0] in TOKENIZER_NO_EFFECT or (len(where) > 1 and where[0] == "eos_token") or _empty(value)
        )

    told = _judged(model, "tokenizer_config.json", bounds(read), cases=cases, seed=4, harmless=harmless)
    assert told["refused"] > cases // 3, told


@pytest.mark.parametrize("cases", CASES)
def test_generation_config_json(tmp_path, bounds, model, cases):
    path, config = tmp_path / "generation_config.json", config_from_hf(model.documents["config.json"])

    def harmless(where, value, kind):
        neutral = where[0] == "no_repeat_ngram_size" and value == 0
        return where[0] in (*GENERATION_NO_EFFECT, "bos_token_id") or neutral

    told = judge(
        model.documents[path.name],
        path.write_bytes,
        bounds(lambda: read_generation(read_json(path), config)),
        cases=cases,
        seed=5,
        harmless=harmless,
        errors=ModelError,
    )
    assert told["refused"] > cases // 3 and told["other"] > cases // 10, told


@pytest.mark.parametrize("cases", CASES)
def test_weight_index(model, bounds, cases):
    def read():
        described = describe_folder(model.folder)
        rows = {n: described.file.rows(n, 0, info.shape[0]) for n, info in described.file.tensors.items()}
        return {name: np.asarray(values).tobytes() for name, values in rows.items()}

    def harmless(where, value, kind):
        return where[0] == "metadata"

    told = _judged(
        model, "model.safetensors.index.json", bounds(read), cases=cases, seed=6, harmless=harmless
    )
    assert told["refused"] > cases // 3, told


@pytest.mark.parametrize("cases", CASES)
def test_orbax_manifest(model, bounds, cases):
    if not model.orbax.exists():
        convert(model.folder, model.orbax, progress=False)
    path = model.orbax / "pagedjax_model.json"
    document = json.loads(path.read_text())
    document["config"]["windows"], document["config"]["rope_layers"] = [8], [True]

    def read():
        config, _, understood = describe_checkpoint(model.orbax)
        return config, understood.sampling

    def harmless(where, value, kind):
        # What it is called and how it is stored; drawn settings stand for themselves.
        return where in (("name",), ("dtype",)) or _empty(value)

    told = judge(
        document, path.write_bytes, bounds(read), cases=cases, seed=7, harmless=harmless, errors=ModelError
    )
    assert told["refused"] > cases // 3 and told["other"] > cases // 10, told


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize(
    "job",
    [
        {"prompt": "a text"},
        {"token_ids": [1, 2, 3]},
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "y"}]},
            ]
        },
    ],
    ids=lambda job: next(iter(job)),
)
def test_prompt_files(tmp_path, bounds, job, cases):
    path = tmp_path / "prompts.jsonl"
    told = judge(
        job,
        lambda raw: path.write_bytes(raw.replace(b"\n", b" ")),
        bounds(lambda: list(_from_file(path, True, None))),
        cases=cases,
        seed=8,
        # What a message has beside role and content goes to the chat template.
        harmless=lambda where, value, kind: len(where) > 2 or _empty(value),
        errors=ValueError,
    )
    assert told["refused"] > cases // 4, told
