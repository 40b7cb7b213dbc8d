"""MistralCalls: calls after the marker [TOOL_CALLS]. Mistral's models up to version 7 of their tokenizer write
[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; later models write [TOOL_CALLS]name[ARGS]{...} for each call.

Owns: the second form, and the choice between the two. Does not: read the first form (TaggedCalls does).
"""

from __future__ import annotations

import re

from octavo.text.answer_format import Part
from octavo.text.calls.reader import CallReader, JsonValue, Output
from octavo.text.calls.tagged import TaggedCalls

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OUTSIDE, _OPENED, _LIST, _ARGUMENTS = range(4)
_HEAD = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_HEAD_SO_FAR = re.compile(r"[A-Za-z0-9_.-]{1,128}\s*(\[[A-Z_]{0,7}\]?\s*[A-Za-z0-9]{0,64}\s*){0,2}")


class MistralCalls(CallReader):
    """Incremental parser of one answer."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._list = TaggedCalls(output, (MARKER, ""))
        self._value = JsonValue()

    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""
        parts: list[Part] = []
        if self._state == _LIST:
            parts = self._list.finish()
        elif self._state == _OPENED:
            self._output.text(MARKER + self._held)
        elif self._state == _OUTSIDE:
            self._output.text(self._held)
        self._held = ""
        return parts + self._output.finish()

    def _step(self) -> bool:
        if self._state == _LIST:  # _list finds all later markers by itself
            held, self._held = self._held, ""
            self._list.feed(held)
            return False
        if self._state == _OUTSIDE:
            return self._outside()
        return self._opened() if self._state == _OPENED else self._in_arguments()

    def _outside(self) -> bool:
        if not self._show_before(MARKER):
            return False
        self._held = self._held.removeprefix(MARKER)
        self._state = _OPENED
        return True

    def _opened(self) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        head = _HEAD.match(rest)
        if rest[0] in "[{":
            self._held, self._state = MARKER + self._held, _LIST
        elif head is not None:
            self._output.begin(head[1])
            self._held, self._state, self._value = rest[head.end() :], _ARGUMENTS, JsonValue()
        elif _HEAD_SO_FAR.fullmatch(rest):
            return False
        else:
            self._output.text(MARKER)
            self._state = _OUTSIDE
        return True

    def _in_arguments(self) -> bool:
        self._held = self._held[self._value.push(self._held) :]
        self._output.arguments(self._value.take())
        if self._value.is_done:
            self._state = _OUTSIDE
        return bool(self._held)
