"""What the manager does to its eviction policy when requests come one at a time and blocks are found by digest alone.

A replay asks the manager one question only, which blocks stay; its books of sequences, copies, reasons and events
cost more than most policies do. `tests/sim/test_replay_engine.py` holds both to the same hits in every request.
"""

from __future__ import annotations

import numpy as np

from pagedjax.cache import InvariantError
from pagedjax.cache.policies import PolicyFactory, make_policy
from pagedjax.cache.protocol import NO_HINTS, Hints


class FlatStore:
    """Blocks of one pool under a policy: each request takes what it finds, computes the rest, and is released.

    Args:
        num_blocks: Blocks of the pool, the null block included; one of them holds the token after a request's blocks.
        policy: As `make_policy` takes it.
    """

    def __init__(self, num_blocks: int, policy: str | PolicyFactory) -> None:
        self._policy = make_policy(policy, num_blocks)
        self._link = getattr(self._policy, "link", None)
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._key_of = [0] * num_blocks
        self._block_of: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}  # later copies of a key, computed anew behind a missing block

    @property
    def present(self) -> set[int]:
        """Keys of the blocks that are held."""
        return set(self._block_of)

    def hits(self, keys: list[int]) -> int:
        """Leading keys that are present; changes nothing."""
        held = self._block_of
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def touch(self, keys: list[int], now: float, hints: Hints = NO_HINTS) -> None:
        """One request: at least one key, at most as many as the pool holds beside the last token's block.

        Raises:
            InvariantError: A key stands twice among the hits, or the policy names too few victims.
        """
        policy, hit = self._policy, self.hits(keys)
        table = list(map(self._block_of.__getitem__, keys[:hit]))
        if table:
            if len(set(table)) < hit:
                raise InvariantError(
                    f"a request of {len(keys)} blocks names one twice: its keys are no chain"
                )
            policy.hit(table, table, 0, hints, now)
        *new, last = self._take(len(keys) - hit + 1, now)
        if new:
            fresh = keys[hit:]
            self._enter(new, fresh)
            if self._link is not None:
                self._link(table[-1] if table else 0, new[0])
            packed = np.array(fresh, dtype="<i8").tobytes()
            names = [packed[at : at + 8] for at in range(0, len(packed), 8)]
            policy.insert(new, names, hit, hints, now)
        self._blank.append(last)
        table += new
        table.reverse()
        policy.release(table, now)

    def _take(self, count: int, now: float) -> list[int]:
        """Blank blocks first, then the policy's victims."""
        blank = self._blank
        rest = len(blank) - count
        if rest >= 0:
            out = blank[rest:]
            del blank[rest:]
            out.reverse()
            return out
        out = blank[::-1]
        blank.clear()
        victims = self._policy.victim(-rest, now)
        if len(victims) != -rest:
            raise InvariantError(f"policy named {len(victims)} victims of {-rest} asked for")
        self._policy.remove(victims)
        self._forget(victims)
        return out + victims

    def _enter(self, blocks: list[int], keys: list[int]) -> None:
        held, key_of = self._block_of, self._key_of
        if held.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            held.update(zip(keys, blocks))
            for b, key in zip(blocks, keys):
                key_of[b] = key
            return
        for b, key in zip(blocks, keys):
            key_of[b] = key
            if held.setdefault(key, b) != b:
                self._twins.setdefault(key, []).append(b)

    def _forget(self, blocks: list[int]) -> None:
        held, key_of, twins = self._block_of, self._key_of, self._twins
        for b in blocks:
            key = key_of[b]
            if not twins or key not in twins:
                del held[key]
                continue
            others = twins[key]
            if held[key] == b:
                held[key] = others.pop(0)
            else:
                others.remove(b)
            if not others:
                del twins[key]
