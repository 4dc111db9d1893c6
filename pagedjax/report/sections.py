"""Sections of the page as markup: where the figures come from, and tables that are read without a script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def text(value: object) -> str:
    """As it stands in markup: nothing of it is a tag or ends an attribute."""
    return html.escape(str(value), quote=True)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; None is unknown."""
    top = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{text(_UNKNOWN if v is None else v)}</td>' for v in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


_UNKNOWN = "unknown"


def scrolled(inner: str, label: str) -> str:
    """What may be wider than the page scrolls by itself, by keys too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}">{inner}</div>\n'


def source_of(about: Mapping[str, Any]) -> str:
    """Kind, model, command and trace of what is shown, as markup."""
    parts = [f"<i>{text(about.get('kind', 'of unknown kind'))}</i>"]
    for name in ("model", "command", "pagedjax"):
        if about.get(name):
            parts.append(f"{name}: <code>{text(about[name])}</code>")
    trace = about.get("trace")
    if isinstance(trace, str):
        parts.append(f"trace sha256: <code>{text(trace)}</code>")
    elif isinstance(trace, Mapping):
        parts.append("trace: " + ", ".join(f"{text(k)} <code>{text(v)}</code>" for k, v in trace.items()))
    return "; ".join(parts)


def curve_section(number: int, curve: Mapping[str, Any]) -> str:
    """Hit ratio against capacity of one trace."""
    names = list(curve["policies"])
    rows = [
        [capacity, *(None if (v := curve["policies"][name][i]) is None else f"{v:.4f}" for name in names)]
        for i, capacity in enumerate(curve["capacities"])
    ]
    left = curve.get("left_out")
    note = f"<p>Not replayed unasked, as the trace is long: {text(', '.join(left))}.</p>\n" if left else ""
    return (
        f'<section aria-labelledby="curve-title-{number}"><h2 id="curve-title-{number}">Hit ratio against capacity: '
        f'{text(curve["name"])}</h2><p class="source"><i>counted</i>: hit blocks over prompt blocks, block size '
        f"{curve['block_size']}; trace sha256 <code>{text(curve['sha256'])}</code>; "
        f"<code>{text(curve['command'])}</code></p>\n"
        f'<div id="curve-{number}"></div>\n{note}{scrolled(table(("blocks", *names), rows), "hit ratios by block")}'
        "</section>\n"
    )


def checkup_section(number: int, facts: Mapping[str, Any]) -> str:
    """Where the tokens of a trace's prompts go by block size, and what to change."""
    parts = ("found", "below_block", "last_token", "new")
    head = ("block size", "found", "lost below a block", "lost to the last token", "new")
    rows = [[size["block_size"], *(f"{size[part]:,}" for part in parts)] for size in facts["sizes"]]
    said = "".join(f"<p>{text(sentence)}</p>\n" for sentence in facts["said"])
    return (
        f'<section aria-labelledby="checkup-title-{number}"><h2 id="checkup-title-{number}">Check-up: '
        f'{text(facts["name"])}</h2><p class="source"><i>counted</i> in a cache without end: {facts["requests"]:,} '
        f"requests, {facts['tokens']:,} prompt tokens ({text(facts['unit'])}); trace sha256 "
        f"<code>{text(facts['sha256'])}</code>; <code>{text(facts['command'])}</code></p>\n"
        f'<h3>Block size</h3><div id="checkup-{number}"></div>\n{said}'
        f"{scrolled(table(head, rows), 'tokens by block size')}<h3>Fields that change</h3>\n{_moves(facts)}"
        "</section>\n"
    )


def _moves(facts: Mapping[str, Any]) -> str:
    if not facts["looked_for_fields"]:
        return "<p>The trace has no token ids: prompts cannot be laid side by side.</p>\n"
    if not facts["moves"]:
        return "<p>No field that changes per request stands in front of common text worth 1 % of all tokens.</p>\n"
    out = []
    for move in facts["moves"]:
        fields = "".join(f"<li>{_field(field, facts['unit'])}</li>" for field in move["fields"])
        out.append(f"<p>{text(move['said'])}</p><ul>{fields}</ul>\n")
    if not facts["texts"]:
        out.append('<p class="source">Their text is shown with <code>--text</code>.</p>\n')
    return "".join(out)


def _field(field: Mapping[str, Any], unit: str) -> str:
    told = (
        f"at {field['position']:,} {text(unit)}: {field['values']:,} values, the longest {field['longest']:,}"
    )
    if field["examples"] is None:
        return told
    examples = ", ".join(f"<mark>{text(example)}</mark>" for example in field["examples"])
    return f"{told}; <bdi>…{text(field['before'])}</bdi><bdi>{examples}</bdi>"


def fleet_section(number: int, fleet: Mapping[str, Any]) -> str:
    """Instances over time, routing choices, transfers of one fleet."""
    name = text(fleet["name"])
    lines = [
        [line["name"], line["role"], line["steps"], f"{line['joined']:.1f}", line["why"], line["usable"]]
        for line in fleet["instances"]
    ]
    totals = [
        [what, source, target, count, moved, lost]
        for what, source, target, count, moved, lost in fleet["totals"]
    ]
    head = (
        "request",
        "came at",
        "sent to",
        "decoded by",
        "why there",
        "expected cached",
        "found cached",
        "end at",
    )
    requests = [
        [
            r["id"],
            r["t"],
            r["refused"] or ", ".join(r["to"]),
            ", ".join(r["decoders"]) or "the same",
            *(r[key] for key in ("reason", "expected", "cached", "end")),
        ]
        for r in fleet["requests"][:500]
    ]
    more = (
        "" if len(fleet["requests"]) == fleet["num_requests"] else f", the first {len(fleet['requests']):,}"
    )
    return (
        f'<section aria-label="fleet {name}"><h2>{name}</h2><p class="source">{source_of(fleet["about"])}; '
        f"{len(lines)} instances, {fleet['num_requests']:,} requests{more}, {fleet['span']:.1f} s</p>\n"
        '<h3>Instances over time</h3><p class="source">Point at a moment, or press the arrow keys; '
        f'<code>--instance NAME</code> shows one step by step.</p><div id="fleet-{number}"></div>\n'
        f"<noscript>{table(('instance', 'role', 'steps', 'joined at', 'gone', 'blocks'), lines)}</noscript>\n"
        f"<h3>Routing</h3>{scrolled(table(('instance', 'why there', 'requests'), fleet['chosen']), 'choices')}"
        f'<div id="routing-{number}"></div>\n<noscript>{table(head, requests)}</noscript>\n'
        f'<h3>Transfers of KV</h3><div id="moves-{number}"></div>\n'
        + (
            scrolled(
                table(("what", "from", "to", "transfers", "bytes arrived", "bytes lost"), totals), "transfers"
            )
            if totals
            else ""
        )
        + "</section>\n"
    )
