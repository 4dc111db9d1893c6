"""The bench's bounds are what they claim: the dense loop is the same model, and the rows add up."""

import json

import jax
import numpy as np
import pytest
from judges import compile_quickly

from pagedjax.bench import decode
from pagedjax.cache.rules import SCALED
from pagedjax.engine.request import SamplingParams
from pagedjax.kernels import KVLayout
from pagedjax.llm import LLM


@pytest.fixture(scope="module")
def llm(tiny_folder):
    settings = dict(max_num_seqs=4, token_budget=8, num_blocks=64, compilation_cache_dir="off")
    llm = LLM(str(tiny_folder), progress=False, **settings)
    compile_quickly(llm.runner)
    llm.warm_up(mixed=True)
    return llm


def test_dense_loop_is_the_same_model(llm):
    """Fed the prompt token by token, the dense loop goes on with the engine's greedy tokens."""
    prompts = decode._prompts(llm, 3, 12, seed=5)
    expected = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    loop = decode.DenseLoop(llm, batch=3, length=24)
    for at, column in enumerate(np.array(prompts).T):
        tokens = loop.step(column, at)
    out = [tokens]
    for at in range(12, 19):
        out.append(loop.step(out[-1], at))
    assert np.array(out).T.tolist() == [list(output.outputs[0].token_ids) for output in expected]


def test_products_are_every_matrix_of_a_step(llm, monkeypatch):
    """The chain's floating-point work is 2 x batch x (all matrices but the embedding), as XLA counts its own."""
    monkeypatch.setattr(llm.runner, "products", "xla")
    products = decode._Products(llm, batch=4)
    flops = products._chain.lower(products._params, products._x).compile().cost_analysis()["flops"]
    config = llm.model_config
    qkv = config.d_model * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    out = config.num_heads * config.head_dim * config.d_model
    layer = qkv + out + 3 * config.d_model * config.d_mlp
    expected = 2 * 4 * (config.num_layers * layer + config.d_model * config.vocab_size)
    assert flops == pytest.approx(expected, rel=0.01)
    assert 2 * 4 * decode._matrix_entries(llm.runner.params) == expected


def test_rows_agree_with_themselves(llm):
    (row,) = decode.run(llm, [2], context=20, tokens=3, rounds=1)
    assert row["of dense"] == pytest.approx(row["decode tok/s"] / row["dense tok/s"])
    assert row["of memory"] == pytest.approx(row["decode tok/s"] / row["memory tok/s"])
    assert row["of peak"] == pytest.approx(row["decode tok/s"] / row["peak tok/s"]) and row["peak tok/s"] > 0
    host = row["schedule µs/row"] + row["pack µs/row"] + row["commit µs/row"]
    assert row["host µs/row"] == pytest.approx(host) and host > 0
    assert llm.engine.on_step is None and not llm.engine.has_work
    llm.manager.check_invariants()
    assert llm.manager.snapshot()["groups"][0]["ref"] == {}


def test_first_token_is_cold_then_warm(llm):
    row = decode.first_token(llm, context=64, rounds=2)
    assert row["cached tokens"] == 48 and row["warm / cold"] == pytest.approx(row["warm ms"] / row["cold ms"])


def test_mixed_step_holds_what_it_says(llm):
    row = decode.mixed_step(llm, decodes=3, chunk=4, context=20, rounds=2)
    assert row["mixed / sum"] == pytest.approx(row["mixed ms"] / (row["decodes ms"] + row["chunk ms"]))
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (dict(batches=[5]), "--batch 5: must be in [1, max_num_seqs=4]"),
        (dict(batches=[4], context=250), "needs 64 blocks, the pool has 63 usable"),
        (dict(batches=[1], context=511), "must fit max_model_len=512"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(llm, options, part):
    with pytest.raises(ValueError) as caught:
        decode.run(llm, tokens=3, rounds=1, **options)
    assert part in str(caught.value)
    with pytest.raises(ValueError, match="token_budget=8: must hold 4"):
        decode.mixed_step(llm, decodes=4, chunk=40)


def test_floor_counts_all_weights_but_the_embedding(llm):
    floor = decode._FloorTimer(llm.runner.params)
    counted = floor._scale * floor._array.nbytes
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.params))
    assert counted == pytest.approx(total - llm.runner.params["embed"].nbytes)
    assert floor() > 0


def test_keys_and_values_are_counted_as_they_are_stored(llm):
    """Against the pool's own bytes where its lanes are full; a latent row is one key, codes have their scales."""
    config = llm.model_config
    assert decode._kv_bytes_per_token(llm.runner.layouts) == 2 * 4 * config.num_layers * (
        config.num_kv_heads * config.head_dim
    )
    full = KVLayout(2, 8, 16, 2, 64, "bfloat16")
    assert decode._kv_bytes_per_token([full]) * 8 * 16 == full.num_bytes
    latent = KVLayout(3, 8, 16, 1, 576, "bfloat16", 512)
    assert decode._kv_bytes_per_token([latent]) == 3 * 576 * 2
    assert decode._kv_bytes_per_token([KVLayout(1, 8, 16, 2, 64, "fp8_e4m3_unscaled")]) == 2 * 2 * 64
    for dtype in SCALED:  # float32 scales of keys and of values, a head each
        assert decode._kv_bytes_per_token([KVLayout(1, 8, 16, 2, 64, dtype)]) == 2 * 2 * (64 + 4)
    assert decode._kv_bytes_per_token([full, latent]) == 2 * 4 * 64 * 2 + 3 * 576 * 2


def test_peers_stand_beside_rows_of_their_batch(tmp_path):
    vllm, llama, other = (tmp_path / name for name in ("vllm.json", "llama.json", "other.json"))
    row = dict(prefill_tok_s=100.0, decode_tok_s=10.0)
    vllm.write_text(json.dumps(dict(vllm="0.32", args=dict(dtype="bfloat16"), rows=[dict(row, batch=1)])))
    args = dict(model="models/m-f32.gguf")
    llama.write_text(json.dumps(dict(peer="xllamacpp", version="1", args=args, rows=[dict(row, batch=8)])))
    ours = [{"batch": 1, "dtype": "float32", "decode tok/s": 25.0}]
    (found,) = decode.beside_peers(ours, [vllm, llama])
    assert (found["peer"], found["peer's weights"], found["ours / peer's"]) == ("vllm 0.32", "bfloat16", 2.5)
    (found,) = decode.beside_peers([dict(ours[0], batch=8)], [llama])
    assert (found["peer"], found["peer's weights"]) == ("xllamacpp 1", "m-f32")
    for wrong in ("[]", "{", '{"vllm": "1", "rows": [{}]}'):
        other.write_text(wrong)
        with pytest.raises(ValueError, match=r"--peers .*other\.json: .*must be JSON with peer or vllm"):
            decode.beside_peers(ours, [other])
