"""The settings of the cache that an exploration knows, and what it refuses of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pagedjax.cache.rules import require
from pagedjax.config import CacheConfig, Config

# The other settings of `cache` are of a device, or reserve and share nothing.
EXPLORED = (
    "block_size",
    "num_blocks",
    "index",
    "policy",
    "hash",
    "prefix_caching",
    "verify_tokens",
    "dedup",
    "partial",
    "host_blocks",
)
START = CacheConfig(block_size=4, num_blocks=33)
MOST_BLOCKS = 4097  # each is drawn: as many as the grid has cells, and the null block

Choices = Mapping[str, Sequence[str]]


def settings_of(settings: CacheConfig) -> dict[str, Any]:
    """What an exploration knows of the settings, name to value."""
    return {name: getattr(settings, name) for name in EXPLORED}


def change(settings: CacheConfig, values: Mapping[str, Any], choices: Choices) -> CacheConfig:
    """The settings with some changed; strings are read as on the command line.

    Raises:
        ValueError: An unknown setting, or a value that `check` or the setting itself refuses.
    """
    for name in values:
        require(
            name in EXPLORED, f"{name[:80]}: is no setting of an exploration; it has {', '.join(EXPLORED)}"
        )
    config = Config(cache=settings).replace({f"cache.{name}": value for name, value in values.items()})
    check(config.cache, choices)
    return config.cache


def check(settings: CacheConfig, choices: Choices) -> None:
    """Refuse what cannot be drawn, and names that are not among the choices: a name may load a module.

    Args:
        settings: Of the cache.
        choices: Setting → the values that it may have.

    Raises:
        ValueError: The setting, its value and what it may be.
    """
    blocks = settings.num_blocks
    require(
        blocks is not None and blocks <= MOST_BLOCKS,
        f"cache.num_blocks={'auto' if blocks is None else blocks}: must be a number up to {MOST_BLOCKS}, each block "
        "is drawn; try 33",
    )
    require(
        settings.host_blocks < MOST_BLOCKS,
        f"cache.host_blocks={settings.host_blocks}: must be below {MOST_BLOCKS}; try 16",
    )
    for name, names in choices.items():
        value = getattr(settings, name)
        require(value in names, f"cache.{name}={value[:80]}: must be one of {', '.join(names)}")
    for f in fields(CacheConfig):
        value = getattr(settings, f.name)
        require(
            f.name in EXPLORED or value == getattr(START, f.name),
            f"cache.{f.name}={value}: has no effect in an exploration; leave it out",
        )
