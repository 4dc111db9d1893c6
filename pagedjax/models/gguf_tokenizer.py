"""The tokenizer that a GGUF file carries in its metadata, with the defaults of llama.cpp where a key is missing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedjax.models.config import ModelError
from pagedjax.models.config_keys import refuse_key
from pagedjax.models.tokenizer import HFTokenizer, first_line, template_text

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_IDS = (
    *("bos", "eos", "unknown", "seperator", "separator", "padding", "cls", "mask", "eot", "eom"),
    *("prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_READ = (
    *(f"{name}_token_id" for name in _IDS),
    *("model", "pre", "tokens", "token_type", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "suppress_tokens"),
)
# Of tokenizers of other kinds, which are refused by tokenizer.ggml.model.
_NO_EFFECT = ("token_type_count", "remove_extra_whitespaces", "precompiled_charsmap")
_OTHERS = re.compile(r"tokenizer\.(chat_template(\..+)?|chat_templates|huggingface\.json|rwkv\.world)")

# Texts that end an answer wherever they are in the vocabulary, as llama.cpp has them.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    # Fill-in-the-middle: padding, the next repository and the next file.
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True)
class Split:
    """How text is cut before pieces are merged.

    Attributes:
        patterns: Each cuts further what the ones before left.
        whole_words: A piece that is a token is not merged from its parts.
        add_bos: Whether a text begins with the start token where the file does not say.
        nfc: Text is composed first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3 = Split((_LLAMA3_SPLIT,), whole_words=True, add_bos=True)
_QWEN2 = Split((_QWEN2_SPLIT,), nfc=True)
_GPT2 = Split((_GPT2_SPLIT,))
_DIGITS = Split((r"\p{N}", _GPT2_SPLIT))


def _ranges(text: str) -> str:
    """A class of characters from hexadecimal numbers and ranges, none of which means something in a class."""
    ends = [[chr(int(end, 16)) for end in part.split("-")] for part in text.split()]
    return f"[{''.join('-'.join(pair) for pair in ends)}]"


# Letters with case as the tokenizer of DeepSeek-V2 lists them: not Armenian small ones, nor mathematical alphabets.
_DEEPSEEK_LETTERS = _ranges(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_DEEPSEEK = Split(
    (
        r"[\r\n]",
        rf"\s?{_DEEPSEEK_LETTERS}+",
        rf"\s?{_ranges('21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}+",
        r"\s+$",
        f"{_ranges('4e00-9fa5 800-4e00 ac00-d7ff')}+",
        r"\p{N}+",
    )
)
# V3 cuts digits in threes, then Chinese and Japanese from the rest.
_DEEPSEEK3 = Split(
    (
        r"\p{N}{1,3}",
        f"{_ranges('4e00-9fa5 3040-309f 30a0-30ff')}+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"))
# tokenizer.ggml.pre → split; names that llama.cpp treats alike.
SPLITS: dict[str, Split] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), Split((_LLAMA3_SPLIT,))),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK3,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> HFTokenizer:
    """Rebuild the tokenizer that a GGUF file carries in its metadata.

    Raises:
        ModelError: The metadata has none, one of a kind we do not rebuild, or a key that we do not know.
    """
    known = {f"tokenizer.ggml.{key}" for key in (*_READ, *_NO_EFFECT)}
    for key, value in metadata.items():
        if key.startswith("tokenizer.") and key not in known and not _OTHERS.fullmatch(key):
            refuse_key("GGUF metadata", key, value, known)
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError(
            "tokenizer.ggml.tokens: must list the vocabulary; this GGUF file carries no tokenizer"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens: a token comes twice; download the file again")
    ids = {name: _id(metadata, name, len(tokens)) for name in _IDS}
    switches = {name: _switch(metadata, name) for name in ("add_bos_token", "add_eos_token", "add_sep_token")}
    for name in ("add_eos_token", "add_sep_token"):
        if switches[name]:
            raise ModelError(
                f"tokenizer.ggml.{name}=True: a prompt that ends is not continued; set it to false"
            )
    if metadata.get("tokenizer.ggml.suppress_tokens"):
        raise ModelError("tokenizer.ggml.suppress_tokens: not supported; give logit_bias, and remove the key")
    if model == "gpt2":
        split = _split(metadata)
        tokenizer, add_bos = _byte_level(metadata, vocab, split), split.add_bos
    elif model == "llama":
        tokenizer, add_bos = _sentence_pieces(metadata, vocab), True
        for name, default in (("bos", 1), ("eos", 2)):  # of every SentencePiece model that says nothing else
            if ids[name] is None and default < len(tokens):
                ids[name] = default
    else:
        raise ModelError(
            f"tokenizer.ggml.model={model!r}: can rebuild gpt2 and llama; use a folder with tokenizer.json"
        )
    ends = _ends(ids, vocab)
    _mark_special(tokenizer, metadata, tokens)
    add_bos = add_bos if switches["add_bos_token"] is None else bool(switches["add_bos_token"])
    if add_bos and ids["bos"] is None:
        raise ModelError(
            "tokenizer.ggml.bos_token_id is missing: texts begin with it (add_bos_token, or the default of "
            f"tokenizer.ggml.pre={metadata.get('tokenizer.ggml.pre')!r}); convert the file again"
        )
    return HFTokenizer(
        tokenizer,
        bos_token_id=ids["bos"],
        eos_token_ids=ends,
        add_bos=add_bos,
        chat_template=template_text(metadata.get("tokenizer.chat_template"), "tokenizer.chat_template"),
        special={
            name: tokens[i]
            for name, i in (("unk_token", ids["unknown"]), ("pad_token", ids["padding"]))
            if i is not None
        },
    )


def _id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not (type(value) is int and 0 <= value < size):
        raise ModelError(f"tokenizer.ggml.{name}_token_id={value!r}: must be an id below {size}")
    return value


def _switch(metadata: Mapping[str, Any], name: str) -> bool | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, bool | None):
        raise ModelError(f"tokenizer.ggml.{name}={value!r}: must be true or false")
    return value


def _ends(ids: Mapping[str, int | None], vocab: Mapping[str, int]) -> dict[int, str]:
    """Ends of text and of turns → where the file says so; those without a key are found by their text."""
    ends: dict[int, str] = {}
    for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"):
        token = ids[name]
        if token is not None:
            ends.setdefault(token, f"tokenizer.ggml.{name}_token_id")
    for text in _ENDS:
        if text in vocab:
            ends.setdefault(vocab[text], f"the text {text}")
    # Where a model returns or calls with tokens of their own, <|end|> only ends a message.
    if ("<|call|>" in vocab and "<|return|>" in vocab) or ("<|flush|>" in vocab and "<|calls|>" in vocab):
        ends.pop(vocab.get("<|end|>", -1), None)
    if "<|tool_response>" in vocab:  # there </s> is a plain piece
        ends.pop(vocab.get("</s>", -1), None)
    return ends


def _split(metadata: Mapping[str, Any]) -> Split:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        warnings.warn(
            "tokenizer.ggml.pre is missing: text is split by llama.cpp's default, and a model that was trained with "
            "another split answers worse; convert the file again",
            RuntimeWarning,
            stacklevel=2,
        )
        return _DEFAULT
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ModelError(
            f"tokenizer.ggml.pre={pre!r}: must be one of {', '.join(SPLITS)}; use tokenizer.json"
        )
    return SPLITS[pre]


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], split: Split) -> Any:
    """Byte-level BPE: what to split before merging goes by the name in tokenizer.ggml.pre."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as RustTokenizer

    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("tokenizer.ggml.merges: a gpt2 vocabulary needs its merges; download the file again")
    cut = [m.partition(" ") for m in merges if isinstance(m, str)]
    pairs = [(left, right) for left, space, right in cut if space]
    if len(pairs) != len(merges):
        raise ModelError(
            "tokenizer.ggml.merges: each must be two tokens with a space between; check the file"
        )
    try:
        tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words))
    except Exception as error:  # tokenizers raises Exception itself, and nothing narrower
        raise ModelError(f"tokenizer.ggml.merges: {first_line(error)}: must be made of the tokens") from error
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, plain_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _one_per_token(metadata: Mapping[str, Any], key: str, kind: Any, vocab: dict[str, int]) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if (
        not isinstance(values, list)
        or len(values) != len(vocab)
        or not all(isinstance(v, kind) and v == v for v in values)
    ):
        raise ModelError(f"tokenizer.ggml.{key}: must be one number per token; download the file again")
    return values


def _sentence_pieces(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Any:
    """SentencePiece BPE as merges: any two pieces whose join is a piece, best-scored join first."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, normalizers

    scores = _one_per_token(metadata, "scores", (int, float), vocab)
    kinds = _one_per_token(metadata, "token_type", int, vocab)
    joins = []
    for piece, i in vocab.items():
        if kinds[i] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                joins.append((-scores[i], i, left, right, piece[:cut], piece[cut:]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    names = list(vocab)
    if type(unknown) is not int or not 0 <= unknown < len(names):
        raise ModelError(f"tokenizer.ggml.unknown_token_id={unknown!r}: must be an id below {len(names)}")
    tokenizer = RustTokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in sorted(joins)],
            unk_token=names[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _switch(metadata, "add_space_prefix") is not False
    spaces = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _mark_special(tokenizer: Any, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Control tokens are special (left out of text); user-defined ones are only never split."""
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or (kinds and len(kinds) != len(tokens)):
        raise ModelError("tokenizer.ggml.token_type: must have one entry per token; download the file again")
    # An end by its text that the file marks as plain text is one all the same, as in llama.cpp.
    kinds = [_CONTROL if t in _ENDS else k for t, k in zip(tokens, kinds or [_NORMAL] * len(tokens))]
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds) if k == _CONTROL]
    plain = [
        AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds) if k == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
