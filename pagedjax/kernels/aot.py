"""Compile kernels and whole steps for TPUs and GPUs that are not in this machine.

libtpu (extra `tpu`) and the CUDA plugin (extra `cuda`) carry the real compilers. A program compiled so has met
the device's limits (HBM, VMEM or shared memory, layouts), and its memory analysis shows whether the pool is
updated in place. What it cannot show is time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.layout import Format, Layout


@dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
        name: As on the command line.
        platform: "tpu" or "cuda".
        topology: Name of a topology of one host.
        kernel: The implementation of `paged_attention` made for it.
        module: The Python module whose compiler is used.
        extra: The extra that installs it.
    """

    name: str
    platform: str
    topology: str
    kernel: str
    module: str
    extra: str


def _tpu(name: str, topology: str) -> Target:
    return Target(name, "tpu", f"{name}:{topology}", "pallas_tpu", "libtpu", "tpu")


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _tpu("v4", "2x2x1"),
        _tpu("v5p", "2x2x1"),
        _tpu("v5e", "2x2"),
        _tpu("v6e", "2x2"),
        _tpu("tpu7x", "2x2x1"),
        Target("h100", "cuda", "1x1x1", "pallas_mosaic", "jax_cuda13_plugin", "cuda"),
        *(
            Target(name, "cuda", "1x1x1", "pallas_mma", "jax_cuda13_plugin", "cuda")
            for name in ("a100", "l4", "rtx4090", "b200")
        ),
    )
}
# Links of a chip to the others of its slice, all together and both ways, as the vendor states it: "bidirectional
# inter-chip interconnect (ICI) bandwidth per chip" of docs.cloud.google.com/tpu/docs/v5e (400 GBps), v6e (800 GBps) and
# v5p (1200 GBps). The page of tpu7x states 1200 of a chip that jax shows as two devices, that of v4 none: both are left
# out.
LINK_BYTES_PER_S: Mapping[str, float] = {"v5e": 400e9, "v6e": 800e9, "v5p": 1200e9}
# What libtpu asks of the machine that runs it; set before its first use. Several processes may load it.
LIBTPU_ENVIRONMENT: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Gpu:
    """What CUDA reports of a GPU that is not there for the plugin to ask.

    Attributes:
        kind: Its name.
        compute_capability: (major, minor).
        multiprocessors: Of the device.
        shared_kib: Shared memory of a multiprocessor; a program may take 1 KiB less.
        threads: That a multiprocessor holds.
        memory_bytes: Device memory.
        bytes_per_s: Its bandwidth.
        l2_mib: Second-level cache.
        clock_ghz: Highest clock.
    """

    kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_kib: int
    threads: int
    memory_bytes: int
    bytes_per_s: int
    l2_mib: int
    clock_ghz: float

    def config(self) -> str:
        """As the CUDA plugin takes it."""
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_core": self.shared_kib << 10,
            "shared_memory_per_block_optin": (self.shared_kib - 1) << 10,
            "threads_per_core_limit": self.threads,
            "core_count": self.multiprocessors,
            "fpus_per_core": 64 if self.compute_capability == (8, 0) else 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": self.bytes_per_s,
            "l2_cache_size": self.l2_mib << 20,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        major, minor = self.compute_capability
        return (
            f"gpu_device_info {{ {' '.join(f'{key}: {value}' for key, value in info.items())} "
            f"cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} '
            f'runtime_version {{ major: 13 minor: 0 }} device_description_str: "{self.kind}"'
        )


GPUS: Mapping[str, Gpu] = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 228, 2048, 84_978_434_048, 3_352_320_000_000, 50, 1.98),
    "a100": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 164, 2048, 42_298_834_944, 1_555_200_000_000, 40, 1.41),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 100, 1536, 23_609_475_072, 300_096_000_000, 48, 2.04),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 100, 1536, 25_282_281_472, 1_008_096_000_000, 72, 2.52
    ),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 228, 2048, 191_400_000_000, 7_672_320_000_000, 126, 1.965),
}


@dataclass(frozen=True)
class Limits:
    """What a device holds.

    Attributes:
        hbm_bytes: Device memory.
        hbm_bytes_per_s: Its bandwidth.
        on_chip_bytes: VMEM of a TPU core; shared memory that one program of a GPU may take.
    """

    hbm_bytes: int
    hbm_bytes_per_s: int
    on_chip_bytes: int


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collectives:
    """Operations between chips in a compiled program.

    Attributes:
        counts: Kind → operations of every call.
        branches: Kind → further ones in branches and loops, which only some calls take.
        sent_bytes: That each chip sends for those in `counts`, in rings.
    """

    counts: Mapping[str, int]
    branches: Mapping[str, int]
    sent_bytes: float


def count_collectives(hlo: str, chips: int) -> Collectives:
    """Count a compiled program's operations between chips, its entry computation apart from the others.

    In a ring of n chips, an all-reduce of b bytes sends 2 (n - 1) / n * b from each, an all-gather to b bytes half.
    """
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    part = (chips - 1) / chips
    share = dict.fromkeys(COLLECTIVES, part) | {"all-reduce": 2 * part, "reduce-scatter": chips - 1}
    counts, branches, sent, entry = dict.fromkeys(COLLECTIVES, 0), dict.fromkeys(COLLECTIVES, 0), 0.0, False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        found = pattern.search(line)
        if found:
            (counts if entry else branches)[found[2]] += 1
            sent += share[found[2]] * _bytes_of(found[1]) if entry else 0.0
    return Collectives(counts, branches, sent)


def _bytes_of(shape: str) -> int:
    """Bytes of an HLO shape's last array: "bf16[8,4096]{1,0:T(8,128)}", or a started operation's (operand, result)."""
    arrays = re.findall(r"([a-z]+)(\d+)\[([\d,]*)\]", shape)
    if not arrays:
        return 0
    _, bits, dims = arrays[-1]
    return math.prod(int(n) for n in dims.split(",") if n) * int(bits) // 8


@dataclass(frozen=True)
class Compiled:
    """One program compiled for a target.

    Attributes:
        target: Key of TARGETS.
        name: What was compiled.
        compile_s: Seconds of lowering and compiling.
        argument_bytes: Of all arguments, padded as the device lays them out.
        output_bytes: Of all results, those that are aliases included.
        temp_bytes: Scratch in HBM beside them.
        alias_bytes: Arguments updated in place.
        code_bytes: Of the program.
        pool_bytes: Of the KV pool among the arguments; of a slice, everything is one chip's.
        kernel_bytes: On-chip memory that the largest of the program's kernels takes; 0 where it is not known.
        limits: Of the device.
        hlo: The compiled program's text.
        chips: That the program is compiled for; every size is one chip's.
    """

    target: str
    name: str
    compile_s: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    code_bytes: int
    pool_bytes: int
    kernel_bytes: int
    limits: Limits
    hlo: str = field(repr=False, compare=False, default="")
    chips: int = 1

    @property
    def in_place(self) -> bool:
        """The pool is an alias of the result and nothing of its size stands beside it."""
        return self.alias_bytes >= self.pool_bytes and self.temp_bytes < self.pool_bytes / 100

    @property
    def hbm_bytes(self) -> int:
        """HBM that a call needs; what is updated in place counts once."""
        rest = self.temp_bytes + self.code_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + rest

    @property
    def num_kernels(self) -> int:
        """Calls of Pallas kernels in the program."""
        return len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', self.hlo))

    @property
    def between_chips(self) -> Collectives:
        """What every call sends between chips."""
        return count_collectives(self.hlo, self.chips)

    @property
    def fits(self) -> bool:
        return self.hbm_bytes <= self.limits.hbm_bytes


def compile(
    name: str,
    target: str,
    fn: Callable[..., Any],
    args: Any,
    *,
    donate: tuple[int, ...] = (),
    pool_bytes: int = 0,
    row_major: tuple[int, ...] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> Compiled:
    """Compile fn for a device that is not there.

    Args:
        name: For the report.
        target: Key of TARGETS.
        fn: To be jitted.
        args: Tuple of pytrees whose leaves have shape and dtype; no data is read.
        donate: Argument numbers whose buffers the program may reuse.
        pool_bytes: Size of the KV pool among the arguments, for `Compiled.in_place`.
        row_major: Argument numbers whose arrays lie row by row. By default XLA:TPU expects an array in the
            order that pads least, and a [V, D] embedding of 576 columns is then copied at every call.
        mesh: Of a slice's chips (`slice_devices`): fn is jitted, donates by itself, and the arguments' shardings count;
            arguments without one are on every chip.

    Raises:
        ValueError: Unknown target.
        NotImplementedError: The target's compiler is not installed, or refuses the program: the message
            carries its reason.
    """
    if not of_this_process(target):
        raise NotImplementedError(
            f"{name} on {target}: this process has compiled for another compute capability, which ptxas is told "
            "once; compile for one target a process"
        )
    device, _ = _device(target)
    everywhere: Any = jax.sharding.SingleDeviceSharding(device)
    if mesh is not None:
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def spec(x: Any, rows: bool) -> jax.ShapeDtypeStruct:
        sharding = everywhere if mesh is None else getattr(x, "sharding", None) or everywhere
        place = Format(Layout(tuple(range(len(x.shape)))), sharding) if rows else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    specs = [jax.tree.map(lambda x, i=i: spec(x, i in row_major), arg) for i, arg in enumerate(args)]
    started = time.perf_counter()
    try:
        limits = device_limits(target)
        with tracing_for(target) if mesh is None else jax.set_mesh(mesh):
            program: Any = jax.jit(fn, donate_argnums=donate) if mesh is None else fn
            traced = program.trace(*specs)
            compiled = traced.lower(lowering_platforms=(TARGETS[target].platform,)).compile()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Mosaic GPU reports too much shared memory as a ValueError; any other is a mistake of the caller.
        if isinstance(error, ValueError) and "shared memory" not in str(error):
            raise
        raise NotImplementedError(f"{name} on {target}: {str(error).splitlines()[0]}") from error
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    return Compiled(
        target,
        name,
        time.perf_counter() - started,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
        pool_bytes,
        _kernel_bytes(hlo),
        limits,
        hlo,
        1 if mesh is None else mesh.size,
    )


_FIRST_CAPABILITY: list[tuple[int, int]] = []


def of_this_process(target: str) -> bool:
    """Whether this process may compile for a target: Mosaic GPU tells ptxas the first capability it meets, for good."""
    if target not in GPUS:
        return True
    if not _FIRST_CAPABILITY:
        _FIRST_CAPABILITY.append(GPUS[target].compute_capability)
    return _FIRST_CAPABILITY[0] == GPUS[target].compute_capability


@functools.cache
def worker(capability: tuple[int, int]) -> concurrent.futures.Executor:
    """A process that compiles for one compute capability."""
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def installed(target: str) -> bool:
    """Whether this environment has the compiler of a target."""
    return importlib.util.find_spec(TARGETS[target].module) is not None


def device_limits(target: str) -> Limits:
    """Capacities of a target's device, as its own libraries state them."""
    if TARGETS[target].platform == "cuda":
        gpu = GPUS[target]
        return Limits(gpu.memory_bytes, gpu.bytes_per_s, (gpu.shared_kib - 1) << 10)
    from jax.experimental.pallas import tpu as pltpu

    with tracing_for(target):
        info = pltpu.get_tpu_info()
    return Limits(info.hbm_capacity_bytes, info.mem_bw_bytes_per_second, info.vmem_capacity_bytes)


class AbstractGpu(jax.sharding.AbstractDevice):
    """With the compute capability, without which Mosaic compiles for 9.0."""

    compute_capability: str


def _device(target: str) -> tuple[Any, Any]:
    """(device of a topology, what a trace is told of it)."""
    if target not in TARGETS:
        raise ValueError(f"target={target!r}: must be one of {', '.join(TARGETS)}")
    chip = TARGETS[target]
    if not installed(target):
        raise NotImplementedError(f"target={target}: needs {chip.module}; install the extra {chip.extra!r}")
    from jax.experimental import topologies

    if chip.platform == "cuda":
        gpu = GPUS[target]
        options = {"target_config": gpu.config(), "topology": chip.topology}
        device: Any = topologies.get_topology_desc(gpu.kind, "cuda", **options).devices[0]
        abstract = AbstractGpu(device_kind=gpu.kind, num_cores=gpu.multiprocessors, platform="gpu")
        object.__setattr__(abstract, "compute_capability", "{}.{}".format(*gpu.compute_capability))
        return device, abstract
    for key, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    cores = getattr(device, "num_cores", 1)
    return device, jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=cores, platform="tpu"
    )


def slice_devices(target: str, topology: str) -> list[Any]:
    """Chips of a slice that is not here, of one host or several.

    Args:
        target: A TPU of TARGETS.
        topology: As the target's own documents spell it: "2x4", "2x2x2".

    Raises:
        ValueError: The target is no TPU, or libtpu knows no such slice of it.
    """
    _device(target)  # refuses what is unknown or not installed; sets libtpu's environment
    if TARGETS[target].platform != "tpu":
        raise ValueError(f"target={target}: slices are of TPUs; leave the topology out")
    from jax.experimental import topologies

    try:
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:{topology}").devices
        )
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        own = TARGETS[target].topology.partition(":")[2]
        raise ValueError(
            f"topology={topology}: libtpu knows no such slice of {target} ({str(error).splitlines()[0][:120]}); "
            f"try {own}"
        ) from None


def tracing_for(target: str) -> Any:
    """A context in which programs are traced as for that device, and its limits can be asked for."""
    # An axis-less mesh: with a one-device mesh, shardings reach the avals that kernels reshape.
    _, chip = _device(target)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip))


def _kernel_bytes(hlo: str) -> int:
    """VMEM of the largest Pallas kernel, as XLA:TPU notes it beside the call."""
    sizes = [0]
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            used = line.rpartition("used_scoped_memory_configs")[2].partition("]")[0]
            sizes += [int(size) for size in re.findall(r'"size":"(\d+)"', used)]
    return max(sizes)
