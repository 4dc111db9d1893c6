"""`pagedjax experiment`: run the questions of `experiments/`, and put the results beside the papers' figures."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import click

from pagedjax.cli.options import PathOrUrl, note
from pagedjax.paths import AnyPath, replace_text


@click.group("experiment")
def command() -> None:
    """Ask the question: run experiments and put the results beside the papers'."""


@command.command("list")
@click.option(
    "--settings", is_flag=True, help="Also what --set can change, with the values of the first unit."
)
def list_all(settings: bool) -> None:
    """Name every experiment and its question."""
    from pagedjax import lab

    for name in lab.names():
        experiment = lab.load(name)
        print(f"{name:<20} {experiment.kind:<10} {experiment.question}")
        if settings:
            first: dict[str, object] = {}
            for unit in lab.units_of(experiment, smoke=False, seed=0):
                first = {**unit, **first}
            print("".join(f"    --set {key}={_shown(value)}\n" for key, value in first.items()), end="")


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@command.command("run")
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Run every experiment.")
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a field of its units; repeatable."
)
@click.option("--smoke", is_flag=True, help="The small version, seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--seeds", type=click.IntRange(min=1), help="So many, from --seed on.  [default: the experiment's own]"
)
@click.option(
    "--out",
    type=PathOrUrl(folder=True, written=True),
    help="Folder of the results, or its URL (s3://…).  [default: ./results, smoke: ./results/smoke]",
)
@click.option("--resume", is_flag=True, help="Keep what an interrupted run finished.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes of this machine, as --on local:N.  [default: 2]"
)
@click.option("--on", metavar="PLACE", help="local:PROCESSES, or dask://HOST:PORT, a cluster that is there.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Folder that holds data/.  [default: ../shared]"
)
@click.option("--no-plots", is_flag=True, help="Tables alone.")
@click.pass_context
def run(
    ctx: click.Context,
    name: str | None,
    everything: bool,
    settings: tuple[str, ...],
    smoke: bool,
    seed: int,
    seeds: int | None,
    out: AnyPath | None,
    resume: bool,
    jobs: int | None,
    on: str | None,
    data_dir: Path | None,
    no_plots: bool,
) -> None:
    """Run NAME, or --all. `experiment list --settings` says what --set can change in each."""
    from pagedjax import lab
    from pagedjax.lab import catalog
    from pagedjax.lab.cluster import workers_on
    from pagedjax.progress import bar

    if jobs is not None and on is not None:
        raise click.UsageError(f"--jobs {jobs}: says what --on says too; give one of them")
    if everything == (name is not None):
        raise click.UsageError("give the name of an experiment, or --all")
    chosen = lab.names() if name is None else [name]
    if seeds is not None and name is None:
        raise click.UsageError("--seeds: is of one experiment; give its name in place of --all")
    if settings and name is None:
        raise click.UsageError("--set: changes one experiment; give its name in place of --all")
    parsed = lab.parse_settings(settings)
    if name is not None and seed and lab.load(name).units(smoke, seed) == lab.load(name).units(smoke, 0):
        raise click.UsageError(f"--seed {seed}: {name} draws nothing; leave it out")
    data = (data_dir or catalog.default_data()).resolve()
    out = out or (Path("results/smoke") if smoke else Path("results"))
    several = seeds or 0
    units = {
        n: lab.units_of(lab.load(n), smoke=smoke, seed=seed, settings=parsed, seeds=several) for n in chosen
    }
    pictures = (
        [draw(unit) for unit in units[chosen[0]][:4]] if (draw := lab.load(chosen[0]).draw) and parsed else []
    )
    with (
        nullcontext() if on is None else workers_on(on) as executor,
        bar("experiments", sum(map(len, units.values())), enabled=sys.stderr.isatty()) as advance,
    ):
        results = lab.run_all(
            chosen,
            out,
            smoke=smoke,
            seed=seed,
            settings=parsed,
            seeds=several,
            resume=resume,
            data=data,
            jobs=jobs or 2,
            executor=executor,
            note=note,
            advance=advance,
        )
    for done, rows in results.items():
        experiment = lab.load(done)
        paths = lab.write_tables(experiment, rows, out, parsed, several)
        if not no_plots:
            paths += lab.write_plots(experiment, rows, out)
        print(f"## {done}: {experiment.question}")
        claims = lab.claim_rows(experiment.claims, rows, judged=not parsed)
        told = not parsed and any(row.get("ours") is not None for row in claims)
        print(lab.markdown(claims if told else (lab.means_over_seeds(rows) if several else []) or rows))
        for picture in pictures:
            print(picture)
        note(f"{done}: {len(rows)} rows; " + ", ".join(str(p) for p in paths))
    if name is not None and name not in results:  # skipped, and named above: a script should know
        ctx.exit(2)


@command.command("report")
@click.option(
    "--results",
    type=PathOrUrl(exists=True, folder=True),
    default="results",
    show_default=True,
)
@click.option("--out", type=PathOrUrl(written=True), help="[default: README.md among the results]")
@click.option(
    "--plots", is_flag=True, help="Draw every plot anew as well, and FIGURES.md, the page of all of them."
)
def report(results: AnyPath, out: AnyPath | None, plots: bool) -> None:
    """Write one page of all results that are there: claims, verdicts, definitions, commands. Nothing is run."""
    from pagedjax import lab

    out = out or results / "README.md"
    replace_text(out, lab.summary(results, out.parent))
    if plots:
        note(f"{len(lab.redraw(results))} files drawn")
        page = out.parent / "FIGURES.md"
        replace_text(page, lab.captions(results, out.parent))
        print(page)
    print(out)
