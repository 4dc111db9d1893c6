"""Warm caches on disk: chosen prefixes' KV blocks, written so that a crash leaves the old snapshot good.

A snapshot is a folder. Each save makes a version beside the last one; `CURRENT` names the version that
counts and is replaced atomically, last of all:

    CURRENT                     "v-1f3c…"
    v-1f3c…/manifest.json       what the blocks belong to, and the prefixes with their rows
    v-1f3c…/blocks/             orbax: per KV group f[C, L, B, width], each block once
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from pagedjax.cache import ExtraKeys, Hints, PagedManager, TokenChain
from pagedjax.models.weights import flat
from pagedjax.runtime.runner import JaxRunner

FORMAT = 2
_CURRENT = "CURRENT"
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
    """

    model: str
    weights: str
    dtype: str
    block_size: int
    layout: tuple[tuple[int, ...], ...]
    hash: str

    def check(self, stored: dict[str, Any], path: Path) -> None:
        """Raise SnapshotError naming the first field that differs."""
        for name, ours in vars(self).items():
            theirs = stored.get(name)
            if json.loads(json.dumps(ours)) != theirs:
                raise SnapshotError(
                    f"{path}: snapshot of {name}={theirs}: this engine has {name}={ours}; save it again with this one"
                )


def weights_digest(params: dict[str, Any]) -> str:
    """Hex SHA-256 over all leaves: names, dtypes, shapes and bytes."""
    hasher = hashlib.sha256()
    for name, leaf in sorted(flat(params)):
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
        prefixes = []
        for chain, (count, groups) in zip(chains, tables, strict=True):
            places = [[row.setdefault(b, len(row)) if b else -1 for b in t] for row, t in zip(rows, groups)]
            if count:
                tokens = chain.tokens[: count * manager.block_size]
                last = chain.digest(count - 1).hex()
                prefixes.append(
                    {"tokens": tokens, "extra": _extra(chain.extra), "digest": last, "rows": places}
                )
        blocks = [
            runner.copies.read(pool, np.array(list(row), np.int32)) for pool, row in zip(runner.pools, rows)
        ]
    manifest = {
        "format": FORMAT,
        "owner": vars(owner),
        "prefixes": prefixes,
        "blocks": [{"count": len(b), "sha256": _digest(b)} for b in blocks],
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
    folder, manifest = _read_manifest(path)
    owner.check(manifest["owner"], path)
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
        pools = list(runner.pools)
        for group, places in enumerate(rows):
            table = manager.table(seq, group)
            at = [i for i in range(first, len(places)) if table[i]]
            if any(places[i] < 0 for i in at):
                raise SnapshotError("snapshot lacks a block that its windows need; save it again")
            ids = np.array([table[i] for i in at], np.int32)
            pools[group] = runner.copies.write(pools[group], ids, blocks[group][[places[i] for i in at]])
        runner.pools = tuple(pools)
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
    version = path / f"v-{uuid.uuid4().hex}"
    version.mkdir()
    tree = {f"group_{g}": array for g, array in enumerate(blocks) if len(array)}
    if tree:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((version / "blocks").absolute(), tree)
            checkpointer.wait_until_finished()
    _write_durably(version / "manifest.json", json.dumps(manifest))
    _write_durably(path / f"{_CURRENT}.new", version.name)
    os.replace(path / f"{_CURRENT}.new", path / _CURRENT)
    for other in path.glob("v-*"):  # versions that were replaced, or never finished
        if other != version:
            shutil.rmtree(other, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> tuple[Path, dict[str, Any]]:
    try:
        name = (path / _CURRENT).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise SnapshotError(f"{path}: holds no snapshot; save one with save_cache") from None
    folder = path / name
    try:
        if folder.parent != path or not name.startswith("v-"):
            raise ValueError(f"{_CURRENT} names {name!r}")
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if manifest.pop("sha256") != _own_digest(manifest):
            raise ValueError("manifest.json has another digest")
        return folder, manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{path}: is not a whole snapshot ({error}); save it again") from None


def _read_blocks(path: Path, folder: Path, manifest: dict[str, Any], runner: JaxRunner) -> list[np.ndarray]:
    facts = manifest["blocks"]
    tree: dict[str, Any] = {}
    try:
        if any(fact["count"] for fact in facts):
            with ocp.PyTreeCheckpointer() as checkpointer:
                target = (folder / "blocks").absolute()
                names = [f"group_{g}" for g, fact in enumerate(facts) if fact["count"]]
                args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
                tree = checkpointer.restore(target, restore_args=args)
        blocks = []
        for g, (fact, host) in enumerate(zip(facts, runner.copies.hosts, strict=True)):
            empty = np.empty((0, *host.data.shape[1:]), host.data.dtype)
            blocks.append(tree[f"group_{g}"] if fact["count"] else empty)
            if _digest(blocks[-1]) != fact["sha256"]:
                raise ValueError(f"blocks of group {g} have another digest")
        return blocks
    except Exception as error:  # damaged files surface as almost any type from the storage library
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SnapshotError(f"{path}: is not a whole snapshot ({first}); save it again") from error
