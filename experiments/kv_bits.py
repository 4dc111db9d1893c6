"""What do keys and values of eight bits cost in quality, and what do they gain in room and speed?

Source: no printed figure in this setting; our own lines. The default model reads stories of L-Eval: served from a real
pool of each dtype, and by a dense pass that rounds keys, values or one layer alone as the pool does. Room is counted,
and serving simulated, for Llama-3-8B on Mooncake's conversations. Cost: a quarter of an hour on two cores, and the
model's download.
    pagedjax experiment run kv-bits
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine.request import SamplingParams
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell, ratio
from pagedjax.lab.drawing import Series, bars, curves, from_zero, label_axes, panels, plain_log
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.curve import load_references, lru_curve
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import open_trace

TEXT = "data/text/leval_quality.jsonl.gz"
TRACE = "data/traces/mooncake_conversation_trace.jsonl.gz"
DECODER = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "int8", "fp8_e4m3")
BARE = "fp8_e4m3 without scales"
# What the dense pass rounds: (dtype, of keys, of values).
ROUNDED = (
    ("bfloat16", True, True),
    *((kind, *which) for kind in DTYPES[2:] for which in ((True, True), (True, False), (False, True))),
    (BARE, True, True),
)
SERVED, ROUNDED_TOKENS, LAYER_TOKENS, WINDOW = 20_000, 5_000, 250, 1_000
BLOCK, TRACE_BLOCK, MAX_LEN = 16, 512, 131_072
GIB = (4, 8, 16, 32, 64, 128, 256)
RATES = (0.1, 0.2, 0.3)  # requests a second, of one device
SHAPES = (DECODER, "llama-3-8b", "llama-3-70b")
SCHEDULER = SchedulerConfig(max_num_seqs=256, token_budget=8192)


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        text = {"decoder": "tiny", "tokens": 40, "window": 20}
        return [
            {"part": "served", "dtype": "int8", **text},
            {"part": "rounded", "dtypes": ["int8"], **text},
            {"part": "bytes"},
            {"part": "serving", "dtype": "int8", "rate": 0.2, "requests": 20},
        ]
    text = {"decoder": DECODER, "window": WINDOW}
    return [
        *({"part": "served", "dtype": d, **text, "tokens": SERVED} for d in DTYPES),
        {"part": "rounded", "dtypes": [*DTYPES[1:], BARE], **text, "tokens": ROUNDED_TOKENS},
        *({"part": "layers", "dtype": d, **text, "tokens": LAYER_TOKENS} for d in DTYPES[2:]),
        {"part": "greedy", "decoder": DECODER, "prompts": 16, "prompt": 128, "answer": 48},
        {"part": "bytes"},
        {"part": "curve", "requests": 0},
        *({"part": "serving", "dtype": d, "rate": r, "requests": 1000} for d in DTYPES[1:] for r in RATES),
    ]


# ------------------------------------------------------------------ quality


@functools.cache
def _model(name: str) -> Any:
    """The default model, or the tests' tiny one."""
    from pagedjax.models import load_model
    from pagedjax.testing import tiny_model

    return tiny_model(num_layers=1) if name == "tiny" else load_model(name)


@functools.cache
def _text(data: Path, decoder: str) -> list[int]:
    """Token ids of the stories, one behind the other."""
    with gzip.open(data / TEXT, "rt", encoding="utf-8") as file:
        stories = [json.loads(line)["input"] for line in file]
    ids: list[int] = []
    for story in stories:
        ids += _model(decoder).tokenizer.encode(story.strip() + "\n\n")
        if len(ids) > SERVED:
            break
    return ids


def _windows(data: Path, unit: Unit) -> list[list[int]]:
    """Pieces of the text in each of which `window` tokens are told from those before them."""
    ids, size = _text(data, unit["decoder"]), min(unit["window"], unit["tokens"])
    return [ids[at : at + size + 1] for at in range(0, unit["tokens"] - size + 1, size)]


def _digest(windows: list[list[int]]) -> str:
    return hashlib.sha256(np.concatenate([np.array(w, "<i4") for w in windows]).tobytes()).hexdigest()[:16]


def _engine(decoder: str, dtype: str, longest: int, seqs: int) -> Any:
    """A fresh engine over a pool of a dtype; weights are float32."""
    from pagedjax.engine import Engine
    from pagedjax.models.decoder import pool_layout
    from pagedjax.runtime import Buckets, JaxRunner

    model = _model(decoder)
    num_blocks = seqs * (-(-longest // BLOCK) + 1) + 1
    scheduler = SchedulerConfig(seqs, 16 if decoder == "tiny" else 512)
    layout = pool_layout(model.config, num_blocks, BLOCK, dtype)
    runner = JaxRunner(
        model.config, model.params, layout, scheduler, max_model_len=longest, buckets=Buckets(scheduler, 1, 1)
    )
    manager = PagedManager(num_blocks=num_blocks, block_size=BLOCK, prefix_caching=False)
    return Engine(manager, runner, scheduler, max_model_len=longest)


def _served(unit: Unit, data: Path) -> Iterator[TableRow]:
    """The engine scores the text as prompts, chunk by chunk: keys and values are read back from the pool."""
    windows = _windows(data, unit)
    engine = _engine(unit["decoder"], unit["dtype"], len(windows[0]) + 1, 1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    losses = []
    for window in windows:
        [output] = engine.complete([(window, params)])
        losses.append(-math.fsum(entry.token.logprob for entry in output.prompt_logprobs[1:]))
    each = len(windows[0]) - 1
    for count in sorted({len(windows), min(len(windows), ROUNDED_TOKENS // WINDOW)}):
        yield {
            "part": "served",
            "dtype": unit["dtype"],
            "decoder": unit["decoder"],
            "tokens": each * count,
            "text": _digest(windows[:count]),
            "perplexity": math.exp(math.fsum(losses[:count]) / (each * count)),
        }


def _kept(x: Any, dtype: str) -> Any:
    """What a pool gives back of heads f32[T, K, H]."""
    import jax.numpy as jnp

    from pagedjax.kernels.quant import QUANTISED, dequantise, quantise

    if dtype in QUANTISED:
        return dequantise(*quantise(x, dtype), dtype)
    if dtype == BARE:
        most = QUANTISED["fp8_e4m3"]
        return jnp.clip(x, -most, most).astype(jnp.float8_e4m3fn).astype(x.dtype)
    return x.astype(dtype).astype(x.dtype)


@functools.cache
def _scorer(decoder: str, dtype: str) -> Callable[..., Any]:
    """Logits f32[T, V] of tokens i32[T] by dense attention, keys and values rounded in layers bool[L]."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from pagedjax.models.decoder import make_decoder

    model = _model(decoder)
    graphdef, config = make_decoder(model.config), model.config

    def attend_in(keys: Any, values: Any) -> Callable[..., Any]:
        def attend(layer: int, q: Any, k: Any, v: Any, kv: Any) -> tuple[Any, Any]:
            k = jnp.where(keys[layer], _kept(k, dtype), k)
            v = jnp.where(values[layer], _kept(v, dtype), v)
            tokens, heads = q.shape[0], k.shape[1]
            grouped = q.reshape(tokens, heads, -1, q.shape[2])
            scores = jnp.einsum("tkgh,skh->kgts", grouped, k) * config.attention_scale
            seen = jnp.tril(jnp.ones((tokens, tokens), bool))
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            return jnp.einsum("kgts,skh->tkgh", weights, v).reshape(q.shape), kv

        return attend

    @jax.jit
    def score(params: Any, tokens: Any, keys: Any, values: Any) -> Any:
        body = nnx.merge(graphdef, params)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        hidden, _ = body(tokens, positions, None, attend_in(keys, values))
        return jax.nn.log_softmax(body.logits(hidden))

    return functools.partial(score, model.params)


@functools.cache
def _against() -> Callable[..., Any]:
    """Sums over positions of loss, divergence from the first and equal likeliest tokens."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def sums(plain: Any, other: Any, targets: Any) -> tuple[Any, Any, Any]:
        loss = -jnp.take_along_axis(other, targets[:, None], axis=1).sum()
        apart = jnp.where(plain > -jnp.inf, jnp.exp(plain) * (plain - other), 0.0).sum(axis=1)
        return loss, apart.sum(), (plain.argmax(axis=1) == other.argmax(axis=1)).sum()

    return sums


def _compared(unit: Unit, data: Path, cases: list[tuple[str, np.ndarray, np.ndarray]]) -> list[list[float]]:
    """Loss, divergence and agreement a token of each case: dtype, layers of keys, of values; the first has none."""
    windows = _windows(data, unit)
    totals = np.zeros((len(cases), 3))
    for window in windows:
        tokens, targets = np.array(window[:-1], np.int32), np.array(window[1:], np.int32)
        plain = None
        for at, (dtype, keys, values) in enumerate(cases):
            scores = _scorer(unit["decoder"], dtype)(tokens, keys, values)
            plain = scores if plain is None else plain
            totals[at] += [float(x) for x in _against()(plain, scores, targets)]
    each: list[list[float]] = (totals / sum(len(w) - 1 for w in windows)).tolist()
    return each


def _rounded(unit: Unit, data: Path) -> Iterator[TableRow]:
    layers = _model(unit["decoder"]).config.num_layers
    none, every = np.zeros(layers, bool), np.ones(layers, bool)
    cases = [("float32", none, none)]
    names = [("float32", True, True), *(case for case in ROUNDED if case[0] in unit["dtypes"])]
    cases += [(dtype, every if k else none, every if v else none) for dtype, k, v in names[1:]]
    found = _compared(unit, data, cases)
    for (dtype, k, v), (loss, apart, agree) in zip(names, found, strict=True):
        yield {
            "part": "rounded",
            "dtype": dtype,
            "decoder": unit["decoder"],
            "of": "both" if k and v else "keys" if k else "values",
            "tokens": unit["tokens"],
            "text": _digest(_windows(data, unit)),
            "perplexity": math.exp(loss),
            "divergence": apart,
            "agreement": agree,
        }


def _layers(unit: Unit, data: Path) -> Iterator[TableRow]:
    layers = _model(unit["decoder"]).config.num_layers
    none, one = np.zeros(layers, bool), np.eye(layers, dtype=bool)
    cases = [(unit["dtype"], none, none)]
    cases += [
        case
        for at in range(layers)
        for case in ((unit["dtype"], one[at], none), (unit["dtype"], none, one[at]))
    ]
    for at, (loss, apart, agree) in enumerate(_compared(unit, data, cases)[1:]):
        yield {
            "part": "layers",
            "dtype": unit["dtype"],
            "decoder": unit["decoder"],
            "of": ("keys", "values")[at % 2],
            "layer": at // 2,
            "tokens": unit["tokens"],
            "perplexity": math.exp(loss),
            "divergence": apart,
            "agreement": agree,
        }


def _greedy(unit: Unit, data: Path) -> Iterator[TableRow]:
    """The engine's own greedy answers to pieces of the text, beside those from a float32 pool."""
    ids, size = _text(data, unit["decoder"]), unit["prompt"]
    prompts = [ids[at * size : (at + 1) * size] for at in range(unit["prompts"])]
    params = SamplingParams(max_tokens=unit["answer"], ignore_eos=True)
    answers = {}
    for dtype in DTYPES:
        engine = _engine(unit["decoder"], dtype, size + unit["answer"] + 1, unit["prompts"])
        answers[dtype] = [o.outputs[0].token_ids for o in engine.complete([(p, params) for p in prompts])]
    for dtype in DTYPES[1:]:
        same = [
            next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))
            for one, other in zip(answers[dtype], answers["float32"], strict=True)
        ]
        yield {
            "part": "greedy",
            "dtype": dtype,
            "decoder": unit["decoder"],
            "tokens": unit["answer"] * unit["prompts"],
            "equal_answers": sum(n == unit["answer"] for n in same) / len(same),
            "equal_tokens": sum(same) / len(same),
        }


# ------------------------------------------------------------------ room and time


def _cost(shape: str, dtype: str, block: int) -> CostModel:
    """One H100 file and weights of 16 bits."""
    return CostModel(HardwareSpec.read("h100-80gb"), read_shape(shape), block, kv_dtype=dtype)


def _bytes(unit: Unit, data: Path) -> Iterator[TableRow]:
    for shape in SHAPES:
        for dtype in DTYPES:
            kept = _cost(shape, dtype, BLOCK).kv_bytes_per_token
            yield {
                "part": "bytes",
                "dtype": dtype,
                "shape": shape,
                "bytes_per_token": kept,
                "blocks_per_gib": 2**30 // (kept * BLOCK),
                "blocks_over_bfloat16": _cost(shape, "bfloat16", BLOCK).kv_bytes_per_token / kept,
            }


def _curve(unit: Unit, data: Path) -> Iterator[TableRow]:
    trace = open_trace(data / TRACE)
    if unit["requests"]:
        trace = trace.head(unit["requests"])
    curve = lru_curve(load_references(trace, TRACE_BLOCK))
    for dtype in DTYPES[1:3]:
        per_block = _cost("llama-3-8b", dtype, TRACE_BLOCK).kv_bytes_per_token * TRACE_BLOCK
        for gib in GIB:
            blocks = gib * 2**30 // per_block
            yield {
                "part": "curve",
                "dtype": dtype,
                "shape": "llama-3-8b",
                "pool_gib": gib,
                "pool_blocks": blocks,
                "hit_by_token": curve.by_token(blocks),
                "hit_unlimited": curve.by_token(math.inf),
            }


def _serving(unit: Unit, data: Path) -> Iterator[TableRow]:
    model = _cost("llama-3-8b", unit["dtype"], TRACE_BLOCK)
    held = PagedManager(num_blocks=model.kv_blocks(), block_size=TRACE_BLOCK)
    trace = open_trace(data / TRACE).head(unit["requests"]).with_arrivals(unit["rate"])
    summary = simulate(trace, held, model, SCHEDULER, max_model_len=MAX_LEN).summary()
    yield {
        "part": "serving",
        "dtype": unit["dtype"],
        "shape": "llama-3-8b",
        "rate": unit["rate"],
        "requests": summary.requests,
        "pool_blocks": held.num_usable,
        "simulated_hit_by_token": summary.hit_by_token,
        "simulated_ttft_p50_s": summary.ttft_s[50],
        "simulated_ttft_p99_s": summary.ttft_s[99],
        "simulated_tpot_p50_s": summary.tpot_s[50],
        "simulated_preemptions": summary.preemptions,
    }


PARTS = {
    "served": _served,
    "rounded": _rounded,
    "layers": _layers,
    "greedy": _greedy,
    "bytes": _bytes,
    "curve": _curve,
    "serving": _serving,
}


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    return PARTS[unit["part"]](unit, data)


# ------------------------------------------------------------------ the figure


def _plot(rows: list[TableRow], figure: Any) -> None:
    """What rounding keys, values or one layer loses; hits by the pool's bytes, and time per token."""
    titles = ["divergence, all layers", "by layer", "hits by pool", "time per token"]
    made = dict(zip(titles, panels(figure, titles, columns=2)))

    def of(part: str) -> list[TableRow]:
        return [row for row in rows if row["part"] == part]

    lost = [row for row in of("rounded") if row["dtype"] != "float32"]
    bars(
        made[titles[0]],
        [f"{r['dtype']}{'' if r['of'] == 'both' else ', ' + r['of']}" for r in lost],
        {"": [1e3 * r["divergence"] for r in lost]},
    )
    label_axes(made[titles[0]], "mnat a token")

    def lines(
        axes: Any, rows: list[TableRow], names: tuple[str, ...], x: str, y: str, times: float = 1.0
    ) -> None:
        found: dict[str, list[TableRow]] = {}
        for row in rows:
            found.setdefault(" ".join(row[name] for name in names), []).append(row)
        curves(
            axes,
            [Series(label, [r[x] for r in own], [times * r[y] for r in own]) for label, own in found.items()],
        )

    lines(made[titles[1]], of("layers"), ("dtype", "of"), "layer", "divergence", 1e3)
    label_axes(made[titles[1]], "layer that is rounded", "mnat a token")
    lines(made[titles[2]], of("curve"), ("dtype",), "pool_gib", "hit_by_token")
    plain_log(made[titles[2]].xaxis, made[titles[2]].set_xscale, base=2)
    label_axes(made[titles[2]], "pool, GiB", "prompt tokens from the cache")
    lines(made[titles[3]], of("serving"), ("dtype",), "rate", "simulated_tpot_p50_s", 1e3)
    label_axes(made[titles[3]], "requests a second", "median, ms (simulated)")
    from_zero(*(made[title] for title in titles[1:]))


_LINE = "our line"
EXPERIMENT = Experiment(
    name="kv-bits",
    question="What do keys and values of eight bits cost in quality, and what do they gain in room and speed?",
    kind="counted",
    definition=(
        "served: perplexity of the text's tokens from a pool of the dtype, in windows of 1,000 tokens told from those "
        "before them in the window (text: sha256 of the token ids as int32, first 16 digits), the first 5,000 tokens "
        "by themselves, too; rounded, layers: a dense float32 pass that rounds keys, values or both as the pool "
        "does, in all layers or one; divergence: KL of the next token from float32's, nats a token; agreement: equal "
        "likeliest tokens; greedy: answers equal to a float32 pool's, and tokens before the first that differs; bytes: "
        "a token in all layers as stored, with scales; curve: LRU, blocks of 512; serving: one H100 file and Llama-3-8B"
        ", 90 % of the memory beside the weights for KV, 1,000 conversations, Poisson arrivals"
    ),
    claims=(
        Claim(
            "int8: perplexity over float32's, served",
            1.0,
            _LINE,
            ratio(
                "perplexity",
                {"part": "served", "dtype": "int8", "tokens": SERVED},
                {"part": "served", "dtype": "float32", "tokens": SERVED},
            ),
            "identity",
            2,
        ),
        Claim(
            "fp8_e4m3: the same",
            None,
            _LINE,
            ratio(
                "perplexity",
                {"part": "served", "dtype": "fp8_e4m3", "tokens": SERVED},
                {"part": "served", "dtype": "float32", "tokens": SERVED},
            ),
        ),
        *(
            Claim(
                f"{dtype}: perplexity of the dense pass over the engine's",
                1.0,
                "one rounding",
                ratio(
                    "perplexity",
                    {"part": "rounded", "dtype": dtype, "of": "both", "tokens": ROUNDED_TOKENS},
                    {"part": "served", "dtype": dtype, "tokens": ROUNDED_TOKENS},
                ),
                "identity",
                2,  # sums in another order flip codes here and there, and then the rounding's noise is another draw
            )
            for dtype in DTYPES
        ),
        *(
            Claim(
                f"{dtype}, {of}: agreement",
                None,
                _LINE,
                cell("agreement", part="rounded", dtype=dtype, of=of, tokens=ROUNDED_TOKENS),
            )
            for dtype in DTYPES[2:]
            for of in ("both", "keys", "values")
        ),
        Claim(
            "blocks of int8 over bfloat16's, 8 KV heads of 128",
            1.88,
            "worked example",
            cell("blocks_over_bfloat16", dtype="int8", shape="llama-3-8b"),
            "identity",
            2,
        ),
        Claim(
            "the same, 3 KV heads of 64",
            1.5,
            "worked example",
            cell("blocks_over_bfloat16", dtype="int8", shape=DECODER),
            "identity",
            2,
        ),
        *(
            Claim(
                f"{text} p50, int8 over bfloat16, {rate:g} requests a second",
                None,
                "our setting",
                ratio(
                    f"simulated_{text.lower()}_p50_s",
                    {"part": "serving", "dtype": "int8", "rate": rate, "requests": 1000},
                    {"part": "serving", "dtype": "bfloat16", "rate": rate, "requests": 1000},
                ),
            )
            for text in ("TTFT", "TPOT")
            for rate in RATES
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(TEXT, TRACE),
    note=(
        "weights are float32 throughout; tokens are read whole into the pool before they are attended to, so that a "
        "token sees its own rounded key, too; bundles of the TPU kernels by dtype: docs/kernels.md"
    ),
)
