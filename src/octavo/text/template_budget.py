"""What one render of a chat template may still do.

Owns: the budget of steps, time and text, and the bounds on what an operation is about to make.
Does not: know jinja2's environment (template_sandbox.py draws on the budget there).
Invariants: every charge comes before the work; a budget that is used up raises jinja2's SecurityError.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError

_MAX_STEPS = 1_000_000
_MAX_SECONDS = 5.0
_MAX_BITS = 4096  # of whole numbers
MAX_WIDTH = 1000  # of padding and indentation
_WRITTEN = 4  # characters written, those captured by macros and blocks too, for each character of output allowed
_MADE = 32  # characters of strings made on the way, for each character of output allowed
_PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^}]*\{")


@dataclass(slots=True)
class Budget:
    """What one render, whose result may have `max_chars`, may still do."""

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
        """Count one loop turn, call or operation."""
        self.steps -= 1
        if self.steps < 0 or (self.steps & 255 == 0 and time.monotonic() > self.deadline):
            raise SecurityError("the template runs for too long")

    def write(self, num_chars: int) -> None:
        """Count text written."""
        self.written_chars -= num_chars
        if self.written_chars < 0:
            raise SecurityError("the template's output is too long")

    def make(self, num_chars: int) -> None:
        """Count text, list items or digits about to be made."""
        self.made_chars -= num_chars
        if self.made_chars < 0:
            raise SecurityError("the template makes too much text")


current: ContextVar[Budget] = ContextVar("octavo_template_budget")


def render_within(budget: Budget, render: Callable[[], str]) -> str:
    """Call `render` under a budget."""
    token = current.set(budget)
    try:
        text = render()
    finally:
        current.reset(token)
    if len(text) > budget.max_chars:
        raise SecurityError("the template's output is too long")
    return text


def measure(value: Any) -> int:
    """Characters that str() would about make of a value; counts shared parts as often as they would be written."""
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
    """Bound the characters that a text filter, or a method of a string, makes of its data."""
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
    """Bound the characters, items or bits that `*` or `**` makes."""
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
    """Characters of a string, or as many as the places of a list take."""
    return len(items) if isinstance(items, str) else 8 * len(items)


def method_size(owner: str, name: str, args: list[Any]) -> int:
    """Bound the characters that a method of a string makes; refuse wide padding and formats."""
    if name in _PADDING_METHODS and any(isinstance(value, int) and value > MAX_WIDTH for value in args):
        return refuse()
    if name == "expandtabs":
        return (owner.count("\t") + 1) * MAX_WIDTH + len(owner)
    if name in ("format", "format_map") and WIDE_FORMAT.search(owner):
        return refuse()
    return made_size(name, [owner, *(value for value in args if isinstance(value, (str, list, tuple, dict)))])


def refuse() -> int:
    """Raise, where a size is expected."""
    raise SecurityError("the template makes a number or text that is too large")
