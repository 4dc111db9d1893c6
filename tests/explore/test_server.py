"""The server of `pagedjax explore` without a browser: who is refused, what is answered, how it ends."""

import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from explore_judge import Judge

pytest.importorskip("starlette", reason="the extra web is not installed: starlette is missing")
pytest.importorskip("uvicorn", reason="the extra web is not installed: uvicorn is missing")

from pagedjax.config import CacheConfig
from pagedjax.explore import Exploration, load, state
from pagedjax.explore.server import MOST_BODY, MOST_TABS, Server
from pagedjax.report.facts import run_facts
from pagedjax.report.replay import read_record

HOSTILE = "</script><script>alert(1)</script>\"'&\u202e\x00"


@contextmanager
def running(exploration):
    server = Server(exploration)
    thread = threading.Thread(target=server.run, args=(lambda address: None,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def shared():
    with running(Exploration(CacheConfig(block_size=2, num_blocks=9))) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.exploration.restart()
    return shared


def ask(server, method, path, body=None, headers=None, *, token=None):
    """(status, headers, body)."""
    parts = urlsplit(server.address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    given = parts.path.strip("/") if token is None else token
    connection.request(method, f"/{given}/{path}", body, headers or {})
    reply = connection.getresponse()
    try:
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def command(server, **values):
    status, _, body = ask(server, "POST", "command", json.dumps(values))
    return status, json.loads(body)


def test_commands_change_the_session_and_the_answer_is_its_state(server):
    status, told = command(server, op="lookup", seq=0, text="abcde")
    assert (
        status == 200
        and told["done"]["ok"]
        and told["state"] == json.loads(json.dumps(state(server.exploration)))
    )
    for op in ("allocate", "fill", "index"):
        status, told = command(server, op=op, seq=0)
    judge = Judge([c.plain() for c in server.exploration.history])
    assert told["state"]["pool"]["keys"] == judge.plain()["keys"] and len(judge.plain()["keys"]) == 2
    assert json.loads(ask(server, "GET", "state")[2]) == told["state"]
    assert ask(server, "POST", "undo")[0] == 200
    assert state(server.exploration)["pool"]["keys"] == {}


def test_a_refused_command_says_why_and_changes_nothing(server):
    before = state(server.exploration)
    for body, message in (
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "must be an object"),
        (json.dumps({"op": "free", "seq": 0}), "sequence 0: is not there"),
        (json.dumps({"op": HOSTILE}), "must be one of"),
    ):
        status, headers, told = ask(server, "POST", "command", body)
        assert status == 400 and message in json.loads(told)["error"]
        assert headers["content-type"] == "application/json"
    assert ask(server, "POST", "undo")[0] == 400
    assert ask(server, "POST", "command", b" " * (MOST_BODY + 1))[0] == 413
    assert ask(server, "GET", "command")[0] == 405 and ask(server, "GET", "../secret")[0] == 404
    assert state(server.exploration) == before


REFUSED = {
    "no token": dict(token=""),
    "a wrong token": dict(token="x" * 43),
    "half a token": dict(token="half"),
    "a foreign origin": dict(headers={"Origin": "https://example.com"}),
    "origin null": dict(headers={"Origin": "null"}),
    "the origin of another port": dict(headers={"Origin": "http://127.0.0.1:1"}),
    "another host (DNS rebinding)": dict(headers={"Host": "rebound.example:80"}),
    "another host, a likely name": dict(headers={"Host": "127.0.0.1.example.com"}),
    "a script of another site": dict(headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("GET", "events"), ("POST", "command"), ("POST", "load")]
)
def test_strangers_are_refused(server, method, path, name):
    options = dict(REFUSED[name])
    if options.get("token") == "half":
        options["token"] = urlsplit(server.address).path.strip("/")[:20]
    body = json.dumps({"op": "lookup", "seq": 0, "text": "a"}) if method == "POST" else None
    status, headers, told = ask(server, method, path, body, **options)
    assert status == 403 and told.startswith(b"refused: ") and not server.exploration.history
    assert headers["Content-Security-Policy".lower()].startswith("default-src 'none'")
    assert urlsplit(server.address).path.strip("/").encode() not in told


def test_who_belongs_here_is_welcome(server):
    parts = urlsplit(server.address)
    for headers in (
        {},
        {"Origin": f"http://{parts.netloc}", "Sec-Fetch-Site": "same-origin"},
        {"Host": f"localhost:{parts.port}", "Origin": f"http://localhost:{parts.port}"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a click on the address
    ):
        status, told, body = ask(server, "GET", "", headers=headers)
        assert status == 200 and b"<title>pagedjax explore</title>" in body
        assert "'unsafe" not in told["content-security-policy"] and told["cache-control"] == "no-store"
        assert told["referrer-policy"] == "no-referrer" and told["x-content-type-options"] == "nosniff"
    for name in ("explore.js", "grid.js", "page.css", "explore.css", "icon.svg"):
        assert ask(server, "GET", name)[0] == 200


def test_two_addresses_have_two_tokens_and_only_this_machine_is_served():
    one, two = Server(Exploration()), Server(Exploration())
    tokens = {urlsplit(s.address).path for s in (one, two)}
    assert len(tokens) == 2 and min(map(len, tokens)) > 40
    for server in (one, two):
        assert server._socket.getsockname()[0] == "127.0.0.1"
        server._socket.close()


def _stream(server):
    parts = urlsplit(server.address)
    tab = socket.create_connection((parts.hostname, parts.port), timeout=30)
    tab.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    return tab, tab.makefile("rb")


def _next_state(lines):
    for line in lines:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    return None


def test_every_tab_is_told_and_one_too_many_is_refused(server, monkeypatch):
    monkeypatch.setattr("pagedjax.explore.server._BEAT_S", 1e6)  # told of the change, not by and by
    tabs = [_stream(server) for _ in range(MOST_TABS)]
    first = [_next_state(lines) for _, lines in tabs]
    assert first == [first[0]] * MOST_TABS and first[0]["history"]["total"] == 0
    command(server, op="lookup", seq=3, text=HOSTILE)
    for _, lines in tabs:
        told = _next_state(lines)
        assert told["sequences"][0]["seq"] == 3 and told["history"]["total"] == 1
    status, _, told = ask(server, "GET", "events")
    assert status == 429 and b"close one" in told
    for tab, lines in tabs:
        lines.close()
        tab.close()


def test_hidden_characters_are_shown_and_hostile_text_is_json(server):
    _, told = command(server, op="lookup", seq=0, text=HOSTILE, salt=HOSTILE)
    (sequence,) = told["state"]["sequences"]
    text = "".join(sequence["pieces"])
    assert "⟨0⟩" in text and "\x00" not in text and "\u202e" not in json.dumps(told, ensure_ascii=False)
    assert "⟨202E⟩" in sequence["salt"]


def test_a_saved_history_opens_as_a_report_and_is_gone_on_with(server, tmp_path):
    for values in (
        dict(op="lookup", seq=0, text="abcdefg"),
        dict(op="allocate", seq=0),
        dict(op="fill", seq=0),
        dict(op="index", seq=0),
        dict(op="settings", values={"policy": "fifo", "num_blocks": 7}),
        dict(op="fork", seq=0, child=1),
        dict(op="write", seq=1, text="xyz"),
        dict(op="free", seq=0),
    ):
        assert command(server, **values)[0] == 200
    status, headers, body = ask(server, "GET", "history.jsonl")
    assert status == 200 and "attachment" in headers["content-disposition"]
    path = tmp_path / "saved.jsonl"
    path.write_bytes(body)
    facts = run_facts(path)
    assert [r["id"] for r in facts["requests"]] == ["0", "1"] and facts["requests"][0]["why"] == "freed"
    assert facts["requests"][1]["reason"] == "forked from 0" and facts["requests"][0]["text"] == "abcdefg"
    want = state(server.exploration)
    other = Exploration()
    load(other, read_record(path), "x")
    assert state(other) | {"revision": 0} == want | {"revision": 0}
    server.exploration.restart()
    for packed in (body, gzip.compress(body)):
        status, _, told = ask(server, "POST", "load", packed)
        assert status == 200 and "8 commands of the file" in json.loads(told)["done"]["said"]
        assert state(server.exploration) | {"revision": 0} == want | {"revision": 0}
    for broken, message in (
        (b"\x1f\x8b nothing", "no whole gzip"),
        (b"\xff\xfe", "is no text"),
        (b"{}", "no frame"),
        (b"", "holds no frame"),
        (gzip.compress(b" " * (MOST_BODY + 1)), "when unpacked"),
        (body.replace(b'"fork"', b'"fork it"'), "command 6: op=fork it"),
    ):
        status, _, told = ask(server, "POST", "load", broken)
        assert status == 400 and message in json.loads(told)["error"], told
    assert state(server.exploration)["history"] == want["history"]


def _started(*args, **options):
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedjax", "explore", "--no-browser", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("ignored", [False, True], ids=["in front", "started in the background"])
def test_ctrl_c_ends_it_at_once_while_a_tab_looks_on(ignored, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler
    )  # what a child inherits
    try:
        path = os.pathsep.join(filter(None, sys.path))
        process, address = _started(
            "--set=block_size=8", start_new_session=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1" and len(parts.path) > 40
        tab = socket.create_connection((parts.hostname, parts.port), timeout=60)
        tab.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        lines = tab.makefile("rb")
        assert _next_state(lines)["settings"]["block_size"] == 8
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and said.split("\n") == ["Ctrl-C ends it", "", "interrupted", ""]
    assert lines.read().endswith(b"0\r\n\r\n"), "the stream was cut"
    lines.close()
    tab.close()
    assert list(tmp_path.iterdir()) == [], "something was written"
