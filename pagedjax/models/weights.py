"""Weights: from tensor files into the decoder's leaves, and to and from orbax checkpoints.

Leaves are filled one at a time and in short strips, straight into the buffer that becomes the
array, in the dtype and on the device it will have. The peak is the result and one strip. Where leaves are dealt out to
several devices, a process reads and holds its own devices' parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.dealing import Dealer, Sample
from pagedjax.models.decoder import abstract_params
from pagedjax.models.families import Leaf, Names, Part, leaves_of
from pagedjax.models.formats import STORED, TensorFile

Params = dict[str, Any]
Report = Callable[[int], None]  # told the bytes of each leaf when it is done
# (path, shape) of a leaf → where it lives; None puts it on the default device.
ShardingRule = Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding]

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
_CHECKPOINT_CHUNK_BYTES = 4 << 20
_HEAD = ("lm_head", "weight")  # the embedding itself where the model ties them


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of a weight dtype's name.

    Raises:
        ModelError: It is not one we hold weights in.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r}: weights are {', '.join(DTYPES)}; use float32 on CPU")
    return np.dtype(DTYPES[dtype])


def read_params(
    file: TensorFile,
    config: ModelConfig,
    names: Names,
    *,
    dtype: str = "float32",
    report: Report | None = None,
    sharding: ShardingRule | None = None,
    dealer: Dealer | None = None,
    sample: Sample | None = None,
) -> Params:
    """Fill the decoder's leaves from a tensor file.

    Args:
        file: An opened GGUF or safetensors model.
        config: Its shapes; `tie_embeddings` says that the output matrix is the embedding.
        names: The family's row for this format.
        dtype: Of the result, but for what the decoder holds in float32 whatever it is.
        report: Called with the bytes of each finished leaf.
        sharding: (path, shape) → sharding; default the default device.
        dealer: Deals leaves out to devices; then `sharding` has no say.
        sample: Gets a row of each tensor.

    Returns:
        Nested dict of arrays, shaped as `abstract_params(config, dtype)` where nothing is dealt out.

    Raises:
        ModelError: A tensor is missing, unexpected, or of another shape; nothing was allocated then.
    """
    numpy_dtype(dtype)
    kinds = {name: np.dtype(leaf.dtype) for name, leaf in flat(abstract_params(config, dtype))}
    if dealer is not None:
        _refuse_dealt(dtype)
    leaves = leaves_of(config, names, tied=config.tie_embeddings)
    check_tensors(file, leaves, names, tied=config.tie_embeddings)
    # Strips of float32 grow with the model: few calls for a large one, little beside a small one.
    strip = min(max(sum(math.prod(leaf.shape) for leaf in leaves) // 64, 1 << 20), 64 << 20)
    params: Params = {}
    for leaf in leaves:
        kind = kinds["/".join(leaf.path)]
        if sample is not None:
            for part in leaf.parts:
                shape = file.tensors[part.name].shape
                sample.add(part.name, shape, functools.partial(file.rows, part.name))
        where = sharding(leaf.path, leaf.shape) if sharding else None
        if config.tie_embeddings and leaf.path == _HEAD:
            head = (
                params["embed"] if dealer else jax.device_put(params["embed"], where)
            )  # no copy on its device
            set_leaf(params, leaf.path, head)
            if dtype == "int8":
                set_leaf(params, scale_path(leaf.path), params["embed_scale"])
            if report:
                report(math.prod(leaf.shape) * kind.itemsize)
            continue
        if dealer is not None:
            set_leaf(params, leaf.path, _deal(dealer, file, leaf, kind, strip))
            if report:
                report(math.prod(leaf.shape) * kind.itemsize)
            continue
        buffer = _aligned_empty(leaf.shape, np.dtype(np.float32) if kind == np.int8 else kind)
        _fill(buffer, file, leaf, strip)
        if kind == np.int8:
            buffer, scales = quantise(buffer)
            set_leaf(params, scale_path(leaf.path), jax.device_put(scales, where))
        set_leaf(params, leaf.path, jax.device_put(buffer, where))
        if report:
            report(math.prod(leaf.shape) * kind.itemsize)
    return params


# ---- int8 ------------------------------------------------------------------------------------------------


def quantise(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix f32[O, D] as int8[O, D] and the scale of each row, f32[O]: 127 of them are the row's largest entry."""
    scales = np.abs(matrix).max(axis=1, initial=0.0).astype(np.float32) / np.float32(127)
    whole = _aligned_empty(matrix.shape, np.dtype(np.int8))
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    step = max(1, (1 << 20) // max(1, matrix.shape[1]))
    for at in range(0, len(matrix), step):  # in strips: the rounded numbers are wide for a moment
        whole[at : at + step] = np.rint(matrix[at : at + step] * inverse[at : at + step, None])
    return whole, scales


def scale_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Where the scales of an int8 matrix lie."""
    return (*path[:-1], f"{path[-1]}_scale")


def quantised(params: Params, config: ModelConfig) -> Params:
    """Parameters in float32 as those of dtype int8; a tied output matrix stays the embedding itself."""
    out: Params = {}
    wanted = dict(flat(abstract_params(config, "int8")))
    for name, leaf in flat(params):
        path = tuple(name.split("/"))
        if wanted[name].dtype != jnp.int8:
            set_leaf(out, path, leaf)
            continue
        if path == _HEAD and config.tie_embeddings:
            whole, scales = out["embed"], out["embed_scale"]
        else:
            whole, scales = map(jax.device_put, quantise(np.asarray(leaf, np.float32)))
        set_leaf(out, path, whole)
        set_leaf(out, scale_path(path), scales)
    return out


def _refuse_dealt(dtype: str) -> None:
    if dtype == "int8":
        raise ModelError("dtype='int8': runs on one device; use float32 or bfloat16 on several")


def check_tensors(file: TensorFile, leaves: list[Leaf], names: Names, *, tied: bool) -> None:
    """Compare what the decoder needs with what the file has, before anything is allocated.

    Raises:
        ModelError: Naming the first tensor that is missing, of another shape, or left over.
    """
    wanted = {part.name: part for leaf in leaves for part in leaf.parts}
    for name, part in wanted.items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelError(
                f"{name!r} is missing: the config asks for it; the file is incomplete or of another architecture"
            )
        if info.kind not in STORED:
            raise ModelError(
                f"{name!r} is stored as {info.kind}: weights must be one of {', '.join(STORED)}; convert the file"
            )
        if info.shape != part.stored_shape:
            raise ModelError(
                f"{name!r} has shape {info.shape}: the config asks for {part.stored_shape}; "
                "config and weights belong to different models"
            )
    spare = f"{names.lm_head}.weight" if tied else ""
    layers = len({leaf.path[0] for leaf in leaves if leaf.path[0].startswith("layer_")})
    behind = tuple(names.layer.format(l=layers + i) for i in range(names.spare_layers)) or ("\0",)
    for name in file.tensors:
        if name in wanted or name == spare or name.startswith(behind):
            continue
        if not name.endswith(names.ignored or "\0"):
            raise ModelError(
                f"{name!r} is not part of this decoder: leaving it out would change the model's answers; "
                "the architecture or the number of layers differs from the config"
            )


# ---- orbax -----------------------------------------------------------------------------------------------


def alone() -> ocp.options.MultiprocessingOptions:
    """For orbax in a process of several, which otherwise waits until all of them read or write the same."""
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})


def checkpoint_reader() -> ocp.Checkpointer:
    """A reader of trees of arrays, for this process alone."""
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone())
    return ocp.Checkpointer(handler, multiprocessing_options=alone())


def save_params(path: Path, params: Params) -> None:
    """Write the leaves as an orbax checkpoint; `path` must not exist yet."""
    # Small chunks: a leaf is read chunk by chunk, so no second copy of a large one is held.
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHECKPOINT_CHUNK_BYTES), params)
    with ocp.StandardCheckpointer(multiprocessing_options=alone()) as checkpointer:
        checkpointer.save(path.absolute(), params, save_args=save_args)
        checkpointer.wait_until_finished()


def restore_params(
    path: Path,
    config: ModelConfig,
    *,
    dtype: str = "float32",
    sharding: ShardingRule | None = None,
    dealer: Dealer | None = None,
    sample: Sample | None = None,
) -> Params:
    """The leaves of an orbax checkpoint, bitwise as saved where the dtype is the stored one.

    Args:
        path: What `save_params` wrote.
        config: The model it must hold.
        dtype: Of the result; another than the stored one is cast while reading.
        sharding: (path, shape) → sharding; default the default device.
        dealer: Deals leaves out to devices, read one at a time; then `sharding` has no say.
        sample: Gets a row of each leaf that is dealt out.

    Raises:
        ModelError: It holds another model (named by the first path that differs), or cannot be read.
    """
    numpy_dtype(dtype)
    if dealer is not None:
        _refuse_dealt(dtype)
    if dtype == "int8" and not _holds_int8(path):
        return quantised(restore_params(path, config, sharding=sharding), config)
    if dtype != "int8" and _holds_int8(path):
        raise ModelError(
            f"{path}: holds int8 weights: dtype must be int8; use it, or convert the model again"
        )
    wanted = dict(flat(abstract_params(config, dtype)))
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target: Params = {}
    for name, leaf in wanted.items():
        keys = tuple(name.split("/"))
        where = sharding(keys, leaf.shape) if sharding else default
        set_leaf(target, keys, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where))
    params: Params = {}
    try:
        with checkpoint_reader() as checkpointer:
            stored = checkpointer.metadata(path.absolute()).item_metadata.tree
            found = dict(flat(stored))
            _same_tree(path, wanted, found)
            # One layer at a time: restored at once, all leaves' read buffers would be alive together.
            for key, subtree in target.items():
                if config.tie_embeddings and key == _HEAD[0]:
                    continue
                if dealer is not None:
                    params[key] = _restore_dealt(checkpointer, path, {key: subtree}, found, dealer, sample)[
                        key
                    ]
                    continue
                part = {key: subtree}
                args = ocp.checkpoint_utils.construct_restore_args(part)
                request = ocp.args.PyTreeRestore(item=part, restore_args=args, partial_restore=True)
                params[key] = checkpointer.restore(path.absolute(), args=request)[key]
    except ModelError:
        raise
    except Exception as error:  # damaged files surface as almost any type from the storage library
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(f"{path}: {first}: must be a whole checkpoint; convert the model again") from error
    if dealer is None:
        for name, leaf in flat(params):
            _check_finite(name, jnp.isfinite(leaf), found[name], numpy_dtype(dtype))
    if config.tie_embeddings and dealer is not None:
        set_leaf(params, _HEAD, params["embed"])
    elif config.tie_embeddings:
        where = target[_HEAD[0]][_HEAD[1]].sharding
        set_leaf(params, _HEAD, jax.device_put(params["embed"], where))
        if dtype == "int8":
            set_leaf(params, scale_path(_HEAD), params["embed_scale"])
    return params


def _restore_dealt(
    checkpointer: Any, path: Path, target: Params, stored: Params, dealer: Dealer, sample: Sample | None
) -> Params:
    """Leaves of a checkpoint, each read whole and dealt out before the next."""
    out: Params = {}
    for name, leaf in flat(target):
        keys = tuple(name.split("/"))
        part: Params = {}
        set_leaf(part, keys, leaf)
        wanted = ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        args = jax.tree.map(lambda _, wanted=wanted: wanted, part)
        request = ocp.args.PyTreeRestore(item=part, restore_args=args, partial_restore=True)
        array: Any = checkpointer.restore(path.absolute(), args=request)
        for key in keys:
            array = array[key]
        # Here, and not on the devices: all processes would have to do it at once.
        _check_finite(name, np.isfinite(array), stored[name], array.dtype)
        if sample is not None:
            sample.add(name, leaf.shape, functools.partial(_rows_between, array))
        parts = dealer.parts(keys, leaf.shape)
        buffers = parts.allocate(array.dtype)
        parts.put(buffers, np.arange(leaf.shape[0]), array)
        set_leaf(out, keys, dealer.join(keys, leaf.shape, buffers))
    return out


def _rows_between(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    return array[start:stop]


def _check_finite(name: str, finite: Any, stored: Any, dtype: np.dtype) -> None:
    """Refuse a leaf that a cast to a narrower dtype made infinite, or that never was finite."""
    if not bool(finite.all()):
        kind = np.dtype(stored.dtype)
        remedy = "convert the model again" if kind == dtype else f"it is stored as {kind}; use that dtype"
        raise ModelError(
            f"{name} holds values that are not finite in {dtype.name}: weights must be; {remedy}"
        )


def _holds_int8(path: Path) -> bool:
    """Whether a checkpoint's embedding is stored as int8; one that cannot be read holds none, and is refused later."""
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            stored = checkpointer.metadata(path.absolute()).item_metadata.tree
            return bool(np.dtype(stored["embed"].dtype) == np.int8)
    except Exception:
        return False


def _same_tree(path: Path, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            raise ModelError(
                f"{path}: {name} is missing: the config asks for it; this is another model's checkpoint"
            )
        if name not in wanted:
            raise ModelError(
                f"{path}: {name} is not in the config's tree; this is another model's checkpoint"
            )
        if tuple(stored[name].shape) != wanted[name].shape:
            raise ModelError(
                f"{path}: {name} has shape {tuple(stored[name].shape)}: the config asks for {wanted[name].shape}; "
                "this is another model's checkpoint"
            )


# ---- trees and buffers -----------------------------------------------------------------------------------


def leaf_of(params: Params, path: tuple[str, ...]) -> Any:
    """The leaf of nested dicts at a path."""
    for key in path:
        params = params[key]
    return params


def set_leaf(params: Params, path: tuple[str, ...], value: Any) -> None:
    """Put a leaf into nested dicts, making the dicts on the way."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


def flat(params: Params, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """("layer_00/qkv/weight", leaf) for every leaf, in sorted order."""
    for key in sorted(params):
        value = params[key]
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised, on a 64-byte border: XLA:CPU then takes the buffer over instead of copying it.

    Sharing is safe because nobody writes to the buffer after it has been handed over.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _fill(out: np.ndarray, file: TensorFile, leaf: Leaf, strip_bytes: int) -> None:
    at = 0
    for part in leaf.parts:
        target = out[at : at + _height(part)]
        for start, stop in _strips(part, strip_bytes):
            _fill_strip(target, _read_strip(file, part, start, stop, out.dtype), part, start, stop)
        at += _height(part)


def _deal(dealer: Dealer, file: TensorFile, leaf: Leaf, dtype: np.dtype, strip_bytes: int) -> Any:
    """A leaf dealt out: strips that hold nothing of this process's devices are not read."""
    parts = dealer.parts(leaf.path, leaf.shape)
    buffers = parts.allocate(dtype)
    at = 0
    for part in leaf.parts:
        for start, stop in _strips(part, strip_bytes):
            rows = at + (_turned_rows(part) if part.transpose else _rows_of(part, start, stop))
            if not parts.wants(rows):
                continue
            values = _read_strip(file, part, start, stop, dtype)
            if part.transpose:
                parts.put(buffers, rows, values.T, start)
            else:
                parts.put(buffers, rows, values)
        at += _height(part)
    return dealer.join(leaf.path, leaf.shape, buffers)


def _height(part: Part) -> int:
    """Rows of the leaf that a part makes."""
    if part.take:
        size, start, stop = part.take
        return part.shape[0] // size * (stop - start)
    return part.shape[-1] if part.transpose else part.shape[0] - part.skip


def _read_strip(file: TensorFile, part: Part, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Rows of a tensor, finite ones that fit the dtype, with what is added to them.

    Raises:
        ModelError: They are not.
    """
    if part.index is None:
        rows = file.rows(part.name, start, stop)
    else:
        rows = file.rows(part.name, part.index, part.index + 1)[0][start:stop]
    if part.take:
        rows = rows[_taken(part, start, stop)]
    if not np.isfinite(rows).all():
        raise ModelError(
            f"{part.name!r} holds values that are not finite numbers: weights must be; "
            "the file is damaged, download it again"
        )
    _check_fits(part.name, rows, part.add, dtype)
    return rows.astype(np.float32) + np.float32(part.add) if part.add else rows


def _check_fits(name: str, rows: np.ndarray, add: float, dtype: np.dtype) -> None:
    """Refuse finite values that are infinite in the dtype they are held in."""
    if dtype.itemsize >= rows.dtype.itemsize and dtype != np.float16 and not add:
        return
    with np.errstate(over="ignore"):
        most = (np.abs(rows).max() + np.float64(abs(add))).astype(dtype) if rows.size else np.zeros((), dtype)
    if not np.isfinite(most):
        raise ModelError(
            f"{name!r} holds values up to {float(np.abs(rows).max()):.3g}: {dtype.name} ends below; use float32 or "
            "bfloat16"
        )


def _strips(part: Part, strip_bytes: int) -> Iterable[tuple[int, int]]:
    rows = part.shape[0]
    if len(part.shape) == 1 or part.index is not None:  # one of many matrices is small
        return [(part.skip, rows)]
    step = max(1, strip_bytes // (4 * math.prod(part.shape[1:])))
    return [(start, min(start + step, rows)) for start in range(part.skip, rows, step)]


def _taken(part: Part, start: int, stop: int) -> np.ndarray:
    """Which of rows start to stop of a tensor enter."""
    size, first, last = part.take
    at = np.arange(start, stop) % size
    return (at >= first) & (at < last)


def _rows_of(part: Part, start: int, stop: int) -> np.ndarray:
    """Where the rows that enter, of start to stop of a tensor, lie among those that its part makes."""
    rows = np.arange(start, stop)
    if part.take:
        size, first, last = part.take
        rows = rows[_taken(part, start, stop)]
        return rows // size * (last - first) + rows % size - first
    return _half_split(rows, part.head_dim, part.rotated) if part.head_dim else rows - part.skip


def _turned_rows(part: Part) -> np.ndarray:
    """Where the columns of a tensor that holds [in, out] lie among the rows that its part makes."""
    columns = np.arange(_height(part))
    return _half_split(columns, part.head_dim) if part.head_dim else columns


def _fill_strip(target: np.ndarray, rows: np.ndarray, part: Part, start: int, stop: int) -> None:
    if part.transpose and part.head_dim:
        target[_turned_rows(part), start:stop] = rows.T
    elif part.head_dim or part.take:
        target[_rows_of(part, start, stop)] = rows
    elif part.transpose:
        target[:, start:stop] = rows.T
    elif part.head_dim:
        target[_rows_of(part, start, stop)] = rows
    else:
        target[start - part.skip : stop - part.skip] = rows


def _half_split(index: np.ndarray, head_dim: int, rotated: int = 0) -> np.ndarray:
    """Where row 2i + j of a head goes when its pairs lie half its rotated rows apart: i + j * rotated / 2."""
    head, row = np.divmod(index, head_dim)
    rotated = rotated or head_dim
    row = row - (head_dim - rotated)  # below 0: rows in front of the rotated ones
    moved = np.where(row < 0, row, (row % 2) * (rotated // 2) + row // 2)
    return head * head_dim + head_dim - rotated + moved
