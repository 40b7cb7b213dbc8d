"""The jinja2 environment of chat templates: what transformers gives a template, with limits on work and memory.

Owns: the sandbox, its filters and globals, and sending every loop, call, operator and output through the budget.
Does not: know messages.
Invariants: a template reaches no file, module or attribute outside its data; a render ends after a bounded number of
steps, a bounded time and a bounded amount of text. A limit reached raises jinja2's SecurityError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from octavo.text.template_budget import (
    MAX_WIDTH,
    WIDE_FORMAT,
    current,
    made_size,
    measure,
    method_size,
    refuse,
    result_size,
    weight,
)

# Nothing a prompt needs, and most of them make much text of little.
_REMOVED_FILTERS = (
    ("batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
)  # fmt: skip
_TEXT_FILTERS = ("capitalize", "e", "escape", "forceescape", "join", "lower", "replace", "safe", "string", "striptags",
                 "title", "trim", "upper")  # fmt: skip


class _Items:
    """A sequence whose iteration counts steps."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        budget = current.get()
        for item in self._items:
            budget.step()
            yield item


def _counted(iterable: Any) -> _Items:
    return _Items(iterable if isinstance(iterable, (list, tuple)) else list(iterable))


def _concatenate(parts: Sequence[Any]) -> str:
    current.get().make(sum(map(measure, parts)))
    return "".join(map(str, parts))


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    current.get().write(measure(value))
    return value


def _guard_text_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Charge what a text filter makes. Contexts and environments among its arguments are not data."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        data = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, list, tuple, dict))]
        current.get().make(made_size(name, data))
        return function(*args, **kwargs)

    return guarded


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter `indent`, with a bound on the width."""
    pad = width if isinstance(width, str) else " " * (width if width <= MAX_WIDTH else refuse())
    text = str(text)
    current.get().make((text.count("\n") + 1) * (len(pad) + 1) + len(text))
    lines = (text + "\n").splitlines()
    rest = [pad + line if line or blank else line for line in lines[1:]]
    return ("\n".join([lines[0], *rest])) if not first else pad + "\n".join([lines[0], *rest])


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, as transformers defines this filter."""
    if (isinstance(indent, int) and indent > 16) or measure(indent or "") + measure(separators or "") > 64:
        raise SecurityError("tojson has an indent or separators that are too wide")
    current.get().make(measure(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if WIDE_FORMAT.search(layout):
        raise SecurityError("strftime_now has a width that is too large")
    return datetime.now().strftime(layout)


class _Dict:
    """The global `dict`, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """The global `namespace`, without underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be a keyword, as in jinja2
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not use the name {name!r} in a namespace")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's words for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Sends loops, `~` and literal text through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concatenate", [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. One instance serves all templates and threads."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_finalize,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _TEXT_FILTERS:
            self.filters[name] = _guard_text_filter(name, self.filters[name])
        own = {"tojson": _tojson, "indent": _indent, "_counted": _counted, "_concatenate": _concatenate}
        self.filters.update(own)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be large, if it will not be."""
        budget = current.get()
        budget.step()
        if operator == "%" and isinstance(left, str):
            budget.make(made_size("%", [left, right]) if not WIDE_FORMAT.search(left) else refuse())
        if operator == "+" and isinstance(left, (str, list, tuple)):
            budget.make(weight(left) + (weight(right) if isinstance(right, (str, list, tuple)) else 0))
        elif operator in ("*", "**"):
            budget.make(result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe `format` and `format_map`, charged."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner, name = value.__self__, value.__name__

        def charged(*args: Any, **kwargs: Any) -> str:
            current.get().make(method_size(owner, name, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return charged

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method of the template's, counting it and what it makes."""
        budget = current.get()
        budget.step()
        owner, name = getattr(target, "__self__", None), getattr(target, "__name__", "")
        if isinstance(owner, str):
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            budget.make(method_size(owner, name, [*args, *kwargs.values()]))
        return super().call(context, target, *args, **kwargs)
