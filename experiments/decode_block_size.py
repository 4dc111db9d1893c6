"""Does the block size change the speed of decoding?

Source: PagedAttention §7.2 (small blocks cannot use the device, 16 is the default). Measured on the real decoder.
Cost: a minute.
    pagedjax experiment run decode-block-size
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import bars, label_axes, panels

from ._decoder import NOTE, SEQS, SIZES, SmallEngine, tokens


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = [16] if smoke else [8, 16, 32, 64, 128]
    context, outputs = (24, 4) if smoke else (512, 64)
    return [
        {
            "smoke": smoke,
            "sizes": sizes,
            "context": context,
            "outputs": outputs,
            "rounds": 1 if smoke else 5,
            "seed": seed,
        }
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """All sizes in one process, interleaved, the best of each kept; a first round compiles and is dropped."""
    decoders = {size: SmallEngine(smoke=unit["smoke"], block_size=size) for size in unit["sizes"]}
    prompts = [tokens(unit["seed"] + i, unit["context"]) for i in range(SEQS)]
    best: dict[int, float] = {}
    answers: dict[int, list[tuple[int, ...]]] = {}
    for number in range(unit["rounds"] + 1):
        for size, decoder in decoders.items():
            decoder.run(prompts, 1)  # prefill: what follows finds all but the last tokens in the cache
            taken, outputs = decoder.seconds(prompts, unit["outputs"])
            answers[size] = [o.outputs[0].token_ids for o in outputs]
            if number:
                best[size] = min(taken, best.get(size, taken))
    for size, taken in best.items():
        yield {
            "block_size": size,
            "ms_per_step": 1e3 * taken / unit["outputs"],
            "over_16": taken / best[16],
            "same_tokens": answers[size] == answers[16],
        }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Milliseconds of a decode step of eight sequences at each block size; shorter is better."""
    (axes,) = panels(figure, ["decode step of 8 sequences"], width=5.0)
    bars(axes, [f"{r['block_size']} tokens" for r in rows], {"": [r["ms_per_step"] for r in rows]})
    label_axes(axes, "ms (measured)", "block size")


EXPERIMENT = Experiment(
    name="decode-block-size",
    question="Does the block size change the speed of decoding?",
    kind="measured",
    definition=(
        f"8 sequences of 512 tokens, 64 steps, prompts cached, best of 5 interleaved rounds; decoder: {SIZES}"
    ),
    claims=tuple(
        Claim(
            f"block size {size}: step time over that at 16",
            None,
            "our decoder",
            cell("over_16", block_size=size),
        )
        for size in (8, 32, 128)
    ),
    units=_units,
    run=_run,
    plot=_plot,
    note=NOTE,
)
