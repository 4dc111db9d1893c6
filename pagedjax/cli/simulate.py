"""`pagedjax simulate`: a trace through the real scheduler and cache manager, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pagedjax.cli.options import Common, common_options
from pagedjax.cli.serving import (
    POSITIVE,
    Serving,
    about,
    document,
    lines,
    publish,
    refuse_idle,
    serving_options,
    show,
)
from pagedjax.cli.trace_options import AT_LEAST_0, AT_LEAST_1, FILE, Opener, requests_bar, trace_options
from pagedjax.config import SIMULATED
from pagedjax.paths import AnyPath

if TYPE_CHECKING:
    from pagedjax.sim.fleet.settings import InstanceSpec
    from pagedjax.sim.metrics import RequestRecord
    from pagedjax.sim.simulator import Simulation
    from pagedjax.sim.trace import Trace

# Option → the options of which one must be there for it to have an effect; and pairs, with why not both.
_NEEDS = {"beam_gap": ("beam_width",), "share": ("find_rate",), "seed": ("rate", "beam_width")}
_ONE_RUN = "runs many simulations; write records of one, without it"
_AGAINST = {
    ("beam_width", "n"): "a beam search has one sample a request; leave --n out",
    ("in_flight", "find_rate"): "a closed loop has no rate of arrivals; leave one of them out",
    ("find_rate", "until"): "what has not ended by then would count as a broken promise; leave --until out",
    ("find_rate", "records"): _ONE_RUN,
    ("find_rate", "record_file"): _ONE_RUN,
    ("find_rate", "hash_plans"): _ONE_RUN,
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
@click.option("--beam-width", type=AT_LEAST_0, default=0, help="Beam search with drawn candidates.")
@click.option("--beam-gap", type=POSITIVE, default=1.0, help="Nats between one candidate and the next.")
@click.option("--find-rate", is_flag=True, help="Search the highest rate that keeps the promise.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="With --find-rate: of the requests that must get what was promised.",
)
@click.option("--no-skip", is_flag=True, help="Plan every step, those where nothing can happen, too.")
@serving_options
@trace_options
@common_options(
    settings=SIMULATED, cache_dir=False, scheduler__max_num_seqs=256, scheduler__token_budget=8192
)
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    file: AnyPath,
    open_file: Opener,
    serving: Serving,
    find_rate: bool,
    share: float,
    **options: Any,
) -> None:
    """Play the trace FILE through a simulated engine: its scheduler and cache manager are the real ones.

    Time is a cost model's: the model's shape on the hardware's peaks, with what steps reach of them
    (docs/experiments.md), or steps that were measured (`pagedjax calibrate`). --config and --set give the settings of
    cache and scheduler.
    """
    refuse_idle(ctx, file, _NEEDS, _AGAINST)
    if (
        ctx.get_parameter_source("reserve") is ParameterSource.COMMANDLINE
        and common.config.cache.num_blocks is not None
    ):
        raise click.UsageError(
            "--reserve: has an effect where cache.num_blocks is auto; leave one of them out"
        )
    if find_rate and not serving.promised:
        raise click.UsageError("--find-rate: needs a promise; give --ttft and --tpot in seconds")
    spec = _spec(common, options)
    trace = serving.arranged(open_file(file))
    if find_rate:
        found, shown = _search(common, trace, spec, serving, options, share), _show_rate
    else:
        found, shown = _run(common, trace, spec, serving, options), show
    publish(serving, found, shown, as_json=common.as_json)


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
    trace: Trace, spec: InstanceSpec, serving: Serving, options: dict[str, Any], **more: Any
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
        n=serving.n,
        beams=Beams(width, options["beam_gap"], serving.seed) if width else None,
        until_s=serving.until_s,
        in_flight=serving.in_flight or 0,
        hash_plans=serving.hash_plans,
        skip=not options["no_skip"],
        **more,
    )
    return result, manager


def _run(
    common: Common, trace: Trace, spec: InstanceSpec, serving: Serving, options: dict[str, Any]
) -> dict[str, Any]:
    """One simulation, as plain data."""
    tally = serving.tally()
    bar = requests_bar("simulate", common.quiet)
    shown = replace(trace, source=lambda: bar(trace.source()))

    @contextmanager
    def observe(engine: Any) -> Iterator[None]:
        from pagedjax.report.record import Recorder

        path = serving.record_file
        with nullcontext() if path is None else Recorder(path, engine, about(common, "simulated", trace)):
            yield
            if not tally.requests:  # refused: older files stay
                raise click.UsageError(
                    f"{trace.name}: no request ended: none could run, or none by --until; raise --until, "
                    "--max-model-len or the pool"
                )

    with lines(serving.records) as write:

        def keep(record: RequestRecord) -> None:
            tally.add(record)
            write(record)

        result, manager = _simulate(shown, spec, serving, options, on_record=keep, observe=observe)
    cost: Any = spec.cost
    out = document(trace, cost.hardware.name, serving, tally, result, manager)
    out["cost"] = cost.basis(spec.scheduler)
    return out


def _search(
    common: Common,
    trace: Trace,
    spec: InstanceSpec,
    serving: Serving,
    options: dict[str, Any],
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
        return _simulate(trace.faster(factor), spec, serving, options, on_record=watch)[0]

    found = find_rate(run, total, ttft_limit_s=serving.ttft, tpot_limit_s=serving.tpot, share=share)
    return {
        "trace": {"name": trace.name, "format": trace.format, "sha256": trace.digest()},
        "promise": {
            "ttft_s": None if serving.ttft == math.inf else serving.ttft,
            "tpot_s": None if serving.tpot == math.inf else serving.tpot,
            "share": share,
        },
        "keeps": "none" if not found.factor else "all" if found.bound == "most" else "some",
        "bound": found.bound or None,
        "rate": found.factor * total / last or None,
        "factor": found.factor or None,
        "tried": [{"rate": f * total / last, "kept": kept} for f, kept in found.tried],
    }


def _show_rate(out: dict[str, Any]) -> None:
    tried = [t["rate"] for t in out["tried"]]
    bounds = {
        "least": "2^-10 times the trace's rate, where the search ends",
        "most": "2^10 times the trace's rate, where the search ends: faster arrivals were not tried",
        "runs": f"{len(tried)} runs, where the search ends: others were not tried",
    }
    if out["rate"]:
        print(f"{out['rate']:.4g} requests/s ({out['factor']:.4g} times the trace's) keep the promise")
    else:
        print(f"no rate tried keeps the promise, down to {min(tried):.4g} requests/s")
    if out["bound"]:
        print(f"bound             {out['bound']}: {bounds[out['bound']]}")
