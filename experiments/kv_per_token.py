"""How many bytes does a token keep, and how much smaller does latent attention make it?

Source: DeepSeek-V2 (arXiv 2405.04434), abstract and §2.1.4: the KV cache is 93.3 % smaller than DeepSeek 67B's. That
figure holds 6-bit numbers against 16-bit ones; at equal bits, and against heads of its own, it is another. Counted
from shapes. Cost: no time.
    pagedjax experiment run kv-per-token
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import bars, label_axes, panels
from pagedjax.models.family_configs import read_shape

MODELS = (
    "llama-3-8b",
    "llama-3-70b",
    "qwen3-235b-a22b",
    "gpt-oss-120b",
    "deepseek-67b",
    "deepseek-v2",
    "deepseek-v3",
)
BITS, QUANTISED_BITS = 16, 6
V2, DENSE = "deepseek-v2", "deepseek-67b"


def _units(smoke: bool, seed: int) -> list[Unit]:
    return [{"model": name} for name in ((V2, DENSE) if smoke else MODELS)]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    """Elements are the lanes that hold something, stored bytes whole vectors of 128 lanes of 16 bits."""
    model = read_shape(unit["model"])
    elements = model.num_layers * (
        model.head_dim if model.latent else 2 * model.num_kv_heads * model.head_dim
    )
    latent = model.latent
    own = model.num_heads * (latent.query_dim + latent.value_dim if latent else 2 * model.head_dim)
    content = 2 * latent.value_dim * model.num_heads if latent else own
    dense = read_shape(DENSE)
    dense_bits = 2 * dense.num_layers * dense.num_kv_heads * dense.head_dim * BITS
    yield {
        "model": unit["model"],
        "attention": "latent" if latent else "grouped",
        "layers": model.num_layers,
        "elements_per_token": elements,
        "kib_in_use": elements * BITS / 8 / 1024,
        "kib_stored": model.kv_bytes_per_token(BITS // 8) / 1024,
        "tokens_per_gib": 2**30 // model.kv_bytes_per_token(BITS // 8),
        "less_than_dense": 1 - elements * BITS / dense_bits,
        "less_than_dense_at_6_bits": 1 - elements * QUANTISED_BITS / dense_bits,
        "less_than_own_heads": 1 - elements / (model.num_layers * content),
        "less_than_own_heads_rotated": 1 - elements / (model.num_layers * own),
        "parameters_billion": model.num_parameters / 1e9,
    }


def _plot(rows: list[TableRow], figure: Any) -> None:
    """KiB that a token keeps in all layers, at 16 bits."""
    (axes,) = panels(figure, ["keys and values of one token"], columns=1)
    ordered = sorted(rows, key=lambda r: r["kib_stored"])
    bars(axes, [r["model"] for r in ordered], {"": [r["kib_stored"] for r in ordered]})
    label_axes(axes, "KiB a token")


_ABSTRACT = "DeepSeek-V2, abstract"
EXPERIMENT = Experiment(
    name="kv-per-token",
    question="How many bytes does a token keep, and how much smaller does latent attention make it?",
    kind="counted",
    definition=(
        "elements_per_token: lanes of all layers that hold something; kib_stored: in whole vectors of 128 lanes, as "
        "the pool holds them; less_than_dense: against DeepSeek 67B (95 layers, 8 KV heads of 128) at 16 bits, at "
        "equal bits or with 6 bits against its 16; less_than_own_heads: against a key and a value of 128 lanes for "
        "each of the model's own query heads at equal bits (rotated: with the keys' rotated lanes)"
    ),
    claims=(
        Claim(
            "DeepSeek-V2 below DeepSeek 67B, 6 bits against 16",
            0.933,
            _ABSTRACT,
            cell("less_than_dense_at_6_bits", model=V2),
            "identity",
            3,
        ),
        Claim(
            "the same at equal bits",
            0.822,
            "worked example",
            cell("less_than_dense", model=V2),
            "identity",
            3,
        ),
        Claim(
            "DeepSeek-V2 below 128 heads of its own",
            0.982,
            "worked example",
            cell("less_than_own_heads", model=V2),
            "identity",
            3,
        ),
        Claim(
            "elements a token, DeepSeek-V2",
            34560,
            "worked example",
            cell("elements_per_token", model=V2),
            "identity",
        ),
        Claim(
            "elements a token, DeepSeek 67B",
            194560,
            "worked example",
            cell("elements_per_token", model=DENSE),
            "identity",
        ),
    ),
    units=_units,
    run=_run,
    plot=_plot,
)
