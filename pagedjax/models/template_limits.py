"""Jinja's immutable sandbox with bounds: a chat template can neither fill the memory nor run for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MOST_SOURCE = 1 << 17  # characters of a template; published ones have some thousands
MOST_TEXT = 1 << 24  # characters of a prompt, and of any text or list on the way to it
MOST_STEPS = 1_000_000  # numbers that all of a template's ranges give together
_MOST_BITS = 1 << 12  # of a number
_MOST_COUNT = 1 << 12  # that a filter is told: columns, or items of a batch
_COUNTING = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")
_WIDENING = ("ljust", "rjust", "center", "zfill", "expandtabs", "translate")


def _refuse(what: str) -> None:
    raise SecurityError(f"{what}: more than a template may make")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Operators, ranges and what is joined are measured before they are done."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One operator, where its result stays within bounds."""
        sizes = [len(side) for side in (left, right) if isinstance(side, str | bytes | list | tuple)]
        counts = [side for side in (left, right) if isinstance(side, int)]
        if operator == "*" and sizes and counts and sizes[0] * counts[0] > MOST_TEXT:
            _refuse("a text times a number")
        if operator == "*" and len(counts) == 2 and sum(n.bit_length() for n in counts) > _MOST_BITS:
            _refuse("a product")
        if operator == "**" and len(counts) == 2 and counts[0].bit_length() * abs(counts[1]) > _MOST_BITS:
            _refuse("a power")
        if operator == "+" and sum(sizes) > MOST_TEXT:
            _refuse("a sum of texts")
        if operator == "%" and isinstance(left, str) and any(c.isdigit() or c == "*" for c in left):
            _refuse("a format with a width")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Methods that make a text as wide as they are told are none."""
        if isinstance(obj, str) and attr in _WIDENING:
            return False
        if isinstance(obj, str) and attr in ("format", "format_map") and ":" in obj:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        """A format may have no width."""
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and ":" in text and getattr(value, "__name__", "").startswith("format"):
            _refuse("a format with a width")
        return super().wrap_str_format(value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`replace` can multiply a text, too."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        given = [arg for arg in args if isinstance(arg, str)]
        if isinstance(owner, str) and name == "replace" and len(given) > 1:
            times = owner.count(given[0]) if given[0] else len(owner) + 1
            if len(owner) + times * len(given[1]) > MOST_TEXT:
                _refuse("a text with replacements")
        return super().call(context, function, *args, **kwargs)


class _Joins(NodeTransformer):
    """`a ~ b` becomes a filter that measures."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        listed = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(listed, "_joined", [], [], None, None, lineno=node.lineno)


def _small(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is not told large numbers."""

    @wraps(function)  # keeps what Jinja passes to it
    def measured(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(n, int) and abs(n) > _MOST_COUNT for n in (*args, *kwargs.values())):
            _refuse(function.__name__.removeprefix("do_"))
        return function(*args, **kwargs)

    return measured


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MOST_TEXT:
        _refuse("texts put together")
    return "".join(texts)


def bounded(env: BoundedSandbox, tree: nodes.Template) -> Callable[..., str]:
    """A template as a function of its variables, within the bounds.

    Args:
        env: Whose filters and globals it uses.
        tree: Parsed by it; is changed.
    """
    env.filters["_joined"] = _joined
    for name in _COUNTING:
        env.filters[name] = _small(env.filters[name])
    env.globals.pop("lipsum", None)
    steps = 0

    def counted(*args: int) -> range:
        nonlocal steps
        numbers = range(*args)
        steps += len(numbers)
        if steps > MOST_STEPS:
            _refuse("ranges")
        return numbers

    env.globals["range"] = counted
    template = env.from_string(_Joins().visit(tree))

    def render(**variables: Any) -> str:
        parts, size = [], 0
        for part in template.generate(**variables):
            size += len(part)
            if size > MOST_TEXT:
                _refuse("the prompt")
            parts.append(part)
        return "".join(parts)

    return render
