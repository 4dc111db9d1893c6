"""Attention as its definition reads: numpy float64, one query at a time, keys as plain arrays, no paging."""

from __future__ import annotations

import numpy as np


def attend_one(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One query f[N, H] at `position` over k f[n, K, H], v f[n, K, Hv]: (o f64[N, Hv], lse f64[N])."""
    N = len(q)
    group = N // k.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    out = np.zeros((N, v.shape[-1]))
    lse = np.full(N, -np.inf)
    for head in range(N):
        keys = k[first : position + 1, head // group].astype(np.float64)
        values = v[first : position + 1, head // group].astype(np.float64)
        scores = keys @ q[head].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        logits = scores if sinks is None else np.append(scores, np.float64(sinks[head]))
        if len(logits) == 0:
            continue
        top = logits.max()
        total = np.exp(logits - top).sum()
        lse[head] = top + np.log(total)
        out[head] = np.exp(scores - top) @ values / total
    return out, lse


def attend(
    q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray], query_lens: list[int], **params: object
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of queries, one after the other in q f[T, N, H]; row r's queries are the last of keys[r]."""
    outs, lses = [], []
    token = 0
    for k, v, num in zip(keys, values, query_lens):
        for i in range(num):
            out, lse = attend_one(q[token], k, v, len(k) - num + i, **params)
            outs.append(out)
            lses.append(lse)
            token += 1
    return np.stack(outs), np.stack(lses)
