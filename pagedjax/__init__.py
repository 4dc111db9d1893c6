"""pagedjax: research on the paged KV cache, in JAX."""

__version__ = "0.1.0"
