"""The call formats by name.

Owns: the names. Does not: read any call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.text.answer_format import AnswerFormat
from octavo.text.calls.reader import CallReader

CALL_READERS: Mapping[str, Callable[[AnswerFormat, str], CallReader]] = {}
