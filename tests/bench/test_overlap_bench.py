"""`bench overlap` times what it says: the device is waited for, and only steps with overlap are planned ahead."""

import pytest

from pagedjax.bench import overlap
from pagedjax.llm import LLM


def test_both_are_held_to_the_device(tiny_folder):
    llm = LLM(
        str(tiny_folder),
        progress=False,
        max_num_seqs=4,
        num_blocks=64,
        compilation_cache_dir="off",
        num_steps=4,
    )
    program = llm.runner.step_fn
    rows = overlap.run(llm, batch=4, context=20, tokens=6, step_ms=2.0, rounds=1)
    assert [(row["overlap"], row["num_steps"]) for row in rows] == [
        ("off", 1),
        ("on", 1),
        ("off", 4),
        ("on", 4),
    ]
    assert [row["planned ahead"] for row in rows] == [0, 1, 0, 1]
    assert [row["inner"] for row in rows] == [0, 0, 0.75, 0.75]
    assert rows[0]["of the first"] == 1
    for row in rows:
        assert 0 < row["of the device"] < 1.2  # the first of few steps may have been waited for already
        assert row["decode tok/s"] == pytest.approx(row["of the device"] * 4 / 2e-3)
        host = row["schedule µs/row"] + row["pack µs/row"] + row["commit µs/row"]
        assert row["host µs/row"] == pytest.approx(host) and host > 0
    assert llm.runner.step_fn is program and not llm.engine.has_work
    with pytest.raises(ValueError, match=r"--batch 5: must be in \[1, max_num_seqs=4\]"):
        overlap.run(llm, batch=5)
