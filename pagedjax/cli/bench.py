"""`pagedjax bench`: measured speed, always beside what it could have been in the same process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pagedjax.cli.options import Common, OutputFile, common_options, emit_json
from pagedjax.cli.trace_options import FILE
from pagedjax.config import WEIGHT_DTYPES, ModelSource
from pagedjax.paths import AnyPath, replace_text

_COUNT = click.IntRange(min=1)
# One request at a time and a host to swap it to; what was dropped must not come back from the prefix cache.
_PREEMPTING: dict[str, Any] = {
    "scheduler.max_num_seqs": 1,
    "scheduler.preemption": "auto",
    "cache.prefix_caching": False,
    "cache.num_blocks": 256,
    "cache.host_blocks": 256,
}
_CONTEXTS = (16, 128, 512, 1024)


@click.group("bench")
def command() -> None:
    """Measure speed; each figure stands beside a bound taken in the same run."""


def _show(common: Common, tables: dict[str, list[dict[str, Any]]]) -> None:
    if common.as_json:
        emit_json({"config": common.config.to_dict(), "tables": tables})
        return
    from pagedjax.report.tables import render

    for title, rows in tables.items():
        common.console().print(render(title, rows))


@command.command("decode")
@click.option(
    "--batch", "batches", multiple=True, type=_COUNT, help="Batch size; repeatable.  [default: 1, 8, 32]"
)
@click.option("--context", type=_COUNT, default=512, show_default=True, help="Prompt length in tokens.")
@click.option(
    "--tokens", type=_COUNT, default=32, show_default=True, help="Tokens decoded a sequence and round."
)
@click.option(
    "--rounds", type=_COUNT, default=3, show_default=True, help="Interleaved rounds; the best of each counts."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(WEIGHT_DTYPES),
    help="Of the weights; repeatable.  [default: float32, bfloat16 and int8 on CPU, else model.dtype]",
)
@click.option(
    "--peers",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON that another engine's script wrote, to stand beside; repeatable.",
)
# 31 decodes and a 256-token chunk must fit one step.
@common_options(scheduler__token_budget=288, scheduler__chunk_tokens=256, cache__memory_bytes="1536MiB")
def decode(
    common: Common,
    batches: tuple[int, ...],
    context: int,
    tokens: int,
    rounds: int,
    dtypes: tuple[str, ...],
    peers: tuple[Path, ...],
) -> None:
    """Speed of the engine beside a dense loop, its matrix products and its floors; preemption by swap and recompute."""
    from pagedjax.bench import decode as bench
    from pagedjax.bench import preemption as preemptions

    bench.beside_peers([], peers)  # files that are none are refused before anything is measured

    def measured(llm: Any) -> list[dict[str, Any]]:
        sizes = batches or (1, 8, 32)
        return bench.run(llm, sizes, context=context, tokens=tokens, rounds=rounds, note=common.note)

    def made(dtype: str) -> Any:
        common.note(f"weights in {dtype}")
        return replace(common, config=common.config.replace({"model.dtype": dtype})).llm()

    first_dtype, *others = dtypes or _dtypes_here(common)
    rows = [
        row for dtype in others for row in measured(made(dtype))
    ]  # one engine's weights and pool at a time
    llm = made(first_dtype)
    rows = [*measured(llm), *rows]
    first, mixed = bench.first_token(llm, rounds=rounds), bench.mixed_step(llm, context=context)
    del llm  # its pool makes room for the other engine's
    preempting = replace(common, config=common.config.replace(_PREEMPTING)).llm()
    preempted = preemptions.run(preempting, _CONTEXTS, note=common.note)
    tables = {"decode": rows, "first token": [first], "mixed step": [mixed], "preemption": preempted}
    if peers:
        tables["peers"] = bench.beside_peers(rows, peers)
    _show(common, tables)


def _dtypes_here(common: Common) -> tuple[str, ...]:
    """What a run without --dtype compares: what is served, where the setting is left at its default."""
    from pagedjax.kernels.layout import device_class

    own = common.config.model.dtype
    alone = device_class() != "cpu" or common.config.runtime.tensor_parallel > 1
    return (own,) if alone or own != ModelSource().dtype else ("float32", "bfloat16", "int8")


@command.command("preemption")
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=_COUNT,
    help="Tokens of the preempted request; repeatable.  [default: 16, 128, 512, 1024]",
)
@click.option(
    "--rounds",
    type=_COUNT,
    default=5,
    show_default=True,
    help="Interleaved rounds; the median of each counts.",
)
@common_options(**{name.replace(".", "__"): value for name, value in _PREEMPTING.items()})
def preemption(common: Common, contexts: tuple[int, ...], rounds: int) -> None:
    """Swapping a request to the host and back beside recomputing it, and what the cost rule chooses."""
    from pagedjax.bench import preemption as bench

    rows = bench.run(common.llm(), contexts or _CONTEXTS, rounds=rounds, note=common.note)
    _show(common, {"preemption": rows})


@command.command("deterministic")
@click.option(
    "--batch", "batches", multiple=True, type=_COUNT, help="Batch size; repeatable.  [default: 1, 8]"
)
@click.option("--context", type=_COUNT, default=256, show_default=True, help="Prompt length in tokens.")
@click.option(
    "--tokens", type=_COUNT, default=16, show_default=True, help="Decode steps a round; the fastest counts."
)
@click.option(
    "--rounds", type=_COUNT, default=3, show_default=True, help="Of both engines in turn; the fastest counts."
)
@common_options(scheduler__max_num_seqs=8, scheduler__token_budget=256, cache__memory_bytes="512MiB")
def deterministic(common: Common, batches: tuple[int, ...], context: int, tokens: int, rounds: int) -> None:
    """Prefill and decode with runtime.deterministic beside the same without it."""
    from pagedjax.bench import deterministic as bench

    usual, other = (
        replace(common, config=common.config.replace({"runtime.deterministic": on})).llm()
        for on in (False, True)
    )
    rows = bench.run(
        usual, other, batches or (1, 8), context=context, tokens=tokens, rounds=rounds, note=common.note
    )
    _show(common, {"deterministic": rows})


@command.command("overlap")
@click.option("--batch", type=_COUNT, default=32, show_default=True, help="Sequences decoded at once.")
@click.option("--context", type=_COUNT, default=256, show_default=True, help="Prompt length in tokens.")
@click.option("--tokens", type=_COUNT, default=96, show_default=True, help="Decode steps a round.")
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0.0),
    default=5.0,
    show_default=True,
    help="Milliseconds of the simulated device a step; 0: the model itself computes.",
)
@click.option(
    "--rounds",
    type=_COUNT,
    default=5,
    show_default=True,
    help="Of all ways, in turn; the medians count.",
)
@common_options(scheduler__max_num_seqs=32, cache__memory_bytes="1536MiB", runtime__num_steps=8)
def overlap(common: Common, batch: int, context: int, tokens: int, step_ms: float, rounds: int) -> None:
    """Decoding on a simulated device, runtime.overlap off and on, num_steps 1 and as set: what the host leaves it."""
    from pagedjax.bench import overlap as bench

    rows = bench.run(
        common.llm(),
        batch=batch,
        context=context,
        tokens=tokens,
        step_ms=step_ms,
        rounds=rounds,
        note=common.note,
    )
    _show(common, {"overlap": rows})


@command.command("in-place")
@common_options(settings=(), cache_dir=False)
def in_place(common: Common) -> None:
    """One decode step of a tiny model over a small and a large pool: the pool must be updated in place."""
    from pagedjax.bench import in_place as bench

    _show(common, {"in-place": bench.run(note=common.note)})


@command.command("record")
@click.option("--rounds", type=_COUNT, default=7, show_default=True, help="Pairs of runs; the median counts.")
@common_options(settings=(), cache_dir=False)
def record(common: Common, rounds: int) -> None:
    """What `--record` costs: a simulation and a tiny model with and without a record, in turn."""
    from pagedjax.bench import record as bench

    _show(common, {"record": bench.run(rounds=rounds, note=common.note)})


@command.command("experts")
@click.option(
    "--rounds", type=_COUNT, default=15, show_default=True, help="Times each candidate runs; the best counts."
)
@common_options(settings=(), cache_dir=False)
def experts(common: Common, rounds: int) -> None:
    """One layer of 64 experts, 8 a token, beside a dense product of the weights of those in use."""
    from pagedjax.bench import experts as bench

    _show(common, {"experts": bench.run(rounds=rounds, note=common.note)})


@command.command("latent")
@click.option(
    "--rounds", type=_COUNT, default=5, show_default=True, help="Times each candidate runs; the best counts."
)
@common_options(settings=(), cache_dir=False)
def latent(common: Common, rounds: int) -> None:
    """Latent attention of one layer, absorbed as the engine has it, beside keys and values multiplied out first."""
    from pagedjax.bench import latent as bench

    _show(common, {"latent": bench.run(rounds=rounds, note=common.note)})


@command.command("hosts")
@click.option("--batch", type=_COUNT, default=32, show_default=True, help="Sequences of a step.")
@click.option("--context", type=_COUNT, default=512, show_default=True, help="Prompt length in tokens.")
@click.option(
    "--tokens", type=_COUNT, default=32, show_default=True, help="Tokens decoded a sequence and round."
)
@click.option(
    "--rounds", type=_COUNT, default=3, show_default=True, help="Of one process and of two, in turn."
)
@common_options(settings=(), cache_dir=False)
def hosts(common: Common, batch: int, context: int, tokens: int, rounds: int) -> None:
    """What a step costs the host on two processes beyond one and beyond an empty message; bytes of a step.

    Starts two processes of a tiny model on this machine's CPU.
    """
    from pagedjax.bench import hosts as bench

    rows = bench.run(batch=batch, context=context, tokens=tokens, rounds=rounds, note=common.note)
    _show(common, {"hosts": rows})


@command.command("cache")
@click.option("--large", is_flag=True, help="Also a pool of 1,000,000 blocks (about half a minute).")
@common_options(settings=("cache.index", "cache.policy", "cache.block_size"), cache_dir=False)
def cache(common: Common, large: bool) -> None:
    """Host time per block: look up, allocate, index, free, evict; beside a bare SHA-256 of the same bytes."""
    from pagedjax.bench import cache as bench
    from pagedjax.cache import PagedManager

    # The configured cell is measured last: a name that does not exist is refused before the first.
    wanted = common.config.cache
    PagedManager(num_blocks=2, block_size=wanted.block_size, index=wanted.index, policy=wanted.policy)
    _show(common, {"cache": bench.run(common.config, large=large, progress=common.note)})


@command.command("kernels")
@click.option(
    "--rounds", type=_COUNT, default=15, show_default=True, help="Times each candidate runs; the best counts."
)
@click.option(
    "--tune",
    type=OutputFile(),
    help="Instead, time sizes of the kernels' pieces and write the quickest to this file, for runtime.kernel_tuning.",
)
@common_options(settings=(), cache_dir=False)
def kernels(common: Common, rounds: int, tune: Path | None) -> None:
    """Decode attention of one layer beside a dense cache, a gather of everything, and a copy; what was claimed of it.

    On a machine with a GPU or TPU the same command measures its kernel beside jax's own and torch's dense attention.
    """
    from pagedjax.bench import kernels as bench

    if tune is not None:
        from pagedjax.bench import tune as tuning

        text, rows = tuning.run(rounds=rounds, progress=common.note)
        replace_text(tune, text)
        return _show(common, {"tune": rows})
    rows = bench.run(rounds=rounds, progress=common.note)
    _show(common, {"kernels": rows, "claims": bench.claims(rows)})


@command.command("fleet")
@FILE
@click.option("--config", metavar="FILE", help="TOML file of a fleet, or the name of one in configs/fleets/.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    help="Repeatable; all: every built-in one.  [default: round-robin, cache-aware, kv-overlap]",
)
@click.option(
    "--minutes", type=float, default=15.0, show_default=True, help="Of the trace's time, from its start."
)
@click.option(
    "--rounds", type=_COUNT, default=2, show_default=True, help="Interleaved rounds; the best of each counts."
)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change one setting; repeatable.")
@common_options(settings=(), cache_dir=False)
def fleet(
    common: Common,
    file: AnyPath,
    config: str | None,
    routers: tuple[str, ...],
    minutes: float,
    rounds: int,
    changes: tuple[str, ...],
) -> None:
    """CPU time of a fleet beside the sum of its instances' simulations alone, on the same requests.

    Without --config: eight instances of four H100s, the trace FILE at eight times its rate.
    """
    from itertools import takewhile

    from pagedjax.bench import fleet as bench
    from pagedjax.sim.fleet.file import read_fleet
    from pagedjax.sim.routing import ROUTERS
    from pagedjax.sim.trace import open_trace

    own = ("instance.count=8", "instance.devices=4", "instance.cache.block_size=512", "arrivals.scale=8")
    plan = read_fleet(config, [*(own if config is None else ()), *changes])
    trace = open_trace(file, encode=lambda text: list(text.encode()))
    count = sum(1 for _ in takewhile(lambda request: request.arrival_s < 60 * minutes, trace))
    if not count:
        raise click.UsageError(f"{file}: holds no request in its first {minutes:g} minutes; give more")
    chosen = list(routers or ("round-robin", "cache-aware", "kv-overlap"))
    if "all" in chosen:
        chosen = [*ROUTERS, *(name for name in chosen if name not in ROUTERS and name != "all")]
    rows = bench.run(
        trace.head(count), plan.specs(), plan.arguments(), chosen, rounds=rounds, note=common.note
    )
    _show(common, {"fleet": rows})
