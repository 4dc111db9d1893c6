"""What the site needs beyond Sphinx: pages opened and not downloaded, help texts of the commands, skipped notebooks."""

from __future__ import annotations

import re
import sys
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pagedjax.models.hub import named_path
from pagedjax.paths import user_cache_dir

MODEL = "smollm2-135m"


class CommandHelp(SphinxDirective):
    """The `--help` of every command, each under a heading of its own."""

    def run(self) -> list[nodes.Node]:
        import click

        from pagedjax.cli import COMMANDS, cli

        out: list[nodes.Node] = []
        context = click.Context(cli, info_name="pagedjax", terminal_width=100, max_content_width=100)
        for name in sorted(COMMANDS):
            command = cli.get_command(context, name)
            assert command is not None
            section = nodes.section(ids=[f"command-{name}"])
            section += nodes.title(text=f"pagedjax {name}")
            section += _help(command, click.Context(command, info_name=name, parent=context))
            for inner, sub in sorted(getattr(command, "commands", {}).items()):
                own = click.Context(command, info_name=name, parent=context)
                section += _help(sub, click.Context(sub, info_name=inner, parent=own))
            out.append(section)
        return out


def _help(command: Any, context: Any) -> nodes.literal_block:
    text = command.get_help(context)
    return nodes.literal_block(text, text, language="text")


def open_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """A link to an HTML file of `html_extra_path` opens it; Sphinx would offer it as a download."""
    for node in list(doctree.findall(addnodes.download_reference)):
        folder, _, name = node["reftarget"].rpartition("/")
        if folder.rpartition("/")[2] == "example" and name.endswith(".html"):
            uri = "../" * docname.count("/") + name
            link = nodes.reference("", "", *node.children, refuri=uri, internal=True)
            node.replace_self(link)


def whole_links(app: Sphinx, path: Any, docname: str, content: list[str]) -> None:
    """The page of results shows its plots; the tables it links to are no pages here, the same rows are in the CSV."""
    if docname == "results":
        text = re.sub(r"\[table\]\(results/[\w-]+\.md\), ", "", content[0])
        content[0] = re.sub(
            r"\[plot\]\(results/([\w-]+)\.png\)(.*)",
            r"[plot](results/\1.png)\2\n\n  ![\1](../experiments/results/\1.png)\n",
            text,
        )


def skip_by_name(app: Sphinx, config: Any) -> None:
    """Notebooks that need the default model stand unexecuted where it was not fetched, and the build says so."""
    if named_path(MODEL, user_cache_dir()).is_file() or config.nb_execution_mode == "off":
        return
    for path in sorted((app.srcdir / "notebooks").glob("*.md")):
        if f'"{MODEL}"' in path.read_text(encoding="utf-8"):
            config.nb_execution_excludepatterns = [*config.nb_execution_excludepatterns, path.name]
            print(
                f"notebook {path.name}: not executed; {MODEL} was not fetched (make model)", file=sys.stderr
            )


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.connect("config-inited", skip_by_name, priority=100)
    app.connect("include-read", whole_links)
    app.connect("doctree-resolved", open_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
