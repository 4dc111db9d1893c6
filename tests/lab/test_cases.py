"""The laboratory's cases: provenance (F086), settings (F102), one rule for all claims (F084)."""

import json
from pathlib import Path

import pytest

from pagedjax import lab
from pagedjax.cli import main
from pagedjax.lab import catalog, claims, provenance
from pagedjax.lab.claims import Claim, Estimate, cell, ratio

ROOT = Path(__file__).resolve().parents[2]


def test_F086_a_changed_policy_makes_rows_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do a changed hardware file and a changed file that the experiment imports; a changed page does not."""
    changed: set[str] = set()

    def fingerprint(path: Path) -> str:
        return "other" if str(path.relative_to(ROOT)) in changed else true(path)

    def work_of(path: Path) -> str:
        return "other" if str(path.relative_to(ROOT)) in changed else text(path)

    true, text = provenance.fingerprint, provenance.work_of
    monkeypatch.setattr(provenance, "fingerprint", fingerprint)
    monkeypatch.setattr(provenance, "work_of", work_of)

    def units_done() -> int:
        done: list[float] = []
        monkeypatch.setattr("pagedjax.lab.run.work", lambda *unit: done.append(1) or [{"hit_tokens": 0}])
        lab.run_all(["hit-length"], tmp_path, smoke=True, resume=True)
        return len(done)

    everything = units_done()
    assert everything == 11 and units_done() == 0
    for file in (
        "pagedjax/cache/policies/adaptive.py",
        "pagedjax/kernels/native.cc",
        "pagedjax/kernels/products.h",
        "configs/hardware/a100-40gb.toml",
        "configs/shapes/opt-13b.json",
        "experiments/hit_length.py",
    ):
        assert (ROOT / file).is_file()
        changed = {file}
        assert units_done() == everything, file
        assert units_done() == 0
    before = changed
    for file in ("pagedjax/cli/curve.py", "pagedjax/report/tables.py", "experiments/ledger.py"):
        assert (ROOT / file).is_file()
        changed = before | {file}
        assert units_done() == 0, file


def test_F086_a_digest_is_of_what_makes_rows(tmp_path: Path) -> None:
    """Not of claims and plots, nor of how imports are laid out; of everything that the run needs, decorators too."""
    path = tmp_path / "question.py"
    text = """\'\'\'A question?\'\'\'
from pagedjax.lab import Experiment, Claim, Unit
import math
SIZES = (1, 2)
@dataclass(frozen=True)
class Case:
    size: int = SIZES[0]
def _units(smoke, seed): return [Case()]
def _half(x): return x / 2
def _run(unit, data): yield {"x": _half(math.pi)}
def _colour(): return "C0"
def _plot(rows): _colour()
EXPERIMENT = Experiment(units=_units, run=_run, plot=_plot, claims=(Claim(),))
"""

    def work(old: str = "", new: str = "") -> str:
        assert old in text
        path.write_text(text.replace(old, new, 1) if old else text)
        return provenance.work_of(path)

    whole = work()
    shown = {
        "C0": "C1",
        "A question": "Another",
        "Claim()": "Claim(1)",
        "Experiment, Claim": "Experiment",
        "(rows)": "(r)",
    }
    for old, new in shown.items():
        assert work(old, new) == whole, old
    made = {
        "(1, 2)": "(4, 2)",
        "=True": "=False",
        "x / 2": "x / 3",
        "import math": "import cmath as math",
        "Case()": "Case(2)",
    }
    for old, new in made.items():
        assert work(old, new) != whole, old


def test_F086_the_digest_covers_every_module_that_can_change_a_row() -> None:
    """A new room counts unless it is listed among those that show results."""
    known = {"bench", "cli", "explore", "lab", "progress", "report", "shipped", "__main__"}
    assert set(provenance._SHOW) == known
    names = {path.name for path in provenance.own_files("calibration")}
    assert names == {"calibration.py", "_serving.py"}
    assert {path.name for path in provenance.own_files("decoded-sharing")} >= {
        "beam_search.py",
        "_serving.py",
    }


def test_F086_claims_and_notes_are_no_part_of_the_work(tmp_path: Path) -> None:
    """Another note keeps the rows, another line of the work does not."""
    source = (ROOT / "experiments" / "ledger.py").read_text()
    path = tmp_path / "ledger.py"
    path.write_text(source)
    before = provenance.work_of(path)
    assert "EXPERIMENT" not in before and "PagedManager" in before
    path.write_text(source.replace("What does sharing a prefix save", "How much does sharing save"))
    assert provenance.work_of(path) == before
    path.write_text(source.replace("users // 10", "users // 5"))
    assert provenance.work_of(path) != before


@pytest.mark.parametrize("name", lab.names())
def test_F102_every_field_of_every_unit_can_be_set(name: str) -> None:
    experiment = lab.load(name)
    units = lab.units_of(experiment, smoke=True, seed=0)
    for field in {field for unit in units for field in unit}:
        (old, *_) = (unit[field] for unit in units if field in unit)
        if isinstance(old, str):
            assert {
                u[field] for u in lab.units_of(experiment, smoke=True, seed=0, settings={field: old})
            } == {old}
            if field not in experiment.open:
                with pytest.raises(ValueError, match=f"--set {field}=no such value: must be one of"):
                    lab.units_of(experiment, smoke=True, seed=0, settings={field: "no such value"})
            continue
        element = old[0] if isinstance(old, list) else old
        if isinstance(element, bool):
            typed, value = "off", False
        elif isinstance(element, str):
            typed = value = "x"
        else:
            typed, value = "7", type(element)(7)
        new = lab.units_of(experiment, smoke=True, seed=0, settings={field: typed})
        got = [unit[field] for unit in new if field in unit]
        assert got and all(v == ([value] if isinstance(old, list) else value) for v in got)
    with pytest.raises(ValueError, match=f"is not a setting of {name}, which has"):
        lab.units_of(experiment, smoke=True, seed=0, settings={"no_such_field": "1"})


def test_F102_the_rows_the_table_and_the_header_say_what_was_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["experiment", "run", "ledger", "--out", str(tmp_path), "--no-plots", "--jobs", "1"]
    assert main([*args, "--set", "users=30", "--set", "common=100", "--set", "block-size=16"]) == 0
    out = capsys.readouterr().out
    assert "| users |" in out and "| common |" in out
    header, units = lab.ResultFile(tmp_path / "ledger.jsonl").read()
    assert header is not None and header["settings"] == {"users": "30", "common": "100", "block_size": "16"}
    assert header["command"].endswith("--seed 0 --set users=30 --set common=100 --set block_size=16")
    rows = [row for number in sorted(units) for row in units[number]]
    assert [row["case"] for row in rows] == list(dict.fromkeys(row["case"] for row in rows)), "each unit once"
    assert all((row["users"], row["common"]) == (30, 100) for row in rows)
    table = (tmp_path / "ledger.md").read_text()
    assert "Set: users=30, common=100, block_size=16" in table and "other settings: not judged" in table
    assert "reproduced" not in table and "| equal |" not in table
    assert main([*args, "--set", "userz=30"]) == 2
    assert "did you mean users?" in capsys.readouterr().err
    assert main([*args, "--set", "users=many"]) == 2
    assert "--set users=many: must be a whole number; try users=16" in capsys.readouterr().err
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])["settings"]["users"] == "30"


@pytest.mark.parametrize(
    ("paper", "values", "expected"),
    [
        (2.0, [2.19], "reproduced"),
        (2.0, [2.21], "differs"),
        (2.0, [1.81], "reproduced"),
        (2.0, [1.79], "differs"),
        (2.0, [2.0, 2.1, 1.9, 2.05, 1.95], "reproduced"),
        (2.0, [2.1, 2.3, 1.9, 2.2, 2.0], "undecided"),  # 2.1 with an interval of 1.9 to 2.3
        (2.0, [3.0, 3.1, 2.9, 3.0, 3.0], "differs"),
        ((1.7, 2.7), [1.6], "reproduced"),
        ((1.7, 2.7), [1.5], "differs"),
        ((1.7, 2.7), [2.9], "reproduced"),
        ((1.7, 2.7), [3.0], "differs"),
    ],
)
def test_F084_one_rule_judges_figures_and_ranges(paper: object, values: list[float], expected: str) -> None:
    claim = Claim("x", paper, "somewhere", lambda rows: values)  # type: ignore[arg-type]
    (row,) = lab.claim_rows((claim,), [])
    assert row["verdict"] == expected and "within 10%" in row["judged by"]


def test_F084_inputs_and_identities_are_marked_and_every_claim_says_its_rule() -> None:
    made = [
        Claim("an input", 1.0, "s", lambda rows: [9.0], "input"),
        Claim("equal", 4.89, "s", lambda rows: [4.887], "identity", 2),
        Claim("unequal", 4.89, "s", lambda rows: [4.884], "identity", 2),
        Claim("exact", 1.0, "s", lambda rows: [1.0 + 1e-9], "identity"),
        Claim("alone", None, "s", lambda rows: [3.0]),
        Claim("nothing", 3.0, "s", lambda rows: []),
    ]
    told = [(row["judged by"], row["verdict"]) for row in lab.claim_rows(tuple(made), [])]
    assert told == [
        ("an input: not judged", ""),
        ("identity: equal to 2 decimals", "equal"),
        ("identity: equal to 2 decimals", "NOT equal"),
        ("identity: equal", "NOT equal"),
        ("ours alone", ""),
        ("within 10%", ""),
    ]
    for name in lab.names():
        for claim in lab.load(name).claims:
            assert claims.rule(claim) and claim.source, (name, claim.text)
    with pytest.raises(ValueError, match="a claim has no tolerance"):
        Claim("x", 1.0, "s", lambda rows: [], 0.15)  # type: ignore[arg-type]
    assert claims.TOLERANCE == 0.10 and "tolerance" not in {
        f.name for f in Claim.__dataclass_fields__.values()
    }


def test_intervals_are_students_and_pair_the_seeds() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert estimate is not None and estimate.mean == 3.0
    assert estimate.half == pytest.approx(2.776 * (2.5**0.5) / 5**0.5)
    rows = [
        {"seed": s, "k": k, "v": v}
        for s, k, v in [(0, "a", 2.0), (0, "b", 1.0), (1, "a", 9.0), (1, "b", 3.0)]
    ]
    assert ratio("v", {"k": "a"}, {"k": "b"})(rows) == [2.0, 3.0]
    assert cell("v", k="a")(rows) == [2.0, 9.0] and cell("v", k="c")(rows) == []
    assert Estimate.of([]) is None and Estimate.of([4.0]) == Estimate(4.0, 0.0, 1)


def test_an_experiment_is_not_looked_for_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own `experiments` package stays out of it, and ours does not take its name."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise RuntimeError('not ours')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Path(catalog.module("ledger").__file__ or "") == ROOT / "experiments" / "ledger.py"


# ------------------------------------------------------------------------- what is committed

RESULTS = ROOT / "experiments" / "results"


def committed(name: str) -> list[dict[str, object]]:
    _, units = lab.ResultFile(RESULTS / f"{name}.jsonl").read()
    assert units, f"{name}: no result is committed"
    return [row for number in sorted(units) for row in units[number]]


def told(name: str) -> dict[str, dict[str, object]]:
    """Claim → its row of the committed table."""
    return {str(row["claim"]): row for row in lab.claim_rows(lab.load(name).claims, committed(name))}


def test_F083_every_row_of_fig_2_has_one_definition() -> None:
    """Token states of all KV memory, for the paged system as for Orca's; of the blocks in use stands beside."""
    machine = lab.load("batched-requests").units(False, 0)[0]["hardware"]
    systems = ("orca-max", "orca-pow2", "orca-oracle", "paged")
    rows = [
        {"workload": "sharegpt", "system": s, "hardware": machine, "seed": 0, "token_states": 0.5 + i / 10,
         "token_states_of_used": 99.0} for i, s in enumerate(systems)]  # fmt: skip
    rows += [{"workload": "alpaca", "system": s, "hardware": machine, "seed": 0} for s in systems]
    claims_of = {
        c.text: c for c in lab.load("batched-requests").claims if c.source == "PagedAttention Fig. 2"
    }
    assert [c.ours(rows) for c in claims_of.values()] == [[0.5], [0.6], [0.7], [0.8]]
    assert all("of all KV memory" in text for text in claims_of)
    (other,) = [c for c in lab.load("batched-requests").claims if "blocks in use" in c.text]
    assert other.ours(rows) == [99.0] and other.paper is None and "another definition" in other.source


def test_F087_when_tree_and_chain_find_the_same() -> None:
    off = {text: row["ours"] for text, row in told("indexes").items() if text.startswith("hash and radix")}
    assert off["hash and radix, LRU, few evictions: share of tokens of difference"] == 0
    tight = {text.split(", ")[1]: value for text, value in off.items() if "tight" in text}
    assert set(tight) == {"lru", "fifo", "cost", "s3fifo"}
    assert tight["lru"] == tight["cost"] == 0, "the first to go is a tail in both"
    assert all(float(str(tight[policy])) > 0 for policy in ("fifo", "s3fifo"))
    rows = [row for row in committed("indexes") if row["pool"] == "tight"]
    assert all(row["evictions"] > 0 for row in rows), "a traffic with evictions"  # type: ignore[operator]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "find the same tokens while LRU or the cost rule evicts" in readme


def test_F088_the_ledger_counts_blocks_on_both_sides() -> None:
    for row in committed("ledger"):
        per_block = row["block_size"] * 0.125 / 1000  # type: ignore[operator]
        assert row["gb_alone"] == pytest.approx(row["blocks_alone"] * per_block)
        assert row["gb_shared"] == pytest.approx(row["blocks_shared"] * per_block)
        assert (
            row["case"] not in ("all different", "timestamp as token 0")
            or row["gb_alone"] == row["gb_shared"]
        )


def test_an_outside_policy_and_a_hardware_file_run_in_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_outside.py").write_text(
        "from pagedjax.cache.eviction import LRU\n\n\nclass Mine(LRU):\n    pass\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"policy": "lab_outside:Mine", "index": "hash", "requests": "10"}
    rows = lab.run_all(["indexes"], tmp_path / "r", smoke=True, settings=settings, jobs=2)["indexes"]
    assert len(rows) == 5 and {row["policy"] for row in rows} == {"lab_outside:Mine"}
    own = tmp_path / "own.toml"
    own.write_text((ROOT / "configs" / "hardware" / "h100-80gb.toml").read_text())
    units = lab.units_of(lab.load("concurrency"), smoke=True, seed=0, settings={"hardware": str(own)})
    slow = lab.load("concurrency").units(True, 0)
    quick, usual = (next(iter(lab.load("concurrency").run(u[0], tmp_path))) for u in (units, slow))
    assert quick["hardware"] == str(own) and quick["requests_per_s"] > 1.5 * usual["requests_per_s"]
    with pytest.raises(
        ValueError, match="must be a file, or one of a100-40gb, a100-40gb-anyscale, h100-80gb"
    ):
        list(lab.load("concurrency").run({**units[0], "hardware": "a200"}, tmp_path))


# Questions whose results are to be written anew, on an idle machine; an entry goes when its result has come.
AWAITED: set[str] = set()


def awaited(names: list[str]) -> list[object]:
    """A test per question; one of `AWAITED` fails until its result is there, and must leave the list then."""
    return [pytest.param(n, marks=pytest.mark.xfail(strict=True)) if n in AWAITED else n for n in names]


# The papers' serving tables, of a device and a scheduler of their time.
SERVING = [name for name in lab.names() if "hardware" in lab.load(name).units(False, 0)[0]]


@pytest.mark.parametrize("name", awaited(SERVING))
def test_F085_figures_that_depend_on_host_work_stand_under_both_machines(name: str) -> None:
    experiment = lab.load(name)
    units = lab.units_of(experiment, smoke=False, seed=0)
    assert {unit["hardware"] for unit in units} == {"a100-40gb", "a100-40gb-anyscale"}
    for claim in experiment.claims:
        assert claim.beside is not None or "sensitivity" in claim.source, claim.text
    for row in told(name).values():
        assert row["ours"] is not None and row["seeds"] >= 5, row  # type: ignore[operator]
        assert "sensitivity" in str(row["source"]) or row["other machine, one seed"] is not None, row


@pytest.mark.parametrize("name", awaited(["serving-hour"]))
def test_F085_the_hour_is_played_under_three_hosts(name: str) -> None:
    hosts = {unit["host"] for unit in lab.units_of(lab.load(name), smoke=False, seed=0)}
    assert hosts == {"h100-80gb", "a100-40gb", "a100-40gb-anyscale"}
    assert all(row["ours"] is not None for row in told(name).values())


def test_F089_constants_are_sourced_and_odd_figures_explained() -> None:
    for path in sorted((ROOT / "configs" / "hardware").glob("*.toml")):
        text = path.read_text()
        assert "\nhost_bytes_per_s = " in text and "\ntransfer_s = " in text, path.name
    text = (ROOT / "configs" / "hardware" / "a100-40gb.toml").read_text()
    assert "PCIe Gen4" in text and "Assumed: what starting one copy costs" in text
    assert any("sensitivity to an assumption" in claim.source for claim in lab.load("swap-recompute").claims)
    mooncake = told("mooncake-curve")
    for trace in ("conversation", "synthetic"):
        for tokens in ("100,000", "1,000,000"):
            assert mooncake[f"{trace}, {tokens} tokens"]["verdict"] in ("reproduced", "differs")


@pytest.mark.parametrize("name", awaited(["decoded-sharing"]))
def test_F089_sixteen_requests_stand_with_their_interval(name: str) -> None:
    sampled = {text: row for text, row in told(name).items() if "draws of 16" in text}
    assert sampled and all(row["seeds"] == 20 and row["± 95 %"] for row in sampled.values())


@pytest.mark.parametrize("name", awaited(["policy-gap"]))
def test_the_goal_of_the_own_policy_is_reached(name: str) -> None:
    rows = committed(name)
    cells = {(r["trace"], r["capacity_blocks"]): r for r in rows if r["part"] == "trace"}
    assert len(cells) == 25 and all(r["by_block"] >= r["lru"] - 0.01 for r in cells.values())  # type: ignore[operator]
    goal = cells["conversation", 10_000]
    assert goal["by_block"] >= 0.238 and goal["by_block"] > goal["best_other"] > goal["lru"]  # type: ignore[operator]
    assert goal["second_half"] >= 0.24 > 0.216 > goal["lru_second_half"]  # type: ignore[operator]
    without = {r["what"]: r["by_block"] for r in rows if r["part"] == "ablation"}
    assert without.pop("no credit: LRU") == goal["lru"] and without.pop("whole") == goal["by_block"]
    assert all(value < goal["by_block"] for value in without.values()), without  # type: ignore[operator]


@pytest.mark.parametrize("name", awaited(["cached-ttft"]))
def test_F089_what_is_left_of_the_gain_is_explained(name: str) -> None:
    answer = told(name)["gain in latency with the longest answer"]
    assert answer["paper"] == 1.0 and answer["ours"] and "near 1 only where" in lab.load(name).note
    assert max(row["output_tokens"] for row in committed(name)) == 256  # type: ignore[type-var]


@pytest.mark.parametrize("name", awaited(lab.names()))
def test_F086_committed_headers_are_of_the_committed_questions(name: str) -> None:
    """hit-length's header once matched no file."""
    header, units = lab.ResultFile(RESULTS / f"{name}.jsonl").read()
    assert header is not None, f"{name}: no result is committed"
    experiment = lab.load(name)
    assert header["definition"] == experiment.definition
    assert header["sources"]["experiment"] == provenance.sources(name)["experiment"]
    assert header["units"] == provenance.digest(lab.units_of(experiment, smoke=False, seed=0))
    assert len(units) == len(lab.units_of(experiment, smoke=False, seed=0))
