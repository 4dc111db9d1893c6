"""Where arrays live and programs run: on one device, or dealt out to several by the rules of `models.sharding`.

    step:  weights, pool, batch ──► each device: its heads, its part of the MLP, its tokens ──► drawn tokens, pool
                                    all-reduce behind `out`, all-reduce behind `down`, one exchange of who is best

Programs name what they are given: "weights", "pool" (cut on its minor axis), "blocks" (copies out of it), "logits" (cut
by token) and "whole" (the same on every device). The place of every result is fixed: else the pool came back whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from pagedjax.kernels import KVLayout, KVPool, make_pool
from pagedjax.kernels.layout import stored_fill
from pagedjax.models.config import ModelConfig
from pagedjax.models.dealing import Parts
from pagedjax.models.sharding import AXIS, Cut, rule_of
from pagedjax.runtime.vocabulary import WHOLE, CutVocabulary, Vocabulary

Array = Any
Params = dict[str, Any]
Ask = Callable[[], Mapping[int, bytes | bytearray]]  # what the other processes hold, by process
_SPECS = {
    "pool": Spec(None, None, AXIS),
    "blocks": Spec(None, None, None, AXIS),
    "logits": Spec(None, AXIS),
    "whole": Spec(),
}


class Placement(Protocol):
    """What the runner asks of its devices.

    Attributes:
        devices: How many.
        cut: How the model is dealt out; None on one device.
        vocabulary: What the columns of a program's logits are.
    """

    devices: int
    vocabulary: Vocabulary

    @property
    def cut(self) -> Cut | None: ...

    @property
    def num_here(self) -> int:
        """Devices of this process."""
        ...

    def own_blocks(self, blocks: Array) -> np.ndarray:
        """The parts of blocks f[L, C, B, devices * width] that this process's devices hold, on the host."""
        ...

    def blocks_of(self, blocks: np.ndarray) -> Array:
        """The opposite of `own_blocks`, as programs take it."""
        ...

    def all_blocks(self, own: np.ndarray, ask: Ask | None) -> np.ndarray:
        """Blocks [..., devices here * width] with the parts of all devices, what others hold asked for."""
        ...

    def blocks_for(self, process: int, blocks: np.ndarray) -> np.ndarray:
        """Of blocks [..., devices * width] what a process's devices hold."""
        ...

    def layout(self, layout: KVLayout) -> KVLayout:
        """A device's part of a pool, from the pool of the whole model."""
        ...

    def make_pool(self, layout: KVLayout, fill: float = 0.0) -> KVPool:
        """An empty pool of a device's layout, on all of them."""
        ...

    def zeros(self, size: int) -> Array:
        """i32[size] of zeros, the same on every device."""
        ...

    def pool_shape(self, layout: KVLayout) -> KVPool:
        """`make_pool` without its array, to lower programs for."""
        ...

    def program(
        self, fn: Callable[..., Any], args: Sequence[str], results: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        """A jitted function of named arguments; `results` is a pytree of such names."""
        ...

    def put(self, params: Params) -> Params:
        """Weights where they belong."""
        ...

    def holds(self, leaf: Any) -> bool:
        """Whether a leaf is where it belongs already, and in parts where those are cut."""
        ...

    def own_part(self, path: tuple[str, ...], leaf: Array) -> np.ndarray:
        """What this process's devices hold of a leaf, side by side, on the host."""
        ...

    def parts_for(self, process: int, path: tuple[str, ...], leaf: np.ndarray) -> list[np.ndarray]:
        """What a process's devices hold of a whole leaf, as `join` takes it."""
        ...

    def join(self, path: tuple[str, ...], shape: tuple[int, ...], buffers: Sequence[np.ndarray]) -> Array:
        """A leaf of this one-device shape in its place, from this process's parts."""
        ...

    def whole(self, path: tuple[str, ...], leaf: Array, ask: Ask | None = None) -> Array:
        """A leaf as one device would hold it; `ask` gets what other processes hold of it.

        Raises:
            ValueError: Others hold a part, and there is no `ask`.
        """
        ...

    def whole_heads(self, blocks: np.ndarray, layout: KVLayout) -> np.ndarray:
        """Blocks [..., width] as one device's pool of this layout would hold them."""
        ...

    def own_heads(self, blocks: np.ndarray, layout: KVLayout) -> np.ndarray:
        """The opposite of `whole_heads`."""
        ...


class OneDevice:
    """Programs and arrays as jax makes them."""

    devices = 1
    cut: Cut | None = None
    vocabulary: Vocabulary = WHOLE
    num_here = 1

    def own_blocks(self, blocks: Array) -> np.ndarray:
        return np.asarray(blocks)

    def blocks_of(self, blocks: np.ndarray) -> Array:
        return blocks

    def all_blocks(self, own: np.ndarray, ask: Ask | None) -> np.ndarray:
        return own

    def blocks_for(self, process: int, blocks: np.ndarray) -> np.ndarray:
        return blocks

    def layout(self, layout: KVLayout) -> KVLayout:
        return layout

    def make_pool(self, layout: KVLayout, fill: float = 0.0) -> KVPool:
        return make_pool(layout, fill)

    def zeros(self, size: int) -> Array:
        return jnp.zeros(size, jnp.int32)

    def pool_shape(self, layout: KVLayout) -> KVPool:
        return KVPool(jax.ShapeDtypeStruct(layout.shape, layout.storage), layout)  # type: ignore[arg-type]

    def program(
        self, fn: Callable[..., Any], args: Sequence[str], results: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        return jax.jit(fn, donate_argnums=donate)

    def put(self, params: Params) -> Params:
        return params

    def holds(self, leaf: Any) -> bool:
        return True

    def own_part(self, path: tuple[str, ...], leaf: Array) -> np.ndarray:
        return np.asarray(leaf)

    def parts_for(self, process: int, path: tuple[str, ...], leaf: np.ndarray) -> list[np.ndarray]:
        return [leaf]

    def join(self, path: tuple[str, ...], shape: tuple[int, ...], buffers: Sequence[np.ndarray]) -> Array:
        return buffers[0]

    def whole(self, path: tuple[str, ...], leaf: Array, ask: Ask | None = None) -> Array:
        return leaf

    def whole_heads(self, blocks: np.ndarray, layout: KVLayout) -> np.ndarray:
        return blocks

    def own_heads(self, blocks: np.ndarray, layout: KVLayout) -> np.ndarray:
        return blocks


ONE_DEVICE: Placement = OneDevice()


class DeviceMesh:
    """n devices in a row.

    Args:
        model: The whole model.
        devices: At least two, in the order of their parts.

    Attributes:
        mesh: The jax mesh, of one axis.

    Raises:
        ModelError: The model cannot be dealt out to so many; names the numbers that work.
    """

    def __init__(self, model: ModelConfig, devices: Sequence[Any]) -> None:
        self.devices = len(devices)
        self.cut = Cut(model, self.devices)
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.vocabulary: Vocabulary = CutVocabulary(AXIS, self.devices, model.vocab_size)

    def layout(self, layout: KVLayout) -> KVLayout:
        return dataclasses.replace(layout, num_kv_heads=self.cut.kv_heads)

    def sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def spec(self, path: tuple[str, ...]) -> Spec:
        """How a leaf is cut."""
        axis = rule_of(path).axis
        return Spec() if axis is None else Spec(*[None] * axis, AXIS)

    def make_pool(self, layout: KVLayout, fill: float = 0.0) -> KVPool:
        rows, size, width = layout.shape
        shape = (rows, size, width * self.devices)
        data = jnp.full(
            shape, stored_fill(layout, fill), layout.storage, device=self.sharding(_SPECS["pool"])
        )
        return KVPool(data, layout)

    def zeros(self, size: int) -> Array:
        return jnp.zeros(size, jnp.int32, device=self.sharding(_SPECS["whole"]))

    def pool_shape(self, layout: KVLayout) -> KVPool:
        rows, size, width = layout.shape
        where = self.sharding(_SPECS["pool"])
        data = jax.ShapeDtypeStruct((rows, size, width * self.devices), layout.storage, sharding=where)
        return KVPool(data, layout)  # type: ignore[arg-type]

    def program(
        self, fn: Callable[..., Any], args: Sequence[str], results: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        def specs(names: Any) -> Any:
            return jax.tree.map(self._specs_of, names)

        mapped = jax.shard_map(
            fn, mesh=self.mesh, in_specs=tuple(specs(list(args))), out_specs=specs(results), check_vma=False
        )
        places = jax.tree.map(self.sharding, specs(results), is_leaf=lambda x: isinstance(x, Spec))
        return jax.jit(mapped, donate_argnums=donate, out_shardings=places)

    def _specs_of(self, name: str) -> Any:
        return self._weights if name == "weights" else _SPECS[name]

    # ------------------------------------------------------------- weights

    @property
    def _weights(self) -> Any:
        from pagedjax.models.decoder import abstract_params

        return _map_leaves(lambda path, leaf: self.spec(path), abstract_params(self.cut.config))

    def holds(self, leaf: Any) -> bool:
        where = getattr(leaf, "sharding", None)
        return isinstance(where, NamedSharding) and where.mesh == self.mesh

    def put(self, params: Params) -> Params:
        """Whole leaves dealt out, each device's part read from them; leaves in their place stay."""
        tied: dict[int, Array] = {}

        def place(path: tuple[str, ...], leaf: Any) -> Any:
            if self.holds(leaf):
                return leaf
            if id(leaf) not in tied:
                tied[id(leaf)] = self._deal(path, leaf)
            return tied[id(leaf)]

        return _map_leaves(place, params)

    def _deal(self, path: tuple[str, ...], leaf: Any) -> Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape, where = self.cut.shape(path, leaf.shape), self.sharding(self.spec(path))
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)
        host = np.asarray(leaf)
        return self.join(path, host.shape, self.parts_for(jax.process_index(), path, host))

    def parts_for(self, process: int, path: tuple[str, ...], leaf: np.ndarray) -> list[np.ndarray]:
        parts = self._parts(process, path, leaf.shape)
        buffers = parts.allocate(leaf.dtype)
        parts.put(buffers, np.arange(leaf.shape[0]), leaf)
        return buffers

    def _of(self, process: int) -> list[int]:
        """Places in the row of a process's devices."""
        return [i for i, device in enumerate(self.mesh.devices) if device.process_index == process]

    @property
    def _own(self) -> list[tuple[int, Any]]:
        """(place in the row, device) of this process's devices."""
        return [(i, self.mesh.devices[i]) for i in self._of(jax.process_index())]

    def parts(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Parts:
        """What this process's devices hold of a leaf of this one-device shape."""
        return self._parts(jax.process_index(), path, shape)

    def _parts(self, process: int, path: tuple[str, ...], shape: tuple[int, ...]) -> Parts:
        rule = rule_of(path)
        width = 0 if rule.axis is None else self.cut.width(path, shape[rule.axis])
        return Parts(shape, rule.axis, [rule.pieces(self.cut, i) for i in self._of(process)], width)

    def join(self, path: tuple[str, ...], shape: tuple[int, ...], buffers: Sequence[np.ndarray]) -> Array:
        """The array over all devices from the buffers of `parts`, which must not be changed afterwards."""
        own = self._own
        if len(buffers) < len(own):  # one buffer for all: the leaf is whole everywhere
            buffers = [buffers[0]] * len(own)
        arrays = [jax.device_put(buffer, device) for buffer, (_, device) in zip(buffers, own, strict=True)]
        where = self.sharding(self.spec(path))
        return jax.make_array_from_single_device_arrays(self.cut.shape(path, shape), where, arrays)

    def whole(self, path: tuple[str, ...], leaf: Array, ask: Ask | None = None) -> Array:
        """A leaf as one device would hold it, on the host: pieces back in their order, padding left out."""
        own, axis = self.own_part(path, leaf), rule_of(path).axis
        if axis is None:
            return own
        if ask is None and self.num_here < self.devices:
            raise ValueError(
                f"weights {'/'.join(path)}: lie on several processes; process 0 reads them, with all of them running"
            )
        host = self._all_parts(own, axis, ask)
        width = host.shape[axis] // self.devices
        found: dict[tuple[int, int], np.ndarray] = {}
        for device in range(self.devices):
            at = device * width
            for start, stop in rule_of(path).pieces(self.cut, device):
                found[start, stop] = host[(slice(None),) * axis + (slice(at, at + stop - start),)]
                at += stop - start
        return np.concatenate([found[piece] for piece in sorted(found)], axis)

    def own_part(self, path: tuple[str, ...], leaf: Array) -> np.ndarray:
        axis = rule_of(path).axis
        return np.asarray(leaf.addressable_shards[0].data) if axis is None else self._own_parts(leaf, axis)

    def _own_parts(self, array: Array, axis: int) -> np.ndarray:
        """What this process's devices hold of an array that is cut along an axis, side by side."""
        if self.num_here == self.devices:
            return np.asarray(array)
        held = {shard.device: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(held[device]) for _, device in self._own], axis)

    def _all_parts(self, own: np.ndarray, axis: int, ask: Ask | None) -> np.ndarray:
        """What `_own_parts` gives, with what the other processes answer, in the devices' order."""
        if ask is None or self.num_here == self.devices:
            return own
        axis %= own.ndim
        before, after = own.shape[:axis], own.shape[axis + 1 :]
        width = own.shape[axis] // self.num_here
        out = np.empty((*before, self.devices, width, *after), own.dtype)
        for process, data in [(jax.process_index(), own), *ask().items()]:
            places = self._of(process)
            part = data if isinstance(data, np.ndarray) else np.frombuffer(data, own.dtype)
            out[(slice(None),) * axis + (places,)] = part.reshape(*before, len(places), width, *after)
        return out.reshape(*before, self.devices * width, *after)

    # ------------------------------------------------------------- blocks on the host

    @property
    def num_here(self) -> int:
        return len(self._own)

    def own_blocks(self, blocks: Array) -> np.ndarray:
        return self._own_parts(blocks, -1)

    def all_blocks(self, own: np.ndarray, ask: Ask | None) -> np.ndarray:
        return self._all_parts(own, -1, ask)

    def blocks_for(self, process: int, blocks: np.ndarray) -> np.ndarray:
        parts = blocks.reshape(*blocks.shape[:-1], self.devices, -1)[..., self._of(process), :]
        return parts.reshape(*blocks.shape[:-1], -1)

    def blocks_of(self, blocks: np.ndarray) -> Array:
        if self.num_here == self.devices:
            return blocks
        return jax.make_array_from_process_local_data(self.sharding(_SPECS["blocks"]), blocks)

    def whole_heads(self, blocks: np.ndarray, layout: KVLayout) -> np.ndarray:
        """Of devices that hold the same KV head the first one's copy is taken."""
        parts = blocks.reshape(*blocks.shape[:-1], self.devices, -1)[..., :: self.cut.kv_copies, :]
        out = np.zeros((*blocks.shape[:-1], layout.width), blocks.dtype)
        for own, all_heads in self._lanes(layout):
            heads = parts[..., own]
            out[..., all_heads] = heads.reshape(*heads.shape[:-2], -1)
        return out

    def own_heads(self, blocks: np.ndarray, layout: KVLayout) -> np.ndarray:
        part = self.layout(layout)
        out = np.zeros((*blocks.shape[:-1], self.devices, part.width), blocks.dtype)
        for own, all_heads in self._lanes(layout):
            heads = blocks[..., all_heads].reshape(*blocks.shape[:-1], -1, own.stop - own.start)
            out[..., own] = np.repeat(heads, self.cut.kv_copies, axis=-2)
        return out.reshape(*blocks.shape[:-1], self.devices * part.width)

    def _lanes(self, layout: KVLayout) -> Iterator[tuple[slice, slice]]:
        """Of each part of a head (key, value, scales): its lanes in a device's row, and in one device's alone."""
        at, own, whole = 0, self.cut.kv_heads, layout.num_kv_heads
        for lanes in layout.head_parts:
            end = at + lanes
            yield slice(at * own, end * own), slice(at * whole, end * whole)
            at = end


def make_place(model: ModelConfig, tensor_parallel: int) -> Placement:
    """Where a model runs: the first so many of this process's devices.

    Args:
        model: The whole model.
        tensor_parallel: The `runtime.tensor_parallel` setting.

    Raises:
        ValueError: There are fewer devices, or the model cannot be dealt out to so many; names the numbers that work.
    """
    dealer = make_dealer(tensor_parallel)
    return ONE_DEVICE if dealer is None else dealer(model)


def make_dealer(tensor_parallel: int) -> Callable[[ModelConfig], DeviceMesh] | None:
    """For `load_model`: weights are dealt out to so many devices while they are read; None for one. As `make_place`."""
    if tensor_parallel == 1:
        return None
    check_devices(tensor_parallel)
    return lambda model: DeviceMesh(model, jax.devices()[:tensor_parallel])


def check_devices(tensor_parallel: int) -> None:
    """Refuse more devices than there are, before a model is loaded.

    Raises:
        ValueError: Says how many there are.
    """
    have = jax.devices() if tensor_parallel > 1 else [None]
    if jax.process_count() > 1 and tensor_parallel != len(jax.devices()):
        raise ValueError(
            f"runtime.tensor_parallel={tensor_parallel}: {jax.process_count()} processes have {len(jax.devices())} "
            f"devices, and all of them take part; try {len(jax.devices())}"
        )
    if tensor_parallel > len(have):
        platform = getattr(have[0], "platform", "")
        more = f", or set JAX_NUM_CPU_DEVICES={tensor_parallel}" if platform == "cpu" else ""
        here = f"{len(have)} {platform} device" + ("s are" if len(have) > 1 else " is")
        upto = f"at most {len(have)}" if len(have) > 1 else "1"
        raise ValueError(f"runtime.tensor_parallel={tensor_parallel}: {here} here; try {upto}{more}")


def _map_leaves(fn: Callable[[tuple[str, ...], Any], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, dict):
        return {key: _map_leaves(fn, value, (*path, key)) for key, value in tree.items()}
    return fn(path, tree)
