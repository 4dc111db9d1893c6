"""pagedjax: research on the paged KV cache, in JAX.

`import pagedjax` loads nothing but this file. Every public name below is imported when it is first
touched, so the host half can be used on a machine that has no accelerator stack to load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Name -> module that defines it. The one list of what the package offers at its top.
_PUBLIC = {
    "CacheConfig": "pagedjax.config",
    "Config": "pagedjax.config",
    "ModelSource": "pagedjax.config",
    "RuntimeConfig": "pagedjax.config",
    "SchedulerConfig": "pagedjax.config",
    "CompletionOutput": "pagedjax.engine.request",
    "FinishReason": "pagedjax.engine.request",
    "RequestOutput": "pagedjax.engine.request",
    "SamplingParams": "pagedjax.engine.request",
    "ExtraKeys": "pagedjax.cache",
    "PagedManager": "pagedjax.cache",
    "TokenChain": "pagedjax.cache",
    "Engine": "pagedjax.engine",
    "LLM": "pagedjax.llm",
}

if TYPE_CHECKING:
    from pagedjax.cache import ExtraKeys, PagedManager, TokenChain
    from pagedjax.config import CacheConfig, Config, ModelSource, RuntimeConfig, SchedulerConfig
    from pagedjax.engine import Engine
    from pagedjax.engine.request import CompletionOutput, FinishReason, RequestOutput, SamplingParams
    from pagedjax.llm import LLM

__all__ = [
    "LLM",
    "CacheConfig",
    "CompletionOutput",
    "Config",
    "Engine",
    "ExtraKeys",
    "FinishReason",
    "ModelSource",
    "PagedManager",
    "RequestOutput",
    "RuntimeConfig",
    "SamplingParams",
    "SchedulerConfig",
    "TokenChain",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
