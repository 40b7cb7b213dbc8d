"""CallObject: one call written as a JSON object, {"name": ..., "arguments": {...}}, parsed as it arrives.

Owns: recognising such an object, and the text of its arguments. Does not: know what surrounds it.
Invariants: until the call has begun no arguments are returned, and `raw` holds all text taken, so that the caller can
emit it as content if it is no call; from then on parsing cannot fail. Members may be in any order; others are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from octavo.text.calls.json_value import JsonValue

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")
_OPEN, _KEY, _COLON, _VALUE, _NEXT, _DONE, _FAILED = range(7)
_SPACES = " \t\r\n"
_MAX_KEY = 256


class CallObject:
    """Incremental parser of one object. `accepts` says whether a name can be called."""

    __slots__ = ("_accepts", "_early", "_key", "_state", "_streams", "_value", "arguments", "has_begun", "name", "raw")

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._state = _OPEN
        self._key: str | None = None
        self._value = JsonValue()
        self._early: str | None = None  # arguments that preceded the name
        self._streams = False
        self.name: str | None = None
        self.has_begun = False
        self.arguments = ""  # read since the last take()
        self.raw = ""

    @property
    def is_done(self) -> bool:
        """True once the object has ended."""
        return self._state == _DONE

    @property
    def has_failed(self) -> bool:
        """True if the text is no call."""
        return self._state == _FAILED

    def take(self) -> str:
        """Return the arguments read since the last call."""
        arguments, self.arguments = self.arguments, ""
        return arguments

    def push(self, text: str) -> str:
        """Parse text; return the rest after the object, or from the first character that shows that it is no call."""
        at = 0
        while at < len(text) and self._state not in (_DONE, _FAILED):
            if self._state == _VALUE:
                at = self._value.push(text, at)
                self._take_value()
            elif self._step(text[at]):
                at += 1
        if not self.has_begun:
            self.raw += text[:at]
        return text[at:]

    def _step(self, character: str) -> bool:
        """Take one character outside of values; return False if it is not part of the object."""
        is_in_key = self._state == _KEY and self._key is not None
        if is_in_key and len(self._key or "") < _MAX_KEY:
            self._spell(character)
        elif is_in_key:
            return self._fail()
        elif character in _SPACES:
            return True
        elif self._state == _KEY and character == '"':
            self._key = character
        elif self._state == _OPEN and character == "{":
            self._state = _KEY
        elif self._state == _COLON and character == ":":
            self._state, self._value = _VALUE, JsonValue()
        elif self._state == _NEXT and character == ",":
            self._state, self._key = _KEY, None
        elif character == "}" and self._state in (_KEY, _NEXT) and self.name is not None:
            self._state = _DONE
            if not self.has_begun:
                self._begin("{}")
        else:
            return self._fail()
        return True

    def _fail(self) -> bool:
        """Stop before the next character: done if the call has begun, else failed. Return False."""
        self._state = _DONE if self.has_begun else _FAILED
        return False

    def _spell(self, character: str) -> None:
        """Take one character of a key."""
        assert self._key is not None
        self._key += character
        if character == '"' and not self._key.endswith('\\"'):
            self._state, self._key = _COLON, self._key[1:-1]

    def _take_value(self) -> None:
        value, is_arguments = self._value, self._key in ARGUMENTS
        if is_arguments and not self.has_begun and self.name is not None and value.is_object:
            self._begin("")
            self._streams = True
        if self._streams:
            self.arguments += value.take()
        if not value.is_done:
            return
        self._streams = False
        self._state = _NEXT
        if self._key in NAMES and self.name is None:
            self._take_name(value.text)
        elif is_arguments and not self.has_begun:
            self._take_arguments(value.text)

    def _take_name(self, text: str) -> None:
        name = _loaded(text)
        if not isinstance(name, str) or not self._accepts(name):
            self._state = _FAILED
            return
        self.name = name
        if self._early is not None:
            self._begin(self._early)

    def _take_arguments(self, text: str) -> None:
        """Take arguments that could not be streamed: those before the name, or written as a string."""
        value = _loaded(text)
        if isinstance(value, str):
            text = value
        if value is None or not text.strip():
            text = "{}"
        if self.name is None:
            self._early = text
        else:
            self._begin(text)

    def _begin(self, arguments: str) -> None:
        self.has_begun, self.raw = True, ""
        self.arguments += arguments


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
