"""What the steps of one model took on one machine, by the compiled program that ran them.

A step is padded to one of a few shapes (`engine.shapes`), so that most of its time depends on its shape alone, and on a
host no smooth function of that shape gives it: a product of 8 rows is not 8 times one of 1. So each program has
seconds of its own, and four rates for all of them say what a step's content adds:

    step time = seconds of its program + rows · s_per_row + keys · s_per_key + tiles · s_per_tile + work · s_per_score

`keys` are what rows of one token read; longer rows are worked in tiles of at most 128 queries (`tiles`), each over all
keys up to its end (`work`: queries of a full tile times keys). Rates come out of least squares on steps of the real
engine (`fit_steps`), its planning and booking among their seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.engine.shapes import Bucket, smallest
from pagedjax.engine.step import StepPlan
from pagedjax.models.config import ModelConfig

TILE = 128  # queries of a tile, as kernels/plan.py has them
RATES = ("s_per_row", "s_per_key", "s_per_tile", "s_per_score")
_SHAPE = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_mlp", "vocab_size")
_MORE = ("layer_parameters", "active_layer_parameters")  # of models that are more than these widths
_LIMITS = ("max_num_seqs", "token_budget", "chunk_tokens")
_LEAST_STEPS = 3  # of a program, before its seconds are believed
_ROUNDS = 40
_FLAT = 0.01  # relative errors below it weigh alike
_LEAST_SHARE = 0.1  # of its usual steps, which a program's seconds are at least


class Load(NamedTuple):
    """What a step's content adds to its program's time; in the order of `RATES`."""

    rows: int
    keys: int
    tiles: int
    work: float


def load_of(plan: StepPlan, program: Bucket) -> Load:
    """Count a plan's rows, keys, tiles and scores in the program that runs it."""
    size = min(TILE, program.num_tokens)
    keys = tiles = 0
    work = 0
    for row in plan.rows:
        count, start = row.num_tokens, row.start
        if count == 1:
            keys += start + 1
            continue
        for first in range(0, count, size):
            tiles += 1
            work += start + min(first + size, count)
    return Load(len(plan.rows), keys, tiles, float(work * size))


class StepSample(NamedTuple):
    """One measured step.

    Attributes:
        program: Which compiled program ran it.
        load: What it had to do beside.
        seconds: What it took, planning and booking included, compiling not.
    """

    program: Bucket
    load: Load
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """Step times of one model under one set of limits on one machine.

    Attributes:
        shape: Field of `ModelConfig` → its number: whose steps these are.
        limits: Field of `SchedulerConfig` → its number: they fix the programs.
        block_size: Tokens per block.
        dtype / implementation / device: How it was computed; for those who compare.
        programs: Seconds of each program without rows.
        s_per_row / s_per_key / s_per_tile / s_per_score: See above.
    """

    shape: Mapping[str, int]
    limits: Mapping[str, int]
    block_size: int
    programs: Mapping[Bucket, float]
    s_per_row: float = 0.0
    s_per_key: float = 0.0
    s_per_tile: float = 0.0
    s_per_score: float = 0.0
    dtype: str = ""
    implementation: str = ""
    device: str = ""
    _ladder: tuple[Bucket, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in RATES:
            if not getattr(self, name) >= 0:
                raise ValueError(f"steps.{name}={getattr(self, name)}: must not be negative; calibrate again")
        if not self.programs or not all(seconds > 0 for seconds in self.programs.values()):
            raise ValueError("steps.program: must be programs of positive seconds; calibrate again")
        ladder = sorted(self.programs, key=lambda b: (b.num_tokens, b.num_samples))
        object.__setattr__(self, "_ladder", tuple(ladder))

    @property
    def rates(self) -> np.ndarray:
        """f64[4], in the order of `RATES`."""
        return np.array([getattr(self, name) for name in RATES])

    def program(self, plan: StepPlan) -> Bucket:
        """The measured program that runs a plan: the smallest that holds it.

        Raises:
            ValueError: None does.
        """
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        return smallest(self._ladder, decodes, plan.num_tokens - decodes, len(plan.rows), plan.num_samples)

    def seconds(self, plan: StepPlan) -> float:
        """Seconds a plan takes, its copies left out."""
        program = self.program(plan)
        return self.programs[program] + float(np.dot(self.rates, load_of(plan, program)))

    def sample_seconds(self, sample: StepSample) -> float:
        """Seconds that these times give a measured step.

        Raises:
            ValueError: No program holds it.
        """
        bucket = sample.program
        if bucket not in self.programs:
            need = (bucket.num_decodes, bucket.num_prefill_tokens, bucket.num_seqs, bucket.num_samples)
            bucket = smallest(self._ladder, *need)
        return self.programs[bucket] + float(np.dot(self.rates, sample.load))

    def decode_seconds(self, rows: int, cached: int, count: int) -> np.ndarray:
        """f64[count] of steps that decode the same rows; `cached` is the KV that the first finds, over all rows."""
        # A fleet may ask for more rows than run at once: what is beyond waits, and the largest batch says how long.
        most = min(rows, max(program.num_decodes for program in self._ladder))
        program = smallest(self._ladder, most, 0, most, most)
        keys = cached + rows * np.arange(1, count + 1)
        return self.programs[program] + rows * self.s_per_row + keys * self.s_per_key

    def differs(
        self, model: ModelConfig, block_size: int, scheduler: SchedulerConfig, kv_dtype: str = ""
    ) -> str:
        """Why these are no steps of such an engine; "" where they are, of whatever KV where none is named."""
        theirs = shape_numbers(model) | limit_numbers(scheduler) | {"block_size": block_size}
        ours = {**self.shape, **self.limits, "block_size": self.block_size}
        for name in (*ours, *(name for name in theirs if name not in ours)):
            if ours.get(name) != theirs.get(name):
                return f"its steps were measured with {name}={ours.get(name)}, this has {theirs.get(name)}"
        if kv_dtype and not self.dtype.endswith(f"KV {kv_dtype}"):
            return (
                f"its steps were measured with {self.dtype or 'KV of no known dtype'}, this has KV {kv_dtype}"
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a hardware file's table [steps] holds them."""
        names = ("block_size", *RATES, "dtype", "implementation", "device")
        programs = [
            {f.name: getattr(program, f.name) for f in fields(Bucket)} | {"seconds": seconds}
            for program, seconds in sorted(self.programs.items())
        ]
        plain = {name: getattr(self, name) for name in names}
        return plain | {"shape": dict(self.shape), "limits": dict(self.limits), "program": programs}

    @classmethod
    def from_dict(cls, values: Any) -> StepTimes:
        """The reverse of `to_dict`.

        Raises:
            ValueError: A field is missing, unknown, or of another kind.
        """
        try:
            given = dict(values)
            programs = {}
            for entry in given.pop("program"):
                row = dict(entry)
                seconds = float(row.pop("seconds"))
                programs[Bucket(**{name: int(value) for name, value in row.items()})] = seconds
            names = (*_SHAPE, *(name for name in _MORE if name in given["shape"]))
            shape = {name: int(given["shape"][name]) for name in names}
            limits = {name: int(given["limits"][name]) for name in _LIMITS}
            return cls(**{**given, "shape": shape, "limits": limits, "programs": programs})
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"steps: {error}: must be as `pagedjax calibrate` wrote it; calibrate again"
            ) from None


def shape_numbers(model: ModelConfig) -> dict[str, int]:
    """What of a model its step times depend on."""
    more = () if model.experts is None and model.latent is None else _MORE
    return {name: int(getattr(model, name)) for name in (*_SHAPE, *more)}


def limit_numbers(scheduler: SchedulerConfig) -> dict[str, int]:
    """What of the limits fixes the programs."""
    return {name: getattr(scheduler, name) for name in _LIMITS}


def fit_steps(samples: Sequence[StepSample], bare: StepTimes) -> StepTimes:
    """Fit programs' seconds and the four rates to measured steps.

    What is least is the sum of errors relative to what is fitted, not of their squares and not of seconds: a step of a
    few milliseconds counts as much as one of a second, and the fit goes through the middle of equal steps, whatever
    else the machine did in some of them. A rate that would come out negative is 0: these steps do not show it. A
    program's own seconds are at least a tenth of its usual step.

    Args:
        samples: Steps; programs with fewer than 3 are left out.
        bare: Whose steps they are; its programs and rates are replaced.

    Raises:
        ValueError: No program has enough steps.
    """
    counts: dict[Bucket, int] = {}
    for sample in samples:
        counts[sample.program] = counts.get(sample.program, 0) + 1
    known = sorted(program for program, count in counts.items() if count >= _LEAST_STEPS)
    if not known:
        raise ValueError(
            f"{len(samples)} steps: must be at least {_LEAST_STEPS} of one program; measure more"
        )
    used = [sample for sample in samples if sample.program in known]
    at = {program: i for i, program in enumerate(known)}
    columns = np.zeros((len(used), len(known) + len(RATES)))
    for row, sample in zip(columns, used):
        row[at[sample.program]] = 1.0
        row[len(known) :] = sample.load
    seconds = np.array([sample.seconds for sample in used])
    floors = np.zeros(columns.shape[1])
    for i in at.values():
        floors[i] = _LEAST_SHARE * np.median(seconds[columns[:, i] > 0])
    found = floors + _least(columns, seconds, columns @ floors)
    rates = dict(zip(RATES, found[len(known) :].tolist()))
    return replace(bare, programs=dict(zip(known, found[: len(known)].tolist())), **rates)


def _least(columns: np.ndarray, seconds: np.ndarray, given: np.ndarray) -> np.ndarray:
    """x, none negative, with the least sum of |seconds / fit - 1|, fit = given + columns @ x.

    Least squares, reweighted by the fit and the errors it leaves until they settle. Of what these steps cannot tell
    apart the smallest x is taken.
    """
    used = np.asarray(columns.any(axis=0))
    scale = np.where(used, np.abs(columns).max(axis=0), 1.0)
    scaled, rest = columns / scale, seconds - given
    lowest = float(seconds.min())
    while True:
        fitted, off, x = seconds, np.ones(len(columns)), np.zeros(columns.shape[1])
        for _ in range(_ROUNDS):
            root = 1 / (fitted * np.sqrt(np.maximum(off, _FLAT)))
            x[used] = np.linalg.lstsq(scaled[:, used] * root[:, None], rest * root, rcond=1e-9)[0]
            fitted = np.maximum(given + scaled @ x, lowest)
            off = np.abs(seconds / fitted - 1)
        if not (x < 0).any():
            return np.asarray(x / scale)
        used[int(np.argmin(x))] = False  # the most negative one goes; then the others are found anew
        x[:] = 0.0
