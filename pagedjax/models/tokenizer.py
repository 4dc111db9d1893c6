"""Text to token ids and back: a byte tokenizer, and `tokenizers` models with the facts that lie around them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagedjax.models.chat import Message, plain_messages, render_chat
from pagedjax.models.config import ModelError, kind_of_file
from pagedjax.models.config_keys import refuse_key


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

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as one prompt text, special tokens spelled out: encode it with add_special=False.

        Args:
            messages: {"role", "content"} each.
            add_generation_prompt: End where the assistant begins to speak.
            template: Jinja source instead of the model's own.
            variables: What else the template asks for.
        """
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

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """One line per message, `role: content`, or what a template makes of them."""
        if template is not None:
            return render_chat(
                template, messages, add_generation_prompt=add_generation_prompt, variables=variables
            )
        if variables:
            raise ValueError(f"template argument {next(iter(variables))!r}: this tokenizer has no template")
        lines = [f"{m['role']}: {m['content']}\n" for m in plain_messages(messages)]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


class HFTokenizer:
    """A `tokenizers.Tokenizer` with the facts that lie outside it.

    Args:
        tokenizer: The `tokenizers` object. Its truncation and padding, left from training, are switched off.
        bos_token_id: Start of text, or None.
        eos_token_ids: Any of its ends, or a mapping from each to where the files say so.
        add_bos: Put the start token in front by hand, because the tokenizer's post-processor does not.
        chat_template: Jinja source; "" where the model has none.
        special: Texts that templates know by name (pad_token, unk_token); bos_token and eos_token are added.
        notes: Where its files disagree, and who was followed.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] | Mapping[int, str] = (),
        add_bos: bool = False,
        chat_template: str = "",
        special: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.eos_sources = dict(eos_token_ids) if isinstance(eos_token_ids, Mapping) else {}
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.special = dict(special or {})
        self.notes = tuple(notes)
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

    def apply_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages through the model's chat template, or another.

        Raises:
            ValueError: There is no template, it refuses the messages, or it does not use a variable.
        """
        template = self.chat_template if template is None else template
        if not template:
            raise ValueError(
                "chat: this model has no chat template; give one (model.chat_template), or complete plain text "
                "(--raw, LLM.generate)"
            )
        ends = self.eos_token_ids
        named = {
            "bos_token": self.spell(self.bos_token_id),
            "eos_token": self.spell(ends[0] if ends else None),
        }
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special={**named, **self.special},
            variables=variables,
        )

    def save(self, path: Path) -> None:
        """Write tokenizer.json and the facts beside it, for `load_tokenizer`."""
        (path / "tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")
        facts = {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
            "add_bos": self.add_bos,
            "chat_template": self.chat_template,
            "special": self.special,
        }
        (path / OWN_FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def to_json(self) -> str:
        """The `tokenizers` object as text: equal where two tokenizers split and number texts alike."""
        text: str = self._tokenizer.to_str()
        return text

    def spell(self, token: int | None) -> str:
        """Text of one token, "" where there is none."""
        return "" if token is None else self._tokenizer.id_to_token(token) or ""


# ---- from a Hugging Face folder --------------------------------------------------------------------------

OWN_FACTS = "pagedjax_tokenizer.json"

# tokenizer_config.json: what is read, and what changes nothing here.
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_READ = (
    *_TOKENS,
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "split_special_tokens",
    "chat_template",
)
_NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            "model_max_length",
            "max_length",
            "max_len",
            "padding_side",
            "truncation_side",
            "truncation_strategy",
            "truncation",
            "padding",
            "stride",
            "pad_to_multiple_of",
            "pad_token_type_id",
            "model_input_names",
            "return_token_type_ids",
        ),
        "texts are neither cut nor padded here",
    ),
    **dict.fromkeys(
        (
            "tokenizer_class",
            "name_or_path",
            "special_tokens_map_file",
            "tokenizer_file",
            "vocab_file",
            "merges_file",
            "auto_map",
            "processor_class",
            "backend",
            "is_local",
            "local_files_only",
            "init_inputs",
            "trust_remote_code",
            "use_fast",
            "from_slow",
            "legacy",
            "sp_model_kwargs",
            "add_dummy_prefix_space",
            "model_type",
            "vocab_size",
            "transformers_version",
            "chat_template_file",
        ),
        "how the tokenizer was made; tokenizer.json is what came out",
    ),
    **dict.fromkeys(
        ("use_default_system_prompt", "response_schema"), "helpers around the template, not the template"
    ),
    # Joined token by token, as a stream must be, text cannot be cleaned afterwards; vLLM does not either.
    "clean_up_tokenization_spaces": "decoding is by token",
    "spaces_between_special_tokens": "decoding is by token",
    "errors": "bytes that are no UTF-8 become U+FFFD",
}


def read_json(path: Path, limit: int = 64 << 20) -> dict[str, Any]:
    """One JSON object from a file.

    Raises:
        ModelError: The file is not there, too long, not an object, or gives a key twice.
    """
    try:
        if path.is_fifo():
            raise ModelError(f"{path.name}: is a pipe: must be a file; save it first")
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            raise ModelError(f"{path.name}: over {limit} bytes: must be a small JSON file; check the folder")
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_twins)
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}: the model folder needs this file; check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        kind = kind_of_file(raw[:64])
        if kind is not None:
            raise ModelError(f"{path.name}: is no JSON file but {kind}") from None
        raise ModelError(
            f"{path.name}: {str(error)[:80]}: must be a JSON object; download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name}: {type(value).__name__}: must be a JSON object; download it again")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"key {twice[:40]!r} twice")
    return out


def load_tokenizer(folder: Path, eos_sources: Mapping[int, str] | None = None) -> HFTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json with tokenizer_config.json where present.

    Args:
        folder: Holds tokenizer.json.
        eos_sources: Ends of text that the model's other files name → where; joined with the tokenizer's own.

    Raises:
        ModelError: A file is missing, not readable as what it should be, or says what another denies.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file: a model folder needs tokenizer.json; save it with the model")
    own = folder / OWN_FACTS
    if own.is_file():
        return _from_own_facts(_parse_tokenizer(path), read_json(own))
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    for key, value in config.items():
        if value is not None and key not in _READ and key not in _NO_EFFECT and not _is_extra(key, value):
            refuse_key(config_path.name, key, value, _READ)
    tokenizer = _parse_tokenizer(path)
    notes: list[str] = []
    special = _special_tokens(folder, config, tokenizer)
    _check_added(folder, config, tokenizer)
    _check_switches(config, tokenizer, special.get("bos_token"), notes)
    eos = _token_id(tokenizer, special.get("eos_token"))
    ends = {} if eos is None else {eos: "tokenizer_config.json eos_token"}
    for token, where in (eos_sources or {}).items():
        ends[token] = f"{ends[token]}, {where}" if token in ends else where
    return HFTokenizer(
        tokenizer,
        bos_token_id=_token_id(tokenizer, special.get("bos_token")),
        eos_token_ids=ends,
        chat_template=_template(folder, config, notes),
        special={name: text for name, text in special.items() if name not in ("bos_token", "eos_token")},
        notes=notes,
    )


def _is_extra(key: str, value: Any) -> bool:
    """A special token under a name of the model's own, as image_token is, or its id."""
    return (key.endswith("_token") and isinstance(value, (str, dict))) or key.endswith("_token_id")


def _from_own_facts(tokenizer: Any, facts: dict[str, Any]) -> HFTokenizer:
    """A tokenizer that `HFTokenizer.save` wrote."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    kinds = {
        "bos_token_id": int,
        "eos_token_ids": list,
        "add_bos": bool,
        "chat_template": str,
        "special": dict,
    }
    for key, value in facts.items():
        if key not in kinds:
            refuse_key(OWN_FACTS, key, value, tuple(kinds))
        if type(value) is not kinds[key] and not (key == "bos_token_id" and value is None):
            raise ModelError(f"{OWN_FACTS}: {key}={value!r}: must be {kinds[key].__name__}; convert again")
    bos, ends = facts.get("bos_token_id"), facts.get("eos_token_ids", [])
    if any(type(i) is not int or not 0 <= i < size for i in (*ends, *(() if bos is None else (bos,)))):
        raise ModelError(f"{OWN_FACTS}: bos_token_id, eos_token_ids: must be below {size}; convert again")
    special = facts.get("special", {})
    if not all(isinstance(text, str) for text in special.values()):
        raise ModelError(f"{OWN_FACTS}: special: must be texts by name; convert again")
    return HFTokenizer(
        tokenizer,
        bos_token_id=bos,
        eos_token_ids=dict.fromkeys(ends, OWN_FACTS),
        add_bos=facts.get("add_bos", False),
        chat_template=facts.get("chat_template", ""),
        special=special,
    )


_TOP = (
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
)
# Spellings of older files that the library reads and writes otherwise.
_LEGACY = {"Metaspace": ("add_prefix_space", "str_rep"), "Punctuation": ("behavior",)}


def _parse_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer as RustTokenizer

    facts = read_json(path)
    for key, value in facts.items():
        if key not in _TOP and value is not None:
            refuse_key(path.name, key, value, _TOP)
    _check_templates(path.name, facts.get("post_processor"))
    _check_vocab(path.name, facts.get("model"))
    try:
        tokenizer = RustTokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # tokenizers raises Exception itself, and nothing narrower
        raise ModelError(
            f"{path.name}: {first_line(error)}: must be a `tokenizers` file; download it again"
        ) from error
    # The library passes over keys that it does not know: what it read must be all there was.
    kept = json.loads(tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model"):
        _check_kept(path.name, part, facts.get(part), kept.get(part))
    if sorted(facts.get("added_tokens") or [], key=json.dumps) != sorted(
        kept["added_tokens"], key=json.dumps
    ):
        given = {json.dumps(token, sort_keys=True) for token in facts["added_tokens"]}
        odd = min(given ^ {json.dumps(token, sort_keys=True) for token in kept["added_tokens"]})
        raise ModelError(
            f"{path.name}: added_tokens: {odd[:80]}: the tokenizers library reads it otherwise; save the file again"
        )
    return tokenizer


def _check_vocab(name: str, model: Any) -> None:
    """Refuse two tokens of one id: the library takes them, and decodes one of them."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        tokens: dict[Any, str] = {}
        for token, i in vocab.items():
            if isinstance(i, int) and tokens.setdefault(i, token) != token:
                raise ModelError(
                    f"{name}: model.vocab: {tokens[i]!r} and {token!r} have id {i}; save the file again"
                )


def _check_templates(name: str, part: Any) -> None:
    """Refuse a post-processor that puts in tokens it does not describe: the library panics when it encodes."""
    if isinstance(part, list):
        for inner in part:
            _check_templates(name, inner)
    if not isinstance(part, dict):
        return
    _check_templates(name, part.get("processors"))
    if part.get("type") != "TemplateProcessing":
        return
    for way in ("single", "pair"):
        pieces = part.get(way)
        for piece in pieces if isinstance(pieces, list) else ():
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            token = special.get("id") if isinstance(special, dict) else None
            described = part.get("special_tokens")
            if token is not None and not (isinstance(described, dict) and token in described):
                raise ModelError(
                    f"{name}: post_processor.{way}: {token!r} is not in its special_tokens; save the file again"
                )


def _check_kept(name: str, where: str, given: Any, kept: Any) -> None:
    """Refuse a key of tokenizer.json that the library did not take in."""
    if isinstance(given, dict):
        if not isinstance(kept, dict):
            raise ModelError(f"{name}: {where}: the tokenizers library does not know it; update tokenizers")
        for key, value in given.items():
            if where == "model" and key in ("vocab", "merges"):
                continue
            if key not in kept and value is not None:
                if key in _LEGACY.get(str(given.get("type")), ()):
                    continue
                refuse_key(f"{name}: {where}", key, value, tuple(kept))
            _check_kept(name, f"{where}.{key}", value, kept.get(key))
    elif isinstance(given, list) and isinstance(kept, list):
        for at, (value, other) in enumerate(zip(given, kept)):
            _check_kept(name, f"{where}[{at}]", value, other)
    elif (given or None) != (kept or None) and not _same_number(given, kept):
        raise ModelError(
            f"{name}: {where}={str(given)[:40]!r}: the tokenizers library reads {str(kept)[:40]!r}; save the file again"
        )


def _same_number(a: Any, b: Any) -> bool:
    """Whether two numbers are one, but for the precision that the library keeps."""
    return isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)


def first_line(error: Exception) -> str:
    """The first line of an error of another library, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def _differs(a: Any, b: Any) -> bool:
    """Whether two JSON values differ; 0 is not false."""
    return type(a) is not type(b) or bool(a != b)


# What is said of an added token.
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special", "__type")


def _text(token: Any) -> str | None:
    """Text of a token given as such or as {"content": text}; None where it is neither."""
    if isinstance(token, dict) and not set(token) <= set(_FLAGS):
        return None
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token_id(tokenizer: Any, text: str | None) -> int | None:
    return None if text is None else tokenizer.token_to_id(text)


def _special_tokens(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> dict[str, str]:
    """Texts of bos_token, eos_token and so on, from tokenizer_config.json or special_tokens_map.json."""
    path = folder / "special_tokens_map.json"
    extra = read_json(path) if path.is_file() else {}
    found = {}
    for name in {*_TOKENS, *(k for k, v in config.items() if _is_extra(k, v) and k.endswith("_token"))}:
        ours, theirs = config.get(name), extra.get(name)
        for where, value in (("tokenizer_config.json", ours), (path.name, theirs)):
            if value is not None and _text(value) is None:
                raise ModelError(f"{where}: {name}={value!r}: must be a token's text; download it again")
        if ours is not None and theirs is not None and _text(ours) != _text(theirs):
            raise ModelError(
                f"tokenizer_config.json: {name}={_text(ours)!r}, but {path.name} says {_text(theirs)!r}: must be "
                "equal; remove one"
            )
        text = _text(theirs if ours is None else ours)
        if text is not None:
            if name in ("bos_token", "eos_token") and text and tokenizer.token_to_id(text) is None:
                raise ModelError(
                    f"tokenizer_config.json: {name}={text!r}: is no token of tokenizer.json; the files belong to "
                    "different models"
                )
            found[name] = text
    return found


def _check_added(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> None:
    """Tokens that other files add must be tokenizer.json's own, under the same ids."""
    path = folder / "added_tokens.json"
    listed_there = read_json(path) if path.is_file() else {}
    added: list[tuple[str, str | None, Any]] = [(path.name, text, i) for text, i in listed_there.items()]
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise ModelError(f"tokenizer_config.json: added_tokens_decoder={listed!r}: must be a table of tokens")
    inside = tokenizer.get_added_tokens_decoder()
    for key, token in listed.items():
        i = int(key) if key.isdecimal() else key
        added.append(("tokenizer_config.json: added_tokens_decoder", _text(token), i))
        for flag, value in token.items() if isinstance(token, dict) and i in inside else ():
            if flag not in _FLAGS or (flag != "__type" and _differs(getattr(inside[i], flag), value)):
                raise ModelError(
                    f"tokenizer_config.json: added_tokens_decoder: {flag}={value!r} of token {i}: tokenizer.json says "
                    f"{getattr(inside[i], flag, 'nothing')!r}; the files belong to different models"
                )
    for where, text, i in added:
        if text is None or type(i) is not int or tokenizer.token_to_id(text) != i:
            raise ModelError(
                f"{where}: {text!r} has id {i!r}: tokenizer.json gives it "
                f"{None if text is None else tokenizer.token_to_id(text)}; the files belong to different models"
            )


def _check_switches(
    config: Mapping[str, Any], tokenizer: Any, bos_token: str | None, notes: list[str]
) -> None:
    """Switches of tokenizer_config.json against what tokenizer.json does."""
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"):
        if not isinstance(config.get(name), bool | None):
            raise ModelError(f"tokenizer_config.json: {name}={config[name]!r}: must be true or false")
    if config.get("add_eos_token"):
        raise ModelError(
            "tokenizer_config.json: add_eos_token=True: a prompt that ends is not continued; set it to false"
        )
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    bos, wanted = _token_id(tokenizer, bos_token), config.get("add_bos_token")
    starts = bos is not None and tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]
    if wanted is not None and wanted is not starts:
        notes.append(
            f"tokenizer_config.json: add_bos_token={wanted}, but tokenizer.json {'puts' if starts else 'does not put'} "
            "the start token in front: tokenizer.json is followed, as transformers 5 does"
        )
    prefixes = _adds_prefix_space(json.loads(tokenizer.to_str()))
    if config.get("add_prefix_space") is not None and prefixes not in (None, config["add_prefix_space"]):
        raise ModelError(
            f"tokenizer_config.json: add_prefix_space={config['add_prefix_space']}, but tokenizer.json says "
            f"{prefixes}: must be equal; remove the key where tokenizer.json is right"
        )


def _adds_prefix_space(facts: dict[str, Any]) -> bool | None:
    """Whether tokenizer.json puts a space in front of a text; None where it has no part that could."""
    parts: list[Any] = [facts.get("normalizer"), facts.get("pre_tokenizer")]
    for part in parts:
        if isinstance(part, dict):
            parts += [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
    answers = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "ByteLevel":
            answers.append(bool(part.get("add_prefix_space")))
        elif kind == "Metaspace":
            answers.append(part.get("prepend_scheme") != "never")
        elif kind == "Prepend":
            answers.append(True)
    return any(answers) if answers else None


def _template(folder: Path, config: Mapping[str, Any], notes: list[str]) -> str:
    """The chat template: chat_template.jinja before tokenizer_config.json, as transformers has it."""
    path, inner = folder / "chat_template.jinja", config.get("chat_template")
    text = template_text(inner, "tokenizer_config.json: chat_template")
    if not path.is_file():
        return text
    try:
        outer = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path.name}: is not UTF-8 text; download it again") from None
    if text and text != outer:
        notes.append(
            f"tokenizer_config.json: chat_template differs from {path.name}: the file is followed, as "
            "transformers does"
        )
    return outer


def template_text(template: Any, where: str) -> str:
    """Jinja source; of several named ones the one called default.

    Raises:
        ModelError: It is neither text nor a list of named texts.
    """
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        if len(named) != len(template) or not all(isinstance(t, str) for t in named.values()):
            raise ModelError(f"{where}: must be a text, or a list of name and template each")
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{where}={str(template)[:60]!r}: must be a text, or a list of name and template each"
        )
    return template or ""
