"""`pagedjax run`: a trace on the real decoder, reported as `simulate` reports one, and beside a simulation of it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pagedjax.cli.options import Common, common_options
from pagedjax.cli.serving import (
    TIMES,
    Serving,
    about,
    document,
    lines,
    publish,
    refuse_idle,
    serving_options,
    show,
)
from pagedjax.cli.trace_options import AT_LEAST_1, FILE, Opener, trace_options
from pagedjax.paths import AnyPath

if TYPE_CHECKING:
    from pagedjax.bench.beside import Beside
    from pagedjax.llm import LLM
    from pagedjax.sim.cost import HardwareSpec
    from pagedjax.sim.metrics import RequestRecord
    from pagedjax.sim.play import Played
    from pagedjax.sim.requests import PlayRequests
    from pagedjax.sim.trace import Trace

_NAMED = 3  # refused requests that are named; of the others the number is


@click.command("run")
@FILE
@click.option("--max-prompt", type=AT_LEAST_1, help="Cut prompts to so many tokens.")
@click.option("--max-tokens", type=AT_LEAST_1, help="Cut answers to so many tokens.")
@click.option(
    "--made-tokens",
    is_flag=True,
    help="Token ids of the model's vocabulary, equal as far as the file's are: for another model's ids.",
)
@click.option(
    "--warm-up/--no-warm-up",
    default=True,
    show_default=True,
    help="Compile and run every program once before the clock starts.",
)
@click.option("--record-text", is_flag=True, help="With --record: the prompts' text, too.")
@click.option(
    "--beside-simulation",
    "beside_file",
    metavar="HARDWARE",
    help="Simulate the same requests on this hardware, and compare: a file of `calibrate`, or any other.",
)
@serving_options
@trace_options
@common_options()
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    file: AnyPath,
    open_file: Opener,
    serving: Serving,
    max_prompt: int | None,
    max_tokens: int | None,
    made_tokens: bool,
    warm_up: bool,
    record_text: bool,
    beside_file: str | None,
) -> None:
    """Play the trace FILE on the real decoder, each request at its time, and report as `simulate` does.

    Prompts are the file's text (in the model's own tokens unless --tokenizer says otherwise) or token ids; from block
    ids tokens are made that are equal as far as the ids are. Answers have the file's length, whatever the model would
    say; where the file holds the answer's tokens, these count as answered. A request that cannot run to its end
    is refused by name, or cut where --max-prompt and --max-tokens ask for it.
    """
    from pagedjax.sim.requests import PlayRequests

    refuse_idle(ctx, file, {}, {})
    if record_text and serving.record_file is None:
        raise click.UsageError("--record-text: needs --record FILE")
    hardware = _hardware(beside_file)
    llm = common.llm()
    if ctx.get_parameter_source("tokenizer") == ParameterSource.DEFAULT:
        open_file = open_file.using(llm.tokenizer, llm.model_name)
    trace = serving.arranged(open_file(file))
    requests = PlayRequests(
        trace,
        llm.model_config.vocab_size,
        n=serving.n,
        max_prompt=max_prompt,
        max_tokens=max_tokens,
        made=made_tokens,
        seed=serving.seed,
    )
    total = _announce(common, llm, requests)
    cost = None
    if hardware is not None:
        from pagedjax.bench.beside import cost_of

        cost = cost_of(llm, hardware)
        common.note(f"simulation: {cost.basis(llm.config.scheduler)}")
    if warm_up:
        from pagedjax.bench.calibrate import warm

        warm(llm)
    played, out = _play(common, llm, trace, requests, serving, total, record_text, keep=cost is not None)
    if cost is None:
        publish(serving, out, _show, as_json=common.as_json)
        return
    from pagedjax.bench.beside import beside

    tally = serving.tally()
    found = beside(
        llm,
        played,
        cost,
        name=trace.name,
        until_s=serving.until_s,
        in_flight=serving.in_flight or 0,
        known=trace.granularity > 0,
        on_record=tally.add,
    )
    theirs = None
    if tally.requests:
        theirs = document(trace, cost.hardware.name, serving, tally, found.result, found.manager)
        theirs["cost"] = found.basis
    out["simulated"], out["beside"] = theirs, _comparison(found)
    publish(serving, out, _show_both, as_json=common.as_json)


def _hardware(name: str | None) -> HardwareSpec | None:
    if name is None:
        return None
    from pagedjax.sim.cost import HardwareSpec

    return HardwareSpec.read(name)


def _announce(common: Common, llm: LLM, requests: PlayRequests) -> int:
    """Read the trace once: its requests are counted, and those that can never run are named before anything does.

    Raises:
        click.UsageError: None can run.
    """
    from pagedjax.sim.play import check_request

    total = refused = prompts = answers = 0
    last = "there is none in this part of the file"
    for request in requests:
        total += 1
        prompts, answers = prompts + bool(request.cut[0]), answers + bool(request.cut[1])
        try:
            check_request(llm.engine, request)
        except ValueError as error:
            refused += 1
            last = str(error)
            if refused <= _NAMED:
                common.note(f"request {request.name} is refused: {error}")
    if refused > _NAMED:
        common.note(f"{refused:,} of {total:,} requests are refused, those among them")
    if prompts or answers:
        common.note(f"cut: {prompts:,} prompts, {answers:,} answers")
    if refused == total:
        raise click.UsageError(f"{requests.trace.name}: none of {total:,} requests can run; the last: {last}")
    return total


def _play(
    common: Common,
    llm: LLM,
    trace: Trace,
    requests: PlayRequests,
    serving: Serving,
    total: int,
    record_text: bool,
    *,
    keep: bool,
) -> tuple[Played, dict[str, Any]]:
    """The run, and its report."""
    from pagedjax.progress import bar
    from pagedjax.sim.play import play

    tally = serving.tally()
    recording: Any = nullcontext()
    if serving.record_file is not None:
        recording = llm.record(serving.record_file, text=record_text, about=about(common, "measured", trace))
    with recording, lines(serving.records) as write, bar("run", total, common.bars) as advance:

        def book(record: RequestRecord) -> None:
            tally.add(record)
            write(record)
            advance(1)

        played = play(
            requests,
            llm.engine,
            until_s=serving.until_s,
            in_flight=serving.in_flight or 0,
            hash_plans=serving.hash_plans,
            keep=keep,
            on_record=book,
        )
        if not tally.requests:  # refused: older files stay
            raise click.UsageError(f"{trace.name}: no request ended before --until {serving.until}; raise it")
    manager = llm.manager
    out = document(trace, f"{llm.model_name} here", serving, tally, played.result, manager)
    shares = {name: getattr(played, name) for name in ("wall_s", "idle_s", "compile_s", "between_s")}
    cut = dict(zip(("prompts", "answers"), played.cut))
    return played, {"kind": "measured", **out, **shares, "cut": cut}


def _show(out: dict[str, Any]) -> None:
    show(out)
    print(
        f"wall              {out['wall_s']:,.1f} s: {out['busy_s']:,.1f} in steps, {out['idle_s']:,.1f} waiting for "
        f"arrivals, {out['between_s']:,.2f} between steps, {out['compile_s']:,.1f} compiling"
    )
    if any(out["cut"].values()):
        print(f"cut               {out['cut']['prompts']:,} prompts, {out['cut']['answers']:,} answers")


def _comparison(found: Beside) -> dict[str, Any]:
    followed = found.followed
    return {
        "equal_plans": followed.equal,
        "equal_steps": followed.equal_steps,
        "steps": followed.steps,
        "plan_hash": followed.plan_hash if followed.equal else None,
        "measured_s": found.measured_s,
        "simulated_s": found.simulated_s,
        "ratio": found.ratio if found.measured_s else None,
        "step_error_median": None if math.isnan(found.step_error_median) else found.step_error_median,
        "basis": found.basis,
    }


def _show_both(out: dict[str, Any]) -> None:
    _show(out)
    theirs, same = out["simulated"], out["beside"]
    print()
    print(f"simulated         {same['basis']}")
    if same["equal_plans"]:
        print(
            f"the same plans    all {same['steps']:,}, with each request before the step it came before: sha256 "
            f"{same['plan_hash']}"
        )
    else:
        print(f"OTHER PLANS       from step {same['equal_steps'] + 1:,} of {same['steps']:,} on")
    if same["ratio"] is not None:
        print(
            f"their seconds     {same['measured_s']:,.2f} measured, {same['simulated_s']:,.2f} simulated: "
            f"{same['ratio']:.3f}; median error of a step {same['step_error_median']:.1%}"
        )
    if theirs is None:
        print("no request ended in the simulation")
        return
    print("on its own clock  measured    simulated   ratio")
    rows = [
        (f"{label} {p}", out[name][p], theirs[name][p]) for name, label in TIMES.items() for p in out[name]
    ]
    rows += [
        (name, out[name], theirs[name]) for name in ("requests_per_s", "tokens_per_s", "busy_s", "batch")
    ]
    if out["goodput"] is not None:
        rows.append(("goodput", out["goodput"], theirs["goodput"]))
    if out["hit_by_token"] is not None:
        rows.append(("hit rate", out["hit_by_token"], theirs["hit_by_token"]))
    for label, ours, other in rows:
        ratio = f"{other / ours:.3f}" if ours else ""
        print(f"  {label:<15} {ours:<11.4g} {other:<11.4g} {ratio}")
    print(
        "  "
        + "  ".join(
            f"{name} {out[name]:,} / {theirs[name]:,}" for name in ("steps", "preemptions", "requests")
        )
    )
