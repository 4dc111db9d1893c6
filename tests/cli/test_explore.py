"""`pagedjax explore` on the command line: what is refused before anything is served."""

import json
import socket

import pytest

from pagedjax.cli import main
from pagedjax.explore import Exploration, frames


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved.jsonl"
    path.write_text("".join(json.dumps(frame) + "\n" for frame in frames(Exploration())))
    return path


def _error(capsys, *args):
    assert main(["explore", "--no-browser", *map(str, args)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


def test_without_the_extra_one_line_names_it(capsys, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "pagedjax.explore.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'pagedjax[web]'" in _error(capsys)


def test_settings_of_a_file_are_its_own(capsys, saved):
    assert "has no effect with --load" in _error(capsys, "--load", saved, "--set", "cache.block_size=8")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set", "cache.reservation=max"), "has no effect here; this command uses cache.block_size"),
        (("--set", "cache.num_blocks=auto"), "num_blocks=auto: must be a number up to 4097"),
        (("--set", "cache.policy=belady"), "has to know the future"),
        (("--set", "cache.policy=lrx"), "policy=lrx: must be one of lru"),
        (("--port", "65536"), "65535"),
    ],
    ids=str,
)
def test_bad_input_ends_in_one_line(capsys, args, message):
    assert message in _error(capsys, *args)


def test_a_file_that_is_no_history_is_refused(capsys, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"frame": "run", "version": 1, "block_size": 4, "pool_blocks": [9]}\n')
    assert "is the record of a run, it has no commands" in _error(capsys, "--load", path)


def test_a_taken_port_is_named(capsys):
    pytest.importorskip("uvicorn", reason="the extra web is not installed: uvicorn is missing")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port={port}: address already in use; take another" in _error(capsys, "--port", port)
