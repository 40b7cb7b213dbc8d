"""Render a model's chat template: messages to prompt text, within bounds of steps, time and output.

Owns: compiling, the sandbox, the budget of one rendering, and the errors of all three. Does not: tokenize, or change
messages (text_model.py does). Invariants: output equals that of transformers' apply_chat_template for the same input. A
template can read only its variables, and no input makes rendering exceed its bounds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from octavo.errors import InvalidRequestError, ModelFileError

_MAX_STEPS = 1_000_000
_MAX_SECONDS = 5.0
_MAX_BITS = 4096  # of an integer
MAX_WIDTH = 1000  # of padding and indentation
_WRITTEN = 4  # characters written (also those that macros and blocks capture) per character of allowed output
_MADE = 32  # characters of intermediate strings per character of allowed output
_PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^}]*\{")


@dataclass(slots=True)
class RenderBudget:
    """The remaining budget of one render, whose result may have `max_chars` characters."""

    max_chars: int
    written_chars: int = 0
    made_chars: int = 0
    steps: int = _MAX_STEPS
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.written_chars = self.max_chars * _WRITTEN
        self.made_chars = self.max_chars * _MADE
        self.deadline = time.monotonic() + _MAX_SECONDS

    def step(self) -> None:
        """Count one loop iteration, call or operation."""
        self.steps -= 1
        if self.steps < 0 or (self.steps & 255 == 0 and time.monotonic() > self.deadline):
            raise SecurityError("the template runs for too long")

    def make(self, num_chars: int) -> None:
        """Count characters, list items or digits that are about to be made."""
        self.made_chars -= num_chars
        if self.made_chars < 0:
            raise SecurityError("the template makes too much text")


current: ContextVar[RenderBudget] = ContextVar("octavo_template_budget")


def measure(value: Any) -> int:
    """Return about how many characters str() makes of a value. A shared part counts each time that it is written."""
    if isinstance(value, str):
        return len(value)
    budget, total, pending = current.get(), 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            pending += item
        total += 2
        budget.step()
    return total


def made_size(name: str, data: Sequence[Any]) -> int:
    """Return an upper bound of the characters that a text filter, or a string's method, makes of its data."""
    sizes = [measure(value) for value in data]
    if name == "replace" and len(data) >= 3 and all(isinstance(value, str) for value in data[:3]):
        return sizes[0] + int(data[0].count(data[1])) * sizes[2]
    if name in ("format", "format_map", "%"):
        return sizes[0] + int(data[0].count("{") + data[0].count("%")) * sum(sizes[1:])
    if name in ("replace", "translate"):
        return (sizes[0] + 1) * (sum(sizes[1:]) + 1)
    if name == "join":
        texts = [len(value) for value in data if isinstance(value, str)]
        num_items = max([len(value) for value in data if not isinstance(value, str)] or texts)
        return sum(sizes) + num_items * sum(texts)
    return sum(sizes)


def result_size(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the characters, items or bits that `*` or `**` makes; refuse large numbers."""
    if operator == "**":
        bits = left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
        return bits if bits <= _MAX_BITS else refuse()
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        return bits if bits <= _MAX_BITS else refuse()
    for items, count in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(count, int):
            return weight(items) * max(count, 0)
    return 0


def weight(items: str | list[Any] | tuple[Any, ...]) -> int:
    """Return the number of characters of a string, or 8 for each item of a list."""
    return len(items) if isinstance(items, str) else 8 * len(items)


def method_size(owner: str, name: str, args: list[Any]) -> int:
    """Return an upper bound of the characters that a string's method makes; refuse wide padding and formats."""
    if name in _PADDING_METHODS and any(isinstance(value, int) and value > MAX_WIDTH for value in args):
        return refuse()
    if name == "expandtabs":
        return (owner.count("\t") + 1) * MAX_WIDTH + len(owner)
    if name in ("format", "format_map") and WIDE_FORMAT.search(owner):
        return refuse()
    return made_size(name, [owner, *(value for value in args if isinstance(value, (str, list, tuple, dict)))])


def refuse() -> int:
    """Raise SecurityError. The return type is a size's, so that a call can be used in an expression."""
    raise SecurityError("the template makes a number or text that is too large")


# No prompt needs these filters, and most of them make long texts of short ones.
_REMOVED_FILTERS = (
    ("batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
)  # fmt: skip
_TEXT_FILTERS = ("capitalize", "e", "escape", "forceescape", "join", "lower", "replace", "safe", "string", "striptags",
                 "title", "trim", "upper")  # fmt: skip


class _CountedItems:
    """The items of a loop; iterating over them counts steps."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items: Sequence[Any] = items if isinstance(items, (list, tuple)) else list(items)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        budget = current.get()
        for item in self._items:
            budget.step()
            yield item


def _concatenate(parts: Sequence[Any]) -> str:
    current.get().make(sum(map(measure, parts)))
    return "".join(map(str, parts))


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    budget = current.get()
    budget.written_chars -= len(value) if isinstance(value, str) else measure(value)
    if budget.written_chars < 0:
        raise SecurityError("the template's output is too long")
    return value


def _guard_text_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Charge the budget for the text that a filter makes. Contexts and environments in its arguments are not data."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        data = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, list, tuple, dict))]
        current.get().make(made_size(name, data))
        return function(*args, **kwargs)

    return guarded


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Apply Jinja's filter `indent`, with a bound on the width."""
    pad = width if isinstance(width, str) else " " * (width if width <= MAX_WIDTH else refuse())
    text = str(text)
    current.get().make((text.count("\n") + 1) * (len(pad) + 1) + len(text))
    lines = (text + "\n").splitlines()
    rest = [pad + line if line or blank else line for line in lines[1:]]
    return ("\n".join([lines[0], *rest])) if not first else pad + "\n".join([lines[0], *rest])


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without HTML escapes, as transformers defines this filter."""
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
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text for training. Renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Tree rewriter that makes loops, `~` and literal text count against the budget."""

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
        own = {"tojson": _tojson, "indent": _indent, "_counted": _CountedItems, "_concatenate": _concatenate}
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
        """Apply an operator after charging the budget for the size of its result."""
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
        """Wrap Jinja's safe `format` and `format_map` so that they charge the budget."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner, name = value.__self__, value.__name__

        def charged(*args: Any, **kwargs: Any) -> str:
            current.get().make(method_size(owner, name, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return charged

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for the template, charging the budget for the call and its result."""
        budget = current.get()
        budget.step()
        owner, name = getattr(target, "__self__", None), getattr(target, "__name__", "")
        if isinstance(owner, str):
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            budget.make(method_size(owner, name, [*args, *kwargs.values()]))
        return super().call(context, target, *args, **kwargs)


_MAX_SOURCE_CHARS = 1 << 19
_RESERVED = frozenset(("self", "messages", "tools", "add_generation_prompt"))
# Errors that a template may raise on data of an unexpected form.
_DATA_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_SIZE_ERRORS = (RecursionError, MemoryError)


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """A compiled template. Safe to share between threads.

    The budget counts the sandbox's own operations. One operation inside C (comparing or sorting shared lists)
    can still take minutes and hold the interpreter's lock. A server therefore renders an untrusted template in a
    sandbox process, which it can kill.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        max_output_chars: int = 4_000_000,
        path: object = "chat template",
        is_trusted: bool = False,
    ) -> None:
        """Compile the template. `tokens` are the named special tokens ("bos_token": "<s>"). Raises ModelFileError."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelFileError(path, f"chat template has {len(source)} characters; {_MAX_SOURCE_CHARS} are supported")
        self.source = source
        self.is_trusted = is_trusted
        self.tokens = dict(tokens)
        self._max_output_chars = max_output_chars
        try:
            self._template: Template = _environment().from_string(source)
        except (TemplateError, SyntaxError, ValueError, *_SIZE_ERRORS) as error:
            raise ModelFileError(path, f"chat template cannot be compiled ({_reason(error)})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text. The template gets `kwargs` as variables.

        Raises InvalidRequestError when the template refuses the messages, fails on them, or exceeds its limits.
        """
        if kwargs:
            check_variables(kwargs)
        variables = {
            "documents": None,
            **self.tokens,
            **kwargs,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        token = current.set(RenderBudget(self._max_output_chars))
        try:
            text = self._template.render(variables)
            if len(text) > self._max_output_chars:
                raise SecurityError("the template's output is too long")
        except (*_DATA_ERRORS, *_SIZE_ERRORS) as error:
            raise InvalidRequestError(
                f"the chat template does not take these messages: {_reason(error)}", "messages"
            ) from error
        finally:
            current.reset(token)
        return text


def check_variables(names: Iterable[str]) -> None:
    """Refuse variables that the server sets itself. Raises InvalidRequestError."""
    if clash := _RESERVED.intersection(names):
        raise InvalidRequestError(f"{', '.join(sorted(clash))} cannot be set here", "chat_template_kwargs")


def _reason(error: BaseException) -> str:
    if isinstance(error, _SIZE_ERRORS):
        return "it is too large or nested too deeply"
    return (str(error).strip() or type(error).__name__)[:300]
