"""Tokenizers: bytes, tokenizer.json, GGUF metadata, and chat templates in their sandbox."""

import itertools
import json
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pagedjax.models.chat import render_chat
from pagedjax.models.config import ModelError
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer, read_json

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
TOKENS = [*CONTROL, *ALPHABET, "he", "ll", "hell", "Ġw", "12", "<tool>"]
GGUF = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 3) + [4],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


@given(st.text())
def test_bytes_round_trip(text):
    tok = ByteTokenizer()
    ids = tok.encode(text)
    assert ids[0] == tok.bos_token_id and max(ids) < tok.vocab_size
    assert tok.decode([*ids, *tok.eos_token_ids]) == text


def test_half_a_character_shows_as_replacement():
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


GGUF_TOKENIZER = tokenizer_from_gguf(GGUF)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_gguf_round_trip(text):
    ids = GGUF_TOKENIZER.encode(text, add_special=False)
    assert GGUF_TOKENIZER.decode(ids, skip_special=False) == text


def test_gguf_merges_digits_and_special_tokens():
    tok = GGUF_TOKENIZER
    spelled = [TOKENS[i] for i in tok.encode("hello world 12<|im_end|><tool>")]
    # Digits stand alone, although the vocabulary has a merge of two.
    assert spelled == ["hell", "o", "Ġw", *"orld", "Ġ", "1", "2", "<|im_end|>", "<tool>"]
    assert tok.decode(tok.encode("he<|im_end|><tool>")) == "he<tool>"
    assert (tok.bos_token_id, tok.eos_token_ids, tok.vocab_size) == (0, (1,), len(TOKENS))


def test_start_token_only_where_the_file_asks_for_it():
    assert tokenizer_from_gguf(GGUF).encode("he") == [TOKENS.index("he")]
    eager = tokenizer_from_gguf(GGUF | {"tokenizer.ggml.add_bos_token": True})
    assert eager.encode("he") == [0, TOKENS.index("he")]
    assert eager.encode("he", add_special=False) == [TOKENS.index("he")]


def test_every_end_token_counts():
    assert tokenizer_from_gguf(GGUF | {"tokenizer.ggml.eot_token_id": 0}).eos_token_ids == (1, 0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tokenizer.ggml.model": "wordpiece"}, "'wordpiece'"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.tokens": ["a", 3]}, "tokens"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "he"]}, "twice"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["he"]}, "merges"),
        ({"tokenizer.ggml.merges": ["xy zz"]}, "merges"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of'"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10**9}, "eos_token_id=1000000000"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id='x'"),
    ],
)
def test_bad_gguf_tokenizers_are_named(change, names):
    with pytest.raises(ModelError, match=names):
        tokenizer_from_gguf(GGUF | change)


@pytest.fixture
def folder(tmp_path):
    rust = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(CONTROL)
    rust.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_folder(folder):
    tok = load_tokenizer(folder, {7: "elsewhere"})
    assert tok.encode("a")[0] == 0 and len(tok.encode("a")) == 2
    assert tok.encode("a", add_special=False) == tok.encode("a")[1:]
    assert tok.eos_token_ids == (1, 7)
    assert tok.apply_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"


A20K = "{% set a = 'a' * 20000 %}"
ENDLESS = {
    "{{ 'a' * 10**10 }}": "a text times a number",
    "{{ [1] * 10**9 }}": "a text times a number",
    "{% set n = 10 %}{{ n ** (n ** 8) }}": "a power",
    "{% set n = 10 ** 900 %}{{ n * n * n * n * n }}": "a product",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "ranges",
    "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}": "texts put",
    "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}": "a sum of texts",
    "{% set a = 'a' * 4000 %}{{ a.replace('a', 'b' * 9000) }}": "a text with replacements",
    "{{ '%1000000000d' % 1 }}": "a format with a width",
    "{{ '{:>1000000000}'.format('a') }}": "a format with a width",
    "{{ 'a'.ljust(10**10) }}": "unsafe",
    "{{ 'a'|center(10**10) }}": "center",
    "{{ 'a'|indent(10**10) }}": "indent",
    "{{ 'ab'|batch(10**10, 'x')|list }}": "batch",
    "{% for i in range(9999) %}{{ messages[0].content * 5000 }}{% endfor %}": "the prompt",
    A20K + "{{ a|replace('a', a)|length }}": "a text with replacements",
    A20K + "{{ a|join(a)|length }}": "texts put together",
    A20K + "{{ a.join(a)|length }}": "texts put together",
    A20K + "{{ a.encode().join([a.encode()] * 2000)|length }}": "texts put together",
    A20K + "{{ ('{0}' * 2000).format(a)|length }}": "a format",
    A20K + "{{ (('%s' * 2000) % ((a,) * 2000))|length }}": "a format",
    A20K + "{{ ('%s' * 2000)|format(a)|length }}": "a format",
    A20K + "{{ ([a] * 2000)|string|length }}": "what a call is given",
    A20K + "{{ namespace(a=[a] * 2000) }}": "what a call is given",
    A20K + "{{ (a|list)|tojson(indent=2000)|length }}": "tojson",
    A20K + "{{ a|wordwrap(1, wrapstring=a)|length }}": "wordwrap",
    "{{ ('x\n' * 20000)|indent(4000, true)|length }}": "indent",
    "{{ '%20000000d'|format(1)|length }}": "a format with a width",
    "{{ 'a'.encode().ljust(20000000)|length }}": "unsafe",
    "{{ (1).to_bytes(20000000, 'big')|length }}": "unsafe",
    "{% set s = namespace(x='\"') %}{% for i in range(30) %}{% set s.x = s.x|tojson %}{% endfor %}": "tojson",
    "{% set a = 'a' * 9999 %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}": "loops and calls",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": "loops and calls",
    "{{ lipsum(n=100000) }}": "'lipsum' is undefined",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages }}" * 20_000: "chat template of 280,000 characters: must have at most 131,072",
    "{% if a %}" * 500 + "{% endif %}" * 500: "RecursionError",
}


@pytest.mark.parametrize("template", ENDLESS, ids=lambda template: template[:50])
def test_a_template_neither_fills_the_memory_nor_runs_for_ever(template, monkeypatch):
    if ENDLESS[template] == "loops and calls":
        monkeypatch.setattr("pagedjax.models.template_limits.MOST_WORK", 500_000)  # sooner
    with pytest.raises(ValueError, match="chat template") as caught:
        render_chat(template, [{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert ENDLESS[template] in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_is_no_file_of_a_model(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json: is a pipe: must be a file; save it first"):
        read_json(tmp_path / "config.json")


def test_what_published_templates_do_is_within_the_bounds():
    template = (
        "{% for i in range(messages|length) %}{{ i ~ ':' ~ messages[i].content ~ none }}{% endfor %}{{ '-' * 3 }}"
        "{{ 2 ** 3 }}{{ 2 ** 0.5 }}{{ 2.5 * 2 }}{{ '%s' % 'x' }}{{ 'ab'.replace('a', 'bb') }}{{ [1] + [2] }}{{ 7 % 4 }}"
        "{{ 'x'|indent(4) }}{{ '{}'.format(5) }}{{ messages|tojson(indent=None) }}"
        "{% for m in messages %}{{ loop.index0 ~ loop.last ~ loop.length }}{% endfor %}"
        "{{ messages|map(attribute='content')|join('+') }}{{ ','.join(['a', 'b']) }}{{ 'aa'|replace('a', 'b', 1) }}"
        "{{ '%s'|format('x') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'a b'|wordwrap(1) }}"
        "{{ {'b': 1}|dictsort }}{% for k, v in {'k': 'v'}.items() %}{{ k ~ v }}{% endfor %}"
    )
    said = [{"role": "user", "content": "hi"}]
    assert render_chat(template, said, add_generation_prompt=False) == (
        "0:hi"
        + "None---8"
        + str(2**0.5)
        + "5.0xbbb[1, 2]3x5"
        + json.dumps(said)
        + "0True1hia,bbax1a\nb[('b', 1)]kv"
    )


def test_template_file_and_named_templates(folder):
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).apply_chat([]) == "file"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(folder).apply_chat([]) == "yes"
    assert load_tokenizer(folder).eos_token_ids == ()


def test_saved_tokenizer_comes_back_equal(tmp_path):
    before = tokenizer_from_gguf(GGUF | {"tokenizer.ggml.add_bos_token": True})
    before.save(tmp_path)
    after = load_tokenizer(tmp_path)
    text = "hello world 12<|im_end|>"
    assert after.encode(text) == before.encode(text)
    assert (after.eos_token_ids, after.chat_template) == (before.eos_token_ids, before.chat_template)


def test_bad_files_are_named(folder):
    with pytest.raises(ModelError, match=r"no such file.*tokenizer\.json"):
        load_tokenizer(folder / "nowhere")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    for text in ("[1]", "{", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"):
        (folder / "bad.json").write_text(text)
        with pytest.raises(ModelError, match=r"bad\.json"):
            read_json(folder / "bad.json")
    with pytest.raises(ModelError, match="over 4 bytes"):
        read_json(folder / "tokenizer_config.json", limit=4)


def test_chat_of_the_gguf_template():
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "he"}]
    assert GGUF_TOKENIZER.apply_chat(messages) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhe<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not GGUF_TOKENIZER.apply_chat(messages, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for %}",
        "{{ raise_exception('only users may speak') }}",
        "{{ messages[0]['nothing']['there'] }}",
        "{{ range(10**12) | list }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template):
    with pytest.raises(ValueError, match="chat template"):
        render_chat(template, [{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_words_that_templates_use():
    template = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ strftime_now('%Y') | length }}{% endfor %}"
    )
    messages = [{"role": "skip"}, {"role": "é<"}]
    assert render_chat(template, messages, add_generation_prompt=False) == '{"role": "é<"}4'


def test_no_template_says_so():
    tok = HFTokenizer(Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="no chat template"):
        tok.apply_chat([])


# ---- SentencePiece vocabularies in GGUF files ----


def _pieces(path):
    """(piece, score) of a llama2.c tokenizer file."""
    raw, out, at = path.read_bytes(), [], 4
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        out.append((raw[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    return out


def _spm_metadata(pieces):
    """As a GGUF file would hold them: unknown, controls, bytes, then pieces with U+2581 for spaces."""
    tokens = [p.replace(" ", "\u2581") for p, _ in pieces]
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    tokens[3:259] = [f"<0x{b:02X}>" for b in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [s for _, s in pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _merge_best(text, pieces):
    """The slow, obvious encoder: start from characters, join the best-scored neighbours until none join."""
    vocab = {p: i for i, (p, _) in enumerate(pieces) if i >= 259}
    parts = list(" " + text) if text else []
    while True:
        best = max(
            (
                (pieces[vocab[a + b]][1], -i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in vocab
            ),
            default=None,
        )
        if best is None:
            break
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for p in parts for i in ([vocab[p]] if p in vocab else [b + 3 for b in p.encode()])]


def test_sentence_pieces_equal_the_slow_encoder(data_dir):
    pieces = _pieces(data_dir / "data" / "models" / "tok512.bin")
    tok = tokenizer_from_gguf(_spm_metadata(pieces))
    golden = (data_dir / "data" / "models" / "stories260K_greedy_expected.txt").read_text()
    texts = [golden.strip(), "Lily's dog", "  two  spaces", "naïve 東京 🙂", "tab\tnewline\n", "x", ""]
    for text in texts:
        ids = tok.encode(text, add_special=False)
        assert ids == _merge_best(text, pieces), text
        assert tok.decode(ids) == text
    assert tok.encode("x")[0] == 1 and tok.eos_token_ids == (2,)
    assert tok.decode([1, *tok.encode("Once", add_special=False), 2]) == "Once"
    plain = tokenizer_from_gguf(_spm_metadata(pieces) | {"tokenizer.ggml.add_space_prefix": False})
    assert plain.decode(plain.encode("Once upon", add_special=False)) == "Once upon"
    ids = json.loads((data_dir / "data" / "models" / "stories260K_greedy_ids.json").read_text())["greedy_ids"]
    assert tok.decode(ids).strip() == golden.strip()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tokenizer.ggml.scores": None}, "scores"),
        ({"tokenizer.ggml.scores": [float("nan")] * 262}, "scores"),
        ({"tokenizer.ggml.token_type": ["x"] * 262}, "token_type"),
        ({"tokenizer.ggml.unknown_token_id": 1 << 40}, "unknown_token_id"),
    ],
)
def test_bad_sentence_pieces_are_named(change, names):
    pieces = [(f"t{i}", 0.0) for i in range(259)] + [("a", -1.0), ("b", -2.0), ("ab", -3.0)]
    good = _spm_metadata(pieces)
    assert tokenizer_from_gguf(good).encode("ab") == [1, *[b + 3 for b in "\u2581".encode()], 261]
    with pytest.raises(ModelError, match=names):
        tokenizer_from_gguf(good | change)
