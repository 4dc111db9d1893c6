"""Jinja's immutable sandbox with bounds: a chat template can neither fill the memory nor run for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import filters, nodes, pass_eval_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_SOURCE = 1 << 17  # characters of a template; published ones have some thousands
MOST_TEXT = 1 << 24  # characters of a prompt, and of any text or list on the way to it
MOST_STEPS = 1_000_000  # numbers that all of a template's ranges give together
# Turns of loops; a call counts as several, and as one more for every 1,024 characters that it is given.
MOST_WORK = 10_000_000
_CALL = 16
_MOST_BITS = 1 << 12  # of a number
_MOST_COUNT = 1 << 12  # that a filter is told: columns, or items of a batch
_COUNTING = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")
_WIDENING = ("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "to_bytes")
# Filters that only look at a value or hand it on: what they are given is not measured.
_FREE = (
    *("length", "count", "first", "last", "default", "d", "list", "items"),
    *("map", "select", "reject", "selectattr", "rejectattr"),
)
_LEFT_OUT = ("urlize", "pprint")  # filters that multiply, and that no prompt needs


def _refuse(what: str) -> None:
    raise SecurityError(f"{what}: more than a template may make")


def _length(value: Any, indent: int = 0) -> int:
    """Characters of a value written out, about, with so many columns a level; counted a little beyond the bound."""
    total, rest = 0, [(value, 1)]
    while rest and total <= MOST_TEXT:
        item, depth = rest.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping) and not isinstance(item, Context):
            rest += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple | set | frozenset):
            rest += [(inner, depth + 1) for inner in item]
        total += (item.bit_length() // 3 if isinstance(item, int) else 1) + indent * depth
    return total


def _check_replaced(text: Any, old: Any, new: Any) -> None:
    times = text.count(old) if old else len(text) + 1
    if len(text) + times * len(new) > MOST_TEXT:
        _refuse("a text with replacements")


def _check_joined(items: list[Any], between: Any) -> None:
    if _length(items) + len(items) * len(between) > MOST_TEXT:
        _refuse("texts put together")


def _check_formatted(text: str, values: Iterable[Any]) -> None:
    if len(text) + text.count("%") * max(map(_length, values), default=0) > MOST_TEXT:
        _refuse("a format")
    if any(c.isdigit() or c == "*" for c in text):
        _refuse("a format with a width")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Operators, ranges and what is joined are measured before they are done."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    work = 0

    def count(self, *given: Any) -> None:
        """One call with what it is given."""
        size = sum(map(_length, given))
        if size > MOST_TEXT:
            _refuse("what a call is given")
        self.turn(_CALL + (size >> 10))

    def turn(self, work: int = 1) -> None:
        """One turn of a loop, or work of so many."""
        self.work += work
        if self.work > MOST_WORK:
            _refuse("loops and calls")

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
        if operator == "%" and isinstance(left, str):
            _check_formatted(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Methods that make a text as wide as they are told are none."""
        if isinstance(obj, str | bytes | int) and attr in _WIDENING:
            return False
        if isinstance(obj, str) and attr in ("format", "format_map") and ":" in obj:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        """A format may have no width."""
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and ":" in text and getattr(value, "__name__", "").startswith("format"):
            _refuse("a format with a width")
        wrapped: Any = super().wrap_str_format(value)
        if wrapped is None or not isinstance(text, str):
            return wrapped

        def measured(*args: Any, **kwargs: Any) -> str:
            widest = max(map(_length, (*args, *kwargs.values())), default=0)
            if len(text) + text.count("{") * widest > MOST_TEXT:
                _refuse("a format")
            return str(wrapped(*args, **kwargs))

        return measured

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`replace` and `join` can multiply a text, too."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        owners = (owner,) if isinstance(owner, str | bytes) else ()
        if owners and name == "join" and args:
            args = (list(args[0]), *args[1:])
            _check_joined(args[0], owner)
        self.count(*owners, *args, *kwargs.values())
        if (
            owners
            and name == "replace"
            and len(args) > 1
            and all(isinstance(a, type(owner)) for a in args[:2])
        ):
            _check_replaced(owner, *args[:2])
        return super().call(context, function, *args, **kwargs)


class _Measures(NodeTransformer):
    """`a ~ b` becomes a filter that measures, and what a loop runs over one that counts."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter("_counted", node.iter)
        return node

    @staticmethod
    def _filter(name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _measured(env: BoundedSandbox, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose texts are measured before and after."""

    @wraps(function)  # keeps what Jinja passes to it
    def measured(*args: Any, **kwargs: Any) -> Any:
        env.count(*(() if name in _FREE else (*args, *kwargs.values())))
        if name in _BEFORE:
            _BEFORE[name](*args, **kwargs)
        out = function(*args, **kwargs)
        if isinstance(out, str) and len(out) > MOST_TEXT:
            _refuse(name)
        return out

    return measured


def _before_replace(_: Any, text: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replaced(str(text), str(old), str(new))


def _before_format(text: Any, *args: Any, **kwargs: Any) -> None:
    _check_formatted(str(text), (*args, *kwargs.values()))


def _before_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    columns = width if isinstance(width, int) else len(width)
    if (str(text).count("\n") + 1) * columns > MOST_TEXT:
        _refuse("indent")


def _before_wordwrap(
    _: Any,
    text: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: Any = None,
    *__: Any,
    **___: Any,
) -> None:
    if len(str(text)) * len(wrapstring or "") > MOST_TEXT:
        _refuse("wordwrap")


def _before_tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, *_: Any, **__: Any) -> None:
    columns = len(indent) if isinstance(indent, str) else indent or 0
    if _length(value, columns) > MOST_TEXT:
        _refuse("tojson")


_BEFORE: dict[str, Callable[..., None]] = {
    "replace": _before_replace,
    "format": _before_format,
    "indent": _before_indent,
    "wordwrap": _before_wordwrap,
    "tojson": _before_tojson,
}


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> Any:
    of = (lambda item: item) if attribute is None else filters.make_attrgetter(context.environment, attribute)
    items = [of(item) for item in value]
    _check_joined(items, str(d))
    return filters.do_join(context, items, d)


def _small(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is not told large numbers."""

    @wraps(function)  # keeps what Jinja passes to it
    def measured(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(n, int) and abs(n) > _MOST_COUNT for n in (*args, *kwargs.values())):
            _refuse(function.__name__.removeprefix("do_"))
        return function(*args, **kwargs)

    return measured


def _joined(parts: list[Any]) -> str:
    _check_joined(parts, "")
    return "".join(str(part) for part in parts)


def _written(value: Any) -> Any:
    """What stands between {{ and }}, before it becomes a text."""
    if _length(value) > MOST_TEXT:
        _refuse("the prompt")
    return value


def bounded(env: BoundedSandbox, tree: nodes.Template) -> Callable[..., str]:
    """A template as a function of its variables, within the bounds.

    Args:
        env: Whose filters and globals it uses.
        tree: Parsed by it; is changed.
    """
    for name in _LEFT_OUT:
        env.filters.pop(name, None)
    for name in _COUNTING:
        env.filters[name] = _small(env.filters[name])
    env.filters["join"] = _join
    for name, function in env.filters.items():
        env.filters[name] = _measured(env, name, function)

    def turns(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            env.turn()
            yield item

    env.filters |= {"_joined": _joined, "_counted": turns}
    env.finalize = _written
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
    template = env.from_string(_Measures().visit(tree))

    def render(**variables: Any) -> str:
        parts, size = [], 0
        for part in template.generate(**variables):
            size += len(part)
            if size > MOST_TEXT:
                _refuse("the prompt")
            parts.append(part)
        return "".join(parts)

    return render
