"""AnswerEncoder: one request's answer on the wire, whole or as events.

Owns: the protocol. Does not: know any interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta
    from octavo.server.answer import Json
    from octavo.server.generation import Choice
    from octavo.server.shapes.framing import StreamFormat

Identity = tuple[str, int, str]  # id, created (Unix seconds), model


class AnswerEncoder(Protocol):
    """One request's answer, in whichever form."""

    @property
    def framing(self) -> StreamFormat:
        """What surrounds the events."""
        ...

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer as one object."""
        ...

    def first(self) -> bytes:
        """The events before any delta, b"" when there are none."""
        ...

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """The events that a delta makes, b"" when there is nothing to show yet."""
        ...

    def last(self) -> bytes:
        """The events behind the last delta: usage when asked for."""
        ...
