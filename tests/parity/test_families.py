"""Tiny random checkpoints of every family, made with transformers: equal logits and greedy tokens.

Run as a program it freezes the goldens that keep the default suite free of torch:
    python tests/parity/test_families.py tests/models/families.json
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity

GOLDENS = Path(__file__).resolve().parent.parent / "models" / "families.json"
PROMPT, STEPS, VOCAB = 24, 32, 96
LONG, CLOSE = 64, 2e-5  # steps of families with experts or latent attention; distance of all

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_GATED_ONLY = ("intermediate_size", "num_key_value_heads", "rms_norm_eps")  # GPT-2 and OPT know none of them
_ROPE = dict(rope_type="default", rope_theta=10000.0)

_YARN = dict(rope_type="yarn", rope_theta=1000.0, original_max_position_embeddings=32, beta_fast=16.0)


def _latent(q_rank, rank, nope, rope, value):
    """Widths of latent attention in three layers."""
    return dict(
        q_lora_rank=q_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        num_hidden_layers=3,
        num_key_value_heads=4,
    )


def _mixture(count, per_token, width, **changes):
    """Experts in the last two layers, one of them shared."""
    sizes = dict(n_routed_experts=count, num_experts_per_tok=per_token, moe_intermediate_size=width)
    return dict(sizes, first_k_dense_replace=1, n_shared_experts=1) | changes


# Each row: model_type and what differs from the common sizes.
FAMILIES = {
    "llama2": ("llama", dict(tie_word_embeddings=False, rope_parameters=_ROPE)),
    "llama3": (
        "llama",
        dict(
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
    ),
    "llama_linear": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(_ROPE, rope_type="linear", factor=4.0)),
    ),
    "llama_yarn": (
        "llama",
        dict(
            rope_parameters=dict(
                _ROPE, rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0
            )
        ),
    ),
    "smollm3": (
        "smollm3",
        dict(
            tie_word_embeddings=True,
            no_rope_layer_interval=2,
            rope_parameters=_ROPE,
            use_sliding_window=False,
        ),
    ),
    "mistral": ("mistral", dict(sliding_window=7, head_dim=16, rope_parameters=_ROPE)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True, rope_parameters=_ROPE)),
    "qwen2_windows": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=2, rope_parameters=_ROPE),
    ),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True, rope_parameters=_ROPE)),
    "phi3": ("phi3", dict(sliding_window=9, rope_parameters=_ROPE)),
    "gemma2": (
        "gemma2",
        dict(
            head_dim=16,
            sliding_window=6,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=8.0,
            rope_parameters=_ROPE,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            head_dim=16,
            num_hidden_layers=7,
            sliding_window=6,
            query_pre_attn_scalar=24,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=2.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=5, rope_parameters=_ROPE)),
    "mixtral_windows": (
        "mixtral",
        dict(
            num_local_experts=8, num_experts_per_tok=3, sliding_window=9, head_dim=16, rope_parameters=_ROPE
        ),
    ),
    "mixtral_one": (
        "mixtral",
        dict(num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True, rope_parameters=_ROPE),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            head_dim=16,
            rope_parameters=_ROPE,
        ),
    ),
    "qwen3_moe_steps": (
        "qwen3_moe",
        dict(
            num_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=12,
            decoder_sparse_step=2,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=_ROPE,
        ),
    ),
    "qwen3_moe_windows": (
        "qwen3_moe",
        dict(
            num_experts=9,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            use_sliding_window=True,
            sliding_window=11,
            rope_parameters=dict(_ROPE, rope_type="linear", factor=2.0),
        ),
    ),
    "olmoe": ("olmoe", dict(num_experts=6, num_experts_per_tok=3, rope_parameters=_ROPE)),
    "olmoe_normed": (
        "olmoe",
        dict(
            num_experts=16,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            num_key_value_heads=4,
            rope_parameters=_ROPE,
        ),
    ),
    "olmoe_biased": (
        "olmoe",
        dict(
            num_experts=5,
            num_experts_per_tok=1,
            attention_bias=True,
            tie_word_embeddings=True,
            num_key_value_heads=1,
            rope_parameters=_ROPE,
        ),
    ),
    "gpt_oss": (
        "gpt_oss",
        dict(num_local_experts=6, num_experts_per_tok=3, head_dim=16, sliding_window=8, swiglu_limit=0.8),
    ),
    "gpt_oss_layers": (
        "gpt_oss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=1,
            head_dim=8,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1000.0,
                factor=4.0,
                original_max_position_embeddings=32,
                truncate=True,
            ),
        ),
    ),
    "gpt_oss_plain": (
        "gpt_oss",
        dict(
            num_local_experts=9,
            num_experts_per_tok=4,
            head_dim=8,
            num_key_value_heads=4,
            attention_bias=False,
            sliding_window=16,
            swiglu_alpha=1.1,
            rope_parameters=_ROPE,
        ),
    ),
    # No two widths are alike, and V3's odd (the judge of V2 wants even ones).
    "deepseek_v2": (
        "deepseek_v2",
        dict(
            _latent(20, 18, 14, 6, 9),
            **_mixture(6, 2, 12, n_group=3, topk_group=2, topk_method="group_limited_greedy"),
            rope_parameters=_ROPE,
        ),
    ),
    "deepseek_v2_no_rank": (
        "deepseek_v2",
        dict(
            _latent(None, 22, 10, 4, 5),
            first_k_dense_replace=3,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=_ROPE,
        ),
    ),
    "deepseek_v2_yarn": (
        "deepseek_v2",
        dict(
            _latent(None, 34, 6, 10, 13),
            **_mixture(5, 3, 20, n_shared_experts=2, routed_scaling_factor=1.5),
            rope_parameters=dict(_YARN, factor=4.0, mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            _latent(19, 31, 9, 8, 7),
            **_mixture(8, 3, 12, n_group=4, topk_group=2),
            rope_parameters=_ROPE,
        ),
    ),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        dict(
            _latent(12, 15, 3, 6, 17),
            first_k_dense_replace=3,
            rope_parameters=dict(_YARN, factor=8.0, mscale=1.0, mscale_all_dim=0.5),
        ),
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        dict(
            _latent(None, 21, 10, 12, 4),
            **_mixture(6, 4, 16, n_group=1, topk_group=1, norm_topk_prob=False),
            rope_interleave=False,
            attention_bias=True,
            rope_parameters=dict(_YARN, factor=2.0),
        ),
    ),
    "gpt2": ("gpt2", dict(n_embd=32, n_head=4, n_layer=3, n_positions=128)),
    "opt": ("opt", dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),
}


EXPERTS = {
    name
    for name, (kind, _) in FAMILIES.items()
    if kind in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3")
}
# One of each of these families is frozen for the default suite; the others are rows of this one.
FROZEN = [name for name, (kind, _) in FAMILIES.items() if name not in EXPERTS or name == kind]


def _steps(name):
    return LONG if name in EXPERTS else STEPS


def _saved(model, folder):
    """Names and shapes as transformers writes them: its own modules stack experts, its files do not."""
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    return {name: w.shape for name, w in load_file(Path(folder) / "model.safetensors").items()}


def _load(model_class, config, tensors, folder):
    """The model from a folder that holds these tensors."""
    from safetensors.numpy import save_file

    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    return model_class.from_pretrained(folder, config=config, dtype="float32").eval()


def _build(torch, name):
    """The transformers model with seeded weights, eager attention, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pagedjax.testing import seeded_tensors

    kind, changes = FAMILIES[name]
    common = {k: v for k, v in _COMMON.items() if kind not in ("gpt2", "opt") or k not in _GATED_ONLY}
    config = AutoConfig.for_model(kind, **(common | changes))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if name in EXPERTS:
        with tempfile.TemporaryDirectory() as folder:
            tensors = seeded_tensors(_saved(model, folder))
            model = _load(type(model), config, tensors, folder)
    else:
        state = {n: t for n, t in model.state_dict().items() if t.is_floating_point()}
        tied = model.config.tie_word_embeddings
        shapes = {n: tuple(t.shape) for n, t in state.items() if not (tied and n == "lm_head.weight")}
        tensors = seeded_tensors(shapes)
        missing, unexpected = model.load_state_dict(
            {n: torch.tensor(w) for n, w in tensors.items()}, strict=False
        )
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    raw = json.loads(config.to_json_string(use_diff=False))
    keep = {k: v for k, v in raw.items() if isinstance(v, (int, float, str, bool, list, dict)) or v is None}
    return (
        model,
        {k: keep[k] for k in sorted(keep) if k not in ("transformers_version", "id2label", "label2id")},
        tensors,
    )


def _golden(torch, name):
    """Greedy continuation of a fixed prompt, and the logits of every position."""
    model, config, tensors = _build(torch, name)
    prompt = np.random.default_rng(7).integers(3, VOCAB, PROMPT).tolist()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(_steps(name)):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids])).logits[0].numpy()
    return config, tensors, ids, logits


@pytest.fixture(scope="module")
def goldens():
    return json.loads(GOLDENS.read_text())


@pytest.mark.parametrize("name", FROZEN)
def test_goldens_are_what_transformers_says_now(torch, goldens, name):
    config, tensors, ids, logits = _golden(torch, name)
    frozen = goldens[name]
    assert frozen["ids"] == ids
    assert {n: tuple(s) for n, s in frozen["shapes"].items()} == {n: w.shape for n, w in tensors.items()}
    for at, row in frozen["rows"].items():
        np.testing.assert_allclose(row, logits[int(at)], atol=1e-5 * np.abs(logits).max(), rtol=0)
    assert frozen["config"] == config


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_chunks_decode_and_batches_equal_transformers(torch, name, tmp_path):
    """Alone and in a ragged batch; every row within 2e-5 of its largest logit, greedy tokens equal."""
    from judges import PagedModel
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    from pagedjax.models import load_model

    config, tensors, ids, want = _golden(torch, name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    loaded = load_model(tmp_path, progress=False)
    size = dict(tokens=96, seqs=4, width=24)
    alone = PagedModel(loaded.config, loaded.params, **size).feed({"s": ids})["s"]
    model = PagedModel(loaded.config, loaded.params, **size)
    other = np.random.default_rng(9).integers(3, VOCAB, 40).tolist()
    parts = [model.feed({"s": ids[:11]})["s"]]
    parts.append(model.feed({"s": ids[11:PROMPT], "t": other[:9]})["s"])
    for i in range(PROMPT, len(ids)):
        # Decode beside another sequence's chunk, then beside its decode.
        rest = other[model.lens["t"] :][: 5 if i < PROMPT + 3 else 1]
        parts.append(model.feed({"s": ids[i : i + 1]} | ({"t": rest} if rest else {}))["s"])
    for got in (alone, np.concatenate(parts)):
        limit = CLOSE * np.abs(want).max(axis=-1)
        assert (np.abs(got - want).max(axis=-1) <= limit).all()
        assert got[PROMPT - 1 : -1].argmax(-1).tolist() == ids[PROMPT:]


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_greedy_tokens_of_the_engine_equal_transformers(torch, name, tmp_path):
    """Cold, warm, in chunks, beside others, and of samples that fork: whatever the cache holds."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    from pagedjax import LLM
    from pagedjax.engine.request import SamplingParams

    config, tensors, ids, _ = _golden(torch, name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    limits = dict(scheduler__max_num_seqs=4, scheduler__token_budget=16, scheduler__chunk_tokens=7)
    pool = dict(cache__block_size=16, cache__num_blocks=60, model__max_model_len=128)
    llm = LLM(str(tmp_path), progress=False, **limits, **pool)
    prompt, want = ids[:PROMPT], ids[PROMPT:]
    greedy = dict(max_tokens=_steps(name), ignore_eos=True)
    other = [*prompt[:13], *reversed(prompt)]

    def tokens(prompts, **changes):
        return llm.generate(prompts, SamplingParams(**greedy | changes))

    cold, warm = (tokens([prompt])[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    beside = tokens([other, prompt, prompt[:9]])[1]
    forked = tokens([prompt], n=3)[0]
    assert llm.manager.stats.copies > 0
    for output in (cold, warm, beside, forked):
        assert all(list(c.token_ids) == want for c in output.outputs)


# Our routing, and transformers' config, of the same choice; a router's matrix is the identity: x is its logits.
_COUNTS = dict(vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=2, moe_intermediate_size=8)
_GROUPED = dict(
    n_group=4, topk_group=2, routed_scaling_factor=2.5, n_routed_experts=16, num_experts_per_tok=4
)
ROUTERS = {
    "mixtral": (
        ("mixtral", "MixtralTopKRouter"),
        dict(num_local_experts=8, num_experts_per_tok=2),
        dict(num_experts=8, per_token=2, normalise=True),
    ),
    "qwen3_moe": (
        ("qwen3_moe", "Qwen3MoeTopKRouter"),
        dict(num_experts=16, num_experts_per_tok=4, norm_topk_prob=True),
        dict(num_experts=16, per_token=4, normalise=True),
    ),
    "olmoe": (
        ("olmoe", "OlmoeTopKRouter"),
        dict(num_experts=16, num_experts_per_tok=5),
        dict(num_experts=16, per_token=5),
    ),
    "gpt_oss": (
        ("gpt_oss", "GptOssTopKRouter"),
        dict(num_local_experts=16, num_experts_per_tok=4),
        dict(num_experts=16, per_token=4, routing="softmax-of-chosen"),
    ),
    "deepseek_v2": (
        ("deepseek_v2", "DeepseekV2TopkRouter"),
        dict(_GROUPED, topk_method="group_limited_greedy"),
        dict(num_experts=16, per_token=4, num_groups=4, groups_per_token=2, scale=2.5),
    ),
    "deepseek_v3": (
        ("deepseek_v3", "DeepseekV3TopkRouter"),
        dict(_GROUPED, norm_topk_prob=True),
        dict(
            num_experts=16,
            per_token=4,
            num_groups=4,
            groups_per_token=2,
            scale=2.5,
            routing="sigmoid",
            normalise=True,
            group_score="best-two",
        ),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_transformers_on_a_thousand_tokens_with_ties(torch, name):
    """Weights are equal rank by rank. Experts are, too, but for those whose score others share: torch's `topk` leaves
    open which of them it takes; here the lower number goes first, and the logits of both choices are the same."""
    import importlib

    import jax.numpy as jnp
    from transformers import AutoConfig

    from pagedjax.models.experts import choose
    from pagedjax.models.mixture import Experts

    (kind, router_class), changes, ours = ROUTERS[name]
    experts = Experts(d_expert=8, **ours)
    count = experts.num_experts
    config = AutoConfig.for_model(kind, **_COUNTS | dict(hidden_size=count) | changes)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    router = getattr(module, router_class)(config).eval()
    router.weight.data.copy_(torch.eye(count))
    x = np.random.default_rng(0).standard_normal((1000, count)).astype(np.float32)
    x[::2] = np.round(x[::2] * 2) / 2
    _, want, theirs = (t.numpy() for t in router(torch.tensor(x)))
    ids, weights = (np.asarray(a) for a in choose(jnp.asarray(x), experts))
    clear = _groups_are_clear(x, experts)
    assert clear.sum() > 800
    np.testing.assert_allclose(weights[clear], -np.sort(-want, axis=1)[clear], rtol=2e-6)
    for row, a, b in zip(x[clear], ids[clear], theirs[clear], strict=True):
        assert np.array_equal(np.sort(row[a]), np.sort(row[b])), (row, a, b)
        assert set(a.tolist()) == set(b.tolist()) or len(set(row.tolist())) < count


def _groups_are_clear(x, experts):
    """Tokens whose last kept group scores more than the first that is left out: among equal ones torch takes any."""
    scores = 1 / (1 + np.exp(-x)) if experts.routing == "sigmoid" else x
    grouped = np.sort(scores.reshape(len(x), experts.num_groups, -1), axis=2)
    best = np.sort(
        grouped[:, :, -2:].sum(2) if experts.group_score == "best-two" else grouped[:, :, -1], axis=1
    )
    if experts.num_groups == 1:
        return np.ones(len(x), bool)
    return np.diff(best, axis=1)[:, experts.num_groups - experts.groups_per_token - 1] > 1e-6


def _freeze(path):
    import torch

    out = {}
    for name in FROZEN:
        config, tensors, ids, logits = _golden(torch, name)
        rows = {str(at): [float(f"{v:.7g}") for v in logits[at]] for at in (0, PROMPT - 1, len(ids) - 1)}
        out[name] = dict(
            config=config, shapes={n: list(w.shape) for n, w in tensors.items()}, ids=ids, rows=rows
        )
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in out.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _freeze(Path(sys.argv[1]))
