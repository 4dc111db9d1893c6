"""`pagedjax compare`: two runs of the same prompts under two settings, and where their tokens part; or two records."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import Common, common_options, emit_json
from pagedjax.config import load_config

if TYPE_CHECKING:
    from pagedjax.report.differences import Difference, Told

_RECORDS = (".jsonl", ".jsonl.gz")


@click.command("compare")
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@click.argument("prompts", nargs=-1)
@click.option(
    "--file", "files", metavar="FILE", multiple=True, help="Prompts, one a line; .jsonl as in generate."
)
@click.option("--chat/--raw", default=True, show_default=True, help="Wrap each prompt in the chat template.")
@click.option("--max-tokens", default=64, show_default=True, help="Most tokens to generate per sample.")
@click.option("--n", default=1, show_default=True, help="Samples per prompt.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, help="Fixes the samples.")
@common_options()
def command(
    common: Common,
    one: str,
    other: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    n: int,
    temperature: float,
    seed: int,
) -> int:
    """Find the first token that PROMPTS get otherwise under settings A than under B, and whether rounding explains it.

    A and B are settings, as cache.prefix_caching=false,scheduler.chunk_tokens=64, or TOML files of
    settings; "" changes nothing. --model, --config and --set hold for both. Two records (.jsonl,
    .jsonl.gz) in their place are compared step by step: they hold no tokens.

    Exit code 1 where something differs that rounding does not explain.
    """
    if one.endswith(_RECORDS) or other.endswith(_RECORDS):
        return _records(common, one, other, prompts or files)
    from pagedjax.cli.generate import jobs_of
    from pagedjax.report.differences import compare

    jobs = jobs_of(prompts, files, chat)
    if not jobs:
        raise click.UsageError("no prompt; give one behind A and B, or --file FILE")
    sampling = {"max_tokens": max_tokens, "n": n, "temperature": temperature, "seed": seed}
    configs = [_settings(common, text) for text in (one, other)]
    if configs[0].config == configs[1].config:
        raise click.UsageError("A and B: are the same settings; change one of them")
    told, dtypes = [], set()
    for name, side in zip("AB", configs, strict=True):
        common.note(f"{name}: {len(jobs)} prompts")
        run, used = _run(side, name, jobs, sampling)
        told.append(run)
        dtypes |= used
    found = list(compare(told[0], told[1], sorted(dtypes)))
    some = [difference for difference in found if difference is not None]
    if common.as_json:
        emit_json(
            {
                "configs": {name: side.config.to_dict() for name, side in zip("AB", configs, strict=True)},
                "samples": len(found),
                "differences": [{**asdict(d), "rounding": d.rounding} for d in some],
            }
        )
    else:
        print(f"{len(found) - len(some)} of {len(found)} samples have equal tokens")
        for difference in some:
            print(describe(difference))
    return int(any(not difference.rounding for difference in some))


def _settings(common: Common, text: str) -> Common:
    """One side: a TOML file over what holds for both, or settings between commas."""
    if text.endswith(".toml"):
        return replace(common, config=load_config(Path(text), [], base=common.config))
    return replace(
        common, config=load_config(None, [part for part in text.split(",") if part], base=common.config)
    )


def _run(
    side: Common, name: str, jobs: list[dict[str, Any]], sampling: dict[str, Any]
) -> tuple[Told, set[str]]:
    """The prompts under one side's settings, all at once, in an engine of its own."""
    from pagedjax.cli.generate import encoded
    from pagedjax.engine.request import SamplingParams
    from pagedjax.report.differences import LIKELIEST, Told

    told = Told(name)
    llm = side.llm()
    llm.engine.on_step = told.hook(llm.runner.program_of)
    params = SamplingParams(ignore_eos=False, logprobs=LIKELIEST, **sampling)
    told.outputs = llm.generate([encoded(llm, job, {}) for job in jobs], params)
    return told, {layout.dtype for layout in llm.runner.layouts} | {llm.runner.dtype}


def describe(difference: Difference) -> str:
    """A difference in some lines."""
    d = difference
    verdict = (
        f"rounding explains it: the two tokens' scores part by {d.swing:.2g}, of at most {d.limit:g}"
        if d.rounding
        else "rounding does not explain it: "
        + (
            "one of the tokens is not among the likeliest of the other run"
            if d.swing is None
            else f"the two tokens' scores part by {d.swing:.2g}, more than {d.limit:g}"
        )
    )
    lines = [f"prompt {d.prompt}, sample {d.sample}, token {d.position} of the answer: {verdict}"]
    before = "no token before it" if d.noise is None else f"scores before it part by at most {d.noise:.2g}"
    lines.append(f"  {before}")
    for at, name in enumerate("AB"):
        token = "had ended" if d.tokens[at] is None else f"token {d.tokens[at]}"
        gap = "" if d.gaps[at] is None else f", {d.gaps[at]:.2g} above the second"
        place = "" if d.places[at] is None else f"; {d.places[at]}"
        lines.append(
            f"  {name}: {token}{gap}; {d.cached[at]} prompt tokens cached, preempted {d.preemptions[at]} times{place}"
        )
    return "\n".join(lines)


def _records(common: Common, one: str, other: str, prompts: tuple[str, ...]) -> int:
    from pagedjax.report.differences import compare_records
    from pagedjax.report.replay import read_record

    if prompts:
        raise click.UsageError("PROMPTS and --file: have no effect with two records; leave them out")
    for path in (one, other):
        if not path.endswith(_RECORDS):
            raise click.UsageError(f"{path}: must be a record, as the other is; or give settings for both")
    found = compare_records(read_record(one), read_record(other))
    if common.as_json:
        emit_json({"difference": None if found is None else asdict(found)})
    elif found is None:
        print("the same rows and hits in every step")
    else:
        print(f"step {found.step} is the first that differs")
        for name, rows, hits in zip("AB", found.rows, found.hits, strict=True):
            for request, sample, start, tokens in rows[:8]:
                print(f"  only {name}: request {request}, sample {sample}: {tokens} tokens from {start} on")
            if len(rows) > 8:
                print(f"  only {name}: {len(rows) - 8} more rows")
            for request, cached in hits.items():
                print(f"  {name} admits request {request} with {cached} tokens cached")
    return int(found is not None)
