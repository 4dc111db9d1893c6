"""Text to token ids and back: a byte tokenizer, and `tokenizers` models from tokenizer.json or GGUF metadata.

Chat templates are Jinja programs that come with a model. They run in Jinja's immutable sandbox: they can
format messages and nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagedjax.models.config import ModelError

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    Attributes:
        eos_token_ids: Any of them ends a text.
        vocab_size: Ids are below it.
    """

    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; add_special puts the model's start token in front where it has one."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def apply_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Messages as one prompt text, special tokens spelled out: encode it with add_special=False."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte, then 256 (start) and 257 (end): enough for tests and tiny models.

    Example:
        >>> tok = ByteTokenizer()
        >>> tok.encode("hé", add_special=False)
        [104, 195, 169]
        >>> tok.decode([104, 195, 169, 257])
        'hé'
    """

    bos_token_id = 256
    eos_token_ids: tuple[int, ...] = (257,)
    vocab_size = 258

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """One id per UTF-8 byte, after the start token if asked for."""
        return [self.bos_token_id] * add_special + list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the bytes; start and end have no text of their own."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def apply_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """One line per message, `role: content`."""
        lines = [f"{m['role']}: {m['content']}\n" for m in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


class HFTokenizer:
    """A `tokenizers.Tokenizer` with the facts that lie outside it.

    Args:
        tokenizer: The `tokenizers` object.
        bos_token_id, eos_token_ids: Start of text and any of its ends.
        add_bos: Put the start token in front by hand, because the tokenizer's post-processor does not.
        chat_template: Jinja source; "" where the model has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        add_bos: bool = False,
        chat_template: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; special tokens spelled out in the text become their ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        if add_special and self.add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, without special tokens unless asked for."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def apply_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Messages through the model's chat template.

        Raises:
            ValueError: The model has no template, or the template refuses the messages.
        """
        if not self.chat_template:
            raise ValueError("chat: this model has no chat template; use generate with a plain prompt")
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._spell(self.bos_token_id),
            eos_token=self._spell(self.eos_token_ids[0] if self.eos_token_ids else None),
        )

    def save(self, path: Path) -> None:
        """Write tokenizer.json and the facts beside it, for `load_tokenizer`."""
        (path / "tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")
        facts = {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
            "add_bos": self.add_bos,
            "chat_template": self.chat_template,
        }
        (path / "pagedjax_tokenizer.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def _spell(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_token(token) or ""


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """Run a chat template in Jinja's immutable sandbox.

    Raises:
        ValueError: The template does not compile or refuses the messages.
    """
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Generation(Extension):
        """{% generation %} marks the assistant's part for training; here its body is plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return env.from_string(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except (jinja2.TemplateError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"chat template: {error}: check the messages (role and content each)") from error


# ---- from a Hugging Face folder --------------------------------------------------------------------------


def read_json(path: Path, limit: int = 64 << 20) -> dict[str, Any]:
    """One JSON object from a file.

    Raises:
        ModelError: The file is not there, too long, or not an object.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            raise ModelError(f"{path.name}: over {limit} bytes: must be a small JSON file; check the folder")
        value = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}: the model folder needs this file; check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path.name}: {str(error)[:80]}: must be a JSON object; download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name}: {type(value).__name__}: must be a JSON object; download it again")
    return value


def load_tokenizer(folder: Path, eos_token_ids: tuple[int, ...] = ()) -> HFTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json with tokenizer_config.json where present.

    Args:
        folder: Holds tokenizer.json.
        eos_token_ids: The model config's, joined with the tokenizer's own.

    Raises:
        ModelError: A file is missing or not readable as what it should be.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file: a model folder needs tokenizer.json; save it with the model")
    tokenizer = _parse_tokenizer(path.read_bytes(), path.name)
    own = folder / "pagedjax_tokenizer.json"
    if own.is_file():
        facts = read_json(own)
        return HFTokenizer(
            tokenizer,
            bos_token_id=facts.get("bos_token_id"),
            eos_token_ids=tuple(facts.get("eos_token_ids", ())),
            add_bos=bool(facts.get("add_bos", False)),
            chat_template=str(facts.get("chat_template", "")),
        )
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(config_path) if config_path.is_file() else {}
    template = template_path.read_text("utf-8") if template_path.is_file() else config.get("chat_template")
    eos = _token_id(tokenizer, config.get("eos_token"))
    return HFTokenizer(
        tokenizer,
        bos_token_id=_token_id(tokenizer, config.get("bos_token")),
        eos_token_ids=tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids])),
        chat_template=_template_text(template),
    )


def _parse_tokenizer(raw: bytes, name: str) -> Any:
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_buffer(raw)
    except Exception as error:  # tokenizers raises Exception itself, and nothing narrower
        raise ModelError(
            f"{name}: {_first_line(error)}: must be a `tokenizers` file; download it again"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def _token_id(tokenizer: Any, token: Any) -> int | None:
    """Id of a token given as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _template_text(template: Any) -> str:
    """Jinja source; of several named ones the one called default."""
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


# ---- from GGUF metadata ----------------------------------------------------------------------------------

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> HFTokenizer:
    """Rebuild the tokenizer that a GGUF file carries in its metadata.

    Raises:
        ModelError: The metadata has none, or one of a kind we do not rebuild.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError(
            "tokenizer.ggml.tokens: must list the vocabulary; this GGUF file carries no tokenizer"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens: a token comes twice; download the file again")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, vocab)
    elif model == "llama":
        tokenizer = _sentence_pieces(metadata, vocab)
    else:
        raise ModelError(
            f"tokenizer.ggml.model={model!r}: can rebuild gpt2 and llama; use a folder with tokenizer.json"
        )
    _mark_special(tokenizer, metadata, tokens)
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    for key, value in ids.items():
        if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
            raise ModelError(f"tokenizer.ggml.{key}_token_id={value!r}: must be an id below {len(tokens)}")
    ends = [ids[key] for key in ("eos", "eot", "eom") if ids[key] is not None]
    return HFTokenizer(
        tokenizer,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(e for e in ends if e is not None)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model != "gpt2")),
        chat_template=_template_text(metadata.get("tokenizer.chat_template")),
    )


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Any:
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
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits: dict[str, Any] = {
        "default": byte_level,
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), plain_bytes]
        ),
        "qwen2": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), plain_bytes]
        ),
    }
    splits["llama3"] = splits["llama-v3"] = splits["llama-bpe"]
    if pre not in splits:
        raise ModelError(
            f"tokenizer.ggml.pre={pre!r}: must be one of {', '.join(splits)}; use tokenizer.json"
        )
    whole_words = splits[pre] is splits["llama-bpe"]
    try:
        tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    except Exception as error:  # tokenizers raises Exception itself, and nothing narrower
        raise ModelError(
            f"tokenizer.ggml.merges: {_first_line(error)}: must be made of the tokens"
        ) from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splits[pre]
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
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
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
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds) if k == _CONTROL]
    plain = [
        AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds) if k == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
