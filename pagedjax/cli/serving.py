"""What `simulate` and `run` share: the options of arrivals and promises, and the report of a served trace."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pagedjax.cli.options import Common, OutputFile, PathOrUrl, emit_json, json_text, keep_apart, shell
from pagedjax.cli.trace_options import AT_LEAST_0, AT_LEAST_1
from pagedjax.paths import AnyPath, Output, replace_text

if TYPE_CHECKING:
    from pagedjax.sim.metrics import RequestRecord, Tally
    from pagedjax.sim.simulator import Simulation
    from pagedjax.sim.trace import Trace


class _Positive(click.FloatRange):
    """A number above 0; nan, which no comparison refuses, is none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail("nan is no number", param, ctx)
        return number


POSITIVE = _Positive(min=0, min_open=True)
OUT_FILE = OutputFile()
# Option → the options of which one must be there for it to have an effect.
_NEEDS = {"burst": ("rate",)}
# Pairs of which one takes the other's effect away, and why.
_AGAINST = {
    ("rate", "rate_scale"): "--rate draws new arrivals, --rate-scale keeps the file's; give one of them",
    ("in_flight", "rate"): "a closed loop has no rate of arrivals; leave one of them out",
    ("in_flight", "rate_scale"): "a closed loop has no rate of arrivals; leave one of them out",
}
TIMES = {"queue_s": "waiting", "ttft_s": "first token", "tpot_s": "per token", "latency_s": "latency"}


@dataclass(frozen=True)
class Serving:
    """How a trace is served; each field is the option of its name."""

    n: int
    rate: float | None
    burst: int
    rate_scale: float | None
    in_flight: int | None
    seed: int
    head: int | None
    until: float | None
    ttft: float
    tpot: float
    hash_plans: bool
    out: Path | None
    records: AnyPath | None
    record_file: Path | None

    @property
    def promised(self) -> bool:
        """Users were promised something."""
        return min(self.ttft, self.tpot) < math.inf

    @property
    def until_s(self) -> float:
        """When the clock stops."""
        return self.until or math.inf

    def arranged(self, trace: Trace) -> Trace:
        """The part of a trace that was asked for, at its times."""
        trace = trace if self.head is None else trace.head(self.head)
        if self.rate is not None:
            trace = trace.with_arrivals(self.rate, seed=self.seed, burst=self.burst)
        return trace if self.rate_scale is None else trace.faster(self.rate_scale)

    def tally(self) -> Tally:
        """Counts records under the promise."""
        from pagedjax.sim.metrics import Tally

        return Tally(ttft_limit_s=self.ttft, tpot_limit_s=self.tpot)


_OPTIONS = (
    click.option("--n", type=AT_LEAST_1, default=1, show_default=True, help="Samples per request."),
    click.option("--rate", type=POSITIVE, help="New arrivals: Poisson, so many requests a second."),
    click.option("--burst", type=AT_LEAST_1, default=1, help="With --rate: in groups of this size."),
    click.option("--rate-scale", type=POSITIVE, help="The file's own arrivals, so many times as fast."),
    click.option(
        "--in-flight",
        type=AT_LEAST_1,
        help="A closed loop instead: so many requests at once, whatever their times.",
    ),
    click.option(
        "--seed",
        type=AT_LEAST_0,
        default=0,
        show_default=True,
        help="Of arrivals and whatever else is drawn.",
    ),
    click.option("--head", type=AT_LEAST_1, help="The first so many requests."),
    click.option(
        "--until", type=POSITIVE, help="Stop the clock then, in seconds; what still runs is not counted."
    ),
    click.option("--ttft", type=POSITIVE, default=math.inf, help="Promised seconds to the first token."),
    click.option("--tpot", type=POSITIVE, default=math.inf, help="Promised seconds per token after it."),
    click.option("--hash-plans", is_flag=True, help="Print a hash of all plans (and plan every step)."),
    click.option("--out", type=OUT_FILE, help="Write what is printed to a file, too, as JSON."),
    click.option("--records", type=PathOrUrl(written=True), help="Write one JSON line per request."),
    click.option("--record", "record_file", type=OUT_FILE, help="Write the run down, step by step."),
)


def serving_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; it gets a `Serving`, `serving`, in their place."""
    names = [field.name for field in fields(Serving)]

    @functools.wraps(function)
    def wrapped(*args: Any, **given: Any) -> Any:
        return function(*args, serving=Serving(**{name: given.pop(name) for name in names}), **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def refuse_idle(
    ctx: click.Context,
    file: AnyPath,
    needs: Mapping[str, tuple[str, ...]],
    against: Mapping[tuple[str, str], str],
) -> None:
    """Refuse options that were typed and have no effect, and an output that is the trace.

    Args:
        ctx: Of the command.
        file: The trace.
        needs: More of `_NEEDS` that the command has.
        against: More of `_AGAINST`.
    """
    typed = {
        p.name: p.opts[0]
        for p in ctx.command.params
        if p.name is not None and ctx.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }
    for name, needed in {**_NEEDS, **needs}.items():
        if name in typed and typed.keys().isdisjoint(needed):
            others = " or ".join(f"--{other.replace('_', '-')}" for other in needed)
            raise click.UsageError(f"{typed[name]}: has an effect with {others} only; leave it out")
    for (first, second), why in {**_AGAINST, **against}.items():
        if first in typed and second in typed:
            raise click.UsageError(f"{typed[first]} with {typed[second]}: {why}")
    written = {typed[name]: ctx.params[name] for name in ("out", "records", "record_file") if name in typed}
    keep_apart([("the trace", file)], written)


@contextmanager
def lines(path: AnyPath | None) -> Iterator[Callable[[RequestRecord], None]]:
    """A function that writes one record as a JSON line; nothing where there is no file.

    An older file goes with the first record, or when the block ends without an exception.
    """
    if path is None:
        yield lambda record: None
        return
    with Output(path) as file:
        yield lambda record: file.write(json.dumps(asdict(record)) + "\n")


def document(
    trace: Trace, engine: str, serving: Serving, tally: Tally, result: Simulation, manager: Any
) -> dict[str, Any]:
    """Everything a run says, as plain data; what is unknown is None.

    Args:
        trace: What was served.
        engine: By what.
        serving: As asked for.
        tally: Every request that ended.
        result: Totals.
        manager: Of the run, for its pool and why its matches stopped.
    """
    summary = asdict(tally.summary())
    times = {
        name: {f"p{p}": v for p, v in summary.pop(name).items()}
        for name in ("queue_s", "prefill_s", "ttft_s", "tpot_s", "latency_s")
    }
    known = trace.granularity > 0
    reasons = dict(getattr(manager.stats, "miss_reasons", {}))
    return {
        "trace": {"name": trace.name, "format": trace.format, "sha256": trace.digest()},
        "hardware": engine,
        "blocks": manager.num_usable,
        "block_size": manager.block_size,
        **summary,
        **times,
        "goodput": summary["goodput"] if serving.promised else None,
        "good_share": tally.good / tally.requests if serving.promised else None,
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


def show(out: dict[str, Any]) -> None:
    """Print a `document` for people."""
    ended = ", ".join(f"{count:,} {reason}" for reason, count in out["ended"].items())
    print(f"engine            {out['hardware']}, {out['blocks']:,} blocks of {out['block_size']} tokens")
    if out.get("cost"):
        print(f"step times        {out['cost']}")
    print(f"requests          {out['requests']:,} ended ({ended}), {out['refused']:,} refused")
    print(
        f"rates             {out['requests_per_s']:.3g} requests/s, {out['tokens_per_s']:,.0f} output tokens/s over "
        f"{out['span_s']:,.1f} s"
    )
    for name, label in TIMES.items():
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


def publish(
    serving: Serving, found: dict[str, Any], shown: Callable[[dict[str, Any]], None], *, as_json: bool
) -> None:
    """Print what was found, for people or as JSON, and write it down where that was asked for."""
    if serving.out is not None:
        replace_text(serving.out, json_text(found) + "\n")
    if as_json:
        emit_json(found)
    else:
        shown(found)


def about(common: Common, kind: str, trace: Trace) -> dict[str, Any]:
    """The first frame of a record."""
    return {
        "kind": kind,
        "command": shell(["pagedjax", *sys.argv[1:]]),
        "trace": trace.digest(),
        "settings": common.config.to_dict(),
    }
