"""KernelSuite: what every attention implementation has to keep to, as tests that two lines run over a plug-in.

from pagedjax.testing import KernelSuite
class TestMine(KernelSuite): implementation = "my_kernel:attend"
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

CASES: tuple[dict[str, Any], ...] = (
    {},
    {"heads": (4, 4), "block_size": 1, "soft_cap": 5.0},
    {"heads": (4, 1), "head_dim": 64, "sinks": True, "window": 5},
    {"rows": ((1, 1, 1), (1, 8, 33)), "window": 20},
    {"rows": ((9, 2), (20, 2)), "heads": (3, 1)},
)


class KernelSuite:
    """Tests of one implementation; derive a class whose name begins with Test.

    Attributes:
        implementation: As `paged_attention` takes it.
        tolerance: Of float32 outputs, absolute and relative.
    """

    implementation: str = "xla"
    tolerance: float = 2e-6

    def _run(
        self,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 32,
        block_size: int = 8,
        rows: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 1, 4, 7), (1, 30, 12, 7)),
        sinks: bool = False,
        **params: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(outputs, log-sum-exps) of the implementation and of dense attention, for one random step."""
        import jax
        import jax.numpy as jnp

        from pagedjax.kernels import KVLayout, KVPool, paged_attention, plan_ragged

        (N, K), H, B = heads, head_dim, block_size
        rng = np.random.default_rng([N, K, H, B, *rows[0]])
        query_lens, seq_lens = rows
        counts = [-(-n // B) for n in seq_lens]
        ids = iter(rng.permutation(sum(counts) + 2) + 1)
        tables = np.full((len(counts), max(counts)), 2**30, np.int32)  # what stands behind a row is not read
        layout = KVLayout(2, sum(counts) + 3, B, K, H, "float32")
        data = np.full(layout.shape, np.nan, np.float32)  # nor is a slot that nobody wrote
        q = rng.standard_normal((sum(query_lens) + 3, N, H)).astype(np.float32)
        sink = rng.standard_normal(N).astype(np.float32) if sinks else None
        outs, lses, at = [], [], 0
        for row, (num, n) in enumerate(zip(query_lens, seq_lens)):
            tables[row, : counts[row]] = [next(ids) for _ in range(counts[row])]
            kv = rng.standard_normal((n, 2 * K * H)).astype(np.float32)
            for p in range(n):
                data[layout.num_blocks + tables[row, p // B], p % B, : 2 * K * H] = kv[p]
            k, v = kv[:, : K * H].reshape(n, K, H), kv[:, K * H :].reshape(n, K, H)
            out, lse = _dense(q[at : at + num], k, v, H**-0.5, sink, **params)
            outs.append(out)
            lses.append(lse)
            at += num
        decodes = query_lens.count(1)
        ragged = plan_ragged(
            query_lens,
            seq_lens,
            tables,
            block_size=B,
            num_tokens_bucket=len(q),
            num_seqs_bucket=len(counts) + 1,
            decode_bucket=decodes,
            windows=(params.get("window"),),
        )
        attend = functools.partial(
            paged_attention,
            layer=1,
            scale=H**-0.5,
            implementation=self.implementation,
            return_lse=True,
            **params,
        )
        kv_pool = KVPool(jnp.asarray(data), layout)
        ours, logs = jax.jit(attend)(
            jnp.asarray(q), kv_pool, ragged=ragged, sinks=None if sink is None else jnp.asarray(sink)
        )
        return np.asarray(ours)[:at], np.asarray(logs)[:at], np.concatenate(outs), np.concatenate(lses)

    def test_it_agrees_with_dense_attention_or_refuses(self) -> None:
        """Float64, no blocks, one row after another; a case that it cannot serve it refuses by name."""
        served = 0
        for case in CASES:
            try:
                out, lse, expected, expected_lse = self._run(**case)
            except NotImplementedError as error:
                assert self.implementation in str(error) and len(str(error)) > len(self.implementation) + 4
                continue
            served += 1
            np.testing.assert_allclose(out, expected, self.tolerance, self.tolerance, err_msg=str(case))
            np.testing.assert_allclose(
                lse, expected_lse, 4 * self.tolerance, 4 * self.tolerance, err_msg=str(case)
            )
        assert served, "it serves none of the cases"


def _dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    sink: np.ndarray | None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one row: q f[T, N, H], k and v f[n, K, H] → (f64[T, N, H], f64[T, N])."""
    (T, N, _), (n, K, _) = q.shape, k.shape
    k, v = (np.repeat(a.astype(np.float64), N // K, axis=1) for a in (k, v))
    scores = np.einsum("tnh,mnh->tnm", q.astype(np.float64), k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = np.arange(n - T, n)[:, None, None]
    seen = np.arange(n) <= position
    if window is not None:
        seen &= np.arange(n) > position - window
    scores = np.where(seen, scores, -np.inf)
    if sink is not None:
        scores = np.concatenate([scores, np.broadcast_to(sink[None, :, None], (T, N, 1))], axis=-1)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("tnm,mnh->tnh", weights[..., :n] / total, v), (most + np.log(total))[..., 0]
