"""Where each family keeps its weights: one row of names per family and file format.

The decoder has one set of leaves. A row of `NAMES` says which tensors of a file make each leaf, and the few
ways in which files differ: fused or separate matrices, [out, in] or [in, out], rotary pairs side by side or
half a head apart, a one that is left out of norm scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.decoder import layer_name


@dataclass(frozen=True)
class Part:
    """One tensor of a file and how it enters a leaf.

    Attributes:
        name, shape: As they must be in the file.
        transpose: The file has [in, out].
        head_dim: Not 0: rows of each head pair (2i, 2i + 1); they move to (i, i + head_dim / 2).
        rotated: Not 0: only the last so many rows of each head do, the others stay.
        add: Added to every value.
        skip: Rows left out in front.
        index: Which entry of the file's first axis it is; None: the whole tensor. `shape` is then that entry's.
        count: Entries of that axis.
        take: (size, start, stop): of every `size` rows those from start to stop enter; () is all.
    """

    name: str
    shape: tuple[int, ...]
    transpose: bool = False
    head_dim: int = 0
    rotated: int = 0
    add: float = 0.0
    skip: int = 0
    index: int | None = None
    count: int = 0
    take: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        return self.shape if self.index is None else (self.count, *self.shape)


@dataclass(frozen=True)
class Leaf:
    """One array of the decoder, and the parts that lie one after the other on its first axis."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Names:
    """How one family spells its tensors in one format; templates of layer tensors hold {l}.

    Attributes:
        qkv, up: One fused tensor, or one per projection (q, k, v; gate, up).
        transpose: Matrices are [in, out].
        adjacent_pairs: Rotary pairs lie side by side in the rows of q and k.
        q, q_down, q_up, kv_down, kv_norm, kv_up: Of latent attention in place of qkv; q where queries have no
            rank of their own.
        k_up, v_up: What kv_up holds as one matrix a head, [in, out] of keys and [out, in] of values, each all heads in
            one tensor; of files that have no kv_up.
        norm_add: Norm scales are stored less this number.
        position_skip: Rows in front of the learned positions that no token uses.
        spare_layers: Layers behind the last that a file may hold and that the decoder has none of: they predict
            tokens beyond the next.
        ignored: Tensors that carry nothing for the decoder, as endings of their names.
        optional_prefix: In front of every name but lm_head's; a file saved without its head leaves it out.
        router, choice_bias, sinks: Of layers that have them; the last two name whole tensors.
        expert_up, expert_down: Templates of each expert's tensors with {e}; without it one tensor holds all experts
            along its first axis, and its bias is a tensor named with expert_bias behind it.
        expert_transpose: Such a tensor's matrices are [in, out].
        expert_pairs: Rows of gate and up alternate in the one fused tensor.
        shared_up, shared_down: Of the MLP that all tokens use.
    """

    embed: str
    layer: str
    attn_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    final_norm: str
    lm_head: str
    q_norm: str = ""
    k_norm: str = ""
    attn_post_norm: str = ""
    mlp_post_norm: str = ""
    position_embed: str = ""
    q: str = ""
    q_down: str = ""
    q_up: str = ""
    kv_down: str = ""
    kv_norm: str = ""
    kv_up: str = ""
    k_up: str = ""
    v_up: str = ""
    transpose: bool = False
    adjacent_pairs: bool = False
    norm_add: float = 0.0
    position_skip: int = 0
    spare_layers: int = 0
    ignored: tuple[str, ...] = ()
    optional_prefix: str = ""
    router: str = ""
    choice_bias: str = ""
    sinks: str = ""
    expert_up: tuple[str, ...] = ()
    expert_down: str = ""
    expert_weight: str = ".weight"
    expert_bias: str = ".bias"
    expert_transpose: bool = False
    expert_pairs: bool = False
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""


_LLAMA_HF = Names(
    embed="embed_tokens",
    layer="layers.{l}.",
    attn_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    final_norm="norm",
    lm_head="lm_head",
    ignored=("rotary_emb.inv_freq",),
    optional_prefix="model.",
    router="mlp.gate",
    choice_bias="mlp.gate.e_score_correction_bias",
    expert_up=("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    expert_down="mlp.experts.{e}.down_proj",
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
_LLAMA_GGUF = Names(
    embed="token_embd",
    layer="blk.{l}.",
    attn_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    out="attn_output",
    mlp_norm="ffn_norm",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    final_norm="output_norm",
    lm_head="output",
    adjacent_pairs=True,
    ignored=("rope_freqs.weight",),
    router="ffn_gate_inp",
    choice_bias="exp_probs_b.bias",
    sinks="attn_sinks.weight",
    expert_up=("ffn_gate_exps", "ffn_up_exps"),
    expert_down="ffn_down_exps",
    shared_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
)

_QK_NORMS_HF: dict[str, Any] = dict(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
_GEMMA_HF: dict[str, Any] = dict(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norm_add=1.0,
)
_MIXTRAL_HF = replace(
    _LLAMA_HF,
    router="block_sparse_moe.gate",
    expert_up=("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    expert_down="block_sparse_moe.experts.{e}.w2",
)
_GPT_OSS_HF = replace(
    _LLAMA_HF,
    sinks="self_attn.sinks",
    router="mlp.router",
    expert_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
    expert_weight="",
    expert_bias="_bias",
    expert_transpose=True,
    expert_pairs=True,
)
_GEMMA_GGUF: dict[str, Any] = dict(
    adjacent_pairs=False, attn_post_norm="post_attention_norm", mlp_post_norm="post_ffw_norm"
)
_DEEPSEEK_HF: dict[str, Any] = dict(
    qkv=(),
    q="self_attn.q_proj",
    q_down="self_attn.q_a_proj",
    q_norm="self_attn.q_a_layernorm",
    q_up="self_attn.q_b_proj",
    kv_down="self_attn.kv_a_proj_with_mqa",
    kv_norm="self_attn.kv_a_layernorm",
    kv_up="self_attn.kv_b_proj",
    spare_layers=1,
)
_DEEPSEEK_GGUF: dict[str, Any] = dict(
    qkv=(),
    q="attn_q",
    q_down="attn_q_a",
    q_norm="attn_q_a_norm",
    q_up="attn_q_b",
    kv_down="attn_kv_a_mqa",
    kv_norm="attn_kv_a_norm",
    kv_up="attn_kv_b",
    k_up="attn_k_b",
    v_up="attn_v_b",
)
_GPT2_HF = Names(
    embed="wte",
    position_embed="wpe",
    layer="h.{l}.",
    attn_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    final_norm="ln_f",
    lm_head="lm_head",
    transpose=True,
    ignored=(".attn.bias", ".attn.masked_bias"),
    optional_prefix="transformer.",
)
_OPT_HF = Names(
    embed="decoder.embed_tokens",
    position_embed="decoder.embed_positions",
    position_skip=2,
    layer="decoder.layers.{l}.",
    attn_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    final_norm="decoder.final_layer_norm",
    lm_head="lm_head",
    optional_prefix="model.",
)

# Mistral and SmolLM2/3 spell theirs as Llama does, and so do Qwen2 and Qwen3 with what they add; only the
# GGUF files of the two pair rotary dimensions half a head apart.
NAMES: dict[tuple[str, str], Names] = {
    ("hf", "llama"): replace(_LLAMA_HF, **_QK_NORMS_HF),
    ("hf", "mixtral"): _MIXTRAL_HF,
    ("hf", "gpt_oss"): _GPT_OSS_HF,
    ("hf", "phi3"): replace(_LLAMA_HF, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    ("hf", "gemma2"): replace(_LLAMA_HF, **_GEMMA_HF),
    ("hf", "gemma3"): replace(_LLAMA_HF, **_GEMMA_HF, **_QK_NORMS_HF),
    ("hf", "deepseek"): replace(_LLAMA_HF, **_DEEPSEEK_HF),
    ("hf", "gpt2"): _GPT2_HF,
    ("hf", "opt"): _OPT_HF,
    ("gguf", "llama"): _LLAMA_GGUF,
    # Gemma's scales are stored whole here. gpt-oss calls the norm in front of its experts by the name of Gemma's.
    ("gguf", "gemma2"): replace(_LLAMA_GGUF, **_GEMMA_GGUF),
    ("gguf", "gemma3"): replace(_LLAMA_GGUF, **_GEMMA_GGUF, q_norm="attn_q_norm", k_norm="attn_k_norm"),
    ("gguf", "gpt_oss"): replace(_LLAMA_GGUF, adjacent_pairs=False, mlp_norm="post_attention_norm"),
    ("gguf", "deepseek"): replace(_LLAMA_GGUF, **_DEEPSEEK_GGUF),
    ("gguf", "qwen"): replace(_LLAMA_GGUF, adjacent_pairs=False, q_norm="attn_q_norm", k_norm="attn_k_norm"),
}


def names_for(file_format: str, family: str, tensors: Iterable[str] = ()) -> Names:
    """The row of `NAMES` for a format ("hf" or "gguf") and a family.

    Args:
        file_format, family: Which row.
        tensors: Names in the file, which say whether it leaves the family's prefix out, and which way of keeping
            the same matrices it has.

    Raises:
        ModelError: There is no such row.
    """
    if (file_format, family) not in NAMES:
        have = ", ".join(sorted(f for fmt, f in NAMES if fmt == file_format))
        raise ModelError(f"family {family!r} in {file_format} files: no weight names; have {have}")
    names = NAMES[file_format, family]
    found = list(tensors)
    if names.k_up and any(name.endswith(f"{names.kv_up}.weight") for name in found):
        # Files made for both ways hold the matrices twice.
        twice = (f"{names.k_up}.weight", f"{names.v_up}.weight")
        names = replace(names, k_up="", v_up="", ignored=(*names.ignored, *twice))
    prefix, bare = names.optional_prefix, names.layer.partition("{")[0]
    if any(name.startswith(bare) for name in found) and not any(name.startswith(prefix) for name in found):
        return names
    return replace(
        names,
        embed=prefix + names.embed,
        position_embed=prefix + names.position_embed,
        layer=prefix + names.layer,
        final_norm=prefix + names.final_norm,
    )


def leaves_of(config: ModelConfig, names: Names, *, tied: bool) -> list[Leaf]:
    """Every leaf of the decoder with the tensors that make it.

    Args:
        config: Shapes and switches.
        names: A row of `NAMES`.
        tied: The output matrix is read from the embedding.
    """
    c = config
    vocab = (c.vocab_size, c.d_model)
    leaves = [Leaf(("embed",), vocab, (Part(f"{names.embed}.weight", vocab),))]
    if c.positions == "learned":
        shape = (c.max_model_len, c.d_model)
        stored = (c.max_model_len + names.position_skip, c.d_model)
        part = Part(f"{names.position_embed}.weight", stored, skip=names.position_skip)
        leaves.append(Leaf(("position_embed",), shape, (part,)))
    for layer in range(c.num_layers):
        leaves += _layer_leaves(c, names, layer)
    leaves += _norm(c, names, ("final_norm",), names.final_norm, c.d_model)
    head = names.embed if tied else names.lm_head
    leaves.append(Leaf(("lm_head", "weight"), vocab, (Part(f"{head}.weight", vocab),)))
    return leaves


def _layer_leaves(c: ModelConfig, names: Names, layer: int) -> list[Leaf]:
    prefix, root = names.layer.format(l=layer), (layer_name(layer),)
    mlp = (c.d_mlp, c.d_mlp) if c.gated_mlp else (c.d_mlp,)
    leaves = _norm(c, names, (*root, "attn_norm"), prefix + names.attn_norm, c.d_model)
    leaves += _latent_leaves(c, names, prefix, root) if c.latent else _qkv_leaves(c, names, prefix, root)
    up = [(prefix + n, w, 0) for n, w in zip(names.up, mlp)]
    if len(names.up) == 1:
        up = [(prefix + names.up[0], sum(mlp), 0)]
    out = [(prefix + names.out, c.d_model, 0)]
    leaves += _linear(names, (*root, "out"), c.mixed_width, out, c.out_bias)
    leaves += _norm(c, names, (*root, "mlp_norm"), prefix + names.mlp_norm, c.d_model)
    if c.has_experts(layer):
        leaves += expert_leaves(c, names, prefix, (*root, "mlp"))
    else:
        leaves += _mlp_leaves(c, names, (*root, "mlp"), up, prefix + names.down, c.d_mlp)
    if c.sinks:
        leaves.append(Leaf((*root, "sinks"), (c.num_heads,), (Part(prefix + names.sinks, (c.num_heads,)),)))
    if c.qk_norm:
        whole_q, whole_k = (c.num_heads, c.num_kv_heads) if c.qk_norm_whole else (1, 1)
        leaves += _norm(c, names, (*root, "q_norm"), prefix + names.q_norm, whole_q * c.head_dim)
        leaves += _norm(c, names, (*root, "k_norm"), prefix + names.k_norm, whole_k * c.head_dim)
    if c.post_norms:
        leaves += _norm(c, names, (*root, "attn_post_norm"), prefix + names.attn_post_norm, c.d_model)
        leaves += _norm(c, names, (*root, "mlp_post_norm"), prefix + names.mlp_post_norm, c.d_model)
    return leaves


def _mlp_leaves(
    c: ModelConfig, names: Names, root: tuple[str, ...], up: list[tuple[str, int, int]], down: str, width: int
) -> list[Leaf]:
    leaves = _linear(names, (*root, "up"), c.d_model, up, c.mlp_bias)
    return leaves + _linear(names, (*root, "down"), width, [(down, c.d_model, 0)], c.mlp_bias)


def expert_leaves(c: ModelConfig, names: Names, prefix: str, root: tuple[str, ...]) -> list[Leaf]:
    """Router, experts one after the other, and the shared MLP of a layer with experts."""
    e = c.experts
    assert e is not None
    if not names.router:
        raise ModelError(f"experts: no weight names of this family in such files; have {prefix}… of others")
    leaves = _linear(
        names, (*root, "router"), c.d_model, [(prefix + names.router, e.num_experts, 0)], e.router_bias
    )
    if e.choice_bias:
        bias = (e.num_experts,)
        leaves.append(Leaf((*root, "choice_bias"), bias, (Part(prefix + names.choice_bias, bias),)))
    fused = 2 * e.d_expert if len(names.expert_up) == 1 else e.d_expert
    stacks = (
        ("expert_up", names.expert_up, fused, c.d_model, fused if names.expert_pairs else 0),
        ("expert_down", (names.expert_down,), c.d_model, e.d_expert, 0),
    )
    for leaf, stems, width, d_in, pairs in stacks:
        rows = e.num_experts * len(stems) * width
        weight = _stack(names, [prefix + stem for stem in stems], e.num_experts, (width, d_in), pairs)
        leaves.append(Leaf((*root, leaf, "weight"), (rows, d_in), weight))
        if e.expert_bias:
            biases = _stack(names, [prefix + stem for stem in stems], e.num_experts, (width,), pairs)
            leaves.append(Leaf((*root, leaf, "bias"), (rows,), biases))
    if e.d_shared:
        up = [(prefix + name, e.d_shared, 0) for name in names.shared_up]
        leaves += _mlp_leaves(c, names, (*root, "shared"), up, prefix + names.shared_down, e.d_shared)
    return leaves


def _stack(
    names: Names, stems: list[str], count: int, shape: tuple[int, ...], pairs: int
) -> tuple[Part, ...]:
    """Parts of every expert's weights (two axes) or biases (one), expert by expert."""
    matrix = len(shape) == 2
    ending = names.expert_weight if matrix else names.expert_bias
    if "{e}" in stems[0]:
        return tuple(Part(stem.format(e=i) + ending, shape) for i in range(count) for stem in stems)
    turned = matrix and names.expert_transpose
    stored = shape[::-1] if turned else shape
    how: dict[str, Any] = dict(transpose=turned, head_dim=pairs, count=count)
    return tuple(Part(stem + ending, stored, index=i, **how) for i in range(count) for stem in stems)


def _qkv_leaves(c: ModelConfig, names: Names, prefix: str, root: tuple[str, ...]) -> list[Leaf]:
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    pairs = (c.head_dim, c.head_dim, 0) if names.adjacent_pairs else (0, 0, 0)
    qkv = [(prefix + n, w * c.head_dim, p) for n, w, p in zip(names.qkv, heads, pairs)]
    if len(names.qkv) == 1:
        qkv = [(prefix + names.qkv[0], sum(heads) * c.head_dim, 0)]
    return _linear(names, (*root, "qkv"), c.d_model, qkv, c.qkv_bias)


def _latent_leaves(c: ModelConfig, names: Names, prefix: str, root: tuple[str, ...]) -> list[Leaf]:
    """The matrices of latent attention: rotated rows are paired as the decoder does, kv_up is taken apart by heads."""
    a, N = c.latent, c.num_heads
    assert a is not None
    root = (*root, "latent")

    def paired(leaves: list[Leaf], head: int) -> list[Leaf]:
        if not a.interleaved_rope:
            return leaves
        return [
            replace(x, parts=tuple(replace(p, head_dim=head, rotated=a.rope_dim) for p in x.parts))
            for x in leaves
        ]

    def linear(name: str, tensor: str, d_in: int, width: int, bias: bool = False) -> list[Leaf]:
        return _linear(names, (*root, name), d_in, [(prefix + tensor, width, 0)], bias)

    leaves = []
    if a.q_lora_rank:
        leaves += linear("q_down", names.q_down, c.d_model, a.q_lora_rank, c.qkv_bias)
        leaves += _norm(c, names, (*root, "q_norm"), prefix + names.q_norm, a.q_lora_rank)
    up = (names.q_up, a.q_lora_rank) if a.q_lora_rank else (names.q, c.d_model)
    leaves += paired(linear("q_up", *up, N * a.query_dim), a.query_dim)
    leaves += paired(linear("kv_down", names.kv_down, c.d_model, a.row_dim, c.qkv_bias), a.row_dim)
    leaves += _norm(c, names, (*root, "kv_norm"), prefix + names.kv_norm, a.kv_lora_rank)
    rank = a.kv_lora_rank
    if names.k_up:
        k_up = _heads(f"{prefix}{names.k_up}.weight", N, (rank, a.nope_dim), transpose=True)
        leaves.append(Leaf((*root, "k_up", "weight"), (N * a.nope_dim, rank), k_up))
        v_up = _heads(f"{prefix}{names.v_up}.weight", N, (a.value_dim, rank))
        leaves.append(Leaf((*root, "v_up", "weight"), (N * a.value_dim, rank), v_up))
        return leaves
    head = a.nope_dim + a.value_dim
    for name, start, stop in (("k_up", 0, a.nope_dim), ("v_up", a.nope_dim, head)):
        part = Part(f"{prefix}{names.kv_up}.weight", (N * head, rank), take=(head, start, stop))
        leaves.append(Leaf((*root, name, "weight"), (N * (stop - start), rank), (part,)))
    return leaves


def _heads(name: str, count: int, shape: tuple[int, ...], transpose: bool = False) -> tuple[Part, ...]:
    """Parts of a tensor that holds one matrix a head."""
    return tuple(Part(name, shape, transpose=transpose, index=i, count=count) for i in range(count))


def _linear(
    names: Names, path: tuple[str, ...], d_in: int, parts: list[tuple[str, int, int]], bias: bool
) -> list[Leaf]:
    """Weight (and bias) of one matrix from parts (name, width, head_dim of adjacent pairs or 0)."""
    width = sum(w for _, w, _ in parts)
    weight = tuple(
        Part(
            f"{n}.weight", (d_in, w) if names.transpose else (w, d_in), transpose=names.transpose, head_dim=p
        )
        for n, w, p in parts
    )
    out = [Leaf((*path, "weight"), (width, d_in), weight)]
    if bias:
        out.append(
            Leaf((*path, "bias"), (width,), tuple(Part(f"{n}.bias", (w,), head_dim=p) for n, w, p in parts))
        )
    return out


def _norm(c: ModelConfig, names: Names, path: tuple[str, ...], name: str, width: int) -> list[Leaf]:
    out = [Leaf((*path, "scale"), (width,), (Part(f"{name}.weight", (width,), add=names.norm_add),))]
    if c.norm == "layer":
        out.append(Leaf((*path, "bias"), (width,), (Part(f"{name}.bias", (width,)),)))
    return out
