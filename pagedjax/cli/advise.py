"""`pagedjax advise`: which block size, pool, policy and prompt; each with the command that proves it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import OutputFile, emit_json, keep_apart, note, shell
from pagedjax.cli.trace import note_of
from pagedjax.cli.trace_options import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    QUIET,
    Opener,
    requests_bar,
    trace_options,
)
from pagedjax.paths import AnyPath

if TYPE_CHECKING:
    from pagedjax.sim.advice import Advice
    from pagedjax.sim.sharing import Checkup
    from pagedjax.sim.trace import Trace


@click.command("advise")
@FILE
@click.option(
    "--block-size",
    "sizes",
    type=AT_LEAST_1,
    multiple=True,
    help="Tokens per block; repeatable, pools and policies are those of the first.  [default: 16 to 256]",
)
@click.option(
    "--capacity", type=AT_LEAST_1, help="Blocks to compare policies at.  [default: half of LRU's 95 %]"
)
@click.option("--policy", "policies", multiple=True, help="To replay beside LRU; repeatable.  [default: all]")
@click.option("--insert", type=click.Choice(["prompt", "prompt+output"]), default="prompt", show_default=True)
@click.option(
    "--kv-bytes-per-token", type=AT_LEAST_0, default=0, help="Of the model, to turn tokens into memory."
)
@click.option("--parameters", type=float, default=0.0, help="Of the model, to turn tokens into prefill work.")
@click.option(
    "--top", type=AT_LEAST_0, default=5, show_default=True, help="Groups and changing fields to show."
)
@click.option(
    "--moved",
    type=OutputFile(),
    help="Write the trace with the fields moved to the end, as token ids, to prove it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@trace_options
@QUIET
def command(
    file: AnyPath,
    sizes: tuple[int, ...],
    capacity: int | None,
    policies: tuple[str, ...],
    insert: Any,
    kv_bytes_per_token: int,
    parameters: float,
    top: int,
    moved: Path | None,
    as_json: bool,
    open_file: Opener,
    quiet: bool,
) -> None:
    """What should the cache be like for the trace FILE, and what should change in its prompts?

    Counted by replay: a block is found if an earlier request left it, whatever its time.
    """
    from pagedjax.sim.advice import advise
    from pagedjax.sim.replay import PolicyStore

    if not 0 <= parameters < math.inf:
        raise click.UsageError(f"--parameters {parameters}: must be a number of weights, such as 7e9")
    keep_apart([("the trace", file)], {"--moved": moved})
    for name in policies:
        if name == "belady":
            raise click.BadParameter("--policy belady: is no policy but a bound, which is shown anyway")
        PolicyStore(1, name)  # a name that does not exist is refused before the trace is read
    trace = open_file(file)
    advice = advise(
        trace,
        block_sizes=sizes,
        capacity=capacity or 0,
        policies=policies or None,
        insert=insert,
        progress=lambda label: requests_bar(label, quiet),
    )
    if not quiet and (unheard := note_of(advice.unheard)):
        note(f"{file}: {unheard}")
    checkup = _check_up(trace, advice, sizes, top, moved is not None, quiet)
    if moved is not None:
        if checkup is None or not checkup.moved:
            raise click.UsageError(f"--moved {moved}: {file} has no field worth moving; leave it out")
        _write_moved(trace, checkup, moved)
    left = advice.tokens - advice.best_size.found
    costs = {
        "kv_bytes": [n * kv_bytes_per_token for n in (advice.tokens, left)] if kv_bytes_per_token else None,
        "prefill_flops": [2 * parameters * n for n in (advice.tokens, left)] if parameters else None,
    }
    if as_json:
        emit_json(_document(trace, advice, checkup, open_file, costs))
        return
    unit = open_file.unit_of(trace)
    read = shell([str(file), *open_file.typed()])
    _show_sizes(read, advice, unit, insert)
    _show_costs(advice, costs)
    _show_pools(read, advice, insert)
    if checkup is not None:
        _show_prompts(read, checkup, open_file, unit, advice.tokens)
    print(
        "assumed: every request finds what earlier ones left, at once and under way alike; "
        + (
            "answers are kept, too"
            if insert == "prompt+output"
            else "answers are not kept (--insert prompt+output)"
        )
        + "; the bound is Belady's for block requests, and no policy's"
    )


def _write_moved(trace: Trace, checkup: Checkup, path: Path) -> None:
    """The trace as token ids, the fields of its prompts behind the rest; what else it says stays."""
    from dataclasses import replace

    from pagedjax.cli.trace import write_whole
    from pagedjax.sim.trace import write_trace

    requests = (
        replace(r, token_ids=checkup.moved[i].astype("i4")) if i in checkup.moved else r
        for i, r in enumerate(trace)
    )
    write_whole(path, lambda part: write_trace(part, requests, granularity=1, tail_ids=True), sys.stderr)


def _check_up(
    trace: Trace, advice: Advice, sizes: tuple[int, ...], top: int, keep_moved: bool, quiet: bool
) -> Checkup | None:
    """Groups and fields of the prompts; None where there are no token ids to lay side by side."""
    from pagedjax.progress import bar
    from pagedjax.sim.sharing import check_up

    if trace.granularity != 1:
        return None

    def progress(items: Iterable[int], label: str, total: int) -> Iterator[int]:
        with bar(label, total, enabled=not quiet and sys.stderr.isatty()) as advance:
            for i, item in enumerate(items, 1):
                if i % 256 == 0:
                    advance(256)
                yield item

    prompts = (request.token_ids for request in trace)
    chosen = sizes or [size.block_size for size in advice.sizes]
    return check_up(
        (p for p in prompts if p is not None),
        block_sizes=chosen,
        top=top,
        keep_moved=keep_moved,
        progress=progress,
    )


def _show_sizes(read: str, advice: Advice, unit: str, insert: str) -> None:
    from pagedjax.sim.advice import share

    print(f"{advice.requests:,} requests, {advice.tokens:,} prompt tokens ({unit})")
    print("where they go in a cache without end, by block size:")
    print("block size          found   lost below a block   lost to the last token            new")
    for s in advice.sizes:
        print(
            f"{s.block_size:>10} {s.found:>9,} {share(s.found, s.looked_up):>5} {s.below_block:>13,} "
            f"{share(s.below_block, s.looked_up):>6} {s.last_token:>14,} {share(s.last_token, s.looked_up):>6} "
            f"{s.new:>14,}"
        )
    print(advice.size_sentence)
    if advice.best_size.found:
        best = advice.best_size.block_size
        print(f"  proof: pagedjax trace info {read} --block-size {best}{_kept(insert)}")


def _kept(insert: str) -> str:
    return "" if insert == "prompt" else f" --insert {insert}"


def _show_costs(advice: Advice, costs: dict[str, Any]) -> None:
    if costs["kv_bytes"]:
        alone, shared = (n / 1e9 for n in costs["kv_bytes"])
        print(f"KV memory: {alone:,.2f} GB alone, {shared:,.2f} GB without what is found")
    if costs["prefill_flops"]:
        alone, shared = (n / 1e15 for n in costs["prefill_flops"])
        print(
            f"prefill: {alone:,.2f} PFLOP alone, {shared:,.2f} PFLOP without what is found (no attention counted)"
        )


def _show_pools(read: str, advice: Advice, insert: str) -> None:
    from pagedjax.sim.advice import share

    if not advice.unlimited_tokens:
        return
    for said in advice.pool_sentences:
        print(said)
    proof = f"pagedjax curve {read} --block-size {advice.block_size}{_kept(insert)}"
    print(f"  proof: {proof} " + " ".join(f"--capacity {pool.blocks}" for pool in advice.pools))
    best = advice.policies[0]
    print(
        f"At {advice.capacity:,} blocks {best.name} finds most: {share(best.hit_blocks, advice.blocks)} of the "
        f"blocks, {best.of_bound:.1%} of the bound ({share(advice.bound_blocks, advice.blocks)})."
    )
    for policy in advice.policies[1:]:
        print(
            f"  {policy.name:<12} {share(policy.hit_blocks, advice.blocks):>6}, {policy.of_bound:.1%} of the bound"
        )
    names = " ".join(f"--policy {policy.name}" for policy in advice.policies if policy.name != "lru")
    print(f"  proof: {proof} --capacity {advice.capacity} {names} --bound".replace("  --bound", " --bound"))


def _show_prompts(read: str, checkup: Checkup, open_file: Opener, unit: str, tokens: int) -> None:
    print("prefix groups by tokens saved:")
    for g in (g for g in checkup.groups if g.saved_tokens):
        ways = f"then part {g.num_branches:,} ways: {g.saved_tokens:,} {unit}"
        print(f"  {g.count:>6,} prompts share {g.depth:,} {unit}, {ways}")
    if not checkup.divergences:
        print("No field that changes per request stands in front of common text worth 1 % of all tokens.")
    decode = open_file.texts.decode
    for d in checkup.divergences:
        print(d.sentence(unit, tokens))
        for f in d.fields:
            examples = ", ".join(repr(decode(e)) for e in f.examples)
            print(
                f"  changing field at {f.position} {unit}, {f.num_values:,} values, up to {f.longest} {unit}, after "
                f"{decode(f.before)!r}: {examples}"
            )
    if checkup.divergences:
        print(f"  proof: pagedjax advise {read} --moved moved.jsonl, then pagedjax advise moved.jsonl")


def _document(
    trace: Trace, advice: Advice, checkup: Checkup | None, open_file: Opener, costs: dict[str, Any]
) -> dict[str, Any]:
    """Everything, as plain data."""
    out: dict[str, Any] = {
        "trace": {"name": trace.name, "format": trace.format, "sha256": trace.digest()},
        **asdict(advice),
        "best_block_size": advice.best_size.block_size,
        **costs,
        "assumed": {
            "concurrent requests": "find what earlier ones left, as if those had ended",
            "bound": "Belady's for block requests; no policy's, and no proven optimum for prefix chains",
        },
        "prompts": None,
    }
    if checkup is not None:
        decode = open_file.texts.decode
        out["prompts"] = {
            "groups": [asdict(group) for group in checkup.groups],
            "moves": [
                {
                    **asdict(d),
                    "fields": [
                        {**asdict(f), "before": decode(f.before), "examples": [decode(e) for e in f.examples]}
                        for f in d.fields
                    ],
                }
                for d in checkup.divergences
            ],
            "shared_blocks": [asdict(saving) for saving in checkup.savings],
        }
    return out
