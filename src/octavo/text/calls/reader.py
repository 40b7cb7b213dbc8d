"""CallReader, the base of the parsers of call formats, and their common parts: JsonValue, CallObject, Output.

Owns: the end of a JSON value; calls written as JSON objects; numbers and ids of calls; blank space around calls.
Does not: know a format.
Invariants: a CallObject that has not begun returns no arguments, and its `raw` is all text so far, which the caller can
emit as content if the text is no call. Once it has begun, parsing cannot fail. Control characters in strings, which
models write although JSON forbids them, are escaped; all other text is unchanged.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import blake2b

from octavo.text.answer_format import CallArguments, CallBegin, Part, Text

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")
_OPEN, _KEY, _COLON, _VALUE, _NEXT, _DONE, _FAILED = range(7)
_BLANKS = " \t\r\n"
_MAX_KEY = 256
_VALUE_ENDS = " \t\r\n,"


def held_at_end(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that is a beginning of the marker, but not the whole marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class JsonValue:
    """Incremental scanner of one JSON value. `text` is the value so far."""

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
        """Scan text from `at` on; return the index at which the value ends, or the text's length if it does not."""
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
        """Scan a character outside of strings; return False if the value ended before this character."""
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        elif self._depth == 0 and (character in _VALUE_ENDS or character in "}]"):
            self.is_done = True
            return False
        return True


class CallObject:
    """Incremental parser of one JSON object. `accepts` returns True for the name of a function that can be called."""

    __slots__ = (
        "_accepts",
        "_arguments_before_name",
        "_is_streaming",
        "_key",
        "_state",
        "_value",
        "arguments",
        "has_begun",
        "name",
        "raw",
    )

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._state = _OPEN
        self._key: str | None = None
        self._value = JsonValue()
        self._arguments_before_name: str | None = None  # arguments that preceded the name
        self._is_streaming = False
        self.name: str | None = None
        self.has_begun = False
        self.arguments = ""  # the arguments read since the last take()
        self.raw = ""

    @property
    def is_done(self) -> bool:
        """True once the object has ended."""
        return self._state == _DONE

    @property
    def has_failed(self) -> bool:
        """True if the text is not a call."""
        return self._state == _FAILED

    def take(self) -> str:
        """Return the arguments read since the last call."""
        arguments, self.arguments = self.arguments, ""
        return arguments

    def push(self, text: str) -> str:
        """Parse text; return the rest: what follows the object, or all from the character that rules out a call."""
        at = 0
        while at < len(text) and self._state not in (_DONE, _FAILED):
            if self._state == _VALUE:
                at = self._value.push(text, at)
                self._read_value()
            elif self._step(text[at]):
                at += 1
        if not self.has_begun:
            self.raw += text[:at]
        return text[at:]

    def _step(self, character: str) -> bool:
        """Parse one character outside of values; return False if it is not part of the object."""
        is_in_key = self._state == _KEY and self._key is not None
        if is_in_key and len(self._key or "") < _MAX_KEY:
            self._add_to_key(character)
        elif is_in_key:
            return self._fail()
        elif character in _BLANKS:
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
        """Stop before the next character: as done if the call has begun, else as failed. Return False."""
        self._state = _DONE if self.has_begun else _FAILED
        return False

    def _add_to_key(self, character: str) -> None:
        """Add one character to the current key."""
        assert self._key is not None
        self._key += character
        if character == '"' and not self._key.endswith('\\"'):
            self._state, self._key = _COLON, self._key[1:-1]

    def _read_value(self) -> None:
        value, is_arguments = self._value, self._key in ARGUMENTS
        if is_arguments and not self.has_begun and self.name is not None and value.is_object:
            self._begin("")
            self._is_streaming = True
        if self._is_streaming:
            self.arguments += value.take()
        if not value.is_done:
            return
        self._is_streaming = False
        self._state = _NEXT
        if self._key in NAMES and self.name is None:
            self._set_name(value.text)
        elif is_arguments and not self.has_begun:
            self._set_arguments(value.text)

    def _set_name(self, text: str) -> None:
        name = _parse(text)
        if not isinstance(name, str) or not self._accepts(name):
            self._state = _FAILED
            return
        self.name = name
        if self._arguments_before_name is not None:
            self._begin(self._arguments_before_name)

    def _set_arguments(self, text: str) -> None:
        """Handle arguments that could not be streamed: they preceded the name, or were written as a string."""
        value = _parse(text)
        if isinstance(value, str):
            text = value
        if value is None or not text.strip():
            text = "{}"
        if self.name is None:
            self._arguments_before_name = text
        else:
            self._begin(text)

    def _begin(self, arguments: str) -> None:
        self.has_begun, self.raw = True, ""
        self.arguments += arguments


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Output:
    """The parts of one answer, in order. Blank space next to a call does not become content."""

    __slots__ = ("_blank", "_digits", "_follows_call", "_parts", "_seed", "num_calls")

    def __init__(self, seed: str, digits: int = 0) -> None:
        """Derive call ids from `seed`: `digits` hexadecimal digits, or OpenAI's form "call_..." if `digits` is 0."""
        self._seed = seed
        self._digits = digits
        self._parts: list[Part] = []
        self._blank: list[str] = []
        self._follows_call = False
        self.num_calls = 0

    def take(self) -> list[Part]:
        """Return the parts added since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def text(self, text: str) -> None:
        """Add content."""
        if self._blank and text.isspace():
            self._blank.append(text)
            return
        text = text.lstrip() if self._follows_call else "".join(self._blank) + text
        self._follows_call &= not text
        shown = text.rstrip()
        self._blank = [text[len(shown) :]] if len(shown) < len(text) else []
        if shown:
            self._parts.append(Text(shown))

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._blank, self._follows_call = [], True
        self._parts.append(CallBegin(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the last call's arguments."""
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    def object(self, call: CallObject, text: str) -> str:
        """Push text to an object; add the call and arguments that this yields; return the text after the object."""
        was_begun = call.has_begun
        rest = call.push(text)
        if call.has_begun and not was_begun:
            assert call.name is not None
            self.begin(call.name)
        self.arguments(call.take())
        return rest

    def finish(self) -> list[Part]:
        """Return the last parts, including trailing blank space."""
        if self._blank:
            self._parts.append(Text("".join(self._blank)))
        self._blank = []
        return self.take()

    def _call_id(self, index: int) -> str:
        digest = blake2b(f"{self._seed}:{index}".encode(), digest_size=12).hexdigest()
        return digest[: self._digits] if self._digits else "call_" + digest


class CallReader(ABC):
    """Incremental parser of an answer after its reasoning. A subclass parses `_held`, beginning in state 0."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._state = 0
        self._held = ""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._output.num_calls

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""
        self.feed(text)
        return self._output.take()

    def feed(self, text: str) -> None:
        """Parse text; leave the parts in the output."""
        self._held += text
        while self._held and self._step():
            pass

    @abstractmethod
    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""

    @abstractmethod
    def _step(self) -> bool:
        """Parse some of the held text; return False if more is needed."""

    def _show_before(self, *markers: str) -> bool:
        """Add the held text before the first of these markers as content; return False if it has none yet."""
        places = [at for marker in markers if marker and (at := self._held.find(marker)) >= 0]
        end = min(places) if places else len(self._held) - max(held_at_end(self._held, each) for each in markers)
        self._output.text(self._held[:end])
        self._held = self._held[end:]
        return bool(places)
