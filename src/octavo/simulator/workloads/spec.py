"""A specification: `KIND:key=value,...`, or `KIND:PATH,key=value,...` for a workload's file.

Owns: splitting the text; typed reading of options; errors that name the option, its value and the remedy; BuildContext
and Source, the argument and the result of every kind's builder. Does not: know any kind.
Invariants: an option that its kind does not read is an error, with a near name. Every dropped or changed request has a
note.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival

MAX_SPEC = 4096  # maximum characters of a specification


class Spec:
    """A specification: `kind`, `path` (the first word without `=`; empty if none), `options`.

    `subject` names in messages what is specified.
    """

    def __init__(self, text: str, subject: str = "workload") -> None:
        if len(text) > MAX_SPEC:
            raise ConfigError(f"{subject} has {len(text)} characters; give at most {MAX_SPEC}")
        self.where = f"{subject} {text!r}"
        self.text = text
        kind, _, rest = text.partition(":")
        self.kind = kind.strip()
        self.path = ""
        self.options: dict[str, str] = {}
        self._known: dict[str, None] = {}  # the options that were read, in order
        for index, word in enumerate(_split(rest, self.where)):
            name, equals, value = word.partition("=")
            name = name.strip()
            if not equals and index == 0:
                self.path = name
            elif not equals or not name:
                raise ConfigError(f"{self.where}: {word!r} is no option; write name=value")
            elif name in self.options:
                raise ConfigError(f"{self.where} gives {name} twice; give it once")
            else:
                self.options[name] = value.strip()

    def text_of(self, name: str, default: str = "") -> str:
        """Return an option's text."""
        self._known[name] = None
        return self.options.get(name, default)

    def number(self, name: str, default: float | None = None, *, min_value: float | None = None) -> float:
        """Return a finite number above 0, or of at least `min_value`. Required if `default` is None."""
        text = self.text_of(name)
        if name not in self.options:
            if default is None:
                raise ConfigError(f"{self.where} needs {name}=NUMBER, as in {self.kind}:{name}=1")
            return default
        value = read_number(text)
        if value is None or not math.isfinite(value) or (value <= 0 if min_value is None else value < min_value):
            bound = "above 0" if min_value is None else f"of at least {min_value:g}"
            raise ConfigError(f"{self.where}: {name} is {text!r}; give a number {bound}")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a number above 0 if the option is given."""
        self.text_of(name)
        return self.number(name) if name in self.options else None

    def count(self, name: str, default: int, *, min_value: int = 0) -> int:
        """Return a whole number of at least `min_value`."""
        text = self.text_of(name)
        if name not in self.options:
            return default
        value = read_number(text)
        if value is None or value != value // 1 or not min_value <= value < 2**53:
            raise ConfigError(f"{self.where}: {name} is {text!r}; give a whole number of at least {min_value}")
        return int(value)

    def choice(self, name: str, words: tuple[str, ...]) -> str:
        """Return one of the words; the first unless given."""
        value = self.text_of(name, words[0])
        if value not in words:
            raise ConfigError(f"{self.where}: {unknown(name, value, words)}")
        return value

    def close(self) -> None:
        """Raise ConfigError for options that were never read."""
        for name in self.options:
            if name not in self._known:
                remedy = f"{self.kind} takes {', '.join(sorted(self._known))}"
                raise ConfigError(f"{self.where}: {unknown('key', name, self._known, remedy)}")


class Notes:
    """Counts of dropped and changed requests, by description."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, description: str, number: int = 1) -> None:
        """Add `number` to the count of a description."""
        if number:
            self.counts[description] = self.counts.get(description, 0) + number


Source = Callable[[Notes], Iterator[Arrival]]


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The argument of a kind's builder: seed, index of the workload, function that opens another specification."""

    seed: int
    index: int
    open_source: Callable[[str], Source]

    def rng(self, spec: Spec, purpose: str) -> random.Random:
        """Return a separate random generator for each purpose, so that drawing lengths does not change arrivals."""
        return random.Random(f"{self.seed}/{self.index}/{spec.kind}/{purpose}")


def read_number(text: str) -> float | None:
    """Parse a number, also `4K` (4096) and `2k` (2000); return None for other text and for NaN."""
    units = {"k": 1e3, "m": 1e6, "K": 1024.0, "M": 1048576.0}
    unit = units.get(text[-1:], 0.0)
    try:
        value = float(text[:-1] if unit else text)
    except ValueError:
        return None
    return None if math.isnan(value) or "_" in text else value * (unit or 1.0)


def read_call(text: str, option: str) -> tuple[str, list[str]]:
    """Split `name(a,b)` into its name and arguments; a bare number is `fixed(number)`. Raises ConfigError."""
    if read_number(text) is not None:
        return "fixed", [text]
    name, bracket, rest = text.partition("(")
    if bracket and not rest.endswith(")"):
        raise ConfigError(f"{option} is {text!r}; close the bracket, as in lognormal(512,0.8)")
    return name.strip(), [part.strip() for part in rest[:-1].split(",")] if rest[:-1].strip() else []


def _split(rest: str, where: str) -> Iterable[str]:
    """Split at the commas outside brackets; yield the parts."""
    depth, start = 0, 0
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise ConfigError(f"{where} closes a bracket that is not open")
        if letter == "," and depth == 0:
            yield rest[start:index]
            start = index + 1
    if depth:
        raise ConfigError(f"{where} leaves a bracket open")
    if rest[start:].strip() or start:
        yield rest[start:]
