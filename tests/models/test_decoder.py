"""The decoder over a paged pool equals a dense float64 forward that shares no code with it."""

import jax
import numpy as np
import pytest

from pagedjax.models import abstract_params, make_decoder
from pagedjax.models.config import LatentAttention
from pagedjax.models.mixture import Experts
from pagedjax.models.weights import flat
from pagedjax.testing import tiny_config, tiny_params

# One row per switch of ModelConfig. Logits agree to a float32 rounding of a few hundred terms.
ROWS = {
    "gqa": {},
    "gqa_tied": dict(tie_embeddings=True),
    "mha_biases": dict(num_heads=4, num_kv_heads=4, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mqa_gelu_one_layer_without_rope": dict(
        num_heads=6, num_kv_heads=1, head_dim=16, activation="gelu", rope_layers=(True, False)
    ),
    "qk_norm": dict(qk_norm=True),
    "gemma_like": dict(
        windows=(4, None),
        local_rope_theta=100.0,
        attn_soft_cap=5.0,
        logit_soft_cap=3.0,
        post_norms=True,
        embed_scale=48**0.5,
        query_scale=0.2,
        activation="gelu_tanh",
    ),
    "experts": dict(qk_norm=True, qk_norm_whole=True, experts=Experts(6, 2, 24, normalise=True)),
    "experts_like_deepseek": dict(
        experts=Experts(
            12,
            3,
            16,
            layers=(False, True),
            routing="sigmoid",
            normalise=True,
            scale=2.5,
            choice_bias=True,
            num_groups=4,
            groups_per_token=2,
            group_score="best-two",
            d_shared=40,
        )
    ),
    "gpt_oss_like": dict(
        sinks=True,
        windows=(4, None),
        experts=Experts(5, 2, 24, routing="softmax-of-chosen", router_bias=True, expert_bias=True, clamp=0.9),
    ),
    "opt_like": dict(
        positions="learned",
        norm="layer",
        gated_mlp=False,
        activation="relu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_dim=9,
    ),
    "latent": dict(
        latent=LatentAttention(24, 8, 4, 6, q_lora_rank=20), num_kv_heads=1, head_dim=28, qkv_bias=True
    ),
    "latent_odd": dict(
        latent=LatentAttention(17, 7, 6, 11), num_heads=5, num_kv_heads=1, head_dim=23, query_scale=0.4
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_equals_the_dense_judge_in_chunks_and_batches(row, judge):
    config = tiny_config(max_model_len=64, **ROWS[row])
    params = tiny_params(config, seed=3)
    rng = np.random.default_rng(1)
    texts = {s: rng.integers(0, config.vocab_size, n).tolist() for s, n in (("a", 23), ("b", 14), ("c", 9))}
    want = {s: judge.forward(config, params, t) for s, t in texts.items()}
    model = judge.Paged(config, jax.device_put(params))
    got = {s: [] for s in texts}
    # Prefill and chunked prefill, decodes beside a chunk, then decodes alone.
    for plan in ({"a": 11}, {"a": 1, "b": 9}, {"a": 7, "b": 1, "c": 5}, *[dict(a=1, b=1, c=1)] * 4):
        chunks = {s: texts[s][model.lens.get(s, 0) :][:n] for s, n in plan.items()}
        for s, rows in model.feed(chunks).items():
            got[s].append(rows)
    for s, expected in want.items():
        found = np.concatenate(got[s])
        assert len(found) == len(expected) == len(texts[s])
        np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max(), rtol=0)


def test_building_allocates_no_arrays():
    huge = tiny_config(
        d_model=8192, num_heads=64, num_kv_heads=8, head_dim=128, d_mlp=28672, vocab_size=128256
    )
    shapes = dict(flat(abstract_params(huge, "bfloat16")))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in shapes.values())
    assert shapes["layer_01/qkv/weight"].shape == ((64 + 16) * 128, 8192)
    assert shapes["embed"].dtype == "bfloat16"
    assert make_decoder(huge) == make_decoder(huge)


def test_leaves_are_one_per_layer_and_matrix():
    names = [name for name, _ in flat(abstract_params(tiny_config()))]
    assert names == [
        "embed",
        "final_norm/scale",
        *[
            f"layer_{layer:02d}/{leaf}"
            for layer in range(2)
            for leaf in (
                "attn_norm/scale",
                "mlp/down/weight",
                "mlp/up/weight",
                "mlp_norm/scale",
                "out/weight",
                "qkv/weight",
            )
        ],
        "lm_head/weight",
    ]


def test_bfloat16_stays_bfloat16_and_logits_are_float32(judge):
    config = tiny_config()
    params = tiny_params(config, dtype="bfloat16")
    wide = judge.forward(config, params, [5, 9, 200])

    from pagedjax.kernels import KVLayout, make_pool, plan_ragged
    from pagedjax.models import forward, logits

    graphdef = make_decoder(config, "bfloat16")
    pool = make_pool(KVLayout(2, 4, 4, config.num_kv_heads, config.head_dim, "bfloat16"))
    ragged = plan_ragged(
        [3],
        [3],
        np.array([[1]], np.int32),
        block_size=4,
        num_tokens_bucket=4,
        num_seqs_bucket=1,
        decode_bucket=0,
    )
    tokens, positions = np.int32([5, 9, 200, 0]), np.int32([0, 1, 2, 0])

    @jax.jit
    def step(params, pool, ragged):
        hidden, _ = forward(graphdef, params, tokens, positions, pool, ragged)
        return hidden, logits(graphdef, params, hidden)

    hidden, out = step(params, pool, ragged)
    assert (hidden.dtype, out.dtype) == ("bfloat16", "float32")
    # Eight bits of mantissa through two layers.
    np.testing.assert_allclose(np.asarray(out)[:3], wide, atol=0.05 * np.abs(wide).max(), rtol=0)


def test_layer_groups_have_pools_of_their_own(judge):
    """Two pools of different sizes; blocks behind the window are given up and poisoned as the text grows."""
    from pagedjax.kernels import KVLayout, KVPool, make_pool, plan_ragged
    from pagedjax.models import forward, logits

    config = tiny_config(num_layers=3, windows=(6, None, 6))
    assert [(g.window, g.layers) for g in config.layer_groups] == [(None, (1,)), (6, (0, 2))]
    params = tiny_params(config, seed=5)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 29).tolist()
    graphdef = make_decoder(config)

    @jax.jit
    def step(params, tokens, positions, pools, batches):
        hidden, pools = forward(graphdef, params, tokens, positions, pools, batches)
        return logits(graphdef, params, hidden), pools

    sizes = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=4)
    pools = (
        make_pool(KVLayout(num_layers=1, num_blocks=9, **sizes), fill=np.nan),
        make_pool(KVLayout(num_layers=2, num_blocks=6, **sizes), fill=np.nan),
    )
    full, windowed, free = list(range(8, 0, -1)), np.zeros((1, 8), np.int32), [4, 2, 5, 1, 3]
    got, done = [], 0
    for size in (4, 4, *[1] * 21):
        end = done + size
        for block in range(8):
            if block * 4 >= end or windowed[0, block]:
                continue
            windowed[0, block] = free.pop(0) if block * 4 + 3 >= done else 0
        for block in range(max(0, done + 1 - 6) // 4):  # wholly before the first key that this step sees
            if gone := windowed[0, block]:
                free.append(gone)
                windowed[0, block] = 0
                rows = np.array([gone, 6 + gone])
                pools = (pools[0], KVPool(pools[1].data.at[rows].set(np.nan), pools[1].layout))
        batches = tuple(
            plan_ragged(
                [size],
                [end],
                table,
                block_size=4,
                num_tokens_bucket=4,
                num_seqs_bucket=1,
                decode_bucket=1,
                windows=(window,),
            )
            for table, window in ((np.int32([full]), None), (windowed, 6))
        )
        pad = [0] * (4 - size)
        out, pools = step(
            params, np.int32(ids[done:end] + pad), np.int32([*range(done, end), *pad]), pools, batches
        )
        got.append(np.asarray(out)[:size])
        done = end
    want = judge.forward(config, params, ids)
    np.testing.assert_allclose(np.concatenate(got), want, atol=3e-5 * np.abs(want).max(), rtol=0)
    with pytest.raises(ValueError, match=r"1 pools, 1 batches: must be one per layer group \(2\)"):
        forward(graphdef, params, np.int32([0]), np.int32([0]), pools[:1], batches[:1])
