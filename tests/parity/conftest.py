"""Judges that share no code with pagedjax: transformers on torch, from the same file."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def torch():
    """torch on one precision path: float32 products stay float32."""
    torch = pytest.importorskip("torch", reason="extra parity (torch, transformers) is not installed")
    pytest.importorskip("transformers", reason="extra parity (torch, transformers) is not installed")
    torch.set_grad_enabled(False)
    return torch


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The default model's GGUF file, where it was fetched before."""
    from pagedjax.models.hub import named_path
    from pagedjax.paths import user_cache_dir

    path = named_path("smollm2-135m", user_cache_dir())
    if not path.is_file():
        pytest.skip(f"{path}: the default model is not there; `pagedjax demo` fetches it")
    return path


@pytest.fixture(scope="session")
def smollm(smollm_path):
    """The default model through pagedjax's own reader."""
    from pagedjax.models import load_model

    return load_model(str(smollm_path), progress=False)


@pytest.fixture(scope="session")
def smollm_judge(torch, smollm_path):
    """The same file through transformers, float32."""
    import warnings

    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own deprecations, not of ours
        where = dict(gguf_file=smollm_path.name)
        model = AutoModelForCausalLM.from_pretrained(smollm_path.parent, dtype=torch.float32, **where).eval()
        tokenizer = AutoTokenizer.from_pretrained(smollm_path.parent, **where)
    return model, tokenizer
