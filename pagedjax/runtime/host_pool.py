"""Block copies as bytes: within the device pools, to the host's pool and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.cache import CopyBatch, CopyPlan
from pagedjax.kernels import KVLayout, KVPool, copy_blocks, gather_blocks, scatter_blocks
from pagedjax.runtime.compile_clock import CompileClock
from pagedjax.runtime.mesh import ONE_DEVICE, Placement

# Blocks per call. A fork of n samples copies n-1 blocks, and padding is gathered too; a sequence that is
# swapped moves many.
_FEW, _MANY = 8, 64


class HostPool:
    """One KV group's blocks in host memory.

    Args:
        layout: Of the group's device pool; only `num_blocks` differs here.
        num_blocks: Host blocks, numbered from 0: the host has no null block.
        devices: That have a part of this layout each.

    Attributes:
        data: [num_blocks, L, B, devices * width] in the pool's dtype. Pages are taken from the system when first
            written.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, devices: int = 1) -> None:
        shape = (num_blocks, layout.num_layers, layout.block_size, devices * layout.width)
        self.data = np.empty(shape, jax.numpy.dtype(layout.storage))

    @property
    def block_bytes(self) -> int:
        return int(self.data[:1].nbytes)


class BlockCopies:
    """Runs a plan's copies, batch by batch, in few compiled shapes; device pools are updated in place.

    Args:
        layouts: Of a device's part, one per KV group.
        host_blocks: Host blocks per group; 0: plans hold no swaps.
        compiling: Takes the seconds of programs that have to be compiled.
        place: Where the pools are; blocks on the host hold the parts of this process's devices side by side.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        host_blocks: int = 0,
        compiling: CompileClock | None = None,
        place: Placement = ONE_DEVICE,
    ) -> None:
        self.host_blocks = host_blocks
        self._place = place
        self.hosts = tuple(HostPool(layout, host_blocks, place.num_here) for layout in layouts)
        self._call = (compiling or CompileClock()).call
        self._copy = place.program(copy_blocks, ("pool", "whole", "whole"), "pool", donate=(0,))
        self._gather = place.program(gather_blocks, ("pool", "whole"), "blocks")
        self._scatter = place.program(scatter_blocks, ("pool", "whole", "blocks"), "pool", donate=(0,))

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return sum(f._cache_size() for f in (self._copy, self._gather, self._scatter))

    def warm_up(self, pools: tuple[KVPool, ...]) -> tuple[KVPool, ...]:
        """Compile what copies may need, by copying nothing."""
        out = []
        for pool, host in zip(pools, self.hosts, strict=True):
            none = np.full(_FEW, -1, np.int32)
            pool = self._call(self._copy, pool, none, none)
            for size in (_FEW, _MANY) if self.host_blocks else ():
                none = np.full(size, -1, np.int32)
                blocks = np.zeros((host.data.shape[1], size, *host.data.shape[2:]), host.data.dtype)
                self._call(self._gather, pool, none)
                pool = self._call(self._scatter, pool, none, self._place.blocks_of(blocks))
            out.append(pool)
        return tuple(out)

    def run(self, pools: tuple[KVPool, ...], plan: CopyPlan) -> tuple[KVPool, ...]:
        """The pools after the plan's copies; swap-outs have reached the host when it returns.

        Raises:
            ValueError: A swap names a host block that is not there.
        """
        for batch in plan.batches:
            pool = self._run(pools[batch.group], batch)
            pools = (*pools[: batch.group], pool, *pools[batch.group + 1 :])
        return pools

    def _run(self, pool: KVPool, batch: CopyBatch) -> KVPool:
        if batch.kind == "cow":
            for part, ids in _slices(batch.src, (_FEW,)):
                pool = self._call(self._copy, pool, ids, _padded(batch.dst[part], len(ids)))
            return pool
        host = self.hosts[batch.group].data
        slots = batch.dst if batch.kind == "swap_out" else batch.src
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(host):
            raise ValueError(
                f"{batch.kind} of host blocks {slots.tolist()}: the runner has {len(host)}; build the manager "
                "and the runner with the same host_blocks"
            )
        if batch.kind == "swap_out":
            host[batch.dst] = self.read(pool, batch.src)
            return pool
        return self.write(pool, batch.dst, host[batch.src])

    def read(self, pool: KVPool, ids: np.ndarray) -> np.ndarray:
        """Blocks of all layers on the host: i32[C] → [C, L, B, devices here * width]."""
        layout = pool.layout
        shape = (len(ids), layout.num_layers, layout.block_size, self._place.num_here * layout.width)
        out = np.empty(shape, jax.numpy.dtype(layout.storage))
        for part, padded in _slices(ids, (_FEW, _MANY)):
            blocks = self._place.own_blocks(self._call(self._gather, pool, padded))
            out[part] = blocks.transpose(1, 0, 2, 3)[: len(out[part])]
        return out

    def write(self, pool: KVPool, ids: np.ndarray, blocks: np.ndarray) -> KVPool:
        """Put what `read` returned into blocks i32[C]; the pool is updated in place.

        Args:
            pool: Donated.
            ids: None twice.
            blocks: [C, L, B, devices here * width], not changed afterwards.
        """
        for part, padded in _slices(ids, (_FEW, _MANY)):
            full = np.zeros((blocks.shape[1], len(padded), *blocks.shape[2:]), blocks.dtype)
            full[:, : len(blocks[part])] = blocks[part].transpose(1, 0, 2, 3)
            pool = self._call(self._scatter, pool, padded, self._place.blocks_of(full))
        return pool


def _slices(ids: np.ndarray, sizes: tuple[int, ...]) -> Iterator[tuple[slice, np.ndarray]]:
    """Cut ids into (where, padded ids) of the given sizes, the largest while they fill it."""
    at = 0
    while at < len(ids):
        size = next((s for s in sizes if len(ids) - at <= s), sizes[-1])
        part = slice(at, at + size)
        yield part, _padded(ids[part], size)
        at += size


def _padded(ids: Any, size: int) -> np.ndarray:
    out = np.full(size, -1, np.int32)
    out[: len(ids)] = ids
    return out
