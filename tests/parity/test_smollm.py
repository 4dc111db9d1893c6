"""SmolLM2-135M in float32: pagedjax = transformers on the same GGUF file, tokens and logits."""

import functools

import numpy as np
import pytest

pytestmark = pytest.mark.parity

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a prime number is.",
    "List three uses of copper.",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.",
    "What is 12 + 30?",
    "Why is the sky blue?",
    "Name a mammal that can fly.",
]
TEXTS = [
    "Once upon a time, in a village by the river,",
    "def fibonacci(n):\n    ",
    "The three branches of government are",
    "Water boils at",
    "The quick brown fox",
    "In 1969, astronauts",
    "import numpy as np\n\nx = np.",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
    "Ingredients: 2 cups of flour, 1 egg,",
]
NEW_TOKENS = 64
BLOCK, BUCKET, TABLE = 16, 64, 16


@pytest.fixture(scope="module")
def prompts(smollm):
    tok = smollm.tokenizer
    chats = [tok.apply_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    return [tok.encode(text, add_special=False) for text in chats + TEXTS]


@pytest.fixture(scope="module")
def golden(torch, smollm_judge, prompts):
    """Greedy tokens and the logits they came from, recomputed densely over the whole text at the end."""
    model, _ = smollm_judge
    out = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )[0].tolist()
        logits = model(torch.tensor([ids[:-1]])).logits[0, len(prompt) - 1 :].numpy()
        out.append((ids[len(prompt) :], logits))
    return out


@pytest.fixture(scope="module")
def step(smollm):
    import jax

    from pagedjax.models import forward, logits, make_decoder

    graphdef = make_decoder(smollm.config)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, pool, tokens, positions, ragged, last):
        hidden, pool = forward(graphdef, params, tokens, positions, pool, ragged)
        return logits(graphdef, params, hidden[last]), pool

    return run


def test_greedy_tokens_and_logits_over_the_paged_pool(smollm, prompts, golden, step):
    """Chunked prefill, then decode over a scattered table; each row's logits within 2e-4 of its largest."""
    from pagedjax.kernels import KVLayout, make_pool, plan_ragged

    c = smollm.config
    pool = make_pool(KVLayout(c.num_layers, 64, BLOCK, c.num_kv_heads, c.head_dim), fill=np.nan)
    table = np.random.default_rng(0).permutation(np.arange(1, 64))[:TABLE].astype(np.int32)[None]
    worst = 0.0
    for prompt, (expected, rows) in zip(prompts, golden):
        tokens, done, found = list(prompt), 0, []
        while len(found) < NEW_TOKENS:
            chunk = tokens[done : done + BUCKET]
            size = BUCKET if len(chunk) > 1 else 1
            pad = [0] * (size - len(chunk))
            positions = np.int32([*range(done, done + len(chunk)), *pad])
            done += len(chunk)
            ragged = plan_ragged(
                [len(chunk)],
                [done],
                table,
                block_size=BLOCK,
                num_tokens_bucket=size,
                num_seqs_bucket=1,
                decode_bucket=1,
            )
            last = np.int32([len(chunk) - 1])
            scores, pool = step(smollm.params, pool, np.int32(chunk + pad), positions, ragged, last)
            if done < len(tokens):
                continue
            row, want = np.asarray(scores)[0], rows[len(found)]
            worst = max(worst, np.abs(row - want).max() / np.abs(want).max())
            found.append(int(row.argmax()))
            tokens.append(found[-1])
        assert found == expected, smollm.tokenizer.decode(prompt)
    print(f"largest |difference| / max|logit| over {len(prompts) * NEW_TOKENS} rows: {worst:.2e}")
    assert worst <= 2e-4


def test_tokenizer_equals_transformers(smollm, smollm_judge):
    _, judge = smollm_judge
    texts = [
        *QUESTIONS,
        *TEXTS,
        "1234567890 3.14",
        "naïve café — 東京 🙂🙃",
        "\t\tif x:\n\n\n   return\r\n",
        "<|im_start|>user\nhi<|im_end|>",
        "don't we'll I'M",
        " leading and trailing  ",
        "",
    ]
    for text in texts:
        ids = smollm.tokenizer.encode(text, add_special=False)
        assert ids == judge.encode(text, add_special_tokens=False), text
        assert smollm.tokenizer.decode(ids, skip_special=False) == judge.decode(
            ids, clean_up_tokenization_spaces=False
        )
        assert smollm.tokenizer.decode(ids, skip_special=False) == text


def test_chat_template_equals_transformers(smollm, smollm_judge):
    _, judge = smollm_judge
    talks = [
        [{"role": "user", "content": "Hi!"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    for messages in talks:
        for ask in (True, False):
            assert smollm.tokenizer.apply_chat(
                messages, add_generation_prompt=ask
            ) == judge.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)


def test_engine_gives_the_same_tokens(smollm, prompts, golden):
    """The whole way: LLM, scheduler, paged manager with prefix cache, all prompts at once."""
    from pagedjax import LLM, SamplingParams

    llm = LLM("smollm2-135m", progress=False)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), progress=False)
    for output, (expected, _) in zip(outputs, golden):
        assert list(output.outputs[0].token_ids) == expected
