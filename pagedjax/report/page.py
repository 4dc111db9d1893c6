"""One self-contained HTML file from records and traces: no network, no script but its own, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from pagedjax.report.prefix import explorer
from pagedjax.report.sections import checkup_section, curve_section, fleet_section, source_of, table, text

_WEB = files("pagedjax.report") / "web"
_SCRIPTS = ("uPlot.iife.min.js", "grid.js", "curves.js", "fleet.js", "page.js")


def page(
    runs: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
    *,
    checkups: Sequence[Mapping[str, Any]] = (),
    title: str = "pagedjax",
    prefix: Mapping[str, Any] | None = None,
) -> str:
    """The page.

    Whatever comes from a record (names, prompts, paths) is text in it: in the data block no character can end the
    block, in the markup everything is escaped, and a content policy allows the page's own scripts by their digests
    and nothing else: no request leaves it.

    Args:
        runs: As `pagedjax.report.facts.read_runs` gives them, fleets among them; several stand side by side.
        curves: As `pagedjax.report.traces.curve_facts` gives them.
        checkups: As `pagedjax.report.traces.checkup_facts` gives them.
        title: Of the page.
        prefix: Tables of the prefix explorer; None counts them now (a few seconds).
    """
    scripts = [(_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    styles = [(_WEB / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "page.css")]
    fleets = [run for run in runs if run.get("fleet")]
    runs = [run for run in runs if not run.get("fleet")]
    shown = {"runs": runs, "fleets": fleets, "curves": curves, "checkups": checkups}
    data = json.dumps(
        {**shown, "prefix": prefix or explorer()},
        separators=(",", ":"),
        allow_nan=False,
    )
    for character, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        data = data.replace(character, escape)
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src {_digests(scripts)}; "
        f"style-src {_digests(styles)}"
    )
    body = "".join(fleet_section(i, fleet) for i, fleet in enumerate(fleets))
    body += _beside([_run_section(i, run) for i, run in enumerate(runs)])
    body += _beside([curve_section(i, curve) for i, curve in enumerate(curves)])
    body += _beside([checkup_section(i, facts) for i, facts in enumerate(checkups)])
    wide = ' class="wide"' if max(len(runs), len(curves)) > 1 else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n"
        + "".join(f"<style>{style}</style>\n" for style in styles)
        + f"</head>\n<body{wide}>\n<main>\n<h1>{text(title)}</h1>\n{body}{_PREFIX}</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def _beside(sections: Sequence[str]) -> str:
    """Several stand side by side where there is room."""
    if len(sections) < 2:
        return "".join(sections)
    return f'<div class="beside">\n{"".join(sections)}</div>\n'


def _digests(texts: Sequence[str]) -> str:
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts
    )


_PREFIX = """<section aria-labelledby="prefix-title"><h2 id="prefix-title">Prefix explorer</h2>
<p class="source"><i>counted</i>: each number was looked up in a real manager that had served the known prefix.</p>
<div id="prefix"></div>
<noscript><p>Drawn by a script; without one, <code>pagedjax experiment run hit-length --set prompt=14 --set prefix=10
--set block_size=4</code> draws single cases.</p></noscript></section>
"""


def _run_section(number: int, run: Mapping[str, Any]) -> str:
    blocks = ", ".join(str(count - 1) for count in run["pool_blocks"])
    source = f"{source_of(run['about'])}; {blocks} usable blocks of {run['block_size']} tokens"
    name = text(run["name"])
    parts = (
        (
            "pool",
            "The pool through time",
            "Drag, play, or press the arrow keys on the picture; point at a block.",
        ),
        ("series", "What the pool holds", "Click in the chart to open that step above."),
        ("requests", "Requests", "Choose one: why did it take so long?"),
    )
    out = f'<section aria-label="run {name}"><h2>{name}</h2><p class="source">{source}</p>\n'
    for key, title, hint in parts:
        out += f'<h3>{title}</h3><p class="source">{hint}</p><div id="{key}-{number}"></div>\n'
    return out + f"<noscript>{_request_table(run['requests'])}</noscript></section>\n"


def _request_table(requests: Sequence[Mapping[str, Any]]) -> str:
    head = ("request", "prompt tokens", "from the cache", "match stopped", "first token at", "end at", "why")
    keys = ("id", "prompt", "hit", "reason", "first", "end", "why")
    return table(head, [[r[key] for key in keys] for r in requests[:500]])
