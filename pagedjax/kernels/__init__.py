"""Kernels of the paged KV cache: arrays in, arrays out; they know no request and no config file."""

from pagedjax.kernels.api import IMPLEMENTATIONS, KERNEL_PLUGINS, decode_chunk_tokens, paged_attention
from pagedjax.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pagedjax.kernels.cascade import merge_states
from pagedjax.kernels.layout import DecodeList, KVLayout, KVPool, RaggedBatch, make_pool
from pagedjax.kernels.plan import plan_ragged

__all__ = [
    "IMPLEMENTATIONS",
    "KERNEL_PLUGINS",
    "DecodeList",
    "KVLayout",
    "KVPool",
    "RaggedBatch",
    "copy_blocks",
    "decode_chunk_tokens",
    "gather_blocks",
    "make_pool",
    "merge_states",
    "paged_attention",
    "plan_ragged",
    "scatter_blocks",
    "write_kv",
]
