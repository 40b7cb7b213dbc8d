"""TaggedCalls: calls as JSON between tags, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and
Qwen write them. Several objects, or a list of objects, between two tags are accepted too.

Owns: the tags. Does not: read an object (CallObject does).
Invariant: text between tags that is not a call is returned as content, with the tags; later text is parsed as before.
"""

from __future__ import annotations

from octavo.text.answer_format import Part
from octavo.text.calls.reader import CallObject, CallReader, Output

_OUTSIDE, _OPENED, _OBJECT, _AFTER_CALL = range(4)


class TaggedCalls(CallReader):
    """Incremental parser of one answer. If the closing tag is empty, a call ends where its JSON ends."""

    def __init__(self, output: Output, tags: tuple[str, str]) -> None:
        super().__init__(output)
        self._open, self._close = tags
        self._consumed = ""  # text read since the opening tag, while no call has begun
        self._object = CallObject(bool)

    def finish(self) -> list[Part]:
        """Return the text held back. An unfinished tag, or an opening tag without a call, is dropped after a call."""
        if self._state == _OBJECT or (self._state == _OPENED and not self.num_calls):
            self._output.text(self._consumed + self._object.raw + self._held)
        elif self._state == _OUTSIDE and not self.num_calls:
            self._output.text(self._held)
        self._held = ""
        return self._output.finish()

    def _step(self) -> bool:
        if self._state == _OUTSIDE:
            return self._outside()
        if self._state == _OBJECT:
            return self._in_object()
        rest = self._held.lstrip()
        if self._state == _OPENED:
            self._consumed += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if not rest:
            return False
        return self._opened() if self._state == _OPENED else self._after_call()

    def _outside(self) -> bool:
        if not self._show_before(self._open):
            return False
        self._held = self._held.removeprefix(self._open)
        self._consumed, self._state = self._open, _OPENED
        return True

    def _opened(self) -> bool:
        if self._held.startswith("[") and not self._consumed.rstrip().endswith("["):
            self._consumed += "["
            self._held = self._held[1:]
        else:
            self._object, self._state = CallObject(bool), _OBJECT
        return True

    def _in_object(self) -> bool:
        self._held = self._output.object(self._object, self._held)
        if self._object.has_failed:
            self._output.text(self._consumed + self._object.raw)
            self._state = _OUTSIDE
        elif self._object.has_begun:
            self._consumed = ""
            if self._object.is_done:
                self._state = _AFTER_CALL
        return bool(self._held)

    def _after_call(self) -> bool:
        """Read what follows a call: another call, the closing tag, or content."""
        if self._held[0] in ",];":
            self._held = self._held[1:]
        elif self._held[0] == "{":
            self._object, self._state = CallObject(bool), _OBJECT
        elif self._close and self._held.startswith(self._close):
            self._held = self._held[len(self._close) :]
            self._state = _OUTSIDE
        elif self._close and self._close.startswith(self._held):
            return False
        else:
            self._state = _OUTSIDE
        return True
