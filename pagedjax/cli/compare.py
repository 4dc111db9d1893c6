"""`pagedjax compare`: two runs of the same prompts under two settings, and where their tokens part; or two records."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import Common, common_options, emit_json, refuse_with
from pagedjax.config import load_config

if TYPE_CHECKING:
    from pagedjax.engine.request import SamplingParams
    from pagedjax.llm import LLM
    from pagedjax.report.differences import Difference, Told

_RECORDS = (".jsonl", ".jsonl.gz")
# Of prompts and engines, where there are records.
_IDLE = (
    "files",
    "chat",
    "max_tokens",
    "n",
    "temperature",
    "seed",
    "model",
    "config_file",
    "settings",
    "checked",
    "cache_dir",
)


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
        if prompts:
            raise click.UsageError("PROMPTS: have no effect with two records; leave them out")
        refuse_with(click.get_current_context(), "two records", _IDLE)
        return _records(common, one, other)
    from pagedjax.cli.generate import jobs_of
    from pagedjax.engine.request import SamplingParams
    from pagedjax.report.differences import LIKELIEST, compare

    jobs = jobs_of(prompts, files, chat)
    if not jobs:
        raise click.UsageError("no prompt; give one behind A and B, or --file FILE")
    params = SamplingParams(
        max_tokens=max_tokens, n=n, temperature=temperature, seed=seed, logprobs=LIKELIEST
    )
    configs = [_settings(common, text) for text in (one, other)]
    if configs[0].config == configs[1].config:
        raise click.UsageError("A and B: are the same settings; change one of them")
    llms = [side.llm() for side in configs]  # both, so that what one refuses is said before the other runs
    dtypes = {dtype for llm in llms for dtype in (llm.runner.dtype, *(l.dtype for l in llm.runner.layouts))}
    ids = _same_tokens(llms, jobs)
    told = []
    for name in "AB":
        common.note(f"{name}: {len(jobs)} prompts")
        told.append(_run(llms.pop(0), name, ids, params))
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


def _same_tokens(llms: list[LLM], jobs: list[dict[str, Any]]) -> list[list[int]]:
    """The prompts as tokens, which must be the same under A as under B."""
    from pagedjax.cli.generate import encoded

    ids, others = ([encoded(llm, job, {}) for job in jobs] for llm in llms)
    for number, (one, other) in enumerate(zip(ids, others, strict=True)):
        if one != other:
            raise ValueError(
                f"prompt {number}: {len(one)} tokens under A, {len(other)} others under B: runs are compared token by "
                "token; choose models of one tokenizer and template, or --raw"
            )
    return ids


def _run(llm: LLM, name: str, prompts: list[list[int]], params: SamplingParams) -> Told:
    """The prompts in one side's engine, all at once."""
    from pagedjax.report.differences import Told

    told = Told(name)
    llm.engine.on_step = told.hook(llm.runner.program_of)
    told.outputs = llm.generate(prompts, params)
    return told


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


def _records(common: Common, one: str, other: str) -> int:
    from pagedjax.report.differences import compare_records
    from pagedjax.report.replay import read_record

    for path in (one, other):
        if not path.endswith(_RECORDS):
            raise click.UsageError(f"{path}: must be a record, as the other is; or give settings for both")
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "no such file"
            raise click.UsageError(f"{path}: {what}; give a record, as --record FILE writes it")
    if os.path.samefile(one, other):
        raise click.UsageError(f"A and B: are the same file {one}; name two")
    found = compare_records(read_record(one), read_record(other))
    if common.as_json:
        emit_json({"difference": None if found is None else asdict(found)})
    elif found is None:
        print("the same rows and hits in every step")
    else:
        print(f"step {found.step} is the first that differs")
        for name, rows, hits, ended in zip("AB", found.rows, found.hits, found.ended, strict=True):
            if ended:
                print(f"  {name} ends before it{': the record was cut' if ended == 'cut' else ''}")
            for request, sample, start, tokens in rows[:8]:
                print(f"  only {name}: request {request}, sample {sample}: {tokens} tokens from {start} on")
            if len(rows) > 8:
                print(f"  only {name}: {len(rows) - 8} more rows")
            for request, cached in hits.items():
                print(f"  {name} admits request {request} with {cached} tokens cached")
    return int(found is not None)
