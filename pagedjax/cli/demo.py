"""`pagedjax demo`: a real model decodes while its KV blocks are shared, copied on write and reused."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.generate import describe
from pagedjax.cli.options import Common, common_options, emit_json, refuse_with
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


@click.command("demo")
@click.option(
    "--explain", is_flag=True, help="Walk through one request's life in the block manager; no model."
)
@common_options(
    model__max_model_len=1024,
    cache__memory_bytes="256MiB",
    scheduler__max_num_seqs=4,
    scheduler__token_budget=256,
)
@click.pass_context
def command(ctx: click.Context, common: Common, explain: bool) -> None:
    """Decode with shared, copied and reused KV blocks, and show them.

    Several questions over one document, cold and warm; a second chat turn that reuses the blocks the first
    one generated; four samples of one prompt that share its blocks and copy on write.
    """
    if explain:
        idle = ("model", "config_file", "settings", "checked", "as_json", "quiet", "cache_dir")
        refuse_with(ctx, "--explain", idle)
        from pagedjax.cli.explain import Story

        Story(common.console()).tell()
        return
    llm = common.llm()
    started = time.perf_counter()
    common.note("compiling the step programs: about a minute on two cores the first time, then kept on disk")
    llm.warm_up(mixed=False)
    common.note(f"{llm.runner.num_programs} step programs ready after {time.perf_counter() - started:.0f} s")
    demo = Demo(llm, common.console().print if not common.as_json else lambda *_: None)
    demo.run()
    if common.as_json:
        emit_json({"config": llm.config.to_dict(), **demo.results})


@dataclass
class Demo:
    """The four scenes.

    Attributes:
        llm: A warmed-up engine of at least 4 sequences.
        say: Prints rich markup.
        results: What was shown, as plain data; filled by `run`.
    """

    llm: LLM
    say: Callable[..., Any]
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
        self.say(
            f"  first token: cold {cold * 1e3:.0f} ms, warm {min(warm) * 1e3:.0f} ms, "
            f"{cold / min(warm):.1f} times sooner"
        )
        self.results["document"] = [
            _checked(asked, output) for asked, output in zip(QUESTIONS, outputs, strict=True)
        ]
        self.results["ttft_cold_s"], self.results["ttft_warm_s"] = cold, min(warm)

        self.say(
            "\n  All four again, at once. The pool before, while they run (■ one owner, ▣ shared), and after:"
        )
        self.say(draw_pool(self._picture()))
        started = time.perf_counter()
        again = self._together(prompts, SamplingParams(max_tokens=24))
        elapsed = time.perf_counter() - started
        self.say(draw_pool(self._picture()))
        tokens = sum(len(output.outputs[0].token_ids) for output in again)
        self.say(f"  {tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.1f} tokens per second")
        same = all(
            a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(again, outputs, strict=True)
        )
        self.say(f"  the same answers as alone: {'yes' if same else 'NO'}")
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
        self.say(
            f"  {reused} of the {second.num_cached_tokens} cached tokens were generated in the first turn"
        )
        self.results["second_turn"] = {**describe(second), "reused_generated_tokens": reused}

    def _samples(self) -> None:
        self._title("4. Four samples of one prompt: one prefill, shared blocks, copies on write")
        params = SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=7, max_tokens=20)
        output = self._together([self.llm.encode_chat(_chat(SAMPLED))], params)[0]
        self.say(f"  [bold]{SAMPLED}[/]")
        for sample in output.outputs:
            self.say(f"  {sample.index}: {_plain(sample.text)}")
        self.say(f"  blocks copied on write: {output.num_copies}")
        self.results["samples"] = describe(output)

    def _statistics(self) -> None:
        stats = self.llm.manager.stats
        self._title("What the cache did")
        reasons = ", ".join(f"{reason} {count}" for reason, count in stats.miss_reasons.items())
        self.say(
            f"  {stats.requests} requests, {stats.prompt_tokens:,} prompt tokens: {stats.hit_tokens:,} hits "
            f"({stats.hit_rate:.0%})\n"
            f"  blocks: {stats.blocks_taken} handed out, {stats.blocks_indexed} indexed, {stats.copies} copied on "
            f"write, {stats.evictions} evicted\n"
            f"  matches stopped for: {reasons}"
        )
        self.results["stats"] = dataclasses.asdict(stats) | {"hit_rate": stats.hit_rate}

    # ---- pieces --------------------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self.say(f"\n[bold underline]{text}[/]")

    def _answer(self, asked: tuple[str, str], ids: Sequence[int]) -> RequestOutput:
        return self._show(asked[0], ids, SamplingParams(max_tokens=24), span=asked[1])

    def _show(
        self, question: str, ids: Sequence[int], params: SamplingParams, span: str = ""
    ) -> RequestOutput:
        output = self.llm.generate([list(ids)], params, progress=False)[0]
        text = _plain(output.outputs[0].text)
        mark = "" if not span else (" [green]✓[/]" if span in text else f" [red](expected: {span})[/]")
        rate = ""
        generated = len(output.outputs[0].token_ids)
        if output.ttft_s is not None and output.latency_s is not None and generated > 1:
            rate = f", {(generated - 1) / (output.latency_s - output.ttft_s):.0f} tokens/s"
        self.say(f"  [bold]{question}[/]\n    {text}{mark}")
        self.say(
            f"    [dim]{output.num_prompt_tokens} prompt tokens, {output.num_cached_tokens} from the cache "
            f"(match stopped: {output.miss_reason}), first token {(output.ttft_s or 0) * 1e3:.0f} ms{rate}[/]"
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


def _checked(asked: tuple[str, str], output: RequestOutput) -> dict[str, Any]:
    question, span = asked
    return {
        "question": question,
        "expected": span,
        "found": span in output.outputs[0].text,
        **describe(output),
    }


def _plain(text: str) -> str:
    """On one line, and safe from being read as rich markup."""
    from rich.markup import escape

    return escape(" ".join(text.split()))
