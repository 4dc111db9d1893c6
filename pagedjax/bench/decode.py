"""How fast the engine decodes, beside what the same weights could do in the same process.

Three bounds, each looser than the last:

    dense      a bare jitted loop over a dense cache: the same decoder and weights, no paging, no scheduler
    products   the step's matrix products alone
    memory     the bytes of weights and of keys and values over the read bandwidth of this machine
    peak       the operations of the products over the best rate that a product in the cache reaches here

All are timed in turn, round after round, and the best round of each is kept: on a shared machine only
ratios taken so mean anything.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.engine.request import SamplingParams
from pagedjax.kernels.products import product
from pagedjax.models import make_decoder
from pagedjax.models.decoder import Decoder, layer_name

if TYPE_CHECKING:
    from pagedjax.engine import StepRecord
    from pagedjax.kernels import KVLayout
    from pagedjax.llm import LLM

from pagedjax.lab.claims import TableRow


def run(
    llm: LLM,
    batches: Sequence[int],
    *,
    context: int = 512,
    tokens: int = 32,
    rounds: int = 3,
    note: Callable[[str], None] = lambda _: None,
) -> list[TableRow]:
    """Measure each batch size.

    Args:
        llm: The engine to measure; compiled here first.
        batches: Sequences decoded at once.
        context: Prompt length, tokens.
        tokens: Decode steps per round.
        rounds: Interleaved rounds.
        note: Told what is being measured.

    Returns:
        One row per batch size: tokens per second of engine and bounds, the ratios of the engine's decode
        rate to the bounds, and host microseconds per sequence and step.

    Raises:
        ValueError: A batch does not fit the engine's limits or its pool.
    """
    check_fits(llm, batches, context, tokens)
    llm.warm_up()
    floor_s, peak_s = _FloorTimer(llm.runner.params), _PeakTimer(llm.runner.products)
    rows = []
    for batch in batches:
        note(f"batch {batch}: {rounds} rounds of engine, dense loop, products, floors")
        rows.append(_measure_batch(llm, batch, context, tokens, rounds, floor_s, peak_s))
    return rows


def first_token(llm: LLM, *, context: int = 1024, rounds: int = 3) -> TableRow:
    """Time to the first token of one prompt, cold and again warm.

    Args:
        llm: A warmed-up engine.
        context: Prompt length, tokens.
        rounds: Pairs of runs; the best of each is kept.
    """
    cold: list[float] = []
    warm: list[float] = []
    cached = 0
    for seed in range(rounds):
        prompt = _prompts(llm, 1, context, seed=1000 + seed)[0]
        for times in (cold, warm):
            output = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)[0]
            assert output.ttft_s is not None
            times.append(output.ttft_s)
            cached = output.num_cached_tokens
    return {
        "context": context,
        "cached tokens": cached,
        "cold ms": min(cold) * 1e3,
        "warm ms": min(warm) * 1e3,
        "warm / cold": min(warm) / min(cold),
    }


def mixed_step(
    llm: LLM, *, decodes: int = 31, chunk: int = 256, context: int = 512, rounds: int = 5
) -> TableRow:
    """A step that decodes and prefills at once, beside the two steps alone.

    Args:
        llm: A warmed-up engine whose budget holds decodes + chunk tokens.
        decodes: Sequences that decode.
        chunk: Prompt tokens in the step.
        context: Prompt length of the decoding sequences.
        rounds: Interleaved rounds.
    """
    budget = llm.engine.scheduler.config.token_budget
    if decodes + chunk > budget:
        raise ValueError(f"token_budget={budget}: must hold {decodes} + {chunk} tokens; raise it with --set")
    with StepRecords(llm) as recorder, running(llm, decodes, context, seed=7):
        times: dict[str, list[float]] = {"decodes": [], "mixed": []}
        for seed in range(rounds):
            times["decodes"].append(timed_step(recorder))
            request = llm.engine.add(
                _prompts(llm, 1, chunk, seed=2000 + seed)[0], SamplingParams(max_tokens=1)
            )
            times["mixed"].append(timed_step(recorder))
            llm.engine.abort(request)
    with StepRecords(llm) as recorder:
        times["chunk"] = []
        for seed in range(rounds):
            llm.engine.add(_prompts(llm, 1, chunk, seed=3000 + seed)[0], SamplingParams(max_tokens=1))
            times["chunk"].append(timed_step(recorder))
    best = {name: min(values) for name, values in times.items()}
    return {
        "decodes": decodes,
        "chunk tokens": chunk,
        "decodes ms": best["decodes"] * 1e3,
        "chunk ms": best["chunk"] * 1e3,
        "mixed ms": best["mixed"] * 1e3,
        "mixed / sum": best["mixed"] / (best["decodes"] + best["chunk"]),
    }


def beside_peers(rows: Sequence[TableRow], files: Sequence[Path]) -> list[TableRow]:
    """What other engines' scripts measured, beside this one's rows of the same batch.

    Args:
        rows: Of `run`.
        files: JSON as those scripts write it: who, and rows of batch, decode_tok_s and prefill_tok_s.

    Raises:
        ValueError: A file that is none of these; names what is missing.
    """
    found: list[TableRow] = []
    for file in files:
        try:
            said = json.loads(file.read_text("utf-8"))
            who = said.get("peer", "vllm")
            version = said["version" if "peer" in said else "vllm"]
            kind = str(said["args"].get("dtype") or Path(said["args"]["model"]).stem)
            peers = [
                (int(r["batch"]), float(r["prefill_tok_s"]), float(r["decode_tok_s"])) for r in said["rows"]
            ]
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--peers {file}: {type(error).__name__}: {error}: must be JSON with peer or vllm, args and rows of "
                "batch, prefill_tok_s and decode_tok_s; give what the peer's script wrote with --json"
            ) from None
        for batch, prefill, decode in peers:
            for ours in [row for row in rows if row["batch"] == batch]:
                found.append(
                    {
                        "peer": f"{who} {version}",
                        "peer's weights": kind,
                        "our weights": ours["dtype"],
                        "batch": batch,
                        "peer's prefill tok/s": prefill,
                        "peer's decode tok/s": decode,
                        "our decode tok/s": ours["decode tok/s"],
                        "ours / peer's": ours["decode tok/s"] / decode,
                    }
                )
    return found


# ---- the engine --------------------------------------------------------------------------------------------


def check_fits(llm: LLM, batches: Sequence[int], context: int, tokens: int) -> None:
    """Refuse batches that would preempt: what is timed must be `batch` rows, each `context` + `tokens` tokens long.

    Raises:
        ValueError: A batch beyond max_num_seqs, or beyond what the pool holds; the setting that helps is named.
    """
    most = llm.config.scheduler.max_num_seqs
    for batch in batches:
        if not 1 <= batch <= most:
            raise ValueError(f"--batch {batch}: must be in [1, max_num_seqs={most}]; raise it with --set")
        each, usable = llm.manager.demand(context + tokens + 2, llm.engine.scheduler.chunk_tokens)
        if batch * each > usable:
            raise ValueError(
                f"--batch {batch}: needs {batch * each} blocks, the pool has {usable} usable; "
                "lower --context or raise cache.memory_bytes"
            )
    if context + tokens + 2 > llm.max_model_len:
        raise ValueError(
            f"--context {context}: with {tokens} tokens must fit max_model_len={llm.max_model_len}; lower it"
        )


def _prompts(llm: LLM, batch: int, context: int, *, seed: int) -> list[list[int]]:
    """Random prompts that share no prefix."""
    draw = np.random.default_rng(seed)
    return draw.integers(3, llm.model_config.vocab_size, (batch, context)).tolist()


class StepRecords:
    """Collects the engine's step records while it is open."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.records: list[StepRecord] = []

    def __enter__(self) -> StepRecords:
        self._before = self.llm.engine.on_step
        self.llm.engine.on_step = self.records.append
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.engine.on_step = self._before


@contextmanager
def running(llm: LLM, batch: int, context: int, *, seed: int) -> Any:
    """A batch that has been prefilled and decodes as long as the block lasts; yields seconds of prefill."""
    endless = SamplingParams(max_tokens=llm.max_model_len, ignore_eos=True)
    started = time.perf_counter()
    requests = [llm.engine.add(prompt, endless) for prompt in _prompts(llm, batch, context, seed=seed)]
    waiting = set(requests)
    try:
        while waiting:
            waiting -= {output.request_id for output in llm.engine.step()}
        yield time.perf_counter() - started
    finally:
        for request in requests:
            llm.engine.abort(request)


def timed_step(recorder: StepRecords) -> float:
    """Seconds of one step of the engine by the wall, planning and booking included."""
    started = time.perf_counter()
    recorder.llm.engine.step()
    return time.perf_counter() - started


def _measure_batch(
    llm: LLM, batch: int, context: int, tokens: int, rounds: int, floor: _FloorTimer, peak: _PeakTimer
) -> TableRow:
    dense = DenseLoop(llm, batch, context + tokens + 2)
    products = _Products(llm, batch)
    prefill_s, step_s, dense_s, products_s, floor_s, peak_s = [], [], [], [], [], []
    kv_bytes = batch * context * _kv_bytes_per_token(llm.runner.layouts)
    flops = 2 * batch * _matrix_entries(llm.runner.params)
    hosts: list[np.ndarray] = []
    for round_ in range(rounds):
        with (
            StepRecords(llm) as recorder,
            running(llm, batch, context, seed=round_ * 1000 + batch) as seconds,
        ):
            prefill_s.append(seconds)
            timed_step(recorder)  # the first pure decode step is not timed
            recorder.records.clear()
            step_s.append(min(timed_step(recorder) for _ in range(tokens)))
            hosts.append(np.median([host_seconds(record) for record in recorder.records], axis=0))
        dense_s.append(dense.best_step(context, tokens))
        products_s.append(products.best(tokens))
        floor_s.append(floor(kv_bytes))
        peak_s.append(peak(flops))
    best = min(step_s)
    host = np.min(hosts, axis=0) / batch * 1e6
    return {
        "dtype": llm.config.model.dtype,
        "batch": batch,
        "context": context,
        "prefill tok/s": batch * context / min(prefill_s),
        "decode tok/s": batch / best,
        "dense tok/s": batch / min(dense_s),
        "products tok/s": batch / min(products_s),
        "memory tok/s": batch / min(floor_s),
        "peak tok/s": batch / min(peak_s),
        "of dense": min(dense_s) / best,
        "of products": min(products_s) / best,
        "of memory": min(floor_s) / best,
        "of peak": min(peak_s) / best,
        "schedule µs/row": host[0],
        "pack µs/row": host[1],
        "dispatch µs/row": host[2],
        "commit µs/row": host[3],
        "host µs/row": host[0] + host[1] + host[3],
    }


def _kv_bytes_per_token(layouts: Sequence[KVLayout]) -> int:
    """What a decode step reads of a token in all layers: lanes in use, as they are stored."""
    return sum(l.num_layers * l.used_width * jnp.dtype(l.storage).itemsize for l in layouts)


def host_seconds(record: StepRecord) -> tuple[float, float, float, float]:
    """Of a step, the seconds in which the host planned, packed, dispatched and booked."""
    return record.schedule_s, record.result.pack_s, record.result.dispatch_s, record.commit_s


# ---- the bounds --------------------------------------------------------------------------------------------


class DenseLoop:
    """Greedy decoding over a dense cache: the bare loop that paging and scheduling are measured against.

    Args:
        llm: Lends its decoder and its weights.
        batch: Sequences.
        length: Slots of each sequence's cache.
    """

    def __init__(self, llm: LLM, batch: int, length: int) -> None:
        config = llm.model_config
        self.params = llm.runner.params
        shape = (batch, config.num_kv_heads, length, config.head_dim)
        dtype = llm.runner.dtype if llm.runner.layout.quantised else llm.runner.layout.dtype
        self.cache = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]
        weights = jax.tree.leaves(self.params)[0].dtype
        graphdef = make_decoder(config, weights, products=llm.runner.products)

        def step(params: Any, cache: Any, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
            decoder: Decoder = nnx.merge(graphdef, params)

            def attend(
                layer: int, q: jax.Array, k: jax.Array, v: jax.Array, kv: Any
            ) -> tuple[jax.Array, Any]:
                return _dense_attention(config, layer, q, k, v, kv, position)

            hidden, cache = decoder(tokens, jnp.full(batch, position), cache, attend)
            return decoder.logits(hidden).argmax(-1).astype(jnp.int32), cache

        self._step = jax.jit(step, donate_argnums=1)
        self.tokens = jnp.zeros(batch, jnp.int32)

    def step(self, tokens: Any, position: int) -> np.ndarray:
        """Feed one token per sequence at `position`; i32[batch] of most likely next tokens."""
        self.tokens, self.cache = self._step(
            self.params, self.cache, jnp.asarray(tokens, jnp.int32), position
        )
        return np.asarray(self.tokens)

    def best_step(self, start: int, steps: int) -> float:
        """Seconds of the fastest of `steps` steps from position `start`, tokens read back each time."""
        tokens = self.step(self.tokens, start)
        return min(_timed(functools.partial(self.step, tokens, start + 1 + i)) for i in range(steps))


def _dense_attention(
    config: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, position: jax.Array
) -> tuple[jax.Array, Any]:
    """q f[S, N, H], k and v f[S, K, H]; the layer's cache f[S, K, length, H] gets them at `position`."""
    keys, values = kv[layer]
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k[:, :, None, :].astype(keys.dtype), position, axis=2)
    values = jax.lax.dynamic_update_slice_in_dim(
        values, v[:, :, None, :].astype(keys.dtype), position, axis=2
    )
    grouped = q.reshape(q.shape[0], config.num_kv_heads, -1, config.head_dim)
    scores = jnp.einsum("skgh,skth->skgt", grouped, keys) * config.attention_scale
    if config.attn_soft_cap:
        scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
    at = jnp.arange(keys.shape[2])[None, None, None, :]
    seen = at <= position
    if config.window(layer) is not None:
        seen &= at > position - config.window(layer)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("skgt,skth->skgh", weights, values)
    kv = [*kv[:layer], (keys, values), *kv[layer + 1 :]]
    return mixed.reshape(q.shape), kv


class _Products:
    """The matrix products of one decode step and nothing else, chained so that none can be left out."""

    def __init__(self, llm: LLM, batch: int) -> None:
        config = llm.model_config
        width = config.num_heads * config.head_dim
        times = functools.partial(_times, implementation=llm.runner.products)

        def chain(params: Any, x: jax.Array) -> jax.Array:
            for layer in range(config.num_layers):
                block = params[layer_name(layer)]
                mixed = times(x, block["qkv"])[:, :width]
                x = times(mixed, block["out"])
                up = times(x, block["mlp"]["up"])[:, : config.d_mlp]
                x = times(up, block["mlp"]["down"])
            return times(x, params["lm_head"])

        self._chain = jax.jit(chain)
        self._params = llm.runner.params
        # Zeros: the chain has no norm that would keep numbers small, and denormals would be slow.
        kind = self._params["lm_head"]["weight"].dtype
        wide = llm.runner.products == "native" or kind == jnp.int8
        self._x = jnp.zeros((batch, config.d_model), jnp.float32 if wide else kind)
        self._chain(self._params, self._x).block_until_ready()

    def best(self, times: int) -> float:
        return min(
            _timed(lambda: self._chain(self._params, self._x).block_until_ready()) for _ in range(times)
        )


def _times(x: jax.Array, linear: Any, *, implementation: str) -> jax.Array:
    return product(x, linear["weight"], linear.get("weight_scale"), implementation=implementation)


def _matrix_entries(params: Any) -> int:
    """Entries of all matrices that a token is multiplied with."""
    leaves = jax.tree_util.tree_leaves_with_path({k: v for k, v in params.items() if k != "embed"})
    return sum(leaf.size for path, leaf in leaves if leaf.ndim == 2 and path[-1].key == "weight")


class _PeakTimer:
    """Seconds of so many operations at the best rate at which float32 products run here, of some that fit a cache."""

    _SIZES = ((64, 256, 512), (256, 512, 512))  # rows, outputs, depth

    def __init__(self, implementation: str) -> None:
        self._calls: list[tuple[int, Callable[[], Any]]] = []
        for name in {implementation, "xla"}:
            times = jax.jit(functools.partial(product, implementation=name))
            for rows, outputs, depth in self._SIZES:
                x, w = jnp.ones((rows, depth)), jnp.ones((outputs, depth))
                call = functools.partial(times, x, w)
                call().block_until_ready()
                self._calls.append((2 * rows * outputs * depth, call))

    def __call__(self, flops: int) -> float:
        def seconds(call: Callable[[], Any]) -> float:
            return min(_timed(lambda: call().block_until_ready()) for _ in range(20))

        return min(seconds(call) * flops / each for each, call in self._calls)


class _FloorTimer:
    """Seconds to read as many bytes as a decode step must: all weights but the embedding table, and more."""

    def __init__(self, params: Any) -> None:
        leaves = jax.tree.leaves({k: leaf for k, leaf in params.items() if k not in ("embed", "embed_scale")})
        self._num_bytes = num_bytes = sum(leaf.nbytes for leaf in leaves)
        lanes = 4096
        self._array = jnp.ones((max(1, num_bytes // 4 // lanes), lanes), jnp.float32)
        self._scale = num_bytes / self._array.nbytes
        self._read = jax.jit(lambda array: array.sum(axis=1))
        self._read(self._array).block_until_ready()

    def __call__(self, more_bytes: int = 0) -> float:
        return (
            self._scale
            * (1 + more_bytes / self._num_bytes)
            * min(_timed(lambda: self._read(self._array).block_until_ready()) for _ in range(10))
        )


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
