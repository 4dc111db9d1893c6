"""`pagedjax bench`: measured speed, always beside what it could have been in the same process."""

from __future__ import annotations

import importlib
from typing import Any

import click

from pagedjax.cli.options import Common, common_options, emit_json


@click.group("bench")
def command() -> None:
    """Measure speed; each figure stands beside a bound taken in the same run."""


def _show(common: Common, title: str, rows: list[dict[str, Any]]) -> None:
    if common.as_json:
        emit_json({"config": common.config.to_dict(), "bench": title, "rows": rows})
        return
    from pagedjax.report.tables import render

    common.console().print(render(title, rows))


@command.command("decode")
@click.option(
    "--batch", "batches", multiple=True, type=int, help="Batch size; repeatable.  [default: 1, 8, 32]"
)
@click.option("--context", default=512, show_default=True, help="Prompt length in tokens.")
@click.option("--tokens", default=32, show_default=True, help="Tokens decoded per sequence and round.")
@click.option("--rounds", default=3, show_default=True, help="Interleaved rounds; the best of each is kept.")
@common_options()
def decode(common: Common, batches: tuple[int, ...], context: int, tokens: int, rounds: int) -> None:
    """Prefill and decode speed of the engine, beside a dense loop, its matrix products, and the floor."""
    from pagedjax.bench import decode as bench

    llm = common.llm()
    rows = bench.run(
        llm, batches or (1, 8, 32), context=context, tokens=tokens, rounds=rounds, note=common.note
    )
    _show(common, "decode", rows)


@command.command("in-place")
@common_options()
def in_place(common: Common) -> None:
    """One decode step of a tiny model over a small and a large pool: the pool must be updated in place."""
    from pagedjax.bench import in_place as bench

    _show(common, "in-place", bench.run())


def _delegate(name: str, summary: str) -> None:
    """A bench whose module offers run(config) -> rows and takes no options of its own."""

    @command.command(name, help=summary)
    @common_options()
    def run(common: Common) -> None:
        bench = importlib.import_module(f"pagedjax.bench.{name}")
        _show(common, name, bench.run(common.config))


_delegate("cache", "Blocks per second of the host half: allocate, look up, evict, free.")
_delegate("kernels", "Attention and KV writes, beside the bytes they move.")
