"""`pagedjax trace`: look at a trace, make one, convert one."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import PathOrUrl, note
from pagedjax.cli.trace_options import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    QUIET,
    Opener,
    requests_bar,
    trace_options,
)
from pagedjax.paths import AnyPath, part_of, told_of
from pagedjax.progress import shown

if TYPE_CHECKING:
    from pagedjax.sim.references import References
    from pagedjax.sim.replay import HitCounts
    from pagedjax.sim.trace import Trace


def write_whole(path: AnyPath, write: Callable[[Path], int], told: Any = None) -> None:
    """Write a trace file completely or not at all: what stands at `path` goes only once the new one is whole.

    How many requests it holds is said on stdout, or where `told` leads.
    """
    kind = next((s.lower() for s in reversed(path.suffixes) if s.lower() in _TABLES), "")
    if kind:
        raise click.UsageError(
            f"{path}: would hold JSON lines, and be read as {kind}; name it {path.stem}.jsonl"
        )
    if not isinstance(path, Path):
        with TemporaryDirectory() as folder:
            made = Path(folder) / path.name
            if not (count := write(made)):
                raise click.UsageError(f"{path}: would hold no request; give a trace with at least one")
            path.upload(made)
        print(shown(f"{count:,} requests in {path}"), file=told)
        return
    target, part = part_of(path)
    device = part == target  # /dev/stdout, a pipe
    try:
        with told_of(path, part):  # a reader's error carries its file
            count = write(part)
            if not count:  # no reader would take the file
                raise click.UsageError(f"{path}: would hold no request; give a trace with at least one")
            if not device:
                os.replace(part, target)
    finally:
        if not device:
            part.unlink(missing_ok=True)
    print(shown(f"{count:,} requests in {path}"), file=sys.stderr if device else told or sys.stdout)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}

_TABLES = (".csv", ".tsv", ".txt", ".parquet")  # by these names a reader looks for something else
_MANY = 10_000_000  # block references from which on memory is worth a word
_SMALL_FILE, _LOOKED_AT = (
    10 << 20,
    1000,
)  # bytes below which no file holds so many; requests its size is judged by
_MOST_RATE, _LEAST_RATE = 1e4, 1 / 86400  # a second; beyond, the unit of times is in doubt


@click.group("trace")
def command() -> None:
    """Recorded and generated requests."""


@command.command("info")
@FILE
@click.option("--block-size", type=AT_LEAST_1, help="Tokens per block.  [default: the trace's own, or 16]")
@click.option("--capacity", type=AT_LEAST_0, default=0, help="Blocks of an LRU cache; 0 never evicts.")
@click.option("--insert", type=click.Choice(["prompt", "prompt+output"]), default="prompt", show_default=True)
@trace_options
@QUIET
def info(
    file: AnyPath,
    block_size: int | None,
    capacity: int,
    insert: Any,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Count a trace and its prefix hits, by every definition of the hit rate.

    Needs at most 24 bytes of memory for each block of a prompt, and nothing for a request.
    """
    trace = open_file(file)
    size = block_size or (trace.granularity if trace.granularity > 1 else 16)
    seen = Seen()
    counts = _counts(trace, size, insert, capacity, seen.watching(requests_bar("read", quiet)), quiet)
    if not counts.requests:
        raise click.UsageError(f"{file}: holds no request; give a trace with at least one")
    if not quiet and (doubt := seen.doubt(counts.requests)):
        note(f"{file}: {doubt}")
    unit = f"{trace.granularity} tokens per id" if trace.granularity else "lengths alone"
    print(f"trace             {trace.name} ({trace.format}, {unit})")
    print(f"sha256            {trace.digest()}")
    span = f"over {seen.last_s:,.1f} s" if trace.timed else "without times"
    print(f"requests          {counts.requests:,} {span}")
    if seen.unanswered:
        print(f"without an answer {seen.unanswered:,} of them (0 output tokens)")
    print(
        f"tokens            {counts.tokens / counts.requests:,.1f} in, "
        f"{seen.outputs / counts.requests:,.1f} out (means)"
    )
    print(f"blocks of {size:<7} {counts.blocks:,}, of which full {counts.full_blocks:,}")
    if not counts.identified:
        print("hit rate          unknown: the file says nothing of which prefixes are equal")
        return
    print(
        f"cache             {f'LRU, {capacity:,} blocks' if capacity else 'never evicts'}, {insert} inserted at arrival"
    )
    print("hit rate, contiguous prefixes, no last-token rule:")
    print(f"  by block        {counts.by_block:.4f}   (partly filled tails counted)")
    print(f"  by full block   {counts.by_full_block:.4f}")
    print(f"  by token        {counts.by_token:.4f}")
    print(f"  mean of requests {counts.mean_per_request:.4f}  (token ratios)")
    print("hit rate under the engine's rules (full blocks, last token computed):")
    print(f"  by token        {counts.by_engine:.4f}")


@dataclass
class Seen:
    """What passes by while a trace is read.

    Attributes:
        outputs / unanswered / last_s: Answers' tokens; requests with none; the last arrival.
    """

    outputs: int = 0
    unanswered: int = 0
    last_s: float = 0.0

    def doubt(self, requests: int) -> str:
        """A question where so many requests in that time are hardly true; "" where they may be."""
        rate = requests / self.last_s if self.last_s else 0.0
        if requests >= 100 and rate > _MOST_RATE:
            return f"{rate:,.0f} requests a second: is the unit right? (--time-unit)"
        if requests >= 2 and 0 < rate < _LEAST_RATE:
            return f"{self.last_s / requests / 86400:,.1f} days between requests: is the unit right? (--time-unit)"
        return ""

    def watching(
        self, bar: Callable[[Iterable[Any]], Iterator[Any]]
    ) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """`bar`, with an eye on what goes through it."""

        def wrap(items: Iterable[Any]) -> Iterator[Any]:
            for item in bar(items):
                self.outputs += item.num_output
                self.unanswered += item.num_output == 0
                self.last_s = item.arrival_s
                yield item

        return wrap


def _counts(
    trace: Trace, size: int, insert: Any, capacity: int, progress: Callable[[Iterable[Any]], Any], quiet: bool
) -> HitCounts:
    """Hits of a trace; of one without identity only what there is to count."""
    from pagedjax.sim.curve import count_hits
    from pagedjax.sim.replay import HitCounts

    if not trace.granularity:
        counts = HitCounts(identified=False)
        for request in progress(trace):
            counts.add(-(-request.num_input // size), 0, request.num_input, size)
        return counts
    refs = load_announced(trace, size, insert=insert, progress=progress, quiet=quiet)
    return count_hits(refs, capacity or math.inf)


def load_announced(
    trace: Trace, size: int, *, insert: Any, progress: Callable[[Iterable[Any]], Any], quiet: bool
) -> References:
    """`load_references`; says beforehand what so many take, where it is much, and afterwards what was not heard."""
    from pagedjax.sim.references import PEAK_BYTES, load_references

    count, told = 0, quiet

    def tell(many: str, references: int) -> None:
        nonlocal told
        told = True
        most = references * PEAK_BYTES / 1e9
        note(f"{trace.name}: {many} block references: at most {most:,.1f} GB of memory")

    def counted(more: int) -> None:
        nonlocal count
        count += more
        if count > _MANY and not told:  # a compressed file: its size says little
            tell(f"more than {_MANY:,}", count)

    if not quiet and (expected := _expected(trace, size)) > _MANY:
        tell(f"about {expected:,.2g}", expected)
    refs = load_references(trace, size, insert=insert, progress=progress, on_request=counted)
    if len(refs.keys) > _MANY and not quiet:
        tell(f"{len(refs.keys):,}", len(refs.keys))
    note_unheard(trace, refs, quiet)
    return refs


def note_unheard(trace: Trace, refs: References, quiet: bool) -> None:
    """Say what rows asked for and blocks alone cannot do."""
    if not quiet and (unheard := note_of(refs.unheard)):
        note(f"{trace.name}: {unheard}")


def note_of(unheard: Mapping[str, int]) -> str:
    """What a replay did not do that rows asked for; "" where they asked for nothing."""
    asked = ", ".join(f"{name} (in {count:,} rows)" for name, count in unheard.items())
    return f"{asked}: has no effect on blocks alone; simulate does what requests ask" if asked else ""


def _expected(trace: Trace, size: int) -> int:
    """Block references of a plain file, about: by its size and its first requests; 0 where that says nothing."""
    from pagedjax.sim.records import OPENERS, lines

    if not isinstance(trace.path, Path) or trace.spec or trace.path.suffix.lower() in (*OPENERS, ".parquet"):
        return 0
    with trace.path.open("rb") as file:
        array = file.read(100).lstrip().startswith(b"[")  # whose lines are no rows
    if array or trace.path.stat().st_size < _SMALL_FILE:
        return 0
    first = [-(-request.num_input // size) for request in islice(trace, _LOOKED_AT)]
    read = sum(len(text.encode()) for _, text in islice(lines(trace.path), len(first)))
    return int(sum(first) * trace.path.stat().st_size / max(read, 1))


@command.command("make")
@click.argument("kind")
@click.argument("out", type=PathOrUrl(written=True))
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the generator; repeatable."
)
@click.option("--rate", default=1.0, show_default=True, help="Requests (or sessions) per second.")
@click.option(
    "--burst", type=AT_LEAST_1, default=1, show_default=True, help="They come in groups of this size."
)
@click.option("--seed", type=AT_LEAST_0, default=0, show_default=True)
@QUIET
def make(
    kind: str, out: AnyPath, settings: tuple[str, ...], rate: float, burst: int, seed: int, quiet: bool
) -> None:
    """Generate a token-id trace.

    KIND is system-prompt, few-shot, document-questions, target-sharing, chat or agents.
    """
    import inspect

    from pagedjax.sim.synth import GENERATORS, Arrivals
    from pagedjax.sim.trace import write_trace

    if kind not in GENERATORS:
        raise click.BadParameter(f"{kind}: must be one of {', '.join(GENERATORS)}")
    known = inspect.signature(GENERATORS[kind]).parameters
    arguments: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in known or name in ("seed", "arrivals"):
            offered = ", ".join(n for n in known if n not in ("seed", "arrivals"))
            raise click.BadParameter(f"--set {setting}: must be NAME=VALUE with a name among {offered}")
        kind_of = type(known[name].default)
        try:
            arguments[name] = {"true": True, "false": False}[value] if kind_of is bool else kind_of(value)
        except (ValueError, KeyError):
            raise click.BadParameter(f"--set {setting}: must be {_KINDS[kind_of]}") from None
    trace = GENERATORS[kind](**arguments, seed=seed, arrivals=Arrivals(rate, burst))
    requests = requests_bar("write", quiet)(trace)
    write_whole(out, lambda part: write_trace(part, requests, granularity=1, tail_ids=True))


@command.command("convert")
@FILE
@click.argument("out", type=PathOrUrl(written=True))
@click.option(
    "--anonymise",
    type=click.Choice(["mooncake", "bailian"]),
    help="Write lengths, times and salted block ids only, in this form: 512 or 16 tokens an id.",
)
@click.option(
    "--salt", help="With --anonymise: equal salts give equal ids.  [default: drawn anew, told to nobody]"
)
@trace_options
@QUIET
def convert(
    file: AnyPath,
    out: AnyPath,
    anonymise: str | None,
    salt: str | None,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Rewrite a trace: text becomes token ids, agentic sessions become Mooncake's flat form.

    What is written says nothing of texts but their tokens; with --anonymise not even those.
    """
    from pagedjax.sim.trace import anonymous, write_anonymous, write_trace

    if salt is not None and anonymise is None:
        raise click.UsageError("--salt: has an effect with --anonymise only; leave it out")
    trace = open_file(file)
    bar = requests_bar("write", quiet)
    if anonymise is None:
        write_whole(
            out,
            lambda part: write_trace(
                part, bar(trace), granularity=trace.granularity, tail_ids=trace.tail_ids
            ),
        )
        return
    hidden = anonymous(trace, anonymise, salt=(salt or "").encode())
    write_whole(out, lambda part: write_anonymous(part, hidden, anonymise, progress=bar))
