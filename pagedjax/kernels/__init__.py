"""Kernels of the paged KV cache: arrays in, arrays out; they know no request and no config file."""

from pagedjax.kernels.api import (
    IMPLEMENTATIONS,
    KERNEL_PLUGINS,
    paged_attention,
    plan_sizes,
    write_and_attend,
)
from pagedjax.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pagedjax.kernels.cascade import merge_states
from pagedjax.kernels.layout import DecodeList, KVLayout, KVPool, RaggedBatch, make_pool
from pagedjax.kernels.plan import plan_ragged
from pagedjax.kernels.tuning import PACKAGED, Tuning

__all__ = [
    "IMPLEMENTATIONS",
    "KERNEL_PLUGINS",
    "PACKAGED",
    "DecodeList",
    "KVLayout",
    "KVPool",
    "RaggedBatch",
    "Tuning",
    "copy_blocks",
    "gather_blocks",
    "make_pool",
    "merge_states",
    "paged_attention",
    "plan_ragged",
    "plan_sizes",
    "scatter_blocks",
    "write_and_attend",
    "write_kv",
]
