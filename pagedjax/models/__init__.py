"""Models: one Flax decoder, its weights, and where they come from."""

from pagedjax.models.decoder import abstract_params, forward, logits, make_decoder
from pagedjax.models.hub import LoadedModel, convert, load_model

__all__ = ["LoadedModel", "abstract_params", "convert", "forward", "load_model", "logits", "make_decoder"]
