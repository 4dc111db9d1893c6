"""One self-contained HTML file from records and traces: no network, no script but its own, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from pagedjax.report.prefix import explorer

_WEB = files("pagedjax.report") / "web"


def page(
    runs: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
    *,
    title: str = "pagedjax",
    prefix: Mapping[str, Any] | None = None,
) -> str:
    """The page.

    Whatever comes from a record (names, prompts, paths) is text in it: in the data block no character can end the
    block, in the markup everything is escaped, and a content policy allows the page's own scripts by their digests
    and nothing else: no request leaves it.

    Args:
        runs: As `pagedjax.report.facts.run_facts` gives them; they stand one below the other.
        curves: As `curve_facts` gives them.
        title: Of the page.
        prefix: Tables of the prefix explorer; None counts them now (a few seconds).
    """
    scripts = [
        (_WEB / name).read_text(encoding="utf-8") for name in ("uPlot.iife.min.js", "grid.js", "page.js")
    ]
    styles = [(_WEB / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "page.css")]
    data = json.dumps(
        {"runs": runs, "curves": curves, "prefix": prefix or explorer()},
        separators=(",", ":"),
        allow_nan=False,
    )
    for character, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        data = data.replace(character, escape)
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src {_digests(scripts)}; "
        f"style-src {_digests(styles)}"
    )
    body = "".join(_run_section(i, run) for i, run in enumerate(runs))
    body += "".join(_curve_section(i, curve) for i, curve in enumerate(curves))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n"
        + "".join(f"<style>{style}</style>\n" for style in styles)
        + f"</head>\n<body>\n<main>\n<h1>{_text(title)}</h1>\n{body}{_PREFIX}</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def _digests(texts: Sequence[str]) -> str:
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


_PREFIX = """<section aria-labelledby="prefix-title"><h2 id="prefix-title">Prefix explorer</h2>
<p class="source"><i>counted</i>: each number was looked up in a real manager that had served the known prefix.</p>
<div id="prefix"></div>
<noscript><p>Drawn by a script; without one, <code>pagedjax experiment run hit-length --set prompt=14 --set prefix=10
--set block_size=4</code> draws single cases.</p></noscript></section>
"""


def _run_section(number: int, run: Mapping[str, Any]) -> str:
    about = run["about"]
    kind = about.get("kind", "of unknown kind")
    facts = [f"<i>{_text(kind)}</i>"]
    for name in ("model", "command", "pagedjax"):
        if about.get(name):
            facts.append(f"{name}: <code>{_text(about[name])}</code>")
    trace = about.get("trace")
    if isinstance(trace, str):
        facts.append(f"trace sha256: <code>{_text(trace)}</code>")
    elif isinstance(trace, Mapping):
        facts.append("trace: " + ", ".join(f"{_text(k)} <code>{_text(v)}</code>" for k, v in trace.items()))
    blocks = ", ".join(str(count - 1) for count in run["pool_blocks"])
    facts.append(f"{blocks} usable blocks of {run['block_size']} tokens")
    source = "; ".join(facts)
    name = _text(run["name"])
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
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{_text('unknown' if value is None else value)}</td>"
            for value in (r["id"], r["prompt"], r["hit"], r["reason"], r["first"], r["end"], r["why"])
        )
        + "</tr>"
        for r in requests[:500]
    )
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            "request",
            "prompt tokens",
            "from the cache",
            "match stopped",
            "first token at",
            "end at",
            "why",
        )
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _curve_section(number: int, curve: Mapping[str, Any]) -> str:
    names = list(curve["policies"])
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in ("blocks", *names))
    rows = "".join(
        f"<tr><td>{capacity}</td>"
        + "".join(
            f"<td>{'unknown' if (v := curve['policies'][name][i]) is None else f'{v:.4f}'}</td>"
            for name in names
        )
        + "</tr>"
        for i, capacity in enumerate(curve["capacities"])
    )
    return (
        f'<section aria-labelledby="curve-title-{number}"><h2 id="curve-title-{number}">Hit ratio against capacity: '
        f'{_text(curve["name"])}</h2><p class="source"><i>counted</i>: hit blocks over prompt blocks, block size '
        f"{curve['block_size']}; trace sha256 <code>{_text(curve['sha256'])}</code>; "
        f"<code>{_text(curve['command'])}</code></p>\n"
        f'<div id="curve-{number}"></div>\n<div class="scroll" tabindex="0" role="region" aria-label="values">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>\n"
    )
