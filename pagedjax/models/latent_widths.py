"""The widths of multi-head latent attention, as a config carries them; `latent` computes with them."""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.models.checks import ModelError, check_number, check_range

_MOST_LANES, _MOST_RANK = 1 << 12, 1 << 17  # as `config.LIMITS` has them of heads and of x


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention: all heads' keys and values of a token are one low-rank row.

    Attributes:
        kv_lora_rank: Lanes of the latent that keys and values are multiplied out of.
        q_lora_rank: Lanes that queries are multiplied out of; 0: straight out of x.
        nope_dim, rope_dim: Lanes of a head's query and key without positions, and rotated; all heads share the rotated
            lanes of a key.
        value_dim: Lanes of a head's value.
        interleaved_rope: Files pair rotated lanes (2i, 2i + 1); what is loaded pairs (i, i + rope_dim / 2).
        norm_eps: Added to the variance in the norms of both low-rank rows.

    Source:
        DeepSeek-V2: arXiv 2405.04434, §2.1.
    """

    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_lora_rank: int = 0
    interleaved_rope: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "nope_dim", "rope_dim", "value_dim"):
            check_range(f"latent {name}", getattr(self, name), 1, _MOST_LANES)
        check_range("latent q_lora_rank", self.q_lora_rank, 0, _MOST_RANK)
        if self.rope_dim % 2:
            raise ModelError(
                f"latent rope_dim={self.rope_dim}: rotary positions need an even number; check the config"
            )
        check_number("latent norm_eps", self.norm_eps, above=0.0)

    @property
    def row_dim(self) -> int:
        """Lanes of the one row that a token keeps in a layer: the latent, then the rotated key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Lanes of a head's query."""
        return self.nope_dim + self.rope_dim
