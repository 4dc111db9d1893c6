"""`pagedjax sharing`: the prefix check-up of a set of prompts."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from pagedjax.cli.trace_options import AT_LEAST_0, AT_LEAST_1, FILE, QUIET, Opener, trace_options


@click.command("sharing")
@FILE
@click.option("--block-size", "sizes", type=AT_LEAST_1, multiple=True, help="Tokens per block; repeatable.")
@click.option(
    "--kv-bytes-per-token", type=AT_LEAST_0, default=0, help="Of the model, to turn tokens into memory."
)
@click.option("--parameters", type=float, default=0.0, help="Of the model, to turn tokens into prefill work.")
@click.option(
    "--top", type=AT_LEAST_0, default=5, show_default=True, help="Groups and changing fields to show."
)
@trace_options
@QUIET
def command(
    file: Path,
    sizes: tuple[int, ...],
    kv_bytes_per_token: int,
    parameters: float,
    top: int,
    open_file: Opener,
    quiet: bool,
) -> None:
    """How much do these prompts share, where do they part, and what does it cost?

    FILE holds prompts (JSON lines with prompt, or text lines in .txt) or a token-id trace.
    """
    import numpy as np

    from pagedjax.progress import bar
    from pagedjax.sim.sharing import check_up

    if not 0 <= parameters < math.inf:
        raise click.UsageError(f"--parameters {parameters}: must be a number of weights, such as 7e9")
    trace = open_file(file)
    if trace.granularity != 1:
        raise click.UsageError(f"{file}: holds no token ids; `pagedjax trace info` counts its hits")

    def progress(items: Iterable[int], label: str, total: int) -> Iterator[int]:
        with bar(label, total, enabled=not quiet and sys.stderr.isatty()) as advance:
            for i, item in enumerate(items, 1):
                if i % 256 == 0:
                    advance(256)
                yield item

    prompts = (request.token_ids for request in trace)
    result = check_up(
        (p for p in prompts if p is not None),
        top=top,
        progress=progress,
        **({"block_sizes": sizes} if sizes else {}),
    )
    tokens, saved = result.num_tokens, result.saved_tokens
    print(
        f"{result.num_prompts:,} prompts, {tokens:,} tokens, {saved:,} ({saved / tokens:.1%}) of them a repeated prefix"
    )
    print("share of a prompt that another one begins with:")
    for percent in (10, 25, 50, 75, 90):
        print(f"  percentile {percent:<3} {np.percentile(result.shares, percent):.1%}")
    print("block size   blocks alone   blocks shared   reduction   tokens saved")
    for s in result.savings:
        print(
            f"{s.block_size:>10} {s.total_blocks:>14,} {s.total_blocks - s.shared_blocks:>15,} "
            f"{s.reduction:>10.2f}x {s.token_share:>14.1%}"
        )
    left = tokens - saved
    if kv_bytes_per_token:
        alone, shared = (n * kv_bytes_per_token / 1e9 for n in (tokens, left))
        print(f"KV memory: {alone:,.2f} GB, shared {shared:,.2f} GB")
    if parameters:
        alone, shared = (2 * parameters * n / 1e15 for n in (tokens, left))
        print(f"prefill: {alone:,.2f} PFLOP, shared {shared:,.2f} PFLOP (without attention)")
    print("prefix groups by tokens saved:")
    for g in (g for g in result.groups if g.saved_tokens):
        ways = f"then part {g.num_branches:,} ways: {g.saved_tokens:,} tokens"
        print(f"  {g.count:>6,} prompts share {g.depth:,} tokens, {ways}")
    if not result.divergences:
        print("no field that changes per request was found in front of common text")
    decode = open_file.texts.decode
    for d in result.divergences:
        examples = ", ".join(repr(decode(e)) for e in d.examples)
        print(
            f"changing field at token {d.position}, {d.num_values} values in {d.count:,} prompts, up to "
            f"{d.dynamic_tokens} tokens, after {decode(d.before)!r}: {examples}"
        )
        print(
            f"  moved to the end, the prompts would share {d.saved_if_moved:,} tokens instead of {d.saved_now:,}"
        )
