"""Options that every command shares, and what they turn into."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.config import Config, load_config

if TYPE_CHECKING:
    from rich.console import Console

    from pagedjax.llm import LLM


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

        return LLM(config=self.config, progress=self.bars, cache_dir=self.cache_dir, **hooks)

    @property
    def bars(self) -> bool:
        """Whether to draw progress bars: on a terminal, unless told to be quiet."""
        return not self.quiet and sys.stderr.isatty()

    def note(self, message: str) -> None:
        """Say something that is not a result."""
        if not self.quiet:
            print(message, file=sys.stderr)

    def console(self) -> Console:
        """Where results are drawn: stdout, in colour on a terminal."""
        from rich.console import Console

        return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def emit_json(document: Any) -> None:
    """Print a JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def common_options(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --model, --config, --set, --checked, --json, --quiet and --cache-dir; the command gets one `Common` first.

    Args:
        **defaults: Settings the command starts from where they are not `Config`'s own, `section__key=value`.
    """
    base = Config().replace({name.replace("__", "."): value for name, value in defaults.items()})
    return functools.partial(_add_common, base)


def _add_common(base: Config, function: Callable[..., Any]) -> Callable[..., Any]:

    @click.option("--model", metavar="MODEL", help="Named model, GGUF file, model folder or hub id.")
    @click.option("--config", "config_file", metavar="FILE", help="TOML file of settings, see configs/.")
    @click.option(
        "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change one setting; repeatable."
    )
    @click.option("--checked", is_flag=True, help="Assert each step's blocks on the device before it runs.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
    @click.option("--quiet", "-q", is_flag=True, help="No progress bars and notes on stderr.")
    @click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="PAGEDJAX_CACHE_DIR",
        help="Where models and compiled programs are kept.  [default: the user's cache folder]",
    )
    @functools.wraps(function)
    def wrapped(
        *args: Any,
        model: str | None,
        config_file: str | None,
        settings: tuple[str, ...],
        checked: bool,
        as_json: bool,
        quiet: bool,
        cache_dir: Path | None,
        **rest: Any,
    ) -> Any:
        named = [] if model is None else [f"model.model={model}"]
        named += ["runtime.checked=true"] if checked else []
        config = load_config(config_file, [*named, *settings], base=base)
        return function(Common(config, as_json, quiet, cache_dir), *args, **rest)

    return wrapped
