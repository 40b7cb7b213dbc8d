"""AnswerReader: an answer's text, told apart into content, reasoning and calls as it comes.

Owns: the order of the readers. Does not: know tokens, or any interface.
Invariant: the parts' texts in a row do not depend on how the text was split, and the same seed gives the same ids.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.text.answer_format import AnswerFormat
from octavo.text.answer_parts import CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.calls.reader import CallReader
from octavo.text.calls.registry import CALL_READERS
from octavo.text.reasoning import ReasoningReader


class AnswerReader:
    """Reads one choice of one answer. With format None everything is Text.

    `seed` tells this choice from all others: the answer's id and the choice's number.
    """

    def __init__(self, answer_format: AnswerFormat | None, seed: str) -> None:
        known = answer_format or AnswerFormat()
        self._reasoning = ReasoningReader(known.reasoning, known.starts_inside) if known.reasoning else None
        make: Callable[[AnswerFormat, str], CallReader] | None = CALL_READERS[known.calls] if known.calls else None
        self._calls = make(known, seed) if make else None
        self._is_single = known.is_single
        self._has_call = False

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain; of a call, its arguments as they come."""
        if self._reasoning is None:
            return self._read(text)
        return self._behind(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        """Return what was held back: the answer has ended."""
        parts = self._behind(self._reasoning.finish()) if self._reasoning is not None else []
        return parts + (self._counted(self._calls.finish()) if self._calls is not None else [])

    def _behind(self, split: list[Reasoning | Text]) -> list[Part]:
        parts: list[Part] = []
        for part in split:
            parts += [part] if isinstance(part, Reasoning) else self._read(part.text)
        return parts

    def _read(self, text: str) -> list[Part]:
        if self._calls is not None:
            return self._counted(self._calls.push(text))
        return [Text(text)] if text else []

    def _counted(self, parts: list[Part]) -> list[Part]:
        """The parts that count where only one call is wanted: those up to its end."""
        if not self._is_single:
            return parts
        counted: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin | CallArguments):
                self._has_call = True
                counted += [part] if part.index == 0 else []
            elif not self._has_call:
                counted.append(part)
        return counted
