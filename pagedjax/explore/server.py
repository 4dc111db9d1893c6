"""The page of an exploration, served on this machine alone: who may ask, what is answered, and all tabs told."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import secrets
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

from pagedjax.explore.exploration import Exploration
from pagedjax.explore.history import frames, load
from pagedjax.explore.view import state
from pagedjax.report.replay import read_frames

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"explore: needs {error.name}, which is not installed; pip install 'pagedjax[web]'"
    ) from None

HOST = "127.0.0.1"
MOST_BODY = 16 << 20  # bytes of a request, and of a file once unpacked
MOST_TABS = 4  # a browser opens 6 connections to a server; two are left for commands
_BEAT_S = 15.0  # a line to each tab, so that one that has gone is noticed
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# What the page is made of: name in the address → (package, file, kind).
_FILES = {
    "": ("pagedjax.explore", "explore.html", "text/html"),
    "explore.js": ("pagedjax.explore", "explore.js", "text/javascript"),
    "explore.css": ("pagedjax.explore", "explore.css", "text/css"),
    "icon.svg": ("pagedjax.explore", "icon.svg", "image/svg+xml"),
    "grid.js": ("pagedjax.report", "grid.js", "text/javascript"),
    "page.css": ("pagedjax.report", "page.css", "text/css"),
}
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """One exploration behind one address of 127.0.0.1.

    The address holds a token that nobody can guess; without it, under another host's name or from a page of another
    origin every request is refused (403). Nothing is written to disk: a file is what the browser saves.

    Args:
        exploration: Whose page.
        port: 0 takes a free one.

    Attributes:
        address: Of the page, token included. It answers from the start: the socket is open, and `run` serves it.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, exploration: Exploration, *, port: int = 0) -> None:
        self.exploration = exploration
        try:
            self._socket = socket.create_server((HOST, port))
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
            raise OSError(f"port={port}: {why}; take another, or 0 for a free one") from None
        self._port = self._socket.getsockname()[1]
        self._token = secrets.token_urlsafe(32)
        self.address = f"http://{HOST}:{self._port}/{self._token}/"
        self._tabs = _Tabs(exploration)
        self._stopped = False
        config = uvicorn.Config(
            self._app(),
            loop="asyncio",
            http="h11",
            log_config=None,  # the program around has its own
            log_level="warning",
            access_log=False,  # it would print the token
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config, self._tabs)

    def run(self, tell: Callable[[str], Any] = print) -> None:
        """Serve until `stop` (from any thread) or Ctrl-C.

        Args:
            tell: Called once with the address.

        Raises:
            KeyboardInterrupt: Ctrl-C, where this runs in the main thread.
        """
        try:
            tell(self.address)
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
        if not self._stopped:  # a signal that Python was told to ignore, as in the background of a script
            raise KeyboardInterrupt

    def stop(self) -> None:
        """End `run`."""
        self._stopped = True
        self._server.should_exit = True

    # -------------------------------------------------------------- parts

    def _app(self) -> Any:
        at = f"/{self._token}/"
        return _Guard(
            Starlette(
                routes=[
                    *(Route(at + name, _file(name)) for name in _FILES),
                    Route(at + "state", self._state),
                    Route(at + "events", self._events),
                    Route(at + "history.jsonl", self._history),
                    Route(at + "command", self._change(self._command), methods=["POST"]),
                    Route(at + "undo", self._change(self._undo), methods=["POST"]),
                    Route(at + "restart", self._change(self._restart), methods=["POST"]),
                    Route(at + "load", self._change(self._load), methods=["POST"]),
                ]
            ),
            self._token,
            self._port,
        )

    async def _state(self, request: Request) -> Response:
        return Response(self._tabs.state(), media_type="application/json")

    async def _events(self, request: Request) -> Response:
        if self._tabs.count >= MOST_TABS:
            return PlainTextResponse(f"{MOST_TABS} tabs look at this already; close one\n", 429)
        return StreamingResponse(self._tabs.events(), media_type="text/event-stream")

    async def _history(self, request: Request) -> Response:
        text = "".join(
            json.dumps(frame, separators=(",", ":"), allow_nan=False) + "\n"
            for frame in frames(self.exploration)
        )
        name = {"Content-Disposition": 'attachment; filename="explore.jsonl"'}
        return Response(text, media_type="application/octet-stream", headers=name)

    def _change(self, what: Callable[[bytes], dict[str, Any]]) -> Handler:
        """A handler that changes the exploration: it answers with what happened and the state after it."""

        async def handle(request: Request) -> Response:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY:
                    return JSONResponse({"error": f"more than {MOST_BODY} bytes; give less"}, 413)
            try:
                done = what(bytes(body))
            except (ValueError, ModuleNotFoundError) as error:  # a hash may need a library that is not there
                return JSONResponse({"error": " ".join(str(error).split())}, 400)
            self._tabs.changed()
            text = f'{{"done":{json.dumps(done)},"state":{self._tabs.state()}}}'
            return Response(text, media_type="application/json")

        return handle

    def _command(self, body: bytes) -> dict[str, Any]:
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            raise ValueError(
                'command: is no JSON; give an object such as {"op": "evict", "count": 1}'
            ) from None
        outcome = self.exploration.apply(values)
        return {"ok": outcome.ok, "said": outcome.said}

    def _undo(self, body: bytes) -> dict[str, Any]:
        return {"ok": True, "said": f"undone: {self.exploration.undo()}"}

    def _restart(self, body: bytes) -> dict[str, Any]:
        self.exploration.restart()
        return {"ok": True, "said": "a fresh manager, no command"}

    def _load(self, body: bytes) -> dict[str, Any]:
        return {"ok": True, "said": load(self.exploration, read_frames(_lines(body), "the file"), "the file")}


def _lines(body: bytes) -> io.StringIO:
    """The text of a file, plain or gzip."""
    if body[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(body)) as packed:
                body = packed.read(MOST_BODY + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"the file: is no whole gzip file ({error}); save it anew") from None
        if len(body) > MOST_BODY:
            raise ValueError(
                f"the file: is more than {MOST_BODY} bytes when unpacked; give a shorter history"
            )
    try:
        return io.StringIO(body.decode())
    except UnicodeDecodeError:
        raise ValueError("the file: is no text; give what explore has saved") from None


def _file(name: str) -> Handler:
    package, file, kind = _FILES[name]
    text = (files(package) / "web" / file).read_text(encoding="utf-8")

    async def handle(request: Request) -> Response:
        return Response(text, media_type=kind)

    return handle


class _Tabs:
    """Every open tab is sent the state after each change, as server-sent events."""

    def __init__(self, exploration: Exploration) -> None:
        self._exploration = exploration
        self._news = asyncio.Event()
        self._text: tuple[int, str] | None = None
        self.count = 0
        self.closed = False

    def state(self) -> str:
        """The state as JSON, made once a change however many ask."""
        if self._text is None or self._text[0] != self._exploration.revision:
            text = json.dumps(state(self._exploration), separators=(",", ":"), allow_nan=False)
            self._text = self._exploration.revision, text
        return self._text[1]

    def changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def close(self) -> None:
        """Every stream ends now."""
        self.closed = True
        self.changed()

    async def events(self) -> AsyncIterator[str]:
        self.count += 1
        seen = None
        try:
            while not self.closed:
                news = self._news
                if self._exploration.revision != seen:
                    seen = self._exploration.revision
                    yield f"data: {self.state()}\n\n"
                try:
                    await asyncio.wait_for(news.wait(), _BEAT_S)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.count -= 1


class _Guard:
    """Refuses who has no token, asks under another host's name, or stands on another origin's page."""

    def __init__(self, app: Any, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        why = self._refusal(Request(scope))
        app = self._app if why is None else PlainTextResponse(f"refused: {why}\n", 403)
        await app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> str | None:
        """Why not; None: welcome. The token is compared in constant time, and first."""
        given = request.scope.get("raw_path", b"").split(b"/")[1:2]
        if not secrets.compare_digest(given[0] if given else b"", self._token):
            return "the address needs the token that pagedjax explore has printed"
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return "this is served as 127.0.0.1 alone"
        if len(origins) > 1 or any(origin not in self._origins for origin in origins):
            return "a page of another origin may not ask"
        foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if (
            foreign and request.headers.get("sec-fetch-mode") != "navigate"
        ):  # a click on the address is welcome
            return "a page of another origin may not ask"
        return None


class _Uvicorn(uvicorn.Server):
    """Ends at once: the tabs' streams would hold it up."""

    def __init__(self, config: uvicorn.Config, tabs: _Tabs) -> None:
        super().__init__(config)
        self._tabs = tabs

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._tabs.close()
        await super().shutdown(sockets)
