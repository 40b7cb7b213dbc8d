"""Find stop strings in text as it is generated.

Owns: the search, and the text that may still turn out to begin a stop string.
Does not: know tokens.
Invariants: the returned text never contains a stop string or the beginning of the one that matched; the result does
not depend on how the text is split. The first match to end counts; of those that end together, the longest.

Knuth-Morris-Pratt (1977), one state per stop string: a constant cost per character and string, whatever the lengths.
"""

from __future__ import annotations


class StopStrings:
    """A stream of text, cut at the first stop string. With `include` the stop string itself is returned."""

    __slots__ = ("_fallbacks", "_held", "_include", "_initials", "_matched", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._fallbacks = tuple(map(_fallback_table, self._stops))
        self._initials = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to send, and the stop string that ends it, if one does.

        After a match no more text is returned.
        """
        if self._matched is not None:
            return "", self._matched
        if not any(self._states) and self._initials.isdisjoint(text):
            return text, None
        before = len(self._held)
        pending = self._held + text
        for end, character in enumerate(text, before + 1):
            matched = self._advance(character)
            if matched is not None:
                self._matched, self._held = matched, ""
                return pending[: end if self._include else end - len(matched)], matched
        # With `include` nothing is taken back, so nothing needs to be held.
        num_held = 0 if self._include else max(self._states, default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """Return the text held back: the stream has ended without a stop string."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    @property
    def num_held_chars(self) -> int:
        """Characters held back; fewer than the longest stop string has."""
        return len(self._held)

    def _advance(self, character: str) -> str | None:
        """Take one character; return the longest stop string that it completes."""
        states = self._states
        matched: str | None = None
        for index, stop in enumerate(self._stops):
            state = states[index]
            while state and stop[state] != character:
                state = self._fallbacks[index][state]
            states[index] = state = state + 1 if stop[state] == character else 0
            if state == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
        return matched


def _fallback_table(stop: str) -> tuple[int, ...]:
    """Return, for each length of a matched prefix, that of its longest proper prefix that is also its suffix."""
    table = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = table[length]
        length = length + 1 if stop[length] == character else 0
        table.append(length)
    return tuple(table)
