"""What memory does sharing save when beams and samples of Alpaca prompts are really decoded?

Source: PagedAttention §6.3, Fig. 15: beam search 37.56, 53.13, 55.16 % at widths 2, 4, 6; parallel sampling 6.09,
8.53, 9.79 % for n = 2, 4, 6. Decoded by the default model. Cost: ten minutes on two cores, and the model's download.
    pagedjax experiment run decoded-sharing
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Claim, Experiment, Row, Unit
from pagedjax.request import SamplingParams

DATA = "data/text/alpaca_en_demo.json.gz"
PRINTED = {
    "beam search": {2: 0.3756, 4: 0.5313, 6: 0.5516},
    "parallel sampling": {2: 0.0609, 4: 0.0853, 6: 0.0979},
}
BLOCK = 16
LONGEST_PROMPT = 48  # tokens: Alpaca's prompts are single instructions, 19.3 tokens on average in the paper


def _units(smoke: bool, seed: int) -> list[Unit]:
    if smoke:
        return [
            {"method": m, "width": 2, "requests": 3, "tokens": 12, "seed": seed, "tiny": True}
            for m in PRINTED
        ]
    return [
        {"method": m, "width": w, "requests": 16, "tokens": 64, "seed": seed, "tiny": False}
        for m in PRINTED
        for w in (2, 4, 6)
    ]


@functools.cache
def _decoder(tiny: bool) -> tuple[Any, Callable[[str], list[int]]]:
    """(make a fresh engine, encode): the default model, or the tests' tiny one."""
    from pagedjax.cache import PagedManager
    from pagedjax.config import SchedulerConfig
    from pagedjax.engine import Engine
    from pagedjax.kernels import KVLayout
    from pagedjax.models import load_model
    from pagedjax.runtime import Buckets, JaxRunner
    from pagedjax.testing import tiny_model

    model = tiny_model(num_layers=1) if tiny else load_model("smollm2-135m")
    scheduler = SchedulerConfig(max_num_seqs=6 if tiny else 24, token_budget=256)
    c = model.config
    layout = KVLayout(c.num_layers, 512, BLOCK, c.num_kv_heads, c.head_dim, "float32")
    buckets = Buckets(scheduler, 1 if tiny else 2, 1)
    runner = JaxRunner(c, model.params, layout, scheduler, max_model_len=256, buckets=buckets)
    ends = c.eos_token_ids or model.tokenizer.eos_token_ids

    def engine(on_step: Callable[[Any], None]) -> Engine:
        manager = PagedManager(num_blocks=512, block_size=BLOCK, prefix_caching=False)
        return Engine(manager, runner, scheduler, max_model_len=256, eos_token_ids=ends, on_step=on_step)

    return engine, model.tokenizer.encode


def _prompts(data: Path, encode: Callable[[str], list[int]], count: int, seed: int) -> list[list[int]]:
    with gzip.open(data / DATA, "rt", encoding="utf-8") as file:
        texts = [" ".join([r["instruction"], r["input"]]).strip() for r in json.load(file)]
    order = np.random.default_rng(seed).permutation(len(texts))
    prompts = (encode(texts[i]) for i in order)
    return [p for p, _ in zip((p for p in prompts if len(p) <= LONGEST_PROMPT), range(count))]


def _run(unit: Unit, data: Path) -> Iterator[Row]:
    make, encode = _decoder(unit["tiny"])
    saved: list[float] = []
    held: list[int] = []

    def watch(record: Any) -> None:
        plan = record.plan
        saved.append(1 - plan.num_held_blocks / plan.num_named_blocks)
        held.append(plan.num_held_blocks)

    engine = make(watch)
    width = unit["width"]
    prompts = _prompts(data, encode, unit["requests"], unit["seed"])
    several = (
        dict(beam_width=width)
        if unit["method"] == "beam search"
        else dict(temperature=1.0, seed=unit["seed"])
    )
    sampling = SamplingParams(max_tokens=unit["tokens"], n=width, **several)
    for prompt in prompts:
        engine.add(prompt, sampling)
    outputs = []
    while engine.has_work:
        outputs += [o for o in engine.step() if o.finished]
    yield {
        "method": unit["method"],
        "width": width,
        "memory_saved": float(np.mean(saved)),
        "blocks_held": float(np.mean(held)),
        "steps": len(saved),
        "copies": engine.manager.stats.copies,
        "prompt_tokens": float(np.mean([len(p) for p in prompts])),
        "output_tokens": float(np.mean([len(o.token_ids) for r in outputs for o in r.outputs])),
        "decoder": "tiny" if unit["tiny"] else "smollm2-135m",
    }


def _value(method: str, width: int) -> Callable[[list[Row]], float | None]:
    def pick(rows: list[Row]) -> float | None:
        own = [r for r in rows if (r["method"], r["width"]) == (method, width) and r["decoder"] != "tiny"]
        return own[0]["memory_saved"] if own else None

    return pick


def _plot(rows: list[Row], axes: Any) -> None:
    for method, printed in PRINTED.items():
        own = [r for r in rows if r["method"] == method]
        axes.plot([r["width"] for r in own], [r["memory_saved"] for r in own], marker="o", label=method)
        axes.plot(list(printed), list(printed.values()), "x", label=f"{method}, paper")
    axes.set_xlabel("beams, or samples, per request")
    axes.set_ylabel("share of blocks saved")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    name="decoded-sharing",
    question="What memory does sharing save when beams and samples of Alpaca prompts are really decoded?",
    kind="counted",
    definition="1 - distinct blocks over blocks named by all tables of a step, averaged over steps; prefix cache off",
    claims=tuple(
        Claim(
            f"{method}, {'width' if method == 'beam search' else 'n'} = {w}",
            value,
            "PagedAttention Fig. 15",
            _value(method, w),
            0.15,
        )
        for method, printed in PRINTED.items()
        for w, value in printed.items()
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(DATA,),
    note=(
        "SmolLM2-135M in place of OPT-13B, answers cut at 64 tokens, other prompts of the Alpaca kind: how early beams "
        "part and how many prompts fill a block of 16 tokens decide the saving, so only the trend is compared"
    ),
)
