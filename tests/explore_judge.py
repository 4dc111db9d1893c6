"""The slow judge of explorations: a `PagedManager` driven command by command, without anything of pagedjax.explore."""

from dataclasses import asdict

from pagedjax.cache import ExtraKeys, Hints, PagedManager, TokenChain
from pagedjax.cache.hashing import NO_EXTRA

OPS = ("lookup", "allocate", "fill", "index", "write", "fork", "free", "truncate", "swap_out", "swap_in")
POLICIES = ("lru", "fifo", "lfu", "s3fifo", "arc", "retention")


class Judge:
    """What accepted commands (plain values) must have led to."""

    def __init__(self, commands=(), **settings):
        self.settings = {"num_blocks": 9, "block_size": 2, **settings}
        for command in commands:
            if command["op"] == "settings":
                self.settings |= command["values"]
        self.manager = PagedManager(**self.settings)
        self.clock = 0
        self.chains, self.written, self.new, self.away = {}, {}, set(), set()
        for command in commands:
            self.take(command)

    def take(self, command):
        op, manager = command["op"], self.manager
        if op == "settings":
            return
        self.clock += 1
        seq, count = command.get("seq"), command.get("count")
        if op == "lookup":
            extra = ExtraKeys(salt=command["salt"]) if "salt" in command else NO_EXTRA
            chain = TokenChain(command["tokens"], block_size=manager.block_size, extra=extra)
            hit = manager.begin(seq, chain, Hints(priority=command.get("priority", 0)))
            self.chains[seq], self.written[seq] = chain, hit.num_tokens
            self.new.add(seq)
        elif op == "allocate":
            if count is None:
                count = len(self.chains[seq]) - manager.num_computed(seq)
            if manager.reserve(seq, count):
                self.new.discard(seq)
        elif op == "fill" and seq not in self.new:
            slots = len(manager.table(seq)) * manager.block_size
            end = min(slots, len(self.chains[seq])) if count is None else self.written[seq] + count
            if end > self.written[seq]:
                manager.take_copies()
                self.written[seq] = end
        elif op == "index" and seq not in self.new and self.written[seq] > manager.num_computed(seq):
            manager.commit(seq, self.written[seq], float(self.clock))
        elif op == "write":
            chain = self.chains[seq]
            if manager.reserve(seq, len(chain) + len(command["tokens"]) - manager.num_computed(seq)):
                manager.take_copies()
                chain.extend(command["tokens"])
                manager.commit(seq, len(chain), float(self.clock))
                self.written[seq] = len(chain)
        elif op == "fork":
            child = command["child"]
            self.chains[child] = self.chains[seq].fork()
            manager.fork(seq, child, self.chains[child])
            self.written[child] = manager.num_computed(seq)
        elif op == "free":
            manager.release(seq)
            self._forget(seq)
        elif op == "truncate":
            manager.truncate(seq, count)
            self.written[seq] = min(self.written[seq], count)
        elif op == "swap_out" and seq not in self.new and manager.swap_out(seq):
            self.away.add(seq)
        elif op == "swap_in" and manager.swap_in(seq):
            self.away.discard(seq)
            self.written[seq] = manager.num_computed(seq)
        elif op == "evict":
            manager.evict(count)
        elif op == "reset":
            for gone in manager.reset(command.get("mode", "strict")).preempted:
                self._forget(gone)

    def _forget(self, seq):
        for held in (self.new, self.away):
            held.discard(seq)
        del self.chains[seq], self.written[seq]

    def plain(self):
        """The manager's own state with JSON's types."""
        state = self.manager.snapshot()
        (pool,) = state["groups"]
        return {
            "ref": {str(b): n for b, n in pool["ref"].items()},
            "keys": {str(b): key.hex() for b, key in pool["keys"].items()},
            "free_queue": pool["free_queue"],
            "num_blank": pool["num_blank"],
            "num_evictable": pool["num_evictable"],
            "tables": {str(seq): tables[0] for seq, tables in state["tables"].items()},
            "stats": asdict(state["stats"]),
        }


def random_settings(rng):
    """Settings of a small pool, in which everything happens soon."""
    return {
        "num_blocks": rng.randint(5, 12),
        "block_size": rng.choice((1, 2, 4)),
        "policy": rng.choice(POLICIES),
        "index": rng.choice(("hash", "radix", "table")),
        "host_blocks": rng.choice((0, 0, 4)),
    }


def random_command(rng, held):
    """One command; about half of them make sense. `held`: numbers of the sequences that are there."""
    op = rng.choice((*OPS, *OPS, "lookup", "allocate", "fill", "index", "evict", "reset"))
    pick = rng.choice(held) if held and rng.random() < 0.9 else rng.randrange(4)
    tokens = [7] * rng.randint(0, 6) + [rng.randrange(3) for _ in range(rng.randint(1, 6))]
    if op == "lookup":
        command = {"op": op, "seq": rng.randrange(4), "tokens": tokens}
        if rng.random() < 0.2:
            command |= {"salt": "<b>x", "priority": 2}
        return command
    if op == "evict":
        return {"op": op, "count": rng.randint(1, 3)}
    if op == "reset":
        return {"op": op, "mode": rng.choice(("strict", "preempt"))}
    command = {"op": op, "seq": pick}
    if op == "write":
        command["tokens"] = tokens[-2:]
    elif op == "fork":
        command["child"] = rng.randrange(4)
    elif op == "truncate" or (op in ("allocate", "fill") and rng.random() < 0.3):
        command["count"] = rng.randint(1, 6)
    return command
