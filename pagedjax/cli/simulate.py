"""`pagedjax simulate`: a trace through the real scheduler and cache manager, on a virtual clock."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pagedjax.cli.options import Common, PathOrUrl, common_options, emit_json
from pagedjax.cli.trace_options import AT_LEAST_0, AT_LEAST_1, FILE, Opener, requests_bar, trace_options
from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.paths import AnyPath

if TYPE_CHECKING:
    from pagedjax.sim.fleet.settings import InstanceSpec
    from pagedjax.sim.metrics import RequestRecord, Tally
    from pagedjax.sim.simulator import Simulation
    from pagedjax.sim.trace import Trace

# Of the device alone, or of real arrays: the cost model knows nothing of them.
_IDLE = ("memory_bytes", "dtype", "hash", "window_groups")
_SETTINGS = (
    *(f"cache.{f.name}" for f in fields(CacheConfig) if f.name not in _IDLE),
    *(f"scheduler.{f.name}" for f in fields(SchedulerConfig)),
)


class _Positive(click.FloatRange):
    """A number above 0; nan, which no comparison refuses, is none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail("nan is no number", param, ctx)
        return number


_POSITIVE = _Positive(min=0, min_open=True)
# Option → the options of which one must be there for it to have an effect.
_NEEDS = {
    "burst": ("rate",),
    "beam_gap": ("beam_width",),
    "share": ("find_rate",),
    "seed": ("rate", "beam_width"),
}
# Pairs of which one takes the other's effect away, and why.
_AGAINST = {
    ("rate", "rate_scale"): "--rate draws new arrivals, --rate-scale keeps the file's; give one of them",
    ("beam_width", "n"): "a beam search has one sample a request; leave --n out",
    ("in_flight", "rate"): "a closed loop has no rate of arrivals; leave one of them out",
    ("in_flight", "rate_scale"): "a closed loop has no rate of arrivals; leave one of them out",
    ("in_flight", "find_rate"): "a closed loop has no rate of arrivals; leave one of them out",
    ("find_rate", "until"): "what has not ended by then would count as a broken promise; leave --until out",
    ("find_rate", "records"): "runs many simulations; write records of one, without it",
    ("find_rate", "record_file"): "runs many simulations; write records of one, without it",
    ("find_rate", "hash_plans"): "runs many simulations; write records of one, without it",
}


@click.command("simulate")
@FILE
@click.option(
    "--shape", default="llama-3-8b", show_default=True, help="A config.json, or a name in configs/shapes/."
)
@click.option(
    "--hardware", default="h100-80gb", show_default=True, help="A TOML file, or a name in configs/hardware/."
)
@click.option(
    "--devices", type=AT_LEAST_1, default=1, show_default=True, help="A slice of so many, with its links."
)
@click.option("--free-links", is_flag=True, help="The slice's links take no time: an upper bound.")
@click.option(
    "--reserve",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Share of the memory that is neither weights nor KV, where cache.num_blocks is auto.",
)
@click.option("--max-model-len", type=AT_LEAST_1, default=131_072, show_default=True, help="In tokens.")
@click.option("--n", type=AT_LEAST_1, default=1, show_default=True, help="Samples per request.")
@click.option("--beam-width", type=AT_LEAST_0, default=0, help="Beam search with drawn candidates.")
@click.option("--beam-gap", type=_POSITIVE, default=1.0, help="Nats between one candidate and the next.")
@click.option("--rate", type=_POSITIVE, help="New arrivals: Poisson, so many requests a second.")
@click.option("--burst", type=AT_LEAST_1, default=1, help="With --rate: in groups of this size.")
@click.option("--rate-scale", type=_POSITIVE, help="The file's own arrivals, so many times as fast.")
@click.option(
    "--in-flight",
    type=AT_LEAST_1,
    help="A closed loop instead: so many requests at once, whatever their times.",
)
@click.option("--seed", type=AT_LEAST_0, default=0, show_default=True, help="Of arrivals and candidates.")
@click.option("--head", type=AT_LEAST_1, help="The first so many requests.")
@click.option(
    "--until", type=_POSITIVE, help="Stop the clock then, in seconds; what still runs is not counted."
)
@click.option("--ttft", type=_POSITIVE, default=math.inf, help="Promised seconds to the first token.")
@click.option("--tpot", type=_POSITIVE, default=math.inf, help="Promised seconds per token after it.")
@click.option("--find-rate", is_flag=True, help="Search the highest rate that keeps the promise.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="With --find-rate: of the requests that must get what was promised.",
)
@click.option("--no-skip", is_flag=True, help="Plan every step, those where nothing can happen, too.")
@click.option("--hash-plans", is_flag=True, help="Print a hash of all plans (and plan every step).")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what is printed to a file, too, as JSON.",
)
@click.option("--records", type=PathOrUrl(), help="Write one JSON line per request.")
@click.option(
    "--record",
    "record_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the run down, step by step.",
)
@trace_options
@common_options(
    settings=_SETTINGS, cache_dir=False, scheduler__max_num_seqs=256, scheduler__token_budget=8192
)
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    file: AnyPath,
    open_file: Opener,
    rate: float | None,
    burst: int,
    rate_scale: float | None,
    seed: int,
    head: int | None,
    ttft: float,
    tpot: float,
    find_rate: bool,
    share: float,
    out: Path | None,
    records: AnyPath | None,
    record_file: Path | None,
    **options: Any,
) -> None:
    """Play the trace FILE through a simulated engine: its scheduler and cache manager are the real ones.

    Time is a cost model's: the model's shape on the hardware's peaks, with what steps reach of them
    (docs/experiments.md). --config and --set give the settings of cache and scheduler.
    """
    _refuse_idle(ctx, common, file)
    if find_rate and min(ttft, tpot) == math.inf:
        raise click.UsageError("--find-rate: needs a promise; give --ttft and --tpot in seconds")
    spec = _spec(common, options)
    trace = open_file(file)
    trace = trace if head is None else trace.head(head)
    if rate is not None:
        trace = trace.with_arrivals(rate, seed=seed, burst=burst)
    if rate_scale is not None:
        trace = trace.faster(rate_scale)
    if find_rate:
        found = _search(common, trace, spec, seed, options, ttft, tpot, share)
    else:
        found = _run(common, trace, spec, seed, options, ttft, tpot, records, record_file)
    if out is not None:
        out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if common.as_json:
        emit_json(found)
    else:
        (_show_rate if find_rate else _show)(found)


def _refuse_idle(ctx: click.Context, common: Common, file: AnyPath) -> None:
    """Refuse options that were typed and have no effect, and an output that is the trace."""
    typed = {
        p.name: p.opts[0]
        for p in ctx.command.params
        if p.name is not None and ctx.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }
    for name, needed in _NEEDS.items():
        if name in typed and typed.keys().isdisjoint(needed):
            others = " or ".join(f"--{other.replace('_', '-')}" for other in needed)
            raise click.UsageError(f"{typed[name]}: has an effect with {others} only; leave it out")
    for (first, second), why in _AGAINST.items():
        if first in typed and second in typed:
            raise click.UsageError(f"{typed[first]} with {typed[second]}: {why}")
    if "reserve" in typed and common.config.cache.num_blocks is not None:
        raise click.UsageError(
            "--reserve: has an effect where cache.num_blocks is auto; leave one of them out"
        )
    for name in ("out", "records", "record_file"):
        path = ctx.params.get(name)
        local = isinstance(path, Path) and isinstance(file, Path) and path.exists()
        if path is not None and (path.samefile(file) if local else path == file):
            raise click.UsageError(f"{typed[name]} {path}: is the trace itself; name another file")


def _spec(common: Common, options: dict[str, Any]) -> InstanceSpec:
    """What is simulated, as one instance of a fleet has it."""
    from pagedjax.sim.fleet.file import InstanceTable

    names = ("hardware", "devices", "free_links", "shape", "max_model_len", "reserve")
    table = InstanceTable(
        cache=common.config.cache,
        scheduler=common.config.scheduler,
        **{name: options.pop(name) for name in names},
    )
    (spec,) = table.specs()
    return spec


def _simulate(
    trace: Trace, spec: InstanceSpec, seed: int, options: dict[str, Any], **more: Any
) -> tuple[Simulation, Any]:
    """One run, and its manager."""
    from pagedjax.sim.beams import Beams
    from pagedjax.sim.simulator import simulate

    width = options["beam_width"]
    manager = spec.manager(None)
    result = simulate(
        trace,
        manager,
        spec.cost,
        spec.scheduler,
        max_model_len=spec.max_model_len,
        n=options["n"],
        beams=Beams(width, options["beam_gap"], seed) if width else None,
        until_s=options["until"] or math.inf,
        in_flight=options["in_flight"] or 0,
        hash_plans=options["hash_plans"],
        skip=not options["no_skip"],
        **more,
    )
    return result, manager


def _run(
    common: Common,
    trace: Trace,
    spec: InstanceSpec,
    seed: int,
    options: dict[str, Any],
    ttft: float,
    tpot: float,
    records: AnyPath | None,
    record_file: Path | None,
) -> dict[str, Any]:
    """One simulation, as plain data."""
    from dataclasses import replace

    from pagedjax.sim.metrics import Tally

    tally = Tally(ttft_limit_s=ttft, tpot_limit_s=tpot)
    bar = requests_bar("simulate", common.quiet)
    shown = replace(trace, source=lambda: bar(trace.source()))
    about = {
        "kind": "simulated",
        "command": shlex.join(["pagedjax", *sys.argv[1:]]),
        "trace": trace.digest(),
        "settings": common.config.to_dict(),
    }

    def observe(engine: Any) -> Any:
        from pagedjax.report.record import Recorder

        return Recorder(str(record_file), engine, about)

    with _lines(records) as write:

        def keep(record: RequestRecord) -> None:
            tally.add(record)
            write(record)

        result, manager = _simulate(
            shown, spec, seed, options, on_record=keep, observe=observe if record_file is not None else None
        )
    if not tally.requests:
        raise click.UsageError(
            f"{trace.name}: no request ended ({result.refused:,} could never run); raise --until, --max-model-len "
            "or the pool"
        )
    return _document(trace, spec, tally, result, manager, ttft, tpot)


@contextmanager
def _lines(path: AnyPath | None) -> Iterator[Callable[[RequestRecord], None]]:
    """A function that writes one record as a JSON line; nothing where there is no file."""
    if path is None:
        yield lambda record: None
        return
    with path.open("w", encoding="utf-8") as file:
        yield lambda record: print(json.dumps(asdict(record)), file=file)


def _document(
    trace: Trace, spec: InstanceSpec, tally: Tally, result: Simulation, manager: Any, ttft: float, tpot: float
) -> dict[str, Any]:
    """Everything a run says, as plain data; what is unknown is None."""
    summary = asdict(tally.summary())
    times = {
        name: {f"p{p}": v for p, v in summary.pop(name).items()}
        for name in ("queue_s", "prefill_s", "ttft_s", "tpot_s", "latency_s")
    }
    promised = min(ttft, tpot) < math.inf
    known = trace.granularity > 0
    cost: Any = spec.cost
    reasons = dict(getattr(manager.stats, "miss_reasons", {}))
    return {
        "trace": {"name": trace.name, "format": trace.format, "sha256": trace.digest()},
        "hardware": cost.hardware.name,
        "blocks": manager.num_usable,
        "block_size": manager.block_size,
        **summary,
        **times,
        "goodput": summary["goodput"] if promised else None,
        "good_share": tally.good / tally.requests if promised else None,
        "match_stopped": {str(k): v for k, v in reasons.items()} if known else None,
        "ended": dict(tally.reasons),
        "refused": result.refused,
        "swaps": result.num_swaps,
        "steps": result.num_steps,
        "busy_s": result.busy_s,
        "batch": result.batch,
        "pool_held": result.held,
        "pool_held_most": result.most_held,
        "plan_hash": result.plan_hash or None,
    }


def _show(out: dict[str, Any]) -> None:
    ended = ", ".join(f"{count:,} {reason}" for reason, count in out["ended"].items())
    print(f"engine            {out['hardware']}, {out['blocks']:,} blocks of {out['block_size']} tokens")
    print(f"requests          {out['requests']:,} ended ({ended}), {out['refused']:,} refused")
    print(
        f"rates             {out['requests_per_s']:.3g} requests/s, {out['tokens_per_s']:,.0f} output tokens/s over "
        f"{out['span_s']:,.1f} s"
    )
    labels = {"queue_s": "waiting", "ttft_s": "first token", "tpot_s": "per token", "latency_s": "latency"}
    for name, label in labels.items():
        print(f"{label:<17} " + ", ".join(f"{p} {v:.4g} s" for p, v in out[name].items()))
    if out["goodput"] is not None:
        print(f"goodput           {out['goodput']:.3g} requests/s, {out['good_share']:.1%} of the requests")
    if out["hit_by_token"] is None:
        print("hit rate          unknown: the file says nothing of which prefixes are equal, so none were")
    else:
        stopped = ", ".join(f"{reason} {count:,}" for reason, count in out["match_stopped"].items())
        print(
            f"hit rate          {out['hit_by_token']:.4f} of prompt tokens; matches stopped: {stopped or 'none'}"
        )
    print(f"preemptions       {out['preemptions']:,}, of which swapped {out['swaps']:,}")
    print(
        f"batch             {out['batch']:.1f} sequences over {out['busy_s']:,.1f} busy s, {out['steps']:,} steps"
    )
    print(f"pool              {out['pool_held']:.1%} held, {out['pool_held_most']:.1%} at most")
    if out["plan_hash"]:
        print(f"plans             sha256 {out['plan_hash']}")


def _search(
    common: Common,
    trace: Trace,
    spec: InstanceSpec,
    seed: int,
    options: dict[str, Any],
    ttft: float,
    tpot: float,
    share: float,
) -> dict[str, Any]:
    """What a search found, in requests a second."""
    from pagedjax.sim.rates import Watch, find_rate

    total, last = 0, 0.0
    for request in requests_bar("count", common.quiet)(trace):
        total, last = total + 1, request.arrival_s
    if not trace.timed or not last:
        raise click.UsageError(f"{trace.name}: all requests arrive at once; draw arrivals with --rate first")

    def run(factor: float, watch: Watch) -> Simulation:
        common.note(f"trying {factor * total / last:.4g} requests/s")
        return _simulate(trace.faster(factor), spec, seed, options, on_record=watch)[0]

    found = find_rate(run, total, ttft_limit_s=ttft, tpot_limit_s=tpot, share=share)
    return {
        "trace": {"name": trace.name, "format": trace.format, "sha256": trace.digest()},
        "promise": {
            "ttft_s": None if ttft == math.inf else ttft,
            "tpot_s": None if tpot == math.inf else tpot,
            "share": share,
        },
        "keeps": "none" if not found.factor else "all" if found.factor == math.inf else "some",
        "rate": found.factor * total / last if 0 < found.factor < math.inf else None,
        "factor": found.factor if 0 < found.factor < math.inf else None,
        "tried": [{"rate": f * total / last, "kept": kept} for f, kept in found.tried],
    }


def _show_rate(out: dict[str, Any]) -> None:
    if out["keeps"] == "some":
        print(f"{out['rate']:.4g} requests/s ({out['factor']:.4g} times the trace's) keep the promise")
    elif out["keeps"] == "all":
        print("every rate keeps the promise, even all requests at once")
    else:
        print("no rate keeps the promise: a request alone misses it")
