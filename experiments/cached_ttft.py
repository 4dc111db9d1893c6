"""How does the time to the first token fall with the tokens found in the cache, and with long answers what is left?

Source: SGLang §6 (almost no speedup for multi-turn chat with long answers): only prefill is saved. Measured on the real
decoder. Cost: a minute.
    pagedjax experiment run cached-ttft
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value
from pagedjax.lab.drawing import Series, curves, from_zero, label_axes, panels

from ._decoder import NOTE, SIZES, SmallEngine, tokens


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [
            {"smoke": True, "prompt": 64, "cached": [0, 48], "outputs": [1, 4], "rounds": 1, "seed": seed}
        ]
    return [
        {
            "smoke": False,
            "prompt": 768,
            "cached": [0, 192, 384, 576, 752],
            "outputs": [1, 8, 32, 128, 256],
            "rounds": 5,
            "seed": seed,
        }
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """All cases in one process, interleaved, the best of each kept; a first round compiles and is dropped."""
    decoder = SmallEngine(smoke=unit["smoke"])
    length, last = unit["prompt"], max(unit["outputs"])
    cases = [(c, unit["outputs"][0]) for c in unit["cached"]]
    cases += [(c, o) for o in unit["outputs"][1:] for c in (unit["cached"][0], unit["cached"][-1])]
    best: dict[tuple[int, int], tuple[float, float, int]] = {}
    for number in range(unit["rounds"] + 1):
        for cached, outputs in cases:
            decoder.forget()
            prompt = tokens(unit["seed"], length)
            if cached:
                decoder.run([prompt[:cached] + tokens(unit["seed"] + 1, 1)], 1)
            taken, (output,) = decoder.seconds([prompt], outputs)
            key = (cached, outputs)
            if number and (key not in best or taken < best[key][1]):
                best[key] = (output.ttft_s or 0.0, taken, output.num_cached_tokens)
    for (_, outputs), (ttft, taken, found) in best.items():
        cold = best[0, outputs]
        yield {
            "cached_tokens": found,
            "output_tokens": outputs,
            "ttft_ms": 1e3 * ttft,
            "latency_ms": 1e3 * taken,
            "ttft_over_cold": ttft / cold[0],
            "latency_over_cold": taken / cold[1],
            "longest": outputs == last,
        }


def _gain(longest: bool, column: str) -> Value:
    def pick(rows: list[TableRow]) -> list[float]:
        shortest = min(r["output_tokens"] for r in rows)
        own = [r for r in rows if (r["longest"] if longest else r["output_tokens"] == shortest)]
        best = max(own, key=lambda r: r["cached_tokens"])
        return [1 / best[column]]

    return pick


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Milliseconds to the first token by the prompt tokens that are cached, and of the whole request by its answer."""
    first, whole = panels(figure, ["time to first token", "whole request"], columns=2)
    shortest = min(r["output_tokens"] for r in rows)
    own = [r for r in rows if r["output_tokens"] == shortest and r["longest"] is False] or rows
    own = list({r["cached_tokens"]: r for r in own}.values())
    curves(first, [Series("", [r["cached_tokens"] for r in own], [r["ttft_ms"] for r in own])], named=False)
    label_axes(first, "prompt tokens from the cache", "ms (measured)")
    cold, most = min(r["cached_tokens"] for r in rows), max(r["cached_tokens"] for r in rows)
    series = []
    for cached, label in ((cold, "nothing cached"), (most, f"{most} tokens cached")):
        there = {r["output_tokens"]: r["latency_ms"] for r in rows if r["cached_tokens"] == cached}
        series.append(Series(label, sorted(there), [there[n] for n in sorted(there)]))
    curves(whole, series if cold != most else series[:1])
    label_axes(whole, "tokens of the answer", "ms (measured)")
    from_zero(first, whole)


EXPERIMENT = Experiment(
    name="cached-ttft",
    question="How does the time to the first token fall with cached tokens, and what is left of it with long answers?",
    kind="measured",
    definition=f"one request at a time, best of 5 interleaved rounds in one process; decoder: {SIZES}",
    claims=(
        Claim(
            "gain in TTFT, all but the last block cached", None, "our decoder", _gain(False, "ttft_over_cold")
        ),
        Claim(
            "gain in latency with the longest answer",
            1.0,
            "SGLang §6 (almost no speedup)",
            _gain(True, "latency_over_cold"),
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    note=(
        f"{NOTE}. What is saved is prefill, so the gain in latency is the whole over what is left, and falls with the "
        "answer's length, row by row. It would be near 1 only where decoding takes most of the time, as with SGLang's "
        "answers of 256 to 512 tokens on a GPU; on this CPU a prefill of 768 tokens is worth a hundred decode steps"
    ),
)
