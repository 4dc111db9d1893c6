"""Chat templates: Jinja programs that come with a model, run in Jinja's immutable sandbox.

They can format messages and nothing else. Filters, globals and extensions are those that transformers gives them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_RESERVED = ("messages", "add_generation_prompt")


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    special: Mapping[str, str] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Run a chat template in Jinja's immutable sandbox.

    Args:
        template: Jinja source.
        messages: {"role", "content"} each; content is text, or a list of {"type": "text", "text"} parts. A
            template that does not loop over content gets the parts' texts, one a line.
        add_generation_prompt: End where the assistant begins to speak.
        special: What templates know as bos_token, eos_token and so on.
        variables: What else the template asks for (enable_thinking, tools, documents).

    Raises:
        ValueError: The template does not compile or refuses the messages, a part is no text, or a variable is
            not one that the template uses.
    """
    import jinja2
    from jinja2 import meta

    from pagedjax.models.template_limits import MOST_SOURCE, bounded

    if len(template) > MOST_SOURCE:
        raise ValueError(f"chat template of {len(template):,} characters: must have at most {MOST_SOURCE:,}")
    env = _environment()
    try:
        tree = env.parse(template)
        used = meta.find_undeclared_variables(tree)
        for name in variables or {}:
            if name in _RESERVED or name not in used:
                known = sorted(used - {*_RESERVED, *env.globals, *(special or {})})
                raise ValueError(
                    f"template argument {name!r}: the chat template does not use it; "
                    f"it uses {', '.join(known) or 'none'}"
                )
        plain = plain_messages(messages, parts=_loops_over_content(tree))
        given: dict[str, Any] = {**(special or {}), **(variables or {})}
        render = bounded(env, tree)
        return render(**given, messages=plain, add_generation_prompt=add_generation_prompt)
    except ValueError:
        raise
    except Exception as error:  # a template is a program, and may raise whatever it likes
        # jinja2.TemplateError, TypeError, KeyError, ZeroDivisionError, RecursionError, ...
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        first = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(
            f"chat template: {kind}{first}: check the messages (role and content each)"
        ) from error


def plain_messages(messages: Sequence[Message], *, parts: bool = False) -> list[dict[str, Any]]:
    """Messages with their contents checked; parts=False joins the texts of parts, one a line.

    Raises:
        ValueError: A message has no role, or its content holds something that is no text.
    """
    out = []
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{at}]={message!r}: must be an object with role and content")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_part_text(part, f"messages[{at}].content[{i}]") for i, part in enumerate(content)]
            content = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"messages[{at}].content={content!r}: must be text or a list of text parts")
        out.append({**message, "content": content} if "content" in message else dict(message))
    return out


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f'{where} of type {kind!r}: must be {{"type": "text", "text": ...}}; images, sound and '
            "files are not supported"
        )
    return text


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension

    from pagedjax.models.template_limits import BoundedSandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    class Generation(Extension):
        """{% generation %} marks the assistant's part for training; here its body is plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    env = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def _loops_over_content(tree: Any) -> bool:
    """Whether a template loops over a message's content, so that it wants parts and not one text."""
    from jinja2 import nodes

    def is_content(node: Any) -> bool:
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == "content")
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Filter):
            return node.node is not None and is_content(node.node)
        return isinstance(node, nodes.Name) and node.name in aliases

    aliases: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            aliases.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
