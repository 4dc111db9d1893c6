"""`pagedjax report`: one HTML file that shows what runs did and what traces would hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("report")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--run", "runs", type=_FILE, multiple=True, help="A record (generate --record, …); repeatable.")
@click.option("--trace", "traces", type=_FILE, multiple=True, help="A trace to draw curves of; repeatable.")
@click.option("--policy", "policies", multiple=True, help="A policy beside LRU in the curves; repeatable.")
@click.option(
    "--block-size", type=click.IntRange(min=1), help="Of the curves.  [default: the trace's, or 16]"
)
@click.option("--title", default="pagedjax", show_default=True)
def command(
    out: Path,
    runs: tuple[Path, ...],
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    block_size: int | None,
    title: str,
) -> None:
    """Write OUT, a page that needs no network: the pool through time, each request's story, prefixes, curves.

    Prompts are in it only where the record has them (`--record-text`). Several runs stand one below the other.
    """
    from pagedjax.report.facts import run_facts
    from pagedjax.report.page import page

    if not (runs or traces):
        raise click.UsageError("nothing to show: give --run RECORD or --trace FILE")
    if (policies or block_size) and not traces:
        raise click.UsageError("--policy and --block-size are of curves: give --trace FILE, too")
    text = page(
        [run_facts(path) for path in runs],
        [_curve(path, policies, block_size) for path in traces],
        title=title,
    )
    out.write_text(text, encoding="utf-8")
    print(out)


def _curve(path: Path, policies: tuple[str, ...], block_size: int | None) -> dict[str, Any]:
    """LRU, the policies and the bound at powers of two, in plain values."""
    import hashlib

    from pagedjax.sim.curve import belady_bound, load_references, lru_curve
    from pagedjax.sim.replay import PolicyStore, replay
    from pagedjax.sim.trace import open_trace

    trace = open_trace(path)
    size = block_size or (trace.granularity if trace.granularity > 1 else 16)
    refs = load_references(trace, size)
    curve = lru_curve(refs)
    capacities = [2**k for k in range(max(refs.num_distinct, 1).bit_length() + 1)]
    values: dict[str, list[float]] = {"lru": [curve.by_block(c) for c in capacities]}
    for name in policies:
        values[name] = [replay(trace, size, PolicyStore(c, name)).by_block for c in capacities]
    values["bound"] = [belady_bound(refs, c) / max(len(refs.keys), 1) for c in capacities]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    more = "".join(f" --policy {name}" for name in policies)
    return {
        "name": path.name,
        "sha256": digest,
        "command": f"pagedjax curve {path.name} --block-size {size}{more} --bound",
        "block_size": size,
        "capacities": capacities,
        "policies": values,
    }
