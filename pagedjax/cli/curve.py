"""`pagedjax curve`: hit ratio against cache size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from pagedjax.cli.trace import announce
from pagedjax.cli.trace_options import AT_LEAST_1, FILE, QUIET, Opener, requests_bar, trace_options


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
@trace_options
@QUIET
def command(
    file: Path,
    sizes: tuple[int, ...],
    capacities: tuple[int, ...],
    policies: tuple[str, ...],
    bound: bool,
    insert: Any,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Hit ratio by block at every capacity, LRU in one pass over the trace (CSV on stdout).

    Needs at most 24 bytes of memory for each block of a prompt, and nothing for a request.
    """
    from pagedjax.sim.curve import belady_bound, lru_curve
    from pagedjax.sim.references import load_references, replay_references
    from pagedjax.sim.replay import PolicyStore

    for name in policies:
        if name == "belady":
            raise click.BadParameter("--policy belady: is no policy but a bound; give --bound instead")
        PolicyStore(1, name)  # a name that does not exist is refused before the trace is read
    trace = open_file(file)
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
