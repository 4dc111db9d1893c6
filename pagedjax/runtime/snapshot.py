"""Warm caches on disk: chosen prefixes' KV blocks, written so that a crash leaves the old snapshot good.

A snapshot is a folder. Each save makes a version beside the last one; `CURRENT` names the version that
counts and is replaced atomically, last of all:

    CURRENT                     "v-1f3c…"
    v-1f3c…/lock                held by whoever writes or reads this version
    v-1f3c…/manifest.json       what the blocks belong to, and the prefixes with their rows
    v-1f3c…/blocks/             orbax: per KV group f[C, L, B, width], each block once

Several processes may save and load at once: each writes a version of its own, the last to finish counts, and a
version is removed only by who holds its lock and sees that `CURRENT` names another.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from pagedjax.cache import ExtraKeys, Hints, PagedManager, TokenChain
from pagedjax.models.config import ModelConfig
from pagedjax.models.weights import alone, checkpoint_reader
from pagedjax.runtime.runner import JaxRunner

FORMAT = 3
_CURRENT, _LOCK, _MANIFEST, _BLOCKS = "CURRENT", "lock", "manifest.json", "blocks"
_VERSION = re.compile(r"v-[0-9a-f]{32}")
_TRIES = 100  # to find a version that is not being removed; each takes a save of another process
# Fields of the config that leave keys and values as they are.
_NOT_KV = ("family", "bos_token_id", "eos_token_ids", "max_model_len", "logit_soft_cap")
_UNCOUNTED = Hints(counted=False)


class SnapshotError(ValueError):
    """A snapshot cannot be used here; the message names what differs."""


@dataclass(frozen=True)
class Owner:
    """What the KV in a snapshot depends on beside the tokens: all of it must be equal where it is loaded.

    Attributes:
        model: Name of the model.
        weights: Digest of its weights, from `weights_digest`.
        dtype: Of the KV.
        block_size: Tokens per block.
        layout: Per KV group [window or 0, layers, KV heads, head dim].
        hash: Name of the block hash.
        config: Fields of the model's config that keys and values depend on: rotary base and stretching, norm,
            activation, scales, windows and the rest (`kv_config`). Prefixes are stored as token ids, so no tokenizer.
    """

    model: str
    weights: str
    dtype: str
    block_size: int
    layout: tuple[tuple[int, ...], ...]
    hash: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def check(self, stored: dict[str, Any], path: Path) -> None:
        """Raise SnapshotError naming the first field that differs."""
        ours, theirs = (_flat_facts(facts) for facts in (json.loads(json.dumps(vars(self))), stored))
        for name in dict.fromkeys((*ours, *theirs)):
            same = name in ours and name in theirs and json.dumps(ours[name]) == json.dumps(theirs[name])
            if not same:
                raise SnapshotError(
                    f"{path}: snapshot of {name}={theirs.get(name)}: this engine has {name}={ours.get(name)}; save it "
                    "again with this one"
                )


def kv_config(config: ModelConfig) -> dict[str, Any]:
    """What of a config enters keys and values: everything but ends of text, lengths and what follows the last layer."""
    return {name: value for name, value in config.to_dict().items() if name not in _NOT_KV}


def _flat_facts(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """config.rope_scaling.factor → value, for every leaf of nested tables."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        nested = isinstance(value, Mapping) and value
        out |= _flat_facts(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return out


def weights_digest(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> str:
    """Hex SHA-256 over all leaves, as `JaxRunner.leaves` gives them: names, dtypes, shapes and bytes."""
    hasher = hashlib.sha256()
    for path, leaf in leaves:
        name = "/".join(path)
        array = np.asarray(leaf)
        hasher.update(f"{name} {array.dtype} {array.shape}\n".encode())
        hasher.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return hasher.hexdigest()


def save_snapshot(
    path: Path, owner: Owner, chains: Sequence[TokenChain], manager: PagedManager, runner: JaxRunner
) -> int:
    """Write the resident full blocks of prefixes; returns how many tokens they hold, shared ones once.

    Args:
        path: Folder; an older snapshot in it is replaced, whole or not at all.
        owner: What the blocks belong to.
        chains: Prefixes; what of them is not resident is left out.
        manager: Knows where their blocks are; its statistics stay as they are.
        runner: Holds the bytes.

    Raises:
        ValueError: A prefix carries multimodal items, or there is no room to hold the blocks while reading.
    """
    if any(chain.extra.items for chain in chains):
        raise ValueError("extra.items: prefixes with multimodal items are not saved; leave them out")
    with _held(chains, manager, runner) as tables:
        rows: list[dict[int, int]] = [{} for _ in runner.layouts]  # per group: block -> row in the file
        names: list[dict[int, str]] = [{} for _ in runner.layouts]  # per group: row -> digest of its block
        prefixes = []
        for chain, (count, groups) in zip(chains, tables, strict=True):
            places = [[row.setdefault(b, len(row)) if b else -1 for b in t] for row, t in zip(rows, groups)]
            for named, group in zip(names, places):
                named.update((row, chain.digest(i).hex()) for i, row in enumerate(group) if row >= 0)
            if count:
                tokens = chain.tokens[: count * manager.block_size]
                last = chain.digest(count - 1).hex()
                prefixes.append(
                    {"tokens": tokens, "extra": _extra(chain.extra), "digest": last, "rows": places}
                )
        blocks = [runner.read_blocks(group, np.array(list(row), np.int32)) for group, row in enumerate(rows)]
    manifest = {
        "format": FORMAT,
        "owner": vars(owner),
        "prefixes": prefixes,
        "blocks": [
            {"count": len(b), "sha256": _digest(b), "names": [named[row] for row in range(len(b))]}
            for b, named in zip(blocks, names)
        ],
    }
    _write(path, manifest | {"sha256": _own_digest(manifest)}, blocks)
    return len(rows[0]) * manager.block_size


def load_snapshot(path: Path, owner: Owner, manager: PagedManager, runner: JaxRunner) -> int:
    """Put a snapshot's prefixes into the cache; returns how many of their tokens can be hit now.

    Args:
        path: Folder that `save_snapshot` wrote.
        owner: What blocks must belong to.
        manager: Gets the prefixes as if they had been computed; what does not fit is left out.
        runner: Gets the bytes.

    Raises:
        SnapshotError: No snapshot, a damaged one, or one that belongs to something else.
    """
    with _reading(path) as (folder, manifest):
        owner.check(manifest["owner"], path)
        vocab_size = runner.model.vocab_size
        try:
            _check_fields(manifest, owner.block_size, len(runner.layouts), vocab_size)
        except ValueError as error:
            raise SnapshotError(f"{path}: {_MANIFEST}: {error}; save it again") from None
        blocks = _read_blocks(path, folder, manifest, runner)
    chains = []
    for number, prefix in enumerate(manifest["prefixes"]):
        chain = TokenChain(
            prefix["tokens"],
            block_size=owner.block_size,
            hash=owner.hash,
            extra=ExtraKeys(**prefix["extra"]),
        )
        if chain.digest(chain.num_full_blocks - 1).hex() != prefix["digest"]:
            raise SnapshotError(
                f"{path}: prefix {number} has another digest under hash={owner.hash}; save it again"
            )
        for fact, places in zip(manifest["blocks"], prefix["rows"], strict=True):
            for i, row in enumerate(places):
                if row >= 0 and fact["names"][row] != chain.digest(i).hex():
                    raise SnapshotError(
                        f"{path}: prefix {number}: row {row} is not its block {i}; save it again"
                    )
        if _install(-1 - number, chain, prefix["rows"], blocks, manager, runner):
            chains.append(chain)
    hit = {(c.extra, c.digest(i)) for c in chains for i in range(_resident(c, manager))}
    return len(hit) * manager.block_size


def _install(
    seq: int,
    chain: TokenChain,
    rows: list[list[int]],
    blocks: list[np.ndarray],
    manager: PagedManager,
    runner: JaxRunner,
) -> bool:
    """A sequence's life without a step: its KV comes from the file; False: no room."""
    hit = manager.begin(seq, chain, _UNCOUNTED).num_tokens
    try:
        if not manager.reserve(seq, len(chain) - hit):
            return False
        _run_copies(manager, runner)
        # What lies behind a window at the end was not saved: it must not be indexed.
        manager.leave_behind(seq, len(chain))
        first = hit // manager.block_size
        for group, places in enumerate(rows):
            table = manager.table(seq, group)
            at = [i for i in range(first, len(places)) if table[i]]
            if any(places[i] < 0 for i in at):
                raise SnapshotError("snapshot lacks a block that its windows need; save it again")
            ids = np.array([table[i] for i in at], np.int32)
            runner.write_blocks(group, ids, blocks[group][[places[i] for i in at]])
        manager.commit(seq, len(chain), manager.now)
        return True
    finally:
        manager.release(seq)


def _resident(chain: TokenChain, manager: PagedManager) -> int:
    """Full blocks of a chain that a longer prompt would hit."""
    longer = chain.fork()
    longer.append(0)
    return manager.peek(longer) // manager.block_size


def _run_copies(manager: PagedManager, runner: JaxRunner) -> None:
    copies = manager.take_copies()
    try:
        runner.run_copies(copies)
    except BaseException:
        manager.lose(copies)
        raise


@contextmanager
def _held(
    chains: Sequence[TokenChain], manager: PagedManager, runner: JaxRunner
) -> Iterator[list[tuple[int, list[list[int]]]]]:
    """Per chain (full blocks resident, a table per group), held on the device while the context lasts."""
    out: list[tuple[int, list[list[int]]]] = []
    seqs = [-1 - i for i in range(len(chains))]
    size = manager.block_size
    try:
        for seq, chain in zip(seqs, chains, strict=True):
            # One token more than the full blocks: a hit never covers the last one.
            whole = TokenChain(
                [*chain.tokens[: chain.num_full_blocks * size], 0],
                block_size=size,
                hash=chain.scheme,
                extra=chain.extra,
            )
            hints = Hints(counted=False, max_hit_tokens=len(whole) - 1)
            count = manager.begin(seq, whole, hints).num_tokens // size
            if not manager.reserve(seq, 0):
                raise ValueError(
                    f"save_cache: no room to hold prefix {-1 - seq} while it is read; finish requests"
                )
            _run_copies(manager, runner)
            out.append((count, [manager.table(seq, g)[:count] for g in range(len(runner.layouts))]))
        yield out
    finally:
        for seq in seqs:
            manager.release(seq)


# ------------------------------------------------------------------- files


def _extra(extra: ExtraKeys) -> dict[str, str]:
    return {name: value for name, value in vars(extra).items() if name != "items" and value is not None}


def _digest(blocks: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1).data).hexdigest()


def _own_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, manifest: dict[str, Any], blocks: list[np.ndarray]) -> None:
    """A new version beside the old one; the switch is one atomic rename."""
    path.mkdir(parents=True, exist_ok=True)
    if (path / _CURRENT).exists() and _current(path) is None:
        raise SnapshotError(f"{path}: its file {_CURRENT} is no snapshot's; choose another folder")
    version = path / f"v-{uuid.uuid4().hex}"
    version.mkdir()
    with _locked(version, fcntl.LOCK_EX):
        tree = {f"group_{g}": array for g, array in enumerate(blocks) if len(array)}
        if tree:
            with ocp.StandardCheckpointer(multiprocessing_options=alone()) as checkpointer:
                checkpointer.save((version / _BLOCKS).absolute(), tree)
                checkpointer.wait_until_finished()
        _write_durably(version / _MANIFEST, json.dumps(manifest))
        pointer = path / f"{_CURRENT}.{version.name}"
        _write_durably(pointer, version.name)
        os.replace(pointer, path / _CURRENT)
    _remove_old(path)


@contextmanager
def _locked(version: Path, how: int) -> Iterator[bool]:
    """The lock of a version; False where it is gone, or (with LOCK_NB) somebody else's."""
    try:
        handle = os.open(version / _LOCK, os.O_RDWR | (os.O_CREAT if how & fcntl.LOCK_EX else 0), 0o644)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, how)
        except BlockingIOError:
            yield False
            return
        yield os.fstat(handle).st_nlink > 0  # 0: it was removed while we waited
    finally:
        os.close(handle)


def _remove_old(path: Path) -> None:
    """Versions that were replaced or never finished, and that nobody writes or reads; nothing else."""
    for version in path.iterdir():
        ours = _VERSION.fullmatch(version.name) and version.is_dir() and not version.is_symlink()
        if not ours or not ((version / _LOCK).is_file() or (version / _MANIFEST).is_file()):
            continue
        with _locked(version, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            # Its writer switches before it lets go: what counts is seen here.
            if not free or _current(path) == version.name:
                continue
            shutil.rmtree(version / _BLOCKS, ignore_errors=True)
            for name in (_MANIFEST, _LOCK):
                (version / name).unlink(missing_ok=True)
            (path / f"{_CURRENT}.{version.name}").unlink(missing_ok=True)
            with suppress(OSError):  # somebody put a file of their own in
                version.rmdir()


def _current(path: Path) -> str | None:
    """The version that counts; None where there is none, or `CURRENT` is not ours."""
    try:
        name = (path / _CURRENT).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _VERSION.fullmatch(name) else None


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _reading(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(folder, manifest) of the version that counts, which nobody removes while the context lasts."""
    name = None
    for _ in range(_TRIES):
        before, name = name, _current(path)
        if name is None:
            raise SnapshotError(f"{path}: holds no snapshot; save one with save_cache")
        with _locked(path / name, fcntl.LOCK_SH) as there:
            if there:
                yield path / name, _read_manifest(path, path / name)
                return
        if name == before:  # named still, and not there: it was not replaced under us
            break
    raise SnapshotError(f"{path}: is not a whole snapshot ({name} is not there); save it again")


def _read_manifest(path: Path, folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if manifest.pop("sha256") != _own_digest(manifest):
            raise ValueError("manifest.json has another digest")
        if not isinstance(manifest.get("owner"), dict):
            raise ValueError("owner must be a table")
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path}: is not a whole snapshot ({error}); save it again") from None


def _check_fields(manifest: dict[str, Any], block_size: int, num_groups: int, vocab_size: int) -> None:
    """Types, ranges and agreement of everything that a manifest says; its digest proves only that it is as written.

    Raises:
        ValueError: Naming the field.
    """
    _require_keys("manifest", manifest, ("format", "owner", "prefixes", "blocks"))
    facts, prefixes = manifest["blocks"], manifest["prefixes"]
    if not isinstance(facts, list) or len(facts) != num_groups:
        raise ValueError(f"blocks: must have one entry for each of {num_groups} KV groups")
    for fact in facts:
        _require_keys("blocks", fact, ("count", "sha256", "names"))
        count, names = fact["count"], fact["names"]
        if type(count) is not int or not 0 <= count < 1 << 31:
            raise ValueError(f"blocks.count={count!r}: must be a whole number")
        if not isinstance(names, list) or len(names) != count or not all(_is_hex(name) for name in names):
            raise ValueError("blocks.names: must be one digest for each row")
        if not _is_hex(fact["sha256"]):
            raise ValueError(f"blocks.sha256={str(fact['sha256'])[:20]!r}: must be a digest")
    if not isinstance(prefixes, list):
        raise ValueError("prefixes: must be a list")
    known = {f.name for f in fields(ExtraKeys)} - {"items"}
    for prefix in prefixes:
        _require_keys("prefixes", prefix, ("tokens", "extra", "digest", "rows"))
        tokens, extra, rows = prefix["tokens"], prefix["extra"], prefix["rows"]
        if not isinstance(tokens, list) or not tokens or len(tokens) % block_size:
            raise ValueError(f"prefixes.tokens: must fill blocks of {block_size}")
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise ValueError(f"prefixes.tokens: must be ids below {vocab_size}")
        if not isinstance(extra, dict) or not all(
            k in known and isinstance(v, str) for k, v in extra.items()
        ):
            raise ValueError(f"prefixes.extra={extra!r}: must be texts for {', '.join(sorted(known))}")
        ExtraKeys(**extra)  # raises its own ValueError
        if not _is_hex(prefix["digest"]):
            raise ValueError(f"prefixes.digest={str(prefix['digest'])[:20]!r}: must be a digest")
        if not isinstance(rows, list) or len(rows) != num_groups:
            raise ValueError(f"prefixes.rows: must have one list for each of {num_groups} KV groups")
        for places, fact in zip(rows, facts, strict=True):
            if not isinstance(places, list) or len(places) != len(tokens) // block_size:
                raise ValueError("prefixes.rows: must have one row for each block of tokens")
            if not all(type(row) is int and -1 <= row < fact["count"] for row in places):
                raise ValueError(f"prefixes.rows: must be rows of {fact['count']}, or -1")


def _require_keys(where: str, value: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(value, dict) or set(value) != set(keys):
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where} has {got}: must have {', '.join(keys)}")


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16,128}", value) is not None


def _read_blocks(path: Path, folder: Path, manifest: dict[str, Any], runner: JaxRunner) -> list[np.ndarray]:
    facts = manifest["blocks"]
    tree: dict[str, Any] = {}
    try:
        if any(fact["count"] for fact in facts):
            with checkpoint_reader() as checkpointer:
                target = (folder / _BLOCKS).absolute()
                names = [f"group_{g}" for g, fact in enumerate(facts) if fact["count"]]
                args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
                tree = checkpointer.restore(target, restore_args=args)
        blocks = []
        for g, (fact, layout) in enumerate(zip(facts, runner.layouts, strict=True)):
            shape = (fact["count"], layout.num_layers, layout.block_size, layout.width)
            kind = runner.copies.hosts[g].data.dtype
            blocks.append(tree[f"group_{g}"] if fact["count"] else np.empty(shape, kind))
            if blocks[-1].shape != shape or blocks[-1].dtype != kind:
                raise ValueError(f"blocks of group {g} are {blocks[-1].dtype}{blocks[-1].shape}, not {shape}")
            if _digest(blocks[-1]) != fact["sha256"]:
                raise ValueError(f"blocks of group {g} have another digest")
        return blocks
    except Exception as error:  # damaged files surface as almost any type from the storage library
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SnapshotError(f"{path}: is not a whole snapshot ({first}); save it again") from error
