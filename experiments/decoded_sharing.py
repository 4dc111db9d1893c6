"""What memory does sharing save when beams and samples of Alpaca prompts are really decoded?

Source: PagedAttention §6.3, Fig. 15: beam search 37.56, 53.13, 55.16 % at widths 2, 4, 6; parallel sampling 6.09,
8.53, 9.79 % for n = 2, 4, 6. Decoded by the default model, and simulated on the same lengths. Cost: a quarter of an
hour on two cores, and the model's download.
    pagedjax experiment run decoded-sharing
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.engine.request import SamplingParams
from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, cell
from pagedjax.lab.drawing import Series, at_each, curves, from_zero, label_axes, mean_curve, panels
from pagedjax.sim.beams import Beams
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import Trace, TraceRequest

from ._serving import ALPACA, blocks_watch, workload
from ._serving import ALPACA_TEXT as DATA
from .beam_search import GAP

PRINTED = {
    "beam search": {2: 0.3756, 4: 0.5313, 6: 0.5516},
    "parallel sampling": {2: 0.0609, 4: 0.0853, 6: 0.0979},
}
BLOCK, NUM_BLOCKS, MAX_LEN = 16, 800, 512
DECODER = "smollm2-135m"
DRAWS = 20
SHOWN = 6  # samples
LONGEST_PROMPT = 128  # tokens; 99.7 % of the prompts are shorter


def _units(smoke: bool, seed: int) -> list[Unit]:
    """Decoded once, at even steps of all lengths; without a model many times, with requests drawn at random."""
    if smoke:
        size = {"requests": 3, "longest": 12, "draw": "even", "decoder": "tiny", "seed": seed}
        return [{"method": m, "width": 2, **size} for m in PRINTED]
    size = {"requests": 16, "longest": MAX_LEN - LONGEST_PROMPT}
    cases = [{"method": m, "width": w, **size} for m, printed in PRINTED.items() for w in printed]
    # What samples share does not depend on their tokens: one width decoded shows it.
    decoded = [
        {**case, "draw": "even", "decoder": DECODER, "seed": seed}
        for case in cases
        if case["method"] == "beam search" or case["width"] == SHOWN
    ]
    drawn = {"draw": "random", "decoder": "none"}
    return decoded + [{**case, **drawn, "seed": seed + i} for case in cases for i in range(DRAWS)]


def _scheduler(tiny: bool) -> SchedulerConfig:
    # Prompts fed token by token need one program where chunks need two: the smoke run compiles sooner.
    return SchedulerConfig(6, 6, chunk_tokens=1) if tiny else SchedulerConfig(24, 256)


def _manager() -> PagedManager:
    return PagedManager(num_blocks=NUM_BLOCKS, block_size=BLOCK, prefix_caching=False)


@functools.cache
def _model(tiny: bool) -> Any:
    """The default model, or the tests' tiny one."""
    from pagedjax.models import load_model
    from pagedjax.testing import tiny_model

    return tiny_model(num_layers=1) if tiny else load_model(DECODER)


@functools.cache
def _decoder(tiny: bool) -> Callable[[Callable[[Any], None]], Any]:
    """Makes a fresh engine on the same compiled runner."""
    from pagedjax.engine import Engine
    from pagedjax.kernels import KVLayout
    from pagedjax.runtime import Buckets, JaxRunner

    model = _model(tiny)
    scheduler = _scheduler(tiny)
    c = model.config
    layout = KVLayout(c.num_layers, NUM_BLOCKS, BLOCK, c.num_kv_heads, c.head_dim, "float32")
    buckets = Buckets(scheduler, 1 if tiny else 2, 1)
    runner = JaxRunner(c, model.params, layout, scheduler, max_model_len=MAX_LEN, buckets=buckets)
    ends = c.eos_token_ids or model.tokenizer.eos_token_ids

    def engine(on_step: Callable[[Any], None]) -> Engine:
        return Engine(
            _manager(), runner, scheduler, max_model_len=MAX_LEN, eos_token_ids=ends, on_step=on_step
        )

    return engine


def _pick(values: Sequence[Any], unit: Unit, seed: int) -> list[Any]:
    """Some of sorted values: at even steps, shuffled, so that long and short ones are in proportion; or at random."""
    count, rng = unit["requests"], np.random.default_rng(seed)
    if unit["draw"] == "random":
        return [values[i] for i in rng.integers(0, len(values), count)]
    picked = [values[int((i + 0.5) / count * len(values))] for i in range(count)]
    return [picked[i] for i in rng.permutation(count)]


def _prompts(data: Path, encode: Callable[[str], list[int]], unit: Unit) -> list[list[int]]:
    with gzip.open(data / DATA, "rt", encoding="utf-8") as file:
        texts = [" ".join([r["instruction"], r["input"]]).strip() for r in json.load(file)]
    prompts = [ids for ids in map(encode, texts) if len(ids) <= LONGEST_PROMPT]
    return _pick(sorted(prompts, key=len), unit, unit["seed"])


def _answers(data: Path, unit: Unit) -> list[int]:
    """Lengths of Alpaca's answers, tokens; scaled to the mean of Fig. 11."""
    lengths = sorted(request.num_output for request in workload("alpaca", data, 1000, 0))
    return [min(n, unit["longest"]) for n in _pick(lengths, unit, unit["seed"] + 1)]


def _sampling(unit: Unit, length: int) -> SamplingParams:
    """An answer of exactly so many tokens, as the paper's benchmark asks for them: the model may not end it."""
    several: dict[str, Any] = {"temperature": 1.0, "seed": unit["seed"]}
    if unit["method"] == "beam search":
        several = {"beam_width": unit["width"]}
    return SamplingParams(max_tokens=length, n=unit["width"], ignore_eos=True, **several)


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    tiny = unit["decoder"] == "tiny"
    prompts, answers = _prompts(data, _model(tiny).tokenizer.encode, unit), _answers(data, unit)
    row: TableRow = {
        "method": unit["method"],
        "width": unit["width"],
        "decoder": unit["decoder"],
        "draw": unit["draw"],
        "seed": unit["seed"],
        "simulated_saved": _simulated(unit, [len(p) for p in prompts], answers),
        "prompt_tokens": float(np.mean([len(p) for p in prompts])),
        "output_tokens": float(np.mean(answers)),
    }
    if unit["decoder"] == "none":
        yield row
        return
    steps: list[dict[str, float]] = []
    engine = _decoder(tiny)(lambda record: steps.append(blocks_watch(record.plan)))
    for prompt, length in zip(prompts, answers, strict=True):
        engine.add(prompt, _sampling(unit, length))
    while engine.has_work:
        engine.step()
    held, named = (float(np.mean([step[key] for step in steps])) for key in ("held", "named"))
    saved = 1 - held / named
    yield row | {
        "memory_saved": saved,
        "less_simulated": saved - row["simulated_saved"],
        "blocks_held": held,
        "steps": len(steps),
        "copies": engine.manager.stats.copies,
    }


def _simulated(unit: Unit, prompts: Sequence[int], answers: Sequence[int]) -> float:
    """The saving of the same requests without a model: candidates drawn, answers as long."""
    rows = [TraceRequest(0.0, p, a) for p, a in zip(prompts, answers, strict=True)]
    beams = Beams(unit["width"], GAP, unit["seed"]) if unit["method"] == "beam search" else None
    result = simulate(
        Trace("decoded", "lengths", 0, False, lambda: iter(rows)),
        _manager(),
        lambda plan: 1.0,  # steps are averaged, as they are counted above
        _scheduler(unit["decoder"] == "tiny"),
        max_model_len=MAX_LEN,
        n=1 if beams else unit["width"],
        beams=beams,
        watch=blocks_watch,
    )
    return 1 - result.sampled["held"] / result.sampled["named"]


def _value(column: str, method: str, width: int, decoder: str) -> Value:
    return cell(column, least=7, method=method, width=width, decoder=decoder)


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Share of blocks saved by sharing between beams or samples: decoded by a model (16 requests), simulated over
    draws of 16, and printed.
    """
    made = panels(figure, list(PRINTED), columns=2, share_y=True)
    for (method, printed), axes in zip(PRINTED.items(), made):
        own = [r for r in rows if r["method"] == method]
        decoded = [r for r in own if "memory_saved" in r]
        widths = sorted({*printed, *(r["width"] for r in own)})
        curves(
            axes,
            [
                Series("decoded", [r["width"] for r in decoded], [r["memory_saved"] for r in decoded]),
                mean_curve(
                    (r for r in own if r["decoder"] == "none"),
                    "width",
                    "simulated_saved",
                    f"simulated, {DRAWS} draws",
                ),
                Series("paper", list(printed), list(printed.values()), printed=True),
            ],
        )
        at_each(axes, widths)
        label_axes(axes, "beams, or samples, per request", "share of blocks saved" if axes is made[0] else "")
    from_zero(*made)


_FIG = "PagedAttention Fig. 15"
EXPERIMENT = Experiment(
    name="decoded-sharing",
    question="What memory does sharing save when beams and samples of Alpaca prompts are really decoded?",
    kind="counted",
    definition=(
        "1 - distinct blocks over blocks named by all tables of a step, both averaged over steps; prefix cache off; "
        "simulated_saved: the simulator's value for the same lengths, without a model"
    ),
    claims=(
        *(
            Claim(
                f"beam search, width {w}, decoded",
                paper,
                _FIG,
                _value("memory_saved", "beam search", w, DECODER),
            )
            for w, paper in PRINTED["beam search"].items()
        ),
        *(
            Claim(
                f"beam search, width {w}, simulated over {DRAWS} draws of 16 requests",
                paper,
                _FIG,
                _value("simulated_saved", "beam search", w, "none"),
            )
            for w, paper in PRINTED["beam search"].items()
        ),
        *(
            Claim(
                f"parallel sampling, n = {n}, simulated over {DRAWS} draws of 16 requests",
                paper,
                _FIG,
                _value("simulated_saved", "parallel sampling", n, "none"),
            )
            for n, paper in PRINTED["parallel sampling"].items()
        ),
        Claim(
            f"parallel sampling, n = {SHOWN}: decoded less simulated, same lengths",
            0.0,
            "what a sample shares does not depend on its tokens",
            _value("less_simulated", "parallel sampling", SHOWN, DECODER),
            "identity",
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(DATA, ALPACA),
    note=(
        "SmolLM2-135M in place of OPT-13B; 16 Alpaca instructions of the named file, answers as long as Alpaca's "
        "(scaled to the mean of Fig. 11), as in the paper's benchmark; decoded once, at even steps of all lengths."
        " How much 16 requests say is seen from twenty draws of 16, simulated: samples save what the simulator "
        "says to the last digit, because nothing depends on the tokens. Length decides for beams: the last blocks,"
        " in which beams part, weigh more in short answers. On equal lengths the simulator agrees with the "
        "decoder, whose beams part sooner at width 6"
    ),
)
