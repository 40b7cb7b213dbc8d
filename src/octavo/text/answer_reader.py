"""Split an answer's text into content, reasoning and tool calls as it arrives.

Owns: the order of the readers. Does not: know tokens, or any API.
Invariant: the parts' concatenated texts do not depend on how the text was split. The same seed gives the same call ids.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.calls.reader import CallReader, held_at_end
from octavo.text.dialect import CALL_READERS

# Before the opening tag; after an opening tag in the prompt; in the reasoning; in the blanks after it; in the content.
_BEFORE, _OPENED, _INSIDE, _BLANK, _CONTENT = range(5)


class ReasoningReader:
    """Splits reasoning from content. An answer has reasoning if it begins with the opening tag, or inside the tags."""

    __slots__ = ("_close", "_has_reasoning", "_held", "_open", "_state", "num_characters")

    def __init__(self, tags: tuple[str, str], starts_inside: bool) -> None:
        self._open, self._close = tags
        self._state = _OPENED if starts_inside else _BEFORE
        self._held = ""
        self._has_reasoning = False  # some reasoning has been returned
        self.num_characters = 0  # of the reasoning returned so far

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""
        if self._state == _CONTENT:
            return [Text(text)] if text else []
        self._held += text
        parts: list[Part] = []
        if self._state == _BEFORE:
            self._before()
        if self._state == _OPENED:
            self._opened()
        if self._state == _INSIDE:
            parts += self._inside()
        if self._state == _BLANK:
            self._held = self._held.lstrip()
            self._state = _CONTENT if self._held else _BLANK
        if self._state == _CONTENT and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        if not held or self._state == _BLANK:
            return []
        if self._state == _BEFORE:
            return [Text(held)]
        self.num_characters += len(held)
        return [Reasoning(held)]

    def _before(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith(self._open):
            self._held = rest[len(self._open) :]
            self._state = _INSIDE
        elif not self._open.startswith(rest):
            self._state = _CONTENT

    def _opened(self) -> None:
        """Drop an opening tag that repeats the tag in the prompt, as some models write it."""
        self._held = self._held.lstrip()
        if self._held == self._open or not self._open.startswith(self._held):
            self._held = self._held.removeprefix(self._open)
            self._state = _INSIDE

    def _inside(self) -> list[Reasoning | Text]:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        end = self._held.find(self._close)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(self._close) :]
            self._state = _BLANK
        else:
            safe = self._held[: len(self._held) - held_at_end(self._held, self._close)].rstrip()
            thought, self._held = safe, self._held[len(safe) :]
        self._has_reasoning |= bool(thought)
        self.num_characters += len(thought)
        return [Reasoning(thought)] if thought else []


class AnswerReader:
    """The parts of one choice of one answer. If the format is None, everything is Text.

    `seed` is unique to this choice (the answer's id and the choice's number); call ids are derived from it.
    """

    def __init__(self, answer_format: AnswerFormat | None, seed: str) -> None:
        answer_format = answer_format or AnswerFormat()
        self._reasoning = (
            ReasoningReader(answer_format.reasoning, answer_format.starts_inside) if answer_format.reasoning else None
        )
        make: Callable[[AnswerFormat, str], CallReader] | None = (
            CALL_READERS[answer_format.calls] if answer_format.calls else None
        )
        self._calls = make(answer_format, seed) if make else None
        self._is_single = answer_format.is_single
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
        """Return the parts that are certain after this text. A call's arguments are returned as they arrive."""
        self.num_characters += len(text)
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        else:
            parts = [Text(text)] if text else []
        return parts if self._calls is None else self._with_calls(self._calls, parts)

    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""
        parts = self._reasoning.finish() if self._reasoning is not None else []
        if self._calls is None:
            return parts
        return self._with_calls(self._calls, parts) + self._keep(self._calls.finish())

    def _with_calls(self, reader: CallReader, split: list[Part]) -> list[Part]:
        """Return the parts, with calls extracted from the content."""
        parts: list[Part] = []
        for part in split:
            parts += self._keep(reader.push(part.text)) if isinstance(part, Text) else [part]
        return parts

    def _keep(self, parts: list[Part]) -> list[Part]:
        """Return the parts to keep: all, or with `is_single` only those up to the end of the first call."""
        if not self._is_single:
            return parts
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin | CallArguments):
                self._has_call = True
                kept += [part] if part.index == 0 else []
            elif not self._has_call:
                kept.append(part)
        return kept
