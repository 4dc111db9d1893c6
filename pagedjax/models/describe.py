"""What a model's files say, before a weight is read: sizes, tokenizer, ends of text, sampling settings.

`pagedjax doctor` prints it, and `hub` fills the decoder with what is named here. Facts that stand in several files
are read from all of them; where they disagree, the one that transformers or llama.cpp follows is followed, and
`Understood.notes` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.models.config import ModelConfig, ModelError, RopeScaling
from pagedjax.models.config_keys import GENERATION
from pagedjax.models.dequantise import unpack
from pagedjax.models.families import Names, leaves_of, names_for
from pagedjax.models.family_configs import config_from_hf
from pagedjax.models.formats import GgufFile, SafetensorsFiles, TensorFile, open_gguf
from pagedjax.models.generation import gguf_sampling, read_generation
from pagedjax.models.gguf_configs import config_from_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, read_json
from pagedjax.models.weights import check_tensors

_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Understood:
    """What was read beside the sizes.

    Attributes:
        kind: Of the files: "GGUF", "Hugging Face folder", "orbax folder".
        ends: Token id that ends a text → where the files say so.
        sampling: Fields of `SamplingParams` for requests that give none.
        sampling_source: Where they stand; "" where nowhere.
        notes: Where files disagree and who was followed, and what has no effect here.
    """

    kind: str = ""
    ends: Mapping[int, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    sampling_source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Described:
    """A model whose files were checked and whose weights have not been read.

    Attributes:
        config, tokenizer, understood: What the files say.
        file: Its tensors.
        names: How they are spelled.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    understood: Understood
    file: TensorFile
    names: Names


def describe_gguf(path: Path) -> Described:
    """Read everything but the weights of a GGUF file, or of the parts of one.

    Raises:
        ModelError: A file is damaged, incomplete, or of an architecture or quantisation we lack.
    """
    file = open_gguf(path)
    config = config_from_gguf(file.metadata)
    names = names_for("gguf", config.family, file.tensors)
    config = replace(config, tie_embeddings=f"{names.lm_head}.weight" not in file.tensors)
    if _ROPE_FACTORS in file.tensors:  # Llama 3.1 and later: its stretching, worked out pair by pair
        config = replace(config, rope_scaling=_rope_factors(file, config))
    tokenizer = tokenizer_from_gguf(file.metadata)
    config = _with_ids(config, tokenizer.bos_token_id, tokenizer.eos_sources)
    sampling = gguf_sampling(file.metadata)
    check_tensors(
        file, leaves_of(config, names, tied=config.tie_embeddings), names, tied=config.tie_embeddings
    )
    understood = Understood(
        "GGUF", tokenizer.eos_sources, sampling, "general.sampling" if sampling else "", tokenizer.notes
    )
    return Described(config, tokenizer, understood, file, names)


def _rope_factors(file: GgufFile, config: ModelConfig) -> RopeScaling:
    if config.rope_scaling is not None:
        raise ModelError(
            f"{_ROPE_FACTORS} beside rope.scaling.type={config.rope_scaling.kind}: both stretch the positions; "
            "convert the file again"
        )
    num_pairs = file.tensors[_ROPE_FACTORS].shape[0]
    divisors = file.rows(_ROPE_FACTORS, 0, min(num_pairs, 4096)).ravel().tolist()
    return RopeScaling("table", 1.0, divisors=tuple(divisors))


def _with_ids(config: ModelConfig, bos: int | None, ends: Mapping[int, str]) -> ModelConfig:
    """The config with its start and ends; ids that the embedding has no row for cannot come up."""
    size = config.vocab_size
    return replace(
        config,
        bos_token_id=bos if bos is not None and bos < size else None,
        eos_token_ids=tuple(token for token in ends if token < size),
    )


def describe_folder(folder: Path) -> Described:
    """Read everything but the weights of a Hugging Face folder.

    Raises:
        ModelError: A file is missing, damaged, contradicts another, or lies outside the folder.
    """
    if not inside(folder, "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder}: is an adapter (LoRA) and no model: merge it into its base model first")
    raw = read_json(inside(folder, "config.json"))
    notes: list[str] = []
    config = config_from_hf(raw, notes)
    sampling, ends = _generation(folder, raw, config, notes)
    for extra in _TOKENIZER_FILES:
        inside(folder, extra)
    tokenizer: HFTokenizer = load_tokenizer(folder, ends)
    if tokenizer.bos_token_id is not None and config.bos_token_id not in (None, tokenizer.bos_token_id):
        notes.append(
            f"config.json: bos_token_id={config.bos_token_id}, but the tokenizer's is {tokenizer.bos_token_id}: "
            "the tokenizer is followed, as transformers does"
        )
    bos = config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    config = _with_ids(config, bos, tokenizer.eos_sources)
    source = "generation_config.json" if sampling else ""
    understood = Understood(
        "Hugging Face folder", tokenizer.eos_sources, sampling, source, (*notes, *tokenizer.notes)
    )
    try:
        facts = raw.get("quantization_config")
        file = unpack(_open_safetensors(folder), facts if isinstance(facts, Mapping) else {})
        config, names = _fit(config, file)
    except ModelError as error:
        method = _quantisation(folder, raw)
        if method is None:
            raise
        raise ModelError(
            f"quantised by {method}: weights must be plain or GGUF ({error}); use the original model or its GGUF file"
        ) from error
    return Described(config, tokenizer, understood, file, names)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def _generation(
    folder: Path, raw: Mapping[str, Any], config: ModelConfig, notes: list[str]
) -> tuple[dict[str, Any], dict[int, str]]:
    """Sampling settings, and ends of text → where: generation_config.json before config.json."""
    for key, neutral in GENERATION.items():
        if raw.get(key) is not None and raw[key] != neutral:
            notes.append(
                f"config.json: {key}={raw[key]!r} has no effect: generation_config.json is its place, as in "
                "transformers 5"
            )
    path = inside(folder, "generation_config.json")
    from_config = dict.fromkeys(config.eos_token_ids, "config.json eos_token_id")
    if not path.is_file():
        return {}, from_config
    sampling, ends = read_generation(read_json(path), config)
    if ends is None:
        return sampling, from_config
    unused = [token for token in config.eos_token_ids if token not in ends]
    if unused and raw.get("eos_token_id") is not None:
        notes.append(
            f"config.json: eos_token_id={unused} is not among generation_config.json's {list(ends)}: followed, as "
            "transformers does"
        )
    return sampling, dict.fromkeys(ends, "generation_config.json eos_token_id")


# ---- weights ---------------------------------------------------------------------------------------------


def _fit(config: ModelConfig, file: TensorFile) -> tuple[ModelConfig, Names]:
    """The names under which this file holds the model; a tied pair may lie under either name."""
    names = names_for("hf", config.family, file.tensors)
    embed, head = f"{names.embed}.weight", f"{names.lm_head}.weight"
    if config.tie_embeddings and embed not in file.tensors and head in file.tensors:
        names = replace(names, embed=names.lm_head)
        embed = head
    check_tensors(
        file, leaves_of(config, names, tied=config.tie_embeddings), names, tied=config.tie_embeddings
    )
    if config.tie_embeddings and embed != head and head in file.tensors:
        _same_tensor(file, embed, head)
    return config, names


def _same_tensor(file: TensorFile, embed: str, head: str) -> None:
    """Both names of a tied pair must hold the same numbers: which of them counts, nobody says."""
    ours, theirs = file.tensors[embed], file.tensors[head]
    equal = ours.shape == theirs.shape
    step = max(1, (8 << 20) // max(1, 8 * ours.shape[-1]))
    for start in range(0, ours.shape[0] if equal else 0, step):
        stop = min(start + step, ours.shape[0])
        equal = equal and np.array_equal(
            np.asarray(file.rows(embed, start, stop), np.float32),
            np.asarray(file.rows(head, start, stop), np.float32),
        )
    if not equal:
        raise ModelError(
            f"{head!r} differs from {embed!r} although tie_word_embeddings says that they are one; set it to false, or "
            "remove the tensor"
        )


def _open_safetensors(folder: Path) -> SafetensorsFiles:
    index, single = inside(folder, "model.safetensors.index.json"), inside(folder, "model.safetensors")
    if index.is_file():
        table = _weight_map(index)
        paths = [_weights(folder, name) for name in sorted(set(table.values()))]
        if single.is_file() and single not in paths:
            raise ModelError(
                f"{single.name} and {index.name}: both say where weights are; remove the one of another model"
            )
        return SafetensorsFiles(paths, table)
    if not single.is_file():
        shards = _shards(folder)
        if shards:
            return SafetensorsFiles([_weights(folder, name) for name in shards])
    return SafetensorsFiles([_weights(folder, single.name)])


def _weight_map(index: Path) -> dict[str, str]:
    facts = read_json(index)
    table = facts.get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
        raise ModelError(f"{index.name}: weight_map must name a file per tensor; download it again")
    for key in facts:
        if key not in ("weight_map", "metadata"):
            raise ModelError(
                f"{index.name}: {key!r}: must have weight_map and metadata only; download it again"
            )
    for name in table.values():
        if "/" in name or "\\" in name:
            raise ModelError(
                f"{index.name}: {name!r}: leads to another folder: files must lie beside the index"
            )
    return table


def _shards(folder: Path) -> list[str]:
    """Files named model-00001-of-00002.safetensors and so on, where all of them are there."""
    found = {}
    for path in folder.iterdir():
        match = re.fullmatch(r"model-(\d{5})-of-(\d{5})\.safetensors", path.name)
        if match:
            found[int(match[1])] = (path.name, int(match[2]))
    totals = {total for _, total in found.values()}
    if len(totals) > 1:
        raise ModelError(
            f"{folder}: shards of different sets ({sorted(totals)}); remove those of the other model"
        )
    for number in range(1, (totals.pop() if totals else 0) + 1):
        if number not in found:
            raise ModelError(
                f"{folder}: shard {number} of {len(found)} files named model-*-of-*.safetensors is missing; download it"
            )
    return [name for _, (name, _) in sorted(found.items())]


def _weights(folder: Path, name: str) -> Path:
    path = inside(folder, name)
    if not path.is_file():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        hint = f" ({pickled[0]} is a pickle, which is never read)" if pickled else ""
        raise ModelError(
            f"{path}: no such file: weights must be safetensors{hint}; save the model with "
            "save_pretrained(safe_serialization=True)"
        )
    if path.suffix != ".safetensors":
        raise ModelError(f"{path.name}: weights must be .safetensors; pickles are never read")
    return path


def _quantisation(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """The method of a quantised folder, from config.json or from the files that older tools wrote beside it."""
    facts = raw.get("quantization_config")
    if isinstance(facts, Mapping):
        method = facts.get("quant_method")
        if method is None:
            method = next(
                (f"bitsandbytes ({k})" for k in ("load_in_8bit", "load_in_4bit") if facts.get(k)), None
            )
        return str(method or "a method that quantization_config does not name")
    if isinstance(raw.get("quantization"), Mapping):
        return "mlx (quantization)"
    for name, method in (
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
    ):
        if (folder / name).is_file():
            return f"{method} ({name})"
    return None


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a model folder, if it really lies there.

    A hub snapshot is a folder of links into the blobs of its own repository; those are followed. Any other
    way out of the folder is refused, so that a model cannot have us read files of its choosing.

    Raises:
        ModelError: The name, or a link under it, leads outside or nowhere.
    """
    path = folder / name
    try:
        root, real = folder.resolve(), path.resolve()
        real.stat()  # a loop of links shows here where resolve keeps quiet about it
    except FileNotFoundError:
        root, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{path}: {getattr(error, 'strerror', None) or 'a loop of links'}: must be a file"
        ) from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(a) for a in allowed):
        raise ModelError(
            f"{name}: leads to {real}: files must lie in the model folder or its own hub cache; copy the file in"
        )
    return path
