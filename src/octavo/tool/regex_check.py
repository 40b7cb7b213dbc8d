"""Check that a regular expression compiles within bounded memory.

Owns: the bounds on its length, depth and weight, and compiling it with an engine that never backtracks.
Does not: match anything.
Invariant: the weight is computed before anything is compiled, in one pass over the pattern.

The weight is about the number of states that a compiler makes: repetitions multiply it, everything else adds to it.
"""

from __future__ import annotations

import re

from pydantic_core import SchemaError, SchemaValidator, core_schema

from octavo.errors import InvalidRequestError, TooComplexError

MAX_PATTERN_BYTES = 2048
MAX_WEIGHT = 50_000
MAX_GROUP_DEPTH = 32
_CLASS_WEIGHT = 4
_SHELL = 'Error building "str" validator:\n  SchemaError: '  # what pydantic puts before an expression's error
_REPEAT = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^{}]{0,64}\}|[pPxuU].|.)", re.DOTALL)


def check_regex(pattern: str, param: str = "regex") -> int:
    """Return the pattern's weight. Raises TooComplexError or InvalidRequestError naming `param`."""
    try:
        size = len(pattern.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{param} holds half a surrogate pair", param) from None
    if size > MAX_PATTERN_BYTES:
        raise TooComplexError(f"{param} has {size} bytes; at most {MAX_PATTERN_BYTES} are taken", param)
    weight = _Weigher(pattern, param).weigh()
    if weight > MAX_WEIGHT:
        raise TooComplexError(f"{param} needs about {weight} states; at most {MAX_WEIGHT} are taken", param)
    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = " ".join(str(error).removeprefix(_SHELL).split())[-200:]
        if "size limit" in reason:
            raise TooComplexError(f"{param} needs more than 10 MiB when compiled", param) from None
        raise InvalidRequestError(f"{param} is no regular expression that can be used ({reason})", param) from None
    return weight


class _Weigher:
    """One pass over a pattern, with a stack of open groups. The compiler reports malformed patterns."""

    def __init__(self, pattern: str, param: str) -> None:
        self._pattern = pattern
        self._param = param
        self._at = 0
        self._groups: list[int] = []  # weights of the enclosing groups
        self._total = 0  # of the innermost group so far
        self._atom = 0  # of the last atom, which a repetition after it multiplies

    def weigh(self) -> int:
        """Return the weight of the pattern."""
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "(":
                self._open()
            elif character == ")":
                self._close()
            elif character in "*+?":
                self._take(self._atom, 1)
                self._at += 1
            elif character == "{" and (match := _REPEAT.match(self._pattern, self._at)):
                self._repeat(match)
            elif character == "[":
                self._class()
            else:
                self._single(character)
        return self._total + sum(self._groups)

    def _take(self, atom: int, more: int) -> None:
        """Make the current atom weigh `atom + more`, and add `more` to the total."""
        self._atom = atom + more
        self._total += more

    def _open(self) -> None:
        if len(self._groups) >= MAX_GROUP_DEPTH:
            raise TooComplexError(f"{self._param} has groups nested more than {MAX_GROUP_DEPTH} deep", self._param)
        self._groups.append(self._total)
        self._total = self._atom = 0
        self._at += 1
        if self._pattern.startswith("?", self._at):
            self._at += 1

    def _close(self) -> None:
        inner = self._total + 1
        self._total = (self._groups.pop() if self._groups else 0) + inner
        self._atom = inner
        self._at += 1

    def _repeat(self, match: re.Match[str]) -> None:
        low, _, high = match.groups()
        times = max(int(low or 0), int(high or 0), 1)
        self._take(self._atom, self._atom * (times - 1))
        if self._total > MAX_WEIGHT:  # keeps numbers small, however deep the nesting
            message = f"{self._param} repeats too much: over {MAX_WEIGHT} states at character {self._at}"
            raise TooComplexError(message, self._param)
        self._at = match.end()

    def _class(self) -> None:
        """Read a bracketed class, including the classes inside it."""
        depth, weight = 0, _CLASS_WEIGHT
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            escape = _ESCAPE.match(self._pattern, self._at)
            self._at = escape.end() if escape else self._at + 1
            depth += (character == "[") - (character == "]")
            weight += 1
            if depth == 0:
                break
        self._atom = 0
        self._take(0, weight)

    def _single(self, character: str) -> None:
        escape = _ESCAPE.match(self._pattern, self._at)
        self._at = escape.end() if escape else self._at + 1
        self._atom = 0
        self._take(0, _CLASS_WEIGHT if escape or character == "." else 1)
