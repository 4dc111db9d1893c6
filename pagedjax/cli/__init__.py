"""The command line: `pagedjax COMMAND`. One module per command; `COMMANDS` is the only list of them.

A command module defines `command`, a click command or group, and imports nothing heavy at its top, so
that `--help` answers at once. Results go to stdout, everything else to stderr. Bad input ends in one line
and exit code 2; a broken invariant is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from pagedjax import __version__
from pagedjax.progress import shown

# Name -> module. A new command is one module and one line here.
COMMANDS = {
    "demo": "pagedjax.cli.demo",
    "generate": "pagedjax.cli.generate",
    "compare": "pagedjax.cli.compare",
    "bench": "pagedjax.cli.bench",
    "compile": "pagedjax.cli.compile",
    "doctor": "pagedjax.cli.doctor",
    "convert": "pagedjax.cli.convert",
    "trace": "pagedjax.cli.trace",
    "curve": "pagedjax.cli.curve",
    "advise": "pagedjax.cli.advise",
    "simulate": "pagedjax.cli.simulate",
    "run": "pagedjax.cli.run",
    "calibrate": "pagedjax.cli.calibrate",
    "sweep": "pagedjax.cli.sweep",
    "fleet": "pagedjax.cli.fleet",
    "report": "pagedjax.cli.report",
    "explore": "pagedjax.cli.explore",
    "experiment": "pagedjax.cli.experiment",
}


class _ReaderLeft(Exception):
    """Nobody reads our stdout any more, as after `| head`: no error, and nothing left to do."""


@contextmanager
def _reader() -> Iterator[None]:
    """Names the end of a pipe before click, or rich, turns it into an exit like any other."""
    try:
        yield
    except BrokenPipeError:
        raise _ReaderLeft from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's console
            raise _ReaderLeft from None
        raise


class _Commands(click.Group):
    """Imports a command's module when the command is asked for."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _reader():  # --help and --version write here
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader():
            result = super().invoke(ctx)
            if sys.stdout is not None:  # none where it was closed before we began
                sys.stdout.flush()
            return result

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"{args[0]}: is not a command; {remedy}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="pagedjax")
@click.option("--traceback", is_flag=True, help="Show the Python traceback of an error.")
def cli(traceback: bool) -> None:
    """Decode real models over a paged, prefix-shared KV cache, and study the cache."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments; None takes the process's own.

    Returns:
        Exit code: 0, 2 for bad input, 130 where interrupted.
    """
    argv = list(sys.argv[1:] if args is None else args)
    try:
        result = cli.main(args=argv, prog_name="pagedjax", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    except _ReaderLeft:
        # What is still buffered has nowhere to go, and must not fail when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.exceptions.NoArgsIsHelpError as error:  # a group without its command
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        return _complain(_usage(error))
    except (ValueError, NotImplementedError, OSError, MemoryError, ModuleNotFoundError) as error:
        if "--traceback" in argv:
            raise
        if isinstance(error, OSError) and _stdout_is_full(error):
            return _complain(
                "stdout: takes no more; results must be written whole, so free some room, or write elsewhere"
            )
        return _complain(_one_line(error))


def script() -> None:
    """The installed command: `main`, and the process ends."""
    code = main()
    if code == 130:
        # XLA's compiler threads may still work, and crash the interpreter that is taken down around them.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _complain(message: str) -> int:
    print(f"error: {shown(message)}", file=sys.stderr)
    return 2


def _stdout_is_full(error: OSError) -> bool:
    """Whether an error came from printing results: errors of files name theirs."""
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return False
    # What is still buffered must not fail once more when the interpreter flushes it.
    with suppress(OSError, ValueError):  # where stdout is no file of the process's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _usage(error: click.ClickException) -> str:
    context: Any = getattr(error, "ctx", None)
    message = " ".join(error.format_message().split())
    return f"{message} (see {context.command_path} --help)" if context is not None else message


def _one_line(error: BaseException) -> str:
    """The message on one line; a class name in front where the message alone would say too little."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}"
    message = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"out of memory: {message or 'an allocation failed'}; lower cache.memory_bytes or use a smaller model"
    return message or type(error).__name__
