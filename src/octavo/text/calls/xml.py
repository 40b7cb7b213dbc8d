"""XmlCalls: calls as Qwen3-Coder writes them. The outer tags are optional:
<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>.

Owns: this form, and converting its arguments to JSON. Each argument is returned when it ends.
Invariant: text that is not a call is returned as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from octavo.text.answer_format import Part
from octavo.text.calls.reader import CallReader, Output, held_at_end

_OPEN, _CLOSE, _FUNCTION, _END = "<tool_call>", "</tool_call>", "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]{1,128})>")
_MAX_HEAD = 256
_OUTSIDE, _OPENED, _FUNCTION_BODY, _VALUE, _AFTER_CALL = range(5)


class XmlCalls(CallReader):
    """Incremental parser of one answer. `texts` are the arguments, as "function.argument", that are always strings."""

    def __init__(self, output: Output, texts: Collection[str]) -> None:
        super().__init__(output)
        self._texts = texts
        self._function = self._key = ""
        self._num_arguments = 0
        self._value: list[str] = []  # pieces of the argument being read

    def finish(self) -> list[Part]:
        """Return the text held back. An unfinished argument is returned as an unfinished string."""
        if self._state in (_OUTSIDE, _OPENED):
            self._output.text(self._held)
        elif self._state == _VALUE:
            value = "".join((*self._value, self._held)).removeprefix("\n")
            self._argument(json.dumps(value, ensure_ascii=False)[:-1])
        self._held = ""
        return self._output.finish()

    def _step(self) -> bool:
        if self._state == _OUTSIDE:
            return self._outside()
        if self._state == _VALUE:
            return self._in_value()
        if self._state == _OPENED:
            return self._opened()
        self._held = self._held.lstrip()
        if not self._held:
            return False
        return self._in_function() if self._state == _FUNCTION_BODY else self._after_call()

    def _outside(self) -> bool:
        if not self._show_before(_OPEN, _FUNCTION):
            return False
        self._state = _OPENED
        return True

    def _opened(self) -> bool:
        head = _HEAD.match(self._held)
        if head is not None:
            self._function = head[1].strip()
            self._output.begin(self._function)
            self._num_arguments = 0
            self._held, self._state = self._held[head.end() :], _FUNCTION_BODY
            return True
        inner = self._held.removeprefix(_OPEN).lstrip()
        is_name = inner.startswith(_FUNCTION) and not set(inner[1:]) & set("<>\n")
        if len(self._held) < _MAX_HEAD and (is_name or _FUNCTION.startswith(inner)):
            return False
        self._output.text(self._held[0])
        self._held, self._state = self._held[1:], _OUTSIDE
        return True

    def _in_function(self) -> bool:
        if self._held.startswith(_PARAMETER):
            key, end, value = self._held[len(_PARAMETER) :].partition(">")
            if end:
                self._key, self._held, self._state = key.strip(), value, _VALUE
                return bool(value)
            return False
        if self._held.startswith(_END):
            self._held = self._held[len(_END) :]
        elif _END.startswith(self._held) or _PARAMETER.startswith(self._held):
            return False
        self._output.arguments("}" if self._num_arguments else "{}")
        self._state = _AFTER_CALL
        return bool(self._held)

    def _in_value(self) -> bool:
        end = self._held.find(_END_PARAMETER)
        cut = end if end >= 0 else len(self._held) - held_at_end(self._held, _END_PARAMETER)
        self._value.append(self._held[:cut])
        self._held = self._held[cut:]
        if end < 0:
            return False
        self._argument(self._json("".join(self._value).removeprefix("\n").removesuffix("\n")))
        self._held, self._value, self._state = self._held[len(_END_PARAMETER) :], [], _FUNCTION_BODY
        return bool(self._held)

    def _argument(self, value: str) -> None:
        begin = ", " if self._num_arguments else "{"
        self._output.arguments(f"{begin}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._num_arguments += 1

    def _json(self, value: str) -> str:
        if f"{self._function}.{self._key}" not in self._texts:
            try:
                return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):
                pass  # not JSON, so the value is a string
        return json.dumps(value, ensure_ascii=False)

    def _after_call(self) -> bool:
        """Read what follows a call, possibly its closing outer tag."""
        if _CLOSE.startswith(self._held) and self._held != _CLOSE:
            return False
        self._held = self._held.removeprefix(_CLOSE)
        self._state = _OUTSIDE
        return bool(self._held)
