"""ReasoningReader: the reasoning at the start of an answer, told from what follows.

Owns: the search for the tags, and the text that may still turn out to be one. Does not: know calls.
Invariants: the parts do not depend on how the text is split. Without tags the text comes out as it came in. Blank space
around the reasoning, and what stands between its end and the answer, is dropped.
"""

from __future__ import annotations

from octavo.text.answer_parts import Reasoning, Text
from octavo.text.calls.reader import held_at_end

# Before the opening tag; behind one that the prompt holds; in the reasoning; in the blank space behind it; after all.
_BEFORE, _OPENED, _INSIDE, _BEHIND, _AFTER = range(5)


class ReasoningReader:
    """Splits one answer; only an answer that begins with the opening tag, or inside it, has reasoning."""

    __slots__ = ("_begun", "_close", "_held", "_open", "_state")

    def __init__(self, tags: tuple[str, str], starts_inside: bool) -> None:
        self._open, self._close = tags
        self._state = _OPENED if starts_inside else _BEFORE
        self._held = ""
        self._begun = False  # some reasoning has been given

    def push(self, text: str) -> list[Reasoning | Text]:
        """Return the parts that this text makes certain."""
        if self._state == _AFTER:
            return [Text(text)] if text else []
        self._held += text
        parts: list[Reasoning | Text] = []
        if self._state == _BEFORE:
            parts += self._before()
        if self._state == _OPENED:
            self._opened()
        if self._state == _INSIDE:
            parts += self._inside()
        if self._state == _BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                parts += self._rest()
        return parts

    def finish(self) -> list[Reasoning | Text]:
        """Return what was held back: the answer has ended."""
        held, self._held = self._held, ""
        if not held or self._state == _BEHIND:
            return []
        return [Text(held)] if self._state == _BEFORE else [Reasoning(held)]

    def _before(self) -> list[Reasoning | Text]:
        begun = self._held.lstrip()
        if begun.startswith(self._open):
            self._held = begun[len(self._open) :]
            self._state = _INSIDE
        elif not self._open.startswith(begun):
            return self._rest()
        return []

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
        return [Reasoning(thought)] if thought else []

    def _rest(self) -> list[Reasoning | Text]:
        self._state = _AFTER
        held, self._held = self._held, ""
        return [Text(held)] if held else []
