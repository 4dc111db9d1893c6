"""Which part of every weight each of several devices holds: one table of rules for all families, without arrays.

Letters as in `kernels/layout.py`; n devices, device d. A leaf is cut along one axis, or whole on every device:

    heads         rows of q, k and v        device d: its N/n query heads | its KV heads' keys | their values
    latent heads  rows of q_up, k_up, v_up  device d: the rows of its N/n heads; what comes before them is whole
    head columns  columns of `out`          device d: the columns of its query heads
    mlp           rows of gate and up       device d: F/n rows of gate | the same rows of up
    mlp columns   columns of `down`         device d: the same F/n columns
    experts       rows of every expert's gate and up, columns of its `down`: as the MLP's, every device a part of each
    shared        as the MLP's
    sinks         one number a query head   device d: its own heads'
    vocabulary    rows of both embeddings   device d: ceil(V/n) tokens from d * ceil(V/n), the last ones padded with 0
    whole         norms, positions, biases behind a sum

So a device's part is a leaf of a smaller decoder (`Cut.local`), its own heads side by side, and sums over devices are
due at two places of a layer: behind `out` and behind `down`. Where KV heads are fewer, several devices hold the same;
a latent row is one head, which all devices hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.mixture import Experts

AXIS = "model"  # the mesh axis along which weights and pools are cut
Piece = tuple[int, int]  # entries start to stop of the one-device leaf, along the axis that is cut


@dataclass(frozen=True)
class Rule:
    """How leaves of some names are cut.

    Attributes:
        name: For people.
        axis: That is cut; None: every device holds the whole leaf.
        pieces: (cut, device) → what the device holds of the axis, in its order.
        leaves: Ends of the paths that it is for.
    """

    name: str
    axis: int | None
    pieces: Callable[[Cut, int], list[Piece]]
    leaves: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Cut:
    """A model dealt out to n devices.

    Attributes:
        config: The whole model.
        devices: n.
        setting: What the user calls n, for the refusal.

    Raises:
        ModelError: Heads or MLP do not divide; names the numbers that work.
    """

    config: ModelConfig
    devices: int
    setting: str = field(default="runtime.tensor_parallel", compare=False)

    def __post_init__(self) -> None:
        c, n = self.config, self.devices
        if n not in possible_devices(c):
            raise ModelError(
                f"{self.setting}={n}: {_dealt(c)} must be dealt out evenly; try {_one_of(possible_devices(c))}"
            )

    @property
    def heads(self) -> int:
        """Query heads of a device."""
        return self.config.num_heads // self.devices

    @property
    def kv_heads(self) -> int:
        """KV heads of a device, shared ones counted on each."""
        return max(1, self.config.num_kv_heads // self.devices)

    @property
    def kv_copies(self) -> int:
        """Devices that hold the same KV head."""
        return max(1, self.devices // self.config.num_kv_heads)

    @property
    def tokens(self) -> int:
        """Rows of a device's embedding; those that stand for no token are padding."""
        return -(-self.config.vocab_size // self.devices)

    @property
    def local(self) -> ModelConfig:
        """The smaller decoder that a device's parts make; ends of text are the host's affair."""
        return replace(
            self.config,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            d_mlp=self.config.d_mlp // self.devices,
            experts=self._local_experts,
            vocab_size=self.tokens,
            bos_token_id=None,
            eos_token_ids=(),
        )

    @property
    def _local_experts(self) -> Experts | None:
        e, n = self.config.experts, self.devices
        return None if e is None else replace(e, d_expert=e.d_expert // n, d_shared=e.d_shared // n)

    def first_kv_head(self, device: int) -> int:
        """Of the KV heads that a device holds."""
        return device // self.kv_copies if self.kv_copies > 1 else device * self.kv_heads

    def width(self, path: Iterable[str], size: int) -> int:
        """Entries of a device's part along the axis that is cut, of a one-device leaf of `size` entries there."""
        rule = rule_of(path)
        if rule.axis is None:
            return size
        return self.tokens if rule.name == "vocabulary" else sum(b - a for a, b in rule.pieces(self, 0))

    def shape(self, path: tuple[str, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the array that all devices' parts make side by side."""
        axis = rule_of(path).axis
        if axis is None:
            return whole
        return (*whole[:axis], self.devices * self.width(path, whole[axis]), *whole[axis + 1 :])


def possible_devices(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of devices to which a model can be dealt out."""
    if config.qk_norm_whole:
        return (1,)
    N, K, widths = config.num_heads, config.num_kv_heads, _mlp_widths(config)
    return tuple(
        n
        for n in range(1, N + 1)
        if N % n == 0 and not any(F % n for F in widths) and (K % n == 0 or n % K == 0)
    )


def _mlp_widths(config: ModelConfig) -> tuple[int, ...]:
    """Of the MLPs that the layers have: one for all, that of every expert, the shared one."""
    e = config.experts
    dense = () if all(config.has_experts(layer) for layer in range(config.num_layers)) else (config.d_mlp,)
    return dense if e is None else (*dense, e.d_expert, *((e.d_shared,) if e.d_shared else ()))


def _dealt(config: ModelConfig) -> str:
    """What has to be dealt out, in words."""
    if config.qk_norm_whole:
        return "a norm over all heads of a token"
    widths = " and ".join(map(str, _mlp_widths(config)))
    return f"{config.num_heads} query heads, {config.num_kv_heads} KV heads and an MLP of {widths}"


def _one_of(numbers: tuple[int, ...]) -> str:
    words = [str(n) for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def rule_of(path: Iterable[str]) -> Rule:
    """The rule that a leaf follows, by the end of its path."""
    path = tuple(path)
    return next(rule for rule in RULES if any(path[len(path) - len(end) :] == end for end in rule.leaves))


def _part(whole: int, devices: int, device: int) -> Piece:
    width = whole // devices
    return device * width, (device + 1) * width


def _heads(cut: Cut, device: int) -> list[Piece]:
    c, H = cut.config, cut.config.head_dim
    first, kv = device * cut.heads, cut.first_kv_head(device)
    keys = c.num_heads + kv
    values = keys + c.num_kv_heads
    parts = [(first, cut.heads), (keys, cut.kv_heads), (values, cut.kv_heads)]
    return [(at * H, (at + count) * H) for at, count in parts]


def _head_columns(cut: Cut, device: int) -> list[Piece]:
    return [_part(cut.config.mixed_width, cut.devices, device)]


def _latent_heads(lanes: str) -> Callable[[Cut, int], list[Piece]]:
    def pieces(cut: Cut, device: int) -> list[Piece]:
        return [_part(cut.config.num_heads * getattr(cut.config.latent, lanes), cut.devices, device)]

    return pieces


def _sinks(cut: Cut, device: int) -> list[Piece]:
    return [_part(cut.config.num_heads, cut.devices, device)]


def _mlp(cut: Cut, device: int) -> list[Piece]:
    return _gate_and_up(cut, cut.config.d_mlp, device)


def _gate_and_up(cut: Cut, F: int, device: int) -> list[Piece]:
    start, stop = _part(F, cut.devices, device)
    return [(start, stop), (F + start, F + stop)] if cut.config.gated_mlp else [(start, stop)]


def _mlp_columns(cut: Cut, device: int) -> list[Piece]:
    return [_part(cut.config.d_mlp, cut.devices, device)]


def _mixture(cut: Cut) -> Experts:
    assert cut.config.experts is not None, "only models with experts have such leaves"
    return cut.config.experts


def _experts(cut: Cut, device: int) -> list[Piece]:
    e = _mixture(cut)
    one = _gate_and_up(cut, e.d_expert, device)
    return [(2 * e.d_expert * i + a, 2 * e.d_expert * i + b) for i in range(e.num_experts) for a, b in one]


def _expert_columns(cut: Cut, device: int) -> list[Piece]:
    return [_part(_mixture(cut).d_expert, cut.devices, device)]


def _shared(cut: Cut, device: int) -> list[Piece]:
    return _gate_and_up(cut, _mixture(cut).d_shared, device)


def _shared_columns(cut: Cut, device: int) -> list[Piece]:
    return [_part(_mixture(cut).d_shared, cut.devices, device)]


def _vocabulary(cut: Cut, device: int) -> list[Piece]:
    start, V = device * cut.tokens, cut.config.vocab_size
    return [(min(start, V), min(start + cut.tokens, V))]


RULES = (
    Rule("heads", 0, _heads, (("qkv", "weight"), ("qkv", "bias"))),
    Rule("latent heads", 0, _latent_heads("query_dim"), (("q_up", "weight"),)),
    Rule("latent heads", 0, _latent_heads("nope_dim"), (("k_up", "weight"),)),
    Rule("latent heads", 0, _latent_heads("value_dim"), (("v_up", "weight"),)),
    Rule("head columns", 1, _head_columns, (("out", "weight"),)),
    Rule("sinks", 0, _sinks, (("sinks",),)),
    Rule("experts", 0, _experts, (("expert_up", "weight"), ("expert_up", "bias"))),
    Rule("expert columns", 1, _expert_columns, (("expert_down", "weight"),)),
    Rule("shared", 0, _shared, (("shared", "up", "weight"), ("shared", "up", "bias"))),
    Rule("shared columns", 1, _shared_columns, (("shared", "down", "weight"),)),
    Rule("mlp", 0, _mlp, (("up", "weight"), ("up", "bias"))),
    Rule("mlp columns", 1, _mlp_columns, (("down", "weight"),)),
    Rule("vocabulary", 0, _vocabulary, (("embed",), ("lm_head", "weight"))),
    Rule("whole", None, lambda cut, device: [], ((),)),
)
