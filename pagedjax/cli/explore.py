"""`pagedjax explore`: command a real cache manager by hand, in a browser."""

from __future__ import annotations

import dataclasses
import sys
import webbrowser
from pathlib import Path

import click

from pagedjax.cli.options import Common, common_options, emit_json, refuse_with
from pagedjax.explore.settings import EXPLORED, START, settings_of


@click.command("explore")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Of 127.0.0.1; 0: a free one."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option(
    "--load",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Go on with a history that was saved.",
)
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="For prompts of text: bytes, a tokenizer.json, or a model (name, GGUF file or folder).",
)
@common_options(
    settings=tuple(f"cache.{name}" for name in EXPLORED),
    cache_dir=False,
    cache__block_size=START.block_size,
    cache__num_blocks=START.num_blocks,
)
@click.pass_context
def command(
    ctx: click.Context, common: Common, port: int, no_browser: bool, file: Path | None, tokenizer: str
) -> None:
    """Serve a page on this machine: look prompts up, allocate, fill, index, free, evict, fork and write.

    Each command goes to a real manager, and every open tab shows its state. Policy, index, block size and pool can be
    changed at any time: all commands are run again on a new manager. The address is printed and holds a token; nothing
    is written to disk but what the browser saves. Ctrl-C ends it.
    """
    from pagedjax.cli.trace_options import texts
    from pagedjax.explore import Exploration, load, serve
    from pagedjax.report.replay import read_record

    if file is not None:  # it has its own
        refuse_with(ctx, "--load", ("settings", "config_file"))
    held = texts(tokenizer)
    settings = dataclasses.replace(START, **settings_of(common.config.cache))
    exploration = Exploration(settings, encode=held.encode, decode=held.decode, tokenizer=tokenizer)
    if file is not None:
        common.note(load(exploration, read_record(file), str(file)))

    def tell(address: str) -> None:
        if common.as_json:
            emit_json({"address": address})
        else:
            print(address)
        sys.stdout.flush()
        if not no_browser and not _open(address):
            common.note("no browser was found here: open the address yourself")
        common.note("Ctrl-C ends it")

    serve(exploration, port=port, tell=tell)


def _open(address: str) -> bool:
    """Open the address in a browser with a window; one that lives in the terminal would take it over."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return type(browser) is not webbrowser.GenericBrowser and browser.open(address)
