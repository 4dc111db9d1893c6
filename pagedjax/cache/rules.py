"""Rules that more than one place checks, each in one home. Pure Python: whoever checks loads nothing for it."""

from __future__ import annotations

# Of one number of keys and values in the pool.
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e4m3_unscaled": 1}
SCALED = ("int8", "fp8_e4m3")  # of them, whose every head has a scale a token
SCALE_BYTES = 4  # of each head's key and value, where they have one


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def is_power_of_two(n: int) -> bool:
    """1, 2, 4, …"""
    return n > 0 and n & (n - 1) == 0


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n < 2.

    Example:
        >>> [next_power_of_two(n) for n in (0, 1, 5, 8)]
        [1, 1, 8, 8]
    """
    return 1 << max(n - 1, 0).bit_length()


def check_block_size(block_size: int, name: str = "block_size") -> None:
    """Raise ValueError unless block_size is a power of two between 1 and 1024.

    Args:
        block_size: Tokens per block.
        name: Of the setting, for the message.
    """
    require(
        1 <= block_size <= 1024 and is_power_of_two(block_size),
        f"{name}={block_size}: must be a power of two between 1 and 1024; try 16 or 32",
    )
