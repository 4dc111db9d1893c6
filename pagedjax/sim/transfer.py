"""Moving KV between instances: links that transfers share fairly, and stores of host memory and disk behind them."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedjax.cache.hashing import TokenChain
from pagedjax.cache.protocol import NO_HINTS, Hints, Hit

_UNCOUNTED = Hints(counted=False)
_INSTALLER = -1  # a sequence id that no engine gives out


@dataclass(eq=False)
class Link:
    """One direction of a wire, a bus or a disk.

    Attributes:
        name: For tables; unique.
        bytes_per_s: Its bandwidth, shared by the transfers on it.
        start_s: Until the first byte of a transfer moves.
        moved_bytes: By transfers that are whole, and parts of those that were cancelled.
    """

    name: str
    bytes_per_s: float
    start_s: float = 0.0
    moved_bytes: int = 0
    flows: dict[int, Transfer] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"{self.name}: bytes_per_s={self.bytes_per_s}: must be positive; try 25e9")
        if not 0 <= self.start_s < math.inf:
            raise ValueError(f"{self.name}: start_s={self.start_s}: must be 0 or positive; try 1e-4")


@dataclass(eq=False)
class Transfer:
    """Bytes on their way along links.

    Attributes:
        number: In order of starting.
        path: Links it uses at once.
        num_bytes: Whole size.
        done: Called with the time of its end.
        left: Bytes to move as of `since_s`.
        rate: Bytes per second now; 0 before it begins.
    """

    number: int
    path: tuple[Link, ...]
    num_bytes: int
    done: Callable[[float], None]
    since_s: float
    left: float
    rate: float = 0.0
    version: int = 0
    live: bool = True


class Network:
    """All transfers under way. The links they share are shared max-min fairly, anew whenever one begins or ends.

    Max-min: no transfer could be faster without another, no faster one, becoming slower (Bertsekas and Gallager,
    *Data Networks*, §6.5). A change is spread to the transfers that share a link with it, however indirectly.

    Attributes:
        sent_bytes / received_bytes / lost_bytes: Handed to links; arrived with whole transfers; moved by transfers that
            were cancelled.
        log: (time, transfer, rate) of every change, where asked for.
    """

    def __init__(self, *, log_rates: bool = False) -> None:
        self.sent_bytes = self.received_bytes = self.lost_bytes = 0
        self.log: list[tuple[float, Transfer, float]] | None = [] if log_rates else None
        self._due: list[tuple[float, int, int, Transfer]] = []
        self._count = 0

    @property
    def next_s(self) -> float:
        """When the next transfer begins to move or ends; infinite where none is under way."""
        while self._due and (not self._due[0][3].live or self._due[0][2] != self._due[0][3].version):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def start(
        self, path: Sequence[Link], num_bytes: int, now: float, done: Callable[[float], None]
    ) -> Transfer:
        """Send bytes; `done` is called by `advance` once they have arrived. No links, or no bytes, take no time."""
        begins = now + max((link.start_s for link in path), default=0.0) if num_bytes else now
        transfer = Transfer(self._count, tuple(path), num_bytes, done, begins, float(num_bytes))
        self._count += 1
        self._push(transfer, begins)
        return transfer

    def expected_s(self, path: Sequence[Link], num_bytes: int) -> float:
        """Predicted seconds of such a transfer, if it had its fair share of each link as it is used now."""
        if not path or not num_bytes:
            return 0.0
        rate = min(link.bytes_per_s / (len(link.flows) + 1) for link in path)
        return max(link.start_s for link in path) + num_bytes / rate

    def cancel(self, transfer: Transfer, now: float) -> None:
        """Stop a transfer; what it has moved is lost."""
        if not transfer.live:
            return
        transfer.live = False
        moved = 0
        if transfer.rate:
            left = max(transfer.left - transfer.rate * (now - transfer.since_s), 0.0)
            moved = min(round(transfer.num_bytes - left), transfer.num_bytes)
            self._leave(transfer, now)
        self.sent_bytes += moved
        self.lost_bytes += moved
        for link in transfer.path:
            link.moved_bytes += moved

    def advance(self, now: float) -> None:
        """Begin and end what is due by `now`, in order of time."""
        while self.next_s <= now:
            at, _, _, transfer = heapq.heappop(self._due)
            if transfer.rate or not transfer.num_bytes or not transfer.path:
                self._finish(transfer, at)
            else:
                for link in transfer.path:
                    link.flows[transfer.number] = transfer
                self._share(transfer.path, at)

    def _finish(self, transfer: Transfer, now: float) -> None:
        transfer.live = False
        if transfer.rate:
            self._leave(transfer, now)
        self.sent_bytes += transfer.num_bytes
        self.received_bytes += transfer.num_bytes
        for link in transfer.path:
            link.moved_bytes += transfer.num_bytes
        transfer.done(now)

    def _leave(self, transfer: Transfer, now: float) -> None:
        for link in transfer.path:
            del link.flows[transfer.number]
        self._set_rate(transfer, 0.0, now)
        self._share(transfer.path, now)

    def _push(self, transfer: Transfer, at: float) -> None:
        heapq.heappush(self._due, (at, transfer.number, transfer.version, transfer))

    def _share(self, links: Iterable[Link], now: float) -> None:
        """Fill the links that hang together with these, the tightest first."""
        room: dict[str, tuple[Link, float, int]] = {}
        flows: dict[int, Transfer] = {}
        queue = list(links)
        while queue:
            link = queue.pop()
            if link.name in room:
                continue
            room[link.name] = (link, link.bytes_per_s, len(link.flows))
            for number, flow in link.flows.items():
                if number not in flows:
                    flows[number] = flow
                    queue += flow.path
        while flows:
            tight, capacity, count = min(
                (entry for entry in room.values() if entry[2]),
                key=lambda entry: (entry[1] / entry[2], entry[0].name),
            )
            rate = capacity / count
            for number in sorted(tight.flows.keys() & flows.keys()):
                flow = flows.pop(number)
                for link in flow.path:
                    _, left, users = room[link.name]
                    room[link.name] = (link, max(left - rate, 0.0), users - 1)
                self._set_rate(flow, rate, now)

    def _set_rate(self, transfer: Transfer, rate: float, now: float) -> None:
        if rate == transfer.rate:
            return
        transfer.left = max(transfer.left - transfer.rate * (now - transfer.since_s), 0.0)
        transfer.since_s, transfer.rate = now, rate
        transfer.version += 1
        if self.log is not None:
            self.log.append((now, transfer, rate))
        if rate:
            self._push(transfer, now + transfer.left / rate)


class Landing:
    """KV that has arrived at an instance and is waiting for its request to be admitted.

    The manager's `begin` first brings in what has landed of a chain: written into fresh blocks and indexed like any
    other, it is then hit. Until then it is visible to nobody, and where the pool has no room it stays landed.

    Args:
        manager: A `PagedManager` with prefix caching; its `begin` is wrapped.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._begin = manager.begin
        self._blocks: dict[
            bytes, int
        ] = {}  # digest of the last landed block of a chain → requests that wait for it
        self._lengths: dict[int, int] = {}  # numbers of blocks landed → how many chains
        manager.begin = self.begin

    def add(self, digests: Sequence[bytes]) -> None:
        """These blocks, a chain from its start, are here (or were before) for one request more."""
        if digests:
            self._blocks[digests[-1]] = self._blocks.get(digests[-1], 0) + 1
            self._lengths[len(digests)] = self._lengths.get(len(digests), 0) + 1

    def drop(self, digests: Sequence[bytes]) -> None:
        """The request that waited for them has been admitted, or is gone."""
        if digests:
            for book, key in ((self._blocks, digests[-1]), (self._lengths, len(digests))):
                book[key] -= 1  # type: ignore[index]
                if not book[key]:  # type: ignore[index]
                    del book[key]  # type: ignore[arg-type]

    @property
    def is_empty(self) -> bool:
        return not self._blocks

    def begin(self, seq: int, chain: TokenChain, hints: Hints = NO_HINTS) -> Hit:
        """`PagedManager.begin`, after what has landed of the chain was brought in."""
        if self._blocks:
            for length in sorted(self._lengths, reverse=True):
                if length <= chain.num_full_blocks and chain.digest(length - 1) in self._blocks:
                    self._bring_in(chain, length * self._manager.block_size)
                    break
        hit: Hit = self._begin(seq, chain, hints)
        return hit

    def _bring_in(self, chain: TokenChain, num_tokens: int) -> None:
        manager = self._manager
        hit = self._begin(_INSTALLER, chain, _UNCOUNTED)
        if hit.num_tokens < num_tokens and manager.reserve(_INSTALLER, num_tokens - hit.num_tokens):
            manager.commit(_INSTALLER, num_tokens, manager.now)
        manager.release(_INSTALLER)


class Place(NamedTuple):
    """Where a store holds a block.

    Attributes:
        node: Whose memory or disk.
        tier: "memory" or "disk".
    """

    node: str
    tier: str


class _Tier:
    """Blocks by digest, least recently used first out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def put(self, digest: bytes) -> bytes | None:
        """Insert or touch; the block that had to go."""
        self.blocks[digest] = None
        self.blocks.move_to_end(digest)
        return self.blocks.popitem(last=False)[0] if len(self.blocks) > self.capacity else None


class Store:
    """KV blocks in the host memory of nodes, and on their disks.

    What instances compute is written here behind the computation; what memory has no room for sinks to the node's disk,
    and from there out; what is read from disk stands in memory again. Pooled: every node reads every other's, and holds
    a block once (Mooncake's store); else a node knows its own only (as LMCache's local back ends do). Least recently
    used goes first, tails of a chain before heads. A block that sinks is readable at once, its write is only counted.

    Args:
        memory_blocks: Of each node; 0: none.
        disk_blocks: Of each node; 0: none.
        pooled: See above.
    """

    def __init__(self, memory_blocks: int, disk_blocks: int = 0, *, pooled: bool = False) -> None:
        if memory_blocks < 1:
            raise ValueError(
                f"memory_blocks={memory_blocks}: must be at least 1; leave the store out instead"
            )
        if disk_blocks < 0:
            raise ValueError(f"disk_blocks={disk_blocks}: must be 0 (no disk) or positive")
        self.pooled = pooled
        self._sizes = {"memory": memory_blocks, "disk": disk_blocks}
        self._tiers: dict[Place, _Tier] = {}

    def join(self, node: str) -> None:
        """A node with empty memory and disk."""
        for tier, size in self._sizes.items():
            if size:
                self._tiers.setdefault(Place(node, tier), _Tier(size))

    def leave(self, node: str) -> None:
        """A node is gone with all it held."""
        for tier in self._sizes:
            self._tiers.pop(Place(node, tier), None)

    def num_blocks(self, tier: str) -> int:
        """Held in all nodes' memory, or on all disks."""
        return sum(len(t.blocks) for place, t in self._tiers.items() if place.tier == tier)

    def _readable(self, node: str) -> list[tuple[Place, _Tier]]:
        """Nearest first: own memory, others' memory, own disk, others' disks."""
        own = [(p, t) for p, t in self._tiers.items() if p.node == node or self.pooled]
        return sorted(own, key=lambda pair: (pair[0].tier != "memory", pair[0].node != node))

    def find(self, node: str, digests: Iterable[bytes]) -> list[Place]:
        """For each of the blocks the nearest place that holds it, up to the first that none holds."""
        tiers = self._readable(node)
        found = []
        for digest in digests:
            place = next((p for p, tier in tiers if digest in tier.blocks), None)
            if place is None:
                break
            found.append(place)
        return found

    def touch(self, node: str, digests: Sequence[bytes]) -> None:
        """These were read: they stay longer."""
        tiers = self._readable(node)
        for digest in reversed(digests):
            for _, tier in tiers:
                if digest in tier.blocks:
                    tier.blocks.move_to_end(digest)
                    break

    def missing(self, node: str, digests: Iterable[bytes]) -> list[bytes]:
        """Those that would have to be written."""
        tiers = self._readable(node)
        return [digest for digest in digests if not any(digest in tier.blocks for _, tier in tiers)]

    def put(self, node: str, digests: Sequence[bytes]) -> int:
        """Hold these in the node's memory; returns how many blocks sank to its disk meanwhile."""
        memory = self._tiers.get(Place(node, "memory"))
        disk = self._tiers.get(Place(node, "disk"))
        sunk = 0
        if memory is None:  # the node left while they were on their way
            return 0
        for digest in reversed(digests):
            victim = memory.put(digest)
            if victim is not None and disk is not None:
                sunk += victim not in disk.blocks
                disk.put(victim)
        return sunk
