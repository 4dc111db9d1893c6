"""Where the two halves meet: packing plans into arrays and running them on a jax device."""

from pagedjax.engine.shapes import Bucket, Buckets
from pagedjax.runtime.adjust import Adjustments
from pagedjax.runtime.batch import StepBatch, pack
from pagedjax.runtime.runner import JaxRunner
from pagedjax.runtime.sampling import SamplingBatch, sample_tokens

__all__ = [
    "Adjustments",
    "Bucket",
    "Buckets",
    "JaxRunner",
    "SamplingBatch",
    "StepBatch",
    "pack",
    "sample_tokens",
]
