"""What an API's encoder is made from and must give: AnswerSpec, AnswerEncoder, StreamFormat.

Owns: these types, and the choices that an encoder is given. Does not: know any API (`api.encoders` has the table).
Invariant: the same spec and deltas give the same bytes, so that another server can encode the answer again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from octavo.core.request import FinishReason

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.faults import ApiError

Json = dict[str, Any]
Identity = tuple[str, int, str]  # id, created (Unix seconds), model
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Pieces(Protocol):
    """What an encoder needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        ...


@dataclass(slots=True)
class Choice:
    """One choice, collected whole."""

    deltas: list[TextDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def usage(self) -> Usage | None:
        """The usage that its last delta carries, if it was its prompt's last choice to end."""
        return self.deltas[-1].usage if self.deltas else None


class AnswerSpec(Struct, frozen=True, array_like=True):
    """Plain data that the journal keeps. `kind` names the encoder; `facts` holds what this kind alone needs.

    The fact "format" is an AnswerFormat, or its plain form where the journal had it.
    """

    kind: str
    identity: Identity
    include_usage: bool = False
    echoes: tuple[str, ...] = ("",)
    n: int = 1
    facts: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What surrounds the events of a stream. `error` encodes a failure; an empty `keep_alive` means none is sent.

    `done` ends every stream, also one that failed. `has_ids`: a line with an event's id may precede the event.
    `by_token`: each token has events of its own, so that all readers of an answer get the same events.
    """

    media_type: str
    done: bytes
    keep_alive: bytes
    error: Callable[[ApiError], bytes]
    has_ids: bool = True
    by_token: bool = False


class AnswerEncoder(Protocol):
    """Encodes one request's answer, whole or as events."""

    @property
    def stream_format(self) -> StreamFormat:
        """What surrounds the events."""
        ...

    @property
    def head(self) -> bytes:
        """The events before any delta, b"" for none. Read once."""
        ...

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        ...

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta, b"" for none yet."""
        ...

    def last(self) -> bytes:
        """Return the events after the last delta: the usage where it is asked for."""
        ...
