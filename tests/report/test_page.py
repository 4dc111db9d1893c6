"""The page: one file, no network, hostile strings stay text, numbers are the manager's."""

import base64
import hashlib
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from pagedjax.cache import PagedManager
from pagedjax.cli import cli
from pagedjax.config import SchedulerConfig
from pagedjax.models.family_configs import read_shape
from pagedjax.report import facts as facts_module
from pagedjax.report import page as page_module
from pagedjax.report.facts import run_facts
from pagedjax.report.page import page
from pagedjax.report.prefix import MODES, SIZES, explorer, hit_tokens
from pagedjax.report.record import Recorder, RecordError, Replay, read_record
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat

HOSTILE = "</script><script>alert(1)</script><!-- \" ' \u202e & <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "run.jsonl.gz"
    cost = CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16)
    about = {"kind": "simulated", "command": HOSTILE, "model": HOSTILE, "trace": {"sha256": "0" * 64}}
    simulate(
        chat(8, turns=3, system_tokens=40, seed=1),
        PagedManager(num_blocks=70, block_size=16),
        cost,
        SchedulerConfig(max_num_seqs=8, token_budget=256),
        max_model_len=1024,
        observe=partial(Recorder, path, about=about),
    )
    return path


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def test_hostile_strings_stay_text_and_nothing_is_fetched(record):
    run = run_facts(record)
    run["name"] = HOSTILE
    run["requests"][0]["text"] = HOSTILE
    run["requests"][1]["id"] = HOSTILE
    text = page([run], [], title=HOSTILE, prefix=explorer(4))
    tags = _Tags()
    tags.feed(text)
    assert (
        tags.tags.count("script") == 1 + len(page_module._SCRIPTS)
        and "img" not in tags.tags
        and "link" not in tags.tags
    )
    assert not [name for name, _ in tags.attributes if name in ("src", "href") or name.startswith("on")]
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(block)["runs"][0]["requests"][0]["text"] == HOSTILE
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    for script in re.findall(r"<script>(.*?)</script>", text, re.S):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_a_page_without_data_is_small_and_says_where_its_charts_come_from(record):
    assert len(page([], [], prefix=explorer(4))) + len(json.dumps(explorer(8))) < 400_000
    notice = (facts_module.Path(facts_module.__file__).parent / "web" / "NOTICE").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        file = facts_module.Path(facts_module.__file__).parent / "web" / name
        assert f"{name} " in notice and hashlib.sha256(file.read_bytes()).hexdigest() in notice


def test_counts_of_every_step_are_those_of_the_replayed_blocks(record):
    run = run_facts(record)
    state, at = Replay(), -1
    frames = list(read_record(record))
    for frame, after in zip(frames, [*frames[1:], {"frame": "close"}], strict=True):
        state.apply(frame)
        at += frame["frame"] in ("step", "quiet")
        if at < 0 or after["frame"] == "end":
            continue
        group = state.snapshot()["groups"][0]
        owners = list(group["ref"].values())
        shared = sum(n > 1 for n in owners)
        assert run["counts"][at] == [group["num_blank"], len(owners) - shared, shared, group["num_evictable"]]
    assert at + 1 == len(run["steps"]) == len(run["counts"])
    assert run["left"], "no content ever left: the pool was too large to test that"


def test_each_requests_story_adds_up(record):
    run = run_facts(record)
    fed = {}
    for line in run["requests"]:
        assert line["arrival"] <= line["first"] <= line["end"] and line["why"] == "length"
        chunks = sum(count for _, _, count in line["chunks"])
        if not line["preemptions"]:
            assert line["hit"] + chunks == line["prompt"]
        for (_, end, _), (start, _, _) in zip(line["spans"], line["spans"][1:]):
            assert start >= end - 1e-9
        fed[line["id"]] = chunks
    assert len(fed) > 10 and any(line["preemptions"] for line in run["requests"])


def test_a_request_says_what_compiling_cost_it():
    frames = [
        {"frame": "run", "version": 1, "block_size": 4, "pool_blocks": [9]},
        {"frame": "add", "id": "a", "t": 0.0, "prompt": 3, "max_new": 2, "n": 1},
        {"frame": "step", "n": 1, "t": 0.0, "s": 2.5, "admitted": [["a", 0, 0, "no_match"]], "compile_s": 2.0,
         "rows": [[0, "a", 0, 0, 3, 1]], "blocks": [[0, 1, 1]], "tables": [[0, 0, 0, [1]]]},
        {"frame": "step", "n": 2, "t": 2.5, "s": 0.5, "copy_s": 0.25},
    ]  # fmt: skip
    (line,) = facts_module.facts(frames, "x")["requests"]
    assert (line["compile_s"], line["copy_s"], line["first"], line["end"]) == (2.0, 0.25, 2.5, None)
    assert line["spans"] == [[0.0, 0.0, "wait"], [0.0, 2.5, "prefill"], [2.5, 3.0, "decode"]]


def test_a_record_too_long_for_a_page_is_refused(record, monkeypatch):
    monkeypatch.setattr(facts_module, "MOST_FRAMES", 50)
    with pytest.raises(RecordError, match="more than 50 frames"):
        run_facts(record)


def test_the_explorers_tables_are_the_managers(record):
    data = explorer(12)
    for mode, options in MODES.items():
        for size in SIZES:
            alone = [hit_tokens(n, prefix, size, **options) for n in range(1, 13) for prefix in range(n + 1)]
            assert data["tables"][mode][str(size)] == alone
    whole = data["tables"]["hash chain, whole blocks"]["4"]
    assert (whole[12 * 13 // 2 - 1 + 10], whole[12 * 13 // 2 - 1 + 12]) == (8, 8)


def test_the_command_writes_a_page_and_refuses_what_shows_nothing(record, tmp_path, monkeypatch):
    monkeypatch.setattr("pagedjax.report.page.explorer", lambda: explorer(4))
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 3)
    run = CliRunner().invoke(
        cli,
        ["report", str(tmp_path / "o.html"), "--run", str(record), "--trace", str(trace), "--policy", "fifo"],
    )
    assert run.exit_code == 0 and run.output == f"{tmp_path / 'o.html'}\n"
    text = (tmp_path / "o.html").read_text()
    assert "<td>4</td><td>0.6667</td><td>0.6667</td><td>0.6667</td>" in text
    (tmp_path / "c.csv").write_text("q\n" + "one and the same\n" * 2)
    of_columns = ["--trace", str(tmp_path / "c.csv"), "--column", "prompt=q", "--quiet"]
    assert CliRunner().invoke(cli, ["report", str(tmp_path / "c.html"), *of_columns]).exit_code == 0
    for command in ("curve", "advise"):  # the commands on the page open the file as the page did
        assert f"<code>pagedjax {command} c.csv --column prompt=q" in (tmp_path / "c.html").read_text()
    for arguments, said in (
        ([], "give --run RECORD or --trace FILE"),
        (["--run", str(record), "--policy", "lfu"], "are of traces"),
        (["--run", str(trace)], "t.jsonl:1: no frame of a record"),
        (["--run", str(record), "--instance", "h0"], "no record is of a fleet"),
        (["--trace", str(trace), "--policy", "belady"], "is no policy but a bound"),
        (["--trace", str(trace), "--policy", "lruu"], "lruu"),
    ):
        refused = CliRunner().invoke(cli, ["report", str(tmp_path / "p.html"), *arguments])
        assert refused.exit_code != 0
        assert said in refused.output + str(refused.exception)
