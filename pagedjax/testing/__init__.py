"""What tests, examples and plug-ins share: a tiny seeded model that needs no file."""

from pagedjax.testing.tiny import seeded_tensors, tiny_config, tiny_model, tiny_params

__all__ = ["seeded_tensors", "tiny_config", "tiny_model", "tiny_params"]
