"""What a step would take on hardware that is not there: a roofline over its floating-point work and bytes.

    roof(kernel) = max( FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency) )
    step time    = overhead + rows · host time per row + roof(matrix products) + roof(attention) + links
    links        = (2 L + 2) · start + (all-reduces of x, exchange of the output) / bandwidth; 0 on one device

Matrix products read the weights once; attention reads and writes KV, and block copies move with it. The
two are kernels that run one after the other, so each has its own roof: a prompt's products do not hide
behind the reading of KV. A block that several rows name is read from memory once; each further read of it
costs the share `shared_read` of one, because caches serve a part. Hardware is a file of `configs/hardware/`, a model is
its config (`configs/shapes/`); what in a hardware file is no data sheet's says so there.

A file that `pagedjax calibrate` wrote knows what the steps of one model took, program by program (`sim.programs`);
for that model under those limits they take the place of the roofs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import numpy as np

from pagedjax.cache.rules import KV_BYTES, SCALE_BYTES, SCALED
from pagedjax.config import SchedulerConfig, read_toml
from pagedjax.engine.step import StepPlan
from pagedjax.models.config import ModelConfig
from pagedjax.models.sharding import Cut
from pagedjax.paths import replace_text, shipped_file
from pagedjax.sim.programs import StepTimes


@dataclass(frozen=True)
class HardwareSpec:
    """One accelerator.

    Attributes:
        name: For tables.
        flops_per_s: Dense peak at 2 bytes a number.
        bytes_per_s: Peak of its main memory.
        memory_bytes: Size of its main memory.
        compute_efficiency / bandwidth_efficiency: Share of the peaks that steps reach.
        step_overhead_s: Host work and launches per step.
        host_s_per_row: Host work per step and sequence that the device waits for; 0 unless measured.
        host_bytes_per_s: Between device and host, one way.
        transfer_s: Until one transfer between device and host starts; a block is two per layer (K and V).
        shared_read: What reading a block costs that another row of the step reads too, over a first read.
        link_bytes_per_s: From one device to the others of a slice, one way; 0: not known, and there are no slices.
        link_start_s: Until one operation among all of them moves bytes.
        devices: That share the work of a slice, and pay for their links; made by `times`, never read from a file.
        steps: What the steps of one model took here; None: nobody measured them.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    step_overhead_s: float = 0.003
    host_s_per_row: float = 0.0
    host_bytes_per_s: float = 25e9
    transfer_s: float = 5e-6
    shared_read: float = 1.0
    link_bytes_per_s: float = 0.0
    link_start_s: float = 0.0
    devices: int = 1
    steps: StepTimes | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[1:-1]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value == float("inf"):
                raise ValueError(f"{field.name}={value!r}: must be a number")
            may_be_0 = field.name in ("host_s_per_row", "link_bytes_per_s", "link_start_s")
            if not (value > 0 or (value == 0 and may_be_0)):
                raise ValueError(f"{field.name}={value}: must be positive")
        for name in ("compute_efficiency", "bandwidth_efficiency", "shared_read"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most 1")

    def times(self, devices: int) -> HardwareSpec:
        """A slice of so many of them: each works its heads, and what crosses between them takes its time.

        Raises:
            ValueError: The hardware's file says nothing of links.
        """
        if devices == 1:
            return self
        if not self.link_bytes_per_s:
            raise ValueError(
                f"devices={devices}: {self.name} has no link_bytes_per_s; add it from the data sheet, or let links "
                "cost nothing (free_links)"
            )
        return replace(self.idealised(devices), name=f"{devices} x {self.name}", devices=devices)

    def idealised(self, devices: int) -> HardwareSpec:
        """So many of them as one device: tensor parallelism with no cost of its own, an upper bound."""
        if devices == 1:
            return self
        return replace(
            self,
            name=f"{devices} x {self.name}, free links",
            flops_per_s=self.flops_per_s * devices,
            bytes_per_s=self.bytes_per_s * devices,
            memory_bytes=self.memory_bytes * devices,
            host_bytes_per_s=self.host_bytes_per_s * devices,
            steps=None,  # those are of one
        )

    @classmethod
    def read(cls, source: str | Path) -> HardwareSpec:
        """Read a TOML file, or one of `configs/hardware/` by its name ("a100-40gb").

        Raises:
            ValueError: No such file, or an unknown or a missing field.
        """
        path = shipped_file("hardware", source)
        values = read_toml(path, "see configs/hardware/ for examples")
        names = {f.name for f in fields(cls)} - {"devices"}
        if unknown := sorted(values.keys() - names):
            raise ValueError(f"{path}: {', '.join(unknown)}: must be among {', '.join(sorted(names))}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise ValueError(f"{path}: must have {', '.join(missing)}; see configs/hardware/ for examples")
        try:
            if "steps" in values:
                values["steps"] = StepTimes.from_dict(values["steps"])
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def write(self, path: str | Path, comments: Sequence[str] = ()) -> None:
        """Write a TOML file that `read` reads, comments in front.

        Raises:
            OSError: The file cannot be written.
        """
        lines = [f"# {comment}" for comment in comments]
        lines += [
            f"{f.name} = {_toml(getattr(self, f.name))}"
            for f in fields(self)
            if f.name not in ("steps", "devices")
        ]
        if self.steps is not None:
            tables = self.steps.to_dict()
            programs = tables.pop("program")
            inner = {name: tables.pop(name) for name in ("shape", "limits")}
            for name, table in {"steps": tables, **{f"steps.{k}": v for k, v in inner.items()}}.items():
                lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
            for program in programs:
                lines += ["", "[[steps.program]]", *(f"{k} = {_toml(v)}" for k, v in program.items())]
        replace_text(Path(path), "\n".join(lines) + "\n")


def _toml(value: float | str) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Work:
    """What one step computes and moves, in matrix products and in attention (block copies included).

    `tokens` it feeds and `samples` it draws are what crosses between the devices of a slice.
    """

    flops: float
    bytes: float
    attention_flops: float = 0.0
    attention_bytes: float = 0.0
    tokens: int = 0
    samples: int = 0


@dataclass(frozen=True)
class CostModel:
    """Step times of a model on a device.

    Attributes:
        hardware: The device.
        model: The decoder.
        block_size: Tokens per block, for copies.
        itemsize: Bytes of one number, in weights, and in KV where nothing else is said.
        kv_dtype: Of the KV pool, as `cache.dtype` names it; codes have their scales with them, and cost nothing to read
            but their bytes. "" is as the weights.
        steps: Measured step times in place of the roofs; `under` puts them here.

    Raises:
        ModelError: The hardware is a slice to which the model cannot be dealt out (names the numbers that work), or its
            rows are not kept as codes.
    """

    hardware: HardwareSpec
    model: ModelConfig
    block_size: int
    itemsize: int = 2
    kv_dtype: str = ""
    steps: StepTimes | None = None

    def under(self, scheduler: SchedulerConfig) -> CostModel:
        """This model under such limits: with the hardware's measured steps, where it has those of just this."""
        steps = self.hardware.steps
        if steps is not None and steps.differs(self.model, self.block_size, scheduler, self.kv_dtype):
            steps = None
        return replace(self, steps=steps)

    def basis(self, scheduler: SchedulerConfig) -> str:
        """Where step times come from, in words."""
        if self.steps is not None:
            return f"measured steps of {len(self.steps.programs)} programs"
        known = self.hardware.steps
        return (
            "roofline"
            if known is None
            else (f"roofline: {known.differs(self.model, self.block_size, scheduler, self.kv_dtype)}")
        )

    def __post_init__(self) -> None:
        Cut(self.model, self.hardware.devices, "devices")
        _ = self.kv_bytes_per_token  # refused here where it has none

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers, keys and values."""
        if not self.kv_dtype:
            return self.model.kv_bytes_per_token(self.itemsize)
        scales = SCALE_BYTES if self.kv_dtype in SCALED else 0
        return self.model.kv_bytes_per_token(KV_BYTES[self.kv_dtype], scales)

    @property
    def held_bytes_per_token(self) -> int:
        """The same as a slice holds it, where several devices may have a KV head."""
        return self.kv_bytes_per_token * max(1, self.hardware.devices // self.model.num_kv_heads)

    def between_s(self, tokens: int, samples: int) -> float:
        """Seconds on the links between a slice's devices (docs/devices.md).

        Two all-reduces of x a layer and one for the embedding, in rings; a score and a token for each sample.
        """
        spec, n = self.hardware, self.hardware.devices
        if n == 1:
            return 0.0
        sums = 2 * self.model.num_layers + 1
        summed = 2 * (n - 1) / n * tokens * self.model.d_model * self.itemsize
        return (sums + 1) * spec.link_start_s + (
            sums * summed + 8 * (n - 1) * samples
        ) / spec.link_bytes_per_s

    def work(self, plan: StepPlan) -> Work:
        """Count a plan's FLOPs and bytes: causal attention reads each row's KV once."""
        model = self.model
        tokens = samples = read = 0
        pairs = 0.0
        for row in plan.rows:
            count = row.num_tokens
            tokens += count
            samples += len(row.samples)
            read += row.start + count
            pairs += count * (row.start + (count + 1) / 2)
        head = model.vocab_size * model.d_model
        cow = sum(len(batch.src) for batch in plan.copies.batches if batch.kind == "cow")
        if self.hardware.shared_read < 1:
            again = plan.num_named_blocks - plan.num_held_blocks
            moved = read - (1 - self.hardware.shared_read) * again * self.block_size
        else:
            moved = read
        return Work(
            flops=2.0 * model.active_layer_parameters * tokens + 2.0 * head * samples,
            bytes=float((model.read_layer_parameters(tokens) + head) * self.itemsize),
            attention_flops=float(model.attention_flops) * pairs,
            attention_bytes=float((moved + tokens + 2 * cow * self.block_size) * self.held_bytes_per_token),
            tokens=tokens,
            samples=samples,
        )

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to move blocks between device and host, each layer's K and V by itself."""
        spec, model = self.hardware, self.model
        transfers = 2 * model.num_layers * num_blocks
        num_bytes = num_blocks * self.block_size * self.held_bytes_per_token
        return transfers * spec.transfer_s + num_bytes / spec.host_bytes_per_s

    def copy_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's transfers between device and host."""
        return self.swap_s(sum(len(batch.src) for batch in plan.copies.batches if batch.kind != "cow"))

    def step_s(self, plan: StepPlan) -> float:
        """Seconds a plan takes."""
        if self.steps is not None:
            cow = sum(len(batch.src) for batch in plan.copies.batches if batch.kind == "cow")
            moved = 2 * cow * self.block_size * self.kv_bytes_per_token
            memory = self.hardware.bytes_per_s * self.hardware.bandwidth_efficiency
            return (self.steps.seconds(plan) if plan.rows else 0.0) + self.copy_s(plan) + moved / memory
        return self.seconds(self.work(plan), len(plan.rows), self.copy_s(plan))

    def seconds(self, work: Work, rows: int, copy_s: float = 0.0) -> float:
        """Seconds of a step that does some work for so many rows, with `copy_s` of transfers."""
        spec = self.hardware
        compute = spec.flops_per_s * spec.compute_efficiency
        memory = spec.bytes_per_s * spec.bandwidth_efficiency
        products = max(work.flops / compute, work.bytes / memory)
        attention = max(work.attention_flops / compute, work.attention_bytes / memory)
        host = spec.step_overhead_s + spec.host_s_per_row * rows + copy_s
        return host + products + attention + self.between_s(work.tokens, work.samples)

    def decode_steps_s(self, rows: int, cached: int, count: int, again: int = 0) -> np.ndarray:
        """Seconds of each of `count` steps that decode the same rows; equal to `step_s` of each.

        Args:
            rows: Sequences, one token each.
            cached: KV that the first of the steps finds, over all rows.
            count: Steps.
            again: Blocks named by the rows' tables less distinct blocks.

        Returns:
            f64[count].
        """
        if self.steps is not None:
            return self.steps.decode_seconds(rows, cached, count)
        spec, model = self.hardware, self.model
        compute = spec.flops_per_s * spec.compute_efficiency
        memory = spec.bytes_per_s * spec.bandwidth_efficiency
        head = model.vocab_size * model.d_model
        flops = 2.0 * model.active_layer_parameters * rows + 2.0 * head * rows
        num_bytes = float((model.read_layer_parameters(rows) + head) * self.itemsize)
        products = max(flops / compute, num_bytes / memory)
        read = cached + rows * np.arange(1, count + 1)
        scores = float(model.attention_flops) * read / compute
        moved = read - (1 - spec.shared_read) * again * self.block_size if again else read
        attention = np.maximum(scores, (moved + rows) * self.held_bytes_per_token / memory)
        host = spec.step_overhead_s + spec.host_s_per_row * rows + 0.0
        return host + products + attention + self.between_s(rows, rows)

    def kv_blocks(self, reserve: float = 0.1) -> int:
        """Blocks that fit beside the weights, with the share `reserve` of the memory left for the rest."""
        free = self.hardware.memory_bytes * (1 - reserve) - self.model.num_parameters * self.itemsize
        blocks = int(free // (self.held_bytes_per_token * self.block_size))
        if blocks < 2:
            raise ValueError(
                f"{self.hardware.name}: {self.model.num_parameters:,} parameters leave no room for KV; "
                "take a smaller model or a larger device"
            )
        return blocks


def calibrate(
    peaks: HardwareSpec, works: Sequence[Work], rows: Sequence[int], seconds: Sequence[float]
) -> HardwareSpec:
    """Fit efficiencies and host times to measured steps; the peaks stay.

    Which roof bounds a step depends on the efficiencies, so both are settled in turn: assign steps to a
    roof, solve the linear least squares that is left, assign again. A roof that the steps do not show (more of its work
    would take less time, as where all weights lie in a cache) is taken out, with efficiency 1, and a host time per row
    that comes out negative is 0.

    Args:
        peaks: Peaks, and where the fit starts.
        works: `CostModel.work` of each step.
        rows: Sequences in each step.
        seconds: What each step took.

    Raises:
        ValueError: Fewer than 8 steps, or the fit leaves the range (efficiency above 1, negative time):
            the steps do not vary enough, or the peaks are wrong.
    """
    if not len(works) == len(rows) == len(seconds) or len(works) < 8:
        raise ValueError(
            f"{len(works)} works, {len(rows)} rows, {len(seconds)} times: must be equally many, at least 8"
        )
    # [kernel, step]: seconds at the peaks.
    compute = np.array([[w.flops for w in works], [w.attention_flops for w in works]]) / peaks.flops_per_s
    memory = np.array([[w.bytes for w in works], [w.attention_bytes for w in works]]) / peaks.bytes_per_s
    count = np.array(rows, dtype=float)
    start = (1 / peaks.compute_efficiency, 1 / peaks.bandwidth_efficiency)
    overhead, per_row, scale_c, scale_m = _settle(compute, memory, count, np.array(seconds), start)
    if scale_m < 0 <= scale_c:
        overhead, per_row, scale_c, _ = _settle(compute, 0 * memory, count, np.array(seconds), start)
        scale_m = 1.0
    elif scale_c < 0 <= scale_m:
        overhead, per_row, _, scale_m = _settle(0 * compute, memory, count, np.array(seconds), start)
        scale_c = 1.0
    if min(scale_c, scale_m) < 1 or overhead <= 0:
        raise ValueError(
            f"{peaks.name}: the fit gives efficiencies {1 / scale_c:.3g} and {1 / scale_m:.3g}, overhead "
            f"{overhead:.3g} s and {per_row:.3g} s a row: must be at most 1 and not negative; measure steps "
            "that vary more, or correct the peaks"
        )
    return replace(
        peaks,
        compute_efficiency=1 / scale_c,
        bandwidth_efficiency=1 / scale_m,
        step_overhead_s=overhead,
        host_s_per_row=per_row,
    )


def _settle(
    compute: np.ndarray,
    memory: np.ndarray,
    rows: np.ndarray,
    seconds: np.ndarray,
    start: tuple[float, float],
) -> tuple[float, float, float, float]:
    """Overhead, seconds a row, and by how much each roof lies below its peak; f64[kernel, step] at the peaks."""
    scale_c, scale_m = start
    fit = np.zeros(4)
    for _ in range(50):
        bound = compute * scale_c > memory * scale_m
        under = [np.where(bound, compute, 0.0).sum(axis=0), np.where(bound, 0.0, memory).sum(axis=0)]
        columns = np.stack([np.ones(len(rows)), rows, *under], axis=1)
        used = np.asarray(columns.any(axis=0))
        fit = _solve(columns, seconds, used)
        if fit[1] < 0:  # rows cost nothing that these steps could show
            used[1] = False
            fit = _solve(columns, seconds, used)
        # A roof that bounds no step keeps its scale.
        scale_c, scale_m = float(fit[2]) if used[2] else scale_c, float(fit[3]) if used[3] else scale_m
        if np.array_equal(bound, compute * scale_c > memory * scale_m):
            break
    return float(fit[0]), float(fit[1]), scale_c, scale_m


def _solve(columns: np.ndarray, seconds: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Least squares over the used columns; 0 for the others."""
    fit = np.zeros(columns.shape[1])
    fit[used] = np.linalg.lstsq(columns[:, used], seconds, rcond=None)[0]
    return fit
