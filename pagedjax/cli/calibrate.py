"""`pagedjax calibrate`: what a model's steps take on this machine, as a hardware file for `simulate` and `run`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import Common, OutputFile, common_options, emit_json
from pagedjax.cli.trace_options import AT_LEAST_0, AT_LEAST_1

if TYPE_CHECKING:
    from pagedjax.bench.calibrate import Calibration


@click.command("calibrate")
@click.argument("out", type=OutputFile())
@click.option(
    "--repeats", type=AT_LEAST_1, default=3, show_default=True, help="How often each designed step comes."
)
@click.option("--seed", type=AT_LEAST_0, default=0, show_default=True, help="Of the prompts.")
@common_options()
def command(common: Common, out: Path, repeats: int, seed: int) -> None:
    """Measure steps of the model on this machine, fit its cost model, and write the hardware file OUT.

    Steps of many batches, prompts and lengths of context run on the real engine; others, of sizes between, are kept
    apart, and the error on them is printed. `simulate --hardware OUT` uses the measured steps for this model under
    these limits (scheduler.max_num_seqs, token_budget, chunk_tokens, cache.block_size), and a roofline for others.
    Run it on an idle machine.
    """
    if not out.parent.is_dir():
        raise click.UsageError(f"{out}: its folder does not exist; make it first")
    from pagedjax import __version__
    from pagedjax.bench import calibrate as bench
    from pagedjax.progress import bar

    llm = common.llm()
    common.note("compiling, and running every program once")
    bench.warm(llm)
    with bar("measuring", None, common.bars) as advance:
        found = bench.calibrate(llm, repeats=repeats, seed=seed, advance=lambda phase, phases: advance(1))
    settings = {"scheduler": asdict(common.config.scheduler), "block_size": common.config.cache.block_size}
    found.hardware.write(out, _comments(found, f"pagedjax {__version__}", llm.model_name))
    document = {
        "hardware": str(out),
        "model": llm.model_name,
        "settings": settings,
        "programs": {
            str(b): s for b, s in (found.hardware.steps.programs if found.hardware.steps else {}).items()
        },
        "unmeasured": [str(bucket) for bucket in found.unmeasured],
        "held_out": {kind: asdict(e) | {"ratio": e.ratio} for kind, e in found.held_out.items()},
        "fitted": asdict(found.fitted) | {"ratio": found.fitted.ratio},
        "no_roofline": found.no_roofline or None,
    }
    if common.as_json:
        emit_json(document)
        return
    _show(document, found)


def _comments(found: Calibration, version: str, model: str) -> list[str]:
    held = found.held_out["all"]
    roof = found.no_roofline or "of relative errors, over the same steps as wide as their programs"
    return [
        f"Written by `pagedjax calibrate` ({version}) for {model}: [steps] are measured, for it and these limits.",
        f"On {held.steps} steps that were not fitted: {held.ratio:.3f} of the measured seconds in all, median error "
        f"of a step {held.median:.1%}, nine in ten within {held.p90:.1%}.",
        "The rates below are what was reached, not peaks, for models and limits that were not measured: least squares"
        if not found.no_roofline
        else "The rates below are the most that any step reached; no roofline could be fitted:",
        roof,
    ]


def _show(document: dict[str, Any], found: Calibration) -> None:
    print(
        f"written           {document['hardware']}: {len(document['programs'])} programs of {document['model']}"
    )
    for name, seconds in document["programs"].items():
        print(f"  {name:<38} {1e3 * seconds:9.3f} ms")
    if document["unmeasured"]:
        print(f"not measured      {', '.join(document['unmeasured'])}: charged as the next larger one")
    for kind, error in found.held_out.items():
        label = "held-out steps" if kind == "all" else f"  {kind}"
        print(
            f"{label:<17} {error.steps:,}: {error.ratio:.3f} of the measured seconds, median error {error.median:.1%}, "
            f"nine in ten within {error.p90:.1%}"
        )
    print(f"fitted steps      {found.fitted.steps:,}: median error {found.fitted.median:.1%}")
    if found.no_roofline:
        print(f"no roofline       {found.no_roofline}")
