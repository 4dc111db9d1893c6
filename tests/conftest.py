"""What every test runs under: strict JAX on several CPU devices, no network, data found or skipped by name.

JAX is set up through its environment variables, before anything imports it, so that tests of the host
half run without importing it at all.
"""

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"

# Timings on shared machines vary by more than any useful deadline, and a failure must come back.
settings.register_profile("pagedjax", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pagedjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-dir",
        type=Path,
        default=ROOT.parent / "shared",
        help="folder that holds data/ and cases/ (default: shared, beside the checkout)",
    )


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """Folder of the real traces, texts and models; tests that need it skip where it is absent."""
    folder = request.config.getoption("--data-dir").resolve()
    if not (folder / "data").is_dir():
        pytest.skip(f"--data-dir {folder}: no data/ in it")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny seeded model in a folder as `convert` writes it, with a tokenizer of one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from pagedjax.models.tokenizer import HFTokenizer
    from pagedjax.models.weights import save_params
    from pagedjax.testing import tiny_model

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    bytewise = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    model = tiny_model()
    save_params(folder / "params", model.params)
    HFTokenizer(bytewise, bos_token_id=256, eos_token_ids=(257,)).save(folder)
    facts = {"format": 1, "name": "tiny", "dtype": "float32", "config": model.config.to_dict()}
    (folder / "pagedjax_model.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="session")
def smollm_cache() -> Path:
    """The cache folder that holds the default model; tests that need it skip where it was not fetched."""
    from pagedjax.models.hub import named_path
    from pagedjax.paths import user_cache_dir

    path = named_path("smollm2-135m", user_cache_dir())
    if not path.is_file():
        pytest.skip(f"{path}: not fetched; run make model")
    return user_cache_dir()


@pytest.fixture(scope="session", autouse=True)
def _no_network():
    """Connections that leave the machine fail at once, naming the address."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "unix"
        if self.family != socket.AF_UNIX and host not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"{address}: tests do not reach the network; use a file or a fake")
        connect(self, address)

    socket.socket.connect = local_only
    yield
    socket.socket.connect = connect
