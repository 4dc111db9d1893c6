"""A runner without a model whose next token depends on every token it can read through the block table.

It stores token ids where a real runner stores keys and values. A wrong table, a missed copy, a block that
was handed out too early or shared too long changes what is read, hence the tokens that come out.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine, StepResult
from pagedjax.engine.request import MAX_CANDIDATES, RequestOutput, SamplingParams
from pagedjax.engine.step import StepPlan

VOCAB = 97
UNWRITTEN = -1


def next_token(tokens: Sequence[int], salt: int = 0) -> int:
    """What follows `tokens`: any single change among them changes it with probability 1 - 1/VOCAB."""
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes(), salt) % VOCAB


def toy_logprobs(tokens: Sequence[int]) -> np.ndarray:
    """f64[VOCAB] of what follows `tokens`; drawn anew for each of them."""
    logits = np.random.default_rng(zlib.crc32(np.asarray(tokens, np.int64).tobytes())).normal(0, 2, VOCAB)
    return logits - np.log(np.exp(logits).sum())


def dense_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The judge: no cache, no blocks, no batch."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Launched(NamedTuple):
    """A step that the toy has computed: who drew, and what nobody was told yet; `lost` where `collect` is to fail."""

    samples: list[Any]
    result: StepResult
    lost: bool = False
    several: Sequence[StepResult] = ()


class ToyRunner:
    """Executes plans on a pool of token ids; keeps every plan for the tests to look at."""

    def __init__(self, manager: PagedManager) -> None:
        self.manager = manager
        self.pool_blocks = manager.pool_blocks
        self.block_size = manager.block_size
        self.vocab_size = None
        self.pool = np.full((manager.num_blocks, manager.block_size), UNWRITTEN, np.int64)
        self.host = np.full((manager.host_blocks, manager.block_size), UNWRITTEN, np.int64)
        self.block_bytes = (1000,)
        self.weights_version = 0
        self.token_s, self.block_s = 0.0, 0.0  # seconds per token and per swapped block
        self.plans: list[StepPlan] = []

    def recover(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan, None))

    def launch(self, plan: StepPlan, after: Launched | None) -> Launched:
        """Computes at once, as its own memory is all that it reads; tells nothing before `collect`."""
        drawn = {} if after is None else dict(zip(after.samples, after.result.tokens, strict=True))
        return Launched([s for row in plan.rows for s in row.samples], self.compute(plan, drawn))

    def collect(self, launched: Launched) -> StepResult:
        return launched.result

    def launch_several(self, plans: Sequence[StepPlan], after: Launched | None) -> Launched:
        """Rows that have drawn an end write nothing more; what they draw is -1."""
        drawn = {} if after is None else dict(zip(after.samples, after.result.tokens, strict=True))
        rows = [row.seq for row in plans[0].rows]
        stopped = {seq for seq in rows if drawn.get(seq) in seq.request.end_token_ids}
        results = []
        for plan in plans:
            live = [i for i, row in enumerate(plan.rows) if row.seq not in stopped]
            some = tuple(plan.rows[i] for i in live)
            result = self.compute(dataclasses.replace(plan, rows=some, tables=(plan.tables[0][live],)), drawn)
            told = dict(zip((row.seq for row in some), result.tokens, strict=True))
            drawn |= told
            stopped |= {seq for seq, token in told.items() if token in seq.request.end_token_ids}
            tokens = [told.get(row.seq, -1) for row in plan.rows]
            results.append(dataclasses.replace(result, tokens=tokens))
        last = dataclasses.replace(results[-1], tokens=[drawn.get(seq, -1) for seq in rows])
        return Launched(rows, last, several=results)

    def collect_several(self, launched: Launched) -> list[StepResult]:
        return launched.several

    def compute(self, plan: StepPlan, drawn: Mapping[Any, int]) -> StepResult:
        self.plans.append(plan)
        for batch in plan.copies.batches:
            assert len(set(batch.dst)) == len(batch.dst)
            source = self.host if batch.kind == "swap_in" else self.pool
            target = self.host if batch.kind == "swap_out" else self.pool
            assert batch.kind != "cow" or not set(batch.dst) & set(batch.src)
            target[batch.dst] = source[batch.src]
        written: set[tuple[int, int]] = set()
        for row, table in zip(plan.rows, plan.tables[0], strict=True):
            assert row.num_tokens >= 1, "a row of no tokens"
            for position in range(row.start, row.start + row.num_tokens):
                block, offset = int(table[position // self.block_size]), position % self.block_size
                assert block > 0, "a token was to be written to the null block"
                assert (block, offset) not in written, "two rows write one slot"
                written.add((block, offset))
                known = row.seq.chain.tokens
                self.pool[block, offset] = known[position] if position < len(known) else drawn[row.seq]
        tokens = []
        tops: list[tuple[np.ndarray, np.ndarray]] = []
        for row, table in zip(plan.rows, plan.tables[0], strict=True):
            end = row.start + row.num_tokens
            seen = self.pool[table].reshape(-1)[:end]
            assert (seen != UNWRITTEN).all(), "a row reads a slot nobody wrote"
            for seq in row.samples:
                salt = seq.request.seed * 1000 + seq.index if seq.request.sampling.temperature else 0
                tokens.append(next_token(seen, salt))
                logprobs = toy_logprobs(seen) if seq.request.sampling.beam_width else np.zeros(VOCAB)
                order = np.argsort(-logprobs, kind="stable")[:MAX_CANDIDATES]
                tops.append((order, logprobs[order]))
        ids, values = (np.array(column) for column in zip(*tops)) if tops else (None, None)
        swapped = sum(len(batch.src) for batch in plan.copies.batches if batch.kind != "cow")
        copy_s = self.block_s * swapped
        return StepResult(
            tokens,
            [],
            self.token_s * plan.num_tokens + copy_s,
            copy_s=copy_s,
            top_ids=ids,
            top_logprobs=values,
        )


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """`make_engine(num_blocks=…, block_size=…, max_num_seqs=…, token_budget=…, **manager_options)`."""

    def make(
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        token_budget: int = 64,
        chunk_tokens: int = 0,
        chunked_prefill: bool = True,
        max_model_len: int = 256,
        preemption: str = "recompute",
        eos_token_ids: Sequence[int] = (),
        decode: Any = None,
        overlap: bool = False,
        num_steps: int = 1,
        **options: Any,
    ) -> Engine:
        manager = PagedManager(num_blocks=num_blocks, block_size=block_size, **options)
        config = SchedulerConfig(max_num_seqs, token_budget, chunk_tokens, chunked_prefill, preemption)
        return Engine(
            manager,
            ToyRunner(manager),
            config,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            decode=decode,
            overlap=overlap,
            num_steps=num_steps,
        )

    return make


@pytest.fixture
def judge() -> Callable[[Sequence[int], int], list[int]]:
    """`judge(prompt, n)`: the n tokens that greedy decoding must give."""
    return dense_greedy


@pytest.fixture
def logprobs_judge() -> Callable[[Sequence[int]], np.ndarray]:
    """`logprobs_judge(tokens)`: f64[VOCAB] that the toy model gives to what follows."""
    return toy_logprobs


@pytest.fixture
def run_all() -> Callable[..., dict[str, RequestOutput]]:
    """`run_all(engine, steps=…)`: step until idle; the last output of each request by id."""

    def run(engine: Engine, steps: int = 2000) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for _ in range(steps):
            if not engine.has_work:
                engine.manager.check_invariants()
                return outputs
            for output in engine.step():
                outputs[output.request_id] = output
            engine.manager.check_invariants()
        raise AssertionError(f"no end after {steps} steps")

    return run


@pytest.fixture
def greedy() -> Callable[..., SamplingParams]:
    """`greedy(max_tokens, **more)`: parameters that never stop early."""
    return lambda max_tokens, **more: SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)
