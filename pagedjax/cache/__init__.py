"""Paged KV block management on the host: blocks, prefix indexes, eviction, managers. Never imports jax."""

from pagedjax.cache.hashing import ExtraKeys, HashScheme, MediaItem, TokenChain

__all__ = ["ExtraKeys", "HashScheme", "MediaItem", "TokenChain"]
