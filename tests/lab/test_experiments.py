"""Every experiment's smoke run, results that survive kill -9, tables and plots."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagedjax import lab
from pagedjax.lab import catalog, workers

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
NAMES = lab.names()
# Each of these compiles a decoder: about 9 seconds of the 10 allowed.
SOURCES = {n: catalog.path_of(n).read_text() for n in NAMES}
DECODERS = [n for n in NAMES if "_decoder import" in SOURCES[n] or "JaxRunner" in SOURCES[n]]
SMOKES = [pytest.param(n, marks=pytest.mark.full) if n in DECODERS else n for n in NAMES]
COUNTED = ["hit-length", "indexes", "ledger"]  # these need no shared data


@pytest.fixture
def data(request: pytest.FixtureRequest) -> Path:
    return request.config.getoption("--data-dir").resolve()


@pytest.mark.parametrize("name", SMOKES)
def test_smoke_run_gives_rows_table_and_plot(name: str, tmp_path: Path, data: Path) -> None:
    experiment = lab.load(name)
    try:
        lab.check_data(experiment, data)
    except lab.MissingData as missing:
        pytest.skip(str(missing))
    started = time.process_time()
    rows = lab.run_all([name], tmp_path, smoke=True, data=data)[name]
    assert time.process_time() - started < 10
    assert rows and experiment.kind in ("counted", "simulated", "measured")
    for claim in lab.claim_rows(experiment.claims, rows):
        assert claim["verdict"] in ("", "reproduced", "undecided", "differs", "equal")
    written = lab.write_tables(experiment, rows, tmp_path) + lab.write_plots(experiment, rows, tmp_path)
    assert all(path.stat().st_size > 0 for path in written)
    header = json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[0])
    assert header["experiment"] == name and set(header["data"]) == set(experiment.data)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.full) if n in DECODERS else n
        for n in NAMES
        if lab.load(n).kind != "measured"
    ],
)
def test_runs_are_pure(name: str, tmp_path: Path, data: Path) -> None:
    experiment = lab.load(name)
    if any(not (data / f).is_file() for f in experiment.data):
        pytest.skip(f"{name}: its data is not there")
    unit = experiment.units(True, 0)[0]
    assert list(experiment.run(unit, data)) == list(experiment.run(unit, data))


def test_drawn_case() -> None:
    draw = lab.load("hit-length").draw
    assert draw is not None
    assert draw({"prompt": 14, "prefix": 10, "block_size": 4}).splitlines() == [
        "|####|####|....|..|",
        "8 hit (#), 6 computed (.)",
    ]
    with pytest.raises(ValueError, match="prefix=11"):
        draw({"prompt": 10, "prefix": 11, "block_size": 4})
    with pytest.raises(ValueError, match="block_size=0"):
        draw({"prompt": 10, "prefix": 1, "block_size": 0})


@pytest.mark.parametrize("prompt", [1, 16, 33])
def test_the_pages_formula_is_the_managers(prompt: int) -> None:
    count = catalog.module("hit-length").count
    for block_size in (1, 4, 16):
        for prefix in range(prompt + 1):
            by_rule = min(prefix // block_size, (prompt - 1) // block_size) * block_size
            assert count(prompt, prefix, block_size) == by_rule


def test_ledger_at_full_size(tmp_path: Path) -> None:
    """One case of the full ledger on the real manager: 157,000 blocks alone, 32,125 shared."""
    ledger = lab.load("ledger")
    unit = next(u for u in ledger.units(False, 0) if u["block_size"] == 16 and u["common"] == 2000)
    (row,) = ledger.run(unit, tmp_path)
    assert (row["blocks_alone"], row["blocks_shared"], row["shared_share"]) == (157_000, 32_125, 0.8)


def test_killed_run_resumes_to_the_same_rows(tmp_path: Path) -> None:
    """kill -9 in the middle, a cut last line, then resume: nothing twice, nothing lost."""
    whole = lab.run_all(COUNTED, tmp_path / "whole", smoke=True)
    out = tmp_path / "killed"
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path; from pagedjax import lab\n"
        f"lab.run_all({COUNTED!r}, Path({str(out)!r}), smoke=True, advance=lambda n: time.sleep(0.2))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    path = out / "indexes.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < 4):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = path.read_bytes().count(b"\n") - 1
    assert 3 <= finished < len(lab.load("indexes").units(True, 0))
    with path.open("ab") as file:
        file.write(b'{"unit": 14, "rows": [{"traf')
    ran: list[float] = []
    resumed = lab.run_all(COUNTED, out, smoke=True, resume=True, advance=ran.append)
    assert resumed == whole
    for name in COUNTED:
        assert (out / f"{name}.jsonl").read_text() == (tmp_path / "whole" / f"{name}.jsonl").read_text()


def test_resume_does_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.run_all(["hit-length"], tmp_path, smoke=True)
    file = lab.ResultFile(tmp_path / "hit-length.jsonl")
    header, units = file.read()
    assert header is not None
    lost = units.pop(1)
    file.start(header, units)
    done: list[object] = []
    monkeypatch.setattr("pagedjax.lab.run.work", lambda name, unit, data, settings: done.append(unit) or lost)
    lab.run_all(["hit-length"], tmp_path, smoke=True, resume=True)
    assert len(done) == 1
    notes: list[str] = []
    lab.run_all(["hit-length"], tmp_path, smoke=True, seed=1, resume=True, note=notes.append)
    assert "other settings" in notes[0] and len(done) > 1


def test_two_processes_give_the_same_file(tmp_path: Path) -> None:
    for jobs in (1, 2):
        lab.run_all(["hit-length", "ledger"], tmp_path / str(jobs), smoke=True, jobs=jobs)
    for name in ("hit-length", "ledger"):
        assert (tmp_path / "1" / f"{name}.jsonl").read_text() == (
            tmp_path / "2" / f"{name}.jsonl"
        ).read_text()


def test_what_is_measured_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything else, one unit at a time: the clock must not show a neighbour."""
    asked: list[int] = []
    ran: list[tuple[int, str]] = []

    @contextmanager
    def local(jobs: int) -> Iterator[workers.Here]:
        asked.append(jobs)
        yield workers.Here()

    monkeypatch.setattr("pagedjax.lab.run.local", local)
    monkeypatch.setattr("pagedjax.lab.run.work", lambda name, *rest: ran.append((asked[-1], name)) or [{}])
    lab.run_all(["hash-cost", "hit-length"], tmp_path, smoke=True, jobs=2)
    assert {name for jobs, name in ran if jobs == 2} == {"hit-length"} and ran[-1] == (1, "hash-cost")


def test_what_is_measured_runs_alone_on_any_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--on local:4` is `--jobs 4`: after everything else, each once the one before has ended."""
    begun: list[tuple[str, int]] = []
    futures: list[Future[object]] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, fn, /, *args):  # type: ignore[no-untyped-def]
            begun.append((args[0], sum(not future.done() for future in futures)))
            futures.append(super().submit(fn, *args))
            return futures[-1]

    monkeypatch.setattr("pagedjax.lab.run.work", lambda *unit: time.sleep(0.005) or [{}])
    with Pool(2) as pool:
        lab.run_all(["hash-cost", "cached-ttft", "hit-length"], tmp_path, smoke=True, executor=pool)
    names = [name for name, _ in begun]
    first = names.index("hash-cost")
    assert set(names[:first]) == {"hit-length"} and set(names[first:]) == {"hash-cost", "cached-ttft"}
    assert [under_way for _, under_way in begun[first:]] == [0] * len(names[first:])


def test_missing_data_is_named(tmp_path: Path) -> None:
    notes: list[str] = []
    assert lab.run_all(["mooncake-curve"], tmp_path, smoke=True, data=tmp_path, note=notes.append) == {}
    assert "mooncake_conversation_trace" in notes[0] and "--data-dir" in notes[0]
    with pytest.raises(ValueError, match="experiment=nope: must be one of"):
        lab.load("nope")


def test_summary_lists_claims_and_commands(tmp_path: Path) -> None:
    lab.run_all(["hit-length"], tmp_path, smoke=True)
    text = lab.summary(tmp_path, tmp_path)
    assert (
        "pagedjax experiment run hit-length" in text and "| 8 | 1 | 8 | 1 | identity: equal | equal |" in text
    )
    assert text.count("No result is there.") == len(NAMES) - 1


def test_committed_summary_is_of_the_committed_results() -> None:
    assert (RESULTS.parent / "README.md").read_text() == lab.summary(RESULTS, RESULTS.parent)


def test_workers_end_with_whoever_was_killed(tmp_path: Path) -> None:
    """A killed run leaves no process behind that goes on computing."""
    script = tmp_path / "asker.py"
    script.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pagedjax.lab import workers\n"
        "if __name__ == '__main__':\n"
        "    with workers.local(2) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        pool.submit(time.sleep, 600)\n"
        "        time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and _runs(worker):
            time.sleep(0.05)
    assert not _runs(worker)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("group", [False, True], ids=["parent", "group"])
def test_ctrl_c_ends_a_run_at_once(tmp_path: Path, group: bool) -> None:
    """With workers in the middle of long units and many more queued; what is finished stays."""
    script = tmp_path / "asker.py"
    script.write_text(
        f"import signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pagedjax.lab import workers\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background\n"
        "if __name__ == '__main__':\n"
        "    calls = [(i, time.sleep, (600 if i else 0.01,)) for i in range(6)]\n"
        "    with workers.local(2) as pool:\n"
        "        for number, _ in workers.finished(pool, calls):\n"
        "            print(number, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline() == b"0\n"
        (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
        process.wait(60)
        assert b"KeyboardInterrupt" in process.stderr.read()
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):  # soon nobody of it is left
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_call_that_fails_loses_no_other(threads: int) -> None:
    """What runs is waited for and kept, what is not begun is not begun; any executor of concurrent.futures serves."""

    def call(number: int) -> int:
        if number == 1:
            raise ValueError("call 1")
        time.sleep(0.05)
        return number

    found: list[int] = []
    with ThreadPoolExecutor(threads) as pool, pytest.raises(ValueError, match="call 1"):
        for key, value in workers.finished(pool, [(i, call, (i,)) for i in range(20)]):
            assert key == value
            found.append(key)
    assert 0 in found and 19 not in found


def test_a_borrowed_executor_gives_the_same_rows(tmp_path: Path) -> None:
    """A cluster's client stands in for the local processes: whatever has `submit`."""
    with ThreadPoolExecutor(2) as pool:
        rows = lab.run_all(COUNTED, tmp_path / "a", smoke=True, executor=pool)
        assert pool.submit(int, "7").result() == 7  # left open: it is not ours
    assert rows == lab.run_all(COUNTED, tmp_path / "b", smoke=True)


def test_here_begins_no_call_before_it_is_asked() -> None:
    """In this process a unit runs when its turn comes, so that each is written down before the next begins."""
    begun: list[int] = []
    for number, _ in workers.finished(workers.Here(), [(i, begun.append, (i,)) for i in range(3)]):
        assert begun == list(range(number + 1))


def test_strange_lines_of_a_result_file_count_for_nothing(tmp_path: Path) -> None:
    lab.run_all(["hit-length"], tmp_path, smoke=True)
    path = tmp_path / "hit-length.jsonl"
    whole = path.read_text()
    path.write_text('5\nnull\n[1]\n{"experiment": "hit-length"}\n' + whole)
    header, units = lab.ResultFile(path).read()
    assert header == json.loads(whole.splitlines()[0]) and len(units) == len(whole.splitlines()) - 1
    assert lab.summary(tmp_path, tmp_path)
    path.write_text('{"experiment": "hit-length"}\n')
    assert "No result is there." in lab.summary(tmp_path, tmp_path)


def test_the_command_tells_a_script_that_nothing_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedjax.cli import main

    args = ["experiment", "run", "mooncake-curve", "--data-dir", str(tmp_path), "--out", str(tmp_path)]
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("skipped mooncake-curve: needs ")
    assert main(["experiment", "run", "hit-length", "--set", "prompt=100000000"]) == 2
    assert "prompt=100000000: must be at most 10,000" in capsys.readouterr().err
