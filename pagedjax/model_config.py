"""What a decoder looks like: widths, heads, positions and the attention pattern of each layer.

Nothing here knows jax. `ModelConfig.from_hf` reads the dictionary of a Hugging Face `config.json`,
`ModelConfig.from_gguf` the metadata of a GGUF file; both end in the same frozen dataclass, and a field that
a file cannot express keeps the value that makes it a no-op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


class ModelError(ValueError):
    """A model's files are not what they should be; the message names what, which rule, and the remedy."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was first trained on.

    Attributes:
        kind: "linear" divides every frequency; "llama3" divides the slow ones and blends a band between;
            "yarn" blends by the number of turns and scales the attention temperature; "table" divides each
            frequency by its own number.
        factor: By how much the length was stretched.
        original_len: Length before stretching, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: Edges of llama3's band, in turns over original_len.
        beta_fast, beta_slow: Edges of yarn's band, in turns over original_len.
        attention_factor: Multiplies cos and sin; 0 takes yarn's own formula 0.1 ln(factor) + 1.
        truncate: Round yarn's band edges to whole dimensions.
        divisors: One per rotated pair (table).

    Source:
        Position interpolation: arXiv 2306.15595. YaRN: arXiv 2309.00071, §3.
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

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn", "table"):
            raise ModelError(
                f"rope_scaling={self.kind!r}: must be linear, llama3, yarn or table; use a model with one of these"
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ModelError(
                f"rope_scaling factor={self.factor}: must be a positive number; check the config"
            )
        if not all(math.isfinite(d) and d > 0 for d in self.divisors):
            raise ModelError("rope_scaling divisors: must be positive numbers; download the file again")
        if self.kind in ("llama3", "yarn") and self.original_len <= 0:
            raise ModelError(
                f"rope_scaling original length={self.original_len}: {self.kind} needs the length before "
                "stretching; set original_max_position_embeddings in the config"
            )


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
        post_norms: A second norm after attention and after the MLP, before the residual sum.
        attn_soft_cap, logit_soft_cap: cap * tanh(x / cap) on scores and logits; 0 is off.
        query_scale: Multiplies the scores; 0 is head_dim ** -0.5.
        embed_scale: Multiplies the embedding.
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
    post_norms: bool = False
    attn_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    query_scale: float = 0.0
    embed_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_mlp", "vocab_size"):
            _check(name, getattr(self, name), 1, _LIMITS[name])
        _check("max_model_len", self.max_model_len, 1, _LIMITS["max_model_len"])
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: query heads must be a "
                "multiple of KV heads; check the config file"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ModelError(
                f"head_dim={self.head_dim}: rotary positions need an even number; check the config"
            )
        for name in ("windows", "rope_layers"):
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                raise ModelError(
                    f"{name} has {len(value)} entries: must have one per layer ({self.num_layers}) or none"
                )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "table" and len(scaling.divisors) != self.head_dim // 2:
            raise ModelError(
                f"rope_scaling has {len(scaling.divisors)} divisors: must have one per pair "
                f"({self.head_dim // 2}); the file belongs to another model"
            )
        if any(w is not None and w < 1 for w in self.windows):
            raise ModelError(f"windows={self.windows}: a window must hold at least the query's own key")
        if self.activation not in ACTIVATIONS.values():
            raise ModelError(
                f"activation={self.activation!r}: must be one of {sorted(set(ACTIVATIONS.values()))}"
            )

    @property
    def num_groups(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor on the scores before the soft cap."""
        return self.query_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see, its own included; None is all."""
        return self.windows[layer] if self.windows else None

    def uses_rope(self, layer: int) -> bool:
        """Whether this layer rotates its queries and keys."""
        return self.positions == "rope" and (self.rope_layers[layer] if self.rope_layers else True)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token keeps over all layers.

        Args:
            itemsize: Bytes of one number in the pool (4 for float32, 2 for bfloat16).
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

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
        if kwargs.get("rope_scaling"):
            scaling = dict(kwargs["rope_scaling"])
            scaling["divisors"] = tuple(scaling.get("divisors", ()))
            kwargs["rope_scaling"] = RopeScaling(**scaling)
        for name in ("eos_token_ids", "windows", "rope_layers"):
            kwargs[name] = tuple(kwargs.get(name, ()))
        try:
            return cls(**kwargs)
        except TypeError as error:
            raise ModelError(f"model config: {error}; write it again") from error

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a Hugging Face `config.json`.

        Raises:
            ModelError: The architecture is not one of ours, or a value is missing or out of range.
        """
        family = _str(config, "model_type", "config.json")
        read = _HF.get(family)
        if read is None:
            raise ModelError(
                f"model_type={family!r}: no decoder for it; supported are {', '.join(sorted(_HF))}"
            )
        return read(_Reader(config, "config.json"))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ModelConfig:
        """Read the metadata of a GGUF file (key → plain value).

        Raises:
            ModelError: The architecture is not one of ours, or a value is missing or out of range.
        """
        arch = _str(metadata, "general.architecture", "GGUF metadata")
        read = _GGUF.get(arch)
        if read is None:
            raise ModelError(
                f"general.architecture={arch!r}: no decoder for it; supported are {', '.join(sorted(_GGUF))}"
            )
        return read(_Reader(metadata, "GGUF metadata", prefix=f"{arch}."))


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}

# Far above any model that exists, far below what would make a shape product overflow or exhaust memory
# before the weights are found to be missing.
_LIMITS = {
    "num_layers": 1024,
    "d_model": 1 << 17,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "d_mlp": 1 << 20,
    "vocab_size": 1 << 23,
    "max_model_len": 1 << 31,
}


def _check(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(
            f"{name}={value!r}: must be a whole number in [{low}, {high}]; check the model's files"
        )


def _str(mapping: Mapping[str, Any], key: str, where: str) -> str:
    value = mapping.get(key)
    if not isinstance(value, str):
        raise ModelError(f"{key}={value!r}: {where} must name the architecture; is this a language model?")
    return value


class _Reader:
    """Typed look-ups in an outside mapping; a wrong type is an error that names the key."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(
                f"{self.prefix}{key}={value!r}: {self.where} must give a whole number; check the file"
            )
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self.prefix}{key}={value!r}: {self.where} must give a number; check the file")
        return float(value)

    def bool(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(
                f"{self.prefix}{key}={value!r}: {self.where} must say true or false; check the file"
            )
        return value

    def activation(self, default: str) -> str:
        name = self.get("hidden_act", self.get("hidden_activation", default))
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise ModelError(f"activation {name!r}: must be one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


def _token_ids(value: Any, key: str) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{key}={value!r}: must be a token id or a list of them; check the file")
    return ids


def _hf_rope(r: _Reader) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from either spelling: rope_theta + rope_scaling, or rope_parameters."""
    params = r.get("rope_parameters") or r.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ModelError(f"rope_scaling={params!r}: must be a table; check config.json")
    p = _Reader(params, "rope_scaling")
    theta = p.float("rope_theta", r.float("rope_theta", 10000.0))
    kind = p.get("rope_type", p.get("type", "default"))
    if kind == "default":
        return theta, None
    original = p.int("original_max_position_embeddings", r.int("max_position_embeddings"))
    attention = p.get("attention_factor")
    return theta, RopeScaling(
        kind=str(kind),
        factor=p.float("factor"),
        original_len=original,
        low_freq_factor=p.float("low_freq_factor", 1.0),
        high_freq_factor=p.float("high_freq_factor", 4.0),
        beta_fast=p.float("beta_fast", 32.0),
        beta_slow=p.float("beta_slow", 1.0),
        attention_factor=0.0 if attention is None else p.float("attention_factor"),
        truncate=p.bool("truncate", True),
    )


def _hf_common(r: _Reader, family: str) -> dict[str, Any]:
    """The fields that every rotary, gated family spells alike."""
    num_heads, d_model = r.int("num_attention_heads"), r.int("hidden_size")
    _check("num_attention_heads", num_heads, 1, _LIMITS["num_heads"])
    theta, scaling = _hf_rope(r)
    bos = _token_ids(r.get("bos_token_id"), "bos_token_id")
    return dict(
        family=family,
        num_layers=r.int("num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=r.int("num_key_value_heads", num_heads),
        head_dim=r.int("head_dim", d_model // num_heads),
        d_mlp=r.int("intermediate_size"),
        vocab_size=r.int("vocab_size"),
        max_model_len=r.int("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=r.float("rms_norm_eps", 1e-6),
        activation=r.activation("silu"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_token_ids(r.get("eos_token_id"), "eos_token_id"),
    )


def _hf_llama(r: _Reader) -> ModelConfig:
    bias = r.bool("attention_bias", False)
    return ModelConfig(
        **_hf_common(r, "llama"),
        tie_embeddings=r.bool("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=r.bool("mlp_bias", False),
    )


def _hf_smollm3(r: _Reader) -> ModelConfig:
    """SmolLM3: a Llama of which every fourth layer has no positions at all."""
    common = _hf_common(r, "llama")
    bias = r.bool("attention_bias", False)
    pattern = r.get("no_rope_layers")
    if pattern is None:
        every = r.int("no_rope_layer_interval", 4)
        _check("no_rope_layer_interval", every, 1, _LIMITS["num_layers"])
        _check("num_layers", common["num_layers"], 1, _LIMITS["num_layers"])
        pattern = [(layer + 1) % every != 0 for layer in range(common["num_layers"])]
    if not isinstance(pattern, list) or any(v not in (0, 1) for v in pattern):
        raise ModelError(f"no_rope_layers={pattern!r}: must be a list of 0 and 1; check config.json")
    return ModelConfig(
        **common,
        tie_embeddings=r.bool("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=r.bool("mlp_bias", False),
        rope_layers=tuple(bool(v) for v in pattern),
    )


def _gguf_vocab(r: _Reader) -> int:
    tokens = r.values.get("tokenizer.ggml.tokens")
    return r.int("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _gguf_eos(r: _Reader) -> tuple[int, ...]:
    """End of text and, where the file names one, end of turn."""
    found: dict[int, None] = {}
    for key in ("eos", "eot", "eom"):
        name = f"tokenizer.ggml.{key}_token_id"
        found.update(dict.fromkeys(_token_ids(r.values.get(name), name)))
    return tuple(found)


def _gguf_rope_scaling(r: _Reader) -> RopeScaling | None:
    kind = r.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return RopeScaling(
        kind=str(kind),
        factor=r.float("rope.scaling.factor"),
        original_len=r.int("rope.scaling.original_context_length", r.int("context_length")),
        attention_factor=r.float("rope.scaling.attn_factor", 0.0),
    )


def _gguf_common(r: _Reader, family: str) -> dict[str, Any]:
    num_heads, d_model = r.int("attention.head_count"), r.int("embedding_length")
    _check("attention.head_count", num_heads, 1, _LIMITS["num_heads"])
    head_dim = r.int("attention.key_length", d_model // num_heads)
    if r.int("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{r.prefix}rope.dimension_count={r.int('rope.dimension_count')}: must equal the head dim "
            f"({head_dim}); partly rotated heads are not supported"
        )
    bos = _token_ids(r.values.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")
    return dict(
        family=family,
        num_layers=r.int("block_count"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=r.int("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_mlp=r.int("feed_forward_length"),
        vocab_size=_gguf_vocab(r),
        max_model_len=r.int("context_length"),
        rope_theta=r.float("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(r),
        norm_eps=r.float("attention.layer_norm_rms_epsilon"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_gguf_eos(r),
    )


def _gguf_llama(r: _Reader) -> ModelConfig:
    if r.int("expert_count", 0):
        raise ModelError(f"llama.expert_count={r.int('expert_count')}: mixtures of experts are not supported")
    # GGUF has no key for tying: the file leaves the output matrix out. weights.py looks.
    return ModelConfig(**_gguf_common(r, "llama"), tie_embeddings=True)


_HF: dict[str, Callable[[_Reader], ModelConfig]] = {"llama": _hf_llama, "smollm3": _hf_smollm3}
_GGUF: dict[str, Callable[[_Reader], ModelConfig]] = {"llama": _gguf_llama}
