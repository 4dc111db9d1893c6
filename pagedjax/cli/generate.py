"""`pagedjax generate`: complete prompts, or answer them, and say what the cache did for each."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import Common, OutputFile, common_options, emit_json
from pagedjax.engine.request import PositionLogprobs, RequestOutput, SamplingParams
from pagedjax.models.chat import plain_messages

if TYPE_CHECKING:
    from pagedjax.cache.events import CacheEvent
    from pagedjax.llm import LLM
    from pagedjax.runtime.hosts import Hosts


_EARLY: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}


@click.command("generate")
@click.argument("prompts", nargs=-1)
@click.option(
    "--file", "files", metavar="FILE", multiple=True, help="Prompts, one a line; .jsonl: see below."
)
@click.option("--chat/--raw", default=True, show_default=True, help="Wrap each prompt in the chat template.")
@click.option("--system", metavar="TEXT", help="System message in front of each chat prompt.")
@click.option(
    "--template-arg",
    "template_args",
    metavar="KEY=VALUE",
    multiple=True,
    help="What the chat template asks for, as enable_thinking=false; the value is JSON or text; repeatable.",
)
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to generate per sample.")
@click.option("--n", default=1, show_default=True, help="Samples per prompt; they share the prompt's blocks.")
@click.option("--best-of", type=int, help="Draw so many samples, print the --n likeliest.")
@click.option("--beam-width", default=0, show_default=True, help="Beam search; --n beams are printed.")
@click.option("--length-penalty", default=1.0, show_default=True, help="Beams: favours length above 0.")
@click.option(
    "--early-stopping",
    type=click.Choice(["yes", "no", "never"]),
    default="no",
    show_default=True,
    help="Beams: stop when all have ended (yes), no better one is likely (no) or possible (never).",
)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the most likely mass; 1 keeps all.")
@click.option(
    "--min-p", default=0.0, show_default=True, help="Keep tokens this likely against the best; 0: all."
)
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1: against repeating.")
@click.option("--presence-penalty", default=0.0, show_default=True, help="Off the logit of tokens used.")
@click.option("--frequency-penalty", default=0.0, show_default=True, help="The same for each time used.")
@click.option("--min-tokens", default=0, show_default=True, help="Do not end before so many tokens.")
@click.option("--seed", type=int, help="Fixes the samples, whatever else is in the batch.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end-of-sequence tokens.")
@click.option("--logprobs", is_flag=True, help="With --json: log-probability of each token.")
@click.option("--prompt-logprobs", is_flag=True, help="With --json: of each prompt token; reads no cache.")
@click.option("--salt", metavar="TEXT", help="Cache salt: blocks are shared only under an equal one.")
@click.option(
    "--retention",
    default=0,
    show_default=True,
    help="With cache.policy=retention: blocks of more stay longer.",
)
@click.option(
    "--group",
    metavar="NAME",
    default="",
    help="With cache.policy=workload-aware: the prompts' category, whose blocks come back alike.",
)
@click.option("--ttl", "ttl_s", type=float, help="Seconds for which --retention holds.  [default: for ever]")
@click.option(
    "--cache-read/--no-cache-read", default=True, help="Take prefixes from the cache, or compute all."
)
@click.option("--cache-write/--no-cache-write", default=True, help="Leave blocks in the cache, or none.")
@click.option("--priority", default=0, show_default=True, help="Higher is admitted first, preempted last.")
@click.option("--load-cache", metavar="DIR", help="Take a snapshot's blocks into the cache first.")
@click.option(
    "--save-cache",
    metavar="DIR",
    type=OutputFile(folder=True),
    help="Write the prompts' blocks there at the end.",
)
@click.option(
    "--record",
    "record",
    metavar="FILE",
    type=OutputFile(),
    help="Write down the run, for `pagedjax report`; .gz: gzip.",
)
@click.option("--record-text", is_flag=True, help="With --record: the prompts' text, too.")
@click.option("--stats", "show_stats", is_flag=True, help="Say at the end what cache and engine have done.")
@click.option(
    "--hosts",
    "address",
    metavar="HOST:PORT|auto",
    help="Several processes: where process 0 is; auto: as the launcher says (SLURM, Open MPI, Cloud TPU, …).",
)
@click.option("--processes", type=click.IntRange(min=2), help="With --hosts: how many.")
@click.option("--process", type=click.IntRange(min=0), help="With --hosts: which is this, from 0.")
@click.option("--stream/--no-stream", default=None, help="Print text as it comes.  [default: on a terminal]")
@common_options()
def command(
    common: Common,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    chat: bool,
    system: str | None,
    template_args: tuple[str, ...],
    salt: str | None,
    load_cache: str | None,
    save_cache: Path | None,
    record: Path | None,
    record_text: bool,
    priority: int,
    show_stats: bool,
    stream: bool | None,
    early_stopping: str,
    address: str | None,
    processes: int | None,
    process: int | None,
    **sampling: Any,
) -> None:
    """Complete PROMPTS; "-" reads one prompt from stdin.

    A line of a .jsonl file is an object with "prompt" (text), "token_ids" or "messages".
    Sampling options that are not given are the model's own, of its generation_config.json.

    Text goes to stdout; a line for each prompt on stderr says how many of its tokens came from the
    cache, how many blocks were copied, and why the match stopped. --json puts all of it on stdout.
    """
    hosts = _hosts(address, processes, process)
    params = SamplingParams(early_stopping=_EARLY[early_stopping], **sampling)
    for name, text in [("--system", system), ("--salt", salt), *(("--stop", s) for s in sampling["stop"])]:
        _check_text(name, text)
    for name in ("logprobs", "prompt_logprobs"):
        if sampling[name] and not common.as_json:
            raise click.UsageError(f"--{name.replace('_', '-')}: is printed with --json only; give it, too")
    if record_text and record is None:
        raise click.UsageError("--record-text: needs --record FILE")
    # Above is what every process of a launcher sees, and ends for; files and stdin are process 0's.
    if hosts is not None and hosts.index:
        common.llm(hosts=hosts).follow()
        return
    jobs = jobs_of(prompts, files, chat, system)
    if not jobs:
        raise click.UsageError('no prompt; give one as an argument, --file FILE, or "-" for stdin')
    from pagedjax.cache import ExtraKeys

    extra = ExtraKeys(salt=salt)
    llm = common.llm(
        on_compile=lambda bucket: common.note(f"compiling a step of {bucket} (once)"), hosts=hosts
    )
    params = _with_defaults(common, llm, {"early_stopping": _EARLY[early_stopping], **sampling})
    arguments = _template_args(template_args)
    if arguments and not any("messages" in job for job in jobs):
        raise ValueError("--template-arg: needs a chat prompt; leave out --raw")
    prompts_ids = [encoded(llm, job, arguments) for job in jobs]
    if load_cache is not None:
        common.note(f"{load_cache}: {llm.load_cache(load_cache)} tokens can be hit")
    if stream is None:
        stream = sys.stdout.isatty() and not common.as_json and len(jobs) == 1
    with nullcontext() if record is None else llm.record(record, text=record_text):
        if stream and not common.as_json and params.num_sequences == 1:
            for ids in prompts_ids:
                _print_stream(common, llm, ids, params, extra=extra, priority=priority)
        else:
            outputs = llm.generate(prompts_ids, params, extra=extra, priority=priority)
            _print_outputs(common, llm, outputs, params, show_stats)
    if record is not None:
        common.note(f"{record}: written; pagedjax report OUT.html --run {record}")
    if show_stats and not common.as_json:
        for name, counts in llm.stats().items():
            common.note(f"{name}: {', '.join(f'{key} {value}' for key, value in counts.items())}")
    if save_cache is not None:
        common.note(f"{save_cache}: {llm.save_cache(save_cache, prompts_ids, extra=extra)} tokens saved")


def _hosts(address: str | None, processes: int | None, process: int | None) -> Hosts | None:
    """The processes of a run, where there are several."""
    given = [value is not None for value in (address, processes, process)]
    if not any(given):
        return None
    if address == "auto":
        if any(given[1:]):
            raise click.UsageError(
                "--hosts auto: the launcher knows --processes and --process; leave them out"
            )
        from pagedjax.runtime.hosts import Hosts

        return Hosts.of_launcher()
    if not all(given):
        raise click.UsageError("--hosts, --processes and --process: belong together; give all three")
    from pagedjax.runtime.hosts import Hosts

    return Hosts(str(address), int(processes or 0), int(process or 0))


def _with_defaults(common: Common, llm: LLM, options: dict[str, Any]) -> SamplingParams:
    """The options that were given, and the model's own settings where none was; says so."""
    context, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    given = {
        name: value for name, value in options.items() if context.get_parameter_source(name) is not default
    }
    params = llm.default_sampling(**{**given, "early_stopping": options["early_stopping"]})
    used = {name: getattr(params, name) for name in llm.understood.sampling if name not in given}
    if used:
        listed = ", ".join(f"{name}={value}" for name, value in used.items())
        common.note(f"sampling of {llm.understood.sampling_source}: {listed} (options override it)")
    return params


def _template_args(settings: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--template-arg {setting}: must be KEY=VALUE, as enable_thinking=false")
        try:
            out[key] = json.loads(value)
        except ValueError:
            out[key] = value
    return out


def _print_outputs(
    common: Common, llm: LLM, outputs: list[RequestOutput], params: SamplingParams, show_stats: bool
) -> None:
    if common.as_json:
        emit_json(
            {
                "config": common.config.to_dict(),
                "outputs": [describe(output) for output in outputs],
                **({"stats": llm.stats()} if show_stats else {}),
                **({} if llm.events is None else {"events": list(map(_event, llm.events.events))}),
            }
        )
        return
    for output in outputs:
        for sample in output.outputs:
            score = "" if sample.score is None else f" ({sample.score:.3f})"
            print(f"[{sample.index}]{score} {sample.text}" if params.n > 1 else sample.text)
        common.note(summary(output))


def jobs_of(
    prompts: tuple[str, ...], files: Sequence[str], chat: bool, system: str | None = None
) -> list[dict[str, Any]]:
    """What to complete: prompts as typed ("-" is stdin), then those of the files; each as in a .jsonl file."""
    from_files = (job for file in files for job in _from_file(Path(file), chat, system))
    return [*_typed(prompts, chat, system), *from_files]


def _typed(prompts: tuple[str, ...], chat: bool, system: str | None) -> list[dict[str, Any]]:
    return [_job(_stdin() if prompt == "-" else prompt, chat, system) for prompt in prompts]


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:  # a strict locale
        raise ValueError("prompt: stdin is not UTF-8 text; convert it first") from None


def _job(prompt: str, chat: bool, system: str | None) -> dict[str, Any]:
    if not prompt:
        raise ValueError("prompt: is empty; give at least one character")
    _check_text("prompt", prompt)
    if not chat:
        if system is not None:
            raise ValueError("--system: needs a chat prompt; leave out --raw")
        return {"prompt": prompt}
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, {"role": "user", "content": prompt}]}


def _from_file(path: Path, chat: bool, system: str | None) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        found = "is not a file" if path.exists() else "no such file"
        raise ValueError(f"--file {path}: {found}; give a text or .jsonl file")
    from pagedjax.sim.records import OPENERS, lines, parse

    name = Path(path.stem if path.suffix.lower() in OPENERS else path.name)
    for number, line in lines(path):
        if name.suffix == ".jsonl":
            yield _json_job(f"{path}:{number}", parse(path, number, line, "must be one object a line"))
        else:
            yield _job(line.rstrip("\n"), chat, system)


def _json_job(where: str, job: Any) -> dict[str, Any]:
    kinds = {"prompt": str, "token_ids": list, "messages": list}
    fields = job if isinstance(job, dict) else {}
    for key in fields:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            raise ValueError(
                f"{where}: {key!r} is not known here; "
                + (f"did you mean {near[0]}?" if near else "leave it out")
            )
    given = {k: fields[k] for k, t in kinds.items() if isinstance(fields.get(k), t) and fields[k]}
    if len(given) != 1 or sum(value is not None for value in fields.values()) != 1:
        raise ValueError(
            f'{where}: must be an object with one of "prompt", "token_ids" or "messages", not empty'
        )
    messages = given.get("messages", [])
    if not all(isinstance(m, dict) and isinstance(m.get("content"), (str, list)) for m in messages):
        raise ValueError(f'{where}: each message must be an object with "role" and "content"')
    try:
        messages = plain_messages(messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not all(type(t) is int for t in given.get("token_ids", [])):
        raise ValueError(f"{where}: token_ids must be whole numbers")
    for text in (given.get("prompt"), *(part for m in messages for part in m.values())):
        _check_text(where, text)
    return given


def _check_text(where: str, text: Any) -> None:
    """Refuse what no tokenizer takes: bytes that were no UTF-8, which Python keeps as lone surrogates."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: is not UTF-8 text; convert it first") from None


def encoded(llm: LLM, job: dict[str, Any], template_args: dict[str, Any]) -> list[int]:
    """The token ids of an object of `jobs_of`."""
    if "messages" in job:
        return llm.encode_chat(job["messages"], template_args=template_args)
    return llm.encode(job.get("prompt") or job["token_ids"])


def _print_stream(common: Common, llm: LLM, ids: list[int], params: SamplingParams, **options: Any) -> None:
    shown = 0
    last: RequestOutput | None = None
    for last in llm.stream(ids, params, **options):
        text = last.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
    if last is not None:
        common.note(summary(last))


def summary(output: RequestOutput) -> str:
    """One line on what a request cost and what the cache gave it."""
    generated = sum(len(sample.token_ids) for sample in output.outputs)
    times = ""
    if output.ttft_s is not None and output.latency_s is not None:
        compiling = output.ttft_times.compiling_s if output.ttft_times is not None else 0.0
        of_it = f" ({compiling * 1e3:.0f} compiling)" if compiling else ""
        times = f" · first token {output.ttft_s * 1e3:.0f} ms{of_it}, total {output.latency_s:.2f} s"
    return (
        f"  prompt {output.num_prompt_tokens} tokens, {output.num_cached_tokens} cached "
        f"(match stopped: {output.miss_reason}) · generated {generated} · copies {output.num_copies}{times}"
    )


def _event(event: CacheEvent) -> dict[str, Any]:
    digests = {"keys": [key.hex() for key in event.keys], "parent": event.parent and event.parent.hex()}
    return {**dataclasses.asdict(event), **digests}


def _own(entries: Sequence[PositionLogprobs | None]) -> list[float | None]:
    return [None if entry is None else entry.token.logprob for entry in entries]


def describe(output: RequestOutput) -> dict[str, Any]:
    """A request's output as plain data."""
    return {
        "request_id": output.request_id,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "matched_tokens": output.matched_tokens,
        "miss_reason": output.miss_reason,
        "num_copies": output.num_copies,
        "num_preemptions": output.num_preemptions,
        "ttft_s": output.ttft_s,
        "latency_s": output.latency_s,
        "ttft_times": None if output.ttft_times is None else output.ttft_times._asdict(),
        "times": None if output.times is None else output.times._asdict(),
        **({} if output.prompt_logprobs is None else {"prompt_logprobs": _own(output.prompt_logprobs)}),
        "samples": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                **({} if sample.logprobs is None else {"logprobs": list(sample.logprobs)}),
                **({} if sample.score is None else {"score": sample.score}),
            }
            for sample in output.outputs
        ],
    }
