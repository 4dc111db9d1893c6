"""What a mixture of experts looks like: how many, how wide, and how a token's experts are chosen.

Nothing here knows jax; `models/experts.py` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.models.checks import ModelError, check_number, check_range

ROUTINGS = ("softmax", "softmax-of-chosen", "sigmoid")
GROUP_SCORES = ("best", "best-two")
LARGEST = 1 << 14  # experts, far above any model


@dataclass(frozen=True)
class Experts:
    """The MLPs of which each token uses a few.

    Attributes:
        num_experts: E.
        per_token: Experts that a token uses.
        d_expert: Width of one.
        layers: Whether layer l has experts; () is yes for all layers, the others have one MLP.
        routing: A token's score of each expert, from the router's logits. "softmax": over all experts, then the best
            are chosen; "softmax-of-chosen": the best logits are chosen, then softmax over these; "sigmoid": each by
            itself. Among equal scores the expert of the lower number is chosen.
        normalise: The chosen scores are divided by their sum.
        scale: Multiplies them at last.
        choice_bias: A bias joins the scores for the choice, not for the weights.
        num_groups, groups_per_token: Experts lie in so many equal groups, a token chooses within the best of them.
        group_score: A group's is its "best" expert's, or the sum of its "best-two".
        router_bias, expert_bias: Which matrices carry a bias.
        clamp: Not 0: gate and up are cut off there, and an expert is down((up + 1) * gate * sigmoid(alpha * gate)).
        alpha: Of experts that clamp.
        d_shared: Width of the MLP that every token uses beside its experts; 0 is none.

    Source:
        Shazeer et al., arXiv 1701.06538; groups and shared experts: DeepSeek-V2, arXiv 2405.04434, §2.2; sigmoid and
        the bias of the choice: DeepSeek-V3, arXiv 2412.19437, §2.1.2.
    """

    num_experts: int
    per_token: int
    d_expert: int
    layers: tuple[bool, ...] = ()
    routing: str = "softmax"
    normalise: bool = False
    scale: float = 1.0
    choice_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: str = "best"
    router_bias: bool = False
    expert_bias: bool = False
    clamp: float = 0.0
    alpha: float = 1.702
    d_shared: int = 0

    def __post_init__(self) -> None:
        check_range("num_experts", self.num_experts, 1, LARGEST)
        check_range("experts per token", self.per_token, 1, self.num_experts)
        check_range("d_expert", self.d_expert, 1, 1 << 20)
        check_range("d_shared", self.d_shared, 0, 1 << 20)
        check_range("expert groups", self.num_groups, 1, self.num_experts)
        check_range("expert groups per token", self.groups_per_token, 1, self.num_groups)
        check_number("expert scale", self.scale, above=0.0)
        check_number("expert alpha", self.alpha, above=0.0)
        check_number("expert clamp", self.clamp, least=0.0)
        for name, value, kinds in (
            ("routing", self.routing, ROUTINGS),
            ("group_score", self.group_score, GROUP_SCORES),
        ):
            if value not in kinds:
                raise ModelError(f"{name}={value!r}: must be one of {', '.join(kinds)}; check the config")
        size = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or self.per_token > self.groups_per_token * size:
            raise ModelError(
                f"num_experts={self.num_experts} in {self.num_groups} groups, {self.groups_per_token} of them a token: "
                f"groups must be equal and hold the {self.per_token} experts of a token; check the config"
            )
        if self.group_score == "best-two" and self.num_groups > 1 and size < 2:
            raise ModelError(
                f"{self.num_groups} groups of {size} expert: a group's score is that of its best two; check the config"
            )

    def in_layer(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.layers[layer] if self.layers else True

    def share_used(self, tokens: float) -> float:
        """Expected share of the experts that a step of so many tokens uses, each token choosing evenly.

        An expert is passed over by one token with probability 1 - per_token / num_experts.
        """
        return 1.0 - (1.0 - self.per_token / self.num_experts) ** tokens
