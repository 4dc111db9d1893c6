"""Named faults, planted one at a time: each must be caught, or the suite checks nothing.

The judge is every case and example test that needs no more than `drive` and `tokens`, and random histories
under the naive model. Without a mutant it passes.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedjax.cache import InvariantError, PagedManager, copies
from pagedjax.cache.admission import Admission
from pagedjax.cache.block import BlockPool
from pagedjax.cache.eviction import LRU
from pagedjax.cache.hash_index import HashIndex

HERE = Path(__file__).parent
HISTORIES = [
    dict(index="hash"),
    dict(index="hash", dedup=True, partial=1),
    dict(index="radix", dedup=True, host_blocks=4),
    dict(index="hash", block_size=4, usable=9, host_blocks=3),
]


def _load(name):
    spec = importlib.util.spec_from_file_location(f"judge_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _checks():
    for name in ("test_cases", "test_examples"):
        for label, function in inspect.getmembers(_load(name), inspect.isfunction):
            plain = label.startswith("test_") and not getattr(function, "pytestmark", [])
            if plain and set(inspect.signature(function).parameters) <= {"drive", "tokens"}:
                yield function


CHECKS = list(_checks())


def _first_failure(drive, world):
    """Name of the first check that fails, or None."""
    for function in CHECKS:
        count = itertools.count(1000)
        tokens = SimpleNamespace(new=lambda n, c=count: list(itertools.islice(c, n)))
        given = {"drive": drive, "tokens": tokens}
        names = inspect.signature(function).parameters
        try:
            function(**{name: given[name] for name in names})
        except (Exception, pytest.fail.Exception):
            return function.__name__
    for options in HISTORIES:
        rng = random.Random(3)
        try:
            w = world(**options)
            for _ in range(300):
                w.act(rng.randrange)
        except (Exception, pytest.fail.Exception):
            return f"history of {options}"
    return None


def _dropped_touch(monkeypatch):
    """A hit adds no reference."""

    def touch(self, blocks, first=0, hints=None, now=0.0):
        idle = [b for b in blocks if not self.ref[b]]
        if self.index.indexes:
            self.num_evictable -= len(idle)
            self.policy.hit(blocks, idle, first, hints, now)

    monkeypatch.setattr(BlockPool, "touch", touch)


def _skipped_hash_clear(monkeypatch):
    """A recycled block keeps its entry in the index."""
    monkeypatch.setattr(HashIndex, "forget", lambda self, blocks, keys: None)


def _head_before_tail(monkeypatch):
    """A release queues the head of the table first."""
    queue = BlockPool._queue
    monkeypatch.setattr(BlockPool, "_queue", lambda self, idle, now: queue(self, idle[::-1], now))


def _hash_before_write(monkeypatch):
    """Blocks are indexed when they are reserved, not when their KV is written."""
    reserve = PagedManager.reserve

    def early(self, seq, num_tokens, lookahead=0):
        done = reserve(self, seq, num_tokens, lookahead)
        state = self._seqs[seq]
        full = min(state.computed + num_tokens, len(state.chain)) // self.block_size
        if done and full > state.indexed and self.prefix_caching:
            for group in self._groups:
                self._registrar.register(group, state, state.indexed, full, self.now)
            state.indexed = full
        return done

    monkeypatch.setattr(PagedManager, "reserve", early)


def _hits_counted_as_free(monkeypatch):
    """`need > free - hits in the queue` weakened to `need > free`."""
    monkeypatch.setattr(Admission, "num_waiting", lambda self, state, group: 0)


def _repeated_destination(monkeypatch):
    """A batch names a destination twice."""
    batch = copies._batch
    monkeypatch.setattr(copies, "_batch", lambda items: batch([*items, dataclasses.replace(items[0])]))


def _left_copy(monkeypatch):
    """A release leaves its pending copy."""
    monkeypatch.setattr(copies.PendingCopies, "cancel_unneeded", lambda self: None)


def _write_into_shared(monkeypatch):
    """The red line is not checked."""
    monkeypatch.setattr(PagedManager, "_unwritable", staticmethod(lambda *a: []))


def _broken_link(monkeypatch):
    """The queue forgets a backward link when a block leaves its middle."""

    def hit(self, blocks, idle, *rest):
        for b in idle:
            self._next[self._prev[b]] = self._next[b]

    monkeypatch.setattr(LRU, "hit", hit)


MUTANTS = [
    _dropped_touch,
    _skipped_hash_clear,
    _head_before_tail,
    _hash_before_write,
    _hits_counted_as_free,
    _repeated_destination,
    _left_copy,
    _write_into_shared,
    _broken_link,
]


def test_the_judge_passes_without_a_mutant(drive, world):
    assert len(CHECKS) > 30
    assert _first_failure(drive, world) is None


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda f: f.__name__.strip("_"))
def test_mutant_is_caught(drive, world, monkeypatch, plant):
    plant(monkeypatch)
    assert _first_failure(drive, world) is not None, plant.__doc__


def test_an_invariant_error_dumps_the_books(drive):
    d = drive(usable=3)
    d.m._groups[0].pool.ref[1] = 5
    with pytest.raises(InvariantError, match="block 1: is"):
        d.m.check_invariants()
