"""What does a prefix cache bring to an hour of Mooncake's conversations, served by Llama-3-8B?

Source: the trace of Mooncake FAST'25; no figure of the paper has this setting. Simulated: the H100 file four times
over. One device's memory holds 833 blocks beside the weights, which hit 4 %: at the file's share of its peak, the
arithmetic of the hour alone then takes 1.6 hours. Cost: four minutes.
    pagedjax experiment run serving-hour
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.lab import Claim, Experiment, TableRow, Unit, Value, ratio
from pagedjax.lab.drawing import bars, label_axes, panels
from pagedjax.models.family_configs import read_shape
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import open_trace

from ._serving import MACHINES

TRACE = "data/traces/mooncake_conversation_trace.jsonl.gz"
HOSTS = ("h100-80gb", *MACHINES)
FIRST_S = 600.0
DEVICES, BLOCK, MAX_LEN = 4, 512, 131_072
SCHEDULER = SchedulerConfig(max_num_seqs=256, token_budget=8192)


def cost(host: str) -> CostModel:
    """Four H100s as one device, their links free, and Llama-3-8B; host work as the file says, or a calibrated one's."""
    device, other = HardwareSpec.read("h100-80gb").idealised(DEVICES), HardwareSpec.read(host)
    device = replace(device, step_overhead_s=other.step_overhead_s, host_s_per_row=other.host_s_per_row)
    return CostModel(device, read_shape("llama-3-8b"), BLOCK)


def _units(smoke: bool, seed: int) -> list[Unit]:
    """The hour under the file's host; its first ten minutes under that and both calibrated ones."""
    runs = [("h100-80gb", 30.0)] if smoke else [("h100-80gb", 1e9), *((host, FIRST_S) for host in HOSTS)]
    return [{"host": host, "until_s": until_s, "caching": c} for host, until_s in runs for c in (False, True)]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    model = cost(unit["host"])
    held = PagedManager(num_blocks=model.kv_blocks(), block_size=BLOCK, prefix_caching=unit["caching"])
    trace = open_trace(data / TRACE)
    result = simulate(trace, held, model, SCHEDULER, max_model_len=MAX_LEN, until_s=unit["until_s"])
    summary = result.summary()
    last = max(r.arrival_s for r in result.records) - min(r.arrival_s for r in result.records)
    yield {
        "prefix_caching": unit["caching"],
        "host": unit["host"],
        "until_s": None if unit["until_s"] >= 1e9 else unit["until_s"],
        "requests": summary.requests,
        "refused": result.refused,
        "span_over_arrivals": summary.span_s / last,
        "hit_by_token": summary.hit_by_token,
        "ttft_p50_s": summary.ttft_s[50],
        "ttft_p99_s": summary.ttft_s[99],
        "queue_p99_s": summary.queue_s[99],
        "tpot_p50_s": summary.tpot_s[50],
        "busy_s": result.busy_s,
        "steps": result.num_steps,
        "preemptions": summary.preemptions,
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Seconds to the first token with and without the prefix cache: the median, and the slowest of a hundred."""
    own = rows[:2]
    names = ["prefix cache" if r["prefix_caching"] else "none" for r in own]
    columns = {"ttft_p50_s": "median time to first token", "ttft_p99_s": "p99 time to first token"}
    for (column, _), axes in zip(
        columns.items(), panels(figure, list(columns.values()), columns=2, height=1.5)
    ):
        bars(axes, names, {"": [r[column] for r in own]})
        label_axes(axes, "seconds (simulated)")


def _with_over_without(column: str, host: str, until_s: float | None) -> Value:
    of, over = ({"prefix_caching": c, "host": host, "until_s": until_s} for c in (True, False))
    return ratio(column, of, over)


COLUMNS = {"TTFT p50": "ttft_p50_s", "busy time": "busy_s"}
EXPERIMENT = Experiment(
    name="serving-hour",
    question="What does a prefix cache bring to an hour of Mooncake's conversations, served by Llama-3-8B?",
    kind="simulated",
    definition=(
        "four H100 files as one device without communication cost, block size 512, 90 % of the memory "
        "beside the weights for KV, chunks of up to 8,192 tokens; hits by this engine's rules"
    ),
    claims=(
        *(
            Claim(
                f"{text}, with over without",
                None,
                "our setting",
                _with_over_without(column, "h100-80gb", None),
            )
            for text, column in COLUMNS.items()
        ),
        *(
            Claim(
                f"{text}, with over without, first ten minutes, host work of {host}",
                None,
                "sensitivity",
                _with_over_without(column, host, FIRST_S),
            )
            for text, column in COLUMNS.items()
            for host in HOSTS
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    data=(TRACE,),
    open=("host",),
    note=(
        "the trace is given, so nothing is drawn and there are no seeds; the H100 file's host work is an "
        "assumption, so ten minutes are played under that of both calibrated machines as well; the links between "
        "the four devices are free (HardwareSpec.idealised)"
    ),
)
