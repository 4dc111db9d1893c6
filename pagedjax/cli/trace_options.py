"""How commands open a trace: one set of options for all of them, and the tokenizer that text needs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.options import PathOrUrl, note
from pagedjax.paths import AnyPath

if TYPE_CHECKING:
    from pagedjax.sim.trace import Chat, Encode, Trace

AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)
FILE = click.argument("file", type=PathOrUrl(exists=True))
_TEXT_FORMATS = ("chat", "gateway", "sharegpt", "prompts", "alpaca-text")
QUIET = click.option("--quiet", is_flag=True, help="No progress and notes on stderr.")


@dataclass(frozen=True)
class Texts:
    """A tokenizer, as traces need it.

    Attributes:
        encode: Text to ids, special tokens in the text included.
        decode: Back, for messages.
        chat: The model's own template; None where it has none.
    """

    encode: Encode
    decode: Callable[[Iterable[int]], str]
    chat: Chat | None = None


def texts(name: str) -> Texts:
    """The tokenizer of that name.

    Raises:
        click.BadParameter: There is no such tokenizer, or it cannot be read.
    """
    if name == "bytes":
        return Texts(lambda text: list(text.encode()), _text_of_bytes)
    path = Path(name)
    if path.is_file() and path.suffix != ".gguf":
        return _from_json(path)
    return texts_of(_of_model(name))


def texts_of(tokenizer: Any) -> Texts:
    """A model's tokenizer, as traces need it."""

    def chat(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        # A template that does not use the tools refuses them.
        return tokenizer.apply_chat(messages, variables={"tools": tools} if tools else None)

    return Texts(
        lambda text: tokenizer.encode(text, add_special=False),
        lambda ids: tokenizer.decode(list(ids), skip_special=False),
        chat if getattr(tokenizer, "chat_template", "") else None,
    )


def _text_of_bytes(ids: Iterable[int]) -> str:
    held = list(ids)
    return bytes(held).decode(errors="replace") if all(i < 256 for i in held) else str(held)


def _from_json(path: Path) -> Texts:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise click.BadParameter(f"--tokenizer {path}: {error}; must be a tokenizer.json file") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Texts(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
    )


def _of_model(name: str) -> Any:
    from pagedjax.models.formats import GgufFile
    from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
    from pagedjax.models.hub import NAMED_MODELS, fetch_named
    from pagedjax.models.tokenizer import load_tokenizer
    from pagedjax.paths import user_cache_dir

    path = Path(name)
    if path.is_dir():
        return load_tokenizer(path)
    if name in NAMED_MODELS:
        path = fetch_named(name, user_cache_dir())
    elif not path.is_file():
        named = ", ".join(NAMED_MODELS)
        raise click.BadParameter(
            f"--tokenizer {name}: must be 'bytes', a tokenizer.json file, a model's folder or GGUF file, or {named}"
        )
    return tokenizer_from_gguf(GgufFile(path).metadata)


def _pairs(option: str, settings: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key or not value:
            raise click.BadParameter(
                f"{option} {setting}: must be HOLDS=NAME, as in {option} prompt=question"
            )
        if key in pairs:
            raise click.BadParameter(f"{option} {setting}: {key} was given before; name it once")
        pairs[key] = value
    return pairs


# Options with a value, and what they are where nothing was typed.
_USUAL: dict[str, Any] = {
    **dict.fromkeys(("time_unit", "granularity", "chat_template", "from_s", "to_s", "sample", "sessions")),
    "tokenizer": "bytes",
    "output_tokens": 0,
}


@dataclass(frozen=True)
class Opener:
    """Opens trace files as the options say; each field is the option of its name."""

    columns: tuple[str, ...]
    time_unit: str | None
    granularity: int | None
    tokenizer: str
    chat_template: str | None
    output_tokens: int
    from_s: float | None
    to_s: float | None
    sample: float | None
    sessions: int | None
    sort: bool
    common_prefix: bool
    quiet: bool

    def typed(self) -> list[str]:
        """The options that open a file in this way, as they would be typed."""
        words = [word for column in self.columns for word in ("--column", column)]
        for name, usual in _USUAL.items():
            given = getattr(self, name)
            if given != usual:
                words += [f"--{name.removesuffix('_s').replace('_', '-')}", str(given)]
        return words + [
            f"--{name.replace('_', '-')}" for name in ("sort", "common_prefix") if getattr(self, name)
        ]

    @functools.cached_property
    def texts(self) -> Texts:
        """The tokenizer that was asked for."""
        return texts(self.tokenizer)

    def using(self, tokenizer: Any, name: str) -> Opener:
        """The same options with the tokenizer of a model that is loaded already."""
        opener = replace(self, tokenizer=name)
        vars(opener)["texts"] = texts_of(tokenizer)  # where the cached property keeps it
        return opener

    @property
    def unit(self) -> str:
        """What a token of text is."""
        return "bytes" if self.tokenizer == "bytes" else f"tokens of {self.tokenizer}"

    def unit_of(self, trace: Trace) -> str:
        """What the trace's tokens are: of files of text the tokenizer's, else the file's own."""
        return self.unit if trace.format in _TEXT_FORMATS else "tokens"

    def __call__(self, path: AnyPath) -> Trace:
        """The trace at `path`, or the part of it that was asked for; its notes go to stderr.

        Raises:
            click.BadParameter, ValueError: An option makes no sense, or not for this file.
        """
        from pagedjax.sim.trace import TEMPLATES, open_trace

        chat = TEMPLATES.get(self.chat_template or "", self.texts.chat)
        if self.chat_template == "model" and chat is None:
            raise click.BadParameter(
                f"--chat-template model: --tokenizer {self.tokenizer} has none; take chatml or plain"
            )
        trace = open_trace(
            path,
            columns=_pairs("--column", self.columns),
            time_unit=self.time_unit or "",
            granularity=self.granularity or 0,
            encode=self.texts.encode,
            chat=chat,
            output_tokens=self.output_tokens,
            common_prefix=self.common_prefix,
            sort=self.sort,
        )
        if self.chat_template is not None and trace.format not in ("chat", "gateway", "sharegpt"):
            raise click.BadParameter(
                f"--chat-template {self.chat_template}: {path} holds no messages; leave it out"
            )
        if not self.quiet:
            for text in trace.notes:
                note(f"{path}: {text}")
        if self.from_s is not None or self.to_s is not None:
            trace = trace.between(self.from_s or 0.0, float("inf") if self.to_s is None else self.to_s)
        if self.sessions is not None:
            trace = trace.first_sessions(self.sessions)
        return trace if self.sample is None else trace.sampled(self.sample)


_OPTIONS = (
    click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="HOLDS=NAME",
        help="Where something stands: prompt, messages, body, answer, input, output, time, session, …; repeatable.",
    ),
    click.option("--time-unit", type=click.Choice(["s", "ms", "us", "ns"]), help="Of the file's times."),
    click.option("--granularity", type=AT_LEAST_1, help="Tokens per block id of the file."),
    click.option(
        "--tokenizer",
        default="bytes",
        show_default=True,
        help="For files of text: bytes, a tokenizer.json, or a model (name, GGUF file or folder).",
    ),
    click.option(
        "--chat-template",
        type=click.Choice(["model", "chatml", "plain"]),
        help="Turns messages into text.  [default: the model's own where --tokenizer has one, else chatml]",
    ),
    click.option(
        "--output-tokens", type=AT_LEAST_0, default=0, help="Answer length where the file has none."
    ),
    click.option("--from", "from_s", type=float, help="Leave out what arrives before, in seconds."),
    click.option("--to", "to_s", type=float, help="Leave out what arrives from then on, in seconds."),
    click.option("--sample", type=float, help="Keep this share of the requests, of whole sessions."),
    click.option("--sessions", type=AT_LEAST_1, help="Keep the first so many sessions."),
    click.option("--sort", is_flag=True, help="Order requests by time, in memory."),
    click.option(
        "--common-prefix", is_flag=True, help="Let agentic sessions share tools and system prompts."
    ),
)


def trace_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of reading to a command; it gets an `Opener`, `open_file`, in their place."""
    names = [field.name for field in fields(Opener) if field.name != "quiet"]

    @functools.wraps(function)
    def wrapped(*args: Any, **given: Any) -> Any:
        options = {name: given.pop(name) for name in names}
        return function(*args, open_file=Opener(**options, quiet=bool(given.get("quiet"))), **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def requests_bar(label: str, quiet: bool) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """A progress bar over a stream of unknown length."""
    from pagedjax.progress import bar

    def wrap(items: Iterable[Any]) -> Iterator[Any]:
        with bar(label, None, enabled=not quiet and sys.stderr.isatty()) as advance:
            for item in items:
                advance(1)
                yield item

    return wrap
