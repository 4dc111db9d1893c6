"""From settings to a cache manager: one way for the real engine and for the simulated one."""

from __future__ import annotations

from collections.abc import Sequence

from pagedjax.cache import EventLog, KVGroup, PagedManager, ReservationManager, split_blocks
from pagedjax.cache.groups import most_blocks
from pagedjax.config import CacheConfig


def size_groups(
    config: CacheConfig,
    windows: Sequence[int | None],
    block_bytes: Sequence[int],
    *,
    max_model_len: int,
    step_tokens: int,
) -> list[KVGroup]:
    """How many blocks each KV group gets.

    The groups' numbers stand as the most blocks that a sequence of `max_model_len` holds in each, so that
    they run out together; a windowed group has at least one sequence's.

    Args:
        config: `num_blocks`, where given, is the first group's; else `memory_bytes` is split.
        windows: Attention window of each group's layers; None: all keys.
        block_bytes: Bytes of one block in each group's pool.
        max_model_len: Longest sequence in tokens.
        step_tokens: Most tokens of one sequence in a step.

    Raises:
        ValueError: The memory is too small for the groups.
    """
    weights = [most_blocks(window, config.block_size, max_model_len, step_tokens) for window in windows]
    if config.num_blocks is not None:
        usable = config.num_blocks - 1
        counts = [1 + -(-usable * weight // weights[0]) for weight in weights]
    elif len(windows) == 1:
        counts = [max(2, config.memory_bytes // block_bytes[0])]
    else:
        counts = split_blocks(config.memory_bytes, block_bytes, weights)
    least = [2 if window is None else weight + 1 for window, weight in zip(windows, weights)]
    if config.num_blocks is not None:
        least[0] = 2  # a number that was asked for stays
    return [
        KVGroup(num_blocks=max(count, floor), window=window)
        for count, floor, window in zip(counts, least, windows)
    ]


def make_manager(
    config: CacheConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    groups: Sequence[KVGroup] | None = None,
    events: EventLog | None = None,
) -> PagedManager | ReservationManager:
    """The manager that the settings ask for.

    Args:
        config: The `cache` section.
        num_blocks: Blocks of the pool, the null block included; of each group that names no number.
        max_model_len: Longest sequence in tokens; caps reservations.
        groups: KV groups of the model; None is one full-attention group.
        events: Where changes of what is resident are logged.

    Raises:
        ValueError: Unknown index or policy, or reservations over several groups.
    """
    if config.reservation:
        if groups is not None and (len(groups) > 1 or groups[0].window is not None):
            raise ValueError(
                f"cache.reservation={config.reservation}: reserves in one pool; set cache.window_groups=false"
            )
        return ReservationManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            rule=config.reservation,
            max_tokens=max_model_len,
        )
    return PagedManager(
        num_blocks=num_blocks,
        block_size=config.block_size,
        index=config.index,
        policy=config.policy,
        dedup=config.dedup,
        partial=config.partial,
        groups=groups,
        prefix_caching=config.prefix_caching,
        host_blocks=config.host_blocks,
        events=events,
        verify_tokens=config.verify_tokens,
    )
