"""What a decoder looks like: widths, heads, positions and the attention pattern of each layer.

Nothing here knows jax. `family_configs.config_from_hf` reads the dictionary of a Hugging Face `config.json`,
`gguf_configs.config_from_gguf` the metadata of a GGUF file; both end in the same frozen dataclass, and a field that
a file cannot express keeps the value that makes it a no-op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from pagedjax.models.checks import ModelError as ModelError
from pagedjax.models.checks import check_number as _check_number
from pagedjax.models.checks import check_range as check_range
from pagedjax.models.latent_widths import LatentAttention
from pagedjax.models.mixture import Experts


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was first trained on.

    Attributes:
        kind: "linear" divides every frequency; "llama3" divides the slow ones and blends a band between;
            "yarn" blends by the number of turns and scales the attention temperature; "table" divides each
            frequency by its own number; "longrope" is one of two such tables, by the longest sequence (`chosen`).
        factor: By how much the length was stretched.
        original_len: Length before stretching, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: Edges of llama3's band, in turns over original_len.
        beta_fast, beta_slow: Edges of yarn's band, in turns over original_len.
        attention_factor: Multiplies cos and sin; 0 takes yarn's own formula 0.1 ln(factor) + 1.
        truncate: Round yarn's band edges to whole dimensions.
        divisors: One per rotated pair (table; longrope beyond original_len).
        short_divisors: One per rotated pair (longrope up to original_len).

    Source:
        Position interpolation: arXiv 2306.15595. YaRN: arXiv 2309.00071, §3. LongRoPE: arXiv 2402.13753.
    """

    kind: str
    factor: float
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()

    def chosen(self, longest: int) -> RopeScaling:
        """Itself, or of longrope the table for sequences of up to so many tokens.

        One table serves all positions of an engine: were it chosen by each sequence's length, as in transformers,
        cached keys would be wrong as soon as their sequence grew past the border.
        """
        if self.kind != "longrope":
            return self
        divisors = self.divisors if longest > self.original_len else self.short_divisors
        return RopeScaling("table", self.factor, divisors=divisors, attention_factor=self.attention_factor)

    def __post_init__(self) -> None:
        kinds = ("linear", "llama3", "yarn", "table", "longrope")
        if self.kind not in kinds:
            raise ModelError(
                f"rope_scaling={self.kind!r}: must be {', '.join(kinds)}; use a model with one of these"
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _check_number(f"rope_scaling {name}", getattr(self, name), above=0.0)
        _check_number("rope_scaling attention_factor", self.attention_factor, least=0.0)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope_scaling high_freq_factor={self.high_freq_factor}: must be above low_freq_factor="
                f"{self.low_freq_factor}; check the config"
            )
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ModelError(
                f"rope_scaling beta_fast={self.beta_fast}: must be at least beta_slow={self.beta_slow}; mend the config"
            )
        if not all(math.isfinite(d) and d > 0 for d in (*self.divisors, *self.short_divisors)):
            raise ModelError("rope_scaling divisors: must be positive numbers; download the file again")
        if self.kind in ("llama3", "yarn", "longrope") and self.original_len <= 0:
            raise ModelError(
                f"rope_scaling original length={self.original_len}: {self.kind} needs the length before "
                "stretching; set original_max_position_embeddings in the config"
            )


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV blocks live equally long: one pool and one block table serve them.

    Attributes:
        window: Keys a query sees, its own included; None is all.
        layers: Indices of the layers, rising.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one decoder; hashable, so it can be static under jit.

    Attributes:
        family: The weight-name table that reads its files (`pagedjax.models.families`).
        num_layers, d_model, num_heads, num_kv_heads, head_dim, d_mlp, vocab_size: L, D, N, K, H, F, V.
        max_model_len: Longest sequence the positions reach, in tokens.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Stretching of the rotary frequencies, or None.
        norm: "rms" or "layer" (mean removed, with a bias).
        norm_eps: Added to the variance in every norm.
        tie_embeddings: The output matrix is the embedding.
        bos_token_id: Starts a text, or None where the model has none.
        eos_token_ids: Any of them ends a text.
        windows: Keys a query of layer l may see, its own included; None is all. () is all for all layers.
        rope_layers: Whether layer l rotates its queries and keys; () is yes for all layers.
        local_rope_theta: Base of the rotary frequencies of windowed layers (unscaled); 0 is rope_theta.
        positions: "rope" or "learned" (a table added to the embedding).
        activation: "silu", "gelu_tanh", "gelu" or "relu".
        gated_mlp: down(act(gate x) * up x) instead of down(act(up x)).
        qkv_bias, out_bias, mlp_bias: Which matrices carry a bias.
        qk_norm: RMS norm of each query and key head before the rotation.
        qk_norm_whole: It is one norm over all heads of a token.
        sinks: A logit per head joins each softmax without a value.
        post_norms: A second norm after attention and after the MLP, before the residual sum.
        attn_soft_cap, logit_soft_cap: cap * tanh(x / cap) on scores and logits; 0 is off.
        query_scale: Multiplies the scores; 0 is head_dim ** -0.5, or of latent attention query_dim ** -0.5.
        embed_scale: Multiplies the embedding.
        experts: The mixture of experts that stands in place of the MLP, or None.
        latent: Widths of latent attention, or None. With it the pool's one KV head (`num_kv_heads` is 1) is the row
            that all heads share, and `head_dim` its lanes.
    """

    family: str
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_mlp: int
    vocab_size: int
    max_model_len: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm: str = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    local_rope_theta: float = 0.0
    positions: str = "rope"
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    sinks: bool = False
    post_norms: bool = False
    attn_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    query_scale: float = 0.0
    embed_scale: float = 1.0
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_mlp", "vocab_size"):
            check_range(name, getattr(self, name), 1, LIMITS[name])
        check_range("max_model_len", self.max_model_len, 1, LIMITS["max_model_len"])
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: query heads must be a "
                "multiple of KV heads; check the config file"
            )
        self._check_numbers()
        self._check_latent()
        if self.positions == "rope" and self.rope_dim % 2:
            raise ModelError(
                f"head_dim={self.rope_dim}: rotary positions need an even number; check the config"
            )
        for name in ("windows", "rope_layers"):
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                raise ModelError(
                    f"{name} has {len(value)} entries: must have one per layer ({self.num_layers}) or none"
                )
        scaling = self.rope_scaling
        tables = {"table": ("divisors",), "longrope": ("divisors", "short_divisors")}
        for name in tables.get("" if scaling is None else scaling.kind, ()):
            if len(getattr(scaling, name)) != self.rope_dim // 2:
                raise ModelError(
                    f"rope_scaling has {len(getattr(scaling, name))} {name}: must have one per pair "
                    f"({self.rope_dim // 2}); the file belongs to another model"
                )
        if self.experts is not None and len(self.experts.layers) not in (0, self.num_layers):
            raise ModelError(
                f"experts.layers has {len(self.experts.layers)} entries: must have one per layer ({self.num_layers}) "
                "or none"
            )
        if any(w is not None and w < 1 for w in self.windows):
            raise ModelError(f"windows={self.windows}: a window must hold at least the query's own key")
        if self.activation not in ACTIVATIONS.values():
            raise ModelError(
                f"activation={self.activation!r}: must be one of {sorted(set(ACTIVATIONS.values()))}"
            )

    def _check_numbers(self) -> None:
        for name, kinds in (("norm", NORMS), ("positions", POSITIONS)):
            if getattr(self, name) not in kinds:
                raise ModelError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(kinds)}")
        _check_number("norm_eps", self.norm_eps, above=0.0)
        _check_number("rope_theta", self.rope_theta, above=1.0)
        if self.local_rope_theta:
            _check_number("local_rope_theta", self.local_rope_theta, above=1.0)
        for name in ("attn_soft_cap", "logit_soft_cap", "query_scale"):
            _check_number(name, getattr(self, name), least=0.0)
        _check_number("embed_scale", self.embed_scale, above=0.0)
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for name, ids in (("bos_token_id", bos), ("eos_token_ids", self.eos_token_ids)):
            for token in ids:
                check_range(name, token, 0, self.vocab_size - 1)

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if (self.num_kv_heads, self.head_dim) != (1, self.latent.row_dim):
            raise ModelError(
                f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}: latent attention keeps one row of "
                f"{self.latent.row_dim} lanes a token; set 1 and {self.latent.row_dim}"
            )
        if self.qk_norm or self.positions != "rope" or not all(self.rope_layers):
            raise ModelError(
                "latent attention: heads are not normed by themselves, and every layer rotates; "
                "use qk_norm=False, positions=rope and no rope_layers"
            )

    def first_layers(self, count: int) -> ModelConfig:
        """The same decoder of its first layers."""
        experts = self.experts
        if experts is not None and experts.layers:
            layers = experts.layers[:count]
            experts = replace(experts, layers=layers) if any(layers) else None
        return replace(
            self,
            num_layers=count,
            windows=self.windows[:count],
            rope_layers=self.rope_layers[:count],
            experts=experts,
        )

    @property
    def longest_len(self) -> int:
        """Longest sequence that may be asked for, in tokens.

        It is max_model_len, or what the stretching of the rotary frequencies reaches beyond it: files of
        stretched models say either length in `max_position_embeddings`.
        """
        scaling = self.rope_scaling
        if self.positions != "rope" or scaling is None or scaling.kind not in ("linear", "yarn"):
            return self.max_model_len
        reach = int((scaling.original_len or self.max_model_len) * scaling.factor)
        return max(self.max_model_len, min(reach, LIMITS["max_model_len"]))

    def for_length(self, longest: int) -> ModelConfig:
        """The model as it serves sequences of up to so many tokens; it differs where positions are LongRoPE's."""
        if self.rope_scaling is None or self.rope_scaling.chosen(longest) is self.rope_scaling:
            return self
        return replace(self, rope_scaling=self.rope_scaling.chosen(longest))

    @property
    def expert_parameters(self) -> int:
        """Entries of all layers' experts, shared ones and routers left out."""
        if self.experts is None:
            return 0
        return self._expert_layers * self.experts.num_experts * 3 * self.d_model * self.experts.d_expert

    @cached_property  # the simulator asks in every step
    def _expert_layers(self) -> int:
        return sum(self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def layer_parameters(self) -> int:
        """Entries of all layers' matrices: q, k, v, o, the MLP, and routers with all their experts."""
        attention = self.d_model * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        if (a := self.latent) is not None:
            queries = self.num_heads * a.query_dim
            attention = a.q_lora_rank * (self.d_model + queries) if a.q_lora_rank else self.d_model * queries
            attention += self.d_model * a.row_dim + self.num_heads * a.value_dim * self.d_model
            attention += a.kv_lora_rank * self.num_heads * (a.nope_dim + a.value_dim)
        mlp, sparse = (3 if self.gated_mlp else 2) * self.d_model * self.d_mlp, self._expert_layers
        total = self.num_layers * attention + (self.num_layers - sparse) * mlp + self.expert_parameters
        if self.experts is not None:
            total += sparse * self.d_model * (self.experts.num_experts + 3 * self.experts.d_shared)
        return total

    @property
    def active_layer_parameters(self) -> int:
        """Entries of the layers' matrices that one token is multiplied with."""
        return round(self.read_layer_parameters(1))

    def read_layer_parameters(self, tokens: int) -> float:
        """Entries of the layers' matrices that a step of so many tokens is expected to read.

        Experts count by the expected share of those in use (`Experts.share_used`).
        """
        if self.experts is None:
            return float(self.layer_parameters)
        return self.layer_parameters - self.expert_parameters * (1.0 - self.experts.share_used(tokens))

    @property
    def num_parameters(self) -> int:
        """Entries of the layers' matrices and the embeddings; norms, biases and positions are not counted."""
        return self.layer_parameters + (1 if self.tie_embeddings else 2) * self.vocab_size * self.d_model

    @property
    def active_parameters(self) -> int:
        """Entries that one token is multiplied with: of the layers and the output matrix."""
        return self.active_layer_parameters + self.vocab_size * self.d_model

    @property
    def num_groups(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor on the scores before the soft cap."""
        return self.query_scale or (self.head_dim if self.latent is None else self.latent.query_dim) ** -0.5

    @property
    def rope_dim(self) -> int:
        """Lanes of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def latent_dim(self) -> int:
        """Lanes of a key in the pool that are its value as well; 0: values lie beside the keys."""
        return 0 if self.latent is None else self.latent.kv_lora_rank

    @property
    def mixed_width(self) -> int:
        """Lanes of all heads' values, which `out` multiplies."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def attention_flops(self) -> int:
        """FLOPs of one query and one key over all layers and heads, as the pool is attended: scores and values."""
        return 2 * self.num_layers * self.num_heads * (self.head_dim + (self.latent_dim or self.head_dim))

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts in place of one MLP."""
        return self.experts is not None and self.experts.in_layer(layer)

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see, its own included; None is all."""
        return self.windows[layer] if self.windows else None

    def uses_rope(self, layer: int) -> bool:
        """Whether this layer rotates its queries and keys."""
        return self.positions == "rope" and (self.rope_layers[layer] if self.rope_layers else True)

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers by window, those that see everything first, then in order of their first layer."""
        by_window: dict[int | None, list[int]] = {}
        for layer in range(self.num_layers):
            by_window.setdefault(self.window(layer), []).append(layer)
        order = sorted(by_window, key=lambda window: window is not None)
        return tuple(LayerGroup(window, tuple(by_window[window])) for window in order)

    def kv_bytes_per_token(self, itemsize: int, scale_bytes: int = 0) -> int:
        """Bytes of keys and values that one token keeps over all layers.

        Of latent attention, and of codes with scales, what is stored: whole vectors of 128 lanes, 640 for a row of 576.

        Args:
            itemsize: Bytes of one number in the pool (4 for float32, 2 for bfloat16, 1 for codes).
            scale_bytes: Of each head's key and value, that lie with codes.

        Raises:
            ModelError: Latent rows are not kept as codes.
        """
        lanes = 2 * self.num_kv_heads * self.head_dim
        if self.latent is not None:
            if itemsize == 1:
                raise ModelError("cache.dtype: keys that hold their values are not quantised; try bfloat16")
            lanes = -(-self.latent.row_dim // LANES) * LANES
        elif scale_bytes:
            lanes = -(-(lanes + 2 * self.num_kv_heads * scale_bytes) // LANES) * LANES
        return self.num_layers * lanes * itemsize

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into this config."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The config that `to_dict` wrote.

        Raises:
            ModelError: A key is unknown, or a value is out of its range.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ModelError(
                f"{unknown[0]!r}: not a field of a model config; was it written by a later version?"
            )
        kwargs = dict(values)
        for name, part in (("rope_scaling", RopeScaling), ("experts", Experts), ("latent", LatentAttention)):
            if kwargs.get(name) is not None:
                kwargs[name] = _nested(name, part, kwargs[name])
        try:
            for name in ("eos_token_ids", "windows", "rope_layers"):
                kwargs[name] = tuple(kwargs.get(name, ()))
            _check_kinds(cls, kwargs)
            return cls(**kwargs)
        except TypeError as error:
            raise ModelError(f"model config: {error}; write it again") from error


NORMS, POSITIONS = ("rms", "layer"), ("rope", "learned")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}

LANES = 128  # of a vector, which the pool's rows are whole numbers of (kernels/layout.py)

# Far above any model that exists, far below what would make a shape product overflow or exhaust memory
# before the weights are found to be missing.
LIMITS = {
    "num_layers": 1024,
    "d_model": 1 << 17,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "d_mlp": 1 << 20,
    "vocab_size": 1 << 23,
    "max_model_len": 1 << 31,
}


# What a field of each annotation takes from JSON.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
_ITEMS: dict[str, tuple[type, ...]] = {
    "tuple[int, ...]": (int,),
    "tuple[int | None, ...]": (int, type(None)),
    "tuple[bool, ...]": (bool,),
    "tuple[float, ...]": (int, float),
}


def _check_kinds(cls: Any, values: Mapping[str, Any]) -> None:
    """Refuse a value from JSON that is not of its field's kind."""
    for field in fields(cls):
        if field.name not in values:
            continue
        value = values[field.name]
        items = value if field.type in _ITEMS else (value,)
        kinds = _ITEMS.get(str(field.type)) or _KINDS.get(str(field.type))
        if kinds is not None and not all(type(item) in kinds for item in items):
            raise ModelError(f"{field.name}={value!r}: must be of kind {field.type}; write it again")


def _nested(field: str, part: Any, values: Any) -> Any:
    """A nested dataclass from the table that `to_dict` wrote of it."""
    if not isinstance(values, Mapping):
        raise ModelError(f"{field}={values!r}: must be a table; write it again")
    known = {f.name: f for f in fields(part)}
    for name in values:
        if name not in known:
            raise ModelError(f"{field} {name!r}: not a field; was it written by a later version?")
    kwargs = dict(values)
    for name, value in values.items():
        if isinstance(value, list) and known[name].type in _ITEMS:
            kwargs[name] = tuple(value)
    _check_kinds(part, kwargs)
    return part(**kwargs)


_KINDS_OF_FILES = {
    b"version https://git-lfs": "a Git LFS pointer and not the file itself; fetch it with git lfs pull",
    b"GGUF": "a GGUF file; name it .gguf",
    b"PK\x03\x04": "a zip archive, as PyTorch writes pickles, which are never read",
    b"\x80": "a pickle, which is never read",
    b"<": "a web page; the address needs a login, or names a page about the file",
    **dict.fromkeys(
        (b"ggml", b"ggjt", b"ggla", b"lmgg", b"tjgg"), "a GGML file of before GGUF; convert the model again"
    ),
}


def kind_of_file(head: bytes) -> str | None:
    """What a file is by its first bytes, with the remedy; None where they say nothing.

    So that a refusal names a file of another kind, and does not send the user to download it again.
    """
    if head[8:10] in (b'{"', b"{}", b"{ "):
        return "a safetensors file; put it into a folder with its config.json"
    return next((kind for start, kind in _KINDS_OF_FILES.items() if head.startswith(start)), None)
