"""JAX's global settings as the engine needs them, whatever the program around it has set.

A user's program may have switched on 64-bit types, strict promotion of dtypes or a transfer guard for its own
arrays, or changed how keys are split. The engine's programs are traced and run under their own: its arrays are 32-bit
and cross to the device on purpose, and a seed gives the same tokens everywhere. `jax_debug_nans` and the precision of
matrix products stay the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """A context, or a decorator, under which the engine calls JAX. About 20 us."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.threefry_partitionable(True),
        jax.transfer_guard("allow"),
    ):
        yield
