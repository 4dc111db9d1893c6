"""stories260K, a real Llama with published greedy text: read, teacher-forced, and decoded."""

import json

import jax
import numpy as np
import pytest
from judges import read_stories

NEW_TOKENS = 56


@pytest.fixture(scope="module")
def stories(data_dir):
    folder = data_dir / "data" / "models"
    golden = json.loads((folder / "stories260K_greedy_ids.json").read_text())
    return *read_stories(folder / "stories260K.bin"), [golden["start_token"], *golden["greedy_ids"]]


def test_teacher_forced_over_the_whole_text(stories, judge):
    """Every position's best token is the golden next one, in both the judge and the decoder."""
    config, params, ids = stories
    want = judge.forward(config, params, ids[:-1])
    assert want.argmax(-1).tolist() == ids[1:]
    model = judge.Paged(config, jax.device_put(params), block_size=16, tokens=128, seqs=1, width=32)
    got = np.concatenate([model.feed({"s": ids[i : min(i + 100, 256)]})["s"] for i in range(0, 256, 100)])
    assert got.argmax(-1).tolist() == ids[1:]
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("start", [1, 200])
def test_greedy_decoding_continues_the_golden_text(stories, judge, start):
    config, params, ids = stories
    model = judge.Paged(
        config, jax.device_put(params), block_size=4, num_blocks=128, tokens=128, seqs=1, width=80
    )
    rows = [model.feed({"s": ids[i : min(i + 100, start)]})["s"][-1] for i in range(0, start, 100)]
    found = [int(rows[-1].argmax())]
    while len(found) < NEW_TOKENS:
        found.append(int(model.feed({"s": found[-1:]})["s"][-1].argmax()))
    assert found == ids[start : start + NEW_TOKENS]
