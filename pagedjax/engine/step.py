"""What crosses the seam in one step: the plan, its rows, the result, the runner's protocol, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pagedjax.cache import CopyPlan
from pagedjax.engine.request import FinishReason, Request, RequestOutput, Sequence

S = TypeVar("S")  # Sequence while a step is made, SequenceRecord once it is over


class Row(NamedTuple, Generic[S]):
    """Tokens of one sequence in one step.

    Attributes:
        seq: The sequence whose tokens `[start, start + num_tokens)` are fed.
        start: Position of the first token fed; KV of all positions before it is in the pool.
        num_tokens: Tokens fed, at least 1.
        samples: Sequences that draw their next token from the row's last logits: none in the middle
            of a prompt, the sequence itself in general, all n samples at the end of a shared prompt.
    """

    seq: S
    start: int
    num_tokens: int
    samples: tuple[S, ...]


@dataclass(frozen=True)
class StepPlan(Generic[S]):
    """All that crosses from the host half to the device half in one step.

    Attributes:
        step: Number of the step, from 1.
        rows: Rows of one token first (they take the decode path of the kernels), then longer ones.
        tables: One i32[S, M] block table per KV group, a row per `rows` entry, null-padded.
        copies: Block copies to run before the step computes.
    """

    step: int
    rows: tuple[Row[S], ...]
    tables: tuple[np.ndarray, ...]
    copies: CopyPlan

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(len(row.samples) for row in self.rows)

    @property
    def num_named_blocks(self) -> int:
        """Blocks the rows would hold if none were shared; all KV groups together."""
        return sum(int(np.count_nonzero(table)) for table in self.tables)

    @property
    def num_held_blocks(self) -> int:
        """Blocks the rows hold; 1 - held / named is what sharing saves in this step."""
        return sum(len(np.unique(table[table > 0])) for table in self.tables)


class SharedPrefix(NamedTuple):
    """A prefix that a step's attention read once for several rows.

    Attributes:
        rows: Numbers of the rows in the plan.
        num_tokens: Tokens that these rows share. Of prefixes one within another, the longer one's are read once from
            where the shorter one ends.
        group: KV group.
    """

    rows: tuple[int, ...]
    num_tokens: int
    group: int


class TokenScores(NamedTuple):
    """What the model gave to n given tokens, and the likeliest tokens in their places.

    Attributes:
        logprobs: f32[n], natural log.
        ranks: i32[n], 1 is the likeliest.
        top_ids: i32[n, K], best first.
        top_logprobs: f32[n, K].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """What a runner gives back for a plan.

    Attributes:
        tokens: One per sample, in row order.
        logprobs: One per sample, natural log; empty where the runner computes none.
        ranks: One per sample, of its token among all (1 is the likeliest); empty where nobody asked.
        top_ids: i32[Q, K], a row per sample: the likeliest tokens, best first. None where nobody asked:
            beams ask always (see `pagedjax.engine.beam`), others with logprobs=k.
        top_logprobs: f32[Q, K], natural log, of these.
        prompt: Number of a row whose request asked for `prompt_logprobs` → scores of the prompt tokens at
            positions [row.start + 1, row.start + num_tokens], as far as they are prompt.
        shared: Prefixes that the step's attention worked once for all rows that share them.
        elapsed_s: Seconds the step took, on the runner's clock (virtual in a simulation).
        pack_s: Of these, seconds spent building arrays on the host.
        dispatch_s: Of these, seconds until the device call returned to the host.
        copy_s: Of these, seconds spent on the plan's block copies.
        compile_s: Of these, seconds spent on programs that were not there yet; in none of the three above.
    """

    tokens: list[int]
    logprobs: list[float]
    elapsed_s: float
    pack_s: float = 0.0
    dispatch_s: float = 0.0
    copy_s: float = 0.0
    compile_s: float = 0.0
    ranks: Seq[int] = ()
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt: Mapping[int, TokenScores] = field(default_factory=dict)
    shared: tuple[SharedPrefix, ...] = ()


class Runner(Protocol):
    """Executes plans; owns the KV pools, or stands in for them.

    Attributes:
        pool_blocks: Blocks that the pool of each KV group holds, the null block included; the manager's must be equal.
        block_size: Tokens per block of the pools.
        block_bytes: Bytes of one block of each group; empty where nothing weighs them.
        vocab_size: Token ids it can compute are below it; None: any (a simulation).
        weights_version: Grows with every change of the model's weights: what is cached belongs to the ones before.
    """

    block_size: int
    vocab_size: int | None

    @property
    def weights_version(self) -> int: ...

    @property
    def pool_blocks(self) -> tuple[int, ...]: ...

    @property
    def block_bytes(self) -> tuple[int, ...]: ...

    def execute(self, plan: StepPlan[Sequence]) -> StepResult:
        """Run the plan's copies, then compute its rows."""
        ...

    def recover(self) -> bool:
        """After a step that failed: make the pool usable again. Says whether its contents are lost."""
        ...


L = TypeVar("L")  # what a runner knows a step by that it has begun


class AheadRunner(Runner, Protocol[L]):
    """A runner that can be given a step while the one before it runs."""

    def launch(self, plan: StepPlan[Sequence], after: L | None) -> L:
        """Begin a plan; steps run in the order in which they were begun.

        Args:
            plan: A row of one token at the end of its sequence's chain feeds what the sequence drew in `after`.
            after: The step begun before, where its tokens are not booked yet.
        """
        ...

    def collect(self, launched: L) -> StepResult:
        """Wait for the end of a step, the oldest that was begun; its seconds count from when the one before ended."""
        ...


class SeveralRunner(AheadRunner[L], Protocol[L]):
    """A runner that computes several steps of decode rows in one dispatch."""

    def launch_several(self, plans: Seq[StepPlan[Sequence]], after: L | None) -> L:
        """Begin steps that follow one another, behind those that were begun.

        A row that has drawn one of its request's `end_token_ids`, in these steps or as what it is fed first from
        `after`, writes nothing from then on, and what it draws counts for nothing.

        Args:
            plans: At least two, of one-token rows that draw for their own sequence. The rows of each are among those
                of the one before; copies are the first's, and its tables hold the blocks of all steps.
            after: As in `launch`.
        """
        ...

    def collect_several(self, launched: L) -> Seq[StepResult]:
        """Wait for their end; each result has its share of the dispatch's seconds."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """A sequence as it stood in one step.

    Attributes:
        seq_id, index: Its number, and which of its request's samples it is.
        request_id: Its request.
        num_prompt_tokens: Of its request.
        num_tokens: Prompt and generated tokens as the step began; what the step drew is not among them.
        finish_reason: Why it ended with this step; None: it goes on.
    """

    seq_id: int
    index: int
    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class StepRecord:
    """One step as the metrics hook sees it; seconds are on the engine's clock.

    Holds values of its step: kept, it stays what it was.

    Attributes:
        plan: What ran; its arrays are read-only.
        result: What came back.
        schedule_s: Seconds to plan.
        commit_s: Seconds to book the result: indexing, forks, stop rules.
        overlap: "ahead": planned while the step before it ran. Else why not: "off", "first" (nothing ran), or the
            rule by which the one before was booked first: "admission" (somebody waits who may fit), "fork", "no room"
            (somebody has to be preempted), "beams", "penalties" or "min_tokens" (what is drawn depends on tokens the
            host does not know yet), "record" (one is written).
        dispatch: "several": the first of several steps in one dispatch; "inner": one of those behind it, whose tables
            are those of the first and whose seconds are its share. Else why it ran alone: "off", "prefill" (a prompt
            is under way), "logprobs" (somebody asks for them), "end" (all are known to end, or one does and somebody
            waits for his place), "no room" (no block is free for a step ahead), or one of the rules of `overlap`.
    """

    plan: StepPlan[SequenceRecord]
    result: StepResult
    schedule_s: float
    commit_s: float
    overlap: str = "off"
    dispatch: str = "off"


class Observer(Protocol):
    """Is told of everything an engine does, as it is booked; what it is given is live and not to be kept."""

    def added(self, request: Request) -> None:
        """A request was queued."""
        ...

    def stepped(self, plan: StepPlan[Sequence], result: StepResult, started_s: float, ended_s: float) -> None:
        """A step was booked; requests that ended in it are told of later."""
        ...

    def quiet(self, first_step: int, count: int, started_s: float, ended_s: float) -> None:
        """So many steps were booked at once in which every running sequence got its next token."""
        ...

    def ended(self, request: Request, output: RequestOutput, now: float) -> None:
        """A request ended."""
        ...


class Lengths:
    """Takes down how long a plan's sequences are before its result is booked, for the record after it."""

    def __init__(self, plan: StepPlan[Sequence]) -> None:
        self._plan = plan
        seqs = {seq.seq_id: seq for row in plan.rows for seq in (row.seq, *row.samples)}
        self._before = {seq_id: (seq, seq.index, seq.num_tokens) for seq_id, seq in seqs.items()}

    def record(self) -> StepPlan[SequenceRecord]:
        """The plan with its sequences as they stood, called once the result is booked."""
        plan = self._plan
        known = {
            seq_id: SequenceRecord(
                seq_id,
                index,
                seq.request.request_id,
                seq.request.num_prompt_tokens,
                num_tokens,
                seq.finish_reason,
            )
            for seq_id, (seq, index, num_tokens) in self._before.items()
        }
        rows = tuple(
            Row(known[row.seq.seq_id], row.start, row.num_tokens, tuple(known[s.seq_id] for s in row.samples))
            for row in plan.rows
        )
        for array in (
            *plan.tables,
            *(ids for batch in plan.copies.batches for ids in (batch.src, batch.dst)),
        ):
            array.setflags(write=False)
        return replace(plan, rows=rows)  # type: ignore[arg-type, return-value]
