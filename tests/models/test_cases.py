"""Fault kinds met in practice by loaders of model files, one test each, named by its id."""

import json
import os
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pagedjax.models import load_model
from pagedjax.models.chat import render_chat
from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.family_configs import FAMILIES, config_from_hf
from pagedjax.models.formats import open_gguf
from pagedjax.models.gguf_configs import config_from_gguf
from pagedjax.models.gguf_tokenizer import SPLITS, tokenizer_from_gguf
from pagedjax.models.hub import describe_model
from pagedjax.models.layers import rope_frequencies
from pagedjax.models.tokenizer import load_tokenizer
from pagedjax.testing import tiny_config

CONFIG = tiny_config(
    tie_embeddings=True,
    num_layers=1,
    d_model=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_mlp=32,
    max_model_len=64,
)  # 258 ids
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HF = dict(
    model_type="llama",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=258,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    bos_token_id=256,
    eos_token_id=257,
)


@pytest.fixture
def folder(tmp_path, hf_tensors):
    """A Hugging Face folder; `write(file, object)` replaces one of its files."""
    path = tmp_path / "m"
    path.mkdir()
    save_file(hf_tensors(CONFIG), path / "model.safetensors")

    def write(name, value):
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    write("config.json", HF)
    write("tokenizer.json", _byte_tokenizer().to_str())
    return SimpleNamespace(path=path, write=write, load=lambda: load_model(path, progress=False))


def _byte_tokenizer(*added):
    """258 ids, the last two special, and what is added behind them."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*ALPHABET])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *added])
    return tokenizer


def _metadata(**changes):
    """Metadata of a byte-level GGUF tokenizer of 258 ids; keys of tokenizer.ggml."""
    values = dict(
        model="gpt2",
        pre="gpt-2",
        tokens=[*ALPHABET, "<s>", "<stop>"],
        token_type=[1] * 256 + [3, 3],
        merges=[],
        bos_token_id=256,
        eos_token_id=257,
    )
    values |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


# ---- GGUF tokenizers ----


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "gpt-2", "qwen2", "smollm", "default"])
def test_B121_the_start_token_goes_by_the_split_where_no_key_says(pre):
    starts = pre in ("llama-bpe", "llama3", "llama-v3")
    assert (tokenizer_from_gguf(_metadata(pre=pre)).encode("hi")[0] == 256) is starts
    for said in (False, True):
        assert (tokenizer_from_gguf(_metadata(pre=pre, add_bos_token=said)).encode("hi")[0] == 256) is said
    if starts:
        with pytest.raises(ModelError, match=r"bos_token_id is missing: texts begin with it"):
            tokenizer_from_gguf(_metadata(pre=pre, bos_token_id=None))
    with pytest.raises(ModelError, match="add_eos_token=True: a prompt that ends is not continued"):
        tokenizer_from_gguf(_metadata(pre=pre, add_eos_token=True))


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"])
def test_B123_a_turn_ends_at_what_its_text_says(text):
    tokens = [*ALPHABET, "<s>", text, "<|endoftext|>"]
    for kind in (3, 1):  # a control token, and one that the file takes for plain text
        tok = tokenizer_from_gguf(
            _metadata(tokens=tokens, token_type=[1] * 256 + [3, kind, 3], eos_token_id=258)
        )
        assert tok.eos_token_ids == (258, 257)
        assert tok.eos_sources == {258: "tokenizer.ggml.eos_token_id", 257: f"the text {text}"}
        assert tok.encode(f"a{text}")[-1] == 257 and tok.decode([*tok.encode("a"), 257]) == "a"
    harmony = ["<|end|>", "<|return|>", "<|call|>"]  # there <|end|> ends a message, not the turn
    tok = tokenizer_from_gguf(_metadata(tokens=[*ALPHABET, "<s>", *harmony], token_type=[1] * 256 + [3] * 4))
    assert tok.eos_token_ids == (257, 258, 259) or tok.eos_token_ids == (258, 259)
    assert 257 not in tok.eos_token_ids


def test_deepseeks_splits_cut_as_their_tokenizers_do():
    """Words, figures, signs and Chinese; V2's class of signs holds ASCII letters too, so an accent cuts a word."""
    text = "Hello, w\u00f6rld! 12345 \u4f60\u597dabc\n\nfoo.bar(x)"
    cuts = {
        "deepseek-llm": "Hello|,| w|\u00f6|rld|!| |12345| |\u4f60\u597d|abc|\n|\n|foo|.|bar|(|x|)",
        "deepseek-v3": "Hello|,| w\u00f6rld|!| |123|45| |\u4f60\u597d|abc|\n\n|foo|.bar|(x|)",
    }
    for pre, pieces in cuts.items():
        split = tokenizer_from_gguf(_metadata(pre=pre))._tokenizer.pre_tokenizer
        spans = [span for _, span in split.pre_tokenize_str(text)]
        assert "|".join(text[start:stop] for start, stop in spans) == pieces


def test_B130_a_split_is_named_or_warned_of():
    with pytest.warns(RuntimeWarning, match=r"tokenizer\.ggml\.pre is missing"):
        unnamed = tokenizer_from_gguf(_metadata(pre=None))
    digits = [a + b for a in "0123456789" for b in "0123456789"]
    tokens = [*ALPHABET, "<s>", "<stop>", *digits, *(d + "3" for d in digits)]
    meta = dict(
        tokens=tokens, token_type=[1] * 256 + [3, 3] + [1] * 200, merges=[f"{a} {b}" for a, b in digits]
    )

    def spelled(pre, text):
        tok = tokenizer_from_gguf(_metadata(**meta, pre=pre))
        return [tok.decode([i]) for i in tok.encode(text)]

    assert spelled("default", "12345") == ["12", "3", "45"]  # 123|45, and only pairs are merged
    assert spelled("gpt-2", "12345") == ["12", "34", "5"]
    assert spelled("smollm", "12345") == list("12345")
    assert spelled("default", "a+b") == ["a", "+", "b"]
    assert unnamed.to_json() == tokenizer_from_gguf(_metadata(pre="default")).to_json()
    qwen = [tokenizer_from_gguf(_metadata(pre=pre)) for pre in ("qwen2", "deepseek-r1-qwen")]
    assert qwen[0].to_json() == qwen[1].to_json() and not qwen[1].add_bos
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre='tekken': must be one of default"):
        tokenizer_from_gguf(_metadata(pre="tekken"))
    assert "default" in SPLITS


def _split(path, parts):
    """The GGUF file at path as several, by the library's own splitter's naming; returns their paths."""
    reader = gguf.GGUFReader(path)
    names = [t.name for t in reader.tensors]
    out = []
    for number in range(parts):
        part = path.with_name(f"m-{number + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        if number:
            writer.kv_data[0].pop("general.architecture")
        else:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    kind = field.types[0]
                    writer.add_key_value(key, field.contents(), kind, *field.types[1:2])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        out.append(part)
    return out


def test_B131_parts_of_a_model_are_read_as_one(tmp_path, write_gguf, hf_tensors):
    whole = write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG))
    want = load_model(whole, progress=False)
    first, second = _split(whole, 2)
    for part in (first, second):  # whichever is named
        got = load_model(part, progress=False)
        assert got.config == want.config
        np.testing.assert_array_equal(
            got.params["layer_00"]["mlp"]["down"]["weight"], want.params["layer_00"]["mlp"]["down"]["weight"]
        )
    (single,) = _split(whole, 1)
    assert load_model(single, progress=False).config == want.config
    renamed = second.rename(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf: no such file: .* one of 2 parts"):
        load_model(first, progress=False)
    with pytest.raises(ModelError, match=r"second\.gguf: is part 2 of 2: must be named .*--merge"):
        load_model(renamed, progress=False)
    first.with_name("m-00002-of-00002.gguf").write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="is not part 2 of 2"):
        open_gguf(first)


# ---- config.json ----


def test_B127_a_stretched_model_may_be_asked_for_what_it_reaches():
    plain = config_from_hf(HF)
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    stretched = config_from_hf(HF | {"rope_scaling": yarn})
    assert (plain.max_model_len, plain.longest_len) == (64, 64)
    assert (stretched.max_model_len, stretched.longest_len) == (64, 256)
    whole = config_from_hf(HF | {"rope_scaling": yarn, "max_position_embeddings": 256})
    assert (whole.max_model_len, whole.longest_len) == (256, 256)


ROTARY = [name for name in FAMILIES if name not in ("gpt2", "opt")]


def _family(name, **changes):
    """A config.json of a family with the fields that it needs."""
    learned = dict(vocab_size=96, num_attention_heads=2, hidden_size=32, num_hidden_layers=2)
    base = HF | dict(vocab_size=96, num_hidden_layers=2, bos_token_id=1, eos_token_id=2)
    if name in ("gpt2", "opt"):
        base = learned | dict(bos_token_id=1, eos_token_id=2)
    if name.startswith("gemma"):
        base = base | dict(sliding_window=8)
    if name == "gemma3_text":
        base.pop("rope_theta")
    if name.startswith(
        "deepseek"
    ):  # every head has keys of its own, whose rotated lanes are as many as elsewhere
        base = {key: value for key, value in base.items() if key not in ("head_dim", "num_key_value_heads")}
        base = base | dict(
            qk_rope_head_dim=16, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=None
        )
        base["num_experts_per_tok"] = 2  # null in the files of V2
    return base | dict(model_type=name) | changes


@pytest.mark.parametrize("name", ROTARY)
def test_B128_partly_rotated_heads_are_found_in_every_place(name):
    # gpt-oss is stretched where its file is silent.
    assert config_from_hf(_family(name, partial_rotary_factor=1.0)) == config_from_hf(_family(name))
    nested = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    tables = {"full_attention": nested, "sliding_attention": {}} if name == "gemma3_text" else nested
    places = [dict(partial_rotary_factor=0.5), dict(rope_parameters=tables)]
    if name != "gemma3_text":
        places.append(dict(rope_scaling=nested))
    for place in places:
        with pytest.raises(ModelError, match=r"partial_rotary_factor=0\.5: must be 1"):
            config_from_hf(_family(name, **place))


@pytest.mark.parametrize("name", FAMILIES)
def test_F044_every_unknown_key_is_refused_by_its_name(name):
    """In the file, in a rope table, and where two places disagree; a null says nothing."""
    config_from_hf(_family(name, never_heard_of=None, attention_dropout=0.1, architectures=["X"]))
    for key, value in (("never_heard_of", 1), ("logits_scaling", 8.0), ("residual_multiplier", 0.2)):
        with pytest.raises(ModelError, match=rf"{key}=.*not known here"):
            config_from_hf(_family(name, **{key: value}))
    with pytest.raises(ModelError, match=r"vocab_sise=96: .*did you mean vocab_size\?"):
        config_from_hf(_family(name, vocab_sise=96))
    with pytest.raises(ModelError, match=r"is_encoder_decoder=True: must be False"):
        config_from_hf(_family(name, is_encoder_decoder=True))
    for key, value in (
        ("eos_token_id", 96),
        ("eos_token_id", [2, 500]),
        ("bos_token_id", -1),
        ("eos_token_id", True),
    ):
        with pytest.raises(ModelError, match=rf"{key}=.*must be token ids below 96"):
            config_from_hf(_family(name, **{key: value}))
    if name in ROTARY:
        for eps in (0, 0.0, -1e-6, float("nan"), float("inf"), True, "1e-6"):
            with pytest.raises(ModelError, match="rms_norm_eps="):
                config_from_hf(_family(name, rms_norm_eps=eps))


@pytest.mark.parametrize("name", [n for n in ROTARY if n not in ("gemma3_text", "phi3")])
def test_F044_every_key_of_a_rope_table_counts_or_is_refused(name):
    linear = dict(rope_type="linear", factor=2.0)
    assert config_from_hf(_family(name, rope_scaling=linear)).rope_scaling.factor == 2.0
    for key, value in (("mscale", 2.0), ("short_factor", [1.0]), ("finetuned", True), ("beta_fast", 1)):
        with pytest.raises(ModelError, match=rf"rope_scaling of type linear: {key}="):
            config_from_hf(_family(name, rope_scaling=linear | {key: value}))
    for theta in (0, -5.0, 1.0):
        with pytest.raises(ModelError, match="rope_theta="):
            config_from_hf(_family(name, rope_theta=theta))
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    plain = config_from_hf(_family(name, rope_scaling=yarn))
    scaled = config_from_hf(_family(name, rope_scaling=yarn | dict(mscale=2.0, mscale_all_dim=1.0)))
    one = 0.1 * np.log(4) + 1
    assert rope_frequencies(16, 1e4, plain.rope_scaling)[1] == pytest.approx(one)
    assert rope_frequencies(16, 1e4, scaled.rope_scaling)[1] == pytest.approx((0.2 * np.log(4) + 1) / one)


def test_facts_in_two_places_follow_transformers_and_say_so():
    notes = []
    two = dict(rope_theta=100.0, rope_parameters=dict(rope_type="default", rope_theta=200.0))
    assert config_from_hf(HF | two, notes).rope_theta == 200.0
    assert "rope_parameters.rope_theta=200.0 and rope_theta=100.0: the first counts" in notes[0]
    notes.clear()
    both = dict(
        rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="linear", factor=3.0)
    )
    assert config_from_hf(HF | both, notes).rope_scaling.factor == 2.0 and len(notes) == 1
    notes.clear()
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    beside = HF | dict(rope_scaling=yarn, original_max_position_embeddings=32)
    assert config_from_hf(beside, notes).rope_scaling.original_len == 32 and len(notes) == 1
    with pytest.raises(ModelError, match=r"n_embd=32 and hidden_size=64: must be equal"):
        config_from_hf(_family("gpt2", n_embd=32, hidden_size=64))


def test_F044_gemma3_has_no_cap_on_scores():
    assert config_from_hf(_family("gemma3_text", attn_logit_softcapping=None)).attn_soft_cap == 0.0
    with pytest.raises(ModelError, match=r"attn_logit_softcapping=4\.0: must be null"):
        config_from_hf(_family("gemma3_text", attn_logit_softcapping=4.0))
    assert config_from_hf(_family("gemma2", attn_logit_softcapping=4.0)).attn_soft_cap == 4.0


def test_F044_gpt2_scores_without_a_scale():
    assert config_from_hf(_family("gpt2")).attention_scale == 16**-0.5
    assert config_from_hf(_family("gpt2", scale_attn_weights=False)).attention_scale == 1.0
    with pytest.raises(ModelError, match="scale_attn_by_inverse_layer_idx=True: must be False"):
        config_from_hf(_family("gpt2", scale_attn_by_inverse_layer_idx=True))


# What published files say beside what the tiny ones here do, from memory of their config.json.
PUBLISHED = {
    "llama": dict(
        is_llama_config=True, rope_interleaved=False, pretraining_tp=1, rope_scaling=None, use_cache=True
    ),
    "qwen2": dict(use_mrope=False, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
    "smollm3": dict(max_window_layers=28, use_sliding_window=False, sliding_window=None, pretraining_tp=2),
    "phi3": dict(
        auto_map={"AutoConfig": "x"}, embd_pdrop=0.0, resid_pdrop=0.0, attention_bias=False, sliding_window=9
    ),
    "gemma2": dict(cache_implementation="hybrid", sliding_window_size=8, hidden_act="gelu_pytorch_tanh"),
    "gpt2": dict(
        n_ctx=1024, summary_type="cls_index", task_specific_params={"text-generation": {"do_sample": True}}
    ),
    "opt": dict(
        prefix="</s>", init_std=0.02, layerdrop=0.0, word_embed_proj_dim=32, _remove_final_layer_norm=False
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_say_is_known(name):
    notes = []
    more = PUBLISHED[name] | ({"hidden_activation": "gelu_pytorch_tanh"} if name == "gemma2" else {})
    assert config_from_hf(_family(name, **more), notes) and not notes
    for key in ("use_mrope", "rope_interleaved"):
        with pytest.raises(ModelError, match=f"{key}=True: must be False"):
            config_from_hf(_family(name, **{key: True}))


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 258,
}


def test_F044_every_key_of_a_gguf_file_counts_or_is_refused():
    about = {"general.name": "x", "general.license.link": "y", "split.count": 1, "quantize.imatrix.file": "z"}
    assert config_from_gguf(GGUF | about) == config_from_gguf(GGUF)
    for key, value in (
        ("llama.logit_scale", 2.0),
        ("llama.attention.scale", 0.1),
        ("llama.rope.dimension_sections", [1]),
        ("general.sampler", 1),
        ("qwen2.block_count", 1),
    ):
        with pytest.raises(ModelError, match=rf"{key.replace('.', '.')}=.*not known here"):
            config_from_gguf(GGUF | {key: value})
    with pytest.raises(ModelError, match=r"general\.type='mmproj'"):
        config_from_gguf(GGUF | {"general.type": "mmproj"})
    with pytest.raises(ModelError, match=r"sliding_window=8: must be 0"):
        config_from_gguf(GGUF | {"llama.attention.sliding_window": 8})
    # llama.cpp takes a factor without a type for linear, under its old name too.
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        assert config_from_gguf(GGUF | {f"llama.{key}": 4.0}).rope_scaling.factor == 4.0
    off = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(GGUF | off).rope_scaling is None
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.bos_tokn_id=1: .*did you mean"):
        tokenizer_from_gguf(_metadata() | {"tokenizer.ggml.bos_tokn_id": 1})


def test_F044_a_converted_models_own_config_is_checked():
    good = CONFIG.to_dict()
    assert ModelConfig.from_dict(json.loads(json.dumps(good))) == CONFIG
    for change in (
        dict(norm_eps=0.0),
        dict(norm_eps="x"),
        dict(rope_theta=0),
        dict(norm="batch"),
        dict(gated_mlp=1),
        dict(windows=["a"]),
        dict(eos_token_ids=[258]),
        dict(rope_scaling={"kind": "linear", "factor": 2.0, "wheels": 4}),
        dict(rope_scaling=7),
        dict(num_layers=None),
    ):
        with pytest.raises(ModelError, match=next(iter(change))):
            ModelConfig.from_dict(good | change)


# ---- folders ----


def test_B133_the_method_of_a_quantised_folder_is_named(folder, hf_tensors):
    left_over = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    folder.write("config.json", HF | left_over)
    assert folder.load().config.num_layers == 1  # plain weights: no harm
    tensors = hf_tensors(CONFIG)
    packed = tensors.pop("model.layers.0.mlp.up_proj.weight")
    for name in ("qweight", "qzeros"):
        tensors[f"model.layers.0.mlp.up_proj.{name}"] = packed.astype(np.int32)
    save_file(tensors, folder.path / "model.safetensors")
    for facts, method in (
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
    ):
        folder.write("config.json", HF | {"quantization_config": facts})
        with pytest.raises(ModelError, match=f"quantised by {method}.*plain or GGUF"):
            folder.load()
    folder.write("config.json", HF)
    folder.write("quant_config.json", {"w_bit": 4})
    with pytest.raises(ModelError, match="quantised by awq"):
        folder.load()


def test_B159_the_index_says_which_file_a_tensor_is_read_from(folder, hf_tensors):
    tensors = hf_tensors(CONFIG)
    (folder.path / "model.safetensors").unlink()
    norm = "model.norm.weight"
    names = sorted(tensors)
    stale = {n: tensors[n] for n in names[::2]} | {norm: tensors[norm] * 0, "old.bias": tensors[norm]}
    save_file(stale, folder.path / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in {*names[1::2], norm}}, folder.path / "model-00002-of-00002.safetensors")
    where = {n: f"model-0000{1 + names.index(n) % 2}-of-00002.safetensors" for n in names}
    where[norm] = "model-00002-of-00002.safetensors"
    index = "model.safetensors.index.json"
    folder.write(index, {"metadata": {"total_size": 1}, "weight_map": where})
    np.testing.assert_array_equal(folder.load().params["final_norm"]["scale"], tensors[norm])
    folder.write(index, {"weight_map": where | {names[1]: where[names[0]]}})
    with pytest.raises(ModelError, match=rf"'{names[1]}' is not in .*where the index says"):
        folder.load()
    (folder.path / index).unlink()
    with pytest.raises(ModelError, match=rf"'{norm}' is in .* and "):
        folder.load()
    save_file(tensors, folder.path / "model.safetensors")
    folder.write(index, {"weight_map": where})
    with pytest.raises(ModelError, match=r"both say where weights are"):
        folder.load()


def test_a_tied_pair_under_either_name_and_without_a_prefix(folder, hf_tensors):
    want = folder.load().params
    tensors = hf_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder.path / "model.safetensors")
    np.testing.assert_array_equal(folder.load().params["embed"], want["embed"])
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].copy()
    save_file(tensors, folder.path / "model.safetensors")
    np.testing.assert_array_equal(folder.load().params["embed"], want["embed"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, folder.path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        folder.load()
    bare = {n.removeprefix("model."): w for n, w in hf_tensors(CONFIG).items()}
    save_file(bare, folder.path / "model.safetensors")
    np.testing.assert_array_equal(folder.load().params["embed"], want["embed"])


def test_F045_values_beyond_the_wanted_dtype_are_refused(tmp_path, folder, hf_tensors):
    tensors = hf_tensors(CONFIG)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][3, 5] = 1e5
    save_file(tensors, folder.path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"'{name}' holds values up to 1e\+05: float16 ends below"):
        load_model(folder.path, dtype="float16", progress=False)
    for dtype in ("float32", "bfloat16"):
        load_model(folder.path, dtype=dtype, progress=False)
    from pagedjax.models import convert

    converted = convert(folder.path, tmp_path / "orbax", progress=False)
    with pytest.raises(ModelError, match=r"down/weight holds values that are not finite in float16"):
        load_model(converted, dtype="float16", progress=False)


def test_F046_loops_of_links_and_folders_that_are_not_there(folder, tmp_path, monkeypatch):
    (folder.path / "config.json").unlink()
    (folder.path / "config.json").symlink_to("config.json")
    with pytest.raises(ModelError, match=r"config\.json: .*(loop|levels).*: must be a file"):
        folder.load()
    monkeypatch.chdir(tmp_path)
    os.mkdir("models")
    with pytest.raises(ModelError, match=r"model='models/nope': no such folder: models/ is here"):
        load_model("models/nope", progress=False)


def test_ends_and_settings_of_generation_config(folder):
    folder.write("generation_config.json", {"eos_token_id": [5, 6], "temperature": 0.7, "top_k": 20})
    assert folder.load().understood.sampling == {}  # do_sample is off: greedy
    folder.write(
        "generation_config.json",
        {
            "eos_token_id": [5, 6],
            "do_sample": True,
            "temperature": 0.7,
            "max_new_tokens": 9,
            "use_cache": True,
        },
    )
    folder.write("tokenizer_config.json", {"eos_token": "</s>", "bos_token": {"content": "<s>"}})
    loaded = folder.load()
    assert loaded.config.eos_token_ids == (257, 5, 6)
    assert loaded.understood.ends[5] == "generation_config.json eos_token_id"
    assert loaded.understood.sampling == {"temperature": 0.7, "max_tokens": 9}
    assert describe_model(folder.path)[2] == loaded.understood
    for key, value in (
        ("no_repeat_ngram_size", 3),
        ("typical_p", 0.9),
        ("suppress_tokens", [1]),
        ("num_beams", 4),
        ("temperatur", 0.5),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", 2.5),
        ("eos_token_id", 258),
        ("stop_strings", [""]),
    ):
        folder.write("generation_config.json", {"do_sample": True, key: value})
        with pytest.raises(ModelError, match=f"generation_config.json: {key}="):
            folder.load()


# ---- tokenizers and templates ----


def test_B164_truncation_and_padding_left_from_training_are_off(folder):
    tokenizer = _byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    folder.write("tokenizer.json", tokenizer.to_str())
    for text in ("eleven char", "ab"):
        assert len(load_tokenizer(folder.path).encode(text)) == len(text)


def test_tokenizer_files_that_disagree_are_named(folder):
    good = json.loads(_byte_tokenizer().to_str())
    for change, names in (
        ({"tokeniser": 1}, "tokenizer.json: tokeniser=1"),
        ({"pre_tokenizer": good["pre_tokenizer"] | {"use_regexes": True}}, "pre_tokenizer: use_regexes=True"),
        ({"model": good["model"] | {"dropouts": 0.1}}, "model: dropouts=0.1"),
    ):
        folder.write("tokenizer.json", good | change)
        with pytest.raises(ModelError, match=names):
            load_tokenizer(folder.path)
    folder.write("tokenizer.json", good)
    for change, names in (
        ({"add_bos_tokn": True}, "add_bos_tokn=True.*did you mean add_bos_token"),
        ({"add_eos_token": True}, "add_eos_token=True"),
        ({"add_prefix_space": True}, "add_prefix_space=True, but tokenizer.json says False"),
        ({"eos_token": "<nowhere>"}, "eos_token='<nowhere>': is no token"),
        ({"added_tokens_decoder": {"300": {"content": "<x>"}}}, "'<x>' has id 300"),
        ({"chat_template": 7}, "chat_template='7'"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes'"),
    ):
        folder.write("tokenizer_config.json", change)
        with pytest.raises(ModelError, match=names):
            load_tokenizer(folder.path)
    folder.write("tokenizer_config.json", {"eos_token": "</s>"})
    folder.write("special_tokens_map.json", {"eos_token": "<s>", "bos_token": "<s>"})
    with pytest.raises(ModelError, match=r"eos_token='</s>', but special_tokens_map\.json says '<s>'"):
        load_tokenizer(folder.path)
    folder.write("special_tokens_map.json", {"bos_token": "<s>"})
    assert load_tokenizer(folder.path).bos_token_id == 256
    folder.write("tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    assert "add_bos_token=True, but tokenizer.json does not put" in load_tokenizer(folder.path).notes[0]
    starts = _byte_tokenizer()
    starts.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    folder.write("tokenizer.json", starts.to_str())
    assert load_tokenizer(folder.path).notes == () and load_tokenizer(folder.path).encode("a")[0] == 256


def test_B162_tojson_takes_what_transformers_gives_it():
    message = [{"role": "é<'", "content": "b"}]
    for call, want in (
        ("tojson", '{"role": "é<\'", "content": "b"}'),
        ("tojson(ensure_ascii=True)", '{"role": "\\u00e9<\'", "content": "b"}'),
        ("tojson(sort_keys=True)", '{"content": "b", "role": "é<\'"}'),
        ("tojson(separators=(',', ':'))", '{"role":"é<\'","content":"b"}'),
        ("tojson(indent=1)", '{\n "role": "é<\'",\n "content": "b"\n}'),
    ):
        text = render_chat("{{ messages[0] | " + call + " }}", message, add_generation_prompt=False)
        assert text == want


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)


def test_B171_template_variables_reach_the_template_or_are_named():
    messages = [{"role": "user", "content": "x"}]

    def render(variables, template=THINKING):
        return render_chat(template, messages, add_generation_prompt=True, variables=variables)

    assert (render(None), render({"enable_thinking": False})) == ("x", "xFalse")
    for name in ("enable_thoughts", "messages"):
        with pytest.raises(ValueError, match=f"template argument '{name}'.*it uses enable_thinking"):
            render({name: 1})


def test_content_parts_are_text_or_named():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = [{"role": "user", "content": parts}]
    plain = "{% for m in messages %}{{ 'U: ' + m['content'] }}{% endfor %}"
    looping = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    assert render_chat(plain, message, add_generation_prompt=True) == "U: a\nb"
    assert render_chat(looping, message, add_generation_prompt=True) == "<a><b>"
    parts.append({"type": "image_url", "image_url": "x"})
    for template in (plain, looping):
        with pytest.raises(ValueError, match=r"messages\[0\].content\[2\] of type 'image_url'"):
            render_chat(template, message, add_generation_prompt=True)
    for bad in ([{"content": "x"}], [{"role": "user", "content": 5}], ["hi"]):
        with pytest.raises(ValueError, match=r"messages\[0\]"):
            render_chat(plain, bad, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"\x80\x02}q\x00.", "a pickle, which is never read"),
    ],
    ids=["lfs", "html", "zip", "pickle"],
)
def test_a_file_of_another_kind_is_named_and_no_download_blamed(folder, tmp_path, head, named):
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(ModelError, match=f"is no GGUF file but .*{named}"):
        load_model(tmp_path / "m.gguf", progress=False)
    for name, kind in (("model.safetensors", "safetensors"), ("tokenizer.json", "JSON")):
        old = (folder.path / name).read_bytes()
        (folder.path / name).write_bytes(head)
        with pytest.raises(ModelError, match=f"{name}: is no {kind} file but .*{named}"):
            folder.load()
        (folder.path / name).write_bytes(old)


def test_files_of_other_kinds_of_models_are_named(folder, tmp_path):
    (tmp_path / "m.gguf").write_bytes((folder.path / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="is no GGUF file but a safetensors file"):
        load_model(tmp_path / "m.gguf", progress=False)
    for magic, named in (
        (b"tjgg" + bytes(99), "of before GGUF"),
        (b"GGUF\0\0\0\3" + bytes(99), "big-endian"),
    ):
        (tmp_path / "m.gguf").write_bytes(magic)
        with pytest.raises(ModelError, match=named):
            load_model(tmp_path / "m.gguf", progress=False)
    (folder.path / "config.json").unlink()
    folder.write("adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(ModelError, match=r"is an adapter \(LoRA\) and no model"):
        folder.load()
