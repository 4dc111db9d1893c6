"""Where things are: the cache folder where the system puts caches; files behind URLs as those here; files replaced."""

import errno
import gzip
import subprocess
import sys
from pathlib import Path

import pytest

import pagedjax.paths
from pagedjax.cli import main
from pagedjax.lab import ResultFile
from pagedjax.paths import Output, UrlPath, check_output, place, replace_bytes, replace_text, user_cache_dir


def test_the_cache_folder_follows_the_users_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_dir().is_relative_to(tmp_path) and user_cache_dir().name == "pagedjax"
    if (Path("/proc")).exists():  # Linux
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        assert user_cache_dir() == tmp_path / "elsewhere" / "pagedjax"


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_a_place_is_a_path_or_a_url(memory):
    assert place("a/b") == Path("a/b") and place(Path("a/b")) == Path("a/b")
    assert place("file:///tmp/a%20b") == Path("/tmp/a b")
    url = place("memory://box/one.jsonl.gz/")
    assert isinstance(url, UrlPath) and str(url) == "memory://box/one.jsonl.gz" and place(url) is url
    assert (url.name, url.stem, url.suffix, url.suffixes) == (
        "one.jsonl.gz",
        "one.jsonl",
        ".gz",
        [".jsonl", ".gz"],
    )
    assert url.parent == UrlPath("memory://box") and url.with_name("two") == url.parent / "two"
    assert UrlPath("memory://top").with_name("other") == UrlPath("memory://other")
    assert not url.exists() and not url.is_file()
    url.write_text("é")
    assert url.read_bytes() == "é".encode() and url.read_text() == "é" and url.is_file()
    assert url.parent.beside("one*") == [url] and url.parent.exists() and not url.parent.is_file()
    url.unlink()
    with pytest.raises(FileNotFoundError, match="memory://box/one"):
        url.open()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://x/y", "give a path, or a URL that fsspec knows"),
        (
            "http://127.0.0.1:1/x",
            "http does not replace a file whole or not at all; give a folder, or one of memory",
        ),
        ("ftp://127.0.0.1:1/x", "ftp does not replace a file whole or not at all"),
    ],
)
def test_what_cannot_be_written_whole_is_refused_by_name(url, message):
    with pytest.raises(ValueError, match=message):
        UrlPath(url).exists() if url.startswith("nothing") else UrlPath(url).write_text("x")


def test_a_plain_path_never_imports_fsspec(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"token_ids": [1, 2], "num_output": 1, "arrival_s": 0}\n')
    code = (
        "import sys; from pagedjax.cli import main; "
        f"assert main(['trace', 'info', {str(tmp_path / 't.jsonl')!r}]) == 0; "
        "sys.exit('fsspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_behind_a_url_resume_and_are_not_taken_for_another_runs(memory):
    header = {"experiment": "e", "data": {}, "seed": 0}
    file = ResultFile(place("memory://results/e.jsonl"))
    assert file.read() == (None, {})
    file.start(header, {})
    file.append(1, [{"a": 1}])
    file.append(0, [{"a": 0}])
    assert ResultFile(place("memory://results/e.jsonl")).read() == (header, {0: [{"a": 0}], 1: [{"a": 1}]})
    left = dict(
        memory.store
    )  # a run that is killed between writing the whole and removing the parts leaves these
    file.start({**header, "seed": 1}, {})
    memory.store.update({name: content for name, content in left.items() if not name.endswith("e.jsonl")})
    assert len(memory.store) == 3
    assert file.read() == ({**header, "seed": 1}, {})
    file.start(header, {0: [{"a": 0}]})
    assert list(memory.store) == ["/results/e.jsonl"]
    assert file.read() == (header, {0: [{"a": 0}]})


def test_results_and_traces_behind_urls(memory, tmp_path, capsys):
    trace, out = "memory://box/t.jsonl.xz", "memory://box/results"
    assert main(["trace", "make", "chat", trace, "--set", "num_sessions=3", "--quiet"]) == 0
    arguments = ["--grid", "cache.num_blocks=64,128", "--set", "block_size=8", "--jobs", "1", "--quiet"]
    assert main(["sweep", trace, *arguments, "--out", out]) == 0
    there = capsys.readouterr().out
    (tmp_path / "t.jsonl.xz").write_bytes(place(trace).read_bytes())
    assert (
        main(["sweep", f"file://{tmp_path}/t.jsonl.xz", *arguments, "--out", str(tmp_path / "results")]) == 0
    )
    assert capsys.readouterr().out == there.removeprefix(there[: there.index("|")])
    for name in ("sweep.csv", "sweep-means.csv"):
        here = (tmp_path / "results" / name).read_text().replace(f"{tmp_path}/", "memory://box/")
        assert place(f"{out}/{name}").read_text() == here
    for command in (["trace", "info"], ["curve"], ["simulate"], ["fleet"]):
        assert main([*command, trace]) == 0, capsys.readouterr().err
    assert main(["experiment", "run", "hot-prefix", "--smoke", "--jobs", "1", "--out", out]) == 0
    assert {f"hot-prefix.{kind}" for kind in ("jsonl", "md", "csv", "png", "svg")} <= {
        path.name for path in place(out).beside("hot-prefix*")
    }
    assert main(["experiment", "report", "--results", out]) == 0
    assert "## hot-prefix" in place(f"{out}/README.md").read_text()
    capsys.readouterr()
    assert main(["sweep", "memory://box/none.jsonl", "--out", out]) == 2
    assert "memory://box/none.jsonl: no such file" in capsys.readouterr().err
    assert main(["sweep", trace, "--out", "http://127.0.0.1:1/results"]) == 2
    assert "http does not replace a file whole" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "memory://box/out.jsonl"])
def test_an_output_takes_the_place_of_an_older_file_when_something_happens(memory, tmp_path, name):
    path = place(name) if "://" in name else tmp_path / name

    def told():
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()

    path.write_bytes(b"older")
    with pytest.raises(KeyError), Output(path) as file:
        file.head("run\n")
        assert told() == "older"
        raise KeyError
    assert told() == "older"
    with Output(path) as file:
        file.head("run\n")
    assert told() == "run\n", "a run in which nothing happened was not refused"
    with pytest.raises(KeyError), Output(path) as file:
        file.head("run\n")
        file.write("step\n")
        assert isinstance(path, UrlPath) or told() != "run\n", "written while the run goes"
        raise KeyError
    assert told() == "run\nstep\n"
    replace_text(path, "whole")
    assert told() == "whole"
    assert [file.name for file in tmp_path.iterdir()] == ([] if "://" in name else [name]), "parts are left"


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        Output(tmp_path / "gone" / "out")
    assert caught.value.filename == str(tmp_path / "gone" / "out")
    link = tmp_path / "link"
    link.symlink_to("/dev/full")  # a disk that is full
    with pytest.raises(OSError) as caught:
        replace_text(link, "x")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(link))


@pytest.mark.parametrize("write", [replace_text, lambda path, text: replace_bytes(path, text.encode())])
def test_a_file_that_cannot_be_replaced_stays(write, tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write(path, "older")
    monkeypatch.setattr(
        "pagedjax.paths.os.replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no"))
    )
    with pytest.raises(OSError, match="no"):
        write(path, "newer")
    assert path.read_text() == "older" and [p.name for p in tmp_path.iterdir()] == ["table.csv"]


def test_where_nothing_could_be_written_is_said_before(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "new", tmp_path / "file", Path("/dev/null"), Path("/dev/stdout")):
        check_output(path)
    check_output(tmp_path / "a" / "b", folder=True)
    for path, folder, said in (
        (tmp_path / "a" / "b", False, "a does not exist; make it first"),
        (tmp_path / "file" / "b", False, "file is no folder; make it first"),
        (tmp_path / "file", True, "is no folder; name another"),
        (tmp_path / "file" / "b", True, "is no folder; name another"),
    ):
        with pytest.raises(ValueError, match=said):
            check_output(path, folder=folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"], "nothing is made"


@pytest.mark.parametrize("room", ["lab", "cli", "report", "explore"])
def test_results_are_written_whole_or_not_at_all(room):
    """`replace_text` and `replace_bytes` are the way to write; what is named here is new, or replaced by hand."""
    allowed = {
        "results.py": 2,
        "cluster.py": 1,
    }  # of URLs, where one write is one object; beside, then replaced
    folder = Path(pagedjax.paths.__file__).parent / room
    found = {
        path.name: count
        for path in folder.rglob("*.py")
        if (count := path.read_text().count(".write_text(") + path.read_text().count(".write_bytes("))
    }
    assert found == (allowed if room == "lab" else {})
