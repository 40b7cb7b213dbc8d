"""PlainCalls: an answer that consists only of calls, each {"name": ..., "parameters": {...}}, as Llama 3 writes them.
A marker may precede the calls. Calls are separated by ";", "," or blank space, or are items of a list.

Owns: distinguishing calls from other JSON: the name must be that of a function.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.text.answer_format import Part
from octavo.text.calls.reader import CallObject, CallReader, Output

_START, _OBJECT, _AFTER_CALL, _TEXT = range(4)


class PlainCalls(CallReader):
    """Incremental parser of one answer. `marker` may precede the answer's calls."""

    def __init__(self, output: Output, names: Collection[str], marker: str = "") -> None:
        super().__init__(output)
        self._names = names
        self._marker = marker
        self._consumed = ""
        self._object = CallObject(self._accepts)

    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""
        if self._state == _OBJECT:
            self._output.text(self._consumed + self._object.raw + self._held)
        elif self._state in (_START, _TEXT):
            self._output.text(self._consumed + self._held)
        self._held = self._consumed = ""
        return self._output.finish()

    def _accepts(self, name: str) -> bool:
        return name in self._names or (bool(name) and not self._names)

    def _step(self) -> bool:
        if self._state == _TEXT:
            return self._in_text()
        if self._state == _OBJECT:
            return self._in_object()
        rest = self._held.lstrip()
        self._consumed += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if not rest:
            return False
        return self._start() if self._state == _START else self._after_call()

    def _in_text(self) -> bool:
        """Read content. After content, only the marker begins a call."""
        if not self._show_before(self._marker):
            return False
        self._state = _START
        return True

    def _start(self) -> bool:
        has_begun = bool(self._consumed.strip())
        if self._marker and not has_begun:
            if self._held.startswith(self._marker):
                return self._move(len(self._marker))
            if self._marker.startswith(self._held):
                return False
        if self._held[0] == "[" and not self._consumed.rstrip().endswith("["):
            return self._move(1)
        self._object, self._state = CallObject(self._accepts), _OBJECT
        return True

    def _move(self, length: int) -> bool:
        self._consumed += self._held[:length]
        self._held = self._held[length:]
        return True

    def _in_object(self) -> bool:
        self._held = self._output.object(self._object, self._held)
        if self._object.has_failed:
            self._output.text(self._consumed + self._object.raw)
            self._consumed, self._state = "", _TEXT
        elif self._object.has_begun:
            self._consumed = ""
            if self._object.is_done:
                self._state = _AFTER_CALL
        return bool(self._held)

    def _after_call(self) -> bool:
        """Read what follows a call: another call, or content."""
        if self._held[0] in ",;]":
            return self._move(1)
        if self._marker and self._held.startswith(self._marker):
            return self._move(len(self._marker))
        if self._marker and self._marker.startswith(self._held):
            return False
        if self._held[0] == "{":
            self._object, self._state = CallObject(self._accepts), _OBJECT
        else:
            self._output.text(self._consumed.lstrip("] \t\r\n"))
            self._consumed, self._state = "", _TEXT
        return True
