"""A small driver: one call sends a prompt through begin, reserve, commit and release, checking invariants."""

import itertools
from types import SimpleNamespace

import pytest

from pagedjax.cache import ExtraKeys, Hints, PagedManager, TokenChain
from pagedjax.testing.world import World


class Drive:
    """One manager and the sequences sent through it."""

    def __init__(self, usable: int = 64, block_size: int = 4, **options):
        self.m = PagedManager(num_blocks=usable + 1, block_size=block_size, **options)
        self.ids = itertools.count()
        self.chains: dict[int, TokenChain] = {}
        self.hits = {}

    def chain(self, tokens, **extra) -> TokenChain:
        return TokenChain(tokens, block_size=self.m.block_size, extra=ExtraKeys(**extra))

    def start(self, tokens, *, hints=Hints(), now=0.0, chunk=None, **extra) -> int:
        """Admit and compute a prompt; returns the sequence, which keeps its blocks, or -1 if refused."""
        seq, chain = next(self.ids), self.chain(tokens, **extra)
        self.hits[seq] = hit = self.m.begin(seq, chain, hints)
        self.chains[seq] = chain
        done = hit.num_tokens
        while done < len(chain):
            step = min(chunk or len(chain), len(chain) - done)
            if not self.m.reserve(seq, step):
                self.m.release(seq)
                return -1
            done += step
            self.m.take_copies()
            self.m.commit(seq, done, now)
            self.m.check_invariants()
        return seq

    def grow(self, seq, tokens, now=0.0) -> bool:
        """Append tokens one by one, computing each."""
        for token in tokens:
            self.chains[seq].append(token)
            if not self.m.reserve(seq, 1):
                return False
            self.m.take_copies()
            self.m.commit(seq, len(self.chains[seq]), now)
            self.m.check_invariants()
        return True

    def send(self, tokens, **options) -> int:
        """Run a prompt to its end; returns the tokens it hit."""
        seq = self.start(tokens, **options)
        assert seq >= 0, "refused"
        self.m.release(seq)
        self.m.check_invariants()
        return self.hits[seq].num_tokens

    @property
    def queue(self) -> list[int]:
        return self.m.snapshot()["groups"][0]["free_queue"]

    @property
    def ref(self) -> dict[int, int]:
        return self.m.snapshot()["groups"][0]["ref"]

    def state(self):
        """Everything a refused call must leave alone."""
        return self.m.snapshot()


@pytest.fixture
def drive():
    return Drive


@pytest.fixture
def tokens():
    """Disjoint runs of tokens: `tokens.new(n)` never repeats a token."""
    count = itertools.count(1000)
    return SimpleNamespace(new=lambda n: list(itertools.islice(count, n)))


@pytest.fixture
def world():
    return World
