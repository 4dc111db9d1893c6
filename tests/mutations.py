"""Seeded edits of JSON documents, and the rule by which their readers are judged.

An edit says what it touched. A reader that takes the edited document must not have passed over what was touched: it
refuses it in one line, or what it read is another thing than before, unless the place is one that changes nothing.
Beside them what the edited files of several tests have in common: the sizes of a config, a tokenizer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np

ODD = [None, True, -1, 0, 1.5, 10**30, "x", "", [], {}, [1], {"a": 1}, float("nan"), "\u2028"]
Path = tuple[Any, ...]
# Of a config.json; more is added by who edits it.
SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-4,
    bos_token_id=1,
)


def byte_level_tokenizer(letters: list[str]) -> dict[str, Any]:
    """A tokenizer.json: three special tokens, letters, and merges of them, with everything a file may have."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", *letters, "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


def places(value: Any, at: Path = ()) -> list[Path]:
    """The path of everything below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ((*at, key), *places(inner, (*at, key)))]


def find(document: Any, path: Path) -> Any:
    """What lies at a path."""
    for key in path:
        document = document[key]
    return document


def edit(document: dict[str, Any], rng: np.random.Generator) -> tuple[dict[str, Any], str, list[Path]]:
    """One edit: (the new document, what was done, the paths it touched)."""
    new = copy.deepcopy(document)
    everywhere = places(new)
    keys = [path for path in everywhere if isinstance(path[-1], str)]
    tables = [(), *(path for path in everywhere if isinstance(find(new, path), dict))]
    path = keys[int(rng.integers(len(keys)))]
    table, key = find(new, path[:-1]), path[-1]
    kind = ("rename", "add", "move", "retype", "change", "change", "delete", "null")[int(rng.integers(8))]
    if kind == "rename":
        cut = int(rng.integers(len(key) + 1))
        name = key[:cut] + ("_" if cut % 2 else "") + key[cut + 1 :] or "q"
        if name in table:
            return edit(document, rng)
        table[name] = table.pop(key)
        return new, kind, [(*path[:-1], name)]
    if kind == "add":
        where = tables[int(rng.integers(len(tables)))]
        name = ("scale_everything_by", f"{key}_2", key.upper())[int(rng.integers(3))]
        find(new, where)[name] = 2
        return new, kind, [(*where, name)]
    if kind == "move":
        where = tables[int(rng.integers(len(tables)))]
        if where[: len(path)] == path or key in find(new, where):
            return edit(document, rng)
        find(new, where)[key] = table[key]
        del table[key]
        return new, kind, [(*where, key)]
    if kind == "delete":
        del table[key]
        return new, kind, [path]
    if kind == "null":
        table[key] = None
        return new, kind, [path]
    places_of_leaves = [p for p in everywhere if not isinstance(find(new, p), (dict, list))] or [path]
    path = places_of_leaves[int(rng.integers(len(places_of_leaves)))]
    parent, key = find(new, path[:-1]), path[-1]
    parent[key] = ODD[int(rng.integers(len(ODD)))] if kind == "retype" else _other(parent[key], rng)
    if json.dumps(new) == json.dumps(document):  # by chance what it was
        return edit(document, rng)
    return new, kind, [path]


def _other(value: Any, rng: np.random.Generator) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return (value + 1, value * 2 + 1, -value - 1, value * 1000 + 7)[int(rng.integers(4))]
    return f"{value}x" if isinstance(value, str) else "x"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def noise(text: str, rng: np.random.Generator) -> bytes:
    """One to three edits of bytes; one document in eight is cut short."""
    out = bytearray(text.encode())
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(out)))
        match rng.integers(4):
            case 0:
                out[at] ^= 1 << int(rng.integers(8))
            case 1:
                del out[at : at + int(rng.integers(1, 5))]
            case 2:
                out[at:at] = rng.integers(0, 256, int(rng.integers(1, 4)), dtype=np.uint8).tobytes()
            case 3:
                out[at:at] = out[at : at + int(rng.integers(1, 30))]
        out = out or bytearray(b"{")
    return bytes(out[: int(rng.integers(len(out)))] if rng.integers(8) == 0 else out)


def same_json(a: bytes, b: Any) -> bool:
    """Whether bytes parse to a document, key by key, without a key twice."""
    twice = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, _ in items if sum(key == other for other, _ in items) > 1)
        return dict(items)

    try:
        value = json.loads(a.decode(), object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return False
    return not twice and json.dumps(value) == json.dumps(b)


def judge(
    document: dict[str, Any],
    write: Callable[[bytes], None],
    read: Callable[[], Any],
    *,
    cases: int,
    seed: int,
    harmless: Callable[[Path, Any, str], bool],
    errors: type[Exception] | tuple[type[Exception], ...],
) -> dict[str, int]:
    """Edit a document many times and hold its reader to the rule.

    Args:
        document: What is right.
        write: Puts a document's bytes where the reader finds them.
        read: Reads; gives what it understood, comparable by ==.
        cases, seed: How many edits, and which.
        harmless: (path, value, kind of edit) → whether that place changes nothing.
        errors: What the reader may raise.

    Returns:
        How many were refused, read as another thing, and read as the same.
    """
    rng = np.random.default_rng(seed)
    write(json.dumps(document).encode())
    right = read()
    told = dict(refused=0, other=0, same=0)
    for case in range(cases):
        if case % 4 == 3:
            raw, kind, touched = noise(json.dumps(document), rng), "noise", []
            new = None
        else:
            new, kind, touched = edit(document, rng)
            raw = json.dumps(new).encode()
        write(raw)
        try:
            got = read()
        except errors as error:
            text = str(error)
            assert text and "\n" not in text and len(text) < 1500, text
            told["refused"] += 1
            continue
        if got != right:
            told["other"] += 1
            # What is new and unknown can never be read as something.
            if kind in ("rename", "add"):
                assert all(harmless(path, find(new, path), kind) for path in touched) or kind == "rename", raw
            continue
        told["same"] += 1
        if kind == "noise":
            continue
        for path in touched:
            value = None if kind == "delete" else find(new, path)
            equal = kind in ("retype", "change") and _number(value) and _number(find(document, path))
            equal = equal and value == find(document, path)  # 0 for 0.0
            allowed = value is None or equal or harmless(path, value, kind)
            assert allowed, f"{kind} of {path} to {value!r} changed nothing and was not refused"
    return told
