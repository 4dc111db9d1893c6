"""Fleets from files, `key=value` strings and the command line: every key counts or is refused by name."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from pagedjax.cli import main
from pagedjax.sim import routing
from pagedjax.sim.fleet import run_fleet
from pagedjax.sim.fleet.file import InstanceTable, read_fleet
from pagedjax.sim.routing import ROUTERS
from pagedjax.sim.synth import chat
from pagedjax.sim.trace import write_trace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(path, chat(12, turns=3, user_tokens=60, output_tokens=8), granularity=1, tail_ids=True)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "fleets").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_fleets_run(path: Path) -> None:
    fleet = read_fleet(path.stem)
    result = run_fleet(chat(6, turns=2), fleet.specs(), **fleet.arguments())
    assert len(result.records) == len(list(chat(6, turns=2)))


def test_a_file_says_all_that_python_says(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        """
        [fleet]
        router = "load-aware"
        knowledge = "approximate"
        delay_s = 2
        seed = 3
        [router]
        beta = 0.5
        [arrivals]
        scale = 4
        [links]
        handover = "layers"
        [store]
        memory_bytes = "1GiB"
        pooled = true
        [promise]
        ttft_s = 2.5
        [[instance]]
        name = "a"
        count = 3
        devices = 2
        per_node = 2
        cache = { block_size = 32, num_blocks = 500, policy = "lfu" }
        scheduler = { max_num_seqs = 7 }
        [[instance]]
        name = "b"
        hardware = "a100-40gb"
        cache = { block_size = 32 }
        [[change]]
        at_s = 5
        kind = "join"
        instance = { name = "c", cache = { block_size = 32 } }
        [[change]]
        at_s = 6
        kind = "leave"
        name = "b"
        """
    )
    fleet = read_fleet(path)
    path.write_text("\ufeff" + path.read_text())
    assert read_fleet(path) == fleet, "the mark that Windows puts before UTF-8"
    specs, given = fleet.specs(), fleet.arguments()
    assert [(s.name, s.node) for s in specs] == [
        ("a0", "a-node0"),
        ("a1", "a-node0"),
        ("a2", "a-node1"),
        ("b", ""),
    ]
    assert (specs[0].scheduler.max_num_seqs, specs[0].scheduler.token_budget) == (7, 8192)
    manager = specs[0].manager(None)
    assert (manager.block_size, manager.num_blocks) == (32, 500)
    assert specs[0].cost.hardware.name.startswith("2 x") and specs[3].manager(None).num_blocks > 500  # type: ignore[union-attr]
    assert (given["router"], given["options"], given["knowledge"]) == (
        "load-aware",
        {"beta": 0.5},
        "approximate",
    )
    assert (given["delay_s"], given["arrivals"].scale, given["promise"].ttft_s) == (2.0, 4.0, 2.5)
    assert (given["store"].memory_bytes, given["store"].pooled, given["links"].handover) == (
        1 << 30,
        True,
        "layers",
    )
    assert [(c.at_s, c.kind, c.name, c.instance and c.instance.name) for c in given["changes"]] == [
        (5.0, "join", "", "c"),
        (6.0, "leave", "b", None),
    ]
    changed = read_fleet(path, ["instance.cache.block_size=64", "router.beta=2", "links.bytes_per_s=1e9"])
    assert {s.manager(None).block_size for s in changed.specs()} == {64}
    assert changed.options == {"beta": 2} and changed.tables["links"].bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["fleet.ruter=x"], "fleet.ruter: is not a setting; did you mean router"),
        (["flet.router=x"], "flet: is no table of a fleet; did you mean fleet"),
        (["router"], "must be key=value"),
        (["instance.cache.hash=sha256"], "instance.cache.hash: has no effect in a simulation"),
        (["instance.cache.memory_bytes=1GiB"], "has no effect in a simulation; give num_blocks"),
        (["instance.count=none"], "instance.count=none: must be a whole number"),
        (["instance.count=0"], "instance.count=0: must be at least 1"),
        (["instance.count=1000000000"], "instance.count=1000000000: must be at most 10,000"),
        (["fleet.seed=-3"], "fleet.seed=-3: must be at least 0"),
        (["fleet.until_s=nan"], "fleet.until_s=nan: must be positive"),
        (["fleet.ttl_s=0"], "fleet.ttl_s=0.0: must be positive"),
        (["fleet.tree_tokens=0"], "fleet.tree_tokens=0: must be at least 1"),
        (["instance.cache.event_log=9"], "instance.cache.event_log: has no effect in a simulation"),
        (["instance.reserve=1"], "instance.reserve=1.0"),
        (["fleet.delay_s=soon"], "fleet.delay_s=soon: must be a number"),
        (["links=5"], "links: must be a table"),
        (["change=5"], "change: must be a list of tables"),
        (["store.pooled=maybe"], "must be true or false"),
    ],
)
def test_bad_settings_are_named(settings: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_fleet(None, settings)


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    for text, words in (
        ("[fleet", "is not valid TOML"),
        ("[[change]]\nat_s = 1", "change: must have kind"),
        (
            "[[change]]\nat_s = 1\nkind = 'die'\nnane = 'a'",
            "change.nane: is not a setting; did you mean name",
        ),
        ("[[change]]\nat_s = 1\nkind = 'join'\ninstance = { count = 2 }", "one joins at a time"),
        ("[instance]\ncount = 2", "must be a list of tables"),
        ("[[instance]]\ncount = '2'", "instance.count=2: must be a whole number; take it out of the quotes"),
        (
            "[[instance]]\ncache = { block_size = '16' }",
            "instance.cache.block_size=16: must be a whole number",
        ),
        ("[fleet]\ndelay_s = '2'", "fleet.delay_s=2: must be a number; take it out of the quotes"),
        ("[store]\npooled = 'true'", "store.pooled=true: must be true or false; take it out of the quotes"),
        ("[[change]]\nat_s = '1'\nkind = 'die'\nname = 'h'", "change.at_s=1: must be a number"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words) as error:
            read_fleet(path)
        assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="must be a file, or one of disaggregated, mixed"):
        read_fleet("nowhere")


def test_the_documented_defaults_are_the_code_s() -> None:
    """Every key of every table stands on the page."""
    page = (ROOT / "docs" / "fleets.md").read_text(encoding="utf-8")
    fleet = read_fleet()
    for table in (*fleet.tables.values(), InstanceTable()):
        for f in fields(table):
            assert f"`{f.name}`" in page or f"`{f.name} =" in page, f.name


def test_the_command_prints_and_writes(trace_file: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    records = tmp_path / "records.jsonl"
    many = [str(trace_file), "--router", "session", "--instances", "3", "--scale", "2", "--seed", "1"]
    assert main(["fleet", *many, "--json", "--records", str(records), "--quiet"]) == 0
    out = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert out["requests"] == len(rows) > 10 and len(out["instances"]) == 3
    assert {row["routed"] for row in rows} == {"session"} and {row["expected_cached"] for row in rows} == {
        None
    }
    sessions = {(r["instance"]) for r in rows}
    assert len(sessions) > 1 and out["ttft_s"]["50"] > 0
    assert main(["fleet", *many]) == 0
    text = capsys.readouterr().out
    assert f"requests          {len(rows)}, refused: none" in text and "h2" in text
    assert main(["fleet", str(trace_file), "--concurrency", "2", "--head", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--router", "nearest"], "router=nearest: must be one of"),
        (["--concurrency", "2", "--set", "arrivals.kind=trace"], "arrivals.concurrency=2"),
        (["--set", "router.alpha=1"], "round-robin has none"),
        (["--scale", "0"], "arrivals.scale=0.0: must be positive"),
        (["--set", "instance.shape=gpt"], "must be a file, or one of"),
    ],
)
def test_bad_commands_end_in_one_line(trace_file: Path, capsys, arguments: list[str], words: str) -> None:  # type: ignore[no-untyped-def]
    older = [trace_file.parent / name for name in ("record", "records")]
    for path in older:
        path.write_text("older")
        arguments = [*arguments, f"--{path.name}", str(path)]
    assert main(["fleet", str(trace_file), *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert {path.read_text() for path in older} == {"older"}


def test_bench_says_what_a_fleet_costs_beside_its_instances(trace_file: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(routing, "ROUTERS", {name: ROUTERS[name] for name in ("session", "mooncake")})
    arguments = [
        "--minutes",
        "60",
        "--rounds",
        "1",
        "--router",
        "all",
        "--router",
        "random",
        "--set",
        "instance.count=2",
        "--json",
    ]
    assert (
        main(["bench", "fleet", str(trace_file), *arguments, "--set", "instance.cache.num_blocks=300"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)["tables"]["fleet"]
    assert [row["router"] for row in rows] == ["session", "mooncake", "random"]
    for row in rows:
        assert row["requests"] > 10 and row["ratio"] == row["fleet s"] / row["instances alone s"]
        held = [row[f"MB at {place}"] for place in ("1/4", "1/2", "whole")]
        assert min(held) > 0.1 and max(held) < 2 * min(held) and row["by the wall"] > 0
