"""Settings as frozen dataclasses: what each knob means, its unit, and when to change it.

Three ways in, one set of rules: a `Config` built in Python, a TOML file with one table per section, and
`key=value` strings. A key is written with its section (`cache.block_size`) or without it where only one
section has it (`block_size`). Every value is checked when the object is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from pagedjax.cache.rules import KV_BYTES, check_block_size, require

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = (*DTYPES, "int8")
KV_DTYPES = tuple(KV_BYTES)
PREFIX_GROUPS = ("auto", "on", "off")
PRODUCTS = ("auto", "xla", "native")
OVERLAPS = ("auto", "on", "off")
MOST_STEPS = 64  # of a dispatch
ADMISSIONS = ("chunk", "whole")
PREEMPTIONS = ("recompute", "swap", "auto")
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_BOOLS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


@dataclass(frozen=True)
class ModelSource:
    """Which model, and in which precision.

    Attributes:
        model: A named model ("smollm2-135m"), a GGUF file, a safetensors or orbax folder, or an HF hub id.
        dtype: Weights on the device. On CPU bfloat16 halves and int8 (matrices, with a scale per row) quarters the
            bytes that a decode step reads; there activations stay float32. bfloat16 on TPU and GPU.
        max_model_len: Longest prompt + output in tokens; 0 takes the model's own, at most 2,048. A model whose
            positions are stretched (YaRN, linear) may be given as much as they reach.
        chat_template: File with a Jinja template in place of the model's own; "" is the model's own.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    max_model_len: int = 0
    chat_template: str = ""

    def __post_init__(self) -> None:
        require(bool(self.model.strip()), "model.model='': must name a model; try smollm2-135m")
        require(
            self.dtype in WEIGHT_DTYPES,
            f"model.dtype={self.dtype}: must be one of {', '.join(WEIGHT_DTYPES)}; try float32",
        )
        require(
            self.max_model_len >= 0,
            f"model.max_model_len={self.max_model_len}: must be positive, or 0 for the model's own; try 2048",
        )


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool and how prefixes are shared.

    Attributes:
        block_size: Tokens per KV block, a power of two between 1 and 1024. 16 suits short traffic;
            64 and more suit TPUs and long prompts.
        num_blocks: Blocks in the pool, the null block included; None ("auto" in files and on the command
            line) sizes it from memory_bytes.
        memory_bytes: Bytes for the pool where num_blocks is not given, on all devices together: KV heads that
            several devices hold count on each.
        index: Prefix index: "hash" (chained block hashes), "radix" (a tree over tokens), "table" (sharing by
            fork only), the name of an installed plug-in, or "module:Class".
        policy: Eviction policy: a name of docs/policies.md (lru, lfu, slru, s3fifo, arc, cost, retention, …) or of an
            installed plug-in, or "module:Class". retention goes by what requests ask (`SamplingParams.retention`);
            where none asks, it is lru.
        hash: Block hash: "sha256"; "sha256_cbor" names blocks as vLLM's scheme of that name does (for outside
            indexers), "xxh3_128" is fast and not collision-proof: set verify_tokens with it.
        prefix_caching: Look prompts up and index full blocks. Off: nothing is shared but forks.
        dtype: KV in the pool; "" follows the model's dtype, and is float32 beside int8 weights. int8 and fp8_e4m3 keep
            a scale for each token and head, fp8_e4m3_unscaled none (docs/kernels.md, "Eight bits"). Simulations count
            its bytes; "" is 2.
        verify_tokens: Compare tokens, not digests alone, before a block is shared; an index that cannot is refused.
        dedup: Free a block that turns out to be cached already and use the first copy; None ("auto"): as the
            index does by nature, with where it excludes twins (radix), else without.
        partial: Least gain in tokens for which a part of a cached block is copied into a fresh one; 0 never
            copies. Worth it where prompts diverge in the middle of long blocks.
        host_blocks: Blocks per KV group in host memory: what is evicted moves there and comes back on a hit,
            and preempted sequences are swapped there. 0: neither.
        window_groups: Layers with a sliding window keep their blocks in pools of their own, where what lies
            behind the window is free again. Off: all layers share one pool that keeps everything.
        event_log: Events of the cache (blocks stored, removed, cleared) to keep, the latest of them, for `LLM.events`;
            0 keeps none.
        reservation: "" allocates blocks on demand. "max", "pow2" and "oracle" are Orca's contiguous
            reservations, the baselines of the PagedAttention paper: nothing is shared, the settings above
            have no effect.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int = 1 << 30
    index: str = "hash"
    policy: str = "lru"
    hash: str = "sha256"
    prefix_caching: bool = True
    dtype: str = ""
    verify_tokens: bool = False
    dedup: bool | None = None
    partial: int = 0
    host_blocks: int = 0
    window_groups: bool = True
    event_log: int = 0
    reservation: str = ""

    def __post_init__(self) -> None:
        from pagedjax.cache.hashing import HASHES
        from pagedjax.cache.reservation import RULES

        size = self.block_size
        check_block_size(size, "cache.block_size")
        require(
            self.num_blocks is None or self.num_blocks >= 2,
            f"cache.num_blocks={self.num_blocks}: must be at least 2 (block 0 is never handed out), or auto to "
            "size the pool from cache.memory_bytes; try 1024",
        )
        require(
            self.memory_bytes > 0,
            f"cache.memory_bytes={self.memory_bytes}: must be positive; try 512MiB",
        )
        require(
            self.dtype in ("", *KV_DTYPES),
            f"cache.dtype={self.dtype}: must be one of {', '.join(KV_DTYPES)}, or empty to follow the model",
        )
        require(
            self.hash in HASHES, f"cache.hash={self.hash}: must be one of {', '.join(HASHES)}; try sha256"
        )
        require(
            0 <= self.partial < max(size, 2),
            f"cache.partial={self.partial}: must be a number of tokens below block_size={size}, or 0 to copy no "
            "part of a block; try 4",
        )
        require(
            self.host_blocks >= 0,
            f"cache.host_blocks={self.host_blocks}: must be positive, or 0 for no host tier; try 1024",
        )
        require(
            self.event_log >= 0,
            f"cache.event_log={self.event_log}: must be a number of events, or 0 to keep none; try 10000",
        )
        require(
            self.reservation in ("", *RULES),
            f"cache.reservation={self.reservation}: must be {', '.join(RULES[:-1])} or {RULES[-1]}, or empty to "
            "allocate on demand",
        )
        require(
            not (self.reservation and self.event_log),
            f"cache.event_log={self.event_log}: reservations cache nothing; set event_log=0 or reservation to empty",
        )
        require(
            not (self.reservation and self.host_blocks),
            f"cache.host_blocks={self.host_blocks}: reservations have no host tier; set host_blocks=0 or "
            "reservation to empty",
        )


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step may hold.

    Attributes:
        max_num_seqs: Sequences that run at once.
        token_budget: Tokens per step, decodes and prefill chunks together.
        chunk_tokens: Longest prefill chunk of one sequence in one step; 0 is the token budget. Below it a short prompt
            behind a long one need not wait for its end. Without chunked_prefill it has no effect.
        chunked_prefill: Off: a prompt is computed in one step or refused at submission.
        preemption: What becomes of a request that has to give its blocks up: "recompute" drops them, "swap"
            moves them to the host (cache.host_blocks), "auto" chooses what is predicted to be quicker.
        swap_bandwidth_bytes: Bytes per second between device and host that "auto" assumes until it has
            measured copies.
        admission: "chunk" admits a request where its first chunk finds room: it starts early and may be preempted
            before its prompt is done. "whole" waits until all of the prompt would; fewer tokens are computed
            twice where the pool is tight.
    """

    max_num_seqs: int = 32
    token_budget: int = 256
    chunk_tokens: int = 0
    chunked_prefill: bool = True
    preemption: str = "recompute"
    swap_bandwidth_bytes: int = 8 * 1000**3
    admission: str = "chunk"

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("token_budget", 1), ("chunk_tokens", 0)):
            value = getattr(self, name)
            require(
                value >= least, f"scheduler.{name}={value}: must be at least {least}; try {max(32, least)}"
            )
        require(
            self.admission in ADMISSIONS,
            f"scheduler.admission={self.admission}: must be one of {', '.join(ADMISSIONS)}; try chunk",
        )
        require(
            self.preemption in PREEMPTIONS,
            f"scheduler.preemption={self.preemption}: must be one of {', '.join(PREEMPTIONS)}; try auto",
        )
        require(
            self.swap_bandwidth_bytes > 0,
            f"scheduler.swap_bandwidth_bytes={self.swap_bandwidth_bytes}: must be positive; try 8GB",
        )


# Settings of a cache that decide nothing in a simulation, and why: of real arrays, of digests, of who watches.
NOT_SIMULATED = {
    "memory_bytes": "give num_blocks, or leave both out: the pool is what the memory holds beside the weights",
    "hash": "digests are compared, never guessed",
    "event_log": "nobody asks for events there, and a fleet reads its caches' by itself",
    "window_groups": "simulated models have one KV group",
}
SIMULATED = (
    *(f"cache.{f.name}" for f in fields(CacheConfig) if f.name not in NOT_SIMULATED),
    *(f"scheduler.{f.name}" for f in fields(SchedulerConfig)),
)


@dataclass(frozen=True)
class RuntimeConfig:
    """The device side.

    Attributes:
        implementation: Attention implementation, an installed plug-in's name or "module:function"; "" tries the
            preferred order.
        compilation_cache_dir: Folder where compiled programs are kept between runs; "" is the user's
            cache folder, "off" keeps none.
        seed: Root of the per-request seeds where a request gives none.
        checked: Assert on the device, before each step, that it writes only blocks held by one sequence and
            not indexed, and reads only within its tables. Costs a small program a step; for hunting faults.
        prefix_groups: Work the shared prefix of decoding sequences once for all of them: "auto" where the rule says
            that it pays (docs/kernels.md, "Break-even"), "on" wherever two share a chunk, "off" never. A program of
            its own for each bucket, compiled when first needed; the tokens are the same.
        deterministic: Every token is computed by one program of one shape, whatever else is in the step: a request's
            logits are the same to the last bit cold or warm, alone or in any batch, whole or in chunks, after
            preemption, at any block size (docs/deterministic.md, which also says what it costs).
        kernel_tuning: TOML file of sizes of the kernels' pieces, before those that come with the package
            (docs/kernels.md, "Tuning"); `pagedjax bench kernels --tune` writes one. "" is the package's alone.
        tensor_parallel: Devices that work each step together, each with its own heads, part of the MLP and tokens of
            the vocabulary (docs/devices.md). The model's heads must be dealt out evenly.
        overlap: Plan the next step while one runs; its tokens are fed on the device and booked a step behind, so the
            device does not wait for the host. The tokens are the same. "on", "off", or "auto": on where the device is
            not the host's own CPU and the settings allow it (docs/using.md says which do not).
        num_steps: Most decode steps of one dispatch: while all there is to do is decoding, the device draws so many
            tokens a row before the host books them, their keys and values in blocks that were reserved for them. The
            tokens are the same; who comes meanwhile waits for the dispatch's end. 1 begins every step by itself.
        products: Who multiplies with weights: "native" (C++, on one CPU; each weight is read once a step, and a row's
            result is the same bits in every batch), "xla", or "auto": native where it serves (docs/kernels.md).
    """

    implementation: str = ""
    compilation_cache_dir: str = ""
    seed: int = 0
    checked: bool = False
    prefix_groups: str = "auto"
    deterministic: bool = False
    kernel_tuning: str = ""
    tensor_parallel: int = 1
    overlap: str = "auto"
    num_steps: int = 1
    products: str = "auto"

    def __post_init__(self) -> None:
        require(
            self.prefix_groups in PREFIX_GROUPS,
            f"runtime.prefix_groups={self.prefix_groups}: must be one of {', '.join(PREFIX_GROUPS)}; try auto",
        )
        require(
            not (self.deterministic and self.prefix_groups == "on"),
            "runtime.prefix_groups=on: which rows share a prefix changes how their sums are rounded, which "
            "runtime.deterministic rules out; set prefix_groups to auto or off",
        )
        require(
            not (self.deterministic and self.tensor_parallel > 1),
            f"runtime.tensor_parallel={self.tensor_parallel}: sums between devices have not been shown to keep their "
            "order, which runtime.deterministic needs; set one of the two",
        )
        require(
            self.tensor_parallel >= 1,
            f"runtime.tensor_parallel={self.tensor_parallel}: must be a number of devices; try 1",
        )
        require(
            self.overlap in OVERLAPS,
            f"runtime.overlap={self.overlap}: must be one of {', '.join(OVERLAPS)}; try auto",
        )
        require(
            not (self.deterministic and self.overlap == "on"),
            "runtime.overlap=on: a step of runtime.deterministic is several calls, one after another; set overlap to "
            "auto or off",
        )
        require(
            1 <= self.num_steps <= MOST_STEPS,
            f"runtime.num_steps={self.num_steps}: must be between 1 and {MOST_STEPS}; try 8",
        )
        require(
            not (self.deterministic and self.num_steps > 1),
            f"runtime.num_steps={self.num_steps}: a step of runtime.deterministic is several calls, one after another; "
            "set num_steps to 1",
        )
        require(
            self.products in PRODUCTS,
            f"runtime.products={self.products}: must be one of {', '.join(PRODUCTS)}; try auto",
        )
        require(0 <= self.seed < 2**32, f"runtime.seed={self.seed}: must be in [0, 2**32); try 0")


@dataclass(frozen=True)
class Config:
    """Everything an engine is built from."""

    model: ModelSource = field(default_factory=ModelSource)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain values, section by section."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Hex SHA-256 of all settings: equal digests mean equal settings, on any machine.

        Example:
            >>> Config().digest() == Config(cache=CacheConfig(block_size=16)).digest()
            True
        """
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def replace(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with some settings changed.

        Args:
            overrides: Key (with or without its section) to value. Strings are read as on the command
                line, so "32", "1GiB" and "off" work wherever their kind is asked for.

        Raises:
            ValueError: Unknown or ambiguous key, or a value of another kind or out of its range.

        Example:
            >>> Config().replace({"block_size": 32, "cache.memory_bytes": "2GiB"}).cache.memory_bytes
            2147483648
        """
        return self._changed(overrides, typed=True)

    def _changed(self, overrides: Mapping[str, Any], *, typed: bool) -> Config:
        sections = self.to_dict()
        for key, value in overrides.items():
            section, name = _resolve(key)
            kind = _fields(section)[name]
            sections[section][name] = parse_value(f"{section}.{name}", value, kind, typed=typed)
        return Config(**{section: _SECTIONS[section](**values) for section, values in sections.items()})


_SECTIONS: dict[str, type] = {
    "model": ModelSource,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "runtime": RuntimeConfig,
}


def load_config(
    path: str | Path | None = None, settings: Iterable[str] = (), *, base: Config | None = None
) -> Config:
    """Read a TOML file, then apply `key=value` strings in order.

    Args:
        path: TOML file with tables [model], [cache], [scheduler], [runtime]; None reads none.
        settings: `key=value` strings, as of `--set`; they win over the file.
        base: What the file and the strings change; None: the defaults.

    Raises:
        ValueError: No such file, not TOML, an unknown key (the nearest is named), a bad value.
    """
    config = base or Config()
    if path is not None:
        config = _with_file(config, Path(path))
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: must be key=value; try --set block_size=32")
        config = config.replace({key.strip(): value.strip()})
    return config


def _with_file(config: Config, path: Path) -> Config:
    if not path.is_file():
        found = "is not a file" if path.exists() else "no such file"
        raise ValueError(f"config {path}: {found}; give a .toml file, for example one of configs/serve/")
    try:
        tables = read_toml(path, "see configs/serve/ for examples")
    except ValueError as error:
        raise ValueError(f"config {error}") from None
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    try:
        return config._changed(flat, typed=False)
    except ValueError as error:
        raise ValueError(f"config {path}: {error}") from None


class _Readable(Protocol):
    def read_text(self, encoding: str) -> str: ...


def read_toml(path: _Readable, remedy: str) -> dict[str, Any]:
    """The tables of a TOML file, with or without the mark that Windows puts before UTF-8.

    Args:
        path: File, or what is behind a URL.
        remedy: What to do where it is none.

    Raises:
        ValueError: Not TOML.
        OSError: The file cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid TOML ({error}); {remedy}") from None


def _fields(section: str) -> dict[str, Any]:
    return get_type_hints(_SECTIONS[section])


def full_key(key: str) -> str:
    """The full name of a setting, "cache.block_size", from a key as typed.

    Raises:
        ValueError: No setting has this name, or several have; the message names the nearest.
    """
    return ".".join(_resolve(key))


def _resolve(key: str) -> tuple[str, str]:
    """The (section, field) that a key names."""
    section, dot, name = key.partition(".")
    if dot and section in _SECTIONS and name in _fields(section):
        return section, name
    owners = [s for s in _SECTIONS if key in _fields(s)]
    if len(owners) == 1:
        return owners[0], key
    if owners:
        choices = " or ".join(f"{owner}.{key}" for owner in owners)
        raise ValueError(f"{key}: more than one section has it; write {choices}")
    known = [f"{s}.{f}" for s in _SECTIONS for f in _fields(s)]
    # Compare full names with full names and bare ones with bare ones; the answer is always a full name.
    bare = {full.split(".")[1]: full for full in known}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    near += [bare[m] for m in difflib.get_close_matches(key.rpartition(".")[2], bare, n=1, cutoff=0.5)]
    remedy = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
    raise ValueError(f"{key}: is not a setting; {remedy}")


def parse_value(key: str, value: Any, kind: Any, *, typed: bool = True) -> Any:
    """A value of the field's kind, from a string as typed or a value as TOML and Python give it.

    Args:
        key: For messages; a whole number whose key ends in "_bytes" may have a unit.
        value: "32", "1GiB", "off", or the value itself.
        kind: str, bool, int or float; of bool and int also "or None", which is "auto".
        typed: False for a value of a file, where only a number with a unit, and "auto", stand in quotes.

    Raises:
        ValueError: It is of another kind.
    """
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{key}={value!r}: must be a string; put it in quotes")
    if not typed and isinstance(value, str) and value != "auto" and not key.endswith("_bytes"):
        name = (
            "a number"
            if kind is float
            else "true or false"
            if kind in (bool, bool | None)
            else "a whole number"
        )
        raise ValueError(f"{key}={value}: must be {name}; take it out of the quotes")
    if kind == (bool | None) and value in (None, "auto"):
        return None
    if kind in (bool, bool | None):
        known = _BOOLS.get(value.lower()) if isinstance(value, str) else value
        if isinstance(known, bool):
            return known
        raise ValueError(f"{key}={value}: must be true or false; try {key}=true")
    if kind == (int | None) and value in (None, "auto"):
        return None
    if kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        with suppress(TypeError, ValueError):
            return float(value)
        raise ValueError(f"{key}={value}: must be a number")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        parsed = _parse_int(value, with_units=key.endswith("_bytes"))
        if parsed is not None:
            return parsed
    example = "512MiB or 2GiB" if key.endswith("_bytes") else "a number such as 16"
    raise ValueError(f"{key}={value}: must be a whole number; try {example}")


def _parse_int(text: str, *, with_units: bool) -> int | None:
    if re.fullmatch(r"-?\d[\d_]*", text):
        return int(text)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)", text.lower()) if with_units else None
    return int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else None
