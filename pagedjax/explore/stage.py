"""One manager and the sequences on it: each command of an exploration as calls of the real `PagedManager`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedjax.cache import ExtraKeys, Hints, Hit, PagedManager, TokenChain
from pagedjax.cache.hashing import NO_EXTRA
from pagedjax.cache.rules import require
from pagedjax.config import CacheConfig
from pagedjax.engine.managers import make_manager
from pagedjax.explore.commands import Command


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        ok: False: there was no room, or nothing to do; no block and no table changed.
        said: In words.
        row: (start, tokens, whether the last token was among them) where KV was written.
        copies: [kind, group, sources, destinations] of the copies that ran.
        ended: Sequences that hold nothing any more.
    """

    ok: bool
    said: str
    row: tuple[int, int, bool] | None = None
    copies: tuple[tuple[str, int, list[int], list[int]], ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(eq=False)
class Explored:
    """What an exploration knows of a sequence beside the manager's books.

    Attributes:
        chain: Its tokens; the manager holds the same object.
        hit: What the lookup found; of a fork, None.
        filled: Positions whose KV is written, indexed or not.
        recorded: Looked up, and nothing allocated yet.
        swapped: On the host.
        parent: The sequence it was forked from.
        prompt: Tokens it began with.
    """

    chain: TokenChain
    hit: Hit | None
    filled: int
    recorded: bool = True
    swapped: bool = False
    parent: int | None = None
    prompt: int = 0


@dataclass(eq=False)
class Stage:
    """A fresh manager of these settings, on which commands are run one by one.

    The clock that the manager is told counts commands, from 1. A command either is carried out, or finds no room (an
    `Outcome` that is not ok), or raises ValueError; in the last two cases nothing of the cache has changed.

    Attributes:
        settings: Of the cache.
        manager: The real one.
        seqs: Number → what is known of the sequence.
        known: Digest → tokens of the block that it names, of every prompt that was here.
        clock: Commands carried out.
    """

    settings: CacheConfig
    manager: PagedManager = field(init=False)
    seqs: dict[int, Explored] = field(default_factory=dict)
    known: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    clock: int = 0

    def __post_init__(self) -> None:
        blocks = self.settings.num_blocks
        assert blocks is not None, "check_settings has seen to it"
        manager = make_manager(self.settings, num_blocks=blocks, max_model_len=1)
        assert isinstance(manager, PagedManager), "check_settings has seen to it"
        self.manager = manager

    def run(self, command: Command) -> Outcome:
        """Carry a command out.

        Raises:
            ValueError: It makes no sense now; the message says why.
        """
        carry_out: Callable[[Command], Outcome] = getattr(self, f"_{command.op}")
        self.clock += 1
        try:
            return carry_out(command)
        except ValueError:
            self.clock -= 1
            raise

    # ---------------------------------------------------------- one by one

    def _lookup(self, command: Command) -> Outcome:
        seq, size = _seq(command), self.manager.block_size
        extra = ExtraKeys(salt=command.salt) if command.salt is not None else NO_EXTRA
        chain = TokenChain(command.tokens or (), block_size=size, hash=self.settings.hash, extra=extra)
        hit = self.manager.begin(seq, chain, Hints(priority=command.priority or 0))
        self._remember(chain)
        self.seqs[seq] = Explored(chain, hit, hit.num_tokens, prompt=len(chain))
        return Outcome(
            True,
            f"{hit.num_tokens} of {len(chain)} tokens from the cache, {hit.matched_tokens} known; the match stops: "
            f"{hit.reason.value}. Looking changes nothing",
        )

    def _allocate(self, command: Command) -> Outcome:
        seq = _seq(command)
        known = self._here(seq)
        count = command.count
        if count is None:
            count = len(known.chain) - self.manager.num_computed(seq)
        before = self.manager.stats.snapshot()
        if not self.manager.reserve(seq, count):
            why = ", or what was found has been evicted since: look it up again" if known.recorded else ""
            return Outcome(False, f"no room for {count} tokens in {self.manager.num_free} free blocks{why}")
        known.recorded = False
        done = self.manager.stats.delta(before)
        return Outcome(
            True,
            f"table {_ids(self.manager.table(seq))}: {done.blocks_taken} blocks taken, {done.evictions} evicted for "
            f"them, {done.copies} to be copied on write",
        )

    def _fill(self, command: Command) -> Outcome:
        seq = _seq(command)
        known = self._here(seq)
        if known.recorded:
            return Outcome(False, "nothing is allocated; allocate first")
        slots = len(self.manager.table(seq)) * self.manager.block_size
        start, most = known.filled, min(slots, len(known.chain))
        end = most if command.count is None else start + command.count
        require(
            end <= most,
            f"count={command.count}: {most - start} positions of sequence {seq} have a slot and a token; allocate or "
            "write first",
        )
        if end == start:
            return Outcome(
                False, "every position that has a slot and a token is filled; allocate or write first"
            )
        self._check_writable(seq, start, end)
        copies = self._copies()
        known.filled = end
        return Outcome(
            True,
            f"KV of positions {start} to {end - 1} is written{_copied(copies)}; not to be found before it is indexed",
            row=(start, end - start, end == len(known.chain)),
            copies=copies,
        )

    def _check_writable(self, seq: int, start: int, end: int) -> None:
        """The red line: what is about to be written is this sequence's alone, and not indexed."""
        table, size = self.manager.table(seq), self.manager.block_size
        writable = self.manager.writable()[0]
        for position in range(start // size, (end - 1) // size + 1):
            block = table[position]
            require(
                bool(writable[block]),
                f"sequence {seq}: block {block} is shared or indexed, nobody may write there; allocate again, which "
                "copies it",
            )

    def _index(self, command: Command) -> Outcome:
        seq = _seq(command)
        known = self._here(seq)
        if known.recorded or known.filled == self.manager.num_computed(seq):
            return Outcome(False, "nothing is filled that is not indexed; fill first")
        before = self.manager.stats.snapshot()
        self.manager.commit(seq, known.filled, float(self.clock))
        return Outcome(True, self._indexed(before))

    def _indexed(self, before: Any) -> str:
        done = self.manager.stats.delta(before)
        twins = f", {done.dedup_blocks} twins given back" if done.dedup_blocks else ""
        return f"{done.blocks_indexed} full blocks can be found from now on{twins}"

    def _write(self, command: Command) -> Outcome:
        seq, tokens = _seq(command), command.tokens or ()
        known = self._here(seq)
        require(not known.recorded, f"sequence {seq}: is only looked up; allocate first")
        start = self.manager.num_computed(seq)
        before = self.manager.stats.snapshot()
        if not self.manager.reserve(seq, len(known.chain) - start + len(tokens)):
            return Outcome(
                False, f"no room for {len(tokens)} more tokens in {self.manager.num_free} free blocks"
            )
        copies = self._copies()
        known.chain.extend(tokens)
        self._remember(known.chain)
        known.filled = len(known.chain)
        self.manager.commit(seq, known.filled, float(self.clock))
        done = self.manager.stats.delta(before)
        return Outcome(
            True,
            f"positions {start} to {known.filled - 1}: {done.blocks_taken} blocks taken, {done.evictions} evicted for "
            f"them{_copied(copies)}; {self._indexed(before)}",
            row=(start, known.filled - start, True),
            copies=copies,
        )

    def _fork(self, command: Command) -> Outcome:
        seq, child = _seq(command), command.child
        assert child is not None, "read_command has seen to it"
        known = self._here(seq)
        computed = self.manager.num_computed(seq)
        require(
            known.recorded or known.filled == computed,
            f"sequence {seq}: is filled to {known.filled} and indexed to {computed}; index it before it is forked",
        )
        chain = known.chain.fork()
        self.manager.fork(seq, child, chain)
        self.seqs[child] = Explored(chain, None, computed, recorded=False, parent=seq, prompt=len(chain))
        table = self.manager.table(child)
        return Outcome(
            True, f"table {_ids(table)}: all of it shared with {seq}; who writes there next copies first"
        )

    def _free(self, command: Command) -> Outcome:
        seq = _seq(command)
        known = self._here(seq, swapped=True)
        held = 0 if known.recorded or known.swapped else len(self.manager.table(seq))
        self.manager.release(seq)
        del self.seqs[seq]
        return Outcome(
            True,
            f"{held} references given back; what is indexed stays to be found until evicted",
            ended=(seq,),
        )

    def _truncate(self, command: Command) -> Outcome:
        seq, count = _seq(command), command.count
        known = self._here(seq)
        assert count is not None, "read_command has seen to it"
        held = len(self.manager.table(seq))
        self.manager.truncate(seq, count)
        known.filled = min(known.filled, count)
        gone = held - len(self.manager.table(seq))
        return Outcome(True, f"KV behind position {count} is forgotten, {gone} blocks given back")

    def _swap_out(self, command: Command) -> Outcome:
        seq = _seq(command)
        known = self._here(seq)
        if known.recorded:
            return Outcome(False, "it holds no block yet; allocate first")
        alone = self.manager.num_lone_blocks(seq)[0]
        if not self.manager.swap_out(seq):
            return Outcome(
                False, f"the host has no room for {alone} blocks, or a copy into one of them is still to run"
            )
        known.swapped = True
        return Outcome(
            True, f"{alone} blocks go to the host; of shared ones only the references are given back"
        )

    def _swap_in(self, command: Command) -> Outcome:
        seq = _seq(command)
        known = self._here(seq, swapped=True)
        require(known.swapped, f"sequence {seq}: is not swapped out; swap it out first")
        if not self.manager.swap_in(seq):
            return Outcome(False, f"no room on the device: {self.manager.num_free} blocks are free")
        known.swapped = False
        known.filled = self.manager.num_computed(seq)
        return Outcome(True, f"table {_ids(self.manager.table(seq))}, {known.filled} positions came back")

    def _evict(self, command: Command) -> Outcome:
        gone = self.manager.evict(command.count or 0)
        return Outcome(gone > 0, f"{gone} cached blocks lost their content")

    def _reset(self, command: Command) -> Outcome:
        report = self.manager.reset(command.mode or "strict")
        if not report:
            return Outcome(False, f"{report.blocked_by} sequences are in the way; free them, or take preempt")
        for seq in report.preempted:
            del self.seqs[seq]
        return Outcome(True, f"{report.num_cleared} cached blocks dropped", ended=report.preempted)

    # ------------------------------------------------------------- parts

    def _here(self, seq: int, *, swapped: bool = False) -> Explored:
        known = self.seqs.get(seq)
        if known is None:
            raise ValueError(f"sequence {seq}: is not there; look it up or fork it first")
        require(swapped or not known.swapped, f"sequence {seq}: is swapped out; swap it in first")
        return known

    def _copies(self) -> tuple[tuple[str, int, list[int], list[int]], ...]:
        """The copies planned so far run, before anything is computed."""
        plan = self.manager.take_copies()
        return tuple((b.kind, b.group, b.src.tolist(), b.dst.tolist()) for b in plan.batches)

    def _remember(self, chain: TokenChain) -> None:
        size, tokens = chain.block_size, chain.tokens
        for i, digest in enumerate(chain.digests(chain.num_full_blocks)[: chain.num_full_blocks]):
            self.known[digest] = tuple(tokens[i * size : (i + 1) * size])


def _seq(command: Command) -> int:
    assert command.seq is not None, "read_command has seen to it"
    return command.seq


_KINDS = {"cow": "copied on write", "swap_out": "copied to the host", "swap_in": "copied from the host"}


def _copied(copies: tuple[tuple[str, int, list[int], list[int]], ...]) -> str:
    pairs = [
        f"{_KINDS[kind]}: " + ", ".join(f"{a}→{b}" for a, b in list(zip(src, dst))[:8])
        for kind, _, src, dst in copies
    ]
    return "".join("; " + text for text in pairs)


def _ids(table: list[int]) -> str:
    return " ".join(str(b) for b in table[:16]) + (" …" if len(table) > 16 else "") or "empty"
