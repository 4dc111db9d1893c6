"""Beam search over forked, paged blocks = transformers' generate(num_beams=...): ids, order and scores.

Run as a program it freezes the goldens that hold the default suite's beams without torch:
    python tests/parity/test_beams.py tests/runtime/beams.json
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity

GOLDENS = Path(__file__).resolve().parent.parent / "runtime" / "beams.json"
WIDTHS, PENALTIES, EARLY = (2, 4, 6), (0.6, 1.0, 2.0), (True, False, "never")
TEXTS = ["Once upon a time, in a village by the river,", "The three branches of government are", "2 + 2 ="]


def hf_beams(torch, model, prompt, width, penalty, early, steps, eos):
    """(token ids, score) of all beams, best first, as transformers returns them."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=steps,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    ids = [row[len(prompt) : len(prompt) + n].tolist() for row, n in zip(out.sequences, lengths)]
    return list(zip(ids, out.sequences_scores.tolist(), strict=True))


def assert_equal(output, expected):
    for found, (ids, score) in zip(output.outputs, expected, strict=True):
        assert list(found.token_ids) == ids
        # Sums of up to 40 float32 log-probabilities whose logits agree within 2e-4 of the largest.
        assert abs(found.score - score) <= 1e-3


@pytest.fixture(scope="module")
def llm(smollm_path):
    from pagedjax import LLM

    return LLM("smollm2-135m", progress=False, cache__num_blocks=400, scheduler__max_num_seqs=8)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_smollm_beams_equal_transformers(torch, llm, smollm_judge, width, penalty):
    from pagedjax import SamplingParams

    model, _ = smollm_judge
    eos = llm.model_config.eos_token_ids or llm.tokenizer.eos_token_ids
    chat = llm.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    prompts = [llm.encode(TEXTS[width % 3]), chat, chat]
    ended = 0
    for prompt, early in zip(prompts, EARLY, strict=True):
        sampling = SamplingParams(
            max_tokens=20, beam_width=width, n=width, length_penalty=penalty, early_stopping=early
        )
        expected = hf_beams(torch, model, prompt, width, penalty, early, 20, eos)
        assert_equal(llm.generate([prompt], sampling)[0], expected)
        ended += sum(ids[-1] in eos for ids, _ in expected)
    assert ended or penalty > 1  # a penalty of 2 favours length: all beams run to the limit


def tiny_hf(torch, seed=0):
    """A random 2-layer Llama with a small vocabulary, so that end tokens come often; its files' tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().float()
    for w in model.parameters():
        if w.ndim > 1:
            torch.nn.init.normal_(w, std=0.5)
    return model, config


def test_tiny_beams_equal_transformers(torch, tmp_path):
    """All combinations, also beside other requests in a pool too small for all."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    from pagedjax import LLM, SamplingParams

    model, config = tiny_hf(torch)
    tensors = {n: w.detach().numpy() for n, w in model.state_dict().items() if n != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    llm = LLM(
        str(tmp_path), progress=False, cache__num_blocks=40, cache__block_size=4, scheduler__max_num_seqs=12,
        scheduler__token_budget=64, model__max_model_len=64,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    jobs, expected = [], []
    for width, penalty, early in itertools.product(WIDTHS, PENALTIES, EARLY):
        for ends in ((), (7,), (5, 9)):
            prompt = rng.integers(3, 96, int(rng.integers(1, 14))).tolist()
            steps = int(rng.integers(1, 25))
            sampling = SamplingParams(
                max_tokens=steps, beam_width=width, n=width, length_penalty=penalty, early_stopping=early,
                ignore_eos=True, stop_token_ids=ends,
            )  # fmt: skip
            jobs.append((prompt, sampling))
            expected.append(hf_beams(torch, model, prompt, width, penalty, early, steps, ends))
    outputs = llm.generate([p for p, _ in jobs], [s for _, s in jobs])
    assert sum(o.num_preemptions for o in outputs) > 0
    assert sum(ids[-1] in s.stop_token_ids for (_, s), e in zip(jobs, expected) for ids, _ in e) > 20
    for output, want in zip(outputs, expected, strict=True):
        assert_equal(output, want)


def _tests_model(torch):
    """The model that the default tests search with, as a transformers Llama."""
    from judges import beams_model
    from transformers import LlamaConfig, LlamaForCausalLM

    c, params = beams_model()
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_mlp, head_dim=c.head_dim,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.norm_eps, rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
        max_position_embeddings=c.max_model_len, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    tensors = {"embed_tokens.weight": params["embed"], "norm.weight": params["final_norm"]["scale"]}
    for number in range(c.num_layers):
        leaf, at = params[f"layer_{number:02d}"], f"layers.{number}."
        ends = np.cumsum([c.num_heads, c.num_kv_heads]) * c.head_dim
        for name, weight in zip("qkv", np.split(leaf["qkv"]["weight"], ends), strict=True):
            tensors[f"{at}self_attn.{name}_proj.weight"] = weight
        gate, up = np.split(leaf["mlp"]["up"]["weight"], 2)
        tensors |= {
            f"{at}self_attn.o_proj.weight": leaf["out"]["weight"],
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": leaf["mlp"]["down"]["weight"],
            f"{at}input_layernorm.weight": leaf["attn_norm"]["scale"],
            f"{at}post_attention_layernorm.weight": leaf["mlp_norm"]["scale"],
        }
    model = LlamaForCausalLM(config).eval().float()
    model.model.load_state_dict({name: torch.tensor(w) for name, w in tensors.items()})
    model.lm_head.weight.copy_(torch.tensor(params["lm_head"]["weight"]))
    return model


def _golden_jobs(torch):
    """All widths, penalties and stopping modes, without end tokens and with some that really come up."""
    model = _tests_model(torch)
    rng = np.random.default_rng(3)
    jobs = []
    for width, penalty, early in itertools.product(WIDTHS, PENALTIES, EARLY):
        prompt = rng.integers(0, 256, int(rng.integers(2, 14))).tolist()
        steps = int(rng.integers(6, 20))
        free = hf_beams(torch, model, prompt, width, penalty, early, steps, ())
        ends = sorted({free[0][0][steps // 2], free[-1][0][2]})
        ended = hf_beams(torch, model, prompt, width, penalty, early, steps, ends)
        for stop, beams in ([], free), (ends, ended):
            job = dict(prompt=prompt, width=width, penalty=penalty, early=early, steps=steps, ends=stop)
            jobs.append(job | {"beams": [[ids, float(f"{score:.7g}")] for ids, score in beams]})
    return jobs


def test_goldens_are_what_transformers_says_now(torch):
    frozen = json.loads(GOLDENS.read_text())
    for now, then in zip(_golden_jobs(torch), frozen, strict=True):
        found, beams = now.pop("beams"), then.pop("beams")
        assert now == then
        assert [ids for ids, _ in found] == [ids for ids, _ in beams]
        np.testing.assert_allclose([score for _, score in found], [score for _, score in beams], atol=1e-5)


if __name__ == "__main__":
    import torch as _torch

    _torch.set_grad_enabled(False)
    lines = ",\n".join(json.dumps(job) for job in _golden_jobs(_torch))
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")
