"""Real checkpoints of two more families decode end to end: greedy tokens are transformers' on the same GGUF file."""

import gc

import numpy as np
import pytest
from parity.real_weights import REAL, path_of

pytestmark = pytest.mark.parity

NEW_TOKENS, BLOCK = 32, 16
STEM = (
    "The following notes were written on a long journey by train, in the order in which things came to mind, and "
    "nobody has put them into another one since. "
)
TEXTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    f"{STEM}The first note is about the weather:",
    f"{STEM}The second note is about the food:",
    f"{STEM}The third note is a list of rivers:",
    f"{STEM}import numpy as np\n\nx = np.",
    "Photosynthesis is the process by which",
    "Ingredients: 2 cups of flour, 1 egg,",
]


@pytest.mark.parametrize("name", REAL)
def test_greedy_tokens_and_scores_are_those_of_transformers(torch, name):
    """Cold in one batch and warm, with hits of a shared beginning; log-probabilities within 1e-3."""
    from pagedjax import LLM
    from pagedjax.engine.request import SamplingParams

    path = path_of(name)
    if not path.is_file():
        pytest.skip(f"{path}: is not there; python tests/parity/real_weights.py fetches it")
    limits = dict(model__max_model_len=256, scheduler__max_num_seqs=4, scheduler__token_budget=64)
    llm = LLM(str(path), progress=False, cache__num_blocks=200, cache__block_size=BLOCK, **limits)
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    runs = [llm.generate(prompts, params) for _ in range(2)]
    cold, warm = ([[list(o.outputs[0].token_ids) for o in run], run] for run in runs)
    scores = [np.array(o.outputs[0].logprobs) for o in cold[1]] if cold[1][0].outputs[0].logprobs else None
    assert llm.manager.stats.hit_tokens > 10 * BLOCK
    assert all(o.num_cached_tokens >= len(p) - BLOCK - 1 for o, p in zip(warm[1], prompts) if len(p) > BLOCK)
    assert cold[0] == warm[0]
    del llm
    gc.collect()
    want, judged = _judge(torch, path, prompts)
    assert cold[0] == want
    assert scores is not None
    for got, expected in zip(scores, judged):
        np.testing.assert_allclose(got, expected, atol=1e-3)


def _judge(torch, path, prompts):
    """Greedy tokens of the same file in float32 and their log-probabilities."""
    import warnings

    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own deprecations, not of ours
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    tokens, scores = [], []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = out.sequences[0].tolist()[len(prompt) :]
        rows = torch.stack([row[0] for row in out.logits]).log_softmax(-1)
        tokens.append(ids)
        scores.append(rows[torch.arange(NEW_TOKENS), torch.tensor(ids)].numpy())
    return tokens, scores
