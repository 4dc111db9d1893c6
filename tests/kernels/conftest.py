"""What the kernel tests share: the float64 oracle and a builder of poisoned ragged steps."""

import functools
import importlib.util
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from judges import QUICK

from pagedjax.kernels import KVLayout, KVPool, make_pool, plan_ragged
from pagedjax.kernels.layout import stored_fill
from pagedjax.kernels.quant import QUANTISED

# Of outputs and of log-sum-exps worked in 16 bits: their weights are rounded before they are multiplied.
ROUNDED = {"float32": (0.0, 0.0), "bfloat16": (4e-3, 1e-3), "float16": (5e-4, 1e-3)}
UNIT = 2.0**-24  # what float32 rounds 1 by
# Interprets Mosaic GPU kernels on the CPU; None in jax before 0.12.
GPU_INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)
GARBAGE = np.array([10**6, -7, 2**30, -1], np.int32)


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """tests/kernels/dense_oracle.py."""
    path = Path(__file__).parent / "dense_oracle.py"
    spec = importlib.util.spec_from_file_location("dense_oracle", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dense_oracle"] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def float16_compiles() -> bool:
    """Whether XLA converts float16 here: on x86-64 without F16C it calls functions that jaxlib does not hold."""
    try:
        jax.jit(lambda x: x.astype(jnp.float32))(np.ones(1, np.float16))
    except jax.errors.JaxRuntimeError:
        return False
    return True


@dataclass
class Step:
    """A ragged step over a pool in which everything that must not be read is NaN."""

    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    query_lens: list[int]
    pool: KVPool
    layer: int
    ragged: Any
    params: dict[str, Any]
    tables: np.ndarray
    plan_args: dict[str, Any] = field(default_factory=dict)
    worked_in: str = "float32"  # dtype of queries and products: a quantised pool's is theirs to choose

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @functools.cached_property
    def tolerance(self) -> tuple[float, float]:
        """Of outputs and of log-sum-exps, absolute and relative: (o, lse).

        A float32 score of size s is off by UNIT·s each time it is rounded: about four times, by the last of its sums
        and a cap's quotient, tanh and product. exp makes that the relative error of the score's weight, and the sum
        of the weights moves as much: 8·UNIT·s in all. Scores of up to 4, as scale = 1/sqrt(H) gives, make 1.9e-6.

        That is for heads of up to 256 lanes. The sums of a longer dot product are rounded once a lane, and what they
        are off by grows with the root of their number: the largest error of three million scores was 33, 64, 100 and
        118 UNIT at 64, 256, 576 and 1,024 lanes.
        """
        ends = np.cumsum(self.query_lens)
        size = 4.0
        for end, num, keys in zip(ends, self.query_lens, self.keys, strict=True):
            if num and keys is not None and len(keys):
                q = self.q[end - num : end].reshape(num, keys.shape[1], -1, keys.shape[2])
                size = max(size, np.abs(np.einsum("tkgh,mkh->tkgm", q, keys)).max() * self.params["scale"])
        size *= max(1.0, self.q.shape[-1] / 256) ** 0.5
        out, lse = ROUNDED[self.worked_in]
        return max(out, 8 * UNIT * size), max(lse, 8 * UNIT * size)

    def expected(self, oracle: ModuleType) -> tuple[np.ndarray, np.ndarray]:
        params = {**self.params}
        return oracle.attend(self.q[: self.num_tokens], self.keys, self.values, self.query_lens, **params)


def coded(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys or values of eight bits, f32[..., H] → bytes of codes and of scales, and the numbers they stand for."""
    if kind == "fp8_e4m3_unscaled":
        codes = x.astype(ml_dtypes.float8_e4m3fn)
        return codes.view(np.int8), np.zeros((*x.shape[:-1], 0), np.int8), codes.astype(np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(QUANTISED[kind])
    codes = np.round(x / scale) if kind == "int8" else x / scale
    codes = codes.astype(np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn)
    return codes.view(np.int8), scale.view(np.int8), codes.astype(np.float32) * scale


def build_step(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: str = "float32",
    seed: int = 0,
    num_layers: int = 2,
    layer: int = 1,
    spare_blocks: int = 3,
    table_width: int | None = None,
    buckets: tuple[int, int, int] | None = None,
    chunk_tokens: int = 32,
    tile_queries: int = 8,
    poison: str = "kv",
    table_seed: int = 0,
    share: int | list[tuple[range, int]] = 0,
    latent: int = 0,
    scale: float | None = None,
    worked_in: str | None = None,
    **params: Any,
) -> Step:
    """Random rows over randomly placed blocks, keys and values placed there by numpy.

    Args:
        poison: Which halves of unwritten slots are NaN: "k", "v" or "kv"; the rest is 0.
        share: Leading tokens (whole blocks) that all rows have in common, in the same blocks; or a tree of them: the
            rows that share, and up to which token, the larger sets of rows first.
        worked_in: Of a quantised pool, the dtype of queries and products; None is float32.
        latent: Not 0: values are the keys' first so many lanes, and nothing is stored beside the keys.
    """
    if dtype == "float16" and not float16_compiles():
        pytest.skip("float16: XLA has no conversions for a CPU without F16C")
    N, K = heads
    H, B = head_dim, block_size
    rng = np.random.default_rng(seed)
    n, total = len(query_lens), sum(query_lens)
    T, S, Sd = buckets or (total + 3, n + 1, min(n, query_lens.count(1)))
    blocks = [-(-length // B) for length in seq_lens]
    M = table_width or max(1, *blocks)
    tree = [(range(n), share)] if isinstance(share, int) else share
    stems: list[list[int]] = [[] for _ in range(n)]  # by row the numbers of shared blocks
    num_shared = 0
    for some, upto in tree:
        more = [*range(num_shared, num_shared + upto // B - len(stems[some[0]]))]
        num_shared += len(more)
        for row in some:
            stems[row] = [*stems[row], *more]
    own = [b - len(stem) for b, stem in zip(blocks, stems)]
    P = 1 + num_shared + sum(own) + spare_blocks
    layout = KVLayout(num_layers, P, B, K, H, dtype, latent)

    ids = np.random.default_rng(table_seed).permutation(P - 1).astype(np.int32) + 1
    tables = GARBAGE[np.random.default_rng(1).integers(0, len(GARBAGE), (n, M))]
    used = num_shared
    for row, num in enumerate(own):
        tables[row, : blocks[row]] = np.concatenate([ids[np.array(stems[row], int)], ids[used : used + num]])
        used += num

    plain = (worked_in or "float32") if layout.quantised else dtype

    def rand(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(plain)).astype(np.float32)

    q = rand(T, N, H)
    prefix = rand(num_shared, B, K, H), rand(num_shared, B, K, H)

    def side(which: int) -> list[np.ndarray | None]:
        begins = [prefix[which][np.array(stem, int)].reshape(-1, K, H) for stem in stems]
        return [
            np.concatenate([begin, rand(m - len(begin), K, H)]) if m >= len(begin) else None
            for m, begin in zip(seq_lens, begins)
        ]

    keys, values = side(0), side(1)
    if latent:
        values = [k if k is None else k[..., :latent] for k in keys]

    scales = 2 * K * H
    halves = {"k": [slice(0, K * H)], "v": [slice(K * H, None)]}
    if layout.scaled:
        halves["k"].append(slice(scales, scales + 4 * K))
        halves["v"] = [slice(K * H, scales), slice(scales + 4 * K, None)]
    fill = np.zeros(layout.width, np.int8 if layout.quantised else np.float32)
    for lanes in (lanes for half in poison for lanes in halves[half]):
        fill[lanes] = stored_fill(layout, np.nan)
    data = np.array(np.broadcast_to(fill, layout.shape))
    for row, length in enumerate(seq_lens):
        pos = np.arange(length)
        at = layer * P + tables[row, pos // B], pos % B
        heads = [keys[row]] if latent else [keys[row], values[row]]
        if layout.quantised:
            codes, of_heads, (keys[row], values[row]) = zip(*(coded(x, dtype) for x in heads))
            heads = [*codes, *of_heads]
        written = np.concatenate([x.reshape(length, np.prod(x.shape[1:], dtype=int)) for x in heads], axis=1)
        data[at[0], at[1], : written.shape[1]] = written

    plan_args = dict(
        block_size=B,
        num_tokens_bucket=T,
        num_seqs_bucket=S,
        decode_bucket=Sd,
        windows=(params.get("window"),),
        chunk_tokens=chunk_tokens,
        tile_queries=tile_queries,
    )
    ragged = plan_ragged(query_lens, seq_lens, tables, **plan_args)
    pool = KVPool(jnp.asarray(data.astype(layout.storage)), layout)
    params["scale"] = H**-0.5 if scale is None else scale
    return Step(q, keys, values, list(query_lens), pool, layer, ragged, params, tables, plan_args, plain)


@pytest.fixture(scope="session")
def build():
    """`build_step`."""
    return build_step


# The large table and what is only interpreted here compile in a hurry (QUICK); named cases of what runs on CPUs do not.


@functools.cache
def teach_mma() -> None:
    """Gives Pallas' GPU interpreter a rule for `mma`, which jax 0.12 has none for: a product in float32."""
    from jax._src.interpreters import mlir
    from jax._src.pallas.mosaic_gpu.primitives import mma_p

    def product(acc, a, b):
        return acc + jnp.dot(a, b, preferred_element_type=acc.dtype, precision=jax.lax.Precision.HIGHEST)

    mlir.register_lowering(mma_p, mlir.lower_fun(product, multiple_results=False), platform="cpu")


@pytest.fixture(scope="session")
def interpreted():
    """Implementations of devices that are not here, in Pallas' interpreters."""
    from pagedjax.kernels import pallas_mma, pallas_mosaic, pallas_tpu

    # Small pieces, so that a few dozen tokens are several of each.
    tiling = pallas_tpu.Tiling(chunk_tokens=32, tile_queries=16)
    found = {"pallas_tpu": functools.partial(pallas_tpu.attend, interpret=True, tiling=tiling)}
    if GPU_INTERPRETER is not None:
        teach_mma()
        # Few programs, so that each walks several items.
        args = dict(programs=3, interpret=GPU_INTERPRETER())
        found["pallas_mosaic"] = functools.partial(pallas_mosaic.attend, **args)
        found["pallas_mma"] = functools.partial(pallas_mma.attend, **args)
    return found


@pytest.fixture(scope="session")
def attend(interpreted):
    """Runs a step's plans, with each of several sinks, in one program: → (o, lse) float64 per plan and sinks.

    A plan is (q, ragged); both of a step's own are the default. Programs that differ in sinks alone share all but
    the last few operations, so the second costs next to nothing.
    """
    from pagedjax.kernels import IMPLEMENTATIONS, paged_attention

    def run(
        step: Step,
        implementation: str | None,
        plans: list[tuple[np.ndarray, Any]] | None = None,
        sinks: list[np.ndarray | None] | None = None,
        quick: bool = False,
    ) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        params = {k: v for k, v in step.params.items() if k != "sinks"}
        quick = quick or implementation in interpreted

        @functools.partial(jax.jit, compiler_options=QUICK if quick else None)
        def device(q, pool, ragged, sinks):
            call = functools.partial(paged_attention, q, pool, step.layer, ragged, **params)
            return [call(sinks=s, return_lse=True, implementation=implementation) for s in sinks]

        sinks = [step.params.get("sinks")] if sinks is None else sinks
        sinks = [None if s is None else jnp.asarray(s, jnp.float32) for s in sinks]
        dtype, found = jnp.dtype(step.worked_in), []
        with mock.patch.dict(IMPLEMENTATIONS, interpreted):
            for q, ragged in plans or [(step.q, step.ragged)]:
                out = device(jnp.asarray(q.astype(dtype)), step.pool, ragged, sinks)
                found.append([tuple(np.asarray(x, np.float64) for x in pair) for pair in out])
        return found

    return run


def assert_close(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], step: Step) -> None:
    """(o, lse) of all tokens within the step's tolerance of the oracle's; what lies behind its rows is 0."""
    num = len(want[0])
    for ours, theirs, tolerance in zip(got, want, step.tolerance, strict=True):
        np.testing.assert_allclose(ours[:num], theirs, atol=tolerance, rtol=tolerance)
    assert (got[0][num:] == 0).all(), "padding tokens must give 0"


@pytest.fixture(scope="session")
def check(oracle, attend):
    """Runs a step and compares output and log-sum-exp with the oracle; returns (o, lse)."""

    def run(
        step: Step, implementation: str | None = "xla", quick: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        [[got]] = attend(step, implementation, quick=quick)
        assert_close(got, step.expected(oracle), step)
        return got

    return run


@pytest.fixture(scope="session")
def check_variants(oracle, attend):
    """As `check`, for each of several sinks, and for the decode rows and the longer rows alone in the same program."""

    def run(step: Step, implementation: str, sinks: list[np.ndarray | None], parts: bool) -> None:
        lens, ones = [len(k) for k in step.keys], step.query_lens.count(1)
        spans = [(0, len(lens))] + ([(0, ones), (ones, len(lens))] if parts else [])
        plans = []
        for first, last in spans:
            part = plan_ragged(
                step.query_lens[first:last], lens[first:last], step.tables[first:last], **step.plan_args
            )
            plans.append((np.roll(step.q, -sum(step.query_lens[:first]), axis=0), part))
        want = [replace(step, params={**step.params, "sinks": s}).expected(oracle) for s in sinks]
        for (first, last), got in zip(spans, attend(step, implementation, plans, sinks, quick=True)):
            tokens = slice(sum(step.query_lens[:first]), sum(step.query_lens[:last]))
            for pair, (out, lse) in zip(got, want, strict=True):
                assert_close(pair, (out[tokens], lse[tokens]), step)

    return run


@pytest.fixture(scope="session")
def nan_pool():
    """A pool whose every element is NaN."""
    return lambda layout: make_pool(layout, fill=float("nan"))
