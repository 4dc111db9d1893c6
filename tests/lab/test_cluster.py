"""`--on`: a dask cluster gives the rows of local processes, loses nothing with a worker, and ends in one line."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pagedjax import lab
from pagedjax.cli import main
from pagedjax.lab import cluster, provenance
from pagedjax.lab.cluster import Cluster, LacksData, place_of, point_there, work_there, workers_on
from pagedjax.lab.workers import Here, finished
from pagedjax.sim.synth import Arrivals, chat
from pagedjax.sim.trace import write_trace


@pytest.fixture(scope="module")
def dask_cluster():  # type: ignore[no-untyped-def]
    distributed = pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
    ) as made:
        yield made


def _place(dask_cluster) -> str:  # type: ignore[no-untyped-def]
    return "dask://" + dask_cluster.scheduler_address.removeprefix("tcp://")


@pytest.mark.parametrize("on", ["locl:4", "local:0", "local:", "dask:host", "dask://host", "dask://:1"])
def test_places_are_named(on: str) -> None:
    with pytest.raises(ValueError, match="must be local:PROCESSES or dask://HOST:PORT"), workers_on(on):
        pass


def test_local_is_todays_pool() -> None:
    with workers_on("local:1") as executor:
        assert isinstance(executor, Here)


def test_jobs_and_on_are_not_both_given(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["experiment", "run", "ledger", "--jobs", "2", "--on", "local:2"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_data_is_found_by_content(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(cluster, "user_cache_dir", lambda: tmp_path / "cache")
    here = tmp_path / "here"
    for name, text in (("data/a.txt", b"one"), ("data/b.txt", b"two")):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(text)
    needs = {name: provenance.fingerprint(here / name) for name in ("data/a.txt", "data/b.txt")}
    assert place_of(here, needs) == here
    (here / "data/b.txt").write_bytes(b"other")  # another file of the same name is none
    with pytest.raises(LacksData) as lacks:
        place_of(here, needs)
    assert lacks.value.names == ("data/b.txt",)
    cluster._keep("data/b.txt", b"two")
    folder = place_of(here, needs)
    assert folder != here
    assert [(folder / name).read_bytes() for name in needs] == [b"one", b"two"]


def test_no_scheduler_is_one_line(capsys) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    with pytest.raises(ConnectionError, match="no scheduler answers there"):
        Cluster("dask://127.0.0.1:9", "tcp://127.0.0.1:9", timeout_s=0.5)


def test_dask_gives_the_rows_of_local(dask_cluster, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    names = ["hot-prefix", "scale-out"]
    with workers_on(_place(dask_cluster)) as executor:
        there = lab.run_all(names, tmp_path / "there", smoke=True, executor=executor)
    assert there == lab.run_all(names, tmp_path / "here", smoke=True)
    for name in names:
        written = [(tmp_path / side / f"{name}.jsonl").read_text() for side in ("there", "here")]
        assert written[0] == written[1]


def test_a_worker_gets_the_data_that_it_lacks(dask_cluster, data_dir, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    experiment = lab.load("store-size")
    data = data_dir.resolve()
    unit = experiment.units(True, 0)[0]
    header = provenance.provenance(experiment, smoke=True, seed=0, data=data)
    wanted = (header["data"], header["sources"])
    with workers_on(_place(dask_cluster)) as executor:
        assert isinstance(executor, Cluster)
        executor.offer({name: data / name for name in experiment.data})
        rows = executor.submit(work_there, "store-size", unit, str(tmp_path / "nowhere"), {}, *wanted).result(
            60
        )
        assert rows == list(experiment.run(unit, data))
        other = {**header["sources"], "package": "another"}
        with pytest.raises(ValueError, match="a worker has another package than this machine"):
            executor.submit(work_there, "store-size", unit, str(data), {}, header["data"], other).result(60)


def test_a_killed_worker_loses_nothing(dask_cluster) -> None:  # type: ignore[no-untyped-def]
    with workers_on(_place(dask_cluster)) as executor:
        pids = {executor.submit(os.getpid).result(30) for _ in range(20)}
        calls = [(i, _after, (0.3, i)) for i in range(8)]
        killer = threading.Timer(0.5, os.kill, (min(pids), signal.SIGKILL))
        killer.start()
        assert dict(finished(executor, calls)) == {i: i for i in range(8)}
        killer.join()


_after = eval("lambda seconds, value: (__import__('time').sleep(seconds), value)[1]")  # travels by value


def test_a_scheduler_that_goes_leaves_what_was_finished() -> None:
    distributed = pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as made,
        workers_on(_place(made)) as executor,
    ):
        results = finished(executor, [(0, _after, (0.0, 7)), (1, _after, (60.0, 8))])
        assert next(results) == (0, 7)
        threading.Timer(0.5, made.close).start()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="the scheduler is gone"):
            next(results)
        assert time.monotonic() - began < 50


def test_files_of_a_sweep_are_found_by_content(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(cluster, "user_cache_dir", lambda: tmp_path / "cache")
    trace, card = tmp_path / "t.jsonl", tmp_path / "card.toml"
    trace.write_bytes(b"one")
    card.write_bytes(b"two")
    needs = {str(path): provenance.fingerprint(path) for path in (trace, card)}
    point = {"trace": str(trace), "hardware": str(card), "rate": 2.0, "wide": [1]}

    def work(point, options):  # type: ignore[no-untyped-def]
        return {"point": point, "options": options}

    wanted = provenance.package_sources()
    assert point_there(work, needs, wanted, point, {"a": 1}) == {"point": point, "options": {"a": 1}}
    with pytest.raises(ValueError, match="a worker has another configs than this machine"):
        point_there(work, needs, {**wanted, "configs": "x"}, point, {})
    trace.write_bytes(b"another file of that name")
    with pytest.raises(LacksData) as lacks:
        point_there(work, needs, wanted, point, {})
    assert lacks.value.names == (str(trace),)
    cluster._keep(str(trace), b"one")
    found = point_there(work, needs, wanted, point, {"tokenizer": str(card)})
    assert Path(found["point"]["trace"]).read_bytes() == b"one" and found["point"]["hardware"] == str(card)
    assert found["options"] == {"tokenizer": str(card)} and trace.read_bytes() != b"one"


def _sweep(capsys, folder: Path, *more: str) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    grid = ["--grid", "cache.block_size=8,16", "--set", "num_blocks=90", "--set", "max_num_seqs=8"]
    status = main(["sweep", str(folder / "t.jsonl"), *grid, "--json", "--quiet", *more])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_sweep_on_a_cluster_is_the_sweep_here(dask_cluster, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    trace = chat(4, turns=2, output_tokens=12, arrivals=Arrivals(4.0))
    write_trace(tmp_path / "t.jsonl", trace, granularity=1, tail_ids=True)
    here = _sweep(capsys, tmp_path, "--on", "local:1", "--out", str(tmp_path / "here"))
    there = _sweep(capsys, tmp_path, "--on", _place(dask_cluster), "--out", str(tmp_path / "there"))
    assert here[0] == there[0] == 0 and there[1] == here[1] and len(json.loads(here[1])) == 2
    assert (tmp_path / "here/sweep.jsonl").read_text() == (tmp_path / "there/sweep.jsonl").read_text()
    # A worker elsewhere has no such file: it is sent there, once.
    with workers_on(_place(dask_cluster)) as executor:
        assert isinstance(executor, Cluster)
        name = f"gone/{tmp_path.name}/t.jsonl"
        executor.offer({name: tmp_path / "t.jsonl"})
        needs = {name: provenance.fingerprint(tmp_path / "t.jsonl")}
        call = (point_there, _size, needs, provenance.package_sources(), {"trace": name})
        assert executor.submit(*call).result(60) == {"bytes": (tmp_path / "t.jsonl").stat().st_size}


_size = eval("lambda point: {'bytes': __import__('os').path.getsize(point['trace'])}")  # travels by value


def test_a_sweep_without_its_scheduler_ends_in_one_line(tmp_path: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    trace = chat(2, turns=1, output_tokens=4, arrivals=Arrivals(4.0))
    write_trace(tmp_path / "t.jsonl", trace, granularity=1, tail_ids=True)
    start = Cluster.__init__
    monkeypatch.setattr(
        Cluster, "__init__", lambda self, name, address: start(self, name, address, timeout_s=0.5)
    )
    status, out, err = _sweep(capsys, tmp_path, "--on", "dask://127.0.0.1:9", "--out", str(tmp_path / "out"))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "--on dask://127.0.0.1:9: no scheduler answers there" in err
