"""Beam search over forked, paged blocks = transformers' generate(num_beams=...): ids, order and scores."""

import itertools
import json

import numpy as np
import pytest

pytestmark = pytest.mark.parity

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
