"""Decode attention of one layer: each implementation beside a dense cache, a gather of everything, a copy, and
jax's own references and kernels.

All candidates of a shape, those of every block size included, run in turn in one process, and each figure is the
best of its rounds: on a shared machine the ratios hold where the times do not. `gb_per_s` counts the keys and values
that the step must read. On a GPU or TPU a round is ten calls in a row, so that what is timed is the device and not
the dispatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.bench import rivals
from pagedjax.cache.rules import KV_BYTES, SCALE_BYTES, SCALED
from pagedjax.kernels import (
    IMPLEMENTATIONS,
    KVLayout,
    KVPool,
    RaggedBatch,
    native,
    paged_attention,
    plan_ragged,
)
from pagedjax.kernels.layout import device_class
from pagedjax.kernels.quant import quantise

Progress = Callable[[str], None]
Call = Callable[[], Any]
# (block size, or None for what has no blocks; name).
Key = tuple[int | None, str]
# Keys and values that lie side by side: about three copies of the rows', and four more for every block size.
_FLOATS_AT_ONCE = {"cpu": 1 << 31, "tpu": 1 << 32, "gpu": 1 << 34}
_CALLS_A_ROUND = {"cpu": 1, "tpu": 10, "gpu": 10}


@dataclass(frozen=True)
class Case:
    """One shape to measure.

    Attributes:
        heads: (N, K).
        head_dim: H.
        batch: Rows, one query each.
        context: Tokens per row, those of the shared prefix included.
        shared: Leading tokens that all rows have in the same blocks.
        block_size: B.
        table_tokens: Also measured with a table of room for so many tokens; 0 has the context's alone.
        codes: Also measured, by every kernel but xla, with the same keys and values in pools of these kinds.
    """

    heads: tuple[int, int]
    head_dim: int
    batch: int
    context: int
    shared: int = 0
    block_size: int = 16
    table_tokens: int = 0
    codes: tuple[str, ...] = ()

    @property
    def kv_floats(self) -> int:
        """Keys and values that the rows read, shared ones counted for every row."""
        return 2 * self.batch * self.context * self.heads[1] * self.head_dim


_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
CPU_CASES = (
    *(Case((9, 3), 64, batch, 512, table_tokens=32_768 if batch == 8 else 0) for batch in (1, 8, 32)),
    Case((32, 8), 128, 8, 512, table_tokens=32_768),
    *(Case((32, 8), 128, 8, 4096, block_size=size, codes=SCALED) for size in _BLOCK_SIZES),
    Case((9, 3), 64, 32, 2048 + 128, shared=2048),
    Case((32, 8), 128, 32, 2048 + 128, shared=2048),
)
ACCELERATOR_CASES = (
    *(Case((32, 8), 128, 64, 4096, block_size=size, codes=SCALED) for size in _BLOCK_SIZES),
    *(Case((9, 3), 64, 64, 4096, block_size=size) for size in (16, 64)),
    Case((8, 1), 256, 64, 4096, block_size=64),
    Case((32, 8), 128, 64, 2048 + 128, shared=2048, block_size=64),
)


def run(
    cases: Sequence[Case] | None = None,
    *,
    dtype: str | None = None,
    rounds: int = 15,
    others: bool = True,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measures every case with every implementation that this device runs.

    Args:
        cases: Shapes; None takes CPU_CASES or ACCELERATOR_CASES. A case whose copies would not fit side by side
            (8 GiB of float32 on CPU) is left out, by name.
        dtype: Of the pool; None takes float32 on CPU and bfloat16 elsewhere.
        rounds: Times each candidate runs; the best counts.
        others: Also measure jax's references and kernels, and torch's dense attention where torch is installed.
        progress: Told what is measured next, and what is left out.

    Returns:
        Rows with device, dtype (of the pool), heads, head_dim, batch, context, shared, block_size, implementation, ms,
        gb_per_s, of_copy (share of the measured copy bandwidth) and of_dense (dense time over this one). The dense
        cache has no blocks, and block_size None; block sizes stand side by side where memory allows.
    """
    tell = progress or (lambda message: None)
    platform = jax.devices()[0].platform
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    dtype = dtype or ("float32" if platform == "cpu" else "bfloat16")
    if platform == "cpu":
        native.prepare()
        tell(
            "no GPU or TPU here: their kernels are left out; on such a machine this command measures them "
            '(Hopper: pip install "jax[cuda13]==0.12.0.1" torch)'
        )
    if cases is None:
        cases = CPU_CASES if platform == "cpu" else ACCELERATOR_CASES
    rows: list[dict[str, Any]] = []
    # By shape: what stands side by side in the list differs in its block size alone.
    for shape, group in groupby(cases, key=lambda case: replace(case, block_size=0)):
        sizes = [case.block_size for case in group]
        at_once = (_FLOATS_AT_ONCE[platform] // shape.kv_floats - 3) // 4
        if at_once < 1:
            tell(f"left out: {shape} needs {shape.kv_floats * 4 / 2**30:.1f} GiB a copy")
            continue
        for first in range(0, len(sizes), at_once):
            rows += _measure(shape, sizes[first : first + at_once], dtype, rounds, others, platform, tell)
    return rows


def _measure(
    shape: Case,
    sizes: Sequence[int],
    dtype: str,
    rounds: int,
    others: bool,
    platform: str,
    tell: Progress,
) -> list[dict[str, Any]]:
    """The rows of a shape, its block sizes side by side."""
    tell(f"{shape.heads[0]}q/{shape.heads[1]}kv/{shape.head_dim}, batch {shape.batch} × {shape.context}, "
         f"blocks of {', '.join(map(str, sizes))}")  # fmt: skip
    calls = _candidates(shape, sizes, dtype, others, platform, tell)
    best = best_of(calls, rounds)
    num_bytes = shape.kv_floats * jnp.dtype(dtype).itemsize
    # A copy reads and writes its bytes.
    copy_gb_per_s = 2 * num_bytes / best.pop((None, "copy")) / 1e9
    rows = []
    for (block_size, name), seconds in best.items():
        kind = next((kind for kind in shape.codes if name.endswith(_of_codes(kind))), dtype)
        of_kind: float = num_bytes
        if kind != dtype:
            of_kind = shape.kv_floats * KV_BYTES[kind] * (1 + (kind in SCALED) * SCALE_BYTES / shape.head_dim)
        gb_per_s = of_kind / seconds / 1e9
        rows.append(
            {
                "device": jax.devices()[0].device_kind,
                "dtype": kind,
                "heads": f"{shape.heads[0]}/{shape.heads[1]}",
                "head_dim": shape.head_dim,
                "batch": shape.batch,
                "context": shape.context,
                "shared": shape.shared,
                "block_size": block_size,
                "implementation": name,
                "ms": seconds * 1e3,
                "gb_per_s": gb_per_s,
                "of_copy": gb_per_s / copy_gb_per_s,
                "of_dense": best[None, "dense"] / seconds,
            }
        )
    return rows


def _of_codes(kind: str) -> str:
    """What the name of a candidate ends in that reads a pool of this kind."""
    return f", {kind} KV"


def claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rows of a run say of the project's claims, those only whose cases were measured.

    Returns:
        Rows with claim, measured, at_most or at_least (the other is None), and holds.
    """
    found: list[dict[str, Any]] = []

    def ms(implementation: str, **case: Any) -> list[float]:
        wanted = case | {"implementation": implementation}
        return [row["ms"] for row in rows if all(row[name] == value for name, value in wanted.items())]

    def claim(
        text: str, over: list[float], under: list[float], *, most: Any = None, least: Any = None
    ) -> None:
        if over and under:
            measured = max(over) / min(under)
            holds = measured <= most if least is None else measured >= least
            found.append(
                {"claim": text, "measured": measured, "at_most": most, "at_least": least, "holds": holds}
            )

    llama = {"heads": "32/8", "head_dim": 128, "context": 4096, "shared": 0}
    usual = llama | {"batch": 8}
    at_16 = ms("xla", **usual, block_size=16)
    claim("xla over gathering everything", at_16, ms("gather all", **usual, block_size=16), most=1 / 5)
    claim("xla over a dense cache", at_16, ms("dense", **usual), most=1.5)
    sizes = [t for size in _BLOCK_SIZES if size <= 128 for t in ms("xla", **usual, block_size=size)]
    claim("xla, slowest block size of 8 to 128 over fastest", sizes, sizes, most=1.2)
    for size in _BLOCK_SIZES:
        quick = ms(f"native{_of_codes('int8')}", **usual, block_size=size)
        plain = ms("native", **usual, block_size=size)
        claim(f"native, int8 KV over float32, blocks of {size}", quick, plain, most=0.75)
    for heads, head_dim in (("9/3", 64), ("32/8", 128)):
        shared = {"heads": heads, "head_dim": head_dim, "batch": 32, "context": 2048 + 128, "shared": 2048}
        text = f"xla without cascade over with, {heads}/{head_dim}"
        claim(text, ms("xla", **shared), ms("xla cascade", **shared), least=3.0)
    for heads, head_dim in (("9/3", 64), ("32/8", 128)):
        short = {"heads": heads, "head_dim": head_dim, "batch": 8, "context": 512, "shared": 0}
        for name in ("xla", "native"):
            text = f"{name}, 8 rows of 512 tokens, a table of 32,768 over one of 512, {heads}/{head_dim}"
            claim(text, ms(f"{name} wide table", **short), ms(name, **short), most=1.1)
    for size, share in ((64, 0.75), (16, 0.65)):
        case = llama | {"batch": 64, "block_size": size, "implementation": "pallas_mosaic"}
        reached = [row["of_copy"] for row in rows if all(row[name] == value for name, value in case.items())]
        claim(f"pallas_mosaic of the copy bandwidth, blocks of {size}", reached, [1.0], least=share)
    return found


def _candidates(
    shape: Case, sizes: Sequence[int], dtype: str, others: bool, platform: str, tell: Progress
) -> dict[Key, Call]:
    """Everything to time for a shape, compiled and checked against each other; every block size has the same keys."""
    (N, K), H = shape.heads, shape.head_dim
    q = jax.random.normal(jax.random.key(0), (shape.batch, N, H), jnp.dtype(dtype))
    rows = make_rows(shape, dtype)
    kv = rows.reshape(shape.batch, -1, 2, K, H).transpose(2, 0, 3, 1, 4)
    # Two arrays: cut from one inside the program they would be copied.
    calls: dict[Key, Call] = {
        (None, "copy"): _call(lambda x: x + 1, rows),
        (None, "dense"): _call(_dense, q, kv[0] + 0, kv[1] + 0),
    }
    for size in sizes:
        of_size = _paged(replace(shape, block_size=size), q, rows, others, platform, tell)
        calls |= {(size, name): call for name, call in of_size.items()}
    _check_equal(calls)
    return calls


def make_rows(case: Case, dtype: str) -> jax.Array:
    """Keys and values f[S, context, 2*K*H] of a case, those of the shared prefix equal."""
    shape = (case.batch, case.context, 2 * case.heads[1] * case.head_dim)
    rows = jax.random.normal(jax.random.key(1), shape, jnp.dtype(dtype))
    return rows.at[:, : case.shared].set(rows[0, : case.shared])


def paged_pool(case: Case, rows: jax.Array, kind: str | None = None) -> tuple[KVPool, np.ndarray]:
    """A pool with such rows in blocks that lie anywhere, quantised to a kind or not, and its tables i32[S, M]."""
    (_, K), H, B = case.heads, case.head_dim, case.block_size
    prefix, width = case.shared // B, -(-case.context // B)
    num_blocks = 1 + prefix + case.batch * (width - prefix)
    ids = np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32) + 1
    own = ids[prefix:].reshape(case.batch, -1)
    tables = np.concatenate([np.tile(ids[:prefix], (case.batch, 1)), own], axis=1)
    layout = KVLayout(1, num_blocks, B, K, H, kind or str(rows.dtype))
    if kind:  # both keys and values, and so both scales where there are some, lie side by side
        parts = quantise(rows.reshape(-1, 2 * K, H), kind)
        rows = jnp.concatenate([x.reshape(case.batch, case.context, -1) for x in parts], axis=-1)
    padded = jnp.pad(rows, ((0, 0), (0, width * B - case.context), (0, layout.width - rows.shape[-1])))
    blocks = padded.reshape(case.batch, width, B, layout.width)
    pool = KVPool(jnp.zeros(layout.shape, rows.dtype).at[tables].set(blocks), layout)
    return pool, tables


def _paged(
    case: Case, q: jax.Array, rows: jax.Array, others: bool, platform: str, tell: Progress
) -> dict[str, Call]:
    """What reads rows f[S, context, 2*K*H] out of blocks."""
    H, B = case.head_dim, case.block_size
    pool, tables = paged_pool(case, rows)
    width = tables.shape[1]

    def plan(max_groups: int = 0, room: int = 0) -> RaggedBatch:
        ragged = plan_ragged(
            np.ones(case.batch, np.int32),
            np.full(case.batch, case.context, np.int32),
            np.pad(tables, ((0, 0), (0, room // B - width))) if room else tables,
            block_size=B,
            num_tokens_bucket=case.batch,
            num_seqs_bucket=case.batch,
            decode_bucket=case.batch,
            max_groups=max_groups,
        )
        return jax.tree.map(jnp.asarray, ragged)

    calls: dict[str, Call] = {
        "gather all": _call(
            lambda q, pool, t: _gather_all(q, pool, t, case.context), q, pool, jnp.asarray(tables)
        ),
    }
    plans = {"": (pool, plan())}
    if case.shared:
        plans[" cascade"] = (pool, plan(max_groups=1))
    if case.table_tokens:
        plans[" wide table"] = (pool, plan(room=case.table_tokens))
    plans |= {_of_codes(kind): (paged_pool(case, rows, kind)[0], plan()) for kind in case.codes}
    for name in IMPLEMENTATIONS:
        for suffix, (of_kind, ragged) in plans.items():
            if name == "xla" and of_kind.layout.quantised:
                continue  # it serves, several times as slow as of float32
            label = name + suffix
            try:
                calls[label] = _call(
                    lambda q, pool, ragged, name=name: paged_attention(
                        q, pool, 0, ragged, scale=H**-0.5, implementation=name
                    ),
                    q, of_kind, ragged,
                )  # fmt: skip
            except NotImplementedError as limit:
                tell(f"{label} left out, blocks of {B}: {limit}")
    for name in rivals.names(platform) if others else ():
        try:
            calls[name] = rivals.make(name, rivals.Step(q, pool, jnp.asarray(tables), case.context))
        except Exception as limit:  # other people's code: each refuses in its own way
            reason = str(limit).strip().partition("\n")[0]
            tell(f"{name} left out, blocks of {B}: {type(limit).__name__} {reason[:120]}")
    return calls


def _call(fn: Callable[..., jax.Array], *args: Any) -> Call:
    compiled = jax.jit(fn).lower(*args).compile()
    return lambda: compiled(*args)


def _check_equal(calls: dict[Key, Call]) -> None:
    """A candidate that computes something else is not worth timing."""
    want = rivals.to_numpy(calls[None, "dense"]())
    for (_, name), call in calls.items():
        if name != "copy":
            error = float(np.abs(rivals.to_numpy(call()) - want).max())
            if not error < 3e-2:
                raise RuntimeError(
                    f"{name}: differs from the dense result by {error:.1e}; fix it before timing it"
                )


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q f[S, N, H] over k, v f[S, K, t, H]."""
    S, N, H = q.shape
    grouped = q.reshape(S, k.shape[1], -1, H) * H**-0.5
    weights = jax.nn.softmax(jnp.einsum("skgh,skth->skgt", grouped, k).astype(jnp.float32), axis=-1)
    return jnp.einsum("skgt,skth->skgh", weights.astype(v.dtype), v).reshape(S, N, H)


def _gather_all(q: jax.Array, pool: KVPool, tables: jax.Array, context: int) -> jax.Array:
    """The simplest paged attention: every row's blocks side by side first."""
    K, H = pool.layout.num_kv_heads, pool.layout.head_dim
    rows = pool.data[tables].reshape(tables.shape[0], -1, pool.layout.width)[:, :context]
    kv = rows[..., : 2 * K * H].reshape(*rows.shape[:2], 2, K, H)
    grouped = q.reshape(q.shape[0], K, -1, H) * H**-0.5
    weights = jax.nn.softmax(jnp.einsum("skgh,stkh->skgt", grouped, kv[:, :, 0]).astype(jnp.float32), axis=-1)
    return jnp.einsum("skgt,stkh->skgh", weights.astype(kv.dtype), kv[:, :, 1]).reshape(q.shape)


def best_of(calls: dict[Key, Call], rounds: int) -> dict[Key, float]:
    """Seconds a call in each one's fastest round, rounds interleaved."""
    calls_a_round = _CALLS_A_ROUND[device_class()]
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for key, call in calls.items():
            started = time.perf_counter()
            for _ in range(calls_a_round):
                result = call()
            jax.block_until_ready(result)
            best[key] = min(best[key], (time.perf_counter() - started) / calls_a_round)
    return best
