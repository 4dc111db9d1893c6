"""Models: what describes one, the Flax decoder, its weights, and where they come from.

The host half reads `pagedjax.models.config` and `pagedjax.models.tokenizer`, so nothing here loads jax before a
name that needs it is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Name -> module that defines it.
_PUBLIC = {
    "LoadedModel": "pagedjax.models.hub",
    "ModelConfig": "pagedjax.models.config",
    "abstract_params": "pagedjax.models.decoder",
    "convert": "pagedjax.models.hub",
    "forward": "pagedjax.models.decoder",
    "load_model": "pagedjax.models.hub",
    "logits": "pagedjax.models.decoder",
    "make_decoder": "pagedjax.models.decoder",
}

if TYPE_CHECKING:
    from pagedjax.models.config import ModelConfig
    from pagedjax.models.decoder import abstract_params, forward, logits, make_decoder
    from pagedjax.models.hub import LoadedModel, convert, load_model

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "abstract_params",
    "convert",
    "forward",
    "load_model",
    "logits",
    "make_decoder",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pagedjax.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
