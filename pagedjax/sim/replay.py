"""Prefix hits of a trace, counted by replay: block keys of any size, and hit ratios by every definition.

A replay knows blocks and nothing of time: at its arrival a request looks its blocks up, in order, up to
the first that is absent; then all its blocks are touched, tail first, and those absent are inserted.
Tail first means that of one chain the head is the youngest: a block never outlives its ancestors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

import numpy as np

from pagedjax.cache import ExtraKeys, InvariantError, PagedManager, TokenChain
from pagedjax.cache.indexes import IndexFactory
from pagedjax.cache.policies import PolicyFactory
from pagedjax.cache.protocol import NO_HINTS, Hints
from pagedjax.sim.flat_store import FlatStore
from pagedjax.sim.trace import Trace, TraceRequest

Insert = Literal["prompt", "prompt+output"]
Progress = Callable[[Iterable[TraceRequest]], Iterable[TraceRequest]]


class Refs(NamedTuple):
    """The blocks of one request.

    Attributes:
        lookup: i64[n] keys of the prompt's blocks, the partly filled tail last where it has identity.
        insert: i64[m] keys that the request leaves behind; starts with the lookup's full blocks.
        num_input: Prompt tokens.
    """

    lookup: np.ndarray
    insert: np.ndarray
    num_input: int


class BlockKeys:
    """Keys of a trace's blocks at any block size that its identities allow.

    Equal keys mean equal prefixes up to the end of that block. Token ids are chained through blake2b and
    cut to 64 bits (for 10^8 different blocks, one false match has probability 3e-4); granule ids are
    subdivided arithmetically (hashed where the product leaves 64 bits), so no token is ever made up; without
    identity every block is new.

    Args:
        trace: Whose requests follow.
        block_size: Tokens per block; divides the granularity where there is one.
        insert: What a request leaves behind: its prompt, or its answer as well (token ids only).

    Raises:
        ValueError: The block size does not divide the granularity, or the answers have no ids.
    """

    def __init__(self, trace: Trace, block_size: int, insert: Insert = "prompt") -> None:
        granularity = trace.granularity
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        if granularity > 1 and granularity % block_size:
            raise ValueError(
                f"block_size={block_size}: must divide the trace's granularity of {granularity} tokens"
            )
        if insert == "prompt+output" and granularity != 1:
            raise ValueError("insert='prompt+output': needs token ids of the answers; use 'prompt'")
        self.block_size = block_size
        self.insert = insert
        self._parts = granularity // block_size if granularity > 1 else 0
        self._tail_ids = trace.tail_ids
        self._granularity = granularity
        self._fresh = 0

    def refs(self, request: TraceRequest) -> Refs:
        """The request's blocks."""
        if request.token_ids is not None:
            return self._from_tokens(request)
        if request.granule_ids is not None:
            keys = self._from_granules(request)
        else:
            # No identity: keys below 0 that never come again.
            count = -(-request.num_input // self.block_size)
            keys = np.arange(-self._fresh - 1, -self._fresh - 1 - count, -1, dtype=np.int64)
            self._fresh += count
        return Refs(keys, keys, request.num_input)

    def _from_granules(self, request: TraceRequest) -> np.ndarray:
        ids = request.granule_ids
        assert ids is not None
        if self._parts == 1:
            return ids
        parts = np.arange(self._parts)
        keys = ids[:, None] * self._parts + parts
        far = np.flatnonzero(np.abs(ids) >= 2**62 // self._parts)
        if len(far):
            # The product would wrap: such an id and its part are mixed into 64 bits, as token ids are.
            keys[far] = [[_key(_link(b"%d" % i, b"/%d" % part)) for part in parts] for i in ids[far].tolist()]
        keys = keys.reshape(-1)
        if self._tail_ids:
            keys = keys[: -(-request.num_input // self.block_size)]
        return keys

    def _from_tokens(self, request: TraceRequest) -> Refs:
        assert request.token_ids is not None
        prompt = request.token_ids
        full = len(prompt) // self.block_size
        if self.insert == "prompt+output":
            if request.output_ids is None:
                raise ValueError("insert='prompt+output': a request has no output ids; use 'prompt'")
            both = np.concatenate([prompt, request.output_ids])
            stored, parents = chain_keys(both, self.block_size)
        else:
            both = prompt
            stored, parents = chain_keys(prompt, self.block_size)
        lookup = stored[:full]
        if len(prompt) % self.block_size:
            root = parents[full - 1] if full else b""
            tail = _key(_link(root, prompt[full * self.block_size :].tobytes()))
            lookup = np.append(lookup, tail)
        if self.insert == "prompt":
            return Refs(lookup, lookup, len(prompt))
        return Refs(lookup, stored, len(prompt))


def _link(parent: bytes, content: bytes) -> bytes:
    return blake2b(parent + content, digest_size=16).digest()


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)


def chain_keys(tokens: np.ndarray, block_size: int) -> tuple[np.ndarray, list[bytes]]:
    """Keys i64[n // block_size] of the full blocks of i32[n] tokens, and the 16-byte links behind them."""
    data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
    width = 4 * block_size
    links: list[bytes] = []
    parent = b""
    for at in range(0, len(data) - width + 1, width):
        parent = _link(parent, data[at : at + width])
        links.append(parent)
    return np.frombuffer(b"".join(links), dtype=np.int64)[::2].copy(), links


@dataclass
class HitCounts:
    """What a replay counted. Every common definition of "hit rate" is a property.

    Attributes:
        requests: Requests replayed.
        blocks / hit_blocks: Of prompts, partly filled tails included where they have identity.
        full_blocks / hit_full_blocks: Of prompts, full ones only.
        tokens / hit_tokens: Prompt tokens; a hit tail counts its own tokens.
        token_ratios: Sum over requests of hit tokens over prompt tokens.
        engine_tokens: Hit tokens under this engine's rules: full blocks, and at least the last prompt
            token is computed.
        identified: The trace says which prefixes are equal; else hits are unknown, and every share is nan.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    full_blocks: int = 0
    hit_full_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    token_ratios: float = 0.0
    engine_tokens: int = 0
    identified: bool = True

    def add(self, num_blocks: int, hit: int, num_input: int, block_size: int) -> None:
        """Book one request of which the first `hit` blocks were found."""
        full = num_input // block_size
        hit_tokens = min(hit * block_size, num_input)
        self.requests += 1
        self.blocks += num_blocks
        self.hit_blocks += hit
        self.full_blocks += full
        self.hit_full_blocks += min(hit, full)
        self.tokens += num_input
        self.hit_tokens += hit_tokens
        self.token_ratios += hit_tokens / num_input
        self.engine_tokens += min(hit, (num_input - 1) // block_size) * block_size

    def _share(self, part: float, whole: float) -> float:
        if not self.identified:
            return float("nan")
        return part / whole if whole else 0.0

    @property
    def by_block(self) -> float:
        """Hit blocks over blocks, partly filled tails counted on both sides."""
        return self._share(self.hit_blocks, self.blocks)

    @property
    def by_full_block(self) -> float:
        """Hit full blocks over full blocks."""
        return self._share(self.hit_full_blocks, self.full_blocks)

    @property
    def by_token(self) -> float:
        """Hit tokens over prompt tokens."""
        return self._share(self.hit_tokens, self.tokens)

    @property
    def mean_per_request(self) -> float:
        """Mean over requests of hit tokens over prompt tokens."""
        return self._share(self.token_ratios, self.requests)

    @property
    def by_engine(self) -> float:
        """Tokens that this engine would not compute over prompt tokens."""
        return self._share(self.engine_tokens, self.tokens)


class BlockStore(Protocol):
    """What a replay runs against: presence, and the one change a request makes.

    A store may have a third, `next_group(group: str) -> None`: it is told each request's category
    (`TraceRequest.group`) before the request's blocks are touched. One whose policy goes by categories needs it.
    """

    def hits(self, keys: np.ndarray) -> int:
        """Leading keys that are present; changes nothing."""
        ...

    def touch(self, keys: np.ndarray) -> None:
        """Use and insert all keys of a request."""
        ...


class Unbounded:
    """Never evicts."""

    def __init__(self) -> None:
        self.present: set[int] = set()

    def hits(self, keys: np.ndarray) -> int:
        return _leading(keys.tolist(), self.present)

    def touch(self, keys: np.ndarray) -> None:
        self.present.update(keys.tolist())


class LRUStore:
    """Holds the `capacity` blocks used last; a request's tail counts as used before its head."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1 block")
        self.capacity = capacity
        self.present: OrderedDict[int, None] = OrderedDict()

    def hits(self, keys: np.ndarray) -> int:
        return _leading(keys.tolist(), self.present)

    def touch(self, keys: np.ndarray) -> None:
        present, capacity = self.present, self.capacity
        for key in reversed(keys.tolist()):
            if key in present:
                present.move_to_end(key)
            else:
                present[key] = None
                if len(present) > capacity:
                    present.popitem(last=False)


class _KeysAreNames:
    """A hash scheme for blocks that are their own names: 8 bytes, whatever came before, since keys say that."""

    name = "key"
    root = b"root"
    collision_proof = True

    def extend(
        self, parent: bytes, first: int, packed: bytes, block_size: int, extra: ExtraKeys
    ) -> list[bytes]:
        return [bytes(packed[at : at + 8]) for at in range(0, len(packed), 8)]


_SCHEME = _KeysAreNames()


class PolicyStore:
    """Holds up to `capacity` blocks under any eviction policy and prefix index of `pagedjax.cache`.

    It does what the engine's own manager does, one request at a time: what it finds and what it evicts is what an
    engine would that admits a request, computes it whole and releases it before the next. Under the hash index, where
    blocks are found by digest alone, `FlatStore` does it without the manager's books; else it is the manager. Blocks
    that lie behind a missing one are computed again. A block more than the capacity holds the token that every request
    computes after its last block. Of a request larger than the store the front is kept. Time is the request's number.

    Args:
        capacity: Blocks.
        policy: As `PagedManager` takes it (`Belady` needs the future, see `future_of`).
        index: As `PagedManager` takes it.
    """

    def __init__(
        self,
        capacity: int,
        policy: str | PolicyFactory = "lru",
        index: str | IndexFactory = "hash",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1 block")
        self.capacity = capacity
        self._flat = FlatStore(capacity + 2, policy) if index == "hash" else None
        if self._flat is None:
            self._manager = PagedManager(num_blocks=capacity + 2, block_size=2, index=index, policy=policy)
        self._requests = 0
        self._hints = NO_HINTS
        self._last: tuple[np.ndarray | None, TokenChain | None] = (None, None)

    def _chain(self, keys: np.ndarray) -> TokenChain:
        """Two tokens a key, and the one after them."""
        known, chain = self._last
        if known is not keys or chain is None:
            halves = np.ascontiguousarray(keys, dtype="<i8").view("<i4")
            chain = TokenChain([*halves.tolist(), 0], block_size=2, hash=_SCHEME)
            self._last = keys, chain
        return chain

    @property
    def present(self) -> set[int]:
        """Keys of the blocks that are held."""
        if self._flat is not None:
            return self._flat.present
        return {
            int.from_bytes(digest, "little", signed=True)
            for _, medium, digest in self._manager.resident()
            if medium == "device"
        }

    def next_group(self, group: str) -> None:
        """The next requests are of this category; of none ("") as long as nothing is said."""
        if group != self._hints.group:
            self._hints = Hints(group=group)

    def hits(self, keys: np.ndarray) -> int:
        if self._flat is not None:
            return self._flat.hits(keys.tolist())
        return self._manager.peek(self._chain(keys)) // 2

    def touch(self, keys: np.ndarray) -> None:
        if not len(keys):
            return
        kept = keys if len(keys) <= self.capacity else keys[: self.capacity]
        now = float(self._requests)
        self._requests += 1
        if self._flat is not None:
            self._flat.touch(kept.tolist(), now, self._hints)
            return
        manager, chain = self._manager, self._chain(kept)
        manager.now = now
        hit = manager.begin(0, chain, self._hints).num_tokens
        if not manager.reserve(0, len(chain) - hit):
            raise InvariantError(
                f"request of {len(keys)} blocks: an empty store of {self.capacity} has no room"
            )
        manager.commit(0, len(chain), manager.now)
        manager.release(0)


def _digest(key: int) -> bytes:
    return key.to_bytes(8, "little", signed=True)


def future_of(trace: Trace, block_size: int) -> dict[bytes, list[float]]:
    """When each block of a trace is asked for, in request numbers: what `Belady` has to know."""
    future: dict[bytes, list[float]] = {}
    for number, refs in enumerate(stream_refs(trace, block_size)):
        for key in refs.lookup.tolist():
            future.setdefault(_digest(key), []).append(float(number))
    return future


def _leading(keys: list[int], present: Container[int]) -> int:
    for count, key in enumerate(keys):
        if key not in present:
            return count
    return len(keys)


def teller(store: BlockStore) -> Callable[[str], object]:
    """What tells a store the next request's category; nothing does where it does not ask."""
    told: Callable[[str], object] = getattr(store, "next_group", lambda group: None)
    return told


def replay(
    trace: Trace,
    block_size: int,
    store: BlockStore,
    *,
    insert: Insert = "prompt",
    progress: Progress = iter,
) -> HitCounts:
    """Run a whole trace against a store of blocks.

    Args:
        trace: Requests, in order.
        block_size: Tokens per block.
        store: `Unbounded()`, `LRUStore(capacity)` or another policy's.
        insert: What each request leaves behind.
        progress: Wraps the stream of requests, for a progress bar.
    """
    keys = BlockKeys(trace, block_size, insert)
    counts = HitCounts(identified=trace.granularity > 0)
    next_group = teller(store)
    for request in progress(trace):
        lookup, inserted, num_input = keys.refs(request)
        next_group(request.group)
        counts.add(len(lookup), store.hits(lookup), num_input, block_size)
        store.touch(inserted)
    return counts


def stream_refs(trace: Trace, block_size: int, insert: Insert = "prompt") -> Iterator[Refs]:
    """The blocks of each request, in order."""
    keys = BlockKeys(trace, block_size, insert)
    return (keys.refs(request) for request in trace)
