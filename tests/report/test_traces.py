"""What the page shows of a trace: the replay's own counts, and the sentences that `advise` prints."""

import json

import pytest
from click.testing import CliRunner

from pagedjax.cli import cli
from pagedjax.report import traces
from pagedjax.report.sections import checkup_section
from pagedjax.report.traces import checkup_facts, curve_facts
from pagedjax.sim.replay import PolicyStore, replay
from pagedjax.sim.synth import chat
from pagedjax.sim.trace import open_trace

TRACE = chat(10, turns=3, system_tokens=64, seed=4)


def test_curves_are_what_each_policy_finds_replayed_alone():
    facts = curve_facts(TRACE, block_size=16, policies=("s3fifo", "lfu", "lru"))
    assert list(facts["policies"]) == ["lru", "s3fifo", "lfu", "bound"] and not facts["left_out"]
    assert "bound" not in facts["by_token"]
    for place, capacity in enumerate(facts["capacities"]):
        for name, values in facts["by_token"].items():
            counts = replay(TRACE, 16, PolicyStore(capacity, name))
            assert values[place] == pytest.approx(counts.by_token)
            assert facts["policies"][name][place] == pytest.approx(counts.by_block)
            assert facts["policies"]["bound"][place] >= facts["policies"][name][place] - 1e-12


def test_every_policy_unasked_unless_that_takes_long(monkeypatch):
    assert len(curve_facts(TRACE, block_size=64)["policies"]) > 8
    monkeypatch.setattr(traces, "MOST_REPLAYED", 10)
    facts = curve_facts(TRACE, block_size=64)
    assert list(facts["policies"]) == ["lru", "bound"] and "s3fifo" in facts["left_out"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        f"You answer briefly. Today is day {n:03d} <b>. {'Answer in one sentence what you are asked. ' * 6}{n % 7}?"
        for n in range(40)
    ]
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return path


def test_the_check_up_says_what_advise_prints(prompts):
    trace = open_trace(prompts, encode=lambda text: list(text.encode()))
    facts = checkup_facts(trace, unit="bytes", decode=lambda ids: bytes(ids).decode())
    printed = CliRunner().invoke(cli, ["advise", str(prompts), "--quiet"]).output
    moves = [move["said"] for move in facts["moves"]]
    assert facts["said"] and moves
    for sentence in (*facts["said"], *moves):
        assert sentence in printed
    document = json.loads(CliRunner().invoke(cli, ["advise", str(prompts), "--quiet", "--json"]).output)
    assert facts["sizes"] == document["sizes"] and facts["best"] == document["best_block_size"]
    for size in facts["sizes"]:
        parts = ("found", "below_block", "last_token", "new")
        assert sum(size[part] for part in parts) == size["looked_up"]


def test_texts_of_prompts_are_there_only_where_asked(prompts):
    trace = open_trace(prompts, encode=lambda text: list(text.encode()))
    with_text = checkup_facts(trace, unit="bytes", decode=lambda ids: bytes(ids).decode())
    without = checkup_facts(trace, unit="bytes")
    assert "day" in json.dumps(with_text["moves"]) and "day" not in json.dumps(without)
    assert "<mark>" in checkup_section(0, with_text) and "<b>" not in checkup_section(0, with_text)
    assert "--text" in checkup_section(0, without) and "<mark>" not in checkup_section(0, without)
