"""What tests, examples and plug-ins share: a tiny seeded model that needs no file, and suites for plug-ins."""

from pagedjax.testing.indexes import IndexSuite
from pagedjax.testing.kernels import KernelSuite
from pagedjax.testing.policies import PolicySuite
from pagedjax.testing.tiny import seeded_tensors, tiny_config, tiny_latent_config, tiny_model, tiny_params

__all__ = [
    "IndexSuite",
    "KernelSuite",
    "PolicySuite",
    "seeded_tensors",
    "tiny_config",
    "tiny_latent_config",
    "tiny_model",
    "tiny_params",
]
