"""CallReader: what reads the calls of one format.

Owns: the protocol. Does not: know a format.
"""

from __future__ import annotations

from typing import Protocol

from octavo.text.answer_parts import Part


class CallReader(Protocol):
    """Reads an answer behind its reasoning."""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        ...

    def push(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back."""
        ...
