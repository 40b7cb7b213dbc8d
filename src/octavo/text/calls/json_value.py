"""JsonValue: find the end of a JSON value that arrives in pieces.

Owns: brackets, strings and escapes. Does not: check that a value is valid JSON.
Invariant: control characters in strings, which models write and JSON forbids, are escaped; all else is unchanged.
"""

from __future__ import annotations

import json

_ENDS = " \t\r\n,"


class JsonValue:
    """Incremental scanner of one value. `text` is the value so far."""

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
        """True if the value has begun and is an object."""
        return bool(self._parts) and self._parts[0].startswith("{")

    def take(self) -> str:
        """Return the text added since the last call."""
        new = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        return new

    def push(self, text: str, at: int = 0) -> int:
        """Take text from `at` on; return the index at which the value, or else the text, ends."""
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
        """Take a character outside of strings; return False if the value ended before it."""
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
