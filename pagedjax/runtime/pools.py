"""How large the KV pools are: one per attention window or one for all layers, and whether the machine holds them."""

from __future__ import annotations

import dataclasses

import jax
import psutil

from pagedjax.cache import KVGroup
from pagedjax.config import Config
from pagedjax.engine.managers import size_groups
from pagedjax.kernels import KVLayout
from pagedjax.models.config import LayerGroup, ModelConfig


def plan_pools(
    model: ModelConfig, config: Config, max_model_len: int
) -> tuple[list[KVGroup], list[KVLayout]]:
    """KV groups and the shapes of their pools: one per attention window, or one for all layers.

    Args:
        model: The decoder's shapes.
        config: All settings; the `cache` section says how much memory there is.
        max_model_len: Longest sequence in tokens.

    Raises:
        ValueError: The memory is too small for the groups.
    """
    groups = model.layer_groups
    if not config.cache.window_groups:
        groups = (LayerGroup(None, tuple(range(model.num_layers))),)
    one_block = [
        KVLayout(
            len(group.layers),
            1,
            config.cache.block_size,
            model.num_kv_heads,
            model.head_dim,
            config.cache.dtype or config.model.dtype,
        )
        for group in groups
    ]
    step_tokens = config.scheduler.chunk_tokens or config.scheduler.token_budget
    kv_groups = size_groups(
        config.cache,
        [group.window for group in groups],
        [layout.num_bytes for layout in one_block],
        max_model_len=max_model_len,
        step_tokens=step_tokens if config.scheduler.chunked_prefill else max_model_len,
    )
    layouts = [
        dataclasses.replace(layout, num_blocks=group.num_blocks)
        for layout, group in zip(one_block, kv_groups, strict=True)
    ]
    return kv_groups, layouts


def check_memory(pool_bytes: int, num_blocks: int) -> None:
    """Refuse a pool the machine cannot hold, before the allocator is killed for it.

    Raises:
        ValueError: Names both sizes.
    """
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        available = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    else:
        available = psutil.virtual_memory().available
    if pool_bytes > available:
        raise ValueError(
            f"KV pool of {num_blocks} blocks: needs {pool_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB is "
            "free; lower cache.num_blocks or cache.memory_bytes"
        )
