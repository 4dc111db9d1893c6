"""Speed of the host half's cache, each figure beside the floor: bare hashlib over the same bytes.

The floor is one `hashlib.sha256(parent + packed tokens).digest()` a block, taken in the same process between
the measurements; a ratio is best time over best floor. No block can be named for less under a chained
cryptographic hash, so a ratio of 1 means that managing a block costs as much as naming it.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagedjax.cache import INDEXES, POLICIES, PagedManager, TokenChain
from pagedjax.cache.hashing import pack_tokens

REQUEST_TOKENS = 2048
Progress = Callable[[str], None]


def run(
    config: Any = None,
    *,
    indexes: Sequence[str] = tuple(sorted(INDEXES)),
    policies: Sequence[str] = tuple(sorted(POLICIES.keys() - {"belady"})),
    block_sizes: Sequence[int] = (16, 64, 256),
    num_blocks: int = 10_000,
    rounds: int = 40,
    large: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure every index under LRU, every policy under the hash index, and the block sizes of both.

    Args:
        config: A `pagedjax.config.Config`: its index, policy and block size are measured too.
        indexes: Names in `INDEXES`.
        policies: Names in `POLICIES`.
        block_sizes: Tokens per block.
        num_blocks: Usable blocks of the pool.
        rounds: Requests per operation; the best counts.
        large: Measure hash + LRU at 1,000,000 blocks as well (about half a minute).
        progress: Told what is measured next.

    Returns:
        Rows with index, policy, block_size, num_blocks, operation, us_per_block, floor_us, ratio and
        operations_per_s (requests a second; for "append" tokens a second).
    """
    cells = [(index, "lru", size, num_blocks) for size in block_sizes for index in indexes]
    cells += [("hash", policy, block_sizes[0], num_blocks) for policy in policies]
    if config is not None:
        cache = config.cache
        cells.append((cache.index, cache.policy, cache.block_size, num_blocks))
    if large:
        cells.append(("hash", "lru", 16, 1_000_000))
    rows: list[dict[str, Any]] = []
    for index, policy, size, blocks in dict.fromkeys(cells):
        if progress is not None:
            progress(f"{index} + {policy}, {size} tokens a block, {blocks:,} blocks")
        rows += measure(index, policy, size, blocks, rounds)
    return rows


def measure(index: str, policy: str, block_size: int, num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    """All operations of one kind of manager."""
    bench = _Bench(index, policy, block_size, num_blocks, rounds)
    with _no_gc():
        best = bench.run()
    per_request = REQUEST_TOKENS // block_size
    rows = []
    for operation, seconds in best.items():
        count = 1 / block_size if operation == "append" else per_request
        rows.append(
            {
                "index": index,
                "policy": policy,
                "block_size": block_size,
                "num_blocks": num_blocks,
                "operation": operation,
                "us_per_block": seconds / count * 1e6,
                "floor_us": bench.floor_s / per_request * 1e6,
                "ratio": seconds / count * per_request / bench.floor_s,
                "operations_per_s": 1 / seconds,
            }
        )
    return rows


class _Bench:
    def __init__(self, index: str, policy: str, block_size: int, num_blocks: int, rounds: int) -> None:
        self.manager = PagedManager(
            num_blocks=num_blocks + 1, block_size=block_size, index=index, policy=policy
        )
        self.size = block_size
        self.requests = num_blocks // (REQUEST_TOKENS // block_size)  # that fill the pool
        self.rounds = rounds
        self.floor_s = float("inf")
        self._tokens = itertools.count()
        self._ids = itertools.count()
        self._packed = pack_tokens(list(range(REQUEST_TOKENS)))

    def run(self) -> dict[str, float]:
        """Best seconds per operation: per request, per token for "append"."""
        best: dict[str, float] = {}
        best["hash"] = self._best(lambda tokens: self._hash(tokens), self._new_tokens)
        chains: list[TokenChain] = []
        fresh = min(max(self.requests - 1, 1), max(self.rounds, self.requests - 1))
        seconds = []
        for _ in range(fresh):
            chain = self._new_chain()
            seconds.append(self._timed(lambda: self._request(chain)))  # noqa: B023
            chains.append(chain)
            self._floor()
        best["miss"] = min(seconds)
        recent = chains[-self.rounds :]
        if self.manager._groups[0].index.indexes:
            best["lookup"] = self._each(recent, self.manager.peek)
            best["hit"] = self._each(recent, self._request)
        best["evict"] = self._best(self._request, self._new_chain, warm=2)
        best["append"] = self._append()
        return best

    def _new_tokens(self) -> list[int]:
        start = next(self._tokens) * REQUEST_TOKENS % (2**31 - REQUEST_TOKENS)
        return list(range(start, start + REQUEST_TOKENS))

    def _new_chain(self) -> TokenChain:
        chain = TokenChain(self._new_tokens(), block_size=self.size)
        chain.digests(chain.num_full_blocks)
        return chain

    def _hash(self, tokens: list[int]) -> None:
        chain = TokenChain(tokens, block_size=self.size)
        chain.digests(chain.num_full_blocks)

    def _request(self, chain: TokenChain) -> None:
        """Admit, fill and release."""
        manager, seq = self.manager, next(self._ids)
        hit = manager.begin(seq, chain)
        if not manager.reserve(seq, len(chain) - hit.num_tokens):
            raise RuntimeError("the pool of the bench is too small for one request; raise num_blocks")
        manager.commit(seq, len(chain), seq)
        manager.release(seq)

    def _append(self) -> float:
        """Seconds per decoded token: reserve one position, commit it."""
        manager, seq = self.manager, next(self._ids)
        chain = TokenChain(self._new_tokens()[: self.size], block_size=self.size)
        manager.begin(seq, chain)
        manager.reserve(seq, len(chain))
        manager.commit(seq, len(chain), 0.0)

        def block() -> None:
            for _ in range(self.size):
                chain.append(7)
                manager.reserve(seq, 1)
                manager.commit(seq, len(chain), 0.0)

        seconds = min(self._timed(block) for _ in range(min(self.rounds, self.requests))) / self.size
        manager.release(seq)
        return seconds

    def _best(self, operation: Callable[[Any], None], make: Callable[[], Any], warm: int = 0) -> float:
        subjects = (make() for _ in range(self.rounds + warm))
        return self._each(itertools.islice(subjects, warm, None), operation)

    def _each(self, subjects: Iterator[Any] | Sequence[Any], operation: Callable[[Any], Any]) -> float:
        best = float("inf")
        for subject in subjects:
            self._floor()
            best = min(best, self._timed(lambda: operation(subject)))  # noqa: B023
        return best

    def _floor(self) -> None:
        packed, stride, sha256 = self._packed, 4 * self.size, hashlib.sha256

        def floor() -> None:
            digest = bytes(32)
            for at in range(0, len(packed), stride):
                digest = sha256(digest + packed[at : at + stride]).digest()

        self.floor_s = min(self.floor_s, self._timed(floor))

    @staticmethod
    def _timed(operation: Callable[[], Any]) -> float:
        started = time.perf_counter()
        operation()
        return time.perf_counter() - started


def bytes_per_block(num_blocks: int = 20_000, block_size: int = 16) -> float:
    """Host bytes per cached block, everything together, of hash + LRU filled to the last block."""
    per_request = REQUEST_TOKENS // block_size
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        manager = PagedManager(num_blocks=num_blocks + 1, block_size=block_size)
        for seq in range(num_blocks // per_request):
            chain = TokenChain(range(seq * REQUEST_TOKENS, (seq + 1) * REQUEST_TOKENS), block_size=block_size)
            manager.begin(seq, chain)
            manager.reserve(seq, REQUEST_TOKENS)
            manager.commit(seq, REQUEST_TOKENS, 0.0)
            manager.release(seq)
        del chain
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return used / (num_blocks // per_request * per_request)


@contextmanager
def _no_gc() -> Iterator[None]:
    """As timeit does: collections would fall on whichever operation happens to run."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
