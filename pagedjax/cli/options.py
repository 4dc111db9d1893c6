"""Options that every command shares, and what they turn into."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pagedjax.config import Config, full_key, load_config
from pagedjax.paths import AnyPath, UrlPath, check_output, place, shipped_file
from pagedjax.progress import shown

if TYPE_CHECKING:
    from rich.console import Console

    from pagedjax.llm import LLM


class PathOrUrl(click.ParamType):
    """A path of this machine, or a URL that fsspec knows; as `click.Path` otherwise.

    Args:
        exists: It must be there.
        folder: It is a folder, else a file.
        written: It is an output: where it could not be written is said before any work begins.
    """

    name = "path"

    def __init__(self, *, exists: bool = False, folder: bool = False, written: bool = False) -> None:
        self._exists, self._folder, self._written = exists, folder, written
        self._path = click.Path(exists=exists, dir_okay=folder, file_okay=not folder, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AnyPath:
        if not isinstance(value, str):
            return value if isinstance(value, UrlPath) else Path(value)
        try:
            found = place(value)
            if isinstance(found, Path):
                local: Path = self._path.convert(str(found), param, ctx)
                if self._written:
                    self._check(local)
                return local
            if self._exists and not (found.exists() if self._folder else found.is_file()):
                self.fail(f"{value}: no such {'folder' if self._folder else 'file'}", param, ctx)
            if self._written:
                found.check_writable()
        except (ValueError, ModuleNotFoundError) as error:
            self.fail(str(error), param, ctx)
        return found

    def _check(self, path: Path) -> None:
        check_output(path, folder=self._folder)


class OutputFile(PathOrUrl):
    """A file or folder of this machine that is written, as `PathOrUrl(written=True)`, but behind no URL.

    Args:
        folder: It is a folder, which is made with those above it.
        deep: Folders above it that are missing are made.
    """

    def __init__(self, *, folder: bool = False, deep: bool = False) -> None:
        super().__init__(folder=folder, written=True)
        self._deep = deep

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        found = super().convert(value, param, ctx)
        if not isinstance(found, Path):
            self.fail(f"{value}: is behind a URL; give a path of this machine", param, ctx)
        return found

    def _check(self, path: Path) -> None:
        if self._deep:
            check_output(path.parent, folder=True)
        else:
            super()._check(path)


def note(message: str) -> None:
    """Say something that is not a result: one line on stderr, in which names of files stay text."""
    print(shown(message), file=sys.stderr)


@dataclass(frozen=True)
class Common:
    """The shared options, read.

    Attributes:
        config: Defaults, then --config, then --model, then --set, in this order.
        as_json: Print one JSON document instead of text.
        quiet: No progress on stderr.
        cache_dir: Where models and compiled programs are kept; None is the user's cache folder.
    """

    config: Config
    as_json: bool
    quiet: bool
    cache_dir: Path | None

    def llm(self, **hooks: Any) -> LLM:
        """The configured model and engine."""
        from pagedjax.llm import LLM

        llm = LLM(config=self.config, progress=self.bars, cache_dir=self.cache_dir, **hooks)
        for note in llm.understood.notes:
            self.note(note)
        return llm

    @property
    def bars(self) -> bool:
        """Whether to draw progress bars: on a terminal, unless told to be quiet."""
        return not self.quiet and sys.stderr.isatty()

    def note(self, message: str) -> None:
        """Say something that is not a result."""
        if not self.quiet:
            note(message)

    def console(self) -> Console:
        """Where results are drawn: stdout, in colour on a terminal."""
        from rich.console import Console

        return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def emit_json(document: Any) -> None:
    """Print a JSON document on stdout, as `json_text` gives it."""
    print(json_text(document))


def json_text(document: Any) -> str:
    """A document as JSON; a number that is none, or infinite, is null: JSON has neither."""
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)


def shell(words: Iterable[str]) -> str:
    """A command as it can be typed and shown: what a terminal would obey or hide in a word is spelled in bytes."""
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_spelled, word))}'" for word in words
    )


def _spelled(character: str) -> str:
    if character.isprintable():
        return f"\\{character}" if character in "\\'" else character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def common_options(
    *, settings: tuple[str, ...] | None = None, cache_dir: bool = True, **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --json, --quiet and what a command makes use of among --model, --config, --set, --checked and --cache-dir.

    The command gets one `Common` first. A setting that it makes no use of is refused on the command line and named
    where a --config file holds it: a file may serve several commands.

    Args:
        settings: Full names of the settings that change what the command does; None: all of them do.
        cache_dir: Whether it reads or writes the cache folder.
        **defaults: Settings the command starts from where they are not `Config`'s own, `section__key=value`.
    """
    base = Config().replace({name.replace("__", "."): value for name, value in defaults.items()})
    return functools.partial(_add_common, base, settings, cache_dir)


_MODEL = click.option("--model", metavar="MODEL", help="Named model, GGUF file, model folder or hub id.")
_CONFIG = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="TOML file of settings, or the name of one in configs/serve/.",
)
_SET = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change one setting; repeatable."
)
_CHECKED = click.option(
    "--checked", is_flag=True, help="Assert each step's blocks on the device before it runs."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
_QUIET = click.option("--quiet", "-q", is_flag=True, help="No progress bars and notes on stderr.")
_CACHE_DIR = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="PAGEDJAX_CACHE_DIR",
    help="Where models and compiled programs are kept.  [default: the user's cache folder]",
)


def _add_common(
    base: Config, useful: tuple[str, ...] | None, cache_dir: bool, function: Callable[..., Any]
) -> Callable[..., Any]:

    @functools.wraps(function)
    def wrapped(
        *args: Any,
        as_json: bool,
        quiet: bool,
        model: str | None = None,
        config_file: str | None = None,
        settings: tuple[str, ...] = (),
        checked: bool = False,
        cache_dir: Path | None = None,
        **rest: Any,
    ) -> Any:
        named = [] if model is None else [f"model.model={model}"]
        named += ["runtime.checked=true"] if checked else []
        path = None if config_file is None else _config_file(config_file)
        config = load_config(path, [*named, *settings], base=base)
        common = Common(config, as_json, quiet, cache_dir)
        if useful is not None:
            _refuse(settings, useful)
            if path is not None and (idle := _idle(load_config(path, base=base), base, useful)):
                common.note(f"{path}: {', '.join(idle)} has no effect here")
        return function(common, *args, **rest)

    def takes(setting: str) -> bool:
        return useful is None or setting in useful

    options = [*([_CACHE_DIR] if cache_dir else []), _QUIET, _JSON]
    options += [_CHECKED] if takes("runtime.checked") else []
    options += [_SET, _CONFIG] if useful is None or useful else []
    options += [_MODEL] if takes("model.model") else []
    command: Any = wrapped
    command.useful = useful  # a test asks
    for option in options:  # the last applied is shown first
        command = option(command)
    return command


def _config_file(name: str) -> Path:
    """A path, or one of `configs/serve/` by its name."""
    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path  # where it is missing, load_config says so
    try:
        return shipped_file("serve", name)
    except ValueError as error:
        raise ValueError(f"config {error}") from None


def _refuse(settings: tuple[str, ...], useful: tuple[str, ...]) -> None:
    for setting in settings:
        key = full_key(setting.partition("=")[0].strip())
        if key not in useful:
            raise click.UsageError(
                f"--set {setting}: has no effect here; this command uses {', '.join(useful)}"
            )


def _idle(config: Config, base: Config, useful: tuple[str, ...]) -> list[str]:
    """Settings that a file changed and the command makes no use of."""
    before = base.to_dict()
    return [
        f"{section}.{name}"
        for section, values in config.to_dict().items()
        for name, value in values.items()
        if value != before[section][name] and f"{section}.{name}" not in useful
    ]


def keep_apart(inputs: Iterable[tuple[str, AnyPath]], outputs: Mapping[str, AnyPath | None]) -> None:
    """Refuse to write over what is read, or two outputs into one file.

    Args:
        inputs: What messages call each file that is read ("the trace"), and where it is.
        outputs: Option or argument as typed → where it writes; None: not given.

    Raises:
        click.UsageError: Two of them are one file.
    """
    taken = list(inputs)
    for typed, path in outputs.items():
        if path is None:
            continue
        for held, other in taken:
            if _same_file(path, other):
                raise click.UsageError(f"{typed} {path}: is {held} itself; name another file")
        taken.append((f"the file of {typed}", path))


def _same_file(one: AnyPath, other: AnyPath) -> bool:
    if not (isinstance(one, Path) and isinstance(other, Path)):
        return one == other
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)  # links, too; a device may take several outputs
    return one.absolute() == other.absolute()


def refuse_with(ctx: click.Context, mode: str, names: tuple[str, ...]) -> None:
    """Refuse options that a mode of a command makes no use of, where they were typed.

    Args:
        ctx: Of the command.
        mode: As typed, "--explain".
        names: Parameters (not flags) without effect in this mode; those the command does not have are passed over.

    Raises:
        click.UsageError: One was given on the command line.
    """
    for parameter in ctx.command.params:
        if (
            parameter.name in names
            and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(
                f"{parameter.opts[0]}: has no effect with {mode}; leave one of them out", ctx
            )
