"""`pagedjax fleet`: a trace through N simulated engines behind a router."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import OutputFile, PathOrUrl, emit_json, keep_apart, note, shell
from pagedjax.cli.trace_options import AT_LEAST_1, FILE, QUIET, Opener, trace_options
from pagedjax.paths import AnyPath, Output

if TYPE_CHECKING:
    from pagedjax.report.fleet import FleetRecorder
    from pagedjax.sim.fleet import FleetResult
    from pagedjax.sim.fleet.file import FleetFile
    from pagedjax.sim.trace import Trace


@click.command("fleet")
@FILE
@click.option("--config", metavar="FILE", help="TOML file of a fleet, or the name of one in configs/fleets/.")
@click.option("--router", help="Built-in name, an installed plug-in, or module:Class.")
@click.option("--instances", type=AT_LEAST_1, help="Instances of each table of the file.  [default: 1]")
@click.option("--scale", type=float, help="Divide the trace's times by this: 8 is eight times the rate.")
@click.option(
    "--concurrency", type=AT_LEAST_1, help="Closed loop instead: so many requests under way over all."
)
@click.option("--head", type=AT_LEAST_1, help="The first so many requests of the trace.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the router's chance.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one setting; repeatable.")
@click.option("--records", type=PathOrUrl(written=True), help="Write one JSON line per request here.")
@click.option(
    "--record",
    "record_file",
    type=OutputFile(),
    help="Write the run down, step by step (docs/report.md).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@trace_options
@QUIET
def command(
    file: AnyPath,
    config: str | None,
    router: str | None,
    instances: int | None,
    scale: float | None,
    concurrency: int | None,
    head: int | None,
    seed: int | None,
    settings: tuple[str, ...],
    records: AnyPath | None,
    record_file: Path | None,
    as_json: bool,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Play the trace FILE through a fleet: real schedulers and cache managers, one virtual clock.

    docs/fleets.md lists routers and settings.
    """
    from pagedjax.sim.fleet import run_fleet
    from pagedjax.sim.fleet.file import read_fleet

    if concurrency is not None and scale is not None:
        raise click.UsageError(
            "--scale with --concurrency: a closed loop has no times to divide; leave one out"
        )
    keep_apart([("the trace", file)], {"--records": records, "--record": record_file})
    given = {
        "fleet.router": router,
        "instance.count": instances,
        "arrivals.scale": scale,
        "arrivals.kind": None if concurrency is None else "fleet",
        "arrivals.concurrency": concurrency,
        "fleet.seed": seed,
    }
    fleet = read_fleet(config, [*(f"{k}={v}" for k, v in given.items() if v is not None), *settings])
    trace = open_file(file)
    with nullcontext() if record_file is None else _recorder(record_file, trace) as observer:
        result = run_fleet(
            trace.head(head) if head else trace, fleet.specs(), observer=observer, **fleet.arguments()
        )
    if records is not None:
        _write(records, result)
        if not quiet:
            note(f"{len(result.records):,} requests in {records}")
    promise = fleet.tables["promise"]
    out = result.to_dict(ttft_limit_s=promise.ttft_s, tpot_limit_s=promise.tbt_s)
    if as_json:
        emit_json(_plain({"trace": trace.digest(), **out}))
    else:
        _show(result, out, fleet)


def _recorder(path: Path, trace: Trace) -> FleetRecorder:
    from pagedjax.report.fleet import FleetRecorder

    return FleetRecorder(path, {"trace": trace.digest(), "command": shell(["pagedjax", *sys.argv[1:]])})


def _plain(value: Any) -> Any:
    """Percentiles become strings, as JSON wants its keys."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _write(path: AnyPath, result: FleetResult) -> None:
    with Output(path) as file:
        for record in result.records:
            row = {
                "number": record.number,
                **asdict(record.times),
                "instance": record.instance,
                "decode_instance": record.decode_instance or None,
                "routed": record.reason,
                "expected_cached": record.expected,
                "fetched": dict(zip(("own_memory", "other_memory", "disk"), record.fetched)),
                "lives": record.lives,
            }
            file.write(json.dumps(row) + "\n")
        for refusal in result.refused:
            file.write(
                json.dumps({"number": refusal.number, "at_s": refusal.at_s, "refused": refusal.reason}) + "\n"
            )


def _number(value: float | None, form: str = ".3g") -> str:
    return "unknown" if value is None else format(value, form)


def _show(result: FleetResult, out: dict[str, Any], fleet: FleetFile) -> None:
    from rich.console import Console

    from pagedjax.report.tables import render

    refused = ", ".join(f"{count:,} {reason}" for reason, count in out["refused"].items()) or "none"
    print(f"requests          {out['requests']:,}, refused: {refused}, routed again: {out['rerouted']:,}")
    if result.records:
        print(
            f"rates             {out['requests_per_s']:.3g} requests/s, {out['tokens_per_s']:,.0f} output tokens/s, "
            f"goodput {out['goodput_per_s']:.3g}/s, over {out['span_s']:,.1f} s"
        )
        for name, label in (("ttft_s", "first token"), ("latency_s", "latency")):
            print(f"{label:<17} " + ", ".join(f"p{p} {_number(v)} s" for p, v in out[name].items()))
    print(f"{'between tokens':<17} " + ", ".join(f"p{p} {_number(v)} s" for p, v in out["tbt_s"].items()))
    print(f"hit rate          {_number(out['hit_by_token'], '.4f')} of prompt tokens")
    print(
        f"imbalance         {_number(out['imbalance_busy'])} of busy time, {_number(out['imbalance_requests'])} of "
        "requests (largest over mean)"
    )
    fetched = ", ".join(f"{k.replace('_', ' ')} {v:,}" for k, v in out["fetched_tokens"].items())
    if fleet.tables["store"].memory_bytes:
        print(f"fetched tokens    {fetched}")
    print(
        f"moved             {out['sent_bytes'] / 1e9:,.2f} GB, lost with instances {out['lost_bytes'] / 1e9:,.2f} GB"
    )
    rows = [
        {
            "instance": t["name"],
            "role": t["role"],
            "routed": t["routed"],
            "hit rate": t["hit_by_token"],
            "busy": t["busy_s"] / t["alive_s"] if t["alive_s"] else None,
            "alive s": t["alive_s"],
            "steps": t["steps"],
            "peak queue": t["peak_queue"],
            "GB out": t["sent_bytes"] / 1e9,
            "GB in": t["received_bytes"] / 1e9,
        }
        for t in out["instances"]
    ]
    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(render("instances", rows))
