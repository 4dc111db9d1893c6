"""From settings to a cache manager: one way for the real engine and for the simulated one."""

from __future__ import annotations

from collections.abc import Sequence

from pagedjax.cache import EventLog, KVGroup, PagedManager, ReservationManager
from pagedjax.config import CacheConfig


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
