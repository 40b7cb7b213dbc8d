"""A workload's specification: `KIND:key=value,...` for a generated one, `KIND:PATH,key=value,...` for a file.

Owns: splitting the text, typed reading of the options, errors that name the option, its value and the remedy. Does not:
know any kind (catalogue does). Invariant: an option that its kind does not read is an error, with a near name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from octavo.config.spelling import unknown
from octavo.errors import ConfigError

MAX_SPEC = 4096  # characters


class Spec:
    """One workload's specification: `kind`, `path` (the first word without `=`; empty if none), `options`."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_SPEC:
            raise ConfigError(f"workload has {len(text)} characters; give at most {MAX_SPEC}")
        self.text = text
        kind, _, rest = text.partition(":")
        self.kind = kind.strip()
        self.path = ""
        self.options: dict[str, str] = {}
        self._asked: dict[str, None] = {}
        for place, word in enumerate(_split(rest, text)):
            name, equals, value = word.partition("=")
            name = name.strip()
            if not equals and place == 0:
                self.path = name
            elif not equals or not name:
                raise ConfigError(f"workload {text!r}: {word!r} is no option; write name=value")
            elif name in self.options:
                raise ConfigError(f"workload {text!r} gives {name} twice; give it once")
            else:
                self.options[name] = value.strip()

    def text_of(self, name: str, default: str = "") -> str:
        """Return an option's text."""
        self._asked[name] = None
        return self.options.get(name, default)

    def number(
        self, name: str, default: float | None = None, *, above: float = 0.0, least: float | None = None
    ) -> float:
        """Return a finite number greater than `above`, or of at least `least`. Required if `default` is None."""
        text = self.text_of(name)
        if not text:
            if default is None and name not in self.options:
                raise ConfigError(f"workload {self.text!r} needs {name}=NUMBER, as in {self.kind}:{name}=1")
            if name not in self.options:
                assert default is not None
                return default
        bound = f"above {above:g}" if least is None else f"of at least {least:g}"
        value = read_number(text)
        if value is None or not math.isfinite(value) or (value <= above if least is None else value < least):
            raise ConfigError(f"workload {self.text!r}: {name} is {text!r}; give a number {bound}")
        return value

    def count(self, name: str, default: int, *, least: int = 0) -> int:
        """Return a whole number of at least `least`."""
        text = self.text_of(name)
        if name not in self.options:
            return default
        value = read_number(text)
        if value is None or value != value // 1 or not least <= value < 2**53:
            raise ConfigError(f"workload {self.text!r}: {name} is {text!r}; give a whole number of at least {least}")
        return int(value)

    def choice(self, name: str, words: tuple[str, ...]) -> str:
        """Return one of the words; the first unless given."""
        value = self.text_of(name, words[0])
        if value not in words:
            raise ConfigError(f"workload {self.text!r}: {unknown(name, value, words)}")
        return value

    def close(self) -> None:
        """Raise ConfigError for options that were never read."""
        for name in self.options:
            if name not in self._asked:
                remedy = f"{self.kind} takes {', '.join(sorted(self._asked))}"
                raise ConfigError(f"workload {self.text!r}: {unknown('key', name, self._asked, remedy)}")


def read_number(text: str) -> float | None:
    """Parse a number, with `4K` and `2k` as in settings (4096, 2000); None for anything else, NaN too."""
    units = {"k": 1e3, "m": 1e6, "K": 1024.0, "M": 1048576.0}
    unit = units.get(text[-1:], 0.0)
    try:
        value = float(text[:-1] if unit else text)
    except ValueError:
        return None
    return None if math.isnan(value) or "_" in text else value * (unit or 1.0)


def read_call(text: str, where: str) -> tuple[str, list[str]]:
    """Split `name(a,b)` into its name and arguments; a bare number is `fixed(number)`. Raises ConfigError."""
    if read_number(text) is not None:
        return "fixed", [text]
    name, bracket, rest = text.partition("(")
    if bracket and not rest.endswith(")"):
        raise ConfigError(f"{where} is {text!r}; close the bracket, as in lognormal(512,0.8)")
    return name.strip(), [part.strip() for part in rest[:-1].split(",")] if rest[:-1].strip() else []


def _split(rest: str, text: str) -> Iterable[str]:
    """Yield the parts between commas that are outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise ConfigError(f"workload {text!r} closes a bracket that is not open")
        if letter == "," and depth == 0:
            yield rest[start:place]
            start = place + 1
    if depth:
        raise ConfigError(f"workload {text!r} leaves a bracket open")
    if rest[start:].strip() or start:
        yield rest[start:]
