"""`pagedjax demo`: a real model decodes while its KV blocks are shared, copied on write and reused."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.generate import describe
from pagedjax.cli.options import Common, OutputFile, common_options, emit_json, refuse_with
from pagedjax.engine.request import RequestOutput, SamplingParams
from pagedjax.report.blocks import PoolPicture, draw_pool, draw_tables

if TYPE_CHECKING:
    from pagedjax.llm import LLM

DOCUMENT = """\
Notes on the Marrow Point lighthouse

The lighthouse at Marrow Point was built in 1874 by the engineer Ada Hollis. The tower is 41 metres \
tall and is painted white with two red bands. Its lamp once burned whale oil; since 1932 it has been \
electric. The keeper is Tomas Reyes, who lives in the stone cottage beside the tower with a grey cat \
named Biscuit.

On clear nights the light can be seen from 27 kilometres away. When fog comes in, a bronze bell rings \
every ninety seconds. The bell was cast in the town of Quarrel and carried to the point by eight oxen. \
In the winter of 1911 a storm broke the lantern glass, and for six nights the light was kept burning by \
hand behind a wall of wet sailcloth.

The ferry to Marrow Point leaves from the harbour of Elsby and takes fifty minutes. Visitors climb 203 \
steps to the gallery, where a brass telescope stands. Below the tower lies a garden of sea kale and \
lavender, planted by the first keeper's daughter. The lavender is sold in small blue bags, and the money \
pays for new paint every third spring. Nobody has ever counted the seals on the rocks, but Biscuit seems \
to know each of them by name.
"""
# Question, and the words of the document that answer it.
QUESTIONS = (
    ("Who built the lighthouse?", "Ada Hollis"),
    ("In which year was the lighthouse built?", "1874"),
    ("What is the name of the cat?", "Biscuit"),
    ("From which harbour does the ferry leave?", "Elsby"),
)
CAPITAL = ("What is the capital of France?", "Paris")
STORY = "Write a short story about a lighthouse keeper."
FOLLOW_UP = "Now give the story a title."
SAMPLED = "Give me one idea for a birthday present."
# Words that say nothing of their own: an answer may use them whatever the document says.
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a about after all also an and are as at be because been but by called can did do does for from had has have
        he her his i in into is it its me my name named no not of on one only or our s she so some than that the their
        them then there these they this those to up was we were what when where which while who whose will with you""",
    )
)


@click.command("demo")
@click.option(
    "--explain", is_flag=True, help="Walk through one request's life in the block manager; no model."
)
@click.option(
    "--report",
    type=OutputFile(deep=True),
    default=Path("results/demo.html"),
    show_default=True,
    help="Where the page that shows this run is written.",
)
@common_options(
    model__max_model_len=1024,
    cache__memory_bytes="256MiB",
    scheduler__max_num_seqs=4,
    scheduler__token_budget=256,
)
@click.pass_context
def command(ctx: click.Context, common: Common, explain: bool, report: Path) -> None:
    """Decode with shared, copied and reused KV blocks, and show them.

    Several questions over one document, cold and warm; a second chat turn that reuses the blocks the first
    one generated; four samples of one prompt that share its blocks and copy on write.
    """
    if explain:
        idle = ("report", "model", "config_file", "settings", "checked", "as_json", "quiet", "cache_dir")
        refuse_with(ctx, "--explain", idle)
        from pagedjax.cli.explain import Story

        Story(common.console()).tell()
        return
    llm = common.llm()
    started = time.perf_counter()
    common.note("compiling the step programs: about a minute on two cores the first time, then kept on disk")
    llm.warm_up(mixed=False)
    common.note(f"{llm.runner.num_programs} step programs ready after {time.perf_counter() - started:.0f} s")
    console = common.console()
    demo = Demo(llm, console.print if not common.as_json else lambda *_: None, not console.soft_wrap)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "demo.jsonl")
        with llm.record(record, text=True):
            demo.run()
        _write_report(record, report)
    if common.as_json:
        emit_json({"config": llm.config.to_dict(), **demo.results, "report": str(report)})
    else:
        demo.line(f"\nLook at what just happened, block by block, in a browser: {report}")


def _write_report(record: Path, out: Path) -> None:
    from pagedjax.paths import replace_text
    from pagedjax.report.facts import run_facts
    from pagedjax.report.page import page

    run = run_facts(record) | {"name": "pagedjax demo"}
    run["about"]["command"] = "pagedjax demo"
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page([run], [], title="What the demo did"))


@dataclass
class Demo:
    """The four scenes.

    Attributes:
        llm: A warmed-up engine of at least 4 sequences.
        say: Prints a rich renderable.
        wraps: It prints on a terminal, whose width lines keep to.
        results: What was shown, as plain data; filled by `run`.
    """

    llm: LLM
    say: Callable[..., Any]
    wraps: bool = False
    results: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Play all scenes."""
        self._title("1. One prompt")
        capital = self._answer(CAPITAL, self.llm.encode_chat(_chat(CAPITAL[0])))
        self.results["capital"] = _checked(CAPITAL, capital)
        self._document()
        self._second_turn()
        self._samples()
        self._statistics()

    # ---- scenes --------------------------------------------------------------------------------------------

    def _document(self) -> None:
        prompts = [self.llm.encode_chat(_chat(question, DOCUMENT)) for question, _ in QUESTIONS]
        self._title(f"2. {len(QUESTIONS)} questions over one document, about {len(prompts[0])} tokens each")
        outputs = [self._answer(asked, ids) for asked, ids in zip(QUESTIONS, prompts, strict=True)]
        cold, warm = outputs[0].ttft_s or 0.0, [output.ttft_s or 0.0 for output in outputs[1:]]
        saved = sum(output.num_cached_tokens for output in outputs[1:])
        blocks, pace = saved // self.llm.manager.block_size, cold / outputs[0].num_prompt_tokens
        self.line(
            f"first token: cold {cold * 1e3:.0f} ms, warm {min(warm) * 1e3:.0f} ms, {cold / min(warm):.1f} times "
            f"sooner. Saved by the cache in the last three: {saved} tokens ({blocks} blocks) not computed again, about "
            f"{saved * pace:.1f} s at the pace of the first.",
            2,
        )
        self.results |= {"saved_tokens": saved, "saved_blocks": blocks, "saved_s": saved * pace}
        self.results["document"] = [
            _checked(asked, output) for asked, output in zip(QUESTIONS, outputs, strict=True)
        ]
        self.results["ttft_cold_s"], self.results["ttft_warm_s"] = cold, min(warm)

        self.line(
            "\nAll four again, at once. The pool before, while they run (■ one owner, ▣ shared), and after:",
            2,
        )
        self.say(draw_pool(self._picture()))
        started = time.perf_counter()
        again = self._together(prompts, SamplingParams(max_tokens=24))
        elapsed = time.perf_counter() - started
        self.say(draw_pool(self._picture()))
        tokens = sum(len(output.outputs[0].token_ids) for output in again)
        self.line(f"{tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.1f} tokens per second", 2)
        same = all(
            a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(again, outputs, strict=True)
        )
        self.line(f"the same answers as alone: {'yes' if same else 'NO'}", 2)
        self.results |= {"batch_tokens_per_s": tokens / elapsed, "batch_equals_alone": same}

    def _second_turn(self) -> None:
        self._title("3. A second chat turn")
        messages = _chat(STORY)
        first_ids = self.llm.encode_chat(messages)
        first = self._show(STORY, first_ids, SamplingParams(max_tokens=64))
        messages += [
            {"role": "assistant", "content": first.outputs[0].text},
            {"role": "user", "content": FOLLOW_UP},
        ]
        second = self._show(FOLLOW_UP, self.llm.encode_chat(messages), SamplingParams(max_tokens=24))
        reused = max(0, second.num_cached_tokens - len(first_ids))
        self.line(
            f"{reused} of the {second.num_cached_tokens} cached tokens were generated in the first turn", 2
        )
        self.results["second_turn"] = {**describe(second), "reused_generated_tokens": reused}

    def _samples(self) -> None:
        self._title("4. Four samples of one prompt: one prefill, shared blocks, copies on write")
        params = SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=7, max_tokens=20)
        output = self._together([self.llm.encode_chat(_chat(SAMPLED))], params)[0]
        self.line(f"[bold]{SAMPLED}[/]", 2)
        for sample in output.outputs:
            self.line(f"{sample.index}: {_plain(sample.text)}", 2)
        self.line(f"blocks copied on write: {output.num_copies}", 2)
        self.results["samples"] = describe(output)

    def _statistics(self) -> None:
        stats = self.llm.manager.stats
        self._title("What the cache did")
        reasons = ", ".join(f"{reason} {count}" for reason, count in stats.miss_reasons.items())
        self.line(
            f"{stats.requests} requests, {stats.prompt_tokens:,} prompt tokens: {stats.hit_tokens:,} hits "
            f"({stats.hit_rate:.0%})\n"
            f"blocks: {stats.blocks_taken} handed out, {stats.blocks_indexed} indexed, {stats.copies} copied on "
            f"write, {stats.evictions} evicted\n"
            f"matches stopped for: {reasons} (docs/glossary.md says what each means)",
            2,
        )
        self.results["stats"] = dataclasses.asdict(stats) | {"hit_rate": stats.hit_rate}

    # ---- pieces --------------------------------------------------------------------------------------------

    def line(self, markup: str, indent: int = 0) -> None:
        """Print markup; on a terminal what does not fit the line goes on below with the same indent."""
        from rich.padding import Padding
        from rich.text import Text

        if self.wraps:
            self.say(Padding(Text.from_markup(markup), (0, 0, 0, indent)))
        else:  # a file or a pipe has no width
            blank = " " * indent
            self.say("\n".join(line and blank + line for line in markup.split("\n")))

    def _title(self, text: str) -> None:
        self.line(f"\n[bold underline]{text}[/]")

    def _answer(self, asked: tuple[str, str], ids: Sequence[int]) -> RequestOutput:
        return self._show(asked[0], ids, SamplingParams(max_tokens=24), span=asked[1])

    def _show(
        self, question: str, ids: Sequence[int], params: SamplingParams, span: str = ""
    ) -> RequestOutput:
        output = self.llm.generate([list(ids)], params, progress=False)[0]
        text = output.outputs[0].text
        mark = f" {_mark(question, span, text)}" if span else ""
        rate = ""
        generated = len(output.outputs[0].token_ids)
        if output.ttft_s is not None and output.latency_s is not None and generated > 1:
            rate = f", {(generated - 1) / (output.latency_s - output.ttft_s):.0f} tokens/s"
        self.line(f"[bold]{question}[/]", 2)
        self.line(_plain(text) + mark, 4)
        self.line(
            f"[dim]{output.num_prompt_tokens} prompt tokens, {output.num_cached_tokens} from the cache "
            f"(match stopped: {output.miss_reason}), first token {(output.ttft_s or 0) * 1e3:.0f} ms{rate}[/]",
            4,
        )
        return output

    def _together(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        """Run prompts in one batch and draw the tables once all sequences have blocks of their own."""
        engine = self.llm.engine
        order = [engine.add(ids, params) for ids in prompts]
        done: dict[str, RequestOutput] = {}
        drawn = False
        try:
            while len(done) < len(order):
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = output
                if not drawn and (tables := self._tables(len(order) * params.n)):
                    drawn = True
                    self.say(draw_tables(self._picture(tables)))
                    self.say(draw_pool(self._picture(tables)))
        finally:
            for request in order:
                engine.abort(request)
        return [done[request] for request in order]

    def _tables(self, expected: int) -> dict[str, int]:
        """Label to sequence id, once as many as expected have decoded two tokens."""
        running = [seq for request in self.llm.engine.scheduler.running for seq in request.live]
        if len(running) != expected or any(seq.num_output_tokens < 2 for seq in running):
            return {}
        return {f"request {seq.request.request_id}.{seq.index}": seq.seq_id for seq in running}

    def _picture(self, tables: dict[str, int] | None = None) -> PoolPicture:
        from pagedjax.cache import PagedManager

        manager = self.llm.manager
        if not isinstance(manager, PagedManager):
            raise ValueError("cache.reservation: the demo draws shared blocks; leave it empty")
        return PoolPicture.take(manager, tables or {})


def _chat(question: str, document: str = "") -> list[dict[str, str]]:
    first = [{"role": "system", "content": document}] if document else []
    return [*first, {"role": "user", "content": question}]


def unsupported(question: str, answer: str) -> list[str]:
    """Words of an answer that stand neither in the document nor in the question, and carry meaning."""
    return sorted(_words(answer) - _words(DOCUMENT) - _words(question) - _FUNCTION_WORDS)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _mark(question: str, span: str, answer: str) -> str:
    """A tick only where the answer is right and says no more than the document does."""
    if span not in answer:
        return f"[red]✗ expected: {span}[/]"
    more = sorted(set(unsupported(question, answer)) - _words(span))
    return f"[yellow]~ names {span}; not in the text: {', '.join(more)}[/]" if more else "[green]✓[/]"


def _checked(asked: tuple[str, str], output: RequestOutput) -> dict[str, Any]:
    question, span = asked
    return {
        "question": question,
        "expected": span,
        "found": span in output.outputs[0].text,
        "unsupported": unsupported(question, output.outputs[0].text),
        **describe(output),
    }


def _plain(text: str) -> str:
    """On one line, and safe from being read as rich markup."""
    from rich.markup import escape

    return escape(" ".join(text.split()))
