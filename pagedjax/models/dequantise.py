"""Quantised safetensors as plain ones: a matrix is worked out of its packed tensors while it is read, strip by strip.

    mxfp4   X_blocks u8[E, out, in/32, 16], X_scales u8[E, out, in/32]: fp4 * 2^(scale - 127), two values a byte, the
            low half first
    fp8     X.weight f8[out, in], X.weight_scale_inv[out/b, in/c]: f8 times the scale of its block
    gptq    X.qweight i32[in/n, out], X.qzeros i32[g, out/n], X.scales[g, out], X.g_idx i32[in]: (q - z - 1) times the
            scale of its group
    awq     X.qweight i32[in, out/8], X.qzeros i32[g, out/8], X.scales[g, out]: (q - z) times the scale of its group; a
            word holds columns 0 2 4 6 1 3 5 7

Activations are not quantised: products are those of the plain weights. What differs from these forms is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pagedjax.models.config import ModelError
from pagedjax.models.config_keys import check_keys
from pagedjax.models.formats import SafetensorsFiles, TensorInfo

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # which column the i-th four bits of a word hold


def unpack(file: SafetensorsFiles, facts: Mapping[str, Any]) -> SafetensorsFiles | Unpacked:
    """The file with its packed matrices as plain ones; itself where it holds none, or the method is not one of ours.

    Args:
        file: An opened folder.
        facts: quantization_config of its config.json.

    Raises:
        ModelError: It is packed by one of these methods in a form that is not plain.
    """
    kinds = {"mxfp4": _Mxfp4, "fp8": _Fp8, "gptq": _Gptq, "awq": _Awq}
    kind = kinds.get(str(facts.get("quant_method")))
    if kind is None:
        return file
    stems = [name.removesuffix(kind.mark) for name in file.tensors if name.endswith(kind.mark)]
    if not stems:
        return file
    check_keys(facts, kind.keys, "quantization_config", no_effect=(*_NOTES, *kind.notes))
    kind.check(facts)
    return Unpacked(file, {stem + kind.name: kind(file, stem, facts) for stem in stems})


class Unpacked:
    """A tensor file some of whose matrices are worked out of packed ones."""

    def __init__(self, file: SafetensorsFiles, matrices: Mapping[str, _Packed]) -> None:
        self._file, self._matrices = file, matrices
        used = {part for matrix in matrices.values() for part in matrix.parts}
        self.tensors: dict[str, TensorInfo] = {n: i for n, i in file.tensors.items() if n not in used}
        for name, matrix in matrices.items():
            if name in self.tensors:
                raise ModelError(f"{name!r} is stored plain and packed: which of them counts? Remove one")
            self.tensors[name] = TensorInfo(matrix.shape, "F32", file.tensors[matrix.parts[0]].path)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries start to stop along the first axis; float32 of a matrix that was packed."""
        if name in self._matrices:
            with np.errstate(
                all="ignore"
            ):  # damaged scales are inf or nan; who reads the rows looks for that
                return self._matrices[name].rows(start, stop)
        return self._file.rows(name, start, stop)


class _Packed:
    """One matrix: `parts` are its tensors, `shape` is that of the plain one.

    `mark` ends the name of the tensor that it is known by, `name` stands there in the plain matrix's.
    """

    mark, name = "", ".weight"
    keys: tuple[str, ...] = ()  # of quantization_config that are read
    notes: tuple[str, ...] = ()  # that change nothing: what the quantiser did, how other programs run it
    shape: tuple[int, ...]
    parts: tuple[str, ...]

    def __init__(self, file: SafetensorsFiles, stem: str, facts: Mapping[str, Any]) -> None:
        self.file, self.stem, self.facts = file, stem, facts

    @classmethod
    def check(cls, facts: Mapping[str, Any]) -> None:
        """Refuse settings of the method that make another form."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """float32 entries along the first axis."""
        raise NotImplementedError

    def part(self, ending: str, rank: int, *kinds: str) -> TensorInfo:
        """What is known of one of the tensors."""
        name = self.stem + ending
        info = self.file.tensors.get(name)
        if info is None:
            self.refuse(f"{name!r} is missing: the packed matrix needs it; download the model again")
        if len(info.shape) != rank or info.kind not in kinds:
            self.refuse(
                f"{name!r} is {info.kind} of shape {info.shape}: must be {' or '.join(kinds)} with {rank} axes; "
                "use the original model"
            )
        return info

    def refuse(self, complaint: str) -> NoReturn:
        """Raise ModelError about a tensor, naming the file that the matrix lies in."""
        raise ModelError(f"{self.file.tensors[self.stem + self.mark].path.name}: {complaint}")

    def fits(self, name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than the matrix asks for."""
        if info.shape != shape:
            self.refuse(
                f"{self.stem + name!r} has shape {info.shape}: the packed matrix asks for {shape}; download the model "
                "again"
            )

    def grouped(self, lanes: int, out: int, words: int) -> tuple[int, int]:
        """Groups of input lanes and lanes of one, by group_size; scales and zero points must be as many."""
        size = lanes if self.facts["group_size"] == -1 else int(self.facts["group_size"])
        groups = -(-lanes // size)
        self.fits(".scales", self.part(".scales", 2, "F16", "BF16", "F32"), (groups, out))
        self.fits(".qzeros", self.part(".qzeros", 2, "I32"), (groups, words))
        return groups, size


# What every method's settings may say beside its own, and that changes nothing: which tensors are packed, files show.
_NOTES = ("quant_method", "modules_to_not_convert", "ignored_layers", "backend", "exllama_config")


def _check_groups(facts: Mapping[str, Any], method: str) -> None:
    size = facts.get("group_size")
    if type(size) is not int or not (size == -1 or 1 <= size <= 1 << 20):
        raise ModelError(
            f"{method}: group_size={size!r}: must be lanes of a group, or -1 for one; mend quantization_config"
        )


def _only(facts: Mapping[str, Any], method: str, **plain: tuple[Any, ...]) -> None:
    """Refuse a setting whose value is not one of the plain ones; a missing one is the first."""
    for key, values in plain.items():
        if facts.get(key, values[0]) not in values:
            raise ModelError(
                f"{method}: {key}={facts[key]!r}: must be {' or '.join(map(repr, values))}; other forms are not read"
            )


class _Mxfp4(_Packed):
    mark, name = "_blocks", ""

    def __init__(self, file: SafetensorsFiles, stem: str, facts: Mapping[str, Any]) -> None:
        super().__init__(file, stem, facts)
        experts, out, groups, width = self.part("_blocks", 4, "U8").shape
        self.fits("_blocks", file.tensors[stem + "_blocks"], (experts, out, groups, 16))
        self.fits("_scales", self.part("_scales", 3, "U8"), (experts, out, groups))
        # As the plain files of the same model hold it: [in, out].
        self.shape, self.parts = (experts, groups * width * 2, out), (stem + "_blocks", stem + "_scales")

    def rows(self, start: int, stop: int) -> np.ndarray:
        blocks, scales = (self.file.rows(part, start, stop) for part in self.parts)
        values = np.empty((*blocks.shape, 2), np.float32)
        values[..., 0], values[..., 1] = _FP4[blocks & 15], _FP4[blocks >> 4]
        experts, out, groups = scales.shape
        scaled = np.ldexp(values.reshape(experts, out, groups, 32), scales.astype(np.int32)[..., None] - 127)
        return scaled.reshape(experts, out, groups * 32).swapaxes(1, 2)


class _Fp8(_Packed):
    mark = ".weight_scale_inv"
    keys = ("fmt", "activation_scheme", "weight_block_size")
    notes = ("scale_fmt", "is_checkpoint_fp8_serialized", "dequantize")

    @classmethod
    def check(cls, facts: Mapping[str, Any]) -> None:
        _only(facts, "fp8", fmt=("e4m3",), activation_scheme=("dynamic",))
        size = facts.get("weight_block_size")
        if not (
            isinstance(size, list)
            and len(size) == 2
            and all(type(n) is int and 1 <= n <= 1 << 16 for n in size)
        ):
            raise ModelError(f"fp8: weight_block_size={size!r}: must be two sizes; other forms are not read")

    def __init__(self, file: SafetensorsFiles, stem: str, facts: Mapping[str, Any]) -> None:
        super().__init__(file, stem, facts)
        self.block: tuple[int, int] = tuple(facts["weight_block_size"])
        self.shape = self.part(".weight", 2, "F8_E4M3").shape
        blocks = tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))
        self.fits(self.mark, self.part(self.mark, 2, "F32", "BF16", "F16"), blocks)
        self.parts = (stem + ".weight", stem + self.mark)

    def rows(self, start: int, stop: int) -> np.ndarray:
        high, wide = self.block
        values = self.file.rows(self.parts[0], start, stop).astype(np.float32)
        first = start // high
        scales = self.file.rows(self.parts[1], first, (stop - 1) // high + 1).astype(np.float32)
        scales = np.repeat(scales, wide, axis=1)[:, : self.shape[1]]
        return values * scales[np.arange(start, stop) // high - first]


@dataclass
class _Group:
    """Scales and zero points of the groups of input lanes, for the output lanes at hand; and each lane's group."""

    scales: np.ndarray
    zeros: np.ndarray
    of_lane: np.ndarray

    def weights(self, numbers: np.ndarray) -> np.ndarray:
        """f32[out, in] from the packed numbers i32[in, out]."""
        shifted = (numbers - self.zeros[self.of_lane]).astype(np.float32)
        return (shifted * self.scales[self.of_lane]).T


class _Gptq(_Packed):
    mark = ".qweight"
    keys = (
        "bits",
        "group_size",
        "desc_act",
        "checkpoint_format",
        "lm_head",
        "dynamic",
        "pack_dtype",
        "is_marlin_format",
    )
    notes = (
        *(
            "sym",
            "damp_percent",
            "damp_auto_increment",
            "static_groups",
            "true_sequential",
            "mse",
            "quantizer",
            "meta",
        ),
        *(
            "act_group_aware",
            "model_name_or_path",
            "model_file_base_name",
            "dataset",
            "tokenizer",
            "batch_size",
        ),
        *(
            "cache_block_outputs",
            "model_seqlen",
            "pad_token_id",
            "max_input_length",
            "use_exllama",
            "disable_exllama",
        ),
        *("use_cuda_fp16", "block_name_to_quantize", "module_name_preceding_first_block"),
        "modules_in_block_to_quantize",
    )

    @classmethod
    def check(cls, facts: Mapping[str, Any]) -> None:
        _only(
            facts,
            "gptq",
            bits=(4, 8, 2),
            checkpoint_format=("gptq", "gptq_v2", None),
            lm_head=(False, None),
            dynamic=(None, {}),
            desc_act=(False, True, None),
            pack_dtype=("int32", None),
            is_marlin_format=(False, None),
        )
        if "bits" not in facts:
            raise ModelError("gptq: bits is missing: must be 2, 4 or 8; mend quantization_config")
        _check_groups(facts, "gptq")

    def __init__(self, file: SafetensorsFiles, stem: str, facts: Mapping[str, Any]) -> None:
        super().__init__(file, stem, facts)
        self.each = 32 // int(facts["bits"])  # numbers a word
        words, out = self.part(".qweight", 2, "I32").shape
        lanes = words * self.each
        self.groups, self.size = self.grouped(lanes, out, -(-out // self.each))
        self.shape, ends = (out, lanes), [".qweight", ".qzeros", ".scales"]
        if f"{stem}.g_idx" in file.tensors or facts.get(
            "desc_act"
        ):  # lanes lie in another order than their groups
            self.fits(".g_idx", self.part(".g_idx", 1, "I32"), (self.shape[1],))
            ends.append(".g_idx")
        self.parts = tuple(stem + ending for ending in ends)

    def rows(self, start: int, stop: int) -> np.ndarray:
        first, last = start // self.each, -(-stop // self.each)
        keep = slice(start - first * self.each, stop - first * self.each)
        lanes = self.shape[1]
        words = self.file.columns(self.parts[0], start, stop)
        numbers = _bits(words, self.each).swapaxes(1, 2).reshape(lanes, -1)
        zeros = _bits(self.file.columns(self.parts[1], first, last), self.each).reshape(self.groups, -1)
        # The first form stores zero points less one.
        more = 0 if self.facts.get("checkpoint_format") == "gptq_v2" else 1
        zeros = zeros[:, keep] + more
        scales = self.file.columns(self.parts[2], start, stop).astype(np.float32)
        if len(self.parts) > 3:
            group = self.file.rows(self.parts[3], 0, lanes)
        else:
            group = np.arange(lanes) // self.size
        if group.min() < 0 or group.max() >= self.groups:
            self.refuse(f"{self.stem}.g_idx: names a group that is not there; download the model again")
        return _Group(scales, zeros, group).weights(numbers)


class _Awq(_Packed):
    mark = ".qweight"
    keys = ("bits", "group_size", "zero_point", "version")
    notes = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse")

    @classmethod
    def check(cls, facts: Mapping[str, Any]) -> None:
        _only(facts, "awq", bits=(4,), zero_point=(True,), version=("gemm", "GEMM"))
        _check_groups(facts, "awq")

    def __init__(self, file: SafetensorsFiles, stem: str, facts: Mapping[str, Any]) -> None:
        super().__init__(file, stem, facts)
        lanes, words = self.part(".qweight", 2, "I32").shape
        self.shape, (_, self.size) = (words * 8, lanes), self.grouped(lanes, words * 8, words)
        self.parts = tuple(stem + ending for ending in (".qweight", ".qzeros", ".scales"))

    def rows(self, start: int, stop: int) -> np.ndarray:
        first, last = start // 8, -(-stop // 8)
        keep = slice(start - first * 8, stop - first * 8)
        numbers, zeros = (_awq(self.file.columns(part, first, last))[:, keep] for part in self.parts[:2])
        scales = self.file.columns(self.parts[2], start, stop).astype(np.float32)
        return _Group(scales, zeros, np.arange(self.shape[1]) // self.size).weights(numbers)


def _bits(words: np.ndarray, each: int) -> np.ndarray:
    """Numbers i32[..., each] of 32-bit words, low bits first."""
    width = 32 // each
    shifts = np.arange(each, dtype=np.uint32) * np.uint32(width)
    parts = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << width) - 1)
    return parts.astype(np.int32)


def _awq(words: np.ndarray) -> np.ndarray:
    """i32[rows, 8 * words] in the order of the columns."""
    out = np.empty((*words.shape, 8), np.int32)
    out[..., _AWQ_COLUMNS] = _bits(words, 8)
    return out.reshape(words.shape[0], -1)
