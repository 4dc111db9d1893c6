"""`pagedjax curve`: hit ratio against cache size, time, group or requests in flight, as CSV and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import OutputFile, note
from pagedjax.cli.serving import POSITIVE
from pagedjax.cli.trace import load_announced
from pagedjax.cli.trace_options import AT_LEAST_1, FILE, QUIET, Opener, requests_bar, trace_options
from pagedjax.paths import AnyPath

if TYPE_CHECKING:
    from pagedjax.sim.trace import Trace

Rows = list[dict[str, Any]]
_MOST_BARS = 30
_SHARES = (0.01, 0.05, *(k / 10 for k in range(1, 10)), 0.95, 0.99, 1.0)


@click.command("curve")
@FILE
@click.option(
    "--block-size",
    "sizes",
    type=AT_LEAST_1,
    multiple=True,
    help="Tokens per block; repeatable, one reading each.  [default: the trace's, or 16]",
)
@click.option(
    "--capacity",
    "capacities",
    type=AT_LEAST_1,
    multiple=True,
    help="Blocks; repeatable.  [default: powers of two]",
)
@click.option("--policy", "policies", multiple=True, help="Another policy to replay beside LRU; repeatable.")
@click.option("--bound", is_flag=True, help="Add Belady's bound for block requests.")
@click.option("--insert", type=click.Choice(["prompt", "prompt+output"]), default="prompt", show_default=True)
@click.option(
    "--window",
    type=POSITIVE,
    help="By time windows of so many seconds instead.",
)
@click.option("--by-group", is_flag=True, help="By category or user instead, where the file names them.")
@click.option(
    "--reuse-times", is_flag=True, help="Seconds between two uses of a block instead, as a distribution."
)
@click.option(
    "--in-flight",
    "in_flight",
    type=AT_LEAST_1,
    multiple=True,
    help="With so many requests at once instead, simulated; repeatable; needs --capacity.",
)
@click.option("--plot", type=OutputFile(), help="Draw it, too: .png, .svg or .pdf.")
@trace_options
@QUIET
def command(
    file: AnyPath,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    policies: tuple[str, ...],
    bound: bool,
    insert: Any,
    window: float | None,
    by_group: bool,
    reuse_times: bool,
    in_flight: tuple[int, ...],
    plot: Path | None,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Hit ratio by block at every capacity, LRU in one pass over the trace (CSV on stdout).

    With --window or --by-group: hit ratio by token of each part of the requests, in one LRU cache for all.
    With --in-flight: hits by token of an engine that has so many requests at once (a closed loop on the clock of
    `simulate`); what requests ask of the cache counts there.

    Needs at most 24 bytes of memory for each block of a prompt, and nothing for a request.
    """
    from pagedjax.lab.plots import check_plot
    from pagedjax.sim.replay import PolicyStore

    for name in policies:
        if name == "belady":
            raise click.BadParameter("--policy belady: is no policy but a bound; give --bound instead")
        PolicyStore(1, name)  # a name that does not exist is refused before the trace is read
    asked = {
        "--window": window,
        "--by-group": by_group,
        "--reuse-times": reuse_times,
        "--in-flight": in_flight,
    }
    chosen = [name for name, value in asked.items() if value]
    some = policies and chosen != ["--in-flight"]
    if len(chosen) > 1 or (chosen and (some or bound or len(sizes) > 1)):
        raise click.UsageError(
            f"{chosen[0]}: stands alone: one block size, no policy, no bound, one such option"
        )
    if plot is not None:
        check_plot(plot)
    trace = open_file(file)
    if in_flight:
        if insert != "prompt":
            raise click.UsageError(
                "--insert: has no effect with --in-flight, where answers stay as in an engine"
            )
        _in_flight(trace, sizes, capacities, policies, in_flight, plot, quiet)
    elif chosen:
        _parts(trace, sizes, capacities, insert, window or 0.0, reuse_times, plot, quiet)
    else:
        _capacities(trace, sizes, capacities, policies, bound, insert, plot, quiet)


def _size(trace: Trace, sizes: tuple[int, ...]) -> int:
    return sizes[0] if sizes else trace.granularity if trace.granularity > 1 else 16


def _capacities(
    trace: Trace,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    policies: tuple[str, ...],
    bound: bool,
    insert: Any,
    plot: Path | None,
    quiet: bool,
) -> None:
    """LRU, policies and the bound at each capacity, a block size after the other."""
    from pagedjax.sim.curve import belady_bound, lru_curve
    from pagedjax.sim.references import replay_references
    from pagedjax.sim.replay import PolicyStore

    names = ["lru", "lru_by_token", *policies, *(["bound"] if bound else [])]
    drawn: Rows = []
    for number, size in enumerate(sizes or (_size(trace, sizes),)):
        refs = load_announced(trace, size, insert=insert, progress=requests_bar("read", quiet), quiet=quiet)
        if not refs.totals.requests:
            raise click.UsageError(f"{trace.name}: holds no request; give a trace with at least one")
        curve = lru_curve(refs)
        if not number:  # not before a bad file has been told
            print(",".join(["block_size", "capacity_blocks", *names]))
        distinct = max(refs.num_distinct, 1)
        for capacity in (*(capacities or [2**k for k in range(distinct.bit_length())]), math.inf):
            row = [curve.by_block(capacity), curve.by_token(capacity)]
            blocks = int(min(capacity, distinct))
            for name in policies:
                bar = requests_bar(f"{name}, {blocks} blocks", quiet)
                row.append(replay_references(refs, PolicyStore(blocks, name), progress=bar).by_block)
            if bound:
                row.append(belady_bound(refs, blocks) / max(curve.blocks, 1))
            print(",".join([str(size), str(capacity), *(f"{v:.6f}" for v in row)]))
            if capacity < math.inf:
                at = {"block_size": size, "capacity_blocks": capacity}
                drawn += [{**at, "curve": name, "hit_ratio": value} for name, value in zip(names, row)]
    panel = "block_size" if len(sizes) > 1 else ""
    _drawn(drawn, plot, x="capacity_blocks", y="hit_ratio", hue="curve", panel=panel, log=True)


def _in_flight(
    trace: Trace,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    policies: tuple[str, ...],
    counts: tuple[int, ...],
    plot: Path | None,
    quiet: bool,
) -> None:
    """Hits of an engine with so many requests at once, at each capacity: one simulation each."""
    from pagedjax.sim.trial import run_trial

    if not trace.granularity:
        raise click.UsageError(
            f"{trace.name}: holds lengths and no identity of prefixes, so its hits are unknown"
        )
    if not capacities:
        raise click.UsageError("--in-flight: needs the engine's pool; give --capacity in blocks")
    size = _size(trace, sizes)
    rows: Rows = []
    for policy in policies or ("lru",):
        for capacity in capacities:
            for count in counts:
                settings = {
                    "cache.num_blocks": capacity + 1,  # one is never handed out
                    "cache.block_size": size,
                    "cache.policy": policy,
                    "scheduler.max_num_seqs": count,
                    "in_flight": count,
                }
                bar = requests_bar(f"{policy}, {capacity} blocks, {count} at once", quiet)
                found = run_trial(trace.through(bar), settings, 0)
                kept = ("hit_by_token", "requests", "refused", "preemptions")
                row = {"block_size": size, "capacity_blocks": capacity, "policy": policy, "in_flight": count}
                rows.append(row | {name: found[name] for name in kept})
                if len(rows) == 1:
                    print(",".join(rows[0]))
                print(",".join(f"{v:.6f}" if isinstance(v, float) else str(v) for v in rows[-1].values()))
    panel = "policy" if len(policies) > 1 else ""
    _drawn(rows, plot, x="in_flight", y="hit_by_token", hue="capacity_blocks", panel=panel, log=True)


def _parts(
    trace: Trace,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    insert: Any,
    window: float,
    reuse: bool,
    plot: Path | None,
    quiet: bool,
) -> None:
    """Hits of windows or groups, or the distribution of the time between two uses."""
    from pagedjax.cli.trace import note_unheard
    from pagedjax.sim.reuse import load_timed, parts

    if (window or reuse) and not trace.timed:
        raise click.UsageError(f"{trace.name}: has no times; --by-group needs none")
    timed = load_timed(trace, _size(trace, sizes), insert=insert, progress=requests_bar("read", quiet))
    note_unheard(trace, timed.refs, quiet)
    if not timed.refs.totals.requests:
        raise click.UsageError(f"{trace.name}: holds no request; give a trace with at least one")
    if reuse:
        _reuse_times(trace, timed, plot)
        return
    if not window and timed.refs.groups is None:
        raise click.UsageError(
            f"{trace.name}: names no category or user; name the column (--column group=NAME)"
        )
    limits: list[float] = [*capacities, math.inf]
    label = "window_s" if window else "group"
    found = parts(timed, limits, window_s=window)
    print(",".join([label, "requests", "tokens", *(f"lru_{c}" for c in limits)]))
    drawn: Rows = []
    shown = found if window else sorted(found, key=lambda part: -part.tokens)[:_MOST_BARS]
    if plot is not None and len(shown) < len(found) and not quiet:
        note(f"{plot}: shows the {len(shown)} groups with most tokens of {len(found):,}")
    drawn_names = {part.name for part in shown}
    for part in found:
        ratios = [part.hit_tokens[c] / max(part.tokens, 1) for c in limits]
        name = part.name or "unnamed"
        print(",".join([_cell(name), str(part.requests), str(part.tokens), *(f"{v:.6f}" for v in ratios)]))
        at = {label: float(name) if window else name}
        if part.name in drawn_names:
            drawn += [{**at, "capacity_blocks": str(c), "hit_by_token": v} for c, v in zip(limits, ratios)]
    _drawn(drawn, plot, x=label, y="hit_by_token", hue="capacity_blocks", kind="lines" if window else "bars")


def _cell(text: str) -> str:
    """A name as a CSV cell."""
    import csv
    import io

    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([text])
    return out.getvalue()


def _reuse_times(trace: Trace, timed: Any, plot: Path | None) -> None:
    import numpy as np

    from pagedjax.sim.reuse import reuse_times

    times = reuse_times(timed)
    if not len(times):
        raise click.UsageError(f"{trace.name}: no block is used twice")

    def quantiles(shares: Any) -> Iterator[tuple[float, float]]:
        return ((float(s), float(np.quantile(times, s, method="inverted_cdf"))) for s in shares)

    print("share_of_reuses,seconds")
    for share, seconds in quantiles(_SHARES):
        print(f"{share:g},{seconds:.6g}")
    if plot is not None:
        fine = quantiles(np.arange(0, 401) / 400)
        drawn = [{"seconds": s, "share_of_reuses": share} for share, s in fine]
        log = drawn[0]["seconds"] > 0
        _drawn(drawn, plot, x="seconds", y="share_of_reuses", kind="steps", log=log)


def _drawn(rows: Rows, plot: Path | None, **how: Any) -> None:
    from pagedjax.lab.plots import small_multiples

    if plot is not None:
        small_multiples(rows, plot, **how)
