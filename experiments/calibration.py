"""Where do the constants of the A100 file come from, and do they give back what they were fitted to?

Source: throughput and latency of vLLM 0.1.2 on OPT-13B and one A100-SXM4-40GB: Anyscale's benchmark of continuous
batching (June 2023) and a repetition with its environment printed (issue 4 of llm-continuous-batching-benchmarks):
1,000 requests at once of 512-token prompts, answers exponential with mean 128 below a cap, tokens per second; and
median latency at 1 and 4 requests per second. Shared reads: ChunkAttention (ACL'24), Table 3, PagedAttn* over
PagedAttn. The PagedAttention paper's tables take no part. Simulated. Cost: four minutes.
    pagedjax experiment run calibration
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.engine.step import StepPlan
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import dots, label_axes, panels
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.simulator import simulate
from pagedjax.sim.trace import Trace, TraceRequest

from ._serving import MACHINES, MAX_LEN, cost, manager

CAPS = (32, 128, 512, 1536)  # on the answer's length
RATES = (1.0, 4.0)
# Tokens per second at each cap, then seconds at each rate.
PRINTED = {
    "repetition": (5752.0, 3180.0, 1734.0, 1653.0, 3.6, 7.1),
    "blog": (6121.0, 3592.0, 2029.0, 1898.0, 3.6, 4.6),
}
NAMES = (*(f"tokens/s, answers below {cap}" for cap in CAPS), *(f"latency at {r:g} req/s" for r in RATES))
CONSTANTS = ("step_overhead_s", "host_s_per_row")
ROOFLINE_S = 0.003  # launches of a step and nothing for its rows, for comparison
HARNESS_S = 0.010  # its server sleeps so long between steps
SCHEDULER = SchedulerConfig(max_num_seqs=256, token_budget=8100, chunked_prefill=False)  # as it was launched
# (prompt, shared part of it, us of PagedAttn, us of PagedAttn*), batch 32.
SHARED = (
    (1024, 512, 355.88, 257.74),
    (1024, 768, 356.02, 215.18),
    (1024, 1024, 355.44, 154.46),
    (2048, 1024, 703.35, 505.32),
    (2048, 1536, 702.95, 421.25),
    (2048, 2048, 703.72, 338.41),
    (4096, 2048, 1400.99, 998.78),
    (4096, 3072, 1401.54, 828.98),
    (4096, 4096, 1399.51, 663.84),
)
SHARED_BATCH = 32


def _answers(rng: np.random.Generator, cap: int, count: int) -> list[int]:
    """Exponential with mean 128, drawn again above the cap."""
    drawn = np.round(rng.exponential(128.0, 40 * count))
    return np.maximum(drawn[drawn <= cap][:count], 1).astype(int).tolist()


def _burst(cap: int, count: int, seed: int) -> Trace:
    answers = _answers(np.random.default_rng(seed), cap, count)
    rows = [TraceRequest(0.0, 512, n) for n in answers]
    return Trace("burst", "lengths", 0, False, lambda: iter(rows), spec=f"burst,{cap},{count},{seed}")


def _paced(rate: float, count: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(128, 385, count).tolist()
    rows = [TraceRequest(0.0, p, n) for p, n in zip(prompts, _answers(rng, CAPS[-1], count))]
    trace = Trace("paced", "lengths", 0, False, lambda: iter(rows), spec=f"paced,{rate},{count},{seed}")
    return trace.with_arrivals(rate, seed=seed)


def _with_host(model: CostModel, step_s: float, row_s: float) -> CostModel:
    return replace(model, hardware=replace(model.hardware, step_overhead_s=step_s, host_s_per_row=row_s))


class _Harness:
    """The benchmark, simulated for any host work.

    All requests of a burst are there at once, so its steps do not depend on their times: each is planned once, and
    host work is added afterwards. The paced ones are simulated anew.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.model = cost("opt-13b")
        self.bursts = [self._planned(cap) for cap in CAPS]

    def _planned(self, cap: int) -> tuple[int, int, int, float]:
        """(tokens, steps, rows of all steps, seconds without host work)."""
        bare = _with_host(self.model, 1e-9, 0.0)
        steps: list[tuple[int, float]] = []

        def step_s(plan: StepPlan) -> float:
            steps.append((len(plan.rows), bare.step_s(plan)))
            return steps[-1][1]

        result = simulate(
            _burst(cap, self.count, self.seed), manager("paged"), step_s, SCHEDULER, max_model_len=MAX_LEN
        )
        tokens = sum(r.num_input + r.num_output for r in result.records)
        return tokens, len(steps), sum(n for n, _ in steps), sum(s for _, s in steps)

    def figures(self, step_s: float, row_s: float) -> list[float]:
        """Tokens per second at each cap, median seconds at each rate."""
        model = _with_host(self.model, step_s + HARNESS_S, row_s)
        values = [
            tokens / (bare + steps * (step_s + HARNESS_S) + rows * row_s)
            for tokens, steps, rows, bare in self.bursts
        ]
        for rate in RATES:
            trace = _paced(rate, self.count, self.seed)
            records = simulate(trace, manager("paged"), model, SCHEDULER, max_model_len=MAX_LEN).records
            values.append(float(np.median([r.finished_s - r.arrival_s for r in records])))
        return values


def _fit(harness: _Harness, printed: tuple[float, ...]) -> tuple[float, float]:
    """Host seconds a step and a row with the least squares of log ratios over all printed figures."""
    from scipy.optimize import least_squares

    def off(x: np.ndarray) -> np.ndarray:
        return np.log(np.array(harness.figures(*map(float, x))) / np.array(printed))

    found = least_squares(
        off, [0.006, 0.0002], bounds=([0, 0], [0.1, 0.01]), x_scale=[0.005, 0.0002], diff_step=0.1, max_nfev=6
    )
    return float(found.x[0]), float(found.x[1])


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = {"requests": 60 if smoke else 1000, "seed": seed}
    fits = [{"source": s, "fit": not smoke, **sizes} for s in PRINTED]
    return [*fits, {"source": "roofline", "fit": False, **sizes}, {"source": "ChunkAttention"}]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    source = unit["source"]
    if source == "ChunkAttention":
        yield from _shared()
        return
    harness = _Harness(unit["requests"], unit["seed"])
    host = _fit(harness, PRINTED[source]) if unit["fit"] else (ROOFLINE_S, 0.0)
    for name, value in zip(CONSTANTS, host if unit["fit"] else ()):
        yield {"source": source, "figure": name, "simulated": value, "printed": None}
    printed = PRINTED.get(source, (None,) * len(NAMES))
    for name, ours, value in zip(NAMES, harness.figures(*host), printed):
        yield {"source": source, "figure": name, "simulated": ours, "printed": value}


def _shared() -> Iterator[TableRow]:
    """t* / t = 1 - (1 - x) * shared / prompt * (batch - 1) / batch, solved for x over all of the table."""
    part = np.array([shared / prompt * (SHARED_BATCH - 1) / SHARED_BATCH for prompt, shared, _, _ in SHARED])
    printed = np.array([theirs / alone for _, _, alone, theirs in SHARED])
    x = 1 - float(part @ (1 - printed) / (part @ part))
    for (prompt, shared, _, _), share, value in zip(SHARED, part, printed):
        name = f"{shared} of {prompt} shared: time over unshared"
        yield {
            "source": "ChunkAttention",
            "figure": name,
            "simulated": float(1 - (1 - x) * share),
            "printed": float(value),
        }
    yield {"source": "ChunkAttention", "figure": "shared_read", "simulated": x, "printed": None}


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Simulated over printed for every figure with a printed value; the line is equality, the band is ten per cent."""
    own = [r for r in rows if r["printed"]]
    sources = list(dict.fromkeys(r["source"] for r in own))
    names = [f"{r['figure'][:44]} ({r['source']})" for r in own]
    (axes,) = panels(figure, ["simulated over printed"], width=7.4, height=0.8 + 0.18 * len(own))
    axes.axvspan(0.9, 1.1, color="#eeeeee", zorder=0)
    axes.axvline(1.0, color="#555555", linewidth=0.7, gid="rule")
    series = {s: [r["simulated"] / r["printed"] if r["source"] == s else None for r in own] for s in sources}
    dots(axes, names, series, key=False)
    label_axes(axes, "ratio")


_FILES = dict(zip(PRINTED, MACHINES))
_LEAST = 25  # rows of a whole run; a smoke run fits nothing and has fewer
EXPERIMENT = Experiment(
    name="calibration",
    question="Where do the constants of the A100 file come from, and do they give back what they were fitted to?",
    kind="simulated",
    definition=(
        "host seconds a step and a row by least squares over the six printed figures of each source, its server's "
        "sleep of 10 ms a step on top, efficiencies fixed; a second read of a shared block over nine pairs"
    ),
    claims=(
        *(
            Claim(
                f"{engine}, {name}",
                value,
                where,
                cell("simulated", least=_LEAST, source=source, figure=name),
                "input",
            )
            for source, engine, where in (
                ("repetition", "vLLM 0.1.2", "repetition of the benchmark"),
                ("blog", "vLLM 0.1", "Anyscale's blog"),
            )
            for name, value in zip(NAMES, PRINTED[source])
        ),
        *(
            Claim(
                f"fitted {name}, {source}",
                getattr(HardwareSpec.read(file), name),
                f"configs/hardware/{file}.toml",
                cell("simulated", least=_LEAST, source=source, figure=name),
                "input",
            )
            for source, file in _FILES.items()
            for name in CONSTANTS
        ),
        Claim(
            "fitted shared_read",
            HardwareSpec.read(MACHINES[0]).shared_read,
            f"configs/hardware/{MACHINES[0]}.toml",
            cell("simulated", least=_LEAST, source="ChunkAttention", figure="shared_read"),
            "input",
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    note=(
        "inputs all of them: what is printed was fitted, and the rows show how well two constants give six figures "
        "back. The file a100-40gb takes the repetition's, because its machine is printed; the blog's machine needs "
        "less host work per row, and is a100-40gb-anyscale. Figures of other tables that depend on host work stand "
        "there under both. Source roofline: 3 ms a step, nothing per row"
    ),
)
