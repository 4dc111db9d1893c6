"""The record of a fleet: each instance's frames give its manager's state, the page's figures are the fleet's."""

import numpy as np
import pytest
from click.testing import CliRunner

from pagedjax.cache import PagedManager
from pagedjax.cli import cli
from pagedjax.config import SchedulerConfig
from pagedjax.models.family_configs import read_shape
from pagedjax.report.facts import facts, read_runs, run_facts
from pagedjax.report.fleet import FleetRecorder, fleet_facts, instance_frames
from pagedjax.report.record import RecordError, read_record, replay
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.fleet import Change, InstanceSpec, LinkSpec, StoreSpec, run_fleet
from pagedjax.sim.synth import chat

BLOCK = 16
COST = CostModel(HardwareSpec.read("h100-80gb"), read_shape("llama-3-8b"), BLOCK)
LIMITS = SchedulerConfig(max_num_seqs=6, token_budget=256)


def _fleet(roles, managers, *, deaths=True, **options):
    def spec(name, role):
        def make(log):
            managers[name] = PagedManager(num_blocks=120, block_size=BLOCK, events=log)
            return managers[name]

        return InstanceSpec(name, make, COST, LIMITS, 1024, role)

    changes = ()
    if deaths:
        late = spec("late", roles[0])
        changes = (Change(4.0, "die", "a"), Change(5.0, "join", instance=late), Change(8.0, "leave", "b"))
    trace = chat(14, turns=3, system_tokens=40, user_tokens=30, output_tokens=40, seed=2, pause_s=2.0)
    return trace, [spec(name, role) for name, role in zip("abcd", roles)], {"changes": changes, **options}


KINDS = {
    "mixed": (["mixed"] * 3, {"router": "cache-aware"}),
    "handed over layer by layer": (
        ["prefill", "prefill", "prefill", "decode"],
        {"links": LinkSpec(bytes_per_s=5e8, handover="layers")},
    ),
    "with a store": (
        ["mixed"] * 3,
        {"router": "cache-aware", "store": StoreSpec(60 * BLOCK * COST.kv_bytes_per_token, 1 << 40)},
    ),
}


@pytest.fixture(params=KINDS, scope="module")
def recorded(request, tmp_path_factory):
    roles, options = KINDS[request.param]
    path = tmp_path_factory.mktemp("fleet") / "fleet.jsonl.gz"
    managers = {}
    trace, specs, rest = _fleet(roles, managers, **options)
    with FleetRecorder(path, {"trace": trace.digest()}) as observer:
        result = run_fleet(trace, specs, observer=observer, **rest)
    trace, specs, rest = _fleet(roles, {}, **options)
    return path, managers, result, run_fleet(trace, specs, **rest)


def test_a_fleet_that_is_refused_leaves_the_older_record(tmp_path):
    path = tmp_path / "fleet.jsonl"
    path.write_text("older")
    trace, specs, rest = _fleet(["mixed"] * 2, {}, deaths=False)
    with pytest.raises(ValueError, match="is there already"), FleetRecorder(path, {}) as observer:
        run_fleet(trace, [*specs, specs[0]], observer=observer, **rest)
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]


def test_a_record_changes_nothing(recorded):
    _, _, with_record, without = recorded
    assert with_record.records == without.records and with_record.instances == without.instances


def test_each_instances_frames_give_its_managers_state(recorded):
    path, managers, result, _ = recorded
    for name, manager in managers.items():
        assert replay(instance_frames(path, name)).snapshot() == manager.snapshot(), name
        run = facts(instance_frames(path, name), name)
        (totals,) = (t for t in result.instances if t.name == name)
        assert sum(int(s[1]) for s in run["steps"]) == totals.steps


def test_the_page_says_what_the_fleet_did(recorded):
    path, _, result, _ = recorded
    found = fleet_facts(path)
    assert [line["name"] for line in found["instances"]] == [t.name for t in result.instances]
    for line, totals in zip(found["instances"], result.instances, strict=True):
        assert line["steps"] == totals.steps
        busy = sum(v for v in line["busy"] if v) * found["span"] / found["bins"]
        assert busy == pytest.approx(totals.busy_s, rel=0.02, abs=1e-3)
        assert all(v is None or 0 <= v <= 1.0001 for v in (*line["busy"], *line["held"]))
    whys = {line["name"]: line["why"] for line in found["instances"]}
    assert whys["a"] == "died" and whys["b"] == "left" and whys["c"] == "end"
    routed = dict.fromkeys((t.name for t in result.instances), 0)
    for request in found["requests"]:
        for name in (*request["to"], *request["decoders"]):
            routed[name] += 1
    assert routed == {t.name: t.routed for t in result.instances}
    ended = {record.number: record for record in result.records}
    assert len(ended) == sum(request["end"] is not None for request in found["requests"]) > 20
    for request in found["requests"]:
        record = ended[int(request["id"])]
        assert (request["to"][-1], request["reason"]) == (record.instance, record.reason)
        assert not record.decode_instance or request["decoders"][-1] == record.decode_instance
        assert (request["expected"], request["cached"]) == (record.expected, record.times.num_cached)
        assert request["end"] == pytest.approx(record.times.finished_s)
        assert len(request["to"]) == record.lives
    assert sum(total[4] for total in found["totals"]) == result.received_bytes
    if result.received_bytes:
        assert found["moves"] and all(move[5] >= 0 for move in found["moves"])


def test_the_bins_are_means_of_what_the_frames_say(recorded):
    path = recorded[0]
    found = fleet_facts(path)
    edges = np.linspace(0, found["span"], found["bins"] + 1)
    run = facts(instance_frames(path, "c"), "c")
    line = next(line for line in found["instances"] if line["name"] == "c")
    for place in range(0, found["bins"], 7):
        low, high = edges[place], edges[place + 1]
        busy = sum(max(0.0, min(high, t + s) - max(low, t)) for _, _, t, s, *_ in run["steps"])
        if line["busy"][place] is not None:
            assert line["busy"][place] == pytest.approx(busy / (high - low), abs=1e-3)


def test_instances_are_chosen_by_name(recorded, tmp_path):
    path = recorded[0]
    assert [run["name"] for run in read_runs(path, ["c"])] == [str(path), f"{path}: instance c"]
    with pytest.raises(RecordError, match="--instance x: there are a, b, c"):
        read_runs(path, ["x"])


def test_a_notebook_shows_a_fleet_and_one_engine_is_none(recorded):
    path = recorded[0]
    html = read_record(path)._repr_html_()
    assert "a fleet of" in html and all(f">{name}<" in html for name in "abc") and "<script" not in html
    with pytest.raises(RecordError, match="is of a fleet"):
        run_facts(path)


def test_the_command_records_a_fleet_and_shows_it(tmp_path, monkeypatch):
    monkeypatch.setattr("pagedjax.report.page.explorer", dict)
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 4, "hash_ids": [1, %d]}\n'
    trace.write_text("".join(line % (40 * i, i % 3) for i in range(12)))
    record, out = tmp_path / "f.jsonl", tmp_path / "o.html"
    sets = ["--set", "instance.cache.block_size=512", "--set", "instance.cache.num_blocks=64"]
    arguments = [str(trace), "--instances", "2", "--router", "round-robin", "--record", str(record), *sets]
    run = CliRunner().invoke(cli, ["fleet", *arguments])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(cli, ["report", str(out), "--run", str(record)])
    assert run.exit_code == 0, run.output
    for changed in ('{"frame":"route","id":"0"}', '{"frame":"step","i":7,"n":0,"t":0.0,"s":1.0}'):
        edited = tmp_path / "edited.jsonl"
        edited.write_text(record.read_text() + changed + "\n")
        with pytest.raises(RecordError, match="does not follow from those before it"):
            fleet_facts(edited)
    for option in ("--record", "--records"):  # neither the trace nor a record is written over
        run = CliRunner().invoke(cli, ["fleet", str(trace), option, str(trace)])
        assert run.exit_code == 2 and f"{option} {trace}: is the trace itself" in run.output
    run = CliRunner().invoke(cli, ["fleet", str(trace), "--record", str(out), "--records", str(out)])
    assert run.exit_code == 2 and "is the file of --record" in run.output
    run = CliRunner().invoke(cli, ["fleet", str(trace), "--concurrency", "2", "--scale", "3"])
    assert run.exit_code == 2 and "a closed loop has no times to divide" in run.output
    for over, option in ((record, "--run"), (trace, "--trace")):
        run = CliRunner().invoke(cli, ["report", str(over), option, str(over)])
        assert run.exit_code == 2 and f"OUT {over}: is the " in run.output
    text = out.read_text()
    assert "<h3>Routing</h3>" in text and "<td>6</td>" in text
