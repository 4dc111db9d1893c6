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
from pagedjax.models.decoder import pool_layout
from pagedjax.models.sharding import Cut


def plan_pools(
    model: ModelConfig, config: Config, max_model_len: int
) -> tuple[list[KVGroup], list[KVLayout]]:
    """KV groups and the shapes of their pools: one per attention window, or one for all layers.

    Args:
        model: The decoder's shapes.
        config: All settings; the `cache` section says how much memory there is, on all devices together.
        max_model_len: Longest sequence in tokens.

    Returns:
        The groups, and the layouts of the whole model's pools.

    Raises:
        ValueError: The memory is too small for the groups, or the model cannot be dealt out to so many devices.
    """
    groups = model.layer_groups
    if not config.cache.window_groups:
        groups = (LayerGroup(None, tuple(range(model.num_layers))),)
    cut = Cut(model, config.runtime.tensor_parallel)
    one_block = [
        pool_layout(model, 1, config.cache.block_size, kv_dtype(config), len(group.layers))
        for group in groups
    ]
    step_tokens = config.scheduler.chunk_tokens or config.scheduler.token_budget
    kv_groups = size_groups(
        config.cache,
        [group.window for group in groups],
        [
            cut.devices * dataclasses.replace(layout, num_kv_heads=cut.kv_heads).num_bytes
            for layout in one_block
        ],
        max_model_len=max_model_len,
        step_tokens=step_tokens if config.scheduler.chunked_prefill else max_model_len,
    )
    layouts = [
        dataclasses.replace(layout, num_blocks=group.num_blocks)
        for layout, group in zip(one_block, kv_groups, strict=True)
    ]
    return kv_groups, layouts


def kv_dtype(config: Config) -> str:
    """Of the pool: as asked for, else as the weights, which are not keys and values where they are int8."""
    return config.cache.dtype or ("float32" if config.model.dtype == "int8" else config.model.dtype)


def check_memory(pool_bytes: int, num_blocks: int, devices: int = 1) -> None:
    """Refuse a pool the machine cannot hold, before the allocator is killed for it.

    Args:
        pool_bytes: On all devices of this process together.
        num_blocks: For the message.
        devices: That hold equal parts of it; CPU devices share the machine's memory.

    Raises:
        ValueError: Names both sizes.
    """
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        available = devices * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    else:
        available = psutil.virtual_memory().available
    if pool_bytes > available:
        raise ValueError(
            f"KV pool of {num_blocks} blocks: needs {pool_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB is "
            "free; lower cache.num_blocks or cache.memory_bytes"
        )
