"""`pagedjax experiment`: tables beside the papers' numbers. Lives beside a checkout's experiments/ folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


def _common() -> Any:
    """experiments.common of the checkout this package is installed from."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "experiments" / "common.py").is_file():
        raise click.UsageError(f"{root}: holds no experiments/; run from a checkout with an editable install")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    import experiments.common

    return experiments.common


def _note(text: str) -> None:
    print(text, file=sys.stderr)


@click.group("experiment")
def command() -> None:
    """Ask the question: run experiments and put the results beside the papers'."""


@command.command("list")
def list_all() -> None:
    """Name every experiment and its question."""
    common = _common()
    for name in common.names():
        experiment = common.load(name)
        print(f"{name:<20} {experiment.kind:<10} {experiment.question}")


@command.command("run", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Run every experiment.")
@click.option("--smoke", is_flag=True, help="The small version, seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the results.  [default: experiments/results, smoke: results/smoke]",
)
@click.option("--resume", is_flag=True, help="Keep what an interrupted run finished.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Folder that holds data/.  [default: ../shared]"
)
@click.option("--no-plots", is_flag=True, help="Tables alone.")
@click.pass_context
def run(
    ctx: click.Context,
    name: str | None,
    everything: bool,
    smoke: bool,
    seed: int,
    out: Path | None,
    resume: bool,
    jobs: int,
    data_dir: Path | None,
    no_plots: bool,
) -> None:
    """Run NAME, or --all. Experiments that can draw a single case take it as --name value pairs."""
    from pagedjax.progress import bar

    common = _common()
    if everything == (name is not None):
        raise click.UsageError("give the name of an experiment, or --all")
    chosen = common.names() if everything else [name]
    if ctx.args:
        print(_draw(common.load(name), ctx.args))
        return
    data = (data_dir or common.DEFAULT_DATA).resolve()
    out = out or (Path("results/smoke") if smoke else common.FOLDER / "results")
    total = sum(len(common.load(n).units(smoke, seed)) for n in chosen)
    with bar("experiments", total, enabled=sys.stderr.isatty()) as advance:
        results = common.run_all(
            chosen,
            out,
            smoke=smoke,
            seed=seed,
            resume=resume,
            data=data,
            jobs=jobs,
            note=_note,
            advance=advance,
        )
    for done, rows in results.items():
        experiment = common.load(done)
        paths = common.write_tables(experiment, rows, out)
        if not no_plots:
            paths += common.write_plots(experiment, rows, out)
        print(f"## {done}: {experiment.question}")
        print(
            common.markdown(common.claim_rows(experiment, rows))
            if experiment.claims
            else common.markdown(rows)
        )
        _note(f"{done}: {len(rows)} rows; " + ", ".join(str(p) for p in paths))
    if name is not None and name not in results:  # skipped, and named above: a script should know
        ctx.exit(2)


def _draw(experiment: Any, args: list[str]) -> str:
    """A single case given as --name value pairs."""
    if experiment.draw is None:
        raise click.UsageError(
            f"{args[0]}: {experiment.name} draws no single case; see --help for its options"
        )
    if len(args) % 2 or any(not a.startswith("--") for a in args[::2]):
        raise click.UsageError(f"{' '.join(args)}: must be --name value pairs")
    try:
        options = {k[2:].replace("-", "_"): int(v) for k, v in zip(args[::2], args[1::2])}
    except ValueError:
        raise click.UsageError(f"{' '.join(args)}: values must be whole numbers") from None
    try:
        text: str = experiment.draw(options)
    except TypeError:
        raise click.UsageError(
            f"{' '.join(args)}: {experiment.name} does not know one of these names"
        ) from None
    return text


@command.command("report")
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="[default: experiments/results]",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="[default: experiments/README.md]"
)
def report(results: Path | None, out: Path | None) -> None:
    """Write experiments/README.md from the committed results."""
    common = _common()
    out = out or common.FOLDER / "README.md"
    out.write_text(common.summary(results or common.FOLDER / "results"))
    print(out)
