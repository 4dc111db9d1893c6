"""Token ids for the prompts and answers of a trace that is simulated: equal exactly where its identities are."""

from __future__ import annotations

import numpy as np

from pagedjax.sim.trace import Trace, TraceRequest

# Tokens that stand for content a trace does not identify: i32, out of the way of ids and vocabularies.
_OWN_NUMBER = 1 << 28
_OWN_PROMPT = 1 << 29
_OWN_ANSWER = 1 << 30
_PARTS, _PART_BITS = 3, 22  # of an id of 64 bits, spelled in tokens between _OWN_NUMBER and _OWN_PROMPT
_PART_MASK = np.uint64((1 << _PART_BITS) - 1)


def own_token(number: int) -> int:
    """The token that answers consist of where a trace does not give their ids."""
    return _OWN_ANSWER + number


class Prompts:
    """Token ids for a trace's prompts, made so that they are equal exactly where the identities are.

    A granule's tokens are its id, repeated. Large ids and those below 0 are spelled in three parts, over and over,
    where at least so many tokens are compared together; else they are numbered, in a table that grows with them. What
    has no identity gets a token of its own.

    Args:
        trace: Whose requests follow.
        together: Tokens that are compared as one: the block size, or 1 where parts of blocks are used again.
    """

    def __init__(self, trace: Trace, together: int = 1) -> None:
        self._granularity = trace.granularity
        self._spelled = min(together, trace.granularity) >= _PARTS
        self._dense: dict[int, int] = {}

    def tokens(self, number: int, request: TraceRequest) -> np.ndarray:
        """i32[num_input] of request `number`."""
        if request.token_ids is not None:
            return request.token_ids
        own = np.full(request.num_input, _OWN_PROMPT + number, dtype=np.int32)
        if request.granule_ids is not None:
            spread = self._spread(request.granule_ids)[: request.num_input]
            own[: len(spread)] = spread
        return own

    def _spread(self, ids: np.ndarray) -> np.ndarray:
        """i32[granules * granularity] of granule ids."""
        near = (ids >= 0) & (ids < _OWN_NUMBER)
        if self._spelled and not near.all():
            place = np.arange(self._granularity, dtype=np.uint64) % np.uint64(_PARTS)
            parts = ids.view(np.uint64)[:, None] >> (place * np.uint64(_PART_BITS))
            words = (
                _OWN_NUMBER + (place.astype(np.int64) << _PART_BITS) + (parts & _PART_MASK).astype(np.int64)
            )
            return np.where(near[:, None], ids[:, None], words).astype(np.int32).reshape(-1)
        dense = self._dense
        named = ids.tolist()
        if not near.all():
            named = [
                i if k else dense.setdefault(i, _OWN_NUMBER + len(dense))
                for i, k in zip(named, near.tolist())
            ]
        return np.repeat(np.array(named, dtype=np.int32), self._granularity)
