"""Both ways to preempt are really taken and timed, and the rule's row says what it compared."""

import pytest
from judges import compile_quickly

from pagedjax.bench import preemption
from pagedjax.llm import LLM


def test_rows_hold_both_ways_and_the_rules_choice(tiny_folder):
    llm = LLM(
        str(tiny_folder),
        progress=False,
        max_num_seqs=1,
        token_budget=16,
        num_blocks=64,
        host_blocks=32,
        preemption="auto",
        prefix_caching=False,
        compilation_cache_dir="off",
    )
    compile_quickly(llm.runner)
    (row,) = preemption.run(llm, [40], rounds=2)
    stats, scheduler = llm.manager.stats, llm.engine.scheduler
    assert scheduler.num_preemptions == 4 and scheduler.num_swaps == 2
    assert stats.swapped_out_blocks == stats.swapped_in_blocks == 2 * row["blocks"] == 2 * 3
    assert row["swap / recompute"] == pytest.approx(row["swap ms"] / row["recompute ms"])
    predicted = row["predicted swap ms"] < row["predicted recompute ms"]
    assert row["rule"] == ("swap" if predicted else "recompute")
    assert scheduler.config.preemption == "auto" and not llm.engine.has_work
    with pytest.raises(ValueError, match=r"--context 600: .*raise cache.host_blocks"):
        preemption.run(llm, [600])
