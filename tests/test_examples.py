"""The examples run as a reader would run them: from a shell, on a model in a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(*args):
    # What is judged is what comes out, not how fast: compile without optimising.
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_stays_short(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) < 80


def test_the_decode_script_hits_its_own_first_run(tiny_folder):
    """40 bytes are 40 tokens: nothing is cached at first, then at least the prompt's two full blocks of 16."""
    done = _run(ROOT / "examples" / "decode_script.py", "x" * 40, tiny_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0 tokens from the cache]")
    _, cached = done.stdout.split("\n[", 1)
    tokens = int(cached.split(" tokens from the cache]")[0])
    assert tokens >= 32 and tokens % 16 == 0
