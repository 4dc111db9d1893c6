"""`pagedjax report`: one HTML file that shows what runs did and what traces would hit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import OutputFile, PathOrUrl, keep_apart, note, shell
from pagedjax.cli.trace_options import AT_LEAST_1, QUIET, Opener, requests_bar, trace_options
from pagedjax.paths import AnyPath, replace_text

if TYPE_CHECKING:
    from pagedjax.sim.trace import Trace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("report")
@click.argument("out", type=OutputFile())
@click.option("--run", "runs", type=_FILE, multiple=True, help="A record (generate --record, …); repeatable.")
@click.option("--instance", "instances", multiple=True, help="Of a fleet's record: one to show step by step.")
@click.option(
    "--trace",
    "traces",
    type=PathOrUrl(exists=True),
    multiple=True,
    help="Its curves and check-up; repeatable.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="In the curves, beside LRU; repeatable.  [default: all, of a small trace]",
)
@click.option("--block-size", type=AT_LEAST_1, help="Of the curves.  [default: the trace's, or 16]")
@click.option("--text", is_flag=True, help="Show prompts of the traces where fields in them change.")
@click.option("--title", default="pagedjax", show_default=True)
@trace_options
@QUIET
def command(
    out: Path,
    runs: tuple[Path, ...],
    instances: tuple[str, ...],
    traces: tuple[AnyPath, ...],
    policies: tuple[str, ...],
    block_size: int | None,
    text: bool,
    title: str,
    open_file: Opener,
    quiet: bool,
) -> None:
    """Write OUT, a page that needs no network: the pool through time, each request's story, fleets, prefixes, curves.

    Prompts of a run are in it only where its record has them (`--record-text`). Several runs stand side by side.
    """
    from pagedjax.report.facts import read_runs
    from pagedjax.report.page import page
    from pagedjax.sim.replay import PolicyStore

    if not (runs or traces):
        raise click.UsageError("nothing to show: give --run RECORD or --trace FILE")
    if (policies or block_size or text) and not traces:
        raise click.UsageError("--policy, --block-size and --text are of traces: give --trace FILE, too")
    read = [*(("the record", path) for path in runs), *(("the trace", path) for path in traces)]
    keep_apart(read, {"OUT": out})
    for name in policies:
        if name == "belady":
            raise click.BadParameter("--policy belady: is no policy but a bound, which is shown anyway")
        PolicyStore(1, name)  # a name that does not exist is refused before anything is read
    shown = [facts for path in runs for facts in read_runs(path, instances)]
    if instances and not any(facts.get("fleet") for facts in shown):
        raise click.UsageError(f"--instance {instances[0]}: no record is of a fleet; leave it out")
    curves, checkups = [], []
    for path in traces:
        trace = open_file(path)
        curves.append(_curve(trace, path, open_file, policies, block_size, quiet))
        checkups.append(_checkup(trace, path, open_file, text, quiet))
    replace_text(out, page(shown, curves, checkups=checkups, title=title))
    print(out)


def _curve(
    trace: Trace,
    path: AnyPath,
    open_file: Opener,
    policies: tuple[str, ...],
    block_size: int | None,
    quiet: bool,
) -> dict[str, Any]:
    from pagedjax.report.traces import curve_facts

    facts = curve_facts(
        trace,
        block_size=block_size or 0,
        policies=policies or None,
        command=shell(["pagedjax", "curve", path.name, *open_file.typed()]),
        progress=lambda label: requests_bar(label, quiet),
    )
    if facts["left_out"] and not quiet:
        names = ", ".join(facts["left_out"])
        note(f"{path}: too long to replay every policy unasked ({names}); name them: --policy")
    return facts


def _checkup(trace: Trace, path: AnyPath, open_file: Opener, text: bool, quiet: bool) -> dict[str, Any]:
    from pagedjax.report.traces import checkup_facts

    return checkup_facts(
        trace,
        unit=open_file.unit_of(trace),
        decode=open_file.texts.decode if text else None,
        command=shell(["pagedjax", "advise", path.name, *open_file.typed()]),
        progress=lambda label: requests_bar(label, quiet),
    )
