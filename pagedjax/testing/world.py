"""World: a manager beside the memory it manages; any block that is shared, evicted or reused wrongly shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedjax.cache import CopyPlan, EventLog, ExtraKeys, Hints, KVGroup, PagedManager, TokenChain, replay

Choose = Callable[[int], int]  # an int below its argument: `random.Random(0).randrange`, or a tape
Prefix = tuple[Any, ...]  # the salt and the tokens up to a position
Memory = dict[tuple[int, int], Any]  # (block, offset) to the `Prefix` whose KV stands there


class World:
    """A manager beside the memory it manages, simulated slot by slot; the naive model of the cache.

    A slot holds the whole prefix whose KV it stands for, so any block that is shared, copied, evicted,
    swapped or reused wrongly shows as a wrong prefix. What a prompt may hit is recomputed by brute force
    from what is resident.

    Args:
        usable: Blocks of each pool, without the null block.
        block_size: Tokens per block.
        host_blocks: Of each host tier.
        groups: KV groups.
        options: Further ones of `PagedManager`.
    """

    def __init__(
        self,
        usable: int = 11,
        block_size: int = 2,
        host_blocks: int = 0,
        groups: Sequence[KVGroup] | None = None,
        **options: Any,
    ) -> None:
        self.events = EventLog()
        self.size = block_size
        self.windows = [g.window for g in groups] if groups else [None]
        self.options = options
        self.m = PagedManager(
            num_blocks=usable + 1,
            block_size=block_size,
            host_blocks=host_blocks,
            groups=groups,
            events=self.events,
            **options,
        )
        self.memory: list[Memory] = [{} for _ in self.windows]
        self.host: list[Memory] = [{} for _ in self.windows]
        self.chains: dict[int, TokenChain] = {}
        self.computed: dict[int, int] = {}
        self.swapped: set[int] = set()
        self.pinned: list[TokenChain] = []
        self.ids = 0
        self.now = 0.0
        self.log: list[str] = []

    # The operations: `choose(n)` gives an int below n.

    def act(self, choose: Choose) -> None:
        live = [s for s in self.chains if s not in self.swapped]
        names = ["admit"] * 4 + ["step"] * 5 + ["release"] * 2
        names += ["fork", "swap_out", "swap_in", "pin", "unpin", "reset", "truncate", "evict", "peek", "fail"]
        name = names[choose(len(names))]
        self.log.append(name)
        self.now += 1.0
        if name == "admit":
            self.admit(choose)
        elif name == "step" and live:
            self.step([s for s in live if choose(3)], choose)
        elif name == "release" and self.chains:
            self.release(list(self.chains)[choose(len(self.chains))])
        elif name == "fork" and live:
            self.fork(live[choose(len(live))])
        elif name == "swap_out" and live:
            self.swap_out(*{live[choose(len(live))] for _ in range(1 + choose(3))})
        elif name == "swap_in" and self.swapped:
            swapped = sorted(self.swapped)
            self.swap_in(*{swapped[choose(len(swapped))] for _ in range(1 + choose(3))}, spare=choose(2))
        elif name in ("pin", "unpin", "reset", "evict", "peek", "fail"):
            getattr(self, name)(choose)
        elif name == "truncate" and live:
            self.truncate(live[choose(len(live))], choose)
        self.check()

    def draw_chain(self, choose: Choose) -> TokenChain:
        salt = (None, None, "s")[choose(3)]
        length = 1 + choose(4 * self.size + 3)
        stem = [choose(2) for _ in range(3)]
        tokens = [(stem[min(i // self.size, 2)] if i < 3 * self.size else choose(2)) for i in range(length)]
        return TokenChain(tokens, block_size=self.size, extra=ExtraKeys(salt=salt))

    def admit(self, choose: Choose) -> None:
        self.run(self.plan_admission(choose))

    def plan_admission(self, choose: Choose) -> list[tuple[int, int]]:
        """Look a new prompt up and reserve for it; returns the row to run, if there is room."""
        chain = self.draw_chain(choose)
        hints = Hints(
            cache_read=choose(8) > 0,
            cache_write=choose(8) > 0,
            priority=choose(3),
            resumed=choose(4) == 0,
            group=("", "chat", "api")[choose(3)],
        )
        seq, self.ids = self.ids, self.ids + 1
        peeked = self.m.peek(chain)
        best = self.best_hit(chain)
        hit = self.m.begin(seq, chain, hints)
        if hints.cache_read:
            assert hit.num_tokens == peeked and self.agrees(peeked, best), (hit, peeked, best)
        else:
            assert hit.num_tokens == 0
        before = self.m.snapshot()
        events = self.events.next_number
        want = 1 + choose(len(chain) - hit.num_tokens)
        if self.m.reserve(seq, want):
            self.chains[seq], self.computed[seq] = chain, hit.num_tokens
            return [(seq, want)]
        assert self.m.snapshot() == before and self.events.next_number == events
        self.m.release(seq)
        return []

    def step(self, seqs: Sequence[int], choose: Choose) -> None:
        """One engine step: rows are reserved, some lose their blocks to others, new ones are admitted."""
        rows = []
        for seq in seqs:
            chain = self.chains[seq]
            if len(chain) == self.computed[seq]:
                chain.append(choose(2))
            want = 1 + choose(len(chain) - self.computed[seq])
            before = self.m.snapshot()
            if self.m.reserve(seq, want, lookahead=choose(2)):
                rows.append((seq, want))
                self.m.check_invariants()
            else:
                assert self.m.snapshot() == before
        while rows and choose(3) == 0:
            seq, _ = rows.pop()
            if choose(2):
                self.release(seq)
            else:
                self.swap_out(seq)
            self.m.check_invariants()
        for _ in range(choose(3)):
            rows += self.plan_admission(choose)
            self.m.check_invariants()
        self.run(rows)

    def run(self, rows: Sequence[tuple[int, int]]) -> None:
        """The device step: copies in order, then the writes, then commit."""
        self.copy(self.m.take_copies())
        for seq, want in rows:
            chain = self.chains[seq]
            for g, memory in enumerate(self.memory):
                table = self.m.table(seq, g)
                for p in range(self.computed[seq], self.computed[seq] + want):
                    block = table[p // self.size]
                    self.assert_writable(seq, g, block)
                    memory[block, p % self.size] = self.prefix(chain, p)
        for seq, want in rows:
            self.computed[seq] += want
            self.m.commit(seq, self.computed[seq], self.now)
            self.m.check_invariants()

    def fail(self, choose: Choose) -> None:
        """A step that fails among its copies: all sequences lose their blocks, as the engine has it."""
        self.plan_admission(choose)
        plan = self.m.take_copies()
        self.copy(CopyPlan(plan.batches[: choose(len(plan.batches) + 1)]))
        self.m.lose(plan)
        for seq in list(self.chains):
            self.release(seq)

    def assert_writable(self, seq: int, g: int, block: int) -> None:
        """The red line, judged from the outside: nobody else's table, pin or index entry names the block."""
        assert block != 0
        holders = [s for s in self.chains if s not in self.swapped and block in self.m.table(s, g)]
        assert holders == [seq], (block, holders)
        assert self.m._groups[g].pool.keys[block] is None
        assert all(block not in blocks for blocks in self.m._pins.tables(g))

    def copy(self, plan: CopyPlan) -> None:
        for batch in plan.batches:
            src, dst = batch.src.tolist(), batch.dst.tolist()
            assert len(set(dst)) == len(dst)
            if batch.kind == "cow":
                assert not set(src) & set(dst)
            memory, host = self.memory[batch.group], self.host[batch.group]
            source = host if batch.kind == "swap_in" else memory
            target = host if batch.kind == "swap_out" else memory
            read = [[source.get((b, i)) for i in range(self.size)] for b in src]
            for b, values in zip(dst, read):
                for i, value in enumerate(values):
                    target[b, i] = value

    @staticmethod
    def prefix(chain: TokenChain, p: int) -> Prefix:
        return (chain.extra.salt, *chain.tokens[: p + 1])

    def release(self, seq: int) -> None:
        for _ in range(2):
            self.m.release(seq)
        del self.chains[seq], self.computed[seq]
        self.swapped.discard(seq)

    def fork(self, seq: int) -> None:
        child, self.ids = self.ids, self.ids + 1
        self.chains[child] = self.chains[seq].fork()
        self.m.fork(seq, child, self.chains[child])
        self.computed[child] = self.computed[seq]

    def swap_out(self, *seqs: int) -> None:
        before = self.m.snapshot()
        most = self.m.num_lone_blocks(*seqs) if self.started(seqs) else []
        if self.m.swap_out(*seqs):
            self.swapped.update(seqs)
            assert self.m.stats.swapped_out_blocks - before["stats"].swapped_out_blocks == sum(most)
        else:
            assert self.m.snapshot() == before

    def started(self, seqs: Sequence[int]) -> bool:
        return all(not self.m._seqs[seq].recorded for seq in seqs)

    def swap_in(self, *seqs: int, spare: int = 0) -> None:
        before = self.m.snapshot()
        if self.m.swap_in(*seqs, spare=spare):
            self.swapped.difference_update(seqs)
            assert self.m.num_free >= spare
            for seq in seqs:
                assert self.m.num_computed(seq) <= self.computed[seq]
                self.computed[seq] = self.m.num_computed(seq)
        else:
            assert self.m.snapshot() == before

    def pin(self, choose: Choose) -> None:
        chain = self.draw_chain(choose)
        if self.chains and choose(2):
            chain = list(self.chains.values())[choose(len(self.chains))].fork()
        if self.m.num_free > 4 and self.m.pin(chain):
            self.pinned.append(chain)

    def unpin(self, choose: Choose) -> None:
        if self.pinned:
            assert self.m.unpin(self.pinned.pop(choose(len(self.pinned))))

    def reset(self, choose: Choose) -> None:
        if choose(4):
            before = self.m.snapshot()
            busy = bool(self.chains or self.pinned)
            assert bool(self.m.reset("strict")) is not busy
            if busy:
                assert self.m.snapshot() == before
        else:
            report = self.m.reset("preempt")
            assert report and sorted(report.preempted) == sorted(self.chains)
            self.chains, self.computed, self.swapped, self.pinned = {}, {}, set(), []

    def truncate(self, seq: int, choose: Choose) -> None:
        self.computed[seq] = choose(self.computed[seq] + 1)
        if any(self.windows):
            self.computed[seq] = self.m.num_computed(seq)  # what is behind a window cannot come back
        self.m.truncate(seq, self.computed[seq])

    def evict(self, choose: Choose) -> None:
        count = choose(3)
        assert self.m.evict(count) <= count

    def peek(self, choose: Choose) -> None:
        chain = self.draw_chain(choose)
        before = self.m.snapshot()
        assert self.agrees(self.m.peek(chain), self.best_hit(chain))
        assert self.m.snapshot() == before

    # The model.

    def agrees(self, hit: int, best: int) -> bool:
        """Pinned tables of several groups are shared by whole blocks, and only where every window holds."""
        if not self.m._groups[0].index.indexes and self.windows != [None]:
            return hit <= best and hit % self.size == 0
        return hit == best

    def best_hit(self, chain: TokenChain) -> int:
        """The longest hit, by trying every length."""
        if not self.m.prefix_caching:
            return 0
        limit = len(chain) - 1
        if not self.m._groups[0].index.indexes:
            best = 0
            for pinned in self.pinned:
                if pinned.extra == chain.extra:
                    same = 0
                    while same < min(limit, len(pinned)) and pinned.tokens[same] == chain.tokens[same]:
                        same += 1
                    best = max(best, same)
            return best
        resident = self.m.resident()

        def serves(g: int, window: int | None, count: int) -> bool:
            needed = range(
                0 if window is None else max(count * self.size - window + 1, 0) // self.size, count
            )
            return all(
                any((g, medium, chain.digest(i)) in resident for medium in ("device", "host")) for i in needed
            )

        lengths = range(limit // self.size, -1, -1)
        full = next(n for n in lengths if all(serves(g, w, n) for g, w in enumerate(self.windows)))
        return full * self.size + self.best_part(chain, full, limit)

    def best_part(self, chain: TokenChain, full: int, limit: int) -> int:
        least = self.options.get("partial", 0)
        if not least or -(-len(chain) // self.size) >= self.m.num_usable:
            return 0
        tables = self.m._matcher.match(chain, limit)[0]
        if any(b < 0 for table in tables for b in table):
            return 0
        shared = []
        for g, keys in enumerate(group.pool.keys for group in self.m._groups):
            best = 0
            for b, key in enumerate(keys):
                if key is not None:
                    held = self.memory[g][b, self.size - 1]
                    mine = (chain.extra.salt, *chain.tokens)
                    start = 1 + full * self.size
                    if len(held) == start + self.size and held[:start] == mine[:start]:
                        n = 0
                        while n < self.size and start + n < len(mine) and held[start + n] == mine[start + n]:
                            n += 1
                        best = max(best, n)
            shared.append(best)
        gain = (
            min(*shared, limit - full * self.size)
            if len(shared) > 1
            else min(shared[0], limit - full * self.size)
        )
        return gain if gain >= least else 0

    def check(self) -> None:
        self.copy(self.m.take_copies())
        self.m.check_invariants()
        for seq, chain in self.chains.items():
            if seq in self.swapped:
                continue
            assert self.m.num_computed(seq) == self.computed[seq]
            for g, window in enumerate(self.windows):
                table = self.m.table(seq, g)
                first = 0 if window is None else max(self.computed[seq] - window + 1, 0)
                for p in range(first, self.computed[seq]):
                    held = self.memory[g].get((table[p // self.size], p % self.size))
                    assert held == self.prefix(chain, p), (seq, g, p, held)
        assert replay(self.events.events) == self.m.resident()
