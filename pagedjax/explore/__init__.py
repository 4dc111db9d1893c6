"""Command a real cache manager by hand, in a browser: explorations, their files, and the server of the page.

A name is imported when it is first touched: the command line asks for the settings alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# Name -> module that defines it.
_PUBLIC = {
    "Command": "commands",
    "Exploration": "exploration",
    "Outcome": "stage",
    "Server": "server",
    "frames": "history",
    "load": "history",
    "read_command": "commands",
    "state": "view",
}

if TYPE_CHECKING:
    from pagedjax.explore.commands import Command, read_command
    from pagedjax.explore.exploration import Exploration
    from pagedjax.explore.history import frames, load
    from pagedjax.explore.server import Server
    from pagedjax.explore.stage import Outcome
    from pagedjax.explore.view import state

__all__ = ["Command", "Exploration", "Outcome", "Server", "frames", "load", "read_command", "serve", "state"]


def serve(
    exploration: Exploration | None = None, *, port: int = 0, tell: Callable[[str], Any] = print
) -> None:
    """Serve an exploration's page on this machine until Ctrl-C.

    Args:
        exploration: What to explore; None begins with a small pool.
        port: Of 127.0.0.1; 0 takes a free one.
        tell: Called with the page's address, once it answers.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        ModuleNotFoundError: The extra `web` is not installed; the message names it.
        OSError: The port is taken.
    """
    from pagedjax.explore.exploration import Exploration
    from pagedjax.explore.server import Server

    Server(exploration or Exploration(), port=port).run(tell)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pagedjax.explore' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"pagedjax.explore.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
