"""JsonValue: where a JSON value ends, found as it comes.

Owns: brackets, strings and escapes. Does not: check that a value is right in itself.
Invariant: control characters in strings, which models write and JSON forbids, come out escaped; all else as it was.
"""

from __future__ import annotations

import json

_ENDS = " \t\r\n,"


class JsonValue:
    """Takes text until the value ends. `text` is all of it so far."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "_num_taken", "_parts", "is_done")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self._num_taken = 0
        self.is_done = False

    @property
    def text(self) -> str:
        """The value so far."""
        return "".join(self._parts)

    @property
    def is_object(self) -> bool:
        """Whether it has begun, as an object."""
        return bool(self._parts) and self._parts[0].startswith("{")

    def take(self) -> str:
        """What came since the last time."""
        new = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        return new

    def push(self, text: str, at: int = 0) -> int:
        """Take text from `at` on; return where the value ends, or the text."""
        start = at
        while at < len(text) and not self.is_done:
            character = text[at]
            if not self._parts and start == at and character in " \t\r\n":
                start = at = at + 1
                continue
            if self._is_in_string:
                if character < " ":
                    self._parts += (text[start:at], json.dumps(character)[1:-1])
                    start = at + 1
                self._step_in_string(character)
            elif not self._step(character):
                break
            at += 1
        if at > start:
            self._parts.append(text[start:at])
        return at

    def _step_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            self.is_done = self._depth == 0

    def _step(self, character: str) -> bool:
        """Take a character outside of strings; False when the value ended before it."""
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        elif self._depth == 0 and (character in _ENDS or character in "}]"):
            self.is_done = True
            return False
        return True
