"""What readers of `config.json` have in common: sizes, rotary positions, windows, ends of text.

`family_configs` names the families; readers that share these pieces may stand in files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedjax.models.config import LIMITS, ModelConfig, ModelError, RopeScaling, check_range
from pagedjax.models.config_keys import Reader, refuse_key


@dataclass(frozen=True)
class Family:
    """What a model_type reads.

    Attributes:
        keys: Every key of config.json that changes something.
        read: Makes the config of them.
    """

    keys: frozenset[str]
    read: Callable[[Reader], ModelConfig]


# ---- rotary positions ------------------------------------------------------------------------------------

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
# Keys of a rope table by its kind; every table may also have these.
_TABLE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def rope(r: Reader, base: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from wherever they stand: rope_theta, rope_scaling, rope_parameters."""
    old, new = r.table("rope_scaling"), r.table("rope_parameters")
    r.prefer("rope_scaling", old or None, "rope_parameters", new or None)
    return rope_table(r, "rope_scaling", old, base) if old else rope_table(r, "rope_parameters", new, base)


def rope_table(
    r: Reader, name: str, table: Mapping[str, Any], base: float
) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of one table and of the keys beside it."""
    p = Reader(table, f"{r.where}: {name}")
    kind = r.prefer(f"{name}.rope_type", p.get("rope_type"), f"{name}.type", p.get("type"))
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        raise ModelError(
            f"{r.where}: rope_scaling={kind!r}: must be {', '.join(_SCALING_KEYS)}; use a model with one of these"
        )
    known = (*_TABLE_KEYS, *_SCALING_KEYS[kind])
    for key, value in table.items():
        if key not in known and value is not None:
            refuse_key(f"{r.where}: {name} of type {kind}", key, value, known)
    r.prefer(f"{name}.rope_theta", p.get("rope_theta"), "rope_theta", r.get("rope_theta"))
    theta = p if p.get("rope_theta") is not None else r
    for part in (p, r):
        if part.positive("partial_rotary_factor", 1.0) != 1.0:
            part.fail("partial_rotary_factor", "must be 1: partly rotated heads are not supported")
    base = theta.positive("rope_theta", base) if theta.get("rope_theta") is not None else base
    return base, None if kind == "default" else _scaling(r, p, kind)


def _scaling(r: Reader, p: Reader, kind: str) -> RopeScaling:
    longest = r.whole("max_position_embeddings")
    if kind == "linear":
        return RopeScaling(kind, p.positive("factor"), longest)
    key = "original_max_position_embeddings"
    inside, beside = p.get(key), r.get(key)
    r.prefer(key, beside, f"rope_parameters.{key}", inside)
    original = (p if beside is None and inside is not None else r).whole(key, longest)
    check_range(key, original, 1, LIMITS["max_model_len"])
    if kind == "llama3":
        return RopeScaling(
            kind,
            p.positive("factor"),
            original,
            low_freq_factor=p.positive("low_freq_factor"),
            high_freq_factor=p.positive("high_freq_factor"),
        )
    # DeepSeek's files leave the factor null: it is the ratio of the lengths.
    factor = p.positive("factor") if p.get("factor", 0) is not None else longest / original
    attention = p.optional_positive("attention_factor")
    mscale, all_dim = (p.optional_positive(key) for key in ("mscale", "mscale_all_dim"))
    if attention is None and mscale and all_dim:
        attention = mscale_factor(factor, mscale) / mscale_factor(factor, all_dim)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=p.optional_positive("beta_fast") or 32.0,
        beta_slow=p.optional_positive("beta_slow") or 1.0,
        attention_factor=attention or 0.0,
        truncate=p.flag("truncate", True),
    )


def mscale_factor(factor: float, mscale: float) -> float:
    """YaRN's factor on the attention temperature, weighted as DeepSeek's files weigh it."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def size_under(r: Reader, names: tuple[str, ...], default: int | None = None) -> int:
    """A size under any of its names: transformers maps the later ones onto the first."""
    given = [name for name in names if r.get(name) is not None] or [names[0]]
    for other in given[1:]:
        one_value(r.where, given[0], r.get(given[0]), other, r.get(other))
    return r.whole(given[0], default)


def no_bias(r: Reader) -> None:
    """Refuse biases of attention in a family that has none."""
    if r.flag("attention_bias", False):
        r.fail("attention_bias", "this family has none")


def one_value(where: str, first: str, a: Any, second: str, b: Any) -> Any:
    """What two places agree on; where only one speaks, what it says."""
    if a is not None and b is not None and a != b:
        raise ModelError(f"{where}: {first}={a!r} and {second}={b!r}: must be equal; remove one")
    return b if a is None else a


# ---- sliding windows -------------------------------------------------------------------------------------


def windows_of(r: Reader, num_layers: int, size: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types where the file lists them, else by the family's own rule."""
    kinds = r.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if size is not None and on else "full_attention" for on in sliding]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in known for k in kinds):
        r.fail("layer_types", f"must have {' or '.join(known)} for each of {num_layers} layers")
    if "sliding_attention" not in kinds:
        return ()
    if size is None:
        r.fail("sliding_window", "must give the width of the layers that slide")
    check_range("sliding_window", size, 1, LIMITS["max_model_len"])
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def one_window(r: Reader, num_layers: int, size: int | None) -> tuple[int | None, ...]:
    """The window of a family whose layers all slide or none; it asks no layer_types, so they must agree."""
    windows = windows_of(r, num_layers, size, [True] * num_layers)
    expected = () if size is None else (size,) * num_layers
    if windows != expected:
        r.fail("layer_types", "this family's layers are all alike, by sliding_window")
    return windows


# ---- families --------------------------------------------------------------------------------------------

SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
GATED = (*SIZES, *ROPE_KEYS, "hidden_act", "head_dim")
WINDOWS = ("sliding_window", "layer_types")


def ends_of(r: Reader, vocab_size: int, bos: int | None, eos: int | None) -> dict[str, Any]:
    """bos_token_id and eos_token_ids; a missing key takes transformers' default, a null is none."""
    check_range("vocab_size", vocab_size, 1, LIMITS["vocab_size"])
    starts = r.ids("bos_token_id", vocab_size, bos)
    if isinstance(r.get("bos_token_id"), list):
        r.fail("bos_token_id", "must be one id")
    return dict(
        bos_token_id=starts[0] if starts else None, eos_token_ids=r.ids("eos_token_id", vocab_size, eos)
    )


def common_fields(
    r: Reader,
    family: str,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    activation: str = "hidden_act",
    eps: float = 1e-6,
    tied: bool = False,
    ends: tuple[int | None, int | None] = (None, None),
) -> dict[str, Any]:
    """The fields that every rotary, gated family spells alike.

    Args:
        family: Row of weight names.
        kv_heads, head_dim, eps, tied, ends: What a file that is silent means; None: as many KV heads as query
            heads, hidden_size over heads, no start, no end.
        activation: Which key names it.
    """
    num_heads, d_model = r.whole("num_attention_heads"), r.whole("hidden_size")
    check_range("num_attention_heads", num_heads, 1, LIMITS["num_heads"])
    check_range("hidden_size", d_model, 1, LIMITS["d_model"])
    num_layers, vocab_size = r.whole("num_hidden_layers"), r.whole("vocab_size")
    check_range("num_layers", num_layers, 1, LIMITS["num_layers"])
    own_dim, own_kv = (
        r.optional_whole("head_dim", head_dim),
        r.optional_whole("num_key_value_heads", kv_heads),
    )
    default = "gelu_pytorch_tanh" if activation == "hidden_activation" else "silu"
    return dict(
        family=family,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads if own_kv is None else own_kv,
        head_dim=d_model // num_heads if own_dim is None else own_dim,
        d_mlp=r.whole("intermediate_size"),
        vocab_size=vocab_size,
        max_model_len=r.whole("max_position_embeddings"),
        norm_eps=r.positive("rms_norm_eps", eps),
        tie_embeddings=r.flag("tie_word_embeddings", tied),
        activation=r.activation(activation, default),
        **ends_of(r, vocab_size, *ends),
    )


def rotary_fields(r: Reader, base: float = 10000.0) -> dict[str, Any]:
    """`rope`, as the fields of a config: rope_theta and rope_scaling; `base` where the file names no theta."""
    theta, scaling = rope(r, base)
    return dict(rope_theta=theta, rope_scaling=scaling)
