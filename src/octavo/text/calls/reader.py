"""CallReader: the protocol of the parsers of call formats, and what they share.

Owns: the protocol, the numbers and ids of calls, blank space around them. Does not: know a format.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

from octavo.text.answer_parts import CallArguments, CallBegin, Part, Text
from octavo.text.calls.call_object import CallObject


class CallReader(Protocol):
    """Incremental parser of an answer after its reasoning."""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        ...

    def push(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back."""
        ...


def held_at_end(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that is a proper beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class Output:
    """The parts of one answer, in order. Blank space next to a call is not part of the content."""

    __slots__ = ("_blank", "_digits", "_is_behind_call", "_parts", "_seed", "num_calls")

    def __init__(self, seed: str, digits: int = 0) -> None:
        """Derive call ids from `seed`: `digits` hexadecimal digits, or with 0 OpenAI's form, "call_..."."""
        self._seed = seed
        self._digits = digits
        self._parts: list[Part] = []
        self._blank: list[str] = []
        self._is_behind_call = False
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
        text = text.lstrip() if self._is_behind_call else "".join(self._blank) + text
        self._is_behind_call &= not text
        shown = text.rstrip()
        self._blank = [text[len(shown) :]] if len(shown) < len(text) else []
        if shown:
            self._parts.append(Text(shown))

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._blank, self._is_behind_call = [], True
        self._parts.append(CallBegin(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the last call's arguments."""
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    def object(self, read: CallObject, text: str) -> str:
        """Push text to an object, add the call and arguments that it yields, and return the text after it."""
        had_begun = read.has_begun
        rest = read.push(text)
        if read.has_begun and not had_begun:
            assert read.name is not None
            self.begin(read.name)
        self.arguments(read.take())
        return rest

    def finish(self) -> list[Part]:
        """Return the last parts, with trailing blank space."""
        if self._blank:
            self._parts.append(Text("".join(self._blank)))
        self._blank = []
        return self.take()

    def _call_id(self, index: int) -> str:
        digest = blake2b(f"{self._seed}:{index}".encode(), digest_size=12).hexdigest()
        return digest[: self._digits] if self._digits else "call_" + digest
