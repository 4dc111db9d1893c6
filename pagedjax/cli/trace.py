"""`pagedjax trace`: look at a trace, make one, convert one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pagedjax.sim.trace import Encode, Trace


def encoder(name: str) -> Encode:
    """Text to token ids: "bytes", or a tokenizer.json file."""
    if name == "bytes":
        return lambda text: list(text.encode())
    from tokenizers import Tokenizer

    if not Path(name).is_file():
        raise click.BadParameter(f"--tokenizer {name}: must be 'bytes' or a tokenizer.json file")
    try:
        tokenizer = Tokenizer.from_file(name)
    except Exception as error:  # the library raises no narrower class
        raise click.BadParameter(f"--tokenizer {name}: {error}; must be a tokenizer.json file") from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def open_with(path: Path, tokenizer: str, common_prefix: bool = False) -> Trace:
    """Open a trace as the options say."""
    from pagedjax.sim.trace import open_trace

    return open_trace(path, encode=encoder(tokenizer), common_prefix=common_prefix)


def write_whole(path: Path, requests: Iterable[Any], *, granularity: int, tail_ids: bool) -> None:
    """Write a trace file completely or not at all: what stands at `path` goes only once the new one is whole."""
    from pagedjax.sim.trace import write_trace

    device = path.exists() and not path.is_file()  # /dev/stdout, a pipe
    target = path if device else path.resolve()
    part = (
        target if device else target.with_name(f".part-{target.name}")
    )  # the suffix chooses the compression
    try:
        count = write_trace(part, requests, granularity=granularity, tail_ids=tail_ids)
        if not count:  # no reader would take the file
            raise click.UsageError(f"{path}: would hold no request; give a trace with at least one")
        if not device:
            os.replace(part, target)
    except OSError as error:
        if error.filename in (None, str(part)):  # None: a write; a reader's error carries its file
            error.filename = str(path)
        raise
    finally:
        if not device:
            part.unlink(missing_ok=True)
    print(f"{count:,} requests in {path}", file=sys.stderr if device else sys.stdout)


def requests_bar(label: str, quiet: bool) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """A progress bar over a stream of unknown length."""
    from pagedjax.progress import bar

    def wrap(items: Iterable[Any]) -> Iterator[Any]:
        with bar(label, None, enabled=not quiet and sys.stderr.isatty()) as advance:
            for item in items:
                advance(1)
                yield item

    return wrap


AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)
FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
TOKENIZER = click.option(
    "--tokenizer", default="bytes", show_default=True, help="For files of text: bytes, or a tokenizer.json."
)
COMMON = click.option(
    "--common-prefix", is_flag=True, help="Let agentic sessions share tools and system prompts."
)
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
QUIET = click.option("--quiet", is_flag=True, help="No progress on stderr.")


@click.group("trace")
def command() -> None:
    """Recorded and generated requests."""


@command.command("info")
@FILE
@click.option("--block-size", type=AT_LEAST_1, help="Tokens per block.  [default: the trace's own, or 16]")
@click.option("--capacity", type=AT_LEAST_0, default=0, help="Blocks of an LRU cache; 0 never evicts.")
@click.option("--insert", type=click.Choice(["prompt", "prompt+output"]), default="prompt", show_default=True)
@COMMON
@TOKENIZER
@QUIET
def info(
    file: Path,
    block_size: int | None,
    capacity: int,
    insert: Any,
    common_prefix: bool,
    tokenizer: str,
    quiet: bool,
) -> None:
    """Count a trace and its prefix hits, by every definition of the hit rate."""
    from pagedjax.sim.replay import LRUStore, Unbounded, replay

    trace = open_with(file, tokenizer, common_prefix)
    size = block_size or (trace.granularity if trace.granularity > 1 else 16)
    outputs, last = 0, 0.0

    def watched(items: Iterable[Any]) -> Iterator[Any]:
        nonlocal outputs, last
        for item in requests_bar("replay", quiet)(items):
            outputs += item.num_output
            last = item.arrival_s
            yield item

    store = LRUStore(capacity) if capacity else Unbounded()
    counts = replay(trace, size, store, insert=insert, progress=watched)
    if not counts.requests:
        raise click.UsageError(f"{file}: holds no request; give a trace with at least one")
    print(f"trace             {trace.name} ({trace.format}, {trace.granularity or 'no'} tokens per id)")
    print(f"sha256            {trace.digest()}")
    print(f"requests          {counts.requests:,} over {last:,.1f} s")
    print(
        f"tokens            {counts.tokens / counts.requests:,.1f} in, {outputs / counts.requests:,.1f} out (means)"
    )
    print(f"blocks of {size:<7} {counts.blocks:,}, of which full {counts.full_blocks:,}")
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


@command.command("make")
@click.argument("kind")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
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
    kind: str, out: Path, settings: tuple[str, ...], rate: float, burst: int, seed: int, quiet: bool
) -> None:
    """Generate a token-id trace.

    KIND is system-prompt, few-shot, document-questions, target-sharing, chat or agents.
    """
    import inspect

    from pagedjax.sim.synth import GENERATORS, Arrivals

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
    write_whole(out, requests_bar("write", quiet)(trace), granularity=1, tail_ids=True)


@command.command("convert")
@FILE
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@COMMON
@TOKENIZER
@QUIET
def convert(file: Path, out: Path, common_prefix: bool, tokenizer: str, quiet: bool) -> None:
    """Rewrite a trace: text becomes token ids, agentic sessions become Mooncake's flat form."""
    trace = open_with(file, tokenizer, common_prefix)
    requests = requests_bar("write", quiet)(trace)
    write_whole(out, requests, granularity=trace.granularity, tail_ids=trace.tail_ids)
