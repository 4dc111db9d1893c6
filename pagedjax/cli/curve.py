"""`pagedjax curve`: hit ratio against cache size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.trace import announce
from pagedjax.cli.trace_options import AT_LEAST_1, FILE, QUIET, Opener, requests_bar, trace_options

if TYPE_CHECKING:
    from pagedjax.sim.trace import Trace


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
    type=click.FloatRange(min=0, min_open=True),
    help="By time windows of so many seconds instead.",
)
@click.option("--by-group", is_flag=True, help="By category or user instead, where the file names them.")
@click.option(
    "--reuse-times", is_flag=True, help="Seconds between two uses of a block instead, as a distribution."
)
@trace_options
@QUIET
def command(
    file: Path,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    policies: tuple[str, ...],
    bound: bool,
    insert: Any,
    window: float | None,
    by_group: bool,
    reuse_times: bool,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Hit ratio by block at every capacity, LRU in one pass over the trace (CSV on stdout).

    With --window or --by-group: hit ratio by token of each part of the requests, in one LRU cache for all.

    Needs at most 24 bytes of memory for each block of a prompt, and nothing for a request.
    """
    from pagedjax.sim.curve import belady_bound, lru_curve
    from pagedjax.sim.references import load_references, replay_references
    from pagedjax.sim.replay import PolicyStore

    for name in policies:
        if name == "belady":
            raise click.BadParameter("--policy belady: is no policy but a bound; give --bound instead")
        PolicyStore(1, name)  # a name that does not exist is refused before the trace is read
    asked = {"--window": window, "--by-group": by_group, "--reuse-times": reuse_times}
    chosen_parts = [name for name, value in asked.items() if value]
    if len(chosen_parts) > 1 or (chosen_parts and (policies or bound or len(sizes) > 1)):
        raise click.UsageError(
            f"{chosen_parts[0]}: stands alone: one block size, no policy, no bound, one such option"
        )
    trace = open_file(file)
    if chosen_parts:
        _parts(trace, sizes, capacities, insert, window or 0.0, reuse_times, quiet)
        return
    header = [
        "block_size",
        "capacity_blocks",
        "lru",
        "lru_by_token",
        *policies,
        *(["bound"] if bound else []),
    ]
    for number, size in enumerate(sizes or ((trace.granularity if trace.granularity > 1 else 16),)):
        refs = load_references(trace, size, insert=insert, progress=requests_bar("read", quiet))
        announce(len(refs.keys), quiet)
        curve = lru_curve(refs)
        if not number:  # not before a bad file has been told
            print(",".join(header))
        chosen: list[float] = [*capacities] or [2**k for k in range(max(refs.num_distinct, 1).bit_length())]
        for capacity in (*chosen, math.inf):
            row = [curve.by_block(capacity), curve.by_token(capacity)]
            blocks = int(min(capacity, max(refs.num_distinct, 1)))
            for name in policies:
                bar = requests_bar(f"{name}, {blocks} blocks", quiet)
                row.append(replay_references(refs, PolicyStore(blocks, name), progress=bar).by_block)
            if bound:
                row.append(belady_bound(refs, blocks) / max(curve.blocks, 1))
            print(",".join([str(size), str(capacity), *(f"{v:.6f}" for v in row)]))


def _parts(
    trace: Trace,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    insert: Any,
    window: float,
    reuse: bool,
    quiet: bool,
) -> None:
    """Hits of windows or groups, or the distribution of the time between two uses."""
    import numpy as np

    from pagedjax.sim.reuse import load_timed, parts, reuse_times

    if (window or reuse) and not trace.timed:
        raise click.UsageError(f"{trace.name}: has no times; --by-group needs none")
    size = sizes[0] if sizes else trace.granularity if trace.granularity > 1 else 16
    timed = load_timed(trace, size, insert=insert, progress=requests_bar("read", quiet))
    if reuse:
        times = reuse_times(timed)
        if not len(times):
            raise click.UsageError(f"{trace.name}: no block is used twice")
        print("share_of_reuses,seconds")
        for share in (0.01, 0.05, *(k / 10 for k in range(1, 10)), 0.95, 0.99, 1.0):
            print(f"{share:g},{float(np.quantile(times, share, method='inverted_cdf')):.6g}")
        return
    if not window and not any(timed.names):
        raise click.UsageError(
            f"{trace.name}: names no category or user; name the column (--column group=NAME)"
        )
    limits: list[float] = [*capacities, math.inf]
    print(",".join(["window_s" if window else "group", "requests", "tokens", *(f"lru_{c}" for c in limits)]))
    for part in parts(timed, limits, window_s=window):
        ratios = (f"{part.hit_tokens[c] / max(part.tokens, 1):.6f}" for c in limits)
        print(",".join([part.name or "unnamed", str(part.requests), str(part.tokens), *ratios]))
