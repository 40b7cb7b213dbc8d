"""Split an answer's text into content, reasoning and tool calls as it arrives.

Owns: the order of the readers. Does not: know tokens, or any interface.
Invariant: the parts' concatenated texts do not depend on how the text was split; the same seed gives the same ids.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.text.answer_format import AnswerFormat
from octavo.text.answer_parts import CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.calls.reader import CallReader, held_at_end
from octavo.text.calls.registry import CALL_READERS

# Before the opening tag; after one in the prompt; inside the reasoning; in the blank space after it; in the content.
_BEFORE, _OPENED, _INSIDE, _BEHIND, _AFTER = range(5)


class ReasoningReader:
    """Splitter of reasoning and content. An answer has reasoning if it begins with the tag, or inside it."""

    __slots__ = ("_begun", "_close", "_held", "_open", "_state", "num_characters")

    def __init__(self, tags: tuple[str, str], starts_inside: bool) -> None:
        self._open, self._close = tags
        self._state = _OPENED if starts_inside else _BEFORE
        self._held = ""
        self._begun = False  # some reasoning has been returned
        self.num_characters = 0  # of the reasoning returned

    def push(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain."""
        if self._state == _AFTER:
            return [Text(text)] if text else []
        self._held += text
        parts: list[Part] = []
        if self._state == _BEFORE:
            self._before()
        if self._state == _OPENED:
            self._opened()
        if self._state == _INSIDE:
            parts += self._inside()
        if self._state == _BEHIND:
            self._held = self._held.lstrip()
            self._state = _AFTER if self._held else _BEHIND
        if self._state == _AFTER and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back: the answer has ended."""
        held, self._held = self._held, ""
        if not held or self._state == _BEHIND:
            return []
        if self._state == _BEFORE:
            return [Text(held)]
        self.num_characters += len(held)
        return [Reasoning(held)]

    def _before(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._open):
            self._held = begun[len(self._open) :]
            self._state = _INSIDE
        elif not self._open.startswith(begun):
            self._state = _AFTER

    def _opened(self) -> None:
        """Drop an opening tag that the prompt holds already: models repeat it."""
        self._held = self._held.lstrip()
        if self._held == self._open or not self._open.startswith(self._held):
            self._held = self._held.removeprefix(self._open)
            self._state = _INSIDE

    def _inside(self) -> list[Reasoning | Text]:
        if not self._begun:
            self._held = self._held.lstrip()
        end = self._held.find(self._close)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(self._close) :]
            self._state = _BEHIND
        else:
            safe = self._held[: len(self._held) - held_at_end(self._held, self._close)].rstrip()
            thought, self._held = safe, self._held[len(safe) :]
        self._begun |= bool(thought)
        self.num_characters += len(thought)
        return [Reasoning(thought)] if thought else []


class AnswerReader:
    """The parts of one choice of one answer. With format None everything is Text.

    `seed` is unique to this choice (the answer's id and the choice's number); the call ids derive from it.
    """

    def __init__(self, answer_format: AnswerFormat | None, seed: str) -> None:
        known = answer_format or AnswerFormat()
        self._reasoning = ReasoningReader(known.reasoning, known.starts_inside) if known.reasoning else None
        make: Callable[[AnswerFormat, str], CallReader] | None = CALL_READERS[known.calls] if known.calls else None
        self._calls = make(known, seed) if make else None
        self._is_single = known.is_single
        self._has_call = False
        self.num_characters = 0  # of all text

    @property
    def num_reasoning_characters(self) -> int:
        """Characters of the reasoning returned so far."""
        return 0 if self._reasoning is None else self._reasoning.num_characters

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain; a call's arguments are returned as they arrive."""
        self.num_characters += len(text)
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        else:
            parts = [Text(text)] if text else []
        return parts if self._calls is None else self._with_calls(self._calls, parts)

    def finish(self) -> list[Part]:
        """Return what was held back: the answer has ended."""
        parts = self._reasoning.finish() if self._reasoning is not None else []
        if self._calls is None:
            return parts
        return self._with_calls(self._calls, parts) + self._counted(self._calls.finish())

    def _with_calls(self, reader: CallReader, split: list[Part]) -> list[Part]:
        """Return the parts, with calls extracted from the content."""
        parts: list[Part] = []
        for part in split:
            parts += self._counted(reader.push(part.text)) if isinstance(part, Text) else [part]
        return parts

    def _counted(self, parts: list[Part]) -> list[Part]:
        """Return the parts to keep: with `is_single`, only those up to the end of the first call."""
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
