"""`pagedjax compile`: kernels and whole decode steps for devices that are not in this machine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import Common, common_options, emit_json, refuse_with
from pagedjax.paths import shipped, user_cache_dir

if TYPE_CHECKING:
    from pagedjax.kernels import KVLayout
    from pagedjax.kernels.aot import Compiled
    from pagedjax.models.config import ModelConfig

_TARGETS = ("v5e", "v6e", "v4", "v5p", "tpu7x", "h100", "a100", "l4", "rtx4090", "b200")
_COUNT = click.IntRange(min=1)
# libtpu keeps 0.25 of 16 GiB to itself on v5e, 0.75 of 32 on v6e.
_HBM_SHARE = 0.975
# Of what HBM has left beside the weights, this much becomes the pool: the rest is the step's own scratch.
_POOL_SHARE = 0.9
_READS = ("model", "config_file", "settings", "cache_dir")  # what says which model
# Mode -> parameters without effect in it.
_IDLE: dict[str, tuple[str, ...]] = {
    "--kernels": ("pool_bytes", "topology"),
    "--step": (),
    "--table": (*_READS, "layers", "pool_bytes", "topology"),
    "--bundles": (*_READS, "batch", "context", "layers", "pool_bytes", "topology", "quiet"),
}


@click.command("compile")
@click.option(
    "--target", "targets", multiple=True, required=True, type=click.Choice(_TARGETS), help="Repeatable."
)
@click.option("--kernels", is_flag=True, help="The model's attention; the default.")
@click.option("--step", is_flag=True, help="The whole decode step, sampling included.")
@click.option("--table", is_flag=True, help="The kernels' table of geometries, no model.")
@click.option(
    "--bundles", is_flag=True, help="TPU: count VLIW bundles per chunk and row beside the HBM floor."
)
@click.option("--batch", type=_COUNT, default=8, show_default=True, help="Rows that decode.")
@click.option("--context", type=_COUNT, default=4096, show_default=True, help="Longest row in tokens.")
@click.option("--layers", type=_COUNT, help="Another depth than the model's: a step that fits one device.")
@click.option(
    "--pool-bytes",
    type=_COUNT,
    help="KV pool of the step, a chip's part.  [default: 90 % of usable HBM beside the weights]",
)
@click.option(
    "--topology",
    metavar="2x4",
    default="",
    help="A TPU slice whose chips work the step together, of one host or several: 2x4, 4x4, 2x2x2 (v4, v5p, tpu7x).",
)
@common_options(
    settings=("model.model", "model.dtype", "cache.block_size", "cache.dtype"), model__dtype="bfloat16"
)
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    targets: tuple[str, ...],
    kernels: bool,
    step: bool,
    table: bool,
    bundles: bool,
    batch: int,
    context: int,
    layers: int | None,
    pool_bytes: int | None,
    topology: str,
) -> int:
    """Compile for a device that is not here: time, memory, proof that the pool is updated in place, fit.

    The model may be a folder, a config.json alone or the name of one in configs/shapes/: no weights are read. Needs
    the extra tpu (libtpu) or cuda (the plugin and pjrt, no driver). Exit code 1 where a compiler refuses.
    """
    modes = {"kernels": kernels, "step": step, "table": table, "bundles": bundles}
    asked = [name for name, given in modes.items() if given] or ["kernels"]
    if len(asked) > 1:
        raise click.UsageError(
            f"--{' and --'.join(asked)}: each is another thing to compile; give one of them"
        )
    what = asked[0]
    refuse_with(ctx, f"--{what}", _IDLE[f"--{what}"])
    # The CUDA plugin would look for a driver otherwise; it must be set before jax is imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from pagedjax.kernels import aot

    if missing := [target for target in targets if not aot.installed(target)]:
        extra = aot.TARGETS[missing[0]].extra
        raise click.UsageError(f"--target {missing[0]}: its compiler is missing; install pagedjax[{extra}]")
    if bundles:
        return _bundles(common, targets)
    rows: list[dict[str, Any]] = []
    refused = 0
    for target in targets:
        for name, job in _jobs(common, target, what, batch, context, layers, pool_bytes, topology):
            common.note(f"{target}: {name}")
            try:
                rows.append(_row(job(), batch))
            except NotImplementedError as reason:
                refused += 1
                rows.append({"target": target, "what": name, "refused": str(reason)})
    if common.as_json:
        emit_json({"config": common.config.to_dict(), "compiled": rows})
    else:
        for row in rows:
            print(_text(row))
    return 1 if refused else 0


def _row(compiled: Compiled, batch: int) -> dict[str, Any]:
    """What a compiled program says, for people and for --json."""
    from pagedjax.kernels.aot import LINK_BYTES_PER_S, TARGETS

    c = compiled
    row: dict[str, Any] = {
        "target": c.target,
        "what": c.name,
        "compile_s": c.compile_s,
        "argument_mib": c.argument_bytes / 2**20,
        "pool_mib": c.pool_bytes / 2**20,
        "alias_is_pool": c.alias_bytes >= c.pool_bytes,
        "temp_mib": c.temp_bytes / 2**20,
        "temp_of_pool_percent": 100 * c.temp_bytes / c.pool_bytes,
        "in_place": c.in_place,
        "hbm_percent": 100 * c.hbm_bytes / c.limits.hbm_bytes,
        "fits_hbm": c.fits,
        "kernel_kib": c.kernel_bytes / 2**10,
        "on_chip_kib": c.limits.on_chip_bytes / 2**10,
        "on_chip": "shared memory" if TARGETS[c.target].platform == "cuda" else "VMEM",
    }
    if c.chips > 1:
        between = c.between_chips
        row |= {
            "chips": c.chips,
            "collectives": {kind: count for kind, count in between.counts.items() if count},
            "collectives_of_filters": {kind: count for kind, count in between.branches.items() if count},
            "sent_bytes_per_token": between.sent_bytes / batch,
            "link_bytes_per_s": LINK_BYTES_PER_S.get(c.target),
        }
    return row


def _text(row: dict[str, Any]) -> str:
    head = f"{row['target']}: {row['what']}"
    if "refused" in row:
        return f"{head}\n  REFUSED: {row['refused']}"
    place = "in place" if row["in_place"] else "NOT IN PLACE"
    if row["alias_is_pool"] and not row["in_place"]:
        place = "in place, but with scratch over 1 %"
    memory = row["on_chip"]
    chips = [_between(row)] if "chips" in row else []
    return "\n".join(
        [
            head,
            f"  compiled in {row['compile_s']:.1f} s; {'fits' if row['fits_hbm'] else 'DOES NOT FIT'}: "
            f"{row['hbm_percent']:.1f} % of HBM ({row['argument_mib']:,.0f} MiB of arguments)",
            f"  {place}: {'the pool' if row['alias_is_pool'] else 'NOT the pool'} of {row['pool_mib']:,.0f} MiB "
            f"is an alias, temporaries {row['temp_mib']:.2f} MiB ({row['temp_of_pool_percent']:.3f} % of it)",
            f"  largest kernel {row['kernel_kib']:,.0f} of {row['on_chip_kib']:,.0f} KiB {memory}",
            *chips,
        ]
    )


def _between(row: dict[str, Any]) -> str:
    """What crosses between chips, beside their links."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    link = row["link_bytes_per_s"]
    beside = "links' bandwidth not known here"
    if link:
        least_us = 1e6 * row["sent_bytes_per_token"] / (link / 2)
        beside = f"links of {link / 1e9:,.0f} GB/s both ways: at least {least_us:.2f} us"
    return (
        f"  {row['chips']} chips, each as above; between them a step: {kinds}; each sends "
        f"{row['sent_bytes_per_token'] / 2**10:,.1f} KiB a token ({beside})"
    )


def _jobs(
    common: Common,
    target: str,
    what: str,
    batch: int,
    context: int,
    layers: int | None,
    pool_bytes: int | None,
    topology: str,
) -> list[tuple[str, Any]]:
    """(name, what compiles it) of everything asked for."""
    from pagedjax.kernels import geometries

    if what == "table":
        return [
            (
                str(g),
                lambda g=g: geometries.compile_attention(
                    target, g, num_decodes=batch, context_tokens=context
                ),
            )
            for g in geometries.geometries(target)
        ]
    name, model = read_shapes(common)
    if layers is not None:
        name, model = f"{name}, {layers} layers", model.first_layers(layers)
    from pagedjax.runtime.pools import kv_dtype

    block_size, dtype, kv = common.config.cache.block_size, common.config.model.dtype, kv_dtype(common.config)
    name += f", {kv} KV" if kv != dtype else ""
    if what == "step":
        step = f"{name}: decode step of {batch}" + (f" on {topology}" if topology else "")
        return [
            (
                step,
                lambda: compile_step(
                    step, target, model, dtype, kv, block_size=block_size, batch=batch, context=context,
                    pool_bytes=pool_bytes, topology=topology,
                ),
            )
        ]  # fmt: skip
    geometry = geometries.Geometry(
        model.num_heads, model.num_kv_heads, model.head_dim, block_size, kv, model.latent_dim
    )
    queries = "float32" if dtype == "int8" else dtype
    jobs = []
    for window in dict.fromkeys(model.window(layer) for layer in range(model.num_layers)):
        for kind, prefill in (("decode", 0), ("decode and prefill", 256)):
            title = f"{name}: {kind}" + (f", window {window}" if window else "")

            def job(title: str = title, prefill: int = prefill, window: int | None = window) -> Compiled:
                compiled = geometries.compile_attention(
                    target, geometry, num_decodes=batch, prefill_tokens=prefill, context_tokens=context,
                    window=window, soft_cap=model.attn_soft_cap or None, query_dtype=queries,
                )  # fmt: skip
                return dataclasses.replace(compiled, name=title)

            jobs.append((title, job))
    return jobs


def read_shapes(common: Common) -> tuple[str, ModelConfig]:
    """(name, shapes) of the configured model, without its weights.

    Raises:
        ModelError: The source names no file or folder that holds shapes.
    """
    from pagedjax.models import hub
    from pagedjax.models.config import ModelError
    from pagedjax.models.family_configs import read_shape
    from pagedjax.models.formats import open_gguf
    from pagedjax.models.gguf_configs import config_from_gguf

    source = common.config.model.model
    if source in hub.NAMED_MODELS:
        file = hub.fetch_named(source, common.cache_dir or user_cache_dir())
        return source, config_from_gguf(open_gguf(file).metadata)
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".gguf":
        return path.stem, config_from_gguf(open_gguf(path).metadata)
    try:
        model = read_shape(path)
    except ModelError:
        raise
    except ValueError:
        raise ModelError(
            f"model={source!r}: compile reads shapes only; give a model folder, a config.json, a GGUF file or one of "
            f"{', '.join(sorted(p.stem for p in (shipped('configs') / 'shapes').iterdir()))}"
        ) from None
    return path.resolve().parent.name if path.name == "config.json" else path.stem, model


def compile_step(
    name: str,
    target: str,
    model: ModelConfig,
    dtype: str,
    kv: str,
    *,
    block_size: int,
    batch: int,
    context: int,
    pool_bytes: int | None = None,
    topology: str = "",
) -> Compiled:
    """Compile the runner's own step, from token ids to sampled tokens, for a device that is not here.

    Args:
        name: For the report.
        target: Key of `aot.TARGETS`.
        model: Shapes of the decoder.
        dtype: Of weights.
        kv: Dtype of the KV pool.
        block_size: B.
        batch: Rows that decode one token.
        context: Longest row in tokens.
        pool_bytes: Of the KV pool, a chip's part; None takes 90 % of what usable HBM has left beside the weights.
        topology: Of the slice that works the step together; "" is one device.

    Raises:
        ModelError: The model cannot be dealt out to so many chips.
        NotImplementedError: The compiler is missing or refuses, or the attention kernel was passed over.
    """
    import jax

    from pagedjax.config import SchedulerConfig
    from pagedjax.engine.shapes import Bucket
    from pagedjax.kernels import aot
    from pagedjax.models.decoder import abstract_params, pool_layout
    from pagedjax.runtime.mesh import ONE_DEVICE, DeviceMesh
    from pagedjax.runtime.runner import JaxRunner

    place: Any = DeviceMesh(model, aot.slice_devices(target, topology)) if topology else ONE_DEVICE
    mesh = place.mesh if topology else None

    def layout(num_blocks: int) -> KVLayout:
        return pool_layout(model, num_blocks, block_size, kv)

    params = abstract_params(model, dtype)
    chip = params if place.cut is None else abstract_params(place.cut.local, dtype)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(chip))
    if pool_bytes is None:
        pool_bytes = int(_POOL_SHARE * (_HBM_SHARE * aot.device_limits(target).hbm_bytes - weights))
        if pool_bytes <= 0:
            raise NotImplementedError(
                f"{name} on {target}: its weights of {weights / 2**30:.1f} GiB leave no room in HBM; try --layers"
            )
    pool = layout(max(2, pool_bytes // place.layout(layout(1)).num_bytes))
    # The runner that would serve; of shapes, so that it allocates nothing.
    limits = SchedulerConfig(max_num_seqs=batch)
    # Products in C++ are for the CPU that compiles.
    runner = JaxRunner(model, params, layout(1), limits, max_model_len=context, place=place, products="xla")
    args = runner.step_args(Bucket(batch, 0, batch, batch), pool)
    chip_bytes = place.layout(pool).num_bytes
    compiled = aot.compile(
        name, target, runner.step_fn, args, donate=(1,), pool_bytes=chip_bytes, row_major=(0,), mesh=mesh
    )
    if model.latent is not None and aot.TARGETS[target].platform == "cuda":
        # Kernels of GPUs read no values within keys: the step is xla's, and says so.
        kernel = aot.TARGETS[target].kernel
        return dataclasses.replace(compiled, name=f"{name}, through xla ({kernel} reads no latent rows)")
    if compiled.num_kernels < model.num_layers:
        raise NotImplementedError(
            f"{name} on {target}: {compiled.num_kernels} kernel calls in {model.num_layers} layers; "
            f"{aot.TARGETS[target].kernel} refuses this shape (compile --kernels says why)"
        )
    return compiled


def _bundles(common: Common, targets: tuple[str, ...]) -> int:
    """One process per target: what libtpu dumps is set by the environment before it is loaded."""
    code = 0
    for target in targets:
        args = ["--target", target, *(["--json"] if common.as_json else [])]
        args += [word for kind in ("decode", "prefill", "short", "shared") for word in ("--kind", kind)]
        code |= subprocess.run([sys.executable, "-m", "pagedjax.kernels.bundles", *args]).returncode
    return code
